"""The classifier, the methods on its group losses, and the figures of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fcco
from fcco._distributed import Group, find_group
from fcco.inputs import mean_loss

from ...data.grouped import GroupedPart
from ...task import Method, Row
from ..base import Stepped, make_optimizer, perceptron

# The network.


class Classifier(nn.Module):
    """Scores of the classes.

    Args:
        backbone: from raw batches to vectors; None when the batches are vectors.
        width: of the vectors.
        hidden: widths of the hidden layers of the head.
        classes: how many.
    """

    def __init__(
        self, backbone: nn.Module | None, width: int, hidden: Sequence[int], classes: int
    ) -> None:
        super().__init__()
        self.backbone = nn.Identity() if backbone is None else backbone
        self.top = nn.Sequential(*perceptron(width, hidden, classes))

    def forward(self, batch: Tensor) -> Tensor:
        return self.top(self.backbone(batch))


def standardise(values: Tensor, rows: Tensor) -> Tensor:
    """Vectors scaled to mean 0 and deviation 1 over the given rows, column by column, in float32.

    Columns that hardly vary there are only centred.
    """
    result = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    # 128 columns at a time: float64 for all of them would be four times the memory of the data.
    for columns, scaled in zip(values.split(128, 1), result.split(128, 1), strict=True):
        wide = columns.double()
        mean, deviation = wide[rows].mean(0), wide[rows].std(0)
        scale = torch.where(deviation > 1e-6, deviation, torch.ones_like(deviation))
        scaled.copy_((wide - mean) / scale)
    return result


# The methods.

METHODS = ("sonex", "sonx", "alexr2", "ooa", "erm", "uniform")
REFERENCES = ("erm", "uniform")
"""Methods that minimise another average than the CVaR."""
_BY_TASK = ("num_groups", "ratio", "process_group", "group_sizes")

Losses = Callable[[], Tensor]


@dataclass
class Built(Stepped):
    """A method on this task.

    Attributes:
        groups: whether batches are drawn group by group, or uniformly from all samples.
    """

    groups: bool = True

    def loss(
        self, losses: Losses, group: Tensor, gradient: Losses | None, gradient_group: Tensor | None
    ) -> Tensor:
        """What is differentiated.

        Args:
            losses: runs the model and gives per-sample losses.
            group: of each sample.
            gradient: the same for an independent batch, when the method wants one.
            gradient_group: of each of its samples.
        """
        if self.objective is None:
            return mean_loss(losses(), find_group())
        if gradient is None:
            return self.objective(losses, group)
        return self.objective(losses, group, gradient=gradient, gradient_index=gradient_group)

    def tracked(self) -> Tensor | None:
        """u_i, NaN for groups that were never seen; None for methods without memory of losses."""
        tracks = isinstance(self.objective, fcco.CVaRGroupDRO)
        return self.objective.group_losses() if tracks else None

    def weights(self) -> Tensor | None:
        """The weight of each group in the gradient, None for the plain average over samples."""
        return None if self.objective is None else self.objective.group_weights()


def build(model: nn.Module, method: Method, sizes: Tensor, ratio: float, steps: int = 1) -> Built:
    """A method with its optimizer.

    With `smoothing_end` the smoothing falls from `smoothing` to it over all steps (geometrically):
    at first nearly all groups count, at last the worst alone.

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
        return Built(None, optimizer, optimizer, groups=False)
    if word == "uniform":  # weights that may not move
        return Built(fcco.ooa(model, optimizer, number, ratio=1.0), optimizer, optimizer)
    if word == "ooa":
        cap = None if settings.pop("plain", False) else ratio
        objective = fcco.ooa(model, optimizer, number, ratio=cap, group_sizes=sizes, **settings)
        return Built(objective, optimizer, optimizer)
    stepped: torch.optim.Optimizer = optimizer
    if word == "alexr2":
        loop = {"nu": settings.pop("nu"), "eta": settings.pop("eta")}
        stepped = fcco.ProximalPoint(optimizer, inner_steps=settings.pop("inner_steps", 5), **loop)
        gamma = settings.setdefault("gamma", 0.8)
        settings |= {"correction": settings.pop("theta", 0.125) * gamma, "read": "new"}
    if word == "sonx":
        settings["smoothing"] = 0.0
    if "smoothing_end" in settings:
        end = settings.pop("smoothing_end")
        settings["smoothing"] = fcco.Annealed(settings["smoothing"], end, steps)
    # As the paper has them, not the library's defaults.
    settings = {"gamma": 0.1, "correction": "auto", "read": "old", **settings}
    objective = fcco.CVaRGroupDRO(model, stepped, number, ratio, **settings)
    return Built(objective, stepped, optimizer)


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
    needed = {"sonex": ("smoothing",), "alexr2": ("smoothing", "nu", "eta")}.get(word, ())
    for name in needed:
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


@torch.no_grad()
def evaluate_samples(
    scores: Callable[[Tensor], Tensor],
    part: GroupedPart,
    chunks: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    ranks: Group | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss of each sample and whether it was classified rightly, in float64, on the CPU.

    Args:
        scores: the model.
        part: labels.
        chunks: places in the part, and their inputs.
        device: of the model.
        ranks: that share the chunks.
    """
    label = part.label.to(device)
    loss, right, seen = torch.zeros(3, len(part), dtype=torch.float64, device=device)
    for places, inputs in chunks:
        here, output = places.to(device), scores(inputs)
        loss[here] = cross_entropy(output, label[here], reduction="none").double()
        right[here] = (output.argmax(1) == label[here]).double()
        seen[here] = 1.0
    if ranks is not None:
        for column in (loss, right, seen):
            torch.distributed.all_reduce(column, group=ranks.handle)
    return (loss / seen).cpu(), (right / seen).cpu()


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
        summary: the one accuracy of all reported groups, as `GroupedData.summary` says; the key
            `..._worst_accuracy` or `..._tenth_accuracy` tells which it is.
    """
    losses = group_means(loss, part.group, len(part.group_names))
    accuracies = group_means(right, part.reported, len(part.reported_names))
    one = accuracies.min() if summary == "worst" else accuracies.quantile(0.1)
    row: Row = {
        f"{name}_cvar": fcco.CVaR(ratio)(losses).item(),
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
