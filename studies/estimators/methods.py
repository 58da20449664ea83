"""What is compared: each method yields its fitted candidates, of which validation data choose."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression

from .tables import Part

Array = NDArray[np.float64]
TOLERANCES = (0.005, 0.01, 0.015, 0.02)


class Candidate(NamedTuple):
    """A fitted classifier.

    Attributes:
        setting: in words.
        seconds: of its fit, of one CPU: other processes do not count. None where it comes from the
            same fit as the one before.
        predict: the probability that a row is predicted positive; 0 or 1 where nothing is random.
    """

    setting: str
    seconds: float | None
    predict: Callable[[Part], Array]


Method = Callable[..., Iterator[Candidate]]
"""Of training rows, the name of the constraint and a seed; of those `ON_VALIDATION` also of `val`,
the validation rows."""
Base = Callable[[int], Any]
"""A classifier of scikit-learn from a seed."""


def timed(fit: Callable[[], Any]) -> float:
    """Seconds of CPU time."""
    with warnings.catch_warnings():
        # fairlearn 0.15 uses pandas in two ways that pandas 3.1 announces to end.
        warnings.filterwarnings("ignore", "Setting a(n item| value)")
        # A tolerance that is not kept on the rows of the fit: the figures tell.
        warnings.filterwarnings("ignore", "`ConstrainedClassifier.fit` ended")
        start = time.process_time()
        fit()
        return time.process_time() - start


def fitted(model: Any, part: Part) -> float:
    """Seconds of a fit with the groups known."""
    return timed(partial(model.fit, part.x, part.y, sensitive_features=part.group))


def predictions(model: Any) -> Callable[[Part], Array]:
    """Of a model that draws nothing."""
    return lambda part: model.predict(part.x).astype(np.float64)


# Ours.


@cache
def classifier() -> Any:
    """Our estimator, after a fit that does not count: the first in a process loads modules."""
    from fcco.integrations.sklearn import ConstrainedClassifier

    x, bits = np.arange(64.0)[:, None], np.arange(64) % 4
    ConstrainedClassifier(tolerance=1.0, max_epochs=1).fit(
        x, bits % 2, sensitive_features=bits // 2
    )
    return ConstrainedClassifier


def ours(train: Part, constraint: str, seed: int) -> Iterator[Candidate]:
    """The defaults of the estimator, at four tolerances."""
    for tolerance in TOLERANCES:
        model = classifier()(constraint, tolerance, random_state=seed)
        seconds = fitted(model, train)
        yield Candidate(f"tolerance {tolerance}", seconds, predictions(model))


# fairlearn.


def logistic(seed: int) -> Any:
    return LogisticRegression(max_iter=300)


def boosting(seed: int) -> Any:
    whole: Any = False  # stubs want text
    return HistGradientBoostingClassifier(
        max_iter=40, max_leaf_nodes=15, learning_rate=0.2, early_stopping=whole, random_state=seed
    )


def moment(constraint: str, **options: float) -> Any:
    from fairlearn.reductions import DemographicParity, EqualizedOdds

    kinds = {"demographic_parity": DemographicParity, "equalized_odds": EqualizedOdds}
    return kinds[constraint](**options)


def exponentiated_gradient(base: Base, tolerances: tuple[float, ...] = TOLERANCES) -> Method:
    """A mixture of classifiers: it predicts by one of them, drawn anew for each row.

    Its bound is on the distance of a group's rate from that of all rows. For two groups that is
    the difference of their rates times the share of the other group.
    """

    def fit(train: Part, constraint: str, seed: int) -> Iterator[Candidate]:
        from fairlearn.reductions import ExponentiatedGradient

        larger = max(train.group.mean(), 1 - train.group.mean())
        for tolerance in tolerances:
            bound = moment(constraint, difference_bound=tolerance * larger)
            model = ExponentiatedGradient(base(seed), bound)
            seconds = fitted(model, train)
            yield Candidate(f"tolerance {tolerance}", seconds, mixture(model))

    return fit


def mixture(model: Any) -> Callable[[Part], Array]:
    """The probability of a positive prediction of an `ExponentiatedGradient`."""
    weights = model.weights_.sort_index()
    pairs = [(w, model.predictors_[k]) for k, w in weights.items() if w > 0]
    return lambda part: np.sum([w * each.predict(part.x) for w, each in pairs], axis=0)


def grid_search(base: Base, size: int) -> Method:
    """A classifier for each multiplier of a grid; all of them are candidates.

    Multipliers up to 1: with the default of 2 nearly all of them go too far on these tables.
    """

    def fit(train: Part, constraint: str, seed: int) -> Iterator[Candidate]:
        from fairlearn.reductions import GridSearch

        search = GridSearch(base(seed), moment(constraint), grid_size=size, grid_limit=1.0)
        seconds = fitted(search, train)
        for place, model in enumerate(search.predictors_):
            yield Candidate(f"multiplier {place}", None if place else seconds, predictions(model))

    return fit


class Scores(ClassifierMixin, BaseEstimator):
    """A fitted classifier whose only feature is the score."""

    def fit(self, x: NDArray[Any], y: NDArray[Any]) -> Scores:
        """Nothing is learned."""
        self.classes_ = np.array([0, 1])
        return self

    def predict_proba(self, x: Array) -> Array:
        """The feature, and what is left."""
        return np.column_stack([1 - x[:, 0], x[:, 0]])


def thresholds(base: Base) -> Method:
    """Thresholds for each group, which must be known to predict; some rows are decided by draw.

    They are learned on all training rows, as by default, or on a fifth of them that the base has
    not seen. There is a tolerance for demographic parity alone.
    """

    def fit(train: Part, constraint: str, seed: int) -> Iterator[Candidate]:
        from fairlearn.postprocessing import ThresholdOptimizer

        kind: Any = constraint
        order = np.random.default_rng(seed).permutation(len(train.y))
        aside, rest = (train.rows(rows) for rows in np.split(order, [len(order) // 5]))
        tolerances = TOLERANCES[1::2] if constraint == "demographic_parity" else (None,)
        for name, seen, rows in (("same", train, train), ("held-out", rest, aside)):
            model = base(seed)
            first = timed(partial(model.fit, seen.x, seen.y))
            for tolerance in tolerances:
                optimizer = ThresholdOptimizer(
                    estimator=Scores().fit(rows.x, rows.y), constraints=kind, prefit=True,
                    predict_method="predict_proba", tol=tolerance,
                )  # fmt: skip
                seconds = first + fitted(optimizer, Part(scores(model, rows), rows.y, rows.group))
                words = f"{name} rows" + ("" if tolerance is None else f", tolerance {tolerance}")
                yield Candidate(words, seconds, drawn(model, optimizer))

    return fit


def scores(model: Any, part: Part) -> Array:
    return model.predict_proba(part.x)[:, 1:].astype(np.float64)


def drawn(model: Any, optimizer: Any) -> Callable[[Part], Array]:
    """The probability of a positive prediction of a `ThresholdOptimizer`."""

    def predict(part: Part) -> Array:
        x, found = scores(model, part)[:, 0], np.empty(len(part.y))
        for group, rule in optimizer.interpolated_thresholder_.interpolation_dict.items():
            rows = part.group == group
            found[rows] = rule.p0 * rule.operation0(x[rows]) + rule.p1 * rule.operation1(x[rows])
            if "p_ignore" in rule:
                constant = rule.p_ignore * rule.prediction_constant
                found[rows] = constant + (1 - rule.p_ignore) * found[rows]
        return found

    return predict


# OxonFair.


def oxonfair(base: Base) -> Method:
    """A threshold for each group, which must be known to predict, learned on validation rows.

    Its own `equalized_odds` is the mean of two differences; the gap here is the larger one.
    """

    def fit(train: Part, constraint: str, seed: int, val: Part) -> Iterator[Candidate]:
        from oxonfair import FairPredictor, group_metrics

        kinds = {"equalized_odds": group_metrics.equalized_odds_max}
        gap = kinds.get(constraint, group_metrics.demographic_parity)
        model = base(seed)
        first = timed(partial(model.fit, train.x, train.y))

        def decided(fair: Any, part: Part) -> Array:
            return fair.predict(oxonfair_rows(part)).astype(np.float64)

        for tolerance in TOLERANCES:
            fair = FairPredictor(model, oxonfair_rows(val))
            seconds = first + timed(partial(fair.fit, group_metrics.accuracy, gap, tolerance))
            yield Candidate(f"tolerance {tolerance}", seconds, partial(decided, fair))

    return fit


def oxonfair_rows(part: Part) -> dict[str, NDArray[Any]]:
    """Rows as OxonFair takes them."""
    return {"data": part.x, "target": part.y, "groups": part.group}


OURS = "ours"
ON_VALIDATION = ("OxonFair, logistic", "OxonFair, boosting")
METHODS: dict[str, Method] = {
    OURS: ours,
    "ExponentiatedGradient, logistic": exponentiated_gradient(logistic),
    "ExponentiatedGradient, boosting": exponentiated_gradient(boosting, TOLERANCES[1::2]),
    "GridSearch, logistic": grid_search(logistic, 80),
    "GridSearch, boosting": grid_search(boosting, 20),
    "ThresholdOptimizer, logistic": thresholds(logistic),
    "ThresholdOptimizer, boosting": thresholds(boosting),
    "OxonFair, logistic": oxonfair(logistic),
    "OxonFair, boosting": oxonfair(boosting),
}
