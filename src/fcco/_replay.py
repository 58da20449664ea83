"""Tracking, the loss and the writes at the end of a step as CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ._cuda_graphs import Captured, Packed
from .rules.arrays import tensor
from .rules.track import value_of
from .terms import AbstractTerm
from .tracker import Blocks, Entries, OpenStep
from .tracker.tracker import Update


class Replay:
    """Runs tracking and loss of a call, and the writes at the end of a step, as CUDA graphs.

    A graph reads and writes the buffers of the terms where they were when it was recorded: `valid`
    tells whether they still are there. The result of a call is kept as a `Packed` tree until the
    step ends.

    Args:
        terms: those of the objective, all of them `branch_free`.
        combine: called with g0, the tracked values by term, None and the open step; the loss.
    """

    def __init__(self, terms: Mapping[str, AbstractTerm], combine: Callable[..., Tensor]) -> None:
        self._terms, self._combine = terms, combine
        self._calls, self._steps = Captured(self._call), Captured(self._step)
        self._last: Packed | None = None
        self._views = self._present_views()

    def _present_views(self) -> list[Any]:
        return [views for t in self._terms.values() for views in (t.views, t.tracker.views)]

    @property
    def valid(self) -> bool:
        """Whether the buffers are still where they were."""
        now = self._present_views()
        return all(a is b for a, b in zip(now, self._views, strict=True))

    def can_replay(self, entries: Mapping[str, Entries], step: OpenStep) -> bool:
        """Whether the number of entries alone determines all shapes of a call."""
        return not step.updates and all(
            len(each.fresh) > 0 and (each.blocks.index is None or each.blocks.whole)
            for each in entries.values()
        )

    def loss(self, loss: Tensor | None, entries: Mapping[str, Entries], step: OpenStep) -> Tensor:
        """The loss of a call, differentiable; state updates go into the open step."""
        given: list[Any] = []
        for name, each in entries.items():
            tracker, blocks = self._terms[name].tracker, each.blocks
            table, ids, number = tracker.value, None, tracker.steps + 1
            if blocks.index is None:
                ids = tensor(blocks.inverse).to(table.device, non_blocking=True)
            step.numbers[tracker] = number
            given += [name, each.fresh, ids, table.new_full((), number)]
        g0 = None if loss is None else loss.detach()
        found = step.packed = self._calls(g0, step.packed, self._last, *given)
        parts = [] if loss is None else [loss]
        for k, each in enumerate(entries.values()):
            parts.append(torch.dot(each.carrier.flatten(), found.part(k + 1).flatten()))
        return value_of(found.part(0), gradient_of=functools.reduce(torch.add, parts))

    def _call(self, loss: Any, before: Any, last: Any, *given: Any) -> Any:
        """The recorded function: the loss, its gradient by the entries of each term, the updates.

        `given` holds four arguments for each term: name, values, ids or None, number of the step.
        """
        counters = dict[Any, Any]()
        step, lasts = OpenStep(counters=counters), {} if last is None else last.tree()[1]
        if before is not None:
            self._fill(step, before)
        tracked, leaves = {}, []
        for name, fresh, ids, number in zip(*(given[k::4] for k in range(4)), strict=True):
            tracker = self._terms[name].tracker
            counters[tracker] = (lasts[name][0] if name in lasts else None, number)
            every = tracker.blocks(None)
            blocks = every if ids is None else Blocks(len(ids), None, ids, None)  # type: ignore[arg-type]
            leaves.append(fresh.detach().requires_grad_())
            own = Entries(blocks, fresh, None, leaves[-1], blocks)
            tracked[name] = tracker.track(own, step)
        with torch.enable_grad():
            total = self._combine(loss, tracked, None, step)
            slopes = torch.autograd.grad(total, leaves)
        changed = {}
        for name, term in self._terms.items():
            if term.tracker in step.updates:
                update = step.updates[term.tracker]._replace(number=None)
                changed[name] = (update, step.writes.get(term), step.notes.get(term))
        return [total.detach(), *slopes], changed

    def _fill(self, step: OpenStep, packed: Packed) -> None:
        for name, (update, write, note) in packed.tree()[1].items():
            term = self._terms[name]
            step.updates[term.tracker] = update
            if write is not None:
                step.writes[term] = write
            if note is not None:
                step.notes[term] = note

    def unpack(self, step: OpenStep) -> None:
        """Turn the results of earlier calls into ordinary updates, for a call without a graph."""
        self._fill(step, step.packed)
        for tracker, number in step.numbers.items():
            step.updates[tracker] = step.updates[tracker]._replace(number=number)
        step.packed = None

    def finish(self, step: OpenStep) -> None:
        """Write the updates of a step."""
        packed = self._last = step.packed
        found = self._steps(packed)
        names = [name for name, term in self._terms.items() if term.tracker in step.numbers]
        for k, name in enumerate(names):
            tracker = self._terms[name].tracker
            update = functools.partial(_update_of, name, packed)
            blocks, good = found.part(2 * k), found.part(2 * k + 1)
            tracker.record_step(step.numbers[tracker], blocks, good, update)

    def _step(self, packed: Packed) -> list[Any]:
        """The recorded function: write; return B1 and the finiteness flags of each term."""
        found = []
        for name, (update, write, _) in packed.tree()[1].items():
            tracker = self._terms[name].tracker
            tracker.write(update)
            number = torch.zeros_like(tracker.value[0, 0]) + update.batch.number
            found += [number, tracker.good(update)]
            if write is not None:
                write[0](*write[1])
        return found


def _update_of(name: str, packed: Packed) -> Update:
    return packed.tree()[1][name][0]
