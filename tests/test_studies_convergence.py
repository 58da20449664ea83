"""The comparison of convergence: its batched programs are the library's methods."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fcco
from fcco.rules import cvar
from studies.convergence.__main__ import ratio, relative
from studies.convergence.methods import ENTRIES, Entry
from studies.convergence.problems import PROBLEMS, Batch, Logistic, Problem, draw_blocks
from studies.convergence.tuning import Budget, accuracies, batches, first_points, settings, tune

ROOT = Path(__file__).parents[1]

# Each method of the library on one problem of each kind.
PAIRS = {
    (entry.name, problem.kind): (entry, problem)
    for problem in reversed(PROBLEMS.values())
    for entry in ENTRIES.values()
    if entry.legal(problem)
}

FIRST = dict(reversed(PAIRS))  # one kind of problem for each method; the others are slow
TRIED = [
    pytest.param(*pair, id="-".join(key), marks=() if FIRST[key[0]] == key[1] else pytest.mark.slow)
    for key, pair in PAIRS.items()
]

# One setting and one seed by the library's public objective, fed with the draws of the comparison.


class Player:
    """A user's loop around an objective."""

    def __init__(self, entry: Entry, problem: Problem, setting: dict[str, float]) -> None:
        self.entry, self.problem = entry, problem
        self.model = nn.ParameterDict({"w": problem.start.clone()})
        self.objective: Any = objective_of(self.model, entry, problem, setting)
        self.rounds = "inner_steps" in entry.tunes or "round_steps" in entry.tunes
        self.point = problem.start

    @property
    def w(self) -> Tensor:
        return self.model["w"]

    def closure(self, batch: Batch) -> Any:
        """The user's function of a batch."""

        def inner() -> Any:
            values = self.problem.values(self.w.view(1, 1, -1), batch)[0, 0]
            loss = self.problem.loss(self.w)
            return values if loss is None else (loss, values)

        return inner

    def warm_up(self, batch: Batch) -> None:
        """Start the tracker from one batch of every block, where there is one to start."""
        if not self.entry.starts:
            return
        self.objective.warm_up([(self.closure(batch), None)])
        if self.problem.kind == "cvar":
            # Before the first batch; the term itself would take its values into account.
            term = self.objective.term
            s, slope = cvar.threshold(term.table(), term.ratio, term.smoothing)
            term.load_state_dict({**term.state_dict(), "threshold": s, "tie_slope": slope})

    def step(self, batch: Batch, other: Batch) -> None:
        """One step of a user's loop; a double loop is measured where the last round ended."""
        more: dict[str, Any] = {"gradient": self.closure(other)} if self.entry.batches > 1 else {}
        index = None if self.entry.all_blocks else batch.blocks[0]
        optimizer = self.objective.optimizer
        optimizer.zero_grad()
        self.objective(self.closure(batch), index, **more).backward()
        optimizer.step()
        if not self.rounds or optimizer.inner_step == 0:
            self.point = self.w.detach().clone()


def objective_of(
    model: nn.Module, entry: Entry, problem: Problem, setting: dict[str, float]
) -> Any:
    """A method by the library's names, or by its parts."""
    n, beta, lr = problem.total, setting.get("beta", 1.0), setting["lr"]
    weights = list(model.parameters())
    optimizer: Any = fcco.optim.momentum_type(weights, lr, beta)
    if entry.name == "ICPPAC":
        names = {"proximal": "proximal", "tau": "tau"}
        options: Any = {name: setting[key] for name, key in names.items()}
        options["inner_steps"] = int(setting["round_steps"])
        return fcco.constrained(model, torch.optim.SGD(weights, lr=lr), n, "icppac", **options)
    if entry.name == "ALEXR2":
        optimizer = fcco.optim.ProximalPoint(
            optimizer, setting["nu"], setting["eta"], int(setting["inner_steps"])
        )
    read = "new" if entry.batches > 1 else "old"
    options = {"gamma": setting["gamma"], "correction": setting.get("correction", 0.0)}
    smoothing = setting.get("smoothing", 0.0)
    if problem.kind == "cvar":
        return fcco.CVaRGroupDRO(
            model, optimizer, n, problem.ratio, smoothing=smoothing, read=read, **options
        )
    squared = "penalty" in setting
    outer = fcco.outer.SquaredHinge(setting["penalty"]) if squared else problem.outer
    tracker = fcco.tracker.InnerTracker(n, dtype=torch.float64, read=read, **options)
    term = fcco.terms.CoupledTerm(outer, tracker, smoothing=smoothing)
    return fcco.Compositional(model, optimizer, term)


def one_seed(batch: Batch, seed: int) -> Batch:
    return Batch(*(part[seed : seed + 1] for part in batch))


@pytest.mark.parametrize(("entry", "problem"), TRIED)
def test_batched_program_follows_the_public_objective(entry: Entry, problem: Problem) -> None:
    points = first_points(entry, 2)
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
        (s, c): Player(entry, problem, {key: float(v[c]) for key, v in runs.h.items()})
        for s, c in ((0, 0), (1, 1))
    }
    stream = batches(entry, problem, 2, 25, seed=3)
    first, _ = next(stream)
    runs.warm_up(first)
    for (s, _), each in players.items():
        each.warm_up(one_seed(first, s))
    for batch, other in stream:
        runs.step(batch, other)
        for (s, c), each in players.items():
            each.step(one_seed(batch, s), one_seed(other, s))
            assert torch.allclose(each.point, runs.w[s, c], rtol=1e-10, atol=1e-10)
    moved = (runs.w - problem.start).abs().amax((0, 2))
    assert bool((moved > 0).any()), "nothing moved: the comparison would be empty"


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


def solution(problem: Logistic) -> Tensor:
    import cvxpy as cp

    w, s = cp.Variable(6), cp.Variable()
    losses = cp.hstack([cp.sum(cp.logistic(-z @ w)) / len(z) for z in problem.data.numpy()])
    tail = s + cp.sum(cp.pos(losses - s)) / (problem.ratio * problem.total)
    goal = cp.Problem(cp.Minimize(problem.decay / 2 * cp.sum_squares(w) + tail))
    goal.solve(solver=cp.CLARABEL)
    return torch.as_tensor(w.value)


def test_optima() -> None:
    pytest.importorskip("cvxpy")
    problem: Any = PROBLEMS["logistic"]
    best = solution(problem)
    assert abs(float(problem.error(best))) < 2e-8
    near = best + 1e-3 * torch.randn(200, len(best), dtype=torch.float64)
    assert float(problem.error(near).min()) > -2e-8
    target = PROBLEMS["S3b"].target
    assert target is not None
    solutions = {
        "S1": -PROBLEMS["S1"].shifts,  # type: ignore[attr-defined]
        "S2": torch.full((8,), 1 / 8, dtype=torch.float64),
        "S3": torch.full((8,), 0.3, dtype=torch.float64),
        "S3b": target / target.norm(),
    }
    for key, each in solutions.items():
        assert abs(float(PROBLEMS[key].error(each))) < 1e-12


def test_settings_are_chosen_on_the_tuning_seeds() -> None:
    entry, problem = ENTRIES["SONEX"], PROBLEMS["S1"]
    pool = tune(entry, problem, Budget(16, 400, 3, 3))
    level = accuracies(problem)[2]
    best = pool.cheapest("last", level)
    assert best is not None and len(pool.h["lr"]) == 16
    pool.errors[:, :, 3:] = 1e3  # what the fresh seeds say must not matter
    assert pool.cheapest("last", level) == best
    assert pool.cheapest("last", 1e-9) is None


def test_command_with_other_processes() -> None:
    """As a user starts it: workers cannot import what only the command's own module has."""
    words = "--quick --json --workers 2 --problems S1 --methods SONX SONEX"
    command = [sys.executable, "-m", "studies.convergence", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found["problems"]["S1"]["methods"]) == ["SONEX", "SONX"]
    rows = relative(found)
    assert [row[0] for row in rows] == ["method", "SONEX", "SONX"] and rows[1][1].startswith("1.00")


def test_ratios_by_hand() -> None:
    assert ratio([100.0, 400.0, None], [200.0, 100.0, 50.0]) == "1.41 (2)"
    assert ratio([None], [1.0]) == "-"
