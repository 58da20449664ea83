"""The model: two backbones, two projections into one space; its texts, and how both are run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fcco._distributed import Group
from fcco.continual import TaskHeads

from ...data.grouped import Samples
from ..base import autocast, chunks
from .config import Continual

if TYPE_CHECKING:
    from .problem import ContinualProblem

_CAPTION_SEED = 20_240_101


class Scaling(nn.Module):
    """Features scaled by the means and deviations of `values`, (N, d).

    Columns that hardly vary are only centred.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        wide = values.double()
        deviation = wide.std(0) if len(wide) > 1 else torch.ones_like(wide[0])
        deviation = torch.where(deviation > 1e-6, deviation, torch.ones_like(deviation))
        self.register_buffer("mean", wide.mean(0).float())
        self.register_buffer("deviation", deviation.float())

    def forward(self, features: Tensor) -> Tensor:
        return (features - self.mean) / self.deviation


class TwoBackbones(nn.Module):
    r"""Unit vectors of images and texts.

    .. math::
        E_I(x) = \frac{P\,\phi(x)}{\|P\,\phi(x)\|}, \qquad
        E_T(t) = \frac{(W + A_kB_k)^\top\psi(t)}{\|(W + A_kB_k)^\top\psi(t)\|}

    The texts of protected class k are embedded by its own head (A_k, B_k), all others by W; without
    heads, the text projection is W alone.
    """

    def __init__(
        self,
        image: nn.Module,  # phi, from raw images or from features
        text: nn.Module,  # psi, from token ids or from features
        image_projection: nn.Module,
        text_projection: nn.Module,
    ) -> None:
        super().__init__()
        self.image, self.text = image, text
        self.image_projection, self.text_projection = image_projection, text_projection

    def forward(self, images: Tensor, texts: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """Unit vectors in float32; `head` is the head of each text, -1 for none."""
        image_vectors = self.image_projection(self.image(images))
        features, project = self.text(texts), self.text_projection
        text_vectors = project(features)
        if isinstance(project, TaskHeads):
            by_head = project(features, head.clamp(min=0))
            text_vectors = torch.where((head >= 0).unsqueeze(1), by_head, text_vectors)
        return normalize(image_vectors.float(), dim=1), normalize(text_vectors.float(), dim=1)


@dataclass(frozen=True)
class Texts:
    """All different texts and who uses them."""

    words: tuple[str, ...]  # an extra one may read like one of a class
    head: Tensor  # the protected class whose head embeds a text, -1 for the common projection, (U,)
    prompts: Tensor  # the text of each class, (C,)
    captions: Tensor  # the text of each sample, (N,)
    of_classes: int  # texts with an id below this come from the classes, others from extra pairs

    @classmethod
    def of(cls, config: Continual, label: Tensor, extra: Sequence[str] = ()) -> Texts:
        """Prompts, and a caption for each label, by its row; then captions of extra pairs."""
        owners = list(zip(config.classes, [*range(len(config.protected)), -1], strict=True))
        head = {config.prompt.format(name): owner for name, owner in owners}  # in order of ids
        for name, owner in owners:
            head |= {text.format(name): owner for text in config.captions}
        ids = {text: number for number, text in enumerate(head)}
        prompts = [ids[config.prompt.format(name)] for name in config.classes]
        of_class = torch.tensor(
            [[ids[text.format(name)] for text in config.captions] for name in config.classes]
        )
        generator = torch.Generator().manual_seed(_CAPTION_SEED)
        which = torch.randint(len(config.captions), label.shape, generator=generator)
        # An extra caption that reads like one of a class is another text: no head embeds it.
        others = {text: len(ids) + number for number, text in enumerate(dict.fromkeys(extra))}
        more = torch.tensor([others[text] for text in extra], dtype=torch.int64)
        return cls(
            words=(*ids, *others),
            head=torch.tensor([*head.values(), *(-1 for _ in others)]),
            prompts=torch.tensor(prompts),
            captions=torch.cat([of_class[label, which], more]),
            of_classes=len(ids),
        )


def made_up(words: Sequence[str], width: int = 32) -> Tensor:
    """Vectors for texts without a network: the mean of one for each word, drawn from its hash."""

    def vector(word: str) -> Tensor:
        seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:7], "little")
        return torch.randn(width, generator=torch.Generator().manual_seed(seed))

    return torch.stack([torch.stack([vector(w) for w in t.split()]).mean(0) for t in words])


class Encoder:
    """From samples and texts to unit vectors, by a `TwoBackbones`, perhaps wrapped for ranks."""

    def __init__(self, problem: ContinualProblem, model: nn.Module) -> None:
        self.config, self.device, self.model = problem.config, problem.device, model
        self.texts, self.inputs = problem.texts, problem.inputs

    def __call__(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors of images on the device, and of texts by id; each different text is read once."""
        different, place = torch.unique(texts, return_inverse=True)
        rows, head = self.inputs[different.to(self.device)], self.texts.head[different]
        with autocast(self.config, self.device):
            seen, read = self.model(images, rows, head.to(self.device))
        return seen, read[place.to(self.device)]

    def scores(self, images: Tensor, prompts: Tensor) -> Tensor:
        """Scores of the classes from unit vectors: cosines over the temperature."""
        return images @ prompts.T / self.config.temperature

    @torch.no_grad()
    def all(
        self, samples: Samples, rows: Tensor, texts: Tensor, group: Group | None = None
    ) -> tuple[Tensor, Tensor]:
        """Vectors of rows of the samples and of texts by id; ranks of a group share the work."""
        vectors, read = torch.empty(0), torch.empty(0)
        for places, inputs in chunks(self.config, samples, rows, self.device, group):
            seen, read = self(inputs, texts)
            if not len(vectors):
                vectors = seen.new_zeros(len(rows), seen.shape[1] + 1)
            vectors[places.to(self.device), :-1] = seen
            vectors[places.to(self.device), -1] = 1.0
        if group is not None:
            torch.distributed.all_reduce(vectors, group=group.handle)
        # The last column counts: where samples do not go round, a rank meets one twice.
        return vectors[:, :-1] / vectors[:, -1:], read
