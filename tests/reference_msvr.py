"""MSVR v2, transcribed line by line in NumPy float64; v1 is `reference.sonex`.

Whole tables of u are kept for each step, and every average is a loop. Nothing here imports fcco or
torch. The ordinary loss is g0(w; i, s) = |w - m - c_{is1}|^2 / 2, a mean over the sampled entries.
"""

from __future__ import annotations

import numpy as np
from reference import Array, Quadratics, Slope

Sampled = list[tuple[int, Array, Array]]


def softplus_and_square_slope(u: Array) -> Array:
    """Gradient of log(1 + e^{u_1}) + u_2^2 / 2, or of its first part for d1 = 1."""
    first = 1 / (1 + np.exp(-u[0]))
    return np.array([first]) if len(u) == 1 else np.array([first, u[1]])


def theory(gamma: float, number: int, blocks: int) -> float:
    return (number - blocks) / (blocks * (1 - gamma)) + (1 - gamma)


def estimator(problem: Quadratics, w: Array, u: Array, sampled: Sampled, slope: Slope) -> Array:
    """G(w, u) = (1/B1) sum_i J_i(w; B)^T grad f(u_i), plus the gradient of g0."""
    G = np.zeros_like(w)
    for i, batch, _ in sampled:
        G += problem.jacobian(w, i, batch).T @ slope(u[i])
    parts = [w - problem.m - problem.c[i, s, 0] for i, batch, _ in sampled for s in batch]
    return G / len(sampled) + np.array(parts).mean(0)


def v2(
    problem: Quadratics,
    w0: Array,
    steps: int,
    slope: Slope,
    *,
    lr: float,
    beta: float,
    gamma: float,
    correction: float,
) -> tuple[Array, Array]:
    """z_t = (1-beta) z_{t-1} + G(w_t, u_{t-1}) - (1-beta) G(w_{t-1}, u_{t-2}).

    Returns the iterates and the final u.
    """
    rng = np.random.default_rng(1)
    w, w_prev, z = w0.copy(), w0.copy(), np.zeros_like(w0)
    shape = (problem.num_inner, problem.dim)
    u, u_prev, seen = np.zeros(shape), np.zeros(shape), set()  # u_{t-1}, u_{t-2}
    path = []
    for t in range(steps):
        sampled = problem.draw(rng)
        u_next = u.copy()
        for i, batch, _ in sampled:
            g, g_prev = problem.value(w, i, batch), problem.value(w_prev, i, batch)
            if i not in seen:
                u[i] = u_next[i] = g
                u_prev[i] = g_prev
                seen.add(i)
            else:
                u_next[i] = (1 - gamma) * u[i] + gamma * g + correction * (g - g_prev)
        G = estimator(problem, w, u, sampled, slope)
        G_prev = estimator(problem, w_prev, u_prev, sampled, slope)
        z = G if t == 0 else (1 - beta) * z + G - (1 - beta) * G_prev
        u_prev, u = u, u_next
        w_prev, w = w, w - lr * z
        path.append(w.copy())
    return np.array(path), u
