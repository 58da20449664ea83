"""Bad input is refused with a message that says why, and nothing is changed by it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from problems import Point

import fcco

T, NAN, INF = torch.tensor, torch.nan, torch.inf


def started(**options) -> fcco.tracker.InnerTracker:
    settings = {"gamma": 0.3, "correction": 0.5, "dtype": torch.float64}
    tracker = fcco.tracker.InnerTracker(4, **(settings | options))
    tracker(T([0.1, 0.2, 0.3], dtype=torch.float64), T([0, 1, 3]))
    return tracker


def unchanged(tracker: fcco.tracker.InnerTracker, state: dict) -> bool:
    now = tracker.state_dict()
    return all(torch.equal(now[k], state[k]) for k in ("value", "seen", "_extra_state"))


AUTO: dict[str, Any] = {"gamma": "auto", "correction": 0.0}


@pytest.mark.parametrize(("options", "word"), [
    ({"num_inner": 0}, "num_inner"), ({"dim": 1.5}, "dim"), ({"gamma": -0.1}, "gamma"),
    ({"gamma": 1.0, "correction": "theory"}, "gamma"), ({"correction": -1.0}, "correction"),
    ({"correction": INF}, "correction"), ({"correction": "best"}, "'theory', 'auto'"),
    ({"gamma": 0.0, "correction": 0.0}, "never moves"), ({"read": "both"}, "'old', 'new'"),
    ({"refresh_every": 0}, "refresh_every"), ({"on_nonfinite": "ignore"}, "'raise', 'skip'"),
    ({"dtype": torch.bfloat16}, "dtype"), (AUTO | {"log_space": True}, "measure=True"),
    ({"gamma": 0.0, "correction": 1.0, "measure": True}, "measure=True"),
    (AUTO | {"correction": 0.5}, "gamma='auto'"),
])  # fmt: skip
def test_constructor_refuses(options, word):
    with pytest.raises(ValueError, match=word):
        fcco.tracker.InnerTracker(**({"num_inner": 3} | options))


@pytest.mark.parametrize("outer, measure, word", [
    (fcco.outer.Hinge(), False, "measure=True"), (fcco.outer.SquaredHinge(), True, "jump"),
])  # fmt: skip
def test_an_automatic_width_needs_an_error_and_a_kink(outer, measure, word):
    tracker = fcco.tracker.InnerTracker(3, gamma=0.5, correction=0.0, measure=measure)
    with pytest.raises(ValueError, match=word):
        fcco.terms.CoupledTerm(outer, tracker, smoothing="auto")


# A call (fresh, index, previous), the exception and its message.
BAD_CALLS = {
    "negative": (T([1.0, 2.0]), T([0, -1]), None, IndexError, r"lie in \[0, 3\] .* -1"),
    "too large": (T([1.0, 2.0]), T([0, 4]), None, IndexError, r"lie in \[0, 3\] .* contains: 4"),
    "float": (T([1.0]), T([1.0]), None, ValueError, r"an integer id of each.*float32"),
    "names": (T([1.0]), ["a"], None, TypeError, r"hold integer ids.* `numpy.unique"),
    "2-d": (T([1.0]), T([[0]]), None, ValueError, r"an integer id of each.*\(1, 1\)"),
    "longer": (T([1.0, 2.0]), T([0]), None, ValueError, r"values .*\(1,\).*\(2,\)"),
    "too few": (T([1.0, 2.0]), None, None, ValueError, r"values .*\(4,\).*\(2,\)"),
    "columns": (torch.ones(2, 2), T([0, 1]), None, ValueError, r"values .*\(2,\).*\(2, 2\)"),
    "past": (T([1.0, 2.0]), T([0, 1]), T([1.0]), ValueError, r"w_{t-1} .*\(2,\).*\(1,\)"),
    "fresh nan": (T([1.0, NAN]), T([0, 2]), None, ValueError, r"NaN.*blocks \[2\]"),
    "fresh inf": (T([INF, 1.0]), T([3, 0]), None, ValueError, r"infinite.*blocks \[3\]"),
    "inf - inf": (T([INF, -INF]), T([0, 1]), None, ValueError, r"blocks \[0, 1\]"),
    "past nan": (T([1.0, 2.0]), T([0, 1]), T([1.0, NAN]), ValueError, r"blocks \[1\]"),
    "past inf": (T([1.0, 2.0]), T([0, 0]), T([-INF, 1.0]), ValueError, r"blocks \[0\]"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_raises_and_changes_no_buffer(name):
    fresh, index, previous, error, message = BAD_CALLS[name]
    tracker = started()
    state = copy.deepcopy(tracker.state_dict())
    with pytest.raises(error, match=message):
        tracker(fresh, index, previous)
    assert unchanged(tracker, state)


@pytest.mark.parametrize("name", ["too large", "fresh nan"])
def test_a_bad_call_in_an_open_step_leaves_the_run_as_it_would_have_been(name):
    fresh, index, _, error, message = BAD_CALLS[name]
    ends = []
    for with_bad in (False, True):
        model = Point(np.array([1.0]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        term = fcco.terms.CoupledTerm(fcco.outer.Hinge(), started(), smoothing=2.0)
        objective = fcco.Compositional(model, optimizer, term)
        for _ in range(3):
            objective(lambda w=model.w: T([0.4, 0.5]) * w, T([1, 3])).backward()
            if with_bad:
                with pytest.raises(error, match=message):
                    objective(lambda w=model.w: fresh * w, index)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(torch.cat([term.tracker.value[:, 0], model.w.detach()]))
        assert term.tracker.steps == 1 + 3  # one call before the objective
    assert torch.equal(*ends)


@pytest.mark.parametrize("bad, where", [(NAN, "fresh"), (-INF, "fresh"), (INF, "previous")])
@pytest.mark.parametrize(
    "options",
    [{"log_space": True}, {"gamma": 1.0}, {"gamma": 0.0}],
    ids=["log space", "gamma 1", "gamma 0"],
)
def test_a_bad_value_is_refused_also_when_u_would_be_finite(options, where, bad):
    """Floored as a logarithm, u does not show what entered it."""
    tracker = started(**options)
    state = copy.deepcopy(tracker.state_dict())
    good, wrong = torch.ones(4), T([1.0, bad, 1.0, 1.0])
    fresh, previous = (wrong, good) if where == "fresh" else (good, wrong)
    for index in (None, torch.arange(4)):
        with pytest.raises(fcco.NonFiniteValue, match=r"blocks \[1\]"):
            tracker(fresh, index, previous)
    assert unchanged(tracker, state)


def test_sums_that_overflow_or_cancel_are_no_reason_for_another_error():
    tracker = fcco.tracker.ema_tracker(2, 0.3, dtype=torch.float64)
    huge, bad = T([1e308, 0.0], dtype=torch.float64), T([INF, 0.0])
    blocks = tracker.blocks()
    tracker.update(tracker.entries(blocks, huge, None, huge.clone()))
    assert torch.equal(tracker.value[:, 0], huge)
    for on_nonfinite in ("raise", "skip"):
        single, large = fcco.tracker.InnerTracker(2, on_nonfinite=on_nonfinite), T([2e38, 3e38])
        single(large, previous=large)
        assert torch.equal(single.value[:, 0], large) and single.skipped == 0
    with pytest.raises(fcco.NonFiniteValue, match="NaN or infinite"):
        tracker.update(tracker.entries(blocks, bad, None, -bad))


@pytest.mark.parametrize("bad, independent", [([1.0, NAN], False), ([INF, -INF], True)])
def test_a_nonfinite_carrier_is_refused(bad, independent):
    """Beside values that are finite; sums of the carrier may overflow, they are not it."""
    tracker, model = started(), Point(np.array([1.0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objective = fcco.Compositional(
        model, optimizer, fcco.terms.CoupledTerm(fcco.outer.Hinge(), tracker)
    )
    state = copy.deepcopy(tracker.state_dict())

    def call(carrier: list[float]) -> torch.Tensor:
        values, factors = T([1.0, 2.0]), T(carrier, dtype=torch.float64)
        if independent:
            return objective(lambda: values, T([0, 1]), gradient=lambda: factors * model.w)
        return objective(lambda: fcco.Measured(values, factors * model.w), T([0, 1]))

    with pytest.raises(fcco.NonFiniteValue, match=r"carry the gradient.*NaN or infinite"):
        call(bad)
    with pytest.raises(ValueError, match=r"carry the gradient must have shape \(2,\)"):
        call([1.0])
    optimizer.step()
    assert unchanged(tracker, state)
    call([1e308, 1e308])
    optimizer.step()
    assert not unchanged(tracker, state)


def test_set_values_refuses_bad_values_and_changes_nothing():
    tracker = started()
    state = copy.deepcopy(tracker.state_dict())
    for index, values, error in (
        (T([2, 0]), T([1.0, NAN]), ValueError),
        (T([2, 4]), T([1.0, 1.0]), IndexError),
        (T([2]), T([1.0, 1.0]), ValueError),
    ):
        with pytest.raises(error):
            tracker.set_values(index, values)
        assert unchanged(tracker, state)


@pytest.mark.parametrize("correction, log_space", [("theory", False), ("auto", True), (0.0, True)])
def test_skip_updates_the_rest_as_if_the_bad_entries_were_not_there(correction, log_space):
    """Bad fresh, previous or surrogate values; block 3 loses one of its samples, block 0 all."""
    settings = {"correction": correction, "log_space": log_space, "dtype": torch.float64}
    ids = T([0, 3, 1, 3, 3, 0, 2])
    fresh = T([NAN, 0.4, 0.5, -INF, 0.7, 0.8, 0.9])
    past = T([0.1, 0.2, 0.3, 0.4, 0.5, INF, 0.6])
    carrier = T([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, NAN], requires_grad=True)
    good = T([1, 2, 4])
    if correction == 0.0:  # the previous values are not used: they need not be good
        fresh[5] = INF
    results = []
    for clean in (True, False):
        tracker = fcco.tracker.InnerTracker(4, gamma=0.3, on_nonfinite="skip", **settings)
        tracker.set_values(None, T([0.1, 0.2, 0.3, 0.4]))
        pick = good if clean else torch.arange(7)
        blocks = tracker.blocks(ids[pick])
        entries = tracker.entries(blocks, fresh[pick], past[pick], carrier[pick])
        tracked = tracker.update(entries)
        (gradient,) = torch.autograd.grad(tracked.carrying_gradient().sum(), carrier)
        results.append((tracker.value, tracker.seen, tracked.value, tracked.index, gradient))
        assert tracker.skipped == (0 if clean else 4)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_skip_drops_bad_entries_of_an_independent_batch_and_blocks_that_have_none_left():
    tracker = fcco.tracker.ema_tracker(5, 0.5, read="new", on_nonfinite="skip", dtype=torch.float64)
    tracker.set_values(None, torch.zeros(5, dtype=torch.float64))
    blocks, other = tracker.blocks(T([1, 2, 3, 3])), tracker.blocks(T([1, 2, 3, 3, 3]))
    fresh = T([2.0, NAN, 6.0, 8.0])
    carrier = T([NAN, 1.0, 1.0, NAN, 1.0], requires_grad=True)
    tracked = tracker.update(tracker.entries(blocks, fresh, None, carrier, other))
    assert tracked.index.tolist() == [3] and tracked.value.tolist() == [3.5]
    assert tracker.value[:, 0].tolist() == [0.0, 0.0, 0.0, 3.5, 0.0] and tracker.skipped == 3
    tracked.carrying_gradient().sum().backward()
    assert carrier.grad is not None and carrier.grad.tolist() == [0.0, 0.0, 0.5, 0.0, 0.5]


@pytest.mark.parametrize("correction, ratio", [("theory", 0.5), ("auto", None), (0.0, 0.5)])
def test_a_batch_without_any_good_entry_gives_loss_zero_or_s_and_no_update(correction, ratio):
    model = Point(np.array([1.0, 2.0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = fcco.tracker.InnerTracker(
        2, gamma=0.3, correction=correction, on_nonfinite="skip", dtype=torch.float64
    )
    if ratio is None:
        term = fcco.terms.CoupledTerm(fcco.outer.Hinge(), tracker, smoothing=1.0)
    else:
        term = fcco.terms.CVaRTerm(tracker, ratio, smoothing=1.0)
    objective = fcco.Compositional(model, optimizer, term)
    for kind in ("bad", "good", "bad"):
        before = tracker.value.clone(), tracker.seen.clone()
        shift = NAN if kind == "bad" else 0.0
        loss = objective(lambda shift=shift: model.w + shift)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind == "bad":
            assert torch.equal(tracker.value, before[0]) and torch.equal(tracker.seen, before[1])
            assert loss.item() == 0 or (ratio is not None and loss.item() == loss.item())
    assert tracker.skipped == 4 and tracker.seen.all()


@pytest.mark.parametrize("bad, where", [(NAN, "fresh"), (INF, "previous")])
def test_on_a_gpu_bad_blocks_keep_their_value_and_the_next_call_raises(bad, where, monkeypatch):
    monkeypatch.setattr("fcco.rules.arrays.USE_NUMPY", False)
    tracker = fcco.tracker.InnerTracker(4, gamma=0.5, correction=0.3)
    tracker(torch.tensor([1.0, 2.0]), torch.tensor([0, 1]))
    fresh = torch.tensor([3.0, 3.0, 3.0], requires_grad=True)
    previous = torch.tensor([2.0, 2.0, 2.0])
    with torch.no_grad():
        (fresh if where == "fresh" else previous)[1:] = bad
    tracker(fresh, torch.tensor([0, 1, 2]), previous)
    assert tracker.value[:, 0].tolist() == pytest.approx([2.3, 2.0, 0.0, 0.0])
    assert tracker.seen.tolist() == [True, True, False, False]
    with pytest.raises(fcco.NonFiniteValue, match=r"blocks \[1, 2\] in an earlier step"):
        tracker(torch.ones(1), torch.tensor([3]))
    tracker(torch.ones(1), torch.tensor([3]))  # said once, then training may go on
    assert tracker.seen.tolist() == [True, True, False, True]
