"""A small problem of continual learning on generated vectors, and trainings on it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from fcco_experiments import backbones
from fcco_experiments.task import Method
from fcco_experiments.tasks.continual import Continual, ContinualProblem
from fcco_experiments.tasks.continual.training import Batch, ContinualTraining
from scenes_fixtures import picture, saved
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache of its own; for every test of a file that imports it."""
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data" / "old"


CONFIG = Continual(
    data="scenes-synthetic", target="foggy", protected=("clear", "cloudy", "rainy", "snowy"),
    captions=("it is {} today.", "a {} scene.", "the weather is {}."), width=6, heads=2,
    old_epochs=2, old_batch=32, batch=8, negatives=10, per_class=3, steps_per_epoch=7, epochs=3,
    sample_limit=40, evaluate_batch=50, device="cpu", temperature=0.2,
)  # fmt: skip
METHODS = {
    "sonex": Method(
        "sonex", 0.02, "momentum",
        settings={"penalty": 5.0, "smoothing": 0.05, "gamma": 0.8, "correction": 0.1},
    ),
    "sonex-adam": Method(
        "sonex", 1e-3, weight_decay=0.1,
        settings={"penalty": 5.0, "smoothing": 0.05, "gamma": 0.8, "correction": 0.1},
    ),
    "sox": Method("sox", 0.02, "sgd", settings={"penalty": 20.0, "gamma": 0.7}),
    "sonx": Method(
        "sonx", 0.02, "sgd", settings={"penalty": 2.0, "gamma": 0.8, "correction": 0.1}
    ),
    "alexr2": Method(
        "alexr2", 0.02, "momentum",
        settings={"penalty": 5.0, "smoothing": 0.05, "nu": 0.1, "eta": 0.02, "inner_steps": 3},
    ),
    "weighted": Method("weighted", 0.02, "sgd", settings={"weight": 0.7}),
    "replay": Method("replay", 0.02, "sgd", settings={"contrast_gamma": 0.6}),
    "finetune": Method("finetune", 0.02, "sgd"),
}  # fmt: skip


def problem(**changes: Any) -> ContinualProblem:
    """The problem of a config."""
    return ContinualProblem(dataclasses.replace(CONFIG, **changes))


def training(method: str = "sonex", seed: int = 0, **changes: Any) -> ContinualTraining:
    """A training from its first step."""
    return problem(**changes).start(METHODS[method], seed)


def moved(run: ContinualTraining, scale: float = 0.05) -> ContinualTraining:
    """Away from the old model, where every constraint is at its corner up to rounding."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for each in run.model.parameters():
            each.add_(scale * torch.randn(each.shape, generator=generator))
    return run


def recorded(run: ContinualTraining) -> list[Batch]:
    """A list to which every batch is added that a training draws from now on."""
    found: list[Batch] = []
    draw = run.batches.draw

    def noted() -> tuple[Tensor, list[Tensor]]:
        images, places = draw()
        found.append(Batch(images, *places))
        return images, places

    run.batches.draw = noted  # type: ignore[method-assign]
    return found


# Backbones of a user, for images of weather.


class TinyImages(backbones.Backbone):
    """Its name in configs is `"continual_cases:TinyImages"`."""

    kind, width = "image", 5

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 4, stride=4)

    def forward(self, batch: Tensor) -> Tensor:
        return torch.tanh(self.conv(batch.float() / 64 - 2)).amax((2, 3))


class TinyTexts(backbones.Backbone):
    """Mean embedding of the tokens; `"continual_cases:TinyTexts"`."""

    kind = "text"

    def __init__(self, **options: Any) -> None:
        super().__init__()
        # As with backbones of Hugging Face, the folder of the weights tells the sizes.
        assert options["weights"] or not options["pretrained"]
        self.width = 7 if options["weights"] else 9
        self.words = nn.Embedding(60, self.width)

    def forward(self, batch: Tensor) -> Tensor:
        mask = (batch != 0).unsqueeze(2)
        return (self.words(batch.long()) * mask).sum(1) / mask.sum(1).clamp(min=1)


class TinyClip(TinyImages):
    """An image backbone that brings a projection along."""

    def projection(self) -> nn.Linear:
        layer = nn.Linear(5, 6, bias=False)
        with torch.no_grad():
            layer.weight.copy_(self.conv.weight.reshape(5, -1)[:, :6].T)
        return layer


def with_backbones(folder: Path, monkeypatch: pytest.MonkeyPatch, each: int = 10) -> dict[str, Any]:
    """Photos of the five classes, a vocabulary, and the fields of a config for them."""
    for place, name in enumerate(CONFIG.classes):
        (folder / "weather" / name).mkdir(parents=True)
        for number in range(each):
            photo = saved(picture(100 * place + number, (128, 128)))
            (folder / "weather" / name / f"{number}.png").write_bytes(photo)
    words = ["[PAD]", "[UNK]", "it", "is", "today", ".", "a", "scene", "the", "weather", "road"]
    words += ["fog", "in", *CONFIG.classes]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    cutter = tokenizers.Tokenizer(model)
    cutter.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    (folder / "words").mkdir()
    (folder / "words/tokenizer.json").write_text(cutter.to_str())
    monkeypatch.setenv("FCCO_DATA", str(folder))
    return {
        "data": "weather", "image_backbone": "continual_cases:TinyImages", "sample_limit": 0,
        "text_backbone": "continual_cases:TinyTexts", "text_weights": str(folder / "words"),
        "tokens": 6, "size": (16, 16), "old_batch": 12, "batch": 4, "negatives": 6, "per_class": 2,
        "evaluate_batch": 16, "old_epochs": 1, "width": 4,
    }  # fmt: skip
