"""`NoRegressionTrainer`: what it trains on, against loops in NumPy and runs of another shape."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("trl", exc_type=ImportError)
datasets = pytest.importorskip("datasets")
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from trl import SFTConfig  # noqa: E402

from fcco.integrations import trl as ours  # noqa: E402
from fcco.integrations.trl import NoRegressionTrainer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::Warning:(accelerate|transformers|datasets|trl|peft|fsspec)"),
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
    run = trainer(tmp_path, **options)
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


class Losses(transformers.TrainerCallback):
    """The target's loss of each step, by hand from the model that the step found."""

    def __init__(self) -> None:
        self.logged: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "target_loss" in logs:
            self.logged.append(logs["target_loss"])


def test_accumulation_equals_one_large_batch(tmp_path):
    """While the multipliers are zero to the last digits; the state always pools all batches.

    Later a micro-batch has multipliers that know those before it, not those after.
    """
    results = []
    for size, parts in ((24, 1), (8, 3)):
        losses = Losses()
        run = trainer(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=parts,
            max_steps=8, logging_steps=1, logging_strategy="steps", num_train_epochs=9,
        )  # fmt: skip
        batches = iter(large_batches(run, 24, 8))
        run._get_train_sampler = None  # type: ignore[assignment]
        results.append((run, losses, batches))


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
