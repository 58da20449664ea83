"""The estimator G(w, u) of a batch with other u than the tracker's next: nothing is tracked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._distributed import find_group
from ..inner import Measured, global_mean, split
from ..objective import Compositional
from ..reading import ONLY
from ..terms import CoupledTerm
from ..tracker import InnerTracker, Tracked, log_track, track
from ..tracker.blocks import Layout, per_row

__all__ = ["loss_reading", "overlaid", "require_plain", "shifted", "smoothings", "standing"]

Where = dict[str, Layout | None]
Read = Callable[[str, Tracked], Tensor]


def loss_reading(
    objective: Compositional, result: Any, where: Where, read: Read, smoothing: Mapping[str, float]
) -> Tensor:
    """A scalar whose gradient is G(w, u) for given u.

    Args:
        objective: its terms say what G is.
        result: what the user's function returned at w.
        where: the blocks of its entries, by term.
        read: u_i of the blocks of a batch, from a term's name and its pooled values.
        smoothing: lambda of the terms; one that is missing is what it is now.
    """
    loss, values = split(result)
    group = find_group(objective._process_group)
    loss = None if loss is None else global_mean(loss, group)
    jobs = {
        name: objective._job(name, entry, None, entry, where[name], where[name])
        for name, entry in objective._reader.values(values).items()
    }
    if group is not None:
        jobs = objective._with_other_ranks(jobs, group, False, False)
    parts = {}
    for name, job in jobs.items():
        term = objective._terms[name]
        tracked = term.tracker.update(**job, group=group, commit=False)
        with _smoothed_by(term, smoothing.get(name)):
            parts[name] = term.loss(tracked._replace(value=read(name, tracked)))
    return objective._combined(loss, parts)


@contextmanager
def _smoothed_by(term: Any, smoothing: float | None) -> Iterator[None]:
    kept = term._smoothing
    if smoothing is not None:
        term.smoothing = smoothing
    try:
        yield
    finally:
        term.smoothing = kept


def smoothings(objective: Compositional) -> dict[str, float]:
    """The current lambda of each term."""
    return {name: float(term.smoothing) for name, term in objective.terms.items()}


def standing(tracker: InnerTracker, index: Tensor) -> tuple[Tensor, Tensor]:
    """The u of some blocks before the open step, if any, and whether they had a value."""
    value, seen = tracker._table().index_select(0, index), tracker.seen.index_select(0, index)
    step = tracker._progress
    if step.batch is not None and step.old is not None:
        value = overlaid(value, index, step.batch.index, step.old)
        if step.seen is not None:
            seen = overlaid(seen, index, step.batch.index, step.seen)
    return value, seen


def overlaid(rows: Tensor, index: Tensor, others: Tensor, values: Tensor) -> Tensor:
    """The rows of `index`, replaced by those of `values` for blocks that `others` holds too.

    Both lists of blocks are increasing.

    Example:
        >>> import torch
        >>> rows, index = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 4, 7])
        >>> overlaid(rows, index, torch.tensor([4, 5]), torch.tensor([9.0, 8.0]))
        tensor([1., 9., 3.])
    """
    if len(others) == 0:
        return rows
    position = torch.searchsorted(others, index).clamp(max=len(others) - 1)
    return torch.where(per_row(others[position] == index, rows), values[position], rows)


def shifted(objective: Compositional, result: Any, shifts: Mapping[str, Tensor]) -> Any:
    """What a user's function returned, with a constant added to each inner value.

    Args:
        objective: for whose terms.
        result: inner values or a pair (loss, values), in any form that the objective accepts.
        shifts: one row per entry, by term.
    """
    loss, values = split(result)
    if set(objective._terms) == {ONLY}:
        values = _shifted(values, shifts[ONLY])
    else:
        values = {name: _shifted(part, shifts[name]) for name, part in values.items()}
    return values if loss is None else (loss, values)


def _shifted(part: Any, shift: Tensor) -> Any:
    if isinstance(part, Mapping):
        return {name: _shifted(each, shift[k]) for k, (name, each) in enumerate(part.items())}
    if isinstance(part, Measured):
        return Measured(_shifted(part.value, shift), part.surrogate)
    return part + shift.reshape(part.shape)


def require_plain(objective: Compositional) -> None:
    """Refuse an objective whose gradient is more than G(w, u)."""
    kind = type(objective)
    own = [getattr(kind, name, None) for name in ("forward", "_combined")]
    if own != [Compositional.forward, Compositional._combined]:
        raise TypeError(
            "`RecursiveGradient(objective=...)` must be a Compositional that computes its loss in "
            f"the usual way but is: {kind.__name__}."
        )
    for name, term in objective._terms.items():
        plain = isinstance(term, CoupledTerm) and type(term).loss is CoupledTerm.loss
        if not plain or term.tracker.rule not in (track, log_track):
            raise TypeError(
                "`RecursiveGradient` needs terms that depend on w and the tracked values alone "
                f"(CoupledTerm), but `{name}` is a {type(term).__name__} with state or an update "
                "of its own. For CVaR make the threshold s a parameter of your model: return "
                "`(s, losses - s)` and take the outer function CVaRHinge."
            )
        if term.tracker.on_nonfinite == "skip":
            raise ValueError(
                "`RecursiveGradient` needs on_nonfinite='raise' or 'deferred': an entry skipped at "
                "one of two points would leave gradients of different samples."
            )
