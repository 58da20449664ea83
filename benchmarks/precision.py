"""What bf16 does to the correction g(w_t) - g(w_{t-1}).

    python -m benchmarks.precision --json           # ResNet-50 on a GPU, a small CNN without one

Per-group losses of a network are evaluated before and after one Adam step, in float32 (the
reference, TF32 off) and under bf16 autocast. The table gives the size of the difference and the
error that bf16 makes in it and in a single value (root mean square over groups and steps); on a
GPU the JSON object has the relative error with TF32 too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fcco.previous import PreviousParameters

from .models import resnet50, small_cnn

GROUPS, PER_GROUP = 8, 16


def group_losses(model: nn.Module, x: Tensor, y: Tensor, low: bool) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=low):
        logits = model(x)
    losses = cross_entropy(logits.float(), y, reduction="none")
    return losses.view(GROUPS, PER_GROUP).mean(1)


def measure(device: str, lr: float, repeats: int) -> dict[str, float]:
    torch.manual_seed(0)
    exact_products(True)
    model, side = (resnet50(2), 160) if device == "cuda" else (small_cnn(2), 32)
    model = model.to(device)
    x = torch.randn(GROUPS * PER_GROUP, 3, side, side, device=device)
    y = torch.randint(2, (len(x),), device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    previous = PreviousParameters(model, optimizer)
    true, noise, value_noise, tf32 = [], [], [], []
    for _ in range(repeats):
        x = torch.randn_like(x)
        group_losses(model, x, y, True).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

        values = torch.no_grad()(partial(group_losses, model, x, y))
        true.append(difference(previous, values, False))
        noise.append(difference(previous, values, True) - true[-1])
        value_noise.append(values(True) - values(False))
        if device == "cuda":
            exact_products(False)
            tf32.append(difference(previous, values, False) - true[-1])
            exact_products(True)
    result = {
        "difference": _rms(true),
        "bf16_noise": _rms(noise),
        "bf16_relative": _rms(noise) / _rms(true),
        "value_noise": _rms(value_noise),
    }
    if tf32:
        result["tf32_relative"] = _rms(tf32) / _rms(true)
    return {name: float(f"{number:.3g}") for name, number in result.items()}


def difference(previous: PreviousParameters, values: Callable[[bool], Tensor], low: bool) -> Tensor:
    """Values at the parameters of now less those at the previous ones."""
    return values(low) - previous.evaluate(lambda: values(low))


def exact_products(exact: bool) -> None:
    """Without TF32, or with it."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not exact


def _rms(parts: list[Tensor]) -> float:
    return torch.cat(parts).square().mean().sqrt().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results: dict[str, Any] = {}
    print(f"{'lr':>8}{'difference':>13}{'bf16 noise':>13}{'relative':>10}{'value noise':>13}")
    for lr in (1e-2, 1e-3, 1e-4, 1e-5):
        row = measure(device, lr, options.repeats)
        results[f"{lr:g}"] = row
        print(
            f"{lr:>8g}{row['difference']:>13.3g}{row['bf16_noise']:>13.3g}"
            f"{row['bf16_relative']:>10.3g}{row['value_noise']:>13.3g}"
        )
    if options.json:
        print(json.dumps({"device": device, "lr": results}))


if __name__ == "__main__":
    main()
