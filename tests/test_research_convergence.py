"""The race: its batched programs are the library's methods, and its figures are what they say."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fcco.terms import exact_threshold
from research.convergence import optima, scaling
from research.convergence import study as convergence
from research.convergence.engine import batches, checkpoints, race
from research.convergence.entries import ENTRIES, Entry, legal
from research.convergence.problem import Batch, Problem, draw_blocks
from research.convergence.problems import PROBLEMS
from research.convergence.public import player, seconds_per_step
from research.convergence.ranges import first_points, nearby_points, ranges_of, settings
from research.convergence.results import compare, exponent
from research.convergence.slopes import smoothed_threshold
from research.convergence.tuning import Budget, accuracies, cheapest, reached, tune, window_means

PAIRS = [(e, p) for p in PROBLEMS.values() for e in ENTRIES.values() if legal(e, p)]
REFUSED = {("SONEX+STORM", "S2"), ("SONEX+STORM", "logistic")}  # by the library's STORM


def name(value: object) -> str:
    return value.name if isinstance(value, (Entry, Problem)) else str(value)


def one_seed(batch: Batch, seed: int) -> Batch:
    return Batch(*(part[seed : seed + 1] for part in batch))


@pytest.mark.parametrize(
    ("entry", "problem"), [p for p in PAIRS if (p[0].name, p[1].name) not in REFUSED], ids=name
)
def test_batched_program_follows_the_public_objective(entry: Entry, problem: Problem) -> None:
    points = first_points(entry, problem, 3)
    for key in ("gain", "lr"):  # a loop with a large gain would amplify rounding
        if key in entry.tunes:
            points[:, entry.tunes.index(key)] *= 0.4
    if "width" in entry.tunes:
        points[:, entry.tunes.index("width")] *= 0.3
        points[:, entry.tunes.index("width")] += 0.69
    h = settings(entry, problem, points)
    if problem.kind == "cvar" and entry.batches > 1:
        h["smoothing"] = h["smoothing"].clamp(min=1.0)  # a unique threshold
    seeds, number = 2, len(points)
    runs = entry.build(problem, h, seeds)
    runs_h: dict[str, torch.Tensor] = runs.h  # type: ignore[attr-defined]
    players = {
        (s, c): player(entry, problem, {key: float(v[c]) for key, v in runs_h.items()})
        for s in range(seeds)
        for c in range(number)
    }
    stream = batches(problem, seeds, 45, entry.number(problem), entry.batches > 1, seed=3)
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


def test_storm_on_cvar_is_refused_by_the_library() -> None:
    entry, problem = ENTRIES["SONEX+STORM"], PROBLEMS["S2"]
    h = entry.build(problem, settings(entry, problem, first_points(entry, problem, 1)), 1)
    setting = {key: float(v) for key, v in h.h.items()}  # type: ignore[attr-defined]
    assert seconds_per_step(entry, problem, setting, 5) is None


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=name)
def test_pull_and_base_are_gradients(problem: Problem) -> None:
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
    if loss is None:
        assert base is None
        return
    (expected,) = torch.autograd.grad(loss.sum(), w)
    assert base is not None and torch.allclose(base, expected, atol=1e-12)
    if problem.kind == "constrained":
        move = torch.randn(w.shape, generator=generator, dtype=torch.float64)
        change = problem.values(w + 1e-6 * move, batch) - problem.values(w - 1e-6 * move, batch)
        assert torch.allclose(problem.along(w, batch, move), change / 2e-6, atol=1e-7)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=name)
def test_values_are_unbiased_and_b2_divides_their_variance(problem: Problem) -> None:
    every = torch.arange(problem.total).expand(4000, 1, -1)
    w = problem.start.view(1, 1, -1) + 0.1
    spread = []
    for samples in (1, 4):
        changed = replace(problem, samples=samples)
        drawn = changed.draw(torch.Generator().manual_seed(1), every)
        values = torch.cat([changed.values(w, drawn.at(k)) for k in range(len(every))])
        error = (values.mean(0) - problem.exact(w)[0]).abs() / (values.std(0) / len(every) ** 0.5)
        assert float(error.max()) < 4.5
        spread.append(values.var(0).mean())
    assert 3.5 < float(spread[0] / spread[1]) < 4.6


def test_optima() -> None:
    for key, solve in (("S4", optima.nonsmooth), ("logistic", optima.logistic)):
        problem = PROBLEMS[key]
        solution = torch.as_tensor(solve(problem))  # type: ignore[operator]
        assert abs(float(problem.error(solution))) < 2e-8
        near = solution + 1e-3 * torch.randn(200, len(solution), dtype=torch.float64)
        assert float(problem.error(near).min()) > -2e-8
    centre = torch.full((8,), 1 / 8, dtype=torch.float64)
    assert abs(float(PROBLEMS["S2"].error(centre))) < 1e-12
    assert abs(float(PROBLEMS["S3"].error(torch.full((8,), 0.3, dtype=torch.float64)))) < 1e-12
    outside = PROBLEMS["S3b"]
    target = outside.target  # type: ignore[attr-defined]
    assert abs(float(outside.error(target / target.norm()))) < 1e-12
    assert abs(float(PROBLEMS["S1"].error(-PROBLEMS["S1"].shifts))) < 1e-12  # type: ignore[attr-defined]


@pytest.mark.parametrize("smoothing", [0.01, 0.2, 3.0])
def test_smoothed_threshold_minimises(smoothing: float) -> None:
    table = torch.randn(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours = smoothed_threshold(table, 0.3, torch.tensor([[smoothing]], dtype=torch.float64))
    theirs = torch.stack([exact_threshold(row, 0.3, smoothing) for row in table])
    assert torch.allclose(ours[:, 0], theirs, atol=1e-10)


def test_window_and_reached() -> None:
    steps = np.array([1, 2, 5, 10, 11, 20])
    curve = np.array([8.0, 4.0, 2.0, 1.0, 3.0, 1.0])
    means = window_means(steps, curve)
    assert means.tolist() == [8.0, 4.0, 2.0, 1.0, 2.0, 1.0]  # (7.7, 11] holds 10 and 11
    both = np.stack([means, np.full(6, 9.0)], axis=1)
    assert reached(steps, both, 2.0).tolist() == [5.0, np.inf]
    assert reached(steps, both, 1.5).tolist() == [20.0, np.inf]  # it was below at 10, and left
    assert reached(steps, both, 9.0).tolist() == [1.0, 1.0]


def test_exponent_and_comparison() -> None:
    levels = 2.0 ** -np.arange(6)
    samples = [float(100 * 8**k) for k in range(6)]
    steps = [int(each) for each in samples]
    value, error = exponent(levels, samples, steps, [[s, s] for s in samples])
    assert value == pytest.approx(3.0) and error == pytest.approx(0.0)
    row = {"samples": samples, "steps": steps, "bootstrap": [[s, s] for s in samples]}
    half = {**row, "samples": [s / 2 for s in samples[:5]] + [None]}
    half["steps"] = [s // 2 for s in steps]
    half["bootstrap"] = [[s / 2, s / 2] for s in samples]
    ahead = compare(levels.tolist(), row, half)
    assert ahead["geometric_mean"] == 2.0 and ahead["worse_by_two_se"] == 0
    assert ahead["compared"] == 5
    assert compare(levels.tolist(), half, row)["worse_by_two_se"] == 5


def test_settings_are_equal_in_number_and_within_range() -> None:
    for entry, problem in PAIRS:
        points = first_points(entry, problem, 16)
        near = nearby_points(entry, problem, points[:2], 16)
        for each in (points, near):
            h = settings(entry, problem, each)
            assert {len(v) for v in h.values()} == {16}
            for key, found in ranges_of(entry, problem).items():
                if key in h and hasattr(found, "low"):
                    low, high = found.low, found.high  # type: ignore[union-attr]
                    assert bool(((h[key] >= low * 0.999) & (h[key] <= high * 1.001)).all())


def test_tuning_uses_only_its_own_seeds_and_improves() -> None:
    entry, problem = ENTRIES["SONEX"], PROBLEMS["S1"]
    pool = tune(entry, problem, Budget(16, 400, 3, 3))
    level = float(accuracies(problem)[2])
    best = cheapest(pool, "last", level)
    assert best is not None
    pool.trace.last[:, 3:] = 1e3  # what the fresh seeds say must not matter
    assert cheapest(pool, "last", level) == best
    assert len(pool.cost) == 16
    assert cheapest(pool, "last", 1e-9) is None


def test_race_is_the_same_again_and_counts_steps() -> None:
    entry, problem = ENTRIES["SONX"], PROBLEMS["S2"]
    h = settings(entry, problem, first_points(entry, problem, 4))
    traces = [
        race(entry.build(problem, h, 2), problem, 2, 60, problem.blocks, False, seed=s)
        for s in (0, 0, 1)
    ]
    assert np.array_equal(traces[0].last, traces[1].last)
    assert not np.array_equal(traces[0].last, traces[2].last)
    assert traces[0].steps[0] == 1 and traces[0].steps[-1] == 60
    assert (np.diff(checkpoints(5000)) > 0).all()


def test_sample_counts() -> None:
    problem = PROBLEMS["S3"]  # n = 8, B1 = 2, B2 = 1
    for key, expected in (("SONEX", 2), ("ALEXR2", 4), ("OSS", 8), ("ICPPAC", 16)):
        entry = ENTRIES[key]
        h = settings(entry, problem, first_points(entry, problem, 2))
        assert entry.cost(problem, h).tolist() == [expected, expected]
    entry = ENTRIES["Liu-Xu"]
    h = settings(entry, problem, first_points(entry, problem, 4))
    expected = 8 * (1 + h["value_samples"] + h["refresh_samples"] / h["refresh"])
    assert torch.equal(entry.cost(problem, h), expected.squeeze(-1))


def test_scaling_exponent() -> None:
    levels = [1.0, 0.5]
    steps = [[400, None], [100, 300], [25, 75]]
    found = scaling.fit(levels, [1, 4, 16], [[s[0] * 4, s[1]] for s in steps])
    assert found["exponent"] == -1.0 and len(found["rows"]) == 1


def test_command(tmp_path: Path) -> None:
    words = (
        "--quick --json --workers 1 --problems S1 --methods SONX SONEX --settings 8 --no-scaling"
    )
    command = [sys.executable, "-W", "error", "-m", "research.convergence", *words.split()]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    results = json.loads(done.stdout.splitlines()[-1])
    methods = results["problems"]["S1"]["methods"]
    assert set(methods) == {"SONX", "SONEX"}
    assert methods["SONX"]["seconds_per_step"] > 0
    assert results["sonx_over_sonex"]["S1"]["last"]["compared"] >= 3
    assert (tmp_path / "convergence-S1.png").stat().st_size > 1000
    assert "| accuracy | SONEX | SONX |" in (tmp_path / "convergence.md").read_text()
    assert json.loads((tmp_path / "convergence.json").read_text()) == results


def test_all_methods_have_jobs_on_every_problem() -> None:
    options = argparse.Namespace(
        quick=False, settings=None, problems=None, methods=None, seed=0, no_scaling=False
    )
    found = convergence.jobs(options)
    for key in PROBLEMS:
        methods = {job[2] for job in found if job[:2] == ("race", key)}
        assert {"SONX", "ALEXR2"} <= methods
        assert ("SONEX" in methods) == (key != "S4")
    assert len({job[3].settings for job in found if job[0] == "race"}) == 1
