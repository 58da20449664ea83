"""Switching between the objective and the worst constraint (SSG)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _checks
from .._schedules import Schedule, at_step
from ..optim import OutputIterate, SwitchingOptimizer
from ..optim.switching import Decision, decide
from ..terms.limits import Tolerance
from ..terms.unsampled import UnsampledTerm
from ..tracker import Tracked
from .objective import ConstrainedObjective

__all__ = ["Switching", "SwitchingTerm"]


class SwitchingTerm(UnsampledTerm):
    """The constraints of `Switching`, which branch was taken, and the step sizes of each.

    Args:
        model: the model.
        constraints: their number m, or their names.
        threshold: eps_t, a number, a function of the step, or `"auto"`, see `Switching`.
        tolerance: one number or one per constraint.
        margin: aim for tolerance - margin.
    """

    objective_steps: Tensor
    constraint_steps: Tensor
    needs_objective = True
    never_negative = ("objective_steps", "constraint_steps")

    def __init__(
        self,
        model: nn.Module,
        constraints: int | Sequence[str],
        threshold: Schedule | Literal["auto"],
        tolerance: Tolerance = 0.0,
        margin: float = 0.0,
    ) -> None:
        measure = threshold == "auto"
        super().__init__("Switching", model, constraints, tolerance, margin, measure)
        if isinstance(threshold, str):
            _checks.one_of("Switching", "threshold", threshold, ("auto",))
        elif not callable(threshold):
            _checks.at_least("Switching", "threshold", threshold, 0.0)
        self.schedule = threshold
        self.open: Decision | None = None  # of the step under way
        self.last: Decision | None = None  # of the last call, which may be an evaluation
        zeros = torch.zeros_like(self.tracker.value).squeeze(-1)
        self.register_buffer("objective_steps", zeros.sum())
        self.register_buffer("constraint_steps", zeros)

    @property
    def threshold(self) -> float:
        """The current eps_t."""
        if isinstance(self.schedule, str):
            worst = self.limits.excess(self.tracker.rows).argmax()
            assert self.tracker.estimate is not None
            # Half a squared difference of two values is the noise of one; 0 before there are two.
            return (self.tracker.estimate.difference[worst] / 2).sqrt().item()
        value = at_step(self.schedule, self.step)
        _checks.at_least("Switching", "threshold", value, 0.0)
        return value

    def loss(self, tracked: Tracked) -> Tensor:
        """The worst constraint when it is violated; nothing otherwise, where g0 is the loss."""
        excess = self.limits.excess(tracked.value, tracked.index)
        updating = tracked.step is not None
        decision = self.open if updating else None
        if decision is None:
            worst, which, feasible = (part.item() for part in decide(excess, self.threshold))
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

    def taken(self, size: float) -> None:
        """Note the size of the step that was made."""
        if self.open is None:
            return
        if self.open.constraint is None:
            self.objective_steps += size
        else:
            self.constraint_steps[self.open.constraint] += size

    def forget(self) -> None:
        """Drop the decision of the step under way."""
        self.open = None

    def value(self) -> Tensor:
        """The largest excess in the last batch."""
        return self.limits.excess(self.tracker.rows).max()

    def multipliers(self) -> Tensor:
        """Steps for each constraint over steps for the objective; NaN before one of these."""
        some = self.objective_steps > 0
        steps = self.signed(self.constraint_steps)
        return torch.where(some, steps / self.objective_steps, torch.nan)


class Switching(ConstrainedObjective):
    r"""Step on the objective when the constraints hold, else on the worst of them.

    .. math::
        w_{t+1} = w_t - \eta_t \begin{cases}
            \nabla g_0(w_t) & \max_i g_i(w_t) - \text{tolerance}_i \le \epsilon_t \\
            \nabla g_{i^*}(w_t) & \text{else, } i^* \text{ the largest}
        \end{cases}

    The function you pass returns `(g_0, values of all constraints)`; g_0 is not differentiated in
    an infeasible step. Step `objective.optimizer`, a `SwitchingOptimizer`. With `gradient=`, the
    first function decides (without gradient) and the second carries the gradient, as the theory
    asks; else one batch does both. Several batches before one step (gradient accumulation) follow
    the decision of the first. Under DDP a parameter that only g_0 uses has no gradient in an
    infeasible step: `find_unused_parameters=True`.

    Args:
        model: your model.
        optimizer: yours for the objective (plain SGD then serves the constraints too), or a
            `SwitchingOptimizer` of two.
        constraints: their number m, or their names.
        threshold: eps_t, how much violation counts as feasible: a number or a function of the
            step. `"auto"` is the standard deviation of the batch values of the constraint with the
            largest one, from successive differences, so that noise alone does not switch.
        tolerance: g_i <= tolerance_i, one number or one per constraint.
        margin: aim for tolerance - margin.
        process_group: see `Compositional`.
    """

    method = "ssg"

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        constraints: int | Sequence[str],
        *,
        threshold: Schedule | Literal["auto"] = "auto",
        tolerance: Tolerance = 0.0,
        margin: float = 0.0,
        process_group: Any = "auto",
    ) -> None:
        term = SwitchingTerm(model, constraints, threshold, tolerance, margin)
        if not isinstance(optimizer, SwitchingOptimizer):
            optimizer = SwitchingOptimizer(optimizer)
        super().__init__(model, optimizer, term, process_group=process_group)
        self._switch = optimizer
        optimizer.follow(term)

    def feasible(self) -> bool:
        """Whether the last call found the constraints satisfied up to the threshold."""
        if self.term.last is None:
            raise RuntimeError("`Switching.feasible` needs at least one call of the objective.")
        return self.term.last.constraint is None

    def iterate_weight(self) -> float:
        """The weight of w_t in the output: eta_t when it is feasible, else 0."""
        if self.term.open is None:
            raise RuntimeError(
                "`Switching.iterate_weight` is known between the call of the objective and the "
                "end of the step."
            )
        if self.term.open.constraint is not None:
            return 0.0
        return self._switch.objective_step()

    def output_iterate(
        self, rule: Literal["random", "average"] = "random", seed: int = 0
    ) -> OutputIterate:
        """The method's output: w_tau over feasible tau with probability ~ eta_tau."""
        return OutputIterate(self._switch, rule, seed, weight=self.iterate_weight)
