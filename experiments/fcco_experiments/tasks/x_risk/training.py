"""A run: the config, the methods (X-risks, and losses of single samples), batches, figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from sklearn.metrics import auc, average_precision_score, ndcg_score, roc_auc_score, roc_curve
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from fcco import xrisk
from fcco.groups import GroupBatchSampler

from ...data.grouped import GroupedPart, Samples
from ...task import Method, Row
from ..base import (
    PART_KEYS,
    Scheduled,
    Stepped,
    check_method,
    make_optimizer,
)
from ..network import Batches, Networked, NetworkTraining, per_sample


@dataclass(frozen=True, kw_only=True)
class XRisk(Scheduled, Networked):
    """Scores that rank well: positives above negatives, relevant rows of a query above others.

    Args:
        risk: the figure that counts, by which settings are chosen on validation data and methods
            are judged on test data: `"ap"`, average precision; `"auc"`; `"pauc"`, the AUC up to
            the false positive rate `max_fpr`; `"tpauc"`, the same above the true positive rate
            `min_tpr` alone; or, for lists, `"ndcg"` of the first `k` rows of each query.
        warm: share of the steps in which methods that minimise an X-risk minimise the
            cross-entropy instead, before anything else (the squared error, for lists).
        scale: scale features to mean 0 and deviation 1 over the training rows.
        sample_limit: about so many samples are kept, of each class and part its share; 0 keeps
            all.
    """

    risk: Literal["ap", "auc", "pauc", "tpauc", "ndcg"] = "ap"
    max_fpr: float = 0.3
    min_tpr: float = 0.5
    k: int = 0  # 0: all rows of a query
    warm: float = 0.5
    batch: int = 64
    scale: bool = True
    sample_limit: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        super().__post_init__()
        self.at_least(2, "batch")
        self.at_least(0, "k", "sample_limit")
        for name, low, high in (("max_fpr", 0, 1), ("min_tpr", 0, 1)):
            value = getattr(self, name)
            if not (low < value <= high if name == "max_fpr" else low <= value < high):
                limits = "(0, 1]" if name == "max_fpr" else "[0, 1)"
                raise ValueError(f"`{name}` must be in {limits} but is: {value}.")
        if not 0 <= self.warm < 1:
            raise ValueError(f"`warm` must be in [0, 1) but is: {self.warm}.")

    @property
    def lists(self) -> bool:
        """Whether the data are lists to rank."""
        return self.risk == "ndcg"


# The methods.

METHODS = ("ap", "pauc", "tpauc", "auc", "bce", "focal")
LISTS = ("ndcg", "listwise", "pointwise")
REFERENCES = ("bce", "focal", "pointwise")
"""Methods that minimise the mean of a loss of single samples."""
_BY_TASK = ("labels", "relevance", "query", "max_fpr", "min_tpr", "k", "names", "process_group")


def focal(scores: Tensor, label: Tensor, focus: float = 2.0) -> Tensor:
    r"""The focal loss of each sample, :math:`-(1 - p)^\gamma \log p` for the probability p of its
    class; :math:`\gamma` is `focus`.

    References:
        Lin et al. (2017), Focal loss for dense object detection.
    """
    loss = cross_entropy(scores, label, reduction="none")
    return (1 - torch.exp(-loss)) ** focus * loss


def squared(scores: Tensor, relevance: Tensor) -> Tensor:
    """The squared error of each row."""
    return (scores - relevance).square()


def build(
    model: nn.Module, method: Method, config: XRisk, label: Tensor, query: Tensor | None
) -> Stepped:
    """A method with its optimizer; losses of single samples have no objective.

    Args:
        model: what is trained.
        method: its settings; those of a risk go to its class in `fcco.xrisk`.
        config: with the limits of the partial AUCs, and k.
        label: 0 or 1, or the relevance, of each training sample.
        query: of each training sample, for lists.
    """
    word, settings = method.method, dict[str, Any](method.settings)
    _check(method, config)
    if settings.get("activation") == "none":  # configs have no null
        settings["activation"] = None
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], method)
    makers: dict[str, Callable[[], nn.Module]] = {
        "ap": lambda: xrisk.AveragePrecision(model, optimizer, label, **settings),
        "auc": lambda: xrisk.AUC(model, optimizer, label, **settings),
        "pauc": lambda: xrisk.PartialAUC(
            model, optimizer, label, max_fpr=config.max_fpr, **settings
        ),
        "tpauc": lambda: xrisk.TwoWayPartialAUC(
            model, optimizer, label, min_tpr=config.min_tpr, max_fpr=config.max_fpr, **settings
        ),
        "ndcg": lambda: xrisk.NDCG(model, optimizer, label, query, k=config.k or None, **settings),
        "listwise": lambda: xrisk.ListwiseCrossEntropy(model, optimizer, label, query, **settings),
    }
    objective = None if word in REFERENCES else makers[word]()
    return Stepped(objective, optimizer, optimizer)


def sample_loss(method: Method, config: XRisk) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of each sample of a reference; that of the first steps for the other methods."""
    if method.method == "focal":
        return lambda scores, label: focal(scores, label, **method.settings)  # type: ignore[arg-type]
    if config.lists:
        return squared
    return lambda scores, label: cross_entropy(scores, label, reduction="none")


def _check(method: Method, config: XRisk) -> None:
    """Refuse methods of the other kind of data, and settings that the task makes."""
    check_method(method, _BY_TASK, LISTS if config.lists else METHODS)
    for name in method.settings:
        if method.method in REFERENCES and (method.method, name) != ("focal", "focus"):
            raise ValueError(f"`{method.method}` has no setting {name}.")
    if method.independent:
        raise ValueError("`independent` is for none of these methods.")


# Figures of scores: those of scikit-learn, and the two-way partial AUC, which it lacks.


def two_way_partial_auc(
    label: np.ndarray, scores: np.ndarray, min_tpr: float, max_fpr: float
) -> float:
    r"""The area under the ROC curve with TPR at least `min_tpr` and FPR at most `max_fpr`.

    .. math::
        \frac{1}{(1 - \alpha)\,\beta} \int_0^{\beta} \bigl[\mathrm{TPR}(t) - \alpha\bigr]_+ dt

    It is 1 when all positives are above all negatives, 0 for a curve outside of that corner.

    Args:
        label: 0 or 1, (n,).
        scores: (n,).
        min_tpr: alpha.
        max_fpr: beta.

    References:
        Yang et al. (2019), Two-way partial AUC and its properties.

    Example:
        >>> label, scores = np.array([0, 0, 1, 1]), np.array([0.1, 0.4, 0.3, 0.8])
        >>> two_way_partial_auc(label, scores, min_tpr=0.5, max_fpr=1.0)
        0.5
    """
    fpr, tpr, _ = roc_curve(label, scores, drop_intermediate=False)
    # Along the curve FPR + TPR grows, on its steps too; where it crosses a limit is one more point.
    place = fpr + tpr
    crossed = np.interp(min_tpr, tpr, place), np.interp(max_fpr, fpr, place)
    points = np.union1d(place, crossed)
    x = np.minimum(np.interp(points, place, fpr), max_fpr)
    y = np.maximum(np.interp(points, place, tpr) - min_tpr, 0.0)
    return float(auc(x, y) / ((1 - min_tpr) * max_fpr))


def binary_figures(
    name: str, label: np.ndarray, scores: np.ndarray, min_tpr: float, max_fpr: float
) -> Row:
    """Average precision, AUC and both partial AUCs; NaN where a score is not finite.

    Args:
        name: `train`, `val` or `test`, for the keys.
        label: 0 or 1, (n,).
        scores: (n,).
        min_tpr: of the two-way partial AUC.
        max_fpr: of both; the one-way partial AUC is standardised: 0.5 for random scores.
    """
    row = dict.fromkeys((f"{name}_{key}" for key in ("ap", "auc", "pauc", "tpauc")), math.nan)
    if np.isfinite(scores).all():
        values = (
            average_precision_score(label, scores),
            roc_auc_score(label, scores),
            roc_auc_score(label, scores, max_fpr=max_fpr),
            two_way_partial_auc(label, scores, min_tpr, max_fpr),
        )
        row = dict(zip(row, map(float, values), strict=True))
    return row


def list_figures(
    name: str, relevance: np.ndarray, scores: np.ndarray, query: np.ndarray, k: int
) -> Row:
    """The mean NDCG over queries, of the first `k` rows and of all; NaN with a score that is.

    The gain of a row is 2^relevance - 1. Queries without a relevant row, or with one row alone, do
    not count; without any other the figures are NaN.

    Args:
        name: `train`, `val` or `test`, for the keys.
        relevance: (n,).
        scores: (n,).
        query: of each row, (n,).
        k: 0 for all rows.
    """
    found = []
    order = np.argsort(query, kind="stable")
    gains, scores = 2.0 ** relevance[order] - 1, scores[order]
    for own in np.split(np.arange(len(order)), np.flatnonzero(np.diff(query[order])) + 1):
        if len(own) > 1 and gains[own].any():
            pair = gains[None, own], scores[None, own]
            finite = np.isfinite(pair[1]).all()
            every = ndcg_score(*pair) if finite else math.nan
            found.append([ndcg_score(*pair, k=k) if finite and k else every, every])
    first, every = np.mean(found, axis=0).tolist() if found else (math.nan, math.nan)
    return {f"{name}_ndcg": first, f"{name}_ndcg_all": every}


# The run.

FEWEST_QUERIES = 4


def _queries(batch: int, rows: float) -> int:
    """How many queries a batch has: as many as there is room for with all rows of an average one.

    Example:
        >>> _queries(128, 15.2), _queries(128, 900.0)
        (8, 4)
    """
    return min(max(FEWEST_QUERIES, int(batch / rows)), batch // 2)


class _Streams:
    """Two streams of batches, saved together: of all samples alike, and for the risk."""

    def __init__(self, plain: Batches, own: Batches) -> None:
        self.plain, self.own = plain, own

    def state_dict(self) -> dict[str, Any]:
        return {"plain": self.plain.state_dict(), "own": self.own.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.plain.load_state_dict(state["plain"])
        self.own.load_state_dict(state["own"])


class XRiskTraining(NetworkTraining):
    """A method on a data set from a seed; for lists the groups of the parts are the queries.

    `values` are those of the classes: 0 and 1, or the relevance that each stands for.
    """

    def __init__(
        self,
        config: XRisk,
        method: Method,
        seed: int,
        model: nn.Module,
        samples: Samples,
        parts: Mapping[str, GroupedPart],
        values: Tensor,
        device: torch.device,
    ) -> None:
        self.samples, self.parts, self.values = samples, parts, values
        train = parts["train"]
        steps = -(-len(train) // config.batch)
        model = model.to(device)
        label = values[train.label]
        built = build(model, method, config, label, train.group if config.lists else None)
        # The places of each stream, in the training data.
        every, none = torch.arange(len(train)), torch.zeros_like(train.group)
        options: dict[str, Any] = {"batches_per_epoch": steps, "seed": seed}
        plain = [GroupBatchSampler(none, 1, min(config.batch, len(train)), **options)]
        if config.lists:
            self._places = [every]
            queries = _queries(config.batch, len(train) / len(train.group_names))
            queries = min(queries, len(train.group_names))
            own = [
                GroupBatchSampler(
                    train.group, queries, config.batch // queries, small_groups="all", **options
                )
            ]
        else:
            positive = train.label == 1
            self._places = [every[positive], every[~positive]]
            half = config.batch // 2
            sizes = [half, config.batch - half]
            own = [
                GroupBatchSampler(none[places], 1, min(size, len(places)), **options)
                for places, size in zip(self._places, sizes, strict=True)
            ]
        streams = _Streams(
            Batches(config, samples, [train.rows], plain, device),
            Batches(config, samples, [train.rows[places] for places in self._places], own, device),
        )
        super().__init__(config, method, model, built, streams, device, (steps, config.batch))
        self._label = label.to(device)
        self._loss = sample_loss(method, config)
        self.warm_steps = round(config.warm * config.epochs * steps)

    def loss(self) -> Tensor:
        objective = self.built.objective
        if objective is None or self.steps < self.warm_steps:
            inputs, (index,) = self.batches.plain.draw()
            return self._loss(self._scores(inputs), self._label[index.to(self.device)]).mean()
        if self.steps == self.warm_steps:
            # The squares that Adam keeps are those of other gradients, often far larger.
            self.built.optimizer.state.clear()
        inputs, places = self.batches.own.draw()
        streams = zip(self._places, places, strict=True)
        index = torch.cat([own[place] for own, place in streams]).to(self.device)
        known = () if self.config.lists else (self._label[index],)
        return objective(lambda: self._scores(inputs), *known, index)

    def _scores(self, inputs: Tensor) -> Tensor:
        return self.scores(inputs).squeeze(1)

    def evaluate(self) -> Row:
        row, config = Row(), self.config
        with self.evaluating():
            for part, own in self.parts.items():
                name = PART_KEYS[part]
                label, scores = self.values[own.label].numpy(), self._part_scores(own).numpy()
                if config.lists:
                    row |= list_figures(name, label, scores, own.group.numpy(), config.k)
                else:
                    row |= binary_figures(name, label, scores, config.min_tpr, config.max_fpr)
        return row

    def _part_scores(self, part: GroupedPart) -> Tensor:
        """The score of each sample, in float64, on the CPU."""

        def own(inputs: Tensor, _: Tensor) -> Tensor:
            return self._scores(inputs).double().unsqueeze(1)

        found = per_sample(self.config, self.samples, part.rows, self.device, own)
        return found.squeeze(1).cpu()

    def finish(self) -> Row:
        part = self.parts["test"]
        number = len(part.group_names) if self.config.lists else int((part.label == 1).sum())
        return {"test_queries" if self.config.lists else "test_positives": number}
