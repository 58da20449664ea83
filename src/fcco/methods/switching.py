"""SSG: a step on the objective when the constraints hold, else on the worst of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .. import _checks
from .._schedules import Schedule, at_step
from ..optim.wrapper import SharedGroupsOptimizer
from ..rules.switching import decide, noise_of_worst, polyak_length
from ..terms.limits import UnsampledTerm
from ..tracker import Tracked
from .settings import Auto, Problem, Settings


class Decision(NamedTuple):
    """Which function a step is for: i*, or None for the objective; and the largest excess."""

    constraint: int | None
    excess: float


class SwitchingTerm(UnsampledTerm):
    """The constraints, which branch was taken, and the sizes of the steps of each."""

    objective_steps: Tensor
    constraint_steps: Tensor
    needs_objective = True

    def __init__(self, problem: Problem, threshold: Schedule | Auto) -> None:
        if isinstance(threshold, str):
            _checks.one_of("ssg", "threshold", threshold, ("auto",))
        elif not callable(threshold):
            _checks.at_least("ssg", "threshold", threshold, 0.0)
        model, number, limits = problem.model, problem.number, problem.limits
        super().__init__("ssg", model, number, limits, measure=threshold == "auto")
        self.schedule = threshold
        self.open: Decision | None = None  # of the step under way
        self.last: Decision | None = None  # of the last call, which may be an evaluation
        zeros = torch.zeros_like(self.tracker.rows)
        self.register_buffer("objective_steps", zeros.sum())
        self.register_buffer("constraint_steps", zeros)

    def threshold(self, excess: Tensor) -> float:
        """The current eps_t."""
        if isinstance(self.schedule, str):
            assert self.tracker.estimate is not None
            return noise_of_worst(excess, self.tracker.estimate.difference).item()
        value = at_step(self.schedule, self.step)
        _checks.at_least("ssg", "threshold", value, 0.0)
        return value

    def loss(self, tracked: Tracked) -> Tensor:
        excess = self.limits.excess(tracked.value, tracked.index)
        updating = tracked.step is not None
        decision = self.open if updating else None
        if decision is None:
            found = decide(excess, self.threshold(excess))
            worst, which, feasible = (part.item() for part in found)
            decision = Decision(None if feasible else int(which), worst)
            if updating:  # further batches of the same step follow the first
                self.open = decision
        self.last = decision
        self.replaces_objective = decision.constraint is not None
        if decision.constraint is None:
            return torch.zeros_like(excess[0])
        slope = torch.zeros_like(excess)
        slope[decision.constraint] = 1.0
        return tracked.as_loss(excess[decision.constraint], self.signed(slope))

    @property
    def feasible(self) -> bool:
        """Whether the last call found the constraints satisfied up to the threshold."""
        return self.last is not None and self.last.constraint is None

    def taken(self, size: float) -> None:
        """Note the size of the step that was made."""
        assert self.open is not None
        if self.open.constraint is None:
            self.objective_steps += size
        else:
            self.constraint_steps[self.open.constraint] += size

    def forget(self) -> None:
        self.open = None

    def value(self) -> Tensor:
        return self.limits.excess(self.tracker.rows).max()

    def multipliers_at(self, values: Tensor) -> Tensor:
        """Steps for each constraint over steps for the objective; NaN before one of these."""
        steps = self.signed(self.constraint_steps) / self.objective_steps
        return torch.where(self.objective_steps > 0, steps, torch.nan)


class SwitchingOptimizer(SharedGroupsOptimizer):
    """Steps one of two optimizers: that of the objective or that of the constraints.

    Two are needed as soon as an optimizer keeps something from step to step: momentum of the
    objective would go on lowering it in a step for a constraint. One must be plain SGD.
    """

    def __init__(
        self,
        objective_optimizer: torch.optim.Optimizer,
        constraint_optimizer: torch.optim.Optimizer | Literal["polyak"] | None,
        term: SwitchingTerm,
    ) -> None:
        second = constraint_optimizer or objective_optimizer
        self.polyak = isinstance(second, str)
        others = () if isinstance(second, str) else (second,)
        super().__init__(objective_optimizer, *others)
        self.term = term  # decides the branch of each step
        first = self.wrapped[0]
        if len(self.wrapped) == 1 and not self.polyak and _keeps_state(first):
            raise ValueError(
                f"`ssg(constraint_optimizer=...)` is needed: what {type(first).__name__} keeps "
                "from step to step, or weight decay, would act in the other branch too."
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss, decision = self._evaluated(closure), self.term.open
        if decision is None:
            raise RuntimeError("SSG does not know which branch to take: call the objective first.")
        feasible = decision.constraint is None
        if self.polyak and not feasible:
            size = self._polyak_step(decision.excess)
        else:
            chosen = self.wrapped[0 if feasible else -1]
            self.step_wrapped(chosen)
            size = float(chosen.param_groups[0]["lr"])
        self.term.taken(size)
        return loss

    def _polyak_step(self, excess: float) -> float:
        """Move to w - (excess / |zeta|^2) zeta: onto a linear limit. Returns the length."""
        moving = [p for p in self.parameters if p.grad is not None]
        squares = [float(torch.sum(p.grad.double().square())) for p in moving]  # type: ignore[union-attr]
        # In double precision: |zeta|^2 of many parameters overflows float16.
        wide = torch.tensor([excess, sum(squares)], dtype=torch.float64)
        length = float(polyak_length(*wide))
        for parameter in moving:
            parameter.add_(parameter.grad, alpha=-length)  # type: ignore[arg-type]
        return length


def _keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    if type(optimizer) is not torch.optim.SGD:
        return True
    return any(group["momentum"] or group["weight_decay"] for group in optimizer.param_groups)


@dataclass(frozen=True, kw_only=True)
class Ssg(Settings):
    r"""SSG: switching subgradient steps (Huang and Lin 2023).

    With :math:`\hat g = \max_i g_i(w_t;\mathcal B) - \text{tolerance}_i` and its index i*,

    .. math::
        w_{t+1} = \begin{cases}
            \Pi_X\bigl(w_t - \eta_t\nabla g_0(w_t)\bigr) & \hat g \le \epsilon_t, \; t\in I \\
            \Pi_X\bigl(w_t - \eta_t\nabla g_{i^*}(w_t)\bigr) & \text{else}, \; t\in J
        \end{cases}

    Output: w_tau with tau in I, with probability proportional to eta_tau; see
    `objective.term.feasible`. `multipliers()` estimates them by the sum of the step sizes with
    i* = i over that with t in I. With `gradient=`, the first function decides and the second
    carries the gradient, as the theory asks; several batches before one step follow the decision of
    the first. Under DDP a parameter that only g_0 uses needs `find_unused_parameters=True`.

    Args:
        threshold: eps_t, a number or a function of the step. `"auto"` is the standard deviation of
            the batch values of the worst constraint, from successive differences, so that noise
            alone does not switch.
        constraint_optimizer: for steps on the worst constraint: `"polyak"` (the step
            g / |grad g|^2, for weakly convex constraints), an optimizer over the same parameters,
            or None: the first one, which must then be plain SGD.

    References:
        Y. Huang and Q. Lin, NeurIPS 2023: for g_i convex with a Slater point eta = eps_t/M^2, eps_t
        of order eps^2; for weakly convex ones Polyak steps.
    """

    threshold: Schedule | Auto = "auto"
    constraint_optimizer: torch.optim.Optimizer | Literal["polyak"] | None = None

    word = "ssg"
    couples = False
    sampled = False

    def term(self, problem: Problem) -> SwitchingTerm:
        return SwitchingTerm(problem, self.threshold)

    def stepped(self, optimizer: torch.optim.Optimizer, term: Any) -> SwitchingOptimizer:
        second = self.constraint_optimizer
        if isinstance(second, str):
            _checks.one_of(self.word, "constraint_optimizer", second, ("polyak",))
        return SwitchingOptimizer(optimizer, second, term)
