"""Many runs of one kind as a fleet: their data, schedule and figures."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from fcco.fleet import Fleet, Member, Unsupported, signature_of

from ...task import FleetTraining, Method, Row
from ..base import learning_rate_factor
from .config import Fairness
from .model import CellBatches, Cells, Measure, Scorer, figures, scorer
from .training import IN_PAIRS, Built, build

__all__ = ["FairnessFleet", "MethodCache"]

_BUDGET = 1 << 28, 1 << 32
"""Bytes for the figures of some runs at a time, on the CPU and on a GPU."""


class MethodCache:
    """Methods, built once each: runs that differ in their seed alone share what they build.

    Args:
        config: of the experiment.
        model: any of the right shape.
    """

    def __init__(self, config: Fairness, model: Scorer) -> None:
        self.config, self.model = config, model
        self._built: dict[str, Built] = {}
        self._kinds: dict[str, Hashable | None] = {}

    def built(self, method: Method) -> Built:
        """Optimizer and objective of a method; nobody steps them."""
        key = repr(method)
        if key not in self._built:
            count = 2 * len(self.config.thresholds)
            self._built[key] = build(self.model, method, count, self.config.tolerance)
        return self._built[key]

    def kind(self, method: Method) -> Hashable | None:
        """What runs of one fleet share; None for a method that no fleet can hold."""
        key = repr(method)
        if key not in self._kinds:
            built = self.built(method)
            try:
                signature = signature_of(Member(self.model, built.optimizer, built.objective))
                self._kinds[key] = signature, method.independent, method.method in IN_PAIRS
            except Unsupported:
                self._kinds[key] = None
        return self._kinds[key]


class FairnessFleet(FleetTraining):
    """Runs of one kind.

    Args:
        config: of the experiment.
        runs: a method and a seed each, of one kind and with as many steps in an epoch.
        parts: the data of a seed by name.
        cache: of the built methods.
        device: where to train.
    """

    def __init__(
        self,
        config: Fairness,
        runs: Sequence[tuple[Method, int]],
        parts: Callable[[int], Mapping[str, Cells]],
        cache: MethodCache,
        device: torch.device,
    ) -> None:
        self.config, self.runs, self.device = config, list(runs), device
        self.seeds = list(dict.fromkeys(seed for _, seed in runs))
        self.parts = [parts(seed) for seed in self.seeds]
        copies = 2 if runs[0][0].independent else 1
        trains = [own["train"] for own in self.parts]
        self.batches = [
            CellBatches(config, seed, train, copies)
            for seed, train in zip(self.seeds, trains, strict=True)
        ]
        self._check_steps()
        self.steps, self._rows = 0, None
        models = {s: scorer(config, s, t) for s, t in zip(self.seeds, trains, strict=True)}
        built = [cache.built(method) for method, _ in runs]
        members = [
            Member(models[seed], own.optimizer, own.objective)
            for own, (_, seed) in zip(built, runs, strict=True)
        ]
        self.model = models[self.seeds[0]]
        self.measure, self._state = Measure.of(config, trains[0]), built[0].state
        streams = [self.seeds.index(seed) for _, seed in runs]
        self.fleet = Fleet(members, self._inner, streams=streams, device=device)
        self._own = [[r for r, s in enumerate(streams) if s == k] for k in range(len(self.seeds))]
        self._rates = torch.tensor([method.lr for method, _ in runs], dtype=torch.float64)
        self._factor = float("nan")
        self._inputs = [
            {name: part.inputs.to(device) for name, part in own.items()} for own in self.parts
        ]
        self._rows_of_all = torch.cat([own["train"] for own in self._inputs])

    def _check_steps(self) -> None:
        found = {batches.steps_per_epoch for batches in self.batches}
        if len(found) > 1:
            raise ValueError(
                "`FairnessFleet(runs=...)`: their seeds split the data into parts of different "
                f"size, with {sorted(found)} steps in an epoch; a fleet needs one number."
            )

    @property
    def steps_per_epoch(self) -> int:
        """As many steps as draw the number of training samples."""
        return self.batches[0].steps_per_epoch

    @property
    def samples_per_step(self) -> int:
        """Of each run: the batch, or two."""
        return self.config.batch * self.batches[0].copies

    @property
    def died(self) -> list[int]:
        """The step at which each run was frozen, or -1."""
        return self.fleet.died.tolist()

    def _inner(self, model: Any, inputs: Tensor) -> Any:
        return self.measure.batch(model, inputs, self._state)

    def step(self) -> None:
        """One step of every run."""
        epoch, within = divmod(self.steps, self.steps_per_epoch)
        if self._rows is None or within == 0:
            self._begin(epoch)
        assert self._rows is not None
        factor = learning_rate_factor(self.config, self.steps / self.steps_per_epoch)
        if factor != self._factor:
            self._factor = factor
            self.fleet.set_hyperparameters(lr=factor * self._rates)
        first, *rest = self._rows[within]
        other = self._gathered(rest[0]) if rest and self._state is not None else None
        self.fleet.step(self._gathered(first), other)
        self.steps += 1

    def _gathered(self, rows: Tensor) -> Tensor:
        """Samples (seeds, batch, features) of rows of all seeds."""
        width = self._rows_of_all.shape[1]
        return self._rows_of_all.index_select(0, rows).view(len(self.seeds), -1, width)

    def _begin(self, epoch: int) -> None:
        """Draw an epoch for each seed, and set quantile thresholds where it begins."""
        rows, start = [], 0
        for batches in self.batches:
            rows.append(start + batches.epoch(epoch))
            start += len(batches.train)
        # Steps, batches, then the rows of all seeds in one line.
        self._rows = torch.stack(rows, 2).flatten(2).to(self.device)
        if self.config.threshold_kind == "quantile" and self.steps % self.steps_per_epoch == 0:
            weights = self.fleet.current_weights()
            for seed, runs in self._portions():
                output = self._outputs(weights, self._inputs[seed]["train"], runs)
                for name, value in self.model.level(output)._asdict().items():
                    self.fleet.buffers()[name].index_copy_(0, runs, value)

    def _portions(self) -> list[tuple[int, Tensor]]:
        """Runs of one seed at a time, as many as the memory for figures allows."""
        widest = max(part.inputs.shape[0] for own in self.parts for part in own.values())
        numbers = self._rows_of_all.shape[1] + sum(self.config.hidden) + 16
        numbers += 8 * len(self.config.thresholds)
        budget = _BUDGET[self.device.type == "cuda"]
        size = max(1, budget // (widest * numbers * self._rows_of_all.element_size()))
        return [
            (k, torch.tensor(own[start : start + size], device=self.device))
            for k, own in enumerate(self._own)
            for start in range(0, len(own), size)
        ]

    def _outputs(self, weights: Mapping[str, Tensor], inputs: Tensor, runs: Tensor) -> Tensor:
        """The network's outputs (runs, n) on samples that these runs share."""
        own = {k.removeprefix("body."): v.index_select(0, runs) for k, v in weights.items()}

        def one(values: dict[str, Tensor]) -> Tensor:
            return functional_call(self.model.body, values, (inputs,))

        with torch.no_grad():
            return vmap(one)(own)

    @torch.no_grad()
    def evaluate(self) -> list[Row]:
        """The figures of each run that are numbers, as `FairnessTraining.evaluate` has them."""
        weights = self.fleet.weights()
        thresholds = self.fleet.buffers()["thresholds"]
        rows: list[Row] = [{} for _ in self.runs]
        for seed, runs in self._portions():
            outputs = {
                name: self._outputs(weights, inputs, runs)
                for name, inputs in self._inputs[seed].items()
            }
            level = self.model.level(outputs["train"], thresholds.index_select(0, runs))
            found = figures(outputs, self.parts[seed], level, self.measure, self.config.tolerance)
            facts = {key: value for key, value in found.items() if not isinstance(value, Tensor)}
            numbers = {
                key: value.double()
                for key, value in found.items()
                if isinstance(value, Tensor) and value.dim() == 1
            }
            table = torch.stack(list(numbers.values()), 1).tolist()
            for run, line in zip(runs.tolist(), table, strict=True):
                rows[run] = dict(zip(numbers, line, strict=True)) | facts
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {"steps": self.steps, "fleet": self.fleet.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the middle."""
        self.fleet.load_state_dict(state["fleet"])
        self.steps = int(state["steps"])
        self._rows, self._factor = None, float("nan")
