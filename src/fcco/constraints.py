"""Limits g_i(w) <= tolerance_i: what every method for them offers.

`fcco.constrained` builds one; the methods are in `fcco.methods`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .inputs import Index, parse
from .objective import Compositional
from .report import ConstraintReport, constraint_report
from .terms import AbstractTerm

__all__ = ["ConstrainedObjective", "ConstraintReport"]

OBJECTIVE, CONSTRAINTS = "objective", "constraints"  # two terms, where both are coupled


class ConstrainedObjective(Compositional):
    """What `constrained` returns: an objective with violations, multipliers and a report.

    With a coupled objective beside it there are two terms, named "objective" and "constraints":
    values and index are then given by these names. `term`, and all that is said of constraints,
    mean the second; `value()` is the sum of both.

    Args:
        term: the constraints' term, which holds the limits.
        method: the word of the method.
        objective: a coupled term of the objective, or None.
        options: of `Compositional`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        term: AbstractTerm,
        *,
        method: str = "",
        objective: AbstractTerm | None = None,
        **options: Any,
    ) -> None:
        if objective is not None and not isinstance(objective, AbstractTerm):
            raise TypeError(
                f"`objective=` is a coupled term of the objective but is: "
                f"{type(objective).__name__}. An ordinary loss needs none: return (loss, values)."
            )
        terms = term if objective is None else {OBJECTIVE: objective, CONSTRAINTS: term}
        super().__init__(model, optimizer, terms, **options)
        self.method = method

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

    def report(
        self,
        values: Tensor | Mapping[str, Tensor] | None = None,
        *,
        function: Callable[[], Any] | None = None,
        index: Index = None,
        rows: Any = None,
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
            rows: of that call.
        """
        given = None if values is None else self._in_order(values)
        return constraint_report(self, given, function, index, rows)

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
