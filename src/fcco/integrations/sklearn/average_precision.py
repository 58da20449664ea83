"""Average precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

from ... import xrisk
from ...groups import PositiveBatchSampler
from .base import Groups, Network, PlainClassifier
from .operating_point import cuts_of
from .training import Batches, Part, Settings, Shuffled, Task, adamw

__all__ = ["AveragePrecisionClassifier"]

SLOWER = 0.3
"""The learning rate after the warm start, relative to that before."""


class AveragePrecisionTask(Task):
    """Average precision after cross-entropy."""

    name = "average precision"
    asked = "largest average precision"

    def start(self, module: nn.Module, part: Part, settings: Settings) -> None:
        """Cross-entropy for as many epochs again."""
        super().start(module, part, settings)

        class Loader:
            def __iter__(self) -> Iterator[Any]:
                for rows in Shuffled(len(part.y), settings.batch_size):
                    yield part.x.index_select(0, rows), part.y.index_select(0, rows)

        faster = replace(settings, learning_rate=settings.learning_rate / SLOWER)
        xrisk.warm_start(
            module, adamw(module, faster, part.x.device), Loader(), settings.max_epochs
        )

    def objective(self, module: nn.Module, optimizer: torch.optim.Optimizer, part: Part) -> Any:
        """Minus average precision."""
        return xrisk.AveragePrecision(module, optimizer, labels=part.y)

    def batches(self, part: Part, settings: Settings) -> Batches:
        """A quarter are positives, or all that there are."""
        positives = int(part.y.sum())
        size = max(settings.batch_size, 2)
        return PositiveBatchSampler(
            part.y, size, positives=max(1, min(size // 4, positives)), seed=settings.seed
        )

    def loss(self, objective: Any, module: nn.Module, part: Part, batch: Any) -> Tensor:
        """The loss of a batch."""
        rows = torch.as_tensor(batch, device=part.y.device)
        x, y = part.x.index_select(0, rows), part.y.index_select(0, rows)
        return objective(lambda: module(x).reshape(-1), y, rows)

    def report(self, objective: Any) -> None:
        """The ranks of single positives are no report."""

    def figures(self, scores: Tensor, part: Part) -> dict[str, float]:
        """Without accuracy, as the scores have no threshold yet."""
        return {self.name: self.value(scores, part)}

    def value(self, scores: Tensor, part: Part) -> float:
        """Average precision; NaN without positives."""
        y = part.y.cpu().numpy()
        if not y.any():
            return float("nan")
        return float(average_precision_score(y, scores.reshape(-1).cpu().numpy()))

    def merit(self, training: tuple[Tensor, Part], held: tuple[Tensor, Part]) -> float:
        """Average precision on held-out rows."""
        value = self.value(*held)
        return 0.0 if np.isnan(value) else value


class AveragePrecisionClassifier(PlainClassifier):
    r"""Maximise average precision, for rare positives.

    Half of the epochs train with cross-entropy, by `fcco.xrisk.warm_start`, the others by
    `fcco.xrisk.AveragePrecision`, with 0.3 of the learning rate and batches in which a quarter are
    positives. What is trained is the order of the scores. `predict` cuts them at the threshold that
    was best for the accuracy, on the validation part if there is one.

    Args:
        max_epochs: passes over the training part, half of them with each loss and at least one.

    The others as in `WorstGroupClassifier`.

    Attributes:
        threshold_: what `decision_function` has subtracted from the network's output.

    Example:
        >>> import numpy as np
        >>> from fcco.integrations.sklearn import AveragePrecisionClassifier
        >>> random = np.random.default_rng(0)
        >>> X = random.normal(size=(2000, 3))
        >>> y = X[:, 0] * X[:, 1] > 1.5
        >>> model = AveragePrecisionClassifier(random_state=0).fit(X, y)
        >>> model.report_.training.value > 0.8
        True
    """

    def __init__(
        self,
        *,
        estimator: Network | None = None,
        max_epochs: int | str = "auto",
        batch_size: int | str = "auto",
        learning_rate: float | str = "auto",
        weight_decay: float = 0.01,
        validation_fraction: float = 0.1,
        patience: int | None = None,
        random_state: Any = None,
        device: Any = "cpu",
        verbose: bool = False,
    ) -> None:
        super().__init__(
            estimator=estimator, max_epochs=max_epochs, batch_size=batch_size,
            learning_rate=learning_rate, weight_decay=weight_decay,
            validation_fraction=validation_fraction, patience=patience, random_state=random_state,
            device=device, verbose=verbose,
        )  # fmt: skip

    def _task(self, groups: Groups) -> Task:
        return AveragePrecisionTask()

    def _settings(self, task: Task, number: int, random: np.random.RandomState) -> Settings:
        settings = super()._settings(task, number, random)
        return replace(
            settings,
            max_epochs=max(1, settings.max_epochs // 2),
            learning_rate=settings.learning_rate * SLOWER,
        )

    def _threshold(self, scores: Tensor, part: Part) -> float:
        cuts = cuts_of(scores, part.y)
        right = 2 * cuts.hits - cuts.above  # right answers more than without any positive
        return float(cuts.thresholds[right.argmax()])
