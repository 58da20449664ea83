"""Evaluation at the previous parameters is exact and has no side effects; when they are copied."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fcco

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)


def network(*middle: nn.Module) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), *middle, nn.Linear(5, 1)).double()


def moved(model: nn.Module, extra=(), optimizer=None, steps: int = 2, **options: Any):
    """Take steps; return the object under test and a copy of the model at w_{t-1}."""
    if optimizer is None:
        optimizer = torch.optim.SGD([*model.parameters(), *extra], lr=0.3)
    previous = fcco.previous.PreviousParameters(model, optimizer, **options)
    for _ in range(steps):
        before = copy.deepcopy(model)
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()
    return previous, before, optimizer


def state(model: nn.Module) -> dict:
    return {k: v.clone() for k, v in model.state_dict().items()}


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


class Tied(nn.Module):
    """A tied weight, a sub-module under two names, and one that is also in a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.second.weight = self.first.weight
        self.alias = self.first
        self.layers = nn.ModuleList([self.second, nn.Linear(4, 1).double()])

    def forward(self, x):
        return self.layers[1](torch.tanh(self.layers[0](torch.tanh(self.alias(x)))))


@pytest.mark.parametrize("build", [network, Tied])
def test_everything_is_rerouted_and_everything_comes_back(build):
    model = build()
    previous, before, _ = moved(model)
    objects = dict(model.named_parameters(remove_duplicate=False))
    now, pointers = state(model), [p.data_ptr() for p in model.parameters()]
    found = previous.evaluate(lambda: model(X))
    assert torch.equal(found, before(X)) and not found.requires_grad
    assert (found - model(X)).abs().max() > 1e-3
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(isinstance(p, nn.Parameter) and p is objects[k] for k, p in after.items())
    assert same(state(model), now) and [p.data_ptr() for p in model.parameters()] == pointers
    if build is Tied:
        assert model.first.weight is model.second.weight and model.alias is model.first


def test_what_is_returned_stays_at_w_t_minus_1():
    """The parameter itself, views of it, and containers of these, also after another step."""
    model = network()
    previous, before, optimizer = moved(model)
    old, weight = before[0].weight.detach().clone(), model[0].weight
    found = previous.evaluate(
        lambda: {"itself": weight, "views": (weight.view(-1), weight.detach(), weight[0])}
    )
    optimizer.step()
    assert torch.equal(found["itself"], old) and not torch.equal(weight, old)
    for view, expected in zip(found["views"], (old.view(-1), old, old[0]), strict=True):
        assert torch.equal(view, expected)


def test_dropout_masks_are_equal_and_the_random_stream_is_untouched():
    model = network(nn.Dropout(0.5))
    previous, before, _ = moved(model)
    torch.manual_seed(7)
    expected, follow = before(X), torch.rand(3)
    torch.manual_seed(7)
    found = previous.evaluate(lambda: model(X))
    start = torch.get_rng_state()
    again = previous.evaluate(lambda: model(X))
    assert torch.equal(found, expected) and torch.equal(again, expected)
    assert torch.equal(torch.get_rng_state(), start)
    model(X)
    assert torch.equal(torch.rand(3), follow)
    torch.manual_seed(8)
    assert not torch.equal(previous.evaluate(lambda: model(X)), expected)


class Caching(nn.Module):
    """Buffers reassigned, filled, added and shared inside forward."""

    count: Any
    cache: Any
    child: Any

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 1, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("cache", None)
        self.child = nn.Module()
        self.child.register_buffer("shared", self.count)

    def forward(self, x):
        self.count.add_(1)
        assert torch.equal(self.child.shared, self.count)
        self.child.shared = self.child.shared * 2
        if self.cache is None:
            self.cache = self.weight.detach() * 1
        self.child.register_buffer(f"call{int(self.count)}", torch.ones(1))
        return x @ self.cache + x @ self.weight


def test_buffers_reassigned_filled_or_added_in_forward_are_restored():
    model = Caching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    previous = fcco.previous.PreviousParameters(model, optimizer)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    buffers, count = state(model), model.count
    found = previous.evaluate(lambda: model(X))
    assert torch.equal(found, 2 * X @ torch.ones(4, 1, dtype=torch.float64))
    assert same(state(model), buffers) and model.cache is None
    assert model.count is count and model.child.shared is count
    assert set(model.child._buffers) == {"shared"}


def test_an_exception_restores_parameters_buffers_and_the_random_stream():
    model = network(nn.BatchNorm1d(5), nn.Dropout(0.5))
    previous, *_ = moved(model)
    now, random = state(model), torch.get_rng_state()

    def fails():
        model(X)
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        previous.evaluate(fails)
    assert same(state(model), now) and torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled()


def test_a_failed_swap_restores_all_parameters():
    model = network()
    previous, *_ = moved(model)
    now, last = state(model), list(model.parameters())[-1]
    previous.tensors[last] = previous.tensors[last].to_sparse()  # cannot be put in place
    with pytest.raises(RuntimeError):
        previous.evaluate(lambda: None)
    assert same(state(model), now)


def test_a_live_graph_at_w_t_survives_an_evaluation():
    gradients = []
    for evaluated in (False, True):
        model = network()
        previous, *_, optimizer = moved(model)
        optimizer.zero_grad()
        loss = model(X).square().sum()
        if evaluated:
            previous.evaluate(lambda model=model: model(X))
        loss.backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    assert torch.equal(*gradients)


def test_a_compiled_model_is_evaluated_at_the_previous_point_without_recompiling():
    torch.compiler.reset()
    plain = network(nn.BatchNorm1d(5))
    model: Any = torch.compile(plain, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    previous = fcco.previous.PreviousParameters(model, optimizer)
    for step in range(4):
        if step == 2:
            torch._dynamo.utils.counters.clear()
        before = copy.deepcopy(plain)
        model(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found = previous.evaluate(lambda: model(X))
        np.testing.assert_allclose(found, before(X).detach(), rtol=0, atol=1e-12)
        assert (found - plain.eval()(X)).abs().max() > 1e-4
        plain.train()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def test_an_offloaded_copy_is_the_same_and_is_saved_as_the_same():
    model = network()
    previous, before, _ = moved(model, offload=True)
    assert torch.equal(previous.evaluate(lambda: model(X)), before(X))
    assert same(previous.state_dict(), moved(network())[0].state_dict())


# When the previous parameters are copied, and how the copy is saved.


def test_with_two_optimizers_w_t_minus_1_is_one_point_in_time():
    """Also when one of them does not step each time: its parameters have not moved then."""
    a, b = nn.Parameter(torch.tensor(0.0)), nn.Parameter(torch.tensor(0.0))
    first, second = torch.optim.SGD([a], lr=1.0), torch.optim.SGD([b], lr=1.0)
    previous = fcco.previous.PreviousParameters(nn.ParameterList([a, b]), [first, second])
    a.grad, b.grad = torch.tensor(-1.0), torch.tensor(-10.0)
    point, last = (0.0, 0.0), (0.0, 0.0)
    for moves in ((first, second), (first,), (second,), (first,), (first,), (second, first)):
        assert previous.evaluate(lambda: (a.item(), b.item())) == last
        last = point
        for optimizer in moves:
            optimizer.step()
        point = (a.item(), b.item())
    assert previous.evaluate(lambda: (a.item(), b.item())) == last == (4.0, 20.0)
    assert point == (5.0, 30.0)


def proximal(params):
    return fcco.optim.ProximalPoint(torch.optim.SGD(params, lr=0.3), nu=0.5, eta=0.2, inner_steps=3)


def test_a_round_of_a_proximal_point_begins_with_the_previous_point_at_its_start():
    """z_{-1} = z_0 = w_t; a second optimizer's parameters keep their own previous value."""
    z, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer, plain = proximal([z]), torch.optim.SGD([other], lr=1.0)
    term = fcco.terms.CoupledTerm(fcco.outer.Hinge(), fcco.tracker.InnerTracker(1))
    objective = fcco.Compositional(nn.ParameterList([z, other]), [optimizer, plain], term)
    previous = objective.previous
    assert previous is not None
    z.grad = other.grad = -torch.ones(1)
    for step in range(1, 7):
        now = z.item()
        optimizer.step()
        z.grad = -torch.ones(1)
        plain.step()
        last, others = previous.evaluate(lambda: (z.item(), other.item()))
        assert last == (z.item() if step % 3 == 0 else now) and others == step - 1


def loaded(saved) -> dict:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("step_first", [False, True])
def test_state_dict_round_trip_before_or_after_use(step_first):
    """A second round trip without use in between keeps the copy too; one optimizer may step."""
    model = network()
    halves = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizers = [torch.optim.SGD(half, lr=0.3) for half in halves]
    previous = fcco.previous.PreviousParameters(model, optimizers)
    for _ in range(2):
        before = copy.deepcopy(model)
        model(X).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    other = copy.deepcopy(model)
    halves = list(other.parameters())[:2], list(other.parameters())[2:]
    again = [torch.optim.SGD(half, lr=0.3) for half in halves]
    restored = fcco.previous.PreviousParameters(other, again)
    restored.load_state_dict(loaded(previous.state_dict()))
    restored.load_state_dict(loaded(restored.state_dict()))
    assert restored.ready
    if step_first:
        before = copy.deepcopy(other)
        other(X).square().sum().backward()
        again[0].step()
    assert torch.equal(restored.evaluate(lambda: other(X)), before(X))


def test_a_checkpoint_of_another_model_is_refused():
    previous, *_ = moved(network())
    saved = loaded(previous.state_dict())
    wider = nn.Linear(4, 7).double()
    other = fcco.previous.PreviousParameters(wider, torch.optim.SGD(wider.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match=r"no parameter 0 of shape \(5, 4\)"):
        other.load_state_dict(saved)
    fewer = nn.Linear(4, 5).double()
    other = fcco.previous.PreviousParameters(fewer, torch.optim.SGD(fewer.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="no parameter 2 of shape"):
        other.load_state_dict(saved)


def test_only_optimizers_are_accepted_and_hooks_can_be_removed():
    model = network()
    with pytest.raises(TypeError, match=r"a torch.optim.Optimizer: Linear"):
        fcco.previous.PreviousParameters(model, nn.Linear(1, 1))  # type: ignore[arg-type]
    previous, before, optimizer = moved(model)
    previous.detach_hooks()
    optimizer.step()
    assert torch.equal(previous.evaluate(lambda: model(X)), before(X))
