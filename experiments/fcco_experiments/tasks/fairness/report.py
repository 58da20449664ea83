"""The report: columns, plots, the rule, who won, and what is met only in name."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from fcco.methods.constrained import ALIASES

from ...prose import paragraphs
from ...task import Metric, Page, Panel, Row, Rule
from ..verdict import FinalRows, glossary, keyed
from .config import Fairness
from .training import UNCONSTRAINED

__all__ = ["next_steps", "page", "rule", "score", "verdict", "warnings"]

PAGE = "fairness/page.j2"
FEW = 0.10
"""Below this share of scores between the thresholds, the constraints see almost nobody."""
APART = 0.10
"""ROC curves that differ by more than this are not equal for any purpose."""
NEAR = 0.015
"""A worst constraint value up to this counts as nearly met."""

_NAMES = {"train": "train", "val": "validation", "test": "test"}
_LISTS = ("constraints", "val_constraints", "test_constraints", "multipliers", "best_multipliers")
_COLUMNS: tuple[
    tuple[str, str, Any, int, str], ...
] = (  # key, label, better, digits, headline on: test and training data, test data, nowhere
    ("auc", "AUC", "higher", 4, "both"),
    ("excess_gap", "ROC gap beyond chance", "lower", 3, "test"),
    ("gap", "true gap", "lower", 3, "both"),
    ("gap_floor", "by chance", "none", 3, "test"),
    ("violation", "worst", "lower", 4, "both"),
    ("inside", "inside", "none", 3, "both"),
    ("tpr_gap", "TPR gap", "lower", 3, ""),
    ("fpr_gap", "FPR gap", "lower", 3, ""),
)
_ENDING: tuple[tuple[str, str, Any, int], ...] = (
    ("seconds", "seconds", "none", 1),
    ("kkt_stationarity", "KKT stationarity", "lower", 4),
    ("kkt_feasibility", "KKT feasibility", "lower", 4),
    ("kkt_complementarity", "KKT complementarity", "lower", 4),
    ("kkt_best_stationarity", "KKT stationarity, best multipliers", "lower", 4),
    ("kkt_best_complementarity", "KKT complementarity, best multipliers", "lower", 4),
    ("singular_value", "least singular value", "none", 4),
    ("singular_value_violated", "least singular value, violated constraints", "none", 4),
)


def _judged(config: Fairness) -> str:
    """The figure that makes a model feasible, without its part of the data."""
    return "excess_gap" if config.feasible_by == "gap" else "violation"


def _references(config: Fairness) -> tuple[str, ...]:
    """The methods of a config that train without constraints."""
    return tuple(n for n, each in config.methods.items() if each.method == UNCONSTRAINED)


def score(config: Fairness, row: Row) -> tuple[float, ...]:
    """The smaller the better: feasibility first, then AUC, on validation data alone."""
    if "val_auc" not in row:
        raise ValueError("A choice needs validation data but `validation` is 0.")
    return max(0.0, row[f"val_{_judged(config)}"] - config.feasible_limit), -row["val_auc"]


def rule(config: Fairness) -> Rule:
    """Feasible first, then the AUC."""
    if config.validation == 0:
        raise ValueError("A choice needs validation data: `validation` must be above 0.")
    (text,) = paragraphs(PAGE, "rule", config=config)
    return Rule(
        text,
        functools.partial(score, config),
        objective="test_auc",
        constraint=f"test_{_judged(config)}",
        limit=config.feasible_limit,
        limited=True,
    )


def _outcome(config: Fairness, methods: Mapping[str, list[Row]]) -> dict[str, Any]:
    """What the sentences of the verdict are made from: who is judged, and in which order.

    Methods within the limit come first, by their AUC; then the others, the nearest first.
    """
    key = f"test_{_judged(config)}"
    final = FinalRows(config, methods, "test_auc")
    free = next((name for name in _references(config) if name in final.rows), None)
    names = [n for n in final.rows if n not in (*_references(config), *final.early)]

    def over(name: str) -> float:
        return max(0.0, final.mean(name, key) - config.feasible_limit)

    order = sorted(names, key=lambda name: (over(name), -final.mean(name, "test_auc")))
    feasible = [name for name in order if over(name) == 0]
    behind = final.difference(feasible[0], feasible[1], "test_auc") if feasible[1:] else None
    return {
        "config": config, "final": final, "key": key, "free": free, "order": order,
        "feasible": feasible, "best": order[0] if order else None, "behind": behind,
    }  # fmt: skip


def verdict(config: Fairness, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
    """Who won on test data, by the rule of the sweep; a method without constraints cannot."""
    return paragraphs(PAGE, "verdict", **_outcome(config, methods))


def next_steps(config: Fairness, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
    """What to try next, by the outcome."""
    return paragraphs(PAGE, "next_steps", **_outcome(config, methods))


def warnings(config: Fairness, row: Row) -> tuple[str, ...]:
    """Constraints that are met without meaning anything."""
    nearly_met = row["train_violation"] <= NEAR
    return paragraphs(
        PAGE,
        "warnings",
        config=config,
        row=row,
        vacuous=nearly_met and len(config.thresholds) > 1 and row["train_inside"] < FEW,
        in_name=nearly_met and row["train_excess_gap"] > APART,
    )


def page(config: Fairness) -> Page:
    """What a reader sees, in order."""
    limit, gap_limit = 0.0, config.feasible_limit if config.feasible_by == "gap" else None
    (title,) = paragraphs(PAGE, "title", config=config)
    return Page(
        title=title,
        question=paragraphs(PAGE, "question", config=config),
        metrics=tuple(_metrics(config)),
        panels=(
            Panel(
                "tradeoff",
                y="test_auc",
                x="test_excess_gap",
                title="The price of equal ROC curves (test data): up and left is better",
                label="AUC",
                x_label="ROC gap beyond chance",
                x_reference=gap_limit,
            ),
            Panel(
                "tradeoff",
                y="train_auc",
                x="train_violation",
                title="The same as training sees it: AUC against the worst constraint",
                label="AUC, train",
                x_label="worst constraint value, train",
                x_reference=limit,
            ),
            Panel("curve", y="train_auc", title="AUC on training data", label="AUC"),
            Panel(
                "curve",
                y="train_violation",
                title="Worst constraint on training data: at most 0 is asked",
                label="worst |gap| - tolerance",
                reference=limit,
            ),
            Panel("curve", y="test_auc", title="AUC on test data", label="AUC"),
            Panel("curve", y="test_gap", title="True ROC gap on test data", label="largest gap"),
            Panel(
                "curve",
                y="train_inside",
                title="Share of scores between the thresholds: near 0 the constraints are empty",
                label="share",
            ),
            Panel(
                "family",
                y="constraints",
                title="All constraints on training data, by method",
                label="|gap| - tolerance",
                reference=limit,
            ),
            Panel(
                "family",
                y="multipliers",
                title="Multipliers: the price of each constraint",
                label="multiplier",
            ),
        ),
        entries=dict.fromkeys(_LISTS, config.constraint_names),
        references=_references(config),
        clouds=tuple(_clouds(config)),
        glossary=glossary(PAGE, config.methods, ALIASES),
    )


def _clouds(config: Fairness) -> Iterator[Panel]:
    """Plots of a sweep: what training and validation data say of every run."""
    by_gap = config.feasible_by == "gap"
    for part in ("val", "train") if config.validation else ("train",):
        name = _NAMES[part]
        yield Panel(
            "tradeoff",
            y=f"{part}_auc",
            x=f"{part}_violation",
            title=f"AUC against the worst constraint ({name} data)",
            label=f"AUC, {name}",
            x_label=f"worst constraint value, {name}",
            x_reference=0.0 if by_gap else config.feasible_limit,
        )
        yield Panel(
            "tradeoff",
            y=f"{part}_auc",
            x=f"{part}_excess_gap",
            title=f"AUC against the ROC gap beyond chance ({name} data)",
            label=f"AUC, {name}",
            x_label=f"ROC gap beyond chance, {name}",
            x_reference=config.feasible_limit if by_gap else None,
        )


def _metrics(config: Fairness) -> Iterator[Metric]:
    meanings = keyed(PAGE, "metrics")
    for part in ("test", "train", *(("val",) if config.validation else ())):
        for key, label, better, digits, main in _COLUMNS:
            headline = {"test": main != "", "train": main == "both", "val": False}[part]
            whole = f"{label}, {_NAMES[part]}"
            yield Metric(f"{part}_{key}", whole, better, digits, headline, meanings[key])
    for key, label, better, digits in _ENDING:
        yield Metric(key, label, better, digits, key == "seconds", meanings[key])
