"""Hugging Face folders: where they are, and the weights and the configuration in them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .tokens import needed
from .weights import Weights, WeightsError, at_path, file_checksum

__all__ = ["cached_folder", "configuration_fields", "find_folder", "folder_weights", "read_json"]

_STATES = ("model.safetensors", "pytorch_model.bin")


def find_folder(name: str, weights: str, repositories: Sequence[str], advice: str) -> Path:
    """The folder of a pretrained backbone: the user's, or what Hugging Face's cache holds.

    Args:
        name: of the backbone.
        weights: the user's folder, or nothing.
        repositories: the names of the backbone on the Hugging Face hub, best first.
        advice: what `weights` has to be, for messages.

    Raises:
        WeightsError: when there is none, or it lacks a file.
    """
    if weights:
        place = Path(weights).expanduser()
        lacking = [] if (place / "config.json").is_file() else ["config.json"]
        if not any((place / state).is_file() for state in _STATES):
            lacking.append(_STATES[0])
        if lacking:
            raise WeightsError(f"{place} has no {' and no '.join(lacking)}; `weights` is {advice}.")
        return place
    found = cached_folder(repositories, [("config.json", state) for state in _STATES])
    if found is None:
        raise WeightsError(
            f"The backbone `{name}` has no pretrained weights here. Give `weights` {advice}; or start "  # noqa: E501
            "from random weights with `pretrained: false`."
        )
    return found


def cached_folder(repositories: Sequence[str], wanted: Sequence[tuple[str, ...]]) -> Path | None:
    """The first repository in Hugging Face's cache with all files of one of the choices."""
    with needed():
        from huggingface_hub import try_to_load_from_cache
    for repository in repositories:
        for choice in wanted:
            paths = [try_to_load_from_cache(repository, part) for part in choice]
            if all(isinstance(path, str) for path in paths):
                return Path(str(paths[0])).parent
    return None


def folder_weights(place: Path, *others: str) -> Weights:
    """The weights of a folder, with a checksum of them, of config.json and of what else is given.

    Args:
        place: the folder.
        others: checksums of further files that matter.
    """
    found = at_path(next(path for state in _STATES if (path := place / state).is_file()))
    parts = [found.sha256, file_checksum(place / "config.json"), *others]
    return Weights(found.where, hashlib.sha256(" ".join(parts).encode()).hexdigest(), found.read)


def configuration_fields(place: Path) -> dict[str, Any]:
    """What config.json of a folder says, without the number type that the weights were stored in.

    Backbones are built in torch's own.
    """
    return _without_type(read_json(place / "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """The fields of a file.

    Raises:
        WeightsError: when it holds none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(f"{path} is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise WeightsError(f"{path} must hold fields with values but holds: {str(found)[:40]}.")
    return found


def _without_type(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_type(value) if isinstance(value, dict) else value
        for key, value in fields.items()
        if key not in ("dtype", "torch_dtype")
    }
