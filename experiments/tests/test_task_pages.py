"""The tables of the pages on fairness and continual learning are those of the committed results."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from fcco_experiments import sweep

from research import fairness_frontier

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"
FAIRNESS, CONTINUAL = (
    (DOCS / f"research/{name}.md").read_text(encoding="utf-8").splitlines()
    for name in ("fairness", "continual")
)
DATA = {"adult": "Adult", "compas": "COMPAS"}
# Figures with their digits, "±" with the standard deviation.
WHOLE = (
    "test_auc ±4, test_violation ±3, test_gap ±3, train_auc ±4, train_violation ±4, train_gap ±3, "
    "train_inside ±3, seconds .0f"
)
ABLATION = "train_auc ±4, train_violation ±4, train_inside ±3, train_gap ±3, test_auc ±4"
RESIDUALS = (
    "kkt_stationarity ±3, kkt_best_stationarity ±3, kkt_feasibility ±3, kkt_complementarity ±4, "
    "singular_value ±7, singular_value_violated ±3"
)
LEARNED = (
    "penalty g, test_target_gain ±3, test_forgetting ±3, train_forgetting ±3, train_kept .1f, "
    "train_retained .1f, test_retained .1f, train_violation ±3"
)
RHO = "test_target_gain ±3, test_forgetting ±3, train_kept .1f"
TABLES = [
    (FAIRNESS, f"fairness-{d}{k}", WHOLE)
    for d in DATA
    for k in ("", "-automatic", "-paper", "-appendix")
]
TABLES += [(FAIRNESS, f"fairness-adult-{k}", ABLATION) for k in ("update", "beta", "theta")]
TABLES += [(FAIRNESS, f"fairness-adult{k}", RESIDUALS) for k in ("", "-automatic")]
TABLES += [
    (CONTINUAL, f"continual-{data}", LEARNED)
    for data in ("weather", "bdd100k-subset", "weather-finetune")
]


def read(path: str) -> Any:
    return json.loads((RESULTS / path).read_text(encoding="utf-8"))


def methods(folder: str) -> dict[str, Any]:
    return read(f"{folder}/table.json")["methods"]


def cell(figure: dict[str, float] | None, form: str) -> str:
    if figure is None:
        return "-"
    if form[0] != "±":
        return format(figure["mean"], form)
    return f"{figure['mean']:.{form[1:]}f} ± {figure['std']:.{form[1:]}f}"


def cells(own: dict[str, Any], columns: str) -> str:
    pairs = (column.split() for column in columns.split(", "))
    return " | ".join(cell(own.get(key), form) for key, form in pairs)


@pytest.mark.parametrize(("page", "folder", "columns"), TABLES, ids=lambda value: str(value)[:20])
def test_tables_are_those_of_the_results(page: list[str], folder: str, columns: str) -> None:
    for method, own in methods(folder).items():
        assert f"| {method} | {cells(own, columns)} |" in page, method


@pytest.mark.parametrize("data", DATA)
def test_the_frontier_s_table(data: str) -> None:
    _, points = fairness_frontier.read(RESULTS / f"fairness-{data}-frontier/frontier.json")
    every = fairness_frontier.compared(points, fairness_frontier.OURS.split(","))
    for rival in ("sox", "sonx", "icppac", "sonx-adam", "alexr2-one-batch"):
        own = [row for row in every if row["method"] == rival]
        above = [row["above"] for row in own if "above" in row]
        pairs = [(row["matched_auc"], row["matched_gap"]) for row in own if "matched" in row]
        three = (min(above), statistics.median(above), max(above))
        line = [str(len(own)), ", ".join(f"{value:+.4f}" for value in three)]
        line += [f"{sum(value > 0 for value in above)} of {len(above)}"]
        line += [f"{math.fsum(column) / len(pairs):+.4f}" for column in zip(*pairs, strict=True)]
        line += [f"{sum(auc > 0 for auc, _ in pairs)} of {len(pairs)}"]
        line += [f"{sum(gap < 0 for _, gap in pairs)} of {len(pairs)}"]
        assert f"| {DATA[data]} | {rival} | {' | '.join(line)} |" in FAIRNESS


def test_every_penalty_by_itself() -> None:
    weather, frames = methods("continual-weather-rho"), methods("continual-bdd100k-subset-rho")
    assert list(weather) == list(frames) and len(weather) == 16
    for name, own in weather.items():
        line = f"{cells(own, RHO)} | {cells(frames[name], RHO)}"
        assert f"| {name.replace('-', ' ')} | {line} |" in CONTINUAL, name


def test_learning_rates_of_sonx() -> None:
    lines: dict[float, list[str]] = {}
    swept = sweep.read(RESULTS / "continual-weather-finetune-sweep")
    for run in swept["settings"] if swept else ():
        if run["method"] == "sonx":
            pair = [100 * run["figures"][key] for key in ("train_target_gain", "train_forgetting")]
            lines.setdefault(run["setting"]["lr"], []).append(f"{pair[0]:.1f}, {pair[1]:.1f}")
    assert len(lines) == 4
    for rate, pairs in lines.items():
        assert f"| {rate:g} | {' | '.join(pairs)} |" in CONTINUAL, rate


def test_nothing_of_a_machine_is_in_the_results() -> None:
    for path in RESULTS.glob("*/*"):
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        for place in (b"/tmp/", b"/root/", b"/home/"):
            assert place not in content, path
