# ruff: noqa: D102  a method that is overridden is explained in the base class
"""What a race needs of a problem: batches of noisy values, their gradients, the exact error.

Gaussian noise enters as the mean of B2 samples, so that a batch of B2 samples costs no more to
simulate than one. The numbers drawn for a step serve every setting of the same seed.
"""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fcco.outer import AbstractOuter, Hinge

__all__ = ["Affine", "Batch", "Problem", "Shape", "draw_blocks"]

Shape = tuple[int, int]  # (steps, seeds)


class Batch(NamedTuple):
    """What one step draws: the blocks, and for each the noisy function direction . w + shift.

    Shapes (seeds, B), (seeds, rows, d) and (seeds, B); one axis of steps in front for many steps.
    """

    blocks: Tensor
    direction: Tensor
    shift: Tensor

    def at(self, step: int) -> Batch:
        """The draws of one step."""
        return Batch(*(part[step] for part in self))


def draw_blocks(generator: torch.Generator, shape: Shape, total: int, number: int) -> Tensor:
    """Blocks without replacement, uniform: shape (steps, seeds, number)."""
    if number == total:
        return torch.arange(total).expand(*shape, total)
    return torch.rand(*shape, total, generator=generator).argsort(-1)[..., :number]


@dataclass(frozen=True)
class Problem(abc.ABC):
    """One of: g_0 + (1/n) sum_i f(g_i), g_0 + CVaR(g_1..g_n), or g_0 subject to all g_i <= 0.

    Args:
        name: S1, S2, ...
        blocks: B1, blocks per step.
        samples: B2, samples per block.
        noise: sigma_0 of one value and sigma_1 of each entry of one Jacobian.
    """

    name: str
    blocks: int
    samples: int
    noise: tuple[float, float]

    kind: ClassVar[str] = "sum"  # or "cvar", "constrained"
    convex: ClassVar[bool] = True  # the composition, so that ALEXR is legal
    smooth_inner: ClassVar[bool] = True  # the g_i, so that SONEX is legal
    outer: ClassVar[AbstractOuter] = Hinge()  # f; for constraints the exact penalty
    ratio: ClassVar[float] = 1.0  # r of CVaR

    @property
    @abc.abstractmethod
    def start(self) -> Tensor:
        """w_0, shape (d,)."""

    @property
    @abc.abstractmethod
    def total(self) -> int:
        """The number of blocks, n."""

    @functools.cached_property
    @abc.abstractmethod
    def optimum(self) -> float:
        """The least value of the objective."""

    @abc.abstractmethod
    def draw(self, generator: torch.Generator, blocks: Tensor) -> Batch:
        """Samples for given blocks, of many steps at once."""

    @abc.abstractmethod
    def values(self, w: Tensor, batch: Batch) -> Tensor:
        """g_i(w; batch) of the drawn blocks, shape (seeds, settings, B)."""

    @abc.abstractmethod
    def pull(self, w: Tensor, batch: Batch, weights: Tensor) -> Tensor:
        """sum_i weights_i grad g_i(w; batch), shape (seeds, settings, d)."""

    @abc.abstractmethod
    def exact(self, w: Tensor) -> Tensor:
        """All g_i(w) without noise, shape (..., n)."""

    @abc.abstractmethod
    def coupled(self, values: Tensor) -> Tensor:
        """The part of the exact objective that the g_i enter, shape (...)."""

    def loss(self, w: Tensor) -> Tensor | None:
        """g_0, which is known exactly, shape (...)."""
        return None

    @property
    def steepness(self) -> float:
        """C_f, the Lipschitz constant of the outer function."""
        return 1 / self.ratio if self.kind == "cvar" else self.outer.lipschitz

    def along(self, w: Tensor, batch: Batch, move: Tensor) -> Tensor:
        """<grad g_i(w; batch), move> of the drawn blocks."""
        raise NotImplementedError(f"{type(self).__name__} has no directional derivative.")

    def base(self, w: Tensor) -> Tensor | None:
        """The gradient of g_0."""
        return None

    def project(self, w: Tensor) -> Tensor:
        """The projection onto the set of allowed w, where there is one."""
        return w

    def error(self, w: Tensor) -> Tensor:
        """The objective gap; for constraints the larger of its size and the largest violation."""
        values, loss = self.exact(w), self.loss(w)
        if self.kind == "constrained":
            assert loss is not None
            return torch.maximum((loss - self.optimum).abs(), values.amax(-1))
        coupled = self.coupled(values)
        return (coupled if loss is None else coupled + loss) - self.optimum


@dataclass(frozen=True)
class Affine(Problem):
    """g_i(w) = q/2 |w|^2 + a_i . w + b_i, seen with the noise sigma_0 xi + sigma_1 xi' . w."""

    curvature: ClassVar[float] = 0.0  # q

    @functools.cached_property
    @abc.abstractmethod
    def rows(self) -> Tensor:
        """a_i, shape (n, d)."""

    @functools.cached_property
    @abc.abstractmethod
    def shifts(self) -> Tensor:
        """b_i, shape (n,)."""

    @property
    def total(self) -> int:
        return len(self.rows)

    def draw(self, generator: torch.Generator, blocks: Tensor) -> Batch:
        value, slope = self.sample_noise(generator, blocks)
        return Batch(blocks, self.rows[blocks] + slope, self.shifts[blocks] + value)

    def sample_noise(self, generator: torch.Generator, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The noise of the values and of the Jacobians, as means of B2 samples."""
        scale = self.samples**-0.5
        options: Any = {"generator": generator, "dtype": torch.float64}
        value = torch.randn(blocks.shape, **options) * (self.noise[0] * scale)
        slope = torch.randn(*blocks.shape, self.rows.shape[1], **options)
        return value, slope * (self.noise[1] * scale)

    def values(self, w: Tensor, batch: Batch) -> Tensor:
        linear = torch.baddbmm(batch.shift.unsqueeze(1), w, batch.direction.mT)
        return linear if self.curvature == 0 else linear + self._square(w)

    def pull(self, w: Tensor, batch: Batch, weights: Tensor) -> Tensor:
        linear = torch.bmm(weights, batch.direction)
        if self.curvature == 0:
            return linear
        return linear + self.curvature * weights.sum(-1, keepdim=True) * w

    def along(self, w: Tensor, batch: Batch, move: Tensor) -> Tensor:
        linear = torch.bmm(move, batch.direction.mT)
        return linear + self.curvature * (w * move).sum(-1, keepdim=True)

    def exact(self, w: Tensor) -> Tensor:
        return w @ self.rows.T + self.shifts + self._square(w)

    def _square(self, w: Tensor) -> Tensor:
        return w.square().sum(-1, keepdim=True) * (self.curvature / 2)
