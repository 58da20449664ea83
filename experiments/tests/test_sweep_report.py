"""The report of a sweep: every fact comes from the data, none from test data."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from typing import cast

import numpy as np
from fcco_experiments import stats, store
from fcco_experiments import sweep as sweeps
from fcco_experiments.report import sweep
from fcco_experiments.report.profile import profiles, varied
from fcco_experiments.report.study import clouds, decisive, study
from fcco_experiments.report.sweep_tables import matters
from fcco_experiments.task import Panel, Task
from sweep_cases import LRS, PAGE, PENALTIES, RULE, USUAL, Fair, grid, page_of, swept, table
from test_experiments_sweep import make
from toy_task import TASK as TOY


def test_rule_counts_and_winners_are_those_of_the_data(tmp_path):
    def change(family, index, seed, final):
        return "not finite" if family == "B" and index == 1 and seed == 8 else None

    comparison, told = swept(tmp_path, change=change)
    page = page_of(comparison, told)
    assert f"The rule: {RULE}." in page and "Test data took no part" in page
    assert "3 methods · 12 settings · 24 runs · 6 epochs" in page
    good = Counter(e["method"] for e in told["settings"] if e["score"] and e["score"][0] == 0)
    assert 0 < sum(good.values()) < 12
    expected = {
        "A": ["6", "2", "12", "0", "0", "6", str(good["A"])],
        "B": ["3", "2", "6", "1", "0", "2", str(good["B"])],
        "C": ["3", "2", "6", "0", "0", "3", str(good["C"])],
    }
    assert table(page, "What was tried") == expected
    assert f"in all, {sum(good.values())} of 12 settings" in page
    shown = table(page, "The setting chosen")
    by_name = {entry["name"]: entry for entry in told["settings"]}
    for family, won in told["winners"].items():
        own = [run.figures["val_auc"] for run in comparison.of(won)]
        setting, feasible, auc, *_ = shown[family]
        values = by_name[won]["setting"]
        text = " · ".join(f"{k.removeprefix('settings.')} {v:g}" for k, v in values.items())
        assert setting == text
        assert feasible == ("yes" if by_name[won]["score"][0] == 0 else "no")
        assert auc == f"{np.mean(own):.4f}  ± {np.std(own, ddof=1):.4f}"
        assert f"{won}, best of" in page
    assert "fcco compare fairness --config winners.yaml" in page
    assert "Mean ± standard deviation over the tuning seeds" in page
    assert "1 run that diverged is not drawn." in page
    order = sorted(told["winners"], key=lambda name: by_name[told["winners"][name]]["score"])
    assert f"in this order: {', '.join(order)}." in page
    assert page == page_of(*swept(tmp_path, change=change)), "the same bytes each time"


def test_the_best_settings_are_in_the_order_of_the_rule(tmp_path):
    comparison, told = swept(tmp_path, {"A": grid(lr=[0.1 * k for k in range(1, 14)])})
    rows = table(page_of(comparison, told), "The best settings of A")
    by_name = {entry["name"]: entry for entry in told["settings"]}
    first = sorted(by_name.values(), key=lambda entry: entry["score"])[:10]
    assert list(rows) == [str(k) for k in range(1, 11)]
    assert [row[0] for row in rows.values()] == [f"{e['setting']['lr']:g}" for e in first]


def test_test_figures_change_nothing(tmp_path):
    page = page_of(*swept(tmp_path))
    assert page == page_of(*swept(tmp_path, test=0.3131))
    assert "0.7777" not in page and "AUC, test" not in page and "only test" not in page
    assert "AUC, validation" in page and "Small test groups" not in page
    assert "Test figures of these runs are not shown" in page
    comparison, told = swept(tmp_path)
    for entry in told["settings"]:
        entry["figures"] |= {"test_auc": 0.7777, "test_only": 0.7777}  # as no sweep writes them
    found = study(comparison, told)
    rows = [row for trial in found.trials for row in (trial.figures, *trial.runs)]
    assert len(rows) == 12 + 24 and not any(key.startswith("test") for row in rows for key in row)
    wrong = Panel("tradeoff", "test_auc", "Wrong", "AUC", "test_violation", "worst")
    only = Panel("tradeoff", "test_only", "None", "AUC", "val_violation", "worst")
    given = replace(PAGE, clouds=(wrong, only))
    assert [(p.x, p.y) for p in clouds(given, found)] == [("val_violation", "val_auc")]
    assert "0.7777" not in page_of(comparison, told, given)


def test_settings_with_one_value_only(tmp_path):
    one = {"A": grid(lr=[0.1]), "B": [{}]}
    comparison, told = swept(tmp_path, one)
    page = page_of(comparison, told)
    assert "A has no hyperparameter with more than one value." in page
    assert "<caption><span>What matters" not in page and "as in the config" in page
    assert varied(study(comparison, told).families["A"]) == {}


def test_all_runs_diverged(tmp_path):
    comparison, told = swept(tmp_path, change=lambda *a: "not finite")
    page = page_of(comparison, told)
    assert told["winners"] == {} and "so there is no winner" in page
    assert "winners.yaml</code></pre>" not in page and 'id="cloud"' not in page
    assert "No setting of A came to its end in all runs, so nothing can be said." in page
    assert table(page, "The setting chosen")["A"][0] == "none came to its end"
    assert table(page, "What was tried")["A"] == ["6", "2", "12", "12", "0", "0", "0"]


def test_a_method_without_a_feasible_setting(tmp_path):
    def change(family, index, seed, final):
        final["val_violation"] = 0.1 + 0.05 * index if family == "B" else -0.1

    comparison, told = swept(tmp_path, change=change)
    page = page_of(comparison, told)
    assert "Without a feasible setting: B." in page
    assert "No setting of B is feasible; the nearest to the limit was chosen." in page
    assert table(page, "The setting chosen")["B"][1] == "no"
    assert "worst, 0.1, the best reachable “excess over the limit” differs by 0.10" in page
    found = study(comparison, told)
    assert [each.part for each in profiles(found, found.families["B"])] == [0]


def test_a_rule_without_a_limit_counts_no_feasible_settings(tmp_path):
    comparison, told = swept(tmp_path)
    told["rule"] = "the lowest loss"
    for entry in told["settings"]:
        entry["score"] = [1 - entry["figures"]["val_auc"]]
    page = page_of(comparison, told)
    assert "easible" not in page[page.index("<body") :].replace(RULE, "")
    found = study(comparison, told)
    assert not found.limited and decisive(found, PAGE.metrics, 0) == PAGE.metrics[2]
    sentence = matters(found, "B", profiles(found, found.families["B"]), PAGE.metrics)
    assert "“AUC, validation” differs by" in sentence


def test_names_are_escaped(tmp_path):
    bad = '<b a="1">&'
    page = page_of(
        *swept(tmp_path, {bad: USUAL["A"], "x": USUAL["B"], "y<": grid(mode=["<i>", "z"])})
    )
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
    done = sweep.conclude(tmp_path, told)
    assert done.report == tmp_path / "report.html" and list(done.table) == list(told["winners"])
    assert store.read_json(tmp_path / "table.json")["methods"] == store.clean(done.table)
    whole = stats.table(store.load_comparison(tmp_path), TOY.page(None).metrics)
    assert done.table == {name: whole[won] for name, won in told["winners"].items()}
    assert "| sonex |" in (tmp_path / "table.md").read_text() and "@" not in json.dumps(done.table)
    page = done.report.read_text(encoding="utf-8")
    assert "violation above 0.05 first" in page and "For sonex, " in page
    assert page == sweep.conclude(tmp_path, sweeps.read(tmp_path)).report.read_text()


def test_thousands_of_runs_in_seconds_and_little_room(tmp_path):
    lines = grid(
        lr=[1, 0.1, 0.01, 0.001], eta=[1, 2, 3, 4], nu=[1, 2], rho=list(range(6)), k=[5, 9]
    )
    grids = {"big": lines, "other": lines} | {
        f"m{k}": grid(lr=LRS, rho=PENALTIES) for k in range(6)
    }
    comparison, told = swept(tmp_path, grids, seeds=tuple(range(6)))
    assert len(comparison.runs) > 4800
    start = time.perf_counter()
    page = sweep.render(comparison, told, cast(Task, Fair()), None)
    assert time.perf_counter() - start < 20, "a few seconds where nothing else runs"
    assert len(page) < 1_500_000 and "804 settings · 4,824 runs" in page
