"""A small problem for fleets, every method on it, and the same run by ordinary objects.

A network of two layers, a loss, and four constraints or groups, all in double precision. Each run
has data of its own. No direction of the weights is without effect: Adam would divide the rounding
noise of its gradient by itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import fcco
from fcco.fleet import Fleet, Member
from fcco.methods import ooa

DOUBLE, BLOCKS, PER_BLOCK, STEPS, RUNS = torch.float64, 4, 3, 25, 3
ROWS = BLOCKS * PER_BLOCK
NAMES = ("a", "b", "c", "d")
Made = tuple[torch.optim.Optimizer, Any]


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(DOUBLE)


@dataclass(frozen=True)
class Batches:
    """All batches of a run: x (T, N, 3), y (T, N), and the block of each row (T, N)."""

    x: Tensor
    y: Tensor
    block: Tensor

    @classmethod
    def of(cls, seed: int, sampled: bool, steps: int = STEPS) -> Batches:
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(steps, ROWS, 3, generator=draw, dtype=DOUBLE)
        noise = 0.1 * torch.randn(steps, ROWS, generator=draw, dtype=DOUBLE)
        block = torch.arange(ROWS).div(PER_BLOCK, rounding_mode="floor").expand(steps, -1)
        if sampled:  # two or three of the blocks, in any order, with any number of rows
            chosen = torch.stack([torch.randperm(BLOCKS, generator=draw) for _ in range(steps)])
            three = (torch.arange(steps)[:, None] % 3 == 0) & (torch.arange(ROWS) == 5)
            place = torch.randint(0, 2, (steps, ROWS), generator=draw)
            place[:, :2] = torch.tensor([1, 0])
            block = chosen.gather(1, place.masked_fill(three, 2))
        slope = torch.tensor([1.0, -0.5, 0.3], dtype=DOUBLE) * (1 + 0.1 * seed)
        return cls(x, x @ slope + noise + 0.3 * block, block)

    def at(self, step: int) -> dict[str, Tensor]:
        return {"x": self.x[step], "y": self.y[step], "block": self.block[step]}


def output(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).squeeze(-1)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (output(model, batch) - batch["y"]).square().mean()


def per_row(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """One value per row: a bound on the output that depends on the block."""
    sign = 1.0 - batch["block"].to(DOUBLE) % 2 * 1.5
    return torch.tanh(sign * output(model, batch)) + 0.2 * batch["x"][:, 0] - 0.05


def every(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return loss_of(model, batch), per_row(model, batch).view(BLOCKS, -1).mean(1)


def named(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    loss, values = every(model, batch)
    return loss, {name: values[NAMES.index(name)] for name in ("c", "a", "d", "b")}


def pairs(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    loss, values = every(model, batch)
    return loss, torch.stack([values, values.flip(0) - 0.1], 1)


def by_row(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return loss_of(model, batch), per_row(model, batch)


def with_outliers(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """Some batches have values that are far too large."""
    loss, values = by_row(model, batch)
    far = (batch["x"][:, 1] > 2).to(values)
    return loss + 100 * far.max(), values + 1000 * far


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return softplus(-batch["y"] * output(model, batch))


@dataclass(frozen=True)
class Case:
    """A method with the settings of each run.

    Args:
        make: from a model and the number of a run to its optimizer and objective.
        inner: the function.
        indexed: whether entries name their blocks.
        sampled: whether batches hold some of the blocks.
        independent: whether a second batch carries the gradient.
        of: states of the fleet by what the objective says of them.
    """

    make: Callable[[nn.Module, int], Made]
    inner: Callable[[nn.Module, Any], Any] = every
    indexed: bool = False
    sampled: bool = False
    independent: bool = False
    of: tuple[tuple[str, Callable[[Any], Tensor]], ...] = ()
    steps: int = STEPS
    network: Callable[[int], nn.Module] = network

    def member(self, run: int) -> Member:
        model = self.network(run)
        return Member(model, *self.make(model, run))

    def fleet(self, mode: str) -> Fleet:
        return Fleet([self.member(run) for run in range(RUNS)], self.inner, mode=mode)

    @functools.cached_property
    def batches(self) -> list[tuple[Batches, Batches]]:
        seeds = [(7 + run, 107 + run) for run in range(RUNS)]
        return [(self._draw(a), self._other(b, a)) for a, b in seeds]

    def _draw(self, seed: int) -> Batches:
        return Batches.of(seed, self.sampled, self.steps)

    def _other(self, seed: int, first: int) -> Batches:
        """An independent batch of the same blocks."""
        one, other = self._draw(first), self._draw(seed)
        return Batches(other.x, other.y, one.block)

    def stacked(self, step: int) -> tuple[dict[str, Tensor], Any, Any]:
        """The batch of all runs, the independent one and the blocks, where the case has them."""
        both = [[pair[k].at(step) for pair in self.batches] for k in (0, 1)]
        first, other = ({k: torch.stack([b[k] for b in rows]) for k in rows[0]} for rows in both)
        return first, other if self.independent else None, first["block"] if self.indexed else None

    def step_fleet(self, fleet: Fleet, step: int) -> Tensor:
        first, other, index = self.stacked(step)
        return fleet.step(first, other, index=index)

    def step_alone(self, member: Member, run: int, step: int) -> None:
        first, other = (each.at(step) for each in self.batches[run])
        model, optimizer, objective = member.model, member.optimizer, member.objective
        call = lambda batch: lambda: self.inner(model, batch)  # noqa: E731
        if objective is None:
            loss = self.inner(model, first)
            loss = loss[0] if isinstance(loss, tuple) else loss
        else:
            more: dict[str, Any] = {"gradient": call(other)} if self.independent else {}
            loss = objective(call(first), first["block"] if self.indexed else None, **more)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def alone(self) -> list[Member]:
        """The runs after all steps, each trained by itself."""
        members = [self.member(run) for run in range(RUNS)]
        for run, member in enumerate(members):
            for step in range(self.steps):
                self.step_alone(member, run, step)
        return members

    def held(self, member: Member) -> dict[str, Tensor]:
        parts = [p.detach().reshape(-1) for p in member.model.parameters()]
        found = {"weights": torch.cat(parts)}
        for name, read in self.of:
            found[name] = read(member.objective).detach().clone()
        if hasattr(member.optimizer, "anchored"):
            optimizer: Any = member.optimizer
            with optimizer.anchored():
                found["between"] = torch.cat([p.detach().reshape(-1) for p in parameters(member)])
        return found


def parameters(member: Member) -> list[Tensor]:
    return list(member.model.parameters())


def table(name: str) -> tuple[str, Callable[[Any], Tensor]]:
    """A table of the tracker, in the shape that rules see."""
    return name, lambda objective: torch.as_tensor(objective.term.tracker.views[name])


VALUES = (table("u"),)
TRACKED = (*VALUES, table("seen"))
LEARNED = (
    *TRACKED,
    *map(
        table,
        ("latest", "difference", "visits", "of_noise", "of_drift", "slow", "before", "pooled"),
    ),
)
DUAL = (("multiplier", lambda o: o.term.multiplier), ("last", lambda o: o.term.last))
GROUPS = (("group_weights", lambda o: o.group_weights()), *VALUES)
S = ("threshold", lambda objective: objective.threshold)
THRESHOLD = (*TRACKED, S)


def sgd(model: nn.Module, lr: float, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def momentum(model: nn.Module, run: int) -> torch.optim.Optimizer:
    return fcco.optim.momentum_type(model.parameters(), lr=0.02 + 0.005 * run, beta=0.3 + 0.2 * run)


def adam(model: nn.Module, run: int, **options: Any) -> torch.optim.Optimizer:
    betas = (0.9 - 0.1 * run, 0.99 + 0.003 * run)
    return torch.optim.Adam(
        model.parameters(), lr=0.004 + 0.003 * run, betas=betas, eps=10.0 ** (-6 - run), **options
    )


def method(build: Callable[..., Any]) -> Callable[..., Callable[[nn.Module, int], Made]]:
    """`make` of a case, from the objective that a model, a run and an optimizer make.

    The optimizer is the one to step, or is inside it.
    """

    def of(update: Callable[[nn.Module, int], Any], *given: Any, **options: Any) -> Any:
        def make(model: nn.Module, run: int) -> Made:
            objective = build(model, run, update(model, run), *given, **options)
            return objective.optimizer, objective

        return make

    return of


def plain(update: Callable[[nn.Module, int], torch.optim.Optimizer]) -> Case:
    return Case(lambda model, run: (update(model, run), None), inner=loss_of)


@method
def sonex(model: Any, run: int, optimizer: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "smoothing": 0.05 * (run + 1), "gamma": 0.2 + 0.2 * run, "correction": 0.3 * run + 0.1,
    }  # fmt: skip
    return fcco.methods.sonex(
        model, optimizer, fcco.outer.Hinge(1.0 + run), BLOCKS, **(settings | options)
    )


@method
def penalized(model: Any, run: int, optimizer: Any, limits: Any = None, **options: Any) -> Any:
    return fcco.constrained(
        model, optimizer, NAMES, "sonex", penalty=2.0 + run, gamma=0.3 + 0.2 * run,
        margin=0.01 * run, smoothing=[0.1, lambda t: 0.3 / math.sqrt(t + 1), 0.2][run],
        tolerance=(limits or [0.1, [0.0, 0.1, -0.1, 0.05], torch.tensor(0.02)])[run], **options,
    )  # fmt: skip


@method
def two_sided(model: Any, run: int, optimizer: Any) -> Any:
    outer = fcco.outer.TwoSidedHinge(0.02 * run, 2.0 + run)
    return fcco.constrained(
        model, optimizer, BLOCKS, "sonex", outer=outer, smoothing=0.1, gamma=0.5,
        correction="auto",
    )  # fmt: skip


@method
def alexr2(model: Any, run: int, optimizer: Any, lengths: Any = (4, 4, 4)) -> Any:
    return fcco.methods.alexr2(
        model, optimizer, fcco.outer.Hinge(1.0 + run), BLOCKS, smoothing=0.1 + 0.1 * run,
        nu=0.5 + run, eta=0.03 + 0.01 * run, inner_steps=lengths[run],
        gamma=0.5 + 0.1 * run, theta=0.1 * (run + 1),
    )  # fmt: skip


@method
def unsmoothed(model: Any, run: int, optimizer: Any, build: Any, outer: Any) -> Any:
    return build(model, optimizer, outer(0.5 + run), BLOCKS, gamma=0.2 + 0.3 * run)


BELOW: list[Any] = [
    [0.2, fcco.AtLeast(-0.4), fcco.AtLeast(-0.5), 0.2],
    [fcco.AtLeast(-0.5), 0.3, 0.2, fcco.AtLeast(-0.4)],
    [0.2, 0.3, fcco.AtLeast(-0.5), fcco.AtLeast(-0.4)],
]


@method
def multiplied(model: Any, run: int, optimizer: Any, limits: list[Any]) -> Any:
    """`fcco.constrained` without settings."""
    return fcco.constrained(model, optimizer, BLOCKS, tolerance=limits[run], margin=0.02 * run)


@method
def lagrangian(
    model: Any, run: int, optimizer: Any, numbers: Any, lengths: Any = (5, 5, 5), limits: Any = None
) -> Any:
    return fcco.constrained(
        model, optimizer, BLOCKS, "icppac", proximal=0.3 + 0.4 * run,
        inner_steps=lengths[run], margin=0.01 * run, **numbers(run),
        tolerance=(limits or [0.0, [0.02, 0.0, -0.1, 0.1], 0.05])[run],
    )  # fmt: skip


def constant(run: int) -> dict[str, Any]:
    return {"tau": 2.0 + 3 * run, "theta": 0.2 * run}


def cold(run: int) -> dict[str, Any]:
    return {"tau": 1.0 + run, "theta": 0.5}


@method
def switching(
    model: Any, run: int, optimizer: Any, threshold: Any = (0.0, 0.03, 0.06), limits: Any = None
) -> Any:
    tolerance: Any = (limits or [0.15, [0.1, 0.2, 0.05, 0.15], 0.0])[run]
    return fcco.constrained(
        model, optimizer, BLOCKS, "ssg", tolerance=tolerance, margin=0.02 * run,
        threshold=threshold if threshold == "auto" else threshold[run],
    )  # fmt: skip


def rising(model: nn.Module, run: int) -> torch.optim.Optimizer:
    return sgd(model, 0.02 + 0.01 * run)


@method
def online(model: Any, run: int, optimizer: Any, **options: Any) -> Any:
    return ooa(
        model, optimizer, BLOCKS, step=0.05 + 0.05 * run, ratio=[None, 0.5, 0.4][run],
        **options,
    )  # fmt: skip


@method
def cvar(model: Any, run: int, optimizer: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {"gamma": 0.2 + 0.2 * run} | options
    smoothing: Any = settings.pop("smoothing")
    if callable(smoothing):
        smoothing = smoothing(run)
    return fcco.CVaRGroupDRO(
        model, optimizer, BLOCKS, [0.3, 0.5, 0.8][run], smoothing=smoothing, **settings
    )


@method
def tracked_weights(model: Any, run: int, optimizer: Any) -> Any:
    """Weights that follow running averages of the losses."""
    average: Any = {"gamma": 0.3 + 0.2 * run, "correction": 0.0, "read": "new", "dtype": DOUBLE}
    tracker = fcco.tracker.InnerTracker(BLOCKS, **average)
    term = fcco.terms.GroupWeights(tracker, 0.1 + 0.1 * run, 0.5)
    return fcco.Compositional(model, optimizer, term)


@method
def automatic(
    model: Any, run: int, optimizer: Any, outer: Any, dim: int = 1, far: float = 0.1, **options: Any
) -> Any:
    """A coupled term whose gamma and lambda follow the error of its estimates."""
    own: Any = {"gamma": "auto", "read": "new", "dtype": DOUBLE, **options}
    tracker = fcco.tracker.InnerTracker(BLOCKS, dim, **own)
    term = fcco.terms.CoupledTerm(outer(run), tracker, smoothing="auto", tolerance=far * run)
    return fcco.Compositional(model, optimizer, term)


def at_its_limit(run: int) -> fcco.outer.OneSidedMCP:
    """Lambda would be above 1/weak_convexity."""
    return fcco.outer.OneSidedMCP(1.0 + run, 20.0)


def proximal(model: nn.Module, run: int) -> Any:
    return fcco.optim.ProximalPoint(
        momentum(model, run), 0.5 + run, 0.03 + 0.01 * run, [2, 3, 3][run]
    )


def positive(run: int) -> float:
    return 0.02 + 0.1 * run


def falling(run: int) -> Any:
    """Schedules of which two end at 0, at different steps."""
    return [lambda t: 0.1 / (t + 1), lambda t: max(0.0, 0.1 - 0.006 * t), lambda t: 0.2 * (t < 9)][
        run
    ]


def step(lr: float = 0.03) -> Any:
    return lambda model, run: sgd(model, lr * (1 + 0.5 * run))


SAMPLED: dict[str, Any] = {"inner": by_row, "indexed": True, "sampled": True}
GROUPED: dict[str, Any] = {"inner": losses, "indexed": True, "sampled": True}
FILLED: dict[str, Any] = {"inner": by_row, "indexed": True, "independent": True}
MULTIPLIED: dict[str, Any] = {
    "steps": 60,
    "of": (*LEARNED, *((name, lambda o, name=name: getattr(o.term, name))
                       for name in ("multiplier", "variance", "margin", "scales"))),
}  # fmt: skip
FALLING = (0.05, lambda t: 0.2 / math.sqrt(t + 1), lambda t: 0.1 * (t % 3))
UPPER: list[Any] = [-0.1, [0.0, 0.1, -0.2, 0.05], -0.3]
BETWEEN: list[Any] = [
    [-0.1, fcco.AtLeast(0.2), fcco.Equal(0.1), (0.0, 0.05)],
    [(-0.2, -0.1), 0.0, fcco.AtLeast(0.1), fcco.Equal(-0.1)],
    [fcco.Equal(0.2), (0.1, 0.3), -0.2, fcco.AtLeast(0.3)],
]
CASES: dict[str, Case] = {
    "penalized-between": Case(penalized(momentum, BETWEEN), **SAMPLED),
    "ssg-below": Case(switching(rising, limits=BELOW), of=VALUES),
    "ssg-measured": Case(switching(rising, "auto"), of=VALUES),
    "icppac-below": Case(lagrangian(lambda m, r: sgd(m, 0.05), constant, limits=BELOW), of=DUAL),
    "multipliers": Case(multiplied(momentum, UPPER), **MULTIPLIED),
    "multipliers-sampled": Case(multiplied(momentum, UPPER), **SAMPLED, **MULTIPLIED),
    "multipliers-outliers": Case(
        multiplied(momentum, UPPER), **SAMPLED | {"inner": with_outliers}, **MULTIPLIED
    ),
    "multipliers-filled": Case(multiplied(momentum, UPPER), **FILLED, **MULTIPLIED),
    "multipliers-between-sampled": Case(multiplied(momentum, BETWEEN), **SAMPLED, **MULTIPLIED),
    "sgd": plain(lambda m, r: sgd(m, 0.03 + 0.01 * r, weight_decay=0.05 * r)),
    "momentum": plain(lambda m, r: sgd(m, 0.02, momentum=0.6 + 0.1 * r, dampening=0.2 * r)),
    "adam": plain(lambda m, r: adam(m, r, weight_decay=0.02 * r)),
    "adamw": plain(lambda m, r: torch.optim.AdamW(m.parameters(), 0.004 + 0.002 * r,
                                                  weight_decay=0.3 * r)),
    "sonex-momentum": Case(sonex(momentum), of=TRACKED),
    "sonex-adam": Case(sonex(adam, correction="auto"), of=TRACKED, **SAMPLED),
    "sonex-theory": Case(sonex(momentum, correction="theory"), of=TRACKED, **SAMPLED),
    "sonex-new": Case(sonex(momentum, read="new"), of=TRACKED, independent=True, **SAMPLED),
    "sonex-named": Case(penalized(momentum), inner=named, of=TRACKED),
    "two-sided": Case(two_sided(adam), inner=pairs, of=TRACKED),
    "alexr2-momentum": Case(alexr2(momentum, (2, 4, 4)), of=TRACKED, independent=True),
    "alexr2-adam": Case(alexr2(adam, (3, 5, 1)), of=TRACKED, **SAMPLED),
    "sonx": Case(unsmoothed(rising, fcco.methods.sonx, fcco.outer.Absolute), of=TRACKED),
    "sox": Case(
        unsmoothed(rising, fcco.methods.sox, fcco.outer.SquaredHinge), of=TRACKED, **SAMPLED
    ),
    "icppac": Case(lagrangian(step(), constant, (3, 3, 6)), of=DUAL, independent=True),
    "icppac-cold": Case(lagrangian(momentum, cold), of=DUAL, **FILLED),
    "icppac-adam": Case(lagrangian(adam, constant), of=DUAL),
    "ssg": Case(switching(rising), of=VALUES, independent=True),
    "ssg-scheduled": Case(switching(rising, FALLING), of=VALUES),
    "ssg-rows": Case(switching(rising), of=VALUES, inner=by_row, indexed=True),
    "ooa-kl": Case(online(momentum), of=GROUPS, **GROUPED),
    "ooa-euclidean": Case(online(momentum, geometry="euclidean"), of=GROUPS, independent=True,
                          **GROUPED),
    "ooa-tracked": Case(
        tracked_weights(rising),
        of=(("group_weights", lambda o: o.term.weights), *VALUES), **GROUPED,
    ),
    "ctc-dro": Case(online(adam, gamma=0.4, offset=0.5), of=GROUPS, **GROUPED),
    "ooa-batch": Case(online(adam, scaling="batch"), of=GROUPS, **GROUPED),
    "cvar-annealed-old": Case(cvar(momentum, smoothing=falling, read="old"), of=TRACKED, **GROUPED),
    "cvar-annealed-new": Case(cvar(momentum, smoothing=falling, read="new"), of=THRESHOLD,
                              **GROUPED),
    "cvar-alexr2": Case(cvar(proximal, smoothing=positive), of=THRESHOLD, **GROUPED),
    "cvar-independent": Case(cvar(adam, smoothing=positive), of=TRACKED, **GROUPED,
                             independent=True),
    "cvar-automatic": Case(cvar(momentum, smoothing="auto", gamma="auto"),
                           of=(*LEARNED, S), **GROUPED),
    "cvar-automatic-gamma": Case(cvar(adam, smoothing=0.0, gamma="auto"), of=LEARNED, **GROUPED),
    "all-blocks": Case(
        automatic(momentum, lambda run: fcco.outer.Hinge(1.0 + run), sampled=False),
        of=LEARNED, inner=by_row, indexed=True,
    ),
    "coupled-automatic": Case(
        automatic(momentum, lambda run: fcco.outer.Hinge(1.0 + run)), of=LEARNED,
                              **SAMPLED),
    "coupled-automatic-pairs": Case(
        automatic(adam, lambda run: fcco.outer.TwoSidedHinge(0.1, 2.0 + run), dim=2, far=0.0),
        inner=pairs, of=LEARNED),
    "coupled-automatic-weak": Case(automatic(momentum, at_its_limit), of=TRACKED, **SAMPLED),
    "cvar-corrected": Case(cvar(momentum, smoothing=positive, correction="auto", read="old"),
                           of=TRACKED, **GROUPED),
    "cvar-every": Case(cvar(momentum, smoothing=0.0, correction=0.0), of=TRACKED),
}  # fmt: skip
for read, smoothing in (("old", 0.0), ("old", positive), ("new", 0.0), ("new", positive)):
    # A term moves s after the step, a fleet before the next one: with the old u it shows one step
    # later.
    kind = "hard" if smoothing == 0 else "smooth"
    CASES[f"cvar-{kind}-{read}"] = Case(
        cvar(momentum, smoothing=smoothing, read=read),
        of=THRESHOLD if read == "new" else TRACKED, **GROUPED,
    )  # fmt: skip
