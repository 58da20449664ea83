"""Two backbones of the size of CLIP ViT-B/16 in plain torch, with random weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Size:
    """Sizes of both backbones: (layers, width, heads)."""

    image: tuple[int, int, int] = (12, 768, 12)
    text: tuple[int, int, int] = (12, 512, 8)
    side: int = 224
    patch: int = 16
    tokens: int = 77
    words: int = 49_408
    joint: int = 512


TINY = Size((2, 32, 2), (2, 32, 2), side=32, tokens=16, words=100, joint=16)


class Block(nn.Module):
    """A transformer layer with its norms in front."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same."""
        batch, length, width = x.shape
        parts = self.queries(self.first(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.mixed(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(gelu(self.wide(self.second(x))))


class Backbone(nn.Module):
    """Layers, a norm and a projection; reads one position."""

    def __init__(self, shape: tuple[int, int, int], length: int, joint: int, causal: bool) -> None:
        super().__init__()
        layers, width, heads = shape
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, heads, causal) for _ in range(layers))
        self.norm, self.projection = nn.LayerNorm(width), nn.Linear(width, joint, bias=False)
        self.read = -1 if causal else 0
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, joint)."""
        x = x + self.place
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        return self.projection(self.norm(x[:, self.read]))


class Pair(nn.Module):
    """An image backbone, a text backbone and the logarithm of the scale 1/tau."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        patches = (size.side // size.patch) ** 2
        self.patch = nn.Conv2d(3, size.image[1], size.patch, size.patch, bias=False)
        self.start = nn.Parameter(0.02 * torch.randn(1, 1, size.image[1]))
        self.words = nn.Embedding(size.words, size.text[1])
        self.image = Backbone(size.image, patches + 1, size.joint, causal=False)
        self.text = Backbone(size.text, size.tokens, size.joint, causal=True)
        self.log_scale = nn.Parameter(torch.tensor(20.0).log())

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Features of both kinds."""
        patches = self.patch(images).flatten(2).transpose(1, 2)
        start = self.start.to(patches.dtype).expand(len(images), -1, -1)
        return self.image(torch.cat([start, patches], dim=1)), self.text(self.words(texts))
