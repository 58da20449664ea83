"""One run of a fleet in one step: its state, its data, and passes of the user's function.

No rule sees the other runs: `torch.func.vmap` maps the step of one run over all, so that a tensor
here has no axis for the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp

from ..inputs import mean_loss, parse, split
from ..tracker.blocks import Batch, Blocks, Tracked, segment

State = dict[str, Tensor]
"""What a step changes, by name; in a fleet every tensor has one row per run."""
Outputs = tuple[Tensor, Tensor, Tensor, State]
"""Of a pass: g_0 (or 0), the entries to track, those that carry the gradient, and the buffers."""
Flag = bool | Tensor
"""A bool that holds for all runs and selects what is computed, or a tensor with one per run."""
MODEL = "model."
"""Prefix of the buffers of the model in the state, and of the names within `ModelFunction`."""


class Unsupported(ValueError):
    """A run that cannot be part of a fleet; train it alone."""


class Data(NamedTuple):
    """What a step is given: batches, and where it is in a round."""

    batch: Any  # gives the values and, alone, the gradient
    gradient_batch: Any = None  # an independent batch that carries the gradient (Alg. 2, line 5)
    index: Tensor | None = None  # type: ignore[assignment] # block of each entry
    begins: Flag = False  # this is the first step of a round, where w_{t-1} = w_t
    ends: Flag = False  # it is the last of a round
    smooth: bool = False  # lambda is above 0 in some runs
    hard: bool = False  # lambda is 0 in some runs


def choose(flag: Flag, yes: Tensor, no: Tensor) -> Tensor:
    """One of two tensors."""
    if isinstance(flag, bool):
        return yes if flag else no
    return torch.where(flag, yes, no)


def finite(*values: Tensor | None) -> Tensor:
    """Whether all values of a run are finite; looks at their sums, which may also overflow."""
    totals = [value.sum() for value in values if value is not None]
    return torch.isfinite(torch.stack([total.to(totals[0]) for total in totals])).all()


def _all_blocks(index: Tensor | None, table: Tensor) -> Blocks:
    """The blocks of some entries. All n are listed; those that no entry names have a count of 0.

    A tracker would list the sampled ones only, but their number differs between runs.
    """
    number = table.shape[0]
    every = torch.arange(number, device=table.device)
    if index is None:
        return Blocks(number, every, None, counts=table.new_ones(number), whole=True)
    counts = segment(torch.ones_like(index, dtype=table.dtype), index, number)
    return Blocks(index.shape[0], every, index, counts)


def block_means(values: Tensor, blocks: Blocks) -> Tensor:
    """The mean of the entries of each block, NaN where it has none."""
    if blocks.whole:
        return values
    sums = blocks.sums(values)
    return Batch(blocks.index, blocks.counts, sums, None).mean(sums)


class ModelFunction(nn.Module):
    """The user's function with the weights of a run as an argument: one vector.

    One vector makes an update of the weights a few large operations instead of many small ones.
    """

    def __init__(
        self,
        model: nn.Module,  # its own weights are not used
        function: Callable[..., Any],
        shapes: Mapping[str, torch.Size],  # of the trained parameters, in the order of the vector
        names: tuple[str, ...] | None,  # of the blocks, for values that are given by name
        needs_loss: bool,  # the function must return g_0
    ) -> None:
        super().__init__()
        self.model, self.shapes, self.names, self.needs_loss = model, shapes, names, needs_loss
        self._function = (function,)  # a tuple hides it: it may be a module that holds the model

    def unpack(self, vectors: Tensor) -> dict[str, Tensor]:
        """The parameters by name, as views of a vector, or of one per run."""
        parts = vectors.split([shape.numel() for shape in self.shapes.values()], dim=-1)
        pairs = zip(self.shapes.items(), parts, strict=True)
        return {name: part.view(*vectors.shape[:-1], *shape) for (name, shape), part in pairs}

    def forward(self, batch: Any) -> tuple[Tensor | None, Any, Any]:
        """g_0, the entries to track, and those that carry the gradient; None where it has none."""
        loss, entries = split(self._function[0](self.model, batch))
        if loss is None and isinstance(entries, Tensor) and entries.dim() == 0:
            loss, entries = entries, None
        if loss is None and self.needs_loss:
            raise ValueError("The function of a fleet must return (loss, values) for this method.")
        loss = None if loss is None else mean_loss(loss)
        if entries is None:
            return loss, None, None
        if self.names is not None and isinstance(entries, Mapping):  # all of them, in this order
            entries = {**{name: entries[name] for name in self.names}, **entries}
        tracked, surrogate, _ = parse("inner", self.names, entries)
        return loss, tracked, tracked if surrogate is None else surrogate


class Estimate(NamedTuple):
    """The gradient of one run in one step."""

    gradient: Tensor  # G_t as one vector
    state: State  # what changed
    loss: Tensor  # g_0 of the batch, for logs
    good: Tensor  # whether all values were finite; else the run is frozen before this step


class Forward(NamedTuple):
    """A forward pass at w_t that can be differentiated, after one that gives the values."""

    loss: Tensor  # g_0, or 0
    values: Tensor  # the entries to track
    carrier: Tensor  # the entries that carry the gradient
    blocks: Blocks  # of both
    buffers: State  # of the model after it, by their names in the state
    pull_back: Callable[..., Any]  # from derivatives by loss and carrier to that by the weights

    def estimate(
        self,
        slope: Tensor,
        changed: State,
        *checked: Tensor | None,
        loss_weight: Tensor | None = None,
    ) -> Estimate:
        r"""The estimate :math:`G_t = c \nabla g_0 + \sum_i \langle s_i, \nabla g_i\rangle`.

        s_i is the `slope` of a block (of absent ones it is not used), c the `loss_weight`.
        """
        weight = torch.ones_like(self.loss) if loss_weight is None else loss_weight.to(self.loss)
        blocks = self.blocks
        tracked = Tracked(slope, blocks.index, self.carrier, blocks, blocks.counts)
        (gradient,) = self.pull_back((weight, tracked.factors(slope)))
        good = finite(self.loss, self.values, *checked)
        return Estimate(gradient, {**changed, **self.buffers}, self.loss, good)


class Run(NamedTuple):
    """What a step depends on. A fleet makes one whose tensors have one row per run."""

    function: ModelFunction
    state: State  # before the step
    exact: dict[str, Tensor]  # the numbers of the method by name, in double precision
    fixed: State  # parameters that are not trained
    data: Data
    numbers: Any = None  # those in the precision of the weights

    @property
    def previous(self) -> Tensor:
        """w_{t-1}; at the start of a round it is w_t."""
        return choose(self.data.begins, self.state["weights"], self.state["previous"])

    def evaluate(
        self, vector: Tensor, batch: Any, table: Tensor, written: State | None = None
    ) -> Outputs:
        """A forward pass at some weights; entries become like the rows of the table.

        `written` are the buffers that an earlier pass of the step has left.
        """
        function, state = self.function, {**self.state, **(written or {})}
        # Copies: a pass writes into its buffers, and every pass of a step starts from the same.
        buffers = {k: v.clone() for k, v in state.items() if k.startswith(MODEL)}
        weights = {MODEL + k: v for k, v in {**self.fixed, **function.unpack(vector)}.items()}
        loss, entries, carrier = functional_call(function, {**buffers, **weights}, (batch,))
        loss = vector.new_zeros(()) if loss is None else loss
        if table.shape[0] == 0:  # a plain loss has no blocks
            return loss, table, table, buffers
        tracked = self._entries(entries, table)
        carrier = tracked if carrier is entries else self._entries(carrier, table)
        return loss, tracked, carrier, buffers

    def _entries(self, values: Tensor | None, table: Tensor) -> Tensor:
        """Entries in the precision of the table, and in its shape: (E,) or (E, d1)."""
        if values is None:
            raise ValueError("The function of a fleet must return (loss, values) for this method.")
        if values.dim() > table.dim():
            values = values.squeeze(-1)
        index = self.data.index
        shape = ((table if index is None else index).shape[0], *table.shape[1:])
        if values.shape != shape:
            raise ValueError(
                f"The values of a run must have shape {shape} (a row per block, or per entry of "
                f"`index`): {tuple(values.shape)}."
            )
        return values.to(table.dtype)

    def forward(self, table: Tensor, measured: bool = True) -> Forward:
        """The passes at w_t: one batch gives values (if `measured`) and gradient, or one each."""
        point, values, written, batch = self.state["weights"], None, None, self.data.batch
        if self.data.gradient_batch is not None:
            if measured:
                _, values, _, written = self.evaluate(point, batch, table)
            batch = self.data.gradient_batch

        def outputs(vector: Tensor) -> tuple[tuple[Tensor, Tensor], Outputs]:
            found = self.evaluate(vector, batch, table, written)
            return (found[0], found[2]), found

        _, pull_back, found = vjp(outputs, point, has_aux=True)  # type: ignore[misc]
        loss, own, carrier, buffers = found
        blocks = _all_blocks(self.data.index, table)
        return Forward(loss, own if values is None else values, carrier, blocks, buffers, pull_back)

    def along(self, point: Tensor, move: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """The means of the blocks at some weights, and their derivative along a move."""

        def means(vector: Tensor) -> Tensor:
            _, entries, carrier, _ = self.evaluate(vector, self.data.batch, table)
            if carrier is not entries:
                raise Unsupported("A fleet has no derivative of `Measured` values along a step.")
            return block_means(entries, _all_blocks(self.data.index, table))

        values, pull_back = vjp(means, point)  # type: ignore[misc]
        # J^T y is linear in y: its derivative along y, applied to v, is J v.
        _, push = vjp(lambda y: pull_back(y)[0], torch.zeros_like(values))  # type: ignore[misc]
        return values, push(move)[0]
