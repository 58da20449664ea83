"""One run of a fleet in one step: its state, its data, and passes of the user's function.

No rule sees the other runs: `torch.func.vmap` maps the step of one run over all, so that a tensor
here has no axis for the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp

from ..inputs import mean_loss, parse, split
from ..tracker.blocks import Batch, Blocks, Tracked, segment

__all__ = ["Data", "Estimate", "Forward", "ModelFunction", "Run", "State", "Unsupported"]

State = dict[str, Tensor]
"""What a step changes, by name; in a fleet every tensor has one row per run."""
Flag = bool | Tensor
"""A bool that holds for all runs and selects what is computed, or a tensor with one per run."""
BUFFER = "buffer."
"""Prefix of the buffers of the model in the state."""


class Unsupported(ValueError):
    """A run that cannot be part of a fleet; train it alone."""


class Data(NamedTuple):
    """What a step is given: batches, and where it is in a round."""

    batch: Any  # gives the values and, alone, the gradient
    gradient_batch: Any = None  # an independent batch that carries the gradient (Alg. 2, line 5)
    index: Tensor | None = None  # type: ignore[assignment] # block of each entry of `batch`
    gradient_index: Tensor | None = None  # that of `gradient_batch`, where it differs
    begins: Flag = False  # this is the first step of a round, where w_{t-1} = w_t
    ends: Flag = False  # it is the last of a round
    smooth: bool = False  # lambda is above 0 in some runs
    hard: bool = False  # lambda is 0 in some runs


def choose(flag: Flag, yes: Callable[[], Tensor], no: Callable[[], Tensor]) -> Tensor:
    """One of two tensors; both are computed only where runs differ."""
    if isinstance(flag, bool):
        return yes() if flag else no()
    return torch.where(flag, yes(), no())


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


def block_means(values: Tensor, blocks: Blocks, log: bool = False) -> Tensor:
    """The mean of the entries of each block, NaN where it has none."""
    if blocks.whole:
        return values
    sums = blocks.sums(values, log)
    return Batch(blocks.index, blocks.counts, sums, None, log).mean(sums)


Outputs = tuple[Tensor | None, Tensor | None, Tensor | None, State]
"""Of a forward pass: g_0, the entries to track, those that carry the gradient where they are
others, and the buffers of the model after it."""


class ModelFunction(nn.Module):
    """The user's function with the weights of a run as an argument: one vector.

    One vector makes an update of the weights a few large operations instead of many small ones.

    Args:
        model: the modules; its own weights are not used.
        function: `function(model, batch)` returns what the closure of the objective would.
        shapes: shapes of the trained parameters by name, in the order of the vector.
        buffers: names of the buffers of the model, which a pass may change.
        names: of the blocks, for values that are given by name.
        needs_loss: the function must return g_0.
    """

    def __init__(
        self,
        model: nn.Module,
        function: Callable[..., Any],
        shapes: Mapping[str, torch.Size],
        buffers: Iterable[str] = (),
        names: tuple[str, ...] | None = None,
        needs_loss: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.shapes, self.names, self.needs_loss = model, shapes, names, needs_loss
        self.changing = tuple(buffers)
        self._function = (function,)  # a tuple hides it: it may be a module that holds the model

    def forward(self, *arguments: Any) -> Any:
        return self._function[0](self.model, *arguments)

    def unpack(self, vectors: Tensor) -> dict[str, Tensor]:
        """The parameters by name, as views of a vector, or of one per run."""
        parts = vectors.split([shape.numel() for shape in self.shapes.values()], dim=-1)
        return {
            name: part.view(*vectors.shape[:-1], *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def outputs(self, weights: State, buffers: State, batch: Any) -> Outputs:
        """One forward pass, with parameters by name."""
        # Copies: a pass writes into its buffers, and every pass of a step starts from the same.
        changed = {name: buffers[name].clone() for name in self.changing}
        used = {**buffers, **changed, **weights}
        result = functional_call(self, {f"model.{k}": v for k, v in used.items()}, (batch,))
        loss, values = split(result)
        if loss is None and isinstance(values, Tensor) and values.dim() == 0:
            loss, values = values, None
        if loss is not None:
            loss = mean_loss(loss)
        elif self.needs_loss:
            raise ValueError(
                "This method needs the objective too: the function must return (loss, values)."
            )
        if values is None:
            return loss, None, None, changed
        if self.names is not None and isinstance(values, Mapping):
            if missing := [name for name in self.names if name not in values]:
                raise Unsupported(
                    f"In a fleet, values by name must be there for every name; no {missing[0]!r}."
                )
            values = {**{name: values[name] for name in self.names}, **values}  # in this order
        values, surrogate, _ = parse("inner", self.names, values)
        return loss, values, surrogate, changed

    def unused_parameters(self, weights: State, buffers: State, batch: Any) -> list[set[str]]:
        """Names of the parameters that the loss, and that the values do not depend on."""
        leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
        copies = {name: value.clone() for name, value in buffers.items()}
        with torch.enable_grad():
            loss, values, surrogate, _ = self.outputs(leaves, copies, batch)
        unused = []
        for part in (loss, values if surrogate is None else surrogate):
            if part is not None and part.requires_grad:
                gradients = torch.autograd.grad(
                    part.sum(), [*leaves.values()], retain_graph=True, allow_unused=True
                )
                unused.append({n for n, g in zip(leaves, gradients, strict=True) if g is None})
        return unused


class Estimate(NamedTuple):
    """The gradient of one run in one step."""

    gradient: Tensor  # G_t as one vector
    state: State  # what changed
    loss: Tensor  # g_0 of the batch, for logs
    good: Tensor  # whether all values were finite; else the run is frozen before this step


class Forward(NamedTuple):
    """A forward pass at w_t that can be differentiated."""

    loss: Tensor  # g_0, or 0
    values: Tensor  # the entries to track
    carrier: Tensor  # the entries that carry the gradient
    blocks: Blocks  # their blocks
    state: State  # the buffers that the pass changed, by their names in the state
    pull_back: Callable[..., Any]  # from derivatives by loss and carrier to that by the weights

    def estimate(
        self,
        slope: Tensor,
        changed: State,
        *checked: Tensor | None,
        loss_weight: Tensor | None = None,
        log_values: Tensor | None = None,
    ) -> Estimate:
        r"""The estimate :math:`G_t = c \nabla g_0 + \sum_i \langle s_i, \nabla g_i\rangle`.

        Args:
            slope: s_i of all blocks; those of absent ones are not used.
            changed: the new state of the estimator.
            checked: values that must be finite.
            loss_weight: c, 1 unless given.
            log_values: u_i, when entries and u are logarithms.
        """
        weight = torch.ones_like(self.loss) if loss_weight is None else loss_weight.to(self.loss)
        u, log = (slope, False) if log_values is None else (log_values, True)
        blocks = self.blocks
        tracked = Tracked(u, blocks.index, self.carrier, blocks, blocks.counts, log=log)
        (gradient,) = self.pull_back((weight, tracked.factors(slope)))
        good = finite(self.loss, *checked)
        return Estimate(gradient, {**changed, **self.state}, self.loss, good)


class Run(NamedTuple):
    """What a step depends on. A fleet makes one whose tensors have one row per run."""

    function: ModelFunction
    state: State  # before the step
    exact: dict[str, Tensor]  # the numbers of the method by name, in double precision
    fixed: State  # buffers that no pass changes, and parameters that are not trained
    data: Data
    numbers: Any = None  # those in the precision of the weights

    @property
    def previous(self) -> Tensor:
        """w_{t-1}; at the start of a round it is w_t."""
        state = self.state
        return choose(self.data.begins, lambda: state["weights"], lambda: state["previous"])

    @property
    def buffers(self) -> State:
        return {**self.fixed, **{k: self.state[BUFFER + k] for k in self.function.changing}}

    @property
    def gradient_batch(self) -> tuple[Any, Tensor | None]:
        """The batch that carries the gradient, and the block of each of its entries."""
        batch, other, index, other_index, *_ = self.data
        return (batch if other is None else other, index if other_index is None else other_index)

    def evaluate(self, vector: Tensor, table: Tensor) -> tuple[Tensor, State]:
        """The values of the batch at some weights, and the buffers that the pass changed."""
        weights = self.function.unpack(vector)
        _, values, _, changed = self.function.outputs(weights, self.buffers, self.data.batch)
        return _as_entries(values, self.data.index, table), changed

    def differentiate(self, table: Tensor, changed: State | None = None) -> Forward:
        """A pass at w_t, of the batch that carries the gradient, that can be differentiated.

        Entries are like the rows of `table`; an earlier pass of the step has `changed` buffers.
        """
        function, buffers = self.function, {**self.buffers, **(changed or {})}
        batch, index = self.gradient_batch

        def outputs(vector: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, State]]:
            weights = function.unpack(vector)
            loss, values, surrogate, written = function.outputs(weights, buffers, batch)
            loss = vector.new_zeros(()) if loss is None else loss
            tracked = carrier = _as_entries(values, index, table)
            if surrogate is not None:
                carrier = _as_entries(surrogate, index, table)
            return (loss, carrier), (tracked, {BUFFER + k: v for k, v in written.items()})

        results: Any = vjp(outputs, self.state["weights"], has_aux=True)
        (loss, carrier), pull_back, (values, state) = results
        return Forward(loss, values, carrier, _all_blocks(index, table), state, pull_back)

    def passes(self, table: Tensor) -> tuple[Tensor, Blocks, Forward]:
        """The values to track at w_t, their blocks, and the pass that carries the gradient.

        One batch serves both, unless there is an independent one for the gradient.
        """
        if self.data.gradient_batch is None:
            forward = self.differentiate(table)
            return forward.values, forward.blocks, forward
        values, changed = self.evaluate(self.state["weights"], table)
        blocks = _all_blocks(self.data.index, table)
        return values, blocks, self.differentiate(table, changed)

    def along(
        self, point: Tensor, move: Tensor, batch: Any, index: Tensor | None, table: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The means of the blocks of a batch at some weights, and their derivative along a move."""

        def means(vector: Tensor) -> Tensor:
            weights = self.function.unpack(vector)
            _, values, surrogate, _ = self.function.outputs(weights, self.buffers, batch)
            if surrogate is not None:
                raise Unsupported("A fleet has no derivative of `Measured` values along a step.")
            return block_means(_as_entries(values, index, table), _all_blocks(index, table))

        return jvp(means, (point,), (move,))  # type: ignore[return-value]


def _as_entries(values: Tensor | None, index: Tensor | None, table: Tensor) -> Tensor:
    """Entries in the precision of the table, and in its shape: (E,) or (E, d1)."""
    if table.shape[0] == 0:  # a plain loss has no blocks
        return table
    if values is None:
        raise ValueError("The function of a fleet must return (loss, values) for this method.")
    if values.dim() > table.dim():
        values = values.squeeze(-1)
    number = table.shape[0] if index is None else index.shape[0]
    if values.shape != (number, *table.shape[1:]):
        raise ValueError(
            f"The values of a run must have shape {(number, *table.shape[1:])}, one row per block "
            f"or per entry of `index`, but have shape {tuple(values.shape)}."
        )
    return values.to(table.dtype)
