"""Features of frozen backbones, computed once and kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from fcco import _checks
from fcco._files import DamagedFile, read_values, write_values

from ..data.grouped import GroupedData, Samples, Vectors
from ..data.sources import Progress, cache_folder
from .base import Backbone, Options, lengths, trimmed
from .registry import find, seeded, shape

VERSION = 1  # to be raised when the same weights give other features


def features(
    name: str,
    data: GroupedData,
    *,
    pretrained: bool = True,
    weights: str = "",
    size: tuple[int, int] | None = None,
    tokens: int | None = None,
    batch: int = 64,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Vectors:
    """What a frozen backbone makes of every sample: float32 (N, width), on the CPU.

    They are kept in the cache folder under a name that depends on the backbone, the checksum of its
    weights, the fingerprint of the data, `size` or `tokens`, and the kind of device; a file that
    is damaged is computed anew. Several processes may ask at once: each file is whole, and the
    last to be written stays. Random weights are the same each time.

    Args:
        name: of the backbone.
        data: images or texts, as the backbone takes them.
        pretrained: as in `build`.
        weights: as in `build`.
        size: as in `build`.
        tokens: texts are cut after so many; as in `build`.
        batch: samples at a time.
        device: where to compute.
        progress: is told about downloads, and how many samples are done.
        folder: where to look first for files that PyPI has.
    """
    _checks.integer("features", "batch", batch, 1)
    spec, where = find(name), torch.device(device)
    if spec.kind != data.kind:
        raise ValueError(
            f"The backbone `{name}` takes {spec.kind}s, but the data `{data.name}` are "
            f"{data.kind}s."
        )
    size, tokens = shape(spec, pretrained, weights, size, tokens)
    options = Options(pretrained, weights, folder=folder, progress=progress)
    if data.kind == "image":  # the other one must not matter
        options = replace(options, size=size)
    else:
        options = replace(options, tokens=tokens)
    facts = {
        "version": VERSION,
        "backbone": name,
        "weights": spec.checksum(options),
        "data": data.fingerprint,
        "samples": len(data.samples),
        "shape": list(size) if data.kind == "image" else tokens,
        "precision": "float32",
        "device": where.type,
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    words = "-".join(re.sub(r"\W+", "-", word) for word in (data.name, name))
    path = cache_folder() / "features" / f"{words}-{key[:16]}.pt"
    found: Tensor | None = None
    with contextlib.suppress(DamagedFile):
        found = read_values(path, key)
    if found is None:
        backbone = seeded(spec, options)
        if where.type == "cpu":  # convolutions are faster so
            backbone = backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        what = f"features of {data.name} by {name}"
        samples = spec.encode(data.samples, options)
        found = compute(backbone, samples, batch=batch, device=where, progress=progress, what=what)
        try:
            write_values(path, key, found)
        except OSError as error:
            warnings.warn(f"Features cannot be kept in {path.parent}: {error}.", stacklevel=2)
    return Vectors(found)


def compute(
    backbone: Backbone,
    samples: Samples,
    *,
    batch: int = 64,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    what: str = "features",
) -> Tensor:
    """The output of a backbone in evaluation mode for every sample: float32 (N, width), on the CPU.

    Token ids go through it in the order of their length, so that little of a batch is padding.
    The backbone is on `device` afterwards.

    Args:
        backbone: the network.
        samples: images, or token ids as `encode` gives them.
        batch: samples at a time.
        device: where to compute.
        progress: is told how many samples are done.
        what: the words for that.
    """
    where = torch.device(device)
    training = backbone.training
    backbone.to(where).eval()
    found, done = torch.empty(len(samples), backbone.width), 0
    try:
        with torch.no_grad():
            for rows, values in _batches(backbone, samples, batch):
                found[rows] = backbone(values.to(where)).cpu().float()
                done += len(rows)
                if progress is not None:
                    progress(what, done, len(samples))
    finally:
        backbone.train(training)
    return found


def _batches(backbone: Backbone, samples: Samples, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows and their samples; the longest texts first, so that memory runs out at once or never."""
    values = samples.values if isinstance(samples, Vectors) else None
    order = torch.arange(len(samples))
    if backbone.kind == "text" and values is not None:
        order = lengths(values).argsort(descending=True, stable=True)
    for rows in order.split(batch):
        if values is None:
            stacked = torch.stack([cast(Tensor, samples[row]) for row in rows.tolist()])
        else:
            stacked = values[rows]
        yield rows, trimmed(stacked) if backbone.kind == "text" else stacked
