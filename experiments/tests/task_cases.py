"""What the trainings of all tasks are looked at with."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def one_thread():
    """So that figures do not depend on the machine; for every test of a file that imports it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def steps(run: Any, number: int) -> Any:
    """Make some steps."""
    for _ in range(number):
        run.step()
    return run


def weights(run: Any) -> Tensor:
    """All weights in one vector."""
    return torch.cat([each.detach().reshape(-1).clone() for each in run.model.parameters()])


def stored(state: Any) -> Any:
    """What comes back from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def same(one: Any, other: Any) -> bool:
    """Whether two states are bitwise equal, but for seconds."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same(one[key], other[key]) for key in one if key != "seconds"
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other
