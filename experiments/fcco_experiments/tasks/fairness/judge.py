"""Which figures count: what is feasible, who won, and what is met only in name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from ...task import Row
from .config import Fairness
from .methods import UNCONSTRAINED

__all__ = ["excess", "references", "score", "score_rule", "true_gap", "verdict", "warnings"]

FEW = 0.10
"""Below this share of scores between the thresholds, the constraints see almost nobody."""
APART = 0.10
"""ROC curves that differ by more than this are not equal for any purpose."""
NEAR = 0.015
"""A worst constraint value up to this counts as nearly met."""


def references(config: Fairness) -> tuple[str, ...]:
    """The methods of a config that train without constraints."""
    return tuple(n for n, each in config.methods.items() if each.method == UNCONSTRAINED)


def true_gap(row: Row, part: str) -> float:
    r"""The gap of the ROC curves without what a sample of this size shows when there is none.

    .. math::
        \sqrt{\max(\text{gap}^2 - \text{floor}^2,\, 0)}
    """
    return math.sqrt(max(row[f"{part}_gap"] ** 2 - row[f"{part}_gap_floor"] ** 2, 0.0))


def excess(config: Fairness, row: Row, part: str) -> float:
    """By how much the figure that makes a model feasible exceeds its limit; 0 when feasible."""
    value = true_gap(row, part) if config.feasible_by == "gap" else row[f"{part}_violation"]
    return max(0.0, value - config.feasible_limit)


def score(config: Fairness, row: Row) -> tuple[float, ...]:
    """The smaller the better: feasibility first, then AUC, on validation data alone."""
    if "val_auc" not in row:
        raise ValueError("A choice needs validation data but `validation` is 0.")
    return excess(config, row, "val"), -row["val_auc"]


def score_rule(config: Fairness) -> str:
    """The rule of `score` in words."""
    if config.validation == 0:
        raise ValueError("A choice needs validation data: `validation` must be above 0.")
    limit = f"at most {config.feasible_limit:g}"
    if config.feasible_by == "gap":
        what = f"true ROC gap, less what a sample of this size shows by chance, {limit}"
    else:
        what = f"largest constraint value {limit}"
    return f"feasible first ({what}), then the highest AUC; both on validation data only"


def verdict(config: Fairness, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
    """Who won on test data, by the rule of the sweep; a method without constraints cannot."""
    free = references(config)
    means = {
        name: {key: fmean(row[key] for row in rows) for key in _keys(rows)}
        for name, rows in methods.items()
        if rows
    }
    prices = [means.pop(name) for name in free if name in means]
    if not means:
        return ("No constrained method has finished.", *_price(prices))
    feasible = {name: row for name, row in means.items() if excess(config, row, "test") == 0}
    lines = []
    if config.feasible_by == "gap":
        limit = f"a true ROC gap of at most {config.feasible_limit:g} beyond chance"
    else:
        limit = f"a largest constraint value of at most {config.feasible_limit:g}"
    if feasible:
        best = max(feasible, key=lambda name: feasible[name]["test_auc"])
        row = feasible[best]
        lines.append(
            f"{best} has the highest test AUC, {row['test_auc']:.4f}, among the "
            f"{len(feasible)} of {len(means)} methods with {limit} on test data (its measured gap: "
            f"{row['test_gap']:.3f}; chance alone: {row['test_gap_floor']:.3f})."
        )
        others = sorted(set(feasible) - {best}, key=lambda name: -feasible[name]["test_auc"])
        if others:
            listed = ", ".join(f"{name} {feasible[name]['test_auc']:.4f}" for name in others)
            lines.append(f"The others within that limit: {listed}.")
    else:
        best = min(means, key=lambda name: excess(config, means[name], "test"))
        row = means[best]
        lines.append(
            f"No method has {limit} on test data. {best} comes nearest: gap {row['test_gap']:.3f} "
            f"(chance alone: {row['test_gap_floor']:.3f}), largest constraint value "
            f"{row['test_violation']:+.4f}, test AUC {row['test_auc']:.4f}."
        )
    return (*lines, *_price(prices))


def _price(rows: Sequence[Row]) -> list[str]:
    """What there was to lose: the figures without constraints."""
    return [
        f"Without constraints the test AUC is {row['test_auc']:.4f} and the ROC curves of the "
        f"groups are {row['test_gap']:.3f} apart: that is the price list."
        for row in rows
    ]


def warnings(config: Fairness, row: Row) -> tuple[str, ...]:
    """Constraints that are met without meaning anything."""
    nearly_met = row["train_violation"] <= NEAR
    found = []
    if nearly_met and len(config.thresholds) > 1 and row["train_inside"] < FEW:
        advice = " Normalise the score (`--score normalised`)."
        found.append(
            f"Vacuous constraints: only {100 * row['train_inside']:.1f} % of the training scores "
            "lie between the lowest and the highest threshold, so the constraints hold because "
            "they see almost nobody." + (advice if config.score == "unbounded" else "")
        )
    if nearly_met and true_gap(row, "train") > APART:
        found.append(
            f"Constraints in name only: the worst constraint is at {row['train_violation']:+.3f} "
            f"(0 is the limit) while the true ROC curves of the groups are {row['train_gap']:.2f} "
            "apart. Use a normalised score, a smaller temperature, or more thresholds."
        )
    return tuple(found)


def _keys(rows: list[Row]) -> list[str]:
    """Numbers that every run has: a feasible one has no singular value."""
    shared = set.intersection(*(set(row) for row in rows))
    numbers = [key for key, value in rows[0].items() if isinstance(value, int | float)]
    return [key for key in numbers if key in shared]
