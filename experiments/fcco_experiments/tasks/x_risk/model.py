"""The methods: X-risks of `fcco.xrisk`, and losses of single samples for reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from fcco import xrisk

from ...task import Method
from ..base import Stepped, make_optimizer
from .config import XRisk

RISKS = ("ap", "auc", "pauc", "tpauc")
LISTS = ("ndcg", "listwise")
BINARY_REFERENCES, LIST_REFERENCES = ("bce", "focal"), ("pointwise",)
REFERENCES = BINARY_REFERENCES + LIST_REFERENCES
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
    words = LISTS + LIST_REFERENCES if config.lists else RISKS + BINARY_REFERENCES
    if method.method not in words:
        raise ValueError(
            f"`method` must be one of {', '.join(words)} for `risk: {config.risk}` but is: "
            f"{method.method}."
        )
    for name in method.settings:
        if name in _BY_TASK:
            raise ValueError(f"`settings.{name}` is made by the task; leave it out.")
        if method.method in REFERENCES and (method.method, name) != ("focal", "focus"):
            raise ValueError(f"`{method.method}` has no setting {name}.")
    if method.independent:
        raise ValueError("`independent` is for none of these methods.")
