"""The problems of the comparison: S1, S2, S3, S3b and a logistic CVaR, with their optima.

A problem gives batches of noisy values, their gradients, and the exact error. Gaussian noise enters
as the mean of B2 samples, so that a batch of B2 samples costs no more to simulate than one. The
numbers drawn for a step serve every setting of the same seed.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fcco.outer import Absolute, AbstractOuter, CVaR, Hinge

Shape = tuple[int, int]  # (steps, seeds)


def _numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _line(first: float, last: float) -> Tensor:
    return torch.linspace(first, last, 8, dtype=torch.float64)


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

    total: ClassVar[int] = 8  # the number of blocks, n
    start: ClassVar[Tensor]  # w_0, shape (d,)
    optimum: ClassVar[float]  # the least value of the objective
    target: ClassVar[Tensor | None] = None  # a, where g_0 = |w - a|^2 / 2
    kind: ClassVar[str] = "sum"  # or "cvar", "constrained"
    outer: ClassVar[AbstractOuter] = Hinge()  # f; for constraints the exact penalty
    ratio: ClassVar[float] = 1.0  # r of CVaR

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

    def loss(self, w: Tensor) -> Tensor | None:
        """g_0, which is known exactly, shape (...)."""
        return None if self.target is None else (w - self.target).square().sum(-1) / 2

    def base(self, w: Tensor) -> Tensor | None:
        """The gradient of g_0."""
        return None if self.target is None else w - self.target

    @property
    def steepness(self) -> float:
        """C_f, the Lipschitz constant of the outer function."""
        return 1 / self.ratio if self.kind == "cvar" else self.outer.lipschitz

    def along(self, w: Tensor, batch: Batch, move: Tensor) -> Tensor:
        """<grad g_i(w; batch), move> of the drawn blocks."""
        raise NotImplementedError(f"{type(self).__name__} has no directional derivative.")

    def error(self, w: Tensor) -> Tensor:
        """The objective gap; for constraints the larger of its size and the largest violation."""
        values, loss = self.exact(w), self.loss(w)
        if self.kind == "constrained":
            assert loss is not None
            return torch.maximum((loss - self.optimum).abs(), values.amax(-1))
        coupled = CVaR(self.ratio)(values) if self.kind == "cvar" else self.outer(values).mean(-1)
        return (coupled if loss is None else coupled + loss) - self.optimum


@dataclass(frozen=True)
class Affine(Problem):
    """g_i(w) = q/2 |w|^2 + a_i . w + b_i, seen with the noise sigma_0 xi + sigma_1 xi' . w."""

    curvature: ClassVar[float] = 0.0  # q
    rows: ClassVar[Tensor]  # a_i, shape (n, d)
    shifts: ClassVar[Tensor]  # b_i, shape (n,)

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


class Separable(Affine):
    """S1: (1/n) sum_i |w_i - c_i|, g_i(w) = w_i - c_i: the solution is c, a kink in each block."""

    outer = Absolute()
    start = torch.zeros(8, dtype=torch.float64)
    optimum = 0.0
    rows = torch.eye(8, dtype=torch.float64)
    shifts = _line(-1.0, 1.0)

    def sample_noise(self, generator: torch.Generator, blocks: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = super().sample_noise(generator, blocks)
        return value, slope * self.rows[blocks]  # each block depends on its own coordinate only


class Groups(Affine):
    """S2: CVaR of L_i(w) = |w - e_i|^2 / 2: w* = (1/n) 1, where all groups tie."""

    kind = "cvar"
    curvature = 1.0
    ratio = 0.25
    start = _line(-1.0, 1.0)  # off the symmetric line, or all groups would tie from the start
    optimum = 0.5 * (1 - 1 / 8)
    rows = -torch.eye(8, dtype=torch.float64)
    shifts = torch.full((8,), 0.5, dtype=torch.float64)


class Box(Affine):
    """S3: min |w - a|^2 / 2 subject to w_i <= b = 0.3: w* = b, the multipliers are a - b.

    They differ, 0.1 to 0.8. (Were they all alike, a hinge of twice their size would be free of
    the bias that noise in u causes, and tuning the penalty would find it.)
    """

    kind = "constrained"
    outer = Hinge(8 * 1.6)  # rho/m is twice the largest multiplier
    target = 0.3 + _line(0.1, 0.8)
    start = _line(1.0, -1.0)  # not all alike, or one lucky moment would solve all constraints
    optimum = float((target - 0.3).square().sum() / 2)
    rows = torch.eye(8, dtype=torch.float64)
    shifts = torch.full((8,), -0.3, dtype=torch.float64)


class Outside(Affine):
    """S3b: min |w - a|^2 / 2 subject to 1 - |w|^2 <= 0, |a| = 1/2: w* = a/|a|, multiplier 1/4."""

    kind = "constrained"
    curvature = -2.0
    total = 1
    outer = Hinge(1.0)  # four times the multiplier
    target = _numbers(0.3, -0.3, 0.2, 3**0.5 / 10)
    # Off the ray of the solution, so that the way there follows the bent constraint.
    start = _numbers(0.8, 0.8, 0.0, 0.0)
    optimum = 0.125
    rows = torch.zeros(1, 4, dtype=torch.float64)
    shifts = torch.ones(1, dtype=torch.float64)


def _logistic_data() -> Tensor:
    """Label times features, shape (groups, samples, d): sines, the same on every machine."""
    count = torch.arange(10 * 100 * 6, dtype=torch.float64).view(10, 100, 6)
    # Two uniform numbers from the fractional parts of multiples of irrational ones.
    noise = (count * 0.7548776662466927).frac() + (count * 0.5698402909980532).frac() - 1
    group = torch.arange(10, dtype=torch.float64).view(10, 1, 1)
    mean = torch.full((10, 1, 6), 0.4, dtype=torch.float64) + 0.3 * (group + count[0, :1]).sin()
    mean[8:, :, -1] = -0.8  # the last feature misleads in two groups
    mean[:8, :, -1] = 0.9
    return mean + (1.5 + group / 10) * noise


class Logistic(Problem):
    """0.05/2 |w|^2 + CVaR of the logistic losses of 10 groups of 100 samples, 2 of them hard.

    Samples are drawn from the groups' data with replacement; the noise is theirs.
    """

    kind = "cvar"
    ratio = 0.2
    decay = 0.05
    total = 10
    start = torch.zeros(6, dtype=torch.float64)
    optimum = 0.38841819  # by cvxpy, in a test
    data = _logistic_data()

    def draw(self, generator: torch.Generator, blocks: Tensor) -> Batch:
        shape = (*blocks.shape, self.samples)
        sample = torch.randint(self.data.shape[1], shape, generator=generator)
        rows = self.data[blocks.unsqueeze(-1), sample]
        return Batch(blocks, rows.flatten(-3, -2), torch.zeros(blocks.shape))

    def values(self, w: Tensor, batch: Batch) -> Tensor:
        margin = torch.bmm(w, batch.direction.mT)
        return softplus(-margin).unflatten(-1, (-1, self.samples)).mean(-1)

    def pull(self, w: Tensor, batch: Batch, weights: Tensor) -> Tensor:
        margin = torch.bmm(w, batch.direction.mT).unflatten(-1, (-1, self.samples))
        slope = torch.sigmoid(-margin) * (-weights / self.samples).unsqueeze(-1)
        return torch.bmm(slope.flatten(-2), batch.direction)

    def exact(self, w: Tensor) -> Tensor:
        return softplus(-torch.einsum("...d,gkd->...gk", w, self.data)).mean(-1)

    def base(self, w: Tensor) -> Tensor:
        return self.decay * w

    def loss(self, w: Tensor) -> Tensor:
        return self.decay / 2 * w.square().sum(-1)


PROBLEMS: dict[str, Problem] = {
    each.name: each
    for each in (
        Separable("S1", blocks=2, samples=1, noise=(0.3, 0.1)),
        Groups("S2", blocks=2, samples=1, noise=(0.3, 0.1)),
        Box("S3", blocks=2, samples=1, noise=(0.3, 0.1)),
        Outside("S3b", blocks=1, samples=1, noise=(0.3, 0.1)),
        # The noise is in the data; 0.22 is what it amounts to at the solution, for the ranges.
        Logistic("logistic", blocks=2, samples=2, noise=(0.22, 0.0)),
    )
}
