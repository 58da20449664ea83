"""OOA and ALEXR, transcribed line by line in NumPy float64.

Nothing here imports fcco or torch: these are the independent oracle.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from reference import Array, Quadratics

Update = Callable[[Array, Array], Array]


def kl_capped(q: Array, cap: float) -> Array:
    """min(cap, c q) with c from the smallest consistent number m of capped entries."""
    order = np.argsort(-q)
    for m in range(len(q)):
        left = max(1 - m * cap, 0.0)
        c = left / q[order[m:]].sum()
        if c * q[order[m]] <= cap * (1 + 1e-15):
            return np.minimum(cap, c * q)
    return np.full(len(q), cap)


def euclidean_capped(v: Array, cap: float) -> Array:
    """clip(v - t, 0, cap) with sum 1: bisection until the middle is one of the ends."""
    low, high = v.min() - cap - 1, v.max()
    while low < (t := (low + high) / 2) < high:
        if np.clip(v - t, 0, cap).sum() > 1:
            low = t
        else:
            high = t
    return np.clip(v - high, 0, cap)


def ooa(
    problem: Quadratics,
    w0: Array,
    steps: int,
    update: Update,
    *,
    step: float,
    cap: float,
    geometry: str = "kl",
    scaling: str = "unbiased",
    with_g0: bool = False,
    gamma: float = 1.0,
    offset: float | None = None,
) -> tuple[Array, Array, Array]:
    """Mirror ascent on p, then descent on w; returns iterates, weights and losses of each step."""
    rng = np.random.default_rng(1)
    n = problem.num_inner
    w, p = w0.copy(), np.full(n, 1 / n)
    average: dict[int, float] = {}
    path, weights, losses = [], [], []
    for _ in range(steps):
        sampled = problem.draw(rng)
        factor = n / len(sampled) if scaling == "unbiased" else 1.0
        estimate = np.zeros(n)
        for i, batch, _ in sampled:
            fresh: float = problem.value(w, i, batch)[0]
            average[i] = (1 - gamma) * average.get(i, fresh) + gamma * fresh
            estimate[i] = factor * average[i]
        ascent = step * estimate if offset is None else step * estimate / (p + offset)
        if geometry == "kl":
            p = kl_capped(np.maximum(p, 1e-12) * np.exp(ascent), cap)
        else:
            p = euclidean_capped(p + ascent, cap)
        G = np.zeros_like(w)
        for i, batch, _ in sampled:
            G += factor * p[i] * problem.jacobian(w, i, batch)[0]
        if with_g0:
            G += w - problem.m
        w = update(w, G)
        path.append(w.copy())
        weights.append(p.copy())
        losses.append(p @ estimate)
    return np.array(path), np.array(weights), np.array(losses)


# prox_{alpha f*} of some conjugates, written by hand.

ConjugateProx = Callable[[Array, float], Array]


def hinge_dual(rho: float) -> ConjugateProx:
    """f = rho [u]_+: f* is 0 on [0, rho]."""
    return lambda z, alpha: np.clip(z, 0, rho)


def absolute_dual(rho: float) -> ConjugateProx:
    """f = rho |u|: f* is 0 on [-rho, rho]."""
    return lambda z, alpha: np.clip(z, -rho, rho)


def squared_hinge_dual(rho: float) -> ConjugateProx:
    """f = rho/2 [u]_+^2: f* is y^2 / (2 rho) on y >= 0."""
    return lambda z, alpha: np.maximum(z, 0) / (1 + alpha / rho)


def two_sided_dual(rho: float, kappa: float) -> ConjugateProx:
    """f = rho [|u_1 - u_2| - kappa]_+: f* is kappa |c| at y = (c, -c), |c| <= rho."""

    def prox(z: Array, alpha: float) -> Array:
        d = (z[0] - z[1]) / 2
        c = np.sign(d) * min(max(abs(d) - alpha * kappa / 2, 0.0), rho)
        return np.array([c, -c])

    return prox


def maximum_dual(z: Array, alpha: float) -> Array:
    """f = max_j u_j: f* is 0 on the simplex."""
    return euclidean_capped(z, 1.0)


def alexr(
    problem: Quadratics,
    w0: Array,
    steps: int,
    *,
    eta: float,
    alpha: float,
    theta: float,
    conjugate_prox: ConjugateProx,
    limit: Array | float = 0.0,
    nu: float | None = None,
    independent: bool = True,
    with_g0: bool = False,
) -> tuple[Array, Array]:
    """ALEXR with r(w) = |w - w0|^2 / (2 nu) or r = 0; returns the iterates and the final y.

    The inner functions are g_i - `limit`_i.
    """
    rng = np.random.default_rng(1)
    w, w_prev = w0.copy(), w0.copy()
    y, path = np.zeros((problem.num_inner, problem.dim)), []
    limits = np.broadcast_to(limit, len(y))
    for _ in range(steps):
        sampled = problem.draw(rng)
        z = np.zeros_like(w)
        for i, batch, other in sampled:
            g, g_prev = problem.value(w, i, batch), problem.value(w_prev, i, batch)
            g_tilde = g + theta * (g - g_prev) - limits[i]
            y[i] = conjugate_prox(y[i] + alpha * g_tilde, alpha)
            z += problem.jacobian(w, i, other if independent else batch).T @ y[i]
        z /= len(sampled)
        if with_g0:
            z += w - problem.m
        w_prev = w
        w = w - eta * z if nu is None else (nu * w + eta * w0 - eta * nu * z) / (eta + nu)
        path.append(w.copy())
    return np.array(path), y
