"""Deep networks on CelebA, and the time of a step: the part of the benchmark that wants a GPU.

    python -m benchmarks.untuned.faces faces.npz          # on any machine that has the archive
    python -m benchmarks.untuned --gpu --images faces.npz # needs torch and numpy alone

The file holds the first 8,500 faces of 89 x 109 as quantised cosine coefficients, as JPEG does: 23
MB instead of 250. With them come the weights of EfficientNet-lite0, where they are to be had.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fcco_experiments.backbones.networks import IMAGES, EfficientNetLite, ImageBackbone, ResNet
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fcco

from ..models import Case
from ..overhead import plain_step
from ..timing import interleave
from .groups import Groups

__all__ = ["METHODS", "pack", "prepare", "problems", "step_ratios", "unpack"]

_LITE0 = IMAGES["efficientnet-lite0"]
_COLOURS = (_LITE0.mean, _LITE0.deviation)
TRAINING = 8500  # the first so many faces
STEPS = 1328
QUANTUM = (20.0, 40.0, 40.0)  # of the coefficients of brightness and the two colours

# Name in the table: method, its setting.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "fcco": ("fcco", {}),
    "uniform": ("uniform", {}),
    **{f"OOA-CVaR {step:g}": ("OOA", {"step": step}) for step in (0.003, 0.01, 0.1)},
}

_COLOURS = torch.tensor([[0.299, 0.587, 0.114], [-0.1687, -0.3313, 0.5], [0.5, -0.4187, -0.0813]])


def _cosines() -> Tensor:
    """The orthonormal cosine transform of 8 values."""
    k, n = torch.arange(8.0)[:, None], torch.arange(8.0)
    rows = torch.cos(math.pi / 8 * (n + 0.5) * k) / 2
    rows[0] /= math.sqrt(2)
    return rows


def pack(images: Tensor) -> np.ndarray:
    """Coefficients of uint8 images (N, 3, H, W): int8 (8, 8, 3, N, H/8, W/8), sizes rounded up."""
    height, width = (-(-size // 8) * 8 for size in images.shape[2:])
    parts = []
    for some in images.split(500):
        values = torch.einsum("cd,ndhw->nchw", _COLOURS, some.float() - 128)
        around = (0, width - some.shape[3], 0, height - some.shape[2])
        blocks = nn.functional.pad(values, around, mode="replicate").unflatten(3, (-1, 8))
        blocks = blocks.unflatten(2, (-1, 8))  # image, colour, row of blocks, y, column, x
        found = torch.einsum("ky,lx,nchywx->klcnhw", _cosines(), _cosines(), blocks)
        scale = torch.tensor(QUANTUM).view(1, 1, 3, 1, 1, 1)
        parts.append((found / scale).round().clamp(-127, 127).to(torch.int8))
    return torch.cat(parts, 3).numpy()


def unpack(coefficients: np.ndarray, height: int, width: int) -> Tensor:
    """The images of `pack`, uint8."""
    parts = []
    for some in torch.from_numpy(coefficients).split(500, 3):
        values = some.float() * torch.tensor(QUANTUM).view(1, 1, 3, 1, 1, 1)
        blocks = torch.einsum("ky,lx,klcnhw->nchywx", _cosines(), _cosines(), values)
        planes = blocks.flatten(4, 5).flatten(2, 3)[:, :, :height, :width]
        colours = torch.einsum("cd,ndhw->nchw", torch.linalg.inv(_COLOURS), planes) + 128
        parts.append(colours.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(parts)


def prepare(file: Path) -> None:
    """Write the file from the archive of CelebA, with lite0's weights if they can be had."""
    from fcco_experiments import backbones, data

    found = data.load_grouped("celeba", download=False)
    parts = found.cut(0).values()
    order = torch.cat([part.rows for part in parts]).argsort()
    label = torch.cat([part.label for part in parts])[order]
    group = torch.cat([part.group for part in parts])[order]
    label, group = label[:TRAINING], group[:TRAINING]
    images = torch.stack([torch.as_tensor(found.samples[row]) for row in range(TRAINING)])
    weights: dict[str, Any] = {}
    try:
        backbones.fetch("efficientnet-lite0")
        backbone: Any = backbones.build("efficientnet-lite0", pretrained=True)
        weights = {f"lite0.{k}": v.half().numpy() for k, v in backbone.network.state_dict().items()}
    except data.MissingData as reason:
        print(f"without lite0: {reason}", file=sys.stderr)
    np.savez_compressed(
        file, coefficients=pack(images), size=images.shape[2:], label=label, group=group, **weights
    )


class Residual(nn.Module):
    """Two convolutions with group norm beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(8, outputs),
            nn.ReLU(), nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(8, outputs),
        )  # fmt: skip

    def forward(self, values: Tensor) -> Tensor:
        """Half the size where the stride is 2."""
        return torch.relu(self.shortcut(values) + self.layers(values))


class Scaled(nn.Module):
    """Bytes to about [-1, 1]."""

    def forward(self, images: Tensor) -> Tensor:
        """In float32."""
        return images.float() / 64 - 2


def cnn(device: str) -> nn.Module:
    """From scratch: four stages of 32 to 256 channels."""
    widths = (32, 32, 64, 128, 256)
    stages = [Residual(a, b, 1 + (a < b)) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(
        Scaled(), nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), *stages, nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(256, 2),
    ).to(device)  # fmt: skip


def lite0(weights: dict[str, Tensor], device: str) -> nn.Module:
    """EfficientNet-lite0 from pretrained weights, all of which train; its batch norm is frozen."""
    network = EfficientNetLite()
    network.load_state_dict(weights)
    return nn.Sequential(ImageBackbone(network, *_COLOURS), nn.Linear(1280, 2)).to(device)


def problems(file: Path, device: str = "cuda") -> dict[str, Groups]:
    """Both networks on the training faces; lite0 only where the file has its weights."""
    held = np.load(file)
    images = unpack(held["coefficients"], *held["size"].tolist()).to(device)
    label, group = (torch.from_numpy(held[k]).to(device) for k in ("label", "group"))

    def losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model(inputs), targets, reduction="none")

    def problem(model: Any, *lrs: float) -> Groups:
        return Groups(images, label, group, model, losses, lrs=lrs, steps=STEPS)

    found = {"faces, CNN": problem(functools.partial(cnn, device), 3e-4, 1e-3)}
    names = [key for key in held.files if key.startswith("lite0.")]
    weights = {key[6:]: torch.from_numpy(held[key]) for key in names}
    if weights:
        found["faces, lite0"] = problem(functools.partial(lite0, weights, device), 1e-4, 1e-3)
    else:
        print("faces, lite0 is left out: the file has no weights of it", file=sys.stderr)
    return found


def _cases() -> list[Case]:
    """ResNet-50 on 256 images, and a transformer of DistilBERT's size on 128 texts; bf16."""

    def case(name: str, model: nn.Module, inputs: Tensor) -> Case:
        y = torch.randint(2, (len(inputs),), device="cuda")

        def scores() -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return model(inputs)

        def losses() -> Tensor:
            return cross_entropy(scores().float(), y, reduction="none")

        return Case(name, model, scores, losses, len(y), device="cuda", rounds=30, steps=5)

    backbone = ImageBackbone(ResNet(), *_COLOURS, size=(224, 224), batch_norm="batch")
    resnet: Any = nn.Sequential(backbone, nn.Linear(2048, 2)).cuda()
    resnet = resnet.to(memory_format=torch.channels_last)
    layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True)
    encoder = nn.TransformerEncoder(layer, 6)
    head = nn.Sequential(nn.Embedding(30522, 768), encoder, nn.AdaptiveAvgPool2d((1, 768)))
    bert = nn.Sequential(head, nn.Flatten(), nn.Linear(768, 2)).cuda()
    return [
        case("resnet50-256", resnet, torch.randint(256, (256, 3, 224, 224), device="cuda")),
        case("distilbert-128", bert, torch.randint(30522, (128, 512), device="cuda")),
    ]


def default_step(case: Case, num_groups: int = 1000, each: int = 8) -> Any:
    """A step of `CVaRGroupDRO` with no setting; batches hold `each` samples of a group."""
    optimizer = torch.optim.Adam(case.model.parameters(), lr=1e-4)
    dro = fcco.CVaRGroupDRO(case.model, optimizer, num_groups=num_groups, ratio=0.15)
    group = torch.arange(case.batch_size // each, device=case.device).repeat_interleave(each)
    offset = 0

    def step() -> None:
        nonlocal offset
        offset = (offset + len(group) // each) % (num_groups - len(group) // each)
        dro(case.losses, group + offset).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def step_ratios(rounds: int | None = None) -> dict[str, float]:
    """The step with all defaults over the plain step, by model."""
    found = {}
    for case in _cases():
        plain = plain_step(case, torch.optim.Adam(case.model.parameters(), lr=1e-4))
        steps = {"plain": plain, "fcco": default_step(case)}
        timings = interleave(
            steps, rounds or case.rounds, case.steps, device="cuda", clock=time.perf_counter
        )
        found[case.name] = round(timings.ratio("fcco", "plain"), 4)
    return found


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
