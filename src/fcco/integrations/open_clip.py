"""open_clip: its `ClipLoss` against all pairs of the data set, from small batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._distributed import find_group
from ._pairs import PairMemory, pair_numbers

__all__ = ["GlobalClipLoss"]

_REMEDY = "Let the data set return (image, text, number) and pass `index=number`."


class GlobalClipLoss(nn.Module):
    r"""open_clip's `ClipLoss` with all pairs of the data set as negatives, from small batches.

    .. math::
        \frac1{2n}\sum_{i=1}^n \Bigl[\log\Bigl(1 + \sum_{j \ne i} e^{c (s_{ij} - s_{ii})}\Bigr) +
        \log\Bigl(1 + \sum_{j \ne i} e^{c (s_{ji} - s_{ii})}\Bigr)\Bigr], \qquad
        s_{ij} = \langle \text{image}_i, \text{text}_j\rangle

    is that loss with all n pairs as one batch, where c is the `logit_scale`. Here both sums of
    each pair are followed by moving averages over the visits of the pair,

    .. math::
        G_i \leftarrow (1-\gamma)\,G_i
        + \gamma\,\frac{n-1}{B-1}\sum_{j \in \mathcal B} e^{c (s_{ij} - s_{ii})}.

    The call is that of `ClipLoss` with the number of each pair besides. In `eval()` mode and
    without gradient the loss is that of the batch, and nothing changes. On several ranks the
    negatives and the gradient are those of the whole batch, as with
    `ClipLoss(local_loss=True, gather_with_grad=True)`. The memory is in `state_dict()`.

    Args:
        num_pairs: n, the number of pairs of the data set.
        gamma: weight of the new sums in the average; 1 has no memory.
        stored_pairs: how many of the last pairs keep their features, as further negatives; for
            fine-tuning, where features change slowly.
        negatives: K < n - 1 negatives stand for all: both sums are multiplied by K / (n - 1), as
            in a batch of K + 1 pairs. None is n - 1.
        local_loss: as in `ClipLoss`; only True, and so is `gather_with_grad`.
        rank: as in `ClipLoss`, as is `world_size`; found in `torch.distributed`, checked if given.

    Example:
        >>> import torch
        >>> from torch.nn.functional import normalize
        >>> loss = GlobalClipLoss(num_pairs=100)
        >>> images, texts = (normalize(torch.randn(8, 4), dim=1).requires_grad_() for _ in range(2))
        >>> loss(images, texts, torch.tensor(14.3), index=torch.arange(8)).backward()

    References:
        A. Radford et al., Learning transferable visual models from natural language supervision,
        2021 (CLIP). Z. Yuan et al., Provable stochastic optimization for global contrastive
        learning: small batch does not harm performance, 2022 (SogCLR).
    """

    def __init__(
        self,
        num_pairs: int,
        gamma: float = 0.8,
        stored_pairs: int = 0,
        negatives: int | None = None,
        *,
        local_loss: bool = True,
        gather_with_grad: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        if not (local_loss and gather_with_grad):
            raise ValueError(
                "`GlobalClipLoss(local_loss=..., gather_with_grad=...)` must both be True: else "
                "the sums of a pair would be updated by every rank."
            )
        self.memory = PairMemory("GlobalClipLoss", num_pairs, gamma, True, stored_pairs, negatives)
        self.rank, self.world_size = rank, world_size

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
        *,
        index: Any = None,
    ) -> Tensor | dict[str, Tensor]:
        """The loss of a batch.

        Args:
            image_features: of unit length, (B, d).
            text_features: of the same pairs, (B, d).
            logit_scale: c, with gradient if it is learned.
            logit_bias: has no effect, as in `ClipLoss`: it is the same for all pairs.
            output_dict: return `{"contrastive_loss": loss}`.
            index: the number of each pair in the data set, from 0 to n - 1, (B,), best on the CPU
                (it is checked there). Not used in evaluation.
        """
        numbers = None
        if self.training and torch.is_grad_enabled():
            group = find_group()
            here = (0, 1) if group is None else (group.rank, group.size)
            if self.rank not in (None, here[0]) or self.world_size not in (None, here[1]):
                raise ValueError(
                    f"`GlobalClipLoss(rank={self.rank}, world_size={self.world_size})`: in this "
                    f"process `torch.distributed` has rank {here[0]} of {here[1]}."
                )
            where = "`GlobalClipLoss(...)(index=...)`"
            numbers = pair_numbers(index, self.memory.num_pairs, where, _REMEDY)
        loss = self.memory((image_features, text_features), logit_scale, numbers)
        return {"contrastive_loss": loss} if output_dict else loss
