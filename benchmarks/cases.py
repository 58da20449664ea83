"""The steps that benchmarks time: models with their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

Step = Callable[[], None]


def stepping(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> Step:
    """A step of an optimizer on a loss."""

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


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
    device: str = "cpu"
    rounds: int = 60
    steps: int = 10


def mlp(width: int, outputs: int = 1) -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(128, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, outputs),
    )  # fmt: skip


def small_cnn() -> nn.Module:
    """Three convolutions on 3x32x32."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, 1),
    )  # fmt: skip


def cpu_cases() -> Iterator[Case]:
    """Batch 128 of 128 features, or of 3x32x32 images."""

    def binary(name: str, model: nn.Module, x: Tensor, rounds: int, steps: int) -> Case:
        y = (torch.rand(len(x)) < 0.5).float()

        def scores() -> Tensor:
            return model(x)

        def losses() -> Tensor:
            return binary_cross_entropy_with_logits(scores().squeeze(-1), y, reduction="none")

        return Case(name, model, scores, losses, len(x), rounds=rounds, steps=steps)

    yield binary("mlp64", mlp(64), torch.randn(128, 128), 500, 5)
    yield binary("mlp256", mlp(256), torch.randn(128, 128), 300, 5)
    yield binary("cnn", small_cnn(), torch.randn(128, 3, 32, 32), 30, 1)


def gpu_cases(compiled: bool = False) -> Iterator[Case]:
    """Random weights; the large networks under bf16 autocast."""

    def classified(name: str, model: nn.Module, rounds: int, steps: int, *batch: Tensor) -> Case:
        model = model.to("cuda").train()
        run: Any = torch.compile(model) if compiled else model
        y = torch.randint(2, (len(batch[0]),), device="cuda")
        large = sum(p.numel() for p in model.parameters()) > 10**6

        def scores() -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=large):
                found = run(*batch)
            return found.logits if name.startswith("distilbert") else found

        def losses() -> Tensor:
            return cross_entropy(scores().float(), y, reduction="none")

        return Case(name, model, scores, losses, len(y), "cuda", rounds, steps)

    yield classified("mlp256", mlp(256, 2), 40, 10, torch.randn(256, 128, device="cuda"))
    import torchvision  # pyright: ignore[reportMissingImports]
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig()
    tokens = torch.randint(config.vocab_size, (128, 128), device="cuda")
    bert = DistilBertForSequenceClassification(config)
    yield classified("distilbert-128", bert, 15, 3, tokens, torch.ones_like(tokens))
    for batch in (64, 256):
        model = torchvision.models.resnet50(num_classes=2).to(memory_format=torch.channels_last)
        x = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
        yield classified(f"resnet50-{batch}", model, 15, 3, x)
