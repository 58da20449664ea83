"""A run that is saved and resumed in new objects equals the uninterrupted run bitwise."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fcco

GROUPS, FEATURES = 5, 3
_RNG = np.random.default_rng(0)
ID = torch.as_tensor(np.repeat(np.arange(GROUPS), 8))
X = torch.as_tensor(_RNG.normal(size=(GROUPS * 8, FEATURES)), dtype=torch.float32)
Y = torch.as_tensor(_RNG.normal(size=GROUPS * 8), dtype=torch.float32) + 0.3 * ID

Objective = Callable[[nn.Module], fcco.Compositional]


class Net(nn.Module):
    """Dropout and batch normalisation: random state and buffers that must come back too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).squeeze(1)


@dataclass
class Run:
    """All objects of a training run, by name, and how to step them."""

    build: Objective
    rule: str | None = None
    objects: dict[str, Any] = field(init=False)
    step: int = 0

    def __post_init__(self) -> None:
        model = Net()
        objective = self.build(model)
        optimizer = objective.optimizer
        assert isinstance(optimizer, torch.optim.Optimizer)
        self.objects = {
            "model": model,
            "objective": objective,
            "optimizer": optimizer,
            "sampler": fcco.GroupBatchSampler(ID, 3, 2, seed=3),
            "schedule": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98),
        }
        if self.rule is not None:
            stepped = getattr(optimizer, "outer", optimizer)
            self.objects["output"] = fcco.optim.OutputIterate(stepped, self.rule)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["objects"][name]

    def advance(self, steps: int) -> Run:
        for _ in range(steps):
            rows = torch.tensor(self.sampler.draw())
            losses = lambda rows=rows: (self.model(X[rows]) - Y[rows]).square()  # noqa: E731
            self.objective(losses, ID[rows]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.step += 1
        return self

    def save(self) -> bytes:
        states = {name: each.state_dict() for name, each in self.objects.items()}
        file = io.BytesIO()
        torch.save(states | {"random": torch.get_rng_state(), "step": self.step}, file)
        return file.getvalue()

    def load(self, saved: bytes) -> Run:
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for name, each in self.objects.items():
            each.load_state_dict(states[name])
        torch.set_rng_state(states["random"])
        self.step = states["step"]
        return self


def difference(one: Any, other: Any) -> float:
    """Largest difference of two saved states; inf when they differ in kind."""
    if isinstance(one, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return np.inf
        return 0.0 if torch.equal(one, other) else float((one - other).abs().double().max())
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return np.inf
        return max([0.0, *(difference(one[k], other[k]) for k in one)])
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return np.inf
        return max([0.0, *(difference(a, b) for a, b in zip(one, other, strict=True))])
    return 0.0 if one == other or (one != one and other != other) else np.inf


def states(saved: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(saved), weights_only=True)


def check(run: Callable[[], Run], cuts: tuple[int, ...], total: int = 14) -> None:
    torch.manual_seed(5)
    whole = states(run().advance(total).save())
    for cut in cuts:
        torch.manual_seed(5)
        saved = run().advance(cut).save()
        torch.manual_seed(99)
        resumed = run().load(saved)
        assert difference(states(resumed.save()), states(saved)) == 0, "loading is lossless"
        assert difference(states(resumed.advance(total - cut).save()), whole) == 0


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02)


def sonex(**options: Any) -> Objective:
    return lambda model: fcco.methods.sonex(
        model, sgd(model), fcco.outer.Absolute(2.0), GROUPS, smoothing=0.8, gamma=0.3,
        correction=0.6, **options,
    )  # fmt: skip


def test_alexr2_resumes_bitwise_also_within_a_round():
    build = lambda model: fcco.methods.alexr2(  # noqa: E731
        model, adam(model), fcco.outer.Absolute(2.0), GROUPS, smoothing=0.8, nu=0.5, eta=0.05,
        inner_steps=lambda t: 2 + t % 3, theta=0.6,
    )  # fmt: skip
    check(lambda: Run(build, "average"), (3, 4, 11))


@pytest.mark.parametrize("rule", ["random", "average"])
def test_the_output_iterate_resumes_bitwise(rule):
    check(lambda: Run(sonex(), rule), (1, 6))


@pytest.mark.parametrize("name", ["objective", "output"])
def test_a_checkpoint_in_memory_does_not_change_while_training_goes_on(name):
    saver = Run(sonex(), "average").advance(5)
    saved = copy.deepcopy(getattr(saver, name).state_dict())
    part = saver.objective.previous if name == "objective" else saver.output
    live = part.state_dict()  # what the library adds to buffers is a copy
    reference, copied = copy.deepcopy(saved), copy.deepcopy(live)
    other = Run(sonex(), "average")
    getattr(other, name).load_state_dict(saved)
    other.advance(3)
    saver.advance(3)
    assert difference(dict(saved), dict(reference)) == 0
    assert difference(dict(live), dict(copied)) == 0
    assert difference(dict(getattr(other, name).state_dict()), dict(reference)) > 0


def test_a_checkpoint_of_a_float32_run_loads_into_a_wider_tracker():
    saved = states(Run(sonex()).advance(4).save())["objective"]
    other = Run(sonex(dtype=torch.float64))
    other.objective.load_state_dict(saved)
    value = other.objective.term.tracker.value
    key = next(k for k in saved if k.endswith("tracker.value"))
    assert value.dtype == torch.float64 and torch.equal(value, saved[key].double())
