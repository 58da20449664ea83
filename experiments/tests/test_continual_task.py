"""The task: configs and methods that are refused, who learned without forgetting, the page."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from continual_cases import CONFIG, METHODS
from fcco_experiments import config as configs
from fcco_experiments import sweep as sweeps
from fcco_experiments.task import Method, Row
from fcco_experiments.tasks.continual import TASK, Continual
from fcco_experiments.tasks.continual.training import build
from fcco_experiments.tasks.judge import judge

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize("data", ["weather", "bdd100k-subset"])
@pytest.mark.parametrize(
    ("setting", "number"), [("wide", 6 * 16), ("seen", 4 * 6), ("held-out", 6 * 6)]
)
def test_settings_are_the_winners_of_the_sweep(data: str, setting: str, number: int) -> None:
    sweep = sweeps.read(RESULTS / f"continual-{data}-{setting}{'-sweep' * (setting != 'wide')}")
    assert sweep is not None
    tried = {entry["name"]: entry["setting"] for entry in sweep["settings"]}
    loaded = configs.load(TASK, data if setting == "wide" else f"{data}-{setting}")
    chosen, rule = loaded.methods, TASK.rule(loaded)
    assert len(tried) == number and len(sweep["seeds"]) == 5
    assert not set(sweep["seeds"]) & set(loaded.seeds)
    figures = {entry["name"]: entry["figures"] for entry in sweep["settings"]}
    for method, winner in sweep["winners"].items():
        own = [rule.score(figures[name]) for name in tried if name.startswith(f"{method}@")]
        assert rule.score(figures[winner]) == min(own)
    for name, winner in sweep["winners"].items():
        flat = dataclasses.asdict(chosen[name])
        flat |= {f"settings.{key}": value for key, value in flat.pop("settings").items()}
        assert {key: flat[key] for key in tried[winner]} == tried[winner], name


# What is refused.

SONEX = METHODS["sonex"]


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (Method("sonax", 0.1), "`method` must be one of automatic, sonex"),
        (Method("sonex", 0.1, settings={"penalty": 1}), "needs `smoothing`"),
        (Method("sox", 0.1, settings={"penalty": 1, "smoothing": 1}), "no such setting.*smoothing"),
        (Method("sox", 0.1, settings={"penalty": 1, "tolerance": 1}), "is made by the task"),
        (Method("weighted", 0.1), "`settings.weight` is needed for weighted"),
        (Method("finetune", 0.1, settings={"weight": 1}), "`settings.weight` is not for finetune"),
        (Method("replay", 0.1, settings={"penalty": 1}), "`settings.penalty` is not for replay"),
        (
            dataclasses.replace(SONEX, independent=True),
            "`independent` is for .* but is set for sonex",
        ),
        (
            Method("automatic", 0.1, settings={"penalty": 1}),
            "`settings.penalty` is not for automatic",
        ),
        (Method("finetune", 0.1, settings={"contrast_gamma": 1.5}), "gamma"),
    ],
)
def test_methods_that_do_not_fit(method: Method, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        build(torch.nn.Linear(2, 2), method, CONFIG, 20, 50)


def test_the_task_names_methods_and_backbones_that_do_not_fit() -> None:
    methods = METHODS | {"bad": Method("weighted", 0.1)}
    asked = dataclasses.replace(
        CONFIG, methods=methods, image_backbone="minilm", text_backbone="nothing"
    )
    said = dict(TASK.check(asked))
    assert set(said) == {("image_backbone",), ("text_backbone",), ("methods", "bad")}
    assert "takes texts, not images" in said["image_backbone",]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": "clear"}, "must be different classes"),
        ({"protected": ()}, "must be different classes, two at least"),
        ({"prompt": "the weather"}, r"must hold one \{\}.* but: 'the weather'"),
        ({"captions": ("{} in {town}",)}, r"must hold one \{\}, and no other braces"),
        ({"captions": ()}, "`captions` must hold a sentence"),
        ({"batch": 0}, "`batch` must be at least 1"),
        ({"forget_limit": -0.1}, "`forget_limit` must be at least 0"),
        ({"temperature": 0.0}, "`temperature` must be above 0"),
        ({"old_lr": 0.0}, "`old_lr` must be above 0"),
        ({"old_share": 0.0}, r"`old_share` must be in \(0, 1\]"),
        ({"protect": "held-out"}, "`protect: held-out` needs an `old_share` below 1"),
        ({"size": (0, 5)}, "height and a width"),
        ({"train": "all"}, "`train: all` needs an image and a text backbone"),
        ({"image_backbone": "resnet50"}, "give both or none"),
    ],
)
def test_configs_that_cannot_be_trained(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(CONFIG, **changes)


# The rule and the verdict.


def config(**changes: Any) -> Continual:
    words = {name: name for name in ("sonex", "sox", "sonx", "weighted", "replay")}
    words |= {"sonex-rho-10": "sonex", "plain": "finetune"}
    usual: dict[str, Any] = {"data": "weather", "target": "foggy", "protected": ("clear", "rainy")}
    usual |= {"methods": {n: Method(word, 0.1) for n, word in words.items()}, "seeds": (0, 1, 2)}
    return Continual(**(usual | changes))


def row(**changes: Any) -> Row:
    """A run that learned and kept everything."""
    usual: Row = {
        "epoch": 5, "objective": 0.1, "constraints": [-0.3, -0.1], "zero_one": [0.0, -0.01],
        "multipliers": [0.1, 0.0], "train_accuracy": 0.8, "test_counts": [60, 50, 70],
    }  # fmt: skip
    figures = {"target_accuracy": 0.6, "target_gain": 0.4, "forgetting": 0.0, "kept": 1.0}
    figures |= {"retained": 1.0, "excess": 0.0, "violation": -0.1}
    for part in ("train", "val", "test"):
        usual |= {f"{part}_{key}": value for key, value in figures.items()}
    return usual | changes


def rows(key: str, *values: float, **changes: Any) -> list[Row]:
    return [row(**{key: value}, **changes) for value in values]


def forgetful(*lost: float, **changes: Any) -> list[Row]:
    """Runs in which a protected class loses so much."""
    return [
        row(
            train_forgetting=share, test_forgetting=share, train_kept=0.0, train_retained=0.0,
            test_retained=0.0, train_excess=share - 0.01, **changes,
        )
        for share in lost
    ]  # fmt: skip


def test_kept_comes_before_the_target_and_test_data_never_count() -> None:
    rule = TASK.rule(config())
    best, good = row(val_target_accuracy=0.9), row(val_target_accuracy=0.8, train_violation=-1.0)
    close = forgetful(0.02, val_target_accuracy=0.99)[0]
    far = forgetful(0.05, val_target_accuracy=1.0)[0]
    tied = row(val_target_accuracy=0.8, train_violation=0.5)
    assert sorted([far, tied, close, good, best], key=rule.score) == [best, good, tied, close, far]
    assert rule.feasible(rule.score(tied)) and not rule.feasible(rule.score(close))
    for key in row():
        if key.startswith("test_"):
            assert rule.score(row(**{key: 0.123})) == rule.score(row())
    shown = {metric.key: metric for metric in TASK.page(config()).metrics if metric.headline}
    assert shown[rule.objective].better == "higher" and shown[rule.constraint].better == "lower"


def test_a_choice_on_validation_data_is_the_mean_accuracy_of_all_classes() -> None:
    rule = TASK.rule(config(choose_by="validation"))
    best, second = row(val_accuracy=0.8, train_excess=0.2), row(val_accuracy=0.7)
    assert sorted([second, best], key=rule.score) == [best, second]
    assert rule.feasible(rule.score(best)) and "validation" in rule.text
    shown = {metric.key: metric.better for metric in TASK.page(config()).metrics}
    assert shown[rule.objective] == "higher"


def test_settings_of_one_method_are_chosen_by_the_rule_and_not_by_test_data() -> None:
    methods = {
        "sonex": rows("val_target_accuracy", *[0.9] * 3, test_target_gain=0.1),
        "sonex-rho-10": rows("val_target_accuracy", *[0.8] * 3, test_target_gain=0.9),
        "sox": rows("val_target_accuracy", *[0.7] * 3, test_target_gain=0.3),
    }
    assert TASK.verdict(config(), methods)[0].startswith("sox wins"), "90 points were not chosen"
    assert judge(TASK, config(), methods).best == "sox"
    methods["sonex"] = forgetful(0.2, 0.2, 0.2, val_target_accuracy=0.9)
    assert TASK.verdict(config(), methods)[0].startswith("sonex-rho-10 wins")
    noisy = {"sonex": rows("test_target_gain", 0.1, 0.9, 0.5), "sox": methods["sox"]}
    assert TASK.verdict(config(), noisy)[0].startswith("Not decided: sonex")


def test_what_chooses_settings_judges_the_methods_too() -> None:
    """With `choose_by: validation` no limit counts, in the verdict as in the tables."""
    asked = config(choose_by="validation")
    methods = {
        "sonex": rows("test_accuracy", 0.5, 0.5, 0.5, test_target_gain=0.9, val_accuracy=0.5),
        "sox": [row | {"test_accuracy": 0.7, "val_accuracy": 0.7} for row in forgetful(*[0.2] * 3)],
    }
    assert judge(TASK, asked, methods).best == "sox"
    assert TASK.verdict(asked, methods)[0].startswith("sox wins")


FORGETS = {"train_kept": 0.0, "zero_one": [0.02, 0.035], "train_forgetting": 0.035}
BROKEN = {"constraints": [0.2, 0.3], "train_violation": 0.3, "penalty": 4.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"tracking_error": 0.31}, "does not see.* 0.31"),
        ({"tracking_error": 0.009, "constraints": [0.0, -0.005]}, None),
        ({"train_target_gain": -0.1}, "60.0 % .*70.0 %"),
        (
            {"train_target_gain": 0.0, "zero_one": [0.0, 0.0], "constraints": [1e-5, -1e-5]},
            "^Did not move",
        ),
        ({"train_accuracy": 0.38, "train_target_gain": -0.1}, "^Collapsed.* 38.0 %"),
        ({**FORGETS, "train_violation": 0.01}, "name only.* rainy .*0.035"),
        ({**FORGETS, "train_violation": 0.02}, None),
        ({"test_counts": [60, 50, 49]}, "foggy .*49 .*0.020"),
        ({**BROKEN, "multipliers": [1.9, 2.0]}, "Penalty too small for rainy:"),
        ({**BROKEN, "multipliers": [2.0, 2.5]}, None),  # a squared hinge
        ({**BROKEN, "multipliers": [2.0, 0.0], "tracking_error": 0.25}, None),
    ],
)
def test_warnings(changes: dict[str, Any], said: str | None) -> None:
    found = TASK.warnings(config(), row(**changes))
    assert len(found) == (said is not None)
    assert said is None or re.search(said, found[0])
