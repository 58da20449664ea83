"""Many runs as one program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map_only

from .. import _checks
from .member import Fixed, Member, Numbers, State, stacked
from .packing import Packing
from .program import Inputs
from .reading import read_all
from .rounds import Rounds
from .run import Call, Inner, Phase, Task
from .schedules import Schedules
from .stepper import MODES, Stepper
from .updates import check_decay, unprefixed

__all__ = ["Fleet"]

_BUFFER = "buffer."  # before the names of buffers in the state


class Fleet:
    r"""R runs of one method, each with its own settings, weights and data, stepped together.

    Every run does what it would do alone, to rounding: the step is `torch.func.vmap` of the step
    of one run, which is made of the library's own rules. A run whose values are no longer finite is
    frozen where it was before that step; the others do not notice.

    Args:
        members: the runs. They must be of one kind (`fcco.fleet.groups` sorts them): the same
            method and update, with any numbers.
        inner: `inner(model, batch)` returns what the closure of the objective would: a loss, inner
            values, or both. It is called with tensors of one run.
        streams: which row of a batch each run reads; run r reads row r unless given. Runs with the
            same data order then share rows.
        device: where to train.
        mode: `"auto"`, `"eager"`, `"traced"`, and on a GPU `"graph"` or `"compiled"`.

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
        inner: Inner,
        *,
        streams: Sequence[int] | Tensor | None = None,
        device: torch.device | str | None = None,
        mode: str = "auto",
    ) -> None:
        if not members:
            raise ValueError("`Fleet(members=...)` must hold at least one run.")
        _checks.one_of("Fleet", "mode", mode, MODES)
        plans = read_all(members)
        self.kind, self.runs, self.steps = plans[0].kind, len(members), 0
        weights, held = stacked(members)
        self.packing = Packing.of({name: each[0] for name, each in weights.items()})
        first = next(iter(weights.values()))
        self.device = first.device if device is None else torch.device(device)
        self.fixed: Fixed = {name: each.to(self.device) for name, each in held.items()}
        self.streams = None if streams is None else self._streams(streams)
        self.rounds = None
        if self.kind.rounds:
            self.rounds = Rounds([plan.length for plan in plans], self.device)
        self._schedules = Schedules([plan.numbers for plan in plans], self.device)
        self.numbers: Numbers = self._schedules.at(0)
        vectors = torch.cat([each.flatten(1) for each in weights.values()], 1).to(self.device)
        own = [plan.state for plan in plans]
        self.state: State = {
            "weights": vectors,
            **({"previous": vectors.clone()} if self.kind.estimator.remembers else {}),
            **{key: torch.stack([each[key] for each in own]).to(self.device) for key in own[0]},
            **vmap(self.kind.update.start)(vectors),
        }
        if self.kind.rounds:
            self.state["settled"] = torch.ones(self.runs, dtype=torch.bool, device=self.device)
        self.died = torch.full((self.runs,), -1, device=self.device)
        self._model, self._inner = members[0].model, inner
        self._stepper: Stepper | None = None
        self.mode = mode

    @property
    def alive(self) -> Tensor:
        """Which runs are still trained; the others have left the finite numbers."""
        return self.died < 0

    def set_numbers(self, **values: float | Sequence[float] | Tensor) -> None:
        """Change settings from the next step on, such as `lr`: one number, or one per run.

        Args:
            values: by the names in `numbers`.
        """
        given = {}
        for name, value in values.items():
            if name not in self.numbers or name in self._schedules.moving:
                free = sorted(set(self.numbers) - set(self._schedules.moving))
                raise ValueError(
                    f"`Fleet.set_numbers` cannot set {name!r} (it follows a schedule, or is not "
                    f"known) but: {', '.join(free)}."
                )
            row = torch.as_tensor(value, dtype=torch.float64, device=self.device)
            given[name] = row.expand_as(self.numbers[name])  # raises when it does not fit
        for name, row in given.items():
            self.numbers[name].copy_(row)

    def step(
        self,
        batch: Any,
        other: Any = None,
        *,
        index: Tensor | None = None,
        other_index: Tensor | None = None,
    ) -> Tensor:
        """One step of every run; the losses g_0, NaN or stale for runs that are frozen.

        Args:
            batch: a tensor or any nesting of tensors; rows as `streams` says.
            other: an independent batch that carries the gradient (Alg. 2, line 5).
            index: block of each entry of a batch, for sampled blocks; rows like `batch`.
            other_index: that of `other`, where it differs.
        """
        self._schedules.move(self.numbers, self.steps)
        phase = Phase() if self.rounds is None else self.rounds.phase()
        rows = [None if each is None else self._rows(each) for each in (batch, other)]
        where = [None if each is None else self._rows(each) for each in (index, other_index)]
        inputs = Inputs(self.state, self.numbers, self.fixed, phase, *rows, *where)
        if self._stepper is None:
            self._stepper = Stepper(self._task(inputs), self.kind, self.mode, self.device)
            self.mode = self._stepper.mode
        loss = self._stepper(inputs, self.died, self.steps)
        self.state = inputs.state
        self.steps += 1
        if self.rounds is not None:
            self.rounds.advance()
        return loss

    def weights(self) -> dict[str, Tensor]:
        """The weights of all runs by parameter, (R, ...); in a double loop those between rounds."""
        vectors = self.state["weights"]
        if self.rounds is not None:
            vectors = torch.where(self.state["settled"][:, None], vectors, self.state["anchor"])
        return self.packing.unpack(vectors)

    def buffers(self) -> dict[str, Tensor]:
        """The buffers of all runs by name, and parameters that are not trained."""
        return {**self.fixed, **unprefixed(self.state, _BUFFER)}

    def map(self, function: Callable[..., Any], *rows: Any, chunk: int | None = None) -> Any:
        """`function(model, ...)` of each run, without gradient; the results are stacked.

        Args:
            function: may call the model and its parts; what it does to buffers is forgotten.
            rows: further arguments, one row per stream (or per run, without streams).
            chunk: runs at a time; all unless given.
        """
        call = Call(self._model, function)
        values = {**tree_map_only(Tensor, Tensor.clone, self.buffers()), **self.weights()}
        if self.streams is None:
            shared, own_rows, streams = None, self._rows(rows), self.died
        else:  # looked up run by run: all rows of all runs at once may not fit
            shared = tree_map_only(Tensor, lambda x: self._checked(x.to(self.device)), rows)
            own_rows, streams = None, self.streams

        def one(own: dict[str, Tensor], more: Any, stream: Tensor) -> Any:
            if shared is not None:
                more = tree_map_only(Tensor, lambda x: x.index_select(0, stream[None])[0], shared)
            return functional_call(call, {f"model.{k}": v for k, v in own.items()}, more)

        with torch.no_grad():
            dims = (0, None if own_rows is None else 0, 0)
            return vmap(one, dims, chunk_size=chunk)(values, own_rows, streams)

    def load_into(self, run: int, model: nn.Module) -> None:
        """Put the weights and buffers of a run into a model of its own.

        Args:
            run: its number.
            model: of the same shape.
        """
        values = {**self.buffers(), **self.weights()}
        model.load_state_dict({name: each[run] for name, each in values.items()}, strict=False)

    def state_dict(self) -> dict[str, Any]:
        """All that later steps depend on, but for the members themselves."""
        rounds = {} if self.rounds is None else self.rounds.state_dict()
        held = {"state": self.state, "numbers": self.numbers, "fixed": self.fixed}
        copies = {k: {n: v.clone() for n, v in part.items()} for k, part in held.items()}
        return {**copies, "steps": self.steps, "died": self.died.clone(), "rounds": rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, bit for bit; for a fleet of the same members."""
        own, given = self.state["weights"].shape, tuple(state["state"]["weights"].shape)
        if given != tuple(own):
            raise ValueError(
                f"`Fleet.load_state_dict`: the checkpoint has {given[0]} runs of {given[1]} "
                f"weights but this fleet {own[0]} of {own[1]}."
            )
        parts = {name: dict(state[name]) for name in ("state", "numbers", "fixed")}
        for key in self.state.keys() - parts["state"].keys():  # found since, in the first step
            if (name := key.removeprefix(_BUFFER)) in parts["fixed"]:
                parts["state"][key] = parts["fixed"].pop(name)
        lacking = {*self.state, *self.numbers} - {*parts["state"], *parts["numbers"]}
        if lacking or parts["numbers"].keys() != self.numbers.keys():
            raise ValueError("`Fleet.load_state_dict`: the checkpoint is that of another method.")
        for name, part in parts.items():
            held = getattr(self, name)
            places = [each.data_ptr() for each in held.values()]
            for key, value in part.items():
                if key in held and places.count(held[key].data_ptr()) == 1:
                    held[key].copy_(value)  # where a captured step looks for it
                else:  # one tensor under two names, or a buffer found in the first step
                    held[key] = value.to(self.device, copy=True)
                if key.startswith(_BUFFER):
                    self.fixed.pop(key.removeprefix(_BUFFER), None)
        self.died.copy_(state["died"])
        self.steps = int(state["steps"])
        if self.rounds is not None:
            self.rounds.load_state_dict(state["rounds"])

    def _streams(self, streams: Sequence[int] | Tensor) -> Tensor:
        found = torch.as_tensor(streams, device=self.device)
        if found.shape != (self.runs,) or bool((found < 0).any()):
            raise ValueError(
                f"`Fleet(streams=...)` must be {self.runs} row numbers, one per run, but has shape "
                f"{tuple(found.shape)}."
            )
        self._needed = int(found.max()) + 1
        return found

    def _checked(self, value: Tensor) -> Tensor:
        """A batch with the rows that `streams` names: on a GPU others would end the process."""
        if value.dim() == 0 or len(value) < self._needed:
            raise ValueError(
                f"`Fleet(streams=...)` names {self._needed} rows, but a batch has shape "
                f"{tuple(value.shape)}."
            )
        return value

    def _rows(self, values: Any) -> Any:
        """Values with one row per run."""

        def own(value: Tensor) -> Tensor:
            value = value.to(self.device)
            if self.streams is not None:
                return self._checked(value).index_select(0, self.streams)
            if value.shape[:1] != (self.runs,):
                raise ValueError(
                    f"`Fleet.step`: a batch has shape {tuple(value.shape)} but must have one row "
                    f"for each of {self.runs} runs (or give `streams` to the fleet)."
                )
            return value

        return tree_map_only(Tensor, own, values)

    def _task(self, inputs: Inputs) -> Task:
        """Find out which buffers a pass changes; they become a part of the state."""
        task = Task(self._model, self._inner, self.packing, (), self.kind.names)
        weights = self.packing.unpack(self.state["weights"][0])
        with torch.no_grad():
            own = (self.buffers(), inputs.batch)
            (held, batch), (spare, again) = (
                tree_map_only(Tensor, lambda x: x[0].clone(), own) for _ in range(2)
            )
            held = {name: held[name] for name in self.fixed}
            versions = {name: value._version for name, value in held.items()}
            task.look(weights, {**spare, **held}, batch)
        check_decay(task.without_gradient(weights, spare, again, self.kind.switches), self.numbers)
        # Batch norm writes its statistics without a new version.
        moving = [
            name
            for name, value in held.items()
            if value._version != versions[name] or not torch.equal(value, self.fixed[name][0])
        ]
        known = unprefixed(self.state, _BUFFER)
        for name in moving:
            self.state[_BUFFER + name] = self.fixed.pop(name)
        return dataclasses.replace(task, moving=tuple(dict.fromkeys([*known, *moving])))
