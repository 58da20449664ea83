"""Putting the model together from towers, scalings and projections."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from .. import towers
from .config import Continual
from .model import Scaling, TwoTowers, image_projection, text_projection

__all__ = ["Assembly"]

Progress = Callable[[str, int, int | None], None]


class Assembly:
    """Models of a config, all with the same parts.

    A tower that is trained is a part of the model; of a frozen one the model takes the features.
    Projections that come with the weights of the towers (CLIP) are taken over; features of towers
    that bring none are scaled first.

    Args:
        config: towers, widths and heads.
        progress: is told about downloads.
    """

    def __init__(self, config: Continual, progress: Progress | None = None) -> None:
        self.config, self._progress = config, progress
        self._brought: dict[str, tuple[int, nn.Linear | None]] = {}

    def model(self, scaling: Callable[[str], Scaling]) -> TwoTowers:
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
        return TwoTowers(image, text, seen, read)

    def _side(
        self, side: str, scaling: Callable[[str], Scaling]
    ) -> tuple[nn.Module, int, nn.Linear | None]:
        """What comes before a projection, its width, and the projection that it brings along."""
        config = self.config
        if getattr(config, f"{side}_tower") == "none":
            scaled = scaling(side)
            return scaled, len(scaled.mean), None
        width, layer = self._found(side)
        before = nn.Identity() if layer is not None else scaling(side)
        if config.train == "all" or (config.train == "text" and side == "text"):
            before = nn.Sequential(self._trained_tower(side), before)
        return before, width, copy.deepcopy(layer)

    def _found(self, side: str) -> tuple[int, nn.Linear | None]:
        if side not in self._brought:
            # The tower whose features are kept, and no draw from the stream of the first weights,
            # which would differ between the first model and later ones.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                given = getattr(self.config, f"{side}_weights")  # they tell the sizes, too
                tower = self._tower(side, pretrained=bool(given))  # quick: most bring none
                if tower.projection() is not None and not given:
                    torch.manual_seed(0)
                    tower = self._tower(side)
            self._brought[side] = tower.width, tower.projection()
        return self._brought[side]

    def _trained_tower(self, side: str) -> towers.Tower:
        """A tower to train; with random weights the one whose features the scaling is of."""
        if self.config.pretrained:
            return self._tower(side)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self._tower(side)

    def _tower(self, side: str, pretrained: bool = True) -> towers.Tower:
        config = self.config
        pretrained = pretrained and config.pretrained
        return towers.build(
            getattr(config, f"{side}_tower"),
            pretrained=pretrained,
            weights=getattr(config, f"{side}_weights") if pretrained else "",
            size=config.size,
            tokens=config.tokens,
            recompute=config.recompute,
            progress=self._progress,
        )
