"""Group DRO with CVaR: the average loss of the worst groups, with its threshold."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from . import _checks
from .objective import Compositional
from .outer import CVaR, CVaRHinge
from .terms import OuterTerm, Smoothing
from .tracker import InnerTracker, Tracked, for_model

__all__ = ["CVaRGroupDRO", "CVaRTerm", "GroupObjective", "exact_threshold"]


def exact_threshold(losses: Tensor, ratio: float, smoothing: float = 0.0) -> Tensor:
    r"""The s that minimises s + (1/n) sum_i f_lambda(u_i - s), f = (1/r)[.]_+.

    Without smoothing, the (1-r)-quantile: the ceil(r n)-th largest loss. With smoothing, the root
    of (1/n) sum_i clip((u_i - s)/lambda, 0, 1/r) = 1, piecewise linear in s and found exactly
    from its 2n sorted breakpoints in O(n log n).

    Args:
        losses: u_i, shape (n,).
        ratio: r, the share of groups that count.
        smoothing: lambda.

    Example:
        >>> import torch
        >>> exact_threshold(torch.tensor([1.0, 4.0, 2.0, 3.0]), ratio=0.5)
        tensor(3.)
        >>> exact_threshold(torch.tensor([0.0, 1.0]), ratio=0.5, smoothing=0.5)
        tensor(0.)
    """
    number = len(losses)
    if number == 0:
        return losses.new_tensor(math.nan)
    if smoothing == 0:
        rank = math.ceil(ratio * number - 1e-9)
        return losses.sort(descending=True).values[max(rank, 1) - 1]
    width = smoothing / ratio
    # Sums of losses are subtracted below: start from small ones, in the best precision there is.
    largest = losses.max()
    wide = losses.dtype if losses.device.type == "mps" else torch.float64
    ordered = (losses - largest).to(wide).sort().values
    above = torch.cat([ordered.flip(0).cumsum(0).flip(0), ordered.new_zeros(1)])

    def excess(point: Tensor) -> Tensor:
        """Sum of [u_i - point]_+ at many points at once."""
        first = torch.searchsorted(ordered, point)
        return above[first] - (number - first) * point

    knots = torch.cat([ordered, ordered - width]).sort().values
    mean_slope = (excess(knots) - excess(knots + width)) / (smoothing * number)
    # mean_slope falls from 1/r >= 1 to 0: interpolate in the piece where it passes 1. Where it
    # rests at 1 (r n an integer, losses far apart) every s is a minimiser; rounding must not choose
    # among them, so take the largest.
    slack = 8 * number * torch.finfo(wide).eps
    right = int((mean_slope >= 1 - slack).sum().clamp(1, len(knots) - 1))
    high, low = mean_slope[right - 1], mean_slope[right]
    share = ((high - 1) / (high - low).clamp(min=torch.finfo(wide).tiny)).clamp(0, 1)
    root = knots[right - 1] + share * (knots[right] - knots[right - 1])
    return largest + root.to(losses.dtype)


_ONE = torch.tensor(1.0)  # torch would make one for each "- 1", at the price of the difference


class CVaRTerm(OuterTerm):
    r"""CVaR of the inner values, with its threshold s kept as state.

    .. math::
        \min_s\; s + \frac1n\sum_i f_\lambda\bigl(g_i(w) - s\bigr), \qquad f = \tfrac1r[\cdot]_+

    The tracker follows g_i, not g_i - s, so that u does not lag behind s. The threshold is no
    parameter of your optimizer: weight decay and Adam's sign-like steps both harm it.

    Args:
        tracker: the tracker of g_i.
        ratio: r.
        smoothing: lambda (the quadratic zone has width lambda / r), 0, or a schedule.
        threshold: how s moves when the step closes: `"exact"` minimises over all tracked values;
            `"gradient"` steps by 1 - mean f' over the sampled blocks; `"table"` over all blocks.
        threshold_lr: step size of the two gradient rules.
    """

    threshold: Tensor
    kink: Tensor

    def __init__(
        self,
        tracker: InnerTracker,
        ratio: float,
        *,
        smoothing: Smoothing = 0.0,
        threshold: Literal["exact", "gradient", "table"] = "exact",
        threshold_lr: float = 0.1,
    ) -> None:
        _checks.in_interval("CVaRTerm", "ratio", ratio, 0.0, 1.0, open_low=True)
        _checks.one_of("CVaRTerm", "threshold", threshold, ("exact", "gradient", "table"))
        _checks.positive("CVaRTerm", "threshold_lr", threshold_lr)
        super().__init__(CVaRHinge(ratio), tracker, smoothing)
        self.ratio, self.rule, self.threshold_lr = ratio, threshold, threshold_lr
        self._slopes: list[Tensor] = []
        self._started = False
        self.register_buffer("threshold", tracker.value.new_tensor(math.nan))
        # The subgradient taken at u_i = s: the exact s of the hard CVaR always sits on a kink.
        self.register_buffer("kink", tracker.value.new_tensor(0.0))

    def loss(self, tracked: Tracked) -> Tensor:
        """The threshold s plus the mean of f_lambda(u_i - s) over the sampled blocks."""
        u, s = tracked.value, self.threshold
        updating = self.training and torch.is_grad_enabled()
        if not self._started:
            s, kink = self._minimiser(self._known(tracked) if updating else u)
            if updating and u.shape[0]:
                self._set(s, kink)
        else:
            kink = None
        excess = u - s
        values, slope = self.smoothed.value_and_gradient(excess)
        if self.smoothing == 0:
            slope = torch.where(excess == 0, self.kink if kink is None else kink, slope)
        share = 1 / max(u.shape[0], 1)
        slope = slope * share
        if updating and self.rule == "gradient" and u.shape[0]:
            self._slopes.append(slope.sum())
        return tracked.attach(torch.add(s, values.sum(), alpha=share), slope)

    def close(self) -> bool:
        """End an optimizer step: s moves once, whatever the number of batches in it."""
        took_part = super().close()
        if not (took_part and self._started):
            return took_part
        if self.rule == "exact":
            self._set(*self._minimiser(self.table()))
        else:
            slopes = self._slopes
            if self.rule == "table":
                slopes.append(self.smoothed.gradient(self.table() - self.threshold).mean())
            if slopes:  # none when every entry was dropped
                mean = slopes[0] if len(slopes) == 1 else torch.stack(slopes).mean()
                self.threshold.add_(mean - _ONE, alpha=self.threshold_lr)
            slopes.clear()
        return True

    def _known(self, tracked: Tracked) -> Tensor:
        """What was known before the first step: this batch or, after a warm-up, every block."""
        table = self.tracker.value.squeeze(-1).index_copy(0, tracked.index, tracked.value)
        return table[self.tracker.seen]

    def _minimiser(self, losses: Tensor) -> tuple[Tensor, Tensor]:
        """The best s for these losses; for the exact rule, the slope at u_i = s that proves it."""
        if len(losses) == 0:
            return torch.zeros_like(self.threshold), torch.zeros_like(self.kink)
        s = exact_threshold(losses, self.ratio, self.smoothing)
        if self.smoothing != 0 or self.rule != "exact":
            return s, torch.zeros_like(s)
        above, ties = (losses > s).sum().to(s.dtype), (losses == s).sum()
        return s, (len(losses) - above / self.ratio) / ties

    def _set(self, threshold: Tensor, kink: Tensor) -> None:
        self.threshold.copy_(threshold)
        self.kink.copy_(kink)
        self._started = True

    def value(self) -> Tensor:
        """CVaR of the tracked values, with the exact threshold; NaN before the first."""
        table = self.table()
        return CVaR(self.ratio)(table) if len(table) else table.new_tensor(math.nan)

    def weights(self) -> Tensor:
        """The weight p_i = (1/n) f_lambda'(u_i - s) that each block has in the gradient."""
        excess = self.tracker.value.squeeze(-1) - self.threshold
        slope = self.smoothed.gradient(excess)
        if self.smoothing == 0:
            slope = torch.where(excess == 0, self.kink, slope)
        return torch.where(self.tracker.seen, slope / self.tracker.num_inner, torch.nan)

    def get_extra_state(self) -> dict[str, bool]:
        """Whether s has its first value."""
        return {"started": self._started}

    def set_extra_state(self, state: Any) -> None:
        """Restore it; slopes of an open step are forgotten."""
        self._started = state["started"]
        self._slopes.clear()


class GroupObjective(Compositional):
    """An objective over the losses of groups: what can be asked of each."""

    def cvar(self, losses: Tensor | None = None) -> Tensor:
        """CVaR with the exact threshold: of the known group losses, or of those given.

        For a result to report, give the full-data group losses.
        """
        return self.term.value() if losses is None else CVaR(self.term.ratio)(losses)

    def group_losses(self) -> Tensor:
        """The tracked (or last seen) group losses, NaN where a group was never seen."""
        tracker = self.term.tracker
        return torch.where(tracker.seen, tracker.value.squeeze(-1), torch.nan)


class CVaRGroupDRO(GroupObjective):
    r"""Minimise the average loss of the worst groups (CVaR over groups), by SONEX.

    .. math::
        \min_w\; \mathrm{CVaR}_r\bigl(L_1(w), \dots, L_n(w)\bigr)
        = \min_{w,s}\; s + \frac1{rn}\sum_i [L_i(w) - s]_+

    Give it per-sample losses and the group of each sample; it tracks the group losses, owns the
    threshold s and weighs the groups. With `smoothing=0` it is SONX, with `correction=0` a moving
    average only, and with a `ProximalPoint` optimizer ALEXR2.

    Args:
        model: your model.
        optimizer: your optimizer.
        num_groups: n.
        ratio: r, the share of groups that count; 1 is the plain mean over groups, 1/n the worst.
        smoothing: lambda; the quadratic zone is lambda / r wide, in units of the loss.
        gamma: weight of the new group loss.
        correction: gamma' of the tracker, see `InnerTracker`.
        threshold: rule for s, see `CVaRTerm`.
        threshold_lr: its step size, for the gradient rules.
        process_group: see `Compositional`.
        offload: see `Compositional`.
        options: further options of `InnerTracker` (`read`, `on_nonfinite`, `dtype`, ...).

    Example:
        >>> import torch, fcco
        >>> from torch.nn.functional import binary_cross_entropy_with_logits as bce
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        >>> dro = fcco.CVaRGroupDRO(model, optimizer, num_groups=4, ratio=0.5, smoothing=0.1)
        >>> x, y = torch.randn(8, 2), torch.ones(8)
        >>> group = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
        >>> loss = dro(lambda: bce(model(x).squeeze(1), y, reduction="none"), group)
        >>> loss.backward(); optimizer.step(); optimizer.zero_grad()
        >>> bool(dro.cvar() > dro.group_losses().mean())
        True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        num_groups: int,
        ratio: float,
        *,
        smoothing: Smoothing = 0.1,
        gamma: float = 0.1,
        correction: float | Literal["theory", "auto"] = "auto",
        threshold: Literal["exact", "gradient", "table"] = "exact",
        threshold_lr: float = 0.1,
        process_group: Any = "auto",
        offload: bool = False,
        **options: Any,
    ) -> None:
        tracker = for_model(model, num_groups, gamma=gamma, correction=correction, **options)
        term = CVaRTerm(
            tracker,
            ratio,
            smoothing=smoothing,
            threshold=threshold,
            threshold_lr=threshold_lr,
        )
        super().__init__(model, optimizer, term, process_group=process_group, offload=offload)

    def group_weights(self) -> Tensor:
        """The weight of each group in the gradient; they sum to about 1."""
        return self.term.weights()

    @property
    def threshold(self) -> Tensor:
        """The current s."""
        return self.term.threshold
