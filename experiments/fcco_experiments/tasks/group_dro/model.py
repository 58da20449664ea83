"""The classifier, the methods on its group losses, and the figures of an evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fcco

from ...data.grouped import GroupedPart
from ...task import Method, Row
from ..base import Stepped, make_optimizer

# The methods.

METHODS = ("sonex", "sonx", "alexr2", "ooa", "erm", "uniform")
REFERENCES = ("erm", "uniform")
"""Methods that minimise another average than the CVaR."""
_BY_TASK = ("num_groups", "ratio", "process_group")


def build(model: nn.Module, method: Method, sizes: Tensor, ratio: float, steps: int = 1) -> Stepped:
    """A method with its optimizer; ERM, the average over samples, has no objective.

    SONEX without `smoothing` has the automatic settings of `fcco.CVaRGroupDRO`. With
    `smoothing_end` the smoothing falls from `smoothing` to it over all steps (geometrically): at
    first nearly all groups count, at last the worst alone.

    Args:
        model: what is trained.
        method: its settings.
        sizes: number of training samples of each group.
        ratio: r.
        steps: of the whole training.
    """
    word, settings = method.method, dict[str, Any](method.settings)
    _check(method)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], method)
    number = len(sizes)
    if word == "erm":
        return Stepped(None, optimizer, optimizer)
    if word == "uniform":  # weights that may not move
        return Stepped(fcco.methods.ooa(model, optimizer, number, ratio=1.0), optimizer, optimizer)
    if word == "ooa":
        cap = None if settings.pop("plain", False) else ratio
        objective = fcco.methods.ooa(model, optimizer, number, ratio=cap, **settings)
        return Stepped(objective, optimizer, optimizer)
    stepped: torch.optim.Optimizer = optimizer
    if word == "alexr2":
        loop = {"nu": settings.pop("nu"), "eta": settings.pop("eta")}
        stepped = fcco.optim.ProximalPoint(
            optimizer, inner_steps=settings.pop("inner_steps", 5), **loop
        )
        gamma = settings.setdefault("gamma", 0.8)
        settings |= {"correction": settings.pop("theta", 0.125) * gamma, "read": "new"}
    if word == "sonx":
        settings["smoothing"] = 0.0
    if "smoothing_end" in settings:
        end = settings.pop("smoothing_end")
        settings["smoothing"] = fcco.Annealed(settings["smoothing"], end, steps)
    if "smoothing" in settings:  # the rest as the paper has it; without it the library's defaults
        settings = {"gamma": 0.1, "correction": "auto", "read": "old", **settings}
    with warnings.catch_warnings():  # few groups: the worst alone may be more than the ratio
        warnings.filterwarnings("ignore", ".*is less than one", fcco.UsageWarning)
        objective = fcco.CVaRGroupDRO(model, stepped, number, ratio, **settings)
    return Stepped(objective, stepped, optimizer)


def _check(method: Method) -> None:
    """Refuse settings that would be taken and then ignored, or fail without their name."""
    word, settings = method.method, method.settings
    if word not in METHODS:
        raise ValueError(f"`method` must be one of {', '.join(METHODS)} but is: {word}.")
    for name in settings:
        if name in _BY_TASK:
            raise ValueError(f"`settings.{name}` of {word} is made by the task; leave it out.")
        if word == "sonx" and name.startswith("smoothing"):
            raise ValueError(f"`settings.{name}` is not for sonx: with smoothing it is sonex.")
        if word == "alexr2" and name in ("correction", "read"):
            raise ValueError(f"`settings.{name}` of alexr2 follows from theta and gamma.")
    if word in REFERENCES and settings:
        raise ValueError(f"`{word}` has no settings but got: {', '.join(settings)}.")
    for name in ("smoothing", "nu", "eta") if word == "alexr2" else ():
        if name not in settings:
            raise ValueError(f"`settings.{name}` is needed for {word}.")
    if method.independent and word != "alexr2":
        raise ValueError(f"`independent` is for alexr2 but not for {word}.")


# Figures of an evaluation.

FEW = 64
"""Up to so many groups are shown one by one, more as quantiles."""


def shown(values: Tensor) -> list[float]:
    """Values by group, or their 0, 10, ..., 100 % quantiles when there are many."""
    if len(values) <= FEW:
        return values.tolist()
    return values.double().quantile(torch.linspace(0, 1, 11, dtype=torch.float64)).tolist()


def shown_names(names: Sequence[str]) -> list[str]:
    """Names of the values that `shown` gives for these groups.

    >>> shown_names(["a", "b"]), shown_names(["a"] * 100)[:3]
    (['a', 'b'], ['0 %', '10 %', '20 %'])
    """
    return list(names) if len(names) <= FEW else [f"{level} %" for level in range(0, 101, 10)]


def group_means(values: Tensor, ids: Tensor, number: int) -> Tensor:
    """The mean of the values over each group."""
    total = torch.zeros(number, dtype=values.dtype).index_add_(0, ids, values)
    return total / torch.bincount(ids, minlength=number)


def figures(
    name: str, part: GroupedPart, loss: Tensor, right: Tensor, ratio: float, summary: str
) -> tuple[Row, Tensor]:
    """The figures of a part, and the loss of each of its groups.

    Args:
        name: `train`, `val` or `test`, for the keys.
        part: the groups.
        loss: of each sample.
        right: 1 where the class was right.
        ratio: r of the CVaR.
        summary: of `GroupedData`, by which all accuracies become one. The key says which it is:
            `..._worst_accuracy` or `..._tenth_accuracy`.
    """
    losses = group_means(part.by_group(loss), part.group, len(part.group_names))
    accuracies = group_means(part.by_group(right), part.reported, len(part.reported_names))
    one = accuracies.min() if summary == "worst" else accuracies.quantile(0.1)
    row: Row = {
        f"{name}_cvar": fcco.outer.CVaR(ratio)(losses).item(),
        f"{name}_loss": loss.mean().item(),
        f"{name}_group_loss": losses.mean().item(),
        f"{name}_worst_loss": losses.max().item(),
        f"{name}_accuracy": right.mean().item(),
        f"{name}_{summary}_accuracy": one.item(),
        f"{name}_group_accuracy": accuracies.mean().item(),
    }
    if name == "test":
        row["test_reported"] = shown(accuracies)
        row["test_smallest"] = int(torch.bincount(part.reported).min())
    return row, losses
