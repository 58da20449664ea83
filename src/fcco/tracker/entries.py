"""Checks on the inner values of a batch, made before anything is written."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import Batch, Layout

__all__ = ["Entries", "refuse_nonfinite", "shaped", "without_nonfinite"]


class Entries(NamedTuple):
    """The rows of one batch: values to track, and the values that carry the gradient."""

    fresh: Tensor
    where: Layout
    previous: Tensor | None
    carrier: Tensor
    carrier_where: Layout


def shaped(name: str, entries: Tensor, expected: int, like: Tensor) -> Tensor:
    """Bring entries to shape (E, d1) and to the precision and device of the table `like`."""
    dim, shape = like.shape[1], tuple(entries.shape)
    if entries.dim() == 1 and dim == 1:
        entries = entries.unsqueeze(1)
    if entries.shape != (expected, dim):
        wanted = f"({expected},)" if dim == 1 else f"({expected}, {dim})"
        raise ValueError(
            f"`InnerTracker({name}=...)` must have shape {wanted}, one row per entry of `index`, "
            f"but has shape {shape}."
        )
    return entries.to(like.device, like.dtype)


def without_nonfinite(entries: Entries) -> tuple[Entries, int]:
    """Drop entries with a NaN or infinite value; say how many."""
    fresh, where, previous, carrier, carrier_where = entries
    keep = torch.isfinite(fresh if previous is None else fresh + previous).all(1)
    independent = carrier_where is not where
    if not independent:
        keep = keep & torch.isfinite(carrier.detach()).all(1)
    dropped = int((~keep).sum())
    if dropped == 0:
        return entries, 0
    left = where.select(keep)
    past = None if previous is None else previous[keep]
    if not independent:
        return Entries(fresh[keep], left, past, carrier[keep], left), dropped
    # An independent batch must keep the same blocks: drop its entries of blocks that are gone.
    stays = torch.isin(_block_of_entry(carrier_where), left.index)
    return Entries(fresh[keep], left, past, carrier[stays], carrier_where.select(stays)), dropped


def refuse_nonfinite(batch: Batch, carrier: Tensor | None) -> None:
    """Raise, naming the blocks, if any pooled value (or entry of `carrier`) is NaN or infinite."""
    total = batch.sums.sum()
    if carrier is not None:
        total = total + carrier.detach().sum()
    if math.isfinite(total.item()):
        return
    blocks = batch.index[~torch.isfinite(batch.sums).all(1)].tolist()
    if not blocks and (carrier is None or bool(torch.isfinite(carrier).all())):
        return  # finite values whose sum overflows
    where = f"blocks {blocks[:10]}" if blocks else "the values that carry the gradient"
    raise ValueError(
        f"`InnerTracker` was given a NaN or infinite inner value for {where}; nothing was "
        "updated. Use on_nonfinite='skip' to drop such entries instead."
    )


def _block_of_entry(where: Layout) -> Tensor:
    return where.index if where.inverse is None else where.index[where.inverse]
