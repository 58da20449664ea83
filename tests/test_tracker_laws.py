"""Laws of the tracking error, and invariants of the update, measured on the real tracker.

Many blocks in one tracker are as many repetitions: each is sampled with probability p = B1/n,
independently of its past.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import fcco
from fcco.rules.track import Pooled


def expected_error(gamma: float, share: float, correction: float, systematic: bool) -> float:
    """Steady E(u_i - g_i)^2 after an update, exactly, for g_i that moves by `DELTA` in each step.

    A share of the blocks comes in a step. The motion keeps its sign (`systematic`), or each step
    has an independent random one.
    """
    excess = correction - (1 - gamma)  # a of the law
    lag = DELTA * (share * excess - (1 - share)) / (share * gamma) if systematic else 0.0
    motion = DELTA**2 * (share * excess**2 + 1 - share)
    motion += 2 * DELTA * lag * (share * (1 - gamma) * excess - (1 - share))
    return motion / (share * gamma * (2 - gamma))


def steady_error(
    tracker: fcco.tracker.InnerTracker,
    blocks: int,
    motion: Callable[[np.random.Generator], np.ndarray],
    steps: int,
    burn_in: int,
    seed: int = 0,
) -> float:
    """Mean of (u - g)^2 over blocks and steps; g moves by `motion` without noise."""
    rng, n = np.random.default_rng(seed), tracker.num_inner
    g = np.zeros(n)
    tracker.set_values(None, torch.as_tensor(g))
    errors = []
    for step in range(steps):
        last, g = g, g + motion(rng)
        chosen = rng.permutation(n)[:blocks]
        tracker(torch.as_tensor(g[chosen]), torch.as_tensor(chosen), torch.as_tensor(last[chosen]))
        if step >= burn_in:
            errors.append(np.mean((tracker.value[:, 0].numpy() - g) ** 2))
    return float(np.mean(errors))


N, DELTA = 2000, 0.1
SIGNS = np.where(np.arange(N) % 2, -DELTA, DELTA)
MOTIONS = {
    "systematic": lambda rng: SIGNS,
    "random": lambda rng: rng.choice([-DELTA, DELTA], N),
    "all at once": lambda rng: rng.choice([-DELTA, DELTA]) * np.ones(N),
}


LAWS = [
    ("theory", "systematic", 0.2, 0.3), ("theory", "random", 0.5, 0.1),
    ("theory", "all at once", 0.2, 0.3), ("auto", "systematic", 0.5, 0.3),
    ("auto", "random", 0.5, 0.3), ("auto", "random", 1.0, 0.2), (0.0, "systematic", 0.5, 0.16),
    (0.0, "random", 0.5, 0.16),
]  # fmt: skip


@pytest.mark.parametrize(("correction", "pattern", "p", "gamma"), LAWS)
def test_the_error_of_moving_values_is_that_of_the_law(correction, pattern, p, gamma):
    blocks = int(p * N)
    tracker = fcco.tracker.InnerTracker(N, gamma=gamma, correction=correction, dtype=torch.float64)
    weight = {"auto": (1 - gamma) * p, "theory": (1 - p) / (p * (1 - gamma)) + 1 - gamma}
    law = expected_error(gamma, p, weight.get(correction, correction), pattern == "systematic")
    found = steady_error(tracker, blocks, MOTIONS[pattern], steps=400, burn_in=150)
    assert found == pytest.approx(law, rel=0.05, abs=1e-24)


@pytest.mark.parametrize(("gamma", "samples"), [(0.1, 1), (0.8, 2)])
def test_noise_at_a_fixed_point_is_damped_by_gamma_and_the_batch(gamma, samples):
    """sigma^2 gamma / (2 - gamma) / B2, with samples given as repeated ids, in float32."""
    n, sigma = 4000, 0.7
    rng = np.random.default_rng(0)
    tracker = fcco.tracker.InnerTracker(n, gamma=gamma)
    tracker.set_values(None, torch.full((n,), 2.0))
    ids, errors = torch.arange(n).repeat(samples), []
    for step in range(90):
        noisy = torch.as_tensor(2 + sigma * rng.normal(size=n * samples))
        tracker(noisy, ids, noisy)
        if step >= 40:
            errors.append((tracker.value.double() - 2).square().mean().item())
    law = sigma**2 * gamma / (2 - gamma) / samples
    assert np.mean(errors) == pytest.approx(law, rel=0.05)


@pytest.mark.parametrize(("size", "steps"), [(8000, 3), (8000, 12), (2000, 40)])
@pytest.mark.parametrize("gamma", ["auto", 0.3, 1.0])
def test_the_error_of_noisy_values_that_drift_is_known_from_few_visits(gamma, size, steps):
    """Blocks come at each step or at random, while gamma falls; noise and drift are normal."""
    noise, drift, number = 1.0, 0.5, 8000
    tracker = fcco.tracker.InnerTracker(
        number, gamma=gamma, correction=0.0, measure=True, dtype=torch.float64
    )
    rng, g = np.random.default_rng(0), np.zeros(number)
    for _ in range(steps):
        g = g + drift * np.sqrt(size / number) * rng.normal(size=number)
        chosen = rng.permutation(number)[:size]
        tracker(torch.as_tensor(g[chosen] + noise * rng.normal(size=size)), torch.as_tensor(chosen))
    error, estimate = tracker.rows.numpy() - g, tracker.estimate
    assert estimate is not None
    seen = estimate.visits > 0  # a few start anew: their first value fits an outlier
    known = seen.numpy()
    true = np.mean(error[known] ** 2)
    since = estimate.of_drift[seen].mean() + 1 - size / number  # drift since the last visit
    law = noise**2 * estimate.of_noise[seen].mean() + drift**2 * since
    assert law.item() == pytest.approx(true, rel=0.05)
    said = tracker.error().numpy()
    assert np.isnan(said).sum() == (~known).sum()
    off = abs(error / said)[known]
    tolerance = 0.2 if gamma == 1.0 else 0.1  # all is noise then
    assert np.mean(said[known] ** 2) == pytest.approx(true, rel=tolerance)
    assert np.mean(off < 1) == pytest.approx(0.683, abs=0.06)
    assert 0.92 <= np.mean(off < 2) <= 0.98


@pytest.mark.parametrize("kappa", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("gamma", ["auto", 0.3])
def test_the_error_of_noise_that_makes_up_for_the_last(gamma, kappa):
    """As with passes over few samples: successive values have the correlation -kappa."""
    number, drift, rng = 4000, 0.3, np.random.default_rng(1)
    theta = (1 - np.sqrt(1 - 4 * kappa**2)) / (2 * kappa) if kappa else 0.0
    tracker = fcco.tracker.InnerTracker(
        number, gamma=gamma, correction=0.0, measure=True, dtype=torch.float64
    )
    g, last = np.zeros(number), rng.normal(size=number)
    for _ in range(60):
        g, now = g + drift * rng.normal(size=number), rng.normal(size=number)
        tracker(torch.as_tensor(g + (now - theta * last) / np.sqrt(1 + theta**2)))
        last = now
    assert tracker.estimate is not None
    known = Pooled(*tracker.estimate.pooled.tolist()).noise_and_drift()
    assert known == pytest.approx((1.0, drift**2, kappa), rel=0.15, abs=0.03)
    off = abs(tracker.rows.numpy() - g) / tracker.error().numpy()
    assert np.mean(off < 1) == pytest.approx(0.683, abs=0.03)
    assert np.mean(off < 2) == pytest.approx(0.954, abs=0.02)
