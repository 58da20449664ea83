"""Every method on every problem that it is meant for; the tables of methods."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from method_cases import SETUPS, TRANSCRIPTIONS, Setup
from method_problems import KINDS, GroupLosses, MethodProblem
from problems import Point, decay, take_step
from test_checkpoint import difference

import fcco
from fcco.methods import METHODS, ROWS

CELLS = list(SETUPS)
# One problem of each method, such that each problem is there; the other cells are slow.
CHOSEN = {
    "sonex": "S2", "alexr2": "S4", "sonx": "S2", "hinge": "S3b", "ssg": "S3b", "oss": "S3",
    "icppac": "S3", "squared-hinge": "S3", "recursive-hinge": "S3", "ooa": "S2", "alexr": "S2",
    "multipliers": "S3", "ctc-dro": "S2", "scent": "exponents",
}  # fmt: skip
QUICK = [(name, CHOSEN.get(name, "smooth")) for name in METHODS]
# Each method is compared with its transcription anyway: one of them for each problem.
TRIED = [cell for cell in QUICK if cell[0] in ("sonex", "alexr2", "ooa", "ssg")]
SLOW = [pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS if cell not in TRIED]


def prepare(name: str, problem: str) -> tuple[MethodProblem, Point, Setup]:
    kind: Any = GroupLosses if name in ("ooa", "ctc-dro") else KINDS[problem]
    data = kind()
    model = data.model()
    return data, model, SETUPS[name, problem](data, model)


def advance(data: MethodProblem, model: Point, run: Setup, first: int, last: int) -> None:
    """Steps first..last-1 of a run."""
    objective = run.objective
    for step in range(first, last):
        if run.power:
            decay(objective.optimizer, (1 - step / run.steps) ** run.power)
        batch = data.draw(model, **run.draw)
        more: dict[str, Any] = {} if batch.gradient is None else {"gradient": batch.gradient}
        if run.large is not None and run.large():  # a large batch for the values only
            more["gradient_index"], batch = batch.index, data.everything(model)
        take_step(objective, batch.inner, batch.index, **more)


# The registry and the tests know the same methods.


def test_every_method_has_its_cases():
    assert set(TRANSCRIPTIONS) == set(METHODS), "each method equals a transcription"
    assert {name for name, _ in CELLS} == set(METHODS), "each method reaches a known answer"
    for name in TRANSCRIPTIONS.values():
        file, _, function = name.partition("::")
        assert f"\ndef {function}(" in (Path(__file__).parent / file).read_text(), name


@pytest.mark.parametrize("name", METHODS)
def test_every_method_shows_its_update_its_settings_and_its_source(name):
    kind = METHODS[name]
    text = "\n".join(inspect.getdoc(each) or "" for each in kind.__mro__ if each is not object)
    own = inspect.getdoc(kind) or ""
    assert ".. math::" in own and "References:" in own
    for field in dataclasses.fields(kind):
        shared = ("on_nonfinite", "dtype", "device")
        assert f"\n    {field.name}: " in text or field.name in shared, field.name


# What the methods do.


@pytest.mark.parametrize("name, problem", [*TRIED, *SLOW])
def test_reaches_the_known_answer(name, problem):
    data, model, run = prepare(name, problem)
    before = data.error(model.w)
    advance(data, model, run, 0, run.steps)
    if run.final is not None:
        run.final()
    after = data.error(model.w)
    assert after <= run.tolerance < before / 2, f"{before:.3f} -> {after:.4f}"


@pytest.mark.parametrize("name, problem", QUICK)
def test_evaluations_and_bad_values_change_nothing(name, problem):
    data, model, run = prepare(name, problem)
    objective: Any = run.objective
    advance(data, model, run, 0, 3)
    before = copy.deepcopy(dict(objective.state_dict()))
    batch = data.draw(model, every=True)
    loss = objective.eval()(batch.inner, batch.index)
    with torch.no_grad():
        assert torch.equal(objective.train()(batch.inner, batch.index), loss)
    assert torch.isfinite(loss)

    def bad() -> Any:
        inner = batch.inner()
        return torch.nan * inner if isinstance(inner, torch.Tensor) else (inner[0], inner[1] / 0)

    with pytest.raises(ValueError, match="NaN or infinite"):
        objective(bad, batch.index)
    assert difference(before, dict(objective.state_dict())) == 0


# Requirements.

LACKING = {"smooth": fcco.outer.Hinge(), "convex": fcco.outer.OneSidedMCP(1.0, 2.0)}
GENERAL: dict[str, Any] = {
    row.name: row.settings
    for row in ROWS
    if "general" in row.use and row.name != "scent"  # its outer function is its own
}


@pytest.mark.parametrize(
    "name, fact", [(n, fact) for n, kind in GENERAL.items() for fact in kind.requires]
)
def test_refuses_an_outer_function_without_the_declared_fact(name, fact):
    model = Point(np.zeros(3))
    needed = {"alexr2": {"smoothing": 0.1}, "alexr": {"dual_step": 0.1}}.get(name, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=fact):
        getattr(fcco.methods, name)(model, optimizer, LACKING[fact], 3, **needed)


ALL = [row.name for row in ROWS if "limits" in row.use and not row.settings.sampled]


@pytest.mark.parametrize("name", ALL)
def test_refuses_a_part_of_the_constraints_and_stays_as_it_was(name):
    data, model, run = prepare(name, "S3")
    advance(data, model, run, 0, 3)
    before = copy.deepcopy(dict(run.objective.state_dict()))
    with pytest.raises(ValueError, match="all"):
        options: dict[str, Any] = run.draw | {"every": False}
        batch = data.draw(model, **options)
        assert len(batch.index.unique()) < data.number
        run.objective(batch.inner, batch.index)
    assert difference(before, dict(run.objective.state_dict())) == 0
