"""The fields of a fairness experiment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..base import Schedule, Scheduled


@dataclass(frozen=True, kw_only=True)
class Fairness(Scheduled):
    r"""AUC maximisation under gaps of rates between two groups.

    .. math::
        \max_w \mathrm{AUC}(w) \quad\text{s.t.}\quad
        \bigl|r_{0,y,\tau}(w) - r_{1,y,\tau}(w)\bigr| \le \kappa, \qquad
        r_{a,y,\tau}(w) = \mathrm E\bigl[\sigma((s_w - \tau)/T) \mid a, y\bigr]

    The score is `"unbounded"` as printed, or `"normalised"` to mean 0 and deviation 1 over the
    population, so that the thresholds stay where the scores are. A method is feasible when the
    `"gap"` of the ROC curves beyond chance, or the smoothed `"violation"`, is within the limit.
    """

    schedule: Schedule = "milestones"
    decay: float = 0.1
    score: Literal["normalised", "unbounded"] = "normalised"
    temperature: float = 0.2  # T of the rates
    pair_temperature: float = 1.0  # of the sigmoid in the pairwise AUC objective
    objective: Literal["auc", "bce"] = "auc"  # pairwise sigmoid, or cross-entropy
    thresholds: tuple[float, ...] = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)  # tau
    tolerance: float = 0.005  # kappa
    batch: int = 128  # samples, a quarter from each cell (group, label)
    hidden: tuple[int, ...] = (64, 64)  # widths of the hidden layers
    validation: float = 0.2  # share of the training data that the seed of a run splits off
    holdout: float = 0.0  # share of the rest that rates are measured on, without a gradient
    feasible_by: Literal["gap", "violation"] = "gap"
    feasible_limit: float = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        finite = [math.isfinite(tau) for tau in self.thresholds]
        for name, valid, wanted in (
            ("temperature", 0 < self.temperature < math.inf, "be above 0"),
            ("pair_temperature", 0 < self.pair_temperature < math.inf, "be above 0"),
            ("hidden", all(width >= 1 for width in self.hidden), "hold widths from 1 on"),
            ("batch", self.batch >= 4 and self.batch % 4 == 0, "be a multiple of 4 (cells)"),
            ("tolerance", 0 <= self.tolerance < math.inf, "be at least 0"),
            ("thresholds", finite and all(finite), "hold at least one number"),
            ("validation", 0 <= self.validation < 1, "be in [0, 1)"),
            ("holdout", 0 <= self.holdout < 1, "be in [0, 1)"),
        ):
            if not valid:
                raise ValueError(f"`{name}` must {wanted} but is: {getattr(self, name)}.")

    @property
    def judged(self) -> str:
        """The figure that makes a method feasible, without its part of the data."""
        return "excess_gap" if self.feasible_by == "gap" else "violation"

    @property
    def constraint_names(self) -> tuple[str, ...]:
        """TPR gaps at each threshold, then FPR gaps."""
        return tuple(f"{rate} gap at {tau:g}" for rate in ("TPR", "FPR") for tau in self.thresholds)
