"""Many runs as one program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map_only

from .. import _checks
from .._schedules import at_step
from .member import Member, read_members, stack_weights
from .program import MODES, Program
from .run import MODEL, Data, Flag, ModelFunction, Run, State


class Fleet:
    r"""Many runs of one method, each with its own settings, weights and data, as one program.

    Every run does what it would do alone, to rounding: the step is `torch.func.vmap` of the step
    of one run, which is made of the library's own functions. A run whose values are no longer
    finite is frozen as it was before that step, and the others stay bitwise the same.

    Args:
        members: the runs. They must have the same method and update, with any numbers
            (`fcco.fleet.group_members` sorts a mixed list).
        function: `function(model, batch)` returns what the closure of the objective would: a loss,
            inner values, or both. It is called with tensors of one run.
        streams: which row of a batch each run reads; run r reads row r unless given. Runs with the
            same data order then share rows.
        mode: `"auto"`, `"eager"`, `"traced"`; on a GPU also `"graph"`, `"compiled"`, see `Program`.

    Attributes:
        state: all that a step changes, by name, one row per run.
        hyperparameters: by name, in double precision, one row per run.
        died: the step at which each run was frozen, or -1.
    """

    def __init__(
        self,
        members: Sequence[Member],
        function: Callable[[Any, Any], Any],
        *,
        streams: Sequence[int] | Tensor | None = None,
        device: torch.device | str | None = None,
        mode: str = "auto",
    ) -> None:
        if not members:
            raise ValueError("`Fleet(members=...)` must hold at least one run.")
        _checks.one_of("Fleet", "mode", mode, MODES)
        parts = read_members(members)
        self.signature = signature = parts[0].signature
        self.runs, self.steps, self.mode = len(members), 0, mode
        weights, buffers, self._fixed = stack_weights(members, device)
        vectors = torch.cat([value.flatten(1) for value in weights.values()], 1)
        self.device = vectors.device
        self._shared = streams is not None  # rows of a batch are those of streams, not of runs
        given = range(self.runs) if streams is None else streams
        self.streams = torch.as_tensor(given, device=self.device)
        if self.streams.shape != (self.runs,) or bool((self.streams < 0).any()):
            raise ValueError(f"`Fleet(streams=...)` must be {self.runs} row numbers, one per run.")
        self._rows_needed = int(self.streams.max()) + 1
        self._given = [p.numbers for p in parts]
        names = self._given[0]
        self._scheduled = [n for n in names if any(callable(run[n]) for run in self._given)]
        self.hyperparameters: State = {}
        self._kinds: dict[str, bool] = {}
        for name in names:
            self._set(name, self._at_step(name))
        lengths: Any = [p.round_length for p in parts]  # numbers in all of them, or in none
        self._round_lengths = torch.tensor(lengths) if signature.rounds else None
        shapes = {name: value.shape[1:] for name, value in weights.items()}
        facts = (shapes, signature.names, signature.needs_loss)
        self._function = ModelFunction(members[0].model, function, *facts)
        self.state: State = {"weights": vectors, **vmap(signature.update.start)(vectors)}
        self.state |= {MODEL + name: value for name, value in buffers.items()}
        for name in parts[0].state:
            self.state[name] = torch.stack([p.state[name] for p in parts]).to(self.device)
        if signature.estimator.needs_previous:
            self.state["previous"] = vectors.clone()
        self.died = torch.full((self.runs,), -1, device=self.device)
        if signature.rounds:
            self.state["between_rounds"] = self.alive
        self._program: Program | None = None

    @property
    def alive(self) -> Tensor:
        """Which runs are still trained; the others have left the finite numbers."""
        return self.died < 0

    def set_hyperparameters(self, **values: float | Sequence[float] | Tensor) -> None:
        """Change some of `hyperparameters` from the next step on: one number, or one per run.

        All are set or, when one cannot be, none.
        """
        checked = {}
        for name, value in values.items():
            if name not in self.hyperparameters or name in self._scheduled:
                free = sorted(set(self.hyperparameters) - set(self._scheduled))
                raise ValueError(
                    f"`Fleet.set_hyperparameters` cannot set {name!r} (it follows a schedule, or "
                    f"is not known) but: {', '.join(free)}."
                )
            rows, tensor = torch.as_tensor(value, dtype=torch.float64), self.hyperparameters[name]
            if rows.dim() == 1:  # one per run, for all blocks
                rows = rows.view(-1, *(1 for _ in tensor.shape[1:]))
            checked[name] = rows.to(self.device).expand_as(tensor)  # raises when it does not fit
        for name, rows in checked.items():
            self._set(name, rows)

    def _at_step(self, name: str) -> Tensor:
        """A number of all runs at the present step."""
        values = [at_step(run[name], self.steps) for run in self._given]
        return torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values])

    def _set(self, name: str, rows: Tensor) -> None:
        if name in self.hyperparameters:
            self.hyperparameters[name].copy_(rows)  # in place: a captured step reads it there
        else:
            self.hyperparameters[name] = rows.to(self.device)
        if name == "smoothing":  # known on the host, so that no step waits for the device
            self._kinds = {"smooth": bool((rows > 0).any()), "hard": bool((rows == 0).any())}

    def step(
        self, batch: Any, gradient_batch: Any = None, *, index: Tensor | None = None
    ) -> Tensor:
        """One step of every run; returns the losses g_0, without meaning for frozen runs.

        Args:
            batch: a tensor or any nesting of tensors; rows as `streams` says.
            gradient_batch: an independent batch of the same blocks that carries the gradient.
            index: block of each entry of a batch, for sampled blocks; rows like `batch`.
        """
        if index is not None and index.dtype == torch.bool:
            raise ValueError(
                "`Fleet.step(index=...)` is the block of each entry; for a sample in several "
                "blocks give one value per membership, `values[sample]`."
            )
        for name in self._scheduled:
            self._set(name, self._at_step(name))
        data = Data(*self._rows_of_runs((batch, gradient_batch, index)), **self._kinds)
        if (lengths := self._round_lengths) is not None:
            begins, ends = (self._flag((self.steps + k) % lengths == 0) for k in (0, 1))
            data = data._replace(begins=begins, ends=ends)
        if self._program is None:
            self._program = Program(self.signature, self.mode, self.device)
        runs = Run(self._function, self.state, self.hyperparameters, self._fixed, data)
        self.state, loss = self._program(runs, self.died, self.steps)
        self.steps += 1
        return loss

    def _flag(self, runs: Tensor) -> Flag:
        return bool(runs[0]) if runs.all() or not runs.any() else runs.to(self.device)

    def _rows_of_runs(self, values: Any) -> Any:
        rows = tree_map_only(Tensor, self._checked, values)
        if not self._shared:
            return rows
        return tree_map_only(Tensor, lambda value: value.index_select(0, self.streams), rows)

    def _checked(self, value: Tensor) -> Tensor:
        """A batch with rows for all runs or streams: on a GPU others would end the process."""
        rows = len(value) if value.dim() else 0
        if rows < self._rows_needed or (rows > self.runs and not self._shared):
            whose = "of its streams" if self._shared else "run (or give it `streams`)"
            raise ValueError(
                f"A batch of this fleet must have {self._rows_needed} rows, one for each {whose}, "
                f"but has shape {tuple(value.shape)}."
            )
        return value.to(self.device)

    def weights(self) -> dict[str, Tensor]:
        """The weights of all runs by parameter, (R, ...); in a double loop those between rounds."""
        vectors = self.state["weights"]
        if self.signature.rounds:
            between = self.state["between_rounds"][:, None]
            vectors = torch.where(between, vectors, self.state["anchor"])
        return self._function.unpack(vectors)

    def buffers(self) -> dict[str, Tensor]:
        """The buffers of all runs by name, and parameters that are not trained; no copies."""
        own = {k.removeprefix(MODEL): v for k, v in self.state.items() if k.startswith(MODEL)}
        return {**self._fixed, **own}

    def load_into(self, run: int, model: nn.Module) -> None:
        """Put the weights and buffers of a run into a model of its own, of the same shape."""
        values = {**self.buffers(), **self.weights()}
        model.load_state_dict({name: rows[run] for name, rows in values.items()}, strict=False)

    def state_dict(self) -> dict[str, Any]:
        """All that later steps depend on, but for the members themselves."""
        return {
            "state": {name: value.clone() for name, value in self.state.items()},
            "hyperparameters": {n: value.clone() for n, value in self.hyperparameters.items()},
            "steps": self.steps,
            "died": self.died.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, bitwise; for a fleet of the same members."""
        parts = (state["state"], state["hyperparameters"])
        if _shapes(*parts) != _shapes(self.state, self.hyperparameters):
            raise ValueError("`Fleet.load_state_dict`: another method, model or number of runs.")
        self.state = {k: value.to(self.device, copy=True) for k, value in state["state"].items()}
        for name, rows in state["hyperparameters"].items():
            self._set(name, rows)
        self.died.copy_(state["died"])
        self.steps = int(state["steps"])
        self._program = None  # a captured step reads the state where it was


def _shapes(*parts: State) -> list[dict[str, torch.Size]]:
    return [{name: value.shape for name, value in part.items()} for part in parts]
