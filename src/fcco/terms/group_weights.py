r"""Weights on groups: mirror ascent on the capped simplex, and the term that uses it.

The adversary of group DRO keeps weights p in Omega = {sum p = 1, 0 <= p_i <= cap} and moves them
towards the groups with a large loss. The two functions are pure and free of data-dependent
branches; they act on the last axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from .. import _checks
from ..outer import CVaR, project_capped_simplex
from ..tracker import InnerTracker, Tracked
from .base import AbstractTerm

__all__ = [
    "GroupWeights",
    "block_factor",
    "estimated_losses",
    "mirror_ascent",
    "project_kl_capped",
]

Geometry = Literal["kl", "euclidean"]
Scaling = Literal["unbiased", "batch"]


def project_kl_capped(logits: Tensor, cap: float | Tensor) -> Tensor:
    r"""The point of {sum p = 1, 0 <= p <= cap} nearest to q = exp(logits) in relative entropy.

    .. math::
        \arg\min_p \sum_i p_i\log(p_i/q_i) = \min(\text{cap}, c\,q), \qquad
        c = \frac{1 - m\,\text{cap}}{\sum_{j>m} q_{[j]}}

    where q_{[j]} are the sorted entries and m, the number of entries at the cap, is the smallest
    for which this is consistent. Exact, in O(d log d); q is given by its logarithms, of any size
    and known up to a constant, so nothing overflows.

    Args:
        logits: log q, any shape; the last axis has length d.
        cap: the largest weight, at least 1/d. A tensor is 0-dimensional or ends in an axis of
            length 1.

    Example:
        >>> import torch
        >>> project_kl_capped(torch.tensor([6.0, 1.0, 1.0, 2.0]).log(), cap=0.4)
        tensor([0.4000, 0.1500, 0.1500, 0.3000])
    """
    size = logits.shape[-1]
    if not isinstance(cap, Tensor):
        # The slack is for a cap = 1/d that was rounded.
        _checks.at_least("project_kl_capped", "cap", cap, (1 - 1e-6) / size)
        cap = logits.new_full((), cap)
    largest = torch.finfo(logits.dtype).max / 4
    ordered, order = logits.clamp(-largest, largest).sort(dim=-1, descending=True)
    rank = torch.arange(size, device=logits.device)
    # What m entries at the cap leave to the others, and the share the largest of these takes.
    left = (1 - cap * rank.to(logits.dtype)).clamp(min=0)
    others = ordered.flip(-1).logcumsumexp(-1).flip(-1)
    fits = left.log() + (ordered - others) <= cap.log()
    capped = (~fits).to(torch.int64).cumprod(-1).sum(-1, keepdim=True).clamp(max=size - 1)
    # Normalised once more among themselves: next to a large logit their sum has lost digits.
    free = torch.where(rank >= capped, ordered, -torch.inf).softmax(-1)
    free = torch.minimum(free * left.expand_as(free).gather(-1, capped), cap)
    weights = torch.where(rank >= capped, free, cap)
    return torch.zeros_like(weights).scatter(-1, order, weights)


def mirror_ascent(
    weights: Tensor,
    estimate: Tensor,
    step: float | Tensor,
    cap: float | Tensor,
    geometry: Geometry = "kl",
    floor: float = 1e-12,
) -> Tensor:
    r"""One step of mirror ascent on <p, losses> over Omega = {sum p = 1, 0 <= p <= cap}.

    .. math::
        p^+ = \arg\max_{p'\in\Omega} \langle p', \hat\ell\rangle - \tfrac1\eta D(p', p)
            = \begin{cases} \Pi^{KL}_\Omega\bigl(p \circ e^{\eta\hat\ell}\bigr)
                & D = \text{relative entropy}\\
              \Pi_\Omega(p + \eta\hat\ell) & D = \tfrac12\|\cdot\|^2 \end{cases}

    Args:
        weights: p.
        estimate: the estimated losses.
        step: eta.
        cap: the largest weight.
        geometry: `"kl"` or `"euclidean"`.
        floor: with `"kl"`, p counts as at least this much: a weight that became 0 by underflow
            could never grow again.

    Example:
        >>> import torch
        >>> p, losses = torch.full((4,), 0.25), torch.tensor([2.0, 0.0, 1.0, 0.0])
        >>> mirror_ascent(p, losses, step=1.0, cap=0.5)
        tensor([0.5000, 0.1060, 0.2881, 0.1060])
        >>> mirror_ascent(p, losses, step=0.1, cap=0.5, geometry="euclidean")
        tensor([0.3750, 0.1750, 0.2750, 0.1750])
    """
    _checks.one_of("mirror_ascent", "geometry", geometry, ("kl", "euclidean"))
    if geometry == "euclidean":
        return project_capped_simplex(weights + step * estimate, cap)
    return project_kl_capped(weights.clamp(min=floor).log() + step * estimate, cap)


def block_factor(scaling: Scaling, number: int, blocks: int | Tensor) -> float | Tensor:
    """The factor n/B1 that makes sampled groups unbiased, or 1; pure.

    Args:
        scaling: `"unbiased"` or `"batch"`.
        number: n.
        blocks: B1, at least 1.
    """
    return number / blocks if scaling == "unbiased" else 1.0


def estimated_losses(losses: Tensor, present: Tensor, factor: float | Tensor) -> Tensor:
    """The losses that move p: 0 for absent groups; pure.

    Args:
        losses: L_i, of any value where absent.
        present: whether group i is in the batch.
        factor: of present losses, see `block_factor`.

    Example:
        >>> import torch
        >>> estimated_losses(torch.tensor([2.0, 3.0]), torch.tensor([True, False]), 2.0)
        tensor([4., 0.])
    """
    return torch.where(present, losses * factor, 0)


class GroupWeights(AbstractTerm):
    r"""The losses of groups under weights that an adversary moves (OOA).

    .. math::
        \hat\ell_i &= \tfrac{n}{B_1}\,g_i(w_t;\mathcal B)\ \ (i\in\mathcal B_1),
            \quad 0 \text{ otherwise}, \qquad
        p^{t+1} = \text{mirror step from } p^t \text{ along } \hat\ell \\
        G_t &= \tfrac{n}{B_1}\sum_{i\in\mathcal B_1} p_i^{t+1}\,\nabla g_i(w_t;\mathcal B)

    The buffer `weights` holds p of the last finished optimizer step. Several batches before a
    step (gradient accumulation, a step that a GradScaler skipped) move p once: it is computed
    anew from `weights` and the losses of all of them together. The gradient of each batch uses
    the p that was known then.

    Args:
        tracker: `fcco.ema_tracker(n, gamma=1.0, read="new")`: the losses of the groups in the
            batch.
        step: eta_p.
        ratio: r; p_i <= 1/(r n). 1/n leaves p free, 1 keeps it uniform.
        geometry: `"kl"` or `"euclidean"`, see `mirror_ascent`.
        scaling: `"unbiased"` as above; `"batch"` leaves the factors n/B1 out, as the released
            code of group DRO does.

    Example:
        >>> import torch, fcco
        >>> term = GroupWeights(fcco.ema_tracker(3, gamma=1.0, read="new"), step=1.0, ratio=0.5)
        >>> term.weights, round(term.cap, 4)
        (tensor([0.3333, 0.3333, 0.3333]), 0.6667)
    """

    weights: Tensor
    geometry: Geometry
    scaling: Scaling

    def __init__(
        self,
        tracker: InnerTracker,
        step: float,
        ratio: float,
        *,
        geometry: Geometry = "kl",
        scaling: Scaling = "unbiased",
    ) -> None:
        call, number = type(self).__name__, tracker.num_inner
        _checks.positive(call, "step", step)
        _checks.in_interval(call, "ratio", ratio, 0.0, 1.0, open_low=True)
        _checks.one_of(call, "geometry", geometry, ("kl", "euclidean"))
        _checks.one_of(call, "scaling", scaling, ("unbiased", "batch"))
        if tracker.dim != 1 or tracker.log_space or tracker.read != "new":
            raise ValueError(
                f"`{call}(tracker=...)` must hold one loss per group and read the new one: "
                "dim=1, read='new', no log space."
            )
        super().__init__(tracker)
        self.rate, self.ratio, self.geometry, self.scaling = step, ratio, geometry, scaling
        self.cap = min(1.0, 1 / (ratio * number))
        self.register_buffer("weights", torch.full_like(tracker.value[:, 0], 1 / number))
        self._moved: Tensor | None = None  # p of the open step
        self._blocks: Tensor | None = None  # the groups seen in it

    @property
    def current(self) -> Tensor:
        """The p that the gradient uses: that of the open step, if one is open."""
        return self.weights if self._moved is None else self._moved

    def loss(self, tracked: Tracked) -> Tensor:
        """The estimate of sum_i p_i g_i from the sampled groups."""
        index = tracked.index
        if self.tracker.updating and index.shape[0]:
            self._ascend(index)
        slope = self.current[index] * self._factor(index.shape[0])
        return tracked.as_loss((slope * tracked.value).sum(), slope)

    def close(self) -> bool:
        """End an optimizer step: p of the open step becomes final."""
        if self._moved is not None:
            self.weights.copy_(self._moved)
        self._forget()
        return super().close()

    def rollback(self) -> None:
        """Undo what was done since the last optimizer step."""
        self._forget()
        super().rollback()

    def _forget(self) -> None:
        """Drop p of the open step."""
        self._moved = self._blocks = None

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if no training can have led to this state."""
        super().check_state(state)
        weights = state.get("weights", self.weights)
        if bool((weights < 0).any()) or abs(float(weights.sum()) - 1) > 1e-3:
            raise ValueError("`weights` must be at least 0 and sum to 1.")

    def value(self) -> Tensor:
        """CVaR of the losses last seen, the value that the best p gives; NaN before the first."""
        table = self.table()
        return CVaR(self.ratio)(table) if len(table) else table.new_tensor(torch.nan)

    def _ascend(self, index: Tensor) -> None:
        """Move p from where the step began, along the losses of all groups seen in it."""
        if self._blocks is not None:
            index = torch.cat([self._blocks, index]).unique()
        self._blocks = index
        losses = self.tracker.value[:, 0]
        present = torch.zeros_like(losses, dtype=torch.bool).index_fill(0, index, True)
        factor = self._factor(index.shape[0])
        estimate = estimated_losses(losses, present, factor)
        self._moved = mirror_ascent(self.weights, estimate, self.rate, self.cap, self.geometry)

    def _factor(self, blocks: int) -> float | Tensor:
        return block_factor(self.scaling, self.tracker.num_inner, max(blocks, 1))
