"""The estimator of CVaR over blocks, with its threshold s."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..rules import cvar as rules
from ..terms import CVaRTerm
from .coupled import TrackedBlocks, Tracking, TrackingHyperparameters, given_smoothing
from .hyperparameters import Hyperparameter
from .run import Estimate, Flag, Run, State

__all__ = ["CVaREstimator"]


class CVaRHyperparameters(NamedTuple):
    """The numbers of a `CVaRTerm`."""

    tracking: TrackingHyperparameters
    ratio: Hyperparameter  # r
    smoothing: Hyperparameter  # lambda, None when it is automatic


@dataclass(frozen=True)
class CVaREstimator:
    r"""CVaR of tracked values, see `fcco.terms.CVaRTerm`.

    .. math::
        G_t = \nabla g_0(w_t) + \frac1{B_1}\sum_{i\in\mathcal B_1} f_\lambda'(u_i - s)
            \,\nabla g_i(w_t), \qquad f = \tfrac1r[\cdot]_+

    A `CVaRTerm` moves s when a step is over, here that happens at the start of the next one: the
    values are the same, and so is the lambda that a schedule gives.

    Args:
        tracking: the update of u.
    """

    tracking: Tracking

    @property
    def needs_previous(self) -> bool:
        """Whether it evaluates values at w_{t-1}."""
        return self.tracking.needs_previous

    @classmethod
    def of(cls, term: CVaRTerm) -> tuple[CVaREstimator, CVaRHyperparameters, State]:
        """The estimator of a term, its numbers and its state."""
        tracking, of_tracking, state = Tracking.of(term.tracker, term.smoothing_schedule)
        numbers = CVaRHyperparameters(of_tracking, term.ratio, given_smoothing(term))
        return cls(tracking), numbers, {**state, "threshold": term.threshold.clone()}

    def gradient(self, run: Run, hyperparameters: CVaRHyperparameters) -> Estimate:
        """G_t of one run."""
        numbers: CVaRHyperparameters = run.narrow(hyperparameters)
        table, seen, s = (run.state[name] for name in ("tracked", "seen", "threshold"))
        previous = self.tracking.previous_values(run)
        values, forward = run.passes(table)
        update = self.tracking.update(run, numbers.tracking, values, previous)
        # The first s is the minimiser for the values that the first gradient reads.
        started, counted = ~s.isnan(), update.state["seen"]
        exact, smoothed, smoothing = hyperparameters, run.flags.smoothed, numbers.smoothing
        if smoothing is None:
            smoothing = self._automatic_smoothing(run.state, numbers, update)
            exact, smoothed = exact._replace(smoothing=smoothing), True
        elif self.tracking.read == "old":
            counted = torch.where(started, seen, counted)  # the table as the last step left it
        s, kink = self._minimiser(smoothed, exact, update.u, counted)
        smoothing = 0.0 if smoothed is False else smoothing
        slope = rules.slopes(update.u, s, numbers.ratio, smoothing, kink, update.blocks)
        return forward.estimate(slope, {**update.state, "threshold": s}, values, previous)

    def _automatic_smoothing(
        self, state: State, numbers: CVaRHyperparameters, update: TrackedBlocks
    ) -> Tensor:
        """The lambda of `smoothing="auto"`: at first so large that all groups count alike."""
        width, known = self.tracking.automatic_width(state, numbers.tracking, math.inf)
        smoothing = width * numbers.ratio
        u, seen = update.u, update.state["seen"]
        first = rules.width_at_first(u, seen, numbers.ratio) * numbers.ratio
        return torch.where(known, smoothing, first)

    def _minimiser(
        self, smoothed: Flag, exact: CVaRHyperparameters, losses: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The best s for the losses of the blocks seen, and the slope at u_i = s if lambda = 0.

        Args:
            smoothed: whether lambda is above 0.
            exact: in double precision: the rank of s is r times a number of blocks, rounded up.
            losses: u_i of all blocks.
            seen: which blocks count.
        """
        ratio, smoothing = exact.ratio, exact.smoothing
        if isinstance(smoothed, Tensor):  # any lambda above 0 where it is not used
            smoothing = torch.where(smoothed, smoothing, 1)
        if smoothed is True:
            return rules.threshold(losses, ratio, smoothing, seen)
        s, kink = rules.threshold(losses, ratio, 0.0, seen)
        if smoothed is not False:
            s = torch.where(smoothed, rules.threshold(losses, ratio, smoothing, seen)[0], s)
        return s, kink.to(s)
