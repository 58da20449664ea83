"""Limits of constraints: g_i(w) <= tolerance_i, their margin and their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._state import KeepsPrecision

__all__ = ["Limits", "number_and_names"]


class Limits(KeepsPrecision):
    """What each block may reach, for terms that are read as constraints.

    Args:
        number: m, the number of blocks.
        like: a tensor whose precision and device the limits take.
        tolerance: g_i <= tolerance_i, one number or one per block.
        margin: train for g_i <= tolerance_i - margin, to land on the safe side.
        names: names of the blocks, for values given by name and for reports.
        call: the caller's name, for the error text.

    Example:
        >>> import torch
        >>> limits = Limits(2, torch.zeros(()), tolerance=[0.1, 0.2], names=("a", "b"))
        >>> limits.excess(torch.tensor([0.5]), torch.tensor([1]))
        tensor([0.3000])
        >>> limits.named(torch.tensor([1.0, 2.0]))
        {'a': 1.0, 'b': 2.0}
    """

    tolerance: Tensor

    def __init__(
        self,
        number: int,
        like: Tensor,
        tolerance: float | Sequence[float] | Tensor = 0.0,
        margin: float = 0.0,
        names: Sequence[str] | None = None,
        call: str = "Limits",
    ) -> None:
        super().__init__()
        self.number, self.margin = number, margin
        self.names = None if names is None else tuple(names)
        named = self.names or range(number)
        if {len(named), len(set(named))} != {number}:
            raise ValueError(
                f"`{call}(names=...)` must be {number} different names, one per block, but is: "
                f"{self.names}."
            )
        limit = torch.as_tensor(tolerance, dtype=like.dtype, device=like.device)
        if limit.dim() > 1 or (limit.dim() == 1 and len(limit) != number):
            raise ValueError(
                f"`{call}(tolerance=...)` must be one number or {number}, one per block, but has "
                f"shape {tuple(limit.shape)}."
            )
        self.moved = bool((limit != 0).any())
        self.plain = limit.dim() == 0 and not self.moved and margin == 0
        self.register_buffer("tolerance", limit)

    def of(self, index: Tensor | None, dim: int = 1) -> Tensor:
        """The tolerances of some blocks (None: all), to subtract from values of dimension `dim`."""
        limit = self.tolerance
        if limit.dim() and index is not None:
            limit = limit[index]
        return limit if dim == 1 or limit.dim() == 0 else limit.unsqueeze(-1)

    def excess(self, values: Tensor, index: Tensor | None = None) -> Tensor:
        """How far scalar values are above their limits, margin included: <= 0 is wanted."""
        return values if self.plain else values - self.of(index) + self.margin

    def named(self, values: Tensor) -> Any:
        """One value per block: the tensor itself, or a dict when the blocks have names."""
        if self.names is None:
            return values
        return dict(zip(self.names, values.tolist(), strict=True))


def number_and_names(call: str, constraints: int | Sequence[str]) -> tuple[int, Any]:
    """Read `constraints=...`: a number, or a list of names."""
    if isinstance(constraints, str):
        raise ValueError(
            f"`{call}(constraints=...)` must be a number or a list of names but is one string: "
            f"{constraints!r}."
        )
    if isinstance(constraints, int):
        return constraints, None
    return len(constraints), tuple(constraints)
