"""The average loss of the worst groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import _checks
from ...group_dro import CVaRGroupDRO
from ...groups import GroupBatchSampler
from ...outer import CVaR
from .base import GroupClassifier, Groups, Network
from .training import Batches, Part, Settings, Task, losses_of

__all__ = ["WorstGroupClassifier"]


class WorstGroupTask(Task):
    """CVaR of the losses of groups."""

    name = "worst-group loss"

    def __init__(self, worst: float, names: Sequence[str]) -> None:
        self.worst, self.names = worst, names
        self.asked = f"smallest mean loss of the worst {worst:g} of the groups"
        self.pairs = torch.zeros(0, 2, dtype=torch.int64)

    def objective(self, module: nn.Module, optimizer: torch.optim.Optimizer, part: Part) -> Any:
        """The objective of the groups that have samples."""
        present = part.members.any(0)
        members = part.members[:, present]
        if members.shape[1] < 2:
            return None
        self.pairs = members.nonzero()  # a sample counts in each of its groups
        names = list(itertools.compress(self.names, present.tolist()))
        ratio = max(self.worst, 1 / len(names))  # a share of less than one group is the worst
        return CVaRGroupDRO(module, optimizer, names=names, ratio=ratio)

    def batches(self, part: Part, settings: Settings) -> Batches:
        """Memberships, so that every group comes equally often."""
        if len(self.pairs) == 0:
            return super().batches(part, settings)
        return GroupBatchSampler(
            self.pairs[:, 1].cpu(), batch_size=settings.batch_size, seed=settings.seed
        )

    def loss(self, objective: Any, module: nn.Module, part: Part, batch: Any) -> Tensor:
        """The loss of some memberships."""
        if objective is None:
            return losses_of(module(part.x[batch]), part.y[batch]).mean()
        rows, groups = self.pairs[batch].unbind(1)
        x, y = part.x.index_select(0, rows), part.y.index_select(0, rows)
        return objective(lambda: losses_of(module(x), y), groups)

    def value(self, scores: Tensor, part: Part) -> float:
        """CVaR of the groups that the part has samples of; NaN without any."""
        members = part.members[:, part.members.any(0)].double()
        if members.shape[1] == 0:
            return math.nan
        losses = losses_of(scores, part.y).double() @ members / members.sum(0)
        return float(CVaR(self.worst)(losses))

    def merit(self, training: tuple[Tensor, Part], held: tuple[Tensor, Part]) -> float:
        """Minus the value on held-out rows, or on the training part if they are in no group."""
        value = self.value(*held)
        return -(self.value(*training) if math.isnan(value) else value)


class WorstGroupClassifier(GroupClassifier):
    r"""Minimise the average loss of the worst groups.

    .. math::
        \min_w\; \mathrm{CVaR}_r\bigl(L_1(w), \dots, L_n(w)\bigr), \qquad r = \text{worst},

    by `fcco.CVaRGroupDRO`: L_i is the mean cross-entropy of group i, and CVaR the mean of the
    largest r n of them. For any number of classes and of groups.

    Args:
        worst: r, the share of groups that count; 1 for all alike.

    The others as in `ConstrainedClassifier`; `"auto"` always stands for what it does there with an
    `estimator` of yours.

    Example:
        A tenth of the samples follows a rule of its own.

        >>> import numpy as np
        >>> from fcco.integrations.sklearn import WorstGroupClassifier
        >>> random = np.random.default_rng(0)
        >>> X, rare = random.normal(size=(2000, 3)), random.random(2000) < 0.1
        >>> y = np.where(rare, X[:, 0] - X[:, 1] > 0, X[:, 0] + X[:, 1] > 0)
        >>> model = WorstGroupClassifier(worst=0.5, random_state=0)
        >>> model = model.fit(X, y, sensitive_features=rare)
        >>> worse = max(group.loss for group in model.report_.training.groups)
        >>> worse < 0.8
        True
    """

    def __init__(
        self,
        worst: float = 0.15,
        *,
        estimator: Network | None = None,
        sensitive_features: Any = None,
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
            estimator=estimator, sensitive_features=sensitive_features, max_epochs=max_epochs,
            batch_size=batch_size, learning_rate=learning_rate, weight_decay=weight_decay,
            validation_fraction=validation_fraction, patience=patience, random_state=random_state,
            device=device, verbose=verbose,
        )  # fmt: skip
        self.worst = worst

    def _multiclass(self) -> bool:
        return True

    def _check(self) -> None:
        super()._check()
        _checks.in_interval("WorstGroupClassifier", "worst", self.worst, 0.0, 1.0, open_low=True)

    def _task(self, groups: Groups) -> Task:
        return WorstGroupTask(self.worst, groups.names)
