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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _checks
from .._distributed import Group, sum_over_ranks
from .._state import KeepsPrecision
from ..inputs import ONLY, Index, Measured, split
from ..objective import Compositional, Function
from ..previous import ParameterTensors, PreviousParameters
from ..terms import TermNumbers
from ..tracker import Batch, Blocks, InnerTracker, Tracked
from ..tracker.blocks import per_row

__all__ = ["Snapshot", "shifted"]


def shifted(result: Any, shifts: Mapping[str, Tensor]) -> Any:
    """What a user's function returned, with a constant added to each inner value.

    Args:
        result: inner values or a pair (loss, values), in any form that an objective accepts.
        shifts: one row per entry, by term.
    """
    loss, values = split(result)
    if set(shifts) == {ONLY}:
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


class _Rows(KeepsPrecision):
    """g_i(w_tau) and u_{i,tau-1} of all blocks of one term, in the shape of its table."""

    exact: Tensor
    read: Tensor

    def __init__(self, tracker: InnerTracker) -> None:
        super().__init__()
        self.register_buffer("exact", torch.zeros_like(tracker.rows))
        self.register_buffer("read", torch.zeros_like(tracker.rows))


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
        for name, term in objective.terms.items():
            if term.tracker.log_space:
                raise ValueError(
                    f"`Snapshot`: the term `{name}` tracks logarithms of inner values, to which "
                    "those of a snapshot cannot be added; use `log_space=False`."
                )
        self._objective, self._optimizers, self.period = (objective,), optimizers, period
        self.point = PreviousParameters(objective.model, optimizers, listen=False)
        self.full = ParameterTensors(optimizers)
        self._rows = {name: _Rows(term.tracker) for name, term in objective.terms.items()}
        self.rows = nn.ModuleDict(self._rows)
        self.age: int | None = None
        self._numbers: dict[str, TermNumbers] = {}  # smoothing and weight when it was taken

    @property
    def due(self) -> bool:
        """Whether the next step needs a new snapshot."""
        return self.age is None or self.age >= self.period

    def take(self, batches: Iterable[tuple[Function, Index]], parameters: Sequence[Tensor]) -> None:
        """Make the current parameters w_tau; see `RecursiveGradient.snapshot`."""
        (objective,) = self._objective
        pairs = list(batches) if isinstance(batches, Iterator) else batches
        # Without a copy it evaluates at the current parameters, and leaves no trace there.
        here = PreviousParameters(objective.model, self._optimizers, listen=False)
        samples = 0.0

        def counted(function: Function) -> Any:
            nonlocal samples
            result = here.evaluate(function)
            loss = split(result)[0]
            samples += 0 if loss is None else loss.numel()
            return result

        pooled = objective.pool((functools.partial(counted, f), index) for f, index in pairs)
        group = objective.group
        if group is not None:
            device = next(iter(self._rows.values())).exact.device
            samples = sum_over_ranks(torch.tensor(samples, device=device), group)
        reads = {name: _to_read(objective, name, pooled.get(name)) for name in objective.terms}
        totals: dict[Tensor, Tensor] = {}
        for function, index in pairs:
            share = functools.partial(_share, objective, function, index, reads, pooled, samples)
            for parameter, part in zip(
                parameters, here.gradient(share, parameters)[0], strict=True
            ):
                if part is not None:
                    _add(totals, parameter, part)
        if group is not None:
            _sum_over_ranks(totals, parameters, group)
        self.point.snapshot()
        self.full.replace(totals)
        for name, rows in self._rows.items():
            tracker, batch = objective.terms[name].tracker, pooled[name]
            rows.exact.copy_(batch.mean(batch.fresh))
            rows.read.copy_(reads[name])
            if not bool(tracker.seen.all()):  # such a block starts from its exact value
                new = ~tracker.seen
                tracker.set_values(batch.index[new], rows.read[new])
        self._numbers = {name: term.numbers() for name, term in objective.terms.items()}
        self.age = 0

    def check_blocks(self, blocks: Mapping[str, Blocks | None]) -> None:
        """Refuse samples of several blocks, before anything changes."""
        if any(each is not None and each.rows is not None for each in blocks.values()):
            raise ValueError(
                "`RecursiveGradient(snapshot_every=...)` shifts the value of each sample by what "
                "its block has at the snapshot, so that a sample must have one block: `index` "
                "cannot be a boolean matrix or lists. Give one value per membership."
            )

    def evaluate(
        self,
        function: Function,
        blocks: dict[str, Blocks | None],
        parameters: Sequence[Tensor],
    ) -> tuple[dict[Tensor, Tensor], dict[str, Tensor]]:
        """Evaluate a batch at w_tau.

        Returns:
            hbar - G(w_tau, u_{tau-1}) by parameter, and c_i for each entry, by term.
        """
        (objective,) = self._objective
        shifts: dict[str, Tensor] = {}

        def read(name: str, tracked: Tracked) -> Tensor:
            rows, position = self._rows[name], tracked.entry_positions()
            missing = rows.exact[tracked.index] - tracked.value
            shifts[name] = missing if position is None else missing[position]
            return rows.read[tracked.index]

        there, _ = self.point.gradient(
            lambda: (objective.replay(function(), blocks, read, self._numbers), None), parameters
        )
        missing = {}
        for parameter, batch in zip(parameters, there, strict=True):
            full = self.full.tensors.get(parameter)
            if full is not None:
                missing[parameter] = full.to(parameter.device)
            if batch is not None:
                missing[parameter] = missing.get(parameter, torch.zeros_like(batch)) - batch
        return missing, shifts

    def get_extra_state(self) -> dict[str, Any]:
        """The age, and the numbers of the terms when it was taken."""
        numbers = {name: tuple(values) for name, values in self._numbers.items()}
        return {"age": self.age, "numbers": numbers}

    def set_extra_state(self, state: Any) -> None:
        """Restore them."""
        self.age = state["age"]
        self._numbers = {name: TermNumbers(*parts) for name, parts in state["numbers"].items()}


def _to_read(objective: Compositional, name: str, batch: Batch | None) -> Tensor:
    """u_{tau-1} of all blocks, exact values where there is none; refused if the pass has gaps."""
    tracker = objective.terms[name].tracker
    found = 0 if batch is None else len(batch.index)
    if batch is None or found < tracker.num_inner:
        raise ValueError(
            f"`snapshot(batches)` must hold samples of all {tracker.num_inner} blocks of `{name}`, "
            f"whose exact values it needs, but holds {found}."
        )
    tracker.check_batch(batch, name)
    exact, (value, seen) = batch.mean(batch.fresh), tracker.values_before_step(batch.index)
    if tracker.bounds is not None:
        exact = exact.clamp(*tracker.bounds)
    return value if seen is None else torch.where(per_row(seen, value), value, exact)


def _share(
    objective: Compositional,
    function: Function,
    index: Index,
    reads: dict[str, Tensor],
    pooled: dict[str, Batch],
    samples: float,
) -> tuple[Tensor, None]:
    """The share of one batch of this rank in g0 + (1/n) sum_i f_i(g_i) over all data."""
    blocks = objective.blocks(index)
    loss, values = split(function())
    parts = [] if loss is None else [loss.sum() / samples]
    for name, entries in objective.entries(blocks, values).items():
        term = objective.terms[name]
        tracked = term.tracker.pooled(entries)
        own = tracked.index
        tracked = tracked._replace(
            value=reads[name][own],
            counts=pooled[name].counts[own],
            blocks=tracked.blocks._replace(whole=False),  # one of several samples of each block
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
