"""Checks on the inner values of a batch, made before anything is written."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import Batch, Layout

__all__ = [
    "Entries",
    "finite_blocks",
    "prepared",
    "refuse_nonfinite",
    "shaped",
    "without_nonfinite",
]


class Entries(NamedTuple):
    """The rows of one batch: values to track, and the values that carry the gradient."""

    fresh: Tensor
    where: Layout
    previous: Tensor | None
    carrier: Tensor
    carrier_where: Layout


def shaped(name: str, entries: Tensor, expected: int, like: Tensor) -> Tensor:
    """Bring entries to shape (E, d1), or (E,) when d1 = 1, and to the precision of the table."""
    dim, shape = like.shape[1], tuple(entries.shape)
    if dim == 1 and shape == (expected, 1):
        entries = entries.squeeze(1)
    elif shape != ((expected,) if dim == 1 else (expected, dim)):
        wanted = f"({expected},)" if dim == 1 else f"({expected}, {dim})"
        raise ValueError(
            f"`InnerTracker({name}=...)` must have shape {wanted}, one row per entry of `index`, "
            f"but has shape {shape}."
        )
    if entries.dtype != like.dtype or entries.device != like.device:
        entries = entries.to(like.device, like.dtype)
    return entries


def prepared(
    fresh: Tensor,
    where: Layout,
    previous: Tensor | None,
    carrier: Tensor | None,
    carrier_where: Layout | None,
    like: Tensor,
    corrects: bool,
) -> Entries:
    """All entries in the shape and precision of the table `like`.

    Without a correction, previous values are dropped; with one but without previous values,
    w_{-1} = w_0 and the correction is exactly zero.
    """
    fresh = shaped("fresh", fresh, where.entries, like)
    if previous is not None:
        previous = shaped("previous", previous, where.entries, like)
    if not corrects:
        previous = None
    elif previous is None:
        previous = fresh.detach()
    carrier_where = carrier_where or where
    if carrier is None:
        carrier = fresh
    else:
        carrier = shaped("carrier", carrier, carrier_where.entries, like)
    return Entries(fresh, where, previous, carrier, carrier_where)


def without_nonfinite(entries: Entries) -> tuple[Entries, int]:
    """Drop entries with a NaN or infinite value; say how many."""
    fresh, where, previous, carrier, carrier_where = entries
    keep, stays = _finite(fresh), _finite(carrier)
    if previous is not None:
        keep = keep & _finite(previous)
    independent = carrier_where is not where
    if not independent:
        keep = stays = keep & stays
    dropped = int((~keep).sum()) + (int((~stays).sum()) if independent else 0)
    if dropped == 0:
        return entries, 0
    if independent:  # both batches must keep the same blocks: one that is gone here goes there
        ours, theirs = _block_of_entry(where), _block_of_entry(carrier_where)
        gone = torch.cat([_without(where, ours[keep]), _without(carrier_where, theirs[stays])])
        keep, stays = keep & ~torch.isin(ours, gone), stays & ~torch.isin(theirs, gone)
    left = where.select(keep)
    carrier_left = carrier_where.select(stays) if independent else left
    past = None if previous is None else previous[keep]
    return Entries(fresh[keep], left, past, carrier[stays], carrier_left), dropped


def refuse_nonfinite(batch: Batch, carrier: Tensor | None) -> None:
    """Raise, naming the blocks, if any pooled value (or entry of `carrier`) is NaN or infinite."""
    # A difference is finite only if both are.
    total = (batch.fresh if batch.previous is None else batch.fresh - batch.previous).sum()
    if carrier is not None:
        total = total + carrier.detach().sum()
    if math.isfinite(total.item()):
        return
    blocks = batch.index[~finite_blocks(batch)].tolist()
    if not blocks and (carrier is None or bool(torch.isfinite(carrier).all())):
        return  # finite values whose sum overflows
    where = f"blocks {blocks[:10]}" if blocks else "the values that carry the gradient"
    raise ValueError(
        f"`InnerTracker` was given a NaN or infinite inner value for {where}; nothing was "
        "updated. Use on_nonfinite='skip' to drop such entries instead."
    )


def finite_blocks(batch: Batch) -> Tensor:
    """Which blocks have finite values, now and at the previous parameters, shape (B1,)."""
    finite = _finite(batch.fresh)
    return finite if batch.previous is None else finite & _finite(batch.previous)


def _finite(entries: Tensor) -> Tensor:
    finite = torch.isfinite(entries.detach())
    return finite if finite.dim() == 1 else finite.all(1)


def _without(where: Layout, left: Tensor) -> Tensor:
    """The blocks of a layout that have no entry left."""
    return where.index[~torch.isin(where.index, left)]


def _block_of_entry(where: Layout) -> Tensor:
    return where.index if where.inverse is None else where.index[where.inverse]
