"""The two backbones of CLIP, on `transformers`, from a Hugging Face folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from fcco import _checks

from ..data.grouped import Samples
from .base import Backbone, BuiltIn, Kind, Options, as_images, as_token_ids, register_colours
from .text import check_tokens, id_rows, read_tokenizer, tokenizer_checksum
from .weights import (
    Weights,
    WeightsError,
    cached_folder,
    configuration_fields,
    file_checksum,
    find_folder,
    folder_weights,
    load_into,
    read_json,
    text_extra,
)

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_DEVIATION = (0.26862954, 0.26130258, 0.27577711)
_HUB = ("openai/clip-vit-base-patch16",)
_ADVICE = (
    "a Hugging Face folder with config.json, model.safetensors (or pytorch_model.bin) and, for "
    "texts, tokenizer.json, made where there is a network by `save_pretrained(folder)` of "
    '`CLIPModel.from_pretrained("openai/clip-vit-base-patch16")` and of '
    "`CLIPProcessor.from_pretrained(...)`"
)
_OLD_END = 2  # what config.json calls the end of a text, wrongly, in files from before 2023-07


class _ClipBackbone(Backbone):
    """What both backbones share: the projection, and the temperature of the scores."""

    def __init__(
        self, model: Any, network: Any, projection: nn.Linear, temperature: float, recompute: bool
    ) -> None:
        _checks.positive(type(self).__name__, "temperature", temperature)
        super().__init__()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.network = network
        self.width = int(network.config.hidden_size)
        # Not a parameter: one without a gradient would stop DistributedDataParallel.
        self._projection: Tensor = projection.weight.detach().clone()
        self._temperature = float(temperature)

    def projection(self) -> nn.Linear:
        """A new layer without bias, from this width to the space of both backbones.

        On the device and of the number type of the backbone.
        """
        target = next(self.parameters())
        with torch.no_grad():
            layer = nn.Linear(self.width, len(self._projection), bias=False, device="meta")
            layer.weight = nn.Parameter(self._projection.to(target, copy=True))
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
        model: a `CLIPVisionModelWithProjection` (or `CLIPModel`) of `transformers`.
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
        mean: Sequence[float] = _MEAN,
        deviation: Sequence[float] = _DEVIATION,
        recompute: bool = False,
    ) -> None:
        super().__init__(model, model.vision_model, model.visual_projection, temperature, recompute)
        register_colours(self, [255 * m for m in mean], [255 * d for d in deviation])

    def forward(self, batch: Tensor) -> Tensor:
        """The vectors of images with values from 0 to 255, of any number type and size."""
        values = as_images("ClipImageBackbone", batch, len(self.mean))
        values = _middle_square(values, int(self.network.config.image_size))
        values = (values - self.mean) / self.deviation
        return self.network(pixel_values=values).pooler_output.float()


class ClipTextBackbone(_ClipBackbone):
    r"""CLIP's text transformer: token ids to the state at the end of each text.

    .. math:: x \mapsto h_e, \qquad e = \min\{l : x_l = \text{end of text}\}

    Attention looks back only, so what follows the end does not matter, whatever its id; no mask is
    needed, and the id 0, which stands for "!" too, may occur within a text. The end is the
    `eos_token_id` of the configuration; in old ones, which say 2, it is the largest id.

    Args:
        model: a `CLIPTextModelWithProjection` (or `CLIPModel`) of `transformers`.
        temperature: what `temperature()` gives.
        recompute: as in `ClipImageBackbone`.

    References:
        Radford et al. (2021), Learning transferable visual models from natural language
        supervision.
    """

    kind: Kind = "text"

    def __init__(self, model: Any, *, temperature: float, recompute: bool = False) -> None:
        super().__init__(model, model.text_model, model.text_projection, temperature, recompute)

    def forward(self, batch: Tensor) -> Tensor:
        """The vector of each row of token ids, as `encode` gives them."""
        ids = as_token_ids("ClipTextBackbone", batch)
        return self.network(input_ids=ids).pooler_output.float()


def _middle_square(images: Tensor, edge: int) -> Tensor:
    """The middle square of images whose shorter side is scaled to its edge."""
    height, width = images.shape[2:]
    short = min(height, width)
    height, width = edge * height // short, edge * width // short
    if short != edge:
        images = interpolate(images, (height, width), mode="bicubic", antialias=True)
        images = images.clamp(0, 255)  # the cubic polynomials overshoot at edges
    top, left = (height - edge) // 2, (width - edge) // 2
    return images[:, :, top : top + edge, left : left + edge]


@dataclass(frozen=True)
class ClipSpec(BuiltIn):
    """One of CLIP's backbones, by its name in the registry and what it takes."""

    name: str
    kind: Kind

    def weights(self, options: Options) -> Weights:
        """Find the user's folder, or what Hugging Face's cache holds.

        The checksum also covers the configuration, the preprocessing and the vocabulary.
        """
        place = self._folder(options.weights)
        colours = place / "preprocessor_config.json"
        others = [file_checksum(colours)] if colours.is_file() else []
        return folder_weights(place, *others, *filter(None, [tokenizer_checksum(place)]))

    def shape(self, pretrained: bool, weights: str) -> tuple[tuple[int, int], int]:
        """The size of images that the network has positions for, and its longest text."""
        return _limits(_configuration(self._folder(weights) if pretrained else None))

    def build(self, options: Options) -> ClipImageBackbone | ClipTextBackbone:
        """Build one half of CLIP and load its weights."""
        _checks.in_interval("build", "dropout", options.dropout, 0.0, 1.0, open_high=True)
        found = self.weights(options) if options.pretrained else None
        place = None if found is None else Path(found.where).parent
        config = _configuration(place)
        own_size, limit = _limits(config)
        image = self.kind == "image"
        if image and tuple(options.size) != own_size:
            raise ValueError(
                f"`build(size=...)` must be {own_size} for `{self.name}`, the only size that its "
                f"positions are for, but is: {options.size}."
            )
        if not image:
            check_tokens(self.name, options.tokens, limit)
        own = config.vision_config if image else config.text_config
        own.attention_dropout, own.projection_dim = options.dropout, config.projection_dim
        from transformers import CLIPTextModelWithProjection, CLIPVisionModelWithProjection

        # In every version their parts are called as in CLIPModel, unlike those of CLIPVisionModel.
        model = (CLIPVisionModelWithProjection if image else CLIPTextModelWithProjection)(own)
        scale = float(config.logit_scale_init_value)
        if found is not None:
            scale = _load(model, found, image)
        temperature, recompute = math.exp(-scale), options.recompute
        if not image:
            return ClipTextBackbone(model, temperature=temperature, recompute=recompute)
        path = None if place is None else place / "preprocessor_config.json"
        fields = read_json(path) if path is not None and path.is_file() else {}
        return ClipImageBackbone(
            model,
            temperature=temperature,
            mean=fields.get("image_mean", _MEAN),
            deviation=fields.get("image_std", _DEVIATION),
            recompute=recompute,
        )

    def encode(self, samples: Samples, options: Options) -> Samples:
        """Texts as CLIP's token ids; the tokens of start and end count, the end is never cut off.

        The tokenizer lies in the folder `options.weights`, or in Hugging Face's cache.
        """
        if self.kind == "image":
            return samples
        own = Path(options.weights).expanduser() if options.weights else None
        place = own or cached_folder(_HUB, "tokenizer.json")
        if place is None or not (place / "tokenizer.json").is_file():
            where = f"{place} has no tokenizer.json" if own else "CLIP's tokenizer is not here"
            raise WeightsError(f"{where}; give `weights` {_ADVICE}.")
        file = place / "tokenizer.json"
        tokenizer = read_tokenizer(file.read_bytes(), str(file))
        _check_end(tokenizer, place)
        return id_rows(tokenizer, samples, options.tokens, options.progress)

    def _folder(self, weights: str) -> Path:
        return find_folder(self.name, weights, _HUB, _ADVICE)


CLIP = {
    "clip-image": ClipSpec("clip-image", "image"),
    "clip-text": ClipSpec("clip-text", "text"),
}


def _configuration(place: Path | None) -> Any:
    """The configuration in a folder, or that of a ViT-B/16."""
    with text_extra():
        from transformers import AutoConfig, CLIPConfig
    if place is None:
        return CLIPConfig(vision_config={"patch_size": 16})  # the rest is ViT-B's already
    fields = configuration_fields(place)
    if fields.get("model_type") != "clip":
        raise WeightsError(
            f"{place / 'config.json'} must be of the model_type 'clip' but is of: "
            f"{fields.get('model_type')!r}; `weights` is {_ADVICE}."
        )
    try:
        return AutoConfig.for_model(**fields)
    except Exception as error:  # of several kinds, by the version of transformers
        raise WeightsError(f"{place / 'config.json'} cannot be used: {error}") from error


def _limits(config: Any) -> tuple[tuple[int, int], int]:
    edge = int(config.vision_config.image_size)
    return (edge, edge), int(config.text_config.max_position_embeddings)


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


def _check_end(tokenizer: Any, place: Path) -> None:
    """Refuse a tokenizer whose texts do not end where the network beside it looks for the end."""
    tokenizer.no_padding()
    ids = tokenizer.encode("").ids
    last = ids[-1] if ids else None
    wanted = tokenizer.get_vocab_size() - 1
    if (place / "config.json").is_file():
        told = _configuration(place).text_config.eos_token_id
        wanted = wanted if told == _OLD_END else told
    if last != wanted:
        raise WeightsError(
            f"The tokenizer in {place} must end every text with the token {wanted}, where CLIP "
            f"reads its vector, but ends it with: {last}."
        )
