"""A term of three levels: a function of the mean of functions of tracked values."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..outer import AbstractOuter
from ..tracker import InnerTracker, Tracked
from .base import AbstractTerm

__all__ = ["NestedTerm"]


class NestedTerm(AbstractTerm):
    r"""A function of a mean of functions of tracked values.

    .. math::
        F\Bigl(\frac1n\sum_{i=1}^n \phi_i\bigl(g_i(w)\bigr)\Bigr), \qquad
        g_i(w) = \mathbb E\,g_i(w;\xi)

    Two trackers follow the two expectations: u_i that of g_i, and v that of the mean over i, which
    a batch sees in part. The gradient is the chain rule at the tracked values,

    .. math::
        \frac1{B_1}\sum_{i\in\mathcal B_1} \nabla g_i(w)\,\nabla\phi_i(u_i)\,\nabla F(v).

    Args:
        outer: F.
        middle: gives the mean over the blocks of a batch of phi_i(u_i), shape (d2,), from their u,
            (B1,) or (B1, d1), and their ids, (B1,); by operations of torch, which differentiates
            it. With `mean` in log space it returns logarithms.
        tracker: the tracker of g_i.
        mean: the tracker of the mean, with one block of dimension d2.

    References:
        D. Zhu et al., When AUC meets DRO: optimizing partial AUC for deep learning with non-convex
        convergence guarantee, 2022 (SOTA-s). D. Zhu et al., Provable multi-instance deep AUC
        maximization with stochastic pooling, 2023 (MIDAM).
    """

    def __init__(
        self,
        outer: AbstractOuter,
        middle: Callable[[Tensor, Tensor], Tensor],
        tracker: InnerTracker,
        mean: InnerTracker,
    ) -> None:
        super().__init__(tracker)
        if mean.num_inner != 1 or mean.needs_previous:
            raise ValueError(
                "`NestedTerm(mean=...)` must be a tracker of one block without correction: "
                "`ema_tracker(1, ...)`."
            )
        self.outer, self.middle, self.mean = outer, middle, mean

    def loss(self, tracked: Tracked) -> Tensor:
        """F at the tracked mean, with the gradient of the chain rule."""
        if tracked.index.shape[0] == 0:  # a mean over no blocks would be NaN
            return tracked.as_loss(tracked.value.sum(), tracked.value)
        with torch.enable_grad():
            u = tracked.value.detach().requires_grad_()
            fresh = self.middle(u, tracked.index).unsqueeze(0)
            v = self.mean.track(self.mean.entries(self.mean.blocks(), fresh), tracked.step)
            value, slope = self.outer.value_and_gradient(v.value)
            top = v.as_loss(value.sum(), slope)
            (slope_u,) = torch.autograd.grad(top, u)
        return tracked.as_loss(top.detach(), slope_u)

    def value(self) -> Tensor:
        """F of the mean over the blocks seen; NaN if there are none."""
        table, seen = self.table(), self.tracker.seen.nonzero().squeeze(1)
        if not len(table):
            return table.new_tensor(math.nan)
        return self.outer(self.middle(table, seen)).sum()
