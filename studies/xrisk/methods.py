"""What is compared: for each metric the losses, each with as many settings as any other.

A builder takes the model, the training data, the metric and a setting, and returns a step: a
function of the rows of a batch. Everything from LibAUC follows its documentation: a sigmoid before
its pairwise losses, its own optimizer for each, the number of each row in the training set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import fcco

from .problems import MAX_FPR, TWO_WAY, Part, fill

Setting = dict[str, Any]
Step = Callable[[Tensor], None]
Builder = Callable[[nn.Module, Part, str, Setting], Step]
OURS = "ours"
RATES = (1e-3, 2e-4)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Method:
    """A loss and how it is trained.

    Attributes:
        build: makes the step; None for trees.
        grid: its settings.
        plain: in ordinary batches from random weights, with the same loss for every metric. The
            others start from cross-entropy and take batches with a fixed number of positives.
    """

    build: Builder | None
    grid: list[Setting]
    plain: bool = False


def grid(rates: tuple[float, ...] = RATES, **knob: tuple[Any, ...]) -> list[Setting]:
    """Learning rates x the values of one or no knob."""
    ((name, values),) = knob.items()
    return [{"lr": lr, name: value} for lr, value in product(rates, values)]


def scores(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).squeeze(1)


def stepper(optimizer: torch.optim.Optimizer, loss: Callable[[Tensor], Tensor]) -> Step:
    def step(rows: Tensor) -> None:
        loss(rows).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def adam(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    decay = setting.get("weight_decay", 0.0)
    return torch.optim.AdamW(model.parameters(), setting["lr"], weight_decay=decay, fused=True)


# Plain losses.


def cross_entropy(model: nn.Module, train: Part, metric: str, setting: Setting) -> Step:
    def loss(rows: Tensor) -> Tensor:
        return bce(scores(model, train.x[rows]), train.y[rows])

    return stepper(adam(model, setting), loss)


def focal(model: nn.Module, train: Part, metric: str, setting: Setting) -> Step:
    def loss(rows: Tensor) -> Tensor:
        each = bce(scores(model, train.x[rows]), train.y[rows], reduction="none")
        return ((1 - torch.exp(-each)) ** setting["gamma"] * each).mean()

    return stepper(adam(model, setting), loss)


def listwise(model: nn.Module, train: Part, metric: str, setting: Setting) -> Step:
    """Softmax over the rows of a query against its gains: cross-entropy for ranking."""
    assert train.query is not None
    query = train.query

    def loss(rows: Tensor) -> Tensor:
        _, own = query[rows].unique(return_inverse=True)
        gains = fill(2 ** train.y[rows] - 1, own, 0.0)
        logits = fill(scores(model, train.x[rows]), own, -torch.inf)
        share = gains / gains.sum(1, keepdim=True).clamp(min=1)
        return -(share * logits.log_softmax(1).clamp(min=-1e4)).sum(1).mean()

    return stepper(adam(model, setting), loss)


# Ours.


def ours(model: nn.Module, train: Part, metric: str, setting: Setting) -> Step:
    optimizer = adam(model, setting)
    risk = make_risk(model, optimizer, train, metric, setting)

    def loss(rows: Tensor) -> Tensor:
        run = lambda: scores(model, train.x[rows])  # noqa: E731
        return risk(run, rows) if train.query is not None else risk(run, train.y[rows], rows)

    return stepper(optimizer, loss)


def make_risk(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Part,
    metric: str,
    setting: Setting,
) -> nn.Module:
    xrisk = fcco.xrisk
    own = {key: value for key, value in setting.items() if key not in ("lr", "weight_decay")}
    if metric == "AP":
        return xrisk.AveragePrecision(model, optimizer, train.y, **own)
    if metric == "pAUC":
        return xrisk.PartialAUC(model, optimizer, train.y, max_fpr=MAX_FPR, **own)
    if metric == "tpAUC":
        return xrisk.TwoWayPartialAUC(model, optimizer, train.y, **TWO_WAY, **own)
    k = int(metric.partition("@")[2])
    return xrisk.NDCG(model, optimizer, train.y, train.query, k=k, **own)


# LibAUC.


def libauc_pairs(name: str) -> Builder:
    """Its losses on pairs of a positive and a negative, by the name of the optimizer."""

    def build(model: nn.Module, train: Part, metric: str, setting: Setting) -> Step:
        from libauc import optimizers  # pyright: ignore[reportMissingImports]
        from libauc.losses import auc  # pyright: ignore[reportMissingImports]

        own = {key: value for key, value in setting.items() if key not in ("lr", "weight_decay")}
        size = len(train.y)
        losses = {
            "SOAP": lambda: auc.APLoss(size, device=CPU, **own),
            "SOPA": lambda: auc.pAUC_CVaR_Loss(
                size, int(train.y.sum()), beta=MAX_FPR, device=CPU, **own
            ),
            "SOPAs": lambda: auc.pAUC_DRO_Loss(size, device=CPU, **own),
            "SOTAs": lambda: auc.tpAUC_KL_Loss(size, device=CPU, **own),
            "STACO": lambda: auc.tpAUC_CVaR_loss(
                size, theta_0=1 - TWO_WAY["min_tpr"], theta_1=TWO_WAY["max_fpr"], device=CPU, **own
            ),
        }
        loss = losses[name]()
        optimizer = getattr(optimizers, name)(
            model.parameters(), lr=setting["lr"], mode="adam", verbose=False, device=CPU
        )
        return stepper(
            optimizer,
            lambda rows: loss(torch.sigmoid(model(train.x[rows])), train.y[rows], rows),
        )

    return build


def song(model: nn.Module, train: Part, metric: str, setting: Setting) -> Step:
    """Its NDCG loss on whole queries.

    The loss wants as many relevant items in every query as in any other. What is missing is filled
    with items of relevance 0, which has no gain, and of a score so low that it is above no other;
    so the loss is exactly that of the queries.
    """
    from libauc.losses import NDCGLoss  # pyright: ignore[reportMissingImports]
    from libauc.optimizers import SONG  # pyright: ignore[reportMissingImports]

    assert train.query is not None
    own = {key: value for key, value in setting.items() if key not in ("lr", "top")}
    size, longest = len(train.y), int(train.query.bincount().max())
    queries = int(train.query.max()) + 1
    if setting["top"]:
        own["topk"] = int(metric.partition("@")[2])
    loss = NDCGLoss(size + 1, queries, longest, longest, device=CPU, **own)
    optimizer = SONG(model.parameters(), lr=setting["lr"], mode="adam", device=CPU)
    gains = fill(2**train.y - 1, train.query, 0.0).sort(1, descending=True).values
    ideal = (gains / torch.log2(torch.arange(2, longest + 2))).sum(1)
    query = train.query

    def padded(values: Tensor, own: Tensor, empty: float) -> Tensor:
        table = fill(values, own, empty)
        return nn.functional.pad(table, (0, longest - table.shape[1]), value=empty)

    def value(rows: Tensor) -> Tensor:
        known, own = query[rows].unique(return_inverse=True)
        batch = {
            "rating": padded(train.y[rows], own, 0.0),
            "user_id": known,
            "num_pos_items": torch.full((len(known),), longest),
            "ideal_dcg": ideal[known].clamp(min=1e-3),
            "user_item_id": padded(rows, own, size),
        }
        return loss(padded(scores(model, train.x[rows]), own, -1e4), batch)

    return stepper(optimizer, value)


# What is compared on each metric.

PLAIN = {
    "bce": Method(cross_entropy, grid(weight_decay=(0.0, 0.1)), plain=True),
    "focal": Method(focal, grid(gamma=(1.0, 2.0)), plain=True),
}
SCALES = grid(activation=("sigmoid", None))  # what is compared: probabilities or logits
SURROGATES = grid(surrogate=("squared_hinge", "logistic"))
METHODS: dict[str, dict[str, Method]] = {
    "AP": {
        **PLAIN,
        "libauc SOAP": Method(libauc_pairs("SOAP"), grid(gamma=(0.1, 0.9))),
        OURS: Method(ours, grid(prevalence=(0.2, 0.5))),
    },
    "pAUC": {
        **PLAIN,
        "libauc SOPA": Method(libauc_pairs("SOPA"), grid(eta=(0.1, 1.0))),
        "libauc SOPAs": Method(libauc_pairs("SOPAs"), grid(Lambda=(0.1, 1.0))),
        OURS: Method(ours, SCALES),
    },
    "tpAUC": {
        **PLAIN,
        "libauc SOTAs": Method(libauc_pairs("SOTAs"), grid(Lambda=(0.1, 1.0))),
        "libauc STACO": Method(libauc_pairs("STACO"), grid(threshold=(0.5, 1.0))),
        OURS: Method(ours, SCALES),
    },
}
for _metric in ("NDCG@5", "NDCG@10"):
    METHODS[_metric] = {
        "listwise": Method(listwise, grid(weight_decay=(0.0, 0.1)), plain=True),
        "lambdarank": Method(None, grid((0.1, 0.03), num_leaves=(15, 31)), plain=True),
        "libauc SONG": Method(song, [{**s, "top": False} for s in grid(gamma0=(0.1, 0.9))]),
        "libauc K-SONG": Method(song, [{**s, "top": True} for s in grid(gamma0=(0.1, 0.9))]),
        OURS: Method(ours, SURROGATES),
    }


def missing() -> dict[str, str]:
    """Prefixes of the methods whose package cannot be imported, and why."""
    import importlib

    found = {}
    for prefix, module in (("libauc", "libauc.losses"), ("lambdarank", "lightgbm")):
        try:
            importlib.import_module(module)
        except Exception as reason:  # LibAUC's imports fail in several ways
            hint = " (pip install '.[bench]')" if module == "lightgbm" else ""
            found[prefix] = f"{type(reason).__name__}: {reason}{hint}"
    return found
