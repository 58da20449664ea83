"""From configs to methods: what is built, what is refused, what a reader is warned of."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from fcco_experiments.task import Method
from fcco_experiments.tasks.base import learning_rate_factor
from fcco_experiments.tasks.group_dro import TASK
from fcco_experiments.tasks.group_dro.training import GroupDRO, build
from group_dro_cases import METHODS, SONEX, training

import fcco

SIZES = torch.tensor([40, 30, 20, 10])


def built(method, ratio=0.3):
    config = GroupDRO(data="generated", ratio=ratio)
    return build(torch.nn.Linear(2, 2), method, config, SIZES)


def test_each_word_becomes_its_method():
    found = {name: built(method) for name, method in METHODS.items()}
    assert found["sonex"].objective.term.smoothing == 0.1
    assert found["sonx"].objective.term.smoothing == 0.0
    assert isinstance(found["alexr2"].optimizer, fcco.optim.ProximalPoint)
    assert isinstance(found["alexr2"].scheduled, torch.optim.AdamW)
    tracker = found["alexr2"].objective.term.tracker
    assert tracker.read == "new" and tracker.rule.correction == pytest.approx(0.125 * 0.8)
    assert found["ooa"].objective.term.cap == 1.0
    assert found["ooa-cvar"].objective.term.cap == pytest.approx(1 / (0.3 * 4))
    assert found["ooa-euclidean"].objective.term.geometry == "euclidean"
    assert found["uniform"].objective.term.cap == pytest.approx(1 / 4)
    assert found["erm"].objective is None


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (Method("sonax", 0.1), "`method` must be one of sonex, sonx"),
        (Method("sonx", 0.1, settings={"smoothing": 0.1}), "with smoothing it is sonex"),
        (Method("sonx", 0.1, settings={"smoothing_end": 0.1}), "smoothing_end` is not for sonx"),
        (Method("alexr2", 0.1, settings={"smoothing": 0.1, "nu": 1}), "`settings.eta` is needed"),
        (
            Method("alexr2", 0.1, settings={"smoothing": 1, "nu": 1, "eta": 1, "read": "old"}),
            "follows from theta",
        ),
        (Method("erm", 0.1, settings={"gamma": 0.1}), "`erm` has no settings but got: gamma"),
        (Method("sonx", 0.1, settings={"ratio": 0.1}), "is made by the task"),
        (dataclasses.replace(SONEX, independent=True), "`independent` is for none"),
        (dataclasses.replace(SONEX, settings={"smoothing": 0.1, "gama": 0.5}), "gama"),
        (dataclasses.replace(SONEX, beta=0.0), "beta"),
    ],
)
def test_what_is_refused(method, said):
    with pytest.raises((TypeError, ValueError), match=said):
        built(method)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ratio": 0.0}, "`ratio` must be in"),
        ({"batch": 10, "groups_per_batch": 4}, "multiple of groups_per_batch = 4"),
        ({"decay": 0.0}, "`decay` must be in"),
        ({"size": (0, 3)}, "height and a width"),
        ({"hidden": (0,)}, "widths from 1"),
        ({"train": "all"}, "needs a `backbone`"),
        ({"sample_limit": -1}, "`sample_limit` must be at least 0"),
        ({"epochs": 0}, "`epochs` must be at least 1"),
    ],
)
def test_configs_that_cannot_be_trained(changes, said):
    with pytest.raises(ValueError, match=said):
        GroupDRO(data="celeba", **changes)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_one_epoch_is_enough_for_a_schedule_with_a_warm_up(schedule):
    config = GroupDRO(data="celeba", epochs=1, schedule=schedule)
    factors = [learning_rate_factor(config, step / 100) for step in range(101)]
    top = factors.index(max(factors))
    assert factors[0] == 0 and factors[top] == 1 and factors[-1] == pytest.approx(0) and top <= 50
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert factors[top:] == sorted(factors[top:], reverse=True)


def test_sonex_without_settings_is_the_automatic_one():
    objective = built(Method("sonex", 0.1)).objective
    assert objective.term.tracker.read == "new" and objective.term.width is not None


@pytest.mark.parametrize(("groups", "drawn"), [(2, 2), (12, 8), (500, 32)])
def test_the_shape_of_a_batch_follows_the_number_of_groups(groups, drawn):
    config = GroupDRO(data="mine.csv", groups_per_batch=0, batch=64)
    assert config.with_groups(groups).groups_per_batch == drawn
    assert GroupDRO(data="mine.csv", groups_per_batch=4).with_groups(groups).groups_per_batch == 4


# Words.


def config(data: str) -> GroupDRO:
    return GroupDRO(data=data, methods={"sonex": Method("sonex", 0.1)})


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
    row = {"train_cvar": 0.5, "test_worst_accuracy": 0.7, "test_accuracy": 0.9, "test_smallest": 50}
    found = TASK.warnings(config("celeba"), row | changes)
    assert len(found) == (said is not None)
    assert said is None or re.search(said, found[0])


@pytest.mark.parametrize("summary", ["worst", "tenth"])
def test_the_accuracy_of_groups_is_labelled_as_it_was_computed(summary: Any) -> None:
    """Whatever the data set is called; the column and the plots of the other figure are empty."""
    found = training("sonex", summary=summary).evaluate()
    labels = {"worst": "worst group", "tenth": "10th percentile"}
    for data in ("celeba", "amazon", "my/table.csv"):
        page = TASK.page(config(data))
        known = {metric.key: metric.label for metric in page.metrics if metric.key in found}
        keys = [key for key in known if key.startswith("test_") and known[key].startswith(
            tuple(labels.values()))]  # fmt: skip
        assert keys == [f"test_{summary}_accuracy"]
        assert known[keys[0]] == f"{labels[summary]}, test"
        plotted = {panel.y for panel in page.panels if panel.y in found and "_acc" in panel.y}
        assert plotted == {*keys, "test_accuracy"}
