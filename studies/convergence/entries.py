"""The methods: what each is made of, where it is legal, what it tunes and counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fcco.methods import Icppac, Oss
from fcco.tracker import theory_correction

from .engine import Runs
from .laws import expected_tracking_error
from .methods import (
    DoubleLoop,
    Lagrangian,
    Online,
    SingleLoop,
    Spider,
    Switching,
    Values,
    slopes_of,
)
from .problems import Problem

Build = Callable[[Problem, Values, int], Runs]


@dataclass(frozen=True)
class Entry:
    """One method.

    Args:
        name: as in the tables.
        build: makes the batched program of (problem, hyperparameters, seeds).
        tunes: the hyperparameters, searched over the ranges of `tuning`.
        kinds: the kinds of problem it can solve.
        needs: facts a problem must have: `"smooth_inner"`, `"convex"`.
        squared: it penalises the squared hinge, whose weight follows from the loop gain.
        scale: factor of the range of step sizes; 10 where no penalty multiplies the gradient.
        batches: independent batches per step.
        all_blocks: it cannot sample blocks.
        samples: samples per step by setting, where they are not `batches` x B1 x B2.
        starts: it starts a table of values from B2 samples of every block.
    """

    name: str
    build: Build
    tunes: tuple[str, ...]
    kinds: tuple[str, ...] = ("sum", "cvar", "constrained")
    needs: tuple[str, ...] = ()
    squared: bool = False
    scale: float = 1.0
    batches: int = 1
    all_blocks: bool = False
    samples: Callable[[Problem, Values], Tensor] | None = None
    starts: bool = True

    def number(self, problem: Problem) -> int:
        """Blocks per step."""
        return problem.total if self.all_blocks else problem.blocks

    def steps(self, steps: int) -> int:
        """Steps to run: fewer where each of them draws all blocks."""
        return steps // 4 if self.all_blocks else steps

    def tracked_noise(self, problem: Problem, h: Values) -> Tensor:
        """The standard deviation of a tracked value where nothing moves."""
        if "refresh_samples" in h:
            return problem.noise[0] * (h["refresh_samples"] * problem.samples).rsqrt()
        options = {"value_noise": problem.noise[0], "samples": problem.samples}
        gamma: float = h["gamma"]  # type: ignore[assignment]
        square = expected_tracking_error(
            gamma, problem.total, problem.blocks, correction=0.0, **options
        )
        return torch.as_tensor(square).sqrt()

    def lag(self, problem: Problem, h: Values) -> Tensor:
        """How many steps late the outer gradient acts.

        A moving average of u is late by 1/gamma visits, one with a correction only by the time
        between visits; the average v by another 1/beta.
        """
        late = 1 / h["gamma"]
        if "correction" in h:
            late = torch.full_like(late, problem.total / problem.blocks)
        return late + 1 / h["beta"]

    def cost(self, problem: Problem, h: Values) -> Tensor:
        """Samples per step of each setting, shape (settings,)."""
        if self.samples is not None:
            return self.samples(problem, h).squeeze(-1)
        number = len(next(iter(h.values())))
        per_step = float(self.batches * problem.blocks * problem.samples)
        return torch.full((number,), per_step, dtype=torch.float64)


def legal(entry: Entry, problem: Problem) -> bool:
    """Whether a problem meets the method's assumptions."""
    return problem.kind in entry.kinds and all(getattr(problem, fact) for fact in entry.needs)


def with_correction(problem: Problem, h: Values) -> Values:
    """Replace the choice of the correction (0 none, 1 auto, 2 theory) by its value."""
    gamma, choice = h["gamma"], h["correction"]
    n, blocks = problem.total, problem.blocks
    auto = (1 - gamma) * blocks / n
    full = torch.as_tensor(theory_correction(gamma, n, blocks))
    value = torch.where(choice == 1, auto, torch.where(choice == 2, full, 0.0))
    return {**h, "correction": value}


def with_extrapolation(problem: Problem, h: Values) -> Values:
    """Replace ALEXR's choice (0 the theory's theta, else theta itself) by theta gamma."""
    full = (1 - h["gamma"] * problem.blocks / problem.total).clamp(min=0.0)
    theta = torch.where(h["theta"] == 0, full, h["theta"])
    return {**h, "correction": theta * h["gamma"]}


def single(
    momentum: str, *, smoothed: bool = False, squared: bool = False, correct: bool = True
) -> Build:
    """A builder for one kind of the single loop."""

    def build(problem: Problem, h: Values, seeds: int) -> Runs:
        h = with_correction(problem, h) if correct else h
        slopes = slopes_of(problem, h, smoothed=smoothed, squared=squared)
        return SingleLoop(problem, h, slopes, seeds, momentum)

    return build


def _alexr(problem: Problem, h: Values, seeds: int) -> Runs:
    h = with_extrapolation(problem, h)
    return SingleLoop(problem, h, slopes_of(problem, h, smoothed=True), seeds, fresh=True)


def _alexr2(problem: Problem, h: Values, seeds: int) -> Runs:
    # The outer step alpha = nu, so that without momentum w moves to the end of the inner loop.
    h = {**with_extrapolation(problem, h), "lr": h["nu"]}
    return DoubleLoop(problem, h, slopes_of(problem, h, smoothed=True), seeds)


def _spider(problem: Problem, h: Values, seeds: int) -> Runs:
    return Spider(problem, h, slopes_of(problem, h, smoothed=True), seeds)


def _oss(problem: Problem, h: Values, seeds: int) -> Runs:
    rules = {int(t): Oss(proximal=1.0, inner_steps=int(t)) for t in h["round_steps"].unique()}
    return Lagrangian(problem, h, seeds, rules)


def _icppac(problem: Problem, h: Values, seeds: int) -> Runs:
    tau: float = h["tau"]  # type: ignore[assignment]
    rules = {
        int(t): Icppac(proximal=1.0, inner_steps=int(t), tau=tau) for t in h["round_steps"].unique()
    }
    return Lagrangian(problem, h, seeds, rules)


def _every(batches: int) -> Callable[[Problem, Values], Tensor]:
    """All constraints in each batch."""

    def samples(problem: Problem, h: Values) -> Tensor:
        return torch.full_like(h["lr"], batches * problem.samples * problem.total)

    return samples


def _switching_samples(problem: Problem, h: Values) -> Tensor:
    return problem.samples * (problem.total * h["value_samples"] + 1)


def _spider_samples(problem: Problem, h: Values) -> Tensor:
    refresh = h["refresh_samples"] / h["refresh"]
    return problem.samples * problem.total * (1 + h["value_samples"] + refresh)


def _online(geometry: Literal["kl", "euclidean"]) -> Build:
    return lambda problem, h, seeds: Online(problem, h, seeds, geometry)


_TRACKS = ("lr", "gamma", "correction")
_WIDTH, _GAIN = (*_TRACKS, "beta", "width"), (*_TRACKS, "beta", "gain")
_ONLINE: Any = {"kinds": ("cvar",), "starts": False}
_SQUARED: Any = {"kinds": ("constrained",), "squared": True}
_ALL: Any = {"kinds": ("constrained",), "starts": False, "all_blocks": True}
_SMOOTH: Any = {"needs": ("smooth_inner",)}
_LINEAR: Any = {"scale": 10.0}

_LIST = (
    Entry("SONEX", single("average", smoothed=True), _WIDTH, **_SMOOTH),
    Entry("SONEX+STORM", single("storm", smoothed=True), _WIDTH, **_SMOOTH),
    Entry("SONX", single("none"), _TRACKS),
    Entry("SONX+momentum", single("average"), (*_TRACKS, "beta")),
    Entry(
        "ALEXR2",
        _alexr2,
        ("eta", "gamma", "theta", "beta", "width", "nu", "inner_steps"),
        batches=2,
    ),
    Entry("ALEXR", _alexr, ("lr", "gamma", "theta", "width"), needs=("convex",), batches=2),
    Entry("OOA-KL", _online("kl"), ("lr", "beta", "weight_lr"), **_ONLINE),
    Entry("OOA-Euclidean", _online("euclidean"), ("lr", "beta", "weight_lr"), **_ONLINE),
    Entry(
        "SOX",
        single("average", squared=True, correct=False),
        ("lr", "gamma", "beta", "gain"),
        **_SQUARED,
    ),
    Entry("MSVR-v1", single("average", squared=True), _GAIN, **_SQUARED),
    Entry("MSVR-v2", single("storm", squared=True), _GAIN, **_SQUARED),
    Entry(
        "SSG",
        Switching,
        ("lr", "constraint_lr", "tolerance", "polyak", "value_samples"),
        batches=2,
        samples=_switching_samples,
        **_LINEAR,
        **_ALL,
    ),
    Entry(
        "Liu-Xu",
        _spider,
        ("lr", "width", "value_samples", "refresh_samples", "refresh"),
        batches=2,
        samples=_spider_samples,
        **_ALL,
    ),
    Entry("OSS", _oss, ("lr", "proximal", "round_steps"), samples=_every(1), **_LINEAR, **_ALL),
    Entry(
        "ICPPAC",
        _icppac,
        ("lr", "proximal", "round_steps", "tau"),
        scale=10.0,
        batches=2,
        samples=_every(2),
        **_ALL,
    ),
)
ENTRIES: dict[str, Entry] = {entry.name: entry for entry in _LIST}
