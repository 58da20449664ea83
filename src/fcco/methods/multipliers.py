"""Multipliers that find their own steps: the default for limits."""

from __future__ import annotations

from dataclasses import dataclass

from ..terms import MultiplierTerm
from ..tracker import InnerTracker
from .settings import Auto, Problem, Tracked

__all__ = ["Multipliers"]


@dataclass(frozen=True, kw_only=True)
class Multipliers(Tracked):
    r"""The method of multipliers in units of the measured noise; nothing needs to be set.

    .. math::
        c_i &= \bigl[\nu_i + k_i (u_i - \text{tolerance}_i)\bigr]_+, \qquad
        G_t = \nabla g_0 + \frac m{B_1}\sum_{i\in\mathcal B_1} c_i\nabla g_i \\
        \nu_i &\leftarrow \bigl[\nu_i + k'_i\,(g_i(w_t;\mathcal B) - \text{tolerance}_i)\bigr]_+

    A smoothed hinge whose limit is shifted by nu_i, so that no violation is left when nu_i has
    found the multiplier. The gains and a margin are measured, see `fcco.terms.MultiplierTerm`. The
    function must return the loss too, of a batch like the values: beside a loss without noise,
    noisy values have no unit, and the multipliers hardly move.

    Args:
        gamma: weight of the new value in u_i; the gains were chosen with 0.2.

    References:
        D. P. Bertsekas, Constrained optimization and Lagrange multiplier methods, 1982; the units
        are derived in docs/concepts/automatic-settings.md.
    """

    gamma: float | Auto = 0.2

    word = "multipliers"

    def term(self, problem: Problem) -> MultiplierTerm:
        tracker = InnerTracker(
            problem.number, gamma=self.gamma, correction=0.0, read="new", measure=True,
            **self.table(problem.model),
        )  # fmt: skip
        return MultiplierTerm(tracker, **problem.limits)
