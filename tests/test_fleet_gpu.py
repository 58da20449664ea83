"""Fleets on a GPU: captured and compiled steps, freezing inside them."""

from __future__ import annotations

import pytest
import torch
from fleet_cases import CASES
from test_fleet import held, same, spoiled

from fcco.fleet import Fleet

pytestmark = [
    pytest.mark.gpu,
    # Inductor of some releases of torch; any other warning is an error.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]


CASE = CASES["alexr2-momentum"]


def fleet(mode: str, device: str) -> Fleet:
    members = [CASE.member(run) for run in range(3)]
    return Fleet(members, CASE.inner, device=device, mode=mode)


@pytest.mark.parametrize("mode", ["traced", "graph", "compiled"])
def test_every_mode_is_the_fleet_on_the_cpu(mode: str) -> None:
    here, there = fleet("eager", "cpu"), fleet(mode, "cuda")
    for step in range(25):
        CASE.step_fleet(here, step)
        CASE.step_fleet(there, step)
    assert there.mode == mode
    for name, value in here.weights().items():
        assert torch.allclose(there.weights()[name].cpu(), value, atol=1e-10)


@pytest.mark.parametrize("mode", ["traced", "graph"])
def test_a_frozen_run_harms_no_other(mode: str) -> None:
    good, bad = fleet(mode, "cuda"), fleet(mode, "cuda")
    for step in range(12):
        first, other, _ = CASE.stacked(step)
        good.step(first, other)
        bad.step(spoiled(first, 1, torch.nan) if step == 4 else first, other)
    assert bad.died.tolist() == [-1, 4, -1] and good.died.tolist() == [-1, -1, -1]
    assert same(held(bad), held(good), [0, 2])
    assert not torch.equal(held(bad)["weights"][1], held(good)["weights"][1])


def test_a_captured_fleet_resumes_bitwise_and_follows_its_numbers() -> None:
    first, second = fleet("graph", "cuda"), fleet("graph", "cuda")
    for step in range(5):
        CASE.step_fleet(first, step)
    state = first.state_dict()
    CASE.step_fleet(second, 0)  # captured before it is loaded
    second.load_state_dict(state)
    for step in range(5, 14):
        for each in (first, second):
            each.set_hyperparameters(lr=0.01)
            CASE.step_fleet(each, step)
    assert same(held(first), held(second), [0, 1, 2])
