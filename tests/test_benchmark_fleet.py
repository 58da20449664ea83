"""The benchmark of fleets runs, on tiny settings."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks import fleet, fleet_cases
from benchmarks.timing import Timings

SHAPE = (("rows", 300), ("test_rows", 100), ("features", 4))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--json --device cpu --sizes 2 --methods alexr2 --seconds 0.01 --rounds 2"
    threads = torch.get_num_threads()
    try:
        fleet.main([*words.split(), "--processes", "1", "--generated", "300", "--threads", "1"])
    finally:
        torch.set_num_threads(threads)
    *lines, last = capsys.readouterr().out.splitlines()
    told = json.loads(last)
    assert told["data"] == "generated, 300 rows" and told["torch"] == torch.__version__
    assert [each["runs"] for each in told["results"]] == [2]
    assert told["target"] is None  # no SONEX
    for each in told["results"]:
        assert list(each["rows"]) == [
            "sequential", "processes", "eager", "traced", "products", "state"
        ]  # fmt: skip
        assert each["rows"]["sequential"]["over_sequential"] == 1
        assert each["rows"]["processes"]["over_processes"] == 1
        assert each["steps"] == 60 and each["died"] == 0  # 240 rows, two batches of 128
    assert "extrapolated" in lines[0] and lines[-1].split()[0] == "2"


def test_the_grid(capsys: pytest.CaptureFixture[str]) -> None:
    fleet.main(["--grid", "--json", "--generated", "1", "--limit", "2", "--epochs", "1"])
    *_, line, last = capsys.readouterr().out.splitlines()
    told = json.loads(last)["grid"]
    assert told["runs"] == 10 and told["epochs"] == 1 and told["wall_s"] > 0
    assert "--methods alexr2" in told["command"] and "--out" not in told["command"]
    assert line.startswith("10 runs of 1 epochs with set-up, evaluation and table")


def test_rows_from_times_by_hand() -> None:
    seconds = {
        "sequential": [1.0, 2.0, 4.0],
        "processes": [0.5, 1.0, 2.0],
        "eager": [0.5, 1.0, 2.0],
        "traced": [0.2, 0.4, 1.0],
        "products": [0.1, 0.1, 0.1],
        "state": [0.02, 0.04, 0.1],
    }
    rows = fleet.rows(Timings(seconds), 10, ("eager", "traced"))
    assert rows["traced"]["over_sequential"] == 5 and rows["traced"]["over_processes"] == 2.5
    assert rows["traced"]["runs_per_second"] == 0.25  # 1 / (0.4 s times 10 steps)
    assert rows["products"] == {"run_step_us": 1e5, "share_of_best": 0.25}
    result = {"method": "sonex", "device": "cpu", "runs": 20, "rows": rows}
    assert fleet.target([result]) == {**fleet.TARGET, "reached": 5, "met": True}
    rows["traced"]["over_sequential"] = 3.9
    found = fleet.target([result])
    assert found is not None and not found["met"]


def test_a_fleet_trains_as_the_single_run() -> None:
    """What is compared does the same work."""
    case = fleet_cases.Case("alexr2", hidden=(5,), batch=16, generated=SHAPE)
    problem, runs = case.problem(), case.runs(3)
    together = problem.fleet(runs, torch.device("cpu"))
    single: Any = problem.start(*runs[2])
    for _ in range(5):  # a whole round
        together.step()
        single.step()
    for name, value in single.model.named_parameters():
        assert torch.allclose(together.fleet.weights()[name][2], value, atol=1e-4)


def test_the_products_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward passes, gradients of the weights, and of the inputs but for the first layer."""
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        torch, "bmm", lambda a, b: shapes.append((*a.shape, b.shape[2])) or torch.zeros(1)
    )
    case = fleet_cases.Case("sonex", hidden=(5, 6), batch=8, generated=SHAPE)
    fleet_cases.products(case, 4, 3, 2, "cpu")()
    forward = [(3, 8, 4, 5), (3, 8, 5, 6), (3, 8, 6, 1)]
    weights = [(3, 4, 8, 5), (3, 5, 8, 6), (3, 6, 8, 1)]
    inputs = [(3, 8, 6, 5), (3, 8, 1, 6)]
    assert sorted(shapes) == sorted([*forward, *forward, *weights, *inputs])
