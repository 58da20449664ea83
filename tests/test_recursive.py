"""Recursive gradients in training loops: accumulation, scalers, optimizers, DDP, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from problems import Point, take_step
from test_checkpoint import difference
from torch import Tensor, nn
from torch.nn.functional import softplus

import fcco
from fcco.methods import msvr
from fcco.storm import RecursiveGradient

SMOOTH = fcco.outer.Custom(softplus, smooth=True)
IDENTITY = fcco.outer.Custom(lambda u: u, smooth=True)
ROWS = torch.tensor(np.random.default_rng(0).normal(size=(6, 5, 3)))
START = np.array([0.8, -0.5, 0.3])


class Task:
    """g_i(w; s) = (a_is . w)^2 - 0.3, six blocks of five samples, and a model of three numbers."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model: Any = Point(START) if model is None else model
        self.calls, self.rows = 0, ROWS
        self.random = torch.Generator().manual_seed(0)

    def batch(self, blocks: int = 4, per_block: int = 2) -> Tensor:
        """(block, sample) pairs, sorted by block."""
        chosen = torch.randperm(6, generator=self.random)[:blocks].sort().values
        samples = [torch.randperm(5, generator=self.random)[:per_block] for _ in chosen]
        return torch.stack([chosen.repeat_interleave(per_block), torch.cat(samples)], dim=1)

    def inner(self, pairs: Tensor, with_g0: bool = True) -> Callable[[], Any]:
        rows = self.rows[pairs[:, 0], pairs[:, 1]]

        def function() -> Any:
            self.calls += 1
            values = (rows @ self.model.w).square() - 0.3
            return ((rows[:, 0] - self.model.w[1]).square(), values) if with_g0 else values

        return function

    def everything(self) -> list[tuple[Callable[[], Any], Tensor]]:
        pairs = torch.cartesian_prod(torch.arange(6), torch.arange(5))
        return [(self.inner(part), part[:, 0]) for part in (pairs[:11], pairs[11:])]

    def sgd(self, lr: float = 0.02) -> torch.optim.SGD:
        return torch.optim.SGD(self.model.parameters(), lr=lr)

    def storm(self, version: str = "v2", optimizer: Any = None, **options: Any) -> Any:
        settings = {"v1": {}, "v2": {"beta": 0.2}, "v3": {"beta": 0.2, "period": 7}}[version]
        return msvr(
            self.model, optimizer or self.sgd(), SMOOTH, 6, version=version,  # type: ignore[arg-type]
            gamma=0.2, correction=0.6, **{**settings, **options},
        )  # fmt: skip


def go(task: Task, objective: Any, steps: int, **how: int) -> Tensor:
    for _ in range(steps):
        if getattr(objective, "snapshot_due", False):
            objective.snapshot(task.everything())
        pairs = task.batch(**how)
        objective(task.inner(pairs), pairs[:, 0]).backward()
        optimizers = objective.optimizer
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([task.model.w.detach(), objective.term.tracker.value[:, 0]])


def reference(version: str, steps: int = 20) -> Tensor:
    task = Task()
    storm = task.storm(version)
    if version != "v3":
        storm.warm_up(task.everything())
    return go(task, storm, steps)


def near(one: Tensor, other: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


# One step, several batches; steps that are skipped.


@pytest.mark.parametrize("version, cut", [("v2", "samples"), ("v3", "blocks")])
def test_gradient_accumulation_equals_one_batch(version, cut):
    task = Task()
    storm = task.storm(version)
    if version == "v2":
        storm.warm_up(task.everything())
    for _ in range(20):
        if storm.snapshot_due:
            storm.snapshot(task.everything())
        pairs = task.batch()
        for half in (pairs[:4], pairs[4:]) if cut == "blocks" else (pairs[::2], pairs[1::2]):
            (storm(task.inner(half), half[:, 0]) / 2).backward()
        storm.optimizer.step()
        storm.optimizer.zero_grad()
    ours = torch.cat([task.model.w.detach(), storm.term.tracker.value[:, 0]])
    near(ours, reference(version))


def test_a_skipped_step_leaves_z_alone_and_its_batch_is_pooled():
    """As a call whose loss is not used would."""
    ends = []
    for how in ("skipped", "unused"):
        task = Task()
        storm, scaler = task.storm(), torch.amp.GradScaler("cpu", init_scale=2.0)
        go(task, storm, 5)
        pairs = task.batch()
        before = copy.deepcopy(storm.estimate.get_extra_state())
        loss = storm(task.inner(pairs), pairs[:, 0])
        if how == "skipped":
            scaler.scale(loss * torch.inf).backward()
            scaler.step(storm.optimizer)
            scaler.update()
            storm.optimizer.zero_grad()
        assert difference(storm.estimate.get_extra_state(), before) == 0
        ends.append(go(task, storm, 5))
    assert torch.equal(*ends)


# Parameters.


class Parts(nn.Module):
    """The same three numbers as `Point`, in three parameters, one of them of another optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.tensor([x])) for x in START])

    @property
    def w(self) -> Tensor:
        return torch.cat(list(self.parts))


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_groups_and_several_optimizers_equal_one(version):
    task = Task(Parts())
    first, second, third = task.model.parameters()
    a = torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.02}], lr=0.02)
    optimizers = [a, torch.optim.SGD([third], lr=0.02)]
    storm = task.storm(version, optimizers)
    if version == "v2":
        storm.warm_up(task.everything())
    near(go(task, storm, 20), reference(version))


def test_an_optimizer_that_does_not_step_each_time_is_refused():
    task = Task(Parts())
    first, second, third = task.model.parameters()
    optimizers = [torch.optim.SGD([first, second], lr=0.1), torch.optim.SGD([third], lr=0.1)]
    storm = task.storm(optimizer=optimizers)
    go(task, storm, 2)
    pairs = task.batch()
    storm(task.inner(pairs), pairs[:, 0]).backward()
    optimizers[0].step()
    with pytest.raises(RuntimeError, match="every optimizer to step"):
        storm(task.inner(pairs), pairs[:, 0])
    with pytest.raises(RuntimeError, match="steps without a gradient from it"):
        optimizers[0].step()
    optimizers[1].step()
    storm(task.inner(pairs), pairs[:, 0])


def test_a_step_on_another_loss_is_refused_and_changes_nothing():
    task = Task()
    storm = task.storm()
    storm.optimizer.step()  # nothing has begun yet
    go(task, storm, 3)
    before = copy.deepcopy(storm.state_dict())
    task.model.w.grad = torch.ones(3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="Put a second loss into g0"):
        storm.optimizer.step()
    assert difference(dict(before), dict(storm.state_dict())) == 0
    storm.detach_hooks()
    storm.optimizer.step()


class Gated(nn.Module):
    """A model with a parameter that is used on demand, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Parameter(torch.tensor([0.5, -0.4], dtype=torch.float64))
        self.extra = nn.Parameter(torch.tensor([0.3], dtype=torch.float64))
        self.idle = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.used = True

    @property
    def w(self) -> Tensor:
        return torch.cat([self.main, self.extra if self.used else torch.zeros_like(self.extra)])


def test_parameters_that_are_unused_frozen_or_added_late():
    task = Task(Gated())
    model: Any = task.model
    optimizer = torch.optim.SGD([model.main, model.idle], lr=0.02)
    storm = task.storm(optimizer=optimizer)

    def starts_anew() -> None:
        """z of `extra` is the plain gradient of this step."""
        optimizer.zero_grad()
        pairs = task.batch()
        loss = storm(task.inner(pairs), pairs[:, 0])
        (plain,) = torch.autograd.grad(loss, model.extra, retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(storm.estimate.tensors[model.extra], plain)

    go(task, storm, 3)
    assert model.idle.grad is None and model.idle not in storm.estimate
    optimizer.add_param_group({"params": [model.extra]})
    starts_anew()
    go(task, storm, 3)
    # Unused in this batch: G = 0 at both points, so z shrinks by 1 - beta, and w moves by it.
    model.used, z, at = False, storm.estimate.tensors[model.extra].clone(), model.extra.item()
    go(task, storm, 1)
    near(storm.estimate.tensors[model.extra], 0.8 * z)
    assert model.extra.item() == pytest.approx(at - 0.02 * 0.8 * z.item(), abs=1e-15)
    # Frozen: it does not move.
    model.used = True
    model.extra.requires_grad_(False)
    go(task, storm, 2)
    assert model.extra not in storm.estimate and model.main in storm.estimate
    model.extra.requires_grad_(True)
    starts_anew()


# The same samples with the same randomness at both points.


class Exact(nn.Linear):
    """A layer that autocast leaves alone: so must a backward pass."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            return super().forward(input.float())


def network() -> nn.Sequential:
    torch.manual_seed(1)
    layers = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.4), Exact(8, 1)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("autocast", [False, True])
def test_dropout_batch_norm_and_autocast_are_the_same_at_both_points(autocast):
    """With f the identity, beta = 0 and w at rest, z_t = z_0 if both G are the same numbers."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    storm: Any = msvr(model, optimizer, IDENTITY, 6, version="v2", gamma=0.2, beta=0.0)
    rows = ROWS.float().reshape(-1, 3)
    index = torch.arange(6).repeat_interleave(5)
    first: list[Tensor] = []
    outputs = []
    for _ in range(6):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = storm(lambda: outputs.append(model(rows).squeeze(1)) or outputs[-1], index)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept = list(storm.estimate.tensors.values())
        first = first or [z.clone() for z in kept]
    assert all(map(torch.equal, kept, first))
    assert model.state_dict()["1.num_batches_tracked"] == 6, "each step counts once"
    assert torch.equal(outputs[-1], outputs[-2]) and not torch.equal(outputs[-1], outputs[-3])


def test_how_often_the_function_is_called():
    """As often as its values or gradients are needed somewhere, and never twice at one point."""
    sox = lambda task: fcco.methods.sox(task.model, task.sgd(), SMOOTH, 6)  # noqa: E731
    builds: dict[str, Callable[[Task], Any]] = {
        "v1": lambda task: task.storm("v1"),
        "single point": lambda task: task.storm("v1", single_point=True),
        "v2": lambda task: task.storm("v2"),
        "v3": lambda task: task.storm("v3", period=100),
        "sox": sox,
        "sox with STORM": lambda task: RecursiveGradient(sox(task), 0.1),
    }
    counts = {}
    for name, build in builds.items():
        task = Task()
        storm = build(task)
        go(task, storm, 2)
        before = task.calls
        go(task, storm, 10)
        counts[name] = (task.calls - before) / 10
    assert list(counts.values()) == [2, 1, 2, 3, 1, 2], counts


# Forms of the values.


def test_a_term_that_is_missing_in_a_batch():
    """Its u rests: u_{t-2} = u_{t-1}. A literal computation of z."""
    model = Point(START)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tracker = lambda: fcco.ema_tracker(2, 0.5, dtype=torch.float64)  # noqa: E731
    terms = {name: fcco.CoupledTerm(SMOOTH, tracker()) for name in ("a", "b")}
    storm: Any = RecursiveGradient(fcco.Compositional(model, optimizer, terms), 0.2)
    rows = {"a": ROWS[:2, 0], "b": ROWS[2:4, 0]}
    u = {name: [(r @ model.w.detach()).square()] * 2 for name, r in rows.items()}
    w = [model.w.detach().clone()] * 2
    z = torch.zeros(3, dtype=torch.float64)
    for step, present in enumerate(["ab", "a", "ab", "b", "b", "a", "ab"]):
        take_step(storm, lambda p=present: {k: (rows[k] @ model.w).square() for k in p})

        def G(point: Tensor, which: int, present: str = present) -> Tensor:
            parts = [
                2 * (rows[k] @ point * torch.sigmoid(u[k][which])) @ rows[k] / 2 for k in present
            ]
            return torch.stack(parts).sum(0)

        z = G(w[1], 1) if step == 0 else 0.8 * z + G(w[1], 1) - 0.8 * G(w[0], 0)
        for k in "ab":
            fresh = (rows[k] @ w[1]).square()
            u[k] = [u[k][1], (u[k][1] + fresh) / 2 if k in present else u[k][1]]
        w = [w[1], w[1] - 0.05 * z]
        near(model.w.detach(), w[1])


# Refusals.


def test_optimizers_that_cannot_be_stepped_are_refused():
    model = Point(START)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = lambda o: fcco.sonex(model, o, SMOOTH, 3, smoothing=0.0)  # noqa: E731
    proximal = fcco.ProximalPoint(optimizer, nu=0.5, eta=0.1, inner_steps=2)
    with pytest.raises(ValueError, match="cannot step a ProximalPoint"):
        RecursiveGradient(plain(proximal), 0.1)
    first = RecursiveGradient(plain(optimizer), 0.1)
    with pytest.raises(ValueError, match="belongs to another one"):
        RecursiveGradient(plain(optimizer), 0.1)
    first.detach_hooks()
    RecursiveGradient(plain(optimizer), 0.1)
    task = Task(Parts())
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in task.model.parameters()]
    with pytest.raises(ValueError, match="needs a single optimizer"):
        task.storm(optimizer=optimizers, normalized=True)


def test_steps_that_would_spoil_the_estimate_are_refused():
    """Fused under a scaler, several gradients in a step, sparse gradients."""
    task = Task()
    pairs, scaler = task.batch(), torch.amp.GradScaler("cpu", init_scale=2.0)
    fused = torch.optim.SGD(task.model.parameters(), lr=0.1, fused=True)
    storm = task.storm(optimizer=fused)
    scaler.scale(storm(task.inner(pairs), pairs[:, 0])).backward()
    with pytest.raises(RuntimeError, match="use `fused=False`"):
        scaler.step(fused)
    assert not storm.previous.ready and len(storm.estimate) == 0

    lbfgs = torch.optim.LBFGS(task.model.parameters(), lr=0.1)
    storm = task.storm(optimizer=lbfgs)

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss = storm(task.inner(pairs), pairs[:, 0])
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="LBFGS calls its closure more than once"):
        lbfgs.step(closure)

    model = nn.Embedding(6, 1, sparse=True).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    storm = msvr(model, optimizer, SMOOTH, 6, version="v2", beta=0.1)
    storm(lambda: model(torch.arange(6)).squeeze(1)).backward()
    with pytest.raises(TypeError, match="needs dense gradients"):
        optimizer.step()


def test_objectives_with_state_of_their_own_are_refused():
    model = Point(START)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dro = fcco.CVaRGroupDRO(model, optimizer, 3, ratio=0.5)
    with pytest.raises(TypeError, match=r"is a CVaRTerm with state .*`\(s, losses - s\)`"):
        RecursiveGradient(dro, 0.1)
    single = msvr(model, optimizer, SMOOTH, 3, single_point=True)
    measured = lambda: fcco.Measured(model.w.detach(), model.w)  # noqa: E731
    single(measured).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="have no gradient"):
        single(measured)


def test_snapshots_must_be_taken_and_complete():
    task = Task()
    storm = task.storm("v3")
    pairs = task.batch()
    with pytest.raises(RuntimeError, match="a snapshot is due"):
        storm(task.inner(pairs), pairs[:, 0])
    with pytest.raises(ValueError, match=r"all 6 blocks of `inner`, .* but holds 3"):
        storm.snapshot(task.everything()[:1])
    assert storm.snapshot_due
    go(task, storm, 7)
    assert storm.snapshot_due and storm.anchor.age == 7
    with pytest.raises(RuntimeError, match="a snapshot is due"):
        storm(task.inner(pairs), pairs[:, 0])
    before = copy.deepcopy(dict(storm.state_dict()))
    with pytest.raises(ValueError, match="NaN or infinite"):
        storm.snapshot((lambda f=f: torch.nan * f()[1], i) for f, i in task.everything())
    assert difference(before, dict(storm.state_dict())) == 0
    plain = Task()
    with pytest.raises(ValueError, match=r"needs `RecursiveGradient\(snapshot_every=...\)`"):
        plain.storm("v2").snapshot(plain.everything())


# A GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("version", ["v2", "v3"])
def test_training_on_the_gpu_equals_training_on_the_cpu(version):
    ends = []
    for device in ("cpu", "cuda"):
        task = Task(Point(START).to(device))
        task.rows = ROWS.to(device)
        ends.append(go(task, task.storm(version), 12).cpu())
    near(ends[0], ends[1], 1e-9)
