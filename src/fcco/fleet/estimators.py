"""Estimators of the gradient from tracked values, one for each kind of term.

An estimator holds what all runs of a fleet share; `of` reads it from a term, with the numbers and
the state of one run. `gradient` finds G_t of one run; the mathematics is in `fcco.rules`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..methods.lagrangian import LagrangianTerm
from ..methods.switching import SwitchingTerm
from ..outer import MoreauEnvelope
from ..rules import cvar, group_weights, multipliers, switching
from ..rules.arrays import per_row, tensor
from ..rules.multipliers import Constraints, Multipliers, Scales
from ..rules.proximal import proximal_value, regularised
from ..rules.track import Pooled, Rows, Statistics, Track, Visit, automatic_width
from ..terms import AbstractTerm, CoupledTerm, CVaRTerm, GroupWeights, MultiplierTerm
from ..terms.coupled import OuterTerm, block_mean, widest
from ..terms.limits import Limits, excess, side
from ..tracker import InnerTracker
from .run import Estimate, Forward, Run, State, Unsupported, block_means, choose

STATISTICS = (*Statistics._fields, "pooled")
"""What is known of the error of u, by its names in the state."""
TABLES = ("u", "seen", *STATISTICS)
"""The state of a tracker."""

Numbers = dict[str, Any]
"""Numbers of a run by name (`lr`, `gamma`, `outer.scale`): tensors, or functions of the step."""
Parts = tuple[Any, Numbers, State]
"""An estimator, and the numbers and the state of a run."""

_ANY = torch.zeros(())
"""Stands for a number: the very same object, so that values without their numbers are equal."""


def take_numbers(value: Any, path: str) -> tuple[Any, Numbers]:
    """A rule or an outer function without its numbers, and these by their path.

    `Hinge(2.0)` and `Hinge(5.0)` become equal, and their numbers {"outer.scale": 2.0} and 5.0.
    """
    if not dataclasses.is_dataclass(value):
        raise Unsupported(f"{value!r} is no dataclass: a fleet cannot tell its numbers apart.")
    numbers: Numbers = {}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if isinstance(part, (int, float)) and field.type not in ("bool", "int", bool, int):
            numbers[path + field.name] = float(part)
        elif isinstance(part, Tensor):  # two of them have no one answer to whether they are equal
            raise Unsupported(f"A fleet cannot compare `{field.name}` of {value!r} between runs.")
    return put_numbers(value, path, dict.fromkeys(numbers, _ANY)), numbers


def put_numbers(value: Any, path: str, numbers: Numbers) -> Any:
    """The value with the numbers of a run, which may be tensors."""
    names = {field.name: path + field.name for field in dataclasses.fields(value)}
    own = {name: numbers[key] for name, key in names.items() if key in numbers}
    return dataclasses.replace(value, **own)


@dataclass(frozen=True)
class PlainLoss:
    """The gradient of the loss of a batch."""

    needs_previous = False

    def gradient(self, run: Run) -> Estimate:
        no_blocks = run.state["weights"][:0]
        return run.forward(no_blocks).estimate(no_blocks, {})


class Updated(NamedTuple):
    """The result of a tracking update of one run, with a row for every block."""

    u: Tensor  # what the gradient reads; the old value of blocks that are not in the batch
    came: Tensor | None  # which blocks are in the batch; None for all
    blocks: int | Tensor  # B1, how many these are
    visit: Visit
    state: State
    checked: tuple[Tensor | None, ...]  # what must be finite
    forward: Forward  # the pass that carries the gradient

    def estimate(self, slope: Tensor, changed: State, **options: Any) -> Estimate:
        """See `Forward.estimate`; `changed` is the state beside that of the tracker."""
        return self.forward.estimate(slope, {**self.state, **changed}, *self.checked, **options)


@dataclass(frozen=True)
class Tracking:
    """An estimator that reads the values of an `InnerTracker`."""

    rule: Track  # without its numbers
    read: str  # which u enters the gradient
    sampled: bool  # a batch may be without some of the blocks
    needs_previous: bool  # it uses values at w_{t-1}

    @classmethod
    def reading(cls, tracker: InnerTracker, numbers: Numbers, state: State, *own: Any) -> Parts:
        """The estimator with its `own` fields; what is the tracker's joins numbers and state."""
        kept = (tracker.refresh_every, tracker.on_nonfinite, tracker.log_space)
        if kept != (None, "raise", False):
            raise Unsupported(
                "A fleet has no tracker with `refresh_every`, `log_space` or `on_nonfinite='skip'`."
            )
        rule, of_rule = take_numbers(tracker.rule, "")
        tables = tracker.views
        state |= {name: tensor(tables[name]) for name in TABLES if name in tables}
        estimator = cls(rule, tracker.read, tracker.sampled, tracker.needs_previous, *own)
        return estimator, numbers | of_rule, state

    def step(self, run: Run) -> Updated:
        """The passes of a step, and its tracking update (Alg. 1, line 7)."""
        state, u = run.state, run.state["u"]
        previous = run.evaluate(run.previous, run.data.batch, u)[1] if self.needs_previous else None
        forward = run.forward(u)
        blocks, checked, came, mask, number = forward.blocks, (previous,), None, None, u.shape[0]
        if not blocks.whole:
            came = blocks.counts > 0
            mask, number = per_row(came, u), came.to(u).sum()
            if not self.sampled:  # alone, a batch without some of the blocks is refused
                checked = (previous, 1 / blocks.counts)
        fresh = block_means(forward.values, blocks)
        past = None if previous is None else block_means(previous, blocks)
        rows = Rows(u, state["seen"])
        if "pooled" in state:
            *statistics, pooled = (state[name] for name in STATISTICS)
            rows = rows._replace(statistics=Statistics(*statistics), pooled=Pooled(*pooled))
        rule = put_numbers(self.rule, "", run.numbers)
        visit = rule.step(rows, fresh, past, blocks=number, came=mask)
        seen = torch.ones_like(rows.seen) if mask is None else rows.seen | mask
        changed = {"u": visit.after, "seen": seen}
        if visit.statistics is not None and visit.pooled is not None:
            changed |= {**visit.statistics._asdict(), "pooled": torch.stack(list(visit.pooled))}
        read = visit.before if self.read == "old" else visit.after
        return Updated(read, came, number, visit, changed, checked, forward)

    def width(self, run: Run, reach: Any = 1.0, limit: Any = math.inf) -> tuple[Tensor, Tensor]:
        """The width of the rounded kink with `smoothing="auto"`, and whether that is known."""
        return automatic_width(Pooled(*run.state["pooled"]), run.state["u"].numel(), reach, limit)


def _smoothing(term: OuterTerm) -> Numbers:
    """Lambda of a term; nothing where it is automatic."""
    return {} if term.automatic else {"smoothing": term.smoothing_schedule}


def by_smoothing(run: Run, hard: Callable[[], Any], smooth: Callable[[Tensor], Any]) -> Any:
    """What is found with f itself where lambda is 0, and with its envelope elsewhere.

    Both are computed only where runs differ; `smooth` then gets any lambda above 0 instead of 0.
    """
    if not run.data.smooth:
        return hard()
    zero = run.exact["smoothing"] == 0
    found = smooth(run.exact["smoothing"] + zero)
    if not run.data.hard:
        return found
    return tree_map(lambda one, other: torch.where(zero, one, other), hard(), found)


def _limits(limits: Limits) -> Numbers:
    """The limits of constraints, one per block."""
    numbers = {"tolerance": limits.tolerance.expand(limits.number), "margin": limits.margin}
    return numbers if limits.low is None else {**numbers, "low": limits.low}


def _limits_of(run: Run) -> tuple[Tensor, Tensor | None]:
    """high_i and low_i."""
    return run.numbers["tolerance"], run.numbers.get("low")


@dataclass(frozen=True)
class Coupled(Tracking):
    """An outer function of tracked values, see `fcco.terms.CoupledTerm`."""

    outer: Any  # without its numbers
    automatic: bool  # lambda follows the error of u

    @classmethod
    def of(cls, term: CoupledTerm) -> Parts:
        outer, numbers = take_numbers(term.outer, "outer.")
        numbers |= {**_smoothing(term), **_limits(term.limits)}
        return cls.reading(term.tracker, numbers, {}, outer, term.automatic)

    def gradient(self, run: Run) -> Estimate:
        updated, (high, low), numbers = self.step(run), _limits_of(run), run.numbers
        u, outer = updated.u, put_numbers(self.outer, "outer.", numbers)
        high = per_row(high, u)
        beyond = excess(u, high, low, numbers["margin"])

        def slopes(function: Any) -> Tensor:
            return block_mean(function, beyond, updated.blocks)[1]

        def smoothed(smoothing: Any) -> Tensor:
            return slopes(MoreauEnvelope(outer, smoothing.to(u)))

        if self.automatic:
            slope = smoothed(self.width(run, limit=widest(outer))[0] / outer.jump)
        else:
            slope = by_smoothing(run, lambda: slopes(outer), smoothed)
        return updated.estimate(slope * side(u, high, low), {})


@dataclass(frozen=True)
class CVaR(Tracking):
    """CVaR of tracked values with its threshold s, see `fcco.terms.CVaRTerm`.

    With `read="old"` a `CVaRTerm` finds s at the end of a step, this at the start of the next one,
    from the same u_i and the same lambda: they agree only while s depends on these alone.
    """

    automatic: bool  # lambda follows the error of u

    @classmethod
    def of(cls, term: CVaRTerm) -> Parts:
        numbers = {"ratio": term.ratio, **_smoothing(term)}
        return cls.reading(term.tracker, numbers, {"threshold": term.threshold}, term.automatic)

    def gradient(self, run: Run) -> Estimate:
        ratio, updated, before = run.numbers["ratio"], self.step(run), run.state["threshold"]
        u, counted = updated.u, updated.state["seen"]

        def threshold(smoothing: Any) -> tuple[Any, Any]:
            # In double precision: the rank of s is r times a number of blocks, rounded up.
            s, tie_slope = cvar.threshold(u, run.exact["ratio"], smoothing, counted)
            return s, tie_slope.to(u)

        if self.automatic:
            width, known = self.width(run, 1 / ratio)
            first = cvar.width_at_first(u, counted, ratio)  # so that all groups count alike
            smoothing: Any = torch.where(known, width, first) * ratio
            s, tie_slope = threshold(smoothing)
        else:
            if self.read == "old":
                # As the last step left it; the first s is for what the first gradient reads.
                counted = torch.where(before.isnan(), counted, run.state["seen"])
            smoothing = run.numbers["smoothing"] if run.data.smooth else 0.0
            s, tie_slope = by_smoothing(run, lambda: threshold(0.0), threshold)
        slope = cvar.slopes(u, s, ratio, smoothing, tie_slope, updated.blocks)
        return updated.estimate(slope, {"threshold": s})


@dataclass(frozen=True)
class Weighted(Tracking):
    """Losses of groups under weights that an adversary moves, see `fcco.terms.GroupWeights`."""

    geometry: group_weights.Geometry
    scaling: group_weights.Scaling

    @classmethod
    def of(cls, term: GroupWeights) -> Parts:
        numbers, state = {"rate": term.rate, "cap": term.cap}, {"group_weights": term.weights}
        numbers |= {} if term.offset is None else {"offset": term.offset}
        return cls.reading(term.tracker, numbers, state, term.geometry, term.scaling)

    def gradient(self, run: Run) -> Estimate:
        updated, numbers, weights = self.step(run), run.numbers, run.state["group_weights"]
        came = updated.came
        came = torch.ones_like(weights, dtype=torch.bool) if came is None else came
        factor = group_weights.block_factor(self.scaling, len(weights), updated.blocks)
        settings = (numbers["rate"], numbers["cap"], self.geometry, factor, numbers.get("offset"))
        weights = group_weights.ascend(weights, updated.u, came, *settings)
        return updated.estimate(weights * factor, {"group_weights": weights})


@dataclass(frozen=True)
class Multiplied(Tracking):
    """Constraints without settings, see `fcco.terms.MultiplierTerm`."""

    @classmethod
    def of(cls, term: MultiplierTerm) -> Parts:
        state = {name: term.get_buffer(name) for name in (*Multipliers._fields, "scales")}
        state["steps"] = term.scales.new_zeros(())
        return cls.reading(term.tracker, _limits(term.limits), state)

    def gradient(self, run: Run) -> Estimate:
        """The c_i are those of the state before the step, which then moves them."""
        updated, state, numbers = self.step(run), run.state, run.numbers
        table, visit, steps = state["u"], updated.visit, state["steps"] + 1
        targets = multipliers.targets(*_limits_of(run), numbers["margin"])
        rows, scales = Multipliers(*map(state.get, Multipliers._fields)), Scales(*state["scales"])
        noise = state["pooled"][0] / 2
        slope = multipliers.coefficients(rows, targets, updated.u - targets.limit, noise, scales)
        sampling = table.new_full((), len(table)) / updated.blocks
        scales = scales.with_loss(updated.forward.loss.to(table))._replace(sampling=sampling)
        seen, statistics = state["seen"].to(table), (visit.statistics, visit.pooled)
        shown = Constraints(visit.clipped, table, visit.after, seen, *statistics, updated.came)  # type: ignore[arg-type]
        rows, scales = multipliers.step(rows, targets, shown, scales, len(table), steps)
        changed = {**rows._asdict(), "scales": torch.stack(list(scales)), "steps": steps}
        return updated.estimate(slope * sampling, changed)


@dataclass(frozen=True)
class Switch(Tracking):
    """The gradient of g_0 or of the worst constraint: SSG."""

    @classmethod
    def of(cls, term: SwitchingTerm) -> Parts:
        measured = isinstance(term.schedule, str)
        threshold = {} if measured else {"threshold": term.schedule}
        return cls.reading(term.tracker, {**threshold, **_limits(term.limits)}, {})

    def gradient(self, run: Run) -> Estimate:
        updated, limits = self.step(run), _limits_of(run)
        beyond = excess(updated.u, *limits, run.numbers["margin"])
        threshold = run.exact.get("threshold")
        if threshold is None:
            threshold = switching.noise_of_worst(beyond, run.state["difference"])
        _, which, feasible = switching.decide(beyond, threshold)
        chosen = torch.arange(len(beyond), device=beyond.device) == which
        slope = (chosen & ~feasible).to(beyond) * side(updated.u, *limits)
        return updated.estimate(slope, {}, loss_weight=feasible)


@dataclass(frozen=True)
class Lagrangian:
    """The gradient of g_0 + sum_i y_i g_i after a move of y: ICPPAC."""

    rule: Any  # without its numbers
    needs_previous = True

    @classmethod
    def of(cls, term: LagrangianTerm) -> Parts:
        if term.rule.follows_step:
            raise Unsupported("A fleet has no rule for multipliers that move after a step (OSS).")
        # The length of a round, in which runs may differ, is a number of `Rounds`.
        rule, numbers = take_numbers(dataclasses.replace(term.rule, inner_steps=1), "rule.")
        numbers["coefficient"] = term.rule.coefficient
        state = {"multiplier": term.multiplier, "last": term.last}
        return cls(rule), numbers | _limits(term.limits), state

    def gradient(self, run: Run) -> Estimate:
        """G_t of one run, without the pull to the anchor."""
        y, numbers, begins = run.state["multiplier"], run.numbers, run.data.begins
        limits, weights, point = _limits_of(run), run.state["weights"], run.previous
        forward, move = run.forward(y, measured=False), weights - point
        values, change = run.along(point, move, y)
        anchor = choose(begins, weights, run.state["anchor"])
        proximal = numbers["coefficient"] * proximal_value(point - anchor, move)
        change = change * side(values, *limits)
        now = regularised(excess(values, *limits, numbers["margin"]), change, proximal)
        before = choose(begins, now, run.state["last"])
        rule = put_numbers(self.rule, "rule.", numbers)
        after = rule.dual(y, now, before)
        slope = after * side(y, *limits)
        return forward.estimate(slope, {"multiplier": after, "last": now}, values)


_TERMS: dict[type, Callable[[Any], Parts]] = {
    CoupledTerm: Coupled.of,
    CVaRTerm: CVaR.of,
    GroupWeights: Weighted.of,
    MultiplierTerm: Multiplied.of,
    LagrangianTerm: Lagrangian.of,
    SwitchingTerm: Switch.of,
}


def read_term(term: AbstractTerm) -> Parts:
    """The estimator of a term that has made no step."""
    if type(term) not in _TERMS:
        raise Unsupported(f"A fleet has no rule for the term {type(term).__name__}.")
    if term.step:
        raise Unsupported(f"A fleet starts from the first step; this term has made {term.step}.")
    return _TERMS[type(term)](term)
