"""The values of a batch, and the way from slopes back to a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..limits import Limits
from ..tracker import Tracked
from ..tracker.blocks import Batch, Layout, segment
from .member import State
from .run import Outcome, Run, Seen, finite

__all__ = ["attached", "entries", "excess", "in_two", "layout", "limit_numbers", "pooled"]


def layout(index: Tensor | None, number: int, like: Tensor) -> Layout:
    """Blocks of the entries of one run; those that no entry names have a count of 0."""
    every = torch.arange(number, device=like.device)
    if index is None:
        return Layout(every, None, like.new_ones(number), whole=True)
    ones = torch.ones_like(index, dtype=like.dtype)
    return Layout(every, index, segment(ones, index, number))


def entries(seen: Seen, carrier: bool = False) -> Tensor:
    """The entries of a pass as a vector (E,), at least in single precision.

    Args:
        seen: of the pass.
        carrier: those that carry the gradient.
    """
    if seen.values is None:
        raise ValueError("The function of a fleet must return (loss, values) for this method.")
    found = seen.values.carrier if carrier else seen.values.value
    found = found.to(torch.promote_types(found.dtype, torch.float32))
    return found.squeeze(-1) if found.dim() > 1 else found


def pooled(values: Tensor, index: Tensor | None, number: int) -> tuple[Tensor, Tensor]:
    """The mean of the entries of each block, (n,), and which blocks have any; NaN for others."""
    where = layout(index, number, values)
    batch = Batch(where.index, where.counts, where.sums(values), None, whole=where.whole)
    return batch.mean(batch.fresh), where.counts > 0


def attached(carrier: Tensor, slope: Tensor, index: Tensor | None) -> Tensor:
    """A scalar with the gradient sum_i slope_i grad g_i; slopes of absent blocks do not matter."""
    where = layout(index, len(slope), carrier.detach())
    tracked = Tracked(slope, where.index, carrier, where, where.counts)
    return (carrier * tracked.factors(slope)).sum()


def limit_numbers(limits: Limits) -> dict[str, Any]:
    """The numbers of some limits, one tolerance per block."""
    return {"tolerance": limits.tolerance.expand(limits.number), "margin": limits.margin}


def excess(run: Run, values: Tensor) -> Tensor:
    """How far values are above the limits of a run."""
    return values - run.numbers["tolerance"] + run.numbers["margin"]


def in_two(
    run: Run,
    decide: Callable[[Tensor], tuple[Any, State]],
    scalar: Callable[[Seen, Any, Tensor | None], Tensor],
    read: Callable[[Seen], Tensor] = entries,
    also: Tensor | None = None,
) -> Outcome:
    """The gradient of a method that decides from values and then differentiates.

    One batch serves both, or `run.other` carries the gradient.

    Args:
        run: its step.
        decide: from the entries of the batch, without gradient, to anything and what changed.
        scalar: from a pass, what was decided and the index of the pass to the loss.
        read: the entries of a pass.
        also: other values that must be finite.
    """
    if run.other is None:

        def at_once(seen: Seen) -> tuple[Tensor, Any]:
            fresh = read(seen).detach()
            decided, changed = decide(fresh)
            return scalar(seen, decided, run.index), (changed, seen.loss.detach(), fresh)

        gradient, (changed, loss, fresh), moved = run.differentiate(at_once, run.batch)
    else:
        seen, before = run.pass_at(run.weights, run.batch)
        fresh = read(seen)
        decided, changed = decide(fresh)
        changed = {**changed, **before}
        index = run.index if run.other_index is None else run.other_index

        def apart(seen: Seen) -> tuple[Tensor, Tensor]:
            return scalar(seen, decided, index), seen.loss.detach()

        gradient, loss, moved = run.after(before).differentiate(apart, run.other)
    return Outcome(gradient, {**changed, **moved}, loss, finite(fresh, also, loss))
