"""Pure functions of tensors as CUDA graphs: one launch on a GPU instead of hundreds.

The operations on tracked values are many and small: on a GPU the host needs milliseconds to launch
them, and the device microseconds to run them. A CUDA graph records them once for the shapes of a
batch and launches them together.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

CAPTURE = True
"""False launches the operations one by one, with the same results."""

PROGRAMS = 16
"""Shapes of a batch that are recorded; with more, they change too often to gain by it."""


@dataclass(frozen=True, eq=False)
class _Layout:
    """How the tensors of a tree lie in one vector for each dtype; one object for each layout."""

    spec: Any
    constants: tuple[Any, ...]  # the other leaves, None in the place of a tensor
    places: tuple[tuple[int, int, torch.Size], ...]  # of each tensor: vector, start, shape


class Packed:
    """A tree of tensors in one vector for each dtype, so that few copies move all of it."""

    __slots__ = ("layout", "vectors")

    def __init__(self, layout: _Layout, vectors: Sequence[Tensor]) -> None:
        self.layout, self.vectors = layout, vectors

    def part(self, number: int) -> Tensor:
        """A tensor of the tree, as a view."""
        vector, start, shape = self.layout.places[number]
        return self.vectors[vector][start : start + shape.numel()].view(shape)

    def tree(self) -> Any:
        """The tree, of views."""
        parts = map(self.part, range(len(self.layout.places)))
        each = [next(parts) if leaf is Tensor else leaf for leaf in self.layout.constants]
        return tree_unflatten(each, self.layout.spec)


class _HostNeeded(Exception):
    """An operation needs a number from the device."""


class _Watch(TorchDispatchMode):
    """Raises where the host would wait for the device, which a graph cannot do.

    To find out by recording is no way: a recording that fails leaves the allocator and the random
    numbers of the process in the state of one.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags = func.tags
        asks = torch.Tag.data_dependent_output in tags
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
            asks = any(each is not None and each.dtype == torch.bool for each in args[1])
        elif torch.Tag.dynamic_output_shape in tags:
            asks = True
        if asks:
            raise _HostNeeded(str(func))
        return func(*args, **(kwargs or {}))


class Captured:
    """Calls a function of tensors; on a GPU as a CUDA graph from the third call with their shapes.

    Arguments that are no tensors are constants of a graph: another one is recorded when they
    change. Other tensors may be read and written in place, as long as they stay where they are;
    calling the function twice must write the same as calling it once.

    Args:
        function: returns a tree of tensors and constants.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._layouts = function, dict[Any, _Layout]()
        self._programs, self._pool = dict[Any, Callable[..., Packed] | None](), None
        self._watched = set[Any]()  # shapes with which the function was seen to wait for nothing
        self.records = True  # until it turns out that the function cannot be recorded

    def __call__(self, *given: Tensor | Packed | Hashable) -> Packed:
        key = list[Any]()
        for each in given:
            if isinstance(each, Tensor):
                key += (each.shape, each.dtype)
            else:
                key.append(each.layout if isinstance(each, Packed) else each)
        name = tuple(key)
        program = self._programs.get(name)
        if program is not None:
            return program(given)
        if name not in self._programs or not (CAPTURE and self.records) or capturing():
            if len(self._programs) < PROGRAMS:
                self._programs[name] = None
            return self._pack(self._function(*given))
        try:
            if name not in self._watched:
                with _Watch():
                    result = self._pack(self._function(*given))
                self._watched.add(name)
                return result
            program = self._programs[name] = self._record(given)
        except (_HostNeeded, RuntimeError) as error:  # somebody's own part of it looks at a number
            if not isinstance(error, _HostNeeded) and torch.cuda.is_initialized():
                # The recording left the random numbers of the process in the state of one.
                generator = torch.cuda.default_generators[torch.cuda.current_device()]
                generator.graphsafe_set_state(generator.clone_state())
            self._programs, self.records = dict.fromkeys(self._programs), False
            return self._pack(self._function(*given))
        return program(given)

    def _pack(self, tree: Any) -> Packed:
        leaves, spec = tree_flatten(tree)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        kinds = list(dict.fromkeys(part.dtype for part in tensors))
        rows = {kind: [part for part in tensors if part.dtype == kind] for kind in kinds}
        starts = {k: iter(accumulate([0, *(p.numel() for p in rows[k])])) for k in kinds}
        places = tuple((kinds.index(p.dtype), next(starts[p.dtype]), p.shape) for p in tensors)
        constants = tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        layout = _Layout(spec, constants, places)
        name = (str(spec), str(constants), places, *kinds)
        layout = self._layouts.setdefault(name, layout)
        return Packed(layout, [torch.cat([p.reshape(-1) for p in rows[k]]) for k in kinds])

    def _record(self, given: Sequence[Any]) -> Callable[..., Packed]:
        held = [_copied(each) for each in given]
        places = [tensor for each in held for tensor in _tensors(each)]
        replay, result = self._replayed(held)

        def program(given: Sequence[Any]) -> Packed:
            values = (tensor for each in given for tensor in _tensors(each))
            for place, value in zip(places, values, strict=True):
                place.copy_(value, non_blocking=True)
            replay()
            # Copies: what a later replay overwrites may still be needed, by a backward pass.
            return Packed(result.layout, [vector.clone() for vector in result.vectors])

        return program

    def _replayed(self, held: Sequence[Any]) -> tuple[Callable[[], None], Packed]:
        """Record the function at some places in memory: what runs it again there, its result."""
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        side.wait_stream(torch.cuda.current_stream())
        # Without `torch.cuda.graph`, which waits for the device and empties the cache. Other
        # threads, such as those of a DataLoader, may use the GPU meanwhile.
        collects = gc.isenabled()
        gc.disable()  # an older graph that is freed meanwhile would end the recording
        try:
            with torch.cuda.stream(side):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = self._pack(self._function(*held))
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        torch.cuda.current_stream().wait_stream(side)
        return graph.replay, result


def capturing() -> bool:
    """Whether the current stream is being captured, by the user's own CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _copied(given: Any) -> Any:
    if isinstance(given, Packed):
        return Packed(given.layout, [vector.clone() for vector in given.vectors])
    return given.clone() if isinstance(given, Tensor) else given


def _tensors(given: Any) -> Sequence[Tensor]:
    if isinstance(given, Packed):
        return given.vectors
    return (given,) if isinstance(given, Tensor) else ()
