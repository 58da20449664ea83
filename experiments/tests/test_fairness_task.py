"""The task: its configs and grids, who wins, what is met in name only, columns and plots."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fairness_cases import METHODS
from fairness_cases import config as small
from fcco_experiments import config, data, sweep
from fcco_experiments.task import Method, Row
from fcco_experiments.tasks.fairness import TASK, Fairness

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_methods_that_do_not_fit_are_named_before_any_training() -> None:
    methods = {"good": METHODS["sonex"], "bad": Method("sonex", 0.1)}
    assert [path for path, _ in TASK.check(small(methods=methods))] == [("methods", "bad")]


SWEEPS = [
    (f"{name}{setting}", f"fairness-{name}-{kind}-sweep", grid)
    for name in ("adult", "compas")
    for setting, kind, grid in (
        ("", "full", "full"),
        ("-paper", "paper", "paper"),
    )
]


@pytest.mark.parametrize(("name", "folder", "grid"), SWEEPS)
def test_settings_are_the_winners_of_the_committed_sweeps(name, folder, grid) -> None:
    loaded = config.load(TASK, name)
    found = sweep.read(RESULTS / folder)
    assert found is not None
    tried = {s.name: s for s in sweep.settings_of(sweep.read_grid(TASK, grid), loaded)}
    assert {e["name"]: e["setting"] for e in found["settings"]} == {
        name: setting.values for name, setting in tried.items()
    }
    chosen = {n: method for n, method in loaded.methods.items() if n not in ("erm", "automatic")}
    assert chosen == {family: tried[best].method for family, best in found["winners"].items()}
    assert not set(found["seeds"]) & set(loaded.seeds), "fresh seeds"
    # The rule, asked again, with the figures that are committed.
    scores: dict[str, dict[str, tuple[float, ...]]] = {}
    for entry in found["settings"]:
        figures = entry["figures"]
        if entry["diverged"] == 0:
            if "val_gap" in figures:
                beyond = figures["val_gap"] ** 2 - figures["val_gap_floor"] ** 2
                figures = figures | {"val_excess_gap": math.sqrt(max(0.0, beyond))}
            score = TASK.rule(loaded).score(figures)
            scores.setdefault(entry["method"], {})[entry["name"]] = score
    for family, best in found["winners"].items():
        assert scores[family][best] == pytest.approx(min(scores[family].values()), abs=1e-5)


@pytest.mark.parametrize("name", ["adult", "compas"])
def test_the_learning_rate_of_the_method_without_settings(name: str) -> None:
    found = sweep.read(RESULTS / f"fairness-{name}-automatic-sweep")
    loaded, grid = config.load(TASK, name), sweep.read_grid(TASK, "automatic")
    assert found is not None and not set(found["seeds"]) & set(loaded.seeds)
    tried = {s.name: s.method for s in sweep.settings_of(grid, loaded)}
    best = min(found["settings"], key=lambda entry: TASK.rule(loaded).score(entry["figures"]))
    assert len(tried) == 6 and best["name"] == found["winners"]["automatic"]
    assert loaded.methods["automatic"] == tried[best["name"]]


def test_the_problem_splits_its_data_by_the_seed() -> None:
    asked = Fairness(data="synthetic", epochs=1, hidden=(4,))
    problem = TASK.load(asked)
    sizes = {name: len(part) for name, part in problem.parts(1).items()}
    assert sizes["train"] + sizes["validation"] == 4000 and sizes["test"] == 2000
    assert abs(sizes["validation"] - 800) <= 2, "a fifth of each of four cells, rounded"
    assert problem.start(METHODS["erm"], 1).train is problem.parts(1)["train"]
    assert not problem.parts(1)["train"].inputs.equal(problem.parts(2)["train"].inputs)
    assert problem.fingerprint() == TASK.load(asked).fingerprint()
    alone = TASK.load(replace(asked, validation=0.0)).start(METHODS["erm"], 0).evaluate()
    assert "val_auc" not in alone and "test_auc" in alone


# The rule and the verdict.


def row(**changes: float) -> Row:
    usual: Row = {}
    figures = {"auc": 0.8, "gap": 0.048, "gap_floor": 0.04, "excess_gap": 0.0265}
    for part in ("train", "val", "test"):
        for key, value in (figures | {"violation": 0.01, "inside": 0.9}).items():
            usual[f"{part}_{key}"] = value
    return usual | changes


@pytest.mark.parametrize(("by", "key"), [("gap", "excess_gap"), ("violation", "violation")])
def test_feasible_comes_before_auc_and_only_validation_figures_choose(by: Any, key: str) -> None:
    asked = small(feasible_by=by, feasible_limit=0.03)
    rule = TASK.rule(asked)
    good, fair = row(**{f"val_{key}": 0.5, "val_auc": 0.99}), row(val_auc=0.7)
    better = row(**{f"val_{key}": 0.0, "val_auc": 0.71})
    nearer = row(**{f"val_{key}": 0.4, "val_auc": 0.6})
    assert sorted([good, fair, better, nearer], key=rule.score) == [better, fair, nearer, good]
    assert rule.feasible(rule.score(fair)) and not rule.feasible(rule.score(nearer))
    for name in row():
        if not name.startswith("val_"):
            assert rule.score(row(**{name: 0.123})) == rule.score(row())
    columns = {metric.key: metric for metric in TASK.page(asked).metrics if metric.headline}
    assert {rule.objective, rule.constraint} < columns.keys() and rule.limit == 0.03
    assert columns[rule.objective].better == "higher" and columns[rule.constraint].better == "lower"
    with pytest.raises(ValueError, match="`validation` must be above 0"):
        TASK.rule(replace(asked, validation=0.0))


def test_the_question_names_the_columns_of_a_table() -> None:
    columns = data.Columns(label="income", group=("sex", "race"))
    text = " ".join(TASK.page(small(data="people.csv", columns=columns)).question)
    assert "income of people.csv" in text and "sex and race" in text
    assert "there are two groups" not in text


def test_warnings_by_hand() -> None:
    asked = small(tolerance=0.005)

    def kinds(asked: Fairness, **changes: float) -> list[str]:
        return [text.split()[0] for text in TASK.warnings(asked, row(**changes))]

    assert kinds(asked) == []
    assert kinds(asked, train_inside=0.02) == ["Vacuous"]
    assert kinds(asked, train_excess_gap=0.29) == ["Constraints"]
    for score in ("normalised", "unbounded"):  # no advice to do what is done
        (text,) = TASK.warnings(replace(asked, score=score), row(train_excess_gap=0.29))
        assert ("normalise" in text) == (score == "unbounded") and "temperature" in text
    assert kinds(small(thresholds=(0.0,)), train_inside=0.0) == []  # nothing lies between
    violated = {"train_inside": 0.02, "train_excess_gap": 0.3, "train_violation": 0.1}
    assert kinds(asked, **violated) == []  # a violation needs no further warning


# The page.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("nan")), ("decay", 0.0), ("batch", 30),
        ("tolerance", -0.1), ("thresholds", ()), ("thresholds", (0.0, float("nan"))),
        ("validation", 1.0), ("epochs", 0), ("hidden", (8, 0)), ("decay_at", (0.5, 1.5)),
    ],
)  # fmt: skip
def test_bad_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must"):
        small(**{name: value})
