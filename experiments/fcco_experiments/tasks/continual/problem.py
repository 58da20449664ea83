"""The problem: images of classes with their texts, a model for them, the old model of each seed."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fcco
from fcco._files import DamagedFile, read_values, write_values
from fcco.groups import GroupBatchSampler

from ... import backbones, data, distributed
from ...backbones.clip import CLIP
from ...data.grouped import PARTS, GroupedPart, Samples, Vectors, WithinGroups
from ...data.images import ImageFiles
from ...data.pairs import read_pairs
from ...data.sources import cache_folder, digest
from ...task import Method, Problem, Progress
from ..base import chunks, loader
from .config import Continual
from .model import Encoder, Scaling, Texts, TwoBackbones, made_up
from .training import ContinualTraining

__all__ = ["OLD_FIELDS", "ContinualProblem", "read_old"]

OLD_VERSION = 1  # to be raised when the same settings give another old model
OLD_FIELDS = (
    "target", "protected", "prompt", "captions", "image_backbone", "text_backbone", "image_weights",
    "text_weights", "pretrained", "train", "size", "tokens", "width", "hidden", "heads",
    "temperature", "shares", "sample_limit", "extra_pairs", "old_epochs", "old_lr", "old_batch",
    "precision",
)  # fmt: skip
"""Fields of the config that the old model depends on."""
_LOSS_FIELDS = (
    "prompt", "protected", "target", "temperature", "precision", "size", "tokens", "train",
)  # fmt: skip
_OLD_DECAY = 0.1


@dataclasses.dataclass(frozen=True)
class _Source:
    """What features are computed of."""

    name: str
    kind: str
    samples: Any
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class _Joined:
    """Samples of one sequence, then those of another."""

    first: Samples
    second: Samples

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def __getitem__(self, row: int) -> Any:
        start = len(self.first)
        return self.first[row] if row < start else self.second[row - start]


class ContinualProblem(Problem):
    """Data, texts and models.

    A backbone that is trained is a part of the model; of a frozen one the model takes the features,
    which are computed once. Projections that come with the weights of the backbones (CLIP) are
    taken over; features of backbones that bring none are scaled first.

    Args:
        config: of the experiment.
        progress: is told about downloads and the computation of features.
    """

    def __init__(self, config: Continual, progress: Progress | None = None) -> None:
        self.config, self._progress = config, progress
        self.device = distributed.device(config.device)
        self.data, self.extra = self._load(), None
        if config.extra_pairs:
            first: Any = self.data.samples[0]
            height, width = int(first.shape[1]), int(first.shape[2])
            self.extra = read_pairs(config.extra_pairs, size=(height, width))
        # The class of each row, from the parts of any seed: together they are all rows.
        label = torch.zeros(len(self.data.samples), dtype=torch.int64)
        for part in self.data.cut(0).values():
            label[part.rows] = part.label
        self.texts = Texts.of(config, label, self.extra.captions if self.extra else ())
        self.samples, self.inputs = self._image_inputs(), self._text_inputs()
        self._parts: dict[int, Mapping[str, GroupedPart]] = {}
        self._old: dict[int, dict[str, Tensor]] = {}
        self._brought: dict[str, tuple[int, nn.Linear | None]] = {}

    def _load(self) -> Any:
        config = self.config
        found = data.load_grouped(
            config.data,
            classes=config.classes,
            limit=config.sample_limit,
            progress=self._progress,
        )
        if isinstance(found.cut, WithinGroups):
            cut = dataclasses.replace(found.cut, shares=tuple(config.shares))
            found = dataclasses.replace(found, cut=cut)
        backbone = config.image_backbone
        wanted = "vector" if backbone == "none" else backbones.kind(backbone)
        if wanted != found.kind:
            raise ValueError(
                f"`image_backbone: {backbone}` takes data of the kind {wanted}, but {config.data} "
                f"is of the kind {found.kind}."
            )
        if backbone in CLIP and isinstance(found.samples, ImageFiles):
            # CLIP sees the middle square alone: cut it out where files are read, for frames and
            # pairs alike, instead of moving whole frames.
            square = dataclasses.replace(found.samples, size=tuple(config.size), fit=True)
            found = dataclasses.replace(found, samples=square)
        return found

    # Inputs.

    def _features(self, side: str, source: Any) -> Tensor:
        config = self.config
        return backbones.features(
            getattr(config, f"{side}_backbone"), source, pretrained=config.pretrained,
            weights=getattr(config, f"{side}_weights"), size=config.size, tokens=config.tokens,
            device=self.device, progress=self._progress,
        ).values  # fmt: skip

    def _image_inputs(self) -> Samples:
        """What the image side takes: vectors, features of the frozen backbone, or images."""
        own, extra = self.data.samples, self.extra
        if self.config.image_backbone == "none":
            return own
        if self.config.train == "all":
            return own if extra is None else _Joined(own, extra.samples)
        found = [self._features("image", self.data)]
        if extra is not None:
            source = _Source("pairs", "image", extra.samples, extra.fingerprint)
            found.append(self._features("image", source))
        return Vectors(torch.cat(found).to(self.device))

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

    def _text_features(self, words: tuple[str, ...]) -> Tensor:
        return self._features("text", _Source("texts", "text", words, digest("texts", *words)))

    def parts(self, seed: int) -> Mapping[str, GroupedPart]:
        """Training, validation and test data of a seed; every class is in each."""
        if seed not in self._parts:
            found = self.data.cut(seed)
            for name in PARTS:
                if len(found[name].group_names) < len(self.config.classes):
                    raise ValueError(
                        f"`{self.config.data}`: the {name} data lack a class; they have "
                        f"{', '.join(found[name].group_names)}. Raise `sample_limit` or `shares`."
                    )
            self._parts[seed] = found
        return self._parts[seed]

    def _protected(self, seed: int) -> tuple[Tensor, Tensor]:
        """Rows and classes of the protected training data."""
        part = self.parts(seed)["train"]
        own = part.label < len(self.config.protected)
        return part.rows[own], part.label[own]

    # The model.

    def network(self, seed: int) -> TwoBackbones:
        """A model with its first weights."""
        torch.manual_seed(seed)
        config = self.config
        image, wide, first = self._side("image", seed)
        text, wide_too, second = self._side("text", seed)
        space = config.width if first is None else first.out_features
        if first is not None:
            seen: nn.Module = first
        elif config.hidden:
            layer = nn.Linear(wide, config.hidden)
            seen = nn.Sequential(layer, nn.ReLU(), nn.Linear(config.hidden, space, bias=False))
        else:
            seen = nn.Linear(wide, space, bias=False)
        read = second or nn.Linear(wide_too, space, bias=False)
        heads = fcco.TaskHeads(read, len(config.protected), config.heads) if config.heads else read
        return TwoBackbones(image, text, seen, heads)

    def _side(self, side: str, seed: int) -> tuple[nn.Module, int, nn.Linear | None]:
        """What comes before a projection, its width, and the projection that it brings along."""
        config = self.config
        if getattr(config, f"{side}_backbone") == "none":
            scaled = self._scaling(side, seed)
            return scaled, len(scaled.mean), None
        width, layer = self._brought_by(side)
        before = nn.Identity() if layer is not None else self._scaling(side, seed)
        if config.train == "all" or (config.train == "text" and side == "text"):
            if config.pretrained:
                trained = self._backbone(side)
            else:  # with random weights the one whose features the scaling is of
                trained = self._seeded_backbone(side)
            before = nn.Sequential(trained, before)
        return before, width, copy.deepcopy(layer)

    def _scaling(self, side: str, seed: int) -> Scaling:
        """Of texts over those of the classes, of images over the protected training data."""
        if side == "text":
            number = self.texts.of_classes
            if self.config.train == "projections":
                return Scaling(self.inputs[:number])
            return Scaling(self._text_features(self.texts.words[:number]))
        rows = self._protected(seed)[0]
        if self.config.train != "all":
            assert isinstance(self.samples, Vectors)
            return Scaling(self.samples.values[rows.to(self.samples.values.device)])
        return Scaling(self._features("image", self.data)[rows])

    def _brought_by(self, side: str) -> tuple[int, nn.Linear | None]:
        """Width of a backbone, and the projection among its weights."""
        if side not in self._brought:
            given = getattr(self.config, f"{side}_weights")  # they tell the sizes, too
            # Quick without the weights, where none are needed: most bring no projection.
            backbone = self._seeded_backbone(side, pretrained=bool(given))
            if backbone.projection() is not None and not given:
                backbone = self._seeded_backbone(side)
            self._brought[side] = backbone.width, backbone.projection()
        return self._brought[side]

    def _seeded_backbone(self, side: str, pretrained: bool = True) -> backbones.Backbone:
        """The backbone whose features are kept; draws nothing from the stream of first weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self._backbone(side, pretrained)

    def _backbone(self, side: str, pretrained: bool = True) -> backbones.Backbone:
        config = self.config
        pretrained = pretrained and config.pretrained
        return backbones.build(
            getattr(config, f"{side}_backbone"),
            pretrained=pretrained,
            weights=getattr(config, f"{side}_weights") if pretrained else "",
            size=config.size,
            tokens=config.tokens,
            recompute=config.recompute,
            progress=self._progress,
        )

    def _encoder(self, model: nn.Module) -> Encoder:
        return Encoder(self.config, model, self.texts, self.inputs, self.device)

    # The old model.

    def old_state(self, seed: int) -> dict[str, Tensor]:
        """The weights of the old model: given, or trained first, by rank 0 alone."""
        if seed not in self._old:
            self._old[seed] = distributed.run_on_first(lambda: self.make_old(seed))
        return self._old[seed]

    def make_old(self, seed: int) -> dict[str, Tensor]:
        """The same for this process alone: given, from the cache, or trained and put there."""
        config = self.config
        if config.old:
            return read_old(config.old)
        known = {name: getattr(config, name) for name in OLD_FIELDS}
        known |= {"data": self.fingerprint(), "backbones": self._backbone_checksums}
        known |= {"device": self.device.type, "seed": seed, "version": OLD_VERSION}
        key = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
        path = cache_folder() / "old" / f"{Path(config.data).name}-{seed}-{key[:16]}.pt"
        try:
            found = read_values(path, key)
        except DamagedFile as error:
            warnings.warn(f"The old model is trained anew: {error}.", stacklevel=2)
            found = None
        if found is None:
            found = self._train_old(seed)
            try:
                write_values(path, key, found)
            except OSError as error:
                warnings.warn(
                    f"The old model cannot be kept in {path.parent}: {error}.", stacklevel=2
                )
        return found

    @functools.cached_property
    def _backbone_checksums(self) -> str:
        """What tells the weights of the backbones from others."""
        config = self.config
        built = {"pretrained": config.pretrained, "size": config.size, "tokens": config.tokens}
        return ", ".join(
            backbones.checksum(name, weights=own, **built)
            for name, own in (
                (config.image_backbone, config.image_weights),
                (config.text_backbone, config.text_weights),
            )
            if name != "none"
        )

    def _train_old(self, seed: int) -> dict[str, Tensor]:
        """Train the model contrastively on the pairs of the protected classes.

        The heads stay at zero, so that they start equal. Images of one class are no negatives of
        each other.
        """
        config, device = self.config, self.device
        rows, label = self._protected(seed)
        encoder = self._encoder(self.network(seed).to(device))
        model = encoder.model
        heads = ("text_projection.down", "text_projection.up")
        parameters = [
            p
            for name, p in model.named_parameters()
            if not name.endswith(heads) and p.requires_grad
        ]
        optimizer = torch.optim.AdamW(parameters, lr=config.old_lr, weight_decay=_OLD_DECAY)
        term = fcco.ContrastiveTerm(
            len(rows), temperature=config.temperature, correction=0.0, normalize=False,
            chunk=config.chunk or None, device=device, process_group=None,
        )  # fmt: skip
        objective = fcco.Compositional(model, optimizer, term, process_group=None)
        captions, batch = encoder.texts.captions[rows], min(config.old_batch, len(rows))
        sampler = GroupBatchSampler(
            torch.zeros_like(rows), 1, batch, seed=seed, rank=0, world_size=1,
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

    def _old_losses(self, model: nn.Module, rows: Tensor, label: Tensor) -> fcco.ReferenceLosses:
        """The old model's logistic loss on each protected training sample, computed once.

        They are kept in the cache under a fingerprint of the model, the rows, the data and the
        frozen backbones, which are not in the model.
        """
        config, encoder = self.config, self._encoder(model)

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for places, images in chunks(config, self.samples, rows, self.device):
                scores = encoder.scores(*encoder(images, encoder.texts.prompts))
                own = label[places].to(self.device)
                yield places, cross_entropy(scores, own, reduction="none")

        asked = hashlib.sha256(rows.numpy().tobytes() + label.numpy().tobytes()).hexdigest()
        inputs = f"{self.fingerprint()}, {self._backbone_checksums}"
        known = json.dumps([inputs, asked, [getattr(config, name) for name in _LOSS_FIELDS]])
        return fcco.ReferenceLosses.measure(
            model, batches, len(rows), data=known, cache=cache_folder() / "old"
        )

    # Runs.

    def start(self, method: Method, seed: int) -> ContinualTraining:
        """A run from the old model."""
        state, (rows, label) = self.old_state(seed), self._protected(seed)
        model = self.network(seed)
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise ValueError(f"`old` does not fit the model of this config: {error}") from error
        model.to(self.device)
        losses = self._old_losses(model, rows, label).to(self.device)
        first = len(self.data.samples)
        extra = torch.arange(first, first + (len(self.extra) if self.extra else 0))
        return ContinualTraining(
            self.config, method, seed, model, self.samples, self.texts, self.inputs,
            self.parts(seed), extra, losses, self.device,
        )  # fmt: skip

    def fingerprint(self) -> str:
        """Of the data, and of the extra pairs where there are any."""
        own = self.data.fingerprint
        return own if self.extra is None else digest(own, self.extra.fingerprint)


def read_old(path: str) -> dict[str, Tensor]:
    """The weights that the key `old` of a config names."""
    place = Path(path).expanduser()
    if not place.is_file():
        raise ValueError(f"`old` must be a file of weights but there is none at {place}.")
    try:
        found: Any = torch.load(place, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, pickle and zipfile have one each
        raise ValueError(f"`old`: {place} is no file of weights: {error}.") from error
    if isinstance(found, dict):
        found = found.get("values", found)  # a file of the cache, or the weights themselves
    if not (isinstance(found, dict) and all(map(torch.is_tensor, found.values()))):
        raise ValueError(f"`old`: {place} must hold a state dict, names with tensors.")
    return found
