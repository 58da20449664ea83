"""The problem: images of classes with their texts, a model for them, the old model of each seed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ... import backbones, data, distributed
from ...backbones import checksum
from ...backbones.clip import CLIP
from ...data.grouped import PARTS, GroupedPart, Samples, Vectors, WithinGroups
from ...data.images import ImageFiles
from ...data.pairs import read_pairs
from ...data.sources import digest
from ...task import Method, Problem
from . import old
from .assembly import Assembly
from .config import Continual
from .embedding import Encoder
from .model import Scaling, TwoBackbones
from .texts import Texts, made_up
from .training import ContinualTraining

__all__ = ["ContinualProblem"]

Progress = Callable[[str, int, int | None], None]


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

    Args:
        config: of the experiment.
        progress: is told about downloads and the computation of features.
    """

    def __init__(self, config: Continual, progress: Progress | None = None) -> None:
        self.config, self._progress = config, progress
        self.device = distributed.device(config.device)
        found = data.load_grouped(
            config.data, classes=config.classes, limit=config.sample_limit, progress=progress
        )
        if isinstance(found.cut, WithinGroups):
            cut = dataclasses.replace(found.cut, shares=tuple(config.shares))
            found = dataclasses.replace(found, cut=cut)
        wanted = (
            "vector" if config.image_backbone == "none" else backbones.kind(config.image_backbone)
        )
        if wanted != found.kind:
            raise ValueError(
                f"`image_backbone: {config.image_backbone}` takes data of the kind {wanted}, but "
                f"{config.data} is of the kind {found.kind}."
            )
        if config.image_backbone in CLIP and isinstance(found.samples, ImageFiles):
            # CLIP sees the middle square alone: cut it out where files are read, for frames and
            # pairs alike, instead of moving whole frames.
            square = dataclasses.replace(found.samples, size=tuple(config.size), fit=True)
            found = dataclasses.replace(found, samples=square)
        self.data, self.extra = found, None
        if config.extra_pairs:
            self.extra = read_pairs(config.extra_pairs, size=self._image_size())
        self.texts = Texts.of(config, self._labels(), self.extra.captions if self.extra else ())
        self.samples = self._images()
        self.inputs = self._texts()
        self._parts: dict[int, Mapping[str, GroupedPart]] = {}
        self._old: dict[int, dict[str, Tensor]] = {}
        self._assembly = Assembly(config, progress)

    def _image_size(self) -> tuple[int, int]:
        first: Any = self.data.samples[0]
        return int(first.shape[1]), int(first.shape[2])

    def _labels(self) -> Tensor:
        """The class of each row, from the parts of any seed: together they are all rows."""
        label = torch.zeros(len(self.data.samples), dtype=torch.int64)
        for part in self.data.cut(0).values():
            label[part.rows] = part.label
        return label

    def _features(self, side: str, source: Any) -> Tensor:
        config = self.config
        return backbones.features(
            getattr(config, f"{side}_backbone"), source, pretrained=config.pretrained,
            weights=getattr(config, f"{side}_weights"), size=config.size, tokens=config.tokens,
            device=self.device, progress=self._progress,
        ).values  # fmt: skip

    def _images(self) -> Samples:
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

    def _texts(self) -> Tensor:
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

    def network(self, seed: int) -> TwoBackbones:
        """A model with its first weights, see `Assembly`."""
        torch.manual_seed(seed)
        return self._assembly.model(lambda side: self._scaling(side, seed))

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

    def _encoder(self, model: nn.Module) -> Encoder:
        return Encoder(self.config, model, self.texts, self.inputs, self.device)

    def old_state(self, seed: int) -> dict[str, Tensor]:
        """The weights of the old model: given, or trained first, by rank 0 alone."""
        if seed not in self._old:
            self._old[seed] = distributed.run_on_first(lambda: self.make_old(seed))
        return self._old[seed]

    @functools.cached_property
    def _backbones(self) -> str:
        """What tells the weights of the backbones from others."""
        config = self.config
        sides = [(config.image_backbone, config.image_weights)]
        sides += [(config.text_backbone, config.text_weights)]
        built = {"pretrained": config.pretrained, "size": config.size, "tokens": config.tokens}
        known = [checksum(name, weights=own, **built) for name, own in sides if name != "none"]
        return ", ".join(known)

    def make_old(self, seed: int) -> dict[str, Tensor]:
        """The same for this process alone: it says nothing to other ranks."""
        config = self.config
        if config.old:
            return old.read_state(config.old)

        def make() -> dict[str, Tensor]:
            rows, label = self._protected(seed)
            encoder = self._encoder(self.network(seed).to(self.device))
            return old.train(encoder, self.samples, rows, label, seed)

        facts = {
            "data": self.fingerprint(), "backbones": self._backbones, "device": self.device.type
        }  # fmt: skip
        return old.kept_state(config, seed, facts, make)

    def start(self, method: Method, seed: int) -> ContinualTraining:
        """A run from the old model."""
        state, (rows, label) = self.old_state(seed), self._protected(seed)
        model = self.network(seed)
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise ValueError(f"`old` does not fit the model of this config: {error}") from error
        model.to(self.device)
        known = f"{self.fingerprint()}, {self._backbones}"  # frozen backbones are not in the model
        losses = old.losses(self._encoder(model), self.samples, rows, label, known)
        first = len(self.data.samples)
        extra = torch.arange(first, first + (len(self.extra) if self.extra else 0))
        return ContinualTraining(
            self.config, method, seed, model, self.samples, self.texts, self.inputs,
            self.parts(seed), extra, losses.to(self.device), self.device,
        )  # fmt: skip

    def fingerprint(self) -> str:
        """Of the data, and of the extra pairs where there are any."""
        extra = self.extra
        return (
            self.data.fingerprint
            if extra is None
            else digest(self.data.fingerprint, extra.fingerprint)
        )
