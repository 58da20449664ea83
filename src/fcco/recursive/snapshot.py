r"""A full pass at a fixed point w_tau, and what later batches gain from it (MSVR v3).

The batch of step t is evaluated at w_tau too, where its values and its gradient are known without
noise. What it gets wrong there is taken off at w_t:

.. math::
    \hat g_i = g_i(w_t;\mathcal B) + c_i, \qquad c_i = g_i(w_\tau) - g_i(w_\tau;\mathcal B).

c_i does not depend on w, so the same shift of :math:`g_i(w_{t-1};\mathcal B)` leaves the tracker's
correction as it is: the values of the user's function are shifted, and the tracker needs no change.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks
from .._distributed import Group, find_group, sum_over_ranks
from .._state import KeepsPrecision
from ..inner import split
from ..objective import Compositional, Inner
from ..previous import PerParameter, PreviousParameters
from ..reading import Index
from ..tracker import InnerTracker, Tracked
from ..tracker.blocks import Batch, per_row
from ..tracker.entries import refuse_nonfinite
from .elsewhere import Where, loss_reading, smoothings, standing

__all__ = ["Snapshot"]


class _Rows(KeepsPrecision):
    """g_i(w_tau) and u_{i,tau-1} of all blocks of one term, in the shape of its table."""

    exact: Tensor
    read: Tensor

    def __init__(self, tracker: InnerTracker) -> None:
        super().__init__()
        self.register_buffer("exact", torch.zeros_like(tracker._table()))
        self.register_buffer("read", torch.zeros_like(tracker._table()))


class Snapshot(nn.Module):
    r"""The point w_tau, the values g_i(w_tau), the u_{i,tau-1} and the full gradient there.

    .. math::
        \bar h = \nabla g_0(w_\tau) + \frac1n\sum_i \nabla g_i(w_\tau)\,\nabla f_i(u_{i,\tau-1})

    Args:
        objective: whose terms; their inner functions are finite sums.
        optimizers: the optimizers of all parameters.
        period: number of steps after which a new snapshot is due.
    """

    def __init__(
        self, objective: Compositional, optimizers: Sequence[torch.optim.Optimizer], period: int
    ) -> None:
        super().__init__()
        _checks.integer("Snapshot", "period", period, 1)
        for name, term in objective._terms.items():
            if term.tracker.log_space:
                raise ValueError(
                    f"`Snapshot`: the term `{name}` tracks logarithms of inner values, to which "
                    "those of a snapshot cannot be added; use `log_space=False`."
                )
        self._objective, self._optimizers, self.period = (objective,), optimizers, period
        self.point = PreviousParameters(*objective._model, optimizers)
        self.point.detach_hooks()  # it stays where it is
        self.full = PerParameter(optimizers)
        self._rows = {name: _Rows(term.tracker) for name, term in objective._terms.items()}
        self.rows = nn.ModuleDict(self._rows)
        self.age: int | None = None
        self._smoothing: dict[str, float] = {}

    @property
    def due(self) -> bool:
        """Whether the next step needs a new snapshot."""
        return self.age is None or self.age >= self.period

    def take(self, batches: Iterable[tuple[Inner, Index]], parameters: Sequence[Tensor]) -> None:
        """Make the current parameters w_tau; see `RecursiveGradient.snapshot`."""
        (objective,) = self._objective
        pairs = list(batches) if isinstance(batches, Iterator) else batches
        here = PreviousParameters(*objective._model, self._optimizers)
        here.detach_hooks()  # without a copy it visits the current parameters
        samples = 0.0

        def counted(inner: Inner) -> Any:
            nonlocal samples
            result = here.evaluate(inner)
            loss = split(result)[0]
            samples += 0 if loss is None else loss.numel()
            return result

        pooled = objective._pooled((functools.partial(counted, f), index) for f, index in pairs)
        group = find_group(objective._process_group)
        if group is not None:
            device = next(iter(self._rows.values())).exact.device
            samples = sum_over_ranks(torch.tensor(samples, device=device), group)
        reads = {name: _to_read(objective, name, pooled.get(name)) for name in objective._terms}
        totals: dict[Tensor, Tensor] = {}
        for inner, index in pairs:
            share = functools.partial(_share, objective, inner, index, reads, pooled, samples)
            for parameter, part in zip(
                parameters, here.gradient(share, parameters)[0], strict=True
            ):
                if part is not None:
                    _add(totals, parameter, part)
        if group is not None:
            _sum_over_ranks(totals, parameters, group)
        self.point.snapshot()
        self.full._saved, self.full._loaded = totals, None
        for name, rows in self._rows.items():
            tracker, batch = objective._terms[name].tracker, pooled[name]
            rows.exact.copy_(batch.mean(batch.fresh))
            rows.read.copy_(reads[name])
            if not bool(tracker.seen.all()):  # such a block starts from its exact value
                new = ~tracker.seen
                tracker.set_values(batch.index[new], rows.read[new])
        self._smoothing, self.age = smoothings(objective), 0

    def visit(
        self, inner: Inner, where: Where, parameters: Sequence[Tensor]
    ) -> tuple[dict[Tensor, Tensor], dict[str, Tensor]]:
        """Evaluate a batch at w_tau.

        Returns:
            hbar - G(w_tau, u_{tau-1}) by parameter, and c_i for each entry, by term.
        """
        (objective,) = self._objective
        self.full._adopt_loaded()
        shifts: dict[str, Tensor] = {}

        def read(name: str, tracked: Tracked) -> Tensor:
            rows, position = self._rows[name], tracked._entry_positions()
            missing = rows.exact[tracked.index] - tracked.value
            shifts[name] = missing if position is None else missing[position]
            return rows.read[tracked.index]

        there, _ = self.point.gradient(
            lambda: (loss_reading(objective, inner(), where, read, self._smoothing), None),
            parameters,
        )
        missing = {}
        for parameter, batch in zip(parameters, there, strict=True):
            full = self.full._saved.get(parameter)
            if full is not None:
                missing[parameter] = full.to(parameter.device)
            if batch is not None:
                missing[parameter] = missing.get(parameter, torch.zeros_like(batch)) - batch
        return missing, shifts

    def get_extra_state(self) -> dict[str, Any]:
        """The age, and lambda when it was taken."""
        return {"age": self.age, "smoothing": dict(self._smoothing)}

    def set_extra_state(self, state: Any) -> None:
        """Restore them."""
        self.age, self._smoothing = state["age"], dict(state["smoothing"])


def _to_read(objective: Compositional, name: str, batch: Batch | None) -> Tensor:
    """u_{tau-1} of all blocks, exact values where there is none; refused if the pass has gaps."""
    tracker = objective._terms[name].tracker
    found = 0 if batch is None else len(batch.index)
    if batch is None or found < tracker.num_inner:
        raise ValueError(
            f"`snapshot(batches)` must hold samples of all {tracker.num_inner} blocks of `{name}`, "
            f"whose exact values it needs, but holds {found}."
        )
    refuse_nonfinite(batch, None)
    exact, (value, seen) = batch.mean(batch.fresh), standing(tracker, batch.index)
    if tracker.bounds is not None:
        exact = exact.clamp(*tracker.bounds)
    return torch.where(per_row(seen, value), value, exact)


def _share(
    objective: Compositional,
    inner: Inner,
    index: Index,
    reads: dict[str, Tensor],
    pooled: dict[str, Batch],
    samples: float,
) -> tuple[Tensor, None]:
    """The share of one batch of this rank in g0 + (1/n) sum_i f_i(g_i) over all data."""
    where = objective._reader.layouts(index, None)
    loss, values = split(inner())
    parts = [] if loss is None else [loss.sum() / samples]
    for name, entry in objective._reader.values(values).items():
        term = objective._terms[name]
        job = objective._job(name, entry, None, entry, where[name], where[name])
        tracked = term.tracker.update(**job, commit=False)
        own = tracked.index
        tracked = tracked._replace(
            value=reads[name][own],
            counts=pooled[name].counts[own],
            where=tracked.where._replace(whole=False),  # one of several samples of each block
        )
        parts.append(term.loss(tracked) * (len(own) / term.tracker.num_inner))
    return functools.reduce(torch.add, parts), None


def _add(totals: dict[Tensor, Tensor], parameter: Tensor, part: Tensor) -> None:
    if parameter not in totals:
        kind = torch.promote_types(part.dtype, torch.float32)
        totals[parameter] = torch.zeros_like(parameter, dtype=kind, requires_grad=False)
    totals[parameter].add_(part)


def _sum_over_ranks(
    totals: dict[Tensor, Tensor], parameters: Sequence[Tensor], group: Group
) -> None:
    """Each rank made a part of the pass, and some parts may not use a parameter."""
    for parameter in parameters:
        _add(totals, parameter, torch.zeros_like(parameter, requires_grad=False))
        torch.distributed.all_reduce(totals[parameter], group=group.handle)
