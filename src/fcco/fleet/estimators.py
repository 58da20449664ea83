"""Estimators of the gradient from tracked values, one for each kind of term.

An estimator holds what all runs of a fleet share; `of` reads it from a term, together with the
numbers and the state of one run. The mathematics is in `fcco.rules`, as for one run alone.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..methods.switching import SwitchingTerm, decide
from ..outer import MoreauEnvelope
from ..rules import cvar, group_weights, multipliers
from ..rules.arrays import per_row
from ..rules.multipliers import Constraints, Multipliers, Scales
from ..rules.track import (
    Pooled,
    Rows,
    Statistics,
    Track,
    Visit,
    automatic_width,
    forgetting_log_track,
    log_track,
)
from ..terms import CoupledTerm, CVaRTerm, GroupWeights, MultiplierTerm
from ..terms.coupled import OuterTerm, weighted_mean, widest
from ..terms.limits import Limits, excess, side
from ..tracker import InnerTracker
from .numbers import Numbers, Template
from .run import Estimate, Forward, Run, State, Unsupported, block_means

__all__ = [
    "CVaR",
    "Coupled",
    "Estimator",
    "Multiplied",
    "PlainLoss",
    "Switch",
    "Tracking",
    "Weighted",
    "limits_of",
    "numbers_of_limits",
]

ERROR = "error."
"""Prefix of the statistics of the error of u in the state."""


class Estimator(Protocol):
    """Finds the gradient of one run."""

    @property
    def needs_previous(self) -> bool:
        """Whether it evaluates values at w_{t-1}."""
        ...

    def gradient(self, run: Run) -> Estimate:
        """G_t of one run."""
        ...


Parts = tuple[Estimator, Numbers, State]


@dataclass(frozen=True)
class PlainLoss:
    """The gradient of the loss of a batch."""

    needs_previous = False

    def gradient(self, run: Run) -> Estimate:
        no_blocks = run.weights[:0]
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
    """The update of an `InnerTracker`."""

    rule: Track  # without its numbers
    read: str  # which u enters the gradient
    sampled: bool  # a batch may be without some of the blocks
    measured: bool  # the error of u is estimated
    needs_previous: bool  # it uses values at w_{t-1}

    @classmethod
    def of(cls, tracker: InnerTracker) -> tuple[Tracking, Numbers, State]:
        refused = {
            "refresh_every": tracker.refresh_every is not None,
            "on_nonfinite='skip'": tracker.on_nonfinite == "skip",
            "offset": tracker.offset is not None,
        }
        for option, used in refused.items():
            if used:
                raise Unsupported(f"A fleet has no tracker with `{option}`.")
        rule, numbers = tracker.rule, {}
        if rule.gamma is not None:
            numbers["gamma"] = rule.gamma
        if not isinstance(rule.correction, str):
            numbers["correction"] = rule.correction
            rule = dataclasses.replace(rule, correction=0.0)
        state = {"tracked": tracker.rows.clone(), "seen": tracker.seen.clone()}
        if tracker.estimate is not None:
            known = tracker.estimate.named_buffers()
            state |= {ERROR + name: value.clone() for name, value in known}
        tracking = cls(
            dataclasses.replace(rule, gamma=None),
            tracker.read,
            tracker.sampled,
            tracker.estimate is not None,
            tracker.needs_previous,
        )
        return tracking, numbers, state

    @property
    def log(self) -> bool:
        """Whether values and u are logarithms."""
        return self.rule.formula in (log_track, forgetting_log_track)

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
        past = None if previous is None else block_means(previous, blocks, self.log)
        statistics = pooled = None
        if self.measured:
            statistics = Statistics(*(state[ERROR + name] for name in Statistics._fields))
            statistics = statistics._replace(visits=per_row(statistics.visits, old))
            pooled = Pooled(*state[ERROR + "pooled"].unbind())
        rule = dataclasses.replace(
            self.rule,
            gamma=numbers.get("gamma"),
            correction=numbers.get("correction", self.rule.correction),
        )
        visit = rule.step(
            Rows(old, per_row(seen, old), statistics, pooled),
            block_means(values, blocks, self.log),
            past,
            blocks=number,
            came=None if came is None else per_row(came, old),
        )
        seen = torch.ones_like(seen) if came is None else seen | came
        changed = {"tracked": visit.after, "seen": seen}
        if visit.statistics is not None and visit.pooled is not None:
            after = visit.statistics._replace(visits=visit.statistics.visits.view(len(old)))
            known = zip(Statistics._fields, after, strict=True)
            changed |= {ERROR + name: rows for name, rows in known}
            changed[ERROR + "pooled"] = torch.stack(list(visit.pooled))
        u = visit.before if self.read == "old" else visit.after
        return Updated(u, seen, came, number, visit, changed, checked, forward)

    def width(self, run: Run, limit: Any = math.inf) -> tuple[Tensor, Tensor]:
        """The width of the rounded kink with `smoothing="auto"`, and whether the error is known."""
        pooled = Pooled(*run.state[ERROR + "pooled"].unbind())
        gamma = run.numbers.get("gamma", pooled.gain)
        return automatic_width(pooled, gamma, limit), pooled.steps > 0


def _smoothing_of(term: OuterTerm) -> Numbers:
    """Lambda of a term; nothing where it is automatic."""
    schedule = term.smoothing_schedule
    return {} if isinstance(schedule, str) else {"smoothing": schedule}


def numbers_of_limits(limits: Limits) -> Numbers:
    """The limits of constraints, one per block."""
    numbers = {"tolerance": limits.tolerance.expand(limits.number), "margin": limits.margin}
    return numbers if limits.low is None else {**numbers, "low": limits.low}


def limits_of(numbers: Numbers, dim: int = 1) -> tuple[Tensor, Tensor | None]:
    """high_i and low_i, for values (n,) or (n, d1)."""
    high = numbers["tolerance"]
    return (high if dim == 1 else high.unsqueeze(-1)), numbers.get("low")


@dataclass(frozen=True)
class Coupled:
    r"""An outer function of tracked values, see `fcco.terms.CoupledTerm`.

    .. math::
        G_t = \nabla g_0(w_t) + \frac{\text{weight}}{B_1}\sum_{i\in\mathcal B_1}
            \nabla f_\lambda(u_i - \text{tolerance}_i)\,\nabla g_i(w_t)
    """

    tracking: Tracking
    outer: Template
    automatic: bool  # lambda follows the error of u

    @property
    def needs_previous(self) -> bool:
        return self.tracking.needs_previous

    @classmethod
    def of(cls, term: CoupledTerm) -> Parts:
        tracking, numbers, state = Tracking.of(term.tracker)
        outer, of_outer = Template.of(term.outer, "outer")
        numbers |= {"weight": term.weight_schedule, **_smoothing_of(term), **of_outer}
        numbers |= numbers_of_limits(term.limits)
        return cls(tracking, outer, term.automatic), numbers, state

    def gradient(self, run: Run) -> Estimate:
        """Alg. 1, lines 5-9; Alg. 2, lines 5-10."""
        updated, numbers = self.tracking.step(run), run.numbers
        high, low = limits_of(numbers, updated.u.dim())
        beyond = excess(updated.u, high, low, numbers["margin"])
        slope = self._slope(run, self.outer.build(numbers), beyond, updated.blocks)
        slope = slope * side(updated.u, high, low)
        log_values = updated.u if self.tracking.log else None
        return updated.forward.estimate(
            slope, updated.state, *updated.checked, log_values=log_values
        )

    def _slope(self, run: Run, outer: Any, beyond: Tensor, blocks: Any) -> Tensor:
        def of(function: Any) -> Tensor:
            return weighted_mean(function, beyond, run.numbers["weight"], blocks)[1]

        if self.automatic:
            smoothing: Any = self.tracking.width(run, widest(outer))[0] / outer.jump
            return of(MoreauEnvelope(outer, smoothing))
        if not run.flags.smoothed:
            return of(outer)
        smoothing = run.numbers["smoothing"]
        hard = smoothing == 0  # in some runs: any lambda above 0 for these
        smoothing = torch.where(hard, 1, smoothing)
        return torch.where(hard, of(outer), of(MoreauEnvelope(outer, smoothing)))


@dataclass(frozen=True)
class CVaR:
    r"""CVaR of tracked values with its threshold s, see `fcco.terms.CVaRTerm`.

    .. math::
        G_t = \nabla g_0(w_t) + \frac1{B_1}\sum_{i\in\mathcal B_1} f_\lambda'(u_i - s)
            \,\nabla g_i(w_t), \qquad f = \tfrac1r[\cdot]_+

    A `CVaRTerm` moves s when a step is over, here that happens at the start of the next one: the
    values are the same, and so is the lambda that a schedule gives.
    """

    tracking: Tracking
    automatic: bool  # lambda follows the error of u

    @property
    def needs_previous(self) -> bool:
        return self.tracking.needs_previous

    @classmethod
    def of(cls, term: CVaRTerm) -> Parts:
        tracking, numbers, state = Tracking.of(term.tracker)
        numbers |= {"ratio": term.ratio, **_smoothing_of(term)}
        return cls(tracking, term.automatic), numbers, state | {"threshold": term.threshold.clone()}

    def gradient(self, run: Run) -> Estimate:
        ratio, updated = run.numbers["ratio"], self.tracking.step(run)
        u, counted = updated.u, updated.seen
        # In double precision: the rank of s is r times a number of blocks, rounded up.
        exact, smoothing = run.exact["ratio"], 0.0
        if self.automatic:
            width, known = self.tracking.width(run)
            first = cvar.width_at_first(u, counted, ratio)  # so that all groups count alike
            smoothing = torch.where(known, width, first) * ratio
        elif self.tracking.read == "old":
            # The table as the last step left it; the first s is for what the first gradient reads.
            started = ~run.state["threshold"].isnan()
            counted = torch.where(started, run.state["seen"], counted)
        if self.automatic:
            s, kink = cvar.threshold(u, exact, smoothing, counted)
        else:
            s, kink = cvar.threshold(u, exact, 0.0, counted)
            kink = kink.to(s)
            if run.flags.smoothed:
                hard = run.exact["smoothing"] == 0  # in some runs
                positive = torch.where(hard, 1, run.exact["smoothing"])
                smooth, _ = cvar.threshold(u, exact, positive, counted)
                s, smoothing = torch.where(hard, s, smooth), run.numbers["smoothing"]
        slope = cvar.slopes(u, s, ratio, smoothing, kink, updated.blocks)
        state = {**updated.state, "threshold": s}
        return updated.forward.estimate(slope, state, *updated.checked)


@dataclass(frozen=True)
class Weighted:
    """Losses of groups under weights that an adversary moves, see `fcco.terms.GroupWeights`."""

    tracking: Tracking
    geometry: group_weights.Geometry
    scaling: group_weights.Scaling

    @property
    def needs_previous(self) -> bool:
        return self.tracking.needs_previous

    @classmethod
    def of(cls, term: GroupWeights) -> Parts:
        tracking, numbers, state = Tracking.of(term.tracker)
        numbers |= {"ascent": term.rate, "cap": term.cap}
        state["group_weights"] = term.weights.clone()
        return cls(tracking, term.geometry, term.scaling), numbers, state

    def gradient(self, run: Run) -> Estimate:
        """G_t with the new weights."""
        updated, numbers, weights = self.tracking.step(run), run.numbers, run.state["group_weights"]
        came = torch.ones_like(updated.seen) if updated.came is None else updated.came
        factor = group_weights.block_factor(self.scaling, len(weights), updated.blocks)
        settings = (numbers["ascent"], numbers["cap"], self.geometry, factor)
        weights = group_weights.ascend(weights, updated.u, came, *settings)
        state = {**updated.state, "group_weights": weights}
        return updated.forward.estimate(weights * factor, state, *updated.checked)


@dataclass(frozen=True)
class Multiplied:
    r"""Constraints without settings, see `fcco.terms.MultiplierTerm`.

    .. math::
        G_t = \nabla g_0(w_t) + \frac m{B_1}\sum_{i\in\mathcal B_1} c_i\,\nabla g_i(w_t)
    """

    tracking: Tracking

    @property
    def needs_previous(self) -> bool:
        return self.tracking.needs_previous

    @classmethod
    def of(cls, term: MultiplierTerm) -> Parts:
        tracking, numbers, state = Tracking.of(term.tracker)
        state |= {name: term.get_buffer(name).clone() for name in Multipliers._fields}
        state |= {"scales": term.scales.clone(), "steps": term.scales.new_zeros(())}
        return cls(tracking), numbers | numbers_of_limits(term.limits), state

    def gradient(self, run: Run) -> Estimate:
        """The c_i are those of the state before the step, which then moves them."""
        updated, state, numbers = self.tracking.step(run), run.state, run.numbers
        table, visit, steps = state["tracked"], updated.visit, state["steps"] + 1
        number = table.shape[0]
        targets = multipliers.targets(*limits_of(numbers), numbers["margin"])
        rows = Multipliers(*(state[name] for name in Multipliers._fields))
        scales = Scales(*state["scales"].unbind())
        noise = state[ERROR + "pooled"][0] / 2
        beyond = updated.u - targets.limit
        slope = multipliers.coefficients(rows, targets, beyond, noise, scales)
        sampling = table.new_full((), number) / updated.blocks
        scales = scales.with_loss(updated.forward.loss.to(table))._replace(sampling=sampling)
        assert visit.statistics is not None and visit.pooled is not None
        shown = Constraints(
            visit.counted,
            table,
            visit.after,
            state["seen"].to(table),
            visit.statistics,
            visit.pooled,
            updated.came,
        )
        share = multipliers.largest_margin(number)
        rows, scales = multipliers.step(rows, targets, shown, scales, share, steps)
        changed = {**updated.state, **rows._asdict(), "steps": steps}
        changed["scales"] = torch.stack(list(scales))
        return updated.forward.estimate(slope * sampling, changed, *updated.checked)


@dataclass(frozen=True)
class Switch:
    """The gradient of g_0 or of the worst constraint: SSG."""

    tracking: Tracking

    needs_previous = False

    @classmethod
    def of(cls, term: SwitchingTerm) -> Parts:
        tracking, numbers, state = Tracking.of(term.tracker)
        if not isinstance(term.schedule, str):
            numbers["threshold"] = term.schedule
        table = state["tracked"]
        state["feasible"] = torch.ones((), dtype=torch.bool, device=table.device)
        state["worst"] = table.new_zeros(())
        return cls(tracking), numbers | numbers_of_limits(term.limits), state

    def gradient(self, run: Run) -> Estimate:
        updated, (high, low), margin = (
            self.tracking.step(run),
            limits_of(run.numbers),
            run.numbers["margin"],
        )
        beyond = excess(updated.u, high, low, margin)
        threshold = run.exact.get("threshold")
        if threshold is None:
            # Half a squared difference of two values is the noise of one; 0 before there are two.
            noise = run.state[ERROR + "difference"] / 2
            threshold = noise.gather(0, beyond.argmax(0, keepdim=True)).sqrt().squeeze(0)
        worst, which, feasible = decide(beyond, threshold)
        chosen = torch.arange(len(beyond), device=beyond.device) == which
        slope = (chosen & ~feasible) * side(updated.u, high, low)
        state = {**updated.state, "feasible": feasible, "worst": worst}
        return updated.forward.estimate(
            slope.to(beyond), state, *updated.checked, loss_weight=feasible
        )
