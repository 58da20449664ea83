"""The models that benchmarks train, with their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy


@dataclass
class Case:
    """A model and one batch.

    Attributes:
        scores: runs the model on the batch.
        losses: per-sample losses of the batch.
        rounds, steps: how long to measure.
    """

    name: str
    model: nn.Module
    scores: Callable[[], Tensor]
    losses: Callable[[], Tensor]
    batch_size: int
    targets: Tensor | None = None
    device: str = "cpu"
    rounds: int = 60
    steps: int = 10


def mlp(width: int, features: int = 128) -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 1),
    )  # fmt: skip


def small_cnn() -> nn.Module:
    """Three convolutions on 3x32x32."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, 1),
    )  # fmt: skip


def _binary(name: str, model: nn.Module, x: Tensor, rounds: int, steps: int) -> Case:
    y = (torch.rand(len(x)) < 0.5).float()
    scores = lambda: model(x).squeeze(-1)  # noqa: E731
    losses = lambda: binary_cross_entropy_with_logits(scores(), y, reduction="none")  # noqa: E731
    return Case(name, model, scores, losses, len(x), y, rounds=rounds, steps=steps)


def cpu_cases() -> Iterator[Case]:
    """Batch 128 of 128 features, or of 3x32x32 images."""
    yield _binary("mlp64", mlp(64), torch.randn(128, 128), 500, 5)
    yield _binary("mlp256", mlp(256), torch.randn(128, 128), 300, 5)
    yield _binary("cnn", small_cnn(), torch.randn(128, 3, 32, 32), 30, 1)


def gpu_cases() -> Iterator[Case]:
    """Random weights, bf16 autocast, the batch sizes of the paper's group DRO runs.

    On a fast GPU these batches leave it waiting for the host; the larger ones keep it busy.
    """
    import torchvision  # pyright: ignore[reportMissingImports]
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    def images(name: str, model: nn.Module, batch: int, side: int) -> Case:
        model = model.cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = torch.randn(batch, 3, side, side, device="cuda")
        x = x.to(memory_format=torch.channels_last)
        y = torch.randint(2, (batch,), device="cuda")
        return classified(name, model, lambda: model(x), y)

    def classified(name: str, model: nn.Module, run: Callable[[], Tensor], y: Tensor) -> Case:
        def scores() -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return run()

        def losses() -> Tensor:
            return cross_entropy(scores().float(), y, reduction="none")

        return Case(
            name, model, scores, losses, len(y), device="cuda", rounds=30, steps=5
        )  # fmt: skip

    resnet, densenet = torchvision.models.resnet50, torchvision.models.densenet121
    yield images("resnet50", resnet(num_classes=2), 64, 224)
    yield images("resnet50-256", resnet(num_classes=2), 256, 224)
    yield images("densenet121", densenet(num_classes=2), 256, 96)
    yield images("densenet121-1024", densenet(num_classes=2), 1024, 96)
    config = DistilBertConfig(num_labels=5)  # type: ignore[call-arg]
    bert = DistilBertForSequenceClassification(config).to("cuda").train()  # type: ignore[arg-type]
    for batch, name in ((32, "distilbert"), (128, "distilbert-128")):
        tokens = torch.randint(config.vocab_size, (batch, 512), device="cuda")
        mask = torch.ones_like(tokens)
        y = torch.randint(5, (batch,), device="cuda")
        yield classified(name, bert, lambda t=tokens, m=mask: bert(t, attention_mask=m).logits, y)
