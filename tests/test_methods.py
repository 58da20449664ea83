"""Every method on every problem that it is meant for; the tables of methods."""

from __future__ import annotations

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

import fcco
from fcco.methods import METHODS, ROWS

CELLS = list(SETUPS)
# Each method is compared with its transcription anyway: one of them for each problem.
TRIED = [("sonex", "S2"), ("alexr2", "S4"), ("ooa", "S2"), ("ssg", "S3b")]
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
