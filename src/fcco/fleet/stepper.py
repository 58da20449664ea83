"""Ways to run the step of a fleet: as it is, traced, as a CUDA graph, compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .member import State
from .program import Inputs, Program, Result
from .reading import Kind
from .run import Phase, Task

__all__ = ["MODES", "Stepper", "frozen"]

MODES = ("auto", "eager", "traced", "graph", "compiled")


def frozen(before: State, after: State, good: Tensor) -> State:
    """The new state of the runs whose step was good, the old one of the others."""
    return {name: torch.where(_like(good, new), new, before[name]) for name, new in after.items()}


def _like(mask: Tensor, value: Tensor) -> Tensor:
    return mask.view(-1, *(1 for _ in value.shape[1:]))


class Stepper:
    """Makes steps, and freezes runs that leave the finite numbers.

    Args:
        task: model and function.
        kind: the rules.
        mode: one of `MODES`. `"eager"` maps the step of one run as it is; `"traced"` runs the plain
            operations that this consists of; `"graph"` replays them as a CUDA graph, which takes
            the time to launch them away; `"compiled"` lets `torch.compile` join them first.
            `"auto"` is `"graph"` on a GPU and `"traced"` elsewhere.
        device: of the fleet.
    """

    def __init__(self, task: Task, kind: Kind, mode: str, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if mode == "auto":
            mode = "graph" if self._on_gpu else "traced"
        if mode == "graph" and not self._on_gpu:
            raise ValueError(f"`Fleet(mode='graph')` needs a GPU but the fleet is on: {device}.")
        self.mode = mode
        self.program = Program(task, kind, mode)
        self._captured: dict[Any, _Captured] = {}
        self._pool: Any = None
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self, inputs: Inputs, died: Tensor, step: int) -> Tensor:
        """One step: changes `inputs.state` and, for runs that are frozen now, `died`."""
        if self._on_gpu and self.mode in ("graph", "compiled"):
            loss = self._replay(inputs, died, step)
            if loss is not None:
                return loss
        state, good, loss = self.program(inputs)
        alive = died < 0
        # Without a GPU a look costs nothing, and copies of all weights do.
        if self._on_gpu or not bool((good & alive).all()):
            state = frozen(inputs.state, state, good & alive)
            died.copy_(torch.where(alive & ~good, step, died))
        inputs.state = state
        return loss

    def _replay(self, inputs: Inputs, died: Tensor, step: int) -> Tensor | None:
        key = inputs.shape()
        if key not in self._captured:
            self._own(inputs)
            try:
                self._captured[key] = self._capture(inputs, died)
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                warnings.warn(
                    f"The step of this fleet could not be captured and runs as it is: {error}",
                    stacklevel=2,
                )
                self.mode = "traced"
                return None
        self._count.fill_(step)
        return self._captured[key].replay(inputs)

    def _own(self, inputs: Inputs) -> None:
        """A captured step changes tensors in place: no two parts of the state may share one."""
        held: set[int] = set()
        for name, value in inputs.state.items():
            place = value.untyped_storage().data_ptr()
            if place in held or not value.is_contiguous():
                inputs.state[name] = value.clone()
            held.add(place)

    def _capture(self, inputs: Inputs, died: Tensor) -> _Captured:
        function = self.program.function(inputs)
        captured = _Captured(inputs)
        with torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries set themselves up in the first calls
                for _ in range(2):
                    function(*captured.inputs.tensors())
            torch.cuda.current_stream().wait_stream(side)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            with torch.cuda.graph(captured.graph, pool=self._pool):
                captured.loss = self._in_place(function, captured.inputs, died)
        return captured

    def _in_place(self, function: Callable[..., Result], inputs: Inputs, died: Tensor) -> Tensor:
        state, good, loss = function(*inputs.tensors())
        alive = died < 0
        kept, held = good & alive, inputs.state
        died.copy_(torch.where(alive & ~good, self._count, died))
        own = {id(value) for value in held.values()}
        # w_{t-1} is the very tensor of w_t: written before that one changes.
        for name in sorted(state, key=lambda name: id(state[name]) not in own):
            torch.where(_like(kept, state[name]), state[name], held[name], out=held[name])
        return loss


class _Captured:
    """A step as a CUDA graph, with places of its own for what changes from step to step.

    Args:
        inputs: of the first step; state, numbers and buffers are used where they are.
    """

    def __init__(self, inputs: Inputs) -> None:
        masks = (flag.clone() if isinstance(flag, Tensor) else flag for flag in inputs.phase)
        data = (inputs.batch, inputs.other, inputs.index, inputs.other_index)
        own = tree_map_only(Tensor, Tensor.clone, data)
        self.inputs = Inputs(inputs.state, inputs.numbers, inputs.fixed, Phase(*masks), *own)
        self.graph = torch.cuda.CUDAGraph()
        self.loss: Tensor | None = None

    def _places(self, inputs: Inputs) -> list[Tensor]:
        data = (inputs.phase, inputs.batch, inputs.other, inputs.index, inputs.other_index)
        return [each for each in tree_leaves(data) if isinstance(each, Tensor)]

    def replay(self, inputs: Inputs) -> Tensor:
        """One step on other data."""
        for place, value in zip(self._places(self.inputs), self._places(inputs), strict=True):
            place.copy_(value)
        self.graph.replay()
        assert self.loss is not None
        return self.loss.clone()
