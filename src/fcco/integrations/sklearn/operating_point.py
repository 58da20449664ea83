"""An operating point: one rate as good as possible while another keeps a limit, with a bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import beta
from torch import Tensor, nn

from ... import _checks
from ...inputs import Measured
from ...methods import constrained
from .base import Groups, Network, PlainClassifier, Scored
from .report import ClassifierReport
from .training import STEEP, Part, Task, losses_of, outputs, predicted, split_rows

__all__ = [
    "SIDES",
    "Cuts",
    "OperatingPointClassifier",
    "OperatingPointReport",
    "Proportion",
    "binomial_bound",
    "cuts_of",
    "proportion",
]

Array = NDArray[Any]

GOALS = {"precision": "recall", "recall": "precision", "fpr": "recall"}
"""What is made as large as possible under each constraint."""

SIDES = {"precision": "lower", "recall": "lower", "fpr": "upper"}
"""From which side each rate is bounded: from where it could be worse."""


def binomial_bound(successes: Any, trials: Any, confidence: float, side: str = "lower") -> Any:
    r"""The exact one-sided bound of Clopper and Pearson for a probability p.

    .. math::
        P(\text{Bin}(n, \text{lower}) \ge k) = 1 - \text{confidence}

    With k successes in n trials p is at least this with the given confidence, whatever p is.
    `side="upper"` is the bound from above.

    Args:
        successes: k, a number or an array.
        trials: n.
        confidence: such as 0.95.
        side: "lower" or "upper".

    Example:
        >>> from fcco.integrations.sklearn import binomial_bound
        >>> round(float(binomial_bound(95, 100, 0.95)), 3)
        0.898
    """
    _checks.one_of("binomial_bound", "side", side, ("lower", "upper"))
    k, n = np.asarray(successes, dtype=float), np.asarray(trials, dtype=float)
    if side == "upper":
        return 1.0 - binomial_bound(n - k, n, confidence)
    with np.errstate(invalid="ignore"):
        bound = beta.ppf(1 - confidence, k, n - k + 1)
    return np.where(k > 0, bound, 0.0)


@dataclass(frozen=True)
class Proportion:
    """A rate that was counted, and what it says of the true one.

    Attributes:
        name: of the rate.
        successes: k.
        trials: n.
        measured: k / n, NaN without trials.
        bound: the true rate is at least this, or for `fpr` at most, with the confidence asked for.
    """

    name: str
    successes: int
    trials: int
    measured: float
    bound: float


def proportion(name: str, chosen: Tensor, y: Tensor, confidence: float) -> Proportion:
    """A rate of predictions.

    Args:
        name: "precision", "recall" or "fpr".
        chosen: the class that each sample is predicted to have, 0 or 1.
        y: the class that it has.
        confidence: of the bound.
    """
    chosen, y = chosen.bool(), y.to(chosen.device).bool()
    among = {"precision": chosen, "recall": y, "fpr": ~y}[name]
    hits = among & (y if name == "precision" else chosen)
    k, n = int(hits.sum()), int(among.sum())
    bound = float(binomial_bound(k, n, confidence, SIDES[name]))
    return Proportion(name, k, n, k / n if n else math.nan, bound)


class Cuts:
    """All thresholds of some scores: what lies above one is predicted positive.

    Attributes:
        thresholds: from high to low, the first above all scores and the last below.
        above: how many samples lie above each.
        hits: how many of these are positive.
    """

    def __init__(self, scores: Array, y: Array) -> None:
        order = np.argsort(-scores, kind="stable")
        values = scores[order].astype(np.float64)
        apart = np.concatenate([[True], values[1:] < values[:-1], [True]])  # none between equals
        ends = np.concatenate([values[:1] + 1, values, values[-1:] - 1])
        self.thresholds = (ends[:-1] / 2 + ends[1:] / 2)[apart]  # half-way between two
        self.above = np.arange(len(values) + 1)[apart]
        self.hits = np.append(0, np.cumsum(y[order]))[apart]
        self.positives, self.negatives = int(y.sum()), int((~y).sum())

    def counts(self, rate: str) -> tuple[Array, Array]:
        """Successes and trials of a rate at each threshold."""
        if rate == "precision":
            return self.hits, self.above
        if rate == "recall":
            return self.hits, np.full_like(self.hits, self.positives)
        return self.above - self.hits, np.full_like(self.hits, self.negatives)

    def rates(self, rate: str) -> Array:
        """The rate at each threshold; 0 without trials."""
        k, n = self.counts(rate)
        return k / np.maximum(n, 1)

    def bounds(self, rate: str, confidence: float) -> Array:
        """Its bound at each threshold."""
        return binomial_bound(*self.counts(rate), confidence, SIDES[rate])


def cuts_of(scores: Tensor, y: Tensor) -> Cuts:
    """The thresholds of what a network returned."""
    return Cuts(scores.reshape(-1).cpu().numpy(), y.bool().cpu().numpy())


def keeps(constraint: str, values: Any, limit: float) -> Any:
    """Whether rates, or their bounds, keep a limit."""
    return values >= limit if SIDES[constraint] == "lower" else values <= limit


def best_threshold(cuts: Cuts, constraint: str, limit: float, confidence: float) -> float:
    """The threshold with the best goal among those that keep the limit.

    With the confidence if any does, else as measured, else the one that comes closest.
    """
    goal, measured = cuts.rates(GOALS[constraint]), cuts.rates(constraint)
    for values in (cuts.bounds(constraint, confidence), measured):
        kept = keeps(constraint, values, limit)
        if kept.any():
            return float(cuts.thresholds[np.where(kept, goal, -1.0).argmax()])
    closest = measured if SIDES[constraint] == "lower" else -measured
    return float(cuts.thresholds[closest.argmax()])


@dataclass(frozen=True)
class OperatingPointReport:
    """What was asked, what was measured, and what holds.

    Attributes:
        constraint: "precision", "recall" or "fpr".
        limit: what it was asked to be, at least or, for "fpr", at most.
        confidence: of the bounds.
        threshold: where the network's scores are cut.
        chosen: constraint and goal on the rows that the threshold was set on.
        tested: the same on rows that were used for nothing else.
        holds: whether the bound of the tested constraint keeps the limit.
        needed: trials with which the measured rate would show it; None where it would not.
        training: the report of the training, at the threshold.
    """

    constraint: str
    limit: float
    confidence: float
    threshold: float
    chosen: tuple[Proportion, Proportion]
    tested: tuple[Proportion, Proportion]
    holds: bool
    needed: int | None
    training: ClassifierReport

    def __str__(self) -> str:
        words = "at most" if self.constraint == "fpr" else "at least"
        first, second = self.tested
        percent = f"with {100 * self.confidence:g} % confidence"
        lines = [
            f"asked: {self.constraint} {words} {self.limit:g}, {second.name} as large as possible",
            f"threshold set where {_counted(self.chosen)}",
            f"measured on other samples: {_counted(self.tested)}",
            f"{percent} each: {first.name} {words} {first.bound:.4f}, "
            f"{second.name} at least {second.bound:.4f}",
        ]
        if self.holds:
            return "\n".join([*lines, f"what was asked holds {percent}"])
        trials = {"precision": "predicted positives", "recall": "positives", "fpr": "negatives"}
        what = trials[self.constraint]
        if first.trials == 0:
            why = f"there are no {what} to measure"
        elif self.needed is None:
            why = f"the measured {first.name} is not better than the limit"
        else:
            why = f"{first.trials} {what} are too few, about {self.needed} would be needed at the"
            why += f" measured {first.name}"
        return "\n".join([*lines, f"what was asked is not shown: {why}"])


def _counted(rates: tuple[Proportion, ...]) -> str:
    return ", ".join(
        f"{rate.name} {rate.measured:.4f} ({rate.successes} of {rate.trials})" for rate in rates
    )


def _needed(rate: Proportion, limit: float, confidence: float) -> int | None:
    """How many trials would show the limit at the measured rate."""
    upper = rate.name == "fpr"
    share, limit = (1 - rate.measured, 1 - limit) if upper else (rate.measured, limit)
    trials = 2.0 ** np.arange(1, 41, 0.1)
    shown = binomial_bound(share * trials, trials, confidence) >= limit
    return int(np.ceil(trials[shown.argmax()])) if shown.any() else None


class OperatingPointTask(Task):
    """Cross-entropy while a rate keeps a limit at the threshold 0."""

    def __init__(self, constraint: str, limit: float) -> None:
        self.constraint, self.limit, self.name = constraint, limit, constraint
        self.asked = f"{constraint} at {'most' if constraint == 'fpr' else 'least'} {limit:g}"

    def objective(self, module: nn.Module, optimizer: torch.optim.Optimizer, part: Part) -> Any:
        """One limit."""
        return constrained(module, optimizer, {f"limit of {self.constraint}": 0.0})

    def excess(self, chosen: Tensor, y: Tensor) -> Tensor:
        """A number that is at most 0 where the limit is kept; linear in the predictions."""
        if self.constraint == "precision":  # p E[h] <= E[h y]
            return (chosen * (self.limit - y)).mean()
        if self.constraint == "recall":
            return self.limit - (chosen * y).sum() / y.sum()
        return (chosen * (1 - y)).sum() / (1 - y).sum() - self.limit

    def loss(self, objective: Any, module: nn.Module, part: Part, batch: Any) -> Tensor:
        """The rate counts predictions; its gradient is that of the mean probability."""
        x, y = part.x.index_select(0, batch), part.y.index_select(0, batch)
        positive = y.to(x)
        if not 0 < float(positive.mean()) < 1:  # a rate of nothing
            return losses_of(module(x), y).mean()

        def losses_and_excess() -> Any:
            scores = module(x).reshape(-1)
            counted = self.excess((scores.detach() > 0).to(x), positive)
            smooth = STEEP * self.excess(scores.sigmoid(), positive)
            return losses_of(scores, y), Measured(counted.view(1), smooth.view(1))

        return objective(losses_and_excess)

    def value(self, scores: Tensor, part: Part) -> float:
        """The rate."""
        return proportion(self.constraint, predicted(scores), part.y, 0.5).measured

    def merit(self, training: tuple[Tensor, Part], held: tuple[Tensor, Part]) -> float:
        """The best goal of any threshold whose rate keeps the limit on held-out rows."""
        scores, part = held
        cuts = cuts_of(scores, part.y)
        kept = keeps(self.constraint, cuts.rates(self.constraint), self.limit)
        return float(cuts.rates(GOALS[self.constraint])[kept].max(initial=0.0))


class OperatingPointClassifier(PlainClassifier):
    r"""Make one rate as large as possible while another keeps a limit, and say what holds.

    | `constraint` | limit | as large as possible |
    |---|---|---|
    | `"precision"` | precision at least `limit` | recall |
    | `"recall"` | recall at least `limit` | precision |
    | `"fpr"` | false-positive rate at most `limit` | recall, the true-positive rate |

    The network is trained with cross-entropy under the constraint, by `fcco.constrained`; precision
    p is linear in the predictions h, :math:`p\,\mathbb E\,h \le \mathbb E\,h y`. Then the threshold
    is set on the validation part: the best that keeps the limit with the given confidence or, with
    too few samples for that, as measured. At last both rates are counted on the test part, which
    was used for nothing else, and `report_` states their exact bounds (see `binomial_bound`).

    Args:
        constraint: see above.
        limit: of the constraint.
        confidence: of the bounds.
        test_fraction: share of the rows that are kept for the bounds.
        validation_fraction: share of the other rows on which epoch and threshold are chosen.

    The others as in `ConstrainedClassifier`; `"auto"` always stands for what it does there with an
    `estimator` of yours.

    Attributes:
        threshold_: what `decision_function` has subtracted from the network's output.
        report_: an `OperatingPointReport`.

    Example:
        >>> import numpy as np
        >>> from fcco.integrations.sklearn import OperatingPointClassifier
        >>> random = np.random.default_rng(0)
        >>> X = random.normal(size=(4000, 3))
        >>> y = X[:, 0] + 0.5 * random.normal(size=4000) > 0.5
        >>> model = OperatingPointClassifier("precision", 0.9, random_state=0).fit(X, y)
        >>> precision, recall = model.report_.tested
        >>> precision.measured > 0.85 and recall.measured > 0.3
        True

    References:
        C. J. Clopper and E. S. Pearson, The use of confidence or fiducial limits illustrated in the
        case of the binomial, 1934.
    """

    def __init__(
        self,
        constraint: str = "precision",
        limit: float = 0.9,
        *,
        confidence: float = 0.95,
        test_fraction: float = 0.2,
        estimator: Network | None = None,
        max_epochs: int | str = "auto",
        batch_size: int | str = "auto",
        learning_rate: float | str = "auto",
        weight_decay: float = 0.01,
        validation_fraction: float = 0.2,
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
        self.constraint = constraint
        self.limit = limit
        self.confidence = confidence
        self.test_fraction = test_fraction

    def _check(self) -> None:
        super()._check()
        name = "OperatingPointClassifier"
        _checks.one_of(name, "constraint", self.constraint, tuple(GOALS))
        for parameter in ("limit", "confidence", "test_fraction", "validation_fraction"):
            value = getattr(self, parameter)
            _checks.in_interval(name, parameter, value, 0.0, 1.0, open_low=True, open_high=True)

    def _task(self, groups: Groups) -> Task:
        return OperatingPointTask(self.constraint, self.limit)

    def _fit_all(self, X: Array, label: Array, random: Any) -> Scored:
        rows, test = split_rows(label[:, None], self.test_fraction, random)
        if min(len(test), len(rows) * self.validation_fraction) < 1:
            raise ValueError(
                f"`OperatingPointClassifier.fit(X=...)` has {len(X)} samples, too few for a test "
                f"part of {self.test_fraction:g} of them and a validation part of "
                f"{self.validation_fraction:g} of the others."
            )
        scores, part = super()._fit_all(X[rows], label[rows], random)["validation"]
        chosen = self._rates(scores, part.y)
        new = outputs(self.module_, self.encoding_(X[test]).to(self.device)) - self.threshold_
        tested = self._rates(new, torch.as_tensor(label[test]))
        self.report_ = OperatingPointReport(
            constraint=self.constraint,
            limit=self.limit,
            confidence=self.confidence,
            threshold=self.threshold_,
            chosen=chosen,
            tested=tested,
            holds=bool(keeps(self.constraint, tested[0].bound, self.limit)),
            needed=_needed(tested[0], self.limit, self.confidence),
            training=self.report_,
        )
        return {"validation": (scores, part)}

    def _threshold(self, scores: Tensor, part: Part) -> float:
        cuts = cuts_of(scores, part.y)
        return best_threshold(cuts, self.constraint, self.limit, self.confidence)

    def _rates(self, scores: Tensor, y: Tensor) -> tuple[Proportion, Proportion]:
        """Constraint and goal of scores from which the threshold was subtracted."""
        first, second = (
            proportion(rate, predicted(scores), y, self.confidence)
            for rate in (self.constraint, GOALS[self.constraint])
        )
        return first, second
