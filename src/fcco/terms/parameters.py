"""Parameters that belong to blocks: thresholds s_i, cut-offs lambda_q, temperatures tau_i."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import _checks
from .._distributed import Group, gather_rows
from .._state import KeepsPrecision
from ..rules.arrays import per_row
from ..tracker import OpenStep
from ..tracker.blocks import segment

__all__ = ["BlockParameters"]


class BlockParameters(KeepsPrecision):
    r"""A table of parameters p_i, one row per block, kept beside the tracked values u_i.

    They are minimised together with the weights,

    .. math::
        \min_{w,\,p}\; \frac1n\sum_{i=1}^n f\bigl(g_i(w; p_i)\bigr),

    but are no parameters of your optimizer: a block is in few batches, and momentum or weight decay
    would move it in all others too. The owner of the table reads rows, computes new ones by a rule
    of its own (a gradient step, a step towards the minimiser of the batch, the exact minimiser) and
    proposes them; they become final when the optimizer's step ends. Several proposals for a block
    within one step are averaged.

    A row that was never set is NaN. The CVaR threshold of group DRO is the case of one row.

    Args:
        number: n, the number of blocks.
        dim: numbers per block.
        bounds: keep the parameters in this interval.
        dtype: their precision; never narrowed by `.to(...)`.
        device: where the table lives at first.

    Example:
        >>> import torch
        >>> from fcco.terms import BlockParameters
        >>> table = BlockParameters(3)
        >>> index = torch.tensor([0, 2])
        >>> table.read(index, first=torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
        >>> table.set(index, torch.tensor([1.5, 2.5])); table.value
        tensor([1.5000,    nan, 2.5000])
    """

    value: Tensor
    may_be_nan = ("value",)

    def __init__(
        self,
        number: int,
        dim: int = 1,
        *,
        bounds: tuple[float, float] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _checks.integer("BlockParameters", "number", number, 1)
        _checks.integer("BlockParameters", "dim", dim, 1)
        if bounds is not None and not bounds[0] <= bounds[1]:
            raise ValueError(f"`BlockParameters(bounds=...)` must be (low, high) but is: {bounds}.")
        self.number, self.dim, self.bounds = number, dim, bounds
        shape = (number,) if dim == 1 else (number, dim)
        self.register_buffer("value", torch.full(shape, math.nan, dtype=dtype, device=device))

    def read(self, index: Tensor | None, first: Tensor) -> Tensor:
        """The parameters of some blocks.

        Args:
            index: block ids, (B,); None for all in order.
            first: what stands for a row that was never set, one number, (B,) or (B, dim).
        """
        rows = self.value if index is None else self.value.index_select(0, index)
        return torch.where(rows.isnan(), first.to(rows), rows)

    def propose(
        self, step: OpenStep, index: Tensor | None, values: Tensor, group: Group | None = None
    ) -> None:
        """Give some blocks new parameters at the end of an optimizer step.

        Args:
            step: the step.
            index: block ids, (B,), which may repeat; None for all in order.
            values: the new rows, (B,) or (B, dim).
            group: ranks whose proposals count as well; None when all ranks propose the same.
        """
        values = values.detach().to(self.value)
        if group is not None and index is not None:
            rows = torch.cat([index.double().unsqueeze(1), values.double().view(-1, self.dim)], 1)
            rows = gather_rows(rows, group)
            index = rows[:, 0].long()
            values = rows[:, 1:].to(self.value).reshape(-1, *self.value.shape[1:])
        rows_before = step.writes[self][1][0] if self in step.writes else []
        step.write(self, self.close, [*rows_before, (index, values)])

    def close(self, proposed: list[tuple[Tensor | None, Tensor]]) -> None:
        """End the step: proposals become final."""
        if len(proposed) == 1 and proposed[0][0] is None:
            return self.set(None, proposed[0][1])
        every = torch.arange(self.number, device=self.value.device)
        ids = torch.cat([every if index is None else index for index, _ in proposed])
        ids, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        sums = segment(torch.cat([values for _, values in proposed]), inverse, len(ids))
        return self.set(ids, sums / per_row(counts, sums))

    def set(self, index: Tensor | None, values: Tensor | float) -> None:
        """Change rows at once: an exact minimiser needs no proposal.

        Args:
            index: distinct block ids, (B,); None for all in order.
            values: the new rows, or one number for all of them.
        """
        if self.bounds is not None:
            values = torch.as_tensor(values).clamp(*self.bounds)
        if index is not None:
            self.value[index] = values
        elif isinstance(values, Tensor):
            self.value.copy_(values)
        else:
            self.value.fill_(values)
