# ruff: noqa: D102  a method that is overridden is explained in the base class
"""The problems of the race: S1, S2, S3, S3b, S4 and a logistic CVaR, with their optima."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fcco.outer import Absolute, CVaR, Hinge, project_ball

from .logistic import Logistic
from .problem import Affine, Batch, Problem

__all__ = ["PROBLEMS", "Box", "Groups", "NonSmooth", "Outside", "Separable"]


@dataclass(frozen=True)
class Separable(Affine):
    """S1: (1/n) sum_i |w_i - c_i|, g_i(w) = w_i - c_i: the solution is c, a kink in each block."""

    outer = Absolute()

    @property
    def start(self) -> Tensor:
        return torch.zeros(8, dtype=torch.float64)

    @functools.cached_property
    def optimum(self) -> float:
        return 0.0

    @functools.cached_property
    def rows(self) -> Tensor:
        return torch.eye(8, dtype=torch.float64)

    @functools.cached_property
    def shifts(self) -> Tensor:
        return torch.linspace(-1.0, 1.0, 8, dtype=torch.float64)

    def sample_noise(self, generator: torch.Generator, blocks: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = super().sample_noise(generator, blocks)
        return value, slope * self.rows[blocks]  # each block depends on its own coordinate only

    def coupled(self, values: Tensor) -> Tensor:
        return self.outer(values).mean(-1)


@dataclass(frozen=True)
class Groups(Affine):
    """S2: CVaR of L_i(w) = |w - e_i|^2 / 2: w* = (1/n) 1, where all groups tie."""

    kind = "cvar"
    curvature = 1.0
    ratio = 0.25

    @property
    def start(self) -> Tensor:
        # Off the symmetric line, or all groups would tie from the start.
        return torch.linspace(-1.0, 1.0, 8, dtype=torch.float64)

    @functools.cached_property
    def optimum(self) -> float:
        return 0.5 * (1 - 1 / self.total)

    @functools.cached_property
    def rows(self) -> Tensor:
        return -torch.eye(8, dtype=torch.float64)

    @functools.cached_property
    def shifts(self) -> Tensor:
        return torch.full((8,), 0.5, dtype=torch.float64)

    def coupled(self, values: Tensor) -> Tensor:
        return CVaR(self.ratio)(values)


@dataclass(frozen=True)
class Box(Affine):
    """S3: min |w - a|^2 / 2 subject to w_i <= b = 0.3: w* = b, the multipliers are a - b.

    They differ, 0.1 to 0.8. (Were they all alike, a hinge of twice their size would be free of
    the bias that noise in u causes, and tuning the penalty would find it.)
    """

    kind = "constrained"
    bound = 0.3
    outer = Hinge(8 * 1.6)  # rho/m is twice the largest multiplier

    @functools.cached_property
    def target(self) -> Tensor:
        """The point a."""
        return self.bound + torch.linspace(0.1, 0.8, 8, dtype=torch.float64)

    @property
    def start(self) -> Tensor:
        # Not all alike, or one lucky moment would solve all constraints at once.
        return torch.linspace(1.0, -1.0, 8, dtype=torch.float64)

    @functools.cached_property
    def optimum(self) -> float:
        return float((self.target - self.bound).square().sum() / 2)

    @functools.cached_property
    def rows(self) -> Tensor:
        return torch.eye(8, dtype=torch.float64)

    @functools.cached_property
    def shifts(self) -> Tensor:
        return torch.full((8,), -self.bound, dtype=torch.float64)

    def base(self, w: Tensor) -> Tensor:
        return w - self.target

    def loss(self, w: Tensor) -> Tensor:
        return (w - self.target).square().sum(-1) / 2

    def coupled(self, values: Tensor) -> Tensor:
        return self.outer(values).mean(-1)


@dataclass(frozen=True)
class Outside(Affine):
    """S3b: min |w - a|^2 / 2 subject to 1 - |w|^2 <= 0, |a| = 1/2: w* = a/|a|, multiplier 1/4."""

    kind = "constrained"
    convex = False
    curvature = -2.0
    outer = Hinge(1.0)  # four times the multiplier

    @functools.cached_property
    def target(self) -> Tensor:
        """The point a."""
        return torch.tensor([0.3, -0.3, 0.2, 3**0.5 / 10], dtype=torch.float64)

    @property
    def start(self) -> Tensor:
        # Off the ray of the solution, so that the way there follows the bent constraint.
        return torch.tensor([0.8, 0.8, 0.0, 0.0], dtype=torch.float64)

    @functools.cached_property
    def optimum(self) -> float:
        return 0.125

    @functools.cached_property
    def rows(self) -> Tensor:
        return torch.zeros(1, 4, dtype=torch.float64)

    @functools.cached_property
    def shifts(self) -> Tensor:
        return torch.ones(1, dtype=torch.float64)

    def base(self, w: Tensor) -> Tensor:
        return w - self.target

    def loss(self, w: Tensor) -> Tensor:
        return (w - self.target).square().sum(-1) / 2

    def coupled(self, values: Tensor) -> Tensor:
        return self.outer(values).mean(-1)


@dataclass(frozen=True)
class NonSmooth(Affine):
    """S4: |w - a|^2 / 2 + (rho/n) sum_i [g_i]_+, g_i = |a_i . w| - b_i - c/2 |w|^2, on a ball.

    The g_i are neither smooth nor convex. With rho c = 0.8 the sum is convex nevertheless:
    [g_i]_+ + c/2 |w|^2 = max(|a_i . w| - b_i, c/2 |w|^2), so a convex solver knows the optimum.
    """

    smooth_inner = False
    convex = False  # not in the form that ALEXR asks for: its g_i must be convex
    curvature = -0.2
    weight = 4.0
    outer = Hinge(weight)
    radius = 3.0

    @functools.cached_property
    def target(self) -> Tensor:
        """The point a."""
        return torch.tensor([1.0, -1.0, 0.5, 0.2], dtype=torch.float64)

    @property
    def start(self) -> Tensor:
        return torch.zeros(4, dtype=torch.float64)

    @functools.cached_property
    def optimum(self) -> float:
        return 1.37649137  # by `research.convergence.optima.nonsmooth`; a test computes it again

    @functools.cached_property
    def rows(self) -> Tensor:
        angle = torch.arange(8, dtype=torch.float64).unsqueeze(1) * torch.tensor(
            [1.0, 2.3, 3.1, 4.7], dtype=torch.float64
        )
        return angle.cos() / angle.cos().norm(dim=1, keepdim=True)

    @functools.cached_property
    def shifts(self) -> Tensor:
        return torch.linspace(0.6, -0.6, 8, dtype=torch.float64)

    def draw(self, generator: torch.Generator, blocks: Tensor) -> Batch:
        value, slope = self.sample_noise(generator, blocks)
        # The rows under the absolute value first, those of the noise after them.
        both = torch.cat([self.rows[blocks], slope], dim=-2)
        return Batch(blocks, both, self.shifts[blocks] + value)

    def values(self, w: Tensor, batch: Batch) -> Tensor:
        inner, noise = torch.bmm(w, batch.direction.mT).chunk(2, dim=-1)
        return inner.abs() + noise + batch.shift.unsqueeze(1) + self._square(w)

    def pull(self, w: Tensor, batch: Batch, weights: Tensor) -> Tensor:
        inner, _ = torch.bmm(w, batch.direction.mT).chunk(2, dim=-1)
        both = torch.cat([weights * inner.sign(), weights], dim=-1)
        square = self.curvature * weights.sum(-1, keepdim=True) * w
        return torch.bmm(both, batch.direction) + square

    def exact(self, w: Tensor) -> Tensor:
        return (w @ self.rows.T).abs() + self.shifts + self._square(w)

    def base(self, w: Tensor) -> Tensor:
        return w - self.target

    def project(self, w: Tensor) -> Tensor:
        return project_ball(w, self.radius)

    def loss(self, w: Tensor) -> Tensor:
        return (w - self.target).square().sum(-1) / 2

    def coupled(self, values: Tensor) -> Tensor:
        return self.outer(values).mean(-1)


PROBLEMS: dict[str, Problem] = {
    each.name: each
    for each in (
        Separable("S1", blocks=2, samples=1, noise=(0.3, 0.1)),
        Groups("S2", blocks=2, samples=1, noise=(0.3, 0.1)),
        Box("S3", blocks=2, samples=1, noise=(0.3, 0.1)),
        Outside("S3b", blocks=1, samples=1, noise=(0.3, 0.1)),
        NonSmooth("S4", blocks=2, samples=1, noise=(0.3, 0.1)),
        # The noise is in the data; 0.22 is what it amounts to at the solution, for the ranges.
        Logistic("logistic", blocks=2, samples=2, noise=(0.22, 0.0)),
    )
}
