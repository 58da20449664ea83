"""Clouds, frontiers and profiles of a sweep against what loops over the settings say."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fcco_experiments import config, tasks
from fcco_experiments.report.canvas import SIZE
from fcco_experiments.report.cloud import cloud, robust
from fcco_experiments.report.inline import FINE, dots_path
from fcco_experiments.report.profile import profile, varied
from fcco_experiments.report.sensitivity import places, quantiles
from fcco_experiments.report.study import clouds, metrics, study
from fcco_experiments.task import Panel
from fcco_experiments.tasks.fairness.report import page as fairness_page
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_cases import CLOUD, LRS, PAGE, USUAL, grid, page_of, swept, table


def numbers_of(path: str) -> np.ndarray:
    """Places of the dots of a path, in points."""
    moves = [tuple(map(int, re.findall(r"-?\d+", m))) for m in path.split("h0") if m]
    assert path.startswith("M") and path.count("h0") == len(moves)
    return np.cumsum(moves, axis=0) / FINE


def drawn(page: str, name: str) -> list[tuple[np.ndarray, float]]:
    group = re.search(rf'<g id="{name}" class="dots".*?</g></g>', page)
    assert group, name
    found = re.findall(r'<path d="([^"]*)" stroke-opacity="([^"]*)"', group[0])
    return [(numbers_of(path), float(depth)) for path, depth in found]


def test_every_dot_is_a_run_where_its_figures_say(tmp_path):
    comparison, told = swept(tmp_path)
    page = page_of(comparison, told)
    found = study(comparison, told)
    own = cloud(found, CLOUD, metrics(PAGE, found))
    assert own and own.outside == 0 and "All 24 dots are in the frame." in page
    width, height = (72 * each for each in (SIZE[0] - 0.72, SIZE[1] - 0.80))
    feasible = {e["name"] for e in told["settings"] if e["score"] and e["score"][0] == 0}
    every = [drawn(page, f"c0-{k}") for k in range(3)]
    deepest = max(depth for paths in every for _, depth in paths)
    for paths, family in zip(every, told["ranking"], strict=True):
        for deep in (True, False):
            runs = [r for r in comparison.runs if r.name.startswith(family)]
            runs = [r for r in runs if (r.name in feasible) == deep]
            shares = [
                [
                    (r.figures["val_violation"] - own.x_limits[0])
                    / (own.x_limits[1] - own.x_limits[0]),
                    (own.y_limits[1] - r.figures["val_auc"]) / (own.y_limits[1] - own.y_limits[0]),
                ]
                for r in runs
            ]
            expected = np.array(shares).reshape(-1, 2) * (width, height) + (0.58 * 72, 0.30 * 72)
            there = [p for p, depth in paths if (depth == deepest) == deep]
            assert len(runs) == sum(map(len, there))
            for place in itertools.chain(*there):
                assert np.abs(expected - place).max(axis=1).min() <= 0.5 / FINE + 1e-6
    assert page.count('href="#c0-0"') == 1, "the small plot uses the dots of the large one"
    assert "Each method by itself: Cloud" in page


def test_two_methods_need_no_small_plots(tmp_path):
    page = page_of(*swept(tmp_path, {name: USUAL[name] for name in "AB"}))
    assert 'id="c0-0"' in page and 'href="#c0-0"' not in page
    assert "Each method by itself" not in page


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=12))
def test_the_frontier_is_what_no_setting_of_the_method_beats(points):
    def change(family, index, seed, final):
        x, y = points[index]
        final |= {"val_violation": x / 10 + seed / 100, "val_auc": y / 10 - seed / 100}
        return "why" if index == 3 else None

    lines = {"A": grid(lr=list(range(len(points)))), "B": grid(lr=[0])}
    comparison, told = swept(None, lines, change=change)
    found = study(comparison, told)
    own = cloud(found, CLOUD, PAGE.metrics)
    assert own
    scored = [k for k in range(len(points)) if k != 3]

    def beats(j: int, i: int) -> bool:
        (a, b), (c, d) = points[j], points[i]
        return a <= c and b >= d and (a < c or b > d)

    expected = {f"A@{i}" for i in scored if not any(beats(j, i) for j in scored)}
    assert {trial.name for trial in own.fronts["A"]} == expected
    assert [trial.name for trial in own.fronts["B"]] == ["B@0"], "each method has its own"


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.booleans())
def test_a_profile_is_the_best_score_of_each_value(seed, limited):
    rng = np.random.default_rng(seed)
    level = 0.0 if limited else 5.0

    def change(family, index, seed, final):
        final |= {"val_violation": level + rng.choice([-0.1, 0.0, 0.2]), "val_auc": rng.random()}
        return "why" if rng.random() < 0.1 else None

    comparison, told = swept(None, {"A": USUAL["A"]}, seeds=(7,), change=change)
    found = study(comparison, told)
    for key, values in varied(found.families["A"]).items():
        own = profile(found, found.families["A"], key, values)
        scores = [
            [e["score"] for e in told["settings"] if e["setting"][key] == v and e["score"]]
            for v in values
        ]
        assert [t and list(t.score or ()) for t in own.best] == [
            min(s, default=None) for s in scores
        ]
        assert [len(group) for group in own.groups] == [6 // len(values)] * len(values)
        best = [min(s) for s in scores if s]
        met = [score for score in best if score[0] == 0]
        kept = [score[1] for score in met] if met else [score[0] for score in best]
        assert own.range == pytest.approx(max(kept) - min(kept) if kept else 0.0)
        without = [v for v, s in zip(values, scores, strict=True) if not s or min(s)[0] > 0]
        assert list(own.lost) == (without if met else [])
        if best:
            top, worst = own.top, own.worst
            assert top is not None and worst is not None
            assert min(scores[top]) == min(best) and min(scores[worst]) == max(best)


def test_what_matters_most_comes_first_and_is_said(tmp_path):
    def change(family, index, seed, final):
        lr, penalty = USUAL["A"][index]["lr"], USUAL["A"][index]["settings.penalty"]
        final |= {"val_violation": -0.1, "val_auc": 0.9 - lr - 0.001 * penalty}

    comparison, told = swept(tmp_path, {"A": USUAL["A"]}, change=change)
    page = page_of(comparison, told)
    assert (
        "For A, lr matters most: between its best value, 0.001, and its worst, 0.1, the best"
        in page
    )
    assert "“AUC, validation” differs by 0.099. penalty matters least (0.0090)." in page
    rows = table(page, "What matters")
    assert list(rows) == ["lr", "penalty"]
    assert rows["lr"] == ["3", "0.001", "0.1", "0.0990 AUC, validation", "none"]

    def hard(family, index, seed, final):
        change(family, index, seed, final)
        final["val_violation"] = 0.1 if USUAL["A"][index]["settings.penalty"] == 1 else -0.1

    page = page_of(*swept(tmp_path, {"A": USUAL["A"]}, change=hard))
    assert "For A, penalty matters most: with penalty = 1 no setting is feasible" in page
    assert list(table(page, "What matters")) == ["penalty", "lr"], "whatever the ranges are"
    assert "Best: 10. Nothing feasible with 1." in page


def test_quantiles_are_over_all_runs_with_a_value(tmp_path):
    comparison, told = swept(tmp_path)
    found = study(comparison, told)
    own = profile(found, found.families["A"], "lr", LRS)
    for value, group in zip(LRS, own.groups, strict=True):
        names = {f"A@{i}" for i, point in enumerate(USUAL["A"]) if point["lr"] == value}
        runs = [run.figures["val_auc"] for run in comparison.runs if run.name in names]
        assert len(runs) == 4
        expected = [np.percentile(runs, share) for share in (10, 25, 50, 75, 90)]
        assert quantiles(found, group, "val_auc") == pytest.approx(expected)
    assert places([1, 10, 100]) == ([0.0, 1.0, 2.0], True)
    assert places([True, False]) == ([0.0, 1.0], False)
    assert places([-1, 0, 100]) == ([-1.0, 0.0, 100.0], False)


def test_far_dots_leave_the_frame_and_are_counted(tmp_path):
    def change(family, index, seed, final):
        if family == "B" and seed == 8:
            final |= {"val_violation": 1e6 * (index + 1), "val_auc": -50.0}

    comparison, told = swept(tmp_path, dict.fromkeys("ABC", USUAL["A"]), change=change)
    found = study(comparison, told)
    own = cloud(found, CLOUD, PAGE.metrics)
    assert own and own.outside == 6 and own.x_limits[1] < 0.5 and own.y_limits[0] > 0.5
    page = page_of(comparison, told)
    assert "6 of 36 dots lie far out, outside the frame" in page and "Winners outside: B." in page
    assert "12 dots, 6 of them outside;" in page
    assert sum(len(path) for path, _ in drawn(page, "c0-1")) == 6


def test_limits_of_the_frame():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(0, 1, 500), [1e3, -1e4, math.nan, math.inf]])
    low, high = robust(values)
    first, third = np.percentile(values[:502], (25, 75))
    near = [
        v for v in values[:500] if first - 3 * (third - first) <= v <= third + 3 * (third - first)
    ]
    assert len(near) == 500 and (low, high) == pytest.approx(
        (min(near) - 0.05 * np.ptp(near), max(near) + 0.05 * np.ptp(near))
    )
    low, high = robust(values, 40.0, None)
    assert 40 < high < 45
    low, high = robust(np.array([2.0] * 99 + [9e9]))
    assert low < 2 < high < 3
    assert robust(np.array([]), None) == pytest.approx((-0.05, 1.05))
    low, high = robust(np.array([]), 3.0)
    assert low < 3 < high


def test_a_cloud_without_own_panels_takes_validation_for_test(tmp_path):
    panels = (
        Panel("tradeoff", "test_auc", "On test data", "AUC, test", "test_violation", "worst"),
        Panel("tradeoff", "val_auc", "The same again", "AUC", "val_violation"),
        Panel("tradeoff", "test_only", "No such figure", "", "val_auc"),
        Panel("curve", "val_auc", "A curve"),
    )
    comparison, told = swept(tmp_path)
    found = study(comparison, told)
    shown = clouds(replace(PAGE, clouds=(), panels=panels), found)
    assert [(p.x, p.y, p.title, p.label) for p in shown] == [
        ("val_violation", "val_auc", "On validation data", "AUC, validation")
    ]
    assert clouds(PAGE, found) == [CLOUD]
    page = page_of(comparison, told, replace(PAGE, clouds=()))
    assert 'id="cloud"' not in page and "thin bars" in page  # figures of the score are drawn
    keys = [(metric.key, metric.headline) for metric in metrics(PAGE, found)]
    assert keys == [("val_auc", True), ("val_violation", True)]


def test_fairness_has_clouds_of_validation_and_training_data():
    task = tasks.get("fairness")
    for name in ("adult", "adult-paper"):
        loaded: Any = config.load(task, name)
        page = fairness_page(loaded)
        assert [(p.y, p.x) for p in page.clouds] == [
            (f"{part}_auc", f"{part}_{what}")
            for part in ("val", "train")
            for what in ("violation", "excess_gap")
        ]
        limit = loaded.feasible_limit if loaded.feasible_by == "violation" else 0.0
        assert page.clouds[0].x_reference == limit
        by_gap = loaded.feasible_by == "gap"
        assert page.clouds[1].x_reference == (loaded.feasible_limit if by_gap else None)
    assert len(fairness_page(replace(loaded, validation=0.0)).clouds) == 2


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900))))
def test_dots_are_told_in_little(places_):
    points = np.array(places_, dtype=float).reshape(-1, 2) / FINE
    path = dots_path(points[:, 0], points[:, 1])
    back = numbers_of(path) if path else np.zeros((0, 2))
    assert {tuple(p) for p in back.tolist()} == {tuple(p) for p in points.tolist()}
    assert len(path) <= 12 + 12 * len(set(places_))
