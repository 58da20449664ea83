"""MSVR v2, transcribed line by line in NumPy float64; v1 is `reference.sonex`.

Whole tables of u are kept for each step, and every average is a loop. Nothing here imports fcco or
torch. The ordinary loss is g0(w; i, s) = |w - m - c_{is1}|^2 / 2, a mean over the sampled entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from reference import Array, Quadratics, Slope

Sampled = list[tuple[int, Array, Array]]


def loss_gradient(problem: Quadratics, w: Array, sampled: Sampled) -> Array:
    """Gradient of g0 on the entries of a batch."""
    parts = [w - problem.m - problem.c[i, s, 0] for i, batch, _ in sampled for s in batch]
    return np.array(parts).mean(0)


def estimator(
    problem: Quadratics, w: Array, u: Array, sampled: Sampled, slope: Slope, with_g0: bool
) -> Array:
    """G(w, u) = (1/B1) sum_i J_i(w; B)^T grad f(u_i), plus the gradient of g0."""
    G = np.zeros_like(w)
    for i, batch, _ in sampled:
        G += problem.jacobian(w, i, batch).T @ slope(u[i])
    G /= len(sampled)
    return G + loss_gradient(problem, w, sampled) if with_g0 else G


def v2(
    problem: Quadratics,
    w0: Array,
    steps: int,
    slope: Slope | Callable[[int], Slope],
    *,
    lr: float,
    beta: float,
    gamma: float,
    correction: float,
    read: str = "old",
    annealed: bool = False,
    normalized: bool = False,
    with_g0: bool = False,
) -> tuple[Array, Array, Array]:
    """z_t = (1-beta) z_{t-1} + G(w_t, u_{t-1}) - (1-beta) G(w_{t-1}, u_{t-2}).

    With `read="new"` the indices of u are t and t-1; with `annealed` the slope is that of the
    step. Returns the iterates, the z_t and the final u.
    """
    rng = np.random.default_rng(1)
    slope_of: Any = slope if annealed else lambda t: slope
    w, w_prev, z = w0.copy(), w0.copy(), np.zeros_like(w0)
    shape = (problem.num_inner, problem.dim)
    u, u_prev, seen = np.zeros(shape), np.zeros(shape), set()  # u_{t-1}, u_{t-2}
    path, estimates = [], []
    for t in range(steps):
        sampled = problem.draw(rng)
        for i, batch, _ in sampled:
            if i not in seen:
                u[i] = problem.value(w, i, batch)
                u_prev[i] = problem.value(w_prev, i, batch)
        u_next, u_then = u.copy(), u_prev if read == "old" else u.copy()
        for i, batch, _ in sampled:
            g, g_prev = problem.value(w, i, batch), problem.value(w_prev, i, batch)
            if i in seen:
                u_next[i] = (1 - gamma) * u[i] + gamma * g + correction * (g - g_prev)
            elif read == "new":
                u_then[i] = g_prev
            seen.add(i)
        u_now = u if read == "old" else u_next
        G = estimator(problem, w, u_now, sampled, slope_of(t), with_g0)
        if t == 0:
            z = G
        else:
            G_prev = estimator(problem, w_prev, u_then, sampled, slope_of(t - 1), with_g0)
            z = (1 - beta) * z + G - (1 - beta) * G_prev
        u_prev, u = u, u_next
        w_prev, w = w, w - lr * (z / np.linalg.norm(z) if normalized else z)
        path.append(w.copy())
        estimates.append(z.copy())
    return np.array(path), np.array(estimates), u
