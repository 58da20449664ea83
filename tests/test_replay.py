"""Calls and steps as programs, as on a GPU: the same numbers, from nothing but their arguments.

A CUDA graph runs again what was launched once: numbers of Python are frozen in it. On the CPU a
trace of the operations stands in for it.
"""

from __future__ import annotations

import copy
import itertools
import traceback
from typing import Any

import numpy as np
import pytest
import torch
from problems import take_step
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fcco
from fcco._cuda_graphs import Captured, Packed
from fcco.tracker import NonFiniteValue

GROUPS, STEPS = 12, 40


def traced(self: Captured, held: Any) -> Any:
    """`Captured._replayed` without a GPU."""
    vectors = [v for each in held if isinstance(each, Packed) for v in each.vectors]
    places = [each for each in held if isinstance(each, torch.Tensor)] + vectors
    found: list[Packed] = []

    def function(*_: torch.Tensor) -> Any:
        found.append(self._pack(self._function(*held)))
        return found[-1].vectors

    with torch.no_grad():
        graph = make_fx(function)(*places)
    graph.graph.eliminate_dead_code()
    result = Packed(found[-1].layout, [vector.clone() for vector in graph(*places)])

    def replay() -> None:
        for place, value in zip(result.vectors, graph(*places), strict=True):
            place.copy_(value)

    return replay, result


def train(build: Any, batches: list[Any], per_step: int = 1, device: str = "cpu") -> list[Any]:
    """Weights and losses of a run; the state at its end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    objective, function = build(model, optimizer)
    seen = []
    for number, (x, index) in enumerate(batches):
        x = x.to(device)
        loss = objective(lambda x=x: function(model, x), index)
        loss.backward()
        seen.append(loss.detach().clone())
        if (number + 1) % per_step == 0:
            optimizer.step()
            optimizer.zero_grad()
            seen.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
    objective.eval()  # an evaluation reads the state that the last step has left
    objective(lambda: function(model, x), index).backward()  # type: ignore[possibly-unbound]
    seen.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    state = objective.state_dict()
    seen += [value for name, value in sorted(state.items()) if "extra" not in name]
    return [each.double().cpu() for each in seen]


def losses(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x).squeeze(1) - x[:, 0]).square()


def cvar(model: Any, optimizer: Any) -> Any:
    return fcco.CVaRGroupDRO(model, optimizer, GROUPS, 0.25), losses


def read_new(model: Any, optimizer: Any) -> Any:
    settings: Any = {"smoothing": 0.2, "gamma": 0.3, "read": "new", "correction": 0.0}
    return fcco.CVaRGroupDRO(model, optimizer, GROUPS, 0.25, **settings), losses


def paper(model: Any, optimizer: Any) -> Any:
    settings: Any = {"smoothing": 0.1, "gamma": 0.3, "correction": "auto", "read": "old"}
    return fcco.CVaRGroupDRO(model, optimizer, GROUPS, 0.25, **settings), losses


def hard(model: Any, optimizer: Any) -> Any:
    return fcco.CVaRGroupDRO(model, optimizer, GROUPS, 0.25, smoothing=0.0, gamma=0.3), losses


def ooa(model: Any, optimizer: Any) -> Any:
    return fcco.methods.ooa(model, optimizer, GROUPS, ratio=0.25, step=0.1), losses


def pair(model: Any, x: torch.Tensor) -> Any:
    each = losses(model, x)
    return each.mean(), each


def constrained(model: Any, optimizer: Any) -> Any:
    return fcco.constrained(model, optimizer, GROUPS, tolerance=0.2), pair


def mixed(model: Any, optimizer: Any) -> Any:
    limits: Any = {"a": 0.1, "b": (0.05, 0.1), "c": fcco.Equal(0.2), "d": fcco.AtLeast(0.1)}

    def function(model: nn.Module, x: torch.Tensor) -> Any:
        each = losses(model, x)
        return each.mean(), {"a": each.mean(), "b": model(x).mean(), "d": each[0], "c": each[1]}

    return fcco.constrained(model, optimizer, limits), function


def every(model: Any, optimizer: Any) -> Any:
    """All constraints in each step, without an index."""

    def function(model: nn.Module, x: torch.Tensor) -> Any:
        each = losses(model, x)
        return each.mean(), each[:8].repeat(2)[:GROUPS]  # a batch may have 8 rows

    return fcco.constrained(model, optimizer, GROUPS, tolerance=0.2), function


def sonex(model: Any, optimizer: Any) -> Any:
    settings: Any = {"penalty": 3.0, "smoothing": 0.1, "gamma": 0.4, "correction": 0.0}
    return fcco.constrained(model, optimizer, GROUPS, "sonex", tolerance=0.2, **settings), pair


class AveragePrecision(fcco.xrisk.AveragePrecision):
    """Called as the others are; the index is that of samples, each second one positive."""

    def forward(self, function: Any, index: Any = None, *_: Any) -> torch.Tensor:
        return super().forward(function, index.cpu() % 2, index)


def ranked(model: Any, optimizer: Any) -> Any:
    return AveragePrecision(model, optimizer, torch.arange(GROUPS) % 2), losses


def batch_of(rows: int, groups: int, draw: np.random.Generator) -> Any:
    x = torch.as_tensor(draw.standard_normal((rows, 4)))
    return x, torch.as_tensor(draw.choice(groups, rows))


def batches(rows: int, seed: int = 0) -> list[Any]:
    draw = np.random.default_rng(seed)
    return [batch_of(rows, GROUPS, draw) for _ in range(STEPS)]


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("rows", [30, 8])  # more entries than groups, and fewer
@pytest.mark.parametrize("build", [cvar, read_new, ooa, constrained, mixed, every, sonex, ranked])
def test_programs_find_the_same(build, rows, record, monkeypatch):
    data = batches(rows)
    if build in (mixed, every):
        data = [(x, None) for x, _ in data]
    expected = train(build, data)
    monkeypatch.setattr("fcco.rules.arrays.USE_NUMPY", False)
    monkeypatch.setattr("fcco._cuda_graphs.CAPTURE", record)
    recorded: list[Captured] = []

    def replayed(self: Captured, held: Any) -> Any:
        recorded.append(self)
        return traced(self, held)

    monkeypatch.setattr(Captured, "_replayed", replayed)
    for ours, theirs in zip(train(build, data), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10, equal_nan=True)
    assert bool(recorded) == record
    assert all(each.records for each in recorded)  # none fell back


@pytest.fixture
def on_device(monkeypatch):
    """Tensors on the CPU stay tensors, as on a GPU."""
    monkeypatch.setattr("fcco.rules.arrays.USE_NUMPY", False)
    monkeypatch.setattr(Captured, "_replayed", traced)


def again(data: list[Any]) -> list[Any]:
    """Every batch three times in a row: the same samples are no new visit."""
    return [batch for batch in data for _ in range(3)]


@pytest.mark.parametrize("build, case", [
    *itertools.product([cvar, ooa, constrained], ["accumulated", "again", "lengths", "outlier"]),
    (paper, "accumulated"), (paper, "outlier"), (hard, "again"),
])  # fmt: skip
def test_programs_of_other_loops(build, case, monkeypatch):
    data, per_step = batches(30), 1
    if case == "accumulated":
        per_step = 2
    elif case == "again":
        data = again(data[:13])
    elif case == "outlier":
        data[25][0][0] *= 100
    else:  # the last batch of an epoch is shorter
        data = [batch if k % 4 else (batch[0][:9], batch[1][:9]) for k, batch in enumerate(data)]
    expected = train(build, data, per_step)
    monkeypatch.setattr("fcco.rules.arrays.USE_NUMPY", False)
    monkeypatch.setattr(Captured, "_replayed", traced)
    for ours, theirs in zip(train(build, data, per_step), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10, equal_nan=True)


def test_a_step_may_hold_programs_and_other_calls(on_device):
    """Samples in several groups ask how many there are: such a call is no program."""

    def run(matrices: bool) -> torch.Tensor:
        model = nn.Linear(4, 1).double()
        with torch.no_grad():
            model.weight.fill_(0.3)
            model.bias.fill_(0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        objective, function = cvar(model, optimizer)
        for number, (x, index) in enumerate(batches(30)):
            matrix = nn.functional.one_hot(index, GROUPS).bool()
            given = matrix if matrices and number % 3 == 1 else index
            objective(lambda x=x: function(model, x), given).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        return torch.cat([model.weight.detach().flatten(), objective.term.tracker.rows])

    torch.testing.assert_close(run(True), run(False), rtol=1e-10, atol=1e-12)


def test_bad_ids_and_values_are_refused_a_call_later_and_change_nothing(on_device):
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    objective, function = cvar(model, optimizer)
    data = batches(30)

    def step(x: torch.Tensor, index: torch.Tensor) -> None:
        take_step(objective, lambda: function(model, x), index)

    for batch in data[:10]:
        step(*batch)
    x, index = data[10]
    with pytest.raises(IndexError, match=r"\[0, 11\]"):  # on the host that is known at once
        step(x, index.clone().index_fill(0, torch.tensor([3]), GROUPS))
    before = objective.term.tracker.rows.clone()
    bad = x.clone()
    bad[index == 4] = torch.nan
    step(bad, index)
    assert objective.term.tracker.rows.isfinite().all()
    assert objective.term.tracker.rows[4] == before[4]
    with pytest.raises(NonFiniteValue, match=r"blocks \[4\] in an earlier step"):
        step(x, index)


def test_ids_on_a_device_are_refused_late(on_device, monkeypatch):
    tracker = fcco.tracker.InnerTracker(5, gamma=0.5)
    step = fcco.tracker.OpenStep()
    ids = torch.tensor([0, 3, 3, 7])
    values = torch.tensor([1.0, 2.0, 4.0, 100.0])
    blocks = fcco.tracker.Blocks(4, None, ids, None)
    entries = fcco.tracker.Entries(blocks, values, None, values, blocks)
    tracked = tracker.track(entries, step)
    assert tracked.factors(torch.ones(4))[3] == 0
    tracker.close(step.updates[tracker])
    assert tracker.rows.tolist() == [1.0, 0.0, 0.0, 3.0, 0.0]
    assert tracker.seen.tolist() == [True, False, False, True, False]
    with pytest.raises(IndexError, match="earlier step"):
        tracker.blocks(torch.tensor([0]))


def test_a_copy_and_a_resumed_run_record_anew(on_device):
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    objective, function = cvar(model, optimizer)
    data = batches(30)

    def run(own: Any, model: Any, optimizer: Any, part: Any) -> torch.Tensor:
        for x, index in part:
            own(lambda x=x: function(model, x), index).backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([model.weight.detach().flatten(), own.term.tracker.rows])

    run(objective, model, optimizer, data[:15])
    copies = copy.deepcopy((objective, model, optimizer))
    other = nn.Linear(4, 1).double()
    other.load_state_dict(model.state_dict())
    stepped = torch.optim.SGD(other.parameters(), lr=0.05)
    resumed, _ = cvar(other, stepped)
    run(resumed, other, torch.optim.SGD(other.parameters(), lr=0.0), data[:3])
    resumed.load_state_dict(objective.state_dict())
    expected = run(objective, model, optimizer, data[15:])
    assert torch.equal(run(*copies, data[15:]), expected)
    assert torch.equal(run(resumed, other, stepped, data[15:]), expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 if x.sum() > 0 else -x,
        lambda x: x[x > 0],
        lambda x: x.clip(0, x.max()),  # mixed bounds: torch makes a number of the tensor
        lambda x: x.unique(),
    ],
)
def test_a_function_that_waits_for_the_device_is_never_recorded(function, monkeypatch):
    monkeypatch.setattr(Captured, "_replayed", traced)
    program = Captured(lambda x: [function(x)])
    draw = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = torch.randn(5, generator=draw)
        assert torch.equal(program(x).part(0), function(x))
    assert not program.records


def test_what_cannot_be_recorded_runs_as_it_is(on_device, monkeypatch):
    """A formula of one's own may look at its numbers; the host then waits, as it did before."""

    def refuse(self: Captured, held: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Captured, "_replayed", refuse)
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    objective, function = cvar(model, optimizer)
    for x, index in batches(30)[:8]:
        objective(lambda x=x: function(model, x), index).backward()
        optimizer.step()
    assert objective.term.tracker.steps == 8


# The host never waits.

EXEMPT = {
    "poll",  # looks at a flag that a GPU has sent to the host already
    "_refuse_nonfinite",  # does not ask a GPU
}
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "item", "is_nonzero", "equal")


class Operations(TorchDispatchMode):
    """Notes operations after which a host would have to wait for its GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in WAITS or (name.startswith("index") and self.chooses(args)):
            stack = traceback.extract_stack(limit=12)
            if not EXEMPT & {frame.name for frame in stack}:
                self.waits.append(name + "\n" + "".join(stack.format()))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def chooses(args: Any) -> bool:
        """Indexing with a mask looks at how many are true."""
        index = [each for arg in args if isinstance(arg, (list, tuple)) for each in arg]
        return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in index)


@pytest.mark.parametrize("rows", [30, 8])
@pytest.mark.parametrize("build", [cvar, paper, hard, read_new, ooa, constrained, mixed, sonex])
def test_on_a_gpu_the_host_waits_for_nothing(build, rows, monkeypatch):
    monkeypatch.setattr("fcco.rules.arrays.USE_NUMPY", False)
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    objective, function = build(model, optimizer)
    *first, (x, index) = [(x, None if build is mixed else ids) for x, ids in batches(rows)[:20]]
    for some, ids in first:
        take_step(objective, lambda some=some: function(model, some), ids)
    with Operations() as found:
        objective(lambda: function(model, x), index).backward()
        objective.close()
    assert not found.waits, "\n".join(found.waits)
