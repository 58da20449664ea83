"""Many runs as one program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map_only

from .. import _checks
from .member import Member, read_members, stack_weights
from .numbers import stack
from .program import MODES, Program
from .run import BUFFER, Data, ModelFunction, Run, State, Unsupported
from .updates import Rounds, SwitchingUpdate

__all__ = ["Fleet"]


class Fleet:
    r"""R runs of one method, each with its own hyperparameters, weights and data, as one program.

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
        device: where to train.
        mode: `"auto"`, `"eager"`, `"traced"`, and on a GPU `"graph"` or `"compiled"`.

    Attributes:
        state: all that a step changes, by name, one row per run.
        hyperparameters: by name, one row per run.
        died: the step at which each run was frozen, or -1.
        steps: steps made.

    Example:
        Forty runs that differ in their learning rate, here of plain SGD on (w - 1)^2:

        >>> import torch, fcco
        >>> members = []
        >>> for k in range(40):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (k + 1))
        ...     members.append(fcco.fleet.Member(model, optimizer))
        >>> fleet = fcco.fleet.Fleet(
        ...     members, lambda model, x: (model(x) - 1).square().mean(), streams=[0] * 40)
        >>> for _ in range(500):
        ...     loss = fleet.step(torch.ones(1, 8, 1))
        >>> loss.shape, bool((fleet.weights()["weight"] - 1).abs().max() < 1e-3)
        (torch.Size([40]), True)
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
        self.streams, self._rows_needed = None, 0
        if streams is not None:
            self.streams = torch.as_tensor(streams, device=self.device)
            if self.streams.shape != (self.runs,) or bool((self.streams < 0).any()):
                raise ValueError(
                    f"`Fleet(streams=...)` must be {self.runs} row numbers, one per run, but has "
                    f"shape {tuple(self.streams.shape)}."
                )
            self._rows_needed = int(self.streams.max()) + 1
        self._given = [p.numbers for p in parts]
        self.hyperparameters = {n: stack(self._given, n).to(self.device) for n in signature.numbers}
        self._kinds: dict[str, bool] = {}
        for name, rows in self.hyperparameters.items():
            self._set(name, rows)
        self._scheduled = [
            name for name in signature.numbers if any(callable(run[name]) for run in self._given)
        ]
        lengths = [p.round_length for p in parts if p.round_length is not None]
        self.rounds = Rounds(lengths, self.device) if lengths else None
        shapes = {name: value.shape[1:] for name, value in weights.items()}
        known = (shapes, buffers, signature.names, signature.needs_loss)
        self._function = ModelFunction(members[0].model, function, *known)
        self.state: State = {"weights": vectors, **vmap(signature.update.start)(vectors)}
        self.state |= {BUFFER + name: value for name, value in buffers.items()}
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
        """Change hyperparameters from the next step on, such as `lr`: one number, or one per run.

        Args:
            values: by the names in `hyperparameters`; all are set or, when one cannot be, none.
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

    def _set(self, name: str, rows: Tensor) -> None:
        self.hyperparameters[name].copy_(rows)  # in place: a captured step reads it there
        if name == "smoothing":  # known on the host, so that no step waits for the device
            self._kinds = {"smooth": bool((rows > 0).any()), "hard": bool((rows == 0).any())}

    def step(
        self,
        batch: Any,
        gradient_batch: Any = None,
        *,
        index: Tensor | None = None,
        gradient_index: Tensor | None = None,
    ) -> Tensor:
        """One step of every run; returns the losses g_0, without meaning for frozen runs.

        Args:
            batch: a tensor or any nesting of tensors; rows as `streams` says.
            gradient_batch: an independent batch that carries the gradient (Alg. 2, line 5).
            index: block of each entry of a batch, for sampled blocks; rows like `batch`.
            gradient_index: that of `gradient_batch`, where it differs.
        """
        for blocks in (index, gradient_index):
            if blocks is not None and blocks.dtype == torch.bool:
                raise ValueError(
                    "`Fleet.step(index=...)` is the block of each entry, integers. For a sample in "
                    "several blocks give one value per membership, `values[sample]`."
                )
        for name in self._scheduled:
            self._set(name, stack(self._given, name, self.steps))
        begins, ends = (False, False) if self.rounds is None else self.rounds.flags()
        given = Data(batch, gradient_batch, index, gradient_index)
        data = self._rows_of_runs(given)._replace(begins=begins, ends=ends, **self._kinds)
        if self._program is None:
            self._check_decay(data)
            self._program = Program(self.signature, self.mode, self.device)
        runs = Run(self._function, self.state, self.hyperparameters, self._fixed, data)
        self.state, loss = self._program(runs, self.died, self.steps)
        self.mode = self._program.mode
        self.steps += 1
        if self.rounds is not None:
            self.rounds.advance()
        return loss

    def weights(self) -> dict[str, Tensor]:
        """The weights of all runs by parameter, (R, ...); in a double loop those between rounds."""
        vectors = self.state["weights"]
        if self.rounds is not None:
            between = self.state["between_rounds"][:, None]
            vectors = torch.where(between, vectors, self.state["anchor"])
        return self._function.unpack(vectors)

    def buffers(self) -> dict[str, Tensor]:
        """The buffers of all runs by name, and parameters that are not trained; no copies."""
        names = self._function.changing
        return {**self._fixed, **{name: self.state[BUFFER + name] for name in names}}

    def map(self, function: Callable[..., Any], *rows: Any, chunk: int | None = None) -> Any:
        """`function(model, ...)` of each run, without gradient; the results are stacked.

        Args:
            function: may call the model and its parts; what it does to buffers is forgotten.
            rows: further arguments, one row per stream (or per run, without streams).
            chunk: runs at a time; all unless given.
        """
        call = ModelFunction(self._function.model, function, {})
        values = {name: value.clone() for name, value in self.buffers().items()} | self.weights()
        # Streams are looked up run by run: the rows of all runs at once may not fit.
        checked = tree_map_only(Tensor, self._checked, rows)
        of_stream = self.streams is not None
        streams = torch.arange(self.runs) if self.streams is None else self.streams

        def one(weights: State, more: Any, stream: Tensor) -> Any:
            if of_stream:
                more = tree_map_only(Tensor, lambda x: x.index_select(0, stream[None])[0], checked)
            return functional_call(call, {f"model.{k}": v for k, v in weights.items()}, more)

        with torch.no_grad():
            given, dim = (None, None) if of_stream else (checked, 0)
            return vmap(one, (0, dim, 0), chunk_size=chunk)(values, given, streams)

    def load_into(self, run: int, model: nn.Module) -> None:
        """Put the weights and buffers of a run into a model of its own, of the same shape."""
        values = {**self.buffers(), **self.weights()}
        model.load_state_dict({name: rows[run] for name, rows in values.items()}, strict=False)

    def state_dict(self) -> dict[str, Any]:
        """All that later steps depend on, but for the members themselves."""
        return {
            "state": {name: value.clone() for name, value in self.state.items()},
            "hyperparameters": {n: value.clone() for n, value in self.hyperparameters.items()},
            "rounds": {} if self.rounds is None else self.rounds.state_dict(),
            "steps": self.steps,
            "died": self.died.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, bitwise; for a fleet of the same members."""
        saved, numbers = state["state"], state["hyperparameters"]
        here, there = self.state["weights"].shape, saved["weights"].shape
        if here != there:
            raise ValueError(
                f"`Fleet.load_state_dict`: the checkpoint has {there[0]} runs of {there[1]} "
                f"weights but this fleet {here[0]} of {here[1]}."
            )
        if self.state.keys() != saved.keys() or numbers.keys() != self.hyperparameters.keys():
            raise ValueError("`Fleet.load_state_dict`: the checkpoint is that of another method.")
        self.state = {name: value.to(self.device, copy=True) for name, value in saved.items()}
        for name, rows in numbers.items():
            self._set(name, rows)
        self.died.copy_(state["died"])
        self.steps = int(state["steps"])
        if self.rounds is not None:
            self.rounds.load_state_dict(state["rounds"])
        self._program = None  # a captured step reads the state where it was

    def _checked(self, value: Tensor) -> Tensor:
        """A batch with rows for all runs or streams: on a GPU others would end the process."""
        if self.streams is not None and (value.dim() == 0 or len(value) < self._rows_needed):
            raise ValueError(
                f"`Fleet(streams=...)` names {self._rows_needed} rows, but a batch has shape "
                f"{tuple(value.shape)}."
            )
        if self.streams is None and value.shape[:1] != (self.runs,):
            raise ValueError(
                f"`Fleet.step`: a batch has shape {tuple(value.shape)} but must have one row "
                f"for each of {self.runs} runs (or give `streams` to the fleet)."
            )
        return value.to(self.device)

    def _rows_of_runs(self, values: Any) -> Any:
        rows = tree_map_only(Tensor, self._checked, values)
        if self.streams is None:
            return rows
        streams = self.streams
        return tree_map_only(Tensor, lambda value: value.index_select(0, streams), rows)

    def _check_decay(self, data: Data) -> None:
        """Refuse to decay a parameter without a gradient, which `torch.optim` leaves alone."""
        decays = [v for name, v in self.hyperparameters.items() if name.endswith("weight_decay")]
        if not any(bool(decay.any()) for decay in decays):
            return
        rows = (self._function.unpack(self.state["weights"]), self.buffers(), data.batch)
        unused = self._function.unused_parameters(*tree_map_only(Tensor, lambda x: x[0], rows))
        # A step of SSG is for the loss or for the values, never for both.
        switches = isinstance(self.signature.update, SwitchingUpdate)
        join = set.union if switches else set.intersection
        if unused and (names := sorted(join(*unused))):
            raise Unsupported(
                "`Fleet.step`: with `weight_decay` every trained parameter must have a part in the "
                f"loss, but {names[0]} has none; leave it out of the optimizer."
            )
