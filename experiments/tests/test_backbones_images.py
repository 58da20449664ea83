"""Image backbones: networks against transcriptions, scaling, batch norm, recomputation."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from fcco_experiments import backbones
from fcco_experiments.backbones import networks, registry
from fcco_experiments.backbones.networks import DenseNet, EfficientNetLite, ResNet, Stage
from torch import Tensor, nn
from torch.nn import functional as F

import fcco

TINY_STAGES = (Stage(1, 3, 1, 1, 4), Stage(2, 5, 2, 6, 6), Stage(2, 3, 2, 6, 8))


def tiny_lite() -> EfficientNetLite:
    return EfficientNetLite(TINY_STAGES, stem=4, width=10)


def tiny_resnet() -> ResNet:
    return ResNet((2, 1, 2, 1), channels=4)


def tiny_densenet() -> DenseNet:
    return DenseNet((2, 1, 2, 2), growth=3, channels=6)


TINY = {"lite": tiny_lite, "resnet": tiny_resnet, "densenet": tiny_densenet}


def shaken(network: nn.Module) -> nn.Module:
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


def backbone(which: str, seed: int = 0, **options) -> backbones.ImageBackbone:
    torch.manual_seed(seed)
    options = {"size": (37, 45), **options}
    network = shaken(TINY[which]())
    assert isinstance(network, backbones.ImageNetwork)
    return backbones.ImageBackbone(network, (100.0, 110.0, 120.0), (50.0, 60.0, 70.0), **options)


def photos(count: int = 4, size=(30, 41)) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, 3, *size), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(
    "network, width, count",
    [
        (EfficientNetLite, 1280, 4_652_008 - 1000 * 1281),
        (ResNet, 2048, 25_557_032 - 1000 * 2049),
        (DenseNet, 1024, 7_978_856 - 1000 * 1025),
    ],
)
def test_sizes_of_the_published_networks(network, width, count):
    """The published numbers of parameters, without the classifier of 1000 classes."""
    with torch.device("meta"):
        built = network()
        shape = built(torch.empty(2, 3, 96, 64)).shape
    assert built.width == width and shape == (2, width)
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


def lite_names(network: EfficientNetLite) -> dict[str, Tensor]:
    """A state dict with the names of the file on PyPI, by walking the modules."""
    found = {}

    def add(part, conv, norm):
        found[f"{conv}.weight"] = part.conv.weight
        found.update({f"{norm}.{leaf}": value for leaf, value in part.norm.state_dict().items()})

    add(network.stem, "_conv_stem", "_bn0")
    blocks = [block for stage in network.blocks for block in stage.children()]
    for number, block in enumerate(blocks):
        name = f"_blocks.{number}"
        if block.expand is not None:
            add(block.expand, f"{name}._expand_conv", f"{name}._bn0")
        add(block.depthwise, f"{name}._depthwise_conv", f"{name}._bn1")
        add(block.project, f"{name}._project_conv", f"{name}._bn2")
    add(network.head, "_conv_head", "_bn1")
    return found


@pytest.mark.parametrize("size", [(32, 32), (37, 45), (26, 33)])
def test_efficientnet_lite_is_its_transcription(size):
    torch.manual_seed(0)
    network = shaken(tiny_lite()).eval()
    assert isinstance(network, EfficientNetLite)
    state, values = lite_names(network), 2 * torch.randn(3, 3, *size)
    with torch.no_grad():
        torch.testing.assert_close(network(values), literal_lite(state, values))
    renamed = networks._lite_names(state, TINY_STAGES)
    assert renamed.keys() == network.state_dict().keys()
    assert all(torch.equal(renamed[key], value) for key, value in network.state_dict().items())


def literal_resnet(state, values: Tensor, layers) -> Tensor:
    values = F.conv2d(values, state["conv1.weight"], stride=2, padding=3)
    values = F.max_pool2d(F.relu(normed(state, "bn1", values)), 3, 2, 1)
    for stage, count in enumerate(layers, 1):
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


def literal_densenet(state, values: Tensor, layers) -> Tensor:
    state = {key.removeprefix("features."): value for key, value in state.items()}
    values = F.conv2d(values, state["conv0.weight"], stride=2, padding=3)
    values = F.max_pool2d(F.relu(normed(state, "norm0", values)), 3, 2, 1)
    for block, count in enumerate(layers, 1):
        for number in range(1, count + 1):
            name = f"denseblock{block}.denselayer{number}"
            inner = F.relu(normed(state, f"{name}.norm1", values))
            inner = F.conv2d(inner, state[f"{name}.conv1.weight"])
            inner = F.relu(normed(state, f"{name}.norm2", inner))
            inner = F.conv2d(inner, state[f"{name}.conv2.weight"], padding=1)
            values = torch.cat([values, inner], 1)
        if block < len(layers):
            values = F.relu(normed(state, f"transition{block}.norm", values))
            values = F.conv2d(values, state[f"transition{block}.conv.weight"])
            values = F.avg_pool2d(values, 2)
    return F.relu(normed(state, "norm5", values)).mean((2, 3))


@pytest.mark.parametrize("size", [(64, 64), (109, 89)])
@pytest.mark.parametrize(
    "network, literal, layers",
    [(tiny_resnet, literal_resnet, (2, 1, 2, 1)), (tiny_densenet, literal_densenet, (2, 1, 2, 2))],
)
def test_torchvision_networks_are_their_transcription(network, literal, layers, size):
    torch.manual_seed(0)
    built = shaken(network()).eval()
    values = torch.randn(2, 3, *size)
    with torch.no_grad():
        expected = literal(built.state_dict(), values, layers)
        torch.testing.assert_close(built(values), expected)
        last = built.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        torch.testing.assert_close(last(values), expected)
    assert {part.count(".") for part in built.state_dict()} <= {1, 2, 3, 4, 5}


# The backbone around a network.


@pytest.mark.parametrize("size", [(30, 41), (90, 80)])
def test_images_are_scaled_and_normalised(size):
    built = backbone("lite").eval()
    seen = photos(size=size)
    values = F.interpolate(seen.float(), (37, 45), mode="bilinear", antialias=True)
    middle, spread = torch.tensor([100.0, 110, 120]), torch.tensor([50.0, 60, 70])
    values = (values - middle.view(3, 1, 1)) / spread.view(3, 1, 1)
    with torch.no_grad():
        found = built(seen)
        torch.testing.assert_close(found, built.network(values))
        torch.testing.assert_close(built(seen.float()), found)
        assert found.dtype == torch.float32 and found.shape == (4, built.width)
        same = backbone("lite", size=size).eval()
        plain = (seen.float() - middle.view(3, 1, 1)) / spread.view(3, 1, 1)
        assert torch.equal(same(seen), same.network(plain))
        with torch.autocast("cpu", torch.bfloat16):
            low = built(seen)
    assert low.dtype == torch.float32 and not torch.equal(low, found)
    torch.testing.assert_close(low, found, rtol=0.1, atol=0.1)


def test_wrong_options_and_batches_are_refused(tmp_path):
    cases: list[tuple[dict[str, Any], str]] = [
        ({"batch_norm": "free"}, r"batch_norm=...\)` must be one of"),
        ({"dropout": 1.0}, r"dropout=...\)` must lie in"),
        ({"size": (0, 3)}, "a height and a width"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            backbone("lite", **options)
    with pytest.raises(ValueError, match=r"takes images \(N, 3, H, W\)"):
        backbone("lite")(torch.zeros(2, 1, 30, 41, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"weights=...\)` must be empty"):
        backbones.build("resnet50", pretrained=False, weights="some.pth")
    with pytest.raises(backbones.WeightsError, match="no file of weights at"):
        backbones.build("resnet50", pretrained=True, weights=str(tmp_path / "none.pth"))
    for name in ("bad.pth", "bad.safetensors"):
        (tmp_path / name).write_bytes(b"nothing of the kind")
        with pytest.raises(backbones.WeightsError, match="is no file of weights"):
            backbones.build("resnet50", pretrained=True, weights=str(tmp_path / name))


@pytest.mark.parametrize("which", TINY)
def test_frozen_batch_norm_stays_and_still_trains(which):
    built = nn.Sequential(backbone(which), nn.Linear(backbone(which).width, 2)).train()
    before = copy.deepcopy(built.state_dict())
    first, second = built(photos()), built(photos())
    assert torch.equal(first, second)
    first.sum().backward()
    norms = [each for each in built.modules() if isinstance(each, nn.BatchNorm2d)]
    assert norms and not any(norm.training for norm in norms)
    assert all(norm.weight.grad is not None and norm.bias.grad is not None for norm in norms)
    assert all(torch.equal(before[key], value) for key, value in built.state_dict().items())
    assert built[0].training and not built.eval()[0].training
    torch.testing.assert_close(built(photos()), first)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("batch_norm", ["frozen", "batch"])
@pytest.mark.parametrize("which", TINY)
def test_recomputation_changes_no_gradient_and_keeps_less(which, batch_norm, dropout):
    found, kept = {}, {}
    for recompute in (False, True):
        built = backbone(which, recompute=recompute, batch_norm=batch_norm, dropout=dropout).train()
        sizes: list[int] = []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        torch.manual_seed(5)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = built(photos())
        result.square().sum().backward()
        found[recompute] = [p.grad for p in built.parameters()] + list(built.buffers())
        kept[recompute] = sum(sizes)
    assert kept[True] < 0.5 * kept[False]
    for plain, again in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(again, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("which", TINY)
def test_batch_statistics_move_once_a_step(which, recompute):
    built = backbone(which, batch_norm="batch", recompute=recompute).train()
    norms = [each for each in built.modules() if isinstance(each, nn.BatchNorm2d)]
    inputs: list[Tensor] = []
    first = norms[0]
    handle = first.register_forward_hook(lambda module, given, result: inputs.append(given[0]))
    assert first.running_mean is not None
    start = first.running_mean.clone()
    built(photos()).square().sum().backward()
    handle.remove()
    momentum = first.momentum
    assert momentum is not None
    expected = (1 - momentum) * start + momentum * inputs[0].detach().mean((0, 2, 3))
    torch.testing.assert_close(first.running_mean, expected)
    assert {
        int(norm.num_batches_tracked) for norm in norms if norm.num_batches_tracked is not None
    } == {1}
    assert all(norm.track_running_stats and norm.training for norm in norms)
    assert len(inputs) == 1 + recompute


@pytest.mark.parametrize("batch_norm", ["frozen", "batch"])
@pytest.mark.parametrize("which", TINY)
def test_recomputation_under_msvr(which, batch_norm):
    """Each step visits the previous parameters, with their own buffers, before the backward."""
    group, label = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 1, 1, 0, 1, 1])

    def end(recompute: bool) -> list[Tensor]:
        body = backbone(which, recompute=recompute, batch_norm=batch_norm)
        torch.manual_seed(3)
        model = nn.Sequential(body, nn.Linear(body.width, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        dro = fcco.CVaRGroupDRO(
            model, optimizer, num_groups=3, ratio=0.5, smoothing=0.1, gamma=0.5, correction="theory"
        )
        for step in range(3):
            seen = photos(6).roll(step, 2)
            loss = dro(lambda x=seen: F.cross_entropy(model(x), label, reduction="none"), group)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*model.state_dict().values(), dro.group_losses()]

    for plain, again in zip(end(False), end(True), strict=True):
        torch.testing.assert_close(again, plain, rtol=1e-5, atol=1e-6)


# Weights.


@pytest.fixture
def tiny_resnet50(monkeypatch):
    tiny = replace(networks.IMAGES["resnet50"], network=tiny_resnet)
    monkeypatch.setitem(registry.BUILT_IN, "resnet50", tiny)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def saved_resnet(path):
    torch.manual_seed(9)
    network = shaken(tiny_resnet())
    state = {k: v for k, v in network.state_dict().items() if "num_batches" not in k}  # as of 2017
    torch.save({**state, "fc.weight": torch.zeros(3, 128), "fc.bias": torch.zeros(3)}, path)
    return network


def test_weights_of_torch_hub_are_taken_when_they_are_what_their_name_says(
    tiny_resnet50, hub, monkeypatch
):
    from fcco_experiments.backbones.weights import file_checksum

    with pytest.raises(
        backbones.WeightsError, match=r'torchvision.models.resnet50\(weights="DEFAULT'
    ):
        backbones.build("resnet50", pretrained=True)
    network = saved_resnet(hub / "resnet50-11ad3fa6.pth")
    with pytest.raises(backbones.WeightsError, match=r"resnet50-11ad3fa6.pth"):
        backbones.build("resnet50", pretrained=True)
    good = f"resnet50-{file_checksum(hub / 'resnet50-11ad3fa6.pth')[:8]}.pth"
    (hub / "resnet50-11ad3fa6.pth").rename(hub / good)
    tiny = replace(
        networks.IMAGES["resnet50"], network=tiny_resnet, hub=("resnet50-11ad3fa6.pth", good)
    )
    monkeypatch.setitem(registry.BUILT_IN, "resnet50", tiny)
    built = backbones.build("resnet50", pretrained=True)
    assert torch.equal(built.network.conv1.weight, network.conv1.weight)  # type: ignore[union-attr]


def test_old_names_of_densenet(monkeypatch, tmp_path):
    tiny = replace(networks.IMAGES["densenet121"], network=tiny_densenet)
    monkeypatch.setitem(registry.BUILT_IN, "densenet121", tiny)
    torch.manual_seed(9)
    network = shaken(tiny_densenet())
    old = {}
    for key, value in network.state_dict().items():
        for part in ("norm1", "norm2", "conv1", "conv2"):
            if "denselayer" in key:
                key = key.replace(f".{part}.", f".{part[:-1]}.{part[-1]}.")
        old[key] = value
    assert "features.denseblock1.denselayer2.norm.1.running_var" in old
    torch.save(old, tmp_path / "old.pth")
    built = backbones.build("densenet121", pretrained=True, weights=str(tmp_path / "old.pth"))
    for key, value in network.state_dict().items():
        assert torch.equal(built.network.state_dict()[key], value)  # type: ignore[union-attr]


def wrong_weights() -> dict[str, object]:
    state = tiny_resnet().state_dict()
    shorter = {key: value for key, value in state.items() if not key.startswith("layer4.0.conv")}
    return {
        "it lacks layer4.0.conv1.weight, layer4.0.conv2.weight, layer4.0.conv3.weight.": shorter,
        "it has the unknown extra.weight.": {**state, "extra.weight": torch.zeros(1)},
        "it misshapes conv1.weight.": {**state, "conv1.weight": torch.zeros(4, 3, 5, 5)},
        "must hold a state dict": [1, 2],
        "save `model.state_dict()`, not the model": tiny_resnet(),
    }


@pytest.mark.parametrize("message, content", wrong_weights().items(), ids=range(5))
def test_wrong_weights_are_refused(tiny_resnet50, tmp_path, message, content):
    torch.save(content, tmp_path / "wrong.pth")
    with pytest.raises(backbones.WeightsError) as caught:
        backbones.build("resnet50", pretrained=True, weights=str(tmp_path / "wrong.pth"))
    assert message in str(caught.value) and "wrong.pth" in str(caught.value)
