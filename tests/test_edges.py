"""Mistakes that were once silent: each of them is right now, or refused with the reason."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from problems import Point
from torch import Tensor, nn

import fcco
from fcco.terms import DualTerm
from fcco.tracker import theory_correction

F64 = torch.float64


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


# The CVaR threshold.


def test_cvar_refuses_logarithms():
    with pytest.raises(ValueError, match="log_space"):
        fcco.terms.CVaRTerm(fcco.tracker.InnerTracker(3, gamma=0.5, log_space=True), 0.5)


# Calls between two optimizer steps at moved parameters.


def tracked(model: Point, optimizer: Any, correction: float) -> fcco.Compositional:
    tracker = fcco.tracker.InnerTracker(1, gamma=0.5, correction=correction, dtype=F64)
    return fcco.Compositional(
        model, optimizer, fcco.terms.CoupledTerm(fcco.outer.SquaredHinge(), tracker)
    )


@pytest.mark.parametrize("correction", [0.0, 0.4])
def test_every_closure_of_lbfgs_at_new_parameters_is_a_step_of_its_own(correction):
    model = Point([3.0])
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=1e-3, max_iter=130, tolerance_grad=-1, tolerance_change=-1
    )
    objective = tracked(model, optimizer, correction)
    points: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        points.append(model.w.item())
        loss = objective(lambda: model.w.square())
        loss.backward()
        return loss

    for _ in range(2):  # without a warning, although there are so many calls in a step
        optimizer.step(closure)
    assert len(set(points)) > 200  # the parameters moved inside a step
    u, before = None, 0.0
    for point in points:
        g = point**2
        u = g if u is None else 0.5 * u + 0.5 * g + correction * (g - before)
        before = g
    assert objective.term.tracker.value.item() == pytest.approx(u, abs=1e-12)


@pytest.mark.parametrize("correction", [0.0, 0.4])
def test_the_second_evaluation_of_sam_replaces_the_first(correction):
    model = Point([2.0])
    optimizer = sgd(model)
    objective = tracked(model, optimizer, correction)
    u, previous = None, 0.0
    for _ in range(40):
        w = model.w.item()
        objective(lambda: model.w.square()).backward()
        with torch.no_grad():
            model.w.add_(0.05)  # to the worst point nearby
        model.w.grad = None
        objective(lambda: model.w.square()).backward()
        with torch.no_grad():
            model.w.sub_(0.05)
        optimizer.step()
        optimizer.zero_grad()
        first, second = w**2, (w + 0.05) ** 2
        if u is None:  # before the first step parameters may as well be changed by hand
            u = second if correction else 0.5 * first + 0.5 * second
        else:
            u = 0.5 * u + 0.5 * second + correction * (second - previous)
        # w_{t-1} is where the optimizer's step began
        previous = w**2
    assert objective.term.tracker.value.item() == pytest.approx(u, abs=1e-12)


# Trackers.


def test_the_correction_of_the_theory_at_gamma_1():
    assert theory_correction(1.0, 4, 4) == 0.0


def test_long_float32_sums_keep_their_digits():
    """A running sum in float32 would be percents off."""
    number = 2**23
    tracker = fcco.tracker.InnerTracker(1, gamma=1.0, correction=0.0)
    tracker(torch.full((number,), 0.1), torch.zeros(number, dtype=torch.int64))
    assert tracker.value.item() == pytest.approx(0.1, rel=1e-6)


def test_values_that_make_u_overflow_are_refused():
    tracker = fcco.tracker.InnerTracker(1, gamma=0.5, correction=3.0)
    tracker(torch.tensor([0.0]))
    with pytest.raises(fcco.NonFiniteValue, match="overflow"):
        tracker(torch.tensor([2e38]), None, torch.tensor([-2e38]))
    assert tracker.value.item() == 0.0


@pytest.mark.parametrize("loss", [torch.tensor(torch.nan), torch.tensor([1.0, torch.inf])])
def test_a_loss_that_is_not_finite_is_refused_before_anything_is_tracked(loss):
    model = Point([1.0])
    objective = fcco.constrained(model, sgd(model), 1, "sonex", penalty=1.0, smoothing=0.1)
    with pytest.raises(fcco.NonFiniteValue, match="loss g0"):
        objective(lambda: (loss, model.w))
    assert not objective.term.tracker.seen.any()


def test_a_loss_without_samples_is_refused():
    model = Point([1.0])
    objective = fcco.constrained(model, sgd(model), 1, "sonex", penalty=1.0, smoothing=0.1)
    with pytest.raises(ValueError, match="no samples"):
        objective(lambda: (torch.zeros(0), model.w))


def test_a_warm_up_that_is_refused_writes_no_term():
    model = Point([1.0])
    terms = {
        name: fcco.terms.CoupledTerm(
            fcco.outer.SquaredHinge(), fcco.tracker.ema_tracker(1, dtype=F64)
        )
        for name in ("good", "bad")
    }
    objective = fcco.Compositional(model, sgd(model), terms)
    values = {"good": torch.ones(1), "bad": torch.full((1,), torch.nan)}
    index = {"good": torch.tensor([0]), "bad": torch.tensor([0])}
    with pytest.raises(fcco.NonFiniteValue, match="bad"):
        objective.warm_up([(lambda: values, index)])
    assert not any(term.tracker.seen.any() for term in terms.values())


# Violations of dual terms.


def test_the_violation_of_a_dual_term_survives_a_nan_that_is_refused_late(monkeypatch):
    monkeypatch.setattr("fcco.rules.arrays.USE_NUMPY", False)  # as on a GPU
    model = Point([1.0])
    latest = fcco.tracker.InnerTracker(1, gamma=1.0, correction=0.0, read="new", dtype=F64)
    term = DualTerm(fcco.outer.Hinge(), latest, dual_step=1.0)
    objective = fcco.Compositional(model, sgd(model), term)
    objective(lambda: model.w)
    objective.close()
    objective(lambda: model.w * torch.nan)
    objective.close()
    assert term.violation().item() == 1.0


# Threads.


def test_two_threads_in_one_objective_are_refused():
    model = Point([1.0])
    objective = fcco.CVaRGroupDRO(model, sgd(model), 1, 1.0)
    inside, leave = threading.Event(), threading.Event()

    def slow() -> Tensor:
        inside.set()
        leave.wait(10)
        return model.w

    first = threading.Thread(target=lambda: objective(slow, [0]).backward())
    first.start()
    inside.wait(10)
    with pytest.raises(RuntimeError, match="another thread"):
        objective(lambda: model.w, [0])
    leave.set()
    first.join()
    objective(lambda: model.w, [0]).backward()  # free again
    with pytest.raises(RuntimeError, match="inside the function"):
        objective(lambda: objective(lambda: model.w, [0])[None], [0])
