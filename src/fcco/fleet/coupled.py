"""The estimator of a coupled term: SONEX, SONX, SOX, and ALEXR2 inside a proximal point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..outer import MoreauEnvelope
from ..rules.arrays import per_row
from ..rules.track import (
    Formula,
    Pooled,
    Rows,
    Statistics,
    Track,
    automatic_width,
    forgetting_log_track,
    log_track,
)
from ..terms import CoupledTerm
from ..terms.coupled import OuterTerm, weighted_mean, widest
from ..tracker import InnerTracker
from ..tracker.blocks import Batch
from .hyperparameters import Hyperparameter, LimitHyperparameters, Template
from .run import Estimate, Run, State, Unsupported, all_blocks

__all__ = ["Coupled", "Tracking", "TrackingHyperparameters", "check_tracker", "given_smoothing"]

ERROR = "error."
"""Prefix of the statistics of an `ErrorEstimate` in the state."""


class TrackingHyperparameters(NamedTuple):
    """The numbers of an `InnerTracker`."""

    gamma: Hyperparameter  # weight of the fresh value, None when it is automatic
    correction: Hyperparameter  # gamma', None when a formula gives it


def check_tracker(tracker: InnerTracker) -> None:
    """Refuse options of a tracker that a fleet would leave out.

    Raises:
        Unsupported: for the first of them.
    """
    options = {
        "refresh_every": tracker.refresh_every is not None,
        "on_nonfinite='skip'": tracker.on_nonfinite == "skip",
        "offset": tracker.offset is not None,
        "sampled=False": not tracker.sampled,
    }
    for option, used in options.items():
        if used:
            raise Unsupported(f"A fleet has no tracker with `{option}`.")


class TrackedBlocks(NamedTuple):
    """The result of a tracking update of one run, with a row for every block."""

    u: Tensor  # what the gradient reads; the old value of blocks that are not in the batch
    present: Tensor  # which blocks are in the batch
    blocks: int | Tensor  # B1, how many these are
    state: State  # the new table, and which blocks have a value


@dataclass(frozen=True)
class Tracking:
    """The update of an `InnerTracker`, without its numbers."""

    number: int  # n
    dim: int  # d1
    read: str  # which u enters the gradient
    correction: str  # "number", "theory" or "auto"
    formula: Formula  # the update of one block
    needs_previous: bool  # it uses values at w_{t-1}
    measured: bool  # gamma or smoothing follow the error of u

    @classmethod
    def of(
        cls, tracker: InnerTracker, smoothing: Any = 0.0
    ) -> tuple[Tracking, TrackingHyperparameters, State]:
        """The update of a tracker, its numbers and its state.

        Args:
            tracker: the tracker.
            smoothing: lambda of the term; `"auto"` needs the error of u.
        """
        check_tracker(tracker)
        rule = tracker.rule
        word = rule.correction if isinstance(rule.correction, str) else None
        tracking = cls(
            number=tracker.num_inner,
            dim=tracker.dim,
            read=tracker.read,
            correction=word or "number",
            formula=rule.formula,
            needs_previous=tracker.needs_previous,
            measured=tracker.automatic or smoothing == "auto",
        )
        numbers = TrackingHyperparameters(rule.gamma, None if word else rule.correction)
        state = {"tracked": tracker.rows.clone(), "seen": tracker.seen.clone()}
        if tracking.measured and tracker.estimate is not None:
            known = tracker.estimate.named_buffers()
            state |= {ERROR + name: value.clone() for name, value in known}
        return tracking, numbers, state

    @property
    def log(self) -> bool:
        """Whether values and u are logarithms."""
        return self.formula in (log_track, forgetting_log_track)

    def previous_values(self, run: Run) -> Tensor | None:
        """The values of the batch at w_{t-1}; None without correction."""
        if not self.needs_previous:
            return None
        return run.evaluate(run.previous, run.state["tracked"])[0]

    def update(
        self, run: Run, numbers: TrackingHyperparameters, values: Tensor, previous: Tensor | None
    ) -> TrackedBlocks:
        """One tracking update (Alg. 1, line 7).

        Args:
            run: the run.
            numbers: in the precision of the weights.
            values: entries at w_t.
            previous: entries at w_{t-1}, or None.
        """
        state, index = run.state, run.data.index
        old, seen = state["tracked"], state["seen"]
        blocks = all_blocks(index, self.number, old)
        present = blocks.counts > 0
        sampled = self.number if index is None else present.to(old).sum()
        # Entries are pooled with tensors: views of NumPy know nothing of many runs at once.
        sums = [None if e is None else blocks.sums(e, self.log) for e in (values, previous)]
        batch = Batch(blocks.index, blocks.counts, sums[0], sums[1], self.log, blocks.whole)
        past = None if batch.previous is None else batch.mean(batch.previous)
        statistics = pooled = None
        if self.measured:
            statistics = Statistics(*(state[ERROR + name] for name in Statistics._fields))
            statistics = statistics._replace(visits=per_row(statistics.visits, old))
            pooled = self.pooled(state)
        correction: Any = self.correction if numbers.correction is None else numbers.correction
        rule = Track(self.number, numbers.gamma, correction, self.formula)
        visit = rule.step(
            Rows(old, per_row(seen, old), statistics, pooled), batch.mean(batch.fresh), past,
            blocks=sampled, came=None if index is None else per_row(present, old),
        )  # fmt: skip
        changed = {"tracked": visit.after, "seen": seen | present}
        if visit.statistics is not None and visit.pooled is not None:
            after = visit.statistics._replace(visits=visit.statistics.visits.view(len(old)))
            known = zip(Statistics._fields, after, strict=True)
            changed |= {ERROR + name: rows for name, rows in known}
            changed[ERROR + "pooled"] = torch.stack(list(visit.pooled))
        u = visit.before if self.read == "old" else visit.after
        return TrackedBlocks(u, present, sampled, changed)

    def pooled(self, state: State) -> Pooled:
        """What is known of all blocks together."""
        return Pooled(*state[ERROR + "pooled"].unbind())

    def automatic_width(
        self, state: State, numbers: TrackingHyperparameters, limit: Any
    ) -> tuple[Tensor, Tensor]:
        """The width of the rounded kink with `smoothing="auto"`, and whether the error is known.

        Args:
            state: of the run, before the step.
            numbers: in the precision of the weights.
            limit: of the width, see `fcco.terms.coupled.widest`.
        """
        pooled = self.pooled(state)
        gamma = pooled.gain if numbers.gamma is None else numbers.gamma
        return automatic_width(pooled, gamma, limit), pooled.steps > 0


def given_smoothing(term: OuterTerm) -> Hyperparameter:
    """Lambda of a term, None when it is automatic."""
    schedule = term.smoothing_schedule
    return None if isinstance(schedule, str) else schedule


class CoupledHyperparameters(NamedTuple):
    """The numbers of a `CoupledTerm`."""

    tracking: TrackingHyperparameters
    smoothing: Hyperparameter  # lambda, None when it is automatic
    weight: Hyperparameter
    limits: LimitHyperparameters
    outer: dict[str, Hyperparameter]  # those of f


@dataclass(frozen=True)
class Coupled:
    r"""An outer function of tracked values, see `fcco.CoupledTerm`.

    .. math::
        G_t = \nabla g_0(w_t) + \frac{\text{weight}}{B_1}\sum_{i\in\mathcal B_1}
            \nabla f_\lambda(u_i - \text{tolerance}_i)\,\nabla g_i(w_t)

    Args:
        tracking: the update of u.
        outer: f.
    """

    tracking: Tracking
    outer: Template

    @property
    def needs_previous(self) -> bool:
        """Whether it evaluates values at w_{t-1}."""
        return self.tracking.needs_previous

    @classmethod
    def of(cls, term: CoupledTerm) -> tuple[Coupled, CoupledHyperparameters, State]:
        """The estimator of a term, its numbers and its state."""
        tracking, of_tracking, state = Tracking.of(term.tracker, term.smoothing_schedule)
        outer, of_outer = Template.of(term.outer)
        limits = LimitHyperparameters.of(term.limits)
        numbers = CoupledHyperparameters(
            of_tracking, given_smoothing(term), term.weight_schedule, limits, of_outer
        )
        return cls(tracking, outer), numbers, state

    def gradient(self, run: Run, hyperparameters: CoupledHyperparameters) -> Estimate:
        """G_t of one run (Alg. 1, lines 5-9; Alg. 2, lines 5-10)."""
        numbers: CoupledHyperparameters = run.narrow(hyperparameters)
        previous = self.tracking.previous_values(run)
        values, forward = run.passes(run.state["tracked"])
        update = self.tracking.update(run, numbers.tracking, values, previous)
        excess, weight = numbers.limits.excess(update.u), numbers.weight
        outer: Any = self.outer.build(numbers.outer)
        smoothed, smoothing = run.flags.smoothed, numbers.smoothing
        if smoothing is None:
            limit = widest(outer)
            width, _ = self.tracking.automatic_width(run.state, numbers.tracking, limit)
            smoothed, smoothing = True, width / outer.jump
        if smoothed is False:
            _, slope = weighted_mean(outer, excess, weight, update.blocks)
        elif smoothed is True:
            envelope = MoreauEnvelope(outer, smoothing)
            _, slope = weighted_mean(envelope, excess, weight, update.blocks)
        else:  # a schedule has reached 0 in some runs: both, with any lambda above 0 for these
            _, slope = weighted_mean(outer, excess, weight, update.blocks)
            envelope = MoreauEnvelope(outer, torch.where(smoothed, smoothing, 1))  # type: ignore[arg-type]
            _, smooth = weighted_mean(envelope, excess, weight, update.blocks)
            slope = torch.where(smoothed, smooth, slope)
        log_values = update.u if self.tracking.log else None
        return forward.estimate(slope, update.state, values, previous, log_values=log_values)
