"""Features of frozen backbones, computed once and kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fcco import _checks
from fcco._files import DamagedFile, read_values, write_values

from ..data.grouped import GroupedData, Samples, Vectors
from ..data.sources import Progress, cache_folder
from .backbone import Backbone
from .registry import checksum, encode, kind, seeded, shape
from .tokens import lengths, trimmed

__all__ = ["compute", "features"]

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
    if kind(name) != data.kind:
        raise ValueError(
            f"The backbone `{name}` takes {kind(name)}s, but the data `{data.name}` are {data.kind}s."  # noqa: E501
        )
    where = torch.device(device)
    chosen: dict[str, Any] = {"pretrained": pretrained, "weights": weights}
    size, tokens = shape(name, size=size, tokens=tokens, **chosen)
    chosen |= {"size": size} if data.kind == "image" else {"tokens": tokens}
    facts = {
        "version": VERSION,
        "backbone": name,
        "weights": checksum(name, folder=folder, progress=progress, **chosen),
        "data": data.fingerprint,
        "samples": len(data.samples),
        "shape": list(size) if data.kind == "image" else tokens,
        "precision": "float32",
        "device": where.type,
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    words = "-".join(re.sub(r"\W+", "-", word) for word in (data.name, name))
    path = cache_folder() / "features" / f"{words}-{key[:16]}.pt"
    found = _read(path, key)
    if found is None:
        backbone = seeded(name, folder=folder, progress=progress, **chosen)
        if where.type == "cpu":  # convolutions are faster so
            backbone = backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        samples = encode(
            name, data.samples, tokens=tokens, weights=weights, folder=folder, progress=progress
        )
        what = f"features of {data.name} by {name}"
        found = compute(backbone, samples, batch=batch, device=where, progress=progress, what=what)
        _write(path, key, found)
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


def _read(path: Path, key: str) -> Tensor | None:
    """What a file holds, when it is whole and the one that is meant."""
    try:
        return read_values(path, key)
    except DamagedFile:
        return None


def _write(path: Path, key: str, values: Tensor) -> None:
    try:
        write_values(path, key, values)
    except OSError as error:
        warnings.warn(f"Features cannot be kept in {path.parent}: {error}.", stacklevel=3)
