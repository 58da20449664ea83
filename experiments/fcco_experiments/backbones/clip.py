"""The two backbones of CLIP, on `transformers`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from fcco import _checks

from .backbone import Backbone, Kind, keep_colours, whole_images
from .clip_files import (
    ADVICE,
    DEVIATION,
    HUB,
    MEAN,
    clip_colours,
    clip_configuration,
    tokenizer_files,
)
from .folders import find_folder, folder_weights
from .tokens import whole_ids
from .weights import Weights, WeightsError, file_checksum, load_into

__all__ = [
    "CLIP",
    "ClipImageBackbone",
    "ClipTextBackbone",
    "build_clip",
    "clip_shape",
    "clip_weights",
]

CLIP: dict[str, Kind] = {"clip-image": "image", "clip-text": "text"}
"""The backbones of CLIP, and what each takes."""


class _ClipBackbone(Backbone):
    """What both backbones share: the network, and what leads to the other one."""

    def __init__(
        self, model: Any, part: str, layer: str, temperature: float, recompute: bool
    ) -> None:
        _checks.positive(type(self).__name__, "temperature", temperature)
        super().__init__()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.network = getattr(model, part)
        self.width = int(self.network.config.hidden_size)
        # Not a parameter: one without a gradient would stop DistributedDataParallel.
        self._layer: Tensor = getattr(model, layer).weight.detach().clone()
        self._temperature = float(temperature)

    def projection(self) -> nn.Linear:
        """A new layer without bias, from this width to the space of both backbones.

        On the device and of the number type of the backbone.
        """
        target = next(self.parameters())
        with torch.no_grad():
            layer = nn.Linear(self.width, len(self._layer), bias=False, device="meta")
            layer.weight = nn.Parameter(self._layer.to(target, copy=True))
        return layer

    def temperature(self) -> float:
        r"""What CLIP divides scores by, :math:`e^{-s}` with its learned `logit_scale` s."""
        return self._temperature


class ClipImageBackbone(_ClipBackbone):
    r"""CLIP's vision transformer: images to the state of its class token, as CLIP pools it.

    .. math:: x \mapsto \mathrm{norm}(h_1), \qquad
        h = \mathrm{net}\bigl((\mathrm{cut}(x) / 255 - \mu) / \sigma\bigr)

    The preprocessing is CLIP's, on the device of the batch: the shorter side is scaled to the
    `image_size` of the configuration (bicubic, with antialiasing), and the middle square is cut
    out. So positions never need to be interpolated. To show CLIP a whole picture that is no
    square, scale it to one before.

    Args:
        model: a `CLIPModel` or `CLIPVisionModelWithProjection` of `transformers`.
        temperature: what `temperature()` gives.
        mean: of each channel, on the scale from 0 to 1.
        deviation: of each channel, on that scale.
        recompute: keep only the inputs of the layers and compute the rest anew in the backward
            pass of training.

    References:
        Radford et al. (2021), Learning transferable visual models from natural language
        supervision; Dosovitskiy et al. (2021), An image is worth 16x16 words.
    """

    kind: Kind = "image"
    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        mean: Sequence[float] = MEAN,
        deviation: Sequence[float] = DEVIATION,
        recompute: bool = False,
    ) -> None:
        super().__init__(model, "vision_model", "visual_projection", temperature, recompute)
        keep_colours(self, [255 * m for m in mean], [255 * d for d in deviation])

    def forward(self, batch: Tensor) -> Tensor:
        """The vectors of images with values from 0 to 255, of any number type and size."""
        values = whole_images("ClipImageBackbone", batch, len(self.mean))
        values = _middle(values, int(self.network.config.image_size))
        values = (values - self.mean) / self.deviation
        return self.network(pixel_values=values).pooler_output.float()


class ClipTextBackbone(_ClipBackbone):
    r"""CLIP's text transformer: token ids to the state at the end of each text.

    .. math:: x \mapsto h_e, \qquad e = \min\{l : x_l = \text{end of text}\}

    Attention looks back only, so what follows the end does not matter, whatever its id; no mask is
    needed, and the id 0, which stands for "!" too, may occur within a text. The end is the
    `eos_token_id` of the configuration; in old ones, which say 2, it is the largest id.

    Args:
        model: a `CLIPModel` or `CLIPTextModelWithProjection` of `transformers`.
        temperature: what `temperature()` gives.
        recompute: as in `ClipImageBackbone`.

    References:
        Radford et al. (2021), Learning transferable visual models from natural language
        supervision.
    """

    kind: Kind = "text"

    def __init__(self, model: Any, *, temperature: float, recompute: bool = False) -> None:
        super().__init__(model, "text_model", "text_projection", temperature, recompute)

    def forward(self, batch: Tensor) -> Tensor:
        """The vector of each row of token ids, as `encode` gives them."""
        ids = whole_ids("ClipTextBackbone", batch)
        return self.network(input_ids=ids).pooler_output.float()


def _middle(images: Tensor, edge: int) -> Tensor:
    """The middle square of images whose shorter side is scaled to its edge."""
    height, width = images.shape[2:]
    short = min(height, width)
    height, width = edge * height // short, edge * width // short
    if short != edge:
        images = interpolate(images, (height, width), mode="bicubic", antialias=True)
        images = images.clamp(0, 255)  # the cubic polynomials overshoot at edges
    top, left = (height - edge) // 2, (width - edge) // 2
    return images[:, :, top : top + edge, left : left + edge]


def clip_weights(name: str, weights: str = "") -> Weights:
    """The pretrained weights of CLIP: the user's folder, or Hugging Face's cache.

    The checksum also covers the configuration, the preprocessing and the vocabulary.

    Raises:
        WeightsError: when there are none; it says which folder to give and how to make it.
    """
    place = find_folder(name, weights, HUB, ADVICE)
    others = [place / "preprocessor_config.json", *tokenizer_files(place)]
    return folder_weights(place, *(file_checksum(path) for path in others if path.is_file()))


def clip_shape(name: str, *, pretrained: bool, weights: str = "") -> tuple[tuple[int, int], int]:
    """The size of images that CLIP takes, and its longest text."""
    place = find_folder(name, weights, HUB, ADVICE) if pretrained else None
    return _limits(clip_configuration(place))


def _limits(config: Any) -> tuple[tuple[int, int], int]:
    edge = int(config.vision_config.image_size)
    return (edge, edge), int(config.text_config.max_position_embeddings)


def build_clip(
    name: str,
    *,
    pretrained: bool,
    size: tuple[int, int],
    tokens: int,
    weights: str = "",
    recompute: bool = False,
    dropout: float = 0.0,
) -> ClipImageBackbone | ClipTextBackbone:
    """A backbone of CLIP by its name; see `build`."""
    _checks.in_interval("build", "dropout", dropout, 0.0, 1.0, open_high=True)
    found = clip_weights(name, weights) if pretrained else None
    place = None if found is None else Path(found.where).parent
    config = clip_configuration(place)
    own_size, limit = _limits(config)
    image = CLIP[name] == "image"
    if image and tuple(size) != own_size:
        raise ValueError(
            f"`build(size=...)` must be {own_size} for `{name}`, the only size that its positions "
            f"are for, but is: {tuple(size)}."
        )
    if not image and not 1 <= tokens <= limit:
        raise ValueError(
            f"`build(tokens=...)` must be from 1 to {limit}, the positions that `{name}` knows, "
            f"but is: {tokens}."
        )
    own = config.vision_config if image else config.text_config
    own.attention_dropout, own.projection_dim = dropout, config.projection_dim
    model, scale = _network(own, image), float(config.logit_scale_init_value)
    if found is not None:
        scale = _load(model, found, image)
    options: dict[str, Any] = {"temperature": math.exp(-scale), "recompute": recompute}
    if not image:
        return ClipTextBackbone(model, **options)
    mean, deviation = clip_colours(place)
    return ClipImageBackbone(model, mean=mean, deviation=deviation, **options)


def _network(config: Any, image: bool) -> Any:
    from transformers import CLIPTextModelWithProjection, CLIPVisionModelWithProjection

    # In every version their parts are called as in CLIPModel, unlike those of CLIPVisionModel.
    return (CLIPVisionModelWithProjection if image else CLIPTextModelWithProjection)(config)


def _load(model: nn.Module, found: Weights, image: bool) -> float:
    """Load one half of CLIP, and return `logit_scale`."""
    state = found.state()
    fronts = ("vision_model.", "visual_") if image else ("text_model.", "text_projection.")
    half = {key: value for key, value in state.items() if key.startswith(fronts)}
    unused = tuple(f"{front}embeddings.position_ids" for front in fronts)  # of old files
    if "logit_scale" not in state:
        raise WeightsError(f"{found.where} does not fit CLIPModel: it lacks logit_scale.")
    load_into(model, half, found.where, unused)
    return float(state["logit_scale"])
