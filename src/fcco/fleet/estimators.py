"""Estimators of the gradient from tracked values, one for each kind of term.

An estimator holds what all runs of a fleet share; `of` reads it from a term, with the numbers and
the state of one run. `gradient` finds G_t of one run; the mathematics is in `fcco.rules`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..methods.switching import SwitchingTerm
from ..outer import MoreauEnvelope
from ..rules import cvar, group_weights, multipliers, switching, track
from ..rules.arrays import per_row
from ..rules.multipliers import Constraints, Multipliers, Scales
from ..rules.track import Pooled, Rows, Statistics, Track, Visit, automatic_width
from ..terms import CoupledTerm, CVaRTerm, GroupWeights, MultiplierTerm
from ..terms.coupled import OuterTerm, block_mean, widest
from ..terms.limits import Limits, excess, side
from ..tracker import InnerTracker
from .numbers import Numbers, Template
from .run import Estimate, Forward, Run, State, Unsupported, block_means

__all__ = ["CVaR", "Coupled", "Multiplied", "PlainLoss", "Switch", "Weighted", "limits_of"]

ERROR = "error."
"""Prefix of the statistics of the error of u in the state."""

Parts = tuple[Any, Numbers, State]
"""An estimator, and the numbers and the state of a run."""


@dataclass(frozen=True)
class PlainLoss:
    """The gradient of the loss of a batch."""

    needs_previous = False

    def gradient(self, run: Run) -> Estimate:
        no_blocks = run.state["weights"][:0]
        return run.differentiate(no_blocks).estimate(no_blocks, {})


class Updated(NamedTuple):
    """The result of a tracking update of one run, with a row for every block."""

    u: Tensor  # what the gradient reads; the old value of blocks that are not in the batch
    seen: Tensor  # which blocks have a value now
    came: Tensor | None  # which blocks are in the batch; None for all
    blocks: int | Tensor  # B1, how many these are
    visit: Visit
    state: State
    checked: tuple[Tensor | None, ...]  # what must be finite
    forward: Forward  # the pass that carries the gradient


@dataclass(frozen=True)
class Tracking:
    """An estimator that reads the values of an `InnerTracker`."""

    rule: Track  # without its numbers
    read: str  # which u enters the gradient
    log: bool  # values and u are logarithms
    sampled: bool  # a batch may be without some of the blocks
    measured: bool  # the error of u is estimated
    needs_previous: bool  # it uses values at w_{t-1}

    @classmethod
    def reading(cls, tracker: InnerTracker, *more: Any) -> Parts:
        """The estimator with its own fields `more`, and the numbers and state of the tracker."""
        skips = tracker.on_nonfinite == "skip"
        refused = {"refresh_every": tracker.refresh_every, "on_nonfinite='skip'": skips or None}
        for option, given in {**refused, "offset": tracker.offset}.items():
            if given is not None:
                raise Unsupported(f"A fleet has no tracker with `{option}`.")
        rule, numbers = tracker.rule, {}
        if rule.gamma is not None:
            numbers["gamma"] = rule.gamma
        if not isinstance(rule.correction, str):
            numbers["correction"] = rule.correction
            rule = dataclasses.replace(rule, correction=0.0)
        state = {"tracked": tracker.rows.clone(), "seen": tracker.seen.clone()}
        measured = tracker.estimate is not None
        for name, value in tracker.estimate.named_buffers() if tracker.estimate else ():
            state[ERROR + name] = value.clone()
        log = rule.formula is track.log_track
        shared = (dataclasses.replace(rule, gamma=None), tracker.read, log, tracker.sampled)
        return cls(*shared, measured, tracker.needs_previous, *more), numbers, state

    def step(self, run: Run) -> Updated:
        """The passes of a step, and its tracking update (Alg. 1, line 7)."""
        state, numbers, index = run.state, run.numbers, run.data.index
        old, seen = state["tracked"], state["seen"]
        previous = run.evaluate(run.previous, old)[0] if self.needs_previous else None
        values, blocks, forward = run.passes(old)
        checked = (values, previous)
        came, number = None, old.shape[0]
        if index is not None:
            came = blocks.counts > 0
            number = came.to(old).sum()
            if not self.sampled:  # alone, a batch without some of the blocks is refused
                checked = (*checked, 1 / blocks.counts)
        fresh = block_means(values, blocks, self.log)
        past = None if previous is None else block_means(previous, blocks, self.log)
        rows = Rows(old, per_row(seen, old))
        if self.measured:
            known = Statistics(*(state[ERROR + name] for name in Statistics._fields))
            known = known._replace(visits=per_row(known.visits, old))
            rows = rows._replace(statistics=known, pooled=Pooled(*state[ERROR + "pooled"]))
        correction = numbers.get("correction", self.rule.correction)
        rule = dataclasses.replace(self.rule, gamma=numbers.get("gamma"), correction=correction)
        mask = None if came is None else per_row(came, old)
        visit = rule.step(rows, fresh, past, blocks=number, came=mask)
        seen = torch.ones_like(seen) if came is None else seen | came
        changed = {"tracked": visit.after, "seen": seen}
        if visit.statistics is not None and visit.pooled is not None:
            known = visit.statistics._replace(visits=visit.statistics.visits.view(len(old)))
            changed |= {ERROR + name: rows for name, rows in known._asdict().items()}
            changed[ERROR + "pooled"] = torch.stack(list(visit.pooled))
        u = visit.before if self.read == "old" else visit.after
        return Updated(u, seen, came, number, visit, changed, checked, forward)

    def width(self, run: Run, limit: Any = math.inf) -> tuple[Tensor, Tensor]:
        """The width of the rounded kink with `smoothing="auto"`, and whether the error is known."""
        pooled = Pooled(*run.state[ERROR + "pooled"])
        return automatic_width(
            pooled, run.numbers.get("gamma", pooled.gain), limit
        ), pooled.steps > 0


def _smoothing(term: OuterTerm) -> Numbers:
    """Lambda of a term; nothing where it is automatic."""
    schedule = term.smoothing_schedule
    return {} if isinstance(schedule, str) else {"smoothing": schedule}


def numbers_of(limits: Limits) -> Numbers:
    """The limits of constraints, one per block."""
    numbers = {"tolerance": limits.tolerance.expand(limits.number), "margin": limits.margin}
    return numbers if limits.low is None else {**numbers, "low": limits.low}


def limits_of(run: Run) -> tuple[Tensor, Tensor | None]:
    """high_i and low_i."""
    return run.numbers["tolerance"], run.numbers.get("low")


@dataclass(frozen=True)
class Coupled(Tracking):
    r"""An outer function of tracked values, see `fcco.terms.CoupledTerm`.

    .. math::
        G_t = \nabla g_0(w_t) + \frac1{B_1}\sum_{i\in\mathcal B_1}
            \nabla f_\lambda(u_i - \text{tolerance}_i)\,\nabla g_i(w_t)
    """

    outer: Template
    automatic: bool  # lambda follows the error of u

    @classmethod
    def of(cls, term: CoupledTerm) -> Parts:
        outer, of_outer = Template.of(term.outer, "outer")
        estimator, numbers, state = cls.reading(term.tracker, outer, term.automatic)
        numbers |= {**_smoothing(term), **of_outer}
        return estimator, numbers | numbers_of(term.limits), state

    def gradient(self, run: Run) -> Estimate:
        updated, (high, low) = self.step(run), limits_of(run)
        high, outer, u = per_row(high, updated.u), self.outer.build(run.numbers), updated.u
        beyond = excess(u, high, low, run.numbers["margin"])
        slope = self._slope(run, outer, beyond, updated.blocks)
        slope = slope if low is None else slope * side(u, high, low)
        log_values = u if self.log else None
        return updated.forward.estimate(
            slope, updated.state, *updated.checked, log_values=log_values
        )

    def _slope(self, run: Run, outer: Any, beyond: Tensor, blocks: Any) -> Tensor:
        def of(function: Any) -> Tensor:
            return block_mean(function, beyond, blocks)[1]

        if self.automatic:
            smoothing: Any = self.width(run, widest(outer))[0] / outer.jump
            return of(MoreauEnvelope(outer, smoothing))
        if not run.data.smooth:
            return of(outer)
        smoothing = run.numbers["smoothing"]
        if not run.data.hard:
            return of(MoreauEnvelope(outer, smoothing))
        hard = smoothing == 0  # any lambda above 0 for these
        return torch.where(hard, of(outer), of(MoreauEnvelope(outer, smoothing + hard)))


@dataclass(frozen=True)
class CVaR(Tracking):
    r"""CVaR of tracked values with its threshold s, see `fcco.terms.CVaRTerm`.

    .. math::
        G_t = \nabla g_0(w_t) + \frac1{B_1}\sum_{i\in\mathcal B_1} f_\lambda'(u_i - s)
            \,\nabla g_i(w_t), \qquad f = \tfrac1r[\cdot]_+

    A `CVaRTerm` moves s when a step is over, here that happens at the start of the next one: the
    values are the same, and so is the lambda that a schedule gives.
    """

    automatic: bool  # lambda follows the error of u

    @classmethod
    def of(cls, term: CVaRTerm) -> Parts:
        estimator, numbers, state = cls.reading(term.tracker, term.automatic)
        state["threshold"] = term.threshold.clone()
        return estimator, numbers | {"ratio": term.ratio, **_smoothing(term)}, state

    def gradient(self, run: Run) -> Estimate:
        ratio, updated, before = run.numbers["ratio"], self.step(run), run.state["threshold"]
        # In double precision: the rank of s is r times a number of blocks, rounded up.
        u, counted, exact = updated.u, updated.seen, run.exact["ratio"]
        smoothing: Any = 0.0
        if self.automatic:
            width, known = self.width(run)
            first = cvar.width_at_first(u, counted, ratio)  # so that all groups count alike
            smoothing = torch.where(known, width, first) * ratio
        elif self.read == "old":
            # As the last step left it; the first s is for what the first gradient reads.
            counted = torch.where(before.isnan(), counted, run.state["seen"])
        s, kink = u.new_zeros(()), 0.0
        if run.data.hard:
            s, kink = cvar.threshold(u, exact, 0.0, counted)
            kink = kink.to(s)
        if self.automatic:
            s, kink = cvar.threshold(u, exact, smoothing, counted)
        elif run.data.smooth:
            hard, smoothing = run.exact["smoothing"] == 0, run.numbers["smoothing"]
            # Any lambda above 0 where it is 0.
            smooth, _ = cvar.threshold(u, exact, run.exact["smoothing"] + hard, counted)
            s = torch.where(hard, s, smooth) if run.data.hard else smooth
        slope = cvar.slopes(u, s, ratio, smoothing, kink, updated.blocks)
        state = {**updated.state, "threshold": s}
        return updated.forward.estimate(slope, state, *updated.checked)


@dataclass(frozen=True)
class Weighted(Tracking):
    """Losses of groups under weights that an adversary moves, see `fcco.terms.GroupWeights`."""

    geometry: group_weights.Geometry
    scaling: group_weights.Scaling

    @classmethod
    def of(cls, term: GroupWeights) -> Parts:
        estimator, numbers, state = cls.reading(term.tracker, term.geometry, term.scaling)
        state["group_weights"] = term.weights.clone()
        return estimator, numbers | {"ascent": term.rate, "cap": term.cap}, state

    def gradient(self, run: Run) -> Estimate:
        updated, numbers, weights = self.step(run), run.numbers, run.state["group_weights"]
        came = torch.ones_like(updated.seen) if updated.came is None else updated.came
        factor = group_weights.block_factor(self.scaling, len(weights), updated.blocks)
        settings = (numbers["ascent"], numbers["cap"], self.geometry, factor)
        weights = group_weights.ascend(weights, updated.u, came, *settings)
        state = {**updated.state, "group_weights": weights}
        return updated.forward.estimate(weights * factor, state, *updated.checked)


@dataclass(frozen=True)
class Multiplied(Tracking):
    r"""Constraints without settings, see `fcco.terms.MultiplierTerm`.

    .. math::
        G_t = \nabla g_0(w_t) + \frac m{B_1}\sum_{i\in\mathcal B_1} c_i\,\nabla g_i(w_t)
    """

    @classmethod
    def of(cls, term: MultiplierTerm) -> Parts:
        estimator, numbers, state = cls.reading(term.tracker)
        state |= {name: term.get_buffer(name).clone() for name in Multipliers._fields}
        state |= {"scales": term.scales.clone(), "steps": term.scales.new_zeros(())}
        return estimator, numbers | numbers_of(term.limits), state

    def gradient(self, run: Run) -> Estimate:
        """The c_i are those of the state before the step, which then moves them."""
        updated, state, numbers = self.step(run), run.state, run.numbers
        table, visit, steps = state["tracked"], updated.visit, state["steps"] + 1
        targets = multipliers.targets(numbers["tolerance"], numbers.get("low"), numbers["margin"])
        rows, scales = Multipliers(*map(state.get, Multipliers._fields)), Scales(*state["scales"])
        noise, share = state[ERROR + "pooled"][0] / 2, multipliers.largest_margin(len(table))
        slope = multipliers.coefficients(rows, targets, updated.u - targets.limit, noise, scales)
        sampling = table.new_full((), len(table)) / updated.blocks
        scales = scales.with_loss(updated.forward.loss.to(table))._replace(sampling=sampling)
        seen, statistics = state["seen"].to(table), (visit.statistics, visit.pooled)
        shown = Constraints(visit.counted, table, visit.after, seen, *statistics, updated.came)  # type: ignore[arg-type]
        rows, scales = multipliers.step(rows, targets, shown, scales, share, steps)
        changed = {**updated.state, **rows._asdict(), "steps": steps}
        changed["scales"] = torch.stack(list(scales))
        return updated.forward.estimate(slope * sampling, changed, *updated.checked)


@dataclass(frozen=True)
class Switch(Tracking):
    """The gradient of g_0 or of the worst constraint: SSG."""

    @classmethod
    def of(cls, term: SwitchingTerm) -> Parts:
        estimator, numbers, state = cls.reading(term.tracker)
        if not isinstance(term.schedule, str):
            numbers["threshold"] = term.schedule
        table = state["tracked"]
        feasible = torch.ones((), dtype=torch.bool, device=table.device)
        state |= {"feasible": feasible, "worst": table.new_zeros(())}
        return estimator, numbers | numbers_of(term.limits), state

    def gradient(self, run: Run) -> Estimate:
        updated, limits, margin = self.step(run), limits_of(run), run.numbers["margin"]
        beyond, threshold = excess(updated.u, *limits, margin), run.exact.get("threshold")
        if threshold is None:
            threshold = switching.noise_of_worst(beyond, run.state[ERROR + "difference"])
        worst, which, feasible = switching.decide(beyond, threshold)
        chosen = torch.arange(len(beyond), device=beyond.device) == which
        slope = (chosen & ~feasible).to(beyond) * side(updated.u, *limits)
        state = {**updated.state, "feasible": feasible, "worst": worst}
        return updated.forward.estimate(slope, state, *updated.checked, loss_weight=feasible)
