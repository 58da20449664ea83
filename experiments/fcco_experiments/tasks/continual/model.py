"""The config; the model (two backbones, two projections into one space) and its texts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fcco.continual import TaskHeads

from ...data.grouped import Samples
from ..base import OnMachine, Scheduled, autocast
from ..network import per_sample

if TYPE_CHECKING:
    from . import ContinualProblem

_CAPTION_SEED = 20_240_101


@dataclass(frozen=True, kw_only=True)
class Continual(Scheduled, OnMachine):
    r"""Fine-tune an image-text model on a target class while no protected class gets worse.

    .. math::
        \min_w\; L_{\mathrm{GCL}}(w; \text{target pairs}) \quad\text{subject to}\quad
        h_k(w) = L_k(w) - L_k(w_{\mathrm{old}}) \le 0, \qquad k = 1,\dots,m

    L_k is the mean logistic loss, over the training images of protected class k, of choosing among
    the prompts of all classes.

    Args:
        protect: whose losses of the protected classes may not rise: `"train"`, the images that the
            old model was trained on, or `"held-out"`, those that it was not, for which `old_share`
            must be below 1. A method with `independent: true` takes the gradient of the
            constraints from the former, and their values from the latter.
        choose_by: what a sweep judges. `"train"`: what is forgotten on the protected images, then
            the target's validation accuracy; `"validation"`: the mean validation accuracy of all
            classes.
    """

    target: str  # the class to learn
    protected: tuple[str, ...]  # the classes to keep
    prompt: str = "the weather is {}."  # the sentence of a class by which images are classified
    captions: tuple[str, ...] = ("the weather is {}.",)  # of pairs: each image has one of them
    image_backbone: str = "none"  # before the projection of images; "none" for vectors
    text_backbone: str = "none"  # that of texts; "none" takes made-up vectors, for tests
    image_weights: str = ""  # file or folder of the backbone's weights; its own unless given
    text_weights: str = ""
    # "projections": the last layers on features of frozen backbones, computed once.
    train: Literal["projections", "all"] = "projections"
    size: tuple[int, int] = (128, 128)  # height and width that images are scaled to
    tokens: int = 16  # texts are cut after so many
    width: int = 128  # of the shared space; projections that come with weights have their own
    heads: int = 16  # rank of the text projection's head for each protected class; 0 for none
    temperature: float = 0.05  # tau, of the contrastive loss and of the classifier
    sample_limit: int = 0  # samples of each class at most; 0 keeps all
    old_share: float = 1.0  # of the protected classes' training images, for the old model
    protect: Literal["train", "held-out"] = "train"
    old_epochs: int = 5  # of its training, on the pairs of the protected classes
    old_lr: float = 1e-3
    old_batch: int = 128
    batch: int = 64  # target pairs
    negatives: int = 64  # pairs of the protected classes that they are contrasted with
    per_class: int = 10  # samples of each protected class, for its constraint
    steps_per_epoch: int = 20
    # Accuracy that a protected class may lose on training data; one image is always allowed.
    forget_limit: float = 0.01
    choose_by: Literal["train", "validation"] = "train"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "tokens", "width", "old_batch", "batch", "negatives", "per_class")
        self.at_least(1, "steps_per_epoch")
        self.at_least(0, "heads", "sample_limit", "old_epochs", "forget_limit")
        for text in (self.prompt, *self.captions):
            if [text.count(mark) for mark in ("{}", "{", "}")] != [1, 1, 1]:
                raise ValueError(
                    "`prompt` and `captions` must hold one {}, and no other braces, but: "
                    f"{text!r}."
                )
        different = len(set(self.classes)) == len(self.classes) > 1
        bare = "none" in (self.image_backbone, self.text_backbone)
        alike = self.image_backbone == self.text_backbone
        for valid, wanted in (
            (different, "`target` and `protected` must be different classes, two at least"),
            (self.captions, "`captions` must hold a sentence at least"),
            (self.temperature > 0, f"`temperature` must be above 0 but is: {self.temperature}"),
            (self.old_lr > 0, f"`old_lr` must be above 0 but is: {self.old_lr}"),
            (0 < self.old_share <= 1, f"`old_share` must be in (0, 1] but is: {self.old_share}"),
            (
                self.protect == "train" or self.old_share < 1,
                "`protect: held-out` needs an `old_share` below 1: the rest is held out",
            ),
            (min(self.size) > 0, f"`size` must be a height and a width but is: {self.size}"),
            (alike or not bare, "`image_backbone`, `text_backbone`: give both or none of them"),
            (not bare or self.train != "all", "`train: all` needs an image and a text backbone"),
        ):
            if not valid:
                raise ValueError(f"{wanted}.")

    @property
    def classes(self) -> tuple[str, ...]:
        """The protected classes, then the target."""
        return (*self.protected, self.target)


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

    words: tuple[str, ...]
    head: Tensor  # the protected class whose head embeds a text, -1 for the common projection, (U,)
    prompts: Tensor  # the text of each class, (C,)
    captions: Tensor  # the text of each sample, (N,)

    @classmethod
    def of(cls, config: Continual, label: Tensor) -> Texts:
        """Prompts, and a caption for each label, by its row."""
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
        return cls(
            words=tuple(ids),
            head=torch.tensor(list(head.values())),
            prompts=torch.tensor(prompts),
            captions=of_class[label, which],
        )


def made_up(words: Sequence[str], width: int = 32) -> Tensor:
    """Vectors for texts without a network: the mean of one for each word, drawn from its hash."""

    def vector(word: str) -> Tensor:
        seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:7], "little")
        return torch.randn(width, generator=torch.Generator().manual_seed(seed))

    return torch.stack([torch.stack([vector(w) for w in t.split()]).mean(0) for t in words])


class Encoder:
    """From samples and texts to unit vectors, by a `TwoBackbones`."""

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

    def all(self, samples: Samples, rows: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors of rows of the samples and of texts by id."""
        read = torch.empty(0)

        def seen(inputs: Tensor, _: Tensor) -> Tensor:
            nonlocal read
            vectors, read = self(inputs, texts)
            return vectors

        vectors = per_sample(self.config, samples, rows, self.device, seen)
        return vectors, read
