"""One run: the method, its batches and steps, figures against the old model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fcco
from fcco.contrastive import log_means
from fcco.groups import GroupBatchSampler

from ...task import Method, Row
from ..base import PART_KEYS, BaseTraining, Stepped, check_method, make_optimizer
from ..network import Batches
from .model import Continual, Encoder

if TYPE_CHECKING:
    from . import ContinualProblem

CONSTRAINED = ("automatic", "sonex", "sox", "sonx", "alexr2")
METHODS = (*CONSTRAINED, "weighted", "replay", "finetune")
"""Beside those with constraints: the mean loss of the protected classes with a fixed weight, pairs
of all classes, and the contrastive loss alone.
"""
_BY_TASK = ("objective", "outer", "dim", "tolerance", "process_group")
"""Settings of `fcco.constrained` that the task decides."""


@dataclass
class Contrasting(Stepped):
    """A method with the contrastive term of the target."""

    contrast: fcco.contrastive.ContrastiveTerm


def build(
    model: nn.Module, method: Method, config: Continual, targets: int, others: int
) -> Contrasting:
    """A method with its optimizer, the contrastive term of the target, and constraints.

    `contrast_gamma` of the settings is gamma_1, of the contrastive term; gamma_1' is 0.1 for the
    methods with MSVR and 0 for the others.

    Args:
        model: what is trained.
        method: its settings; those of a method with constraints go to `fcco.constrained`.
        config: with the protected classes and the temperature.
        targets: number of pairs of the target.
        others: of pairs of the protected classes; replay has them as anchors, too.
    """
    word, settings = method.method, dict[str, Any](method.settings)
    _check(method, config)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], method)
    contrast = fcco.contrastive.ContrastiveTerm(
        targets + (others if word == "replay" else 0),
        temperature=config.temperature,
        gamma=settings.pop("contrast_gamma", 0.8),
        correction=0.1 if word in ("automatic", "sonex", "sonx", "alexr2") else 0.0,
        offset=1 / others,
        normalize=False,  # the model's vectors have length 1
        device=next(model.parameters()).device,
    )
    if word not in CONSTRAINED:
        objective = fcco.Compositional(model, optimizer, contrast)
        return Contrasting(objective, optimizer, optimizer, contrast)
    if word != "automatic":
        settings["method"] = word
    names = list(config.protected)
    objective = fcco.constrained(model, optimizer, names, objective=contrast, **settings)
    return Contrasting(objective, objective.optimizer, optimizer, contrast)  # type: ignore[arg-type]


def _check(method: Method, config: Continual) -> None:
    """Refuse what would be taken and then ignored, or fail without its name."""
    word, settings = method.method, method.settings
    check_method(method, _BY_TASK, METHODS)
    if method.independent and (word not in CONSTRAINED or config.protect == "train"):
        raise ValueError(
            f"`independent` is for constraints with `protect: held-out` but is set for {word}."
        )
    known = ("contrast_gamma", *(["weight"] if word == "weighted" else []))
    for name in settings:
        if (word == "automatic" or word not in CONSTRAINED) and name not in known:
            raise ValueError(f"`settings.{name}` is not for {word}: {', '.join(known)}.")
    if word == "weighted" and not float(settings.get("weight", 0.0)) > 0:
        raise ValueError("`settings.weight` is needed for weighted, above 0.")


# Figures.


class Classes(NamedTuple):
    """Means over the samples of each class, in float64, and the number of samples, (C,) each."""

    accuracy: Tensor
    loss: Tensor
    count: Tensor


def by_class(scores: Tensor, label: Tensor) -> Classes:
    """Accuracy and logistic loss of every class from the scores (N, C); every class occurs."""
    scores, number = scores.double(), scores.shape[1]
    count = torch.bincount(label, minlength=number)
    right = (scores.argmax(1) == label).double()
    loss = cross_entropy(scores, label, reduction="none")
    total = torch.zeros(2, number, dtype=torch.float64, device=scores.device)
    total.index_add_(1, label, torch.stack([right, loss]))
    accuracy, mean = total / count
    return Classes(accuracy.cpu(), mean.cpu(), count.cpu())


def changes(name: str, now: Classes, old: Classes, limit: float) -> Row:
    """What became better and worse on a part of the data; the target is the last class.

    A class may lose the accuracy `limit`, and one image in any case.
    """
    lost = (old.accuracy - now.accuracy)[:-1]
    rise = now.loss[:-1] - old.loss[:-1]
    allowed = torch.clamp(1 / now.count[:-1].double(), min=limit)
    accuracy = now.accuracy
    figures: Mapping[str, float] = {
        "target_accuracy": accuracy[-1].item(),
        "target_gain": (accuracy[-1] - old.accuracy[-1]).item(),
        "accuracy": accuracy.mean().item(),
        "forgetting": lost.max().item(),
        "violation": rise.max().item(),
        "retained": float(bool((lost <= 1e-9).all())),
        "kept": float(bool((lost <= allowed + 1e-9).all())),
        "excess": (lost - allowed - 1e-9).clamp(min=0).max().item(),
    }
    prefix = "" if name == "train" else f"{name}_"
    return {f"{name}_{key}": value for key, value in figures.items()} | {
        f"{prefix}constraints": rise.tolist(),
        f"{prefix}zero_one": lost.tolist(),
        f"{prefix}accuracies": accuracy.tolist(),
    }


# The run.


class Batch(NamedTuple):
    """The samples of a batch."""

    images: Tensor  # inputs of all samples, in the order of the three parts
    anchors: Tensor  # places of the target pairs in `ContinualTraining.target`
    negatives: Tensor  # places of the pairs they are contrasted with in `others`
    kept: Tensor  # places of the samples for the constraints in `protected`
    steered: Tensor | None = None  # places in `learned` of those that carry their gradient instead


class ContinualTraining(BaseTraining):
    """A method on a data set, starting from the old model of a seed.

    Attributes:
        target: rows of the target's pairs.
        protected: rows of the samples for the constraints.
        label: class of each.
        learned: rows of the pairs of protected classes that the old model was trained on, and their
            classes.
        others: the pairs that those of the target are contrasted with: `learned`, for replay those
            that it replays, `protected`.
        old: figures of the old model on each part of the data.
        old_losses: of the old model on each protected sample.
    """

    config: Continual
    built: Contrasting
    batches: Batches

    def __init__(self, problem: ContinualProblem, method: Method, seed: int) -> None:
        config, device = problem.config, problem.device
        model = problem.old_model(seed)
        self.old_losses = problem.old_losses(model, seed)
        self.samples, self.parts = problem.samples, dict(problem.parts(seed))
        self.protected, self.label = problem.protected(seed)
        train = self.parts["train"]
        self.target = train.rows[train.label == len(config.protected)]
        self.learned = problem.learned(seed)
        self.constrained = method.method in CONSTRAINED
        self.replays = method.method == "replay"  # pairs of protected classes are anchors, too
        self.weight = float(method.settings.get("weight", 0.0)) if not self.constrained else 0.0
        self.others = (self.protected, self.label) if self.replays else self.learned
        self.encoder = Encoder(problem, model)
        built = build(model, method, config, len(self.target), len(self.others[0]))
        number = len(config.protected)
        drawn = [
            (torch.zeros_like(self.target), 1, config.batch),
            (torch.zeros_like(self.others[0]), 1, config.negatives),
            (self.label, number, config.per_class),
        ]
        rows = [self.target, self.others[0], self.protected]
        if method.independent:
            drawn.append((self.learned[1], number, config.per_class))
            rows.append(self.learned[0])
        samplers = [
            GroupBatchSampler(
                group, groups, size,
                batches_per_epoch=config.steps_per_epoch, seed=3 * seed + place,
            )
            for place, (group, groups, size) in enumerate(drawn)
        ]  # fmt: skip
        batches = Batches(config, self.samples, rows, samplers, device)
        kept = number * config.per_class * (2 if method.independent else 1)
        epoch = config.steps_per_epoch, config.batch + config.negatives + kept
        super().__init__(config, method, model, built, batches, device, epoch)
        with self.evaluating():
            self.old = {name: figures[0] for name, figures in self._classes().items()}

    def loss(self) -> Tensor:
        images, places = self.batches.draw()
        batch, objective = Batch(images, *places), self.built.objective
        pairs = batch.anchors
        if self.replays:
            pairs = torch.cat([pairs, len(self.target) + batch.negatives])
        pairs = pairs.to(self.device)

        def values(apart: bool = False) -> dict[str, Tensor]:
            return dict(zip(("objective", "constraints"), self._values(batch, apart), strict=True))

        def entries() -> Any:
            contrast, differences = self._values(batch)
            # The old losses are constants: the differences have the gradient of the losses.
            return (self.weight * differences, contrast) if self.weight else contrast

        if not self.constrained:
            return objective(entries, pairs)
        index = {"objective": pairs, "constraints": self.label[batch.kept].to(self.device)}
        if batch.steered is None:
            return objective(values, index)
        other = index | {"constraints": self.learned[1][batch.steered].to(self.device)}
        return objective(values, index, gradient=lambda: values(apart=True), gradient_index=other)

    def _values(self, batch: Batch, apart: bool = False) -> tuple[Tensor, Tensor]:
        """Entries of the contrastive term, and what each protected sample lost since the start.

        `apart`: the losses of the samples that carry the gradient alone, in their place.
        """
        texts = self.encoder.texts
        anchors, pairs = len(batch.anchors), len(batch.anchors) + len(batch.negatives)
        rows = torch.cat([self.target[batch.anchors], self.others[0][batch.negatives]])
        images, kept = batch.images, self.label[batch.kept]
        if batch.steered is not None:
            first, last = images[: pairs + len(kept)], images[pairs + len(kept) :]
            images = torch.cat([first[:pairs], last]) if apart else first
            kept = self.learned[1][batch.steered] if apart else kept
        seen, read = self.encoder(images, torch.cat([texts.captions[rows], texts.prompts]))
        target = torch.full((anchors,), len(self.config.protected))
        label = torch.cat([target, self.others[1][batch.negatives]]).to(self.device)
        anchor = None
        if not self.replays:
            anchor = torch.arange(pairs, device=self.device) < anchors
        entries = self.built.contrast.inner(seen[:pairs], read[:pairs], label=label, anchor=anchor)
        scores = self.encoder.scores(seen[pairs:], read[pairs:])
        losses = cross_entropy(scores, kept.to(self.device), reduction="none")
        if apart:  # old losses are constants, which have no gradient
            return entries, losses
        return entries, losses - self.old_losses(batch.kept.to(self.device))

    def _classes(self) -> dict[str, tuple[Classes, Tensor]]:
        """Figures of every class, and the vectors of the images, on each part of the data."""
        figures = {}
        for name, part in self.parts.items():
            prompts = self.encoder.texts.prompts
            seen, read = self.encoder.all(self.samples, part.rows, prompts)
            label = part.label.to(self.device)
            figures[name] = by_class(self.encoder.scores(seen, read), label), seen
        return figures

    def evaluate(self) -> Row:
        row: Row = {}
        with self.evaluating():
            figures = self._classes()
            for name, (now, _) in figures.items():
                limit = self.config.forget_limit
                row |= changes(PART_KEYS[name], now, self.old[name], limit)
            row["objective"] = self._objective(figures["train"][1])
        if self.constrained:
            row["multipliers"] = self._multipliers().tolist()
            tracker = self.built.objective.term.tracker
            if bool(tracker.seen.all()):
                true = torch.tensor(row["constraints"], dtype=torch.float64)
                gap = tracker.value.squeeze(-1).double().cpu() - true
                row["tracking_error"] = gap.square().mean().sqrt().item()
        return row

    def _multipliers(self) -> Tensor:
        """One per protected class, 0 where not seen."""
        return self.built.objective.term.multipliers().detach().nan_to_num(nan=0.0)

    @torch.no_grad()
    def _objective(self, images: Tensor) -> float:
        """The contrastive loss over all training pairs of the data set."""
        part, texts = self.parts["train"], self.encoder.texts
        _, read = self.encoder.all(self.samples, part.rows[:1], torch.arange(len(texts.words)))
        captions = read[texts.captions[part.rows].to(self.device)]
        return self._contrast(images, captions, part.label.to(self.device)).item()

    def _contrast(self, images: Tensor, texts: Tensor, label: Tensor) -> Tensor:
        r"""The contrastive loss of the target over pairs of unit vectors of all classes.

        .. math::
            \frac1n\sum_i \tau\bigl[\log(g_{i1} + e) + \log(g_{i2} + e)\bigr], \qquad
            e = 1/\text{number of pairs of protected classes}
        """
        logs = log_means(
            images, texts, self.config.temperature, label=label,
            anchor=label == len(self.config.protected), chunk=512, process_group=None,
        )  # fmt: skip
        return self.built.contrast.evaluate(logs)

    def finish(self) -> Row:
        """Names of the classes, the old model's figures, and speed."""
        protected, config = list(self.config.protected), self.config
        row: Row = {"constraints_names": protected, "accuracies_names": list(config.classes)}
        for name, old in self.old.items():
            row[f"old_{PART_KEYS[name]}_accuracies"] = old.accuracy.tolist()
            row[f"{PART_KEYS[name]}_counts"] = old.count.tolist()
        if "penalty" in self.method.settings:
            row["penalty"] = float(self.method.settings["penalty"])
        return row

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            # Measured or trained anew elsewhere, they may differ: a run keeps what it began with.
            "old_losses": self.old_losses.value.cpu(),
            "old": {name: list(figures) for name, figures in self.old.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.old_losses = fcco.ReferenceLosses(state["old_losses"]).to(self.device)
        self.old = {name: Classes(*figures) for name, figures in state["old"].items()}
