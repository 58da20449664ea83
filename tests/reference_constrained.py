"""Literal transcriptions of SSG, OSS and ConEx in NumPy, with loops over constraints.

They know nothing of the library: values and gradients come from `NoisyProgram`, whose samples are
numbered, so that both sides see the same noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass
class NoisyProgram:
    """g_0 = |w - a|^2/2 + z.w and g_i = q_i|w|^2/2 + b_i.w - r_i + e_i + E_i.w, sample k."""

    seed: int = 0
    dim: int = 4
    number: int = 3
    samples: int = 400
    noise: float = 0.2
    data: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        d, m, n = self.dim, self.number, self.samples
        self.data = {
            "a": np.full(d, 1.0) + 0.2 * rng.normal(size=d),
            "q": np.linspace(-0.5, 1.0, m),
            "b": np.eye(m, d) + 0.3 * rng.normal(size=(m, d)),
            "r": np.full(m, 0.3),
            "z": self.noise * rng.normal(size=(n, d)),
            "e": self.noise * rng.normal(size=(n, m)),
            "E": self.noise * rng.normal(size=(n, m, d)),
        }

    def objective_gradient(self, w: np.ndarray, k: int) -> np.ndarray:
        return w - self.data["a"] + self.data["z"][k]

    def constraint(self, i: int, w: np.ndarray, k: int) -> float:
        d = self.data
        slope = d["b"][i] + d["E"][k, i]
        return float(0.5 * d["q"][i] * (w @ w) + slope @ w - d["r"][i] + d["e"][k, i])

    def constraint_gradient(self, i: int, w: np.ndarray, k: int) -> np.ndarray:
        d = self.data
        return d["q"][i] * w + d["b"][i] + d["E"][k, i]


Schedule = Callable[[int], float]


def ssg(
    problem: NoisyProgram,
    w: np.ndarray,
    samples: list[tuple[int, int]],
    threshold: Schedule,
    objective_step: Schedule,
    constraint_step: Schedule | None,
) -> tuple[np.ndarray, list[int | None], list[float]]:
    """The path, i* of each step (None: the objective) and the step sizes; None: Polyak."""
    path, branch, sizes = [], [], []
    for t, (value_sample, gradient_sample) in enumerate(samples):
        values = [problem.constraint(i, w, value_sample) for i in range(problem.number)]
        worst = int(np.argmax(values))
        if values[worst] <= threshold(t):
            direction, eta = problem.objective_gradient(w, gradient_sample), objective_step(t)
            branch.append(None)
        else:
            direction = problem.constraint_gradient(worst, w, gradient_sample)
            if constraint_step is None:
                eta = values[worst] / (direction @ direction)
            else:
                eta = constraint_step(t)
            branch.append(worst)
        w = w - eta * direction
        path.append(w)
        sizes.append(eta)
    return np.array(path), branch, sizes


def oss(
    problem: NoisyProgram,
    w: np.ndarray,
    rounds: int,
    steps: int,
    rho_hat: float,
    scale: float = 1.0,
    project: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> tuple[np.ndarray, np.ndarray]:
    """IQRC rounds with the steps of Yu, Neely and Wei; the path and Q/V after each step."""
    V, alpha = np.sqrt(steps), float(steps)
    path, duals, k = [], [], 0
    for _ in range(rounds):
        x, Q, total = w.copy(), np.zeros(problem.number), np.zeros_like(w)
        for t in range(steps):
            near = rho_hat * (x - w)
            d = V * (problem.objective_gradient(x, k) + near)
            for i in range(problem.number):
                d = d + Q[i] * (problem.constraint_gradient(i, x, k) + near)
            new = project(x - scale * d / (2 * alpha))
            for i in range(problem.number):
                value = problem.constraint(i, x, k) + rho_hat / 2 * ((x - w) @ (x - w))
                slope = problem.constraint_gradient(i, x, k) + near
                Q[i] = max(Q[i] + value + slope @ (new - x), 0.0)
            x, k = new, k + 1
            total = total + x
            path.append(x if t < steps - 1 else total / steps)
            duals.append(Q / V)
        w = total / steps
    return np.array(path), np.array(duals)


@dataclass
class ConExSchedule:
    theta: float
    tau: float
    step: float


def conex(
    problem: NoisyProgram,
    w: np.ndarray,
    samples: list[tuple[int, int]],
    steps: int,
    mu: float,
    schedule: ConExSchedule,
    sign: float = -1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """ICPPAC rounds with ConEx steps; `samples` are (dual, primal). The path and y."""
    m = problem.number
    path, duals, y = [], [], np.zeros(m)
    for start in range(0, len(samples), steps):
        x_before, x, last = w.copy(), w.copy(), None
        total = np.zeros_like(w)
        for t in range(steps):
            dual_sample, primal_sample = samples[start + t]
            linear = np.zeros(m)
            for i in range(m):
                away = x_before - w
                value = problem.constraint(i, x_before, dual_sample) + mu * (away @ away)
                slope = problem.constraint_gradient(i, x_before, dual_sample) + 2 * mu * away
                linear[i] = value + slope @ (x - x_before)
            last = linear if last is None else last
            s = (1 + schedule.theta) * linear + sign * schedule.theta * last
            y = np.maximum(y + s / schedule.tau, 0.0)
            d = problem.objective_gradient(x, primal_sample) + 2 * mu * (x - w)
            for i in range(m):
                gradient = problem.constraint_gradient(i, x, primal_sample) + 2 * mu * (x - w)
                d = d + y[i] * gradient
            x_before, x, last = x, x - schedule.step * d, linear
            total = total + x
            path.append(x if t < steps - 1 else total / steps)
            duals.append(y)
        w = total / steps
    return np.array(path), np.array(duals)
