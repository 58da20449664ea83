"""The optimizers of the switching subgradient method: its branches and step sizes (SSG)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import _checks
from .wrapper import SharedGroupsOptimizer

__all__ = ["Decider", "Decision", "PolyakStep", "SwitchingOptimizer", "decide", "polyak_length"]


class Decision(NamedTuple):
    """Which function a step is for.

    Attributes:
        constraint: i*, or None for the objective.
        excess: the largest g_i - tolerance_i.
    """

    constraint: int | None
    excess: float


class Decider(Protocol):
    """What decides the branch of each step; a `SwitchingTerm` is one."""

    open: Decision | None

    @property
    def step(self) -> int:
        """Steps made so far."""
        ...

    def taken(self, size: float) -> None:
        """Note the size of the step that was made."""
        ...


def decide(excess: Tensor, threshold: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest excess, whose it is, and whether that counts as feasible; pure.

    Args:
        excess: g_i - tolerance_i, shape (m,).
        threshold: eps_t; compared in double precision, in which it is given.

    Example:
        >>> import torch
        >>> decide(torch.tensor([0.1, 0.3]), 0.2)
        (tensor(0.3000), tensor(1), tensor(False))
    """
    worst, which = excess.max(0)
    # In float32 a threshold such as 0.1 is rounded, and a tie could go the other way. (MPS has no
    # float64.)
    wide = worst if worst.device.type == "mps" else worst.double()
    return worst, which, wide <= threshold


def polyak_length(value: Tensor, square: Tensor) -> Tensor:
    """Polyak's step size g / |zeta|^2, and 0 where zeta = 0; pure and branch-free.

    Args:
        value: g.
        square: |zeta|^2.

    Example:
        >>> import torch
        >>> polyak_length(torch.tensor(1.0), torch.tensor([4.0, 0.0]))
        tensor([0.2500, 0.0000])
    """
    some = square > 0
    # The inner `where` keeps 0/0 out of both branches: its NaN would reach a gradient.
    return torch.where(some, value / torch.where(some, square, 1), 0)


class PolyakStep(torch.optim.Optimizer):
    r"""Polyak's step to the level 0 of a function, for the constraint branch of `Switching`.

    .. math::
        w^+ = w - \text{lr}\,\frac{\hat g}{\|\zeta\|^2}\,\zeta,
        \qquad \hat g = \max_i g_i(w) - \text{tolerance}_i

    With one linear constraint and lr = 1 the step ends exactly on its limit.

    Args:
        params: the parameters.
        lr: a factor, 1 for the method itself.

    Attributes:
        last_size: the size of the last step, lr g / |zeta|^2; 0 when zeta = 0 (nothing moves).
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 1.0) -> None:
        _checks.positive("PolyakStep", "lr", lr)
        super().__init__(params, {"lr": lr})
        self.last_size = 0.0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; `closure` returns the function's value (its gradient is in `.grad`)."""
        if closure is None:
            raise ValueError("`PolyakStep.step(closure)` must return the value to bring to 0.")
        value = closure()
        moving = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
        squares = [float(torch.sum(p.grad.double().square())) for p, _ in moving]  # type: ignore[union-attr]
        # In double precision: |zeta|^2 of many parameters overflows float16.
        wide = torch.tensor([float(value), sum(squares)], dtype=torch.float64)
        length = float(polyak_length(*wide))
        for parameter, group in moving:
            parameter.add_(parameter.grad, alpha=-float(group["lr"]) * length)  # type: ignore[arg-type]
        self.last_size = float(self.param_groups[0]["lr"]) * length
        return value


class SwitchingOptimizer(SharedGroupsOptimizer):
    """Steps one of two optimizers: that of the objective or that of the constraints.

    Two are needed as soon as an optimizer keeps something from step to step: momentum of the
    objective would go on lowering it in a step for a constraint, and Adam's scale of the one
    gradient would be used for the other.

    Args:
        objective_optimizer: steps on g_0.
        constraint_optimizer: steps on the worst constraint, over the same parameters;
            `PolyakStep`, or any other. None: the first one, which must then be plain SGD.
    """

    def __init__(
        self,
        objective_optimizer: torch.optim.Optimizer,
        constraint_optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__(objective_optimizer, constraint_optimizer or objective_optimizer)
        self.objective_optimizer, self.constraint_optimizer = self.wrapped[0], self.wrapped[-1]
        if len(self.wrapped) == 1 and _keeps_state(self.wrapped[0]):
            raise ValueError(
                "`SwitchingOptimizer(constraint_optimizer=...)` is needed: "
                f"{type(self.wrapped[0]).__name__} keeps momentum, scales or weight decay, which "
                "belong to one branch and would act in the other. Pass a second optimizer over "
                "the same parameters, or plain SGD."
            )
        self._decider: Decider | None = None

    def follow(self, decider: Decider) -> None:
        """Take the decisions of this term."""
        self._decider = decider

    def objective_step(self) -> float:
        """The size of a step on the objective now."""
        return float(self.objective_optimizer.param_groups[0]["lr"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """A step of the optimizer whose branch was taken."""
        loss = self._evaluated(closure)
        if self._decider is None or self._decider.open is None:
            raise RuntimeError(
                "`SwitchingOptimizer.step` does not know which branch to take: call the "
                "objective, and `backward()` of its loss, before each step."
            )
        decision, chosen = self._decider.open, self.objective_optimizer
        if decision.constraint is not None:
            chosen = self.constraint_optimizer
        if isinstance(chosen, PolyakStep):  # its size comes from the value
            self.step_wrapped(chosen, closure=lambda: decision.excess)
            size = chosen.last_size
        else:
            self.step_wrapped(chosen)
            size = float(chosen.param_groups[0]["lr"])
        self._decider.taken(size)
        return loss


def _keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step depends on more than the current gradient: anything but plain SGD."""
    if type(optimizer) is not torch.optim.SGD:
        return True
    return any(group["momentum"] or group["weight_decay"] for group in optimizer.param_groups)
