"""The figures of docs/fleet.md are those of docs/results/fleet-speed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGE = " ".join((DOCS / "fleet.md").read_text().split())
CPU = json.loads((DOCS / "results/fleet-speed/cpu.json").read_text())
GPU = json.loads((DOCS / "results/fleet-speed/h200.json").read_text())


@pytest.mark.parametrize("result", [r for r in CPU["results"] if r["device"] == "cpu"])
def test_every_line_of_the_cpu_table(result: dict[str, Any]) -> None:
    rows = result["rows"]
    times = [rows[name]["over_sequential"] for name in ("processes", "traced")]
    line = rf"\| {result['method']} \| {result['runs']:,}[^|]*\|[^|]*\| {times[0]:.2f} \|[^|]*"
    line += rf"\| {times[1]:.2f} \| {rows['products']['share_of_best']:.2f} \|"
    assert re.search(line, PAGE), line


@pytest.mark.parametrize("result", [r for r in GPU["results"] if r["method"] == "alexr2"])
def test_every_line_of_the_gpu_table(result: dict[str, Any]) -> None:
    speed, times = result["runs_per_second"], result["over_sequential"]
    cells = [f"{result['runs']:,}", *(f"{speed[k]:.4g}" for k in speed), f"{times['graph']:,.0f}"]
    assert f"| {' | '.join(cells)} | {result['floor']['products']:.2f} |" in PAGE


def test_the_targets() -> None:
    target, grid = CPU["target"], GPU["grid"]
    assert target["met"] and target["reached"] >= 4
    assert f"{target['reached']:.2f} times as fast" in PAGE
    assert grid["runs"] == 1152 * 5 and grid["epochs"] == 60 and grid["wall_s"] < 180
    assert f"took {grid['wall_s']:.0f} s from the command" in PAGE


def test_the_steps() -> None:
    for step in GPU["steps"]:
        if step["method"] == "alexr2" and step["inner_steps"] == [5] and step["runs"] < 5000:
            assert f"{step['milliseconds']:.2f}" in PAGE
