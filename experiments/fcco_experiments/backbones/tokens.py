"""How texts become token ids, padded with 0."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.grouped import Samples
from ..data.sources import Progress, contents
from .weights import VOCABULARY, WeightsError, file_checksum

__all__ = [
    "id_rows",
    "lengths",
    "needed",
    "read_tokenizer",
    "token_ids",
    "tokenizer_checksum",
    "trimmed",
    "whole_ids",
]

_TOLD = 256  # texts between two calls of `progress`


def trimmed(ids: Tensor) -> Tensor:
    """Token ids without the columns at the end that are padding in every row.

    Example:
        >>> trimmed(torch.tensor([[5, 0, 0, 0], [6, 7, 0, 0]]))
        tensor([[5, 0],
                [6, 7]])
    """
    return ids[:, : max(int(lengths(ids).max()), 1)] if len(ids) else ids


def lengths(ids: Tensor) -> Tensor:
    """Tokens of each row up to the last that is no padding.

    Example:
        >>> lengths(torch.tensor([[5, 0, 6, 0], [0, 0, 0, 0]]))
        tensor([3, 0])
    """
    place = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    return ((ids != 0) * place).amax(1)


def whole_ids(call: str, batch: Tensor) -> Tensor:
    """A batch of token ids as networks take it; on the CPU without needless columns.

    Raises:
        ValueError: when it is none.
    """
    if batch.dim() != 2 or batch.is_floating_point():
        raise ValueError(
            f"`{call}` takes whole token ids (N, L) but got {batch.dtype} of shape "
            f"{tuple(batch.shape)}."
        )
    if batch.device.type == "cpu":  # elsewhere it would wait for the device
        batch = trimmed(batch)
    return batch.long()


def token_ids(
    samples: Samples,
    *,
    tokens: int,
    weights: str = "",
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Texts as rows of token ids, int32 (N, tokens), cut after `tokens` and padded with 0.

    Args:
        samples: the texts.
        tokens: columns; special tokens count.
        weights: folder with a tokenizer.json; without one, or without that file in it, the
            vocabulary of bert-base-uncased serves, which MiniLM and DistilBERT share.
        folder: where to look for that vocabulary first.
        progress: is told how many texts are done.
    """
    own = _own_tokenizer(weights)
    if own is not None:
        content, where = own.read_bytes(), str(own)
    else:
        (content,) = contents("minilm", [VOCABULARY], folder, progress=progress)
        where = VOCABULARY.name
    tokenizer = read_tokenizer(content, where)
    if tokenizer.token_to_id("[PAD]") != 0:
        raise WeightsError(f"{where} must have the token [PAD] with the id 0: backbones mask 0.")
    return id_rows(tokenizer, samples, tokens, progress)


def id_rows(
    tokenizer: Any, samples: Samples, tokens: int, progress: Progress | None = None
) -> Tensor:
    """Texts as a tokenizer of `tokenizers` cuts them, padded with 0: int32 (N, tokens)."""
    tokenizer.no_padding()
    tokenizer.enable_truncation(tokens)
    found = torch.zeros(len(samples), tokens, dtype=torch.int32)
    for row in range(len(samples)):
        text = samples[row]
        if not isinstance(text, str):
            raise TypeError(f"`encode` takes texts, but row {row} is: {type(text).__name__}.")
        # One at a time: batches would start threads, after which no process may fork quietly.
        ids = tokenizer.encode(text).ids
        found[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        if progress is not None and (row % _TOLD == 0 or row + 1 == len(samples)):
            progress("texts to tokens", row + 1, len(samples))
    return found


def tokenizer_checksum(weights: str) -> str:
    """The sha256 of the tokenizer in a folder; empty where there is none."""
    own = _own_tokenizer(weights)
    return "" if own is None else file_checksum(own)


def _own_tokenizer(weights: str) -> Path | None:
    own = Path(weights).expanduser() / "tokenizer.json"
    return own if weights and own.is_file() else None


@contextmanager
def needed() -> Iterator[None]:
    """Say how to install a package that is imported inside and not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(
            f"Text and CLIP backbones need {error.name}: pip install 'fcco[text]' (or transformers)."  # noqa: E501
        ) from error


@functools.lru_cache(maxsize=4)
def read_tokenizer(content: bytes, where: str) -> Any:
    """The tokenizer of a tokenizer.json.

    Raises:
        WeightsError: when it is none.
    """
    with needed():
        from tokenizers import Tokenizer
    try:
        return Tokenizer.from_str(content.decode())
    except Exception as error:  # tokenizers has no class of its own for these
        raise WeightsError(f"{where} is no tokenizer: {error}.") from error
