"""Who is a negative of whom: the pairs of a batch, their labels, on one process or on many."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .._distributed import Group, gather_rows, row_counts

__all__ = ["Candidates", "find_candidates"]


@dataclass(frozen=True)
class Candidates:
    """The pairs of the global batch, seen from this rank.

    Attributes:
        start: position of this rank's first pair in the global batch.
        own: pairs of this rank.
        total: pairs of all ranks.
        negatives: how many each own pair has, shape (own,), or one number for all.
        label: label of every pair of the global batch, or None when all differ.
        anchor: positions of this rank's anchors, or None when all own pairs are anchors.
        group: the ranks, or None.
        counts: pairs of each rank, or None.
    """

    start: int
    own: int
    total: int
    negatives: Tensor | int
    label: Tensor | None
    anchor: Tensor | None
    group: Group | None
    counts: list[int] | None

    def gathered(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of all ranks, of two tensors with a row for each own pair."""
        if self.group is None:
            return first, second
        kind = torch.promote_types(first.dtype, second.dtype)
        rows = torch.cat([first.to(kind), second.to(kind)], dim=1)
        both = gather_rows(rows, self.group, self.counts)
        one, two = both.split([first.shape[1], second.shape[1]], dim=1)
        return one, two

    def log_negatives(self, kind: torch.dtype) -> Tensor | float:
        """The logarithm of the number of negatives; 0 for a pair without any (no anchor)."""
        if isinstance(self.negatives, int):
            return math.log(self.negatives)
        return self.negatives.clamp(min=1).to(kind).log()

    def hide(self, strip: Tensor, first: int, value: float) -> Tensor:
        """Put a value in the places of a strip that are no negatives, and return the strip.

        Args:
            strip: shape (R, total), for the own pairs `first`, `first + 1`, ...
            first: position of the strip's first pair among this rank's.
            value: what to put there.
        """
        begin = self.start + first
        if self.label is not None:
            rows = self.label[begin : begin + len(strip)]
            strip.masked_fill_(rows.unsqueeze(1) == self.label, value)
        strip.diagonal(begin).fill_(value)
        return strip


def find_candidates(
    call: str,
    images: Tensor,
    texts: Tensor,
    label: Tensor | None,
    anchor: Tensor | None,
    group: Group | None,
) -> Candidates:
    """Check the arguments of a call and find the pairs of all ranks.

    Args:
        call: name of the caller, for the error text.
        images: features (B, d).
        texts: features (B, d).
        label: label of each pair, or None.
        anchor: which pairs get a row, or None for all.
        group: the ranks, or None.
    """
    _check_features(call, images, texts)
    own, device = len(images), images.device
    if label is not None:
        label = _checked(call, "label", label, own).to(device, torch.int64)
    if anchor is not None:
        anchor = _checked(call, "anchor", anchor, own).to(device)
    counts = None if group is None else row_counts(images, group)
    total = own if counts is None else sum(counts)
    start = 0 if group is None or counts is None else sum(counts[: group.rank])
    if total < 2:
        raise ValueError(
            f"`{call}(images=..., texts=...)` needs at least two pairs, because the other pairs of "
            f"the batch are the negatives, but has: {total}."
        )
    negatives: Tensor | int = total - 1
    if label is not None:
        rows = label.unsqueeze(1)
        wanted = torch.ones_like(rows) if anchor is None else anchor.unsqueeze(1).to(rows)
        both = torch.cat([rows, wanted], dim=1)
        if group is not None:
            both = gather_rows(both, group, counts)
        label, wanted = both.unbind(1)
        _, inverse, same = torch.unique(label, return_inverse=True, return_counts=True)
        left = total - same[inverse]
        alone = (left == 0) & (wanted > 0)
        if bool(alone.any()):
            raise ValueError(
                f"`{call}(label=...)` leaves pairs without a negative: all {total} pairs of the "
                f"(global) batch have the label {int(label[alone][0])}. Draw batches with at "
                "least two labels."
            )
        negatives = left[start : start + own]
    places = None if anchor is None else anchor.nonzero().squeeze(1)
    return Candidates(start, own, total, negatives, label, places, group, counts)


def _check_features(call: str, images: Tensor, texts: Tensor) -> None:
    for name, value in (("images", images), ("texts", texts)):
        if value.dim() != 2 or not value.is_floating_point():
            raise ValueError(
                f"`{call}({name}=...)` must be features of shape (pairs, width) but has shape "
                f"{tuple(value.shape)} and dtype {value.dtype}."
            )
    if images.shape != texts.shape or images.device != texts.device:
        raise ValueError(
            f"`{call}(images=..., texts=...)` must hold one row per pair, of the same width and on "
            f"the same device, but have shapes {tuple(images.shape)} and {tuple(texts.shape)} on "
            f"{images.device} and {texts.device}."
        )


def _checked(call: str, name: str, value: Tensor, own: int) -> Tensor:
    """A label or anchor of the right kind and length."""
    boolean = value.dtype == torch.bool
    whole = not (boolean or value.is_floating_point() or value.is_complex())
    if value.shape != (own,) or not (boolean if name == "anchor" else whole):
        kind = "booleans" if name == "anchor" else "integers"
        raise ValueError(
            f"`{call}({name}=...)` must be {own} {kind}, one per pair, but has shape "
            f"{tuple(value.shape)} and dtype {value.dtype}."
        )
    return value
