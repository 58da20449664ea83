"""The report of group DRO by hand: the rule, who is first and by how much, labels, warnings."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fcco_experiments import stats
from fcco_experiments.task import Method, Row
from fcco_experiments.tasks.group_dro import TASK, GroupDRO
from group_dro_cases import training

METHODS = {"sonex": "sonex", "sonx": "sonx", "ooa-cvar": "ooa", "erm": "erm", "mean": "uniform"}
DATA = ("celeba", "sentiment", "amazon", "camelyon17", "grouped-synthetic", "my/table.csv")


def config(**changes: Any) -> GroupDRO:
    methods = {name: Method(word, 0.1) for name, word in METHODS.items()}
    usual: dict[str, Any] = {"data": "celeba", "seeds": (0, 1, 2), "methods": methods, "epochs": 5}
    return GroupDRO(**(usual | changes))


def row(**changes: float) -> Row:
    usual: Row = {"epoch": 5, "test_smallest": 50}
    for part in ("train", "val", "test"):
        usual |= {f"{part}_cvar": 0.5, f"{part}_worst_accuracy": 0.7, f"{part}_accuracy": 0.9}
    return usual | changes


def rows(key: str, *values: float, **others: float) -> list[Row]:
    return [row(**{key: value}, **others) for value in values]


BY = {
    "train_cvar": ((0.2,), "train_cvar"),
    "val_cvar": ((0.3,), "test_cvar"),
}


@pytest.mark.parametrize("by", BY)
def test_what_chooses_settings_is_judged_on_test_data_and_is_a_column(by: Any) -> None:
    figures = {"train_cvar": 0.2, "val_cvar": 0.3}
    wanted, judged = BY[by]
    found = TASK.rule(config(choose_by=by))
    assert found.score(figures) == wanted and found.objective == judged
    with pytest.raises(KeyError, match=by):  # never from test figures
        found.score({"test_cvar": 0.1, "test_worst_accuracy": 0.9})
    page = TASK.page(config(choose_by=by))
    assert stats.columns(page.metrics, found)[0].key == judged


# Warnings.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"tracking_error": 0.49}, None),
        ({"tracking_error": 0.51}, "off by 0.51 .* the CVaR itself, 0.5"),
        ({"threshold": 0.9, "threshold_exact": 0.7}, None),  # 0.2, less than half of 0.5
        ({"threshold": 0.9, "threshold_exact": 0.4}, "threshold is off: 0.9 .* 0.4"),
        ({"threshold": -0.1, "threshold_exact": 0.4}, "threshold is off"),
        ({"test_smallest": 20}, None),
        ({"test_smallest": 19}, "19 samples.* 5 points"),
        ({"test_worst_accuracy": 0.0, "test_accuracy": 0.85}, "One answer for all.* 85.0 %"),
        ({"test_worst_accuracy": 0.0, "test_accuracy": 0.4}, None),
    ],
)
def test_warnings(changes: dict[str, float], said: str | None) -> None:
    found = TASK.warnings(config(), row(**changes))
    assert len(found) == (said is not None)
    assert said is None or re.search(said, found[0])


# The page.


@pytest.mark.parametrize("summary", ["worst", "tenth"])
def test_the_accuracy_of_groups_is_labelled_as_it_was_computed(summary: Any) -> None:
    """Whatever the data set is called; the column and the plots of the other figure are empty."""
    found = training("sonex", summary=summary).evaluate()
    labels = {"worst": "worst group", "tenth": "10th percentile"}
    for data in DATA:
        page = TASK.page(config(data=data))
        known = {metric.key: metric.label for metric in page.metrics if metric.key in found}
        keys = [key for key in known if key.startswith("test_") and known[key].startswith(
            tuple(labels.values()))]  # fmt: skip
        assert keys == [f"test_{summary}_accuracy"]
        assert known[keys[0]] == f"{labels[summary]}, test"
        plotted = {panel.y for panel in page.panels if panel.y in found and "_acc" in panel.y}
        assert plotted == {*keys, "test_accuracy"}
