"""RobustTrainer takes the same path as the plain loop, to the last bit.

The plain loop is itself compared with SONEX by hand in test_training_loop.py.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from integration_cases import GROUPS, distance, dro, run_on_two_ranks, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fcco

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from fcco.integrations.transformers import RobustTrainer, token_losses  # noqa: E402

# Third parties remark on their own deprecations.
pytestmark = [
    pytest.mark.filterwarnings("ignore::Warning:(accelerate|transformers|datasets)"),
    pytest.mark.usefixtures("quick_collections"),
]


BATCH, SAMPLES, EPOCHS, SEED = 8, 64, 2, 3
PER_EPOCH = SAMPLES // BATCH
NAMES = ["ann", "bob", "cyd", "dan"]
BY_LENGTH = (  # named so since 5.2
    {"train_sampling_strategy": "group_by_length"}
    if "train_sampling_strategy" in transformers.TrainingArguments.__dataclass_fields__
    else {"group_by_length": True}
)


@functools.cache
def examples() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(2)
    words = torch.randint(1, 20, (SAMPLES, 5), generator=draw)
    group = torch.randint(GROUPS, (SAMPLES,), generator=draw)
    label = (words.sum(1) + 7 * group) % 2
    return [
        {"input_ids": words[k].tolist(), "labels": int(label[k]), "user": NAMES[group[k]]}
        for k in range(SAMPLES)
    ]


def group_of(example: dict[str, Any]) -> int:
    return NAMES.index(example["user"])


def bert(dropout: float = 0.1) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=8, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).double()


def arguments(folder: Path | str, **options: Any) -> Any:
    settings = {
        "output_dir": str(folder), "num_train_epochs": EPOCHS, "per_device_train_batch_size": BATCH,
        "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "report_to": [], "seed": SEED,
        "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "logging_strategy": "no",
    }  # fmt: skip
    return transformers.TrainingArguments(**(settings | options))


def robust(folder: Path | str, model: Any = None, **options: Any) -> RobustTrainer:
    """A trainer; options of `TrainingArguments` are those that RobustTrainer does not know."""
    own = (
        "objective", "groups", "losses", "loss_on", "columns", "sampler", "groups_per_batch",
        "ungrouped_share", "holdout", "train_dataset", "eval_dataset", "optimizers",
        "data_collator", "compute_loss_func", "compute_metrics",
    )  # fmt: skip
    model = bert() if model is None else model
    mine = {key: options.pop(key) for key in own if key in options}
    settings = {
        "train_dataset": examples(), "objective": dro, "groups": "user", "groups_per_batch": 2,
    } | mine  # fmt: skip
    if "optimizers" not in mine and "optim" not in options:
        settings["optimizers"] = (sgd(model), None)
    return RobustTrainer(model=model, args=arguments(folder, **options), **settings)


def losses_of(model: Any, rows: Sequence[int]) -> Tensor:
    columns = ([examples()[k][name] for k in rows] for name in ("input_ids", "labels"))
    words, label = map(torch.tensor, columns)
    return cross_entropy(model(input_ids=words).logits, label, reduction="none")


def groups_of(rows: Sequence[int]) -> list[int]:
    return [group_of(examples()[k]) for k in rows]


# Examples, an index, and what the function returns of the losses of the examples.
Step = tuple[list[int], Any, Callable[[Tensor], Any]]


def plain_loop(
    model: Any, objective: Any, epochs: list[list[Step]], accumulate: int = 1
) -> tuple[Any, Any]:
    torch.manual_seed(SEED)
    model.train()
    for steps in epochs:
        torch.empty((), dtype=torch.int64).random_()  # as a DataLoader draws at its start
        for number, (rows, index, of) in enumerate(steps, start=1):
            loss = objective(lambda rows=rows, of=of: of(losses_of(model, rows)), index)
            (loss / accumulate).backward()
            if number % accumulate == 0:
                objective.optimizer.step()
                objective.optimizer.zero_grad()
    return model, objective


@functools.cache
def plain(accumulate: int = 1, momentum: bool = True, dropout: float = 0.1) -> tuple[Any, Any]:
    model = bert(dropout)
    optimizer = sgd(model) if momentum else torch.optim.SGD(model.parameters(), lr=0.3)
    sampler = fcco.GroupBatchSampler(groups_of(range(SAMPLES)), 2, 4, seed=SEED)
    epochs = [[(rows, groups_of(rows), lambda x: x) for rows in sampler] for _ in range(EPOCHS)]
    return plain_loop(model, dro(model, optimizer), epochs, accumulate)


def assert_same(trainer: RobustTrainer, expected: tuple[Any, Any], tolerance: float = 0.0) -> None:
    model, objective = expected
    ours: Any = trainer.objective
    assert distance(bert(), model) > 0.01
    assert distance(trainer.model, model) <= tolerance  # type: ignore[arg-type]
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=tolerance)
    close(ours.group_losses(), objective.group_losses())
    close(ours.threshold, objective.threshold)
    assert ours.term.step == objective.term.step


# --- the plain loop -----------------------------------------------------------------------------


def test_with_the_optimizer_of_the_trainer(tmp_path):
    trainer = robust(tmp_path, optim="sgd", learning_rate=0.3, gradient_accumulation_steps=2)
    trainer.train()
    assert_same(trainer, plain(2, momentum=False))


# --- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize(("accumulate", "step"), [(1, 5), (2, PER_EPOCH // 2)])
def test_equals_the_plain_loop_and_resumes_exactly(tmp_path, accumulate, step):
    """Resumed in the middle of an epoch, and at the end of one.

    BERT accepts loss kwargs, for which Trainer leaves the loss of a subclass undivided.
    """
    options = {"gradient_accumulation_steps": accumulate}
    first = robust(tmp_path, save_strategy="steps", save_steps=step, **options)
    first.train()
    assert_same(first, plain(accumulate))
    resumed = robust(tmp_path, dataloader_num_workers=1, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert_same(resumed, plain(accumulate))


def test_best_model_and_few_checkpoints(tmp_path):
    """The figures of `plain(dropout=0)` are those of a run that evaluates: nothing else changes."""
    trainer = robust(
        tmp_path, bert(0.0), eval_dataset=examples()[:16], eval_strategy="epoch",
        save_strategy="epoch", load_best_model_at_end=True, save_total_limit=1,
        metric_for_best_model="bad", greater_is_better=False, num_train_epochs=3,
        compute_metrics=lambda _: {"bad": abs(trainer.state.epoch - EPOCHS)},
    )  # fmt: skip
    trainer.train()
    best = f"checkpoint-{EPOCHS * PER_EPOCH}"
    assert distance(trainer.model, plain(dropout=0.0)[0]) == 0.0  # type: ignore[arg-type]
    assert [each.name for each in tmp_path.iterdir()] == [best]
    assert (tmp_path / best / "objective.pt").is_file()


def test_resume_speaks_up(tmp_path):
    first = robust(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    first.train()
    with pytest.raises(ValueError, match=r"per_group was \[4\], is \[2\]"):
        robust(tmp_path, groups_per_batch=4).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps was 1, is 2"):
        robust(tmp_path, gradient_accumulation_steps=2).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"checksum of the column 'user' was"):
        robust(tmp_path, train_dataset=examples()[::-1]).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="seed was 3, is 4"):
        robust(tmp_path, seed=4).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-1" / "objective.pt").unlink()
    with pytest.raises(ValueError, match=r"needs objective\.pt"):
        robust(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


# --- constraints --------------------------------------------------------------------------------

OLD = 48
"""Examples with a constraint; the others are for the loss."""


def mixed() -> list[dict[str, Any]]:
    given = [dict(each, reference=0.01 * k) for k, each in enumerate(examples())]
    return [each if k < OLD else dict(each, user=None) for k, each in enumerate(given)]


def limited(method: str) -> Callable[[Any, Any], fcco.constraints.ConstrainedObjective]:
    settings = {"sonex": {"smoothing": 0.2}, "alexr2": {"smoothing": 0.2, "nu": 0.5, "eta": 0.1}}
    more: dict[str, Any] = settings[method] | ({"inner_steps": 3} if method == "alexr2" else {})
    return lambda model, optimizer: fcco.constrained(
        model, optimizer, NAMES, method, penalty=4.0, gamma=0.3, tolerance=0.3, **more
    )


def above_reference(outputs: Any, inputs: Any) -> Tensor:
    losses = cross_entropy(outputs.logits, inputs["labels"], reduction="none")
    return losses - inputs["reference"]


def on_others(method: str) -> dict[str, Any]:
    return {
        "objective": limited(method), "train_dataset": mixed(), "losses": above_reference,
        "columns": ["reference"], "loss_on": "ungrouped", "ungrouped_share": 0.25,
    }  # fmt: skip


@functools.cache
def plain_constrained(method: str, dropout: float = 0.1) -> tuple[Any, Any]:
    """Six examples of two constraints and two of the loss in a batch."""
    old = fcco.GroupBatchSampler(groups_of(range(OLD)), 2, 3, seed=SEED)
    new = fcco.GroupBatchSampler([0] * (SAMPLES - OLD), 1, 2, seed=SEED + 1)

    def step(kept: list[int], fresh: list[int]) -> Step:
        rows = [*kept, *(OLD + k for k in fresh)]
        reference = torch.tensor([0.01 * k for k in rows])
        return rows, groups_of(kept), lambda x: ((x - reference)[6:], (x - reference)[:6])

    epochs = [[step(*pair) for pair in zip(old, new, strict=True)] for _ in range(EPOCHS)]
    model = bert(dropout)
    return plain_loop(model, limited(method)(model, sgd(model)), epochs)


def plain_limits(steps: list[Step]) -> Any:
    model = bert(0.0)
    return plain_loop(model, limited("sonex")(model, sgd(model)), [steps])[0]


@pytest.mark.parametrize("method", ["sonex", "alexr2"])
def test_constraints_and_a_loss_on_other_examples(tmp_path, method):
    """alexr2 has an optimizer around the Trainer's, whose state a checkpoint must hold."""
    options = on_others(method)
    expected, objective = plain_constrained(method)
    trainer = robust(tmp_path, save_strategy="steps", save_steps=5, **options)
    trainer.train()
    assert distance(trainer.model, expected) == 0.0  # type: ignore[arg-type]
    assert trainer.objective.violation() == objective.violation()  # type: ignore[union-attr]
    assert [row.name for row in trainer.report().rows] == NAMES
    resumed = robust(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert distance(resumed.model, expected) == 0.0  # type: ignore[arg-type]


def test_constraints_with_a_loss_on_all(tmp_path):
    """A pair (loss, values) says the same as the losses alone, numbers the same as names."""

    def pair(outputs, inputs):
        losses = cross_entropy(outputs.logits, inputs["labels"], reduction="none")
        return losses, losses

    numbered = [dict(each, user=group_of(each)) for each in examples()]
    found = []
    for losses, data in ((None, examples()), (pair, numbered)):
        trainer = robust(
            tmp_path, objective=limited("sonex"), losses=losses, train_dataset=data, max_steps=3
        )
        trainer.train()
        found.append(trainer.model)
        assert [row.name for row in trainer.report().rows] == NAMES
    assert distance(*found) == 0.0 < distance(found[0], bert())


# --- batches ------------------------------------------------------------------------------------


def batches_of(trainer: RobustTrainer) -> list[Any]:
    return list(trainer.get_train_dataloader())


@pytest.mark.parametrize("make", ["list", "datasets"])
def test_batches_hold_what_they_should(tmp_path, make):
    """The column gets through the removal of unused columns, and names become numbers."""
    data: Any = [dict(each, note="not for the model") for each in examples()]
    if make == "datasets":
        data = pytest.importorskip("datasets").Dataset.from_list(data)
    trainer = robust(tmp_path, train_dataset=data, groups_per_batch=None)
    assert trainer.group_names == NAMES
    batches = batches_of(trainer)
    assert len(batches) == PER_EPOCH
    rows = {tuple(each["input_ids"]): group_of(each) for each in examples()}
    for batch in batches:
        assert set(batch) == {"input_ids", "labels", "group_index"}
        group = [each for (each,) in batch["group_index"]]
        assert sorted(group) == [0, 0, 1, 1, 2, 2, 3, 3]
        assert group == [rows[tuple(each)] for each in batch["input_ids"].tolist()]


def test_examples_set_apart_give_the_values_and_the_others_the_gradient(tmp_path):
    """The same run by hand, with the batches of the trainer, and the same again after a resume."""
    trainer = robust(tmp_path, bert(0.0), holdout=0.25, save_strategy="steps", save_steps=9)
    held: Any = trainer._held
    apart, rest = set(held.apart.tolist()), set(held.rest.tolist())
    assert sorted(apart | rest) == list(range(SAMPLES)) and len(apart) == SAMPLES // 4
    loader: Any = trainer.get_train_dataloader()
    batches = list(loader.batch_sampler)
    trainer.train()
    model = bert(0.0)
    optimizer = sgd(model)
    objective = dro(model, optimizer)
    for epoch in range(EPOCHS):
        trainer.state.epoch = epoch
        for rows in loader.batch_sampler:
            assert set(rows[:BATCH]) <= rest and set(rows[BATCH:]) <= apart
            first, second = rows[:BATCH], rows[BATCH:]
            assert groups_of(first) == groups_of(second)
            gradient, values = (functools.partial(losses_of, model, r) for r in (first, second))
            objective(values, groups_of(second), gradient=gradient).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert distance(model, trainer.model) < 1e-12 and len(batches[0]) == 2 * BATCH  # type: ignore[arg-type]
    again = robust(tmp_path, bert(0.0), holdout=0.25)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))
    assert distance(again.model, trainer.model) < 1e-12  # type: ignore[arg-type]


def test_examples_set_apart_of_overlapping_groups_and_without_one(tmp_path):
    data = [dict(each, user=[NAMES[k % 4], NAMES[k % 3]] if k % 4 != k % 3 else None)
            for k, each in enumerate(examples())]  # fmt: skip
    trainer = robust(
        tmp_path, objective=lambda model, optimizer: fcco.constrained(
            model, optimizer, GROUPS, tolerance=0.5), train_dataset=data, groups="user",
        groups_per_batch=None, holdout=0.3,
    )  # fmt: skip
    loader: Any = trainer.get_train_dataloader()
    for rows, batch in zip(list(loader.batch_sampler), list(loader), strict=True):
        items = [loader.dataset[k] for k in rows]
        groups = [own[0] if own else None for own in batch["group_index"]]
        alone = groups.count(None)
        assert alone == 4 and groups[:4] == groups[8:] and None not in groups[8:]
        pairs = zip(groups, items, strict=True)
        assert all(NAMES[group] in item["user"] for group, item in pairs if group is not None)
    trainer.train()
    objective: Any = trainer.objective
    assert bool(objective.term.tracker.seen.all())


def test_labels_may_be_the_groups(tmp_path):
    def of_labels(model, optimizer):
        return fcco.CVaRGroupDRO(model, optimizer, num_groups=2, ratio=0.5)

    trainer = robust(tmp_path, groups="labels", objective=of_labels, max_steps=2)
    for batch in batches_of(trainer):
        assert batch["labels"].tolist() == [each for (each,) in batch["group_index"]]
    trainer.train()


# --- several groups -----------------------------------------------------------------------------


def overlapping() -> list[dict[str, Any]]:
    """Each example is in its group and, one in three, also in the next; one in eight is in none."""
    data = []
    for k, each in enumerate(examples()):
        names = [each["user"], *([NAMES[(group_of(each) + 1) % GROUPS]] if k % 3 == 0 else [])]
        data.append(dict(each, user=[] if k % 8 == 7 else names))
    return data


def test_examples_drawn_for_one_of_their_groups(tmp_path):
    """Equals the loop over memberships, with a loss on examples without a group."""
    datasets, data = pytest.importorskip("datasets"), overlapping()
    pairs = [(k, NAMES.index(name)) for k, each in enumerate(data) for name in each["user"]]
    others = [k for k, each in enumerate(data) if not each["user"]]
    # An epoch is a pass over the others, two of them in a batch.
    kept = fcco.GroupBatchSampler(
        [group for _, group in pairs], 2, 3, seed=SEED, batches_per_epoch=len(others) // 2
    )
    fresh = fcco.GroupBatchSampler([0] * len(others), 1, 2, seed=SEED + 1)
    steps: list[Step] = [
        ([pairs[k][0] for k in old] + [others[k] for k in new], [pairs[k][1] for k in old],
         lambda x: (x[6:], x[:6]))
        for _ in range(EPOCHS)
        for old, new in zip(kept, fresh, strict=True)
    ]  # fmt: skip
    expected = plain_limits(steps)
    trainer = robust(
        tmp_path, bert(0.0), train_dataset=datasets.Dataset.from_list(data),
        objective=limited("sonex"), loss_on="ungrouped", ungrouped_share=0.25,
    )  # fmt: skip
    trainer.train()
    assert distance(bert(0.0), expected) > 0.01
    assert distance(trainer.model, expected) < 1e-9  # type: ignore[arg-type]


def test_examples_in_the_order_of_the_trainer_count_in_all_their_groups(tmp_path):
    seen: list[list[int]] = []
    place = {tuple(each["input_ids"]): k for k, each in enumerate(examples())}

    def losses(outputs: Any, inputs: Any) -> Tensor:
        if torch.is_grad_enabled():
            seen.append([place[tuple(each)] for each in inputs["input_ids"].tolist()])
        return cross_entropy(outputs.logits, inputs["labels"], reduction="none")

    trainer = robust(
        tmp_path, bert(0.0), train_dataset=overlapping(), objective=limited("sonex"), sampler=None,
        groups_per_batch=None, losses=losses,
    )  # fmt: skip
    trainer.train()
    lists = [[NAMES.index(name) for name in each["user"]] for each in overlapping()]
    expected = plain_limits([(rows, [lists[k] for k in rows], lambda x: (x, x)) for rows in seen])
    assert len(seen) == EPOCHS * PER_EPOCH and distance(bert(0.0), expected) > 0.01
    assert distance(trainer.model, expected) < 1e-9  # type: ignore[arg-type]


# --- losses -------------------------------------------------------------------------------------


def small_gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def small_t5() -> Any:
    config = transformers.T5Config(
        vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


class RobustSeq2Seq(RobustTrainer, transformers.Seq2SeqTrainer):
    """The documented way to join it with another Trainer."""


@pytest.mark.parametrize("make", [small_gpt2, small_t5])
def test_losses_of_language_models(tmp_path, make):
    """The loss of a sequence is what the model itself says of it alone."""
    torch.manual_seed(0)
    model = make()
    words = torch.randint(1, 20, (4, 6))
    labels = words.clone()
    labels[1, 3:] = labels[2, :2] = -100
    data = [
        {"input_ids": words[k].tolist(), "labels": labels[k].tolist(), "user": NAMES[k]}
        for k in range(4)
    ]
    args = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), max_steps=2, use_cpu=True, save_strategy="no", logging_strategy="no",
        report_to=[], disable_tqdm=True, per_device_eval_batch_size=2, learning_rate=0.1,
        predict_with_generate=make is small_t5, generation_max_length=4,
    )  # fmt: skip
    trainer = RobustSeq2Seq(
        model=model, args=args, train_dataset=data, eval_dataset=data, objective=dro, groups="user"
    )

    def alone() -> list[float]:
        model.eval()
        with torch.no_grad():
            pairs = zip(words, labels, strict=True)
            return [model(input_ids=x[None], labels=y[None]).loss.item() for x, y in pairs]

    assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(alone()) / 4, rel=1e-5)
    before = alone()
    trainer.train()
    assert sum(alone()) < sum(before)
    if make is small_gpt2:
        with torch.no_grad():
            ours = token_losses(model(input_ids=words), {"labels": labels})
        torch.testing.assert_close(ours, torch.tensor(alone()))


def test_a_model_without_known_losses(tmp_path):
    config = bert().config
    config.num_labels = 1  # cross-entropy over one class would be 0
    data = [dict(each, labels=0) for each in examples()]
    with pytest.raises(ValueError, match=r"losses=.*\(8, 1\)"):
        robust(
            tmp_path, transformers.BertForSequenceClassification(config), train_dataset=data
        ).train()
    model = transformers.BertForMaskedLM(config)
    data = [dict(each, labels=each["input_ids"]) for each in examples()]
    with pytest.raises(ValueError, match=r"losses=.*BertForMaskedLM"):
        robust(tmp_path, model, train_dataset=data).train()


# --- precision, evaluation, reports -------------------------------------------------------------


def test_bfloat16(tmp_path):
    """The model computes in bf16; losses and estimates are in 32 bits."""
    dtypes = set()
    model = bert().float()
    model.bert.pooler.dense.register_forward_hook(lambda *given: dtypes.add(given[2].dtype))
    trainer = robust(tmp_path, model, bf16=True, max_steps=3)
    trainer.train()
    assert dtypes == {torch.bfloat16}
    losses = trainer.objective.group_losses()  # type: ignore[union-attr]
    assert losses.dtype == torch.float32 and losses.isfinite().any()


def test_evaluation_changes_nothing(tmp_path):
    """Examples of other groups, or without the column, can be evaluated."""
    strangers = [dict(each, user="eve") for each in examples()[:7]]
    nobody = [{k: v for k, v in each.items() if k != "user"} for each in examples()[:7]]
    trainer = robust(tmp_path, max_steps=3)
    trainer.train()
    objective: Any = trainer.objective
    before = {k: v.clone() for k, v in objective.state_dict().items() if isinstance(v, Tensor)}
    trainer.model.eval()  # type: ignore[union-attr]
    with torch.no_grad():
        expected = losses_of(trainer.model, range(7)).mean().item()
    for data in (examples()[:7], strangers, nobody):
        found = trainer.evaluate(data, metric_key_prefix="test")["test_loss"]  # type: ignore[arg-type]
        assert found == pytest.approx(expected, rel=1e-6)
    for name, value in before.items():
        assert torch.equal(objective.state_dict()[name], value), name


def test_report_and_log(tmp_path):
    trainer = robust(tmp_path, logging_strategy="epoch")
    with pytest.raises(ValueError, match="train"):
        trainer.report()
    trainer.train()
    report = trainer.report()
    losses = plain()[1].group_losses()
    assert {row.name: row.value for row in report.rows} == dict(
        zip(NAMES, losses.tolist(), strict=True)
    )
    assert report.worst == NAMES[int(losses.argmax())] and report.worst in str(report)
    entries = [each for each in trainer.state.log_history if "loss" in each]
    assert len(entries) == EPOCHS
    assert entries[-1]["worst_group_loss"] == losses.max() and entries[-1]["cvar"] == report.cvar


def test_an_error_names_the_group(tmp_path):
    spoiled = lambda outputs, inputs: outputs.logits.sum(1) * torch.nan  # noqa: E731
    trainer = robust(tmp_path, losses=spoiled)
    with pytest.raises(fcco.NonFiniteValue, match=f"for `({'|'.join(NAMES)})`"):
        trainer.train()


# --- what would go wrong silently ---------------------------------------------------------------


def with_first(**values: Any) -> list[dict[str, Any]]:
    return [dict(examples()[0], **values), *examples()[1:]]


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"groups": "group"}, ValueError, "no such column.*user"),
        ({"train_dataset": None}, TypeError, "NoneType"),
        ({"train_dataset": mixed()}, ValueError, "needs the group of each"),
        ({"loss_on": "ungrouped"}, ValueError, "needs examples with None"),
        ({"sampler": None}, ValueError, "groups_per_batch"),
        ({"train_dataset": with_first(user=["ann", "ann"])}, ValueError, "once"),
        ({"train_dataset": [dict(e, labels=-100) for e in examples()]}, ValueError, "NaN"),
        ({"groups_per_batch": 5}, ValueError, "groups_per_batch"),
        ({"objective": "dro"}, TypeError, "function"),
        ({"objective": lambda m, o: nn.Linear(1, 1)}, TypeError, "Linear"),
        ({"objective": lambda m, o: fcco.CVaRGroupDRO(m, o, 9, 0.5)}, ValueError, "it has 9"),
        (
            {"objective": lambda m, o: fcco.constrained(
                m, o, NAMES[::-1])},
            ValueError, "in the order",
        ),
        ({"label_smoothing_factor": 0.1}, ValueError, "label_smoothing_factor"),
        ({"dataloader_drop_last": True}, ValueError, "dataloader_drop_last"),
        (BY_LENGTH, ValueError, "group_by_length"),
        ({"auto_find_batch_size": True}, ValueError, "auto_find_batch_size"),
        ({"compute_loss_func": print}, ValueError, "losses="),
        ({"losses": lambda outputs, inputs: outputs.logits.mean()}, ValueError, "of 8 examples"),
    ],
)  # fmt: skip
def test_refuses(tmp_path, options, error, reason):
    with pytest.raises(error, match=reason):
        robust(tmp_path, **options).train()


@pytest.mark.parametrize(
    ("objective", "reason"), [(dro, "earlier weights"), (limited("alexr2"), "optimizer of its own")]
)
def test_refuses_a_second_pass_over_shards(tmp_path, objective, reason):
    data = examples() if objective is dro else mixed()
    trainer = robust(tmp_path, objective=objective, train_dataset=data)
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match=reason):
        trainer.create_optimizer()


def test_refuses_data_parallel(tmp_path):
    args = arguments(tmp_path)
    assert args.n_gpu <= 1
    args._n_gpu = 2
    with pytest.raises(ValueError, match="torchrun"):
        RobustTrainer(bert(), args, train_dataset=examples(), objective=dro, groups="user")


def test_batches_without_the_column(tmp_path):
    trainer = robust(tmp_path)
    trainer.data_collator = transformers.default_data_collator
    with pytest.raises(ValueError, match="without the column 'user'"):
        trainer.train()


# --- the example --------------------------------------------------------------------------------


def lora_example(**size: int) -> dict[str, dict[str, float]]:
    pytest.importorskip("peft")
    path = Path(__file__).parent.parent / "examples" / "lora_without_forgetting.py"
    example = runpy.run_path(str(path))
    return example["main"](example["Size"](**size) if size else example["QUICK"])


def test_the_example_of_lora_runs(capsys):
    table = lora_example(slices=6, pretraining=2, steps=2, batch=4)
    assert list(table) == ["before", "plain", "constrained"]
    assert f"{table['constrained']['new']:.3f}" in capsys.readouterr().out


@pytest.mark.slow
def test_lora_without_forgetting():
    table = lora_example()
    before, plain, constrained = table.values()
    assert constrained["new"] < before["new"] - 0.2
    assert constrained["kept"] > 0.7 > 0.1 > plain["kept"]
    assert constrained["rise"] < 0.1 * plain["rise"]


# --- two processes ------------------------------------------------------------------------------


class Normed(nn.Module):
    """Batch norm has buffers, which DDP sends from rank 0 before each pass with gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 6), nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)

    def forward(self, input_ids: Tensor, labels: Any = None) -> dict[str, Tensor]:
        return {"logits": self.last(self.norm(self.embed(input_ids).mean(1)))}


def parameters_of(trainer: RobustTrainer) -> list[Tensor]:
    return [p.detach() for p in trainer.model.parameters()]  # type: ignore[union-attr]


def worker(out: str) -> None:
    """Each rank takes half of the batch; a run is resumed on the way."""
    folder, half = Path(out).parent, {"per_device_train_batch_size": BATCH // 2}
    for step in (None, 3):
        start = {"save_strategy": "steps", "save_steps": 3} if step is None else {}
        trainer = robust(folder, bert(0.0), gradient_accumulation_steps=2, **half, **start)
        trainer.train(step and str(folder / f"checkpoint-{step}"))
    constrained = robust(folder, bert(0.0), **half, **on_others("sonex"))
    constrained.train()
    torch.manual_seed(0)
    normed = robust(folder, Normed(), **half)
    before = []

    def remember(module: Any, given: Any) -> None:
        if torch.is_grad_enabled():
            before.append(module.running_mean.clone())

    normed.model.norm.register_forward_pre_hook(remember)  # type: ignore[union-attr]
    normed.train()
    objective: Any = trainer.objective
    result = {
        "robust": parameters_of(trainer),
        "constrained": parameters_of(constrained),
        "losses": objective.group_losses(),
        "buffers": torch.stack(before),
    }
    torch.save(result, f"{out}{os.environ['RANK']}")
    sys.stdout.flush()
    os._exit(0)  # a thread of DDP may abort the interpreter's own shutdown


@pytest.mark.slow
def test_two_processes(tmp_path):
    """DDP equals one process on the global batch, and each rank gets its half of it."""
    run_on_two_ranks(__file__, tmp_path / "out")
    results = [torch.load(tmp_path / f"out{rank}") for rank in range(2)]
    model, objective = plain(2, dropout=0.0)
    expected = {"robust": model, "constrained": plain_constrained("sonex", dropout=0.0)[0]}
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-10)
    for result in results:
        for name, one in expected.items():
            close(result[name], [p.detach() for p in one.parameters()])
        close(result["losses"], objective.group_losses())
    one, two = (result["buffers"] for result in results)
    assert len(one) > PER_EPOCH and torch.equal(one, two) and one[-1].abs().max() > 0


if __name__ == "__main__":
    worker(*sys.argv[1:])
