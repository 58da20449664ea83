"""What a rule sees of one run in one step. No rule knows that there are others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp

from ..inner import Parsed, mean_loss, parse, split
from .member import Fixed, Numbers, State, Unsupported
from .packing import Packing

__all__ = ["Call", "Flag", "Inner", "Outcome", "Phase", "Run", "Seen", "Task", "choose", "finite"]

Flag = bool | Tensor
"""A yes or no that is the same for all runs (and then decides what is computed), or per run."""
Inner = Callable[[Any, Any], Any]


class Phase(NamedTuple):
    """Where a run stands in its round; single loops have none."""

    begins: Flag = False
    ends: Flag = False


class Seen(NamedTuple):
    """What the user's function returned: g_0 and the entries of the coupled values."""

    loss: Tensor
    values: Parsed | None


class Outcome(NamedTuple):
    """What an estimator found.

    Attributes:
        gradient: G_t as one vector.
        state: what changed.
        loss: g_0 of the batch, for logs.
        good: whether all values were finite; a step with others is not made.
    """

    gradient: Tensor
    state: State
    loss: Tensor
    good: Tensor


@dataclass(frozen=True, eq=False)
class Task:
    """The user's model and function, without weights.

    Args:
        model: the modules; its own weights are not used.
        inner: `inner(model, batch)` returns what a closure of the objective would.
        packing: of the weights.
        moving: names of the buffers that a pass changes.
        names: of the blocks, where values come by name.
    """

    model: nn.Module
    inner: Inner
    packing: Packing
    moving: tuple[str, ...] = ()
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_call", Call(self.model, self.inner))

    def look(self, weights: dict[str, Tensor], buffers: State, batch: Any) -> tuple[Seen, State]:
        """One pass; what it does to buffers is returned."""
        own = {name: value.clone() for name, value in buffers.items() if name in self.moving}
        used = {**weights, **buffers, **own}
        call: Any = self._call  # type: ignore[attr-defined]
        result = functional_call(call, {f"model.{k}": v for k, v in used.items()}, (batch,))
        return self._seen(result), own

    def without_gradient(
        self, weights: dict[str, Tensor], buffers: State, batch: Any, apart: bool
    ) -> list[str]:
        """Names of the parameters that the loss or the values do not depend on.

        Args:
            weights: of one run.
            buffers: of it.
            batch: of it.
            apart: those that one of the two does not depend on; else only those that none does.
        """
        leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
        with torch.enable_grad():
            seen = self.look(leaves, buffers, batch)[0]
        parts = [seen.loss] + ([] if seen.values is None else [seen.values.carrier.sum()])
        missing = [self._missing(part, leaves) for part in parts if part.requires_grad]
        if not missing:
            return []
        return sorted(set.union(*missing) if apart else set.intersection(*missing))

    @staticmethod
    def _missing(part: Tensor, leaves: dict[str, Tensor]) -> set[str]:
        found = torch.autograd.grad(part, [*leaves.values()], retain_graph=True, allow_unused=True)
        return {name for name, each in zip(leaves, found, strict=True) if each is None}

    def _seen(self, result: Any) -> Seen:
        loss, values = split(result)
        if loss is None and isinstance(values, Tensor) and values.dim() == 0:
            return Seen(values, None)
        parsed = None if values is None else parse("inner", self.names, values)
        if parsed is not None and parsed.index is not None:
            if len(parsed.index) != len(self.names or ()):
                raise Unsupported("In a fleet, values by name must be there for every name.")
            # Known while the step is traced: an order, not data.
            given: Any = values
            order = [list(given).index(name) for name in self.names or ()]
            rows = [None if each is None else each[order] for each in parsed[:2]]
            parsed = Parsed(rows[0], rows[1], None)  # type: ignore[arg-type]
        if loss is None:
            assert parsed is not None
            return Seen(torch.zeros_like(parsed.value.sum()), parsed)
        return Seen(mean_loss(loss, None), parsed)


class Call(nn.Module):
    """The user's function as the pass of a module, so that weights can be put in from outside."""

    def __init__(self, model: nn.Module, inner: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._inner = (inner,)  # hidden: it may be a module that holds the model again

    def forward(self, *arguments: Any) -> Any:
        """The function, with the model first."""
        return self._inner[0](self.model, *arguments)


@dataclass(frozen=True, eq=False)
class Run:
    """One run in one step.

    Args:
        task: model and function.
        state: before the step.
        numbers: the settings, in the precision of the weights.
        exact: the same in double precision.
        fixed: buffers.
        phase: of the round.
        batch: for the values.
        other: an independent batch for the gradient, or None.
        index: block of each entry of `batch`, None for all in order.
        other_index: that of `other`.
    """

    task: Task
    state: State
    numbers: Numbers
    exact: Numbers
    fixed: Fixed
    phase: Phase
    batch: Any
    other: Any = None
    index: Tensor | None = None
    other_index: Tensor | None = None

    @property
    def weights(self) -> Tensor:
        """w_t as one vector."""
        return self.state["weights"]

    @property
    def buffers(self) -> State:
        """Those that passes change, and the others."""
        moving = {name: self.state[f"buffer.{name}"] for name in self.task.moving}
        return {**self.fixed, **moving}

    @property
    def previous(self) -> Tensor:
        """w_{t-1}; at the start of a round it is w_t."""
        return choose(self.phase.begins, lambda: self.weights, lambda: self.state["previous"])

    def look(self, weights: Tensor, batch: Any) -> Seen:
        """A pass that leaves nothing behind."""
        return self.pass_at(weights, batch)[0]

    def pass_at(self, weights: Tensor, batch: Any) -> tuple[Seen, State]:
        """A pass, and the buffers that it changed."""
        seen, moved = self.task.look(self.task.packing.unpack(weights), self.buffers, batch)
        return seen, _as_state(moved)

    def after(self, moved: State) -> Run:
        """The same run when a pass has changed some buffers."""
        return dataclasses.replace(self, state={**self.state, **moved})

    def differentiate(
        self, scalar: Callable[[Seen], tuple[Tensor, Any]], batch: Any
    ) -> tuple[Tensor, Any, State]:
        """The gradient at w_t of a function of what a pass sees.

        Args:
            scalar: from a pass to the number to differentiate and anything else.
            batch: of the pass.

        Returns:
            The gradient as one vector, the rest of what `scalar` gave, the buffers that changed.
        """

        def function(weights: dict[str, Tensor]) -> tuple[Tensor, tuple[Any, State]]:
            seen, moved = self.task.look(weights, self.buffers, batch)
            value, rest = scalar(seen)
            return value, (rest, _as_state(moved))

        found, (rest, moved) = grad(function, has_aux=True)(self.task.packing.unpack(self.weights))
        return self.task.packing.pack(found), rest, moved

    def along(self, weights: Tensor, move: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """The coupled values at some weights and their derivative along a move."""
        unpack = self.task.packing.unpack

        def values(point: dict[str, Tensor]) -> Tensor:
            seen = self.task.look(point, self.buffers, batch)[0]
            assert seen.values is not None
            return seen.values.value

        found: Any = jvp(values, (unpack(weights),), (unpack(move),))
        return found[0], found[1]


def _as_state(buffers: State) -> State:
    return {f"buffer.{name}": value for name, value in buffers.items()}


def choose(flag: Flag, yes: Callable[[], Tensor], no: Callable[[], Tensor]) -> Tensor:
    """One of two tensors; both are computed only where runs differ."""
    if isinstance(flag, bool):
        return yes() if flag else no()
    return torch.where(flag, yes(), no())


def finite(*values: Tensor | None) -> Tensor:
    """Whether all are finite: one number per run, from sums, which is nearly always the same."""
    totals = [value.detach().sum() for value in values if value is not None]
    return torch.isfinite(torch.stack([each.to(totals[0]) for each in totals])).all()
