"""The tracker equals what is computed by hand in NumPy."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest
import torch

import fcco
from fcco.tracker import for_model, log_track, theory_correction, track, value_of

OLD = np.array([[1.0, -0.4], [-2.0, 0.3], [7.0, 0.9]])
SEEN = np.array([[True], [True], [False]])
FRESH = np.array([[0.5, 0.8], [-1.0, -0.6], [3.0, 0.2]])
PREVIOUS = np.array([[0.2, 0.9], [-1.3, -0.1], [9.0, 0.4]])


def by_hand(old, seen, fresh, previous, gamma, correction):
    after = (1 - gamma) * old + gamma * fresh
    if previous is not None:
        after = after + correction * (fresh - previous)
    return np.where(seen, old, fresh), np.where(seen, after, fresh)


def in_logs(old, seen, fresh, previous, gamma, correction):
    """The same on exp, with the floor of a thousandth of the uncorrected average."""
    past = None if previous is None else np.exp(previous)
    before, after = by_hand(np.exp(old), seen, np.exp(fresh), past, gamma, correction)
    average = by_hand(np.exp(old), seen, np.exp(fresh), None, gamma, 0.0)[1]
    return np.log(before), np.log(np.maximum(after, 1e-3 * average))


def as_tensors(*arrays):
    return [None if a is None else torch.as_tensor(a) for a in arrays]


RULES = [(track, by_hand), (log_track, in_logs)]
WEIGHTS = [(0.3, 0.4), (0.8, 2.5), (1.0, 0.0), (0.0, 1.0)]


@pytest.mark.parametrize(("rule", "hand"), RULES)
@pytest.mark.parametrize("previous", [None, PREVIOUS])
@pytest.mark.parametrize("number", [float, torch.tensor])
@pytest.mark.parametrize("compiled", [False, True])
def test_pure_updates_equal_the_formula(rule, hand, previous, number, compiled):
    if compiled:
        torch.compiler.reset()
        run = torch.compile(rule, fullgraph=True, backend="eager")
    else:
        run = rule
    for weights in WEIGHTS:
        found = run(*as_tensors(OLD, SEEN, FRESH, previous), *map(number, weights))
        expected = hand(OLD, SEEN, FRESH, previous, *weights)
        np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-12)
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("rule", "hand"), RULES)
def test_pure_updates_run_under_vmap_over_settings_and_over_tables(rule, hand):
    gammas, corrections = torch.tensor(WEIGHTS, dtype=torch.float64).T
    tensors = as_tensors(OLD, SEEN, FRESH, PREVIOUS)
    many = torch.func.vmap(lambda g, c: rule(*tensors, g, c)[1])(gammas, corrections)
    tables = torch.stack([tensors[0], 2 * tensors[0]])
    both = torch.func.vmap(lambda old: rule(old, *tensors[1:], 0.3, 0.4)[1])(tables)
    for found, weights in zip(many, WEIGHTS, strict=True):
        np.testing.assert_allclose(found, hand(OLD, SEEN, FRESH, PREVIOUS, *weights)[1], atol=1e-12)
    for found, factor in zip(both, (1, 2), strict=True):
        expected = hand(factor * OLD, SEEN, FRESH, PREVIOUS, 0.3, 0.4)[1]
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_gamma_one_gives_the_fresh_value_to_the_last_bit():
    """Also when the old value is so large that a difference would swallow the fresh one."""
    fresh = torch.tensor([[0.001], [-3e-5]])
    for rule, old in ((track, [[1e8], [-3e6]]), (log_track, [[500.0], [-500.0]])):
        _, after = rule(torch.tensor(old), torch.tensor([[True], [True]]), fresh, None, 1.0, 0.0)
        assert torch.equal(after, fresh), rule


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_value_of_has_the_exact_value_and_the_other_gradient(dtype):
    u = torch.tensor([0.001, -1e-3, 5.0], dtype=dtype, requires_grad=True)
    g = torch.tensor([1e5, -3e7, 1.0], dtype=dtype, requires_grad=True)
    pulled = torch.compile(value_of, fullgraph=True, backend="eager")
    for function in (value_of, torch.func.vmap(value_of), pulled):
        found = function(u.detach(), g)
        assert torch.equal(found, u)
        (gradient,) = torch.autograd.grad((found**2).sum(), g)
        assert torch.equal(gradient, 2 * u.detach())


def test_the_loss_keeps_its_value_when_g_is_much_larger_than_u():
    """u - g + g would lose u: relative error 1 in float32."""
    tracker = fcco.msvr(2, 0.0, 1.0)
    tracker.set_values(None, torch.tensor([0.001, 0.003]))
    g = torch.tensor([1e6, -3e6], requires_grad=True)
    term = fcco.CoupledTerm(fcco.Absolute(2.0), tracker, smoothing=0.5)
    loss = term.loss(tracker.update(g, tracker.layout(None), g.detach()))
    np.testing.assert_allclose(loss.item(), (0.001**2 + 0.003**2) / (2 * 0.5) / 2, rtol=1e-6)
    loss.backward()
    np.testing.assert_allclose(g.grad, np.array([0.001, 0.003]) / 0.5 / 2, rtol=1e-6)


def test_a_first_visit_takes_the_fresh_value_without_correction():
    tracker = fcco.msvr(4, 0.3, 2.0, dtype=torch.float64)
    index, fresh = torch.tensor([2, 0]), torch.tensor([1.7, -0.3], dtype=torch.float64)
    read = tracker(fresh, index, previous=fresh - 5)
    assert torch.equal(read, fresh.flip(0)) and torch.equal(tracker.value[index, 0], fresh)
    assert tracker.seen.tolist() == [True, False, True, False]
    read = tracker(fresh + 1, index, previous=fresh - 5)
    np.testing.assert_allclose(read, fresh.flip(0))
    np.testing.assert_allclose(tracker.value[index, 0], fresh + 0.3 + 2 * 6)


@pytest.mark.parametrize("read", ["old", "new"])
@pytest.mark.parametrize("as_counts", [False, True])
def test_repeated_ids_are_samples_of_one_block_and_others_stay_bitwise(read, as_counts):
    """Means over unequal counts; the gradient of a block is the mean over its samples."""
    rng = np.random.default_rng(0)
    start, n = rng.normal(size=(9, 2)), 9
    tracker = fcco.InnerTracker(n, 2, gamma=0.3, correction=0.7, read=read, dtype=torch.float64)
    tracker.set_values(torch.arange(8), torch.as_tensor(start[:8]))  # block 8 is new
    before = tracker.value.clone()
    ids = np.array([5, 1, 5, 8, 5, 1])
    fresh, past, slope = (rng.normal(size=(k, 2)) for k in (6, 6, 3))
    blocks = np.array([1, 5, 8])
    mean = lambda x: np.stack([x[ids == b].mean(0) for b in blocks])  # noqa: E731
    old, new = by_hand(
        start[blocks], (blocks < 8)[:, None], mean(fresh), mean(past), 0.3, 0.7
    )
    if as_counts:
        g = torch.as_tensor(mean(fresh)).requires_grad_()
        found = tracker(
            g, torch.as_tensor(blocks), torch.as_tensor(mean(past)), counts=torch.tensor([2, 3, 1])
        )
        expected = slope
    else:
        g = torch.as_tensor(fresh).requires_grad_()
        found = tracker(g, torch.as_tensor(ids), torch.as_tensor(past))
        expected = (slope / np.array([[2], [3], [1]]))[np.searchsorted(blocks, ids)]
    np.testing.assert_allclose(found.detach(), old if read == "old" else new, atol=1e-14)
    np.testing.assert_allclose(tracker.value[torch.as_tensor(blocks)], new, atol=1e-14)
    untouched = torch.tensor([0, 2, 3, 4, 6, 7])
    assert torch.equal(tracker.value[untouched], before[untouched])
    assert tracker.seen.all() and tracker.steps == 1
    (found * torch.as_tensor(slope)).sum().backward()
    np.testing.assert_allclose(g.grad, expected, atol=1e-14)


@pytest.mark.parametrize("log_space", [False, True])
def test_counts_weigh_entries_like_that_many_samples(log_space):
    """Entries of one block that are means of 3, 1 and 2 samples, against the samples themselves."""
    ids, counts = torch.tensor([0, 2, 0, 1]), torch.tensor([3, 2, 1, 4])
    values = torch.tensor([0.3, -1.0, 0.9, 0.5], dtype=torch.float64)
    results = []
    for repeated in (False, True):
        tracker = fcco.ema(3, 0.4, read="new", log_space=log_space, dtype=torch.float64)
        tracker.set_values(None, torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64))
        g = values.clone().requires_grad_()
        entries = g.repeat_interleave(counts) if repeated else g
        where = ids.repeat_interleave(counts) if repeated else ids
        u = tracker(entries, where, counts=None if repeated else counts)
        (u * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
        results.append((tracker.value, g.grad))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-14)


def test_a_measured_value_is_tracked_and_its_surrogate_carries_the_gradient():
    tracker = fcco.ema(3, 0.25, dtype=torch.float64)
    tracker.set_values(None, torch.tensor([0.2, 0.4, 0.8], dtype=torch.float64))
    right = torch.tensor([True, False, True, True])  # 0/1, without gradient
    surrogate = torch.tensor([9.0, 8.0, 7.0, 6.0], requires_grad=True)
    where = tracker.layout(torch.tensor([2, 2, 0, 2]))
    tracked = tracker.update(right, where, carrier=surrogate)
    np.testing.assert_allclose(tracked.value, [0.2, 0.8])
    np.testing.assert_allclose(tracker.value[:, 0], [0.2 * 0.75 + 0.25, 0.4, 0.6 + 0.25 * 2 / 3])
    (tracked.carrying_gradient() * torch.tensor([3.0, 6.0])).sum().backward()
    np.testing.assert_allclose(surrogate.grad, [2.0, 2.0, 3.0, 2.0])


def test_an_independent_carrier_batch_may_have_another_layout_but_not_other_blocks():
    tracker = fcco.ema(5, 0.5, read="new", dtype=torch.float64)
    tracker.set_values(None, torch.zeros(5, dtype=torch.float64))
    where = tracker.layout(torch.tensor([4, 1, 1]))
    values = torch.tensor([2.0, 1.0, 5.0])
    carrier = torch.tensor([7.0, 8.0, 9.0, 10.0], requires_grad=True)
    tracked = tracker.update(
        values, where, carrier=carrier, carrier_where=tracker.layout(torch.tensor([1, 4, 4, 4]))
    )
    np.testing.assert_allclose(tracked.value, [1.5, 1.0])
    tracked.attach(torch.tensor(0.0), torch.tensor([1.0, 6.0], dtype=torch.float64)).backward()
    np.testing.assert_allclose(carrier.grad, [1.0, 2.0, 2.0, 2.0])
    kept = tracker.value.clone()
    for other in ([1, 1, 1, 1], [1, 4, 3, 3], [1, 2, 2, 2]):
        with pytest.raises(ValueError, match="same blocks as the value batch"):
            tracker.update(
                values, where, carrier=carrier, carrier_where=tracker.layout(torch.tensor(other))
            )
    assert torch.equal(tracker.value, kept) and tracker.steps == 1


def test_entries_need_not_be_contiguous():
    tracker = fcco.InnerTracker(3, 2, gamma=0.5, dtype=torch.float64)
    g = torch.arange(6.0, dtype=torch.float64).reshape(2, 3).requires_grad_()
    tracked = tracker.update(g.T, tracker.layout(None))
    tracked.attach(torch.tensor(0.0), torch.ones(2, 3, dtype=torch.float64).T).backward()
    assert g.grad is not None and torch.equal(g.grad, torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("correction", [0.0, 0.2, "auto"])
def test_log_space_equals_tracking_the_exponentials(correction):
    """With repeated ids; the gradient of log u is that of g over u."""
    rng = np.random.default_rng(1)
    make = lambda log: fcco.InnerTracker(  # noqa: E731
        6, gamma=0.3, correction=correction, log_space=log, dtype=torch.float64
    )
    logs, plain = make(True), make(False)
    level, last = rng.normal(size=6), None
    for _ in range(60):
        last, level = level, level + 0.1 * rng.normal(size=6)
        ids = np.sort(rng.choice(6, 4))
        noise = 0.2 * rng.normal(size=4)
        fresh, past = level[ids] + noise, last[ids] + noise
        a, b = torch.as_tensor(fresh).requires_grad_(), torch.as_tensor(fresh).requires_grad_()
        index = torch.as_tensor(ids)
        nu = logs(a, index, torch.as_tensor(past))
        u = plain(b.exp(), index, torch.as_tensor(np.exp(past)))
        np.testing.assert_allclose(nu.detach().exp(), u.detach(), rtol=1e-10)
        nu.square().sum().backward()
        u.log().square().sum().backward()
        np.testing.assert_allclose(a.grad, b.grad, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(logs.value.exp(), plain.value, rtol=1e-10)


@pytest.mark.parametrize("gamma", [0.1, 0.9, 1.0, 0.0])
@pytest.mark.parametrize("sequence", [(500, -500, 500), (-500, 500, -500), (-500, -499, 498)])
def test_log_space_survives_values_whose_exponential_overflows(gamma, sequence):
    """float32 holds exp(88); the hand computation in float64 holds exp(709)."""
    correction = 1.0 if gamma == 0 else 0.0 if gamma == 1 else 0.5
    tracker = fcco.InnerTracker(1, gamma=gamma, correction=correction, log_space=True)
    u = np.array([[float(sequence[0])]])
    tracker.set_values(None, torch.tensor([u.item()]))
    for now, then in zip(sequence[1:], sequence[:-1], strict=True):
        fresh, past = np.array([[float(now)]]), np.array([[float(then)]])
        u = in_logs(u, np.array([[True]]), fresh, past, gamma, correction)[1]
        g = torch.tensor([float(now)], requires_grad=True)
        read = tracker(g, previous=torch.tensor([float(then)]))
        read.sum().backward()
        assert torch.isfinite(read).all() and g.grad is not None and torch.isfinite(g.grad).all()
        np.testing.assert_allclose(tracker.value, u, rtol=1e-4)


def test_bounds_hold_for_every_u_that_is_stored_or_read():
    tracker = fcco.InnerTracker(3, gamma=0.5, correction=3.0, bounds=(0.5, 2.0))
    assert tracker(torch.tensor([-1.0, 9.0, 1.0])).tolist() == [0.5, 2.0, 1.0]
    assert tracker.value[:, 0].tolist() == [0.5, 2.0, 1.0]
    far = torch.tensor([9.0, -9.0, 1.5])
    assert tracker(far, previous=-far).tolist() == [0.5, 2.0, 1.0]
    assert tracker.value[:, 0].tolist() == [2.0, 0.5, 2.0]
    tracker.set_values(torch.tensor([1]), torch.tensor([7.0]))
    assert tracker.value[1].item() == 2.0


def test_spider_follows_its_recursion_and_refreshes():
    rng = np.random.default_rng(2)
    tracker = fcco.spider(5, refresh_every=4, dtype=torch.float64)
    u, due = np.zeros(5), []
    for step in range(12):
        fresh, past = rng.normal(size=(2, 5))
        u = fresh if step % 4 == 0 else u + fresh - past
        due.append(tracker.refresh_due)
        read = tracker(torch.as_tensor(fresh), previous=torch.as_tensor(past))
        np.testing.assert_allclose(read, u, atol=1e-14)
    assert due == [step % 4 == 0 for step in range(12)]


def test_spider_does_not_drift_while_w_stands_still():
    tracker = fcco.spider(4, refresh_every=10**6)
    tracker(torch.randn(4, generator=torch.Generator().manual_seed(0)))
    start, generator = tracker.value.clone(), torch.Generator().manual_seed(1)
    for _ in range(300):
        noisy = 3 * torch.randn(4, generator=generator)
        tracker(noisy, previous=noisy)
    assert torch.equal(tracker.value, start)


def test_correction_weights_are_the_documented_numbers_of_distinct_blocks():
    n, gamma, b = 30, 0.1, 8
    theory = (n - b) / (b * (1 - gamma)) + 1 - gamma
    assert theory_correction(gamma, n, b) == pytest.approx(theory, rel=1e-12)
    for correction, expected in (("auto", 0.9 * b / n), ("theory", theory), (0.05, 0.05)):
        tracker = fcco.msvr(n, gamma, correction, dtype=torch.float64)
        assert tracker.correction_weight(b) == pytest.approx(expected, rel=1e-12)
        tracker.set_values(None, torch.zeros(n, dtype=torch.float64))
        ids = torch.arange(b).repeat(3)  # 8 blocks, 24 entries
        zero = torch.zeros(24, dtype=torch.float64)
        tracker(zero, ids, previous=zero - 1)
        np.testing.assert_allclose(tracker.value[:b, 0], expected, rtol=1e-12)
    assert fcco.msvr(n, gamma, "theory").correction_weight(n) == pytest.approx(1 - gamma)


def test_named_settings_are_what_the_table_says():
    summary = lambda t: (t.gamma, t.correction, t.read, t.needs_previous)  # noqa: E731
    assert summary(fcco.ema(3, 0.2)) == (0.2, 0.0, "old", False)
    assert summary(fcco.msvr(3, 0.2)) == (0.2, "auto", "old", True)
    assert summary(fcco.alexr(3, 0.8, 0.25)) == (0.8, 0.2, "new", True)
    assert summary(fcco.spider(3, 5)) == (0.0, 1.0, "new", True)
    assert not fcco.msvr(3, gamma=1.0).needs_previous
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert for_model(torch.nn.Linear(1, 1, dtype=dtype), 3).value.dtype == expected


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode"])
def test_evaluation_returns_fresh_means_and_changes_nothing(how):
    tracker = fcco.msvr(3, 0.3, on_nonfinite="skip")
    tracker(torch.tensor([1.0, 2.0]), torch.tensor([0, 1]))
    kept = (tracker.value.clone(), tracker.seen.clone(), tracker.steps, tracker.skipped)
    index = torch.tensor([1, 2, 2, 0])
    g = torch.tensor([1.0, 3.0, 4.0, torch.nan], requires_grad=True)
    if how == "eval":
        tracker.eval()
        u = tracker(g, index, previous=g - 1)
        u.sum().backward()
        np.testing.assert_allclose(g.grad, [1.0, 0.5, 0.5, 0.0])
    else:
        with torch.no_grad() if how == "no_grad" else torch.inference_mode():
            u = tracker(g, index, previous=g - 1)
    assert u.tolist() == [1.0, 3.5]
    assert torch.equal(tracker.value, kept[0]) and torch.equal(tracker.seen, kept[1])
    assert (tracker.steps, tracker.skipped) == kept[2:]


@pytest.mark.parametrize(
    "narrow", [lambda t: t.half(), lambda t: t.to(torch.bfloat16), lambda t: t.float()]
)
def test_u_is_never_narrowed_but_widens_and_moves(narrow):
    start = torch.tensor([1.0001, 2.0003, 1e-9], dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        inside = torch.nn.Sequential(torch.nn.Linear(1, 1), fcco.ema(3, 0.1, dtype=dtype))
        inside[1].set_values(None, start)
        kept = inside[1].value.clone()
        narrow(inside)
        assert inside[1].value.dtype == dtype and torch.equal(inside[1].value, kept)
        inside.double()
        assert inside[1].value.dtype == torch.float64 and inside[1].seen.dtype == torch.bool
        assert torch.equal(inside[1].value, kept.double())
        moved = inside.to("meta", torch.bfloat16)[1]
        assert moved.value.device.type == moved.seen.device.type == "meta"
        assert moved.value.dtype == torch.float64


def test_a_bfloat16_model_still_makes_small_tracking_steps():
    tracker = fcco.ema(1, 0.001).to(torch.bfloat16)
    tracker(torch.tensor([1.0], dtype=torch.bfloat16))
    for _ in range(100):
        tracker(torch.tensor([2.0], dtype=torch.bfloat16))
    np.testing.assert_allclose(tracker.value.item(), 2 - 0.999**100, rtol=1e-5)


def test_ten_million_blocks_cost_five_bytes_each_and_build_at_once():
    start = time.perf_counter()
    tracker = fcco.ema(10**7, 0.1)
    assert time.perf_counter() - start < 0.5
    assert sum(b.untyped_storage().nbytes() for b in tracker.buffers()) == 5 * 10**7
    tracker(torch.tensor([1.0, 2.0]), torch.tensor([3, 10**7 - 1]))
    assert tracker.value[10**7 - 1].item() == 2.0


def test_state_dict_round_trip_with_weights_only():
    tracker = fcco.msvr(4, 0.3, refresh_every=3, on_nonfinite="skip")
    for _ in range(2):
        tracker(torch.tensor([1.5, torch.nan]), torch.tensor([2, 0]))
    file = io.BytesIO()
    torch.save(tracker.state_dict(), file)
    file.seek(0)
    other = fcco.msvr(4, 0.3, refresh_every=3, on_nonfinite="skip")
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.value, tracker.value) and torch.equal(other.seen, tracker.seen)
    assert (other.steps, other.skipped) == (tracker.steps, tracker.skipped) == (2, 2)
    assert not other.refresh_due
