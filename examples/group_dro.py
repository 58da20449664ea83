"""Train for the worst groups: plain averaging against SONEX, on data whose groups disagree.

Twenty groups share one classifier. Seventeen are large and follow a simple rule; three are small,
lie elsewhere and follow a finer pattern. Averaging over samples leaves these for last; SONEX
minimises the mean loss of the worst 15 % of the groups (CVaR). Prints a table, writes
`demo/group_dro.png`.

    python examples/group_dro.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import fcco

GROUPS, HARD, RATIO = 20, 3, 0.15
STEPS, EVERY = 5000, 100


@dataclass
class Data:
    """Samples, labels and the group of each sample."""

    x: Tensor
    y: Tensor
    group: Tensor


def make_data(seed: int) -> Data:
    """Large groups of 1,000 samples and small, harder ones of 400."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [400] * HARD + [1000] * (GROUPS - HARD)
    group = torch.cat([torch.full((size,), k) for k, size in enumerate(sizes)])
    hard = group < HARD
    x = torch.randn(len(group), 2, generator=generator)
    x = torch.where(hard.unsqueeze(1), x + 3, 1.5 * x)
    y = torch.where(hard, (2 * x).sin().sum(1) > 0, x[:, 0] + torch.sin(2 * x[:, 1]) > 0)
    flip = torch.rand(len(y), generator=generator) < 0.05
    return Data(x, (y ^ flip).float(), group)


@dataclass
class Curve:
    """What happened during one run."""

    steps: list[int] = field(default_factory=list)
    cvar: list[float] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    worst_accuracy: float = 0.0
    mean_accuracy: float = 0.0
    seconds: float = 0.0


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )


def sample_losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(model(x).squeeze(1), y, reduction="none")


def train(name: str, data: Data, test: Data, seed: int) -> Curve:
    torch.manual_seed(seed)
    model = network()
    optimizer = fcco.optim.adam_type(model.parameters(), lr=5e-3, beta=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    dro = fcco.CVaRGroupDRO(model, optimizer, GROUPS, RATIO, smoothing=0.02, gamma=0.2)
    sampler = fcco.GroupBatchSampler(data.group, groups_per_batch=8, per_group=16, seed=seed)
    curve, start = Curve(), time.perf_counter()
    for step in range(STEPS):
        if name == "SONEX":
            rows = torch.tensor(sampler.draw())
            x, y, group = data.x[rows], data.y[rows], data.group[rows]
            loss = dro(lambda x=x, y=y: sample_losses(model, x, y), group)
        else:
            rows = torch.randint(len(data.x), (128,))
            loss = sample_losses(model, data.x[rows], data.y[rows]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % EVERY == 0 or step == STEPS - 1:
            losses = group_values(test, lambda: sample_losses(model, test.x, test.y))
            curve.steps.append(step)
            curve.cvar.append(dro.cvar(losses).item())
            curve.mean.append(losses.mean().item())
            _progress(name, step + 1)
    accuracy = group_values(test, lambda: ((model(test.x).squeeze(1) > 0) == test.y).float())
    curve.worst_accuracy, curve.mean_accuracy = accuracy.min().item(), accuracy.mean().item()
    curve.seconds = time.perf_counter() - start
    return curve


def group_values(data: Data, per_sample: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return fcco.group_mean(per_sample(), data.group).values


def _progress(name: str, step: int) -> None:
    if not sys.stderr.isatty() and step != STEPS:
        return
    width = 30 * step // STEPS
    bar = "#" * width + "." * (30 - width)
    end = "\n" if step == STEPS else ""
    print(f"\r{name:<10}[{bar}] {step}/{STEPS}", end=end, file=sys.stderr, flush=True)


def plot(curves: dict[str, Curve], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharex=True, layout="constrained")
    for name, curve in curves.items():
        axes[0].plot(curve.steps, curve.cvar, label=name)
        axes[1].plot(curve.steps, curve.mean, label=name)
    axes[0].set_title("Mean loss of the worst 15 % of groups")
    axes[1].set_title("Mean loss of all groups")
    for axis in axes:
        axis.set_xlabel("step")
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("loss on new data")
    axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    torch.set_num_threads(1)
    data, test = make_data(0), make_data(1)
    curves = {name: train(name, data, test, seed=0) for name in ("Average", "SONEX")}
    print(f"\n{'':<10}{'worst 15 % loss':>16}{'mean loss':>11}{'worst group':>13}{'seconds':>9}")
    for name, curve in curves.items():
        print(
            f"{name:<10}{curve.cvar[-1]:>16.3f}{curve.mean[-1]:>11.3f}"
            f"{curve.worst_accuracy:>12.1%}{curve.seconds:>9.1f}"
        )
    path = Path("demo") / "group_dro.png"
    plot(curves, path)
    print(f"\nCurves: {path}")


if __name__ == "__main__":
    main()
