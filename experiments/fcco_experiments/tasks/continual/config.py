"""The fields of an experiment on learning a new class without forgetting the old ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..base import OnMachine, Scheduled


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
        train: `"projections"` trains the last layers on features of frozen backbones, computed
            once; `"all"` every weight.
        size: height and width that images are scaled to.
        tokens: texts are cut after so many tokens.
        width: of the shared space; projections that come with the weights have their own.
        heads: rank of the task-dependent heads of the text projection, one for each protected
            class; 0 for none.
        temperature: tau, of the contrastive loss and of the classifier.
        sample_limit: at most so many samples of each class are kept; 0 keeps all.
        extra_pairs: folder, shards or table of further image-text pairs for the target.
        old: file with the old model's weights; it is trained first unless given.
        old_epochs: of that training, on the pairs of the protected classes.
        old_lr: its learning rate (Adam).
        old_batch: its batch.
        batch: target pairs of a batch.
        negatives: pairs of the protected classes that they are contrasted with.
        per_class: samples of each protected class in a batch, for its constraint.
        steps_per_epoch: steps of an epoch.
        forget_limit: accuracy that a protected class may lose on training data before a run
            counts as forgetting; one image is always allowed.
        certificate: KKT residuals on full data at the end (not for trained backbones).

    Further fields: those of `Scheduled` and `OnMachine`.
    """

    target: str
    protected: tuple[str, ...]
    prompt: str = "the weather is {}."
    captions: tuple[str, ...] = ("the weather is {}.",)
    image_backbone: str = "none"
    text_backbone: str = "none"
    image_weights: str = ""
    text_weights: str = ""
    train: Literal["projections", "all"] = "projections"
    size: tuple[int, int] = (128, 128)
    tokens: int = 16
    width: int = 128
    heads: int = 16
    temperature: float = 0.05
    sample_limit: int = 0
    extra_pairs: str = ""
    old: str = ""
    old_epochs: int = 5
    old_lr: float = 1e-3
    old_batch: int = 128
    batch: int = 64
    negatives: int = 64
    per_class: int = 10
    steps_per_epoch: int = 20
    forget_limit: float = 0.01
    certificate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for names, least in (
            ("tokens width old_batch batch negatives per_class steps_per_epoch", 1),
            ("heads sample_limit old_epochs forget_limit", 0),
        ):
            for name in names.split():
                if getattr(self, name) < least:
                    raise ValueError(
                        f"`{name}` must be at least {least} but is: {getattr(self, name)}."
                    )
        if len(set(self.classes)) < len(self.classes) or not self.protected:
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
        bare = "none" in (self.image_backbone, self.text_backbone)
        for wrong, problem in (
            (not self.captions, "`captions` must hold a sentence at least."),
            (self.temperature <= 0, f"`temperature` must be above 0 but is: {self.temperature}."),
            (self.old_lr <= 0, f"`old_lr` must be above 0 but is: {self.old_lr}."),
            (min(self.size) < 1, f"`size` must be a height and a width but is: {self.size}."),
            (bare and self.train == "all", "`train: all` needs an image and a text backbone."),
            (
                bare and self.image_backbone != self.text_backbone,
                "`image_backbone` and `text_backbone` must both be given, or both none.",
            ),
            (
                bare and self.extra_pairs != "",
                "`extra_pairs` are images with texts: they need backbones.",
            ),
            (
                self.precision == "float16",
                "`precision: float16` is not offered here; use bfloat16.",
            ),
        ):
            if wrong:
                raise ValueError(problem)

    @property
    def classes(self) -> tuple[str, ...]:
        """The protected classes, then the target."""
        return (*self.protected, self.target)
