"""Limits g_i(w) <= tolerance_i: what every method for them offers.

`fcco.constrained` builds one; the methods are in `fcco.methods`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import _checks
from ._state import KeepsPrecision
from .inputs import Index, parse
from .objective import Compositional
from .report import ConstraintReport, constraint_report
from .terms import AbstractTerm

__all__ = ["ConstrainedObjective", "ConstraintReport"]

OBJECTIVE, CONSTRAINTS = "objective", "constraints"  # two terms, where both are coupled


class MultiplierAverage(KeepsPrecision):
    r"""A running average of the multipliers, one per constraint.

    .. math::
        \bar\nu_i \leftarrow \bar\nu_i + (\nu_i - \bar\nu_i) / \min(t_i, \text{horizon})

    The mean over the t_i steps since constraint i was first seen, then an exponential average.
    """

    value: Tensor
    count: Tensor

    def __init__(self, like: Tensor, horizon: int) -> None:
        super().__init__()
        _checks.integer("keep_average", "horizon", horizon, 1)
        self.horizon = horizon
        self.register_buffer("value", torch.zeros_like(like))
        self.register_buffer("count", torch.zeros_like(like, dtype=torch.int64))

    @torch.no_grad()
    def add(self, multipliers: Tensor) -> None:
        """Take the multipliers of one step into account; NaN means not seen yet."""
        seen = ~multipliers.isnan()
        self.count.add_(seen).clamp_(max=self.horizon)
        moved = torch.where(seen, multipliers - self.value, 0)
        self.value.add_(moved / self.count.clamp(min=1))

    def mean(self) -> Tensor:
        return torch.where(self.count > 0, self.value, torch.nan)


class ConstrainedObjective(Compositional):
    """What every method for limits offers: a loss, violations and multipliers.

    With a coupled objective beside it there are two terms, named "objective" and "constraints":
    values and index are then given by these names. `term`, and all that is said of constraints,
    mean the second; `value()` is the sum of both.

    Args:
        term: the constraints' term, which holds the limits.
        method: the word of the method.
        objective: a coupled term of the objective, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        term: AbstractTerm,
        *,
        method: str = "",
        objective: AbstractTerm | None = None,
        process_group: Any = "auto",
        offload: bool = False,
    ) -> None:
        if objective is not None and not isinstance(objective, AbstractTerm):
            raise TypeError(
                f"`objective=` is a coupled term of the objective but is: "
                f"{type(objective).__name__}. An ordinary loss needs none: return (loss, values)."
            )
        terms = term if objective is None else {OBJECTIVE: objective, CONSTRAINTS: term}
        super().__init__(
            model, optimizer, terms, process_group=process_group, offload=offload,
            shared_index=objective is None,  # constraints and the objective have other blocks
        )  # fmt: skip
        self.method = method
        self.multiplier_average: MultiplierAverage | None = None

    @property
    def term(self) -> Any:
        return self.terms[CONSTRAINTS] if len(self.terms) > 1 else super().term

    @property
    def refresh_due(self) -> bool:
        """Whether the next step starts afresh from its batch, which should be a large one."""
        return self.term.tracker.refresh_due

    def violation(self) -> Any:
        """g_i - tolerance_i as the method sees it (positive: violated); a dict with names."""
        return self.term.limits.named(self.term.violation())

    def multipliers(self) -> Any:
        """The multiplier of each constraint: what the penalty implies, or the dual variable."""
        return self.term.limits.named(self.term.multipliers())

    def keep_average(self, horizon: int = 1000) -> None:
        """From now on average the multipliers over the last `horizon` steps or so.

        One read from tracked values carries their noise, and that of the hinge is 0 or rho/m.
        """
        first = self.multiplier_average is None
        self.multiplier_average = MultiplierAverage(self.term.multipliers(), horizon)
        self._averaged_step = self.term.step
        if first:
            self._after_close.append(self._average_multipliers)

    def _average_multipliers(self) -> None:
        if self.multiplier_average is not None and self.term.step > self._averaged_step:
            self._averaged_step = self.term.step
            self.multiplier_average.add(self.term.multipliers())

    def average_multipliers(self) -> Any:
        if self.multiplier_average is None:
            raise ValueError("`average_multipliers()` needs `keep_average()` before the training.")
        return self.term.limits.named(self.multiplier_average.mean())

    def report(
        self,
        values: Tensor | Mapping[str, Tensor] | None = None,
        *,
        function: Callable[[], Any] | None = None,
        index: Index = None,
    ) -> ConstraintReport:
        """A table of values, limits and multipliers, and what they say about the settings.

        `print(objective.report())` shows it. It waits for the device: not for every step.

        Args:
            values: g_i(w) of all constraints, from full data say, as a tensor or by name; the
                multipliers of a penalty are then those there. None: what the method has tracked.
            function: as in a call of the objective, best on a large batch: the gradients of
                violated constraints are then compared, and its values with the tracked ones. It
                runs once, in the mode that the model is in; nothing is updated.
            index: of that call.
        """
        given = None if values is None else self._in_order(values)
        average = None if self.multiplier_average is None else self.multiplier_average.mean()
        return constraint_report(self, given, average, function, index)

    def _own_limits(self) -> Any:
        limits = self.term.limits
        return dict(zip(limits.names or range(limits.number), limits.written(), strict=True))

    def _in_order(self, values: Tensor | Mapping[str, Tensor]) -> Tensor:
        limits = self.term.limits
        rows, _, index = parse("constraints", limits.names, values, self.term.tracker.dim)
        rows = rows if index is None else rows[index.argsort()]
        if rows.shape[:1] != (limits.number,):
            raise ValueError(
                f"`report(values=...)` must hold all {limits.number} constraints, one row each, "
                f"but has shape {tuple(rows.shape)}."
            )
        return rows.detach().to(limits.tolerance)
