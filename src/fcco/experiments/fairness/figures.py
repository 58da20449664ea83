"""Figures on full data: AUC, smoothed violations, and what the groups' ROC curves really do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["auc", "gap_floor", "largest_gap", "share_inside"]


def auc(positive: Tensor, negative: Tensor) -> float:
    r"""The probability that a positive sample has the higher score; ties count half.

    Example:
        >>> import torch
        >>> auc(torch.tensor([0.2, 0.8]), torch.tensor([0.1, 0.2]))
        0.875
    """
    ordered = negative.sort().values
    below = torch.searchsorted(ordered, positive, right=False).double()
    not_above = torch.searchsorted(ordered, positive, right=True).double()
    return ((below + not_above).sum() / (2 * len(positive) * len(negative))).item()


def largest_gap(first: Tensor, second: Tensor) -> float:
    r"""The largest difference of P(s > tau) between two samples over all thresholds tau.

    .. math::
        \max_\tau \bigl|\hat P_1(s > \tau) - \hat P_2(s > \tau)\bigr|

    With the positive samples of two groups it is the largest TPR gap, with the negative ones the
    largest FPR gap: no threshold is chosen and nothing is smoothed.

    Example:
        >>> import torch
        >>> largest_gap(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.0]))
        0.5
    """
    one, two = first.sort().values, second.sort().values
    at = torch.cat([one, two])
    below_one = torch.searchsorted(one, at, right=True).double() / len(one)
    below_two = torch.searchsorted(two, at, right=True).double() / len(two)
    return (below_one - below_two).abs().max().item()


def gap_floor(first: int, second: int) -> float:
    r"""What `largest_gap` shows on average when both samples have the same distribution.

    .. math::
        \sqrt{\pi/2}\,\ln 2\, \sqrt{1/n_1 + 1/n_2}

    the mean of Kolmogorov's limit distribution. A measured gap near it says nothing against
    equal rates, so a small test set cannot show a smaller one.

    Example:
        >>> round(gap_floor(590, 3256), 3)
        0.039
    """
    return math.sqrt(math.pi / 2) * math.log(2) * math.sqrt(1 / first + 1 / second)


def share_inside(scores: Tensor, thresholds: Sequence[float] | Tensor) -> float:
    """The share of scores between the lowest and the highest threshold."""
    low, high = float(min(thresholds)), float(max(thresholds))
    return ((scores >= low) & (scores <= high)).double().mean().item()
