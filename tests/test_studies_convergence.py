"""The comparison of convergence: its batched programs are the library's methods."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_msvr
import torch
from reference_public import STORM, player

import fcco
from studies.convergence import results
from studies.convergence.engine import batches
from studies.convergence.entries import ENTRIES, Entry, legal
from studies.convergence.problems import PROBLEMS, Batch, Problem, draw_blocks
from studies.convergence.tuning import (
    Budget,
    accuracies,
    cheapest,
    first_points,
    settings,
    tune,
)

ROOT = Path(__file__).parents[1]

# Each method of the library on one problem of each kind.
PAIRS = {
    (entry.name, problem.kind): (entry, problem)
    for problem in reversed(PROBLEMS.values())
    for entry in ENTRIES.values()
    if legal(entry, problem) and entry.name not in STORM
}

FIRST = dict(reversed(PAIRS))  # one kind of problem for each method; the others are slow
TRIED = [
    pytest.param(*pair, id="-".join(key), marks=() if FIRST[key[0]] == key[1] else pytest.mark.slow)
    for key, pair in PAIRS.items()
]


def one_seed(batch: Batch, seed: int) -> Batch:
    return Batch(*(part[seed : seed + 1] for part in batch))


@pytest.mark.parametrize(("entry", "problem"), TRIED)
def test_batched_program_follows_the_public_objective(entry: Entry, problem: Problem) -> None:
    points = first_points(entry, problem, 2)
    for key in ("gain", "lr"):  # a loop with a large gain would amplify rounding
        if key in entry.tunes:
            points[:, entry.tunes.index(key)] *= 0.4
    if "width" in entry.tunes:
        points[:, entry.tunes.index("width")] *= 0.3
        points[:, entry.tunes.index("width")] += 0.69
    h = settings(entry, problem, points)
    if problem.kind == "cvar" and entry.batches > 1:
        h["smoothing"] = h["smoothing"].clamp(min=1.0)  # a unique threshold
    if "round_steps" in h:
        h["round_steps"] = h["round_steps"].clamp(max=10.0)  # two rounds end
    runs = entry.build(problem, h, 2)
    players = {
        (s, c): player(entry, problem, {key: float(v[c]) for key, v in runs.h.items()})
        for s, c in ((0, 0), (1, 1))
    }
    stream = batches(problem, 2, 25, entry.number(problem), entry.batches > 1, seed=3)
    first, _ = next(stream)
    runs.warm_up(first)
    for (s, _), each in players.items():
        each.warm_up(one_seed(first, s))
    for batch, other in stream:
        runs.step(batch, other)
        for (s, c), each in players.items():
            each.step(one_seed(batch, s), one_seed(other, s))
            assert torch.allclose(each.point, runs.point[s, c], rtol=1e-10, atol=1e-10)
    moved = (runs.point - problem.start).abs().amax((0, 2))
    assert bool((moved > 0).any()), "nothing moved: the comparison would be empty"


class Recorded:
    """The draws of one seed as the problem of `reference_msvr.v2`, which takes them in order."""

    c = np.zeros((8, 1, 1))  # g_0 is known without noise

    def __init__(self, problem: Problem, batches: list[Batch]) -> None:
        self.problem, self.batches, self.steps = problem, batches, iter(range(len(batches)))
        assert problem.target is not None
        self.num_inner, self.dim, self.m = problem.total, 1, problem.target.numpy()

    def draw(self, rng: Any) -> list[tuple]:
        self.batch = self.batches[next(self.steps)]
        return [(int(i), [0], [0]) for i in self.batch.blocks[0]]

    def pulled(self, w: np.ndarray, i: int) -> tuple[np.ndarray, np.ndarray]:
        point = torch.tensor(w, requires_grad=True)
        place = self.batch.blocks[0].tolist().index(i)
        value = self.problem.values(point.view(1, 1, -1), self.batch)[0, 0, place]
        (slope,) = torch.autograd.grad(value, point)
        return value.detach().numpy()[None], slope.numpy()[None]

    def value(self, w: np.ndarray, i: int, batch: Any) -> np.ndarray:
        return self.pulled(w, i)[0]

    def jacobian(self, w: np.ndarray, i: int, batch: Any) -> np.ndarray:
        return self.pulled(w, i)[1]


@pytest.mark.parametrize("name", STORM)
def test_storm_equals_the_transcription(name: str) -> None:
    entry, problem = ENTRIES[name], PROBLEMS["S3"]
    h = settings(entry, problem, first_points(entry, problem, 2))
    h = {key: value[:1] for key, value in h.items()}
    runs: Any = entry.build(problem, h, 1)
    stream = batches(problem, 1, 40, problem.blocks, False, seed=3)
    drawn = [next(stream)[0], *(batch for batch, _ in stream)]  # the first holds every block
    runs.warm_up(drawn[0])
    number = {key: float(value) for key, value in runs.h.items()}
    if entry.squared:
        slope = lambda u: number["penalty"] * np.maximum(u, 0)  # noqa: E731
    else:
        assert isinstance(problem.outer, fcco.outer.Hinge)
        top = problem.outer.scale
        slope = lambda u: np.clip(u / number["smoothing"], 0, top)  # noqa: E731
    recorded: Any = Recorded(problem, drawn)
    path, u = reference_msvr.v2(
        recorded, problem.start.numpy(), len(drawn), slope, lr=number["lr"], beta=number["beta"],
        gamma=number["gamma"], correction=number["correction"],
    )  # fmt: skip
    assert np.ptp(path, axis=0).max() > 0.05, "the iterates must move"
    for batch, expected in zip(drawn, path, strict=True):
        runs.step(batch, batch)
        np.testing.assert_allclose(runs.point[0, 0], expected, rtol=0, atol=1e-10)
    np.testing.assert_allclose(runs.u[0, 0], u[:, 0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_pull_and_base_are_gradients_and_values_are_unbiased(problem: Problem) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = draw_blocks(generator, (1, 2), problem.total, problem.blocks)
    batch = problem.draw(generator, blocks).at(0)
    w = torch.randn(2, 3, len(problem.start), generator=generator, dtype=torch.float64)
    w.requires_grad_()
    values = problem.values(w, batch)
    weights = torch.randn(values.shape, generator=generator, dtype=torch.float64)
    (expected,) = torch.autograd.grad((weights * values).sum(), w)
    assert torch.allclose(problem.pull(w, batch, weights), expected, atol=1e-12)
    loss, base = problem.loss(w), problem.base(w)
    if loss is not None:
        (expected,) = torch.autograd.grad(loss.sum(), w)
        assert base is not None and torch.allclose(base, expected, atol=1e-12)
    if problem.kind == "constrained":
        move = torch.randn(w.shape, generator=generator, dtype=torch.float64)
        change = problem.values(w + 1e-6 * move, batch) - problem.values(w - 1e-6 * move, batch)
        assert torch.allclose(problem.along(w, batch, move), change / 2e-6, atol=1e-7)
    number = 4000  # draws as so many seeds of one step
    every = torch.arange(problem.total).expand(1, number, -1)
    point = (problem.start.view(1, 1, -1) + 0.1).expand(number, 1, -1)
    drawn = problem.values(point, problem.draw(generator, every).at(0)).squeeze(1)
    error = (drawn.mean(0) - problem.exact(point)[0, 0]).abs() / (drawn.std(0) / number**0.5)
    assert float(error.max()) < 4.5


def test_optima() -> None:
    pytest.importorskip("cvxpy")
    for key in ("S4", "logistic"):
        problem = PROBLEMS[key]
        solution = torch.as_tensor(problem.minimiser())  # type: ignore[attr-defined]
        assert abs(float(problem.error(solution))) < 2e-8
        near = solution + 1e-3 * torch.randn(200, len(solution), dtype=torch.float64)
        assert float(problem.error(near).min()) > -2e-8
    target = PROBLEMS["S3b"].target
    assert target is not None
    solutions = {
        "S1": -PROBLEMS["S1"].shifts,  # type: ignore[attr-defined]
        "S2": torch.full((8,), 1 / 8, dtype=torch.float64),
        "S3": torch.full((8,), 0.3, dtype=torch.float64),
        "S3b": target / target.norm(),
    }
    for key, solution in solutions.items():
        assert abs(float(PROBLEMS[key].error(solution))) < 1e-12


def test_settings_are_chosen_on_the_tuning_seeds() -> None:
    entry, problem = ENTRIES["SONEX"], PROBLEMS["S1"]
    pool = tune(entry, problem, Budget(16, 400, 3, 3))
    level = float(accuracies(problem)[2])
    best = cheapest(pool, "last", level)
    assert best is not None and len(pool.cost) == 16
    pool.trace.last[:, 3:] = 1e3  # what the fresh seeds say must not matter
    assert cheapest(pool, "last", level) == best
    assert cheapest(pool, "last", 1e-9) is None


def test_command_with_other_processes() -> None:
    """As a user starts it: workers cannot import what only the command's own module has."""
    words = (
        "--quick --json --workers 2 --problems S1 --methods SONX SONEX --settings 4 --no-scaling"
    )
    command = [sys.executable, "-m", "studies.convergence", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found["problems"]["S1"]["methods"]) == ["SONEX", "SONX"]
    rows = results.relative(found)
    assert [row[0] for row in rows] == ["method", "SONEX", "SONX"] and rows[1][1].startswith("1.00")


def test_comparison_by_hand() -> None:
    over = {"samples": [100.0, 400.0, None], "steps": [50, 200, None], "bootstrap": [[], [], []]}
    under = {"samples": [200.0, 100.0, 50.0], "steps": [100, 50, 25], "bootstrap": [[], [], []]}
    found = results.compare(over, under)
    assert found["ratios"] == [0.5, 4.0] and found["geometric_mean"] == pytest.approx(2**0.5)
    assert found["worse_by_two_se"] == 1  # half the samples is more than a checkpoint
    assert results.fit([0.1, 0.05], [1, 2, 4], [[400, 40], [200, 20], [100, 10]]) == {
        "accuracies": [0.1], "exponent": -1.0, "spread": 0.0,
    }  # fmt: skip
