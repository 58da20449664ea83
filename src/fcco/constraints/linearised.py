"""Values and their change along a step, kept while the step changes the parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._distributed import Group
from ..directional import Directional

__all__ = ["Linearised", "regularised"]


def regularised(values: Tensor, change: Tensor, proximal: Tensor) -> Tensor:
    """l_t: the values at x, their change along v, and the proximal term there; pure.

    Args:
        values: g(x) - tolerance.
        change: <grad g(x), v>.
        proximal: c (|x - w|^2 + 2 <x - w, v>).
    """
    return values + change + proximal.to(values)


class Linearised:
    """g(x) + <grad g(x), v>, also after the parameters have moved on.

    Args:
        values: g(x), with gradient.
        parameters: x.
        group: ranks over which the gradient of `values` is averaged.

    Example:
        >>> import torch
        >>> from fcco.constraints.linearised import Linearised
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> line = Linearised(x.prod()[None], [x])
        >>> with torch.no_grad():
        ...     _ = x.fill_(100.0)
        >>> line.along([torch.tensor([0.1, 0.0])])
        tensor([2.2000])
    """

    def __init__(
        self, values: Tensor, parameters: Sequence[Tensor], group: Group | None = None
    ) -> None:
        self.values, self._group = values.detach(), group
        self._change: Directional | None = None
        if values.requires_grad:
            places = {p.untyped_storage().data_ptr() for p in parameters}

            def copied(tensor: Tensor) -> Tensor:
                own = tensor.untyped_storage().data_ptr() in places
                return tensor.detach().clone() if own else tensor

            # A step changes the parameters in place, and the derivative of a product needs them.
            hooks = torch.autograd.graph.saved_tensors_hooks(copied, lambda tensor: tensor)
            with torch.autocast(values.device.type, enabled=False), hooks:
                self._change = Directional(values, parameters)

    def change(self, move: Sequence[Tensor]) -> Tensor:
        """<grad g(x), v> for a move v, one tensor per parameter."""
        change = torch.zeros_like(self.values)
        if self._change is not None:
            with torch.autocast(change.device.type, enabled=False), torch.enable_grad():
                change = self._change.along(move)
        if self._group is not None:
            torch.distributed.all_reduce(change, group=self._group.handle)
            change = change / self._group.size
        return change

    def along(self, move: Sequence[Tensor]) -> Tensor:
        """The linearised values after a move."""
        return self.values + self.change(move)
