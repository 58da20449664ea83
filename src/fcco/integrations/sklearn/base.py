"""What all classifiers have in common: parameters, reading the data, predictions."""

from __future__ import annotations

import abc
import copy
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_array, check_random_state, check_X_y
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from ... import _checks
from ..._watch import UsageWarning
from ...tracker import NonFiniteValue
from .network import PIECES, Encoding, WideAndDeep
from .report import classifier_report
from .training import Part, Plan, Settings, Task, outputs, split_rows, train

__all__ = [
    "GroupClassifier",
    "Groups",
    "Network",
    "PlainClassifier",
    "Scored",
    "TorchClassifier",
    "distinct",
    "read_groups",
]

Array = NDArray[Any]
Network = nn.Module | Callable[[int, int], nn.Module]
Scored = dict[str, tuple[Tensor, Part]]


class Groups(NamedTuple):
    """Who belongs to which group."""

    names: tuple[str, ...]
    """One for each group."""
    members: NDArray[np.bool_]
    """(n, G): whether a sample is in a group. A row may have none or several."""


def read_groups(sensitive_features: Any, number: int) -> Groups:
    """The groups of samples.

    Args:
        sensitive_features: a column of any values; several columns, whose combinations are the
            groups; a boolean table with one column per group, or a list of the groups of each
            sample: groups that may overlap. None and NaN are values of a column like others.
        number: n, the number of samples.
    """
    listed = isinstance(sensitive_features, (list, tuple))
    if listed and _has_lists(sensitive_features):
        return _from_lists(sensitive_features, number)
    table = np.asarray(sensitive_features)
    if table.ndim == 1 and table.dtype == object and _has_lists(table):
        return _from_lists(list(table), number)
    if table.shape[:1] != (number,) or table.ndim not in (1, 2):
        raise ValueError(
            f"`fit(sensitive_features=...)` must have one row for each of the {number} samples of "
            f"X but has shape: {table.shape}."
        )
    if table.ndim == 2 and table.dtype == bool and table.shape[1] > 1:
        return Groups(_names(sensitive_features, table.shape[1]), table)
    columns = table.reshape(number, -1).T
    keys = np.array([_codes(column) for column in columns]).T
    _, first, code = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    names = distinct(", ".join(str(column[row]) for column in columns) for row in first)
    return Groups(names, code.reshape(-1, 1) == np.arange(len(names)))


def distinct(names: Iterable[str]) -> tuple[str, ...]:
    """The names, where equal ones get a number: groups and constraints are looked up by name."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return tuple(found)


_LISTS = (list, tuple, set, frozenset, np.ndarray)


def _has_lists(rows: Iterable[Any]) -> bool:
    return any(isinstance(row, _LISTS) for row in rows)


def _from_lists(rows: Sequence[Any], number: int) -> Groups:
    if len(rows) != number:
        raise ValueError(
            f"`fit(sensitive_features=...)` must list the groups of each of the {number} samples "
            f"of X but lists those of {len(rows)}."
        )
    for k, row in enumerate(rows):
        if not isinstance(row, _LISTS):
            raise ValueError(
                "`fit(sensitive_features=...)` must list the groups of each sample, [] for none, "
                f"but has for sample {k}: {row!r}."
            )
    if any(isinstance(name, (bool, np.bool_)) for row in rows for name in row):
        raise ValueError(
            "`fit(sensitive_features=...)` must list the names of groups but lists booleans. A "
            "table with a column for each group must be an array: np.array(sensitive_features)."
        )
    names = sorted({str(name) for row in rows for name in row})
    position = {name: k for k, name in enumerate(names)}
    members = np.zeros((number, len(names)), dtype=bool)
    for k, row in enumerate(rows):
        members[k, [position[str(name)] for name in row]] = True
    return Groups(tuple(names), members)


def _codes(column: Array) -> Array:
    """A number for each value of a column; objects are equal if they are written alike."""
    # NaN differs from itself, and None cannot be compared with a string: both are values here.
    values = column.astype(str) if column.dtype == object else column
    return np.unique(values, return_inverse=True)[1]


def _names(table: Any, number: int) -> tuple[str, ...]:
    """The names of a DataFrame's columns, or numbers."""
    try:
        return distinct(str(name) for name in table.columns)
    except AttributeError:
        return tuple(f"group {k}" for k in range(number))


class TorchClassifier(ClassifierMixin, BaseEstimator):
    """Base of the classifiers: a network on encoded features, trained for a task of fcco."""

    n_features_in_: int
    report_: Any

    def __init__(
        self,
        *,
        estimator: Network | None,
        max_epochs: int | str,
        batch_size: int | str,
        learning_rate: float | str,
        weight_decay: float,
        validation_fraction: float,
        patience: int | None,
        random_state: Any,
        device: Any,
        verbose: bool,
    ) -> None:
        self.estimator = estimator
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

    # What a classifier defines.

    def _multiclass(self) -> bool:
        """Whether there may be more than two classes."""
        return False

    @abc.abstractmethod
    def _task(self, groups: Groups) -> Task:
        """What to train for."""

    def _threshold(self, scores: Tensor, part: Part) -> float:
        """Where to cut the scores of two classes, from the validation part if there is one."""
        return 0.0

    def _check(self) -> None:
        """Refuse parameters that are out of range."""
        name = type(self).__name__
        for parameter in ("max_epochs", "batch_size"):
            value = getattr(self, parameter)
            if value != "auto":
                _checks.integer(name, parameter, value, 1)
        if self.learning_rate != "auto":
            _checks.positive(name, "learning_rate", self.learning_rate)
        _checks.at_least(name, "weight_decay", self.weight_decay, 0.0)
        _checks.in_interval(
            name, "validation_fraction", self.validation_fraction, 0.0, 1.0, open_high=True
        )
        try:
            torch.zeros(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(
                f"`{name}(device=...)` must be a device of this machine but is: {self.device!r} "
                f"({error})."
            ) from error
        if self.patience is not None:
            _checks.integer(name, "patience", self.patience, 1)
            if self.validation_fraction == 0:
                raise ValueError(
                    f"`{name}(patience={self.patience})` needs validation_fraction > 0: epochs are "
                    "compared on the validation part."
                )

    # Training.

    def _fit(self, X: Array, label: Array, groups: Groups, random: Any) -> Scored:
        """Train on checked features, (n, d), and numbers of classes.

        Returns:
            The scores less the threshold, and the rows, of the training and the validation part.
        """
        rows, held = split_rows(
            np.column_stack([label, groups.members]), self.validation_fraction, random
        )
        self.encoding_ = Encoding.of(X[rows], PIECES if self.estimator is None else 1)
        part, validation = (self._part(X, label, groups, each) for each in (rows, held))
        task = self._task(groups)
        unmeasured = task.unmeasured(part)
        if unmeasured:
            more = [f"and {len(unmeasured) - 10} more"] if len(unmeasured) > 10 else []
            warnings.warn(
                f"`{type(self).__name__}.fit(sensitive_features=...)`: not constrained, as the "
                f"training part has no samples for it: {', '.join(unmeasured[:10] + more)}.",
                UsageWarning,
                stacklevel=3,
            )
        settings = self._settings(task, len(rows), random)
        cuda = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        with torch.random.fork_rng(cuda):  # the caller's stream of random numbers stays as it is
            torch.manual_seed(settings.seed)
            module = self._module(X.shape[1]).to(self.device, torch.float32)  # as the features
            self._check_outputs(module, part)
            used = None if len(held) == 0 else validation
            diverged = (
                f"`{type(self).__name__}.fit` diverged: the loss or the network's output is NaN or "
                f"infinite. Lower `learning_rate`, now {settings.learning_rate:g}."
            )
            try:
                trained = train(module, task, part, used, settings)
            except NonFiniteValue as error:
                raise ValueError(diverged) from error
        self.module_, self.objective_, self.history_ = trained
        parts = {"training": part} | ({} if used is None else {"validation": used})
        scored = {name: (outputs(self.module_, each.x), each) for name, each in parts.items()}
        scores = scored["training"][0]
        if not bool(scores.isfinite().all()):
            raise ValueError(diverged)
        if self.estimator is not None and bool(((scores >= 0) & (scores <= 1)).all()):
            warnings.warn(
                f"`{type(self).__name__}(estimator=...)` returned only values between 0 and 1 for "
                "the training part: they are read as logits. Has it a Sigmoid or Softmax at its "
                "end? Leave that out.",
                UsageWarning,
                stacklevel=3,
            )
        self.threshold_ = self._threshold(*list(scored.values())[-1])
        scored = {name: (scores - self.threshold_, each) for name, (scores, each) in scored.items()}
        missed = task.missed(*scored.values())
        if missed:
            warnings.warn(
                f"`{type(self).__name__}.fit` ended after {len(self.history_)} epochs with "
                f"{missed}, on its own rows. Raise `max_epochs`.",
                ConvergenceWarning,
                stacklevel=3,
            )
        found = None if self.objective_ is None else task.report(self.objective_)
        self.report_ = classifier_report(task, groups.names, scored, found)
        return scored

    def _read_labels(self, y: Array) -> Array:
        check_classification_targets(y)
        self.classes_, label = np.unique(y, return_inverse=True)
        number = len(self.classes_)
        if number < 2:
            raise ValueError(
                "`fit(y=...)` must hold at least 2 classes but holds one class: "
                f"{self.classes_[0]!r}."
            )
        if number > 2 and not self._multiclass():
            raise ValueError(
                "Only binary classification is supported. The type of the target is multiclass: "
                f"{type(self).__name__} needs a positive and a negative class, but y has "
                f"{number} classes."
            )
        return label

    def _part(self, X: Array, label: Array, groups: Groups, rows: Array) -> Part:
        parts = (
            self.encoding_(X[rows]),
            torch.as_tensor(label[rows]),
            torch.as_tensor(groups.members[rows]),
        )
        return Part(*(each.to(self.device) for each in parts))

    def _module(self, features: int) -> nn.Module:
        outputs = 1 if len(self.classes_) == 2 else len(self.classes_)
        if self.estimator is None:
            return WideAndDeep(self.encoding_, outputs)
        module: Any = self.estimator
        made = isinstance(module, Callable) and not isinstance(module, nn.Module)
        module = module(features, outputs) if made else copy.deepcopy(module)
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"`{type(self).__name__}(estimator=...)` must be a torch.nn.Module or a function "
                "of the numbers of features and outputs that returns one, but "
                f"{'returned' if made else 'is'}: {module!r}."
            )
        return module

    def _check_outputs(self, module: nn.Module, part: Part) -> None:
        rows, number = len(part.x[:2]), len(self.classes_)
        try:
            with torch.no_grad():
                returned = module.eval()(part.x[:2])
        except RuntimeError as error:
            raise ValueError(
                f"`{type(self).__name__}(estimator=...)` failed on features of shape "
                f"{tuple(part.x[:2].shape)}: {error}."
            ) from error
        right = [(rows, number)] if number > 2 else [(rows,), (rows, 1)]
        tensor = isinstance(returned, Tensor)
        if not tensor or tuple(returned.shape) not in right:
            found = f"the shape {tuple(returned.shape)}" if tensor else f"a {type(returned)}"
            raise ValueError(
                f"`{type(self).__name__}(estimator=...)` must return "
                + (
                    "one logit for each class, "
                    if number > 2
                    else "one logit, of the second class, "
                )
                + f"but for {rows} rows and {number} classes it returned {found}."
            )

    def _settings(self, task: Task, number: int, random: np.random.RandomState) -> Settings:
        plan = task.plan if self.estimator is None else Plan()
        size = self.batch_size
        size = plan.batch_size(number) if size == "auto" else int(size)
        epochs = self.max_epochs
        rate = self.learning_rate
        return Settings(
            max_epochs=plan.epochs(number, size) if epochs == "auto" else int(epochs),
            more_epochs=2 * plan.epochs(number, size) if epochs == "auto" else 0,
            batch_size=size,
            learning_rate=plan.learning_rate if rate == "auto" else float(rate),
            weight_decay=self.weight_decay,
            patience=self.patience,
            seed=int(random.randint(2**31 - 1)),
            progress=_print_row if self.verbose else lambda row: None,
        )

    # Predictions.

    def _read(self, X: Any) -> Array:
        """Features of a table, (n, d), float64."""
        return np.asarray(validate_data(self, X, dtype=np.float64, reset=False))

    def _scores(self, X: Any) -> Tensor:
        """What the network returns, on the CPU."""
        check_is_fitted(self)
        x = self.encoding_(self._read(X)).to(self.device)
        return outputs(self.module_.to(self.device), x).cpu()  # `set_params(device=...)`

    def decision_function(self, X: Any) -> Array:
        """The score of the second of two classes, (n,); or of each class, (n, classes)."""
        scores = self._scores(X)
        if len(self.classes_) > 2:
            return scores.numpy()
        return (scores.reshape(-1) - self.threshold_).numpy()

    def predict_proba(self, X: Any) -> Array:
        """The probability of each class, (n, classes); the larger of two is that predicted.

        Under a constraint these are scores between 0 and 1 rather than frequencies.
        """
        scores = torch.as_tensor(self.decision_function(X))
        if scores.dim() == 2:
            return scores.softmax(1).numpy()
        return torch.stack([(-scores).sigmoid(), scores.sigmoid()], dim=1).numpy()

    def predict(self, X: Any) -> Array:
        """The class of each sample."""
        scores = self.decision_function(X)
        return self.classes_[scores.argmax(1) if scores.ndim == 2 else (scores > 0) * 1]


class PlainClassifier(TorchClassifier):
    """Base of the classifiers that know of no groups."""

    def fit(self, X: Any, y: Any) -> Any:
        """Train.

        Args:
            X: features, (n, d).
            y: two classes, (n,), of any type; positive is the second of `classes_`.
        """
        self._check()
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        self._fit_all(X, self._read_labels(y), check_random_state(self.random_state))
        return self

    def _fit_all(self, X: Array, label: Array, random: Any) -> Scored:
        return self._fit(X, label, Groups((), np.zeros((len(X), 0), dtype=bool)), random)


class GroupClassifier(TorchClassifier):
    """Base of the classifiers that look at groups."""

    def __init__(self, *, sensitive_features: Any, **common: Any) -> None:
        super().__init__(**common)
        self.sensitive_features = sensitive_features

    def fit(self, X: Any, y: Any, *, sensitive_features: Any = None) -> Any:
        """Train.

        Args:
            X: features, (n, d).
            y: classes, (n,), of any type.
            sensitive_features: the group of each sample: a column of any values, or several columns
                whose combinations are the groups; a boolean table with a column for each group, or
                a list of the groups of each sample, where groups may overlap and samples be in
                none. Rows are matched by position; None and NaN are values like others. Groups are
                not needed for predictions.
        """
        self._check()
        if self.sensitive_features is None:
            X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        else:
            if sensitive_features is not None:
                raise ValueError(
                    f"`{type(self).__name__}(sensitive_features={self.sensitive_features!r})` "
                    "names columns of X already: leave `fit(sensitive_features=...)` out."
                )
            validate_data(self, X, skip_check_array=True)
            places, names, table = self._places(), self._names_of_columns(), self._table(X)
            # Columns of a frame keep their types: booleans are overlapping groups here too.
            sensitive_features = X[[names[k] for k in places]] if names else table[:, places]
            X = np.delete(table, places, axis=1)
            X, y = check_X_y(X, y, dtype="float64", ensure_min_samples=2, estimator=self)
        label, groups = self._read_labels(y), self._groups(sensitive_features, len(X))
        self._fit(X, label, groups, check_random_state(self.random_state))
        return self

    def _groups(self, sensitive_features: Any, number: int) -> Groups:
        if sensitive_features is None:
            groups = Groups(("all",), np.ones((number, 1), dtype=bool))
        else:
            groups = read_groups(sensitive_features, number)
            if not groups.members.any():
                raise ValueError("`fit(sensitive_features=...)` has no sample that is in a group.")
        if len(groups.names) < 2:
            what = "has one value" if sensitive_features is not None else "was not given"
            warnings.warn(
                f"`{type(self).__name__}.fit(sensitive_features=...)` {what}: all samples are one "
                "group, there is nothing to compare, and this is plain training.",
                UsageWarning,
                stacklevel=3,
            )
        return groups

    def _names_of_columns(self) -> list[str]:
        """The names of the columns of X, none unless it is a frame."""
        return list(vars(self).get("feature_names_in_", ()))

    def _table(self, X: Any) -> Array:
        """X with all its columns, of any type."""
        every: Any = None  # no type is asked for
        return check_array(X, dtype=every, ensure_all_finite=False, estimator=self)

    def _places(self) -> list[int]:
        """The numbers of the columns of X that hold groups."""
        names = self.sensitive_features
        names = [names] if isinstance(names, (str, int, np.integer)) else list(names)
        known = self._names_of_columns()
        for name in names:
            if name not in (known if isinstance(name, str) else range(self.n_features_in_)):
                raise ValueError(
                    f"`{type(self).__name__}(sensitive_features={self.sensitive_features!r})` "
                    f"names a column that X does not have: {name!r}. X has "
                    + (f"the columns {known}." if known else f"{self.n_features_in_} columns.")
                )
        return [known.index(name) if isinstance(name, str) else int(name) for name in names]

    def _read(self, X: Any) -> Array:
        if self.sensitive_features is None:
            return super()._read(X)
        validate_data(self, X, skip_check_array=True, reset=False)
        features = np.delete(self._table(X), self._places(), axis=1)
        return check_array(features, dtype="float64", estimator=self)


def _print_row(row: dict[str, float]) -> None:
    sys.stdout.write(", ".join(f"{name} {value:.4g}" for name, value in row.items()) + "\n")
