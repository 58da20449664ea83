"""The theorems' settings against the proofs they come from; test_tracker_laws has the laws."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import optimize
from theorems import (
    check_inner_loop,
    sonex_bound,
)

from fcco import theory
from fcco.theory import Constants

BASE = Constants(
    num_inner=40,
    blocks=4,
    samples=8,
    outer_lipschitz=2.0,
    inner_lipschitz=1.5,
    inner_smoothness=0.7,
    value_noise=3.0,
    jacobian_noise=0.4,
)


# ------------------------------------------------------------------------------------- constants


def test_derived_constants() -> None:
    c = Constants(10, 2, 4, 2.0, 3.0, 5.0, 1.0, 6.0, outer_weak_convexity=0.5, dim=9)
    assert c.jacobian_moment == 9 + 36 / 4
    assert c.weak_convexity == 3 * 2 * 5 + 0.5 * 9
    assert c.outer_smoothness(0.5) == 2.0  # 1/lambda
    assert c.outer_smoothness(1.5) == pytest.approx(0.5 / 0.25)  # weak convexity takes over
    assert c.smoothness(0.5) == 9 * 2 + 2 * 5
    assert replace(c, inner_weak_convexity=1.0).weak_convexity == 3 * 2 * 1 + 4.5


# ----------------------------------------------------------------------------------------- SONEX


positive = st.floats(0.05, 20.0)
noises = st.one_of(st.just(0.0), st.floats(0.01, 20.0))


@given(
    n=st.integers(1, 200),
    share=st.floats(0, 1),
    samples=st.integers(1, 64),
    sizes=st.tuples(positive, positive, noises, noises, noises),
    eps=st.floats(0.01, 2.0),
    gap=positive,
    scales=st.tuples(positive, st.floats(1.0, 50.0)),
)
@settings(max_examples=80, deadline=None)
@example(  # both bounds on gamma and the one on beta are tight, with gamma near 1/2
    n=4, share=1.0, samples=4, sizes=(1, 1, 1, 0.4535, 0), eps=1.309, gap=20, scales=(1, 1)
)
@example(  # the last bound on the step is the tight one
    n=1, share=1.0, samples=1, sizes=(1, 1, 0, 0.113, 2), eps=1.549, gap=1, scales=(1, 1)
)
@example(  # and here the one of the descent lemma
    n=5, share=1.0, samples=5, sizes=(0.05, 0.05, 0.05, 0, 0), eps=2, gap=1, scales=(1e-5, 1e3)
)
def test_sonex_settings_satisfy_the_proof(
    n: int, share: float, samples: int, sizes: Any, eps: float, gap: float, scales: Any
) -> None:
    blocks = max(1, round(share * n))
    C_f, C_g, L_g, sigma0, sigma1 = sizes
    c = Constants(n, blocks, samples, C_f, C_g, L_g, sigma0, sigma1, 0.4 * C_f / eps)
    low, high = scales[0], scales[0] * scales[1]
    plain = theory.sonex_settings(c, eps, gap)
    assert sonex_bound(c, eps, gap, plain, 1.0, 1.0) <= eps**2 * (1 + 1e-9)
    adam = theory.sonex_settings(c, eps, gap, smallest_scale=low, largest_scale=high)
    assert sonex_bound(c, eps, gap, adam, low, high) <= eps**2 * (1 + 1e-9)


def test_sonex_bound_is_not_wasteful() -> None:
    s = theory.sonex_settings(BASE, 0.1, 1.0)
    assert sonex_bound(BASE, 0.1, 1.0, s, 1.0, 1.0) > 0.1**2 / 2
    with pytest.raises(AssertionError, match="too long"):
        sonex_bound(BASE, 0.1, 1.0, replace(s, lr=3 * s.lr), 1.0, 1.0)


def test_sonex_values() -> None:
    c, eps, gap = BASE, 0.05, 2.0
    s = theory.sonex_settings(c, eps, gap)
    lam = eps / 2.0
    A = (1 / lam) ** 2 * (1.5**2 + 0.4**2 / 8)
    L_F = 1.5**2 / lam + 2.0 * 0.7
    beta = eps**2 * 4 / (24 * 4.0 * (1.5**2 + 0.4**2))
    gamma = eps**2 * 8 / (120 * 9.0 * A)
    P = 40 / (4 * gamma) * (5 * A + 12 * A * gamma**2 * 4 / (beta * 40))
    eta = min(beta / (24**0.5 * L_F), (4 / (96 * 40 * 1.5**2 * P)) ** 0.5)
    U_1 = 9.0 / 8000 + 0.1 * gamma**2 * 9.0 / 8
    T = 4 / eps**2 * (gap / eta + 16.0 * (1.5**2 + 0.4**2 / 8) / beta + P * U_1)
    assert s.smoothing == lam and s.initial_samples == 8000
    assert s.beta == pytest.approx(beta, rel=1e-12)
    assert s.gamma == pytest.approx(gamma, rel=1e-12)
    assert s.correction == pytest.approx(36 / (4 * (1 - gamma)) + 1 - gamma, rel=1e-12)
    assert s.lr == pytest.approx(eta, rel=1e-12)
    assert abs(s.iterations - T) <= 1 + 1e-9 * T
    few = theory.sonex_settings(c, eps, gap, initial_samples=10)
    assert few.iterations - s.iterations == pytest.approx(
        4 / eps**2 * P * 9.0 * (1 / 10 - 1 / 8000), rel=1e-9
    )


# ---------------------------------------------------------------------------------------- ALEXR2


@given(
    n=st.integers(1, 200),
    share=st.floats(0, 1),
    samples=st.integers(1, 64),
    sizes=st.tuples(positive, positive, positive, noises, noises),
    dim=st.integers(1, 4),
    eps=st.floats(0.02, 2.0),
    gap=positive,
    beta=st.floats(0.05, 0.5),
)
@settings(max_examples=80, deadline=None)
def test_alexr2_settings_satisfy_the_proof(
    n: int, share: float, samples: int, sizes: Any, dim: int, eps: float, gap: float, beta: float
) -> None:
    blocks = max(1, round(share * n))
    C_f, C_g = sizes[:2]
    c = Constants(n, blocks, samples, *sizes, dim=dim)
    s = theory.alexr2_settings(c, eps, gap, beta=beta)
    rho = math.sqrt(dim) * C_f * sizes[2]
    mu = 1 / s.nu - rho
    accuracy = mu * s.nu**2 * eps**2 / 36
    rest = s.gamma_hat * blocks / n  # more digits than 1 - theta
    check_inner_loop(c, s.smoothing, s.theta, rest, accuracy)
    # The start's share of the inner error after K steps.
    start = mu * (1 + s.eta * rho) * (s.nu * C_f * C_g) ** 2 / 2 + 2 * 2 * s.smoothing * C_f**2
    assert math.log(start) + s.inner_steps * math.log1p(-rest) <= math.log(accuracy / 2) + 1e-9
    # The outer loop: 3 alpha^3 L^2 / beta^2 <= alpha/4, and the final bound.
    L = max(1 / s.nu, rho / (1 - s.nu * rho))
    assert 3 * s.lr**2 * L**2 / beta**2 <= 0.25 * (1 + 1e-9)
    bound = (2 * gap / s.lr + (2 / beta - 1) * (C_f * C_g) ** 2) / s.rounds
    assert bound + 6 / s.nu**2 * 2 * accuracy / mu <= eps**2 * (1 + 1e-9)


def test_alexr2_values_and_identities() -> None:
    c = replace(BASE, dim=4, inner_weak_convexity=0.5)
    s = theory.alexr2_settings(c, 0.3, 2.0, beta=0.25)
    rho = 2 * 2.0 * 0.5
    assert s.nu == 1 / (4 * rho) and s.smoothing == 0.15
    assert s.gamma_hat == pytest.approx(40 * (1 - s.theta) / 4, rel=1e-6)
    assert s.gamma_hat == pytest.approx(s.dual_step / (1 + s.dual_step), rel=1e-9)
    assert s.dual_step == pytest.approx(theory.dual_step(s.theta, 40, 4), rel=1e-6)
    assert s.eta == pytest.approx((1 - s.theta) / ((4 * s.theta - 1) * rho), rel=1e-6)
    assert s.eta == pytest.approx(theory.inner_step(s.theta, s.nu, rho), rel=1e-6)
    assert s.inner_lr == pytest.approx(s.eta * s.nu / (s.eta + s.nu), rel=1e-12)
    assert s.correction == pytest.approx(s.theta * s.gamma_hat, rel=1e-12)
    assert s.lr == pytest.approx(0.25 * s.nu / (2 * math.sqrt(3)), rel=1e-12)
    eps_ = 3 * rho * s.nu**2 * 0.3**2 / 36
    noise = 6 * 9.0 * 10 / (0.15 * 8) + 4.0 * (0.4**2 / 8 + 1.5**2 / 4 + 4 * 1.5**2) / rho
    assert s.gamma_hat / 10 == pytest.approx(eps_ / (4 * noise), rel=1e-9)
    assert s.rounds == math.ceil(1.5 / 0.09 * (2 * 2.0 / s.lr + (2 / 0.25 - 1) * 9.0))


def test_the_inner_loop_reaches_its_accuracy() -> None:
    """ALEXR with the theorem's theta, eta, gamma and K on absolute values of noisy lines."""
    n, B1, runs, eps = 4, 2, 60, 1.0
    slope, shift = np.array([1.0, -0.5, 0.8, 0.3]), np.array([0.5, 1.0, -0.2, 2.0])
    noise0, noise1, anchor = 0.5, 0.5, -2.0
    c = Constants(n, B1, 4, 1.0, 1.0, 1.0, noise0, noise1)
    s = theory.alexr2_settings(c, eps, 1.0)

    def slope_at(z: float) -> float:
        return float(np.mean(slope * np.clip((slope * z - shift) / s.smoothing, -1, 1)))

    prox: Any = optimize.brentq(lambda z: slope_at(z) + (z - anchor) / s.nu, -9.0, 9.0)
    rng = np.random.default_rng(0)
    z = previous = np.full(runs, anchor)
    y = np.ones((runs, n))
    rows = np.arange(runs)[:, None]
    scale = 1 / math.sqrt(4)
    for _ in range(s.inner_steps):
        chosen = rng.random((runs, n)).argsort(1)[:, :B1]
        value = slope[chosen] * (z + s.theta * (z - previous))[:, None] - shift[chosen]
        value += noise0 * scale * rng.normal(size=value.shape)
        new = (s.smoothing * y[rows, chosen] + s.dual_step * value) / (1 + s.dual_step)
        y[rows, chosen] = np.clip(new / s.smoothing, -1, 1)
        jacobian = slope[chosen] + noise1 * scale * rng.normal(size=value.shape)
        gradient = (jacobian * y[rows, chosen]).mean(1)
        previous, z = z, z - s.inner_lr * (gradient + (z - anchor) / s.nu)
    allowed = s.nu**2 * eps**2 / 18
    assert (anchor - prox) ** 2 > allowed, "the start must not be good enough"
    assert ((z - prox) ** 2).mean() <= allowed


# ------------------------------------------------------------------------------------------ laws


def test_smoothed_bias_on_a_box() -> None:
    """Minimise |w - a|^2 / 2 subject to w_i <= b with the smoothed hinge penalty."""
    m, a, b, penalty, smoothing = 4, 1.0, 0.3, 8.0, 0.02

    def slope(w: float) -> float:  # of one coordinate
        return w - a + np.clip((w - b) / smoothing, 0, penalty) / m

    w: Any = optimize.brentq(slope, b, a)
    assert w - b == pytest.approx(theory.smoothed_bias(smoothing, m, a - w), rel=1e-9)
    first_order = theory.smoothed_bias(smoothing, m, a - b)
    assert w - b == pytest.approx(first_order / (1 + smoothing * m), rel=1e-9)


def test_laws_in_their_limits() -> None:
    law = theory.expected_tracking_error
    at_limit = law(1.0, 5, 5, drift=0.3, value_noise=2.0, samples=2)
    assert at_limit == 4.0 / 2, "all blocks, gamma = 1: the noise of the batch"
    assert law(1.0, 5, 4, drift=0.3, correction=0.0) > 0
    assert theory.penalty_size(14, 2.0, 0.5) > 14 * 3 / 0.5
    assert theory.penalty_size(14, 2.0, 0.5, margin=1e-9) == pytest.approx(84.0)
    rough = replace(BASE, inner_smoothness=math.inf, inner_weak_convexity=1.0)
    assert theory.alexr2_settings(rough, 0.1, 1.0).polish_steps is None


# ---------------------------------------------------------------------------------------- errors

CURVED = replace(BASE, outer_weak_convexity=50.0)
ROUGH = replace(BASE, inner_smoothness=math.inf)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: replace(BASE, blocks=41), r"blocks=\.\.\.\)` must lie in \[1, 40\] but is: 41"),
    (lambda: replace(BASE, samples=0), "samples.*at least 1"),
    (lambda: replace(BASE, inner_lipschitz=0.0), "inner_lipschitz.*positive"),
    (lambda: replace(BASE, value_noise=-1.0), "value_noise.*at least 0"),
    (lambda: replace(BASE, inner_weak_convexity=-1.0), "inner_weak_convexity.*at least 0"),
    (lambda: CURVED.outer_smoothness(0.02), r"smoothing.*below 1/outer_weak_convexity = 0.02"),
    (lambda: theory.sonex_settings(BASE, 0.0, 1.0), r"sonex_settings\(eps=\.\.\.\).*positive"),
    (lambda: theory.sonex_settings(BASE, 0.1, 1.0, smallest_scale=3, largest_scale=2),
     r"sonex_settings\(smallest_scale=\.\.\.\).*\(0, 2\]"),
    (lambda: theory.sonex_settings(CURVED, 0.1, 1.0),
     r"eps.*below outer_lipschitz/outer_weak_convexity = 0.04"),
    (lambda: theory.sonex_settings(ROUGH, 0.1, 1.0), "smooth inner functions"),
    (lambda: theory.sonex_settings(BASE, 0.1, 1.0, initial_samples=0),
     r"sonex_settings\(initial_samples=\.\.\.\).*at least 1"),
    (lambda: theory.alexr2_settings(replace(BASE, outer_weak_convexity=0.1), 0.1, 1.0),
     "convex outer functions"),
    (lambda: theory.alexr2_settings(replace(BASE, inner_weak_convexity=0.0), 0.1, 1.0),
     "positive finite inner_weak_convexity"),
    (lambda: theory.alexr2_settings(ROUGH, 0.1, 1.0), "positive finite inner_weak_convexity"),
    (lambda: theory.alexr2_settings(BASE, 0.1, 1.0, beta=0.6),
     r"alexr2_settings\(beta=\.\.\.\).*\(0, 0.5\] but is: 0.6"),
    (lambda: theory.dual_step(0.75, 8, 2),
     r"theta.*above 1 - blocks/num_inner = 0.75 but is: 0.75"),
    (lambda: theory.inner_step(0.9, 0.5, 2.0),
     r"nu.*below theta/weak_convexity = 0.45 but is: 0.5"),
    (lambda: theory.expected_tracking_error(1.0, 5, 4),
     r"tracking_error\(gamma=\.\.\.\).*below its limit = 1"),
    (lambda: theory.expected_tracking_error(0.5, 5, 6),
     r"tracking_error\(blocks=\.\.\.\).*\[1, 5\]"),
    (lambda: theory.expected_tracking_error(0.0, 5, 4),
     r"tracking_error\(gamma=\.\.\.\).*\(0, 1\]"),
    (lambda: theory.penalty_size(14, 2.0, 0.0), r"penalty_size\(delta=\.\.\.\).*positive"),
])  # fmt: skip
def test_settings_that_no_theorem_allows_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
