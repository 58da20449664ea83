"""The rules of the switching subgradient method: its branches and step sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _checks

__all__ = [
    "InverseRoot",
    "PolyakStep",
    "convex_step",
    "decide",
    "keeps_state",
    "polyak_length",
    "weakly_convex_step",
]


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
        wide = torch.tensor([float(value), sum(squares)], dtype=torch.float64)
        length = float(polyak_length(*wide))
        for parameter, group in moving:
            parameter.add_(parameter.grad, alpha=-float(group["lr"]) * length)  # type: ignore[arg-type]
        self.last_size = float(self.param_groups[0]["lr"]) * length
        return value


def keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step depends on more than the current gradient: anything but plain SGD."""
    if type(optimizer) is not torch.optim.SGD:
        return True
    return any(group["momentum"] or group["weight_decay"] for group in optimizer.param_groups)


@dataclass(frozen=True)
class InverseRoot:
    """A number that falls like start / sqrt(t + 1), for eps_t and eta_t of convex problems.

    Example:
        >>> from fcco.constraints.steps import InverseRoot
        >>> [InverseRoot(0.6)(t) for t in (0, 3, 24)]
        [0.6, 0.3, 0.12]
    """

    start: float

    def __post_init__(self) -> None:
        _checks.positive("InverseRoot", "start", self.start)

    def __call__(self, step: int) -> float:
        """The value at step t."""
        return self.start / math.sqrt(step + 1)


def convex_step(threshold: float, lipschitz: float) -> float:
    r"""The step for convex constraints, :math:`\eta = \epsilon_t / M^2`.

    To end nearly eps-stationary, the threshold is of order eps^2.

    Args:
        threshold: eps_t.
        lipschitz: M, a bound on the subgradients of g_0 and all g_i.

    Example:
        >>> convex_step(0.02, lipschitz=2.0)
        0.005
    """
    _checks.positive("convex_step", "threshold", threshold)
    _checks.positive("convex_step", "lipschitz", lipschitz)
    return threshold / lipschitz**2


def weakly_convex_step(
    accuracy: float, lipschitz: float, regularity: float, weak_convexity: float
) -> tuple[float, float]:
    r"""Step and threshold for weakly convex constraints; take `PolyakStep` for these.

    .. math::
        \eta = \frac{\nu}{4M^2}\min\Bigl\{\frac{\epsilon^2}{M}, \frac{\nu}{4\rho}\Bigr\},
        \qquad \epsilon_t = M^2\eta

    Args:
        accuracy: eps.
        lipschitz: M, a bound on the subgradients of g_0 and all g_i.
        regularity: nu, a lower bound of the distance of 0 to the subdifferential of max g_i
            where the constraints are violated.
        weak_convexity: rho.

    Returns:
        eta for the objective branch, and the threshold.

    Example:
        >>> step, threshold = weakly_convex_step(
        ...     0.1, lipschitz=1.0, regularity=1.0, weak_convexity=2.0)
        >>> round(step, 6), round(threshold, 6)
        (0.0025, 0.0025)
    """
    arguments = {
        "accuracy": accuracy,
        "lipschitz": lipschitz,
        "regularity": regularity,
        "weak_convexity": weak_convexity,
    }
    for name, value in arguments.items():
        _checks.positive("weakly_convex_step", name, value)
    least = min(accuracy**2 / lipschitz, regularity / (4 * weak_convexity))
    step = regularity / (4 * lipschitz**2) * least
    return step, lipschitz**2 * step
