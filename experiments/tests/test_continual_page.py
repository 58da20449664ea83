"""The tables of the page on continual learning are those of the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "continual.md").read_text(encoding="utf-8").splitlines()


def read(path: str) -> Any:
    return json.loads((DOCS / "results" / path).read_text(encoding="utf-8"))


def methods(folder: str) -> dict[str, Any]:
    return read(f"continual-{folder}/table.json")["methods"]


def cell(figures: dict[str, Any], key: str) -> str:
    return f"{figures[key]['mean']:.3f} ± {figures[key]['std']:.3f}"


@pytest.mark.parametrize("folder", ["weather", "bdd100k-subset", "weather-finetune"])
def test_tables_are_those_of_the_results(folder: str) -> None:
    for name, own in methods(folder).items():
        cells = [f"{own['penalty']['mean']:g}" if "penalty" in own else "-"]
        cells += [cell(own, k) for k in ("test_target_gain", "test_forgetting", "train_forgetting")]
        cells += [
            f"{own[k]['mean']:.1f}" for k in ("train_kept", "train_retained", "test_retained")
        ]
        assert f"| {name} | {' | '.join(cells)} | {cell(own, 'train_violation')} |" in PAGE, name


def test_every_penalty_by_itself() -> None:
    tables = [methods("weather-rho"), methods("bdd100k-subset-rho")]
    assert list(tables[0]) == list(tables[1]) and len(tables[0]) == 16
    for name in tables[0]:
        cells = [
            f"{cell(own[name], 'test_target_gain')} | {cell(own[name], 'test_forgetting')}"
            f" | {own[name]['train_kept']['mean']:.1f}"
            for own in tables
        ]
        assert f"| {name.replace('-', ' ')} | {' | '.join(cells)} |" in PAGE, name


def test_learning_rates_of_sonx() -> None:
    settings = read("continual-weather-finetune/sweep.json")["settings"]
    cells: dict[float, list[str]] = {}
    for run in (entry for entry in settings if entry["method"] == "sonx"):
        pair = [100 * run["figures"][key] for key in ("train_target_gain", "train_forgetting")]
        cells.setdefault(run["setting"]["lr"], []).append(f"{pair[0]:.1f}, {pair[1]:.1f}")
    assert len(cells) == 4
    for rate, pairs in cells.items():
        assert f"| {rate:g} | {' | '.join(pairs)} |" in PAGE, rate


def test_speed() -> None:
    for case in read("continual-speed/speed.json")["cases"]:
        for row in case["rows"].values():
            start, end = f"| {case['batch']:,} |", f"| {row['memory_ratio']:.3f} |"
            middle = f"| {row['milliseconds']:.1f} | {row['ratio']:.3f} |"
            assert any(line.startswith(start) and middle in line and end in line for line in PAGE)
