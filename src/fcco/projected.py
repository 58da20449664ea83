"""A feasible set: put the parameters back into it after each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .previous import unwrap

__all__ = ["keep_inside"]


def keep_inside(optimizer: torch.optim.Optimizer, project: Callable[[], Any]) -> Any:
    r"""Follow each step of an optimizer by a projection, :math:`w \leftarrow \Pi_X(w)`.

    Args:
        optimizer: the optimizer whose steps are meant.
        project: changes the parameters in place, without gradient; what it returns is ignored.

    Returns:
        A handle; `handle.remove()` ends it.

    Example:
        >>> import torch
        >>> from fcco.projected import keep_inside
        >>> w = torch.nn.Parameter(torch.tensor([0.5, 0.5]))
        >>> optimizer = torch.optim.SGD([w], lr=1.0)
        >>> handle = keep_inside(optimizer, lambda: w.clamp_(0.0, 1.0))
        >>> w.grad = torch.tensor([2.0, -2.0])
        >>> optimizer.step()
        >>> w.tolist()
        [0.0, 1.0]
    """

    def after_step(*_: Any) -> None:
        with torch.no_grad():
            project()

    return unwrap(optimizer).register_step_post_hook(after_step)
