"""The benchmarks run on tiny settings, and their figures by hand."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import fcco
from benchmarks import fleet, walk
from benchmarks.timing import Timings
from studies.constrained.convex import Segments
from studies.runner import Job
from studies.untuned import __main__ as untuned
from studies.untuned import constraints, groups, networks, tuned
from studies.untuned.constraints import Figures, Variant

# Fleets.

SHAPE = (("rows", 300), ("test_rows", 100), ("features", 4))


@pytest.mark.slow
def test_fleet_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "SECONDS", 0.01)
    monkeypatch.setattr(fleet.environment, "available_cores", lambda: 1)
    threads = torch.get_num_threads()
    try:
        fleet.main(["--quick", "--json", "--device", "cpu", "--sizes", "2"])
    finally:
        torch.set_num_threads(threads)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    (result,) = told["results"]
    assert result["runs"] == 2 and result["rows"]["sequential"]["over_sequential"] == 1
    assert result["steps"] == 60 * 13 and result["died"] == 0  # 1,600 rows, batches of 128
    # Two runs as one program, beside one and one: within a factor of ten of each other.
    assert 0.1 < result["rows"]["eager"]["over_sequential"] < 10


def test_fleet_rows_from_times_by_hand() -> None:
    seconds = {
        "sequential": [1.0, 2.0, 4.0], "eager": [0.5, 1.0, 2.0],
        "traced": [0.2, 0.4, 1.0], "products": [0.1, 0.1, 0.1],
    }  # fmt: skip
    rows = fleet.rows(Timings(seconds), 10, ("eager", "traced"))
    assert rows["traced"]["over_sequential"] == 5
    assert rows["traced"]["runs_per_second"] == 0.25  # 1 / (0.4 s times 10 steps)
    assert rows["products"] == {"run_step_us": 1e5, "share_of_best": 0.25}


def test_a_fleet_does_the_work_of_the_single_run() -> None:
    case = fleet.Case("alexr2", hidden=(5,), batch=16, generated=SHAPE)
    problem, runs = case.problem(), case.runs(3)
    together = problem.fleet(runs, torch.device("cpu"))
    single: Any = problem.start(*runs[2])
    for _ in range(5):  # a whole round
        together.step()
        single.step()
    for name, value in single.model.named_parameters():
        assert torch.allclose(together.fleet.weights()[name][2], value, atol=1e-4)


# Without settings: variants, the reading at equal violation, the command.


def gradients(problem, model, batch) -> torch.Tensor:
    """Rows: the gradient of the loss, then of every value."""
    loss, values = problem.measure(model, batch)
    weights = list(model.parameters())
    rows = [torch.autograd.grad(part, weights, retain_graph=True) for part in (loss, *values)]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


@pytest.mark.parametrize("first, variant, loss, value, copies", [
    ("docs", "values x 100", 1.0, 100.0, 1),
    ("convex", "loss x 100", 100.0, 1.0, 1),
    ("docs", "10 of each", 1.0, 1.0, 10),
])  # fmt: skip
def test_variants_are_exact_rescalings(first, variant, loss, value, copies):
    original, other = (constraints.make(n).shifted(-0.01) for n in (first, f"{first} / {variant}"))
    model = original.model()
    one, two = original.batches(3)(), other.batches(3)()
    torch.testing.assert_close(one.inputs, two.inputs)
    base, scaled = gradients(original, model, one), gradients(other, model, two)
    torch.testing.assert_close(scaled[0], loss * base[0])
    torch.testing.assert_close(scaled[1:], value * base[1:].repeat(copies, 1))
    values, repeated = original.measure(model, one)[1], other.measure(model, two)[1]
    torch.testing.assert_close(repeated, value * values.repeat(copies))
    assert other.num_constraints == copies * original.num_constraints
    assert other.score(model) == original.score(model)  # in the first units, without the shift


def test_copies_of_a_drawn_constraint_have_numbers_of_their_own():
    base = Segments()
    one, two = base.batches(0)(), Variant(base, copies=10).batches(0)()
    assert one.index is not None and two.index is not None
    assert len(set(two.index.tolist())) == 10 * len(one.index)
    assert (two.index % base.num_constraints).tolist() == 10 * one.index.tolist()


def test_reading_at_equal_violation():
    path = [(-0.005, 0.40), (0.005, 0.30), (0.025, 0.20)]
    assert tuned.level(path, 0.0) == pytest.approx((0.35, 0.0))
    assert tuned.level(path, 1.0) == pytest.approx((0.20, 0.025))  # never beyond its ends
    assert tuned.level(path, -0.01) == pytest.approx((0.40, -0.005))  # not reached: the least
    row = lambda objective, violation: {"objective": objective, "violation": violation}  # noqa: E731
    assert untuned.ahead(row(0.4, 0.004), row(0.3, 0.006))  # feasible first
    assert untuned.ahead(row(0.3, 0.004), row(0.4, -0.1))
    assert not untuned.ahead(row(0.4, 0.004), row(0.3, 0.004))
    assert not untuned.ahead(row(0.1, 0.02), row(0.4, 0.01))


def test_figures_of_ours_and_of_the_tuned(monkeypatch):
    chosen = {"docs": [("SONEX", {"dual_lr": 1.0}), ("ALEXR", {"lr": 1.0})]}
    monkeypatch.setattr(tuned, "CONSTRAINTS", chosen)
    entries = [e for e in untuned.plan_constraints([10, 11], False) if e.problem == "docs"]

    def end(job: Job) -> Figures:  # seed 11 is worse by 0.02, the second tuned method by 0.1
        violation = 0.004 + job.shift
        objective = 0.5 - 10 * job.shift + 0.02 * (job.seed - 10) + 0.1 * (job.method == "ALEXR")
        return Figures(objective, violation)

    known = {job.key: end(job) for e in entries for jobs in e.candidates.values() for job in jobs}
    rows = untuned.collect(entries, known)["constraints"]["docs"]
    assert rows["fcco"]["objective"] == pytest.approx(0.51)
    assert rows["fcco"]["objective_std"] == pytest.approx(0.02 / math.sqrt(2))
    assert rows["tuned"]["method"] == "SONEX"
    assert rows["tuned"]["objective"] == pytest.approx(0.51 - 10 * 0.001)
    assert untuned.equal_violation(rows["tuned"], 0.004) == pytest.approx(0.51)


def test_groups_of_the_benchmark():
    """The optimum of S2 on samples; the quantile by hand weighs the worst groups."""
    problem = groups.make("S2")
    model = problem.model()
    with torch.no_grad():
        next(model.parameters()).fill_(1 / 8)
    assert fcco.outer.CVaR(problem.ratio)(problem.group_losses(model)).item() == pytest.approx(
        0.4375
    )
    losses = torch.arange(10.0, requires_grad=True)
    objective = groups.METHODS["EMA + quantile"](None, None, 10, 0.2)
    objective(lambda: losses, torch.arange(10)).backward()
    assert losses.grad is not None
    torch.testing.assert_close(losses.grad, torch.tensor([0.0] * 8 + [0.5] * 2))  # 1/(r n)


def test_groups_against_earlier_figures():
    """Seed by seed, at every learning rate that was recorded."""
    ends = {"0.1": [0.304, 0.314], "0.2": [0.41, 0.41], "0.3": [9.0, 9.0]}
    found = {"S2": {"fcco": {"by_seed": ends}}}
    earlier = {"S2": {"0.1": [0.30, 0.31, 0.9], "0.2": [0.40, 0.40, 0.9]}}
    (line,) = untuned.group_goals(found, earlier)
    assert line.startswith("S2: MISSED (+0.0040 ") and "+0.0100 at the worst" in line
    earlier["S2"]["0.2"] = [0.406, 0.41]
    assert untuned.group_goals(found, earlier)[0].startswith("S2: met")
    assert untuned.group_goals(found, {}) == []


def test_networks_beside_the_better_of_the_others():
    ends = {"fcco": (0.30, 0.693), "uniform": (0.20, 0.50), "OOA": (0.25, 0.40)}
    jobs = [
        (networks.Job("CNN", method, "SGD 0.9", lr, (4, 16), 0), networks.Result(cvar, 0.02, 1.0))
        for method, own in ends.items()
        for lr, cvar in zip((0.1, 1.0), own, strict=True)
    ]
    alone = networks.Job("CNN", "fcco", "SGD 0.9", 10.0, (4, 16), 0)  # nothing to compare with
    found = networks.collect([*jobs, (alone, networks.Result(math.inf, math.inf, 1.0))])
    row = found["CNN, 4 x 16, SGD 0.9"]["fcco"]
    assert row["runs"] == 3 and row["constant"] == 1  # ln 2 with outputs alike
    own = networks.compare(found)["CNN"]
    assert own["ours"] == pytest.approx((0.30 + 0.693) / 2)
    assert own["others"] == pytest.approx((0.20 + 0.40) / 2)
    assert own["worst"] == pytest.approx(0.693 / 0.40) and own["constant"] == 1
    assert list(networks.goals(found)["CNN"].values()) == [False, False]


def test_a_tabular_network_fits_every_group():
    problem = networks.tabular(rows=200, number=4)
    job = networks.Job("tabular MLP", "uniform", "Adam 0.9", 3e-3, (4, 16), 0)
    result = networks.fit(replace(problem, steps=300), job)
    assert result.cvar < 0.05 and result.spread > 5 and not result.constant
    assert networks.fit(replace(problem, steps=300), job).cvar == result.cvar
    start = networks.fit(replace(problem, steps=1), replace(job, lr=1e-9))
    assert start.constant and start.cvar == pytest.approx(math.log(2), abs=0.1)


@pytest.mark.slow
def test_networks_in_other_processes(monkeypatch, tmp_path, capsys):
    """Runs that the file holds are not made again, and one that fails is a note."""
    number = 64
    pixels = torch.randint(256, (number, 3, 27, 22), dtype=torch.uint8)
    faces = networks.Faces(pixels, torch.arange(number) % 2, torch.arange(number) % 16)
    jobs = [
        networks.Job(network, "uniform", "Adam 0.9", 1e-3, (4, 16), 0, tiny=True)
        for network in ("CNN 22x27", "none such")
    ]
    monkeypatch.setattr(networks, "plan_gpu", lambda tiny: jobs)
    monkeypatch.setattr(networks, "load", lambda path, every: faces)
    out = tmp_path / "runs"
    found = networks.study(tmp_path, out, "cpu", 5.0, 1)
    assert found["CNN 22x27, 4 x 16, Adam 0.9"]["uniform"]["runs"] == 1
    assert "left out: none such: KeyError" in capsys.readouterr().err
    assert networks.study(tmp_path, out, "cpu", 0.0, 1) == found
    assert out.read_text().count("\n") == 1


def test_untuned_command(monkeypatch, capsys, tmp_path):
    arguments = ["--quick", "--json", "--workers", "1", "--cache", str(tmp_path / "runs"), "--only"]
    monkeypatch.setattr(sys, "argv", ["untuned", *arguments, "^docs: penalty"])
    untuned.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) == {"constraints", "groups", "networks", "left_out"}
    assert set(found["constraints"]) == {"docs"}
    assert {"objective", "violation"} <= set(found["constraints"]["docs"]["penalty by hand"])
    assert (tmp_path / "runs").read_text().count("\n") == 1


def test_untuned_without_the_other_libraries(monkeypatch, capsys):
    """Also where the best tuned method is one of theirs."""
    for module in ("cooper", "humancompatible.train.dual_optim"):
        monkeypatch.setitem(sys.modules, module, None)
    assert untuned.tuned.CONSTRAINTS["docs"][0][0].startswith("Cooper")
    words = "untuned --quick --json --workers 1 --only ^docs:.tuned"
    monkeypatch.setattr(sys, "argv", words.split())
    untuned.main()
    told = capsys.readouterr()
    found = json.loads(told.out.splitlines()[-1])
    assert found["constraints"]["docs"]["tuned"]["method"] == "ALEXR"
    for name in ("Cooper", "HCT"):
        (note,) = [each for each in found["left_out"] if each.startswith(name)]
        assert "not installed" in note and note in told.err
    search: Any = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        untuned.tuned.search_constraints("adult", search)
    assert {job.method for job in search.call_args.args[0]} == {"ALEXR", "SONEX"}


def test_walk_command(capsys: pytest.CaptureFixture[str]) -> None:
    walk.main(["--json"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(figures) == list(walk.WALKS)
    for row in figures.values():
        assert row["calls"] > row["switches"] >= row["files"] - 1 >= 1
    # A round is three steps, each about as much of a walk as one of group DRO.
    assert figures["alexr2_round"]["calls"] > 2 * figures["sonex_step"]["calls"]
    with pytest.raises(SystemExit):
        walk.main(["sonex"])
    assert "no walk 'sonex'; there are sonex_step" in capsys.readouterr().err
