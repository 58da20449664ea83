"""Many runs of one kind as a fleet: their data, schedule and figures."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from fcco.fleet import Fleet, Member, Unsupported, signature_of

from ...task import FleetTraining, Method, Row
from .cells import Cells
from .config import Fairness
from .figures import everything
from .methods import IN_PAIRS, Built, build
from .score import Scorer
from .training import drawn, factor, measure_of, scorer, steps_of

__all__ = ["FairnessFleet", "Settings"]

Parts = Mapping[str, Cells]
_BUDGET = 1 << 28, 1 << 32
"""Bytes for the figures of some runs at a time, on the CPU and on a GPU."""


class Settings:
    """Methods, built once each: runs that differ in their seed alone share what they build.

    Args:
        config: of the experiment.
        model: any of the right shape.
    """

    def __init__(self, config: Fairness, model: Scorer) -> None:
        self.config, self.model = config, model
        self._known: dict[str, Built] = {}
        self._kinds: dict[str, Hashable | None] = {}

    def built(self, method: Method) -> Built:
        """Optimizer and objective of a method; nobody steps them."""
        key = repr(method)
        if key not in self._known:
            count = 2 * len(self.config.thresholds)
            self._known[key] = build(self.model, method, count, self.config.tolerance)
        return self._known[key]

    def kind(self, method: Method) -> Hashable | None:
        """What runs of one fleet share; None for a method that no fleet can hold."""
        key = repr(method)
        if key not in self._kinds:
            self._kinds[key] = self._kind(method)
        return self._kinds[key]

    def _kind(self, method: Method) -> Hashable | None:
        built = self.built(method)
        try:
            signature = signature_of(Member(self.model, built.optimizer, built.objective))
        except Unsupported:
            return None
        return signature, method.independent, method.method in IN_PAIRS


class FairnessFleet(FleetTraining):
    """Runs of one kind.

    Args:
        config: of the experiment.
        runs: a method and a seed each, of one kind and with as many steps in an epoch.
        parts: the data of a seed by name.
        settings: of the methods.
        device: where to train.
    """

    def __init__(
        self,
        config: Fairness,
        runs: Sequence[tuple[Method, int]],
        parts: Callable[[int], Parts],
        settings: Settings,
        device: torch.device,
    ) -> None:
        self.config, self.runs, self.device = config, list(runs), device
        self.seeds = list(dict.fromkeys(seed for _, seed in runs))
        self.parts = [parts(seed) for seed in self.seeds]
        self.batches = 2 if runs[0][0].independent else 1
        self.steps_per_epoch = self._steps_per_epoch()
        self.steps, self._rows = 0, None
        models = {
            seed: scorer(config, seed, own["train"])
            for seed, own in zip(self.seeds, self.parts, strict=True)
        }
        built = [settings.built(method) for method, _ in runs]
        members = [
            Member(models[seed], own.optimizer, own.objective)
            for own, (_, seed) in zip(built, runs, strict=True)
        ]
        self.model = models[self.seeds[0]]
        self.measure = measure_of(config, self.parts[0]["train"])
        self.plain, self._state = built[0].objective is None, built[0].state
        streams = [self.seeds.index(seed) for _, seed in runs]
        self.fleet = Fleet(members, self._inner, streams=streams, device=device)
        self._own = [[r for r, s in enumerate(streams) if s == k] for k in range(len(self.seeds))]
        self._rates = torch.tensor([method.lr for method, _ in runs], dtype=torch.float64)
        self._inputs = [
            {name: part.inputs.to(device) for name, part in own.items()} for own in self.parts
        ]
        self._rows_of_all = torch.cat([own["train"] for own in self._inputs])

    def _steps_per_epoch(self) -> int:
        found = {steps_of(self.config, self.batches, own["train"]) for own in self.parts}
        if len(found) > 1:
            raise ValueError(
                "`FairnessFleet(runs=...)`: their seeds split the data into parts of different "
                f"size, with {sorted(found)} steps in an epoch; a fleet needs one number."
            )
        return found.pop()

    @property
    def samples_per_step(self) -> int:
        """Of each run: the batch, or two."""
        return self.config.batch * self.batches

    @property
    def died(self) -> list[int]:
        """The step at which each run was frozen, or -1."""
        return self.fleet.died.tolist()

    def _inner(self, model: Any, inputs: Tensor) -> Any:
        if self.plain:
            return self.measure.loss_of(model, model(inputs).view(4, -1))
        return self.measure.look(model, inputs, self._state)

    def step(self) -> None:
        """One step of every run."""
        epoch, within = divmod(self.steps, self.steps_per_epoch)
        if self._rows is None or within == 0:
            self._begin(epoch)
        assert self._rows is not None
        first, *rest = self._rows[within]
        other = self._gathered(rest[0]) if rest and not self.plain else None
        self.fleet.step(self._gathered(first), other)
        self.steps += 1

    def _gathered(self, rows: Tensor) -> Tensor:
        """Samples (seeds, batch, features) of rows of all seeds."""
        return self._rows_of_all.index_select(0, rows).view(len(self.seeds), -1, self._width)

    @property
    def _width(self) -> int:
        return self._rows_of_all.shape[1]

    def _begin(self, epoch: int) -> None:
        """Draw an epoch for each seed and set what is the same in all of its steps."""
        rows, start = [], 0
        for seed, own in zip(self.seeds, self.parts, strict=True):
            rows.append(start + drawn(self.config, seed, epoch, self.batches, own["train"]))
            start += len(own["train"])
        # Steps, batches, then the rows of all seeds in one line.
        self._rows = torch.stack(rows, 2).flatten(2).to(self.device)
        self.fleet.set_hyperparameters(lr=factor(self.config, epoch) * self._rates)
        if self.config.threshold_kind == "quantile" and self.steps % self.steps_per_epoch == 0:
            weights = self.fleet.current_weights()
            for own, chosen in self._portions():
                output = self._outputs(weights, self._inputs[own]["train"], chosen)
                for name, value in self.model.level(output)._asdict().items():
                    self.fleet.buffers()[name].index_copy_(0, chosen, value)

    def _portions(self) -> list[tuple[int, Tensor]]:
        """Runs of one seed at a time, as many as the memory for figures allows."""
        widest = max(part.inputs.shape[0] for own in self.parts for part in own.values())
        numbers = self._width + sum(self.config.hidden) + 8 * len(self.config.thresholds) + 16
        budget = _BUDGET[self.device.type == "cuda"]
        size = max(1, budget // (widest * numbers * self._rows_of_all.element_size()))
        return [
            (k, torch.tensor(own[start : start + size], device=self.device))
            for k, own in enumerate(self._own)
            for start in range(0, len(own), size)
        ]

    def _outputs(self, weights: Mapping[str, Tensor], inputs: Tensor, runs: Tensor) -> Tensor:
        """The network's outputs (runs, n) on samples that these runs share."""
        prefix = "body."
        own = {k.removeprefix(prefix): v.index_select(0, runs) for k, v in weights.items()}

        def one(values: dict[str, Tensor]) -> Tensor:
            return functional_call(self.model.body, values, (inputs,))

        with torch.no_grad():
            return vmap(one)(own)

    @torch.no_grad()
    def evaluate(self) -> list[Row]:
        """The figures of each run that are numbers, as `FairnessTraining.evaluate` has them."""
        weights = self.fleet.weights()
        thresholds = self.fleet.buffers()["thresholds"]
        tables: list[tuple[Tensor, Tensor]] = []
        keys: list[str] = []
        facts: dict[int, Row] = {}
        for own, chosen in self._portions():
            outputs = {
                name: self._outputs(weights, each, chosen)
                for name, each in self._inputs[own].items()
            }
            level = self.model.level(outputs["train"], thresholds.index_select(0, chosen))
            found = everything(outputs, self.parts[own], level, self.measure, self.config.tolerance)
            numbers = {k: v for k, v in found.items() if isinstance(v, Tensor) and v.dim() == 1}
            facts[own] = {k: v for k, v in found.items() if not isinstance(v, Tensor)}
            keys = list(numbers)
            tables.append((chosen, torch.stack([each.double() for each in numbers.values()], 1)))
        rows: list[Row] = [{} for _ in self.runs]
        order = torch.cat([chosen for chosen, _ in tables]).tolist()
        values = torch.cat([table for _, table in tables]).tolist()
        for run, line in zip(order, values, strict=True):
            own = facts[self.seeds.index(self.runs[run][1])]
            rows[run] = dict(zip(keys, line, strict=True)) | own
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {"steps": self.steps, "fleet": self.fleet.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the middle."""
        self.fleet.load_state_dict(state["fleet"])
        self.steps = int(state["steps"])
        self._rows = None
