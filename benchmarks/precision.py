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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fcco

from .models import small_cnn

GROUPS, PER_GROUP = 8, 16


def network(device: str) -> tuple[nn.Module, Tensor]:
    if device == "cuda":
        import torchvision  # pyright: ignore[reportMissingImports]

        model = torchvision.models.resnet50(num_classes=2)
        return model.cuda(), torch.randn(GROUPS * PER_GROUP, 3, 160, 160, device="cuda")
    model = small_cnn()
    model[-1] = nn.Linear(64, 2)  # type: ignore[operator]
    return model, torch.randn(GROUPS * PER_GROUP, 3, 32, 32)


def group_losses(model: nn.Module, x: Tensor, y: Tensor, low: bool) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=low):
        logits = model(x)
    losses = cross_entropy(logits.float(), y, reduction="none")
    return losses.view(GROUPS, PER_GROUP).mean(1)


def measure(device: str, lr: float, repeats: int) -> dict[str, float]:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model, x = network(device)
    y = torch.randint(2, (len(x),), device=x.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    previous = fcco.previous.PreviousParameters(model, optimizer)
    true, noise, value_noise, tf32 = [], [], [], []
    for _ in range(repeats):
        x = torch.randn_like(x)
        group_losses(model, x, y, True).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        difference: Callable[[bool], Tensor] = lambda low, x=x: (  # noqa: E731
            _no_grad(lambda: group_losses(model, x, y, low))
            - previous.evaluate(lambda: group_losses(model, x, y, low))
        )
        exact, rough = difference(False), difference(True)
        true.append(exact)
        noise.append(rough - exact)
        low = _no_grad(lambda x=x: group_losses(model, x, y, True))
        high = _no_grad(lambda x=x: group_losses(model, x, y, False))
        value_noise.append(low - high)
        if device == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
            tf32.append(difference(False) - exact)
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    result = {
        "difference": _rms(true),
        "bf16_noise": _rms(noise),
        "bf16_relative": _rms(noise) / _rms(true),
        "value_noise": _rms(value_noise),
    }
    if tf32:
        result["tf32_relative"] = _rms(tf32) / _rms(true)
    return {name: float(f"{number:.3g}") for name, number in result.items()}


def _no_grad(function: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return function()


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
