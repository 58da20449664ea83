"""Figures on full data: AUC, smoothed violations, and what the groups' ROC curves really do.

All of them work on the last axis: of one run, or of many runs with one row each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .cells import Cells
from .rates import Measure, gaps
from .score import Level

__all__ = ["auc", "everything", "gap_floor", "largest_gap", "share_inside"]

SHORT = {"train": "train", "validation": "val", "test": "test"}
"""Parts of the data as the keys of rows call them."""


def auc(positive: Tensor, negative: Tensor) -> Tensor:
    r"""The probability that a positive sample has the higher score; ties count half.

    Args:
        positive: scores (..., n).
        negative: scores (..., m).

    Example:
        >>> import torch
        >>> auc(torch.tensor([0.2, 0.8]), torch.tensor([0.1, 0.2])).item()
        0.875
    """
    ordered = negative.sort(-1).values
    below = torch.searchsorted(ordered, positive.contiguous(), right=False)
    not_above = torch.searchsorted(ordered, positive.contiguous(), right=True)
    pairs = positive.shape[-1] * negative.shape[-1]
    return (below + not_above).sum(-1).double() / (2 * pairs)


def largest_gap(first: Tensor, second: Tensor) -> Tensor:
    r"""The largest difference of P(s > tau) between two samples over all thresholds tau.

    .. math::
        \max_\tau \bigl|\hat P_1(s > \tau) - \hat P_2(s > \tau)\bigr|

    With the positive samples of two groups it is the largest TPR gap, with the negative ones the
    largest FPR gap: no threshold is chosen and nothing is smoothed.

    Args:
        first: scores (..., n).
        second: scores (..., m).

    Example:
        >>> import torch
        >>> largest_gap(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.0])).item()
        0.5
    """
    one, two = first.sort(-1).values, second.sort(-1).values
    at = torch.cat([one, two], -1)
    below_one = torch.searchsorted(one, at, right=True).double() / one.shape[-1]
    below_two = torch.searchsorted(two, at, right=True).double() / two.shape[-1]
    return (below_one - below_two).abs().amax(-1)


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


def share_inside(scores: Tensor, thresholds: Sequence[float] | Tensor) -> Tensor:
    """The share of scores (..., n) between the lowest and the highest of thresholds (..., m)."""
    at = torch.as_tensor(thresholds, dtype=scores.dtype, device=scores.device)
    low, high = at.amin(-1, keepdim=True), at.amax(-1, keepdim=True)
    return ((scores >= low) & (scores <= high)).double().mean(-1)


def everything(
    outputs: Mapping[str, Tensor],
    parts: Mapping[str, Cells],
    level: Level,
    measure: Measure,
    tolerance: float,
) -> dict[str, Tensor | float]:
    """All figures of an evaluation by key: numbers (...), and the constraints (..., m).

    Args:
        outputs: of the network on each part of the data, (..., n).
        parts: the data by name.
        level: of the outputs on training data.
        measure: for the smoothed rates.
        tolerance: kappa.
    """
    found: dict[str, Tensor | float] = {}
    for name, part in parts.items():
        scores = level.scores(outputs[name])
        found |= _of_part(SHORT[name], part.split(scores), scores, level, measure, tolerance)
    scores = level.scores(outputs["train"])
    return found | {"score_mean": scores.mean(-1), "score_deviation": scores.std(-1)}


def _of_part(
    name: str,
    cells: list[Tensor],
    scores: Tensor,
    level: Level,
    measure: Measure,
    tolerance: float,
) -> dict[str, Tensor | float]:
    tpr_gap, fpr_gap = (largest_gap(cells[y], cells[2 + y]) for y in (1, 0))
    floor = max(gap_floor(cells[y].shape[-1], cells[2 + y].shape[-1]) for y in (1, 0))
    excess = gaps(measure.full_rates(cells, level.thresholds)).abs() - tolerance
    return {
        f"{name}_auc": auc(torch.cat(cells[1::2], -1), torch.cat(cells[0::2], -1)),
        f"{name}_violation": excess.amax(-1),
        f"{name}_inside": share_inside(scores, level.thresholds),
        f"{name}_gap": torch.maximum(tpr_gap, fpr_gap),
        f"{name}_tpr_gap": tpr_gap,
        f"{name}_fpr_gap": fpr_gap,
        f"{name}_gap_floor": floor,
        "constraints" if name == "train" else f"{name}_constraints": excess,
    }
