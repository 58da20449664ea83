"""The page on fairness has the figures of the committed results, and says what they say."""

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
DATA = {"adult": "Adult", "compas": "COMPAS"}
METHODS = ("alexr2", "sonex", "sox", "sonx", "icppac", "sonx-adam", "alexr2-one-batch")
RIVALS = ("sox", "sonx", "icppac", "sonx-adam", "alexr2-one-batch")
TABLES = [f"{data}{kind}" for data in DATA for kind in ("", "-paper", "-appendix")]


def page() -> list[str]:
    return (DOCS / "fairness.md").read_text(encoding="utf-8").splitlines()


def text() -> str:
    return " ".join(" ".join(page()).split())


def read(path: str) -> Any:
    return json.loads((RESULTS / path).read_text(encoding="utf-8"))


def methods(name: str) -> dict[str, Any]:
    return read(f"fairness-{name}/table.json")["methods"]


def mean(table: dict[str, Any], name: str, key: str) -> float:
    return table[name][key]["mean"]


def cell(figures: dict[str, Any], key: str, digits: int) -> str:
    return f"{figures[key]['mean']:.{digits}f} ± {figures[key]['std']:.{digits}f}"


def rows(data: str) -> list[dict[str, Any]]:
    _, points = fairness_frontier.read(RESULTS / f"fairness-{data}-frontier/frontier.json")
    return fairness_frontier.compared(points, fairness_frontier.OURS.split(","))


def section(title: str) -> list[str]:
    """Lines under a heading, up to the next."""
    lines = page()
    start = next(
        k for k, line in enumerate(lines) if line.lstrip("# ") == title and line[:1] == "#"
    )
    end = next((k for k in range(start + 1, len(lines)) if lines[k].startswith("#")), len(lines))
    return lines[start:end]


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_those_of_the_results(name: str) -> None:
    for method, own in methods(name).items():
        keys = [("test_auc", 4), ("test_violation", 3), ("test_gap", 3), ("train_auc", 4)]
        keys += [("train_violation", 4), ("train_gap", 3), ("train_inside", 3)]
        cells = " | ".join(cell(own, key, digits) for key, digits in keys)
        assert f"| {method} | {cells} | {own['seconds']['mean']:.0f} |" in page(), (name, method)


@pytest.mark.parametrize("name", ["adult-update", "adult-beta", "adult-theta"])
def test_ablations(name: str) -> None:
    for method, own in methods(name).items():
        keys = [("train_auc", 4), ("train_violation", 4), ("train_inside", 3), ("train_gap", 3)]
        cells = " | ".join(cell(own, key, digits) for key, digits in [*keys, ("test_auc", 4)])
        assert f"| {method} | {cells} |" in page(), (name, method)


def test_residuals() -> None:
    for method, own in methods("adult").items():
        keys = [("kkt_stationarity", 3), ("kkt_best_stationarity", 3), ("kkt_feasibility", 3)]
        keys += [("kkt_complementarity", 4), ("singular_value", 7), ("singular_value_violated", 3)]
        cells = " | ".join(cell(own, key, digits) for key, digits in keys)
        assert f"| {method} | {cells} |" in page(), method
        assert own["singular_value"]["mean"] < 1e-6 < own["singular_value_violated"]["mean"]


@pytest.mark.parametrize("name", ["adult", "compas", "adult-paper", "compas-paper"])
def test_then_and_now(name: str) -> None:
    earlier, now = read("fairness-earlier/tables.json")[name], methods(name)
    shown = section("What changed against the earlier table")
    for method, own in now.items():
        if method == "erm":
            continue
        cells = []
        for key, digits in (("test_auc", 4), ("test_gap", 3)):
            if method in earlier:
                before, after = earlier[method][key], own[key]
                spread = math.sqrt((before["std"] ** 2 + after["std"] ** 2) / 5)
                change = f"{after['mean'] - before['mean']:+.{digits}f} ({spread:.{digits}f})"
                cells += [cell(earlier[method], key, digits), cell(own, key, digits), change]
            else:
                cells += ["–", cell(own, key, digits), "–"]
        assert f"| {DATA[name.split('-')[0]]} | {method} | {' | '.join(cells)} |" in shown, method


@pytest.mark.parametrize("data", DATA)
def test_the_frontier_s_table(data: str) -> None:
    every = rows(data)
    for rival in RIVALS:
        own = [row for row in every if row["method"] == rival]
        above = [row["above"] for row in own if "above" in row]
        pairs = [(row["matched_auc"], row["matched_gap"]) for row in own if "matched" in row]
        three = (min(above), statistics.median(above), max(above))
        cells = [str(len(own)), ", ".join(f"{value:+.4f}" for value in three)]
        cells += [f"{sum(value > 0 for value in above)} of {len(above)}"]
        cells += [f"{math.fsum(column) / len(pairs):+.4f}" for column in zip(*pairs, strict=True)]
        cells += [f"{sum(auc > 0 for auc, _ in pairs)} of {len(pairs)}"]
        cells += [f"{sum(gap < 0 for _, gap in pairs)} of {len(pairs)}"]
        assert f"| {DATA[data]} | {rival} | {' | '.join(cells)} |" in section("The frontier")


def test_what_is_said_of_the_frontier() -> None:
    said, adult, compas = text(), rows("adult"), rows("compas")

    def least(every: list[dict[str, Any]], rival: str) -> float:
        return min(row["above"] for row in every if row["method"] == rival and "above" in row)

    assert all(least(adult, rival) > 0 for rival in ("sox", "sonx", "icppac", "sonx-adam"))
    assert f"above that of SOX (by {least(adult, 'sox'):.4f} or more)" in said
    assert f"SONX with Adam ({least(adult, 'sonx-adam'):.4f}) everywhere that it reaches" in said
    smallest = min(row["test_gap"] for row in adult)
    assert f"has a test gap below {smallest:.3f}" in said and smallest > 0.05
    behind = [row for row in compas if row["method"] == "sox" and row.get("matched_auc", 0) < 0]
    alone = [row for row in compas if row["method"] == "sox" and "matched" not in row]
    assert f"*matched* behind at {len(behind)} of 4, and {len(alone)} of its settings" in said


def test_what_training_sees() -> None:
    best: dict[str, list[dict[str, Any]]] = {}
    for data in DATA:
        for entry in read(f"fairness-{data}-full-sweep/sweep.json")["settings"]:
            own = entry["figures"]
            if entry["score"] is not None and own["train_violation"] <= 0.01:
                best.setdefault(f"{data} {entry['method']}", []).append(own)
    for method in METHODS:
        cells = []
        for data in DATA:
            own = max(best[f"{data} {method}"], key=lambda figures: figures["train_auc"])
            cells += [f"{own['train_auc']:.4f}", f"{own['val_auc']:.4f}", f"{own['val_gap']:.3f}"]
        assert f"| {method} | {' | '.join(cells)} |" in section("The frontier"), method


def test_what_is_said_of_the_order() -> None:
    said, adult, compas = text(), methods("adult"), methods("compas")
    auc = {name: mean(adult, name, "test_auc") for name in METHODS}
    order = sorted(auc, key=lambda name: -auc[name])
    assert order[0] == "alexr2" and set(order[1:3]) == {"sonx-adam", "sonex"}
    assert f"ALEXR2 has the highest AUC ({auc['alexr2']:.4f})" in said
    gaps = {name: mean(adult, name, "test_gap") for name in METHODS}
    assert sorted(gaps, key=lambda name: gaps[name])[:2] == ["sonx", "sonex"]
    assert f"SONX ({gaps['sonx']:.3f}) and SONEX ({gaps['sonex']:.3f}), which" in said
    limit = math.sqrt(0.03**2 + mean(adult, "sox", "test_gap_floor") ** 2)
    assert f"(a measured gap of {limit:.3f})" in said and min(gaps.values()) > max(limit, 0.05)
    best = {name: mean(compas, name, "test_auc") for name in METHODS}
    highest = sorted(best, key=lambda name: -best[name])
    assert highest[:2] == ["alexr2-one-batch", "sox"]
    assert (
        f"(0.{round(1e4 * best['alexr2-one-batch'])}) and SOX (0.{round(1e4 * best['sox'])})"
        in said
    )
    before = read("fairness-earlier/tables.json")["compas"]
    five = sorted(METHODS[:5], key=lambda name: -mean(before, name, "test_auc"))
    assert five[2] == "sox" and "which was third of the five" in said
    assert "the order of the AUC is SONEX, ALEXR2, SONX, SOX, ICPPAC" in said
    table = methods("adult-appendix")
    found = sorted(METHODS[:5], key=lambda name: -mean(table, name, "test_auc"))
    assert found == ["sonex", "alexr2", "sonx", "sox", "icppac"]


def test_the_paper_s_setting_means_nothing() -> None:
    said, adult = text(), methods("adult-paper")
    inside = {name: mean(adult, name, "train_inside") for name in METHODS[:5]}
    assert max(inside, key=lambda name: inside[name]) == "icppac"
    assert f"At most {100 * inside['icppac']:.1f} % of the training scores are left" in said
    gaps = [mean(adult, name, "test_gap") for name in METHODS[:5]]
    assert f"ROC curves are {min(gaps):.2f} to {max(gaps):.2f} apart" in said and min(gaps) > 0.2
    for data in DATA:
        sweep = read(f"fairness-{data}-paper-sweep/sweep.json")
        scores = [each["score"][0] for each in sweep["settings"] if each["method"] == "icppac"]
        assert min(scores) > 0, "no setting of ICPPAC is feasible"


def test_settings_tried_and_what_they_cost() -> None:
    said, told = text(), read("fairness-tuning/seconds.json")
    for name, entry in told["sweeps"].items():
        sweep = read(f"fairness-{name}-sweep/sweep.json")
        assert entry["runs"] == len(sweep["settings"]) * len(sweep["seeds"])
        assert sweep["seeds"] == [1000, 1001, 1002, 1003, 1004]
        assert f"{entry['runs']:,} |" in "\n".join(section("How the settings were chosen"))
        assert f"{' + '.join(map(str, entry['seconds']))} s" in said, name
    for data in DATA:
        counts: dict[str, int] = {}
        diverged: dict[str, int] = {}
        for entry in read(f"fairness-{data}-full-sweep/sweep.json")["settings"]:
            met = entry["score"] is not None and entry["score"][0] == 0
            counts[entry["method"]] = counts.get(entry["method"], 0) + met
            diverged[entry["method"]] = diverged.get(entry["method"], 0) + entry["diverged"]
        for name in ("alexr2", "sonex", "sox", "sonx", "icppac"):
            assert f"{name.upper()} {counts[name]}" in said, (data, name)
        for name in ("sox", "icppac"):
            if diverged[name]:
                assert f"{diverged[name]} of {name.upper()}" in said, (data, name)


def test_nothing_of_a_machine_is_in_the_results() -> None:
    found = list(RESULTS.glob("fairness-*/*"))
    assert len(found) > 40
    for path in found:
        content = path.read_text(encoding="utf-8")
        assert not any(place in content for place in ("/tmp/", "/work/", "/root/", "/home/")), path


def test_links_and_images_of_the_page_exist() -> None:
    import re

    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", "\n".join(page()))
    assert len(targets) > 12
    for target in targets:
        assert (DOCS / target).is_file(), target
