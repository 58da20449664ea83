"""The benchmarks run on tiny settings, and their figures by hand."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
import torch

from benchmarks import fleet, walk
from benchmarks.timing import Timings
from studies.constrained.convex import Segments
from studies.constrained.training import Figures
from studies.runner import Job, Runner
from studies.untuned import __main__ as untuned
from studies.untuned import constraints, settings, tuned
from studies.untuned.constraints import Variant

# Fleets.

SHAPE = {"rows": 300, "test_rows": 100, "features": 4}


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
    assert result["steps"] == 60 * 13  # 1,600 rows, batches of 128
    # Two runs as one program, beside one and one: within a factor of ten of each other.
    assert 0.1 < result["rows"]["eager"]["over_sequential"] < 10


def test_fleet_rows_from_times_by_hand() -> None:
    seconds = {"sequential": [1.0, 2.0, 4.0], "traced": [0.2, 0.4, 1.0]}
    rows = fleet.rows(Timings(seconds), 10)
    assert rows["traced"]["over_sequential"] == 5 and rows["traced"]["run_step_us"] == 4e5
    assert rows["traced"]["runs_per_second"] == 0.25  # 1 / (0.4 s times 10 steps)


def test_a_fleet_does_the_work_of_the_single_run() -> None:
    problem, runs = fleet.make(SHAPE, hidden=(5,), batch=16), fleet.runs_of("alexr2", 3)
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


def test_figures_of_ours_and_of_the_tuned():
    entries = [e for e in untuned.plan([10, 11], False) if e.problem == "docs"]

    def end(job: Job) -> Figures:  # seed 11 is worse by 0.02
        return Figures(0.5 - 10 * job.shift + 0.02 * (job.seed - 10), 0.004 + job.shift)

    runner = Runner(end, Figures, show=None)
    runner([job for entry in entries for jobs in entry.jobs.values() for job in jobs], "runs")
    rows = untuned.collect(entries, runner)["docs"]
    assert rows["fcco"]["objective"] == pytest.approx(0.51)
    assert rows["fcco"]["objective_std"] == pytest.approx(0.02 / math.sqrt(2))
    assert rows["tuned"]["method"] == "SONEX"
    assert rows["tuned"]["objective"] == pytest.approx(0.51 - 10 * 0.001)


def test_the_quantile_by_hand_weighs_the_worst_groups():
    losses = torch.arange(20.0, requires_grad=True)
    objective = settings.METHODS["EMA + quantile"](None, None, 20)
    objective(lambda: losses, torch.arange(20)).backward()
    assert losses.grad is not None
    torch.testing.assert_close(losses.grad, torch.tensor([0.0] * 17 + [1 / 3] * 3))  # 1/(r n)


def test_a_tabular_network_fits_every_group():
    setting = {"optimizer": "Adam 0.9", "lr": 3e-3, "shape": [4, 16]}
    end = settings.run(Job("tabular MLP", "uniform", setting, 0))["cvar"]
    # Before training: the CVaR of fair coins is ln 2.
    start = settings.run(Job("tabular MLP", "uniform", {"lr": 1e-9}, 0, evaluations=1))["cvar"]
    assert end < 0.05 and start == pytest.approx(math.log(2), abs=0.05)


def test_untuned_command(capsys, tmp_path):
    words = f"--quick --json --workers 1 --out {tmp_path}/runs --only"
    untuned.main([*words.split(), "^docs: penalty"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) == {"constraints", "left_out"}
    assert set(found["constraints"]) == {"docs"}
    assert {"objective", "violation"} <= set(found["constraints"]["docs"]["penalty by hand"])
    assert (tmp_path / "runs").read_text().count("\n") == 1


def test_untuned_without_the_other_libraries(monkeypatch, capsys):
    """What needs one of them is left out, with a note."""
    for module in ("cooper", "humancompatible.train.dual_optim"):
        monkeypatch.setitem(sys.modules, module, None)
    assert tuned.CONSTRAINTS["convex"][0].startswith("Cooper")
    assert not any("Cooper" in each.method for each in untuned.plan([10], False))
    untuned.main(["--quick", "--json", "--workers", "1", "--only", "^(docs|convex): tuned"])
    told = capsys.readouterr()
    found = json.loads(told.out.splitlines()[-1])
    assert list(found["constraints"]) == ["docs"]
    assert found["constraints"]["docs"]["tuned"]["method"] == "SONEX"
    for name in ("Cooper", "HCT"):
        (note,) = [each for each in found["left_out"] if each.startswith(name)]
        assert "not installed" in note and note in told.err


def test_walk_command(capsys: pytest.CaptureFixture[str]) -> None:
    walk.main(["sonex_step"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" Compositional.forward")
    for line in lines:
        place, name = line.split()
        file, number = place.split(":")
        source = (walk.SOURCE / file).read_text().splitlines()[int(number) - 1 :]
        word = name.rpartition(".")[2]
        assert word == "<lambda>" or any(f"def {word}(" in each for each in source[:5]), line
