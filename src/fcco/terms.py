"""A coupled term (1/n) sum_i f_i(g_i(w)): an outer function and a tracker."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import _checks
from ._state import KeepsPrecision
from .limits import Limits
from .outer.base import AbstractOuter
from .outer.envelope import MoreauEnvelope
from .tracker import InnerTracker, Tracked

__all__ = ["AbstractTerm", "CoupledTerm", "OuterTerm", "weighted_mean"]

Smoothing = float | Callable[[int], float]


def weighted_mean(
    outer: AbstractOuter, excess: Tensor, weight: float | Tensor, blocks: int | Tensor
) -> tuple[Tensor, Tensor]:
    r"""The estimate of a coupled term and its slopes, pure and branch-free.

    .. math::
        \frac{\text{weight}}{B_1}\sum_{i\in\mathcal B_1} f(u_i), \qquad
        \frac{\text{weight}}{B_1}\nabla f(u_i)

    Args:
        outer: f.
        excess: u_i.
        weight: factor in front.
        blocks: B1, the number of blocks in the batch.
    """
    values, slope = outer.value_and_gradient(excess)
    share = weight / blocks
    return values.sum() * share, slope * share


class AbstractTerm(KeepsPrecision):
    """One term of an objective: what an objective needs to know of it.

    Args:
        tracker: the running estimates u_i.

    Attributes:
        names: names of the blocks, or None; values may then be given as a dict.
    """

    tracker: InnerTracker
    names: tuple[str, ...] | None = None

    def __init__(self, tracker: InnerTracker) -> None:
        super().__init__()
        self.tracker = tracker
        tracker.accumulate = True

    @property
    def step(self) -> int:
        """Optimizer steps this term had a part in."""
        return self.tracker.steps

    @abc.abstractmethod
    def loss(self, tracked: Tracked) -> Tensor:
        """The scalar whose gradient is this term's part of the estimator G_t.

        Its value and slope come from the tracked u; `tracked.attach` joins the slope to the
        gradients of g_i.
        """

    @abc.abstractmethod
    def value(self) -> Tensor:
        """The term's own value at the tracked u, without smoothing, over the blocks seen."""

    def close(self) -> bool:
        """End an optimizer step; say whether this term had a part in it.

        A step on another loss, or the second of two optimizers, ends nothing here.
        """
        return self.tracker.close()

    def table(self) -> Tensor:
        """The u_i of the blocks seen so far, shape (seen,) or (seen, d1)."""
        seen = self.tracker.value[self.tracker.seen]
        return seen.squeeze(-1) if self.tracker.dim == 1 else seen


class OuterTerm(AbstractTerm):
    """A term with an outer function f, smoothed or not.

    Args:
        outer: f.
        tracker: the running estimates u_i.
        smoothing: lambda, 0 for f itself, or a function of the step.
    """

    def __init__(self, outer: AbstractOuter, tracker: InnerTracker, smoothing: Smoothing) -> None:
        super().__init__(tracker)
        if tracker.dim != (outer.dim or max(tracker.dim, 2)):
            raise ValueError(
                f"{outer!r} acts on inner values of dimension {outer.dim or 'two or more'} but the "
                f"tracker has `dim={tracker.dim}`."
            )
        self.outer, self._smoothing = outer, smoothing
        self._smoothed: tuple[float, AbstractOuter] | None = None
        _ = self.smoothed  # refuse smoothing >= 1/weak_convexity at once

    @property
    def schedule(self) -> Smoothing:
        """Lambda as it was given: a number, or a function of the step."""
        return self._smoothing

    @property
    def smoothing(self) -> float:
        """The current lambda; a schedule is a function of the steps this term had a part in."""
        return self._smoothing(self.step) if callable(self._smoothing) else self._smoothing

    @smoothing.setter
    def smoothing(self, value: Smoothing) -> None:
        self._smoothing = value

    @property
    def smoothed(self) -> AbstractOuter:
        """f_lambda, or f itself when the smoothing is 0."""
        value = self.smoothing
        if self._smoothed is None or self._smoothed[0] != value:
            _checks.at_least(type(self).__name__, "smoothing", value, 0.0)
            self._smoothed = (value, MoreauEnvelope(self.outer, value) if value else self.outer)
        return self._smoothed[1]


class CoupledTerm(OuterTerm):
    r"""A weighted coupled term, optionally read as penalised constraints.

    .. math::
        \frac{\text{weight}}{n}\sum_{i=1}^n f_\lambda\bigl(g_i(w) - \text{tolerance}_i\bigr)

    Args:
        outer: f.
        tracker: the tracker of g_i.
        smoothing: lambda, 0 for f itself, or a function of the step (annealing).
        weight: factor in front of the sum.
        tolerance: subtracted from g_i, one number or one per block: g_i <= tolerance_i.
        margin: train for g_i <= tolerance_i - margin, to land on the safe side.
        names: names of the blocks, for values given by name and for reports.

    Example:
        >>> import torch, fcco
        >>> term = fcco.CoupledTerm(fcco.Hinge(3.0), fcco.ema(2, gamma=1.0), smoothing=0.1)
        >>> term.tracker.set_values(torch.tensor([0, 1]), torch.tensor([0.2, -1.0]))
        >>> term.value()
        tensor(0.3000)
        >>> term.violation(), term.multipliers()
        (tensor([ 0.2000, -1.0000]), tensor([1., 0.]))
    """

    def __init__(
        self,
        outer: AbstractOuter,
        tracker: InnerTracker,
        *,
        smoothing: Smoothing = 0.0,
        weight: float = 1.0,
        tolerance: float | Sequence[float] | Tensor = 0.0,
        margin: float = 0.0,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(outer, tracker, smoothing)
        _checks.positive("CoupledTerm", "weight", weight)
        self.weight = weight
        self.limits = Limits(
            tracker.num_inner, tracker.value, tolerance, margin, names, call="CoupledTerm"
        )
        self.names = self.limits.names
        self._check_shift()

    def loss(self, tracked: Tracked) -> Tensor:
        """The mean of f_lambda over the sampled blocks, which estimates the mean over all."""
        excess = tracked.value
        limits = self.limits
        if not limits.plain:
            excess = excess - limits.of(tracked.index, self.tracker.dim) + limits.margin
        blocks = max(tracked.index.shape[0], 1)
        return tracked.attach(*weighted_mean(self.smoothed, excess, self.weight, blocks))

    def value(self) -> Tensor:
        """Mean of weight * f(u_i - tolerance_i) over the blocks seen."""
        limit = self.limits.of(self.tracker.seen, self.tracker.dim)
        return self.weight * self.outer(self.table() - limit).mean()

    def violation(self) -> Tensor:
        """How far each constraint is exceeded (positive: violated), NaN where never seen."""
        return self._per_block(lambda excess: self.outer.violation(excess))

    def multipliers(self) -> Tensor:
        """(weight/n) grad f_lambda(u_i - tolerance_i), NaN where never seen.

        Read from the tracked u, they carry its noise divided by lambda; `fcco.diagnostics.kkt`
        recomputes them on full data.
        """
        scale = self.weight / self.tracker.num_inner
        return scale * self._per_block(lambda e: self.smoothed.multiplier(e + self.limits.margin))

    def _check_shift(self) -> None:
        """Refuse what would not make a constraint looser or stricter: a shift of such an f."""
        if self.limits.margin != 0 and not self.outer.monotone:
            raise ValueError(
                f"`CoupledTerm(margin=...)` needs a non-decreasing outer function: {self.outer!r} "
                "would be moved, not made stricter. Lower its own tolerance instead."
            )
        if self.limits.moved and self.outer.dim != 1 and not self.outer.monotone:
            raise ValueError(
                f"`CoupledTerm(tolerance=...)` is subtracted from every component of g_i, which "
                f"does not loosen {self.outer!r}; give the outer function its own tolerance."
            )

    def _per_block(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        limit = self.limits.of(None, self.tracker.dim)
        return self._where_seen(lambda u: function(u - limit))

    def _where_seen(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A function of the table, NaN for blocks that were never seen."""
        u = self.tracker.value.squeeze(-1) if self.tracker.dim == 1 else self.tracker.value
        result = function(u)
        seen = self.tracker.seen.view(-1, *(1 for _ in result.shape[1:]))
        return torch.where(seen, result, torch.nan)
