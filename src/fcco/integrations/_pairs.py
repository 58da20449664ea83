"""The memory behind the contrastive losses of `sentence_transformers` and `open_clip`.

`fcco.GlobalContrastive` needs the optimizer, which these frameworks make after the loss, because it
pools the calls between two steps and may correct its estimates. Here each call is a step of its own
and updates a plain moving average, at the cost of a few operations more than the loss of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .. import _checks
from .._distributed import Group, find_group, gather_rows, row_counts
from .._state import KeepsPrecision

__all__ = ["PairMemory", "pair_numbers"]

_EXCLUDED = -1e30  # its exponential is 0 and so is its slope; that of -inf may be NaN


class PairMemory(KeepsPrecision):
    r"""The loss of each pair against all others of the data set, from small batches.

    With s_ij the score of anchor i and document j,

    .. math::
        \frac1n\sum_{i=1}^n \log(1 + G_i), \qquad G_i = \sum_{j \ne i} e^{s_{ij} - s_{ii}},

    is the cross-entropy with all n pairs as one batch. The N_i negatives of a batch estimate G_i
    without bias, and their average over the visits of pair i takes its place:

    .. math::
        \hat G_i = \frac{n-1}{N_i}\sum_{j} e^{s_{ij} - s_{ii}}, \qquad
        G_i \leftarrow (1-\gamma)\,G_i + \gamma\,\hat G_i, \qquad
        \text{gradient}\ \frac{\nabla \hat G_i}{1 + G_i}.

    The buffer `value` holds log G_i, NaN before the first visit, with a second column for documents
    against anchors if `symmetric`. Hard negatives are further documents: those of other pairs count
    like their positives; those of pair i are always in the batch with it, and count once.

    Args:
        call: name of the class that the user built, for errors.
        num_pairs: n.
        gamma: weight of the new estimate.
        symmetric: mean of both directions.
        dtype: precision of the buffer.
        device: where it lives at first.
    """

    value: Tensor

    def __init__(
        self,
        call: str,
        num_pairs: int,
        gamma: float,
        symmetric: bool,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        super().__init__()
        _checks.integer(call, "num_pairs", num_pairs, 2)
        _checks.in_interval(call, "gamma", gamma, 0.0, 1.0, open_low=True)
        self.num_pairs, self.gamma, self.symmetric = num_pairs, gamma, symmetric
        shape = (num_pairs, 2 if symmetric else 1)
        self.register_buffer("value", torch.full(shape, math.nan, dtype=dtype, device=device))

    def forward(
        self,
        features: Sequence[Tensor],
        scale: float | Tensor,
        index: Tensor | None = None,
    ) -> Tensor:
        """The mean loss of a batch.

        Args:
            features: of the anchors, of their positives, then of hard negatives, (b, d) each.
            scale: what inner products are multiplied by.
            index: the number of each pair, see `pair_numbers`. None leaves the memory alone: the
                loss is that of this batch (of this rank), whose negatives stand for all.
        """
        first = features[0]
        if index is not None and len(index) != len(first):
            raise ValueError(
                f"There are {len(first)} pairs of features but the numbers of {len(index)} pairs."
            )
        group = None if index is None else find_group()
        with torch.autocast(first.device.type, enabled=False):
            dtype = torch.promote_types(first.dtype, torch.float32)
            features = [each.to(dtype) for each in features]
            own = torch.arange(len(first)) if index is None else index
            own = own.to(first.device, non_blocking=True)
            every, numbers, start, ranks = features, own, 0, 1
            if group is not None:
                counts, ranks = row_counts(first, group), group.size
                start = sum(counts[: group.rank])
                numbers = gather_rows(own.unsqueeze(1), group, counts).squeeze(1)
                table: Any = _GatherRows.apply(torch.cat(features, 1), group, counts)
                every = table.chunk(len(features), 1)
            if len(numbers) < 2:  # the last pair of an epoch, alone: there is nothing to compare
                return torch.stack([each.sum() for each in features]).sum() * 0.0
            entries = self._log_sums(features, every, scale, own, numbers, start)
            sums = self._tracked(entries.detach(), own, numbers, group, index is not None)
            # log(1 + G); beyond 60 the 1 has no digit left, beyond 20, the default, it has.
            logs = softplus(sums, threshold=60)
            share = ranks / (len(numbers) * entries.shape[1])
            # A linear function of the entries has the gradient above. Its value, which backward
            # does not look at, is replaced by that of the loss.
            slopes = torch.exp(entries.detach() - logs).mul_(share)
            loss = torch.dot(entries.reshape(-1), slopes.reshape(-1))
            loss.detach().copy_(logs.sum() * share)
            return loss

    def _log_sums(
        self,
        features: Sequence[Tensor],
        every: Sequence[Tensor],
        scale: float | Tensor,
        own: Tensor,
        numbers: Tensor,
        start: int,
    ) -> Tensor:
        """The logarithm of each estimate of G_i, shape (b, 1), or (b, 2) if symmetric.

        Args:
            features: of this rank.
            every: of all ranks.
            scale: of the scores.
            own: numbers of the pairs of this rank.
            numbers: those of all ranks.
            start: place of this rank's first pair among them.
        """
        # A pair that the batch holds twice is no negative of itself.
        same = own.unsqueeze(1) == numbers
        negatives = (len(numbers) - same.sum(1, keepdim=True)).clamp(min=1).to(features[0].dtype)
        weight = math.log(self.num_pairs - 1) - negatives.log()
        weight = torch.where(same, _EXCLUDED, weight)
        scores = scale * features[0] @ every[1].T
        matching = scores.diagonal(start)
        parts = [scores + weight]
        if len(every) > 2:
            with_own = weight.clone()
            with_own.diagonal(start).zero_()
            parts += [scale * features[0] @ hard.T + with_own for hard in every[2:]]
        sums = [torch.cat(parts, 1).logsumexp(1) if len(parts) > 1 else parts[0].logsumexp(1)]
        if self.symmetric:
            sums.append((scale * features[1] @ every[0].T + weight).logsumexp(1))
        return torch.stack(sums, 1) - matching.unsqueeze(1)

    def _tracked(
        self, fresh: Tensor, own: Tensor, numbers: Tensor, group: Group | None, update: bool
    ) -> Tensor:
        """The logarithm of G_i of this rank's pairs, after the update."""
        if not update:
            return fresh
        dtype, fresh = fresh.dtype, fresh.to(self.value.dtype)
        old = self.value[own]
        kept = math.log(1 - self.gamma) if self.gamma < 1 else -math.inf
        mixed = torch.logaddexp(old + kept, fresh + math.log(self.gamma))
        new = torch.where(old.isnan(), fresh, mixed)
        rows = new if group is None else gather_rows(new, group)
        self.value.index_copy_(0, numbers, rows)
        return new.to(dtype)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"{self.num_pairs}, gamma={self.gamma}, symmetric={self.symmetric}"


class _GatherRows(torch.autograd.Function):
    """The rows of all ranks; the gradient of a row is summed over all ranks that use it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group, counts: list[int]) -> Tensor:
        ctx.group, ctx.start, ctx.rows = group, sum(counts[: group.rank]), len(rows)
        return gather_rows(rows, group, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=ctx.group.handle)
        return total[ctx.start : ctx.start + ctx.rows], None, None


def pair_numbers(index: Any, num_pairs: int, where: str, remedy: str) -> Tensor:
    """Check the numbers of the pairs of a batch.

    A wrong number would be an error in the middle of a GPU's work, and a class in its place would
    make one pair of many, without any message. A copy on the host costs less than a kernel.

    Args:
        index: what the user gave.
        num_pairs: n.
        where: the argument in the words of the user's call.
        remedy: how to get right numbers.
    """
    if index is None:
        raise ValueError(
            f"{where} is missing, which tells which of the {num_pairs} pairs these are. {remedy}"
        )
    given = torch.as_tensor(index)
    numbers = given.detach().cpu()
    kind = numbers.dtype
    if numbers.dim() != 1 or kind == torch.bool or kind.is_floating_point or kind.is_complex:
        raise ValueError(
            f"{where} must be a vector of integers, the number of each pair, but has shape "
            f"{tuple(numbers.shape)} and dtype {kind}. {remedy}"
        )
    distinct, rows = set(numbers.tolist()), len(numbers)
    outside = [number for number in distinct if not 0 <= number < num_pairs]
    if outside:
        raise IndexError(
            f"{where} must lie in [0, {num_pairs - 1}] (num_pairs={num_pairs}) but contains: "
            f"{outside[0]}. {remedy}"
        )
    if rows > 2 and len(distinct) <= rows / 2:
        raise ValueError(
            f"{where} has only {len(distinct)} different numbers in a batch of {rows}: these are "
            f"classes or groups, not the numbers of pairs. {remedy}"
        )
    return given.long()
