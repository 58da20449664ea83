"""The problems of the registry, with known answers and finitely many noisy samples per block.

The noise of each block is a table of values with mean zero, so that a batch is noisy, the exact
value is a full pass, and methods with snapshots apply.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import numpy as np
import torch
from problems import Point, program
from torch import Tensor

import fcco

DOUBLE, SAMPLES = torch.float64, 16


@dataclass
class Draw:
    """One batch: the closure, the block of each entry, and a closure of an independent batch."""

    inner: Callable[[], Any]
    index: Tensor
    gradient: Callable[[], Any] | None = None


class MethodProblem(abc.ABC):
    """A loss g0 (or None) and n inner functions, seen through noise."""

    outer: fcco.outer.AbstractOuter
    blocks: int  # sampled per step
    start: np.ndarray
    solution: np.ndarray
    loss_noise: float = 0.0

    def __init__(self, number: int, noise: float, seed: int = 0) -> None:
        self.number, self.generator = number, torch.Generator().manual_seed(seed)
        table = torch.randn((number, SAMPLES), generator=self.generator, dtype=DOUBLE)
        table -= table.mean(1, keepdim=True)
        self.noise = noise * table / table.std(1, keepdim=True, correction=0)

    @abc.abstractmethod
    def exact(self, w: Tensor) -> Tensor:
        """g(w), without noise."""

    def loss(self, w: Tensor) -> Tensor | None:
        return None

    def error(self, w: Tensor) -> float:
        return float(np.abs(w.detach().numpy() - self.solution).max())

    def model(self) -> Point:
        return Point(self.start)

    def closure(self, model: Point, blocks: Tensor, samples: Tensor) -> Callable[[], Any]:
        noise, shift = self.noise[blocks, samples], 0.0
        if self.loss_noise:
            draw = torch.randn((), generator=self.generator, dtype=DOUBLE)
            shift = self.loss_noise * draw.item()

        def inner() -> Any:
            values = self.exact(model.w)[blocks] + noise
            loss = self.loss(model.w)
            return values if loss is None else (loss + shift, values)

        return inner

    def draw(
        self,
        model: Point,
        per_block: int = 1,
        independent: bool = False,
        every: bool = False,
        samples: list[int] | None = None,
    ) -> Draw:
        count = self.number if every else self.blocks
        chosen = torch.randperm(self.number, generator=self.generator)[:count].sort().values
        index = chosen.repeat_interleave(len(samples or ()) or per_block)

        def one() -> Callable[[], Any]:
            if samples is not None:
                return self.closure(model, index, torch.tensor(samples).repeat(count))
            rows = [torch.randperm(SAMPLES, generator=self.generator)[:per_block] for _ in chosen]
            return self.closure(model, index, torch.cat(rows))

        return Draw(one(), index, one() if independent else None)

    def everything(self, model: Point) -> Draw:
        """The whole data set as one batch."""
        return self.draw(model, every=True, samples=list(range(SAMPLES)))


class Groups(MethodProblem):
    """S2: CVaR over L_i = |w - e_i|^2 / 2; w* = 1/n, s* = (1 - 1/n) / 2. s is the last entry."""

    ratio, blocks = 0.25, 4
    outer = fcco.outer.Hinge(1 / 0.25)

    def __init__(self) -> None:
        super().__init__(8, noise=0.1)
        self.start = np.append(np.linspace(-0.5, 0.8, 8), 0.5)
        self.solution = np.full(8, 1 / 8)

    def losses(self, w: Tensor) -> Tensor:
        return (w[:8] - torch.eye(8, dtype=DOUBLE)).square().sum(1) / 2

    def exact(self, w: Tensor) -> Tensor:
        return self.losses(w) - w[8]

    def loss(self, w: Tensor) -> Tensor:
        return w[8]

    def error(self, w: Tensor) -> float:
        return float(np.linalg.norm(w.detach().numpy()[:8] - self.solution))


class GroupLosses(Groups):
    """S2 for methods that weigh groups themselves: the inner values are the losses, no s."""

    def exact(self, w: Tensor) -> Tensor:
        return self.losses(w)

    def loss(self, w: Tensor) -> None:
        return None


class Box(MethodProblem):
    """S3: min |w - a|^2 / 2 subject to w_i <= b; w* = b, multipliers a - b = 0.7."""

    outer, blocks, start, solution = fcco.outer.Hinge(6.0), 2, np.zeros(3), np.full(3, 0.3)

    def __init__(self) -> None:
        super().__init__(3, noise=0.1)

    def exact(self, w: Tensor) -> Tensor:
        return w - 0.3

    def loss(self, w: Tensor) -> Tensor:
        return (w - 1).square().sum() / 2


class OutsideBall(MethodProblem):
    """S3b: min |w - a|^2 / 2 subject to 1 - |w|^2 <= 0; w* = a / |a|, multiplier 0.25."""

    outer, blocks, start = fcco.outer.Hinge(2.0), 1, np.array([1.0, 0.5])
    a = np.array([0.3, 0.4])
    solution = np.array([0.6, 0.8])

    def __init__(self) -> None:
        super().__init__(1, noise=0.1)

    def exact(self, w: Tensor) -> Tensor:
        return (1 - w.square().sum()).unsqueeze(0)

    def loss(self, w: Tensor) -> Tensor:
        return (w - torch.as_tensor(self.a)).square().sum() / 2


class Kinks(MethodProblem):
    """S4: |w - t|^2 / 2 + (rho/n) sum_i [|a_i.w| - b_i - (c/2)|w|^2]_+ in the unit ball.

    The inner functions have kinks and are c-weakly convex; rho c < 1 makes the sum convex, so that
    cvxpy finds the solution. It lies on a kink of an inner and of an outer function.
    """

    rho, weak, blocks, start = 3.0, 0.3, 3, np.array([-0.7, 0.6])
    outer = fcco.outer.Hinge(3.0)
    target = np.array([0.9, 0.6])

    def __init__(self) -> None:
        super().__init__(6, noise=0.05)
        angle = np.pi * np.arange(6) / 6
        self.rows = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        self.limits = np.array([0.3, 0.4, 0.2, 0.3, -0.2, 0.1])
        self.solution = self.solve()

    def exact(self, w: Tensor) -> Tensor:
        rows, limits = torch.as_tensor(self.rows), torch.as_tensor(self.limits)
        return (rows @ w).abs() - limits - self.weak / 2 * w.square().sum()

    def loss(self, w: Tensor) -> Tensor:
        return (w - torch.as_tensor(self.target)).square().sum() / 2

    def solve(self) -> np.ndarray:
        """cvxpy, with [h - q]_+ = max(h, q) - q for the convex h = |a.w| - b, q = (c/2)|w|^2."""
        w = cp.Variable(2)
        half = cp.sum_squares(w) / 2
        tops = [
            cp.maximum(cp.abs(row @ w) - limit, self.weak * half)
            for row, limit in zip(self.rows, self.limits, strict=True)
        ]
        left = (1 - self.rho * self.weak) * half - self.target @ w
        problem = cp.Problem(cp.Minimize(left + self.rho * sum(tops) / 6), [cp.norm(w) <= 1])
        problem.solve(solver=cp.CLARABEL)
        assert w.value is not None
        return w.value


class Smooth(MethodProblem):
    """A squared hinge of eight linear functions: |w - a|^2 / 2 + (1/n) sum_i (rho/2)[g_i]_+^2."""

    rho, blocks, start = 16.0, 4, np.zeros(6)
    outer = fcco.outer.SquaredHinge(16.0)

    def __init__(self) -> None:
        super().__init__(8, noise=0.05)
        self.linear = program(noise=0.0)
        penalty = lambda g: self.rho / 2 * cp.sum(cp.square(cp.pos(g))) / 8  # noqa: E731
        self.solution = self.linear.solve(penalty)[0]

    def exact(self, w: Tensor) -> Tensor:
        return self.linear.exact(w)

    def loss(self, w: Tensor) -> Tensor:
        return self.linear.loss(w)


class Exponents(MethodProblem):
    """|w - a|^2 / 2 + (tau/n) sum_i log E exp(s_i), s_i = x_i.w + b_i with samples (x_i, b_i)."""

    temperature, blocks, start = 0.5, 3, np.array([2.0, -2.0])
    a = np.array([0.5, 1.0])

    def __init__(self) -> None:
        super().__init__(6, noise=1.0)
        rows = torch.randn((6, SAMPLES, 2), generator=self.generator, dtype=DOUBLE)
        self.rows, self.level = rows, 3 * torch.arange(6, dtype=DOUBLE)  # sizes of u differ
        w = cp.Variable(2)
        shift = (self.noise + self.level[:, None]).numpy() - np.log(SAMPLES)
        parts = [cp.log_sum_exp(x @ w + b) for x, b in zip(rows.numpy(), shift, strict=True)]
        loss = cp.sum_squares(w - self.a) / 2 + self.temperature * sum(parts) / 6
        cp.Problem(cp.Minimize(loss)).solve(solver=cp.CLARABEL)
        assert w.value is not None
        self.solution = w.value

    def exact(self, w: Tensor) -> Tensor:
        return (self.rows @ w + self.noise + self.level[:, None]).logsumexp(1)

    def loss(self, w: Tensor) -> Tensor:
        return (w - torch.as_tensor(self.a)).square().sum() / 2

    def closure(self, model: Point, blocks: Tensor, samples: Tensor) -> Callable[[], Any]:
        x, b = self.rows[blocks, samples], (self.noise + self.level[:, None])[blocks, samples]
        return lambda: (self.loss(model.w), x @ model.w + b)


KINDS: dict[str, type[MethodProblem]] = {
    "S2": Groups, "S3": Box, "S3b": OutsideBall, "S4": Kinks, "smooth": Smooth,
    "exponents": Exponents,
}  # fmt: skip
