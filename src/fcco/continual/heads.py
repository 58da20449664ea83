"""Task-dependent heads: a linear layer with a low-rank correction for each task."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import _checks

__all__ = ["TaskHeads"]


class TaskHeads(nn.Module):
    r"""A linear layer x W + b that has its own weight W_k for each task k.

    .. math::
        W_k = W + A_k B_k, \qquad A_k \in \mathbb R^{\text{in}\times r},\;
        B_k \in \mathbb R^{r\times\text{out}}, \qquad
        (A_k)_{ij} \sim \mathcal N(0, 1/\text{in}),\; B_k = 0 \text{ at the start}

    At the start every head equals the layer. A_k and B_k enter the constraint h_k of task k and no
    other constraint, so they add a diagonal matrix to the Gram matrix of the constraints'
    gradients,

    .. math::
        \Delta_{kk} = \|\partial h_k/\partial A_k\|^2 + \|\partial h_k/\partial B_k\|^2
            = \|G_k B_k^\top\|^2 + \|A_k^\top G_k\|^2, \qquad G_k = \partial h_k/\partial W_k,

    and raise its smallest eigenvalue by at least the smallest entry. At the start, the mean of that
    of task k over A_k is r/in times :math:`\|G_k\|^2`.

    Args:
        linear: the layer, kept as `base` and trained with the rest unless you freeze it.
        tasks: number of tasks.
        rank: r.

    Example:
        >>> import torch, fcco
        >>> heads = fcco.continual.TaskHeads(torch.nn.Linear(8, 3), tasks=2, rank=4)
        >>> heads(torch.randn(5, 8), task=torch.tensor([0, 1, 1, 0, 0])).shape
        torch.Size([5, 3])

    References:
        G. Li et al., Model developmental safety: a safety-centric method and applications in
        vision-language models, 2024 (on the text projection, r = 16).
    """

    def __init__(self, linear: nn.Linear, tasks: int, rank: int = 16) -> None:
        super().__init__()
        _checks.integer("TaskHeads", "tasks", tasks, 1)
        _checks.integer("TaskHeads", "rank", rank, 1)
        self.base, self.tasks, self.rank = linear, tasks, rank
        # Only B is zero: with both zero, both gradients would be zero and no head could learn.
        self.down = nn.Parameter(linear.weight.new_empty(tasks, linear.in_features, rank))
        self.up = nn.Parameter(linear.weight.new_zeros(tasks, rank, linear.out_features))
        nn.init.normal_(self.down, std=linear.in_features**-0.5)

    def forward(self, x: Tensor, task: int | Tensor | None = None) -> Tensor:
        """Apply the layer (`task` None), or the head of one task, or of one task per row of x."""
        out = self.base(x)
        if task is None:
            return out
        if isinstance(task, Tensor):
            return out + self._correction_per_row(x, task)
        _checks.integer("TaskHeads", "task", task, 0)
        if task >= self.tasks:
            raise ValueError(f"`TaskHeads(task=...)` must be below {self.tasks} but is: {task}.")
        return out + x @ self.down[task] @ self.up[task]

    def _correction_per_row(self, x: Tensor, task: Tensor) -> Tensor:
        integer = not (task.is_floating_point() or task.is_complex() or task.dtype == torch.bool)
        if task.shape != x.shape[:-1] or not integer:
            raise ValueError(
                f"`TaskHeads(task=...)` must be integers of shape {tuple(x.shape[:-1])}, one per "
                f"row of x, but has shape {tuple(task.shape)} and dtype {task.dtype}."
            )
        ids = task.reshape(-1)
        # index_select, not self.down[ids]: that would read task -1 as the last one.
        narrow = torch.bmm(x.reshape(-1, 1, x.shape[-1]), self.down.index_select(0, ids))
        wide = torch.bmm(narrow, self.up.index_select(0, ids))
        return wide.view(*task.shape, -1)

    def extra_repr(self) -> str:
        return f"tasks={self.tasks}, rank={self.rank}"
