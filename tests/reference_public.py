"""Runs of `studies.convergence` by the library's public objectives, one setting and one seed at a
time: what its batched programs are held against.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fcco
from fcco.rules import cvar
from studies.convergence.entries import Entry
from studies.convergence.problems import Batch, Problem

Setting = dict[str, float]

STORM = ("SONEX+STORM", "MSVR-v2")
"""Methods that are a batched program of this comparison alone."""


@dataclass
class Player:
    """One run of a library objective on a problem, fed with the draws of the comparison.

    Args:
        independent: two batches per step.
        indexed: batches name their blocks; else they hold all.
    """

    problem: Problem
    setting: Setting
    model: nn.ParameterDict
    objective: Any
    independent: bool = False
    indexed: bool = True

    @property
    def w(self) -> Tensor:
        return self.model["w"]

    def values(self, batch: Batch) -> Tensor:
        """The inner values of a batch of one seed, as a user's function returns them."""
        return self.problem.values(self.w.view(1, 1, -1), batch)[0, 0]

    def closure(self, batch: Batch) -> Any:
        def inner() -> Any:
            values, loss = self.values(batch), self.problem.loss(self.w)
            return values if loss is None else (loss, values)

        return inner

    def warm_up(self, batch: Batch) -> None:
        """Start the tracker from one batch of every block."""
        self.objective.warm_up([(self.closure(batch), None)])
        if self.problem.kind == "cvar":
            # Before the first batch; the term itself would take its values into account.
            term = self.objective.term
            s, slope = cvar.threshold(term.table(), term.ratio, term.smoothing)
            term.load_state_dict({**term.state_dict(), "threshold": s, "tie_slope": slope})

    def step(self, batch: Batch, other: Batch) -> None:
        """One step of a user's loop."""
        more: dict[str, Any] = {"gradient": self.closure(other)} if self.independent else {}
        index = batch.blocks[0] if self.indexed else None
        optimizer = self.objective.optimizer
        optimizer.zero_grad()
        self.objective(self.closure(batch), index, **more).backward()
        optimizer.step()
        with torch.no_grad():
            self.w.copy_(self.problem.project(self.w))

    @property
    def point(self) -> Tensor:
        """The iterate that the comparison measures."""
        return self.w.detach()


class Unprepared(Player):
    """A method without a table to start."""

    def warm_up(self, batch: Batch) -> None:
        pass


class Rounds(Player):
    """A double loop: the iterate is where the last round ended."""

    def warm_up(self, batch: Batch) -> None:
        if isinstance(self.objective.optimizer, fcco.optim.ProximalPoint):
            super().warm_up(batch)
        self._anchor = self.w.detach().clone()

    def step(self, batch: Batch, other: Batch) -> None:
        super().step(batch, other)
        if self.objective.optimizer.inner_step == 0:
            self._anchor = self.w.detach().clone()

    @property
    def point(self) -> Tensor:
        return self._anchor


class Averaged(Unprepared):
    """Values of all blocks from larger batches, whose noise is scaled down (Liu-Xu)."""

    def number(self) -> float:
        """How many samples the next values are a mean of."""
        return self.setting["refresh_samples" if self.objective.refresh_due else "value_samples"]

    def step(self, batch: Batch, other: Batch) -> None:
        number = self.number()

        def inner() -> Any:
            exact = self.problem.exact(self.w)
            return self.problem.loss(self.w), exact + (self.values(batch) - exact) * number**-0.5

        optimizer = self.objective.optimizer
        optimizer.zero_grad()
        self.objective(inner, gradient=self.closure(other)).backward()
        self.note()
        optimizer.step()

    def note(self) -> None:
        """Called between the gradient and the step."""


class Feasible(Averaged):
    """SSG, whose output is the last iterate that seemed feasible."""

    def warm_up(self, batch: Batch) -> None:
        self._last = self.w.detach().clone()

    def number(self) -> float:
        return self.setting["value_samples"]

    def note(self) -> None:
        if self.objective.term.feasible:
            self._last = self.w.detach().clone()

    @property
    def point(self) -> Tensor:
        return self._last


def player(entry: Entry, problem: Problem, setting: Setting) -> Player:
    """The public objective of a method on a problem, with the hyperparameters of one setting."""
    model = nn.ParameterDict({"w": problem.start.clone()})
    return _MAKERS.get(entry.name, _tracking)(entry, problem, setting, model)


def _tracking(entry: Entry, problem: Problem, setting: Setting, model: Any) -> Player:
    """The methods with a tracker, by the recipes or by their parts."""
    n, beta, fresh = problem.total, setting.get("beta", 1.0), entry.batches > 1
    kind, optimizer = Player, fcco.optim.momentum_type(model.parameters(), setting["lr"], beta)
    if entry.name == "ALEXR2":
        kind, steps = Rounds, int(setting["inner_steps"])
        optimizer = fcco.optim.ProximalPoint(optimizer, setting["nu"], setting["eta"], steps)
    options: dict[str, Any] = {
        "gamma": setting["gamma"],
        "correction": setting.get("correction", 0.0),
        "read": "new" if fresh else "old",
    }
    smoothing = setting.get("smoothing", 0.0)
    if problem.kind == "cvar":
        objective: Any = fcco.CVaRGroupDRO(
            model, optimizer, n, problem.ratio, smoothing=smoothing, **options
        )
    else:
        outer = fcco.outer.SquaredHinge(setting["penalty"]) if entry.squared else problem.outer
        tracker = fcco.tracker.InnerTracker(n, dtype=torch.float64, **options)
        term = fcco.terms.CoupledTerm(outer, tracker, smoothing=smoothing)
        objective = fcco.Compositional(model, optimizer, term)
    return kind(problem, setting, model, objective, independent=fresh)


def _online(entry: Entry, problem: Problem, setting: Setting, model: Any) -> Player:
    optimizer = fcco.optim.momentum_type(model.parameters(), setting["lr"], setting["beta"])
    geometry: Any = "kl" if entry.name == "OOA-KL" else "euclidean"
    objective = fcco.methods.ooa(
        model, optimizer, problem.total, ratio=problem.ratio, step=setting["weight_lr"],
        geometry=geometry,
    )  # fmt: skip
    return Unprepared(problem, setting, model, objective)


def _limited(word: str, **settings: str) -> Any:
    """A method for limits on all blocks; `settings` name its numbers in the comparison."""

    def make(entry: Entry, problem: Problem, setting: Setting, model: Any) -> Player:
        optimizer = torch.optim.SGD(model.parameters(), lr=setting["lr"])
        more: dict[str, Any] = {k: setting[v] for k, v in settings.items() if v in setting}
        more |= {k: int(more[k]) for k in ("refresh_every", "inner_steps") if k in more}
        if word == "ssg":
            other = torch.optim.SGD(model.parameters(), lr=setting.get("constraint_lr", 1.0))
            more["constraint_optimizer"] = "polyak" if setting["polyak"] else other
        elif word == "recursive-hinge":
            assert isinstance(problem.outer, fcco.outer.Hinge)
            more["penalty"] = problem.outer.scale
        elif word == "oss":
            more["proximal"] *= 2
        objective = fcco.constrained(model, optimizer, problem.total, word, **more)
        if "inner_steps" not in more:
            return (Feasible if word == "ssg" else Averaged)(problem, setting, model, objective)
        return Rounds(problem, setting, model, objective, word == "icppac", indexed=False)

    return make


_ROUNDS = {"proximal": "proximal", "inner_steps": "round_steps"}
_MAKERS: dict[str, Any] = {
    "OOA-KL": _online,
    "OOA-Euclidean": _online,
    "SSG": _limited("ssg", threshold="tolerance"),
    "Liu-Xu": _limited("recursive-hinge", smoothing="smoothing", refresh_every="refresh"),
    "OSS": _limited("oss", **_ROUNDS),
    "ICPPAC": _limited("icppac", tau="tau", **_ROUNDS),
}
