"""One run: batches, steps, figures, state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..task import Method, Row
from .cells import Cells
from .config import Fairness
from .figures import auc, gap_floor, largest_gap, share_inside
from .methods import build
from .rates import Measure, gaps
from .score import Scorer, network

__all__ = ["FairnessTraining"]


class FairnessTraining:
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
        torch.manual_seed(seed)
        body = network(self.train.inputs.shape[1], config.hidden)
        quantiles = config.threshold_kind == "quantile"
        normalised = config.score == "normalised"
        self.model = Scorer(body, self.train.prior, normalised, config.thresholds, quantiles)
        self.measure = Measure(
            self.train.prior, config.temperature, config.pair_temperature, config.objective
        )
        if quantiles:  # so that the first evaluation has thresholds, not shares
            self.model.calibrate(self.train.inputs)
        self.count = 2 * len(config.thresholds)
        self.built = build(self.model, method, self.count, config.tolerance)
        self.steps = 0
        self._rows: Tensor | None = None

    @property
    def samples_per_step(self) -> int:
        """The batch, or two."""
        return self.config.batch * (2 if self.method.independent else 1)

    @property
    def steps_per_epoch(self) -> int:
        """As many steps as draw the number of training samples."""
        return max(1, math.ceil(len(self.train) / self.samples_per_step))

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
            loss = self.measure.loss(self.model(first).view(4, -1))
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
        cells = self.model(inputs).view(4, -1)
        rates = self.measure.rates(cells, self.model.thresholds)
        return self.measure.loss(cells), self.built.state(rates)

    def _begin(self, epoch: int) -> None:
        """Draw an epoch; what is drawn depends on the seed and the epoch alone."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
        batches = 2 if self.method.independent else 1
        rows = self.train.draw(self.steps_per_epoch * batches, self.config.batch // 4, generator)
        self._rows = rows.view(self.steps_per_epoch, batches, -1)
        done = epoch / self.config.epochs
        factor = self.config.decay ** sum(done >= share for share in self.config.decay_at)
        self.built.set_rate(factor * self.method.lr)
        if self.config.threshold_kind == "quantile" and self.steps % self.steps_per_epoch == 0:
            self.model.calibrate(self.train.inputs)

    def evaluate(self) -> Row:
        """AUC, violations and true gaps on every part of the data; it changes nothing.

        In the middle of a round of a double loop the weights of its start are evaluated.
        """
        with self.built.settled():
            row = self._evaluated()
            if 4 * self.steps % self.total_steps == 0 and self.built.objective is not None:
                from .certificate import condition  # at the start and where a quarter ends

                row.update(condition(self))
        return row

    @torch.no_grad()
    def _evaluated(self) -> Row:
        self.model.eval()
        held = {name: value.clone() for name, value in self.model.named_buffers()}
        scores = self.model.calibrate(self.train.inputs)
        row: Row = {}
        for name, part in self.parts.items():
            own = scores if name == "train" else self.model(part.inputs)
            row.update(self._figures(SHORT[name], part.split(own), own))
        row["score_mean"], row["score_deviation"] = scores.mean().item(), scores.std().item()
        row["multipliers"] = self.built.multipliers(self.count).tolist()
        for name, value in self.model.named_buffers():
            value.copy_(held[name])
        self.model.train()
        return row

    def _figures(self, name: str, cells: list[Tensor], scores: Tensor) -> Row:
        tpr_gap, fpr_gap = (largest_gap(cells[y], cells[2 + y]) for y in (1, 0))
        floor = max(gap_floor(len(cells[y]), len(cells[2 + y])) for y in (1, 0))
        rates = self.measure.full_rates(cells, self.model.thresholds)
        excess = gaps(rates).abs() - self.config.tolerance
        key = "constraints" if name == "train" else f"{name}_constraints"
        return {
            f"{name}_auc": auc(torch.cat(cells[1::2]), torch.cat(cells[0::2])),
            f"{name}_violation": excess.max().item(),
            f"{name}_inside": share_inside(scores, self.model.thresholds),
            f"{name}_gap": max(tpr_gap, fpr_gap),
            f"{name}_tpr_gap": tpr_gap,
            f"{name}_fpr_gap": fpr_gap,
            f"{name}_gap_floor": floor,
            key: excess.tolist(),
        }

    def finish(self) -> Row:
        """KKT residuals and the constraint Jacobian's smallest singular value, on full data."""
        from .certificate import certificate

        with self.built.settled():
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


SHORT = {"train": "train", "validation": "val", "test": "test"}
