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
    extra_pairs: str = ""  # folder, shards or table of further image-text pairs for the target
    old: str = ""  # file with the old model's weights; it is trained first unless given
    old_share: float = 1.0  # of the protected classes' training images, for that training
    protect: Literal["train", "held-out"] = "train"
    old_epochs: int = 5  # of that training, on the pairs of the protected classes
    old_lr: float = 1e-3
    old_batch: int = 128
    batch: int = 64  # target pairs
    negatives: int = 64  # pairs of the protected classes that they are contrasted with
    per_class: int = 10  # samples of each protected class, for its constraint
    steps_per_epoch: int = 20
    # Accuracy that a protected class may lose on training data; one image is always allowed.
    forget_limit: float = 0.01
    choose_by: Literal["train", "validation"] = "train"
    certificate: bool = True  # KKT residuals on full data at the end (with frozen backbones)

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
            (not bare or not self.extra_pairs, "`extra_pairs` need backbones: they are images"),
            (self.precision != "float16", "`precision` may be bfloat16 here, not float16"),
        ):
            if not valid:
                raise ValueError(f"{wanted}.")

    @property
    def classes(self) -> tuple[str, ...]:
        """The protected classes, then the target."""
        return (*self.protected, self.target)
