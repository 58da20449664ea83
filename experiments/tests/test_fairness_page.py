"""The tables of the page on fairness are those of the committed results."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from research import fairness_frontier

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"
PAGE = (DOCS / "fairness.md").read_text(encoding="utf-8").splitlines()
DATA = {"adult": "Adult", "compas": "COMPAS"}
WHOLE = (
    "test_auc:4 test_violation:3 test_gap:3 train_auc:4 train_violation:4 train_gap:3 "
    "train_inside:3"
)
ABLATION = "train_auc:4 train_violation:4 train_inside:3 train_gap:3 test_auc:4"
RESIDUALS = (
    "kkt_stationarity:3 kkt_best_stationarity:3 kkt_feasibility:3 kkt_complementarity:4 "
    "singular_value:7 singular_value_violated:3"
)
TABLES = [(f"{data}{kind}", WHOLE) for data in DATA for kind in ("", "-paper", "-appendix")]
TABLES += [(f"adult-{name}", ABLATION) for name in ("update", "beta", "theta")]
TABLES += [("adult", RESIDUALS)]


def read(path: str) -> Any:
    return json.loads((RESULTS / path).read_text(encoding="utf-8"))


def methods(name: str) -> dict[str, Any]:
    return read(f"fairness-{name}/table.json")["methods"]


def cell(figures: dict[str, Any], key: str, digits: int) -> str:
    return f"{figures[key]['mean']:.{digits}f} ± {figures[key]['std']:.{digits}f}"


@pytest.mark.parametrize(("name", "columns"), TABLES)
def test_tables_are_those_of_the_results(name: str, columns: str) -> None:
    keys = [column.split(":") for column in columns.split()]
    for method, own in methods(name).items():
        cells = [cell(own, key, int(digits)) for key, digits in keys]
        if columns is WHOLE:
            cells.append(f"{own['seconds']['mean']:.0f}")
        assert f"| {method} | {' | '.join(cells)} |" in PAGE, (name, method)


@pytest.mark.parametrize("name", ["adult", "compas", "adult-paper", "compas-paper"])
def test_then_and_now(name: str) -> None:
    earlier = read("fairness-earlier/tables.json")[name]
    for method, own in methods(name).items():
        cells = []
        for key, digits in (("test_auc", 4), ("test_gap", 3)):
            cells += ["–", cell(own, key, digits), "–"]
            if method in earlier:
                before, after = earlier[method][key], own[key]
                spread = math.sqrt((before["std"] ** 2 + after["std"] ** 2) / 5)
                change = f"{after['mean'] - before['mean']:+.{digits}f} ({spread:.{digits}f})"
                cells[-3:] = [cell(earlier[method], key, digits), cell(own, key, digits), change]
        line = f"| {DATA[name.split('-')[0]]} | {method} | {' | '.join(cells)} |"
        assert method == "erm" or line in PAGE, method


@pytest.mark.parametrize("data", DATA)
def test_the_frontier_s_table(data: str) -> None:
    _, points = fairness_frontier.read(RESULTS / f"fairness-{data}-frontier/frontier.json")
    every = fairness_frontier.compared(points, fairness_frontier.OURS.split(","))
    for rival in ("sox", "sonx", "icppac", "sonx-adam", "alexr2-one-batch"):
        own = [row for row in every if row["method"] == rival]
        above = [row["above"] for row in own if "above" in row]
        pairs = [(row["matched_auc"], row["matched_gap"]) for row in own if "matched" in row]
        three = (min(above), statistics.median(above), max(above))
        cells = [str(len(own)), ", ".join(f"{value:+.4f}" for value in three)]
        cells += [f"{sum(value > 0 for value in above)} of {len(above)}"]
        cells += [f"{math.fsum(column) / len(pairs):+.4f}" for column in zip(*pairs, strict=True)]
        cells += [f"{sum(auc > 0 for auc, _ in pairs)} of {len(pairs)}"]
        cells += [f"{sum(gap < 0 for _, gap in pairs)} of {len(pairs)}"]
        assert f"| {DATA[data]} | {rival} | {' | '.join(cells)} |" in PAGE


def test_what_training_sees() -> None:
    cells: dict[str, list[str]] = {}
    for data in DATA:
        best: dict[str, dict[str, float]] = {}
        for entry in read(f"fairness-{data}-full-sweep/sweep.json")["settings"]:
            own, method = entry["figures"], entry["method"]
            if entry["score"] is not None and own["train_violation"] <= 0.01:
                best[method] = max(best.get(method, own), own, key=lambda row: row["train_auc"])
        for method, own in best.items():
            cells.setdefault(method, []).append(
                f"{own['train_auc']:.4f} | {own['val_auc']:.4f} | {own['val_gap']:.3f}"
            )
    assert len(cells) == 7
    for method, found in cells.items():
        assert f"| {method} | {' | '.join(found)} |" in PAGE, method


def test_nothing_of_a_machine_is_in_the_results() -> None:
    for path in RESULTS.glob("*/*"):
        content = path.read_bytes()
        for place in (b"/tmp/", b"/work/", b"/root/", b"/home/"):
            assert place not in content, path
