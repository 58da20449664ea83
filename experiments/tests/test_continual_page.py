"""The page on continual learning has the figures of the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"


def page() -> list[str]:
    return (DOCS / "continual.md").read_text(encoding="utf-8").splitlines()


def text() -> str:
    return " ".join(" ".join(page()).split())


def methods(folder: str) -> dict[str, Any]:
    return json.loads((RESULTS / folder / "table.json").read_text())["methods"]


def cell(figures: dict[str, Any], key: str) -> str:
    return f"{figures[key]['mean']:.3f} ± {figures[key]['std']:.3f}"


def points(value: float) -> str:
    return f"{100 * value:.1f}"


TABLES = ("continual-weather", "continual-bdd100k-subset", "continual-weather-finetune")


@pytest.mark.parametrize("folder", TABLES)
def test_tables_are_those_of_the_results(folder: str) -> None:
    for name, figures in methods(folder).items():
        keys = ("test_target_gain", "test_forgetting", "train_forgetting")
        wanted = " | ".join(cell(figures, key) for key in keys)
        rho = f"{figures['penalty']['mean']:g}" if "penalty" in figures else "-"
        kept = f"{figures['train_kept']['mean']:.1f} | {figures['train_retained']['mean']:.1f}"
        start = f"| {name} | {rho} | {wanted} | {kept} |"
        assert any(line.startswith(start) for line in page()), start


def test_every_penalty_by_itself() -> None:
    tables = [methods(f"continual-{data}-rho") for data in ("weather", "bdd100k-subset")]
    assert list(tables[0]) == list(tables[1]) and len(tables[0]) == 16
    for name in tables[0]:
        cells = [
            f"{cell(own[name], 'test_target_gain')} | {cell(own[name], 'test_forgetting')}"
            f" | {own[name]['train_kept']['mean']:.1f}"
            for own in tables
        ]
        assert f"| {name.replace('-', ' ')} | {' | '.join(cells)} |" in page(), name


def test_what_is_said_of_the_figures() -> None:
    said = text()
    weather, frames, tuned = (methods(folder) for folder in TABLES)

    def mean(table: dict[str, Any], name: str, key: str) -> float:
        return table[name][key]["mean"]

    lost = [points(mean(table, "finetune", "train_forgetting")) for table in (weather, frames)]
    assert f"loses {lost[0]} points (weather) and {lost[1]} points (BDD100K)" in said
    for table, where in ((weather, "weather"), (frames, "BDD100K")):
        gap = mean(table, "sonex", "test_target_gain") - mean(table, "sox", "test_target_gain")
        word = "more" if gap >= 0 else "less"
        assert f"{points(abs(gap))} points {word} ({where})" in said
    ratios = [mean(t, "sox", "penalty") / mean(t, "sonex", "penalty") for t in (weather, frames)]
    assert f"with a penalty {ratios[0]:.0f} and {ratios[1]:.0f} times smaller" in said
    kept = [round(5 * mean(t, "sonex", "train_kept")) for t in (weather, frames)]
    assert f"by SONEX in {kept[0]} of 5 seeds on weather and {kept[1]} of 5 on BDD100K" in said
    gap = mean(tuned, "sonex", "test_target_gain") - mean(tuned, "sox", "test_target_gain")
    pair = [f"{100 * mean(tuned, name, 'test_forgetting'):.2f}" for name in ("sonex", "sox")]
    assert gap > 0
    assert f"{points(gap)} points more, forgetting {pair[0]} against {pair[1]} points" in said


def test_learning_rates_of_sonx() -> None:
    sweep = json.loads((RESULTS / "continual-weather-finetune/sweep.json").read_text())
    runs = [each for each in sweep["settings"] if each["method"] == "sonx"]
    assert len(runs) == 8
    for run in runs:
        figures = run["figures"]
        pair = f"{points(figures['train_target_gain'])}, {points(figures['train_forgetting'])}"
        rows = [line for line in page() if line.startswith(f"| {run['setting']['lr']:g} | ")]
        assert len(rows) == 1 and pair in rows[0], (pair, rows)


@pytest.mark.parametrize("data", ["weather", "bdd100k-subset"])
def test_settings_are_the_winners_of_the_sweep(data: str) -> None:
    from fcco_experiments import config, tasks

    sweep = json.loads((RESULTS / f"continual-{data}-wide/sweep.json").read_text())
    by_name = {each["name"]: each["setting"] for each in sweep["settings"]}
    chosen = config.load(tasks.get("continual"), data).methods
    assert len(sweep["settings"]) == 6 * 16 and len(sweep["seeds"]) == 5
    for name, winner in sweep["winners"].items():
        for key, value in by_name[winner].items():
            own: Any = chosen[name]
            inside = key.startswith("settings.")
            found = own.settings[key.removeprefix("settings.")] if inside else getattr(own, key)
            assert found == value, (name, key)


def test_speed() -> None:
    cases = json.loads((RESULTS / "continual-speed/speed.json").read_text())["cases"]
    assert [case["batch"] for case in cases] == [256, 4096]
    for case in cases:
        for row in case["rows"].values():
            start, end = f"| {case['batch']:,} |", f"| {row['memory_ratio']:.3f} |"
            middle = f"| {row['milliseconds']:.1f} | {row['ratio']:.3f} |"
            assert any(line.startswith(start) and middle in line and end in line for line in page())
