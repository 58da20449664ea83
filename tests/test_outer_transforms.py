"""Outer functions under vmap and torch.compile, their dtype and device, and wrong arguments."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from outer_cases import ALL, SMOOTH_ONLY, WITH_PROX, Case
from problems import Custom
from torch._subclasses.fake_tensor import FakeTensorMode

import fcco.outer as fo

CUSTOM = Case(Custom(torch.nn.functional.softplus, lipschitz=1.0, convex=True), lambda u: u)
ENVELOPE = Case(fo.MoreauEnvelope(fo.OneSidedMCP(0.9, 0.8), 0.2), lambda u: u)
# Compiling takes time: functions with a branch and with a sort.
COMPILED = [
    case if type(case.outer) in (fo.OneSidedMCP, fo.CVaR)
    else pytest.param(case, marks=pytest.mark.slow)
    for case in [*ALL, CUSTOM, ENVELOPE]
]  # fmt: skip
every_case = pytest.mark.parametrize("case", [*ALL, CUSTOM, ENVELOPE], ids=repr)


def everything(case: Case, outer: fo.AbstractOuter, u: torch.Tensor, step: float | torch.Tensor):
    """Value and gradient, and what needs a prox where there is one."""
    results = [outer(u), *outer.value_and_gradient(u)]
    if case not in SMOOTH_ONLY:
        results += [outer.prox(u, step), outer.envelope_gradient(u, step)]
        results += outer.envelope_and_gradient(u, step)
    return tuple(results)


# Of torch 2.6, while it traces a comparison of dataclasses.
@pytest.mark.filterwarnings("ignore:NotImplemented should not be used:DeprecationWarning")
@pytest.mark.parametrize("case", COMPILED, ids=repr)
def test_compiles_to_one_graph(case: Case):
    torch._dynamo.reset()

    def run(u: torch.Tensor, step: float):
        return everything(case, case.outer, u, step)

    u = case.points(6)
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for result, expected in zip(compiled(u, 0.2), run(u, 0.2), strict=True):
        torch.testing.assert_close(result, expected)


@every_case
def test_vmap_over_points_and_steps(case: Case):
    u, steps = case.points(5), torch.tensor([0.1, 0.25], dtype=torch.float64)
    batched = torch.vmap(lambda row: everything(case, case.outer, row, 0.2))(u)
    for result, expected in zip(batched, everything(case, case.outer, u, 0.2), strict=True):
        torch.testing.assert_close(result, expected)
    batched = torch.vmap(lambda step: everything(case, case.outer, u, step))(steps)
    for k, step in enumerate(steps.tolist()):
        for result, expected in zip(batched, everything(case, case.outer, u, step), strict=True):
            torch.testing.assert_close(result[k], expected)


PARAMETERS = [
    (case, field.name)
    for case in [*ALL, ENVELOPE]
    for field in dataclasses.fields(case.outer)  # type: ignore[arg-type]
    if isinstance(getattr(case.outer, field.name), float)
]


@pytest.mark.parametrize(("case", "name"), PARAMETERS, ids=lambda value: repr(value))
def test_vmap_over_a_parameter(case: Case, name: str):
    u, value = case.points(5), getattr(case.outer, name)

    def run(parameter):
        outer = dataclasses.replace(case.outer, **{name: parameter})  # type: ignore[type-var]
        return everything(case, outer, u, 0.2)

    values = [value, 0.9 * value]
    batched = torch.vmap(run)(torch.tensor(values, dtype=torch.float64))
    for k, number in enumerate(values):
        for result, expected in zip(batched, run(number), strict=True):
            torch.testing.assert_close(result[k], expected)


@every_case
def test_dtype_and_device_are_kept(case: Case):
    for u in (case.points(4).float(), case.points(4)):
        results = everything(case, case.outer, u, 0.2)
        assert {result.dtype for result in results} == {u.dtype}
    u = case.points(4).to("meta")  # a tensor made on the default device would not mix with it
    assert {result.device.type for result in everything(case, case.outer, u, 0.2)} == {"meta"}


@pytest.mark.parametrize("case", WITH_PROX, ids=repr)
def test_prox_refuses_a_step_that_is_not_positive(case: Case):
    for step in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=r"\.prox\(step=...\)` must be positive and finite"):
            case.outer.prox(case.points(3), step)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: fo.Hinge(0.0), r"`Hinge\(scale=...\)` must be positive and finite but is: 0.0"),
        (lambda: fo.Hinge(math.inf), r"`Hinge\(scale=...\)` must be positive and finite"),
        (lambda: fo.DeadZone(-0.1), r"`DeadZone\(width=...\)` must be at least 0"),
        (lambda: fo.TwoSidedHinge(-1.0), r"`TwoSidedHinge\(tolerance=...\)` must be at least 0"),
        (lambda: fo.LogMeanExp(1.0, -0.1), r"`LogMeanExp\(offset=...\)` must be at least 0"),
        (lambda: fo.MoreauEnvelope(fo.Ratio(), 0.1), r"must be below 1/weak_convexity"),
    ],
)
def test_wrong_arguments_are_refused(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()


NUMBERS = [
    (type(case.outer), field.name, case.outer)
    for case in [*ALL, ENVELOPE]
    for field in dataclasses.fields(case.outer)  # type: ignore[arg-type]
    if type(getattr(case.outer, field.name)) in (int, float)
]


@pytest.mark.parametrize(("kind", "name", "outer"), NUMBERS)
def test_every_number_must_be_a_finite_number(kind: type, name: str, outer: fo.AbstractOuter):
    value = getattr(outer, name)
    for wrong in (str(value), None, True, [value], np.array([value]), math.nan, -math.inf):
        given = rf"`{kind.__name__}\({name}=...\)` must"
        with pytest.raises((TypeError, ValueError), match=given):
            dataclasses.replace(outer, **{name: wrong})  # type: ignore[type-var]


def test_numbers_of_numpy_and_tensors_without_a_value_are_accepted():
    u = torch.linspace(-1, 2, 7)
    for scale in (2, np.float32(2.0), np.int64(2), torch.tensor(2.0)):
        torch.testing.assert_close(fo.Hinge(scale)(u), fo.Hinge(2.0)(u))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`Hinge\(scale=...\)` must be positive"):
        fo.Hinge(np.float32(-2.0))  # type: ignore[arg-type]
    for mode in (torch.device("meta"), FakeTensorMode()):
        with mode:
            one, u = torch.ones(()), torch.ones(4)
            envelope = fo.MoreauEnvelope(fo.Hinge(one), one)  # type: ignore[arg-type]
            assert envelope(u).shape == u.shape
