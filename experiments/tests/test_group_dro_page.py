"""The page on group DRO has the figures of the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
LINES = (DOCS / "research/group-dro.md").read_text(encoding="utf-8").splitlines()
FOLDERS = sorted(
    each.parent for each in DOCS.glob("results/group-dro-*/table.json") if "long" not in str(each)
)


def read(path: str) -> Any:
    return json.loads((DOCS / "results" / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_tables_are_those_of_the_results(folder: Path) -> None:
    assert len(FOLDERS) >= 6 + 8, "three data sets by two rules, four ablations of two"
    for name, figures in read(f"{folder.name}/table.json")["methods"].items():
        judged = figures["train_cvar"], figures["test_cvar"]
        wanted = [f"{figure['mean']:.3f} ± {figure['std']:.3f}" for figure in judged]
        rows = [line for line in LINES if line.startswith(f"| {name} |")]
        assert any(all(cell in row for cell in wanted) for row in rows), (name, wanted)


def test_end_to_end_figures() -> None:
    runs = read("group-dro-celeba-end-to-end/runs.json")["runs"]
    runs = [r for r in runs if r["method"] == "sonex-adam" and "lite0" in r["backbone"]]
    own = {run["seed"]: run["test_worst_accuracy"] for run in runs}
    row = next(line for line in LINES if "| sonex-adam | 5e-05 |" in line)
    assert len(own) == 3 and f"| {sum(own.values()) / 3:.3f} |" in row


@pytest.mark.parametrize("data", ["celeba", "sentiment", "amazon"])
def test_samples_that_the_others_need(data: str) -> None:
    """The lesser of the run of equal length and the longer one."""
    found: dict[str, list[float]] = {}
    for run in ("equal", "long"):
        for each in read(f"group-dro-samples/{data}-{run}.json")["baselines"]:
            if each["needs"] is not None:
                found.setdefault(each["method"], []).append(each["needs"])
    cells = [min(found[name]) for name in ("sonx", "ooa-cvar", "ooa-cvar-euclidean")]
    row = " | ".join(f"{cell:.2f}" for cell in cells)
    assert any(f"| {row} |" in line for line in LINES), row


def test_speed() -> None:
    for case in read("group-dro-speed/speed.json")["cases"].values():
        cells = f"| {case['ema']:.3f} | {case['msvr']:.3f} | {case['msvr_over_bound']:.3f} |"
        rows = [line for line in LINES if cells in line]
        assert any(f"| {case['erm_per_second']:,} |" in row for row in rows)
