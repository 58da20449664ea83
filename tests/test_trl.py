"""`NoRegressionTrainer`: what it trains on, against loops in NumPy and runs of another shape."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from integration_cases import run_on_two_ranks
from torch.utils.data import DataLoader

transformers = pytest.importorskip("transformers")
pytest.importorskip("trl", exc_type=ImportError)
datasets = pytest.importorskip("datasets")
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

from fcco.integrations import trl as ours  # noqa: E402
from fcco.integrations.trl import NoRegressionTrainer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::Warning:(accelerate|transformers|datasets|trl|peft|fsspec)"
    ),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.usefixtures("quick_collections"),
]

WORDS, SIZES, TARGET, BATCH = 40, {"law": 6, "code": 6, "news": 6}, 24, 8


def rows(number: int, first: int, seed: int) -> Any:
    """Texts of 3 to 9 words from a part of the vocabulary."""
    draw = np.random.default_rng(seed)
    words = [first + draw.integers(0, 12, draw.integers(3, 10)) for _ in range(number)]
    return datasets.Dataset.from_dict({"text": [" ".join(f"w{k}" for k in w) for w in words]})


def target() -> Any:
    return rows(TARGET, 26, 0)


def guarded(sizes: dict[str, int] = SIZES) -> dict[str, Any]:
    return {name: rows(size, 7 * k, k + 1) for k, (name, size) in enumerate(sizes.items())}


def tokenizer() -> Any:
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{k}": 3 + k for k in range(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # type: ignore[arg-type]
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[attr-defined]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS + 3, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).float()


def trainer(folder: Path | str, **options: Any) -> NoRegressionTrainer:
    """A trainer; options are those of `SFTConfig`, but for some."""
    own = ("model", "train_dataset", "guarded", "tolerance", "guarded_share", "cache",
           "peft_config", "groups_per_batch", "eval_dataset", "compute_loss_func")  # fmt: skip
    mine = {key: options.pop(key) for key in own if key in options}
    settings: dict[str, Any] = {
        "output_dir": str(folder), "num_train_epochs": 2, "per_device_train_batch_size": BATCH,
        "learning_rate": 0.03, "lr_scheduler_type": "constant", "report_to": [], "seed": 3,
        "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "logging_strategy": "no",
        "bf16": False, "gradient_checkpointing": False, "max_grad_norm": 0.0,
    } | options  # fmt: skip
    given = {"model": llama(), "train_dataset": target(), "guarded": guarded()} | mine
    return NoRegressionTrainer(args=SFTConfig(**settings), processing_class=tokenizer(), **given)


def weights(run: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in run.model.parameters()]


def state(run: Any) -> dict[str, Any]:
    return {k: v for k, v in run.objective.state_dict().items() if isinstance(v, torch.Tensor)}


def distance_to_start(run: Any) -> float:
    pairs = zip(weights(run), llama().parameters(), strict=True)
    return max(float((a - b.detach()).abs().max()) for a, b in pairs)


def text_losses(model: Any, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Sum of the losses of each text alone, and its tokens, by NumPy from the logits."""
    sums, counts = [], []
    for text in texts:
        ids = [*tokenizer()(text)["input_ids"], 1]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0].double().numpy()
        total = 0.0
        for place, word in enumerate(ids[1:]):
            row = logits[place]
            total += math.log(np.exp(row - row.max()).sum()) + row.max() - row[word]
        sums.append(total)
        counts.append(len(ids) - 1)
    return np.array(sums), np.array(counts)


def by_hand(before: Any, after: Any, texts: list[str]) -> float:
    """How much the loss per token of some texts has risen."""
    (old, tokens), (new, _) = text_losses(before, texts), text_losses(after, texts)
    return float((new - old).sum() / tokens.sum())


PACKED = {"packing": True, "max_length": 16}


@pytest.mark.parametrize("options", [{}, {"padding_free": True, "max_length": None}, PACKED])
def test_values_are_differences_averaged_by_tokens(tmp_path, options):
    """A batch with each guarded row once, and a model that has moved."""
    options = options | {"max_steps": 1, "learning_rate": 0.0, "groups_per_batch": 3}
    run: Any = trainer(tmp_path, **options)
    run._measure(run.model)
    (number,) = {list(run.train_dataset[ours.DOMAIN]).count(name) for name in SIZES}
    if "packing" in options:
        assert number < SIZES["law"]  # several texts in a row
    with torch.no_grad():
        for p in run.model.parameters():
            p += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    batch = 3 * number + 4
    again = trainer(
        tmp_path, model=run.model, guarded_share=3 * number / batch,
        per_device_train_batch_size=batch, **options,
    )  # fmt: skip
    again.references = run.references
    again.train()
    found: Any = again.objective.term.tracker.rows  # type: ignore[union-attr]
    expected = [by_hand(llama(), run.model, guarded()[name]["text"]) for name in sorted(SIZES)]
    assert max(map(abs, expected)) > 0.01
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_accumulation_equals_one_large_batch(tmp_path):
    """With texts of unequal length, in the steps that only measure.

    Later a micro-batch has multipliers that know those before it, not those after; the state pools
    all of them.
    """
    options = {"num_train_epochs": 1, "train_dataset": rows(64, 26, 0)}  # 8 steps
    options |= {"optim": "sgd", "learning_rate": 0.3}
    parts = trainer(tmp_path, gradient_accumulation_steps=2, **options)
    whole = trainer(tmp_path, per_device_train_batch_size=2 * BATCH, **options)
    loader = parts.get_train_dataloader()
    small = [*loader.batch_sampler]  # type: ignore[misc]
    both = [one + two for one, two in zip(small[::2], small[1::2], strict=True)]
    whole.get_train_dataloader = lambda: DataLoader(  # type: ignore[method-assign]
        loader.dataset, batch_sampler=both, collate_fn=loader.collate_fn
    )
    parts.train()
    whole.train()
    assert max(map(distance_to_start, (parts, whole))) > 0.1
    torch.testing.assert_close(weights(parts), weights(whole), rtol=0, atol=1e-6)
    assert parts.objective.term.tracker.rows.abs().max() > 0.01  # type: ignore[union-attr]
    torch.testing.assert_close(state(parts), state(whole), rtol=1e-3, atol=1e-5)


def test_resume_in_mid_epoch_is_exact(tmp_path):
    whole = trainer(tmp_path, save_strategy="steps", save_steps=4)
    whole.train()
    part = trainer(tmp_path)
    part.train(str(tmp_path / "checkpoint-4"))
    start = weights(trainer(tmp_path))
    assert whole.state.max_steps == 12  # of two epochs: 4 is in the middle of the first
    for one, two, old in zip(weights(whole), weights(part), start, strict=True):
        assert torch.equal(one, two)
        assert not torch.equal(one, old) or one.dim() == 1
    for name, value in state(whole).items():
        assert torch.equal(value, state(part)[name]), name
    assert torch.equal(whole.references.value, part.references.value)  # type: ignore[union-attr]


def test_guarded_sets_are_kept_and_the_target_is_learned(tmp_path):
    """On the sets themselves, by hand; plain training breaks all limits."""
    options = {"learning_rate": 0.005, "max_steps": 120, "lr_scheduler_type": "linear"}
    config = SFTConfig(
        str(tmp_path), per_device_train_batch_size=4, report_to=[], use_cpu=True, bf16=False,
        disable_tqdm=True, save_strategy="no", logging_strategy="no", seed=3, **options,
    )  # fmt: skip
    plain = SFTTrainer(llama(), config, train_dataset=target(), processing_class=tokenizer())
    run = trainer(tmp_path, tolerance={"law": 0.02, "code": 0.02, "news": 0.3}, **options)
    plain.train()
    run.train()
    learned = [by_hand(llama(), each.model, target()["text"]) for each in (plain, run)]
    assert learned[0] < learned[1] < -0.5
    limits = dict(run.objective._own_limits())  # type: ignore[union-attr]
    assert limits == pytest.approx({"law": 0.02, "code": 0.02, "news": 0.3})
    for name, limit in limits.items():
        assert by_hand(llama(), plain.model, guarded()[name]["text"]) > 0.3
        assert by_hand(llama(), run.model, guarded()[name]["text"]) < limit + 0.02


def test_log_and_report(tmp_path):
    """The first step holds all rows once: its target loss is that of the model before."""
    run = trainer(
        tmp_path, per_device_train_batch_size=2 * TARGET, logging_steps=1, max_steps=12,
        logging_strategy="steps", tolerance=0.05,
    )  # fmt: skip
    run.train()
    logs = [each for each in run.state.log_history if "loss" in each]
    sums, tokens = text_losses(llama(), target()["text"])
    assert logs[0]["target_loss"] == pytest.approx(sums.sum() / tokens.sum(), rel=1e-5)
    last, report = logs[-1], run.report()
    assert [row.name for row in report.rows] == sorted(SIZES)
    for row in report.rows:
        assert last[f"rise/{row.name}"] == pytest.approx(row.value)
        assert last[f"rise_error/{row.name}"] == pytest.approx(row.error)
        assert last[f"multiplier/{row.name}"] == pytest.approx(row.weight)
        assert last[f"limit/{row.name}"] == pytest.approx(0.05)


def test_lora_bfloat16_checkpointing_and_evaluation(tmp_path):
    peft = pytest.importorskip("peft")
    run = trainer(
        tmp_path, bf16=True, gradient_checkpointing=True, max_steps=3, eval_dataset=target(),
        peft_config=peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
        per_device_eval_batch_size=TARGET,
    )  # fmt: skip
    sums, tokens = text_losses(llama(), target()["text"])
    before = run.evaluate()["eval_loss"]
    assert before == pytest.approx(sums.sum() / tokens.sum(), rel=0.01)
    run.train()
    assert run.evaluate()["eval_loss"] < before
    named: Any = dict(run.model.named_parameters())  # type: ignore[union-attr]
    moved = [name for name, p in named.items() if "lora_B" in name and p.abs().max() > 0]
    assert moved and not any(p.requires_grad for name, p in named.items() if "lora" not in name)
    texts = [text for name in sorted(SIZES) for text in guarded()[name]["text"]]
    old, tokens = text_losses(llama(), texts)
    kept: Any = run.references
    np.testing.assert_allclose(sorted(kept.value), sorted(old / tokens), rtol=0.02)


def test_losses_of_the_model_before_are_kept(tmp_path):
    found = []
    for _ in range(2):
        run = trainer(tmp_path, max_steps=1, cache=tmp_path / "kept")
        run.train()
        found.append(run.references.value)  # type: ignore[union-attr]
        (file,) = (tmp_path / "kept").iterdir()
        found.append(file.stat().st_mtime_ns)
    assert torch.equal(found[0], found[2]) and found[1] == found[3]


def test_experts_are_balanced(tmp_path):
    """The auxiliary loss of TRL takes part."""
    ends = []
    for coefficient in (0.0, 5.0):
        torch.manual_seed(0)
        config = transformers.MixtralConfig(
            vocab_size=WORDS + 3, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, num_local_experts=2, pad_token_id=0,
        )  # fmt: skip
        run = trainer(
            tmp_path, model=transformers.MixtralForCausalLM(config), max_steps=1,
            router_aux_loss_coef=coefficient,
        )  # fmt: skip
        ends.append(run.train().training_loss)
    assert ends[1] > ends[0] + 5.0  # it is at least 1


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"guarded": {}}, TypeError, "dict of datasets by name"),
        ({"guarded": [1]}, TypeError, "dict of datasets by name, but is: list"),
        ({"tolerance": {"law": 0.1}}, ValueError, "must have the names of `guarded`"),
        ({"tolerance": math.nan}, ValueError, "tolerance"),
        ({"guarded_share": 1.0}, ValueError, "guarded_share"),
        ({"guarded": {"law": rows(2, 0, 0).to_iterable_dataset()}}, TypeError, r"guarded\['law'\]"),
        ({"loss_type": "dft"}, ValueError, "loss_type"),
        ({"train_dataset": datasets.Dataset.from_dict({"input_ids": [[3, 4]], "labels": [[3, 4]]}),
          "dataset_kwargs": {"skip_prepare_dataset": True}}, ValueError, "skip_prepare_dataset"),
    ],
)  # fmt: skip
def test_refuses(tmp_path, options, error, reason):
    with pytest.raises(error, match=reason):
        trainer(tmp_path, **options)


# --- two processes ------------------------------------------------------------------------------

SHARED = {
    "max_steps": 14, "gradient_accumulation_steps": 2, "learning_rate": 0.003,
    "optim": "adamw_torch",
}  # fmt: skip


def on_the_cpu(make: Any) -> Any:
    """Accelerate shards on devices alone, and silently takes DDP on a CPU; torch can do both."""

    def create(self: Any) -> None:
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

        make(self)
        state = self.accelerator.state
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.is_fsdp_enabled = True

    return create


def worker(kind: str, out: str) -> None:
    """Each rank has half of the batch."""
    options = SHARED | {"per_device_train_batch_size": BATCH // 2}
    if kind == "fsdp2":
        layer = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        options |= {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2} | layer}
        made = NoRegressionTrainer.create_accelerator_and_postprocess
        NoRegressionTrainer.create_accelerator_and_postprocess = on_the_cpu(made)  # type: ignore
    elif kind != "ddp":
        auto = (
            "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size",
            "gradient_clipping",
        )  # fmt: skip
        stage = {"zero_optimization": {"stage": int(kind[-1])}}
        options |= {"deepspeed": stage | dict.fromkeys(auto, "auto")}
    run = trainer(Path(out).parent, **options)
    run.train()
    run.objective.state_dict()  # type: ignore[union-attr]
    model: Any = run.model
    found = {}
    for name, p in model.named_parameters():
        if kind == "fsdp2":
            assert p.to_local().numel() < p.numel()
            found[name] = p.full_tensor().detach()
        elif kind == "zero3":
            import deepspeed

            with deepspeed.zero.GatheredParameters([p]):
                found[name] = p.detach().clone()
        else:
            found[name] = p.detach()
    torch.save((found, state(run)), f"{out}{os.environ['RANK']}")
    sys.stdout.flush()
    os._exit(0)  # a thread of DDP may abort the interpreter's own shutdown


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_two_processes_equal_one(tmp_path, kind):
    """Also with parameters in shards, and with multipliers that are no longer zero."""
    if "zero" in kind:
        pytest.importorskip("deepspeed")
    run_on_two_ranks(__file__, kind, tmp_path / "out", DS_ACCELERATOR="cpu")
    one = trainer(tmp_path, **SHARED)
    one.train()
    assert state(one)["terms.inner.multiplier"].max() > 0.01
    expected: Any = {name: p.detach() for name, p in one.model.named_parameters()}  # type: ignore
    for rank in range(2):
        found, own = torch.load(f"{tmp_path / 'out'}{rank}")
        found = {name.removeprefix("module."): value for name, value in found.items()}
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
        torch.testing.assert_close(own, state(one), rtol=1e-3, atol=2e-5)


if __name__ == "__main__":
    worker(*sys.argv[1:])
