"""What every backbone is, and what image backbones share: scaling, batch norm, recomputation."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from fcco import _checks
from fcco.previous.swap import ParameterSwap

__all__ = [
    "Backbone",
    "BatchNormMode",
    "ImageBackbone",
    "ImageNetwork",
    "Kind",
    "keep_colours",
    "random_start",
    "whole_images",
]

Kind = Literal["image", "text"]
BatchNormMode = Literal["frozen", "batch"]
Stage = Sequence[nn.Module]


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
        """The layer that the pretrained weights bring along, None where they bring none.

        It leads from this width to the space shared with another backbone. Each call makes a new
        layer, with the values that the backbone was built with.
        """
        return None

    def temperature(self) -> float | None:
        """What the scores in that space were divided by when the weights were trained, or None."""
        return None


class ImageNetwork(nn.Module, abc.ABC):
    """A convolutional network as a chain of stages, with or without its classifier.

    A subclass defines `stages` and sets `width`, the channels of the last features.
    """

    width: int

    @abc.abstractmethod
    def stages(self) -> Sequence[Stage]:
        """The parts, in order, each a chain of layers; the last gives maps (N, width, h, w)."""

    def classifier_layer(self) -> nn.Module | None:
        """The layer from pooled features to classes; None when it was not built."""
        return None

    def forward(self, images: Tensor) -> Tensor:
        """Pooled features of normalised images, or their logits when there is a classifier."""
        for stage in self.stages():
            images = _chain(images, stage)
        pooled, layer = images.mean((2, 3)), self.classifier_layer()
        return pooled if layer is None else layer(pooled)


class ImageBackbone(Backbone):
    r"""Scales and normalises images on their device, then averages the last features over space.

    .. math:: x \mapsto \mathrm{mean}_{h,w}\; \mathrm{net}\bigl((x - \mu) / \sigma\bigr)

    Args:
        network: the stages.
        mean: of each channel, on the scale from 0 to 255.
        deviation: of each channel, on that scale.
        size: height and width that images are scaled to (bilinear, with antialiasing).
        recompute: keep only the inputs of the stages and compute the rest anew in the backward
            pass: less memory, about a third more time. Statistics of batch norm move once.
        batch_norm: `"frozen"` uses the running statistics in training too (weights and biases
            still train); `"batch"` those of each batch.
        dropout: rate on the output, while training.
    """

    kind: Kind = "image"
    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        network: ImageNetwork,
        mean: Sequence[float],
        deviation: Sequence[float],
        *,
        size: tuple[int, int] = (128, 104),
        recompute: bool = False,
        batch_norm: BatchNormMode = "frozen",
        dropout: float = 0.0,
    ) -> None:
        _checks.one_of("ImageBackbone", "batch_norm", batch_norm, ("frozen", "batch"))
        _checks.in_interval("ImageBackbone", "dropout", dropout, 0.0, 1.0, open_high=True)
        if len(size) != 2 or min(size) < 1:
            raise ValueError(
                f"`ImageBackbone(size=...)` must be a height and a width but is: {size}."
            )
        super().__init__()
        self.network, self.width = network, network.width
        self.size = (int(size[0]), int(size[1]))
        self.recompute, self.batch_norm = recompute, batch_norm
        self.dropout = nn.Dropout(dropout)
        keep_colours(self, mean, deviation)
        self.train(self.training)

    def forward(self, batch: Tensor) -> Tensor:
        """Features of images with values from 0 to 255, of any number type and size."""
        values = whole_images("ImageBackbone", batch, len(self.mean))
        if values.shape[2:] != self.size:
            values = interpolate(values, self.size, mode="bilinear", antialias=True)
        values = (values - self.mean) / self.deviation
        recompute = self.recompute and torch.is_grad_enabled()
        for stage in self.network.stages():
            values = _recomputed(values, stage) if recompute else _chain(values, stage)
        return self.dropout(values.float().mean((2, 3)))

    def train(self, mode: bool = True) -> ImageBackbone:
        """As `nn.Module.train`, except that frozen batch norm stays in evaluation mode."""
        super().train(mode)
        if self.batch_norm == "frozen":
            for module in self.network.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self


def keep_colours(backbone: Backbone, mean: Sequence[float], deviation: Sequence[float]) -> None:
    """Give a backbone the buffers `mean` and `deviation`, a column for each channel.

    They move with it but are no part of its state.
    """
    for name, values in (("mean", mean), ("deviation", deviation)):
        column = torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)
        backbone.register_buffer(name, column, persistent=False)


def whole_images(call: str, batch: Tensor, channels: int) -> Tensor:
    """A batch of images of any number type and size, as float32.

    Raises:
        ValueError: when it is none.
    """
    if batch.dim() != 4 or batch.shape[1] != channels:
        raise ValueError(
            f"`{call}` takes images (N, {channels}, H, W) but their shape is: {tuple(batch.shape)}."
        )
    return batch.float()


def _chain(values: Tensor, stage: Stage) -> Tensor:
    for layer in stage:
        values = layer(values)
    return values


def _recomputed(values: Tensor, stage: Stage) -> Tensor:
    layers = (each for layer in stage for each in layer.modules())
    options: dict[str, Any] = {}
    if any(isinstance(each, _BatchNorm) and each.training for each in layers):
        options["context_fn"] = lambda: (nullcontext(), _statistics_rest(stage))
    return cast(Tensor, checkpoint(_chain, values, stage, use_reentrant=False, **options))


@contextmanager
def _statistics_rest(stage: Stage) -> Iterator[None]:
    """Let batch norm move copies of its statistics: the first pass has moved the originals."""
    with ExitStack() as stack:
        for layer in stage:
            stack.enter_context(ParameterSwap(layer).at({}))
        yield


@torch.no_grad()
def random_start(network: nn.Module, fan: Literal["fan_in", "fan_out"] = "fan_out") -> None:
    r"""Start weights as He et al. (2015): normal with variance 2 / fan; batch norm as identity.

    The fan of a grouped convolution is that of one group.

    References:
        He, Zhang, Ren and Sun (2015), Delving deep into rectifiers.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            outputs, inputs, *kernel = module.weight.shape
            count = inputs if fan == "fan_in" else outputs // module.groups
            scale = (2 / (count * kernel[0] * kernel[1])) ** 0.5
            nn.init.normal_(module.weight, 0.0, scale)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0.0, 0.01)
            nn.init.zeros_(module.bias)
