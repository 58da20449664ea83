"""The page of a sweep against what loops over its settings say; no test figure is on it."""

from __future__ import annotations

import csv
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from fcco_experiments import report
from fcco_experiments.report import sweep as pages
from fcco_experiments.report.plots import frontier
from fcco_experiments.store import Comparison, SavedRun
from fcco_experiments.task import Metric, Page, Panel, Rule
from test_experiments_report import Fair as Compared
from test_experiments_report import cells, checked, drawings, marks_of, text_of

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


def second_of_b_diverges(family, index, seed, final):
    return "not finite" if family == "B" and index == 1 and seed == 8 else None


def test_counts_and_winners_are_those_of_the_data(tmp_path):
    comparison, told = swept(tmp_path, change=second_of_b_diverges)
    page = page_of(comparison, told)
    assert f"The rule: {RULE}." in page and page.index("The rule:") < page.index("<table")
    assert "3 methods · 12 settings · 24 runs · 6 epochs" in page
    good = sum(entry["feasible"] for entry in told["settings"])
    assert 0 < good < 12 and f"{good} are within the limit" in page
    assert "11 of 12 settings came to their end in all runs; 1 run diverged" in page
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
    again = page_of(*swept(tmp_path, change=second_of_b_diverges))
    assert page == again, "the same bytes each time"


def test_a_table_of_all_settings(tmp_path):
    _, told = swept(tmp_path, change=second_of_b_diverges)
    lines = list(csv.DictReader(report.as_csv(pages.rows(pages.read(told))).splitlines()))
    by_name = {entry["name"]: entry for entry in told["settings"]}
    assert {line["name"] for line in lines} == set(by_name)
    for method, ranked in told["ranking"].items():
        own = [line for line in lines if line["method"] == method]
        assert [line["name"] for line in own] == ranked
        assert [line["rank"] for line in own] == [str(k + 1) for k in range(len(ranked))]
        assert [line["name"] for line in own if line["chosen"] == "True"] == ranked[:1]
        for line in own:
            entry = by_name[line["name"]]
            figures = {k: float(line[k]) for k in entry["figures"]}
            assert figures == entry["figures"] and float(line["lr"]) == entry["setting"]["lr"]
            assert line["diverged"] == str(entry["diverged"])
    assert not any(key.startswith("test") for key in lines[0])


def test_without_a_limit_nothing_is_feasible_or_not(tmp_path, monkeypatch):
    comparison, told = swept(tmp_path)
    monkeypatch.setattr(Fair, "limited", False)
    words = "feasible first, a constraint is violated or not"
    free = page_of(comparison, told | {"rule": words, "limited": False})
    assert "easible" not in free[free.index("<body") :].replace(words, "")


def test_test_figures_change_nothing(tmp_path):
    page = page_of(*swept(tmp_path))
    assert page == page_of(*swept(tmp_path, test=0.3131))
    assert "0.7777" not in page and "AUC, test" not in page and "only test" not in page
    assert "AUC, validation" in page
    comparison, told = swept(tmp_path)
    for entry in told["settings"]:
        entry["figures"] |= {"test_auc": 0.7777, "test_only": 0.7777}  # as no sweep writes them
    wrong = Panel("tradeoff", "test_auc", "On test data", "AUC, test", "test_violation", "worst")
    only = Panel("tradeoff", "test_only", "None", "AUC", "val_violation", "worst")
    given = replace(PAGE, clouds=(only, wrong, CLOUD))
    sweep = pages.read(told)
    panel = pages.panel_of(given, sweep)
    assert panel and (panel.x, panel.y) == ("val_violation", "val_auc")
    assert (panel.title, panel.label) == ("On validation data", "AUC, validation")
    assert "0.7777" not in page_of(comparison, told, given)
    keys = [(metric.key, metric.headline) for metric in pages.metrics(PAGE, sweep)]
    assert keys == [("val_auc", True), ("val_violation", True)]


def test_all_runs_diverged(tmp_path):
    comparison, told = swept(tmp_path, change=lambda *a: "not finite")
    page = page_of(comparison, told)
    assert told["winners"] == {} and 'id="scatter"' not in page
    assert "winners.yaml</code></pre>" not in page
    assert table(page, "The setting chosen")["A"][0] == "none came to its end"


def test_a_method_without_a_feasible_setting_and_one_with_one_value(tmp_path):
    def change(family, index, seed, final):
        final["val_violation"] = 0.1 + 0.05 * index if family == "B" else -0.1

    page = page_of(*swept(tmp_path, USUAL | {"D": [{}]}, change=change))
    chosen = table(page, "The setting chosen")
    assert chosen["B"][1] == "✗ no" and chosen["D"][0] == "as in the config"


def test_other_data_are_named(tmp_path):
    comparison, told = swept(tmp_path)
    assert "made on different data" not in page_of(comparison, told)
    assert comparison.runs[0].result
    comparison.runs[0].result["fingerprint"] = "y"
    assert "made on different data" in page_of(comparison, told)


def test_every_dot_is_a_setting_where_its_figures_say(tmp_path):
    def change(family, index, seed, final):
        if family == "B" and index == 2:
            final |= {"val_violation": 1e6, "val_auc": -50.0}

    comparison, told = swept(tmp_path, change=change)
    page = page_of(comparison, told)
    assert "1 of 12 dots lie outside the frame" in page
    at = {
        e["name"]: [e["figures"][k] for k in ("val_violation", "val_auc")] for e in told["settings"]
    }
    wanted = {
        family: [*(at[name] for name in at if name[0] == family and name != "B@2"), at[won]]
        for family, won in told["winners"].items()
    }
    found = {family: marks_of(drawings(page)[0], k) for k, family in enumerate("ABC")}
    assert {f: len(own) for f, own in found.items()} == {f: len(own) for f, own in wanted.items()}
    # Both axes are straight: the places are a line in the figures, the same for every dot.
    for axis, sign in ((0, 1), (1, -1)):
        places = [sorted(mark[axis] for mark in found[family]) for family in "ABC"]
        figures = [sorted((p[axis] for p in wanted[f]), reverse=sign < 0) for f in "ABC"]
        x, y = np.concatenate(figures), np.concatenate(places)
        slope, offset = np.polyfit(x, y, 1)
        assert sign * slope > 0 and np.abs(slope * x + offset - y).max() < 0.02
    look = pages.styles(dict(zip("ABC", "ABC", strict=True)))
    sweep = pages.read(told)
    chosen = {name: won.at(CLOUD) for name, won in sweep.winners.items()}
    plot = pages.draw(sweep, PAGE, PAGE.metrics, look)
    x, y = zip(*chosen.values(), strict=True)
    assert plot and plot.facts["front"] == [list(chosen)[k] for k in frontier(x, y, False, True)]
