"""LoRA under hundreds of constraints: a language model learns a new text and keeps the old one.

No weights are downloaded: a small GPT-2 is made here and first learns the old text, the source code
of Python's standard library, letter by letter. Then LoRA (`peft`) teaches it a new one, the names
of Unicode characters. Each constraint says that the loss on one slice of old text, which the model
has not trained on, stays at most `TOLERANCE` nats per letter above what it was before:

    loss on slice i  <=  reference_i + TOLERANCE,    i = 1, ..., 300

Whether that keeps the old text as such is judged on other slices, which no constraint knows.
Prints a table, with plain fine-tuning beside it. Two to three minutes on two
cores.

    python examples/lora_without_forgetting.py [--quick]
"""

from __future__ import annotations

import copy
import random
import sys
import sysconfig
import tempfile
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.utils import logging

import fcco
from fcco.integrations.transformers import RobustTrainer, token_losses

LETTERS, LENGTH, WINDOWS = 128, 64, 8  # ASCII; a slice has 8 windows of 64 letters
TOLERANCE = 0.05


@dataclass
class Size:
    """How much of everything there is."""

    slices: int = 300
    pretraining: int = 600
    steps: int = 300
    batch: int = 16


QUICK = Size(slices=100, pretraining=150, steps=200)


def windows(text: str) -> Tensor:
    """The text as letters, (N, LENGTH)."""
    letters = torch.frombuffer(bytearray(text.encode("ascii", "ignore")), dtype=torch.uint8)
    return letters[: len(letters) // LENGTH * LENGTH].view(-1, LENGTH).long()


def old_text() -> Tensor:
    """Source code of the standard library, in slices of subsequent windows, shuffled."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    rows = windows("".join(file.read_text("utf-8", "ignore") for file in files))
    slices = rows[: len(rows) // WINDOWS * WINDOWS].view(-1, WINDOWS, LENGTH)
    return slices[torch.randperm(len(slices), generator=torch.Generator().manual_seed(0))]


def new_text() -> Tensor:
    """Names of characters, one per line, shuffled."""
    names = [unicodedata.name(chr(code), "") for code in range(0x3000)]
    names = [name for name in names if name]
    random.Random(0).shuffle(names)
    return windows("\n".join(names))


def letter_losses(model: Any, rows: Tensor) -> Tensor:
    """The mean loss of each row in nats per letter."""
    return token_losses(model(input_ids=rows), {"labels": rows})


def pretrained(text: Tensor, size: Size) -> Any:
    config = GPT2Config(
        vocab_size=LETTERS, n_positions=LENGTH, n_embd=96, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,  # so that losses can be compared
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, size.pretraining)
    for _ in range(size.pretraining):
        letter_losses(model, text[torch.randint(len(text), (32,))]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def reference_losses(model: Any, rows: Tensor) -> Tensor:
    def batches():
        for part in torch.arange(len(rows)).split(256):
            yield part, letter_losses(model, rows[part])

    return fcco.ReferenceLosses.measure(model, batches, size=len(rows)).value


def above_reference(outputs: Any, inputs: Any) -> Tensor:
    return token_losses(outputs, inputs) - inputs["reference"]


def fine_tuned(base: Any, new: Tensor, old: Tensor | None, size: Size) -> Any:
    """LoRA on the new text, with a constraint for each slice of the old one if that is given."""
    torch.manual_seed(0)
    lora = LoraConfig(
        r=8, lora_alpha=16, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = get_peft_model(copy.deepcopy(base), lora)
    data = [{"input_ids": row, "labels": row} for row in new]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=size.steps,
            learning_rate=3e-3,
            per_device_train_batch_size=size.batch if old is None else 2 * size.batch,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=not sys.stderr.isatty(),
        )
        if old is None:
            trainer = Trainer(model, arguments, train_dataset=data)  # type: ignore[arg-type]
        else:
            rows = old.flatten(0, 1)
            reference = reference_losses(model, rows)  # LoRA begins at the old model
            data = [dict(each, slice=None, reference=torch.tensor(0.0)) for each in data] + [
                {"input_ids": row, "labels": row, "slice": k // WINDOWS, "reference": reference[k]}
                for k, row in enumerate(rows)
            ]
            trainer = RobustTrainer(
                model,
                arguments,
                train_dataset=data,
                objective=lambda model, optimizer: fcco.constrained(
                    model, optimizer, len(old), tolerance=TOLERANCE
                ),
                groups="slice",
                losses=above_reference,
                columns=["reference"],
                loss_on="ungrouped",  # of the new text; the old one has constraints
            )
        trainer.train()
    return model


def main(size: Size) -> dict[str, dict[str, float]]:
    logging.set_verbosity_error()
    torch.manual_seed(0)
    old, new = old_text(), new_text()
    parts = old[: size.slices], old[size.slices : 2 * size.slices]
    held_out, new = new[: size.slices], new[size.slices :]
    base = pretrained(old[2 * size.slices :].flatten(0, 1), size)

    def losses(model: Any) -> list[Tensor]:
        """The mean loss of the new text, and of each slice, constrained or not."""
        rows = [part.flatten(0, 1) for part in parts]
        found = [reference_losses(model, each) for each in (held_out, *rows)]
        return [found[0].mean(), *(each.view(-1, WINDOWS).mean(1) for each in found[1:])]

    before = losses(base)
    table = {"before": {"new": before[0].item(), "kept": 1.0, "others": 1.0, "rise": 0.0}}
    for name, constraints in (("plain", None), ("constrained", parts[0])):
        after = losses(fine_tuned(base, new, constraints, size))
        rises = [now - was for now, was in zip(after[1:], before[1:], strict=True)]
        kept, others = ((rise <= TOLERANCE).double().mean().item() for rise in rises)
        table[name] = {
            "new": after[0].item(), "kept": kept, "others": others, "rise": rises[1].mean().item()
        }  # fmt: skip
    print(f"\n{'':<12}{'new text':>9}{'constrained':>13}{'other slices':>14}{'their rise':>12}")
    print(f"{'':<12}{'loss':>9}{'slices kept':>13}{'kept':>14}{'in mean':>12}")
    for name, row in table.items():
        kept = f"{row['kept']:>13.1%}{row['others']:>14.1%}"
        print(f"{name:<12}{row['new']:>9.3f}{kept}{row['rise']:>12.3f}")
    print(f"\nKept: at most {TOLERANCE} nats per letter above the loss before fine-tuning.")
    return table


if __name__ == "__main__":
    main(QUICK if "--quick" in sys.argv else Size())
