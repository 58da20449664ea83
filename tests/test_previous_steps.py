"""When the previous parameters are copied, and how the copy is saved."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from previous_cases import X, moved, network
from problems import Point
from torch import nn

import fcco


def test_before_the_first_step_the_previous_point_is_the_current_one():
    model = network()
    previous = fcco.PreviousParameters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not previous.ready
    assert torch.equal(previous.evaluate(lambda: model(X)), model(X))
    previous.snapshot()
    assert previous.ready
    previous.forget()
    assert not previous.ready


def test_a_parameter_group_added_later_is_copied_from_then_on():
    model, late = network(), nn.Parameter(torch.ones(1, dtype=torch.float64))
    previous, _, optimizer = moved(model)
    optimizer.add_param_group({"params": [late]})
    assert previous.evaluate(lambda: late.item()) == 1.0
    late.grad = torch.ones(1, dtype=torch.float64)
    optimizer.step()
    assert (previous.evaluate(lambda: late.item()), late.item()) == (1.0, 0.7)
    assert len(previous.get_extra_state()["parameters"]) == 5


def test_with_two_optimizers_w_t_minus_1_is_one_point_in_time():
    """Also when one of them does not step each time: its parameters have not moved then."""
    a, b = nn.Parameter(torch.tensor(0.0)), nn.Parameter(torch.tensor(0.0))
    first, second = torch.optim.SGD([a], lr=1.0), torch.optim.SGD([b], lr=1.0)
    previous = fcco.PreviousParameters(nn.ParameterList([a, b]), [first, second])
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


def trajectory(how: str, make=lambda p: torch.optim.SGD(p, 0.1, momentum=0.5), correction=0.7):
    """SONEX on a slope that depends on u, stepped in various ways."""
    model = Point(np.array([0.9, -0.5]))
    optimizer = make(model.parameters())
    objective = fcco.sonex(
        model, optimizer, fcco.Absolute(2.0), 3, smoothing=2.0, gamma=0.3, correction=correction
    )
    a = torch.tensor([[1.0, 0.2], [0.3, -1.0], [-0.6, 0.8]], dtype=torch.float64)
    step = optimizer.step
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        noise = 0.1 * torch.randn(3, generator=generator, dtype=torch.float64)

        def closure(noise=noise):
            optimizer.zero_grad()
            loss = objective(lambda: (a @ model.w).square() - 0.2 + noise)
            loss.backward()
            return loss

        if how == "positional":
            assert step(closure) is not None
        elif how == "keyword":
            assert step(closure=closure) is not None
        else:
            closure()
            step()
    return torch.cat([model.w.detach(), objective.term.tracker.value[:, 0]])


def proximal(params):
    return fcco.ProximalPoint(torch.optim.SGD(params, lr=0.3), nu=0.5, eta=0.2, inner_steps=3)


@pytest.mark.parametrize(
    "how, make",
    [("positional", lambda p: torch.optim.SGD(p, 0.1, momentum=0.5)), ("keyword", proximal)],
)
def test_a_step_with_a_closure_equals_the_plain_loop(how, make):
    plain = trajectory("plain", make)
    assert torch.equal(trajectory(how, make), plain)
    dropped = trajectory("plain", make, correction=0.0)
    assert (dropped - plain).abs().max() > 1e-3, "the correction must matter here"


def test_a_round_of_a_proximal_point_begins_with_the_previous_point_at_its_start():
    """z_{-1} = z_0 = w_t; a second optimizer's parameters keep their own previous value."""
    z, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer, plain = proximal([z]), torch.optim.SGD([other], lr=1.0)
    term = fcco.CoupledTerm(fcco.Hinge(), fcco.msvr_tracker(1))
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
    previous = fcco.PreviousParameters(model, optimizers)
    for _ in range(2):
        before = copy.deepcopy(model)
        model(X).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    other = copy.deepcopy(model)
    halves = list(other.parameters())[:2], list(other.parameters())[2:]
    again = [torch.optim.SGD(half, lr=0.3) for half in halves]
    restored = fcco.PreviousParameters(other, again)
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
    other = fcco.PreviousParameters(wider, torch.optim.SGD(wider.parameters(), lr=0.1))
    other.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"parameter 0 has shape \(5, 4\) .* \(7, 4\)"):
        other.evaluate(lambda: None)
    fewer = nn.Linear(4, 5).double()
    other = fcco.PreviousParameters(fewer, torch.optim.SGD(fewer.parameters(), lr=0.1))
    other.load_state_dict(saved)
    with pytest.raises(ValueError, match="parameter 2 but the optimizer only 2"):
        other.evaluate(lambda: None)


def test_only_optimizers_are_accepted_and_hooks_can_be_removed():
    model = network()
    with pytest.raises(TypeError, match=r"torch.optim.Optimizer but is: Linear"):
        fcco.PreviousParameters(model, nn.Linear(1, 1))  # type: ignore[arg-type]
    previous, before, optimizer = moved(model)
    previous.detach_hooks()
    optimizer.step()
    assert torch.equal(previous.evaluate(lambda: model(X)), before(X))
