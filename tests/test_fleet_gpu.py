"""Fleets on a GPU: captured and compiled steps, freezing inside them."""

from __future__ import annotations

import pytest
import torch
from test_fleet import batches, held, inner, member, same

from fcco.fleet import Fleet

pytestmark = [
    pytest.mark.gpu,
    # Inductor of some releases of torch; any other warning is an error.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]


def fleet(mode: str, device: str, lengths: tuple[int, ...] = (2, 3, 2)) -> Fleet:
    members = [member("alexr2", seed, inner_steps=k) for seed, k in enumerate(lengths)]
    return Fleet(members, inner, device=device, mode=mode)


@pytest.mark.parametrize("mode", ["traced", "graph", "compiled"])
def test_every_mode_is_the_fleet_on_the_cpu(mode: str) -> None:
    here, there = fleet("eager", "cpu"), fleet(mode, "cuda")
    for batch in batches(3, 25):
        here.step(batch)
        there.step(batch)
    assert there.mode == mode
    for name, value in here.weights().items():
        assert torch.allclose(there.weights()[name].cpu(), value, atol=1e-10)


@pytest.mark.parametrize("mode", ["traced", "graph"])
def test_a_frozen_run_harms_no_other(mode: str) -> None:
    good, bad = fleet(mode, "cuda"), fleet(mode, "cuda")
    data = batches(3, 12)
    for step, batch in enumerate(data):
        good.step(batch)
        if step == 4:
            batch = (batch[0].clone(), batch[1])
            batch[0][1] = torch.inf
        bad.step(batch)
    assert bad.died.tolist() == [-1, 4, -1] and good.died.tolist() == [-1, -1, -1]
    assert same(held(bad), held(good), [0, 2])
    assert not torch.equal(held(bad)["weights"][1], held(good)["weights"][1])


def test_a_captured_fleet_resumes_bitwise_and_follows_its_numbers() -> None:
    first, second = fleet("graph", "cuda"), fleet("graph", "cuda")
    data = batches(3, 14)
    for batch in data[:5]:
        first.step(batch)
    state = first.state_dict()
    second.step(data[0])  # captured before it is loaded
    second.load_state_dict(state)
    for batch in data[5:]:
        for each in (first, second):
            each.set_hyperparameters(lr=0.01)
            each.step(batch)
    assert same(held(first), held(second), [0, 1, 2])
