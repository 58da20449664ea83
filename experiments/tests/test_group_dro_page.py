"""The page on group DRO has the figures of the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FOLDERS = sorted(
    each.parent for each in DOCS.glob("results/group-dro-*/table.json") if "long" not in str(each)
)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_tables_are_those_of_the_results(folder: Path) -> None:
    page = (DOCS / "group-dro.md").read_text(encoding="utf-8")
    for name, figures in json.loads((folder / "table.json").read_text())["methods"].items():
        wanted = [
            f"{figures[key]['mean']:.3f} ± {figures[key]['std']:.3f}"
            for key in ("train_cvar", "test_cvar")
        ]
        rows = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        assert any(all(cell in row for cell in wanted) for row in rows), (name, wanted)


def test_there_are_results() -> None:
    assert len(FOLDERS) >= 6 + 8, "three data sets by two rules, four ablations of two"


def test_end_to_end_figures() -> None:
    page = (DOCS / "group-dro.md").read_text(encoding="utf-8")
    runs = json.loads((DOCS / "results/group-dro-celeba-end-to-end/runs.json").read_text())["runs"]
    own = {r["seed"]: r for r in runs if r["method"] == "sonex-adam" and "lite0" in r["backbone"]}
    mean = sum(run["test_worst_accuracy"] for run in own.values()) / len(own)
    row = next(line for line in page.splitlines() if "| sonex-adam | 5e-05 |" in line)
    assert len(own) == 3 and f"| {mean:.3f} |" in row


def test_samples_that_the_others_need() -> None:
    """The lesser of the run of equal length and the longer one."""
    page = (DOCS / "group-dro.md").read_text(encoding="utf-8")
    for data in ("celeba", "sentiment", "amazon"):
        found: dict[str, list[float]] = {}
        for run in ("equal", "long"):
            own = json.loads((DOCS / f"results/group-dro-samples/{data}-{run}.json").read_text())
            for each in own["baselines"]:
                if each["needs"] is not None:
                    found.setdefault(each["method"], []).append(each["needs"])
        cells = [min(found[name]) for name in ("sonx", "ooa-cvar", "ooa-cvar-euclidean")]
        row = " | ".join(f"{cell:.2f}" for cell in cells)
        assert any(f"| {row} |" in line for line in page.splitlines()), (data, row)


def test_speed() -> None:
    page = (DOCS / "group-dro.md").read_text(encoding="utf-8")
    cases = json.loads((DOCS / "results/group-dro-speed/speed.json").read_text())["cases"]
    for row in cases.values():
        cells = f"| {row['ema']:.3f} | {row['msvr']:.3f} | {row['msvr_over_bound']:.3f} |"
        assert cells in page and f"| {row['erm_per_second']:,} |" in page
