"""Rounds of primal steps around an anchor, which end at their average (OSS, ICPPAC)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import _checks
from ..previous.swap import parameters_at
from .wrapper import SharedGroupsOptimizer

__all__ = ["ProximalRound", "RoundSteps", "proximal_value", "pull_strength", "running_average"]

Moved = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


class RoundSteps(Protocol):
    """The step sizes of a round of T steps; a `fcco.constraints.DualRule` is one."""

    @property
    def follows_step(self) -> bool:
        """Whether it wants to know the move of each step."""
        ...

    def step(self, t: int, steps: int) -> Any:
        """The step size of step t, as a factor of the optimizer's own."""
        ...


def proximal_value(away: Tensor, move: Tensor) -> Tensor:
    """The proximal term at x along v without its factor c, |x - w|^2 + 2 <x - w, v>; pure.

    Args:
        away: x - w.
        move: v.
    """
    return torch.sum(away * (away + 2 * move))


def pull_strength(coefficient: float | Tensor, total: Tensor) -> Tensor:
    """2c (1 + sum_i y_i), the factor of x - w in the gradient of the Lagrangian; pure.

    Args:
        coefficient: c.
        total: sum_i y_i.
    """
    return 2 * coefficient * (1 + total)


def running_average(average: Tensor, point: Tensor, count: int | Tensor) -> Tensor:
    """The average with one more point; pure.

    Args:
        average: of the points before, of any value when there was none.
        point: x_{t+1}.
        count: of the points, this one included.
    """
    share = 1 / count
    point = point.to(average)
    return torch.lerp(average, point, share.to(point) if isinstance(share, Tensor) else share)


class ProximalRound(SharedGroupsOptimizer):
    r"""The primal part of OSS and ICPPAC as an optimizer: step it like any other.

    .. math::
        x_{t+1} = x_t - \eta_t\bigl(G_t + 2c(1 + \textstyle\sum_i y_i)(x_t - w)\bigr),
            \quad x_0 = w, \qquad
        w^+ = \frac1T\sum_t x_{t+1}

    G_t is the gradient in `.grad` (of the objective and the weighted constraints); the pull to the
    anchor w is added here, because the proximal term is part of the objective and of every
    constraint. Each call of `step()` is one inner step; after T of them the parameters, and the
    anchor, become the average. The state is in `state_dict()`, so a checkpoint in the middle of a
    round resumes exactly.

    Args:
        primal: makes the inner steps. Plain SGD is the method itself; others may be used, but
            their momentum survives the jump to the average.
        coefficient: c.
        inner_steps: T.
        rule: step sizes (as factors of the optimizer's), and whether it wants to know the move of
            each step.
        total_multiplier: sum_i y_i.
        moved: called after each step with x_t and x_{t+1} - x_t, for rules that follow the step.
    """

    def __init__(
        self,
        primal: torch.optim.Optimizer,
        coefficient: float,
        inner_steps: int,
        rule: RoundSteps,
        total_multiplier: Callable[[], Tensor],
        moved: Moved,
    ) -> None:
        _checks.positive("ProximalRound", "coefficient", coefficient)
        _checks.integer("ProximalRound", "inner_steps", inner_steps, 1)
        super().__init__(primal)
        self.coefficient, self.inner_steps, self.rule = coefficient, inner_steps, rule
        self.inner_step, self.round = 0, 0
        self._total_multiplier, self._moved = total_multiplier, moved
        self._anchor: dict[Tensor, Tensor] = {}
        self._average: dict[Tensor, Tensor] = {}

    @property
    def round_begins(self) -> bool:
        """Whether the next step is the first of a round, where x_{-1} = x_0 = w."""
        return self.inner_step == 0

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """Inside, the parameters are w_k, the point between rounds: evaluate or save it here."""
        with parameters_at(self._anchor, self.model):
            yield

    def quadratic(self, point: Sequence[Tensor], move: Sequence[Tensor]) -> Tensor:
        """The proximal term at x along v, c (|x - w|^2 + 2 <x - w, v>)."""
        parts = []
        for parameter, x, v in zip(self.parameters, point, move, strict=True):
            if parameter in self._anchor:
                parts.append(proximal_value(x - self._anchor[parameter], v))
        if not parts:  # between rounds: x = w
            return torch.zeros(())
        return self.coefficient * torch.stack([part.to(parts[0]) for part in parts]).sum()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One inner step; the last one of a round ends at the average."""
        loss = self._evaluated(closure)
        t, steps = self.inner_step, self.inner_steps
        before = []
        for x in self.parameters:
            if x not in self._anchor:  # all at the start of a round, later a new group
                self._anchor[x] = x.detach().clone()
        if self.rule.follows_step:
            before = [x.detach().clone() for x in self.parameters]
        self._pull()
        self.step_wrapped(self.wrapped[0], float(self.rule.step(t, steps)))
        if self.rule.follows_step:
            move = [x.detach() - old for x, old in zip(self.parameters, before, strict=True)]
            self._moved(before, move)
        self.inner_step += 1
        self._include()
        if self.inner_step >= steps:
            self._end_round()
        return loss

    def _pull(self) -> None:
        """Add the gradient of the proximal term, which objective and constraints all have."""
        strength = pull_strength(self.coefficient, self._total_multiplier())
        for x in self.parameters:
            away = x.detach() - self._anchor[x]
            if x.grad is not None:
                x.grad.add_(away * strength.to(away))
            elif bool(away.any()):  # moved before; a parameter that nothing uses stays alone
                x.grad = away * strength.to(away)

    def _include(self) -> None:
        for x in self.parameters:
            if x not in self._average:
                # Small weights would vanish in an average kept in bfloat16.
                wide = torch.promote_types(x.dtype, torch.float32)
                self._average[x] = self._anchor[x].to(wide, copy=True)
            self._average[x] = running_average(self._average[x], x.detach(), self.inner_step)

    def _end_round(self) -> None:
        for x in self.parameters:
            x.copy_(self._average[x])
        self._anchor.clear()
        self._average.clear()
        self.inner_step, self.round = 0, self.round + 1

    def own_state(self) -> dict[str, Any]:
        """The position in the round, the anchor and the average, by position of the parameter."""
        places = {x: k for k, x in enumerate(self.parameters)}
        return {
            "inner_step": self.inner_step,
            "round": self.round,
            "anchor": {places[x]: kept.clone() for x, kept in self._anchor.items()},
            "average": {places[x]: kept.clone() for x, kept in self._average.items()},
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Restore what `own_state` gave."""
        self.inner_step, self.round = state["inner_step"], state["round"]
        here = self.parameters
        for name in ("anchor", "average"):
            kept = {
                here[k]: saved.to(here[k].device, copy=True) for k, saved in state[name].items()
            }
            setattr(self, f"_{name}", kept)
