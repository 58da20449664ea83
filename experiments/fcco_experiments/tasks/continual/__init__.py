"""Continual learning: fine-tune an image-text model on a new class, forget none of the old ones."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fcco
from fcco._files import DamagedFile, read_values, write_values
from fcco.groups import GroupBatchSampler

from ... import backbones, data, environment
from ...data.grouped import (
    PARTS,
    GroupedData,
    GroupedPart,
    Samples,
    Vectors,
    WithinGroups,
    cut_within_groups,
)
from ...data.samples import ImageFiles
from ...data.sources import cache_folder, digest
from ...task import Method, Metric, Panel, Problem, Row, Rule
from ..base import SECONDS, BaseTask
from ..network import chunks, loader
from .model import Continual, Encoder, Scaling, Texts, TwoBackbones, made_up
from .training import ContinualTraining, Contrasting, build

__all__ = ["TASK", "Continual", "ContinualProblem", "ContinualTask"]

SHARES = (0.6, 0.2, 0.2)
"""Of training, validation and test data, for data without official parts."""
OLD_VERSION = 2  # to be raised when the same settings give another old model
OLD_FIELDS = (
    "target", "protected", "prompt", "captions", "image_backbone", "text_backbone", "image_weights",
    "text_weights", "train", "size", "tokens", "width", "heads", "temperature", "sample_limit",
    "old_share", "old_epochs", "old_lr", "old_batch", "precision",
)  # fmt: skip
"""Fields of the config that the old model depends on."""
OLD_DECAY = 0.1


def load(config: Continual) -> GroupedData:
    """The data in classes, protected ones first."""
    loaded = data.load_grouped(
        config.data, columns=config.columns, size=config.size, classes=config.classes,
        limit=config.sample_limit,
    )  # fmt: skip
    if isinstance(loaded.cut, WithinGroups):
        loaded = dataclasses.replace(loaded, cut=dataclasses.replace(loaded.cut, shares=SHARES))
    backbone = config.image_backbone
    wanted = "vector" if backbone == "none" else backbones.kind(backbone)
    if wanted != loaded.kind:
        raise ValueError(
            f"`image_backbone: {backbone}` takes data of the kind {wanted}, but {config.data} "
            f"is of the kind {loaded.kind}."
        )
    if backbone.startswith("clip-") and isinstance(loaded.samples, ImageFiles):
        # CLIP sees the middle square alone: cut it out where files are read, instead of moving
        # whole frames.
        square = dataclasses.replace(loaded.samples, size=tuple(config.size), fit=True)
        loaded = dataclasses.replace(loaded, samples=square)
    return loaded


class ContinualProblem(Problem):
    """Data, texts and models.

    A backbone that is trained is a part of the model; of a frozen one the model takes the features,
    which are computed once. Projections that come with the weights of the backbones (CLIP) are
    taken over; features of backbones that bring none are scaled first.
    """

    def __init__(self, config: Continual) -> None:
        self.config = config
        self.device = environment.device(config.device)
        self.data = load(config)
        # The class of each row, from the parts of any seed: together they are all rows.
        label = torch.zeros(len(self.data.samples), dtype=torch.int64)
        for part in self.data.cut(0).values():
            label[part.rows] = part.label
        self.texts = Texts.of(config, label)
        self.samples, self.inputs = self._image_inputs(), self._text_inputs()
        self._parts: dict[int, Mapping[str, GroupedPart]] = {}
        self._old_part: dict[int, GroupedPart] = {}
        self._old: dict[int, dict[str, Tensor]] = {}
        self._brought: dict[str, tuple[int, nn.Linear | None]] = {}

    # Inputs.

    def _options(self, side: str) -> dict[str, Any]:
        """What builds the backbone of a side."""
        weights = getattr(self.config, f"{side}_weights")
        return {"weights": weights, "size": self.config.size, "tokens": self.config.tokens}

    def _features(self, side: str, source: GroupedData) -> Tensor:
        return backbones.features(
            getattr(self.config, f"{side}_backbone"), source, **self._options(side),
            device=self.device,
        ).values  # fmt: skip

    def _text_features(self, words: tuple[str, ...]) -> Tensor:
        source = GroupedData("texts", "text", words, (), self.data.cut, digest("texts", *words))  # type: ignore[arg-type]
        return self._features("text", source)

    def _image_inputs(self) -> Samples:
        """What the image side takes: vectors, features of the frozen backbone, or images."""
        if self.config.image_backbone == "none" or self.config.train == "all":
            return self.data.samples
        return Vectors(self._features("image", self.data).to(self.device))

    def _text_inputs(self) -> Tensor:
        """What the text side takes: features of the frozen backbone, or token ids."""
        config, words = self.config, self.texts.words
        if config.text_backbone == "none":
            return made_up(words).to(self.device)
        if config.train == "projections":
            return self._text_features(words).to(self.device)
        ids: Any = backbones.encode(
            config.text_backbone, words, tokens=config.tokens, weights=config.text_weights
        )
        return ids.values.to(self.device)

    def parts(self, seed: int) -> Mapping[str, GroupedPart]:
        """Training, validation and test data of a seed; every class is in each.

        Of the protected classes' training data only those are here that `protect` names.
        """
        if seed not in self._parts:
            parts = dict(self.data.cut(seed))
            for name in PARTS:
                if len(parts[name].group_names) < len(self.config.classes):
                    raise ValueError(
                        f"`{self.config.data}`: the {name} data lack a class; they have "
                        f"{', '.join(parts[name].group_names)}. Raise `sample_limit`."
                    )
            seen, held_out = self._divided(parts["train"], seed)
            parts["train"] = seen if self.config.protect == "train" else held_out
            self._parts[seed], self._old_part[seed] = parts, seen
        return self._parts[seed]

    def _divided(self, part: GroupedPart, seed: int) -> tuple[GroupedPart, GroupedPart]:
        """Training data with the images that the old model sees, and with those that it does not.

        The target's images are in both.
        """
        share = self.config.old_share
        if share == 1:
            return part, part
        places = cut_within_groups(part.label, seed, (share, 1 - share, 0.0))
        target = torch.nonzero(part.label == len(self.config.protected)).squeeze(1)

        def of(own: Tensor) -> GroupedPart:
            chosen = torch.cat([own, target]).unique()
            columns = ("rows", "label", "group", "reported")
            return dataclasses.replace(part, **{n: getattr(part, n)[chosen] for n in columns})

        return of(places["train"]), of(places["validation"])

    def _protected(self, part: GroupedPart) -> tuple[Tensor, Tensor]:
        chosen = part.label < len(self.config.protected)
        return part.rows[chosen], part.label[chosen]

    def protected(self, seed: int) -> tuple[Tensor, Tensor]:
        """Rows and classes of the training data whose losses may not rise."""
        return self._protected(self.parts(seed)["train"])

    def learned(self, seed: int) -> tuple[Tensor, Tensor]:
        """Rows and classes of the training data that the old model is trained on."""
        self.parts(seed)
        return self._protected(self._old_part[seed])

    # The model.

    def network(self, seed: int) -> TwoBackbones:
        """A model with its first weights."""
        torch.manual_seed(seed)
        config = self.config
        image, image_width, projection = self._side("image", seed)
        text, text_width, text_projection = self._side("text", seed)
        if projection is None:
            projection = nn.Linear(image_width, config.width, bias=False)
        if text_projection is None:
            text_projection = nn.Linear(text_width, projection.out_features, bias=False)
        last: nn.Module = text_projection
        if config.heads:
            last = fcco.continual.TaskHeads(text_projection, len(config.protected), config.heads)
        return TwoBackbones(image, text, projection, last)

    def _side(self, side: str, seed: int) -> tuple[nn.Module, int, nn.Linear | None]:
        """What comes before a projection, its width, and the projection that it brings along."""
        if getattr(self.config, f"{side}_backbone") == "none":
            scaled = self._scaling(side, seed)
            return scaled, len(scaled.mean), None
        width, layer = self._brought_by(side)
        before = nn.Identity() if layer is not None else self._scaling(side, seed)
        if self.config.train == "all":
            before = nn.Sequential(self._backbone(side), before)
        return before, width, copy.deepcopy(layer)

    def _scaling(self, side: str, seed: int) -> Scaling:
        """Of texts over those of the classes, of images over those that the old model sees."""
        frozen = self.config.train == "projections"
        if side == "text":
            return Scaling(self.inputs if frozen else self._text_features(self.texts.words))
        rows = self.learned(seed)[0]
        if not frozen:
            return Scaling(self._features("image", self.data)[rows])
        assert isinstance(self.samples, Vectors)
        return Scaling(self.samples.values[rows.to(self.samples.values.device)])

    def _brought_by(self, side: str) -> tuple[int, nn.Linear | None]:
        """Width of a backbone, and the projection among its weights."""
        if side not in self._brought:
            given = bool(self._options(side)["weights"])  # they tell the sizes, too
            with torch.random.fork_rng(devices=[]):  # the first weights keep their random numbers
                # Quick without the weights, where none are needed: most bring no projection.
                torch.manual_seed(0)
                backbone = self._backbone(side, pretrained=given)
                if backbone.projection() is not None and not given:
                    torch.manual_seed(0)
                    backbone = self._backbone(side)
            self._brought[side] = backbone.width, backbone.projection()
        return self._brought[side]

    def _backbone(self, side: str, pretrained: bool = True) -> backbones.Backbone:
        return backbones.build(
            getattr(self.config, f"{side}_backbone"), pretrained=pretrained, **self._options(side)
        )

    # The old model.

    def old_model(self, seed: int) -> TwoBackbones:
        """The model that every method starts from."""
        if seed not in self._old:
            self._old[seed] = self.make_old(seed)
        model = self.network(seed)
        model.load_state_dict(self._old[seed])
        return model.to(self.device)

    def make_old(self, seed: int) -> dict[str, Tensor]:
        """Weights of the old model, from the cache, or trained and put there."""
        config = self.config
        known = {name: getattr(config, name) for name in OLD_FIELDS}
        known |= {"data": self.fingerprint(), "backbones": self._backbone_checksums}
        known |= {"device": self.device.type, "seed": seed, "version": OLD_VERSION}
        key = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
        path = cache_folder() / "old" / f"{Path(config.data).name}-{seed}-{key[:16]}.pt"
        try:
            weights = read_values(path, key)
        except DamagedFile as error:
            warnings.warn(f"The old model is trained again: {error}.", stacklevel=2)
            weights = None
        if weights is None:
            weights = self._train_old(seed)
            try:
                write_values(path, key, weights)
            except OSError as error:
                warnings.warn(f"The old model cannot be kept: {error}.", stacklevel=2)
        return weights

    @functools.cached_property
    def _backbone_checksums(self) -> str:
        """What tells the weights of the backbones from others."""
        named = {side: getattr(self.config, f"{side}_backbone") for side in ("image", "text")}
        return ", ".join(
            backbones.checksum(name, pretrained=True, **self._options(side))
            for side, name in named.items()
            if name != "none"
        )

    def _train_old(self, seed: int) -> dict[str, Tensor]:
        """Train the model contrastively on the pairs of the protected classes.

        The heads stay at zero, so that they start equal. Images of one class are no negatives of
        each other.
        """
        config, device = self.config, self.device
        rows, label = self.learned(seed)
        encoder = Encoder(self, self.network(seed).to(device))
        model, heads = encoder.model, ("text_projection.down", "text_projection.up")
        parameters = [
            parameter
            for name, parameter in model.named_parameters()
            if not name.endswith(heads) and parameter.requires_grad
        ]
        optimizer = torch.optim.AdamW(parameters, lr=config.old_lr, weight_decay=OLD_DECAY)
        term = fcco.contrastive.ContrastiveTerm(
            len(rows), temperature=config.temperature, correction=0.0, normalize=False,
            device=device, process_group=None,
        )  # fmt: skip
        objective = fcco.Compositional(model, optimizer, term, process_group=None)
        captions, batch = encoder.texts.captions[rows], min(config.old_batch, len(rows))
        sampler = GroupBatchSampler(
            torch.zeros_like(rows), 1, batch, seed=seed,
            batches_per_epoch=-(-len(rows) // batch),
        )  # fmt: skip
        batches = loader(config, self.samples, rows, sampler, device)
        for _ in range(config.old_epochs):
            for inputs, places in batches:
                images = inputs.to(device, non_blocking=True)

                def entries(images: Tensor = images, places: Tensor = places) -> Tensor:
                    seen, read = encoder(images, captions[places])
                    return term.inner(seen, read, label=label[places].to(device))

                objective(entries, places.to(device)).backward()
                optimizer.step()
                optimizer.zero_grad()
        objective.detach_hooks()
        return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}

    def old_losses(self, model: nn.Module, seed: int) -> fcco.ReferenceLosses:
        """The old model's logistic loss on each protected training sample."""
        config, encoder, (rows, label) = self.config, Encoder(self, model), self.protected(seed)

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for places, images in chunks(config, self.samples, rows, self.device):
                scores = encoder.scores(*encoder(images, encoder.texts.prompts))
                target = label[places].to(self.device)
                yield places, cross_entropy(scores, target, reduction="none")

        return fcco.ReferenceLosses.measure(model, batches, len(rows)).to(self.device)

    def start(self, method: Method, seed: int) -> ContinualTraining:
        return ContinualTraining(self, method, seed)

    def fingerprint(self) -> str:
        return self.data.fingerprint


# The task.

REFERENCES = ("finetune",)
"""Methods that do not try to keep anything."""
SMALL = 50
"""A test class with fewer images says little: one of them is more than two points."""
NEAR = 0.01
"""A logistic loss that rose by no more than this counts as kept, and a gap below it as noise."""
CHANCE = 0.05
"""A mean accuracy of the classes no further above that of guessing is that of guessing."""

AT_THE_END = (
    Metric("penalty", "rho", "none", 2, True, "weight of the penalty on violated constraints"),
    SECONDS,
    Metric("objective", "contrastive loss", "lower", meaning="contrastive loss of the target, all"
        " training pairs"),
    Metric("tracking_error", "tracking error", "lower", meaning="how far a method's running values"
        " of the constraints are from the true ones (root mean square over classes)"),
)  # fmt: skip


class ContinualTask(BaseTask):
    """Contrastive fine-tuning under non-forgetting constraints."""

    name, template = "continual", "continual"
    config, problem = Continual, ContinualProblem
    references = REFERENCES

    def grid_name(self, config: Any) -> str:
        return "paper" if config.train == "all" else "wide"

    def load(self, config: Any) -> ContinualProblem:
        problem = ContinualProblem(config)
        for seed in config.seeds:  # once, before several processes begin with them
            problem.make_old(seed)
        return problem

    def wrong(self, config: Any) -> Iterator[tuple[tuple[str, ...], str]]:
        for side in ("image", "text"):
            key, name = f"{side}_backbone", getattr(config, f"{side}_backbone")
            try:
                kind = side if name == "none" else backbones.kind(name)
            except ValueError as error:
                yield (key,), str(error)
                continue
            texts = side == "image" and config.columns.text  # of a table, in the place of images
            if kind != side and not texts:
                yield (key,), f"`{key}: {name}` takes {kind}s, not {side}s."

    def build(self, config: Any, method: Method) -> Contrasting:
        return build(nn.Linear(1, 1), method, config, 2, 2)

    def words(self, block: str, config: Continual, **values: Any) -> tuple[str, ...]:
        return super().words(block, config, allowed=_allowed(config), **values)

    def rule(self, config: Any) -> Rule:
        """What is forgotten beyond the limit first, then the accuracy of the target."""
        (text,) = self.words("rule", config)
        if config.choose_by == "validation":
            return Rule(text, _score(config), objective="test_accuracy")
        return Rule(
            text, _score(config), objective="test_target_gain", constraint="train_excess",
            limit=0.0, limited=True,
        )  # fmt: skip

    def candidates(self, config: Any, methods: Mapping[str, list[Row]]) -> list[str]:
        """Of each method one setting, the one that the rule prefers: test data choose none."""
        score = _score(config)

        def mean_score(name: str) -> tuple[float, ...]:
            columns = zip(*map(score, methods[name]), strict=True)
            return tuple(math.fsum(column) / len(methods[name]) for column in columns)

        preferred: dict[str, str] = {}
        for name in sorted(methods, key=mean_score):
            preferred.setdefault(_word(config, name), name)
        return list(preferred.values())

    def outcome(self, config: Continual, methods: Mapping[str, list[Row]]) -> dict[str, Any]:
        found = super().outcome(config, methods)
        final, words = found["final"], {_word(config, name): name for name in found["order"]}
        names = [
            n for n in final.rows if _word(config, n) not in REFERENCES and n not in final.early
        ]
        return found | {
            "names": names, "free": words.get("finetune"),
            "keepers": [name for name in names if final.mean(name, "train_kept") == 1],
        }  # fmt: skip

    def warnings(self, config: Any, row: Row) -> tuple[str, ...]:
        """Figures that mean less than they seem to."""
        lost, constraints = row["zero_one"], row["constraints"]
        gain, error = row["train_target_gain"], row.get("tracking_error", 0.0)
        counts = row.get("test_counts", (SMALL,))
        return self.words(
            "warnings",
            config,
            row=row,
            guessing=row["train_accuracy"] <= 1 / len(config.classes) + CHANCE,
            still=gain == 0 and not any(lost) and max(map(abs, constraints)) < 1e-3,
            error=error if error > max(NEAR, *map(abs, constraints)) else 0.0,
            near=NEAR if row["train_violation"] <= NEAR and row["train_kept"] < 1 else 0.0,
            worst=lost.index(max(lost)),
            capped=_capped(config, row, error),
            smallest=counts.index(min(counts)) if min(counts) < SMALL else None,
        )

    def once(self, config: Any) -> tuple[Metric, ...]:
        return AT_THE_END

    def card(self, config: Any) -> dict[str, str]:
        return self.described(
            config, title=config.data, asks=f"the samples of {config.data}",
            notes="Test accuracies are those of images that no training has seen; look at how many"
            " of each class there are.",
        )  # fmt: skip

    def figures(self, config: Continual) -> Iterator[tuple[Metric, str]]:
        target, allowed = config.target, _allowed(config)
        meaning = f"accuracy on {target}, minus that of the old model"
        yield Metric("target_gain", "gain", "higher", 3, meaning=meaning), "test val"
        meaning = f"accuracy that a protected class lost beyond {allowed}; should be 0, judged on"
        meaning += " training data"
        yield Metric("excess", "forgotten beyond limit", "lower", meaning=meaning), "train"
        meaning = "largest accuracy that a protected class lost; below 0 all became better"
        yield Metric("forgetting", "forgetting", "lower", 3, meaning=meaning), "test train"
        meaning = f"share of runs in which no protected class lost more than {allowed}"
        yield Metric("kept", "kept", "higher", 2, meaning=meaning), "train"
        meaning = "retention ratio: share of runs in which no protected class lost any accuracy"
        yield Metric("retained", "retained", "higher", 2, meaning=meaning), "test"
        meaning = "largest rise of a protected class's logistic loss; should be at most 0"
        yield Metric("violation", "worst constraint", "lower", meaning=meaning), "train"
        meaning = f"accuracy on {target}"
        yield Metric("target_accuracy", "target accuracy", "higher", 3, meaning=meaning), ""
        meaning = "mean accuracy of all classes, each counted once"
        yield Metric("accuracy", "accuracy", "higher", 3, meaning=meaning), ""

    def panels(self, config: Continual) -> Iterator[Panel]:
        target, limit, lost = config.target, config.forget_limit, "largest loss of accuracy"
        gain = f"gain of {target}"
        title = "What is learned, what is forgotten (test data): up and left is better"
        yield Panel(
            "tradeoff", "test_target_gain", title, gain, "test_forgetting",
            f"{lost} of a protected class", reference=0.0, x_reference=limit,
        )  # fmt: skip
        for part in ("train", "test"):
            yield Panel(
                "curve", f"{part}_target_gain", f"Accuracy gained on {target}, {part}", gain
            )
        title = "Largest accuracy that a protected class lost (test data)"
        yield Panel("curve", "test_forgetting", title, lost, reference=limit)
        title = "Worst constraint on training data: should be at most 0"
        yield Panel("curve", "train_violation", title, "largest rise of a loss", reference=0.0)


def _score(config: Continual) -> Callable[[Row], tuple[float, ...]]:
    """The smaller the better: what is forgotten, the target's accuracy, the largest constraint.

    Protected classes are judged where the constraints live, the target on validation data; or all
    classes on validation data. Test figures are never looked at.
    """
    if config.choose_by == "validation":
        return lambda row: (-row["val_accuracy"],)
    return lambda row: (row["train_excess"], -row["val_target_accuracy"], row["train_violation"])


def _allowed(config: Continual) -> str:
    """What a protected class may lose, in words."""
    limit = config.forget_limit
    return f"the larger of {limit} and one image" if limit > 0 else "one image"


def _word(config: Continual, name: str) -> str:
    """The method of a name, such as `sonex` of `sonex-rho-10@3`."""
    family = name if name in config.methods else name.rpartition("@")[0]
    return config.methods[family].method if family in config.methods else name


def _capped(config: Continual, row: Row, error: float) -> list[str]:
    """Classes that are forgotten although their multiplier is the most that the penalty can pay."""
    if "penalty" not in row or "multipliers" not in row:
        return []
    cap, multipliers = row["penalty"] / len(config.protected), row["multipliers"]
    if max(multipliers) > (1 + 1e-3) * cap:  # a squared hinge has no such limit
        return []
    return [
        name
        for name, value, price in zip(
            config.protected, row["constraints"], multipliers, strict=True
        )
        if price >= (1 - 1e-3) * cap and value > max(NEAR, error)
    ]


TASK = ContinualTask()
