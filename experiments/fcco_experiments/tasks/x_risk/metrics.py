"""Figures of scores: those of scikit-learn, and the two-way partial AUC, which it lacks."""

from __future__ import annotations

import math

import numpy as np
from sklearn.metrics import auc, average_precision_score, ndcg_score, roc_auc_score, roc_curve

from ...task import Row


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
