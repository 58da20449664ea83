"""Rates at a threshold, and what their counts say with confidence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta
from torch import Tensor

from ... import _checks

__all__ = ["SIDES", "Cuts", "Proportion", "binomial_bound", "cuts_of", "proportion"]

Array = NDArray[Any]

SIDES = {"precision": "lower", "recall": "lower", "fpr": "upper"}
"""From which side each rate is bounded: from where it could be worse."""


def binomial_bound(successes: Any, trials: Any, confidence: float, side: str = "lower") -> Any:
    r"""The exact one-sided bound of Clopper and Pearson for a probability p.

    .. math::
        P(\text{Bin}(n, \text{lower}) \ge k) = 1 - \text{confidence}

    With k successes in n trials p is at least this with the given confidence, whatever p is.
    `side="upper"` is the bound from above.

    Args:
        successes: k, a number or an array.
        trials: n.
        confidence: such as 0.95.
        side: "lower" or "upper".

    Example:
        >>> from fcco.integrations.sklearn import binomial_bound
        >>> round(float(binomial_bound(95, 100, 0.95)), 3)
        0.898
    """
    _checks.one_of("binomial_bound", "side", side, ("lower", "upper"))
    k, n = np.asarray(successes, dtype=float), np.asarray(trials, dtype=float)
    if side == "upper":
        return 1.0 - binomial_bound(n - k, n, confidence)
    with np.errstate(invalid="ignore"):
        bound = beta.ppf(1 - confidence, k, n - k + 1)
    return np.where(k > 0, bound, 0.0)


@dataclass(frozen=True)
class Proportion:
    """A rate that was counted, and what it says of the true one.

    Attributes:
        name: of the rate.
        successes: k.
        trials: n.
        measured: k / n, NaN without trials.
        bound: the true rate is at least this, or for `fpr` at most, with the confidence asked for.
    """

    name: str
    successes: int
    trials: int
    measured: float
    bound: float


def proportion(name: str, chosen: Tensor, y: Tensor, confidence: float) -> Proportion:
    """A rate of predictions.

    Args:
        name: "precision", "recall" or "fpr".
        chosen: the class that each sample is predicted to have, 0 or 1.
        y: the class that it has.
        confidence: of the bound.
    """
    chosen, y = chosen.bool(), y.to(chosen.device).bool()
    among = {"precision": chosen, "recall": y, "fpr": ~y}[name]
    hits = among & (y if name == "precision" else chosen)
    k, n = int(hits.sum()), int(among.sum())
    bound = float(binomial_bound(k, n, confidence, SIDES[name]))
    return Proportion(name, k, n, k / n if n else math.nan, bound)


class Cuts:
    """All thresholds of some scores: what lies above one is predicted positive.

    Attributes:
        thresholds: from high to low, the first above all scores and the last below.
        above: how many samples lie above each.
        hits: how many of these are positive.
    """

    def __init__(self, scores: Array, y: Array) -> None:
        order = np.argsort(-scores, kind="stable")
        values = scores[order].astype(np.float64)
        apart = np.concatenate([[True], values[1:] < values[:-1], [True]])  # none between equals
        ends = np.concatenate([values[:1] + 1, values, values[-1:] - 1])
        self.thresholds = (ends[:-1] / 2 + ends[1:] / 2)[apart]  # half-way between two
        self.above = np.arange(len(values) + 1)[apart]
        self.hits = np.append(0, np.cumsum(y[order]))[apart]
        self.positives, self.negatives = int(y.sum()), int((~y).sum())

    def counts(self, rate: str) -> tuple[Array, Array]:
        """Successes and trials of a rate at each threshold."""
        if rate == "precision":
            return self.hits, self.above
        if rate == "recall":
            return self.hits, np.full_like(self.hits, self.positives)
        return self.above - self.hits, np.full_like(self.hits, self.negatives)

    def rates(self, rate: str) -> Array:
        """The rate at each threshold; 0 without trials."""
        k, n = self.counts(rate)
        return k / np.maximum(n, 1)

    def bounds(self, rate: str, confidence: float) -> Array:
        """Its bound at each threshold."""
        return binomial_bound(*self.counts(rate), confidence, SIDES[rate])


def cuts_of(scores: Tensor, y: Tensor) -> Cuts:
    """The thresholds of what a network returned."""
    return Cuts(scores.reshape(-1).cpu().numpy(), y.bool().cpu().numpy())
