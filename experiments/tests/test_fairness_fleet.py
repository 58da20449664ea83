"""Fleets of the fairness task: each run is the single run, in its figures and its state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fairness_cases import METHODS, config, parts, stored, with_settings
from fcco_experiments.task import Method
from fcco_experiments.tasks.fairness import TASK, Fairness
from fcco_experiments.tasks.fairness.fleet import FairnessFleet, MethodCache
from fcco_experiments.tasks.fairness.model import Cells, scorer
from fcco_experiments.tasks.fairness.training import FairnessTraining
from test_experiments_cli import fcco

CPU = torch.device("cpu")
QUANTILES: dict[str, Any] = {"thresholds": (0.3, 0.7), "threshold_kind": "quantile"}
CASES = [
    ("sonex", {"score": "unbounded"}),
    ("alexr2", {}),
    ("alexr2", QUANTILES),
    ("sonx", QUANTILES),
    ("sox", {"score": "unbounded", "objective": "bce"}),
    ("li2024", {"score": "unbounded"}),
    ("yang2025", {}),
    ("erm", {"score": "unbounded"}),
    ("icppac", {}),
    ("ssg", {}),
]


@pytest.fixture
def double() -> Iterator[None]:
    """All that is made inside is float64, but for the data, which all tests share."""
    parts()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def data() -> dict[str, Cells]:
    kind = torch.get_default_dtype()
    return {
        name: replace(part, inputs=part.inputs.to(kind), prior=part.prior.to(kind))
        for name, part in parts().items()
    }


def pair(
    runs: list[tuple[Method, int]], **changes: Any
) -> tuple[FairnessFleet, list[FairnessTraining]]:
    """The same runs together and one by one; not traced, which takes most of the time."""
    own, known = config(**changes), data()
    settings = MethodCache(own, scorer(own, 0, known["train"]))
    kinds = {settings.kind(method) for method, _ in runs}
    assert len(kinds) == 1 and None not in kinds
    fleet = FairnessFleet(own, runs, lambda seed: known, settings, CPU)
    fleet.fleet.mode = "eager"
    return fleet, [FairnessTraining(own, method, seed, known) for method, seed in runs]


def numbers(run: FairnessTraining) -> dict[str, float]:
    """What a fleet shows of a row: no lists and no Jacobian."""
    return {
        key: value
        for key, value in run.evaluate().items()
        if not isinstance(value, list) and not key.startswith("singular")
    }


def compared(fleet: FairnessFleet, singles: list[FairnessTraining]) -> float:
    """The largest difference of any figure of any run."""
    worst = 0.0
    for row, run in zip(fleet.evaluate(), singles, strict=True):
        own = numbers(run)
        assert row.keys() == own.keys()
        worst = max(worst, *(abs(row[key] - own[key]) for key in own))
    return worst


def three(name: str, lengths: tuple[int, int] = (3, 6)) -> list[tuple[Method, int]]:
    """Two seeds, two learning rates, and for double loops two lengths of a round.

    An epoch may end in the middle of a round.
    """
    method = METHODS[name]
    other = replace(method, lr=method.lr / 2)
    if "inner_steps" in method.settings:
        method, other = (
            replace(each, settings=method.settings | {"inner_steps": length})
            for each, length in zip((method, other), lengths, strict=True)
        )
    return [(method, 4), (other, 1), (method, 1)]


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_each_run_has_the_figures_of_the_single_run(name, changes, double):
    fleet, singles = pair(three(name), **changes)
    assert fleet.steps_per_epoch == singles[0].steps_per_epoch
    assert fleet.samples_per_step == singles[0].samples_per_step
    first = fleet.evaluate()
    assert compared(fleet, singles) < 1e-12
    for step in range(1, 4 * fleet.steps_per_epoch + 1):
        fleet.step()
        for run in singles:
            run.step()
        if step % 5 == 0:  # within rounds and epochs, too
            assert compared(fleet, singles) < 1e-9
    last = fleet.evaluate()
    assert compared(fleet, singles) < 1e-9
    assert all(
        abs(a["train_auc"] - b["train_auc"]) > 1e-3 for a, b in zip(first, last, strict=True)
    )
    assert fleet.died == [-1, -1, -1]


@pytest.mark.parametrize(("name", "changes"), [("sonex", QUANTILES), ("alexr2", {})])
def test_a_checkpoint_in_the_middle_goes_on_bitwise_and_evaluation_changes_nothing(name, changes):
    whole, _ = pair(three(name, (3, 3)), **changes)
    watched, _ = pair(three(name, (3, 3)), **changes)
    steps = whole.steps_per_epoch + 1
    for _ in range(steps):
        whole.step()
        watched.step()
        assert watched.evaluate() == watched.evaluate()
    between = whole.fleet.state.get("between_rounds")
    assert (between is None) == (name == "sonex")
    assert between is None or not between.any(), "in the middle of a round, too"
    state = stored(watched.state_dict())
    for _ in range(steps):
        watched.step()
    again, _ = pair(three(name, (3, 3)), **changes)
    again.load_state_dict(state)
    for _ in range(steps):
        whole.step()
        again.step()
    assert same(whole.state_dict(), again.state_dict())
    assert same(whole.state_dict(), watched.state_dict())
    assert whole.evaluate() == again.evaluate()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


def test_a_run_that_diverges_is_frozen_and_the_others_do_not_notice():
    method = METHODS["sonx"]
    wild = replace(method, lr=1e30)
    calm = replace(method, lr=1e-3)
    score = {"score": "unbounded"}
    bad, _ = pair([(method, 1), (wild, 1), (calm, 1)], **score)
    good, _ = pair([(method, 1), (replace(method, lr=0.02), 1), (calm, 1)], **score)
    for _ in range(12):
        bad.step()
        good.step()
    assert bad.died[0] == bad.died[2] == -1 and 0 <= bad.died[1] < 12
    rows, others = bad.evaluate(), good.evaluate()
    assert rows[0] == others[0] and rows[2] == others[2]


def test_kinds():
    problem = TASK.load(Fairness(data="synthetic", epochs=1, hidden=(4,)))
    kinds = {name: problem.fleet_kind(method, 0) for name, method in METHODS.items()}
    assert kinds["alexr"] is None or kinds["liu2025"] is None, "the tests need one for no fleet"
    known = {name: kind for name, kind in kinds.items() if kind is not None}
    assert {"sonex", "alexr2", "sonx", "sox", "erm"} <= known.keys()
    assert problem.fleet_kind(with_settings("sonex", penalty=3), 0) == kinds["sonex"]
    assert problem.fleet_kind(replace(METHODS["sonex"], lr=0.5), 0) == kinds["sonex"]
    for other in (
        replace(METHODS["sonex"], independent=True),
        replace(METHODS["sonex"], update="momentum"),
        METHODS["sox"],
    ):
        assert problem.fleet_kind(other, 0) != kinds["sonex"]
    sizes = {seed: len(problem.parts(seed)["train"]) for seed in range(8)}
    odd = next((seed for seed in sizes if -(-sizes[seed] // 128) != -(-sizes[0] // 128)), None)
    if odd is not None:
        assert problem.fleet_kind(METHODS["sonex"], odd) != kinds["sonex"]
        with pytest.raises(ValueError, match=r"FairnessFleet\(runs=\.\.\.\)`: their seeds split"):
            problem.fleet([(METHODS["sonex"], 0), (METHODS["sonex"], odd)], CPU)


def test_portions_hold_every_run_once(monkeypatch):
    from fcco_experiments.tasks.fairness import fleet as module

    runs = [(replace(METHODS["erm"], lr=0.01 * k), seed) for k in range(1, 4) for seed in (4, 1)]
    fleet, singles = pair(runs)
    whole = fleet.evaluate()
    monkeypatch.setattr(module, "_BUDGET", (1, 1))
    portions = fleet._portions()
    assert sorted(int(r) for _, chosen in portions for r in chosen) == list(range(6))
    assert len(portions) == 6
    for one, other in zip(whole, fleet.evaluate(), strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    assert compared(fleet, singles) < 1e-6


# The command.

GRID = """
seeds: [1000, 1001]
methods:
  sonex:
    base: {method: sonex, lr: 0.01, settings: {penalty: 4, smoothing: 2e-3, gamma: 0.8}}
    grid: {settings.penalty: [4, 20]}
  sox:
    base: {method: sox, lr: 0.01, settings: {penalty: 100, gamma: 0.5}}
    grid: {lr: [1e-2, 1e-4]}
  liu2025:
    base:
      method: liu2025
      lr: 0.01
      update: sgd
      settings: {penalty: 10, smoothing: 2e-3, refresh_every: 4}
    grid: {lr: [1e-2]}
"""


def test_a_sweep_with_and_without_fleets_chooses_the_same(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("grid.yaml").write_text(GRID)
    words = ["sweep", "fairness", "--data", "synthetic", "--grid", "grid.yaml", "--epochs", "2"]
    words += ["--score", "unbounded", "--workers", "1", "--hidden", "[4]"]
    fcco(*words, "--out", "fleet", "--quiet", "--device", "cpu")
    fcco(*words, "--out", "alone", "--quiet", "--no-fleet")
    assert Path("fleet/winners.yaml").read_text() == Path("alone/winners.yaml").read_text()
    tables = []
    for out in ("fleet", "alone"):
        rows = [json.loads(line) for line in Path(out, "runs.jsonl").read_text().splitlines()]
        tables.append({(row["name"], row["seed"]): row for row in rows})
    fleet, alone = tables
    assert list(fleet) == list(alone) and len(fleet) == 10
    lines = Path("fleet/fleet.jsonl").read_text().splitlines()
    folders = list(Path("fleet").glob("*/seed-*/result.json"))
    assert len(lines) + len(folders) == 10 and len(lines) >= 8
    for run, row in fleet.items():
        for key, value in row.items():
            if key != "seconds":
                assert value == pytest.approx(alone[run][key], abs=1e-4), (run, key)
        missing = {key for key in alone[run] if key not in row}
        assert all(key.startswith(("kkt", "singular")) for key in missing)
