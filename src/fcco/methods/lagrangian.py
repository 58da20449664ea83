r"""Proximal points with multipliers: OSS (virtual queues) and ICPPAC (constraint extrapolation).

Round k approximately solves the strongly convex problem

.. math::
    \min_x\; g_0(x) + c\|x - w_k\|^2 \quad\text{s.t.}\quad
    \phi_i(x) = g_i(x) - \text{tolerance}_i + c\|x - w_k\|^2 \le 0

by T primal-dual steps on its Lagrangian; w_{k+1} is the mean of x_1, ..., x_T.

The derivatives of the constraints along a step, J v, are averaged over the ranks of DDP; FSDP2 is
refused. Of several batches before one step the queues take the mean, and ConEx moves the
multipliers by the first.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _checks
from .._distributed import Group, find_group, patience
from ..optim.wrapper import SharedGroupsOptimizer
from ..previous import PreviousParameters, any_sharded, parameters_at
from ..rules.proximal import proximal_value, pull_strength, regularised, running_average
from ..terms.limits import UnsampledTerm
from ..tracker import NonFiniteValue, Tracked
from .settings import Problem, Settings

# The primal steps.


class ProximalRound(SharedGroupsOptimizer):
    r"""The primal part of OSS and ICPPAC as an optimizer: step it like any other.

    .. math::
        x_{t+1} = x_t - \eta_t\bigl(G_t + 2c(1 + \textstyle\sum_i y_i)(x_t - w)\bigr),
            \quad x_0 = w, \qquad
        w^+ = \frac1T\sum_t x_{t+1}

    G_t is the gradient in `.grad`; the pull to the anchor w is added here, because the proximal
    term is part of the objective and of every constraint. `primal` makes the steps: plain SGD is
    the method itself, and the momentum of others survives the jump to the average.
    """

    def __init__(self, primal: torch.optim.Optimizer, rule: Oss, term: LagrangianTerm) -> None:
        super().__init__(primal)
        if any_sharded(self.parameters):
            raise TypeError(f"`{rule.word}` cannot train a sharded model (FSDP2); use DDP.")
        self.rule, self.inner_steps = rule, rule.inner_steps
        self.term = term  # holds the y_i, and is told of a move where the rule follows the step
        term.rounds = self
        self.inner_step, self.round = 0, 0
        self._anchor: list[Tensor] = []  # w and the average of x, one tensor per parameter
        self._average: list[Tensor] = []

    @property
    def round_begins(self) -> bool:
        return self.inner_step == 0

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """Inside, the parameters are w_k, the point between rounds: evaluate or save it here."""
        anchors = dict(zip(self.parameters, self._anchor, strict=False))
        with parameters_at(anchors, self.model):
            yield

    def quadratic(self, point: Sequence[Tensor], move: Sequence[Tensor]) -> Tensor:
        """The proximal term at x along v, c (|x - w|^2 + 2 <x - w, v>)."""
        triples = zip(self._anchor, point, move, strict=False)
        parts = [proximal_value(x - w, v) for w, x, v in triples]
        if not parts:  # between rounds: x = w
            return torch.zeros(())
        return self.rule.coefficient * torch.stack([part.to(parts[0]) for part in parts]).sum()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = self._evaluated(closure)
        parameters, follows = self.parameters, self.rule.follows_step
        for x in parameters[len(self._anchor) :]:  # all at the start of a round, later a new group
            self._anchor.append(x.detach().clone())
            wide = torch.promote_types(x.dtype, torch.float32)  # steps of 1/t vanish in bfloat16
            self._average.append(x.detach().to(wide, copy=True))
        before = [x.detach().clone() for x in parameters] if follows else []
        strength = pull_strength(self.rule.coefficient, self.term.multiplier.sum())
        for x, w in zip(parameters, self._anchor, strict=True):
            away = x.detach() - w
            if x.grad is not None:
                x.grad.add_(away * strength.to(away))
            elif bool(away.any()):  # moved before; a parameter that nothing uses stays alone
                x.grad = away * strength.to(away)
        self.step_wrapped(self.wrapped[0], self.rule.factor)
        if follows:
            move = [x.detach() - old for x, old in zip(parameters, before, strict=True)]
            self.term.follow(before, move)
        self.inner_step += 1
        for x, average in zip(parameters, self._average, strict=True):
            average.copy_(running_average(average, x.detach(), self.inner_step))
            if self.inner_step >= self.inner_steps:
                x.copy_(average)
        if self.inner_step >= self.inner_steps:
            self._anchor, self._average = [], []
            self.inner_step, self.round = 0, self.round + 1
        return loss

    def own_state(self) -> dict[str, Any]:
        kept = copy.deepcopy({"anchor": self._anchor, "average": self._average})
        return {"inner_step": self.inner_step, "round": self.round, **kept}

    def load_own_state(self, state: dict[str, Any]) -> None:
        self.inner_step, self.round = state["inner_step"], state["round"]
        for kept, name in ((self._anchor, "anchor"), (self._average, "average")):
            pairs = zip(state[name], self.parameters, strict=False)
            kept[:] = [part.to(x.device, copy=True) for part, x in pairs]


# The dual steps.


class Linearised:
    r"""g(x) + J v, also after the parameters have moved on from x.

    .. math:: J v = \frac{\partial}{\partial y}\,\bigl\langle J^\top y,\; v\bigr\rangle

    The vector-Jacobian product is linear in y, so its derivative along y is J v: one backward pass
    with a graph when this is built, one more for each direction v. The graph of `values` stays
    usable. The gradient is averaged over the ranks of `group`.
    """

    def __init__(
        self, values: Tensor, parameters: Sequence[Tensor], group: Group | None = None
    ) -> None:
        self.values, self._group = values.detach(), group
        self._probe = torch.zeros_like(values, requires_grad=True)  # y
        self._pulled: list[Tensor | None] = [None for _ in parameters]  # J^T y
        if values.requires_grad:
            moving = [p for p in parameters if p.requires_grad]
            storages = {p.untyped_storage().data_ptr() for p in moving}

            def copied(tensor: Tensor) -> Tensor:
                of_parameter = tensor.untyped_storage().data_ptr() in storages
                return tensor.detach().clone() if of_parameter else tensor

            # A step changes the parameters in place, and the derivative of a product needs them.
            hooks = torch.autograd.graph.saved_tensors_hooks(copied, lambda tensor: tensor)
            with torch.autocast(values.device.type, enabled=False), hooks:
                pulled = iter(torch.autograd.grad(
                    values, moving, self._probe, create_graph=True, allow_unused=True
                ))  # fmt: skip
            self._pulled = [next(pulled) if p.requires_grad else None for p in parameters]

    def change(self, move: Sequence[Tensor]) -> Tensor:
        """J v for a move v, one tensor per parameter."""
        change = torch.zeros_like(self.values)
        with torch.autocast(change.device.type, enabled=False), torch.enable_grad():
            both = zip(self._pulled, move, strict=True)
            parts = [torch.sum(pulled * part) for pulled, part in both if pulled is not None]
            if parts:
                total = torch.stack(parts).sum()
                (change,) = torch.autograd.grad(total, self._probe, retain_graph=True)
        if self._group is not None:
            with patience:
                torch.distributed.all_reduce(change, group=self._group.handle)
            change = change / self._group.size
        return change


class LagrangianTerm(UnsampledTerm):
    """The multipliers y of all constraints, and how they move in a round."""

    multiplier: Tensor
    last: Tensor
    rounds: ProximalRound

    def __init__(self, problem: Problem, rule: Oss) -> None:
        super().__init__(rule.word, problem.model, problem.number, problem.limits)
        self.rule, self._process_group = rule, problem.process_group
        self.looks_back = not rule.follows_step
        self.ahead: Tensor | None = None  # l_t, measured before the step for rules that want it
        self.ascended = False  # whether y has moved in the step under way
        self._lines: list[Linearised] = []
        zeros = torch.zeros_like(self.tracker.rows)
        self.register_buffer("multiplier", zeros)
        self.register_buffer("last", zeros.clone())

    def linearised(self, tracked: Tracked) -> Linearised:
        values = self.limits.excess(tracked.carrying_gradient(), tracked.index)
        return Linearised(values, self.rounds.parameters, find_group(self._process_group))

    def look_back(
        self, pooled: Callable[[], Tracked], previous: PreviousParameters, independent: bool
    ) -> None:
        """l_t = phi(x_{t-1}) + <grad phi(x_{t-1}), x_t - x_{t-1}> on this batch (ConEx)."""
        if self.ascended:  # a further batch of the same step
            return
        parameters = self.rounds.parameters
        moved = previous.moved() if previous.ready else {}
        move = [moved.get(p, torch.zeros_like(p)).detach() for p in parameters]

        def measure() -> Tensor:
            line = self.linearised(pooled())
            proximal = self.rounds.quadratic([p.detach() for p in parameters], move)
            return regularised(line.values, line.change(move), proximal)

        ahead = previous.evaluate_with_graph(measure)
        if not bool(torch.isfinite(ahead).all()):
            raise NonFiniteValue("Constraint values are NaN or infinite; nothing was updated.")
        self.ahead = ahead

    def loss(self, tracked: Tracked) -> Tensor:
        if tracked.step is not None:
            if self.rounds.round_begins and self.rule.follows_step and not self.ascended:
                self.multiplier.zero_()
            if self.rule.follows_step:
                self._lines.append(self.linearised(tracked))
            elif self.ahead is not None:
                self._ascend(self.ahead)
        excess = self.limits.excess(tracked.value, tracked.index)
        slope = self.signed(self.multiplier)
        return tracked.as_loss(torch.dot(self.multiplier, excess), slope)

    def follow(self, point: Sequence[Tensor], move: Sequence[Tensor]) -> None:
        """Move y after a primal step, with the samples that it used."""
        if not self._lines:  # a step on another loss
            return
        values = self._lines[-1].values  # of all batches of the step, which the tracker pools
        change = torch.stack([line.change(move) for line in self._lines]).mean(0)
        self._ascend(regularised(values, change, self.rounds.quadratic(point, move)))

    def _ascend(self, values: Tensor) -> None:
        before = values if self.rounds.round_begins else self.last
        self.multiplier.copy_(self.rule.dual(self.multiplier, values, before))
        self.last.copy_(values)
        self.ascended, self.ahead = True, None

    def forget(self) -> None:
        """Drop what belongs to the step under way; a move of y stays (ConEx)."""
        self.ascended, self.ahead = False, None
        self._lines.clear()

    def value(self) -> Tensor:
        return torch.dot(self.multiplier, self.limits.excess(self.tracker.rows))

    def multipliers_at(self, values: Tensor) -> Tensor:
        """y, or Q/V."""
        return self.signed(self.multiplier)


# The methods.


@dataclass(frozen=True, kw_only=True)
class Oss(Settings):
    r"""OSS: quadratically regularised subproblems, solved with virtual queues.

    With c = rho-hat/2 and phi_i above, round k starts at x_0 = w_k, y = 0, and makes T steps

    .. math::
        x_{t+1} &= \Pi_X\Bigl(x_t - \tfrac1{2\sqrt T}\bigl(\nabla\phi_0
            + \textstyle\sum_i y_i\nabla\phi_i\bigr)(x_t;\xi_t)\Bigr) \\
        y_i &\leftarrow \Bigl[y_i + \tfrac1{\sqrt T}\bigl(\phi_i(x_t;\xi_t)
            + \langle\nabla\phi_i(x_t;\xi_t), x_{t+1}-x_t\rangle\bigr)\Bigr]_+

    (the source averages x_0, ..., x_{T-1}; its queues are Q = sqrt(T) y, its alpha is T). Since y
    ends at the sum of the violations over sqrt(T), w_{k+1} is about nu*/sqrt(T) above a limit whose
    multiplier is nu*: choose T, or `margin`, by that law. Plain SGD with lr=1 is the printed
    method, another lr scales its step.

    Args:
        proximal: rho-hat, above the weak convexity rho of g_0 and of all g_i; 2 rho is usual.
        inner_steps: T.

    References:
        R. Ma, Q. Lin and T. Yang, ICML 2020 (the rounds). H. Yu, M. Neely and X. Wei, NeurIPS 2017
        (the steps).
    """

    proximal: float
    inner_steps: int

    word = "oss"
    couples = False
    sampled = False
    follows_step: ClassVar[bool] = True  # y moves after the step, along it; from 0 in each round

    @property
    def coefficient(self) -> float:
        """The weight c of the proximal term."""
        return self.proximal / 2

    @property
    def factor(self) -> float:
        """Of the optimizer's step; the 2 is that of the source's alpha |x - x_t|^2."""
        return 1 / (2 * math.sqrt(self.inner_steps))

    def dual(self, y: Tensor, now: Tensor, before: Tensor) -> Tensor:
        """The next y = Q/V, from l_t and l_{t-1}, with the source's V = sqrt(T)."""
        return (y + now / math.sqrt(self.inner_steps)).clamp(min=0)

    def term(self, problem: Problem) -> LagrangianTerm:
        _checks.positive(self.word, "proximal", self.proximal)
        _checks.integer(self.word, "inner_steps", self.inner_steps, 1)
        return LagrangianTerm(problem, self)

    def stepped(self, optimizer: torch.optim.Optimizer, term: Any) -> ProximalRound:
        return ProximalRound(optimizer, self, term)


@dataclass(frozen=True, kw_only=True)
class Icppac(Oss):
    r"""ICPPAC: inexact constrained proximal points, solved with constraint extrapolation.

    With c = mu, round k starts at x_{-1} = x_0 = w_k and makes T steps

    .. math::
        \ell_t &= \phi(x_{t-1};\bar\xi_t) + \phi'(x_{t-1};\bar\xi_t)(x_t - x_{t-1}), \qquad
        s_t = (1+\theta)\ell_t - \theta\ell_{t-1} \\
        y_{t+1} &= [y_t + s_t/\tau]_+, \qquad
        x_{t+1} = \Pi_X\Bigl(x_t - \eta\bigl(\phi_0'
            + \textstyle\sum_i y_{t+1,i}\phi_i'\bigr)(x_t;\xi_t)\Bigr)

    (l_{-1} = l_0). The method draws two batches per step: pass `objective(dual_batch,
    gradient=primal_batch)`; with one function, one batch serves both. Plain SGD is the method; its
    lr is eta (a step; the source's eta is its inverse).

    Args:
        proximal: mu; convex rounds need 2 mu at least the weak convexity of every function.
        inner_steps: T.
        tau: divisor of the dual step, tried in {1, 10, 100}.
        theta: extrapolation; 0 is Arrow-Hurwicz with linearised values.

    References:
        D. Boob, Q. Deng and G. Lan, Mathematical Programming 197, 2023.
    """

    tau: float = 10.0
    theta: float = 0.1

    word = "icppac"
    follows_step = False

    @property
    def coefficient(self) -> float:
        return self.proximal

    @property
    def factor(self) -> float:
        return 1.0

    def dual(self, y: Tensor, now: Tensor, before: Tensor) -> Tensor:
        # In the first step of a round `before` is `now`: it is not extrapolated.
        ahead = (1 + self.theta) * now - self.theta * before
        return (y + ahead / self.tau).clamp(min=0)

    def term(self, problem: Problem) -> LagrangianTerm:
        _checks.positive(self.word, "tau", self.tau)
        _checks.at_least(self.word, "theta", self.theta, 0.0)
        return super().term(problem)
