"""The step of a whole fleet: `vmap` of the step of one run, and ways to execute it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from .member import Signature
from .run import Run, State, Unsupported, finite

MODES = ("auto", "eager", "traced", "graph", "compiled")
Result = tuple[State, Tensor, Tensor]
"""The state after a step, whether all was finite, and the loss."""


def step_one_run(signature: Signature, run: Run) -> Result:
    """The step of one run: a pure function of tensors without an axis for the runs."""
    before, estimator = run.state["weights"], signature.estimator
    numbers = {name: value.to(before.dtype) for name, value in run.exact.items()}
    run = run._replace(numbers=numbers)
    estimate = estimator.gradient(run)
    state = {**run.state, **estimate.state}
    if "previous" in state:
        state["previous"] = before
    state |= signature.update.step(run, estimate.gradient, state)
    if signature.rounds:  # a part of the state, so that a frozen run knows where it stood
        state["between_rounds"] = torch.ones_like(state["between_rounds"]) & run.data.ends
    return state, estimate.good & finite(state["weights"]), estimate.loss


class Program:
    """Executes the steps of a fleet, and freezes runs whose values are no longer finite.

    Tracing takes the cost of the transforms, some milliseconds, out of every step. There is one
    program for each shape of the data and each place in a round.

    `"eager"` maps the step of one run as it is; `"traced"` runs the plain operations that this
    consists of; `"graph"` replays them as a CUDA graph, which takes away the time to launch them;
    `"compiled"` lets `torch.compile` fuse them first. `"auto"`: see docs/recipes/fleets.md.
    """

    def __init__(self, signature: Signature, mode: str, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if mode == "auto":
            mode = "graph" if self._on_gpu else "traced"
        if mode == "graph" and not self._on_gpu:
            raise ValueError(f"`Fleet(mode='graph')` needs a GPU but the fleet is on: {device}.")
        self._mode, self._memory_pool = mode, None
        self._step = functools.partial(step_one_run, signature)
        self._programs: dict[Any, Callable[..., tuple[State, Tensor]]] = {}
        self._step_number = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self, runs: Run, died: Tensor, step: int) -> tuple[State, Tensor]:
        """One step: the new state and the losses; `died` is changed in place."""
        leaves, spec = tree_flatten(runs.data)
        known = ((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        key = (str(spec), *known)  # what one program can serve: all but the values of tensors
        try:
            if key not in self._programs:
                self._programs[key] = self._built(runs, died)
            return self._programs[key](runs, died, step)
        except RuntimeError as error:  # what `vmap` says of it means something else for a fleet
            if "randomness" not in str(error):
                raise
            text = "without random numbers (dropout): a run alone could not draw the same ones."
            raise Unsupported(f"A fleet needs a model and a function {text}") from error

    def _built(self, runs: Run, died: Tensor) -> Callable[..., tuple[State, Tensor]]:
        dims = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, runs)
        program: Any = vmap(self._step, in_dims=(dims,))
        if self._mode != "eager":
            program = self._traced(program, runs)
        if self._on_gpu and self._mode in ("graph", "compiled"):
            return self._captured(program, runs, died)
        return functools.partial(self._run, program)

    def _run(self, program: Any, runs: Run, died: Tensor, step: int) -> tuple[State, Tensor]:
        with torch.no_grad():
            state, good, loss = program(runs)
        kept = good & (died < 0)
        # On a CPU a look at the flags costs nothing, and copies of all weights do.
        if self._on_gpu or not bool(kept.all()):
            old = runs.state
            state = {name: torch.where(_like(kept, v), v, old[name]) for name, v in state.items()}
            died.copy_(torch.where((died < 0) & ~good, step, died))
        return state, loss

    def _traced(self, mapped: Callable[[Run], Result], runs: Run) -> Any:
        from torch.fx.experimental.proxy_tensor import make_fx

        leaves, spec = tree_flatten(runs)
        # Tensors are the arguments of the program; flags and None are a part of it.
        constants = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]

        def of_tensors(*tensors: Tensor) -> Result:
            given = iter(tensors)
            parts = [next(given) if part is Tensor else part for part in constants]
            return mapped(tree_unflatten(parts, spec))

        with torch.no_grad():
            # Copies: two inputs that are one tensor by chance would be traced as one for ever.
            copies = [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]
            # Without operations in place, what nobody uses can be left out.
            graph = make_fx(functionalize(of_tensors, remove="mutations"))(*copies)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        run: Any = torch.compile(graph, dynamic=False) if self._mode == "compiled" else graph
        return lambda runs: run(*_tensors(runs))

    def _captured(self, program: Any, runs: Run, died: Tensor) -> Callable[..., Any]:
        """The step as a CUDA graph, with tensors of its own for the data."""
        _separate(runs.state)
        held = runs._replace(data=tree_map_only(Tensor, Tensor.clone, runs.data))
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.no_grad():
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries set themselves up in the first calls
                for _ in range(2):
                    program(held)
            torch.cuda.current_stream().wait_stream(side)
            self._memory_pool = self._memory_pool or torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self._memory_pool):
                losses = self._run_in_place(program, held, died)

        def replay(runs: Run, died: Tensor, step: int) -> tuple[State, Tensor]:
            self._step_number.fill_(step)
            for place, value in zip(_tensors(held.data), _tensors(runs.data), strict=True):
                place.copy_(value)
            graph.replay()
            return runs.state, losses.clone()

        return replay

    def _run_in_place(self, program: Any, runs: Run, died: Tensor) -> Tensor:
        after, good, loss = program(runs)
        alive, state = died < 0, runs.state
        kept = good & alive
        died.copy_(torch.where(alive & ~good, self._step_number, died))
        before = {id(value) for value in state.values()}
        # w_{t-1} is the very tensor of w_t: it is written before that one changes.
        for name in sorted(after, key=lambda name: id(after[name]) not in before):
            torch.where(_like(kept, after[name]), after[name], state[name], out=state[name])
        return loss


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _like(mask: Tensor, value: Tensor) -> Tensor:
    return mask.view(-1, *(1 for _ in value.shape[1:]))


def _separate(state: State) -> None:
    """A captured step changes tensors in place: no two parts of the state may share one."""
    places: set[int] = set()
    for name, value in state.items():
        place = value.untyped_storage().data_ptr()
        if place in places or not value.is_contiguous():
            state[name] = value.clone()
        places.add(place)
