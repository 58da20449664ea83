"""What all classifiers have in common: parameters, reading the data, predictions."""

from __future__ import annotations

import abc
import copy
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from ... import _checks
from ..._watch import UsageWarning
from .groups import Groups, read_groups
from .training import Part, Settings, Task, mlp, split_rows, train

__all__ = ["TorchClassifier"]

Array = NDArray[Any]
Network = nn.Module | Callable[[int, int], nn.Module]


class TorchClassifier(ClassifierMixin, BaseEstimator):
    """Base of the classifiers: a network on scaled features, trained for a task of fcco."""

    needs_groups = True

    def __init__(
        self,
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
        self.estimator = estimator
        self.sensitive_features = sensitive_features
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = self._multiclass()
        return tags

    def _multiclass(self) -> bool:
        """Whether there may be more than two classes."""
        return False

    @abc.abstractmethod
    def _task(self, groups: Groups) -> Task:
        """What to train for."""

    def _check(self) -> None:
        """Refuse parameters that are out of range."""
        name = type(self).__name__
        _checks.integer(name, "max_epochs", self.max_epochs, 1)
        _checks.positive(name, "learning_rate", self.learning_rate)
        _checks.at_least(name, "weight_decay", self.weight_decay, 0.0)
        _checks.in_interval(
            name, "validation_fraction", self.validation_fraction, 0.0, 1.0, open_high=True
        )
        if self.patience is not None:
            _checks.integer(name, "patience", self.patience, 1)
        if self.batch_size != "auto":
            _checks.integer(name, "batch_size", self.batch_size, 1)

    def fit(self, X: Any, y: Any, sensitive_features: Any = None) -> Any:
        """Train.

        Args:
            X: features, (n, d).
            y: classes, (n,), of any type.
            sensitive_features: the group of each sample: a column of any values, or several columns
                whose combinations are the groups; a boolean table with a column for each group, or
                a list of the groups of each sample, where groups may overlap.
        """
        self._check()
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, label = np.unique(y, return_inverse=True)
        self._check_classes()
        groups = self._groups(sensitive_features, len(X))
        random = check_random_state(self.random_state)
        cells = np.column_stack([label, groups.members])
        rows, held = split_rows(cells, self.validation_fraction, random)
        self.mean_, self.scale_ = X[rows].mean(0), X[rows].std(0)
        self.scale_[self.scale_ == 0] = 1.0
        whole = self._part(X, label, groups.members)
        parts = [whole.rows(torch.as_tensor(each)) for each in (rows, held if len(held) else rows)]
        parts = [Part(*(each.to(self.device) for each in part)) for part in parts]
        cuda = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        with torch.random.fork_rng(cuda):  # the caller's stream of random numbers stays as it is
            torch.manual_seed(int(random.randint(2**31 - 1)))
            module = self._module(X.shape[1]).to(self.device)
            trained = train(module, self._task(groups), *parts, self._settings(len(rows)))
        self.module_, self.objective_, self.history_ = trained
        return self

    def _check_classes(self) -> None:
        number = len(self.classes_)
        if number < 2:
            raise ValueError(
                f"`fit(y=...)` must hold at least 2 classes but holds one class: {self.classes_[0]!r}."
            )
        if number > 2 and not self._multiclass():
            raise ValueError(
                "Only binary classification is supported. The type of the target is multiclass: "
                f"{type(self).__name__} compares rates of one class, but y has {number} classes."
            )

    def _groups(self, sensitive_features: Any, number: int) -> Groups:
        if sensitive_features is None:
            if self.needs_groups:
                warnings.warn(
                    f"`{type(self).__name__}.fit` got no `sensitive_features`: all samples are one "
                    "group, and nothing is constrained.",
                    UsageWarning,
                    stacklevel=3,
                )
            return Groups(("all",), np.ones((number, 1), dtype=bool))
        return read_groups(sensitive_features, number)

    def _part(self, X: Array, label: Array, members: Array) -> Part:
        scaled = torch.as_tensor((X - self.mean_) / self.scale_, dtype=torch.float32)
        return Part(scaled, torch.as_tensor(label), torch.as_tensor(members))

    def _module(self, features: int) -> nn.Module:
        outputs = 1 if len(self.classes_) == 2 else len(self.classes_)
        if isinstance(self.estimator, nn.Module):
            return copy.deepcopy(self.estimator)
        return (self.estimator or mlp)(features, outputs)

    def _settings(self, number: int) -> Settings:
        size = self.batch_size
        return Settings(
            max_epochs=self.max_epochs,
            batch_size=min(2048, max(128, math.ceil(number / 16))) if size == "auto" else int(size),
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            patience=self.patience,
            report=self._progress if self.verbose else lambda row: None,
        )

    def _progress(self, row: dict[str, float]) -> None:
        sys.stdout.write("  ".join(f"{name} {value:.4g}" for name, value in row.items()) + "\n")

    @torch.no_grad()
    def _scores(self, X: Any) -> Tensor:
        """The outputs of the network, on the CPU."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        scaled = torch.as_tensor((X - self.mean_) / self.scale_, dtype=torch.float32)
        return self.module_(scaled.to(self.device)).cpu()

    def decision_function(self, X: Any) -> Array:
        """The score of the second of two classes, (n,); or of each class, (n, classes)."""
        scores = self._scores(X)
        return (scores.reshape(-1) if len(self.classes_) == 2 else scores).numpy()

    def predict_proba(self, X: Any) -> Array:
        """The probability of each class, (n, classes)."""
        scores = torch.as_tensor(self.decision_function(X))
        if len(self.classes_) > 2:
            return scores.softmax(1).numpy()
        return torch.stack([(-scores).sigmoid(), scores.sigmoid()], dim=1).numpy()

    def predict(self, X: Any) -> Array:
        """The class of each sample."""
        scores = self.decision_function(X)
        return self.classes_[scores.argmax(1) if len(self.classes_) > 2 else (scores > 0) * 1]
