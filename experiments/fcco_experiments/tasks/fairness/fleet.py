"""Many runs of one kind as a fleet: their data, schedule and figures."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from fcco.fleet import Fleet, Member

from ...task import FleetTraining, Method, Row
from ..base import learning_rate_factor
from .config import Fairness
from .model import CellBatches, Cells, Scorer
from .training import BuiltMethod, copies

_BUDGET = 1 << 28, 1 << 32
"""Bytes for the figures of some runs at a time, on the CPU and on a GPU."""


class FairnessFleet(FleetTraining):
    """Runs of one kind.

    Args:
        config: of the experiment.
        runs: a method and a seed each, of one kind and with as many steps in an epoch.
        parts: the data of a seed by name.
        built: a method with its objective; nobody steps it, so that runs may share it.
        device: where to train.
    """

    def __init__(
        self,
        config: Fairness,
        runs: Sequence[tuple[Method, int]],
        parts: Callable[[int], Mapping[str, Cells]],
        built: Callable[[Method], BuiltMethod],
        device: torch.device,
    ) -> None:
        self.config, self.device, self.steps = config, device, 0
        seeds = list(dict.fromkeys(seed for _, seed in runs))
        self.parts = [parts(seed) for seed in seeds]
        number = copies(config, runs[0][0])
        self.batches = [
            CellBatches(config, seed, data["train"], number)
            for seed, data in zip(seeds, self.parts, strict=True)
        ]
        models = [
            Scorer(config, seed, data["train"])
            for seed, data in zip(seeds, self.parts, strict=True)
        ]
        methods = [built(method) for method, _ in runs]
        streams = [seeds.index(seed) for _, seed in runs]
        members = [
            Member(models[stream], method.optimizer, method.objective)
            for method, stream in zip(methods, streams, strict=True)
        ]
        self.constrained = methods[0].objective is not None
        self.fleet = Fleet(members, methods[0].values, streams=streams, device=device)
        self.model = copy.deepcopy(models[0]).to(device)
        self.runs_of_seed = [
            [run for run, stream in enumerate(streams) if stream == k] for k in range(len(seeds))
        ]
        self._rates = torch.tensor([method.lr for method, _ in runs], dtype=torch.float64)
        self._inputs = [
            {name: part.inputs.to(device) for name, part in data.items()} for data in self.parts
        ]
        self._train = torch.cat([data["train"] for data in self._inputs])
        self._forget_epoch()

    def _forget_epoch(self) -> None:
        self._rows: Tensor | None = None
        self._factor = float("nan")

    @property
    def steps_per_epoch(self) -> int:
        return self.batches[0].steps_per_epoch

    @property
    def samples_per_step(self) -> int:
        return self.config.batch * self.batches[0].copies

    @property
    def died(self) -> list[int]:
        return self.fleet.died.tolist()

    def step(self) -> None:
        epoch, within = divmod(self.steps, self.steps_per_epoch)
        if self._rows is None or within == 0:
            self._rows = self._epoch(epoch)
        factor = learning_rate_factor(self.config, self.steps / self.steps_per_epoch)
        if factor != self._factor:
            self._factor = factor
            self.fleet.set_hyperparameters(lr=factor * self._rates)
        first, *second = self._rows[within]
        other = self._gathered(*second) if second and self.constrained else None
        self.fleet.step(self._gathered(first), other)
        self.steps += 1

    def _epoch(self, epoch: int) -> Tensor:
        """Rows of an epoch: steps, copies, then the batches of all seeds in one line."""
        rows, start = [], 0
        for batches in self.batches:
            rows.append(start + batches.epoch(epoch))
            start += len(batches.train)
        return torch.stack(rows, 2).flatten(2).to(self.device)

    def _gathered(self, rows: Tensor) -> Tensor:
        """Samples (seeds, batch, features) of rows of all seeds."""
        width = self._train.shape[1]
        return self._train.index_select(0, rows).view(len(self.batches), -1, width)

    def _portions(self) -> list[tuple[int, Tensor]]:
        """Runs of one seed at a time, as many as the memory for figures allows."""
        widest = max(len(part) for data in self.parts for part in data.values())
        numbers = self._train.shape[1] + sum(self.config.hidden) + 16
        numbers += 8 * len(self.config.thresholds)
        budget = _BUDGET[self.device.type == "cuda"]
        size = max(1, budget // (widest * numbers * self._train.element_size()))
        return [
            (seed, torch.tensor(runs[start : start + size], device=self.device))
            for seed, runs in enumerate(self.runs_of_seed)
            for start in range(0, len(runs), size)
        ]

    @torch.no_grad()
    def evaluate(self) -> list[Row]:
        """The figures of each run that are numbers, as `FairnessTraining.evaluate` has them."""
        weights = {k.removeprefix("body."): v for k, v in self.fleet.weights().items()}
        rows: list[Row] = [{} for _ in self._rates]
        for seed, runs in self._portions():
            chosen = {name: value.index_select(0, runs) for name, value in weights.items()}
            outputs = {
                name: vmap(lambda values, x=x: functional_call(self.model.body, values, (x,)))(
                    chosen
                )
                for name, x in self._inputs[seed].items()
            }
            figures = self.model.figures(outputs, self.parts[seed])
            facts = {key: value for key, value in figures.items() if not isinstance(value, Tensor)}
            numbers = {
                key: value.double()
                for key, value in figures.items()
                if isinstance(value, Tensor) and value.dim() == 1
            }
            table = torch.stack(list(numbers.values()), 1).tolist()
            for run, line in zip(runs.tolist(), table, strict=True):
                rows[run] = dict(zip(numbers, line, strict=True)) | facts
        return rows

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "fleet": self.fleet.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.fleet.load_state_dict(state["fleet"])
        self.steps = int(state["steps"])
        self._forget_epoch()
