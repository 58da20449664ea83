"""Image backbones: networks against transcriptions, scaling, batch norm, recomputation."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fcco_experiments import backbones
from fcco_experiments.backbones.images import ImageSpec, densenet, efficientnet_lite, resnet
from torch import Tensor, nn
from torch.nn import functional as F

TINY_STAGES = ((1, 3, 1, 1, 4), (2, 5, 2, 6, 6), (2, 3, 2, 6, 8))
BLOCKS, LAYERS = (2, 1, 2, 1), (2, 1, 2, 2)


TINY: dict[str, Callable[[], nn.Sequential]] = {
    "lite": lambda: efficientnet_lite(TINY_STAGES, stem=4, width=10),
    "resnet": lambda: resnet(BLOCKS, channels=4),
    "densenet": lambda: densenet(LAYERS, growth=3, channels=6),
}


def shaken(network: nn.Sequential) -> nn.Sequential:
    """Statistics and affine weights of batch norm that are not those of a fresh layer."""
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None and module.running_var is not None
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 2)
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.2)
    return network


def backbone(which: str, **options: Any) -> backbones.ImageBackbone:
    torch.manual_seed(0)
    given = backbones.Options(size=(37, 45), **options)
    colours = (100.0, 110.0, 120.0), (50.0, 60.0, 70.0)
    return backbones.ImageBackbone(shaken(TINY[which]()), *colours, given)


def photos(count: int = 4, size=(30, 41)) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, 3, *size), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(
    "network, width, count",
    [
        (efficientnet_lite, 1280, 4_652_008 - 1000 * 1281),
        (resnet, 2048, 25_557_032 - 1000 * 2049),
        (densenet, 1024, 7_978_856 - 1000 * 1025),
    ],
)
def test_sizes_of_the_published_networks(network, width, count):
    """The published numbers of parameters, without the classifier of 1000 classes."""
    with torch.device("meta"):
        built = network()
        shape = built(torch.empty(2, 3, 96, 64)).shape
    assert shape == (2, width, 3, 2)
    assert sum(parameter.numel() for parameter in built.parameters()) == count


# Networks, written once more as functions of a state dict.


def normed(state, name: str, values: Tensor, eps: float = 1e-5) -> Tensor:
    parts = [state[f"{name}.{leaf}"].view(-1, 1, 1) for leaf in ("running_mean", "running_var")]
    scaled = (values - parts[0]) / torch.sqrt(parts[1] + eps)
    return scaled * state[f"{name}.weight"].view(-1, 1, 1) + state[f"{name}.bias"].view(-1, 1, 1)


def padded_convolution(state, name: str, values: Tensor, stride: int, groups: int = 1) -> Tensor:
    kernel = state[f"{name}.weight"].shape[2]
    pads = []
    for length in (values.shape[3], values.shape[2]):
        total = max(kernel - (length % stride or stride), 0)
        pads += [total // 2, total - total // 2]
    return F.conv2d(F.pad(values, pads), state[f"{name}.weight"], stride=stride, groups=groups)


def literal_lite(state, values: Tensor) -> Tensor:
    """With the names of the file on PyPI."""

    def part(conv, norm, values, stride=1, groups=1):
        values = padded_convolution(state, conv, values, stride, groups)
        return normed(state, norm, values, 1e-3)

    values = part("_conv_stem", "_bn0", values, 2).clamp(0, 6)
    number = 0
    for repeats, _, stride, expansion, channels in TINY_STAGES:
        for repeat in range(repeats):
            name, inner = f"_blocks.{number}", values
            if expansion > 1:
                inner = part(f"{name}._expand_conv", f"{name}._bn0", inner).clamp(0, 6)
            step = stride if repeat == 0 else 1
            depthwise = (f"{name}._depthwise_conv", f"{name}._bn1")
            inner = part(*depthwise, inner, step, inner.shape[1]).clamp(0, 6)
            inner = part(f"{name}._project_conv", f"{name}._bn2", inner)
            keeps = step == 1 and values.shape[1] == channels
            values = inner + values if keeps else inner
            number += 1
    return part("_conv_head", "_bn1", values).clamp(0, 6).mean((2, 3))


def literal_resnet(state, values: Tensor) -> Tensor:
    values = F.conv2d(values, state["conv1.weight"], stride=2, padding=3)
    values = F.max_pool2d(F.relu(normed(state, "bn1", values)), 3, 2, 1)
    for stage, count in enumerate(BLOCKS, 1):
        for number in range(count):
            name = f"layer{stage}.{number}"
            stride = 2 if stage > 1 and number == 0 else 1
            inner = F.conv2d(values, state[f"{name}.conv1.weight"])
            inner = F.relu(normed(state, f"{name}.bn1", inner))
            inner = F.conv2d(inner, state[f"{name}.conv2.weight"], stride=stride, padding=1)
            inner = F.relu(normed(state, f"{name}.bn2", inner))
            inner = normed(state, f"{name}.bn3", F.conv2d(inner, state[f"{name}.conv3.weight"]))
            if number == 0:
                values = F.conv2d(values, state[f"{name}.downsample.0.weight"], stride=stride)
                values = normed(state, f"{name}.downsample.1", values)
            values = F.relu(inner + values)
    return values.mean((2, 3))


def literal_densenet(state, values: Tensor) -> Tensor:
    state = {key.removeprefix("features."): value for key, value in state.items()}
    values = F.conv2d(values, state["conv0.weight"], stride=2, padding=3)
    values = F.max_pool2d(F.relu(normed(state, "norm0", values)), 3, 2, 1)
    for block, count in enumerate(LAYERS, 1):
        for number in range(1, count + 1):
            name = f"denseblock{block}.denselayer{number}"
            inner = F.relu(normed(state, f"{name}.norm1", values))
            inner = F.conv2d(inner, state[f"{name}.conv1.weight"])
            inner = F.relu(normed(state, f"{name}.norm2", inner))
            inner = F.conv2d(inner, state[f"{name}.conv2.weight"], padding=1)
            values = torch.cat([values, inner], 1)
        if block < len(LAYERS):
            values = F.relu(normed(state, f"transition{block}.norm", values))
            values = F.conv2d(values, state[f"transition{block}.conv.weight"])
            values = F.avg_pool2d(values, 2)
    return F.relu(normed(state, "norm5", values)).mean((2, 3))


@pytest.mark.parametrize(
    "which, literal, size",
    [
        ("lite", literal_lite, (32, 32)),
        ("lite", literal_lite, (37, 45)),  # other paddings
        ("resnet", literal_resnet, (109, 89)),
        ("densenet", literal_densenet, (109, 89)),
    ],
)
def test_networks_are_their_transcription(which, literal, size):
    torch.manual_seed(0)
    network = shaken(TINY[which]()).eval()
    values = 2 * torch.randn(3, 3, *size)
    with torch.no_grad():
        expected = literal(network.state_dict(), values)
        torch.testing.assert_close(network(values).mean((2, 3)), expected)


# The backbone around a network.


def test_images_are_scaled_and_normalised():
    built, seen = backbone("lite").eval(), photos(size=(90, 80))
    values = F.interpolate(seen.float(), (37, 45), mode="bilinear", antialias=True)
    middle, spread = torch.tensor([100.0, 110, 120]), torch.tensor([50.0, 60, 70])
    values = (values - middle.view(3, 1, 1)) / spread.view(3, 1, 1)
    with torch.no_grad():
        expected = built.network(values).mean((2, 3))
        torch.testing.assert_close(built(seen), expected)
        with torch.autocast("cpu", torch.bfloat16):
            low = built(seen)
    assert low.dtype == torch.float32 and not torch.equal(low, expected)


@pytest.mark.parametrize("which", TINY)
def test_frozen_batch_norm_stays_and_still_trains(which):
    built = nn.Sequential(backbone(which), nn.Linear(backbone(which).width, 2)).train()
    before = copy.deepcopy(built.state_dict())
    first = built(photos())
    assert torch.equal(first, built(photos()))
    first.sum().backward()
    norms = [module for module in built.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms and all(norm.weight.grad is not None for norm in norms)
    assert all(torch.equal(before[key], value) for key, value in built.state_dict().items())
    torch.testing.assert_close(built.eval()(photos()), first)


# Weights.


@pytest.mark.parametrize("name, which", [("resnet50", "resnet"), ("densenet121", "densenet")])
def test_files_of_torchvision(name, which, monkeypatch, tmp_path):
    spec = backbones.BUILT_IN[name]
    assert isinstance(spec, ImageSpec)
    monkeypatch.setitem(backbones.BUILT_IN, name, replace(spec, network=TINY[which]))
    torch.manual_seed(9)
    network = shaken(TINY[which]())
    old = {"fc.weight": torch.zeros(3, 2), "classifier.bias": torch.zeros(3)}
    for key, value in network.state_dict().items():
        if "denselayer" in key:  # torchvision's file has another name than its network
            key = re.sub(r"\.(norm|conv)([12])\.", r".\1.\2.", key)
        if "num_batches" not in key:  # as of 2017
            old[key] = value
    torch.save(old, tmp_path / "old.pth")
    built = backbones.build(name, weights=str(tmp_path / "old.pth"))
    assert isinstance(built, backbones.ImageBackbone)
    for key, value in network.state_dict().items():
        assert torch.equal(built.network.state_dict()[key], value)
    with pytest.raises(backbones.WeightsError, match=rf"torchvision.models.{name}\(weights="):
        backbones.build(name)
    assert len(backbones.checksum(name, weights=str(tmp_path / "old.pth"))) == 64


@pytest.mark.parametrize(
    "content, message",
    [
        ({"conv1.weight": torch.zeros(4, 3, 5, 5)}, "Missing key.*size mismatch for conv1.weight"),
        ({"extra.weight": torch.zeros(1)}, 'Unexpected key.*"extra.weight"'),
        ([1, 2], "must hold a state dict"),
        (nn.Linear(1, 1), r"save `model.state_dict\(\)`, not the model"),
    ],
)
def test_wrong_weights_are_refused(tmp_path, content, message):
    torch.save(content, tmp_path / "wrong.pth")
    with pytest.raises(backbones.WeightsError, match=rf"(?s)wrong.pth.*{message}"):
        backbones.build("resnet50", weights=str(tmp_path / "wrong.pth"))
    with pytest.raises(backbones.WeightsError, match="no file of weights at"):
        backbones.build("resnet50", weights=str(tmp_path / "none.pth"))
