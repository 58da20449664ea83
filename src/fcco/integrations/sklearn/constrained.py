"""Accuracy under limits on how much groups may differ."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from ... import _checks
from ...inputs import Measured
from ...methods import constrained
from .base import Network, TorchClassifier
from .groups import Groups
from .training import Assessment, Part, Task

__all__ = ["ConstrainedClassifier"]

CONSTRAINTS = ("equalized_odds", "demographic_parity", "tpr", "fpr", "group_loss")
_LABELS = {"equalized_odds": (1, 0), "demographic_parity": (None,), "tpr": (1,), "fpr": (0,)}
"""The labels whose samples are counted, each in rates of their own; None for all samples."""


class GapTask(Task):
    """Cross-entropy, while rates of groups differ by at most a tolerance."""

    def __init__(self, constraint: str, tolerance: float, groups: Groups) -> None:
        self.constraint, self.tolerance = constraint, tolerance
        number = len(groups.names)
        if constraint == "group_loss":  # each group against all samples
            self.pairs = [(k, number) for k in range(number)]
        else:
            blocks = range(len(_LABELS[constraint]))
            pairs = list(itertools.permutations(range(number), 2))
            self.pairs = [(b * number + i, b * number + j) for b in blocks for i, j in pairs]
        self.first, self.second = torch.tensor(self.pairs, dtype=torch.int64).view(-1, 2).T

    def cells(self, part: Part) -> Tensor:
        """Which samples are counted in which rate, (n, cells)."""
        members = part.members
        if self.constraint == "group_loss":
            return torch.cat([members, torch.ones_like(members[:, :1])], dim=1)
        kept = [
            members if label is None else members & (part.y == label)[:, None]
            for label in _LABELS[self.constraint]
        ]
        return torch.cat(kept, dim=1)

    def objective(self, module: nn.Module, optimizer: torch.optim.Optimizer, part: Part) -> Any:
        """Limits on the differences of all pairs."""
        if not self.pairs:
            return None
        return constrained(module, optimizer, len(self.pairs), tolerance=self.tolerance)

    def loss(self, objective: Any, module: nn.Module, batch: Part, rows: Tensor) -> Tensor:
        """The loss of a batch."""
        if objective is None:
            return self._losses(module(batch.x), batch.y).mean()
        cells = self.cells(batch).to(batch.x)
        counts = cells.sum(0)
        first, second = self.first.to(batch.y.device), self.second.to(batch.y.device)
        index = ((counts[first] > 0) & (counts[second] > 0)).nonzero().view(-1)
        first, second = first[index], second[index]

        def losses_and_gaps() -> Any:
            scores = module(batch.x)
            losses = self._losses(scores, batch.y)
            if self.constraint == "group_loss":
                means = losses @ cells / counts
                return losses, means[first] - means[second]
            scores = scores.reshape(-1)
            rates = scores.sigmoid() @ cells / counts
            hard = (scores.detach() > 0).to(cells) @ cells / counts
            return losses, Measured(hard[first] - hard[second], rates[first] - rates[second])

        return objective(losses_and_gaps, index)

    @staticmethod
    def _losses(scores: Tensor, y: Tensor) -> Tensor:
        if scores.dim() == 1 or scores.shape[1] == 1:
            scores = scores.reshape(-1)
            return binary_cross_entropy_with_logits(scores, y.to(scores), reduction="none")
        return cross_entropy(scores, y, reduction="none")

    def assess(self, scores: Tensor, part: Part) -> Assessment:
        """The gap above the tolerance, and the accuracy."""
        binary = scores.dim() == 1 or scores.shape[1] == 1
        predicted = (scores.reshape(-1) > 0).long() if binary else scores.argmax(1)
        merit = float((predicted == part.y).float().mean())
        if not self.pairs:
            return Assessment(0.0, merit)
        cells = self.cells(part).to(part.x)
        values = self._losses(scores, part.y) if self.constraint == "group_loss" else predicted
        means = values.to(cells) @ cells / cells.sum(0)
        first, second = self.first.to(part.y.device), self.second.to(part.y.device)
        gaps = (means[first] - means[second]).nan_to_num(0.0)
        return Assessment(float(gaps.max()) - self.tolerance, merit)


class ConstrainedClassifier(TorchClassifier):
    """Minimise the loss while rates or losses of groups differ by at most a tolerance.

    | `constraint` | what may differ by at most `tolerance` |
    |---|---|
    | `"demographic_parity"` | the share of samples that are predicted positive, between any groups |
    | `"tpr"` | the true-positive rates |
    | `"fpr"` | the false-positive rates |
    | `"equalized_odds"` | both |
    | `"group_loss"` | the cross-entropy of a group above that of all samples |

    Args:
        constraint: see above.
        tolerance: the largest difference.
        estimator: a network, or a function of the numbers of features and outputs that makes one;
            None: two hidden layers of 64 units. It returns a logit for two classes, one for each
            class for more.
        sensitive_features: columns of X, by name or number, that hold the groups.
        max_epochs: passes over the training part.
        batch_size: rows in a step.
        learning_rate: of AdamW.
        weight_decay: of AdamW.
        validation_fraction: share of the rows that choose the iterate.
        patience: epochs without progress on the validation part before training ends.
        random_state: seed or `numpy.random.RandomState`.
        device: where to train.
        verbose: print a line for each epoch.
    """

    def __init__(
        self,
        constraint: str = "equalized_odds",
        tolerance: float = 0.02,
        *,
        estimator: Network | None = None,
        sensitive_features: Any = None,
        max_epochs: int = 20,
        batch_size: int | str = "auto",
        learning_rate: float = 0.005,
        weight_decay: float = 0.001,
        validation_fraction: float = 0.1,
        patience: int | None = None,
        random_state: Any = None,
        device: str = "cpu",
        verbose: bool = False,
    ) -> None:
        super().__init__(
            estimator=estimator, sensitive_features=sensitive_features, max_epochs=max_epochs,
            batch_size=batch_size, learning_rate=learning_rate, weight_decay=weight_decay,
            validation_fraction=validation_fraction, patience=patience, random_state=random_state,
            device=device, verbose=verbose,
        )  # fmt: skip
        self.constraint = constraint
        self.tolerance = tolerance

    def _multiclass(self) -> bool:
        return self.constraint == "group_loss"

    def _check(self) -> None:
        super()._check()
        _checks.one_of("ConstrainedClassifier", "constraint", self.constraint, CONSTRAINTS)
        _checks.at_least("ConstrainedClassifier", "tolerance", self.tolerance, 0.0)

    def _task(self, groups: Groups) -> Task:
        return GapTask(self.constraint, self.tolerance, groups)
