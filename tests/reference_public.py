"""Runs of `studies.convergence` by the library's public objectives, one setting and one seed at a
time: what its batched programs are held against.
"""

from __future__ import annotations

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


class Player:
    """One run of a library objective on a problem, fed with the draws of the comparison."""

    def __init__(self, problem: Problem, setting: Setting) -> None:
        self.problem, self.setting = problem, setting
        self.model = nn.ParameterDict({"w": problem.start.clone()})
        self.objective: Any = None
        self.independent = self.indexed = False

    @property
    def w(self) -> Tensor:
        """The parameters of the model."""
        return self.model["w"]

    def use(self, objective: Any, *, independent: bool = False, indexed: bool = True) -> Player:
        """Take an objective: with two batches per step or one, with an index or all blocks."""
        self.objective, self.independent, self.indexed = objective, independent, indexed
        return self

    def values(self, batch: Batch) -> Tensor:
        """The inner values of a batch of one seed, as a user's function returns them."""
        return self.problem.values(self.w.view(1, 1, -1), batch)[0, 0]

    def closure(self, batch: Batch) -> Any:
        """The user's function of a batch."""

        def inner() -> Any:
            values, loss = self.values(batch), self.problem.loss(self.w)
            return values if loss is None else (loss, values)

        return inner

    def warm_up(self, batch: Batch) -> None:
        """Start the tracker from one batch of every block, where there is one to start."""
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


class Unprepared(Player):
    """A method without a table to start."""

    def warm_up(self, batch: Batch) -> None:
        pass


class Averaged(Unprepared):
    """Values of all blocks from larger batches, whose noise is scaled down."""

    def number(self) -> float:
        """How many samples the next values are a mean of."""
        refresh = getattr(self.objective, "refresh_due", False)
        return self.setting["refresh_samples" if refresh else "value_samples"]

    def closure(self, batch: Batch) -> Any:
        scale = self.number() ** -0.5

        def inner() -> Any:
            exact = self.problem.exact(self.w)
            return self.problem.loss(self.w), exact + (self.values(batch) - exact) * scale

        return inner

    def step(self, batch: Batch, other: Batch) -> None:
        optimizer = self.objective.optimizer
        optimizer.zero_grad()
        gradient = super(Unprepared, self).closure(other)
        self.objective(self.closure(batch), gradient=gradient).backward()
        self._note()
        optimizer.step()

    def _note(self) -> None:
        """Called between the gradient and the step."""


class Feasible(Averaged):
    """SSG, whose output is the last iterate that seemed feasible."""

    def warm_up(self, batch: Batch) -> None:
        self._last = self.w.detach().clone()

    def _note(self) -> None:
        if self.objective.term.feasible:
            self._last = self.w.detach().clone()

    @property
    def point(self) -> Tensor:
        return self._last


def player(entry: Entry, problem: Problem, setting: Setting) -> Player:
    """The public objective of a method on a problem, with the hyperparameters of one setting."""
    return _MAKERS.get(entry.name, _tracking)(entry, problem, setting)


def _tracking(entry: Entry, problem: Problem, setting: Setting) -> Player:
    """The methods with a tracker, by the recipes or by their parts."""
    double = entry.name == "ALEXR2"
    run = Rounds(problem, setting) if double else Player(problem, setting)
    model, n, beta = run.model, problem.total, setting.get("beta", 1.0)
    optimizer: Any = fcco.optim.momentum_type(model.parameters(), setting["lr"], beta)
    if double:
        optimizer = fcco.optim.ProximalPoint(
            optimizer, setting["nu"], setting["eta"], int(setting["inner_steps"])
        )
    fresh = entry.batches > 1
    options: dict[str, Any] = {
        "gamma": setting["gamma"],
        "correction": setting.get("correction", 0.0),
        "read": "new" if fresh else "old",
    }
    smoothing = setting.get("smoothing", 0.0)
    if problem.kind == "cvar":
        dro = fcco.CVaRGroupDRO(model, optimizer, n, problem.ratio, smoothing=smoothing, **options)
        return run.use(dro, independent=fresh)
    outer = fcco.outer.SquaredHinge(setting["penalty"]) if entry.squared else problem.outer
    tracker = fcco.tracker.InnerTracker(n, dtype=torch.float64, **options)
    term = fcco.terms.CoupledTerm(outer, tracker, smoothing=smoothing)
    return run.use(fcco.Compositional(model, optimizer, term), independent=fresh)


def _online(entry: Entry, problem: Problem, setting: Setting) -> Player:
    run = Unprepared(problem, setting)
    optimizer = fcco.optim.momentum_type(run.model.parameters(), setting["lr"], setting["beta"])
    geometry: Any = "kl" if entry.name == "OOA-KL" else "euclidean"
    step = setting["weight_lr"]
    return run.use(
        fcco.methods.ooa(
            run.model, optimizer, problem.total, ratio=problem.ratio, step=step, geometry=geometry
        )
    )


def _switching(entry: Entry, problem: Problem, setting: Setting) -> Player:
    run = Feasible(problem, setting)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=setting["lr"])
    other: Any = "polyak"
    if not setting["polyak"]:
        other = torch.optim.SGD(run.model.parameters(), lr=setting["constraint_lr"])
    threshold = setting["tolerance"]
    return run.use(
        fcco.constrained(
            run.model,
            optimizer,
            problem.total,
            "ssg",
            threshold=threshold,
            constraint_optimizer=other,
        )
    )


def _spider(entry: Entry, problem: Problem, setting: Setting) -> Player:
    run = Averaged(problem, setting)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=setting["lr"])
    hinge = problem.outer
    assert isinstance(hinge, fcco.outer.Hinge)
    objective = fcco.constrained(
        run.model,
        optimizer,
        problem.total,
        "recursive-hinge",
        penalty=hinge.scale,
        smoothing=setting["smoothing"],
        refresh_every=int(setting["refresh"]),
    )
    return run.use(objective)


def _lagrangian(entry: Entry, problem: Problem, setting: Setting) -> Player:
    run = Rounds(problem, setting)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=setting["lr"])
    steps, coefficient = int(setting["round_steps"]), setting["proximal"]
    settings: Any = {"proximal": coefficient, "inner_steps": steps, "tau": setting.get("tau")}
    if entry.name == "OSS":
        settings = {"proximal": 2 * coefficient, "inner_steps": steps}
    word = entry.name.lower()
    objective = fcco.constrained(run.model, optimizer, problem.total, word, **settings)
    return run.use(objective, independent=word == "icppac", indexed=False)


_MAKERS: dict[str, Any] = {
    "OOA-KL": _online,
    "OOA-Euclidean": _online,
    "SSG": _switching,
    "Liu-Xu": _spider,
    "OSS": _lagrangian,
    "ICPPAC": _lagrangian,
}
