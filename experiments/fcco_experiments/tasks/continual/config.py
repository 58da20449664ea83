"""The fields of an experiment on learning a new class without forgetting the old ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..base import OnMachine, Scheduled

__all__ = ["Continual"]


@dataclass(frozen=True, kw_only=True)
class Continual(Scheduled, OnMachine):
    r"""Fine-tune an image-text model on a target class while no protected class gets worse.

    .. math::
        \min_w\; L_{\mathrm{GCL}}(w; \text{target pairs}) \quad\text{subject to}\quad
        h_k(w) = L_k(w) - L_k(w_{\mathrm{old}}) \le 0, \qquad k = 1,\dots,m

    L_k is the mean logistic loss, over the training images of protected class k, of choosing among
    the prompts of all classes.

    Args:
        target: the class to learn.
        protected: the classes to keep.
        prompt: the sentence of a class by which images are classified.
        captions: sentences for the texts of pairs; each image has one of them, with its class.
        image_backbone: the network before the projection of images; `"none"` for vectors.
        text_backbone: that of texts; `"none"` takes made-up vectors, for tests.
        image_weights: file or folder of the image backbone's weights; its own unless given.
        text_weights: the same for texts.
        pretrained: start the backbones from pretrained weights; random ones are those of seed 0, in
            runs of all seeds.
        train: `"projections"` trains the last layers on features of frozen backbones, computed once;
            `"text"` trains the text backbone, too; `"all"` every weight.
        size: height and width that images are scaled to.
        tokens: texts are cut after so many tokens.
        width: of the shared space; projections that come with the weights have their own.
        hidden: width of a hidden layer in the image projection; 0 makes it linear.
        heads: rank of the task-dependent heads of the text projection, one for each protected
            class; 0 for none.
        temperature: tau, of the contrastive loss and of the classifier.
        chunk: rows of a strip of the matrix of scores; 0 holds the whole matrix.
        shares: of training, validation and test data, for data without official parts.
        sample_limit: at most so many samples of each class are kept; 0 keeps all.
        extra_pairs: folder, shards or table of further image-text pairs for the target.
        old: file with the old model's weights; it is trained first unless given.
        old_epochs: of that training, on the pairs of the protected classes.
        old_lr: its learning rate (Adam).
        old_batch: its batch.
        batch: target pairs of a batch.
        negatives: pairs of the protected classes that they are contrasted with.
        per_class: samples of each protected class in a batch, for its constraint.
        classes_per_batch: protected classes in a batch; 0 takes all.
        steps_per_epoch: steps of an epoch.
        forget_limit: accuracy that a protected class may lose on training data before a run
            counts as forgetting; one image is always allowed.
        certificate: KKT residuals on full data at the end (not for trained backbones).

    Further fields: those of `Scheduled` and `OnMachine`.
    """  # noqa: E501

    target: str
    protected: tuple[str, ...]
    prompt: str = "the weather is {}."
    captions: tuple[str, ...] = ("the weather is {}.",)
    image_backbone: str = "none"
    text_backbone: str = "none"
    image_weights: str = ""
    text_weights: str = ""
    pretrained: bool = True
    train: Literal["projections", "text", "all"] = "projections"
    size: tuple[int, int] = (128, 128)
    tokens: int = 16
    width: int = 128
    hidden: int = 0
    heads: int = 16
    temperature: float = 0.05
    chunk: int = 0
    shares: tuple[float, float, float] = (0.6, 0.2, 0.2)
    sample_limit: int = 0
    extra_pairs: str = ""
    old: str = ""
    old_epochs: int = 5
    old_lr: float = 1e-3
    old_batch: int = 128
    batch: int = 64
    negatives: int = 64
    per_class: int = 10
    classes_per_batch: int = 0
    steps_per_epoch: int = 20
    forget_limit: float = 0.01
    certificate: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        super().__post_init__()
        classes = (*self.protected, self.target)
        if len(set(classes)) < len(classes) or not self.protected:
            raise ValueError(
                "`target` and `protected` must be different classes, one protected at least, but "
                f"are: {self.target} and {list(self.protected)}."
            )
        for text in (self.prompt, *self.captions):
            if [text.count(mark) for mark in ("{}", "{", "}")] != [1, 1, 1]:
                raise ValueError(
                    f"`prompt` and `captions` must hold one {{}}, and no other braces, but: "
                    f"{text!r}."
                )
        if not self.captions:
            raise ValueError("`captions` must hold a sentence at least.")
        for name in (
            "tokens", "width", "old_batch", "batch", "negatives", "per_class", "steps_per_epoch",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1 but is: {getattr(self, name)}.")
        for name in ("hidden", "heads", "chunk", "sample_limit", "old_epochs", "forget_limit"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must be at least 0 but is: {getattr(self, name)}.")
        for name in ("temperature", "old_lr"):
            if getattr(self, name) <= 0:
                raise ValueError(f"`{name}` must be above 0 but is: {getattr(self, name)}.")
        if not 0 <= self.classes_per_batch <= len(self.protected):
            raise ValueError(
                f"`classes_per_batch` must be at most {len(self.protected)}, the number of "
                f"protected classes, but is: {self.classes_per_batch}."
            )
        if len(self.shares) != 3 or min(self.shares) <= 0 or abs(sum(self.shares) - 1) > 1e-6:
            raise ValueError(f"`shares` must be three parts of 1 but are: {list(self.shares)}.")
        if len(self.size) != 2 or min(self.size) < 1:
            raise ValueError(f"`size` must be a height and a width but is: {list(self.size)}.")
        self._check_backbones()

    def _check_backbones(self) -> None:
        if self.train != "projections" and "none" in (self.image_backbone, self.text_backbone):
            raise ValueError(f"`train: {self.train}` needs an image backbone and a text backbone.")
        if (self.image_backbone == "none") != (self.text_backbone == "none"):
            raise ValueError(
                "`image_backbone` and `text_backbone` must both be given, or both none."
            )
        if self.extra_pairs and self.image_backbone == "none":
            raise ValueError("`extra_pairs` are images with texts: they need backbones.")
        if self.precision == "float16":
            raise ValueError("`precision: float16` is not offered here; use bfloat16.")

    @property
    def classes(self) -> tuple[str, ...]:
        """The protected classes, then the target."""
        return (*self.protected, self.target)
