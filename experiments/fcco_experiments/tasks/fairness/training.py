"""One run: batches, steps, figures, state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...task import Method, Row, Training
from .cells import Cells
from .config import Fairness
from .figures import everything
from .methods import build
from .rates import Measure
from .score import Scorer, network

__all__ = ["FairnessTraining", "drawn", "factor", "measure_of", "scorer", "steps_of"]


def scorer(config: Fairness, seed: int, train: Cells) -> Scorer:
    """The model of a seed before its first step: it depends on no method."""
    torch.manual_seed(seed)
    body = network(train.inputs.shape[1], config.hidden)
    quantiles = config.threshold_kind == "quantile"
    normalised = config.score == "normalised"
    model = Scorer(body, train.prior, normalised, config.thresholds, quantiles)
    if quantiles:  # so that the first evaluation has thresholds, not shares
        model.calibrate(train.inputs)
    return model


def measure_of(config: Fairness, train: Cells) -> Measure:
    """From scores to the loss and the rates."""
    return Measure(train.prior, config.temperature, config.pair_temperature, config.objective)


def steps_of(config: Fairness, batches: int, train: Cells) -> int:
    """As many steps as draw the number of training samples."""
    return max(1, math.ceil(len(train) / (config.batch * batches)))


def drawn(config: Fairness, seed: int, epoch: int, batches: int, train: Cells) -> Tensor:
    """Rows of an epoch, (steps, batches, batch); they depend on the seed and the epoch alone."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    steps = steps_of(config, batches, train)
    rows = train.draw(steps * batches, config.batch // 4, generator)
    return rows.view(steps, batches, -1)


def factor(config: Fairness, epoch: int) -> float:
    """What the learning rate is multiplied with in an epoch."""
    return config.decay ** sum(epoch / config.epochs >= share for share in config.decay_at)


class FairnessTraining(Training):
    """A method on a data set from a seed.

    Args:
        config: of the experiment.
        method: and its settings.
        seed: of the first weights and of the batches.
        parts: the data by name: train, validation (where there is one), test.
    """

    def __init__(
        self, config: Fairness, method: Method, seed: int, parts: Mapping[str, Cells]
    ) -> None:
        self.config, self.method, self.seed, self.parts = config, method, seed, dict(parts)
        self.train = parts["train"]
        self.model = scorer(config, seed, self.train)
        self.measure = measure_of(config, self.train)
        self.count = 2 * len(config.thresholds)
        self.built = build(self.model, method, self.count, config.tolerance)
        self.steps = 0
        self._rows: Tensor | None = None

    @property
    def batches(self) -> int:
        """Batches of a step."""
        return 2 if self.method.independent else 1

    @property
    def samples_per_step(self) -> int:
        """The batch, or two."""
        return self.config.batch * self.batches

    @property
    def steps_per_epoch(self) -> int:
        """As many steps as draw the number of training samples."""
        return steps_of(self.config, self.batches, self.train)

    @property
    def total_steps(self) -> int:
        """Of all epochs."""
        return self.config.epochs * self.steps_per_epoch

    def step(self) -> None:
        """One batch, or two."""
        epoch, within = divmod(self.steps, self.steps_per_epoch)
        if self._rows is None or within == 0:
            self._begin(epoch)
        assert self._rows is not None
        rows = self._rows[within]
        first = self.train.inputs[rows[0]]
        optimizer = self.built.optimizer
        if self.built.objective is None:
            loss = self.measure.loss_of(self.model, self.model(first).view(4, -1))
        elif len(rows) == 1:
            loss = self.built.objective(lambda: self._values(first))
        else:
            second = self.train.inputs[rows[1]]
            loss = self.built.objective(
                lambda: self._values(first), gradient=lambda: self._values(second)
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        self.steps += 1

    def _values(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.measure.look(self.model, inputs, self.built.state)

    def _begin(self, epoch: int) -> None:
        """Draw an epoch and set what is the same in all of its steps."""
        self._rows = drawn(self.config, self.seed, epoch, self.batches, self.train)
        self.built.set_rate(factor(self.config, epoch) * self.method.lr)
        if self.config.threshold_kind == "quantile" and self.steps % self.steps_per_epoch == 0:
            self.model.calibrate(self.train.inputs)

    def evaluate(self) -> Row:
        """AUC, violations and true gaps on every part of the data; it changes nothing.

        In the middle of a round of a double loop the weights of its start are evaluated.
        """
        with self.built.at_anchor():
            row = self._evaluated()
            if 4 * self.steps % self.total_steps == 0 and self.built.objective is not None:
                from .certificate import condition  # at the start and where a quarter ends

                row.update(condition(self))
        return row

    @torch.no_grad()
    def _evaluated(self) -> Row:
        outputs = {name: self.model.body(part.inputs) for name, part in self.parts.items()}
        level = self.model.level(outputs["train"])
        row: Row = {
            key: value.tolist() if isinstance(value, Tensor) else value
            for key, value in everything(
                outputs, self.parts, level, self.measure, self.config.tolerance
            ).items()
        }
        return row | {"multipliers": self.built.multipliers(self.count).tolist()}

    def finish(self) -> Row:
        """KKT residuals and the constraint Jacobian's smallest singular value, on full data."""
        from .certificate import certificate

        with self.built.at_anchor():
            return certificate(self)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        objective = self.built.objective
        return {
            "steps": self.steps,
            "model": self.model.state_dict(),
            "optimizer": self.built.optimizer.state_dict(),
            "objective": None if objective is None else objective.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the middle."""
        self.steps = int(state["steps"])
        self.model.load_state_dict(state["model"])
        self.built.optimizer.load_state_dict(state["optimizer"])
        if self.built.objective is not None:
            self.built.objective.load_state_dict(state["objective"])
        self._rows = None
