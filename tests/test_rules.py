"""Thresholds by sorting, and rules on a GPU, where the host never waits for a value."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fcco
from fcco.rules import cvar as cvar_rules

DOUBLE = torch.float64
BLOCKS, SAMPLES, STEPS = 12, 8, 16
LIMITS = {
    "at most": 0.4,
    "at least": fcco.AtLeast(0.2),
    "equal": fcco.Equal(0.3),
    "between": (0.1, 0.5),
    "loose": 9.0,
}


class Regression(nn.Module):
    """Per-sample losses of a small network, and values of the limits above."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).squeeze(1)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return (self(x) - y).square()

    def limited(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and means of the output over parts of the batch."""
        parts = torch.stack(
            [self(x).view(len(LIMITS), -1).mean(1), y.view(len(LIMITS), -1).mean(1)]
        )
        return self.losses(x, y).mean(), (parts[0] + 0.1 * parts[1])


def batch(rng: torch.Generator, size: int) -> tuple[Tensor, Tensor, Tensor]:
    blocks = torch.randperm(BLOCKS, generator=rng)[:size].sort().values
    group = blocks.repeat_interleave(SAMPLES)
    x = torch.randn(len(group), 3, generator=rng, dtype=DOUBLE)
    noise = torch.randn(len(group), generator=rng, dtype=DOUBLE)
    return x, 0.3 * group.to(DOUBLE) * x[:, 0] + noise, group


def cvar(model: nn.Module, optimizer: Any) -> Any:
    return fcco.CVaRGroupDRO(model, optimizer, BLOCKS, 0.3)


def paper(model: nn.Module, optimizer: Any) -> Any:
    settings: dict[str, Any] = {"smoothing": 0.1, "gamma": 0.3, "correction": "auto", "read": "old"}
    return fcco.CVaRGroupDRO(model, optimizer, BLOCKS, 0.3, **settings)


def hard(model: nn.Module, optimizer: Any) -> Any:
    return fcco.CVaRGroupDRO(model, optimizer, BLOCKS, 0.3, smoothing=0.0, gamma=0.3)


def online(model: nn.Module, optimizer: Any) -> Any:
    return fcco.methods.ooa(model, optimizer, BLOCKS, ratio=0.3, step=0.05)


def limits(model: nn.Module, optimizer: Any) -> Any:
    return fcco.constrained(model, optimizer, LIMITS)


def call(objective: Any, model: Regression, x: Tensor, y: Tensor, group: Tensor) -> Tensor:
    if not isinstance(objective, fcco.constraints.ConstrainedObjective):
        return objective(lambda: model.losses(x, y), group)
    # Whole batches have all limits, in order; others name those that they have.
    rows = len(group) // len(LIMITS) * len(LIMITS)
    inner = lambda: model.limited(x[:rows], y[:rows])  # noqa: E731
    if len(group) >= BLOCKS * SAMPLES // 2 + 1:
        return objective(inner)
    index = group.unique()[:3] % len(LIMITS)

    def some() -> tuple[Tensor, Tensor]:
        loss, values = inner()
        return loss, values[index]

    return objective(some, index)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_thresholds_where_a_share_is_a_whole_number_of_groups(dtype):
    """0.1 * 30 rounds to more than 3 in some precisions: the fourth group must not count."""
    for number in range(1, 60):
        u = torch.randperm(number, generator=torch.Generator().manual_seed(number)).to(dtype)
        every = torch.ones(number, dtype=torch.bool)
        for count in range(1, number + 1, 3):
            ratio = count / number
            worst = u.sort(descending=True).values[:count].double()
            for table, seen in ((u, every), (u, None), (u.numpy(), None)):
                s, kink = cvar_rules.threshold(table, ratio, 0.0, seen)
                assert float(s) == worst[-1], (number, count)
                assert float(kink) == pytest.approx(1 / ratio, rel=1e-5)
                mean = float(cvar_rules.mean_of_worst(table, ratio, seen))
                assert mean == pytest.approx(worst.mean().item(), rel=1e-6, abs=1e-6)


# The host never waits.

EXEMPT = {
    "poll",  # looks at a flag that a GPU has sent to the host already
    "_refuse_nonfinite",  # does not ask a GPU
}
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "item", "is_nonzero", "equal")


class Operations(TorchDispatchMode):
    """Notes operations after which a host would have to wait for its GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in WAITS or (name.startswith("index") and self.chooses(args)):
            stack = traceback.extract_stack(limit=12)
            if not EXEMPT & {frame.name for frame in stack}:
                self.waits.append(name + "\n" + "".join(stack.format()))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def chooses(args: Any) -> bool:
        """Indexing with a mask looks at how many are true."""
        index = [each for arg in args if isinstance(arg, (list, tuple)) for each in arg]
        return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in index)


def measured(build: Callable[..., Any], size: int) -> list[str]:
    """Where the host would wait in the last step, on batches of so many blocks."""
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    objective, rng = build(model, optimizer), torch.Generator().manual_seed(1)
    for step in range(STEPS):
        call(objective, model, *batch(rng, size if step else BLOCKS)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with Operations() as found:
        call(objective, model, *batch(rng, size)).backward()
        objective.close()
    return found.waits


@pytest.mark.parametrize("size", [5, BLOCKS])
@pytest.mark.parametrize("build", [cvar, paper, hard, online, limits])
def test_on_a_gpu_the_host_waits_for_nothing(build, size, monkeypatch):
    monkeypatch.setattr("fcco.rules.arrays.USE_NUMPY", False)
    waits = measured(build, size)
    assert not waits, "\n".join(waits)
