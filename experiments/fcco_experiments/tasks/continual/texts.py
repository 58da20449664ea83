"""The texts of an experiment: a prompt for each class, a caption for each image, each kept once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .config import Continual

__all__ = ["Drawn", "Texts", "made_up"]

_CAPTION_SEED = 20_240_101


class Drawn(NamedTuple):
    """Some texts, each different one once.

    Attributes:
        texts: ids of the different ones.
        head: of each of them.
        place: in these, of every text that was asked for.
    """

    texts: Tensor
    head: Tensor
    place: Tensor


@dataclass(frozen=True)
class Texts:
    """All different texts and who uses them.

    Attributes:
        words: the texts; an extra one may read like one of a class.
        head: the protected class whose head embeds a text, -1 for the common projection, (U,).
        prompts: the text of each class, (C,).
        captions: the text of each sample, (N,).
        of_classes: texts with an id below this come from the classes, the others from extra pairs.
    """

    words: tuple[str, ...]
    head: Tensor
    prompts: Tensor
    captions: Tensor
    of_classes: int

    @classmethod
    def of(cls, config: Continual, label: Tensor, extra: Sequence[str] = ()) -> Texts:
        """Prompts and captions; which caption an image has depends on its row alone.

        Args:
            config: prompt, captions and classes.
            label: class of each sample.
            extra: captions of pairs that come after the samples; texts of their own.
        """
        words: list[str] = []
        head: list[int] = []
        ids: dict[str, int] = {}

        def place(text: str, owner: int) -> int:
            if text not in ids:
                ids[text] = len(words)
                words.append(text)
                head.append(owner)
            return ids[text]

        owners = [*range(len(config.protected)), -1]
        prompts = [
            place(config.prompt.format(name), owner)
            for name, owner in zip(config.classes, owners, strict=True)
        ]
        told = torch.tensor(
            [
                [place(text.format(name), owner) for text in config.captions]
                for name, owner in zip(config.classes, owners, strict=True)
            ]
        )
        of_classes = len(words)
        ids.clear()  # an extra caption that reads like one of a class is not embedded by its head
        generator = torch.Generator().manual_seed(_CAPTION_SEED)
        which = torch.randint(len(config.captions), label.shape, generator=generator)
        more = torch.tensor([place(text, -1) for text in extra], dtype=torch.int64)
        return cls(
            tuple(words),
            torch.tensor(head),
            torch.tensor(prompts),
            torch.cat([told[label, which], more]),
            of_classes,
        )

    def draw(self, ids: Tensor) -> Drawn:
        """The different ones among some texts."""
        texts, place = torch.unique(ids, return_inverse=True)
        return Drawn(texts, self.head[texts], place)


def made_up(words: Sequence[str], width: int = 32) -> Tensor:
    """Vectors for texts without a network: the mean of one for each word, drawn from its hash.

    Example:
        >>> made_up(["it rains.", "it snows."], 8).shape
        torch.Size([2, 8])
    """
    return torch.stack([torch.stack([_vector(w, width) for w in t.split()]).mean(0) for t in words])


def _vector(word: str, width: int) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:7], "little")
    return torch.randn(width, generator=torch.Generator().manual_seed(seed))
