"""One run: the method, its batches and steps, figures against the old model, KKT residuals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fcco
from fcco import diagnostics
from fcco._distributed import find_group
from fcco.contrastive import log_means
from fcco.groups import GroupBatchSampler

from ... import strategy
from ...data.grouped import GroupedPart, Samples
from ...task import Method, Row
from ..base import PART_KEYS, BaseTraining, Batches, Stepped, make_optimizer
from .config import Continual
from .model import Encoder, Texts

__all__ = ["METHODS", "Built", "Classes", "ContinualTraining", "build", "by_class", "changes"]

CONSTRAINED = ("sonex", "sox", "sonx", "alexr2")
METHODS = (*CONSTRAINED, "finetune", "weighted", "replay")
_OURS = ("objective", "outer", "dim", "equality", "tolerance", "process_group")
"""Settings of `fcco.constrained` that the task decides."""
_CORRECTED = ("sonex", "sonx", "alexr2")


@dataclass
class Built(Stepped):
    """A method on this task.

    Attributes:
        contrast: the contrastive term of the objective.
        constrained: whether values of the constraints are asked for.
        everyone: whether the pairs of protected classes are anchors, too.
        weight: of the mean loss of the protected classes in the objective.
    """

    contrast: fcco.ContrastiveTerm
    constrained: bool
    everyone: bool = False
    weight: float = 0.0

    def loss(self, values: Callable[[], tuple[Tensor, Tensor]], index: Mapping[str, Tensor]) -> Any:
        """What is differentiated.

        Args:
            values: runs the model; gives the entries of the contrastive term and, for each sample
                of a protected class, its loss minus the old one.
            index: block ids of both.
        """
        if self.constrained:
            return self.objective(
                lambda: dict(zip(("objective", "constraints"), values(), strict=True)), dict(index)
            )

        def entries() -> Any:
            contrast, differences = values()
            # The old losses are constants: the differences have the gradient of the losses.
            return (self.weight * differences, contrast) if self.weight else contrast

        return self.objective(entries, index["objective"])

    def multipliers(self) -> Tensor | None:
        """One per protected class, 0 where not seen; None for methods without constraints."""
        if not self.constrained:
            return None
        return self.objective.term.multipliers().detach().nan_to_num(nan=0.0)

    def tracked(self) -> Tensor | None:
        """The running values of the constraints, NaN where not seen."""
        if not self.constrained:
            return None
        tracker = self.objective.term.tracker
        return torch.where(tracker.seen, tracker.value.squeeze(-1), torch.nan)


def build(
    model: nn.Module,
    method: Method,
    protected: Sequence[str],
    pairs: Sequence[int],
    *,
    temperature: float,
    chunk: int = 0,
) -> Built:
    """A method with its optimizer.

    Settings of every method: `contrast_gamma` and `contrast_correction`, gamma_1 and gamma_1' of
    the contrastive term. Without them 0.8 and, for the methods with MSVR, 0.1 (0 for the others).

    Args:
        model: what is trained.
        method: its settings.
        protected: names of the protected classes.
        pairs: number of target pairs, and of pairs of protected classes.
        temperature: tau.
        chunk: rows of a strip of the matrix of scores; 0 holds the whole.
    """
    word, given = method.method, dict(method.settings)
    _check(word, given, method)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], method)
    gamma: Any = given.pop("contrast_gamma", 0.8)
    correction: Any = given.pop("contrast_correction", 0.1 if word in _CORRECTED else 0.0)
    targets, others = pairs
    contrast = fcco.ContrastiveTerm(
        targets + (others if word == "replay" else 0),
        temperature=temperature,
        gamma=gamma,
        correction=correction,
        offset=1 / others,
        normalize=False,  # the model's vectors have length 1
        chunk=chunk or None,
        device=next(model.parameters()).device,
    )
    if word in CONSTRAINED:
        settings: dict[str, Any] = given
        objective = fcco.constrained(
            model, optimizer, list(protected), word, objective=contrast, **settings
        )
        stepped: Any = objective.optimizer
        return Built(objective, stepped, optimizer, contrast, True)
    plain = fcco.Compositional(model, optimizer, contrast)
    weight = float(given.get("weight", 0.0))
    return Built(plain, optimizer, optimizer, contrast, False, word == "replay", weight)


def _check(word: str, settings: dict[str, Any], method: Method) -> None:
    """Refuse what would be taken and then ignored, or fail without its name."""
    if word not in METHODS:
        raise ValueError(f"`method` must be one of {', '.join(METHODS)} but is: {word}.")
    for name in settings:
        if name in _OURS:
            raise ValueError(f"`settings.{name}` of {word} is made by the task; leave it out.")
    if method.independent:
        raise ValueError(f"`independent` is not offered here but is set for {word}.")
    if word in CONSTRAINED:
        return
    known = {"contrast_gamma", "contrast_correction", *(("weight",) * (word == "weighted"))}
    if wrong := [name for name in settings if name not in known]:
        raise ValueError(f"`settings.{wrong[0]}` is not for {word}: {', '.join(sorted(known))}.")
    if word == "weighted" and not float(settings.get("weight", 0.0)) > 0:
        raise ValueError("`settings.weight` is needed for weighted, above 0.")


# Figures.


class Classes(NamedTuple):
    """Means over the samples of each class, in float64.

    Attributes:
        accuracy: share that is classified rightly, (C,).
        loss: logistic loss, (C,).
        count: samples, (C,).
    """

    accuracy: Tensor
    loss: Tensor
    count: Tensor


def by_class(scores: Tensor, label: Tensor) -> Classes:
    """The figures of every class.

    Args:
        scores: of the classes, (N, C).
        label: of each sample; every class occurs.

    Example:
        >>> found = by_class(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]))
        >>> found.accuracy.tolist(), found.count.tolist()
        ([1.0, 0.0], [1, 1])
    """
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

    Args:
        name: `train`, `val` or `test`, for the keys.
        now: the model.
        old: the old model.
        limit: accuracy that a class may lose; one image is always allowed.
    """
    lost = (old.accuracy - now.accuracy)[:-1]
    excess = now.loss[:-1] - old.loss[:-1]
    allowed = torch.clamp(1 / now.count[:-1].double(), min=limit)
    accuracy = now.accuracy
    found: Mapping[str, float] = {
        "target_accuracy": accuracy[-1].item(),
        "target_gain": (accuracy[-1] - old.accuracy[-1]).item(),
        "target_loss": now.loss[-1].item(),
        "protected_accuracy": accuracy[:-1].mean().item(),
        "protected_change": -lost.mean().item(),
        "accuracy": accuracy.mean().item(),
        "forgetting": lost.max().item(),
        "forgotten_images": (lost * now.count[:-1]).clamp(min=0).sum().item(),
        "violation": excess.max().item(),
        "retained": float(bool((lost <= 1e-9).all())),
        "kept": float(bool((lost <= allowed + 1e-9).all())),
        "excess": (lost - allowed - 1e-9).clamp(min=0).max().item(),
    }
    row: Row = {f"{name}_{key}": value for key, value in found.items()}
    prefix = "" if name == "train" else f"{name}_"
    row[f"{prefix}constraints"] = excess.tolist()
    row[f"{prefix}zero_one"] = lost.tolist()
    row[f"{prefix}accuracies"] = accuracy.tolist()
    return row


# The run.


class Streams(NamedTuple):
    """Rows that the three parts of a batch are drawn from.

    Attributes:
        anchors: rows of the target's pairs.
        negatives: rows of the pairs of protected classes; samples for the constraints too.
        label: class of each of the latter.
    """

    anchors: Tensor
    negatives: Tensor
    label: Tensor


class Batch(NamedTuple):
    """The samples of a batch, this rank's part of it.

    Attributes:
        images: inputs of all samples, in the order of the three parts.
        anchors: places of the target pairs in their stream.
        negatives: places of the pairs they are contrasted with in their stream.
        kept: places of the samples of protected classes, in the same stream.
    """

    images: Tensor
    anchors: Tensor
    negatives: Tensor
    kept: Tensor


class ContinualTraining(BaseTraining):
    """A method on a data set from a seed, starting from the old model.

    Args:
        config: of the experiment.
        method: and its settings.
        seed: of the batches.
        model: the old model, on the device.
        samples: image inputs of all rows.
        texts: all texts.
        inputs: what the text side takes, one row for each text, on the device.
        parts: the data by name; classes are protected first, the target last.
        extra: rows of further pairs for the target.
        old_losses: of the old model, one for each protected training sample, in their order.
        device: of the model and of the batches.
    """

    config: Continual
    built: Built
    batches: Batches

    def __init__(
        self,
        config: Continual,
        method: Method,
        seed: int,
        model: nn.Module,
        samples: Samples,
        texts: Texts,
        inputs: Tensor,
        parts: Mapping[str, GroupedPart],
        extra: Tensor,
        old_losses: fcco.ReferenceLosses,
        device: torch.device,
    ) -> None:
        self.parts, self.samples, self.old_losses = dict(parts), samples, old_losses
        rows, label = parts["train"].rows, parts["train"].label
        protected = label < len(config.protected)
        self.streams = streams = Streams(
            torch.cat([rows[~protected], extra]), rows[protected], label[protected]
        )
        model = strategy.wrap(model, config.strategy, device)
        self.encoder = Encoder(config, model, texts, inputs, device)
        built = build(
            model, method, config.protected, (len(streams.anchors), len(streams.negatives)),
            temperature=config.temperature, chunk=config.chunk,
        )  # fmt: skip
        classes = config.classes_per_batch or len(config.protected)
        wanted = (
            (torch.zeros_like(streams.anchors), 1, config.batch),
            (torch.zeros_like(streams.negatives), 1, config.negatives),
            (streams.label, classes, config.per_class),
        )
        samplers = [
            GroupBatchSampler(
                group, number, each,
                batches_per_epoch=config.steps_per_epoch, seed=3 * seed + place,
            )
            for place, (group, number, each) in enumerate(wanted)
        ]  # fmt: skip
        drawn = (streams.anchors, streams.negatives, streams.negatives)
        batches = Batches(config, samples, drawn, samplers, device)
        super().__init__(config, method, model, built, batches, device)
        self.old = {name: found[0] for name, found in self._classes().items()}

    @property
    def samples_per_step(self) -> int:
        """Images of a batch."""
        config = self.config
        classes = config.classes_per_batch or len(config.protected)
        return config.batch + config.negatives + classes * config.per_class

    @property
    def steps_per_epoch(self) -> int:
        """As the config says."""
        return self.config.steps_per_epoch

    def update(self) -> None:
        """One batch."""
        images, places = self.batches.draw()
        batch = Batch(images, *places)
        self.built.loss(lambda: self._values(batch), self._index(batch)).backward()
        self.built.optimizer.step()
        self.built.optimizer.zero_grad()

    def _index(self, batch: Batch) -> dict[str, Tensor]:
        """Blocks: the target pairs (and, where they are anchors too, the others), the classes."""
        pairs = batch.anchors
        if self.built.everyone:
            pairs = torch.cat([pairs, len(self.streams.anchors) + batch.negatives])
        kept = self.streams.label[batch.kept]
        return {"objective": pairs.to(self.device), "constraints": kept.to(self.device)}

    def _values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Entries of the contrastive term, and what each protected sample lost since the start."""
        texts, streams = self.encoder.texts, self.streams
        anchors, pairs = len(batch.anchors), len(batch.anchors) + len(batch.negatives)
        rows = torch.cat([streams.anchors[batch.anchors], streams.negatives[batch.negatives]])
        seen, read = self.encoder(batch.images, torch.cat([texts.captions[rows], texts.prompts]))
        target = torch.full((anchors,), len(self.config.protected))
        label = torch.cat([target, streams.label[batch.negatives]]).to(self.device)
        anchor = None
        if not self.built.everyone:
            anchor = torch.arange(pairs, device=self.device) < anchors
        entries = self.built.contrast.inner(seen[:pairs], read[:pairs], label=label, anchor=anchor)
        scores = self.encoder.scores(seen[pairs:], read[pairs:])
        own = streams.label[batch.kept].to(self.device)
        losses = cross_entropy(scores, own, reduction="none")
        return entries, losses - self.old_losses(batch.kept.to(self.device))

    def _classes(self) -> dict[str, tuple[Classes, Tensor]]:
        """Figures of every class, and the vectors of the images, on each part of the data."""
        found = {}
        for name, part in self.parts.items():
            seen, read = self.encoder.all(
                self.samples, part.rows, self.encoder.texts.prompts, find_group()
            )
            label = part.label.to(self.device)
            found[name] = by_class(self.encoder.scores(seen, read), label), seen
        return found

    def evaluate(self) -> Row:
        """Accuracies and losses on all data against the old model's; it changes nothing.

        In the middle of a round of a double loop the weights of its start are evaluated.
        """
        row: Row = {}
        with self.built.at_anchor():
            found = self._classes()
            for name, (now, _) in found.items():
                limit = self.config.forget_limit
                row.update(changes(PART_KEYS[name], now, self.old[name], limit))
            row["objective"] = self._objective(found["train"][1])
        multipliers, tracked = self.built.multipliers(), self.built.tracked()
        if multipliers is not None:
            row["multipliers"] = multipliers.tolist()
        if tracked is not None and not bool(tracked.isnan().any()):
            gap = tracked.double().cpu() - torch.tensor(row["constraints"], dtype=torch.float64)
            row["tracking_error"] = gap.square().mean().sqrt().item()
        return row

    @torch.no_grad()
    def _objective(self, images: Tensor) -> float:
        """The contrastive loss over all training pairs of the data set."""
        part, texts = self.parts["train"], self.encoder.texts
        _, read = self.encoder.all(self.samples, part.rows[:1], torch.arange(texts.of_classes))
        captions = read[texts.captions[part.rows].to(self.device)]
        return self._contrast(images, captions, part.label.to(self.device)).item()

    def _contrast(self, images: Tensor, texts: Tensor, label: Tensor) -> Tensor:
        r"""The contrastive loss of the target over many pairs.

        .. math::
            \frac1n\sum_i \tau\bigl[\log(g_{i1} + e) + \log(g_{i2} + e)\bigr], \qquad
            e = 1/\text{number of pairs of protected classes}

        Args:
            images: unit vectors of the pairs.
            texts: of their captions.
            label: class of each, on the device.
        """
        logs = log_means(
            images, texts, self.config.temperature, label=label,
            anchor=label == len(self.config.protected), chunk=512, process_group=None,
        )  # fmt: skip
        return self.built.contrast.evaluate(logs)

    def finish(self) -> Row:
        """Names of the classes, the old model's figures, speed, and KKT residuals."""
        protected, config = list(self.config.protected), self.config
        row: Row = {"constraints_names": protected, "accuracies_names": list(config.classes)}
        for name, old in self.old.items():
            row[f"old_{PART_KEYS[name]}_accuracies"] = old.accuracy.tolist()
            row[f"{PART_KEYS[name]}_counts"] = old.count.tolist()
        if "penalty" in self.method.settings:
            row["penalty"] = float(self.method.settings["penalty"])
        row |= self.speed()
        if config.certificate and config.train == "projections" and not self.sharded:
            with self.built.at_anchor():
                row |= self._certificate()
        return row

    def _certificate(self) -> Row:
        """KKT residuals on all training data, with the method's multipliers and the best ones.

        For models whose backbones are frozen: everything is evaluated in one graph.
        """
        encoder, streams, device = self.encoder, self.streams, self.device
        number, own_pairs = len(self.config.protected), len(streams.anchors)
        rows = torch.cat([streams.anchors, streams.negatives])  # the former with the extra pairs
        label = torch.cat([torch.full((own_pairs,), number), streams.label]).to(device)
        values = self.samples.values[rows.to(device)]  # type: ignore[union-attr]
        captions, prompts = encoder.texts.captions[rows], encoder.texts.prompts
        limits = torch.tensor(self.old["train"].loss[:number].tolist(), device=device)

        def loss() -> Tensor:
            return self._contrast(*encoder(values, captions), label)

        def inner(index: Tensor) -> Tensor:
            seen, read = encoder(values[own_pairs:], prompts)
            own = label[own_pairs:]
            losses = cross_entropy(encoder.scores(seen, read), own, reduction="none")
            return torch.stack([losses[own == k].mean() - limits[k] for k in index.tolist()])

        parameters = [p for p in encoder.model.parameters() if p.requires_grad]
        best = diagnostics.kkt(loss, inner, number, parameters, per_layer=False)
        found = {
            "kkt_best_stationarity": best.stationarity,
            "kkt_best_complementarity": best.complementarity,
            "kkt_feasibility": best.feasibility,
            "best_multipliers": best.multipliers.tolist(),
        }
        multipliers = self.built.multipliers()
        if multipliers is not None:
            used = diagnostics.kkt(
                loss, inner, number, parameters, multipliers=multipliers, per_layer=False
            )
            found["kkt_stationarity"] = used.stationarity
            found["kkt_complementarity"] = used.complementarity
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            **super().state_dict(),
            # Measured or trained anew elsewhere, they may differ: a run keeps what it began with.
            "old_losses": self.old_losses.value.cpu(),
            "old": {name: list(each) for name, each in self.old.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the middle."""
        super().load_state_dict(state)
        self.old_losses = fcco.ReferenceLosses(state["old_losses"]).to(self.device)
        self.old = {name: Classes(*each) for name, each in state["old"].items()}
