"""Switching between the objective and the worst constraint (SSG)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .. import _checks
from ..inner import split
from ..iterates import OutputIterate
from ..objective import Inner
from ..tracker import Tracked
from .base import ConstrainedObjective
from .every import EveryConstraint
from .steps import PolyakStep, decide, keeps_state
from .wrapping import WrappingOptimizer

__all__ = ["Switching", "SwitchingOptimizer", "SwitchingTerm"]

Number = float | Callable[[int], float]


class Decision(NamedTuple):
    """Which function a step is for.

    Attributes:
        constraint: i*, or None for the objective.
        excess: the largest g_i - tolerance_i.
    """

    constraint: int | None
    excess: float


class SwitchingTerm(EveryConstraint):
    """The constraints of `Switching`, which branch was taken, and the step sizes of each.

    Args:
        model: the model.
        constraints: their number m, or their names.
        threshold: eps_t, a number or a function of the step.
        burn_in: S.
        tolerance: one number or one per constraint.
        margin: aim for tolerance - margin.
    """

    objective_steps: Tensor
    constraint_steps: Tensor

    def __init__(
        self,
        model: nn.Module,
        constraints: int | Sequence[str],
        threshold: Number,
        burn_in: int = 0,
        tolerance: float | Sequence[float] | Tensor = 0.0,
        margin: float = 0.0,
    ) -> None:
        super().__init__("Switching", model, constraints, tolerance, margin)
        _checks.integer("Switching", "burn_in", burn_in, 0)
        if not callable(threshold):
            _checks.at_least("Switching", "threshold", threshold, 0.0)
        self.schedule, self.burn_in = threshold, burn_in
        self.open: Decision | None = None  # of the step under way
        self.last: Decision | None = None  # of the last call, which may be an evaluation
        zeros = torch.zeros_like(self.tracker.value).squeeze(-1)
        self.register_buffer("objective_steps", zeros.sum())
        self.register_buffer("constraint_steps", zeros)

    @property
    def threshold(self) -> float:
        """The current eps_t."""
        value = self.schedule
        if callable(value):
            value = value(self.step)
            _checks.at_least("Switching", "threshold", value, 0.0)
        return value

    def loss(self, tracked: Tracked) -> Tensor:
        """The largest excess; its gradient is that of the worst constraint, if that is needed."""
        excess = self.limits.excess(tracked.value, tracked.index)
        decision = self.open if self.updating else None
        if decision is None:
            worst, which, feasible = (part.item() for part in decide(excess, self.threshold))
            decision = Decision(None if feasible else int(which), worst)
            if self.updating:  # further batches of the same step follow the first
                self.open = decision
        self.last = decision
        if decision.constraint is None:
            return excess.max()
        slope = torch.zeros_like(excess)
        slope[decision.constraint] = 1.0
        return tracked.attach(excess[decision.constraint], slope)

    def taken(self, size: float) -> None:
        """Note the size of the step that was made."""
        if self.open is None or self.step < self.burn_in:
            return
        if self.open.constraint is None:
            self.objective_steps += size
        else:
            self.constraint_steps[self.open.constraint] += size

    def close(self) -> bool:
        """End an optimizer step."""
        self.open = None
        return super().close()

    def value(self) -> Tensor:
        """The largest excess in the last batch."""
        return self.limits.excess(self.tracker.value.squeeze(-1)).max()

    def multipliers(self) -> Tensor:
        """Steps for each constraint over steps for the objective; NaN before one of these."""
        some = self.objective_steps > 0
        return torch.where(some, self.constraint_steps / self.objective_steps, torch.nan)


class SwitchingOptimizer(WrappingOptimizer):
    """Steps one of two optimizers: that of the objective or that of the constraints.

    Two are needed as soon as an optimizer keeps something from step to step: momentum of the
    objective would go on lowering it in a step for a constraint, and Adam's scale of the one
    gradient would be used for the other.

    Args:
        objective_optimizer: steps on g_0.
        constraint_optimizer: steps on the worst constraint, over the same parameters;
            `PolyakStep`, or any other. None: the first one, which must then be plain SGD.
        schedule: factor of both step sizes as a function of the step, such as
            `InverseRoot(1.0)`; a `PolyakStep` finds its own size.
    """

    def __init__(
        self,
        objective_optimizer: torch.optim.Optimizer,
        constraint_optimizer: torch.optim.Optimizer | None = None,
        schedule: Callable[[int], float] | None = None,
    ) -> None:
        super().__init__(objective_optimizer, constraint_optimizer or objective_optimizer)
        self.objective_optimizer, self.constraint_optimizer = self.inner[0], self.inner[-1]
        if len(self.inner) == 1 and keeps_state(self.inner[0]):
            raise ValueError(
                "`SwitchingOptimizer(constraint_optimizer=...)` is needed: "
                f"{type(self.inner[0]).__name__} keeps momentum, scales or weight decay, which "
                "belong to one branch and would act in the other. Pass a second optimizer over "
                "the same parameters, or plain SGD."
            )
        self.schedule = schedule
        self._term: SwitchingTerm | None = None

    def follow(self, term: SwitchingTerm) -> None:
        """Take the decisions of this term."""
        self._term = term
        self.hold()

    @property
    def factor(self) -> float:
        """The schedule's factor at the current step."""
        if self.schedule is None or self._term is None:
            return 1.0
        return self.schedule(self._term.step)

    def objective_step(self) -> float:
        """The size of a step on the objective now."""
        return float(self.objective_optimizer.param_groups[0]["lr"]) * self.factor

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """A step of the optimizer whose branch was taken."""
        loss = self._evaluated(closure)
        if self._term is None or self._term.open is None:
            raise RuntimeError(
                "`SwitchingOptimizer.step` does not know which branch to take: call the "
                "objective, and `backward()` of its loss, before each step."
            )
        decision, chosen = self._term.open, self.objective_optimizer
        if decision.constraint is not None:
            chosen = self.constraint_optimizer
        if isinstance(chosen, PolyakStep):
            self._let_step(chosen, closure=lambda: decision.excess)
            size = chosen.last_size
        else:
            self._let_step(chosen, self.factor)
            size = float(chosen.param_groups[0]["lr"]) * self.factor
        self._term.taken(size)
        return loss


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
        threshold: eps_t, how much violation counts as feasible; a number or a function of the
            step.
        burn_in: S, the first steps, left out of `multipliers()` and of the output.
        tolerance: g_i <= tolerance_i, one number or one per constraint.
        margin: aim for tolerance - margin.
        process_group: see `Compositional`.
    """

    method = "ssg"
    samples_constraints = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        constraints: int | Sequence[str],
        *,
        threshold: Number,
        burn_in: int = 0,
        tolerance: float | Sequence[float] | Tensor = 0.0,
        margin: float = 0.0,
        process_group: Any = "auto",
    ) -> None:
        term = SwitchingTerm(model, constraints, threshold, burn_in, tolerance, margin)
        if not isinstance(optimizer, SwitchingOptimizer):
            optimizer = SwitchingOptimizer(optimizer)
        super().__init__(model, optimizer, term, process_group=process_group)
        self._switch = optimizer
        optimizer.follow(term)

    def forward(self, inner: Inner, index: Any = None, **more: Any) -> Tensor:
        """The loss of one batch, g_0 or the worst constraint; see `Compositional.forward`."""
        if more.get("gradient") is None:
            inner = _with_loss(inner)
        else:
            more["gradient"] = _with_loss(more["gradient"])
        return super().forward(inner, index, **more)

    def _combined(self, loss: Tensor | None, parts: dict[str, Tensor]) -> Tensor:
        decision = self.term.last
        assert loss is not None and decision is not None
        return loss if decision.constraint is None else next(iter(parts.values()))

    def feasible(self) -> bool:
        """Whether the last call found the constraints satisfied up to the threshold."""
        if self.term.last is None:
            raise RuntimeError("`Switching.feasible` needs at least one call of the objective.")
        return self.term.last.constraint is None

    def iterate_weight(self) -> float:
        """The weight of w_t in the output: eta_t when it is feasible and t >= S, else 0."""
        if self.term.open is None:
            raise RuntimeError(
                "`Switching.iterate_weight` is known between the call of the objective and the "
                "end of the step."
            )
        if self.term.open.constraint is not None or self.term.step < self.term.burn_in:
            return 0.0
        return self._switch.objective_step()

    def output_iterate(
        self, rule: Literal["random", "average"] = "random", seed: int = 0
    ) -> OutputIterate:
        """The method's output: w_tau over feasible tau >= S with probability ~ eta_tau."""
        return OutputIterate(self._switch, rule, seed, weight=self.iterate_weight)

    def detach_hooks(self) -> None:
        """Stop listening to the optimizer; the inner ones may step on their own again."""
        super().detach_hooks()
        self._switch.release()


def _with_loss(inner: Inner) -> Inner:
    """The same function, refused when it returns no g_0, before anything changes."""

    def checked() -> Any:
        result = inner()
        if split(result)[0] is None:
            raise ValueError(
                "`Switching` needs the objective too: the function must return (loss, values)."
            )
        return result

    return checked
