"""The classifiers: parameters, reading the data, predictions."""

from __future__ import annotations

import abc
import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_array, check_random_state, check_X_y
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data
from torch import Tensor, nn

from ... import _checks
from ..._watch import warn
from ...groups.holdout import HoldOut, split_rows
from ...tracker import NonFiniteValue
from .._shared import report_of
from .goals import AveragePrecision, ClassifierReport, Gap, WorstGroup, figures_of
from .table import PIECES, Array, Encoding, Groups, Part, read_groups
from .training import Fit, Goal, Plan, Settings, WideAndDeep, judged, outputs, train


# scikit-learn reads the parameters of an estimator from the signature of its constructor, which a
# dataclass writes from the fields of all its bases.
@dataclass(eq=False, repr=False, kw_only=True)
class TorchClassifier(ClassifierMixin, BaseEstimator):
    """Base of the classifiers: a network on encoded features, trained for a goal."""

    estimator: nn.Module | Callable[[int, int], nn.Module] | None = None
    max_epochs: int | str = "auto"
    batch_size: int | str = "auto"
    learning_rate: float | str = "auto"
    weight_decay: float = 0.01
    validation_fraction: float = 0.1
    random_state: Any = None
    device: Any = "cpu"

    _multiclass = False  # whether there may be more than two classes
    holdout = 0.0  # no parameter, where nothing is measured of groups

    @abc.abstractmethod
    def _goal(self, groups: Groups) -> Goal: ...

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = self._multiclass
        return tags

    def _check(self) -> None:
        """Refuse parameters that are out of range."""
        name = type(self).__name__
        for parameter, value in (("max_epochs", self.max_epochs), ("batch_size", self.batch_size)):
            if value != "auto":
                _checks.integer(name, parameter, value, 1)
        if self.learning_rate != "auto":
            _checks.positive(name, "learning_rate", self.learning_rate)
        _checks.at_least(name, "weight_decay", self.weight_decay, 0.0)
        share = self.validation_fraction
        _checks.in_interval(name, "validation_fraction", share, 0.0, 1.0, open_high=True)
        _checks.in_interval(name, "holdout", self.holdout, 0.0, 1.0, open_high=True)

    # Training.

    def _fit(self, X: Array, y: Array, groups: Groups) -> Any:
        """Train on checked data."""
        name, random = type(self).__name__, check_random_state(self.random_state)
        goal, label = self._goal(groups), self._read_labels(y)
        cells = np.column_stack([label, groups.members])
        rows, held = split_rows(cells, self.validation_fraction, random)
        self.encoding_ = Encoding.of(X[rows], PIECES if self.estimator is None else 1)
        whole = self._part(X, label, groups, rows)
        aside, parts = self._hold_out(goal, whole, random), {"training": whole}
        if aside is not None:
            parts = {"training": whole.of(aside.rest), "holdout": whole.of(aside.apart)}
        if len(held):
            parts["validation"] = self._part(X, label, groups, held)
        settings = self._settings(goal, len(parts["training"].y), random)
        diverged = (
            f"`{name}.fit` diverged: the loss or the network's output is NaN or infinite. Lower "
            f"`learning_rate`, now {settings.learning_rate:g}."
        )
        cuda = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        with torch.random.fork_rng(cuda):  # the caller's stream of random numbers stays as it is
            torch.manual_seed(settings.seed)
            module = self._module(parts["training"].x[:2], X.shape[1])
            fit = Fit(module, whole, aside, settings)
            try:
                self.objective_, self.history_ = train(goal, fit, parts)
            except NonFiniteValue as error:
                raise ValueError(diverged) from error
        self.module_ = module
        scores = {each: outputs(module, rows.x) for each, rows in parts.items()}
        if not bool(scores["training"].isfinite().all()):
            raise ValueError(diverged)
        low, high = scores["training"].aminmax()
        if self.estimator is not None and low >= 0 and high <= 1:
            warn(
                f"`{name}(estimator=...)` returned only values between 0 and 1 for the training "
                "part: they are read as logits. Leave out a Sigmoid or Softmax at its end."
            )
        last = list(parts)[-1]
        self.threshold_ = goal.threshold(scores[last], parts[last])
        scored = {each: (scores[each] - self.threshold_, rows) for each, rows in parts.items()}
        gap = goal.gap(*judged(scored))
        if gap > 2 * goal.tolerance:
            warnings.warn(
                f"`{name}.fit` ended after {len(self.history_)} epochs with a gap of {gap:.3g} "
                f"with tolerance={goal.tolerance:g}, on its own rows. Raise `max_epochs`.",
                ConvergenceWarning,
                stacklevel=3,
            )
        found = {each: figures_of(each, goal, groups, *scored[each]) for each in scored}
        trained = report_of(self.objective_)
        self.report_ = ClassifierReport(goal.asked, goal.name, trained, **found)
        return self

    def _hold_out(self, goal: Goal, part: Part, random: np.random.RandomState) -> HoldOut | None:
        """The rows of a part whose values are measured, and that carry no gradient."""
        members = goal.members(part)
        if self.holdout == 0 or part.members.shape[1] < 2:
            return None
        alone = (members.sum(0) == 1).nonzero().flatten().tolist()
        if alone:
            raise ValueError(
                f"`{type(self).__name__}(holdout={self.holdout:g})` needs two rows of each group, "
                f"to learn from and to measure, but {goal.means[alone[0]]} has one."
            )
        return HoldOut(members, self.holdout, int(random.randint(2**31 - 1)))

    def _read_labels(self, y: Array) -> Array:
        check_classification_targets(y)
        self.classes_, label = np.unique(y, return_inverse=True)
        number = len(self.classes_)
        if number < 2:
            raise ValueError(f"`fit(y=...)` must hold 2 classes but holds one: {self.classes_}.")
        if number > 2 and not self._multiclass:
            raise ValueError(  # scikit-learn asks for the first words
                "Only binary classification is supported. The type of the target is multiclass: "
                f"`{type(self).__name__}.fit(y=...)` must hold 2 classes but holds {number}."
            )
        return label

    def _part(self, X: Array, label: Array, groups: Groups, rows: Array) -> Part:
        y, members = torch.as_tensor(label[rows]), torch.as_tensor(groups.members[rows])
        return Part(*(each.to(self.device) for each in (self.encoding_(X[rows]), y, members)))

    def _module(self, x: Tensor, features: int) -> nn.Module:
        """The network, tried on a few rows."""
        classes = len(self.classes_)
        number = 1 if classes == 2 else classes
        if self.estimator is None:
            return WideAndDeep(self.encoding_, number).to(self.device, torch.float32)
        if isinstance(self.estimator, nn.Module):
            module = copy.deepcopy(self.estimator)
        else:
            module = self.estimator(features, number)
        module.to(self.device, torch.float32)  # as the features
        with torch.no_grad():
            found = tuple(module.eval()(x).shape)
        if found != (len(x), number) and (classes > 2 or found != (len(x),)):
            wanted = "one logit, of the second class" if classes == 2 else "a logit for each class"
            raise ValueError(
                f"`{type(self).__name__}(estimator=...)` must return {wanted}, but for {len(x)} "
                f"rows and {classes} classes it returned the shape {found}."
            )
        return module

    def _settings(self, goal: Goal, number: int, random: np.random.RandomState) -> Settings:
        plan = goal.plan if self.estimator is None else Plan()
        size, epochs, rate = self.batch_size, self.max_epochs, self.learning_rate
        size = min(max(number // plan.per_epoch, 128), 2048) if size == "auto" else int(size)
        planned = max(plan.passes, math.ceil(plan.steps / max(1, number // size)))
        first = planned if epochs == "auto" else int(epochs)
        return Settings(
            max_epochs=max(1, int(goal.epochs_share * first)),
            more_epochs=2 * planned if epochs == "auto" else 0,
            batch_size=size,
            learning_rate=float(plan.learning_rate if rate == "auto" else rate),
            weight_decay=self.weight_decay,
            seed=int(random.randint(2**31 - 1)),
        )

    # Predictions.

    def _read(self, X: Any) -> Array:
        """Features of a table, (n, d), float64."""
        return np.asarray(validate_data(self, X, dtype=np.float64, reset=False))

    def decision_function(self, X: Any) -> Array:
        """The score of the second of two classes, (n,); or of each class, (n, classes)."""
        check_is_fitted(self)
        x = self.encoding_(self._read(X)).to(self.device)
        scores = outputs(self.module_.to(self.device), x).cpu()  # `set_params(device=...)`
        return (scores if scores.dim() == 2 else scores - self.threshold_).numpy()

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


@dataclass(eq=False, repr=False, kw_only=True)
class GroupClassifier(TorchClassifier):
    """Base of the classifiers that look at groups."""

    sensitive_features: Any = None
    holdout: float = 0.0

    def fit(self, X: Any, y: Any, *, sensitive_features: Any = None) -> Any:
        """Train on features, (n, d), classes, (n,), and the groups of the samples.

        Args:
            sensitive_features: a column of any values, or several columns whose combinations are
                the groups; a boolean table with a column for each group, or a list of the groups
                of each sample, where groups may overlap and samples be in none. Rows are matched
                by position; None and NaN in a column are values like others.
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
            X, sensitive_features = self._without_groups(X, reset=True)
            X, y = check_X_y(X, y, dtype="float64", ensure_min_samples=2, estimator=self)
        return self._fit(X, y, self._groups(sensitive_features, X))

    def _groups(self, sensitive_features: Any, X: Array) -> Groups:
        given = ["all"] * len(X) if sensitive_features is None else sensitive_features
        check_consistent_length(X, given)
        groups = read_groups(given)
        if not groups.members.any():
            raise ValueError("`fit(sensitive_features=...)` has no sample that is in a group.")
        if len(groups.names) < 2:
            warn(
                f"`{type(self).__name__}.fit(sensitive_features=...)` was not given or has one "
                "value: there is nothing to compare, and this is plain training."
            )
        return groups

    def _without_groups(self, X: Any, reset: bool) -> tuple[Array, Any]:
        """X without the columns that hold the groups, and these columns."""
        validate_data(self, X, skip_check_array=True, reset=reset)
        any_type: Any = None
        table = check_array(X, dtype=any_type, ensure_all_finite=False, estimator=self)
        known: list[str] = list(vars(self).get("feature_names_in_", ()))  # of a frame
        wanted = self.sensitive_features
        wanted = [wanted] if isinstance(wanted, (str, int, np.integer)) else list(wanted)
        missing = [name for name in wanted if isinstance(name, str) and name not in known]
        if missing:
            raise ValueError(
                f"`{type(self).__name__}(sensitive_features=...)` names columns that X does not "
                f"have: {missing}. It has: {known or 'no names'}."
            )
        places = [known.index(name) if isinstance(name, str) else int(name) for name in wanted]
        # Columns of a frame keep their types: booleans are overlapping groups here too.
        groups = X[[known[k] for k in places]] if known else table[:, places]
        return np.delete(table, places, axis=1), groups

    def _read(self, X: Any) -> Array:
        if self.sensitive_features is None:
            return super()._read(X)
        return check_array(self._without_groups(X, False)[0], dtype="float64", estimator=self)


@dataclass(eq=False, repr=False)
class ConstrainedClassifier(GroupClassifier):
    r"""Minimise the loss while rates or losses of groups differ by at most a tolerance.

    .. math::
        \min_w\; \mathbb E\,\ell(w; x, y) \qquad\text{subject to}\qquad
        r_a(w) - r_b(w) \le \text{tolerance} \quad\text{for all groups } a, b,

    by `fcco.constrained`. Positive is the second of the two `classes_`. Rates count predictions
    (`fcco.Measured`): the constraint is on what `predict` returns. So that they hold on new data
    too, training aims at the tolerance minus one standard error of the rates, but at least a
    quarter of it.

    Args:
        constraint: what r_a is: the share of group a that is predicted positive,
            `"demographic_parity"`; that among its positives, `"tpr"`, or negatives, `"fpr"`; both,
            `"equalized_odds"`; or its mean cross-entropy, with that of all samples as r_b and for
            any number of classes, `"group_loss"`.
        tolerance: the largest difference.
        estimator: a network, or a function of the numbers of features and outputs that makes one.
            It gets scaled features and returns a logit, or one for each of more than two classes.
            None: a linear function of the features and of up to 8 pieces of each, fitted first,
            plus a network with two hidden layers of 16 units.
        sensitive_features: columns of X that hold the groups, by name or number, instead of
            `fit(sensitive_features=...)`. They are not features then.
        max_epochs: passes over the training part. `"auto"`: 4, or as many as make 64 steps; up to
            three times as many while the tolerance is not kept. With an `estimator` of yours 8, or
            300 steps, as it is not fitted first.
        batch_size: rows in a step. `"auto"`: a sixteenth of them, between 128 and 2,048; a
            sixty-fourth with an `estimator` of yours.
        learning_rate: the largest of the schedule of AdamW: it rises over the first tenth of the
            steps and then falls to 0.3 of that. `"auto"`: 0.02; 0.005 with an `estimator` of yours.
        weight_decay: of AdamW.
        validation_fraction: share of the rows that are not trained on, the same of every group and
            label. The epoch that is best on them is kept; with 0 the last.
        holdout: share of the other rows whose rates and losses of groups are measured, while the
            gradient comes from the rest: limits then hold on new data as they do in training, at
            the price of fewer rows to learn from. For groups of some hundred rows.
        random_state: a seed, a `numpy.random.RandomState`, or None.
        device: where to train and predict, such as "cuda".

    Attributes:
        module_: the network, whose input `encoding_` makes of a table.
        objective_: the objective of the training; None where nothing was constrained.
        history_: the figures of each epoch.
        report_: a `ClassifierReport`.
        threshold_: what `decision_function` subtracts from the output of the network.
    """

    constraint: str = "equalized_odds"
    tolerance: float = 0.02

    @property
    def _multiclass(self) -> bool:
        return self.constraint == "group_loss"

    def _goal(self, groups: Groups) -> Goal:
        return Gap(self.constraint, self.tolerance, groups)


@dataclass(eq=False, repr=False)
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
    """

    worst: float = 0.15
    _multiclass = True

    def _goal(self, groups: Groups) -> Goal:
        return WorstGroup(self.worst, groups.names)


@dataclass(eq=False, repr=False)
class AveragePrecisionClassifier(TorchClassifier):
    r"""Maximise average precision, for rare positives.

    Half of the epochs, at least one, train with cross-entropy, by `fcco.xrisk.warm_start`, as many
    by `fcco.xrisk.AveragePrecision`, with 0.3 of the learning rate and batches in which a quarter
    are positives. What is trained is the order of the scores. `predict` cuts them at the threshold
    that was best for the accuracy, on the validation part if there is one.

    The settings are those of `WorstGroupClassifier` that are not about groups.
    """

    def fit(self, X: Any, y: Any) -> Any:
        """Train on features, (n, d), and classes, (n,); positive is the second of `classes_`."""
        self._check()
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        return self._fit(X, y, Groups((), np.zeros((len(X), 0), dtype=bool)))

    def _goal(self, groups: Groups) -> Goal:
        return AveragePrecision()
