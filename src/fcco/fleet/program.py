"""The step of a whole fleet: `vmap` of the step of one run, and ways to execute it."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from .member import Signature
from .run import Run, State, Unsupported, finite

__all__ = ["MODES", "Program", "step_one_run"]

MODES = ("auto", "eager", "traced", "graph", "compiled")
Result = tuple[State, Tensor, Tensor]
"""The state after a step, whether all was finite, and the loss."""


def step_one_run(signature: Signature, run: Run) -> Result:
    """The step of one run: a pure function of tensors without an axis for the runs."""
    dtype = run.weights.dtype
    run = run._replace(numbers={name: value.to(dtype) for name, value in run.exact.items()})
    estimate = signature.estimator.gradient(run)
    state = {**run.state, **estimate.state}
    if signature.estimator.needs_previous:
        state["previous"] = run.weights
    state |= signature.update.step(run, estimate.gradient, state)
    if signature.rounds:  # a part of the state, so that a frozen run knows where it stood
        state["between_rounds"] = torch.ones_like(state["between_rounds"]) & run.flags.ends
    return state, estimate.good & finite(state["weights"]), estimate.loss


class Program:
    """Executes the steps of a fleet, and freezes runs whose values are no longer finite.

    Tracing takes the cost of the transforms, some milliseconds, out of every step. There is one
    program for each shape of the data and each combination of flags.

    Args:
        signature: the method.
        mode: `"eager"` maps the step of one run as it is; `"traced"` runs the plain operations that
            this consists of; `"graph"` replays them as a CUDA graph, which takes away the time to
            launch them; `"compiled"` lets `torch.compile` fuse them first. `"auto"` is `"graph"`
            on a GPU and `"traced"` elsewhere.
        device: of the fleet.
    """

    def __init__(self, signature: Signature, mode: str, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if mode == "auto":
            mode = "graph" if self._on_gpu else "traced"
        if mode == "graph" and not self._on_gpu:
            raise ValueError(f"`Fleet(mode='graph')` needs a GPU but the fleet is on: {device}.")
        self.mode = mode
        self._step = functools.partial(step_one_run, signature)
        self._programs: dict[Any, Callable[[Run], Result]] = {}
        self._captured: dict[Any, _CapturedStep] = {}
        self._memory_pool: Any = None
        self._step_number = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self, runs: Run, died: Tensor, step: int) -> tuple[State, Tensor]:
        """One step: returns the new state and the losses.

        Args:
            runs: all runs.
            died: the step at which each run was frozen, or -1; changed in place.
            step: the number of this step.
        """
        key = _shape_of(runs)
        if self._on_gpu and self.mode in ("graph", "compiled"):
            captured = self._captured.get(key) or self._capture(key, runs, died)
            if captured is not None:
                self._step_number.fill_(step)
                return runs.state, captured.replay(runs)
        program = self._programs.get(key) or self._build(key, runs)
        with torch.no_grad(), _random_numbers_refused():
            state, good, loss = program(runs)
        alive = died < 0
        # On a CPU a look at the flags costs nothing, and copies of all weights do.
        if self._on_gpu or not bool((good & alive).all()):
            kept = good & alive
            state = {
                name: torch.where(_like(kept, new), new, runs.state[name])
                for name, new in state.items()
            }
            died.copy_(torch.where(alive & ~good, step, died))
        return state, loss

    def _build(self, key: Any, runs: Run) -> Callable[[Run], Result]:
        """The program for data of this shape."""
        dims = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, runs)
        program: Any = vmap(self._step, in_dims=(dims,))
        if self.mode != "eager":
            try:
                program = self._traced(program, runs)
            except Unsupported:
                raise
            except Exception as error:  # whatever a user's model does: `vmap` works or explains
                warnings.warn(
                    f"The step of this fleet could not be traced and runs as it is: {error}",
                    stacklevel=3,
                )
                self.mode = "eager"
        self._programs[key] = program
        return program

    def _traced(self, mapped: Callable[[Run], Result], runs: Run) -> Any:
        from torch.fx.experimental.proxy_tensor import make_fx

        leaves, spec = tree_flatten(runs)
        # Tensors are the arguments of the program; flags and None are a part of it.
        constants = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]

        def of_tensors(*tensors: Tensor) -> Result:
            given = iter(tensors)
            parts = [next(given) if part is Tensor else part for part in constants]
            return mapped(tree_unflatten(parts, spec))

        with torch.no_grad(), _random_numbers_refused():
            # Copies: two inputs that are one tensor by chance would be traced as one for ever.
            copies = [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]
            # Without operations in place, what nobody uses can be left out.
            graph = make_fx(functionalize(of_tensors, remove="mutations"))(*copies)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        run: Any = torch.compile(graph, dynamic=False) if self.mode == "compiled" else graph
        return lambda runs: run(*_tensors(runs))

    def _capture(self, key: Any, runs: Run, died: Tensor) -> _CapturedStep | None:
        """The step as a CUDA graph; None, from now on, when it cannot be captured."""
        _separate(runs.state)
        program, captured = self._build(key, runs), _CapturedStep(runs)
        try:
            with torch.no_grad():
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):  # libraries set themselves up in the first calls
                    for _ in range(2):
                        program(captured.runs)
                torch.cuda.current_stream().wait_stream(side)
                if self._memory_pool is None:
                    self._memory_pool = torch.cuda.graph_pool_handle()
                with torch.cuda.graph(captured.graph, pool=self._memory_pool):
                    captured.loss = self._step_in_place(program, captured.runs, died)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            warnings.warn(
                f"The step of this fleet could not be captured and runs as it is: {error}",
                stacklevel=3,
            )
            self.mode = "traced"
            return None
        self._captured[key] = captured
        return captured

    def _step_in_place(self, program: Callable[[Run], Result], runs: Run, died: Tensor) -> Tensor:
        after, good, loss = program(runs)
        alive, state = died < 0, runs.state
        kept = good & alive
        died.copy_(torch.where(alive & ~good, self._step_number, died))
        before = {id(value) for value in state.values()}
        # w_{t-1} is the very tensor of w_t: it is written before that one changes.
        for name in sorted(after, key=lambda name: id(after[name]) not in before):
            torch.where(_like(kept, after[name]), after[name], state[name], out=state[name])
        return loss


class _CapturedStep:
    """A step as a CUDA graph, with tensors of its own for what changes from step to step.

    Args:
        runs: in the first step; state, hyperparameters and fixed buffers are used in place.
    """

    def __init__(self, runs: Run) -> None:
        data, flags = tree_map_only(Tensor, Tensor.clone, (runs.data, runs.flags))
        self.runs = runs._replace(data=data, flags=flags)
        self.graph = torch.cuda.CUDAGraph()
        self.loss: Tensor | None = None

    def replay(self, runs: Run) -> Tensor:
        """One step on other data."""
        places = _tensors((self.runs.data, self.runs.flags))
        for place, value in zip(places, _tensors((runs.data, runs.flags)), strict=True):
            place.copy_(value)
        self.graph.replay()
        assert self.loss is not None
        return self.loss.clone()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _shape_of(runs: Run) -> tuple[Any, ...]:
    """What one program can serve: everything but the values of tensors."""
    leaves, spec = tree_flatten((runs.data, runs.flags))
    known = ((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return (str(spec), *known)


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


@contextlib.contextmanager
def _random_numbers_refused() -> Iterator[None]:
    """What `vmap` says of random numbers means something else for a fleet."""
    try:
        yield
    except RuntimeError as error:
        if "randomness" not in str(error):
            raise
        raise Unsupported(
            "A fleet needs a model and a function without random numbers (such as dropout): a "
            "run alone could not draw the same ones."
        ) from error
