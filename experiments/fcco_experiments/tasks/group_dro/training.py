"""A run: the config, the methods on the group losses, batches, steps and figures."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fcco
from fcco.groups import GroupBatchSampler
from fcco.rules.cvar import threshold

from ...data.grouped import GroupedPart, Samples
from ...task import Method, Row
from ..base import (
    PART_KEYS,
    Scheduled,
    Stepped,
    check_method,
    make_optimizer,
)
from ..network import Batches, Networked, NetworkTraining, chunks, per_sample


@dataclass(frozen=True, kw_only=True)
class GroupDRO(Scheduled, Networked):
    r"""The average loss of the worst groups.

    .. math::
        \min_{w,s}\; s + \frac1{rn}\sum_{i=1}^n [L_i(w) - s]_+, \qquad
        L_i(w) = \mathrm E\bigl[\ell(w; x, y) \mid \text{group } i\bigr]

    Args:
        distinct: drop texts that repeat one of their own group, so that no copy of a training text
            is a test text.
        choose_by: the figure by which a sweep chooses settings and, on test data, a comparison is
            judged: `"val_cvar"`, or `"train_cvar"`, how well the problem is solved, whatever that
            is worth on other data.
        spectrum: compute the smallest eigenvalue of the groups' Jacobian Gram matrix at the end
            (assumption LBSV), over all weights.
    """

    ratio: float = 0.15  # r, the share of groups that count; alpha in the paper's appendix
    batch: int = 64  # samples of a batch, B1 B2
    groups_per_batch: int = 4  # B1; 0: as many as there are with two samples each
    sample_limit: int = 0  # at most so many samples of each group are kept; 0 keeps all
    distinct: bool = False
    choose_by: Literal["train_cvar", "val_cvar"] = "val_cvar"
    spectrum: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        super().__post_init__()
        if not 0 < self.ratio <= 1:
            raise ValueError(f"`ratio` must be in (0, 1] but is: {self.ratio}.")
        self.at_least(1, "batch")
        self.at_least(0, "sample_limit", "groups_per_batch")
        if self.groups_per_batch and self.batch % self.groups_per_batch:
            raise ValueError(
                f"`batch` must be a multiple of groups_per_batch = {self.groups_per_batch} "
                f"but is: {self.batch}."
            )

    def with_groups(self, number: int) -> GroupDRO:
        """This config for data of so many groups: a number of groups instead of 0."""
        if self.groups_per_batch:
            return self
        most = max(1, min(number, self.batch // 2))
        fitting = next(n for n in range(most, 0, -1) if self.batch % n == 0)
        return replace(self, groups_per_batch=fitting)

    @property
    def per_group(self) -> int:
        """B2, samples of each group in a batch."""
        return self.batch // self.groups_per_batch

    @property
    def share(self) -> str:
        """The ratio in words."""
        return f"{100 * self.ratio:g} %"


# The methods.

METHODS = ("sonex", "sonx", "alexr2", "ooa", "erm", "uniform")
REFERENCES = ("erm", "uniform")
"""Methods that minimise another average than the CVaR: over samples, over groups."""
_BY_TASK = ("num_groups", "ratio", "process_group")


def build(
    model: nn.Module, method: Method, config: GroupDRO, sizes: Tensor, steps: int = 1
) -> Stepped:
    """A method with its optimizer; ERM, the average over samples, has no objective.

    SONEX without `smoothing` has the automatic settings of `fcco.CVaRGroupDRO`. With
    `smoothing_end` the smoothing falls from `smoothing` to it over all steps (geometrically): at
    first nearly all groups count, at last the worst alone.

    Args:
        model: what is trained.
        method: its settings.
        config: with the ratio.
        sizes: number of training samples of each group.
        steps: of the whole training.
    """
    word, settings, ratio = method.method, dict[str, Any](method.settings), config.ratio
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
    check_method(method, _BY_TASK, METHODS)
    for name in settings:
        if word == "sonx" and name.startswith("smoothing"):
            raise ValueError(f"`settings.{name}` is not for sonx: with smoothing it is sonex.")
        if word == "alexr2" and name in ("correction", "read"):
            raise ValueError(f"`settings.{name}` of alexr2 follows from theta and gamma.")
    if word in REFERENCES and settings:
        raise ValueError(f"`{word}` has no settings but got: {', '.join(settings)}.")
    for name in ("smoothing", "nu", "eta") if word == "alexr2" else ():
        if name not in settings:
            raise ValueError(f"`settings.{name}` is needed for {word}.")
    if method.independent:
        raise ValueError("`independent` is for none of these methods.")


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


# The run.


class GroupDROTraining(NetworkTraining):
    """A method on a data set from a seed; `summary` is that of `GroupedData`."""

    def __init__(
        self,
        config: GroupDRO,
        method: Method,
        seed: int,
        model: nn.Module,
        samples: Samples,
        parts: Mapping[str, GroupedPart],
        summary: str,
        device: torch.device,
    ) -> None:
        self.samples, self.parts, self.summary = samples, parts, summary
        train = self.train = parts["train"]
        steps = -(-len(train) // config.batch)
        model = model.to(device)
        built = build(model, method, config, torch.bincount(train.group), steps * config.epochs)
        # Where groups overlap, a sample that is drawn for one counts in that one alone.
        drawn = train.memberships()
        group, number, each = drawn.group, config.groups_per_batch, config.per_group
        if built.objective is None:  # without one (ERM) all samples are one group
            drawn, group, number, each = train, torch.zeros_like(train.rows), 1, config.batch
        sampler = GroupBatchSampler(group, number, each, batches_per_epoch=steps, seed=seed)
        batches = Batches(config, samples, [drawn.rows], [sampler], device)
        super().__init__(config, method, model, built, batches, device, (steps, config.batch))
        ids = drawn.group if drawn.member is None else group
        self._label, self._group = drawn.label.to(device), ids.to(device)

    def loss(self) -> Tensor:
        inputs, (places,) = self.batches.draw()
        places = places.to(self.device)

        def losses() -> Tensor:
            return cross_entropy(self.scores(inputs), self._label[places], reduction="none")

        objective = self.built.objective
        return losses().mean() if objective is None else objective(losses, self._group[places])

    def evaluate(self) -> Row:
        row, losses, config = Row(), {}, self.config
        with self.evaluating():
            for name, part in self.parts.items():
                loss, right = self._sample_figures(part)
                found, losses[name] = figures(
                    PART_KEYS[name], part, loss, right, config.ratio, self.summary
                )
                row |= found
        true, objective = losses["train"], self.built.objective
        row["losses"] = shown(true)
        if isinstance(objective, fcco.CVaRGroupDRO):
            tracked = objective.group_losses().double().cpu()
            error = (tracked - true)[~tracked.isnan()]  # of groups that batches have shown
            if len(error):
                smoothing = float(objective.term.smoothing)
                exact = threshold(true, config.ratio, smoothing)[0]
                row["tracking_error"] = error.square().mean().sqrt().item()
                row["threshold"] = objective.threshold.item()
                row["threshold_exact"] = exact.item()
        if objective is not None and len(true) <= FEW:
            row["weights"] = objective.group_weights().nan_to_num(nan=0.0).tolist()
        return row

    def _sample_figures(self, part: GroupedPart) -> Tensor:
        """Loss of each sample and whether it was classified correctly, in float64, on the CPU."""
        label = part.label.to(self.device)

        def both(inputs: Tensor, here: Tensor) -> Tensor:
            scores, own = self.scores(inputs), label[here]
            losses = cross_entropy(scores, own, reduction="none").double()
            return torch.stack([losses, (scores.argmax(1) == own).double()], 1)

        return per_sample(self.config, self.samples, part.rows, self.device, both).T.cpu()

    def finish(self) -> Row:
        names = shown_names(self.train.group_names)
        row: Row = {"losses_names": names, "weights_names": names}
        row["test_reported_names"] = shown_names(self.parts["test"].reported_names)
        if self.config.spectrum:
            with self.evaluating():
                row |= self.spectrum()
        return row

    def spectrum(self) -> Row:
        r"""The smallest eigenvalue of :math:`J J^\top`, rows :math:`\nabla L_i(w)` (assumption
        LBSV), over all weights.

        With the threshold s as a further variable each row gets the entry -1 (the derivative of
        L_i - s), which adds 1 to every entry of the matrix.
        """
        rows = self._jacobian()
        gram = torch.stack([rows @ row for row in rows]).double()
        plain, bordered = (torch.linalg.eigvalsh(matrix) for matrix in (gram, gram + 1.0))
        return {
            "gram_smallest": max(plain[0].item(), 0.0),
            "gram_smallest_with_s": max(bordered[0].item(), 0.0),
            "gram_largest": plain[-1].item(),
        }

    def _jacobian(self) -> Tensor:
        """The gradient of each group's training loss, (n, d), batch by batch, in float64.

        Unlike `fcco.diagnostics.eigenvalues` it needs the graph of one batch at a time, so
        a group may have thousands of images; the price is memory for n gradients. Batches are no
        larger than those in training, since those of evaluation need room for no graph.
        """
        small = min(self.config.batch, self.config.evaluate_batch)
        config, part = replace(self.config, evaluate_batch=small), self.train.memberships()
        model = self.model
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        sizes, total = torch.bincount(part.group), sum(w.numel() for w in weights)
        result = torch.zeros(len(sizes), total, dtype=torch.float64, device=self.device)
        for group, size in enumerate(sizes):
            members = torch.nonzero(part.group == group).squeeze(1)
            label = part.label[members].to(self.device)
            for places, inputs in chunks(config, self.samples, part.rows[members], self.device):
                with torch.enable_grad():
                    here = label[places.to(self.device)]
                    loss = cross_entropy(model(inputs), here, reduction="sum")
                    gradients = torch.autograd.grad(loss, weights)
                flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
                result[group] += flat.double() / size
        return result
