"""The page of a sweep against what loops over its settings say; no test figure is on it."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fcco_experiments import report
from fcco_experiments.report import sweep as pages
from fcco_experiments.report.plots import SIZE
from fcco_experiments.store import Comparison, SavedRun
from fcco_experiments.task import Metric, Page, Panel, Row, Rule
from hypothesis import given, settings
from hypothesis import strategies as st
from test_experiments_report import Fair as Compared
from test_experiments_report import cells, checked, drawings, text_of

CLOUD = Panel("tradeoff", "val_auc", "Cloud", "AUC", "val_violation", "worst", x_reference=0.0)
PAGE = Page(
    title="Fair scores",
    question=("What is <asked>?",),
    metrics=(
        Metric("test_auc", "AUC, test", "higher", 4, True, "ranks well"),
        Metric("test_violation", "worst, test", "lower", 4, True),
        Metric("val_auc", "AUC, validation", "higher", 4),
        Metric("val_violation", "worst, validation", "lower", 4),
        Metric("test_only", "only test", "higher", 4, True),
    ),
    panels=(),
    clouds=(CLOUD,),
)
RULE = "the worst constraint at most 0, then the highest AUC; on validation data"
Grid = dict[str, list[dict[str, Any]]]


class Fair(Compared):
    """A rule with or without a limit."""

    limited = True

    def rule(self, config: Any) -> Rule:
        keys = ("test_auc", "test_violation")
        return Rule(RULE, lambda row: (0.0,), *keys, limited=self.limited)

    def warnings(self, config: Any, row: Row) -> tuple[str, ...]:
        return ("Odd winner.",) if row["val_auc"] > 0.99 else ("Small test groups.",)


def grid(**values: Any) -> list[dict[str, Any]]:
    return [dict(zip(values, point, strict=True)) for point in itertools.product(*values.values())]


LRS, PENALTIES = (0.001, 0.01, 0.1), (1, 10)
USUAL: Grid = {
    "A": grid(lr=LRS, **{"settings.penalty": PENALTIES}),
    "B": grid(lr=LRS),
    "C": grid(lr=LRS),
}


def swept(folder, grids: Grid = USUAL, seeds=(7, 8), change=None, test=0.7777):
    """A sweep as it is saved: runs, and their ranking by a rule that is written here once more."""
    rng = np.random.default_rng(0)
    runs, entries = [], []
    for family, lines in grids.items():
        for index, values in enumerate(lines):
            name, own = f"{family}@{index}", []
            for seed in seeds:
                auc, worst = 0.9 - 0.1 * rng.random(), 0.05 * rng.standard_normal()
                final = {"val_auc": auc, "val_violation": worst, "train_auc": auc + 0.01}
                final |= {"test_auc": test, "test_violation": test, "test_only": test}
                diverged = change(family, index, seed, final) if change is not None else None
                result = {"final": final, "end": {}, "warnings": [], "diverged": diverged}
                result |= {"seconds": 1.0, "samples": 9, "fingerprint": "x"}
                method = {"method": family.lower()}
                own.append(SavedRun(folder, name, seed, method, [final], result, {}))
            keys = ("val_auc", "val_violation", "train_auc")
            means = {k: sum(run.figures[k] for run in own) / len(own) for k in keys}
            lost = sum(run.diverged is not None for run in own)
            score = None if lost else [max(0.0, means["val_violation"]), -means["val_auc"]]
            entries.append({
                "name": name, "method": family, "setting": values, "score": score,
                "feasible": score is not None and score[0] == 0,
                "diverged": lost, "finished": len(own), "figures": means,
            })  # fmt: skip
            runs += own
    ranking: dict[str, list[str]] = {name: [] for name in grids}
    for entry in sorted(entries, key=lambda e: (e["score"] is None, e["score"] or [])):
        ranking[entry["method"]].append(entry["name"])
    scored = {e["name"] for e in entries if e["score"] is not None}
    winners = {name: own[0] for name, own in ranking.items() if own[0] in scored}
    told = {"task": "fairness", "rule": RULE, "limited": True, "seeds": list(seeds)}
    told |= {"settings": entries, "ranking": ranking, "winners": winners}
    meta = {"task": "fairness", "config_name": "adult", "config": {"data": "adult", "epochs": 6}}
    meta |= {"methods": [e["name"] for e in entries], "seeds": list(seeds), "command": "fcco x"}
    return Comparison(folder, meta, runs), told


def page_of(comparison, told, page=PAGE) -> str:
    return checked(report.render_sweep(comparison, told, Fair(page), None))


def table(page: str, caption: str) -> dict[str, list[str]]:
    rows = cells(page, caption)
    plain = {name: [text_of(cell) for cell in row] for name, row in rows.items()}
    return {n: [cell.replace("\N{NO-BREAK SPACE}", " ") for cell in r] for n, r in plain.items()}


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
        "A": ["6", "12", "0", "0", "6", str(good["A"])],
        "B": ["3", "6", "1", "0", "2", str(good["B"])],
        "C": ["3", "6", "0", "0", "3", str(good["C"])],
    }
    assert f"in all, {sum(good.values())} of 12 settings" in page
    shown, without_runs = (
        table(page_of(own, told), "The setting chosen")
        for own in (comparison, replace(comparison, runs=[]))
    )
    by_name = {entry["name"]: entry for entry in told["settings"]}
    for family, won in told["winners"].items():
        own = [run.figures["val_auc"] for run in comparison.of(won)]
        values = by_name[won]["setting"]
        text = " · ".join(f"{k.removeprefix('settings.')} {v:g}" for k, v in values.items())
        met = "✓ yes" if by_name[won]["score"][0] == 0 else "✗ no"
        mean, deviation = f"{np.mean(own):.4f}", np.std(own, ddof=1)
        assert shown[family][:3] == [text, met, f"{mean} ± {deviation:.4f}"]
        assert without_runs[family][:3] == [text, met, mean]
    order = sorted(told["winners"], key=lambda name: by_name[told["winners"][name]]["score"])
    assert f"in this order: {', '.join(order)}." in page
    assert page == page_of(*swept(tmp_path, change=change)), "the same bytes each time"


def test_feasibility_comes_from_numbers_not_from_the_words_of_the_rule(tmp_path, monkeypatch):
    comparison, told = swept(tmp_path)
    good = sum(entry["feasible"] for entry in told["settings"])
    page = page_of(comparison, told | {"rule": "small first"})
    assert f"in all, {good} of 12 settings" in page
    monkeypatch.setattr(Fair, "limited", False)
    words = "feasible first, a constraint is violated or not"
    free = page_of(comparison, told | {"rule": words, "limited": False})
    assert "easible" not in free[free.index("<body") :].replace(words, "")


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
    wrong = Panel("tradeoff", "test_auc", "On test data", "AUC, test", "test_violation", "worst")
    only = Panel("tradeoff", "test_only", "None", "AUC", "val_violation", "worst")
    given = replace(PAGE, clouds=(wrong, only, CLOUD))
    sweep = pages.read(told)
    assert [(p.x, p.y, p.title, p.label) for p in pages.panels(given, sweep)] == [
        ("val_violation", "val_auc", "On validation data", "AUC, validation")
    ]
    assert "0.7777" not in page_of(comparison, told, given)
    keys = [(metric.key, metric.headline) for metric in pages.metrics(PAGE, sweep)]
    assert keys == [("val_auc", True), ("val_violation", True)]


def test_all_runs_diverged(tmp_path):
    comparison, told = swept(tmp_path, change=lambda *a: "not finite")
    page = page_of(comparison, told)
    assert told["winners"] == {} and "so there is no winner" in page
    assert "winners.yaml</code></pre>" not in page and 'id="scatter"' not in page
    assert "No setting of A came to its end in all runs" in page
    assert table(page, "The setting chosen")["A"][0] == "none came to its end"
    assert table(page, "What was tried")["A"] == ["6", "12", "12", "0", "0", "0"]


def test_a_method_without_a_feasible_setting_and_one_with_one_value(tmp_path):
    def change(family, index, seed, final):
        final["val_violation"] = 0.1 + 0.05 * index if family == "B" else -0.1

    page = page_of(*swept(tmp_path, USUAL | {"D": [{}]}, change=change))
    assert "Without a feasible setting: B." in page and "as in the config" in page
    assert "No setting of B is feasible; the nearest to the limit was chosen." in page
    assert table(page, "The setting chosen")["B"][1] == "✗ no"
    assert "worst, 0.1, the best reachable “worst, validation” differs by 0.10" in page
    assert "D has no hyperparameter with more than one value." in page


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


def dots_of(svg: str, number: int) -> np.ndarray:
    """Places of the dots in a colour: lines of no length."""
    paths = re.findall(rf'd="([^"]*)" [^>]*stroke: var\(--method-{number}\)[^>]*opacity', svg)
    moves = re.findall(r"M ([\d.]+) ([\d.]+) L \1 \2", " ".join(paths))
    return np.array([[float(x), float(y)] for x, y in moves])


def test_every_dot_is_a_setting_where_its_figures_say(tmp_path):
    def change(family, index, seed, final):
        if family == "B" and index == 2:
            final |= {"val_violation": 1e6, "val_auc": -50.0}

    comparison, told = swept(tmp_path, change=change)
    page = page_of(comparison, told)
    assert "1 of 12 dots lie far out, outside the frame" in page
    figures = {
        e["name"]: [e["figures"][k] for k in ("val_violation", "val_auc")] for e in told["settings"]
    }
    expected = np.array([own for name, own in figures.items() if name != "B@2"])
    # Axes fill the frame that the inside dots and the limit need, with 5 % to spare.
    x_low, x_high = min(expected[:, 0].min(), 0.0), max(expected[:, 0].max(), 0.0)
    y_low, y_high = expected[:, 1].min(), expected[:, 1].max()
    width, height = (72 * inches for inches in (SIZE[0] - 0.72, SIZE[1] - 0.80))

    def place(x: float, y: float) -> tuple[float, float]:
        share_x = ((x - x_low) / (x_high - x_low) + 0.05) / 1.1
        share_y = ((y_high - y) / (y_high - y_low) + 0.05) / 1.1
        return 0.58 * 72 + share_x * width, 0.30 * 72 + share_y * height

    for number, family in enumerate("ABC"):  # words that no page knows: colours by position
        wanted = [
            place(*own) for name, own in figures.items() if name[0] == family and name != "B@2"
        ]
        found = dots_of(drawings(page)[0], number)
        assert len(found) == len(wanted)
        for point in wanted:
            assert np.abs(found - point).max(axis=1).min() < 0.02
    look = pages.styles(dict(zip("ABC", "ABC", strict=True)))
    own = pages.scatter(pages.read(told), CLOUD, PAGE.metrics, look, "x")
    for family, front in own["fronts"].items() if own else ():
        places = {name: at for name, at in figures.items() if name[0] == family}
        beaten = {n for n, (x, y) in places.items() for a, b in places.values() if a < x and b > y}
        assert {trial.name for trial in front} == set(places) - beaten


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.booleans())
def test_a_profile_is_the_best_score_of_each_value(seed, within):
    rng = np.random.default_rng(seed)
    level = 0.0 if within else 5.0

    def change(family, index, seed, final):
        final |= {"val_violation": level + rng.choice([-0.1, 0.0, 0.2]), "val_auc": rng.random()}
        return "why" if rng.random() < 0.1 else None

    _, told = swept(None, {"A": USUAL["A"]}, seeds=(7,), change=change)
    trials = pages.read(told).families["A"]
    profiles = pages.profiles(trials)
    assert {own.key: list(own.values) for own in profiles} == pages.varied(trials)
    for own in profiles:
        scores = [
            [e["score"] for e in told["settings"] if e["setting"][own.key] == v and e["score"]]
            for v in own.values
        ]
        first = [min(s, default=None) for s in scores]
        assert [t and list(t.score or ()) for t in own.best] == first
        assert [len(group) for group in own.groups] == [6 // len(own.values)] * len(own.values)
        best = [score for score in first if score]
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

    def hard(family, index, seed, final):
        change(family, index, seed, final)
        final["val_violation"] = 0.1 if USUAL["A"][index]["settings.penalty"] == 1 else -0.1

    page = page_of(*swept(tmp_path, {"A": USUAL["A"]}, change=hard))
    assert "For A, penalty matters most: with penalty = 1 no setting is feasible" in page
    assert "Nothing feasible with 1." in page
