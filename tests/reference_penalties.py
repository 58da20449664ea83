"""Li et al. 2024, Yang et al. 2025, Liu and Xu 2025, transcribed line by line in NumPy float64.

Nothing here imports fcco or torch: these are the independent oracle. The problem has constraints
h_k(w) <= tolerance_k given by samples, and the loss g0(w) = |w - m|^2 / 2.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from reference import Quadratics

Array = np.ndarray
Update = Callable[[Array, Array], Array]


def li2024(
    problem: Quadratics,
    w: Array,
    steps: int,
    update: Update,
    *,
    rho: float,
    gamma: float,
    read: str,
    tolerance: Array,
    margin: float = 0.0,
) -> tuple[Array, Array]:
    """Squared hinge with moving averages; the iterates and the final u."""
    rng = np.random.default_rng(1)
    m = problem.num_inner
    u = np.full(m, np.nan)
    path = []
    for _ in range(steps):
        sampled = problem.draw(rng)
        G = np.zeros_like(w)
        for k, batch, _ in sampled:
            h = problem.value(w, k, batch)[0]
            if np.isnan(u[k]):
                before = after = h
            else:
                before, after = u[k], (1 - gamma) * u[k] + gamma * h
            u[k] = after
            excess = (after if read == "new" else before) - tolerance[k] + margin
            G += rho * max(excess, 0.0) * problem.jacobian(w, k, batch)[0]
        G = w - problem.m + G / len(sampled)
        w = update(w, G)
        path.append(w.copy())
    return np.array(path), u


def yang2025(
    problem: Quadratics,
    w: Array,
    steps: int,
    lr: float,
    *,
    rho: float,
    gamma: float,
    correction: float,
    tolerance: Array,
    margin: float = 0.0,
) -> tuple[Array, Array]:
    """Hinge with SONX; the iterates and the final u."""
    rng = np.random.default_rng(1)
    m = problem.num_inner
    u = np.full(m, np.nan)
    w_prev = w.copy()
    path = []
    for _ in range(steps):
        sampled = problem.draw(rng)
        G = np.zeros_like(w)
        for k, batch, _ in sampled:
            h, h_prev = problem.value(w, k, batch)[0], problem.value(w_prev, k, batch)[0]
            if np.isnan(u[k]):
                u[k] = before = h
            else:
                before = u[k]
                u[k] = (1 - gamma) * u[k] + gamma * h + correction * (h - h_prev)
            if before - tolerance[k] + margin > 0:
                G += rho * problem.jacobian(w, k, batch)[0]
        G = w - problem.m + G / len(sampled)
        w_prev, w = w, w - lr * G
        path.append(w.copy())
    return np.array(path), u


def liu2025(
    problem: Quadratics,
    w: Array,
    steps: int,
    lr: float,
    *,
    beta: float,
    width: float,
    refresh_every: int,
    large: int,
    small: int,
    independent: bool,
    tolerance: Array,
    margin: float = 0.0,
) -> tuple[Array, Array]:
    """SPIDER estimates of all constraints; `width` is nu_s. The iterates and all u."""
    rng = np.random.default_rng(1)
    m = problem.num_inner
    u = np.zeros(m)
    w_prev = w.copy()
    path, history = [], []
    for k in range(steps):
        refresh = k % refresh_every == 0
        sampled = problem.draw(rng, m, large if refresh else small)
        for i, batch, _ in sampled:
            g = problem.value(w, i, batch)[0]
            u[i] = g if refresh else u[i] + g - problem.value(w_prev, i, batch)[0]
        excess = u - tolerance + margin
        y = (beta / m) * (np.clip(excess / width, 0, 1) if width else excess > 0)
        G = w - problem.m
        for i, batch, other in sampled:
            G = G + y[i] * problem.jacobian(w, i, other if independent else batch)[0]
        w_prev, w = w, w - lr * G
        path.append(w.copy())
        history.append(u.copy())
    return np.array(path), np.array(history)
