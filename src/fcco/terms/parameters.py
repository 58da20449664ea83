"""Parameters that belong to blocks: cut-offs lambda_q, temperatures tau_i."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._distributed import Group, gather_rows
from .._state import KeepsPrecision
from ..rules.arrays import per_row
from ..tracker import OpenStep
from ..tracker.blocks import segment


class BlockParameters(KeepsPrecision):
    r"""A table of parameters p_i, one row per block, kept beside the tracked values u_i.

    They are minimised together with the weights, but are no parameters of your optimizer: a block
    is in few batches, and momentum or weight decay would move it in all others too. The owner of
    the table reads some and proposes new ones by a rule of its own, which become final when the
    optimizer's step ends. Several proposals for a block within one step are averaged. One that was
    never set is NaN.

    Args:
        number: n, the number of blocks.
        dim: numbers per block.
        bounds: keep the parameters in this interval.
    """

    value: Tensor
    may_be_nan = ("value",)

    def __init__(
        self,
        number: int,
        dim: int = 1,
        *,
        bounds: tuple[float, float] = (-math.inf, math.inf),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.number, self.dim, self.bounds = number, dim, bounds
        shape = (number,) if dim == 1 else (number, dim)
        self.register_buffer("value", torch.full(shape, math.nan, dtype=dtype, device=device))

    def read(self, index: Tensor | None, first: Tensor) -> Tensor:
        """The parameters of some blocks (None: all); `first` stands for rows never set."""
        rows = self.value if index is None else self.value.index_select(0, index)
        return torch.where(rows.isnan(), first.to(rows), rows)

    def propose(
        self, step: OpenStep, index: Tensor | None, values: Tensor, group: Group | None = None
    ) -> None:
        """Give some blocks (ids may repeat; None: all in order) new parameters at a step's end.

        `group` are ranks whose proposals count as well; None when all ranks propose the same.
        """
        values = values.detach().to(self.value)
        if group is not None and index is not None:
            rows = torch.cat([index.double().unsqueeze(1), values.double().view(-1, self.dim)], 1)
            rows = gather_rows(rows, group)
            index, values = rows[:, 0].long(), rows[:, 1:].to(self.value).squeeze(1)
        before = step.writes[self][1][0] if self in step.writes else []
        step.write(self, self.close, [*before, (index, values)])

    def close(self, proposed: list[tuple[Tensor | None, Tensor]]) -> None:
        """End the step: proposals become final."""
        index, values = proposed[0]
        if len(proposed) > 1 or index is not None:
            every = torch.arange(self.number, device=self.value.device)
            ids = torch.cat([every if index is None else index for index, _ in proposed])
            index, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
            sums = segment(torch.cat([values for _, values in proposed]), inverse, len(index))
            values = sums / per_row(counts, sums)
        self.value[slice(None) if index is None else index] = values.clamp(*self.bounds)
