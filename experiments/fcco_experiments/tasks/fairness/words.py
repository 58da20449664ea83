"""The report's words, columns and plots."""

from __future__ import annotations

from collections.abc import Iterator

from ...task import Metric, Page, Panel
from .config import Fairness
from .judge import references

__all__ = ["page"]

_LISTS = ("constraints", "val_constraints", "test_constraints", "multipliers", "best_multipliers")
_NAMES = {"train": "train", "val": "validation", "test": "test"}


def page(config: Fairness) -> Page:
    """What a reader sees, in order."""
    limit = 0.0
    return Page(
        title=f"Two groups, one ROC curve: {_data(config)}, {config.score} score",
        question=_question(config),
        metrics=_metrics(config),
        panels=(
            Panel(
                "tradeoff",
                y="test_auc",
                x="test_gap",
                title="The price of equal ROC curves (test data): up and left is better",
                label="AUC",
                x_label="largest true gap of TPR or FPR",
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
        references=references(config),
        clouds=tuple(_clouds(config)),
    )


def _clouds(config: Fairness) -> Iterator[Panel]:
    """Plots of a sweep: what training and validation data say of every run."""
    by_violation = config.feasible_by == "violation"
    for part in ("val", "train") if config.validation else ("train",):
        name = _NAMES[part]
        yield Panel(
            "tradeoff",
            y=f"{part}_auc",
            x=f"{part}_violation",
            title=f"AUC against the worst constraint ({name} data)",
            label=f"AUC, {name}",
            x_label=f"worst constraint value, {name}",
            x_reference=config.feasible_limit if by_violation else 0.0,
        )
        yield Panel(
            "tradeoff",
            y=f"{part}_auc",
            x=f"{part}_gap",
            title=f"AUC against the true ROC gap ({name} data)",
            label=f"AUC, {name}",
            x_label=f"largest true gap of TPR or FPR, {name}",
        )


def _data(config: Fairness) -> str:
    return {"adult": "Adult", "compas": "COMPAS"}.get(config.data, config.data)


def _question(config: Fairness) -> tuple[str, ...]:
    asked = {
        "adult": "whether a person earns more than 50,000 dollars a year (census data of 1994, "
        "48,842 people); the groups are women and men",
        "compas": "whether a defendant is arrested again within two years (Broward County, "
        "6,172 people); the groups are Caucasian and non-Caucasian",
    }.get(config.data, "a label; there are two groups")
    goal = "AUC" if config.objective == "auc" else "likelihood (cross-entropy)"
    count = 2 * len(config.thresholds)
    if config.score == "normalised":
        scale = (
            "Scores are normalised to mean 0 and deviation 1 over the population, so that nobody "
            "can meet the constraints by moving all scores out of the thresholds' reach, and a "
            f"rate counts a score with sigmoid((score - threshold)/{config.temperature:g}), sharp "
            "enough that the smoothed rates say something about the true ones."
        )
    else:
        scale = (
            "Scores are unbounded, as the paper prints it: a model may meet every constraint by "
            "moving all scores far away from the thresholds. Look at the share of scores inside "
            "the thresholds and at the true gap before you believe a constraint."
        )
    return (
        f"A network with {len(config.hidden)} hidden layers scores {asked}. We ask for the "
        f"highest {goal} such that the two groups have the same ROC curve: at each of "
        f"{len(config.thresholds)} thresholds, the share of positive people above the threshold "
        "(TPR) may differ between the groups by at most the tolerance "
        f"{config.tolerance:g}, and so may that of negative people (FPR). These are {count} "
        "constraints, each an expectation of which a mini-batch gives a noisy guess.",
        scale,
        "Three figures tell whether a method did it: the AUC; the worst constraint value (the "
        "smoothed gap less the tolerance; at most 0 is asked); and the true gap, the largest "
        "difference of TPR or FPR between the groups over all thresholds, with nothing smoothed. "
        "Even equal curves show a gap on a finite sample: the column 'by chance' says how "
        "much.",
    )


def _metrics(config: Fairness) -> tuple[Metric, ...]:
    parts = ["test", "train"] + (["val"] if config.validation else [])
    metrics: list[Metric] = []
    for part in parts:
        name, main = _NAMES[part], part != "val"
        metrics += [
            Metric(
                f"{part}_auc",
                f"AUC, {name}",
                "higher",
                headline=main,
                meaning="probability that a positive person scores above a negative one",
            ),
            Metric(
                f"{part}_violation",
                f"worst, {name}",
                "lower",
                headline=main,
                meaning="largest smoothed gap less the tolerance; at most 0 is asked",
            ),
            Metric(
                f"{part}_gap",
                f"true gap, {name}",
                "lower",
                3,
                headline=main,
                meaning="largest difference of TPR or FPR between the groups over all thresholds",
            ),
            Metric(f"{part}_tpr_gap", f"TPR gap, {name}", "lower", 3),
            Metric(f"{part}_fpr_gap", f"FPR gap, {name}", "lower", 3),
            Metric(
                f"{part}_gap_floor",
                f"by chance, {name}",
                "none",
                3,
                headline=part == "test",
                meaning="the gap that equal curves show on average on a sample of this size",
            ),
            Metric(
                f"{part}_inside",
                f"inside, {name}",
                "none",
                3,
                headline=main,
                meaning="share of the scores between the lowest and the highest threshold",
            ),
        ]
    return (
        *metrics,
        Metric("seconds", "seconds", "none", 1, headline=True, meaning="training time of a run"),
        Metric("kkt_stationarity", "KKT stationarity", "lower", meaning=_KKT.format("its own")),
        Metric("kkt_feasibility", "KKT feasibility", "lower"),
        Metric("kkt_complementarity", "KKT complementarity", "lower"),
        Metric(
            "kkt_best_stationarity",
            "KKT stationarity, best multipliers",
            "lower",
            meaning=_KKT.format("the best possible"),
        ),
        Metric(
            "singular_value",
            "least singular value",
            "none",
            meaning="of the Jacobian of all constraints at the end, where one is violated",
        ),
        Metric("singular_value_violated", "the same, violated constraints", "none"),
    )


_KKT = "length of the Lagrangian's gradient on all training data with {} multipliers"
