"""DenseNet-121 with torchvision's key names."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from .backbone import ImageNetwork, random_start

__all__ = ["DenseNet", "renamed"]


class DenseNet(ImageNetwork):
    """A network whose layers see the outputs of all before them; DenseNet-121 unless told.

    Args:
        layers: of each block.
        growth: channels that a layer adds.
        channels: of the first convolution.
        classes: of the classifier; 0 for none.

    References:
        Huang, Liu, van der Maaten and Weinberger (2017), Densely connected convolutional networks.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     network = DenseNet(classes=1000)
        >>> network.width, sum(parameter.numel() for parameter in network.parameters())
        (1024, 7978856)
    """

    def __init__(
        self,
        layers: Sequence[int] = (6, 12, 24, 16),
        growth: int = 32,
        channels: int = 64,
        classes: int = 0,
    ) -> None:
        super().__init__()
        parts: OrderedDict[str, nn.Module] = OrderedDict(
            conv0=nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            norm0=nn.BatchNorm2d(channels),
            relu0=nn.ReLU(),
            pool0=nn.MaxPool2d(3, 2, 1),
        )
        for number, count in enumerate(layers, 1):
            parts[f"denseblock{number}"] = _block(channels, growth, count)
            channels += growth * count
            if number < len(layers):
                parts[f"transition{number}"] = _transition(channels)
                channels //= 2
        parts["norm5"], parts["relu5"] = nn.BatchNorm2d(channels), nn.ReLU()
        self.width = channels
        self.features = nn.Sequential(parts)
        self.classifier = nn.Linear(channels, classes) if classes else None
        random_start(self, "fan_in")

    def stages(self) -> Sequence[Sequence[nn.Module]]:
        """Stem, then each block with what follows it."""
        found: list[list[nn.Module]] = [[]]
        for name, part in self.features.named_children():
            if name.startswith("denseblock"):
                found.append([])
            found[-1].append(part)
        return found

    def classifier_layer(self) -> nn.Module | None:
        """The linear layer to classes."""
        return self.classifier


def _block(inputs: int, growth: int, count: int) -> nn.Sequential:
    layers = {f"denselayer{k + 1}": _Layer(inputs + k * growth, growth) for k in range(count)}
    return nn.Sequential(OrderedDict(layers))


def _transition(channels: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            norm=nn.BatchNorm2d(channels),
            relu=nn.ReLU(),
            conv=nn.Conv2d(channels, channels // 2, 1, bias=False),
            pool=nn.AvgPool2d(2, 2),
        )
    )


class _Layer(nn.Module):
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


def renamed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with today's names: torchvision's files have `norm.1` where it is `norm1`.

    Example:
        >>> list(renamed({"features.denseblock1.denselayer2.norm.1.weight": torch.zeros(1)}))
        ['features.denseblock1.denselayer2.norm1.weight']
    """
    old = re.compile(r"(\.denselayer\d+\.(?:norm|conv))\.([12])\.")
    return {old.sub(r"\1\2.", key): value for key, value in state.items()}
