"""The benchmark of the contrastive step runs, on tiny backbones."""

from __future__ import annotations

import json

import pytest

from benchmarks import contrastive_speed as speed
from benchmarks.timing import Timings


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    speed.main(["--json", "--quick", "--batches", "6", "--rounds", "2", "--device", "cpu"])
    *lines, last = capsys.readouterr().out.splitlines()
    told = json.loads(last)
    assert told["backbones"] == "tiny" and [case["batch"] for case in told["cases"]] == [6]
    rows = told["cases"][0]["rows"]
    assert list(rows) == ["clip", "ema", "chunked", "msvr", "msvr-offload", "forward"]
    assert rows["clip"]["ratio"] == 1 and len(lines) == 7
    assert rows["msvr"]["bound"] == pytest.approx(1.05 + rows["forward"]["ratio"])
    assert rows["msvr-offload"]["bound"] == rows["msvr"]["bound"]
    assert "bound" not in rows["forward"]


def test_goals() -> None:
    """Ratios and limits from times and memory given by hand."""
    seconds = {"clip": [1.0, 2.0], "ema": [1.04, 2.08], "msvr": [1.3, 2.6], "forward": [0.2, 0.4]}
    memory: dict[str, float | None] = {"clip": 10.0, "ema": 10.001, "msvr": 10.2, "forward": 3.0}
    rows = {name: speed.row(name, Timings(seconds), memory, 0.2) for name in seconds}
    assert rows["ema"]["time_met"] and rows["ema"]["memory_met"]
    assert rows["ema"]["mib_more"] == pytest.approx(1.0)
    assert rows["msvr"]["bound"] == 1.25 and not rows["msvr"]["time_met"]
    assert rows["msvr"]["memory_ratio"] == 1.02 and not rows["msvr"]["memory_met"]
