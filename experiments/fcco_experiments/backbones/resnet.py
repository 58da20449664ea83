"""ResNet-50 with torchvision's key names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import relu

from .backbone import ImageNetwork, random_start

__all__ = ["IMAGENET_DEVIATION", "IMAGENET_MEAN", "ResNet"]

# Of ImageNet, on the scale from 0 to 255.
IMAGENET_MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
IMAGENET_DEVIATION = (0.229 * 255, 0.224 * 255, 0.225 * 255)


class ResNet(ImageNetwork):
    """A residual network of bottleneck blocks; ResNet-50 unless told otherwise.

    The 3x3 convolution of a block has the stride ("v1.5"), as in torchvision, whose state dicts
    load.

    Args:
        layers: blocks of each of the four stages.
        channels: of the first convolution; the output has 32 times as many.
        classes: of the classifier; 0 for none.

    References:
        He, Zhang, Ren and Sun (2016), Deep residual learning for image recognition.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     network = ResNet(classes=1000)
        >>> network.width, sum(parameter.numel() for parameter in network.parameters())
        (2048, 25557032)
    """

    def __init__(
        self, layers: Sequence[int] = (3, 4, 6, 3), channels: int = 64, classes: int = 0
    ) -> None:
        super().__init__()
        self.width = channels * 8 * _Bottleneck.expansion
        self.conv1 = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu, self.maxpool = nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        first, second, third, fourth = layers
        wide = channels * _Bottleneck.expansion
        self.layer1 = _stage(channels, channels, first, stride=1)
        self.layer2 = _stage(wide, channels * 2, second, stride=2)
        self.layer3 = _stage(wide * 2, channels * 4, third, stride=2)
        self.layer4 = _stage(wide * 4, channels * 8, fourth, stride=2)
        self.fc = nn.Linear(self.width, classes) if classes else None
        random_start(self)

    def stages(self) -> Sequence[Sequence[nn.Module]]:
        """Stem and the four stages."""
        stem = (self.conv1, self.bn1, self.relu, self.maxpool)
        return [stem, (self.layer1,), (self.layer2,), (self.layer3,), (self.layer4,)]

    def classifier_layer(self) -> nn.Module | None:
        """The linear layer to classes."""
        return self.fc


def _stage(inputs: int, inside: int, blocks: int, stride: int) -> nn.Sequential:
    outputs = inside * _Bottleneck.expansion
    rest = [_Bottleneck(outputs, inside) for _ in range(blocks - 1)]
    return nn.Sequential(_Bottleneck(inputs, inside, stride), *rest)


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
