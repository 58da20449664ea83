"""Running the model: the unit vectors of a batch, and of a whole part of the data."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fcco._distributed import Group

from ...data.grouped import Samples
from ..base import autocast, chunks
from .config import Continual
from .texts import Texts

__all__ = ["Encoder"]


class Encoder:
    """From samples and texts to unit vectors.

    Args:
        config: temperature and precision.
        model: a `TwoBackbones`, perhaps wrapped for several ranks.
        texts: all texts.
        inputs: what the text side takes, one row for each text, on the device.
        device: of the model.
    """

    def __init__(
        self,
        config: Continual,
        model: nn.Module,
        texts: Texts,
        inputs: Tensor,
        device: torch.device,
    ) -> None:
        self.config, self.model, self.texts, self.device = config, model, texts, device
        self.inputs = inputs

    def __call__(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors of images, and of texts by id; each different text is read once.

        Args:
            images: inputs of the image side, on the device.
            texts: ids, on the CPU.
        """
        drawn = self.texts.draw(texts)
        rows = self.inputs[drawn.texts.to(self.device)]
        with autocast(self.config, self.device):
            seen, read = self.model(images, rows, drawn.head.to(self.device))
        return seen, read[drawn.place.to(self.device)]

    def scores(self, images: Tensor, prompts: Tensor) -> Tensor:
        """Scores of the classes from unit vectors: cosines over the temperature."""
        return images @ prompts.T / self.config.temperature

    @torch.no_grad()
    def all(
        self, samples: Samples, rows: Tensor, texts: Tensor, group: Group | None = None
    ) -> tuple[Tensor, Tensor]:
        """Vectors of many samples and of some texts, on every rank, in evaluation mode.

        Args:
            samples: image inputs by row.
            rows: which of them.
            texts: ids.
            group: ranks that share the work.
        """
        pieces = chunks(self.config, samples, rows, self.device, group)
        held = self.model.training
        self.model.eval()
        try:
            found, read = self._filled(pieces, len(rows), texts)
        finally:
            self.model.train(held)
        if group is not None:
            torch.distributed.all_reduce(found, group=group.handle)
        # The last column counts: where samples do not go round, a rank meets one twice.
        return found[:, :-1] / found[:, -1:], read

    def _filled(
        self, pieces: Iterable[tuple[Tensor, Tensor]], number: int, texts: Tensor
    ) -> tuple[Tensor, Tensor]:
        found, read = torch.empty(0), torch.empty(0)
        for places, inputs in pieces:
            seen, read = self(inputs, texts)
            if not len(found):
                found = seen.new_zeros(number, seen.shape[1] + 1)
            found[places.to(self.device), :-1] = seen
            found[places.to(self.device), -1] = 1.0
        return found, read
