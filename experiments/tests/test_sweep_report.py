"""The page of a sweep against what loops over its settings say; no test figure is on it."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from fcco_experiments import report, stats, store
from fcco_experiments import sweep as sweeps
from fcco_experiments.report import sweep_data as data
from fcco_experiments.report import sweep_page
from fcco_experiments.report.plots import SIZE
from fcco_experiments.report.sweep_plots import FINE, dots_path, places, quantiles
from fcco_experiments.task import Panel
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_cases import CLOUD, LRS, PAGE, PENALTIES, RULE, USUAL, Fair, grid, page_of, swept, table
from test_experiments_sweep import make
from toy_task import TASK as TOY

LIMITED = Fair().rule(None)


def test_rule_counts_and_winners_are_those_of_the_data(tmp_path):
    def change(family, index, seed, final):
        return "not finite" if family == "B" and index == 1 and seed == 8 else None

    comparison, told = swept(tmp_path, change=change)
    page = page_of(comparison, told)
    assert f"The rule: {RULE}." in page and page.index("The rule:") < page.index("<table")
    assert "3 methods · 12 settings · 24 runs · 6 epochs" in page
    good = Counter(e["method"] for e in told["settings"] if e["score"] and e["score"][0] == 0)
    assert 0 < sum(good.values()) < 12
    assert table(page, "What was tried") == {
        "A": ["6", "2", "12", "0", "0", "6", str(good["A"])],
        "B": ["3", "2", "6", "1", "0", "2", str(good["B"])],
        "C": ["3", "2", "6", "0", "0", "3", str(good["C"])],
    }
    assert f"in all, {sum(good.values())} of 12 settings" in page
    shown = table(page, "The setting chosen")
    by_name = {entry["name"]: entry for entry in told["settings"]}
    for family, won in told["winners"].items():
        own = [run.figures["val_auc"] for run in comparison.of(won)]
        values = by_name[won]["setting"]
        text = " · ".join(f"{k.removeprefix('settings.')} {v:g}" for k, v in values.items())
        met = "✓ yes" if by_name[won]["score"][0] == 0 else "✗ no"
        deviation = np.std(own, ddof=1)
        assert shown[family][:3] == [text, met, f"{np.mean(own):.4f} ± {deviation:.4f}"]
    assert "fcco compare fairness --config winners.yaml" in page
    assert "1 run that diverged is not drawn." in page
    order = sorted(told["winners"], key=lambda name: by_name[told["winners"][name]]["score"])
    assert f"in this order: {', '.join(order)}." in page
    assert page == page_of(*swept(tmp_path, change=change)), "the same bytes each time"


def test_feasibility_comes_from_numbers_not_from_the_words_of_the_rule(tmp_path):
    comparison, told = swept(tmp_path)
    words = "feasible first, a constraint is violated or not"
    free = page_of(comparison, told | {"rule": words}, limited=False)
    assert "easible" not in free[free.index("<body") :].replace(words, "")
    page = page_of(comparison, told | {"rule": "small first"})
    good = sum(entry["feasible"] for entry in told["settings"])
    assert f"in all, {good} of 12 settings" in page
    for entry in told["settings"]:
        del entry["feasible"]  # as earlier sweeps wrote it
    assert page == page_of(
        comparison, told | {"rule": "small first", "limited": True}, limited=False
    )
    assert page == page_of(comparison, told | {"rule": "small first"})


def test_the_best_settings_are_in_the_order_of_the_rule(tmp_path):
    comparison, told = swept(tmp_path, {"A": grid(lr=[0.1 * k for k in range(1, 14)])})
    rows = table(page_of(comparison, told), "The best settings of A")
    first = sorted(told["settings"], key=lambda entry: entry["score"])[:10]
    assert list(rows) == [str(k) for k in range(1, 11)]
    assert [row[0] for row in rows.values()] == [f"{e['setting']['lr']:g}" for e in first]


def test_test_figures_change_nothing(tmp_path):
    page = page_of(*swept(tmp_path))
    assert page == page_of(*swept(tmp_path, test=0.3131))
    assert "0.7777" not in page and "AUC, test" not in page and "only test" not in page
    assert "AUC, validation" in page and "Small test groups" not in page
    comparison, told = swept(tmp_path)
    for entry in told["settings"]:
        entry["figures"] |= {"test_auc": 0.7777, "test_only": 0.7777}  # as no sweep writes them
    sweep = data.read(comparison, told, LIMITED)
    rows = [row for trial in sweep.trials for row in (trial.figures, *trial.runs)]
    assert len(rows) == 12 + 24 and not any(key.startswith("test") for row in rows for key in row)
    wrong = Panel("tradeoff", "test_auc", "On test data", "AUC, test", "test_violation", "worst")
    only = Panel("tradeoff", "test_only", "None", "AUC", "val_violation", "worst")
    given = replace(PAGE, clouds=(wrong, only, CLOUD))
    assert [(p.x, p.y, p.title, p.label) for p in data.panels(given, sweep)] == [
        ("val_violation", "val_auc", "On validation data", "AUC, validation")
    ]
    assert "0.7777" not in page_of(comparison, told, given)
    keys = [(metric.key, metric.headline) for metric in data.metrics(PAGE, sweep)]
    assert keys == [("val_auc", True), ("val_violation", True)]


def test_settings_with_one_value_and_no_scatter_plot(tmp_path):
    page = page_of(*swept(tmp_path, {"A": grid(lr=[0.1]), "B": [{}]}))
    assert "A has no hyperparameter with more than one value." in page
    assert "<caption><span>What matters" not in page and "as in the config" in page
    page = page_of(*swept(tmp_path), replace(PAGE, clouds=()))
    assert 'id="scatter"' not in page and "thin bars" in page  # figures of the score are drawn


def test_all_runs_diverged(tmp_path):
    comparison, told = swept(tmp_path, change=lambda *a: "not finite")
    page = page_of(comparison, told)
    assert told["winners"] == {} and "so there is no winner" in page
    assert "winners.yaml</code></pre>" not in page and 'id="scatter"' not in page
    assert "No setting of A came to its end in all runs" in page
    assert table(page, "The setting chosen")["A"][0] == "none came to its end"
    assert table(page, "What was tried")["A"] == ["6", "2", "12", "12", "0", "0", "0"]


def test_a_method_without_a_feasible_setting(tmp_path):
    def change(family, index, seed, final):
        final["val_violation"] = 0.1 + 0.05 * index if family == "B" else -0.1

    page = page_of(*swept(tmp_path, change=change))
    assert "Without a feasible setting: B." in page
    assert "No setting of B is feasible; the nearest to the limit was chosen." in page
    assert table(page, "The setting chosen")["B"][1] == "✗ no"
    assert "worst, 0.1, the best reachable “excess over the limit” differs by 0.10" in page


def test_names_are_escaped(tmp_path):
    bad = '<b a="1">&'
    lines = {bad: USUAL["A"], "x": USUAL["B"], "y<": grid(mode=["<i>", "z"])}
    page = page_of(*swept(tmp_path, lines))
    assert "<b a=" not in page and "&lt;b a=&#34;1&#34;&gt;&amp;" in page
    assert "<i>" not in page and "y<:" not in page


def test_means_alone_make_a_report_too(tmp_path):
    comparison, told = swept(tmp_path)
    page = page_of(replace(comparison, runs=[]), told)
    assert "every dot is the mean of a setting" in page and "All 12 dots are in the frame." in page
    assert "±" not in "".join(table(page, "The setting chosen")["A"])
    assert table(page, "What was tried")["A"][:4] == ["6", "2", "12", "0"]


def test_warnings_about_winners_and_other_data(tmp_path):
    def change(family, index, seed, final):
        if family == "C":
            final |= {"val_auc": 0.995, "val_violation": -0.1}

    comparison, told = swept(tmp_path, change=change)
    assert "<b>C, all 2 seeds</b> Odd winner." in page_of(comparison, told)
    comparison, told = swept(tmp_path)
    assert comparison.runs[0].result
    comparison.runs[0].result["fingerprint"] = "y"
    assert "made on different data" in page_of(comparison, told)


def test_from_runs_on_disk_to_tables_and_page(tmp_path):
    told, _ = make(tmp_path)
    done = sweep_page.conclude(tmp_path, told)
    assert done.report == tmp_path / "report.html" and list(done.table) == list(told["winners"])
    assert store.read_json(tmp_path / "table.json")["methods"] == store.clean(done.table)
    whole = stats.table(store.load_comparison(tmp_path), TOY.page(None).metrics)
    for name, won in told["winners"].items():
        assert done.table[name] == {key: whole[won][key] for key in done.table[name]}
    assert "| sonex |" in (tmp_path / "table.md").read_text() and "@" not in json.dumps(done.table)
    assert "test" not in json.dumps(done.table), "sweeps print no test figure"
    page = done.report.read_text(encoding="utf-8")
    assert "violation above 0.05 first" in page and "For sonex, " in page
    again = sweep_page.conclude(tmp_path, sweeps.read(tmp_path) or {})
    assert page == again.report.read_text(encoding="utf-8")


def test_thousands_of_runs_in_seconds_and_little_room(tmp_path):
    lines = grid(
        lr=[1, 0.1, 0.01, 0.001], eta=[1, 2, 3, 4], nu=[1, 2], rho=list(range(6)), k=[5, 9]
    )
    grids = {"big": lines, "other": lines} | {
        f"m{k}": grid(lr=LRS, rho=PENALTIES) for k in range(3)
    }
    comparison, told = swept(tmp_path, grids, seeds=tuple(range(6)))
    start = time.perf_counter()
    page = report.render_sweep(comparison, told, Fair(), None)
    assert time.perf_counter() - start < 30, "a few seconds where nothing else runs"
    assert len(page) < 1_200_000 and "786 settings · 4,716 runs" in page


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
    sweep = data.read(comparison, told, LIMITED)
    own = data.scatter(sweep, CLOUD, data.metrics(PAGE, sweep))
    assert own and own.outside == 0 and "All 24 dots are in the frame." in page
    width, height = (72 * each for each in (SIZE[0] - 0.72, SIZE[1] - 0.80))
    low = np.array([own.x_limits[0], own.y_limits[1]])
    room = np.array([own.x_limits[1], own.y_limits[0]]) - low
    feasible = {e["name"] for e in told["settings"] if e["score"] and e["score"][0] == 0}
    every = [drawn(page, f"c0-{k}") for k in range(3)]
    deepest = max(depth for paths in every for _, depth in paths)
    for (paths, family), deep in itertools.product(
        zip(every, told["ranking"], strict=True), (True, False)
    ):
        runs = [r for r in comparison.runs if r.name.startswith(family)]
        runs = [r for r in runs if (r.name in feasible) == deep]
        figures = [[r.figures["val_violation"], r.figures["val_auc"]] for r in runs]
        shares = (np.array(figures).reshape(-1, 2) - low) / room
        expected = shares * (width, height) + (0.58 * 72, 0.30 * 72)
        there = [p for p, depth in paths if (depth == deepest) == deep]
        assert len(runs) == sum(map(len, there))
        for place in itertools.chain(*there):
            assert np.abs(expected - place).max(axis=1).min() <= 0.5 / FINE + 1e-6
    assert page.count('href="#c0-0"') == 1, "the small plot uses the dots of the large one"
    two = page_of(*swept(tmp_path, {name: USUAL[name] for name in "AB"}))
    assert 'id="c0-0"' in two and 'href="#c0-0"' not in two, "two methods need no small plots"


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=12))
def test_the_frontier_is_what_no_setting_of_the_method_beats(some):
    def change(family, index, seed, final):
        x, y = some[index]
        final |= {"val_violation": x / 10 + seed / 100, "val_auc": y / 10 - seed / 100}
        return "why" if index == 3 else None

    lines = {"A": grid(lr=list(range(len(some)))), "B": grid(lr=[0])}
    comparison, told = swept(None, lines, change=change)
    own = data.scatter(data.read(comparison, told, LIMITED), CLOUD, PAGE.metrics)
    assert own
    scored = [k for k in range(len(some)) if k != 3]

    def beats(j: int, i: int) -> bool:
        (a, b), (c, d) = some[j], some[i]
        return a <= c and b >= d and (a < c or b > d)

    expected = {f"A@{i}" for i in scored if not any(beats(j, i) for j in scored)}
    assert {trial.name for trial in own.fronts["A"]} == expected
    assert [trial.name for trial in own.fronts["B"]] == ["B@0"], "each method has its own"


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.booleans())
def test_a_profile_is_the_best_score_of_each_value(seed, within):
    rng = np.random.default_rng(seed)
    level = 0.0 if within else 5.0

    def change(family, index, seed, final):
        final |= {"val_violation": level + rng.choice([-0.1, 0.0, 0.2]), "val_auc": rng.random()}
        return "why" if rng.random() < 0.1 else None

    comparison, told = swept(None, {"A": USUAL["A"]}, seeds=(7,), change=change)
    sweep = data.read(comparison, told, LIMITED)
    profiles = data.profiles(sweep.families["A"])
    assert {own.key: list(own.values) for own in profiles} == data.varied(sweep.families["A"])
    for own in profiles:
        scores = [
            [e["score"] for e in told["settings"] if e["setting"][own.key] == v and e["score"]]
            for v in own.values
        ]
        assert [t and list(t.score or ()) for t in own.best] == [
            min(s, default=None) for s in scores
        ]
        assert [len(group) for group in own.groups] == [6 // len(own.values)] * len(own.values)
        best = [min(s) for s in scores if s]
        met = [score for score in best if score[0] == 0]
        kept = [score[1] for score in met] if met else [score[0] for score in best]
        assert own.range == pytest.approx(max(kept) - min(kept) if kept else 0.0)
        without = [v for v, s in zip(own.values, scores, strict=True) if not s or min(s)[0] > 0]
        assert list(own.lost) == (without if met else [])
        assert [min(scores[k]) for k in own.order] == sorted(best)


def test_what_matters_most_comes_first_and_is_said(tmp_path):
    def change(family, index, seed, final):
        lr, penalty = USUAL["A"][index]["lr"], USUAL["A"][index]["settings.penalty"]
        final |= {"val_violation": -0.1, "val_auc": 0.9 - lr - 0.001 * penalty}

    page = page_of(*swept(tmp_path, {"A": USUAL["A"]}, change=change))
    assert "For A, lr matters most: between its best value, 0.001, and its worst, 0.1" in page
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
    sweep = data.read(comparison, told, LIMITED)
    own = next(p for p in data.profiles(sweep.families["A"]) if p.key == "lr")
    for value, group in zip(own.values, own.groups, strict=True):
        names = {f"A@{i}" for i, point in enumerate(USUAL["A"]) if point["lr"] == value}
        runs = [run.figures["val_auc"] for run in comparison.runs if run.name in names]
        assert len(runs) == 4
        expected = [np.percentile(runs, share) for share in (10, 25, 50, 75, 90)]
        assert quantiles(sweep, group, "val_auc") == pytest.approx(expected)
    assert places([1, 10, 100]) == [0.0, 1.0, 2.0] and places([True, False]) == [0.0, 1.0]
    assert places([-1, 0, 100]) == [-1.0, 0.0, 100.0]


def test_far_dots_leave_the_frame_and_are_counted(tmp_path):
    def change(family, index, seed, final):
        if family == "B" and seed == 8:
            final |= {"val_violation": 1e6 * (index + 1), "val_auc": -50.0}

    comparison, told = swept(tmp_path, dict.fromkeys("ABC", USUAL["A"]), change=change)
    own = data.scatter(data.read(comparison, told, LIMITED), CLOUD, PAGE.metrics)
    assert own and own.outside == 6 and own.x_limits[1] < 0.5 and own.y_limits[0] > 0.5
    page = page_of(comparison, told)
    assert "6 of 36 dots lie far out, outside the frame" in page and "Winners outside: B." in page
    assert "12 dots, 6 of them outside;" in page
    assert sum(len(path) for path, _ in drawn(page, "c0-1")) == 6


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900))))
def test_dots_are_told_in_little(some):
    points = np.array(some, dtype=float).reshape(-1, 2) / FINE
    path = dots_path(points[:, 0], points[:, 1])
    back = numbers_of(path) if path else np.zeros((0, 2))
    assert {tuple(p) for p in back.tolist()} == {tuple(p) for p in points.tolist()}
    assert len(path) <= 12 + 12 * len(set(some))
