"""The old model: trained on the protected classes first, kept in the cache, its losses measured."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fcco
from fcco._files import DamagedFile, read_values, write_values
from fcco.groups import GroupBatchSampler

from ...data.grouped import Samples
from ...data.sources import cache_folder
from ..base import chunks, loader
from .config import Continual
from .embedding import Encoder

__all__ = ["FIELDS", "kept_state", "losses", "read_state", "train"]

VERSION = 1  # to be raised when the same settings give another old model
FIELDS = (
    "target", "protected", "prompt", "captions", "image_backbone", "text_backbone", "image_weights",
    "text_weights", "pretrained", "train", "size", "tokens", "width", "hidden", "heads",
    "temperature", "shares", "sample_limit", "extra_pairs", "old_epochs", "old_lr", "old_batch",
    "precision",
)  # fmt: skip
"""Fields of the config that the old model depends on."""

_DECAY = 0.1


def kept_state(
    config: Continual, seed: int, facts: dict[str, str], make: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """The old model's weights from the cache, or made and put there.

    Args:
        config: see `FIELDS`.
        seed: of the split, the first weights and the batches.
        facts: what else they depend on: data, weights of the backbones, kind of device.
        make: trains it.
    """
    known = {name: getattr(config, name) for name in FIELDS}
    named = json.dumps({**known, **facts, "seed": seed, "version": VERSION}, sort_keys=True)
    key = hashlib.sha256(named.encode()).hexdigest()
    path = cache_folder() / "old" / f"{config.data}-{seed}-{key[:16]}.pt"
    try:
        found = read_values(path, key)
    except DamagedFile as error:
        warnings.warn(f"The old model is trained anew: {error}.", stacklevel=2)
        found = None
    if found is not None:
        return found
    state = make()
    try:
        write_values(path, key, state)
    except OSError as error:
        warnings.warn(f"The old model cannot be kept in {path.parent}: {error}.", stacklevel=2)
    return state


def read_state(path: str) -> dict[str, Tensor]:
    """The weights that `old` names."""
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


def train(
    encoder: Encoder, samples: Samples, rows: Tensor, label: Tensor, seed: int
) -> dict[str, Tensor]:
    """Train the model contrastively on the pairs of the protected classes.

    The heads stay at zero, so that they start equal. Images of one class are no negatives of each
    other.

    Args:
        encoder: the model, on a single process.
        samples: image inputs.
        rows: of the protected training data.
        label: of each of them.
        seed: of the batches.

    Returns:
        The weights, on the CPU.
    """
    config, model = encoder.config, encoder.model
    parameters = [p for name, p in model.named_parameters() if _trained(name) and p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=config.old_lr, weight_decay=_DECAY)
    term = fcco.ContrastiveTerm(
        len(rows), temperature=config.temperature, correction=0.0, normalize=False,
        chunk=config.chunk or None, device=encoder.device, process_group=None,
    )  # fmt: skip
    objective = fcco.Compositional(model, optimizer, term, process_group=None)
    captions = encoder.texts.captions[rows]
    for images, places in _epochs(config, samples, rows, seed, encoder.device):

        def entries(images: Tensor = images, places: Tensor = places) -> Tensor:
            seen, read = encoder(images, captions[places])
            return term.inner(seen, read, label=label[places].to(encoder.device))

        objective(entries, places.to(encoder.device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    objective.detach_hooks()
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def _trained(name: str) -> bool:
    return not name.endswith(("text_projection.down", "text_projection.up"))


def _epochs(
    config: Continual, samples: Samples, rows: Tensor, seed: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    batch = min(config.old_batch, len(rows))
    sampler = GroupBatchSampler(
        torch.zeros_like(rows), 1, batch, seed=seed, rank=0, world_size=1,
        batches_per_epoch=-(-len(rows) // batch),
    )  # fmt: skip
    found = loader(config, samples, rows, sampler, device)
    for _ in range(config.old_epochs):
        for images, places in found:
            yield images.to(device, non_blocking=True), places


def losses(
    encoder: Encoder, samples: Samples, rows: Tensor, label: Tensor, data: str
) -> fcco.ReferenceLosses:
    """The old model's logistic loss on each protected training sample, computed once.

    They are kept in the cache under a fingerprint of the model, the rows and the data.

    Args:
        encoder: the old model.
        samples: image inputs.
        rows: of the protected training data.
        label: of each of them.
        data: fingerprint of the data and of the frozen backbones.
    """
    config, prompts = encoder.config, encoder.texts.prompts

    def measured(images: Tensor, places: Tensor) -> Tensor:
        seen, read = encoder(images, prompts)
        own = label[places].to(encoder.device)
        return cross_entropy(encoder.scores(seen, read), own, reduction="none")

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for places, images in chunks(config, samples, rows, encoder.device):
            yield places, measured(images, places)

    asked = hashlib.sha256(rows.numpy().tobytes() + label.numpy().tobytes()).hexdigest()
    known = json.dumps([data, asked, [getattr(config, name) for name in _LOSS_FIELDS]])
    return fcco.ReferenceLosses.measure(
        encoder.model, batches, len(rows), data=known, cache=cache_folder() / "old"
    )


_LOSS_FIELDS = (
    "prompt", "protected", "target", "temperature", "precision", "size", "tokens", "train",
)  # fmt: skip
