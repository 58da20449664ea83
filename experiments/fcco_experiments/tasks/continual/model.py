"""The model: two backbones, two projections into one space, and a head for each protected class."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fcco import TaskHeads

__all__ = ["Scaling", "TwoBackbones", "image_projection", "text_projection"]


class Scaling(nn.Module):
    """Features scaled by fixed means and deviations.

    Args:
        values: what they are taken from, (N, d); columns that hardly vary are only centred.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        wide = values.double()
        deviation = wide.std(0) if len(wide) > 1 else torch.ones_like(wide[0])
        deviation = torch.where(deviation > 1e-6, deviation, torch.ones_like(deviation))
        self.register_buffer("mean", wide.mean(0).float())
        self.register_buffer("deviation", deviation.float())

    def forward(self, features: Tensor) -> Tensor:
        """The features, scaled."""
        return (features - self.mean) / self.deviation


class TwoBackbones(nn.Module):
    r"""Unit vectors of images and texts.

    .. math::
        E_I(x) = \frac{P\,\phi(x)}{\|P\,\phi(x)\|}, \qquad
        E_T(t) = \frac{(W + A_kB_k)^\top\psi(t)}{\|(W + A_kB_k)^\top\psi(t)\|}

    The texts of protected class k are embedded by its own head (A_k, B_k), all others by W.

    Args:
        image: phi, from raw images or from features.
        text: psi, from token ids or from features.
        image_projection: P.
        text_projection: W, with heads or without.
    """

    def __init__(
        self,
        image: nn.Module,
        text: nn.Module,
        image_projection: nn.Module,
        text_projection: nn.Module,
    ) -> None:
        super().__init__()
        self.image, self.text = image, text
        self.image_projection, self.text_projection = image_projection, text_projection

    def forward(self, images: Tensor, texts: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """Unit vectors in float32.

        Args:
            images: inputs of the image side.
            texts: inputs of the text side.
            head: the head of each text, -1 for none.
        """
        seen = self.image_projection(self.image(images))
        read = self._projected(self.text(texts), head)
        return normalize(seen.float(), dim=1), normalize(read.float(), dim=1)

    def _projected(self, features: Tensor, head: Tensor) -> Tensor:
        project = self.text_projection
        if not isinstance(project, TaskHeads):
            return project(features)
        own = project(features, head.clamp(min=0))
        return torch.where((head >= 0).unsqueeze(1), own, project(features))


def image_projection(inputs: int, hidden: int, width: int) -> nn.Module:
    """A linear layer, or two with a ReLU between them."""
    if not hidden:
        return nn.Linear(inputs, width, bias=False)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, width, bias=False))


def text_projection(linear: nn.Linear, tasks: int, rank: int) -> nn.Module:
    """The layer with low-rank heads, which start at zero; without any for rank 0."""
    return TaskHeads(linear, tasks, rank) if rank else linear
