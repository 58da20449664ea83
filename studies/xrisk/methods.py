"""What is compared: for each metric the losses, each with as many settings as any other.

A builder takes the model, the training data, the metric and a setting, and returns a step: a
function of the rows of a batch. Everything from LibAUC follows its documentation: a sigmoid before
its pairwise losses, its own optimizer for each, the number of each row in the training set.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from fcco_experiments.tasks.x_risk import training as task
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from fcco import xrisk

from .problems import MAX_FPR, TWO_WAY, Part, fill

Setting = dict[str, Any]
Step = Callable[[Tensor], None]
Builder = Callable[[nn.Module, Part, str, Setting], Step]
OURS = "ours"
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


def grid(rates: tuple[float, ...] = (1e-3, 2e-4), **knob: tuple[Any, ...]) -> list[Setting]:
    """Learning rates x the values of a knob."""
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


def knobs(setting: Setting) -> Setting:
    """Without what the optimizer takes."""
    return {key: value for key, value in setting.items() if key not in ("lr", "weight_decay")}


# Plain losses.


def cross_entropy(model: nn.Module, train: Part, metric: str, setting: Setting) -> Step:
    return stepper(
        adam(model, setting), lambda rows: bce(scores(model, train.x[rows]), train.y[rows])
    )


def focal(model: nn.Module, train: Part, metric: str, setting: Setting) -> Step:
    def loss(rows: Tensor) -> Tensor:
        return task.focal(scores(model, train.x[rows]), train.y[rows], setting["gamma"]).mean()

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
    optimizer, own = adam(model, setting), knobs(setting)
    some = model, optimizer, train.y
    if train.query is not None:
        risk = xrisk.NDCG(*some, train.query, k=int(metric.partition("@")[2]), **own)
        return stepper(optimizer, lambda rows: risk(lambda: scores(model, train.x[rows]), rows))
    risks: dict[str, Callable[[], nn.Module]] = {
        "AP": lambda: xrisk.AveragePrecision(*some, **own),
        "pAUC": lambda: xrisk.PartialAUC(*some, max_fpr=MAX_FPR, **own),
        "tpAUC": lambda: xrisk.TwoWayPartialAUC(*some, **TWO_WAY, **own),
    }
    risk = risks[metric]()
    return stepper(
        optimizer, lambda rows: risk(lambda: scores(model, train.x[rows]), train.y[rows], rows)
    )


# LibAUC.


def libauc_pairs(name: str) -> Builder:
    """Its losses on pairs of a positive and a negative, by the name of the optimizer."""

    def build(model: nn.Module, train: Part, metric: str, setting: Setting) -> Step:
        from libauc import optimizers  # pyright: ignore[reportMissingImports]
        from libauc.losses import auc  # pyright: ignore[reportMissingImports]

        size, own = len(train.y), {**knobs(setting), "device": CPU}
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
            model.parameters(), lr=setting["lr"], mode="adam", verbose=False, device=CPU
        )
        return stepper(
            optimizer, lambda rows: loss(torch.sigmoid(model(train.x[rows])), train.y[rows], rows)
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
    query, size, longest = train.query, len(train.y), int(train.query.bincount().max())
    own = knobs(setting)
    if own.pop("top"):
        own["topk"] = int(metric.partition("@")[2])
    loss = NDCGLoss(size + 1, int(query.max()) + 1, longest, longest, device=CPU, **own)
    optimizer = SONG(model.parameters(), lr=setting["lr"], mode="adam", device=CPU)
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

    return stepper(optimizer, value)


# What is compared on each metric.

PLAIN = {
    "bce": Method(cross_entropy, grid(weight_decay=(0.0, 0.1)), plain=True),
    "focal": Method(focal, grid(gamma=(1.0, 2.0)), plain=True),
}
SCALES = grid(activation=("sigmoid", None))  # what is compared: probabilities or logits
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
METHODS["NDCG@5"] = METHODS["NDCG@10"] = {
    "listwise": Method(listwise, grid(weight_decay=(0.0, 0.1)), plain=True),
    "lambdarank": Method(None, grid((0.1, 0.03), num_leaves=(15, 31)), plain=True),
    "libauc SONG": Method(song, [{**s, "top": False} for s in grid(gamma0=(0.1, 0.9))]),
    "libauc K-SONG": Method(song, [{**s, "top": True} for s in grid(gamma0=(0.1, 0.9))]),
    OURS: Method(ours, grid(surrogate=("squared_hinge", "logistic"))),
}


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
