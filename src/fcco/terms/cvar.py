"""CVaR over blocks: the average of the worst values, with its threshold s."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import relu

from .. import _checks
from .._schedules import Smoothing
from ..outer import CVaR, CVaRHinge
from ..tracker import InnerTracker, Tracked
from .coupled import OuterTerm
from .parameters import BlockParameters

__all__ = [
    "CVaRTerm",
    "cvar_slopes",
    "exact_threshold",
    "hard_threshold",
    "mean_of_worst",
    "smooth_threshold",
]


def cvar_slopes(
    losses: Tensor,
    threshold: Tensor,
    ratio: float | Tensor,
    smoothing: float | Tensor,
    kink: Tensor,
    blocks: int | Tensor,
) -> Tensor:
    r"""The slopes of the estimate of CVaR from some blocks; pure.

    .. math::
        \frac1{B_1} f_\lambda'(u_i - s) = \frac1{B_1}
            \mathrm{clip}\Bigl(\frac{u_i - s}{\lambda}, 0, \frac1r\Bigr),
        \qquad f = \tfrac1r[\cdot]_+

    Args:
        losses: u_i, shape (B1,).
        threshold: s.
        ratio: r.
        smoothing: lambda; a tensor may be 0 in some runs of a fleet.
        kink: the subgradient at u_i = s without smoothing.
        blocks: B1, the number of blocks in the batch.

    Example:
        >>> import torch
        >>> u, s = torch.tensor([1.0, 1.2, 3.0]), torch.tensor(1.0)
        >>> cvar_slopes(u, s, 0.5, smoothing=0.5, kink=0 * s, blocks=3) * 3
        tensor([0.0000, 0.4000, 2.0000])
    """
    excess, share, cap = losses - threshold, 1 / blocks, 1 / ratio
    if isinstance(smoothing, Tensor):
        hard = smoothing == 0
        width = torch.where(hard, 1, smoothing)
        slope = torch.minimum(relu(excess / width), cap + torch.zeros_like(excess))
        hard_slope = torch.where(excess == 0, kink, (excess > 0).to(excess) * cap)
        return torch.where(hard, hard_slope, slope) * share
    if not smoothing:
        # A bool times a number would be in single precision.
        return torch.where(excess == 0, kink, (excess > 0).to(excess) * cap) * share
    # The factor 1/B1 is in the slope from the start: fewer operations on short vectors.
    return (excess * (share / smoothing)).clamp_(0, cap * share)  # type: ignore[arg-type]


def mean_of_worst(losses: Tensor, ratio: float, seen: Tensor | None = None) -> Any:
    """CVaR: the mean of the worst r n losses, the last of them in part; pure.

    Args:
        losses: u_i, shape (n,), n > 0.
        ratio: r.
        seen: which losses count; None for all.
    """
    if seen is not None:  # on a GPU, where nobody shall wait
        rank = ratio * seen.sum()
        ordered = torch.where(seen, losses, -torch.inf).sort(descending=True).values
        weight = (rank - torch.arange(len(losses), device=losses.device)).clip(0, 1)
        return torch.where(weight > 0, ordered * weight, 0).sum() / rank
    if losses.device.type != "cpu":
        return CVaR(ratio)(losses)
    values = losses.detach().numpy()
    rank = ratio * values.size
    first = max(values.size - int(rank) - 1, 0)  # what counts in part, then what counts
    worst = np.partition(values, first)[first:]
    total = float(worst.sum(dtype=np.float64))
    return (total - (worst.size - rank) * float(worst[0])) / rank


def exact_threshold(losses: Tensor, ratio: float, smoothing: float = 0.0) -> Tensor:
    r"""The s that minimises s + (1/n) sum_i f_lambda(u_i - s), f = (1/r)[.]_+.

    Without smoothing, the (1-r)-quantile: the ceil(r n)-th largest loss. With smoothing, the root
    of (1/n) sum_i clip((u_i - s)/lambda, 0, 1/r) = 1, which is piecewise linear in s, found from
    its 2n sorted breakpoints in O(n log n).

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
    number = losses.shape[0]
    if number == 0:
        return losses.new_tensor(math.nan)
    if smoothing == 0:
        return hard_threshold(losses, ratio)
    return smooth_threshold(losses, ratio, smoothing)


def newton_threshold(
    losses: np.ndarray[Any, Any], ratio: float, smoothing: float, start: float
) -> float | None:
    """Newton's method for the s of `exact_threshold`, from the last s.

    A step that stays in its linear piece is exact, the usual case during training, and costs O(n)
    instead of a sort. Returns None where it does not. In NumPy, because a dozen operations on a
    short vector take a third of torch's time.
    """
    root, width, number = start, smoothing / ratio, losses.size
    for _ in range(4):
        excess = losses - root
        above = excess[excess > 0]
        zone = above[above < width]  # the blocks whose slope is between 0 and 1/r
        inside, capped = zone.size, above.size - zone.size
        if inside == 0:
            return None
        total = float(zone.sum(dtype=np.float64))
        move = (total + capped * width - number * smoothing) / inside
        root += move
        # The step is exact if no block enters or leaves the zone on the way. Strictly: with a
        # block on an end of the zone the root may not be unique, and the next round decides.
        if move >= 0:
            stays = zone.min() > move and np.count_nonzero(above > width + move) == capped
        else:
            stays = zone.max() < width + move and np.count_nonzero(excess > move) == above.size
        if stays:
            return root
    return None


def hard_threshold(losses: Tensor, ratio: float | Tensor, seen: Tensor | None = None) -> Tensor:
    """The exact threshold without smoothing: the ceil(r n)-th largest loss; pure.

    Args:
        losses: u_i, shape (n,).
        ratio: r; a tensor in double precision when `seen` is given.
        seen: which losses count, at least one; None for all.
    """
    if seen is None:
        # r n in floating point may lie just above the integer that is meant.
        rank = math.ceil(ratio * losses.shape[0] - 1e-9)
        return losses.sort(descending=True).values[max(rank, 1) - 1]
    ordered = torch.where(seen, losses, -torch.inf).sort(descending=True).values
    rank = (ratio * seen.sum().double() - 1e-9).ceil().clamp(min=1).long()
    return ordered.gather(0, rank.unsqueeze(0) - 1).squeeze(0)


def smooth_threshold(
    losses: Tensor, ratio: float | Tensor, smoothing: float | Tensor, seen: Tensor | None = None
) -> Tensor:
    """The exact threshold with smoothing, from sorted breakpoints; pure and branch-free.

    Args:
        losses: u_i, shape (n,).
        ratio: r.
        smoothing: lambda, above 0.
        seen: which losses count, at least one; None for all.
    """
    number, width = losses.shape[0], smoothing / ratio
    # Sums of losses are subtracted below: start from small ones, in the best precision there is.
    largest = (losses if seen is None else torch.where(seen, losses, -torch.inf)).max()
    wide = losses.dtype if losses.device.type == "mps" else torch.float64
    relative, count = (losses - largest).to(wide), number
    if seen is not None:
        # Others go below all breakpoints of those that count, where they add nothing.
        lowest = torch.where(seen, relative, 0).min()
        relative = torch.where(seen, relative, lowest - 2 * width)
        count = seen.sum().to(wide)
    ordered = relative.sort().values
    above = torch.cat([ordered.flip(0).cumsum(0).flip(0), ordered.new_zeros(1)])

    def excess(point: Tensor) -> Tensor:
        """Sum of [u_i - point]_+ at many points at once."""
        first = torch.searchsorted(ordered, point)
        return above[first] - (number - first) * point

    knots = torch.cat([ordered, ordered - width]).sort().values
    mean_slope = (excess(knots) - excess(knots + width)) / (smoothing * count)
    # mean_slope falls from 1/r >= 1 to 0: interpolate in the piece where it passes 1. Where it
    # rests at 1 (r n an integer, losses far apart) every s is a minimiser; rounding must not choose
    # among them, so take the largest.
    slack = 8 * count * torch.finfo(wide).eps
    right = (mean_slope >= 1 - slack).sum().clamp(1, len(knots) - 1)
    ends = torch.stack([right - 1, right])
    high, low = mean_slope[ends]
    share = ((high - 1) / (high - low).clamp(min=torch.finfo(wide).tiny)).clamp(0, 1)
    left, end = knots[ends]
    root = left + share * (end - left)
    return largest + root.to(losses.dtype)


class CVaRTerm(OuterTerm):
    r"""CVaR of the inner values, with its threshold s kept as state.

    .. math::
        \min_s\; s + \frac1n\sum_i f_\lambda\bigl(g_i(w) - s\bigr), \qquad f = \tfrac1r[\cdot]_+

    The rule that moves s stands in `loss` and `close`; `fcco.fleet.cvar` holds the same rule for
    many runs at once. The tracker follows g_i, not g_i - s, so that u does not lag behind s. The
    threshold is no parameter of your optimizer: weight decay and Adam's sign-like steps both harm
    it. Once per optimizer step it becomes the minimiser over the table that the gradient reads
    (the new u, with `read="new"`).

    Args:
        tracker: the tracker of g_i.
        ratio: r.
        smoothing: lambda (the quadratic zone has width lambda / r), 0, or a schedule; a `Width`; or
            `"auto"`, see `OuterTerm`. Before any group was seen twice, all groups then count alike.
    """

    kink: Tensor

    def __init__(
        self,
        tracker: InnerTracker,
        ratio: float,
        *,
        smoothing: Smoothing = 0.0,
    ) -> None:
        _checks.in_interval("CVaRTerm", "ratio", ratio, 0.0, 1.0, open_low=True)
        if tracker.log_space:
            raise ValueError(
                "`CVaRTerm(tracker=...)` compares the values themselves with the threshold: "
                "`log_space=True`, which keeps their logarithms, has no meaning for it."
            )
        # f is for the checks of lambda and for reports; `loss` uses the closed form `cvar_mean`.
        super().__init__(CVaRHinge(ratio), tracker, smoothing)
        self.ratio, self._started = ratio, False
        like = tracker.value
        self.thresholds = BlockParameters(1, dtype=like.dtype, device=like.device)
        self.keep("thresholds", self.thresholds)
        self.__dict__["thresholds"] = self.thresholds  # from where it is found without a search
        # The subgradient taken at u_i = s: the exact s of the hard CVaR always sits on a kink.
        self.register_buffer("kink", tracker.value.new_tensor(0.0))

    @property
    def threshold(self) -> Tensor:
        """The current s, NaN before the first batch: a view of the only row of `thresholds`."""
        return self.thresholds.value[0]

    def loss(self, tracked: Tracked) -> Tensor:
        """CVaR of the tracked values, with the slopes of f_lambda(u_i - s) at the sampled blocks.

        In `eval()` mode it is CVaR of the batch.
        """
        u, threshold, kink = tracked.value, self.threshold, self.kink
        blocks = u.shape[0]
        updating = self.training and torch.is_grad_enabled() and blocks > 0
        automatic = self._buffers["width"] is not None
        # An automatic lambda is that of this step: s must be the minimiser for the same one.
        within_step = automatic or self.tracker.read == "new"
        moves = not self._started or (updating and within_step)
        losses, seen = self._table_with(tracked) if updating and moves else (u, None)
        if updating and automatic:
            self.set_width(lambda: self._width_at_first(losses, seen))
        smoothing = self.smoothing
        if moves:
            best, kink = self._minimiser(losses, seen)
            if updating:
                self._set(best, kink)
            else:  # an evaluation before the first step, which leaves no trace
                assert isinstance(best, Tensor)
                threshold = best
        slope = cvar_slopes(u, threshold, self.ratio, smoothing, kink, max(blocks, 1))
        if updating and (not moves or self.tracker.read == "old"):
            losses, seen = self.table(), None  # the present estimates, whatever the slopes read
        value = mean_of_worst(losses, self.ratio, seen) if blocks else 0.0
        return tracked.as_loss(value, slope)

    def _width_at_first(self, losses: Tensor, seen: Tensor | None) -> Tensor:
        """So wide that all groups count alike: lambda is far above the differences of losses."""
        low = losses if seen is None else torch.where(seen, losses, torch.inf)
        high = losses if seen is None else torch.where(seen, losses, -torch.inf)
        return 100 / self.ratio * (high.max() - low.min() + 1e-12)

    def close(self) -> bool:
        """End an optimizer step: s moves once, whatever the number of batches in it."""
        # This counts the step: a scheduled lambda below is that of the next step, which s is for.
        took_part = super().close()
        if not (took_part and self._started):
            return took_part
        if self.tracker.read == "old" and self._buffers["width"] is None:
            self._set(*self._minimiser(self.tracker.seen_rows()))
        return True

    def _slopes(self, losses: Tensor) -> Tensor:
        blocks = max(len(losses), 1)
        return cvar_slopes(losses, self.threshold, self.ratio, self.smoothing, self.kink, blocks)

    def _table_with(self, tracked: Tracked) -> tuple[Tensor, Tensor | None]:
        """The u_i as the gradient of this batch reads them, and which count; None for all.

        Those of the blocks seen; or, with an automatic lambda on a GPU, of all blocks: to choose
        some of them would make the host wait.
        """
        tracker = self.tracker
        masked = self._buffers["width"] is not None and tracker.value.device.type != "cpu"
        if tracker.read == "new":
            return (tracker.rows, tracker.seen) if masked else (self.table(), None)
        table = tracker.rows.index_copy(0, tracked.index, tracked.value)
        return (table, tracker.seen) if masked else (table[tracker.seen], None)

    def _minimiser(
        self, losses: Tensor, seen: Tensor | None = None
    ) -> tuple[Tensor | float, Tensor]:
        """The best s for these losses; without smoothing, also the slope at u_i = s."""
        if losses.shape[0] == 0:
            return torch.zeros_like(self.threshold), torch.zeros_like(self.kink)
        smoothing = self.smoothing
        if isinstance(smoothing, Tensor):  # `"auto"` on a GPU: above 0
            return smooth_threshold(losses, self.ratio, smoothing, seen), self.kink
        if smoothing and self._started and losses.device.type == "cpu":  # it looks at values
            last = self.threshold.item()
            root = newton_threshold(losses.detach().numpy(), self.ratio, smoothing, last)
            if root is not None:
                return root, self.kink
        s = exact_threshold(losses, self.ratio, smoothing)
        if smoothing != 0:
            return s, self.kink
        # The weights sum to 1 only with the right subgradient at the kink.
        above, ties = (losses > s).sum().to(s.dtype), (losses == s).sum()
        return s, (len(losses) - above / self.ratio) / ties

    def start_threshold(self) -> None:
        """Set s to the best one for the tracked values, before the first batch."""
        self._set(*self._minimiser(self.table()))

    def _set(self, threshold: Tensor | float, kink: Tensor) -> None:
        self.thresholds.set(None, threshold)
        if kink is not self.kink:  # `_minimiser` gives the buffer itself when nothing is new
            self.kink.copy_(kink)
        if not self._started:  # nn.Module is slow to set attributes of
            self._started = True

    def value(self) -> Tensor:
        """CVaR of the tracked values, with the exact threshold; NaN before the first."""
        table = self.table()
        return CVaR(self.ratio)(table) if len(table) else table.new_tensor(math.nan)

    def excess(self, values: Tensor | None = None) -> Tensor:
        """The u_i - s, or those of given values of all blocks."""
        return super().excess(values) - self.threshold

    def weights(self) -> Tensor:
        """The weight p_i = (1/n) f_lambda'(u_i - s) that each block has in the gradient."""
        return torch.where(self.tracker.seen, self._slopes(self.tracker.rows), torch.nan)

    def get_extra_state(self) -> Tensor:
        """Whether s has its first value."""
        return torch.tensor(self._started)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if no training can have led to this state."""
        super().check_state(state)
        threshold = state.get("thresholds.value", self.threshold)
        if bool(state.get("_extra_state", False)) and not bool(threshold.isfinite().all()):
            raise ValueError("`thresholds.value` is NaN, although there were steps.")

    def set_extra_state(self, state: Any) -> None:
        """Restore it."""
        self._started = bool(state)
