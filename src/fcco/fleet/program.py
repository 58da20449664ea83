"""The step of a whole fleet as one function of tensors, and ways to run it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize, vmap
from torch.utils._pytree import tree_flatten, tree_map_only

from .member import Fixed, Numbers, State, Unsupported
from .reading import Kind
from .run import Flag, Phase, Run, Task, finite

__all__ = ["Inputs", "Program", "Result", "step_of_one"]

Result = tuple[State, Tensor, Tensor]
"""The state after a step, which runs made it, and their losses."""


@dataclass
class Inputs:
    """What a step depends on; every tensor has one row per run.

    Args:
        state: before the step.
        numbers: settings.
        fixed: buffers.
        phase: of the rounds, tensors or one answer for all.
        batch: for the values.
        other: for the gradient, or None.
        index: block of each entry, or None.
        other_index: that of `other`.
    """

    state: State
    numbers: Numbers
    fixed: Fixed
    phase: Phase
    batch: Any
    other: Any = None
    index: Tensor | None = None
    other_index: Tensor | None = None

    def tensors(self) -> tuple[Any, ...]:
        """The parts as arguments."""
        masks = [flag for flag in self.phase if isinstance(flag, Tensor)]
        more = [self.other, self.index, self.other_index]
        there = [each for each in more if each is not None]
        return (self.state, self.numbers, self.fixed, masks, self.batch, *there)

    def shape(self) -> tuple[Any, ...]:
        """What the same program can serve: everything but the values of tensors."""
        leaves, spec = tree_flatten((self.batch, self.other, self.index, self.other_index))
        known = tuple(
            (tuple(each.shape), each.dtype) if isinstance(each, Tensor) else each for each in leaves
        )
        flags = tuple(flag if isinstance(flag, bool) else "mask" for flag in self.phase)
        return flags, known, str(spec)


def step_of_one(task: Task, kind: Kind, like: Inputs) -> Callable[..., Result]:
    """The step of one run, to be mapped over all: a pure function of tensors without a run axis.

    Args:
        task: model and function.
        kind: the rules.
        like: for which parts are there.
    """
    flags = [flag if isinstance(flag, bool) else None for flag in like.phase]
    given = [each is not None for each in (like.other, like.index, like.other_index)]

    def step(
        state: State, numbers: Numbers, fixed: Fixed, masks: list[Tensor], batch: Any, *rest: Any
    ) -> Result:
        left, more = iter(masks), iter(rest)
        phase: list[Flag] = [next(left) if flag is None else flag for flag in flags]
        other, index, other_index = (next(more) if there else None for there in given)
        weights = state["weights"]
        narrow = {name: value.to(weights.dtype) for name, value in numbers.items()}
        run = Run(
            task, state, narrow, numbers, fixed, Phase(*phase), batch, other, index, other_index
        )
        found = kind.estimator.gradient(run)
        held = {**state, **found.state}
        if kind.estimator.remembers:
            held["previous"] = weights
        held |= kind.update.step(run, weights, found.gradient, held)
        if kind.rounds:  # kept with the state, so that a frozen run knows where it stood
            held["settled"] = torch.ones_like(state["settled"]) & run.phase.ends
        good = found.good & finite(held["weights"])
        return held, good, found.loss

    return step


class Program:
    """The step of a fleet, traced once for each shape of its inputs.

    `vmap` of the step of one run is the whole program. Tracing it to a graph of plain operations
    takes the cost of the transforms, some milliseconds, out of every step.

    Args:
        task: model and function.
        kind: the rules.
        mode: `"eager"`, `"compiled"`, or anything else for traced.
    """

    def __init__(self, task: Task, kind: Kind, mode: str = "traced") -> None:
        self.task, self.kind, self.mode = task, kind, mode
        self._known: dict[Any, Callable[..., Result]] = {}

    def function(self, inputs: Inputs) -> Callable[..., Result]:
        """The program for inputs of this shape."""
        key = inputs.shape()
        if key not in self._known:
            self._known[key] = self._make(inputs)
        return self._known[key]

    def __call__(self, inputs: Inputs) -> Result:
        """One step."""
        with torch.no_grad():
            return self.function(inputs)(*inputs.tensors())

    def _make(self, inputs: Inputs) -> Callable[..., Result]:
        mapped = _explained(vmap(step_of_one(self.task, self.kind, inputs)))
        if self.mode == "eager":
            return mapped
        from torch.fx.experimental.proxy_tensor import make_fx

        try:
            with torch.no_grad():
                # Copies: two inputs that happen to be one tensor now would be one for ever.
                apart = tree_map_only(Tensor, Tensor.clone, inputs.tensors())
                # Without operations in place, what nobody uses can be left out.
                graph = make_fx(functionalize(mapped, remove="mutations"))(*apart)
        except Unsupported:
            raise
        except Exception as error:  # whatever a user's model does: the plain way works or explains
            warnings.warn(
                f"The step of this fleet could not be traced and runs as it is: {error}",
                stacklevel=2,
            )
            self.mode = "eager"
            return mapped
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return torch.compile(graph, dynamic=False) if self.mode == "compiled" else graph


def _explained(function: Callable[..., Result]) -> Callable[..., Result]:
    """The same function; what `vmap` says of random numbers means something else here."""

    def call(*arguments: Any) -> Result:
        try:
            return function(*arguments)
        except RuntimeError as error:
            if "randomness" not in str(error):
                raise
            raise Unsupported(
                "A fleet needs a model and a function without random numbers (such as dropout): a "
                "run alone could not draw the same ones."
            ) from error

    return call
