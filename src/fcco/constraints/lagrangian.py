"""Constraints by a Lagrangian around a moving anchor (OSS, ICPPAC)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._derivatives import Linearised
from .._distributed import find_group
from ..optim import ProximalRound
from ..previous import PreviousParameters
from ..previous.swap import any_sharded
from ..terms.limits import Tolerance
from ..terms.unsampled import UnsampledTerm
from ..tracker import NonFiniteValue, Tracked
from .dual_rules import DualRule
from .objective import ConstrainedObjective

__all__ = ["LagrangianTerm", "ProximalLagrangian", "regularised"]


def regularised(values: Tensor, change: Tensor, proximal: Tensor) -> Tensor:
    """l_t: the values at x, their change along v, and the proximal term there; pure.

    Args:
        values: g(x) - tolerance.
        change: <grad g(x), v>.
        proximal: c (|x - w|^2 + 2 <x - w, v>).
    """
    return values + change + proximal.to(values)


class LagrangianTerm(UnsampledTerm):
    r"""The dual part of a proximal Lagrangian: the multipliers y, and how they move.

    Args:
        call: the method's name, for the error text.
        model: the model.
        optimizer: makes the primal steps.
        constraints: their number m, or their names.
        rule: the dual rule.
        coefficient: c of the proximal term.
        inner_steps: T.
        tolerance: one number or one per constraint.
        margin: aim for tolerance - margin.
        process_group: see `Compositional`.
    """

    multiplier: Tensor
    last: Tensor

    def __init__(
        self,
        call: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        constraints: int | Sequence[str],
        rule: DualRule,
        coefficient: float,
        inner_steps: int,
        tolerance: Tolerance = 0.0,
        margin: float = 0.0,
        process_group: Any = "auto",
    ) -> None:
        super().__init__(call, model, constraints, tolerance, margin)
        self.rounds = ProximalRound(
            optimizer, coefficient, inner_steps, rule, self.total, self._follow
        )
        if any_sharded(self.rounds.parameters):
            raise TypeError(
                f"`{call}` needs derivatives along a step, which a sharded model (FSDP2) cannot "
                "give; use DDP."
            )
        self.rule, self._process_group = rule, process_group
        self.looks_back = not rule.follows_step
        self.ahead: Tensor | None = None  # l_t, measured before the step for rules that want it
        self.ascended = False  # whether y has moved in the step under way
        self._lines: list[Linearised] = []
        zeros = torch.zeros_like(self.tracker.rows)
        self.register_buffer("multiplier", zeros)
        self.register_buffer("last", zeros.clone())

    @property
    def moving(self) -> list[Tensor]:
        """The parameters that take gradients."""
        return [p for p in self.rounds.parameters if p.requires_grad]

    def total(self) -> Tensor:
        """The sum of the multipliers."""
        return self.multiplier.sum()

    def linearised(self, tracked: Tracked) -> Linearised:
        """The values of a batch, as a function of the move from here."""
        values = self.limits.excess(tracked.carrying_gradient(), tracked.index)
        return Linearised(values, self.moving, find_group(self._process_group))

    def look_back(
        self, pooled: Callable[[], Tracked], previous: PreviousParameters, independent: bool
    ) -> None:
        """l_t = phi(x_{t-1}) + <grad phi(x_{t-1}), x_t - x_{t-1}> on this batch (ConEx)."""
        if self.ascended:  # a further batch of the same step
            return
        parameters = self.rounds.parameters
        moved = previous.moved() if previous.ready else {}
        move = [moved.get(p, torch.zeros_like(p)).detach() for p in parameters]
        own = [v for p, v in zip(parameters, move, strict=True) if p.requires_grad]

        def measure() -> Tensor:
            line = self.linearised(pooled())
            proximal = self.rounds.quadratic([p.detach() for p in parameters], move)
            return regularised(line.values, line.change(own), proximal)

        ahead = previous.evaluate_with_graph(measure)
        if not bool(torch.isfinite(ahead).all()):
            raise NonFiniteValue(
                "Constraint values are NaN or infinite at the parameters of the last step, where "
                "this method linearises them; nothing was updated."
            )
        self.ahead = ahead

    def loss(self, tracked: Tracked) -> Tensor:
        """sum_i y_i (g_i - tolerance_i)."""
        if tracked.step is not None:
            if self.rounds.round_begins and not self.rule.warm_start and not self.ascended:
                self.multiplier.zero_()
            if self.rule.follows_step:
                self._lines.append(self.linearised(tracked))
            elif self.ahead is not None:
                self._ascend(self.ahead)
        excess = self.limits.excess(tracked.value, tracked.index)
        slope = self.signed(self.multiplier)
        return tracked.as_loss(torch.dot(self.multiplier, excess), slope)

    def _follow(self, point: Sequence[Tensor], move: Sequence[Tensor]) -> None:
        """Move y after a primal step, with the samples that it used."""
        if not self._lines:  # a step on another loss
            return
        own = [v for p, v in zip(self.rounds.parameters, move, strict=True) if p.requires_grad]
        values = self._lines[-1].values  # of all batches of the step, which the tracker pools
        change = torch.stack([line.change(own) for line in self._lines]).mean(0)
        self._ascend(regularised(values, change, self.rounds.quadratic(point, move)))

    def _ascend(self, values: Tensor) -> None:
        rounds = self.rounds
        before = values if rounds.round_begins else self.last
        y = self.rule.dual(self.multiplier, values, before, rounds.inner_step, rounds.inner_steps)
        self.multiplier.copy_(y)
        self.last.copy_(values)
        self.ascended, self.ahead = True, None

    def forget(self) -> None:
        """Drop what belongs to the step under way; a move of y stays (ConEx)."""
        self.ascended, self.ahead = False, None
        self._lines.clear()

    def value(self) -> Tensor:
        """sum_i y_i (g_i - tolerance_i) in the last batch."""
        return torch.dot(self.multiplier, self.limits.excess(self.tracker.rows))

    def multipliers(self) -> Tensor:
        """y, or Q/V; NaN before the first call."""
        return torch.where(self.tracker.seen, self.signed(self.multiplier), torch.nan)


class ProximalLagrangian(ConstrainedObjective):
    r"""Minimise g_0 under constraints by inexact proximal points: OSS and ICPPAC.

    Round k approximately solves the strongly convex problem

    .. math::
        \min_x\; g_0(x) + c\|x - w_k\|^2 \quad\text{s.t.}\quad
        g_i(x) - \text{tolerance}_i + c\|x - w_k\|^2 \le 0

    by T primal-dual steps on its Lagrangian; w_{k+1} is the average of these. The rule says how
    the multipliers move: `VirtualQueue` (OSS) or `ConstantConEx` (ICPPAC).

    The function you pass returns `(g_0, values of all constraints)`. Step `objective.optimizer`, a
    `ProximalRound`, which adds the pull to w_k and makes the steps with your optimizer. Between
    rounds the parameters are w_k. For the output of the theorems, w_k of a random round, keep a
    copy after each round (`objective.optimizer.round_begins`).

    The rules use derivatives of the constraints along a step, J v, found by differentiating their
    backward pass: every operation of the constraints must allow that. Under DDP J v is averaged
    over ranks; FSDP2 is refused. With several batches before one step (gradient accumulation),
    the queues take the mean of them all, and ConEx moves the multipliers by the first.

    Args:
        model: your model.
        optimizer: makes the primal steps; the rule's step size is a factor of its own. Plain SGD
            is the method itself.
        constraints: their number m, or their names.
        rule: the dual rule.
        coefficient: c; convex rounds need 2c above the weak convexity of every function.
        inner_steps: T.
        tolerance: g_i <= tolerance_i, one number or one per constraint.
        margin: aim for tolerance - margin.
        process_group: see `Compositional`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        constraints: int | Sequence[str],
        *,
        rule: DualRule,
        coefficient: float,
        inner_steps: int,
        tolerance: Tolerance = 0.0,
        margin: float = 0.0,
        process_group: Any = "auto",
    ) -> None:
        term = LagrangianTerm(
            "ProximalLagrangian",
            model,
            optimizer,
            constraints,
            rule,
            coefficient,
            inner_steps,
            tolerance,
            margin,
            process_group,
        )
        super().__init__(model, term.rounds, term, process_group=process_group)
