"""Fingerprints: what a module knows, as one line of hexadecimal digits."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .visit import any_sharded

__all__ = ["mapping_checksum", "state_checksum", "tensor_checksum"]


def state_checksum(module: nn.Module) -> str:
    """The sha256 of all parameters and buffers with their names.

    The same for a model and for the same model inside DDP or `torch.compile`. A sharded model
    (FSDP2) has its tensors put together for it, which is a call to all ranks.

    Args:
        module: the model.

    Example:
        >>> import torch
        >>> from fcco.fingerprint import state_checksum
        >>> layer = torch.nn.Linear(2, 1)
        >>> before = state_checksum(layer)
        >>> _ = torch.nn.init.constant_(layer.bias, 9.0)
        >>> state_checksum(layer) == before
        False
    """
    return mapping_checksum(_plain(module).state_dict())


def mapping_checksum(values: Mapping[str, Any]) -> str:
    """The sha256 of many tensors with their names, kinds and shapes, in the order of the names."""
    digest = hashlib.sha256()
    for name, value in sorted(values.items(), key=lambda item: item[0]):
        if not isinstance(value, Tensor):  # the extra state of a module
            digest.update(f"{name} {type(value).__name__} ".encode() + pickle.dumps(value))
            continue
        if any_sharded((value,)):
            value = value.full_tensor()  # type: ignore[attr-defined]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(_content(value))
    return digest.hexdigest()


def tensor_checksum(tensor: Tensor) -> str:
    """The sha256 of the content of a tensor, whatever its shape and device."""
    return hashlib.sha256(_content(tensor)).hexdigest()


def _content(tensor: Tensor) -> bytes | memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if len(flat) else b""


def _plain(module: nn.Module) -> nn.Module:
    """The model inside DDP and `torch.compile`, which put a word before every name."""
    while True:
        ddp = isinstance(module, nn.parallel.DistributedDataParallel)
        inside = module.module if ddp else getattr(module, "_orig_mod", None)
        if not isinstance(inside, nn.Module):
            return module
        module = inside
