"""How often each finding of `report()` is right: false alarms, and detections.

In the situations `NULL` nothing is wrong: groups that are equally good, in models that stand still
or learn; groups that must trade off; limits that can be met. A report is made several times in a
run, and any finding is a false alarm. Each situation of `WRONG` is made for one finding. Values
come from random numbers, so that what is true is known. The slow tests count in 50 runs each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from problems import Point, take_step
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import fcco
from fcco.groups import GroupMeans

Kinds = set[str]
Situation = Callable[[int], Kinds]


def kinds(report: Any) -> Kinds:
    return {finding.kind for finding in report.findings}


def given_losses(
    number: int,
    in_batch: int,
    loss: Callable[[int, Tensor], Tensor],
    steps: int,
    seed: int,
    *,
    per_group: int = 4,
    spread: float = 1.0,
    **settings: Any,
) -> Iterator[tuple[int, fcco.CVaRGroupDRO, torch.Generator]]:
    """Groups with losses `loss(step, groups)` whatever the model does, after each step.

    Those of samples are spread by `spread` of their mean, as exponential numbers are.
    """
    draw, model = torch.Generator().manual_seed(seed), Point([0.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dro = fcco.CVaRGroupDRO(model, optimizer, number, 0.2, **settings)
    for step in range(1, steps + 1):
        index = torch.randperm(number, generator=draw)[:in_batch].repeat_interleave(per_group)
        noise = torch.empty(len(index), dtype=torch.float64).exponential_(generator=draw) - 1
        values = loss(step, index) * (1 + spread * noise)
        dro(lambda values=values: values + 0 * model.w, index)
        dro.close()  # as after a step of the optimizer
        yield step, dro, draw


def equal_groups(
    number: int, in_batch: int, fall: float, seed: int, steps: int = 200, per_group: int = 4
) -> Kinds:
    """All groups have one loss, which falls by a share of itself in the run."""

    def loss(step: int, index: Tensor) -> Tensor:
        return torch.full(index.shape, 1 - fall * step / steps, dtype=torch.float64)

    found: Kinds = set()
    for step, dro, draw in given_losses(number, in_batch, loss, steps, seed, per_group=per_group):
        if step in (steps // 5, steps // 2, steps):
            fresh = torch.empty(number, 20).exponential_(generator=draw).mean(1)
            means = GroupMeans(
                fresh * loss(step, fresh), torch.arange(number), torch.full((number,), 20)
            )
            found |= kinds(dro.report(held_out=means)) - {"never-seen"}
    return found


def trade_off(rate: float, momentum: float, seed: int, **settings: Any) -> Kinds:
    """Eight groups that want eight places."""
    draw, model = torch.Generator().manual_seed(seed), Point(torch.zeros(4))
    places = torch.randn(8, 4, generator=draw, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    dro = fcco.CVaRGroupDRO(model, optimizer, 8, 0.25, **settings)
    index = torch.arange(8).repeat_interleave(4)
    for _ in range(200):
        noise = 0.3 * torch.randn(32, 4, generator=draw, dtype=torch.float64)
        take_step(dro, lambda e=noise: (model.w - places[index] + e).square().sum(1) / 2, index)
    return kinds(dro.report())


def network(
    optimizer: Callable[..., torch.optim.Optimizer], groups: int, seed: int, **rate: float
) -> Kinds:
    """A network that learns sixteen kinds of labels, with batches of 64 samples."""
    draw, found = torch.Generator().manual_seed(seed), set[str]()
    group, x = torch.arange(2000) % 16, torch.randn(2000, 10, generator=draw)
    tilt = 0.7 * torch.randn(16, 10, generator=draw) + torch.randn(10, generator=draw)
    y = ((x * tilt[group]).sum(1) + 0.5 * torch.randn(2000, generator=draw) > 0).float()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
    dro = fcco.CVaRGroupDRO(model, optimizer(model.parameters(), **rate), 16, 0.15)
    sampler = fcco.GroupBatchSampler(
        group, groups_per_batch=groups, per_group=64 // groups, seed=seed
    )
    for step in range(1, 151):
        rows = sampler.draw()
        take_step(
            dro,
            lambda rows=rows: binary_cross_entropy_with_logits(
                model(x[rows]), y[rows], reduction="none"
            ),
            group[rows],
        )
        if step in (50, 100, 150):
            found |= kinds(dro.report())
    return found


def limited(
    limits: Any,
    values: Callable[[Tensor], Tensor],
    steps: int,
    seed: int,
    noise: float = 0.1,
    parameters: int = 1,
    times: Iterable[int] = (),
    goal: float = 1.0,
    with_function: bool = False,
    **settings: Any,
) -> Kinds:
    """Minimise |w - goal|^2 / 2 under limits of values with noise."""
    draw, model, found = (
        torch.Generator().manual_seed(seed),
        Point(torch.zeros(parameters)),
        set[str](),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    names = [str(k) for k in range(len(values(model.w)))]
    named: dict[str, Any] = dict.fromkeys(names, limits)
    objective = fcco.constrained(model, optimizer, named, **settings)

    def function(e: Tensor) -> Any:
        parts = values(model.w) + e[1:]
        return (model.w - goal + e[0]).square().sum() / 2, dict(zip(names, parts, strict=True))

    for step in range(1, steps + 1):
        e = noise * torch.randn(1 + len(names), generator=draw, dtype=torch.float64)
        take_step(objective, lambda e=e: function(e))
        if step in (*times, steps):
            once = (lambda e=e: function(e)) if with_function else None
            found |= kinds(objective.report(function=once))
    return found


def overfitted(seed: int) -> Kinds:
    """Two of sixteen groups have a loss of 1 on twenty samples apart, 0.05 in training."""

    def loss(_: int, index: Tensor) -> Tensor:
        return torch.where(index < 2, 0.05, 1.0).double()

    *_, (_, dro, draw) = given_losses(16, 8, loss, 60, seed)
    apart = torch.empty(16, 20).exponential_(generator=draw).mean(1)
    means = GroupMeans(apart, torch.arange(16), torch.full((16,), 20))
    return kinds(dro.report(held_out=means))


def last(*arguments: Any, **settings: Any) -> Kinds:
    """What is found after the last step of `given_losses`."""
    *_, (_, dro, _) = given_losses(*arguments, **settings)
    return kinds(dro.report())


def never_drawn(seed: int) -> Kinds:
    dro = fcco.CVaRGroupDRO(
        model := Point([0.0]), torch.optim.SGD(model.parameters(), lr=0.0), 4, 0.5
    )
    losses = torch.rand(3, generator=torch.Generator().manual_seed(seed)).double()
    take_step(dro, lambda: losses + 0 * model.w, [0, 1, 3])
    return kinds(dro.report())


def either_label(_: int, index: Tensor) -> Tensor:
    return torch.where(index % 2 == 0, 0.69, 0.78).double()


def ones(_: int, index: Tensor) -> Tensor:
    return torch.ones(index.shape, dtype=torch.float64)


def apart(_: int, index: Tensor) -> Tensor:
    return 1 + index / 10


NULL: dict[str, Situation] = {
    "16 groups, all in a batch, still": partial(equal_groups, 16, 16, 0.0),
    "16 groups, 4 in a batch, learning": partial(equal_groups, 16, 4, 0.5, per_group=16),
    "200 groups, 8 in a batch, learning": partial(equal_groups, 200, 8, 0.2),
    "200 groups, 32 in a batch, still": partial(equal_groups, 200, 32, 0.0),
    "1,000 groups, 8 in a batch, still": partial(equal_groups, 1000, 8, 0.0, steps=400),
    "1,000 groups, 32 in a batch, learning": partial(equal_groups, 1000, 32, 0.2, per_group=2),
    "8 groups that trade off": partial(trade_off, 0.02, 0.9),
    "a network, Adam": partial(network, torch.optim.Adam, 16, lr=0.003),
    "a network, SGD with momentum": partial(network, torch.optim.SGD, 4, lr=0.03, momentum=0.9),
    "2 limits": partial(limited, 0.7, lambda w: w, 300, parameters=2, times=[200]),
    "20 limits": partial(limited, 0.7, lambda w: w, 200, parameters=20, times=[150]),
    "200 limits that do not matter": partial(limited, 1.5, lambda w: w, 120, parameters=200),
}


def rising(step: int, index: Tensor) -> Tensor:
    return 1 + 0.05 * step + 0 * index


def pair(w: Tensor) -> Tensor:
    return torch.cat([w, -w])


def above(w: Tensor) -> Tensor:
    return 0.5 + w.square()


width = fcco.Width
large_lr = partial(trade_off, 0.3, 0.9, smoothing=width(0.1))
penalised = {"method": "sonex", "penalty": 4.0, "smoothing": width(0.1)}
given = {"noise": 0.02, "goal": 0.0, "with_function": True}
WRONG: dict[str, tuple[str, Situation]] = {
    "a group that never comes": ("never-seen", never_drawn),
    "a constant output": ("collapse", partial(last, 16, 4, ones, 80, spread=0.01)),
    "a constant output, two labels": (
        "collapse",
        partial(last, 16, 4, either_label, 80, spread=0.01),
    ),
    "a learning rate that is too large": ("swinging", large_lr),
    "overfitted groups": ("overfitted", overfitted),
    "a small gamma while losses move": (
        "estimates-lag",
        partial(last, 200, 16, rising, 80, gamma=0.05, spread=0.1),
    ),
    "a narrow zone": ("zone-below-noise", partial(last, 16, 8, ones, 60, smoothing=width(0.02))),
    "a wide zone": (
        "no-group-at-cap",
        partial(last, 16, 8, apart, 60, spread=0.1, smoothing=width(20.0)),
    ),
    "an impossible limit": ("multiplier-rising", partial(limited, 0.2, above, 150)),
    "an impossible pair": ("multiplier-rising", partial(limited, -0.2, pair, 150)),
    "an impossible pair, with the function": (
        "constraints-oppose",
        partial(limited, -0.2, pair, 110, **given),
    ),
    "a rate that does not change": (
        "value-constant",
        partial(limited, 0.5, lambda w: 1 + 0 * w, 110, noise=0.0),
    ),
    "an impossible limit under a penalty": (
        "multiplier-at-cap",
        partial(limited, 0.2, above, 110, **penalised),
    ),
}


@pytest.mark.parametrize("name", NULL)
def test_no_false_alarm(name: str) -> None:
    assert NULL[name](0) == set()


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str) -> None:
    kind, situation = WRONG[name]
    assert kind in situation(0)


@pytest.mark.slow
@pytest.mark.parametrize("name", NULL)
def test_false_alarms_are_rare(name: str) -> None:
    assert sum(bool(NULL[name](seed)) for seed in range(50)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_nearly_always_found(name: str) -> None:
    kind, situation = WRONG[name]
    assert sum(kind in situation(seed) for seed in range(50)) >= 45
