"""Torch sides of the test problems.

Only the functions that need cvxpy import it: tests on a GPU machine do without.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from reference import Quadratics
from torch import Tensor, nn
from torch.nn.functional import softplus

from fcco import Compositional
from fcco.outer import AbstractOuter


class Point(nn.Module):
    """A model that is one vector of parameters."""

    def __init__(self, start: np.ndarray | Tensor | list[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.as_tensor(start, dtype=torch.float64).detach().clone())


@dataclass(frozen=True)
class SumOfHinges(AbstractOuter):
    """A user's own penalty of several constraints in each block: sum_j rho [u_j]_+."""

    scale: float
    dim: int

    convex = monotone = True

    def __call__(self, u: Tensor) -> Tensor:
        return self.scale * u.clamp(min=0).sum(-1)

    def prox(self, u: Tensor, step: float | Tensor) -> Tensor:
        return u - u.clamp(min=0).clamp(max=step * self.scale)

    def violation(self, u: Tensor) -> Tensor:
        return u

    def slope(self, gradient: Tensor) -> Tensor:
        return gradient


@dataclass(frozen=True)
class Custom(AbstractOuter):
    """An outer function from its value and the facts declared of it; the prox is searched."""

    # The fields replace the attributes and the read-only property of the base class.
    value: Callable[[Tensor], Tensor]
    lipschitz: float = math.inf
    convex: bool = False
    weak_convexity: float = math.inf
    monotone: bool = False
    smooth: bool = False
    dim: int | None = 1

    def __post_init__(self) -> None:
        if self.convex:
            object.__setattr__(self, "weak_convexity", 0.0)

    def __call__(self, u: Tensor) -> Tensor:
        return self.value(u)


class TorchQuadratics:
    """The samples of `Quadratics` as tensors."""

    def __init__(self, problem: Quadratics) -> None:
        self.a, self.c, self.d, self.m = (
            torch.as_tensor(x) for x in (problem.a, problem.c, problem.d, problem.m)
        )

    def values(self, w: Tensor, blocks: Tensor, samples: Tensor) -> Tensor:
        """One row per sample: (E, d1)."""
        a, c, d = self.a[blocks, samples], self.c[blocks, samples], self.d[blocks, samples]
        return 0.5 * (a @ w) ** 2 + c @ w + d

    def loss(self, w: Tensor) -> Tensor:
        return 0.5 * (w - self.m).square().sum()


def entries(sampled: list[tuple], which: int) -> tuple[Tensor, Tensor]:
    """Block ids and sample ids of a drawn batch (which = 1: B_i, 2: the independent one)."""
    blocks = np.concatenate([np.full(len(s[which]), s[0]) for s in sampled])
    return torch.as_tensor(blocks), torch.as_tensor(np.concatenate([s[which] for s in sampled]))


def take_step(
    objective: Compositional, inner: Callable[[], Any], index: Any = None, **more
) -> float:
    """One step of the user's loop; returns the loss."""
    optimizer: Any = objective.optimizer
    loss = objective(inner, index, **more)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def decay(optimizer: Any, left: float) -> None:
    """Set every step size to `left` times its first value, also inside a proximal point."""
    for each in (optimizer, getattr(optimizer, "outer", None)):
        for group in [] if each is None else each.param_groups:
            group["lr"] = group.setdefault("first_lr", group["lr"]) * left


@dataclass
class NoisyConstraints:
    """min |w - a|^2 / 2 subject to rows @ w <= limits, whose values are seen with noise."""

    a: Tensor
    rows: Tensor
    limits: Tensor
    noise: float
    generator: torch.Generator

    def loss(self, w: Tensor) -> Tensor:
        return (w - self.a).square().sum() / 2

    def exact(self, w: Tensor) -> Tensor:
        return self.rows @ w - self.limits

    def sample(self, w: Tensor, index: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """The closure of one batch: its noise is drawn once, so both evaluations share it."""
        shape = (len(index),)
        noise = self.noise * torch.randn(shape, generator=self.generator, dtype=w.dtype)
        return lambda: (self.loss(w), self.exact(w)[index] + noise)

    def solve(
        self,
        penalty: Callable[[Any], Any] | None = None,
        near: tuple[np.ndarray, float] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """cvxpy's minimiser and multipliers.

        With `penalty`, of the loss plus this function of the constraint vector instead; with
        `near = (x, nu)`, plus |w - x|^2 / (2 nu) too.
        """
        import cvxpy as cp

        w = cp.Variable(len(self.a))
        loss = cp.sum_squares(w - self.a.numpy()) / 2
        values = self.rows.numpy() @ w - self.limits.numpy()
        constraints = [values <= 0] if penalty is None else []
        if penalty is not None:
            loss += penalty(values)
        if near is not None:
            loss += cp.sum_squares(w - near[0]) / (2 * near[1])
        cp.Problem(cp.Minimize(loss), constraints).solve(solver=cp.CLARABEL)
        assert w.value is not None
        return w.value, np.array(constraints[0].dual_value) if constraints else np.zeros(0)


def smoothed_hinge(rho: float, lam: float, number: int) -> Callable[[Any], Any]:
    """(1/m) sum_i of the Moreau envelope of rho [.]_+, for `NoisyConstraints.solve`."""
    import cvxpy as cp

    def penalty(values: Any) -> Any:
        v = cp.Variable(number)
        return cp.sum(rho * cp.pos(v) + cp.square(values - v) / (2 * lam)) / number

    return penalty


def program(noise: float = 0.03) -> NoisyConstraints:
    """Eight linear constraints of which four are active, with multipliers known by design."""
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(8, 6))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    x = 0.2 * rng.normal(size=6)
    a, limits = x + rows[:4].T @ [0.6, 0.5, 0.4, 0.3], rows @ x + np.repeat([0.0, 0.6], 4)
    a, rows, limits = (torch.as_tensor(part) for part in (a, rows, limits))
    return NoisyConstraints(a, rows, limits, noise, torch.Generator().manual_seed(0))


def box(a: float, b: float, number: int, noise: float, seed: int = 0) -> NoisyConstraints:
    """min |w - a|^2 / 2 subject to w_i <= b: w* = b and every multiplier is a - b."""
    ones = torch.ones(number, dtype=torch.float64)
    return NoisyConstraints(
        a * ones, torch.diag(ones), b * ones, noise, torch.Generator().manual_seed(seed)
    )


class LogisticGroups:
    """Groups whose last feature misleads in the last three: min l2/2 |w|^2 + CVaR_r(L_1..L_n)."""

    def __init__(self, ratio: float = 0.25, groups: int = 12, samples: int = 60, seed: int = 0):
        rng = np.random.default_rng(seed)
        mean = np.full((groups, 1, 5), 0.8)
        mean[:, 0, -1] = np.where(np.arange(groups) < groups - 3, 1.5, -0.7)
        mean += 0.3 * rng.normal(size=mean.shape)
        noise = np.linspace(0.7, 1.4, groups)[:, None, None]
        self.z = mean + noise * rng.normal(size=(groups, samples, 5))  # label times features
        self.ratio, self.l2, self.number = ratio, 0.05, groups
        self.rows = torch.as_tensor(self.z.reshape(-1, 5))
        self.group = torch.arange(groups).repeat_interleave(samples)

    def value(self, w: np.ndarray) -> float:
        """The exact objective on all data; r n is an integer here."""
        worst = np.sort(np.logaddexp(0, -self.z @ w).mean(1))[-round(self.ratio * self.number) :]
        return self.l2 / 2 * float(w @ w) + worst.mean()

    def batch(self, w: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """(g0, per-sample losses) of some samples."""
        return self.l2 / 2 * w.square().sum(), softplus(-self.rows[index] @ w)

    def solve(self, average: bool = False) -> tuple[np.ndarray, float]:
        """cvxpy's minimiser and its value; with `average`, of the mean over groups (ERM)."""
        import cvxpy as cp

        w, s = cp.Variable(5), cp.Variable()
        losses = cp.hstack([cp.sum(cp.logistic(-z @ w)) / len(z) for z in self.z])
        coupled = cp.sum(losses) / self.number
        if not average:
            coupled = s + cp.sum(cp.pos(losses - s)) / (self.ratio * self.number)
        problem = cp.Problem(cp.Minimize(self.l2 / 2 * cp.sum_squares(w) + coupled))
        problem.solve(solver=cp.CLARABEL)
        assert w.value is not None
        return w.value, self.value(w.value)
