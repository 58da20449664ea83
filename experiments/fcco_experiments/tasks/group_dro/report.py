"""The report: columns, plots, the rule, who has the best worst groups, and what not to believe."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from ...prose import paragraphs
from ...task import Metric, Page, Panel, Row, Rule
from ..verdict import FinalRows, glossary, keyed
from .config import GroupDRO
from .model import REFERENCES

PAGE = "group_dro/page.j2"
SMALL = 20
"""A test group with fewer samples says little: one of them is more than five points."""
FAR = 0.5
"""A threshold that is off by more than this share of the CVaR counts the wrong groups."""

_SUMMARIES = {"worst_accuracy": "worst group", "tenth_accuracy": "10th percentile"}
"""Rows have one of these figures, as `GroupedData.summary` says."""
_COLUMNS: tuple[tuple[str, str, Any, int, str], ...] = (  # the last: parts with a headline column
    ("cvar", "CVaR", "lower", 4, "train test"),
    *((key, label, "higher", 3, "test") for key, label in _SUMMARIES.items()),
    ("accuracy", "accuracy", "higher", 3, "test"),
    ("group_accuracy", "mean of groups", "higher", 3, ""),
    ("worst_loss", "largest group loss", "lower", 4, ""),
    ("group_loss", "group loss", "lower", 4, ""),
    ("loss", "loss", "lower", 4, ""),
)
_ENDING: tuple[tuple[str, str, Any, int], ...] = (
    ("seconds", "seconds", "none", 1),
    ("tracking_error", "tracking error", "lower", 4),
    ("threshold", "threshold", "none", 4),
    ("threshold_exact", "best threshold", "none", 4),
    ("gram_smallest", "least eigenvalue", "none", 4),
    ("gram_smallest_with_s", "least eigenvalue, with threshold", "none", 4),
    ("gram_largest", "largest eigenvalue", "none", 4),
    ("samples_per_second", "samples a second", "none", 0),
)


def _words(block: str, config: GroupDRO, **values: Any) -> tuple[str, ...]:
    share = f"{100 * config.ratio:g} %"
    return paragraphs(PAGE, block, config=config, share=share, **values)


def _references(config: GroupDRO) -> tuple[str, ...]:
    """The methods of a config that minimise another average, and their settings in a sweep."""
    return tuple(name for name, method in config.methods.items() if method.method in REFERENCES)


# The rule.


def score(config: GroupDRO, row: Row) -> tuple[float, ...]:
    """The smaller the better, by `choose_by`; never from test figures."""
    if config.choose_by not in row:
        raise ValueError(f"`choose_by: {config.choose_by}` is no figure of the runs.")
    value = row[config.choose_by]
    return (-value, row["val_cvar"]) if config.choose_by.endswith("accuracy") else (value,)


def rule(config: GroupDRO) -> Rule:
    """The figure `choose_by`; on validation data for settings, on test data for the verdict."""
    (text,) = _words("rule", config)
    judged = config.choose_by.replace("val_", "test_")
    return Rule(text, functools.partial(score, config), objective=judged)


# The verdict.


def _outcome(config: GroupDRO, methods: Mapping[str, list[Row]]) -> dict[str, Any]:
    """What the sentences of the verdict are made from: who is judged, and in which order."""
    key = rule(config).objective
    final = FinalRows(config, methods, key)
    sign = -1 if key.endswith("accuracy") else 1
    rank = {name: sign * final.mean(name, key) for name in final.rows if name not in final.early}
    references = [name for name in rank if name in _references(config)]
    order = sorted((name for name in rank if name not in references), key=rank.__getitem__)
    best = order[0] if order else None
    labels = {f"test_{name}": label for name, label in _SUMMARIES.items()}
    return {
        "final": final, "key": key, "sign": sign, "order": order, "best": best, "labels": labels,
        "references": references,
        "behind": [name for name in references if best and rank[name] >= rank[best]],
        "ahead": [name for name in references if best and rank[name] < rank[best]],
        "accuracy": next((a for a in labels if best and a in final.rows[best][0]), key),
    }  # fmt: skip


def verdict(config: GroupDRO, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
    """Who is first by the judged figure, by how much, and what that is worth to the worst group."""
    return _words("verdict", config, **_outcome(config, methods))


def next_steps(config: GroupDRO, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
    """What to try next, by the outcome."""
    return _words("next_steps", config, **_outcome(config, methods))


def warnings(config: GroupDRO, row: Row) -> tuple[str, ...]:
    """Figures that mean less than they seem to."""
    cvar, worst = row["train_cvar"], row.get("test_worst_accuracy", row.get("test_tenth_accuracy"))
    off = abs(row.get("threshold", 0.0) - row.get("threshold_exact", 0.0))
    return _words(
        "warnings",
        config,
        row=row,
        blind=row.get("tracking_error", 0.0) > cvar,
        off=off > FAR * cvar,
        smallest=row["test_smallest"] if row.get("test_smallest", SMALL) < SMALL else 0,
        one_answer=worst == 0 and row["test_accuracy"] > 0.5,
    )


# The page.


def page(config: GroupDRO) -> Page:
    """What a reader sees, in order."""
    card = keyed(PAGE, "card", config=config)
    (title,) = _words("title", config, card=card)
    metrics = sorted(_metrics(config), key=lambda metric: not metric.headline)
    return Page(
        title=title,
        question=_words("question", config, card=card, rule=rule(config)),
        metrics=tuple(metrics),
        panels=tuple(_panels(config)),
        entries=dict.fromkeys(("losses", "test_reported", "weights"), ()),  # runs know the names
        references=_references(config),
        glossary=glossary(PAGE, config.methods),
    )


def _metrics(config: GroupDRO) -> Iterator[Metric]:
    meanings = keyed(PAGE, "metrics", share=f"{100 * config.ratio:g} %")
    for part, name in (("train", "train"), ("test", "test"), ("val", "validation")):
        for key, label, better, digits, headline in _COLUMNS:
            main, whole = part in headline.split(), f"{label}, {name}"
            yield Metric(f"{part}_{key}", whole, better, digits, main, meanings[key])
    for key, label, better, digits in _ENDING:
        yield Metric(key, label, better, digits, key == "seconds", meanings[key])


def _panels(config: GroupDRO) -> Iterator[Panel]:
    """Plots of figures that no run has are left out, as one of the two accuracies of groups."""
    share = f"{100 * config.ratio:g} %"
    for key, label in _SUMMARIES.items():
        title = "Does a lower CVaR in training help the worst groups of the test data?"
        yield Panel("tradeoff", f"test_{key}", title, label, "train_cvar", "CVaR, train")
        title = "What it costs on average (test data): up and right is better"
        yield Panel("tradeoff", f"test_{key}", title, label, "test_accuracy", "accuracy")
    title = f"Training: average loss of the worst {share} of groups"
    yield Panel("curve", "train_cvar", title, "CVaR, train", log=True)
    yield Panel("curve", "test_cvar", "The same on test data", "CVaR, test", log=True)
    title = "Test accuracy of the worst group"
    yield Panel("curve", "test_worst_accuracy", title, "accuracy")
    title = "Test accuracy that nine of ten groups have or exceed"
    yield Panel("curve", "test_tenth_accuracy", title, "accuracy")
    yield Panel("curve", "test_accuracy", "Test accuracy over all samples", "accuracy")
    title = "How far the running values are from the true group losses"
    yield Panel("curve", "tracking_error", title, "tracking error", log=True)
    title = "Loss of every group before and after training (training data)"
    yield Panel("change", "losses", title, "training loss by group", log=True)
    title = "Test accuracy of every reported group"
    yield Panel("dots", "test_reported", title, "test accuracy by group")
    title = "Loss of every group over training, by method"
    yield Panel("family", "losses", title, "group loss", log=True)
    title = "How much each group counts, by method"
    yield Panel("family", "weights", title, "weight")
