"""Who is feasible, who wins, what is met in name only; the report's columns; bad configs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fairness_cases import config, start
from fcco_experiments.data import synthetic
from fcco_experiments.task import Method, Row
from fcco_experiments.tasks.fairness import TASK, report
from fcco_experiments.tasks.fairness.model import Cells
from fcco_experiments.tasks.fairness.training import FairnessTraining

FREE = {"plain": Method("erm", lr=0.1), "first": Method("sonex", lr=0.1)}


def row(**changes: float) -> Row:
    usual: Row = {}
    for part in ("train", "val", "test"):
        usual |= {
            f"{part}_auc": 0.8,
            f"{part}_gap": 0.048,
            f"{part}_gap_floor": 0.04,
            f"{part}_excess_gap": 0.0265,
            f"{part}_violation": 0.01,
            f"{part}_inside": 0.9,
        }
    return usual | changes


# The rule of a sweep, and of the verdict.


def test_feasible_comes_before_auc() -> None:
    rule = TASK.rule(config(feasible_by="gap", feasible_limit=0.03))
    good, fair = row(val_excess_gap=0.5, val_auc=0.99), row(val_auc=0.7)
    better, nearer = row(val_excess_gap=0.0, val_auc=0.71), row(val_excess_gap=0.4, val_auc=0.6)
    order = sorted([good, fair, better, nearer], key=rule.score)
    assert order == [better, fair, nearer, good]
    assert rule.score(fair) == (0.0, -0.7) and rule.feasible(rule.score(fair))
    assert not rule.feasible(rule.score(nearer))
    by = TASK.rule(config(feasible_by="violation", feasible_limit=0.0))
    inside, outside = row(val_violation=-0.2, val_auc=0.6), row(val_violation=1e-3, val_auc=0.9)
    assert by.score(inside) == (0.0, -0.6) < by.score(outside) == (1e-3, -0.9)


@pytest.mark.parametrize("by", ["gap", "violation"])
def test_only_validation_figures_choose_and_the_judged_figure_is_a_column(by: Any) -> None:
    asked = config(feasible_by=by, feasible_limit=0.07)
    rule = TASK.rule(asked)
    for key in row():
        if not key.startswith("val_"):
            assert rule.score(row(**{key: 0.123})) == rule.score(row())
    columns = {metric.key: metric for metric in TASK.page(asked).metrics if metric.headline}
    assert {rule.objective, rule.constraint} < columns.keys() and rule.limit == 0.07
    assert columns[rule.objective].better == "higher" and columns[rule.constraint].meaning
    assert re.search(r"at most 0\.07.*then .*AUC", rule.text)
    with pytest.raises(ValueError, match="`validation` must be above 0"):
        TASK.rule(config(validation=0.0))


# The verdict.


def test_the_highest_auc_among_the_feasible_wins() -> None:
    asked = config(feasible_by="gap", feasible_limit=0.03, methods=FREE, seeds=(0, 1), epochs=20)
    methods = {
        "unfair": [row(test_auc=0.95, test_excess_gap=0.4)] * 2,
        "second": [row(test_auc=0.80), row(test_auc=0.84)],
        "first": [row(test_auc=0.83, test_gap=0.053), row(test_auc=0.85, test_gap=0.053)],
        # Fair by luck, but nobody asked it to be.
        "plain": [row(test_auc=0.86, test_gap=0.325)] * 2,
        "none": [],
    }
    cut, won, behind = TASK.verdict(asked, methods)
    assert cut.startswith("Constraints cut the ROC gap from 0.325 to 0.053 for 0.020 of AUC (first")
    assert "tolerance of 0.02 was not reached in 20 epochs" in cut
    assert won.startswith("first wins: the highest test AUC, 0.8400 ± 0.0141, of the 2 of 3")
    # Student's t over 2 seeds: 0.02 -+ 12.706 * 0.0141 / sqrt 2.
    assert behind.startswith("second follows") and "0.0200 less (95 % interval" in behind
    assert "-0.1071 to 0.1471" in behind and "tell the two apart" in behind
    apart = {**methods, "second": [row(test_auc=0.81), row(test_auc=0.8301)]}
    assert "more than seeds alone explain" in TASK.verdict(asked, apart)[2]
    steps = " ".join(TASK.next_steps(asked, methods))
    assert "--seeds" in steps and "--epochs 40" in steps


def test_one_seed_prints_no_spread_and_says_so() -> None:
    asked = config(methods=FREE, seeds=(0,))
    lines = TASK.verdict(asked, {"first": [row()], "second": [row(test_auc=0.7)]})
    assert "±" not in " ".join(lines) and lines[-1].startswith("One seed")


def test_the_nearest_is_named_when_none_is_feasible() -> None:
    asked = config(feasible_by="violation", feasible_limit=0.0, seeds=(0,))
    methods = {
        "far": [row(test_violation=0.3, test_auc=0.9)],
        "near": [row(test_violation=0.02, test_auc=0.7)],
        "diverged": [row(test_violation=-1.0, epoch=2)],
        "done": [row(test_violation=0.5, epoch=4)],
    }
    text = " ".join(TASK.verdict(asked, methods))
    assert re.search("No method has a largest constraint value of at most 0 .*near comes", text)
    assert "0.020" in text and "diverged ended early" in text
    assert "sweep" in TASK.next_steps(asked, methods)[0]
    (nobody,) = TASK.verdict(config(), {"a": []})
    assert "finished" in nobody and TASK.next_steps(config(), {"a": []}) == ()


# Warnings.


def test_warnings_by_hand() -> None:
    asked = config(tolerance=0.005)
    assert TASK.warnings(asked, row()) == ()
    (vacuous,) = TASK.warnings(asked, row(train_inside=0.02))
    assert vacuous.startswith("Vacuous") and "2.0 %" in vacuous and "Normalise" not in vacuous
    (in_name,) = TASK.warnings(asked, row(train_gap=0.3, train_excess_gap=0.29))
    assert in_name.startswith("Constraints in name only") and "0.30 apart" in in_name
    (advised,) = TASK.warnings(config(score="unbounded"), row(train_inside=0.02))
    assert "Normalise" in advised
    single = config(thresholds=(0.0,))  # nothing can lie between one threshold
    assert TASK.warnings(single, row(train_inside=0.0)) == ()
    violated = row(train_inside=0.02, train_excess_gap=0.3, train_violation=0.1)
    assert TASK.warnings(asked, violated) == ()  # a violation needs no further warning


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"score": "unbounded", "temperature": 1.0}, ["Vacuous", "Constraints"]),
        ({"score": "normalised", "temperature": 0.2}, []),
    ],
)
def test_an_unbounded_score_meets_the_constraints_vacuously(
    changes: dict[str, Any], expected: list[str]
) -> None:
    loaded = synthetic(rows=1000, test_rows=200)
    parts = {n: Cells.of(n, p.features, p.label, p.group) for n, p in loaded.parts().items()}
    seven = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)
    asked = config(epochs=30, batch=64, thresholds=seven, hidden=(8,), tolerance=0.005, **changes)
    method = Method("sonex", 0.1, settings={"penalty": 40, "smoothing": 1e-2, "gamma": 0.5})
    run = FairnessTraining(asked, method, 0, parts)
    for _ in range(30 * run.steps_per_epoch):
        run.step()
    found = run.evaluate()
    assert found["train_auc"] > 0.8
    assert [text.split()[0] for text in TASK.warnings(asked, found)] == expected


# The page.


@pytest.mark.parametrize(("name", "kind"), [("sonex", "fixed"), ("erm", "quantile")])
def test_the_report_asks_for_figures_that_exist(name: str, kind: Any) -> None:
    run = start(name, threshold_kind=kind, thresholds=(0.25, 0.5, 0.75))
    run.step()
    found = run.evaluate() | run.finish()
    page = report.page(run.config)
    for panel in page.panels + page.clouds:
        for key in [panel.y] + ([panel.x] if panel.kind == "tradeoff" else []):
            assert isinstance(found[key], list if panel.kind == "family" else float), key
    for metric in page.metrics:
        assert metric.meaning
        if metric.key != "seconds":  # of the engine
            assert isinstance(found[metric.key], float), metric.key
    assert set(page.entries) == {key for key, value in found.items() if isinstance(value, list)}
    for key, names in page.entries.items():
        assert len(names) == len(found[key]) == 6
    keys = [metric.key for metric in page.metrics]
    assert len(keys) == len(set(keys))
    without = TASK.page(config(validation=0.0))
    assert not any(metric.key.startswith("val_") for metric in without.metrics)


def test_the_page_says_what_was_asked_and_explains_every_method() -> None:
    methods = {
        name: Method(word, 0.1, independent=name == "two")
        for name, word in {"one": "sonx", "two": "hinge", "three": "conex", "four": "erm"}.items()
    }
    page = TASK.page(config(data="adult", methods=methods))
    text = " ".join(page.question)
    assert "3 thresholds" in text and "6 constraints" in text and "tolerance 0.02" in text
    assert page.glossary.keys() == methods.keys() and all(page.glossary.values())
    assert page.glossary["one"].split(":")[0] == page.glossary["two"].split(":")[0] == "SONX"
    assert "second, independent batch" in page.glossary["two"]
    assert "ICPPAC" in page.glossary["three"] and page.references == ("four",)
    other = " ".join(TASK.page(config(data="x", score="unbounded", objective="bce")).question)
    assert "cross-entropy" in other and "unbounded" in other


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("nan")), ("pair_temperature", -1.0), ("decay", 0.0), ("batch", 30),
        ("tolerance", -0.1), ("thresholds", ()), ("thresholds", (0.0, float("nan"))),
        ("validation", 1.0), ("epochs", 0), ("hidden", (8, 0)), ("decay_at", (0.5, 1.5)),
    ],
)  # fmt: skip
def test_bad_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must"):
        config(**{name: value})


def test_quantiles_are_shares() -> None:
    for thresholds in ((-1.0, 0.5), (0.5, 1.0)):
        with pytest.raises(ValueError, match="`thresholds` must lie between 0 and 1"):
            config(threshold_kind="quantile", thresholds=thresholds)
