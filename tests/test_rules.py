"""Thresholds by sorting, and rules on a GPU, where the host never waits for a value."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from test_replay import batches, constrained, cvar, hard, mixed, ooa, paper, read_new, sonex
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fcco.rules import cvar as cvar_rules

DOUBLE = torch.float64


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


@pytest.mark.parametrize("rows", [30, 8])
@pytest.mark.parametrize("build", [cvar, paper, hard, read_new, ooa, constrained, mixed, sonex])
def test_on_a_gpu_the_host_waits_for_nothing(build, rows, monkeypatch):
    monkeypatch.setattr("fcco.rules.arrays.USE_NUMPY", False)
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    objective, function = build(model, optimizer)
    *first, (x, index) = [(x, None if build is mixed else ids) for x, ids in batches(rows)[:20]]
    for some, ids in first:
        objective(lambda some=some: function(model, some), ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    with Operations() as found:
        objective(lambda: function(model, x), index).backward()
        objective.close()
    assert not found.waits, "\n".join(found.waits)
