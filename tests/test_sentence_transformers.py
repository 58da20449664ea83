"""`GlobalContrastiveLoss` in the Trainer: the plain loop, accumulation, checkpoints, evaluation."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from integration_cases import run_on_two_ranks
from torch import Tensor, nn

pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets")
pytest.importorskip("accelerate")

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import (
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Dropout, StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import TrainerState

import fcco
from fcco.integrations.sentence_transformers import GlobalContrastiveLoss, number_pairs
from studies import small_batches
from studies.runner import Job, Runner

pytestmark = pytest.mark.usefixtures("quick_collections")

PAIRS, WORDS = 22, 30
SETTINGS: dict[str, Any] = {"gamma": 0.5, "stored_pairs": 6, "negatives": 9}


def texts(number: int = PAIRS, columns: int = 2) -> dict[str, list[str]]:
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, (columns, number, 3), generator=draw).tolist()
    names = ["anchor", "positive", "negative", "negative_2"]
    return {
        name: [" ".join(f"w{word}" for word in sentence) for sentence in column]
        for name, column in zip(names, words, strict=False)
    }


def make(dropout: float = 0.0) -> SentenceTransformer:
    torch.manual_seed(0)
    tokenizer = Tokenizer(WordLevel({f"w{word}": word for word in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    modules = [StaticEmbedding(tokenizer, embedding_dim=6), Dropout(dropout)]
    return SentenceTransformer(modules=modules, device="cpu").double()


def columns_of(model: SentenceTransformer, data: dict[str, list[str]], ids: Any) -> list[Any]:
    return [model.preprocess([column[int(i)] for i in ids]) for column in data.values()]


def weights(model: torch.nn.Module) -> Tensor:
    return next(model.parameters()).detach().clone()


# --- the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "symmetric"), [(2, False), (2, True), (3, False), (4, True)])
def test_all_pairs_as_one_batch_is_multiple_negatives_ranking(columns, symmetric):
    """Value and gradient, also with hard negatives."""
    model, data, ids = make(), texts(columns=columns), torch.randperm(PAIRS)
    ours = GlobalContrastiveLoss(
        model, PAIRS, temperature=0.1, gamma=1.0, symmetric=symmetric, in_trainer=False
    )
    both: dict[str, Any] = {
        "directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"
    }  # fmt: skip
    theirs = MultipleNegativesRankingLoss(model, scale=10.0, **(both if symmetric else {}))
    results = []
    for loss in (ours, theirs):
        value = loss(columns_of(model, data, ids), ids)
        (slope,) = torch.autograd.grad(value, list(model.parameters()))
        results.append((value, slope))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-10)
    assert ours.memory.value.shape == (PAIRS, 1 + symmetric)


def test_hard_negatives_of_a_batch_are_estimated_without_bias():
    """Those of the pair itself are in each of its batches and count once."""
    model, data = make(), texts(6, columns=3)
    whole = GlobalContrastiveLoss(model, 6, gamma=1.0, temperature=0.5, in_trainer=False)
    whole(columns_of(model, data, range(6)), torch.arange(6))
    sums = torch.zeros(6, 1, dtype=torch.float64)
    batches = torch.combinations(torch.arange(6), 3)
    for ids in batches:
        part = GlobalContrastiveLoss(model, 6, gamma=1.0, temperature=0.5, in_trainer=False)
        part(columns_of(model, data, ids), ids)
        sums[ids] += part.memory.value[ids].exp() / 10  # 10 of 20 batches have a given pair
    torch.testing.assert_close(sums, whole.memory.value.exp(), rtol=1e-10, atol=0)


# --- the Trainer ----------------------------------------------------------------------------------


def arguments(folder: Path, **options: Any) -> SentenceTransformerTrainingArguments:
    return SentenceTransformerTrainingArguments(
        **{
            "output_dir": str(folder), "num_train_epochs": 2, "per_device_train_batch_size": 4,
            "learning_rate": 0.5, "optim": "sgd", "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0, "report_to": [], "disable_tqdm": True, "use_cpu": True,
            "save_strategy": "no", "logging_strategy": "no", "seed": 3,
            **options,
        }
    )  # fmt: skip


def trainer(folder: Path, dropout: float = 0.0, **options: Any) -> Any:
    model = make(dropout)
    loss = GlobalContrastiveLoss(model, PAIRS, **SETTINGS)
    return SentenceTransformerTrainer(
        model=model,
        args=arguments(folder, **options),
        train_dataset=number_pairs(Dataset.from_dict(texts())),
        eval_dataset=Dataset.from_dict(texts(10)),
        loss=loss,
        callbacks=[loss],
    )


def plain(batches: list[Tensor], accumulate: int) -> tuple[Tensor, Tensor]:
    """The plain loop; an epoch's last micro-batches may be fewer."""
    model, data = make(), texts()
    loss = GlobalContrastiveLoss(model, PAIRS, **SETTINGS, in_trainer=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    per_epoch = -(-PAIRS // 4)
    for start in range(0, len(batches), per_epoch):
        epoch = batches[start : start + per_epoch]
        for first in range(0, len(epoch), accumulate):
            step = epoch[first : first + accumulate]
            for ids in step:
                (loss(columns_of(model, data, ids), ids) / len(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model), loss.memory.value


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_equals_the_plain_loop(tmp_path, accumulate):
    """Also with accumulation, and with evaluation in between (on pairs without numbers)."""
    made = trainer(tmp_path, gradient_accumulation_steps=accumulate, eval_strategy="epoch")
    batches: list[Tensor] = []
    made.loss.register_forward_pre_hook(
        lambda loss, args: batches.append(args[1]) if loss.model.training else None
    )
    made.train()
    expected, value = plain(batches, accumulate)
    assert len(batches) == 12 and {len(ids) for ids in batches} == {4, 2}
    assert float((weights(made.model) - weights(make())).abs().max()) > 0.01
    assert torch.equal(weights(made.model), expected)
    assert torch.equal(made.loss.memory.value, value)
    assert set(made.loss.memory.numbers.tolist()) == set(torch.cat(batches)[-6:].tolist())
    if accumulate == 2:  # a loss that is summed, not averaged, over micro-batches is another path
        assert not torch.allclose(expected, plain(batches, 1)[0], atol=1e-3)


def test_a_resumed_run_continues_exactly(tmp_path):
    """In the middle of an epoch, with dropout."""
    first = trainer(tmp_path, dropout=0.2, save_strategy="steps", save_steps=8)
    first.train()
    resumed = trainer(tmp_path, dropout=0.2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert torch.equal(weights(resumed.model), weights(first.model))
    assert torch.equal(resumed.loss.memory.value, first.loss.memory.value)


def test_only_the_memory_of_the_same_run_is_loaded(tmp_path):
    """A checkpoint without one, one of another run in its place, a folder that was moved."""
    options = arguments(tmp_path / "here")

    def begin(state: TrainerState) -> GlobalContrastiveLoss:
        loss = GlobalContrastiveLoss(make(), PAIRS)
        loss.on_train_begin(options, state, None)
        return loss

    state, other = TrainerState(), TrainerState()
    first, second = begin(state), begin(other)
    first.memory.value.fill_(1.0)
    with pytest.raises(ValueError, match="Two losses have the name"):
        begin(state)
    state.global_step = other.global_step = 4
    folder = tmp_path / "here" / "checkpoint-4"
    folder.mkdir(parents=True)
    first.on_save(options, state, None)
    assert begin(state).memory.value.eq(1.0).all()
    with pytest.raises(ValueError, match="step 4 has no memory"):
        begin(TrainerState(global_step=4))
    with pytest.raises(FileNotFoundError, match="load_checkpoint"):
        begin(other)
    assert second.memory.value.isnan().all()

    options = arguments(tmp_path / "elsewhere")  # the Trainer's notes tell where it was
    assert begin(state).memory.value.eq(1.0).all()
    folder.rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="load_checkpoint"):
        begin(state)
    loss = GlobalContrastiveLoss(make(), PAIRS)
    loss.load_checkpoint(tmp_path / "moved")
    loss.on_train_begin(options, state, None)
    assert loss.memory.value.eq(1.0).all()


def test_numbers_that_do_not_cover_the_pairs_are_noticed(tmp_path):
    """Two data sets, both numbered from 0, under one loss."""
    model = make()
    loss = GlobalContrastiveLoss(model, 2 * PAIRS)
    data = number_pairs(Dataset.from_dict(texts()))
    made = SentenceTransformerTrainer(
        model=model,
        args=arguments(tmp_path, num_train_epochs=1),
        train_dataset={"one": data, "two": data},  # type: ignore[arg-type]
        loss=loss,
        callbacks=[loss],
    )
    with pytest.warns(fcco.UsageWarning, match="22 of the .*num_pairs=44.*own"):
        made.train()


def test_a_model_in_eval_mode_is_refused():
    """`model.encode` leaves it so; the memory would not be used."""
    model, ids = make(), torch.arange(4)
    loss = GlobalContrastiveLoss(model, PAIRS, in_trainer=False)
    model.encode(["w1 w2"])
    with pytest.raises(RuntimeError, match=r"loss\.train\(\)"):
        loss(columns_of(model, texts(), ids), ids)
    assert loss.eval()(columns_of(model, texts(), ids)).item() > 0
    loss.train()(columns_of(model, texts(), ids), ids)
    assert not loss.memory.value[ids].isnan().any()


def test_a_forgotten_callback_is_refused():
    model, ids = make(), torch.arange(4)
    loss = GlobalContrastiveLoss(model, PAIRS)
    with pytest.raises(RuntimeError, match=r"callbacks=\[loss\]"):
        loss(columns_of(model, texts(), ids), ids)
    assert loss.memory.value.isnan().all()


def test_the_model_card_has_the_settings(tmp_path):
    trainer(tmp_path).create_model_card()
    text = (tmp_path / "README.md").read_text()
    assert "GlobalContrastiveLoss" in text and '"gamma": 0.5' in text


# --- errors ---------------------------------------------------------------------------------------


def test_labels_that_are_no_numbers_of_pairs():
    model, data, ids = make(), texts(), torch.arange(4)
    loss = GlobalContrastiveLoss(model, PAIRS, in_trainer=False)
    for labels, error in (
        (None, "missing.*number_pairs"),
        (torch.tensor([0.1, 0.9, 0.3, 0.0]), "integers.*number_pairs"),
        (torch.tensor([0, 1, 0, 1]), "classes or groups.*number_pairs"),
        (torch.tensor([1, 2, PAIRS, 3]), rf"\[0, {PAIRS - 1}\]"),
    ):
        with pytest.raises((ValueError, IndexError), match=error):
            loss(columns_of(model, data, ids), labels)
    with pytest.raises(ValueError, match="two columns"):
        loss(columns_of(model, data, ids)[:1], ids)
    assert loss.memory.value.isnan().all()


def test_a_loss_that_cuts_embeddings_is_refused():
    model, ids = make(), torch.arange(4)
    loss = MatryoshkaLoss(model, GlobalContrastiveLoss(model, PAIRS, in_trainer=False), [6, 3])
    with pytest.raises(ValueError, match="MatryoshkaLoss"):
        loss(columns_of(model, texts(), ids), ids)


def test_number_pairs():
    data = number_pairs(Dataset.from_dict(texts(5)))
    assert list(data["label"]) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"\['label'\] already"):
        number_pairs(data)
    with pytest.raises(ValueError, match="`number`"):
        number_pairs(Dataset.from_dict(texts(5)), "number")
    with pytest.raises(TypeError, match="IterableDataset"):
        number_pairs(data.to_iterable_dataset())  # type: ignore[arg-type]


# --- the benchmark --------------------------------------------------------------------------------


def test_pairs_of_packages(tmp_path):
    """No docstring in a source, no text twice, no package in two parts."""
    code = (
        'def name_{0}(x):\n    """Text number {0} of the package {1}."""\n'
        '    class Inner:\n        "docs"\n    return x + {0} * {1}, "{1} a long line of code"\n'
        'def twice(x):\n    """The same text in all the packages."""\n    return x, {0}, {1}, {0}\n'
    )
    for package in range(40):
        for number in range(3):
            file = tmp_path / f"package{package}" / f"file{number}.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(code.format(number, package))
    (tmp_path / "package1" / "tests").mkdir()
    (tmp_path / "package1" / "tests" / "more.py").write_text(code.format(9, 9))
    pairs = small_batches.collect(tmp_path)
    assert len(pairs) == 120 and len({pair.text for pair in pairs}) == 120
    (pair,) = [pair for pair in pairs if pair.text == "Text number 2 of the package 7."]
    assert pair.package == "package7" and '"""' not in pair.source and "docs" not in pair.source
    assert "class Inner:\n        pass" in pair.source and "return (x + 2 * 7" in pair.source
    parts = small_batches.split(pairs)
    packages = [{pair.package for pair in part} for part in parts.values()]
    assert sum(map(len, packages)) == 40 and len(set.union(*packages)) == 40
    assert [len(part) for part in parts.values()] == [99, 9, 12]


def test_the_study_runs(tmp_path, capsys, monkeypatch):
    """With a network of one layer; a text and the same text are found by any."""

    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(60, 8)

        def forward(self, ids):
            return self.words(ids.long()).mean(1)

    ids = 1 + torch.arange(40)[:, None].repeat(1, 2)
    monkeypatch.setattr(small_batches.backbones, "build", lambda name: Tiny())
    monkeypatch.setattr(small_batches, "collect", lambda site, every: [])
    monkeypatch.setattr(small_batches, "tokens", lambda pairs: [ids, ids])
    out = tmp_path / "runs.jsonl"
    words = ["--quick", "--json", "--device", "cpu", "--seeds", "1", "--workers", "1"]
    small_batches.main([*words, "--out", str(out)])
    first = capsys.readouterr()
    head, *rows = json.loads(first.out.splitlines()[-1])["rows"]
    assert head[0] == "loss" and [row[1] for row in rows] == ["1,024", "32", "32", "32"]
    assert all(row[3:] == ["100.00", "100.00", "2"] for row in rows)
    assert len(out.read_text().splitlines()) == 8
    small_batches.main([*words, "--out", str(out)])  # all runs are known
    assert not capsys.readouterr().err


def test_the_study_chooses_on_validation_pairs():
    """The rate that is best on validation pairs is not best on test pairs."""
    figures = [(1.0, 90.0), (2.0, 70.0), (7.0, 50.0), (3.0, 80.0)]
    first, *_ = small_batches.METHODS
    tried: Any = {first: [[dict(zip(("validation", "test"), own, strict=True))] for own in figures]}
    assert small_batches.choose(tried) == {first: 2}
    rates = [setting["rate"] for setting in small_batches.grid(first)]
    known = {
        Job("", "", setting, seed).key: {"validation": validation, "test": test + seed}
        for setting, (validation, test) in zip(small_batches.grid(first), figures, strict=True)
        for seed in (0, 1)
    }
    runner = Runner(dict, dict, 0, known=known)  # runs nothing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_batches, "METHODS", {first: small_batches.METHODS[first]})
        _, row = small_batches.table(runner)
    assert float(row[2]) == rates[2] and row[3:] == ["7.00", "50.50", "2"]


# --- two processes --------------------------------------------------------------------------------


def worker(folder: str) -> None:
    made = trainer(Path(folder), per_device_train_batch_size=2, dataloader_drop_last=True)
    batches: list[Tensor] = []
    made.loss.register_forward_pre_hook(lambda loss, args: batches.append(args[1].clone()))
    made.train()
    rank = os.environ["RANK"]
    content = [weights(made.model), made.loss.memory.value, torch.stack(batches)]
    torch.save(content, f"{folder}/out.{rank}")
    torch.distributed.destroy_process_group()
    os._exit(0)  # threads of gloo outlive their group and may keep the interpreter from ending


@pytest.mark.slow
def test_two_processes(tmp_path):
    """The Trainer's DDP equals the plain loop on the pairs of both ranks."""
    run_on_two_ranks(__file__, tmp_path, PYTHONPATH=str(Path(__file__).parents[1]))  # studies
    results = [torch.load(tmp_path / f"out.{rank}") for rank in (0, 1)]
    batches = list(torch.cat([batches for _, _, batches in results], 1))
    model, data = make(), texts()
    loss = GlobalContrastiveLoss(model, PAIRS, **SETTINGS, in_trainer=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for ids in batches:
        loss(columns_of(model, data, ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(batches) == 10 and batches[0].shape == (4,)
    for parameters, value, _ in results:
        torch.testing.assert_close(parameters, weights(model), rtol=0, atol=1e-10)
        seen = loss.memory.value
        torch.testing.assert_close(value, seen, rtol=0, atol=1e-10, equal_nan=True)


if __name__ == "__main__":
    worker(*sys.argv[1:])
