"""What is compared: for each metric the losses, each with as many settings as any other.

Everything from LibAUC follows its documentation: a sigmoid before its pairwise losses, its own
optimizer for each, the number of each row in the training set.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from fcco_experiments.tasks.x_risk import training as task
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from fcco import xrisk

from .problems import MAX_FPR, TWO_WAY, Part, fill

Setting = dict[str, Any]
Loss = Callable[[Tensor], Tensor]
"""Of the rows of a batch."""
OURS = "ours"
PLAIN = ("bce", "focal", "listwise", "lambdarank")
"""In ordinary batches from random weights, with the same loss for every metric. The others start
from cross-entropy and take batches with a fixed number of positives."""


def grid(rates: tuple[float, ...] = (1e-3, 2e-4), **knob: tuple[Any, ...]) -> list[Setting]:
    """Learning rates x the values of a knob."""
    ((name, values),) = knob.items()
    return [{"lr": lr, name: value} for lr, value in product(rates, values)]


SAMPLES = {"bce": grid(weight_decay=(0.0, 0.1)), "focal": grid(gamma=(1.0, 2.0))}
SCALES = grid(activation=("sigmoid", None))  # what is compared: probabilities or logits
LISTS = {
    "listwise": grid(weight_decay=(0.0, 0.1)),
    "lambdarank": grid((0.1, 0.03), num_leaves=(15, 31)),
    "libauc SONG": [{**s, "top": False} for s in grid(gamma0=(0.1, 0.9))],
    "libauc K-SONG": [{**s, "top": True} for s in grid(gamma0=(0.1, 0.9))],
    OURS: grid(surrogate=("squared_hinge", "logistic")),
}
METHODS: dict[str, dict[str, list[Setting]]] = {
    "AP": {
        **SAMPLES,
        "libauc SOAP": grid(gamma=(0.1, 0.9)),
        OURS: grid(prevalence=(0.2, 0.5)),
    },
    "pAUC": {
        **SAMPLES,
        "libauc SOPA": grid(eta=(0.1, 1.0)),
        "libauc SOPAs": grid(Lambda=(0.1, 1.0)),
        OURS: SCALES,
    },
    "tpAUC": {
        **SAMPLES,
        "libauc SOTAs": grid(Lambda=(0.1, 1.0)),
        "libauc STACO": grid(threshold=(0.5, 1.0)),
        OURS: SCALES,
    },
    "NDCG@5": LISTS,
    "NDCG@10": LISTS,
}
"""The settings of each method by metric."""


def missing() -> dict[str, str]:
    """Prefixes of the methods whose package cannot be imported, and why."""
    found = {}
    for prefix, module in (("libauc", "libauc.losses"), ("lambdarank", "lightgbm")):
        try:
            importlib.import_module(module)
        except Exception as reason:  # LibAUC's imports fail in several ways
            hint = " (pip install '.[bench]')" if module == "lightgbm" else ""
            found[prefix] = f"{type(reason).__name__}: {reason}{hint}"
    return found


def scores(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).squeeze(1)


def build(
    name: str, model: nn.Module, train: Part, metric: str, setting: Setting
) -> tuple[torch.optim.Optimizer, Loss]:
    """A method on training data: the optimizer of the model, and the loss."""
    if name.startswith("libauc"):
        word = name.removeprefix("libauc ")
        return (song if "SONG" in word else libauc_pairs)(word, model, train, metric, setting)
    optimizer = torch.optim.AdamW(
        model.parameters(), setting["lr"], weight_decay=setting.get("weight_decay", 0.0), fused=True
    )
    own = knobs(setting)

    def plain(rows: Tensor) -> Tensor:
        found, y = scores(model, train.x[rows]), train.y[rows]
        return bce(found, y) if name == "bce" else task.focal(found, y, setting["gamma"]).mean()

    if name == "listwise":
        return optimizer, lambda rows: listwise(scores(model, train.x[rows]), train, rows)
    if name != OURS:
        return optimizer, plain
    some = model, optimizer, train.y
    if train.query is not None:
        risk = xrisk.NDCG(*some, train.query, k=int(metric.partition("@")[2]), **own)
        return optimizer, lambda rows: risk(lambda: scores(model, train.x[rows]), rows)
    if metric == "AP":
        risk = xrisk.AveragePrecision(*some, **own)
    elif metric == "pAUC":
        risk = xrisk.PartialAUC(*some, max_fpr=MAX_FPR, **own)
    else:
        risk = xrisk.TwoWayPartialAUC(*some, **TWO_WAY, **own)
    return optimizer, lambda rows: risk(lambda: scores(model, train.x[rows]), train.y[rows], rows)


def knobs(setting: Setting) -> Setting:
    """Without what the optimizer takes."""
    return {key: value for key, value in setting.items() if key not in ("lr", "weight_decay")}


def listwise(found: Tensor, train: Part, rows: Tensor) -> Tensor:
    """Softmax over the rows of a query against its gains: cross-entropy for ranking."""
    assert train.query is not None
    _, own = train.query[rows].unique(return_inverse=True)
    gains = fill(2 ** train.y[rows] - 1, own, 0.0)
    logits = fill(found, own, -torch.inf)
    share = gains / gains.sum(1, keepdim=True).clamp(min=1)
    return -(share * logits.log_softmax(1).clamp(min=-1e4)).sum(1).mean()


def libauc_pairs(
    name: str, model: nn.Module, train: Part, metric: str, setting: Setting
) -> tuple[torch.optim.Optimizer, Loss]:
    """Its losses on pairs of a positive and a negative, by the name of the optimizer."""
    from libauc import optimizers  # pyright: ignore[reportMissingImports]
    from libauc.losses import auc  # pyright: ignore[reportMissingImports]

    cpu = torch.device("cpu")
    size, own = len(train.y), {**knobs(setting), "device": cpu}
    staco = {"theta_0": 1 - TWO_WAY["min_tpr"], "theta_1": TWO_WAY["max_fpr"]}
    losses = {
        "SOAP": lambda: auc.APLoss(size, **own),
        "SOPA": lambda: auc.pAUC_CVaR_Loss(size, int(train.y.sum()), beta=MAX_FPR, **own),
        "SOPAs": lambda: auc.pAUC_DRO_Loss(size, **own),
        "SOTAs": lambda: auc.tpAUC_KL_Loss(size, **own),
        "STACO": lambda: auc.tpAUC_CVaR_loss(size, **staco, **own),
    }
    loss = losses[name]()
    optimizer = getattr(optimizers, name)(
        model.parameters(), lr=setting["lr"], mode="adam", verbose=False, device=cpu
    )
    return optimizer, lambda rows: loss(torch.sigmoid(model(train.x[rows])), train.y[rows], rows)


def song(
    name: str, model: nn.Module, train: Part, metric: str, setting: Setting
) -> tuple[torch.optim.Optimizer, Loss]:
    """Its NDCG loss on whole queries.

    The loss wants as many relevant items in every query as in any other. What is missing is filled
    with items of relevance 0, which has no gain, and of a score so low that it is above no other;
    so the loss is exactly that of the queries.
    """
    from libauc.losses import NDCGLoss  # pyright: ignore[reportMissingImports]
    from libauc.optimizers import SONG  # pyright: ignore[reportMissingImports]

    assert train.query is not None
    cpu = torch.device("cpu")
    query, size, longest = train.query, len(train.y), int(train.query.bincount().max())
    own = knobs(setting)
    if own.pop("top"):
        own["topk"] = int(metric.partition("@")[2])
    loss = NDCGLoss(size + 1, int(query.max()) + 1, longest, longest, device=cpu, **own)
    gains = fill(2**train.y - 1, query, 0.0).sort(1, descending=True).values
    ideal = (gains / torch.log2(torch.arange(2, longest + 2))).sum(1)

    def value(rows: Tensor) -> Tensor:
        known, place = query[rows].unique(return_inverse=True)

        def padded(values: Tensor, empty: float) -> Tensor:
            table = fill(values, place, empty)
            return nn.functional.pad(table, (0, longest - table.shape[1]), value=empty)

        batch = {
            "rating": padded(train.y[rows], 0.0),
            "user_id": known,
            "num_pos_items": torch.full((len(known),), longest),
            "ideal_dcg": ideal[known].clamp(min=1e-3),
            "user_item_id": padded(rows, size),
        }
        return loss(padded(scores(model, train.x[rows]), -1e4), batch)

    return SONG(model.parameters(), lr=setting["lr"], mode="adam", device=cpu), value
