"""Who is feasible, who wins, what is met in name only; the report's words; bad configs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fairness_cases import METHODS, config, start
from fcco_experiments.data import synthetic
from fcco_experiments.task import Method, Row
from fcco_experiments.tasks.fairness import TASK, judge, words
from fcco_experiments.tasks.fairness.cells import Cells
from fcco_experiments.tasks.fairness.training import FairnessTraining


def row(**changes: float) -> Row:
    usual: Row = {}
    for part in ("train", "val", "test"):
        usual |= {
            f"{part}_auc": 0.8,
            f"{part}_gap": 0.048,
            f"{part}_gap_floor": 0.04,
            f"{part}_violation": 0.01,
            f"{part}_inside": 0.9,
        }
    return usual | changes


# The rule of a sweep.


def test_true_gap_takes_the_chance_out() -> None:
    assert judge.true_gap(row(val_gap=0.05), "val") == pytest.approx(0.03)
    assert judge.true_gap(row(val_gap=0.04), "val") == 0.0
    assert judge.true_gap(row(val_gap=0.01), "val") == 0.0  # below chance


def test_feasible_comes_before_auc() -> None:
    asked = config(feasible_by="gap", feasible_limit=0.03)
    good, fair = row(val_gap=0.5, val_auc=0.99), row(val_auc=0.7)
    better, nearer = row(val_gap=0.04, val_auc=0.71), row(val_gap=0.4, val_auc=0.6)
    order = sorted([good, fair, better, nearer], key=lambda each: judge.score(asked, each))
    assert order == [better, fair, nearer, good]
    assert judge.score(asked, fair) == (0.0, -0.7)
    assert TASK.score(asked, good) == judge.score(asked, good)


def test_feasible_by_violation() -> None:
    asked = config(feasible_by="violation", feasible_limit=0.0)
    inside, outside = row(val_violation=-0.2, val_auc=0.6), row(val_violation=1e-3, val_auc=0.9)
    assert judge.score(asked, inside) == (0.0, -0.6)
    assert judge.score(asked, outside) == (1e-3, -0.9)
    assert judge.score(asked, inside) < judge.score(asked, outside)
    assert judge.score(asked, inside | {"val_gap": 0.9}) == judge.score(asked, inside)


@pytest.mark.parametrize("by", ["gap", "violation"])
def test_only_validation_figures_count(by: Any) -> None:
    asked = config(feasible_by=by)
    kept = judge.score(asked, row())
    for key in row():
        changed = judge.score(asked, row(**{key: 0.123}))
        if not key.startswith("val_"):
            assert changed == kept
    assert judge.score(asked, row(val_auc=0.123)) != kept
    assert judge.score(asked, row(val_gap=0.9, val_violation=0.9)) != kept


def test_a_choice_needs_validation_data() -> None:
    without = {key: value for key, value in row().items() if not key.startswith("val_")}
    with pytest.raises(ValueError, match="`validation` is 0"):
        judge.score(config(), without)


def test_the_rule_in_words() -> None:
    assert re.search("gap.*at most 0.07.*then .*AUC", judge.score_rule(config(feasible_limit=0.07)))
    by = config(feasible_by="violation", feasible_limit=0.01)
    assert "largest constraint value at most 0.01" in TASK.score_rule(by)


# The verdict.


def test_the_highest_auc_among_the_feasible_wins() -> None:
    free = {"plain": Method("erm", lr=0.1), "first": Method("sonex", lr=0.1)}
    asked = config(feasible_by="gap", feasible_limit=0.03, methods=free)
    methods = {
        "unfair": [row(test_auc=0.95, test_gap=0.4)],
        "second": [row(test_auc=0.81), row(test_auc=0.83)],
        "first": [row(test_auc=0.79, test_gap=0.045), row(test_auc=0.89, test_gap=0.045)],
        "plain": [row(test_auc=0.97, test_gap=0.01)],  # fair by luck, but nobody asked it to be
        "none": [],
    }
    lines = TASK.verdict(asked, methods)
    assert lines[0].startswith("first has the highest test AUC, 0.8400, among the 2 of 3")
    assert "0.045" in lines[0] and "0.03" in lines[0]
    assert lines[1] == "The others within that limit: second 0.8200."
    assert lines[2].startswith("Without constraints the test AUC is 0.9700") and "0.010" in lines[2]
    assert len(lines) == 3


def test_the_nearest_is_named_when_none_is_feasible() -> None:
    asked = config(feasible_by="violation", feasible_limit=0.0)
    methods = {
        "far": [row(test_violation=0.3, test_auc=0.9, test_gap=0.01)],
        "near": [row(test_violation=0.02, test_auc=0.7, test_gap=0.3)],
    }
    (line,) = judge.verdict(asked, methods)
    assert re.match("No method has a largest constraint value of at most 0 .*near comes", line)
    assert "+0.0200" in line and "0.7000" in line


def test_test_figures_decide_the_verdict() -> None:
    asked = config()
    methods = {"a": [row(test_auc=0.82, val_auc=0.1)], "b": [row(test_auc=0.81, train_auc=1.0)]}
    assert judge.verdict(asked, methods)[0].startswith("a has")


def test_a_figure_that_one_seed_lacks_does_not_stop_the_verdict() -> None:
    """A feasible end has no singular value."""
    rows = [row(singular_value=0.1), row()]
    assert judge.verdict(config(), {"a": rows, "b": rows[::-1]})[0].startswith("a has")


def test_no_runs() -> None:
    assert judge.verdict(config(), {"a": []}) == ("No constrained method has finished.",)


# Warnings.


def test_warnings_by_hand() -> None:
    asked = config(tolerance=0.005)
    assert judge.warnings(asked, row()) == ()
    (vacuous,) = judge.warnings(asked, row(train_inside=0.02))
    assert vacuous.startswith("Vacuous") and "2.0 %" in vacuous
    (in_name,) = judge.warnings(asked, row(train_gap=0.3))
    assert in_name.startswith("Constraints in name only") and "0.30 apart" in in_name
    assert "Normalise" not in vacuous  # the score is
    (advised,) = judge.warnings(config(score="unbounded"), row(train_inside=0.02))
    assert "Normalise" in advised
    single = config(thresholds=(0.0,))  # nothing can lie between one threshold
    assert judge.warnings(single, row(train_inside=0.0)) == ()
    violated = row(train_inside=0.02, train_gap=0.3, train_violation=0.1)
    assert judge.warnings(asked, violated) == ()  # a violation needs no further warning
    assert len(TASK.warnings(asked, violated | {"train_violation": 0.0})) == 2


def short_training(**changes: Any) -> tuple[str, ...]:
    loaded = synthetic(rows=1000, test_rows=200)
    parts = {n: Cells.of(n, p.features, p.label, p.group) for n, p in loaded.parts().items()}
    seven = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)
    asked = config(epochs=30, batch=64, thresholds=seven, hidden=(8,), tolerance=0.005, **changes)
    method = Method("sonex", 0.1, settings={"penalty": 40, "smoothing": 1e-2, "gamma": 0.5})
    run = FairnessTraining(asked, method, 0, parts)
    for _ in range(run.total_steps):
        run.step()
    found = run.evaluate()
    assert found["train_auc"] > 0.8
    return judge.warnings(asked, found)


def test_an_unbounded_score_meets_the_constraints_vacuously() -> None:
    told = short_training(score="unbounded", temperature=1.0)
    assert [text.split(":")[0] for text in told] == [
        "Vacuous constraints",
        "Constraints in name only",
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_the_same_training_with_a_normalised_score_does_not(temperature: float) -> None:
    told = short_training(score="normalised", temperature=temperature)
    assert not any(text.startswith("Vacuous") for text in told)
    if temperature == 0.2:
        assert told == ()


# The report.


@pytest.mark.parametrize("name", ["sonex", "erm"])
@pytest.mark.parametrize("kind", ["fixed", "quantile"])
def test_the_report_asks_for_figures_that_exist(name: str, kind: Any) -> None:
    asked = {"threshold_kind": kind, "thresholds": (0.25, 0.5, 0.75)}
    run = start(name, **asked)
    run.step()
    evaluated, end = run.evaluate(), run.finish()
    page = words.page(run.config)
    for panel in page.panels:
        wanted = [panel.y] + ([panel.x] if panel.kind == "tradeoff" else [])
        for key in wanted:
            assert isinstance(evaluated[key], list if panel.kind == "family" else float), key
    for metric in page.metrics:
        if metric.key != "seconds":  # of the engine
            assert isinstance((evaluated | end)[metric.key], float), metric.key
    lists = {key for key, value in (evaluated | end).items() if isinstance(value, list)}
    assert set(page.entries) == lists
    for key, names in page.entries.items():
        assert len(names) == len((evaluated | end)[key]) == 6
    keys = [metric.key for metric in page.metrics]
    assert len(keys) == len(set(keys)) and any(metric.headline for metric in page.metrics)


def test_the_page_without_validation_data_has_no_such_columns() -> None:
    page = TASK.page(config(validation=0.0))
    assert not any(metric.key.startswith("val_") for metric in page.metrics)


def test_the_page_says_what_was_asked() -> None:
    text = " ".join(words.page(config(data="adult")).question)
    assert "3 thresholds" in text and "6 constraints" in text and "tolerance 0.02" in text
    assert "AUC" in text and "normalised" in text
    other = " ".join(words.page(config(data="x", score="unbounded", objective="bce")).question)
    assert "cross-entropy" in other and "unbounded" in other


# Configs.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("pair_temperature", -1.0),
        ("decay", 0.0),
        ("decay", float("inf")),
        ("batch", 0),
        ("batch", 30),
        ("tolerance", -0.1),
        ("tolerance", float("nan")),
        ("thresholds", ()),
        ("thresholds", (0.0, float("nan"))),
        ("validation", 1.0),
        ("validation", -0.1),
        ("epochs", 0),
        ("evaluate_every", 0),
        ("checkpoint_every", 0),
        ("hidden", (8, 0)),
        ("decay_at", (0.5, 1.5)),
    ],
)
def test_bad_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must"):
        config(**{name: value})


@pytest.mark.parametrize("thresholds", [(-1.0, 0.5), (0.0, 0.5), (0.5, 1.0)])
def test_quantiles_are_shares(thresholds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="`thresholds` must lie between 0 and 1"):
        config(threshold_kind="quantile", thresholds=thresholds)


def test_usual_values_give_fourteen_constraints() -> None:
    usual = config(thresholds=(-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0), methods=METHODS)
    assert len(usual.constraint_names) == 14 and usual.score == "normalised"
