"""Putting the model together from backbones, scalings and projections."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from ... import backbones
from .config import Continual
from .model import Scaling, TwoBackbones, image_projection, text_projection

__all__ = ["Assembly"]

Progress = Callable[[str, int, int | None], None]


class Assembly:
    """Models of a config, all with the same parts.

    A backbone that is trained is a part of the model; of a frozen one the model takes the features.
    Projections that come with the weights of the backbones (CLIP) are taken over; features of backbones
    that bring none are scaled first.

    Args:
        config: backbones, widths and heads.
        progress: is told about downloads.
    """  # noqa: E501

    def __init__(self, config: Continual, progress: Progress | None = None) -> None:
        self.config, self._progress = config, progress
        self._brought: dict[str, tuple[int, nn.Linear | None]] = {}

    def model(self, scaling: Callable[[str], Scaling]) -> TwoBackbones:
        """A model with its first weights.

        Args:
            scaling: of the features of the side `"image"` or `"text"`.
        """
        config = self.config
        image, wide, first = self._side("image", scaling)
        text, wide_too, second = self._side("text", scaling)
        space = config.width if first is None else first.out_features
        seen = first or image_projection(wide, config.hidden, space)
        linear = second or nn.Linear(wide_too, space, bias=False)
        read = text_projection(linear, len(config.protected), config.heads)
        return TwoBackbones(image, text, seen, read)

    def _side(
        self, side: str, scaling: Callable[[str], Scaling]
    ) -> tuple[nn.Module, int, nn.Linear | None]:
        """What comes before a projection, its width, and the projection that it brings along."""
        config = self.config
        if getattr(config, f"{side}_backbone") == "none":
            scaled = scaling(side)
            return scaled, len(scaled.mean), None
        width, layer = self._found(side)
        before = nn.Identity() if layer is not None else scaling(side)
        if config.train == "all" or (config.train == "text" and side == "text"):
            before = nn.Sequential(self._trained_backbone(side), before)
        return before, width, copy.deepcopy(layer)

    def _found(self, side: str) -> tuple[int, nn.Linear | None]:
        if side not in self._brought:
            # The backbone whose features are kept, and no draw from the stream of the first weights,  # noqa: E501
            # which would differ between the first model and later ones.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                given = getattr(self.config, f"{side}_weights")  # they tell the sizes, too
                backbone = self._backbone(side, pretrained=bool(given))  # quick: most bring none
                if backbone.projection() is not None and not given:
                    torch.manual_seed(0)
                    backbone = self._backbone(side)
            self._brought[side] = backbone.width, backbone.projection()
        return self._brought[side]

    def _trained_backbone(self, side: str) -> backbones.Backbone:
        """A backbone to train; with random weights the one whose features the scaling is of."""
        if self.config.pretrained:
            return self._backbone(side)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self._backbone(side)

    def _backbone(self, side: str, pretrained: bool = True) -> backbones.Backbone:
        config = self.config
        pretrained = pretrained and config.pretrained
        return backbones.build(
            getattr(config, f"{side}_backbone"),
            pretrained=pretrained,
            weights=getattr(config, f"{side}_weights") if pretrained else "",
            size=config.size,
            tokens=config.tokens,
            recompute=config.recompute,
            progress=self._progress,
        )
