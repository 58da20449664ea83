"""The adversary of group DRO: mirror ascent on weights in {sum p = 1, 0 <= p_i <= cap}."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .. import _checks
from ..outer import project_capped_simplex

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


def ascend(
    weights: Tensor,
    losses: Tensor,
    present: Tensor,
    step: float | Tensor,
    cap: float | Tensor,
    geometry: Geometry,
    factor: float | Tensor,
    offset: float | Tensor | None = None,
) -> Tensor:
    """The weights after a step along the losses of a batch, 0 for groups that are not in it.

    Args:
        weights: p.
        losses: L_i, of any value where absent.
        present: whether group i is in the batch.
        step: eta_p.
        cap: the largest weight.
        geometry: see `mirror_ascent`.
        factor: of the losses, see `block_factor`.
        offset: a; the losses are then divided by p + a (CTC-DRO).
    """
    estimate = torch.where(present, losses * factor, 0)
    if offset is not None:
        estimate = estimate / (weights + offset)
    return mirror_ascent(weights, estimate, step, cap, geometry)
