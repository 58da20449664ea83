r"""Constraints without settings: the method of multipliers, in units of the measured noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..rules import multipliers as rules
from ..rules.arrays import Array, tensor, view, where
from ..rules.multipliers import Constraints, Multipliers, Scales, Targets
from ..tracker import InnerTracker, OpenStep, Tracked
from .limits import ConstraintTerm


class MultiplierTerm(ConstraintTerm):
    r"""Constraints low_i <= g_i <= high_i by the method of multipliers; no settings.

    With m constraints of which B1 are in a batch, upper limits, and :math:`x_i = u_i -
    \text{high}_i + \text{margin}_i` from the tracked u_i,

    .. math::
        c_i &= \bigl[\nu_i + \tfrac14\sqrt{m/B_1}\,\kappa_i x_i\bigr]_+, \qquad
        G_t = \nabla g_0 + \frac m{B_1}\sum_{i\in\mathcal B_1} c_i\nabla g_i \\
        \nu_i &\leftarrow \bigl[\nu_i + \min(0.01\,h_i\,m/B_1,\,0.03)\,\kappa_i\,
            (g_i(w_t;\mathcal B) - \text{high}_i + \text{margin}_i)\bigr]_+ \\
        \kappa_i &= \frac{\sigma_0}{A\,\sigma_i W_i}, \qquad W_i = \sigma_i\max(\omega, 1)

    Where there is a lower limit, :math:`-[-\nu_i - k\,(u_i - \text{low}_i -
    \text{margin}_i)]_+` is added, with the same factor k of x_i (or of its batch value): one
    signed multiplier serves both sides, and an equality has :math:`\nu_i + k x_i`.

    Every factor is measured: nothing changes when losses or values are given in other units, and
    little but the margin when constraints are listed twice.

    * :math:`\sigma_i` is the noise of a batch value of g_i, :math:`\sigma_0` that of g_0, both from
      successive differences. A value that never moved has its violation in place of
      :math:`\sigma_i`; :math:`\sigma_0^2` is at least 0.03 times the variance of all losses so far,
      and 1 for a loss that is constant.
    * :math:`h_i = 1 + 4\,l_i/\max(\omega,1)`, where :math:`l_i\le 1` is the part of :math:`x_i`,
      in units of :math:`W_i`, that is beyond half the error of u_i and that the average of u_i over
      128 steps (at most 100 visits) has too. A small batch shows late what lasts.
    * :math:`W_i` is the noise or, while there is more to repair, the largest violation in units of
      it, :math:`\omega = \max_i [x_i]_+/\sigma_i`, which is forgotten by 1 % a step.
    * A is how strongly constraints act together: the standard deviation of :math:`\sum_i c_i
      (g_i(w_t;\mathcal B) - u_i)` in units of its largest :math:`c_i\sigma_i`.
    * :math:`\text{margin}_i = 0.2\sqrt{2\ln m}` errors of u_i, times the square of :math:`\sum_i
      (g_i(w_t;\mathcal B) - u_i)/\sigma_i` over the sum of squares, at most 1 (lower limits count
      with their sign): opposite constraints have no room for it. At most to the middle of an
      interval.

    Limits that cannot all hold would let :math:`\nu` grow for ever. Once the largest
    :math:`A\,c_i\sigma_i` is above :math:`5\,\sigma_0` while some limit is exceeded by more than
    chance, all are relaxed by the same :math:`s` (by as many :math:`\sigma_i` where these differ by
    more than a factor of 4), which grows with the multipliers until they stop: those of the
    constraints that are exceeded by less then fall, and the largest excess becomes the least.

    The first 10 steps only measure. The state changes when a step ends, from all of its batches.

    Args:
        tracker: of scalar values, with `gamma="auto"` or `measure=True`.
        limits: `tolerance`, `margin` (beside the one above) and `names`, see `Limits`.

    Attributes:
        multiplier: nu_i.
        variance: sigma_i^2 after the last visit of each constraint, 0 before the second.
        margin: that of each constraint less its slack, after its last visit.
        scales: omega, A, sigma_0 and more, see `Scales`.

    References:
        D. P. Bertsekas, Constrained optimization and Lagrange multiplier methods, 1982; derived in
        docs/concepts/automatic-settings.md.
    """

    multiplier: Tensor
    variance: Tensor
    margin: Tensor
    scales: Tensor
    watches_objective = True
    integrates = True
    never_negative = ("variance",)

    def __init__(self, tracker: InnerTracker, **limits: Any) -> None:
        if tracker.dim != 1:
            raise ValueError(
                "`MultiplierTerm(tracker=...)` needs one number per constraint, but the tracker "
                f"has `dim={tracker.dim}`. For limits on vectors use a `CoupledTerm`."
            )
        if tracker.estimate is None:
            raise ValueError(
                "`MultiplierTerm(tracker=...)` needs a tracker that measures its noise: "
                "`InnerTracker(..., gamma='auto')`, or `measure=True`."
            )
        super().__init__(tracker, **limits)
        self.branch_free = True
        number, table = tracker.num_inner, tracker.value
        for name in Multipliers._fields:
            self.register_buffer(name, table.new_zeros(number))
        self.register_buffer("scales", table.new_zeros(len(Scales._fields)))

    @property
    def views(self) -> dict[str, Any]:
        """The state and the limits as the rules see them; renewed when they move."""
        if not self._views.found:
            rows = Multipliers(*(view(self.get_buffer(name)) for name in Multipliers._fields))
            limits = self.limits
            limit, margin, sides = rules.targets(
                limits.tolerance.expand(limits.number), limits.low, limits.margin
            )
            targets = Targets(view(limit), margin, None if sides is None else view(sides))
            self._views.found = {"rows": rows, "scales": view(self.scales), "targets": targets}
        return self._views.found

    def _of(self, at: Any) -> tuple[Multipliers, Targets]:
        """The state and the limits of some constraints."""
        tables = self._views.found or self.views
        rows, targets = tables["rows"], tables["targets"]
        if isinstance(at, slice):
            return rows, targets
        sides = None if targets.sides is None else targets.sides[:, at]
        some = Multipliers(*(part[at] for part in rows))
        return some, Targets(targets.limit[at], targets.margin, sides)

    def _scales(self) -> Scales:
        scales = (self._views.found or self.views)["scales"]
        return Scales(*(scales.unbind() if isinstance(scales, Tensor) else scales.tolist()))

    def loss(self, tracked: Tracked) -> Tensor:
        """The sum of c_i (u_i - limit_i), estimated from the batch, with c_i as slopes."""
        number, present = self.tracker.num_inner, tracked.present
        at = slice(None) if tracked.u.shape[0] == number else tracked.ids
        slope, part = self._slopes(at, tracked.u)
        blocks = (tracked.u.shape[0] or 1) if present is None else tracked.number
        slope = slope * (number / blocks)
        part = part if present is None else torch.where(present, part, 0)
        # No `@`, which autocast rounds to bfloat16.
        return tracked.as_loss((slope * part).sum(), slope)

    def _slopes(self, at: Any, u: Array) -> tuple[Array, Array]:
        """The c_i of some constraints at u_i, and u_i minus the limit that c_i is for."""
        rows, targets = self._of(at)
        excess, noise = u - targets.limit, self.tracker.views["pooled"][0] / 2
        noise = noise if isinstance(noise, Tensor) else float(noise)
        slope = rules.coefficients(rows, targets, excess, noise, self._scales())
        if targets.sides is not None:
            excess = excess + targets.sides[0] * (slope < 0)
        return slope, excess

    def observe(self, step: OpenStep, loss: Tensor) -> None:
        """Find the state after the step, with the mean loss of its calls."""
        total, calls = step.notes.get(self, (0.0, 0))
        total, calls = total + loss, calls + 1
        step.notes[self] = (total, calls)
        tracker, scales, table = self.tracker, self._scales(), self._views.found["scales"]
        update, number = step.updates[tracker], tracker.num_inner
        on_device = isinstance(table, Tensor)
        mean = (total / calls).to(self.scales)
        scales = scales.with_loss(mean if on_device else mean.item())
        batch, visit = update.batch, update.visit
        at = slice(None) if batch.index.shape[0] == number else batch.index
        rows = None
        if batch.index.shape[0]:
            fresh, after, seen = visit.clipped, visit.after, update.rows.seen
            if update.came is not None:  # blocks that kept their value have nothing new to say
                fresh = where(update.came, fresh, after)
            known = None if seen is None else where(seen, 1 + 0 * after, 0 * after)
            share: Any = number / batch.number
            if on_device and batch.present is None:
                share = table.new_full((), share)
            scales = scales._replace(sampling=share)
            came = None if batch.present is None else update.came
            known = (known, visit.statistics, visit.pooled, came)
            shown = Constraints(fresh, update.rows.u, after, *known)
            state = self._of(at)
            rows, scales = rules.step(*state, shown, scales, number, update.number)
            rows = rows if came is None else Multipliers(*map(batch.filled, rows))
        new = torch.stack(scales) if on_device else scales
        step.writes[self] = (self._set, (at, rows, new))

    def _set(self, at: Any, rows: Multipliers | None, scales: Any) -> None:
        tables = self._views.found or self.views
        for part, new in zip(tables["rows"], rows or (), strict=rows is not None):
            part[at] = new
        tables["scales"][:] = scales

    def value(self) -> Tensor:
        """The constraints' part of the Lagrangian: the sum of c_i (u_i - high_i), or low_i."""
        slope, part = (tensor(a) for a in self._slopes(slice(None), self.tracker.views["u"]))
        return torch.where(self.tracker.seen, slope * part, 0).sum()

    def multipliers_at(self, values: Tensor) -> Tensor:
        """The c_i at given values g_i."""
        return tensor(self._slopes(slice(None), view(values.detach()))[0])
