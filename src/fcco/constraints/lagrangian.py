"""Constraints by a Lagrangian around a moving anchor (OSS, ICPPAC)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._distributed import find_group
from ..inner import split
from ..objective import Inner
from ..previous import PreviousParameters
from ..reading import ONLY
from ..tracker import Tracked
from ..visit import any_sharded
from .base import ConstrainedObjective
from .every import EveryConstraint
from .linearised import Linearised, regularised
from .rounds import ProximalRound
from .rules import DualRule

__all__ = ["LagrangianTerm", "ProximalLagrangian"]


class LagrangianTerm(EveryConstraint):
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
        tolerance: float | Sequence[float] | Tensor = 0.0,
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
        self.ahead: Tensor | None = None  # l_t, measured before the step for rules that want it
        self.ascended = False  # whether y has moved in the step under way
        self._lines: list[Linearised] = []
        zeros = torch.zeros_like(self.tracker.value).squeeze(-1)
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

    def loss(self, tracked: Tracked) -> Tensor:
        """sum_i y_i (g_i - tolerance_i)."""
        if self.updating:
            if self.rounds.round_begins and not self.rule.warm_start and not self.ascended:
                self.multiplier.zero_()
            if self.rule.follows_step:
                self._lines.append(self.linearised(tracked))
            elif self.ahead is not None:
                self._ascend(self.ahead)
        excess = self.limits.excess(tracked.value, tracked.index)
        return tracked.attach(torch.dot(self.multiplier, excess), self.multiplier)

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

    def close(self) -> bool:
        """End an optimizer step."""
        self.ascended, self.ahead = False, None
        self._lines.clear()
        return super().close()

    def value(self) -> Tensor:
        """sum_i y_i (g_i - tolerance_i) in the last batch."""
        return torch.dot(self.multiplier, self.limits.excess(self.tracker.value.squeeze(-1)))

    def multipliers(self) -> Tensor:
        """y, or Q/V; NaN before the first call."""
        return torch.where(self.tracker.seen, self.multiplier, torch.nan)


class ProximalLagrangian(ConstrainedObjective):
    r"""Minimise g_0 under constraints by inexact proximal points: OSS and ICPPAC.

    Round k approximately solves the strongly convex problem

    .. math::
        \min_x\; g_0(x) + c\|x - w_k\|^2 \quad\text{s.t.}\quad
        g_i(x) - \text{tolerance}_i + c\|x - w_k\|^2 \le 0

    by T primal-dual steps on its Lagrangian; w_{k+1} is the average of these. The rule says how
    the multipliers move: `VirtualQueue` (OSS) or a `ConEx` (ICPPAC).

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

    samples_constraints = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        constraints: int | Sequence[str],
        *,
        rule: DualRule,
        coefficient: float,
        inner_steps: int,
        tolerance: float | Sequence[float] | Tensor = 0.0,
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
        self.rule, self._rounds = rule, term.rounds
        if not rule.follows_step:
            self.previous = PreviousParameters(model, term.rounds)
        term.rounds.hold()

    def forward(
        self,
        inner: Inner,
        index: Any = None,
        *,
        counts: Any = None,
        gradient: Inner | None = None,
        gradient_index: Any = None,
        past: Any = None,
    ) -> Tensor:
        """The Lagrangian of one batch, without its proximal term; see `Compositional.forward`.

        Args:
            inner: runs the model; with `ConEx` its batch moves the multipliers.
            index: constraint of each entry.
            counts: samples behind each entry.
            gradient: an independent batch: it carries the gradient of the primal step.
            gradient_index: its index, when that differs.
            past: not for these methods, which need derivatives at w_{t-1}.
        """
        if past is not None:
            raise ValueError(
                "`ProximalLagrangian(past=...)`: values at w_{t-1} without their derivatives are "
                "of no use here; leave it out."
            )
        if gradient is not None and self.rule.exact_values:
            raise ValueError(
                f"`ProximalLagrangian(gradient=...)`: {type(self.rule).__name__} is for exact "
                "constraint values, and an independent batch means that they are sampled; use "
                "ConstantConEx or StochasticConEx."
            )
        if not self.rule.follows_step:
            if self.term.updating and not self.term.ascended:
                self.term.ahead = self._look_back(inner, index, counts)
            if gradient is not None:
                if gradient_index is not None:
                    index, counts = gradient_index, None
                inner, gradient, gradient_index = gradient, None, None
        return super().forward(
            inner, index, counts=counts, gradient=gradient, gradient_index=gradient_index
        )

    @property
    def _corrects(self) -> bool:
        return False  # the tracker has no memory; w_{t-1} is visited for the multipliers

    def _look_back(self, inner: Inner, index: Any, counts: Any) -> Tensor:
        """l_t = phi(x_{t-1}) + <grad phi(x_{t-1}), x_t - x_{t-1}> on this batch."""
        assert self.previous is not None
        where = self._reader.layouts(index, counts)[ONLY]
        rounds, group = self._rounds, find_group(self._process_group)
        moved = self.previous.moved() if self.previous.ready else {}
        move = [moved.get(p, torch.zeros_like(p)).detach() for p in rounds.parameters]

        def measure() -> tuple[Tensor, Tensor]:
            entry = self._reader.values(split(inner())[1])[ONLY]
            jobs = {ONLY: self._job(ONLY, entry, None, entry, where, where)}
            if group is not None:
                jobs = self._with_other_ranks(jobs, group, False, False)
            tracked = self.term.tracker.update(**jobs[ONLY], group=group, commit=False)
            line = self.term.linearised(tracked)
            own = [v for p, v in zip(rounds.parameters, move, strict=True) if p.requires_grad]
            point = [p.detach() for p in rounds.parameters]
            proximal = rounds.quadratic(point, move)
            return line.values.sum(), regularised(line.values, line.change(own), proximal)

        return self.previous.gradient(measure, ())[1]

    def detach_hooks(self) -> None:
        """Stop listening to the optimizer; the inner one may step on its own again."""
        super().detach_hooks()
        self._rounds.release()
