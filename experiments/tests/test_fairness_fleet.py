"""Fleets of the fairness task: each run is the single run, in its figures and its state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fairness_cases import METHODS, config, float_parts, parts, with_settings
from fcco_experiments.task import Method
from fcco_experiments.tasks.fairness import TASK, Fairness
from fcco_experiments.tasks.fairness import training as module
from fcco_experiments.tasks.fairness.model import Scorer
from fcco_experiments.tasks.fairness.training import BuiltMethod, FairnessFleet, FairnessTraining
from task_cases import same, steps, stored

CASES = [
    ("sonex", {"score": "unbounded"}),
    ("alexr2", {}),
    ("sonx", {}),
    ("sox", {"score": "unbounded"}),
    ("li2024", {"score": "unbounded"}),
    ("yang2025", {}),
    ("erm", {"score": "unbounded"}),
    ("icppac", {}),
    ("ssg", {}),
]


@pytest.fixture
def double() -> Iterator[None]:
    """All that is made inside is float64."""
    float_parts()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def pair(
    runs: list[tuple[Method, int]], **changes: Any
) -> tuple[FairnessFleet, list[FairnessTraining]]:
    """The same runs together and one by one; not traced, which takes most of the time."""
    asked, known = config(**changes), parts()
    model = Scorer(asked, 0, known["train"])
    fleet = FairnessFleet(
        asked, runs, lambda seed: known, lambda method: BuiltMethod(model, method, asked),
        torch.device("cpu"),
    )  # fmt: skip
    fleet.fleet.mode = "eager"
    return fleet, [FairnessTraining(asked, method, seed, known) for method, seed in runs]


def compared(fleet: FairnessFleet, singles: list[FairnessTraining]) -> float:
    """The largest difference of any figure of any run; a fleet shows no lists and no Jacobian."""
    worst = 0.0
    for row, run in zip(fleet.evaluate(), singles, strict=True):
        own = {
            key: value
            for key, value in run.evaluate().items()
            if not isinstance(value, list) and not key.startswith("singular")
        }
        assert row.keys() == own.keys()
        worst = max(worst, *(abs(row[key] - own[key]) for key in own))
    return worst


def three(name: str, lengths: tuple[int, int] = (3, 6)) -> list[tuple[Method, int]]:
    """Two seeds, two learning rates, and for double loops two lengths of a round."""
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
        for run in (fleet, *singles):
            run.step()
        if step % 5 == 0:  # within rounds and epochs, too
            assert compared(fleet, singles) < 1e-9
    assert all(
        abs(a["train_auc"] - b["train_auc"]) > 1e-3
        for a, b in zip(first, fleet.evaluate(), strict=True)
    )


@pytest.mark.parametrize("name", ["sonex", "alexr2"])
def test_a_checkpoint_in_the_middle_goes_on_bitwise_and_evaluation_changes_nothing(name):
    whole, watched, again = (pair(three(name, (3, 3)))[0] for _ in range(3))
    number = whole.steps_per_epoch + 1
    for _ in range(number):
        whole.step()
        watched.step()
        assert watched.evaluate() == watched.evaluate()
    between = whole.fleet.state.get("between_rounds")
    assert between is None or not between.any(), "in the middle of a round, too"
    again.load_state_dict(stored(watched.state_dict()))
    for fleet in (whole, watched, again):
        steps(fleet, number)
    assert same(whole.state_dict(), again.state_dict())
    assert same(whole.state_dict(), watched.state_dict())
    assert whole.evaluate() == again.evaluate()


def test_a_run_that_diverges_is_frozen_and_the_others_do_not_notice():
    rates = [(0.01, 1e30, 1e-3), (0.01, 0.02, 1e-3)]
    bad, good = (
        steps(pair([(replace(METHODS["sonx"], lr=lr), 1) for lr in own], score="unbounded")[0], 12)
        for own in rates
    )
    assert bad.died[0] == bad.died[2] == -1 and 0 <= bad.died[1] < 12
    rows, others = bad.evaluate(), good.evaluate()
    assert rows[0] == others[0] and rows[2] == others[2]


def test_runs_are_of_one_kind_where_one_program_can_train_them():
    problem = TASK.load(Fairness(data="synthetic", epochs=1, hidden=(4,)))
    kinds = {name: problem.fleet_kind(method, 0) for name, method in METHODS.items()}
    assert kinds["liu2025"] is None
    assert None not in [
        kinds[name] for name in ("automatic", "sonex", "alexr2", "sonx", "sox", "erm")
    ]
    sonex = METHODS["sonex"]
    for alike in (with_settings("sonex", penalty=3), replace(sonex, lr=0.5)):
        assert problem.fleet_kind(alike, 0) == kinds["sonex"]
    for other in (replace(sonex, independent=True), replace(sonex, update="sgd"), METHODS["sox"]):
        assert problem.fleet_kind(other, 0) != kinds["sonex"]
    short = {name: replace(p, inputs=p.inputs[:100]) for name, p in problem.parts(0).items()}
    problem._parts[7] = short  # fewer steps in an epoch
    assert problem.fleet_kind(sonex, 7) != kinds["sonex"]


def test_portions_of_the_memory_for_figures_hold_every_run_once(monkeypatch):
    runs = [(replace(METHODS["erm"], lr=0.01 * k), seed) for k in range(1, 4) for seed in (4, 1)]
    fleet, singles = pair(runs)
    monkeypatch.setattr(module, "_BUDGET", (1, 1))
    assert compared(fleet, singles) < 1e-6
