"""Algorithms 1 and 2 (corrected), transcribed line by line in NumPy float64.

Nothing here imports fcco or torch: these are the independent oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray


@dataclass
class Quadratics:
    """Blocks of samples g_i(w; xi) = (a.w)^2 / 2 + c.w + d in R^{d1}; and g0(w) = |w - m|^2 / 2."""

    num_inner: int = 6
    samples: int = 10
    dim: int = 1
    size: int = 4
    seed: int = 0
    a: Array = field(init=False)
    c: Array = field(init=False)
    d: Array = field(init=False)
    m: Array = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        shape = (self.num_inner, self.samples, self.dim)
        self.a = rng.normal(size=(*shape, self.size)) * 0.7
        self.c = rng.normal(size=(*shape, self.size)) * 0.5
        self.d = rng.normal(size=shape) * 0.3 - 0.2
        self.m = rng.normal(size=self.size)

    def value(self, w: Array, i: int, batch: Array) -> Array:
        a, c, d = self.a[i, batch], self.c[i, batch], self.d[i, batch]
        return (0.5 * (a @ w) ** 2 + c @ w + d).mean(0)

    def jacobian(self, w: Array, i: int, batch: Array) -> Array:
        a, c = self.a[i, batch], self.c[i, batch]
        return ((a @ w)[..., None] * a + c).mean(0)

    def draw(self, rng: np.random.Generator, blocks: int = 3, per_block: int = 2) -> list[tuple]:
        """(i, B_i, B~_i) for each sampled block, without replacement."""
        chosen = rng.choice(self.num_inner, blocks, replace=False)
        pick = lambda: rng.choice(self.samples, per_block, replace=False)  # noqa: E731
        return [(int(i), pick(), pick()) for i in chosen]


Slope = Callable[[Array], Array]


def hinge_slope(rho: float, lam: float) -> Slope:
    """Gradient of the Moreau envelope of rho [u]_+."""
    return lambda u: np.clip(u / lam, 0, rho)


def two_sided_slope(w: float, kappa: float, lam: float) -> Slope:
    """Gradient of the Moreau envelope of w [|g1 - g2| - kappa]_+ on R^2."""

    def slope(g: Array) -> Array:
        d = g[0] - g[1]
        t = max(abs(d) - kappa, 0.0)
        return np.sign(d) * min(t / (2 * lam), w) * np.array([1.0, -1.0])

    return slope


@dataclass
class Momentum:
    """v <- (1-beta) v + beta G with v_0 = G_0; w <- w - lr v."""

    lr: float
    beta: float
    v: Array | None = None

    def __call__(self, w: Array, G: Array) -> Array:
        self.v = G.copy() if self.v is None else (1 - self.beta) * self.v + self.beta * G
        return w - self.lr * self.v


@dataclass
class Adam:
    """Bias-corrected Adam on G, with the updated second moment."""

    lr: float
    beta: float
    beta2: float = 0.001
    eps: float = 1e-8
    t: int = 0
    v: Array | float = 0.0
    s: Array | float = 0.0

    def __call__(self, w: Array, G: Array) -> Array:
        self.t += 1
        self.v = (1 - self.beta) * self.v + self.beta * G
        self.s = (1 - self.beta2) * self.s + self.beta2 * G * G
        v_hat = self.v / (1 - (1 - self.beta) ** self.t)
        s_hat = self.s / (1 - (1 - self.beta2) ** self.t)
        return w - self.lr * v_hat / (np.sqrt(s_hat) + self.eps)


def sonex(
    problem: Quadratics,
    w0: Array,
    steps: int,
    slope: Slope,
    update: Callable[[Array, Array], Array],
    *,
    gamma: float,
    correction: float,
    read: str = "old",
    independent: bool = False,
    with_g0: bool = False,
) -> tuple[Array, Array]:
    """Algorithm 1 with lazy initialisation; returns the iterates and the final u."""
    rng = np.random.default_rng(1)
    w, w_prev = w0.copy(), w0.copy()
    u = np.zeros((problem.num_inner, problem.dim))
    seen = np.zeros(problem.num_inner, dtype=bool)
    path = []
    for _ in range(steps):
        sampled = problem.draw(rng)
        G = np.zeros_like(w)
        u_next = u.copy()
        for i, batch, other in sampled:
            g = problem.value(w, i, batch)
            change = g - problem.value(w_prev, i, batch)
            if not seen[i]:
                u[i] = u_next[i] = g  # first visit: assigned before the outer gradient is taken
                seen[i] = True
            else:
                u_next[i] = (1 - gamma) * u[i] + gamma * g + correction * change
            y = slope(u[i] if read == "old" else u_next[i])
            G += problem.jacobian(w, i, other if independent else batch).T @ y
        G /= len(sampled)
        if with_g0:
            G += w - problem.m
        w_prev, w = w, update(w, G)
        u = u_next
        path.append(w.copy())
    return np.array(path), u


def alexr2(
    problem: Quadratics,
    w0: Array,
    rounds: int,
    inner_steps: int,
    slope: Slope,
    update: Callable[[Array, Array], Array],
    *,
    dual_step: float,
    theta: float,
    nu: float,
    eta: float,
    independent: bool = True,
    with_g0: bool = False,
) -> tuple[Array, Array]:
    """Algorithm 2 with G_t = (w - z) / nu, u carried over rounds."""
    rng = np.random.default_rng(1)
    w = w0.copy()
    u = np.zeros((problem.num_inner, problem.dim))
    seen = np.zeros(problem.num_inner, dtype=bool)
    path = []
    for _ in range(rounds):
        z, z_prev = w.copy(), w.copy()
        for _ in range(inner_steps):
            sampled = problem.draw(rng)
            G = np.zeros_like(w)
            for i, batch, other in sampled:
                g, g_prev = problem.value(z, i, batch), problem.value(z_prev, i, batch)
                g_tilde = g + theta * (g - g_prev)
                if not seen[i]:
                    u[i] = g
                    seen[i] = True
                else:
                    u[i] = (u[i] + dual_step * g_tilde) / (1 + dual_step)
                G += problem.jacobian(z, i, other if independent else batch).T @ slope(u[i])
            G /= len(sampled)
            if with_g0:
                G += z - problem.m
            z_prev, z = z, (nu * z + eta * w - eta * nu * G) / (eta + nu)
        w = update(w, (w - z) / nu)
        path.append(w.copy())
    return np.array(path), u


def tracked(
    old: Array,
    seen: Array,
    fresh: Array,
    previous: Array | None,
    gamma: float,
    correction: float,
) -> tuple[Array, Array]:
    """Line 7 of Algorithm 1 for many blocks: u before and after; first visits take the fresh g."""
    after = (1 - gamma) * old + gamma * fresh
    if previous is not None:
        after = after + correction * (fresh - previous)
    return np.where(seen, old, fresh), np.where(seen, after, fresh)
