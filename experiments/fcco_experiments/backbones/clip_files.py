"""What CLIP's backbones read of a Hugging Face folder, besides the weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..data.grouped import Samples
from ..data.sources import Progress
from .folders import cached_folder, configuration_fields, read_json
from .tokens import id_rows, needed, read_tokenizer
from .weights import WeightsError

__all__ = [
    "ADVICE",
    "DEVIATION",
    "HUB",
    "MEAN",
    "clip_colours",
    "clip_configuration",
    "clip_ids",
    "tokenizer_files",
]

MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)
HUB = ("openai/clip-vit-base-patch16",)
_TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"))
ADVICE = (
    "a Hugging Face folder with config.json, model.safetensors (or pytorch_model.bin) and, for "
    "texts, tokenizer.json (or vocab.json and merges.txt), made where there is a network by "
    '`save_pretrained(folder)` of `CLIPModel.from_pretrained("openai/clip-vit-base-patch16")` and '
    "of `CLIPProcessor.from_pretrained(...)`"
)
_OLD_END = 2  # what config.json calls the end of a text, wrongly, in files from before 2023-07


def clip_configuration(place: Path | None) -> Any:
    """The configuration in a folder, or that of a ViT-B/16."""
    with needed():
        from transformers import AutoConfig, CLIPConfig
    if place is None:
        return CLIPConfig(vision_config={"patch_size": 16})  # the rest is ViT-B's already
    fields = configuration_fields(place)
    if fields.get("model_type") != "clip":
        raise WeightsError(
            f"{place / 'config.json'} must be of the model_type 'clip' but is of: "
            f"{fields.get('model_type')!r}; `weights` is {ADVICE}."
        )
    try:
        return AutoConfig.for_model(**fields)
    except Exception as error:  # of several kinds, by the version of transformers
        raise WeightsError(f"{place / 'config.json'} cannot be used: {error}") from error


def clip_colours(place: Path | None) -> tuple[Sequence[float], Sequence[float]]:
    """Mean and deviation of the channels that a folder asks for, or CLIP's usual ones."""
    path = None if place is None else place / "preprocessor_config.json"
    fields = read_json(path) if path is not None and path.is_file() else {}
    return fields.get("image_mean", MEAN), fields.get("image_std", DEVIATION)


def clip_ids(
    samples: Samples, *, tokens: int, weights: str = "", progress: Progress | None = None
) -> Tensor:
    """Texts as rows of CLIP's token ids, int32 (N, tokens), cut after `tokens` and padded with 0.

    Args:
        samples: the texts.
        tokens: columns; the tokens of start and end count, and the end is never cut off.
        weights: folder with CLIP's tokenizer; Hugging Face's cache unless given.
        progress: is told how many texts are done.

    Raises:
        WeightsError: when there is no tokenizer, or it is not the one of the network beside it.
    """
    place = Path(weights).expanduser() if weights else cached_folder(HUB, _TOKENIZERS)
    files = [] if place is None else tokenizer_files(place)
    if place is None or not files:
        where = f"{place} has no tokenizer" if weights else "CLIP's tokenizer is not here"
        raise WeightsError(f"{where}; give `weights` {ADVICE}.")
    tokenizer = _tokenizer(files)
    _check_end(tokenizer, place)
    return id_rows(tokenizer, samples, tokens, progress)


def tokenizer_files(place: Path) -> list[Path]:
    """The files of the tokenizer in a folder; none where there is no whole one."""
    for choice in _TOKENIZERS:
        files = [place / name for name in choice]
        if all(file.is_file() for file in files):
            return files
    return []


def _tokenizer(files: Sequence[Path]) -> Any:
    if len(files) == 1:
        return read_tokenizer(files[0].read_bytes(), str(files[0]))
    with needed():
        import transformers
    # Before version 5, CLIPTokenizer was written in Python and had another interface.
    kind: Any = getattr(transformers, "CLIPTokenizerFast", transformers.CLIPTokenizer)
    place = files[0].parent
    try:
        found = kind.from_pretrained(str(place), local_files_only=True)
    except Exception as error:  # of several kinds, by the version of transformers
        raise WeightsError(f"{place} has no good vocab.json and merges.txt: {error}.") from error
    return found.backend_tokenizer


def _check_end(tokenizer: Any, place: Path) -> None:
    """Refuse a tokenizer whose texts do not end where the network beside it looks for the end."""
    tokenizer.no_padding()
    ids = tokenizer.encode("").ids
    last = ids[-1] if ids else None
    wanted = tokenizer.get_vocab_size() - 1
    if (place / "config.json").is_file():
        told = clip_configuration(place).text_config.eos_token_id
        wanted = wanted if told == _OLD_END else told
    if last != wanted:
        raise WeightsError(
            f"The tokenizer in {place} must end every text with the token {wanted}, where CLIP "
            f"reads its vector, but ends it with: {last}."
        )
