"""What `NoRegressionTrainer` adds to a step of TRL's `SFTTrainer`, on the same rows.

    python -m benchmarks.trl_step --json       # SmolLM2's shape on a GPU, a tiny one without

Both train a Llama with random weights, in bfloat16 on a GPU, on batches of the same number of rows
of the same length, half of them guarded; for TRL they are part of the target. Printed are the
medians of the time of a step over rounds in turns, their ratio, and the largest memory of each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import torch

DOMAINS = 12


def rows(number: int, length: int, vocabulary: int, seed: int) -> Any:
    """Random token ids."""
    from datasets import Dataset

    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (number, length), generator=draw)
    return Dataset.from_dict({"input_ids": ids.tolist()})


def llama(device: str) -> Any:
    """SmolLM2-135M's shape on a GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    if device == "cuda":
        shape |= {
            "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
            "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**shape, pad_token_id=0, eos_token_id=1, bos_token_id=2))


def train(name: str, device: str, steps: int, batch: int, length: int) -> tuple[list[float], float]:
    """Seconds of each step but the first five, and the largest memory in MB."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from fcco.integrations.trl import NoRegressionTrainer

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())

    model, cuda, clock = llama(device), device == "cuda", Clock()
    words = models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<eos>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>"
    )
    half = steps * batch // 2
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=batch, report_to=[],
            logging_strategy="no", save_strategy="no", disable_tqdm=True, bf16=cuda,
            use_cpu=not cuda, max_length=length, gradient_checkpointing=False,
        )  # fmt: skip
        size = model.config.vocab_size
        given: dict[str, Any] = {
            "model": model, "args": args, "processing_class": tokenizer, "callbacks": [clock],
        }  # fmt: skip
        if name == "TRL":
            trainer = SFTTrainer(**given, train_dataset=rows(2 * half, length, size, 0))
        else:
            guarded = {
                f"domain {k}": rows(half // DOMAINS + 1, length, size, k + 1)
                for k in range(DOMAINS)
            }
            target = rows(half, length, size, 0)
            trainer = NoRegressionTrainer(**given, train_dataset=target, guarded=guarded)
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    pairs = zip(clock.times[4:], clock.times[5:], strict=False)
    memory = torch.cuda.max_memory_allocated() / 1e6 if cuda else 0.0
    return [after - before for before, after in pairs], memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, steps, batch, length = ("cuda", 40, 16, 512) if cuda else ("cpu", 25, 8, 32)
    seconds: dict[str, list[float]] = {"TRL": [], "fcco": []}
    memory = dict.fromkeys(seconds, 0.0)
    for turn in range(options.rounds):
        for name in seconds if turn % 2 == 0 else reversed(seconds):
            times, most = train(name, device, steps, batch, length)
            seconds[name].append(statistics.median(times))
            memory[name] = max(memory[name], most)
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    found = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "milliseconds": {name: 1000 * statistics.median(own) for name, own in seconds.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "memory_mb": memory,
    }
    print(f"a step: {found['ratio']:.3f} times TRL's ({min(ratios):.3f} to {max(ratios):.3f})")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
