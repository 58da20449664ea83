"""The fields of a fairness experiment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..base import Schedule, Scheduled

__all__ = ["Fairness"]


@dataclass(frozen=True, kw_only=True)
class Fairness(Scheduled):
    r"""AUC maximisation under gaps of rates between two groups.

    .. math::
        \max_w \mathrm{AUC}(w) \quad\text{s.t.}\quad
        \bigl|r_{0,y,\tau}(w) - r_{1,y,\tau}(w)\bigr| \le \kappa, \qquad
        r_{a,y,\tau}(w) = \mathrm E\bigl[\sigma((s_w - \tau)/T) \mid a, y\bigr]

    Args:
        score: `"unbounded"` as printed, or `"normalised"` to mean 0 and deviation 1 over the
            population, so that the thresholds stay where the scores are.
        temperature: T of the rates.
        pair_temperature: of the sigmoid in the pairwise AUC objective.
        objective: `"auc"` (pairwise sigmoid) or `"bce"`.
        thresholds: tau; in units of the score, or as shares of the population.
        threshold_kind: `"fixed"` or `"quantile"`: then each epoch starts with the thresholds at
            these quantiles of the training scores.
        tolerance: kappa.
        batch: samples of a batch, a quarter from each cell (group, label).
        hidden: widths of the hidden layers.
        validation: share of the training data that is split off; the split depends on the seed of
            the run, so that figures averaged over seeds do not hang on one sample. (Generated data
            are drawn anew for each seed.)
        feasible_by: what must be small for a method to count as feasible: the `"gap"` of the ROC
            curves beyond chance, or the smoothed `"violation"`.
        feasible_limit: its limit.

    Further fields: those of `Scheduled`; the learning rate falls at milestones unless told
    otherwise.
    """

    schedule: Schedule = "milestones"
    decay: float = 0.1
    score: Literal["normalised", "unbounded"] = "normalised"
    temperature: float = 0.2
    pair_temperature: float = 1.0
    objective: Literal["auc", "bce"] = "auc"
    thresholds: tuple[float, ...] = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)
    threshold_kind: Literal["fixed", "quantile"] = "fixed"
    tolerance: float = 0.005
    batch: int = 128
    hidden: tuple[int, ...] = (64, 64)
    validation: float = 0.2
    feasible_by: Literal["gap", "violation"] = "gap"
    feasible_limit: float = 0.03

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        super().__post_init__()
        for name in ("temperature", "pair_temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"`{name}` must be above 0 but is: {getattr(self, name)}.")
        if not all(width >= 1 for width in self.hidden):
            raise ValueError(f"`hidden` must hold widths from 1 on but is: {list(self.hidden)}.")
        if self.batch < 4 or self.batch % 4:
            raise ValueError(f"`batch` must be a multiple of 4 (cells) but is: {self.batch}.")
        if not 0 <= self.tolerance < math.inf:
            raise ValueError(f"`tolerance` must be at least 0 but is: {self.tolerance}.")
        if not self.thresholds or not all(math.isfinite(tau) for tau in self.thresholds):
            raise ValueError(
                f"`thresholds` must hold at least one number but is: {list(self.thresholds)}."
            )
        if self.threshold_kind == "quantile" and not all(0 < q < 1 for q in self.thresholds):
            raise ValueError(
                "`thresholds` must lie between 0 and 1 for threshold_kind: quantile, but are: "
                f"{list(self.thresholds)}."
            )
        if not 0 <= self.validation < 1:
            raise ValueError(f"`validation` must be in [0, 1) but is: {self.validation}.")

    @property
    def constraint_names(self) -> tuple[str, ...]:
        """TPR gaps at each threshold, then FPR gaps."""
        mark = "q" if self.threshold_kind == "quantile" else ""
        return tuple(
            f"{rate} gap at {mark}{tau:g}" for rate in ("TPR", "FPR") for tau in self.thresholds
        )
