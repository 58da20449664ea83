"""Accuracy under limits on how much groups may differ."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from ... import _checks
from ...inputs import Measured
from ...methods import constrained
from .base import GroupClassifier, Groups, Network, distinct
from .training import STEEP, Part, Plan, Task, losses_of, predicted

__all__ = ["ConstrainedClassifier"]

LABELS: dict[str, tuple[int | None, ...]] = {
    "equalized_odds": (1, 0),
    "demographic_parity": (None,),
    "tpr": (1,),
    "fpr": (0,),
}
"""The labels whose samples are counted, each in rates of their own; None for all samples."""

CONSTRAINTS = (*LABELS, "group_loss")

MOST_GROUPS = 300
"""Rates are compared in pairs, and there are as many as the square of this."""

LEAST = 0.25
"""The share of the tolerance that training aims at, at least."""

EXCHANGE = 2.0
"""Accuracy that an epoch may have less if its gap is smaller by 1."""


class GapTask(Task):
    """Cross-entropy, while means of cells of the data differ by at most a tolerance.

    A cell is a group, or its positives or negatives.
    """

    name = "gap"
    plan = Plan(passes=4, per_epoch=16, steps=64, learning_rate=0.02)

    def __init__(self, constraint: str, tolerance: float, groups: Groups) -> None:
        self.constraint, self.tolerance, number = constraint, tolerance, len(groups.names)
        self.asked = f"{constraint} gap of at most {tolerance:g}"
        if constraint == "group_loss":
            self.asked = f"loss of every group at most {tolerance:g} above that of all samples"
            labels, pairs = [""], [(k, number) for k in range(number)]  # the last cell is all
        else:
            labels = [{1: "tpr ", 0: "fpr ", None: ""}[label] for label in LABELS[constraint]]
            pairs = list(itertools.permutations(range(number), 2))
        names = (*groups.names, "all")
        self.means = [f"{label}{name}" for label in labels for name in groups.names]
        self.names = distinct(
            f"{label}{names[i]} - {names[j]}" for label in labels for i, j in pairs
        )
        cells = [
            (block * number + i, block * number + j)
            for block in range(len(labels))
            for i, j in pairs
        ]
        self.pairs = torch.tensor(cells, dtype=torch.int64).view(-1, 2)
        self.limit = torch.full((len(cells),), tolerance)  # what training aims at
        self.trained: Tensor | None = None  # cells of the training part

    def cells(self, part: Part) -> Tensor:
        """Which samples count in which mean, (n, cells), 0 or 1."""
        members = part.members
        if self.constraint == "group_loss":
            kept = [members, torch.ones_like(members[:, :1])]
        else:
            kept = [
                members if label is None else members & (part.y == label)[:, None]
                for label in LABELS[self.constraint]
            ]
        return torch.cat(kept, dim=1).to(part.x)

    def unmeasured(self, part: Part) -> list[str]:
        """The means of cells without samples; those of one group are not constrained anyway."""
        if part.members.shape[1] < 2:
            return []
        empty = ~self.cells(part).any(0)[: len(self.means)]
        return list(itertools.compress(self.means, empty.tolist()))

    def objective(self, module: nn.Module, optimizer: torch.optim.Optimizer, part: Part) -> Any:
        """A limit for each pair of cells that has samples.

        It is the tolerance, less what two rates of new data differ by chance: one standard error,
        here that of the labels. Less than a quarter of the tolerance costs more than it gains.
        """
        self.trained = cells = self.cells(part)
        counts = cells.sum(0).double().cpu()
        filled = (counts > 0)[self.pairs].all(1)
        self.pairs, self.limit = self.pairs[filled], self.limit[filled]
        self.names = tuple(itertools.compress(self.names, filled.tolist()))
        if len(self.names) == 0 or part.members.shape[1] < 2:
            return None
        if self.constraint != "group_loss":
            share = float(part.y.double().mean())
            error = (share * (1 - share) * (1 / counts)[self.pairs].sum(1)).sqrt()
            self.limit = (self.limit - error).clip(LEAST * self.tolerance)
        limits = dict(zip(self.names, self.limit.tolist(), strict=True))
        return constrained(module, optimizer, limits)

    def loss(self, objective: Any, module: nn.Module, part: Part, batch: Any) -> Tensor:
        """Rates count predictions; their gradient is that of the mean probability."""
        x, y = part.x.index_select(0, batch), part.y.index_select(0, batch)
        if objective is None:
            return losses_of(module(x), y).mean()
        assert self.trained is not None
        cells, pairs = self.trained.index_select(0, batch), self.pairs.to(y.device)
        counts = cells.sum(0)
        there = (counts > 0)[pairs].all(1)
        index = None
        if not bool(there.all()):  # a small group is not in every batch
            index = there.nonzero().view(-1)
            pairs = pairs[index]

        def difference(values: Tensor) -> Tensor:
            means = values @ cells / counts.clip(1)  # 0 / 0 has no gradient, not even 0
            first, second = means[pairs].unbind(1)
            return first - second

        def losses_and_gaps() -> Any:
            scores = module(x)
            losses = losses_of(scores, y)
            if self.constraint == "group_loss":
                return losses, difference(losses)
            counted = predicted(scores.detach()).to(cells)
            return losses, Measured(
                difference(counted), difference(STEEP * scores.view(-1).sigmoid())
            )

        return objective(losses_and_gaps, index)

    def differences(self, *parts: tuple[Tensor, Part]) -> Tensor:
        """The difference of each pair over parts of the data together; 0 without samples."""
        sums, counts = torch.zeros(()), torch.zeros(())
        for scores, part in parts:
            cells = self.cells(part).double()
            loss = self.constraint == "group_loss"
            values = losses_of(scores, part.y) if loss else predicted(scores)
            sums, counts = sums + (values.double() @ cells).cpu(), counts + cells.sum(0).cpu()
        first, second = (sums / counts)[self.pairs].unbind(1)
        return (first - second).nan_to_num(0.0)

    @staticmethod
    def largest(differences: Tensor) -> float:
        """The largest of some differences, 0 without any."""
        return float(differences.max()) if len(differences) else 0.0

    def value(self, scores: Tensor, part: Part) -> float:
        """The largest difference."""
        return self.largest(self.differences((scores, part)))

    def done(self, *parts: tuple[Tensor, Part]) -> bool:
        """Whether the tolerance is kept over all rows."""
        return self.largest(self.differences(*parts)) <= self.tolerance

    def missed(self, *parts: tuple[Tensor, Part]) -> str:
        """The largest difference over all rows where it is more than twice the tolerance."""
        largest = self.largest(self.differences(*parts))
        if self.trained is None or largest <= 2 * self.tolerance:
            return ""
        return f"a gap of {largest:.3g} with tolerance={self.tolerance:g}"

    def merit(self, training: tuple[Tensor, Part], held: tuple[Tensor, Part]) -> float:
        """Accuracy on held-out rows, less what the gap over all rows is too large by.

        Rates of a small group are too rough on the held-out rows alone.
        """
        scores, part = held
        accuracy = float((predicted(scores) == part.y).float().mean())
        excess = self.largest(self.differences(training, held) - self.limit)
        return accuracy - EXCHANGE * max(excess, 0.0)


class ConstrainedClassifier(GroupClassifier):
    r"""Minimise the loss while rates or losses of groups differ by at most a tolerance.

    .. math::
        \min_w\; \mathbb E\,\ell(w; x, y) \qquad\text{subject to}\qquad
        r_a(w) - r_b(w) \le \text{tolerance} \quad\text{for all groups } a, b,

    by `fcco.constrained`, where r_a is

    | `constraint` | r_a |
    |---|---|
    | `"demographic_parity"` | share of group a that is predicted positive |
    | `"tpr"` | the same among its positives, the true-positive rate |
    | `"fpr"` | the same among its negatives, the false-positive rate |
    | `"equalized_odds"` | both rates, each with the tolerance |
    | `"group_loss"` | mean cross-entropy of group a, with that of all samples as r_b |

    Positive is the second of the two `classes_`; `"group_loss"` is for any number of classes.
    Rates count predictions (`fcco.Measured`): the constraint is on what `predict` returns.
    Groups are needed for training alone. Rates of few samples are uncertain: training aims at the
    tolerance less one standard error, but at least a quarter of it, so that the tolerance also
    holds on new data as far as the number of samples allows.

    Args:
        constraint: see above.
        tolerance: the largest difference.
        estimator: a network, or a function of the numbers of features and outputs that makes one.
            It gets scaled features and returns a logit, or one for each of more than two classes.
            None: the sum of a linear function of the features and their piecewise linear encoding
            (up to 8 pieces each), and of a network with two hidden layers of 16 units; the linear
            function is fitted first.
        sensitive_features: columns of X that hold the groups, by name or number, instead of
            `fit(sensitive_features=...)`. They are not features then.
        max_epochs: passes over the training part. `"auto"`: 4, or as many as make 64 steps; up to
            three times as many while the tolerance is not kept. With an `estimator` of yours 8, or
            300 steps, as it is not fitted first.
        batch_size: rows in a step. `"auto"`: a sixteenth of them, between 128 and 2,048; a
            sixty-fourth with an `estimator` of yours.
        learning_rate: the largest of the schedule of AdamW: it rises over the first tenth of the
            steps and then falls to 0.3 of that.
            `"auto"`: 0.02; 0.005 with an `estimator` of yours.
        weight_decay: of AdamW.
        validation_fraction: share of the rows that are not trained on, the same of every group and
            label. The epoch that is best on them is kept; with 0 the last.
        patience: end training after so many epochs without a better one; None: do not.
        random_state: a seed, a `numpy.random.RandomState`, or None.
        device: where to train and predict, such as "cuda".
        verbose: print the figures of each epoch.

    Attributes:
        classes_: the classes.
        n_features_in_: the number of columns of X.
        module_: the network.
        encoding_: what turns a table into its input.
        objective_: the objective of the training; None where nothing was constrained.
        history_: the figures of each epoch.
        report_: a `ClassifierReport`.

    Example:
        >>> import numpy as np
        >>> from fcco.integrations.sklearn import ConstrainedClassifier
        >>> random = np.random.default_rng(0)
        >>> group = random.choice(["a", "b"], 2000)
        >>> X = random.normal(size=(2000, 3)) + (group == "a")[:, None]
        >>> y = X[:, 0] + random.normal(size=2000) > 0.5
        >>> model = ConstrainedClassifier("demographic_parity", random_state=0)
        >>> chosen = model.fit(X, y, sensitive_features=group).predict(X)
        >>> bool(abs(chosen[group == "a"].mean() - chosen[group == "b"].mean()) < 0.03)
        True
    """

    def __init__(
        self,
        constraint: str = "equalized_odds",
        tolerance: float = 0.02,
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
        self.constraint = constraint
        self.tolerance = tolerance

    def _multiclass(self) -> bool:
        return self.constraint == "group_loss"

    def _check(self) -> None:
        super()._check()
        _checks.one_of("ConstrainedClassifier", "constraint", self.constraint, CONSTRAINTS)
        _checks.in_interval(
            "ConstrainedClassifier", "tolerance", self.tolerance, 0.0, math.inf, open_high=True
        )

    def _task(self, groups: Groups) -> Task:
        if self.constraint != "group_loss" and len(groups.names) > MOST_GROUPS:
            raise ValueError(
                f"`fit(sensitive_features=...)` has {len(groups.names)} groups, more than "
                f"{MOST_GROUPS}: their rates are compared in pairs. Put its values into classes."
            )
        return GapTask(self.constraint, self.tolerance, groups)
