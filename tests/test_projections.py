"""Projections: feasible, nearest by their optimality condition, transformable."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcco.outer import project_capped_simplex
from fcco.outer.cvar import capped_threshold

SIZE = 6


def project_simplex(v: torch.Tensor) -> torch.Tensor:
    """The projection onto {y >= 0, sum y = 1} by sorting (Held, Wolfe and Crowder 1974)."""
    partial = v.sort(descending=True).values.cumsum(0) - 1
    return (v - (partial / torch.arange(1, len(v) + 1)).max()).clamp(min=0)


entries = st.one_of(
    st.floats(-4, 4), st.integers(-2, 2).map(float), st.floats(-1e6, 1e6), st.just(0.0)
)


PROJECTIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda v: project_capped_simplex(v, 0.4),
    lambda v: project_capped_simplex(v, 0.7, 2.0),
    lambda v: project_capped_simplex(v, torch.inf),
]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(entries, min_size=SIZE, max_size=SIZE), st.integers(0, 1000))
def test_projection_is_feasible_and_nearest(values: list[float], seed: int):
    v = torch.tensor(values, dtype=torch.float64)
    members = torch.distributions.Dirichlet(torch.full((SIZE,), 0.5, dtype=torch.float64))
    torch.manual_seed(seed)
    scale = 1 + v.abs().max()
    for cap, total in ((1.0, 1.0), (0.37, 1.0), (1 / 3, 1.0), (1 / SIZE, 1.0), (0.7, 2.0), (9, 3)):
        y = project_capped_simplex(v, cap, total)
        assert (y >= 0).all() and (y <= cap).all()
        torch.testing.assert_close(y.sum(), total * torch.ones((), dtype=v.dtype))
        # Nearest: <v - y, z - y> <= 0 for every member z of the set, of which `greedy` has the
        # largest inner product with v.
        draws = total * members.sample((20,))
        draws = draws[(draws <= cap).all(-1)]
        order = v.argsort(descending=True)
        greedy = torch.zeros(SIZE, dtype=v.dtype)
        greedy[order] = (total - cap * torch.arange(SIZE, dtype=v.dtype)).clamp(0, cap)
        for z in (*draws, greedy):
            assert (v - y) @ (z - y) <= 1e-9 * scale
    torch.testing.assert_close(project_capped_simplex(v, 1.0), project_simplex(v))


@pytest.mark.parametrize("project", PROJECTIONS)
def test_idempotent_shaped_and_transformable(project):
    points = torch.randn(3, 4, SIZE, generator=torch.Generator().manual_seed(0)).double()
    projected = project(points)
    assert projected.shape == points.shape and projected.dtype == torch.float64
    torch.testing.assert_close(project(projected), projected)
    torch.testing.assert_close(torch.vmap(torch.vmap(project))(points), projected)
    assert project(points.float()).dtype == torch.float32
    torch._dynamo.reset()
    compiled = torch.compile(project, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(points), projected)


def test_close_entries_far_from_zero_keep_their_digits():
    # In float32 the spacing near 4096 is 5e-4; the entries below are exact multiples of it.
    near = torch.tensor([0.0, 5.0, 2.0, -3.0, 4.0, 1.0]) * 2**-11
    for cap in (1.0, 0.4):
        for total in (1.0, 2**-10):
            weights = project_capped_simplex(4096 + near, cap * total, total)
            torch.testing.assert_close(weights, project_capped_simplex(near, cap * total, total))
    # The cluster that holds the threshold may lie anywhere among the entries.
    points = torch.cat([torch.tensor([1e4]), 4096 + near, torch.full((5,), -1e5)])
    weights = project_capped_simplex(points, 2**-11, 2**-10)
    exact = project_capped_simplex(points.double(), 2**-11, 2**-10)
    torch.testing.assert_close(weights.double(), exact, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("cap", [1e-3, 0.4])
def test_many_entries(cap: float):
    v = torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    single = project_capped_simplex(v, cap)
    v = v.double()
    y = project_capped_simplex(v, cap)
    torch.testing.assert_close(single.double(), y, rtol=0, atol=1e-6)
    assert abs(float(single.sum()) - 1) < 1e-6
    threshold = (v - y)[(y > 0) & (y < cap)]
    torch.testing.assert_close(y.sum(), torch.ones((), dtype=v.dtype), rtol=0, atol=1e-13)
    assert threshold.max() - threshold.min() < 1e-12


def test_empty_set_is_refused():
    with pytest.raises(
        ValueError, match=r"`project_capped_simplex\(cap=...\)` must be at least 0.1"
    ):
        project_capped_simplex(torch.zeros(SIZE), 0.1)


def test_threshold():
    v = torch.tensor([5.0, 1.0, 3.0, 2.0])
    for cap, threshold in ((1.0, 5.0), (0.6, 3.0), (0.5, 3.0), (0.4, 2.0), (0.25, 1.0)):
        assert capped_threshold(v, cap).tolist() == [threshold]
