"""Task-dependent heads: a linear layer with a low-rank correction for each task."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import _checks

__all__ = ["TaskHeads"]


class TaskHeads(nn.Module):
    r"""A linear layer x W + b and, for each task k, the layer with W_k in the place of W.

    .. math::
        W_k = W + A_k B_k, \qquad A_k \in \mathbb R^{\text{in}\times r},\;
        B_k \in \mathbb R^{r\times\text{out}}, \qquad
        (A_k)_{ij} \sim \mathcal N(0, 1/\text{in}),\; B_k = 0 \text{ at the start}

    At the start every head equals the layer, so no task is changed; then each protected task
    can be kept by its own parameters. Those of task k enter the constraint h_k alone. The Gram
    matrix of the constraints' gradients therefore grows by a diagonal matrix,

    .. math::
        \Delta_{kk} = \|\partial h_k/\partial A_k\|^2 + \|\partial h_k/\partial B_k\|^2
            = \|G_k B_k^\top\|^2 + \|A_k^\top G_k\|^2, \qquad G_k = \partial h_k/\partial W_k,

    and its smallest eigenvalue by at least the smallest entry, :math:`\min_k \|A_k^\top G_k\|^2` at
    the start. That is r/in times :math:`\|G_k\|^2` on average over A_k, and all of it only if the
    columns of G_k lie in the span of orthonormal columns of A_k (r = in and A_k orthogonal, say).

    Args:
        linear: the layer, kept as `base` and trained with the rest unless you freeze it.
        tasks: how many tasks.
        rank: r.

    Example:
        >>> import torch
        >>> from fcco.heads import TaskHeads
        >>> heads = TaskHeads(torch.nn.Linear(8, 3), tasks=2, rank=4)
        >>> x = torch.randn(5, 8)
        >>> torch.equal(heads(x, task=1), heads.base(x))
        True
        >>> heads(x, task=torch.tensor([0, 1, 1, 0, 0])).shape
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
        inputs, outputs, like = linear.in_features, linear.out_features, linear.weight
        self.down = nn.Parameter(like.new_empty(tasks, inputs, rank))
        self.up = nn.Parameter(like.new_zeros(tasks, rank, outputs))
        nn.init.normal_(self.down, std=inputs**-0.5)

    def forward(self, x: Tensor, task: int | Tensor | None = None) -> Tensor:
        """Apply the layer or a head.

        Args:
            x: input, shape (..., in).
            task: None for the layer itself, at no further cost; one task for all rows; or the
                task of each row, integers of the shape of x without its last axis.
        """
        out = self.base(x)
        if task is None:
            return out
        if isinstance(task, Tensor):
            return out + self._per_row(x, task)
        self._check(task)
        return out + x @ self.down[task] @ self.up[task]

    def weight(self, task: int) -> Tensor:
        """The weight of one head as `nn.Linear` keeps it, shape (out, in): export it from here."""
        self._check(task)
        return self.base.weight + (self.down[task] @ self.up[task]).T

    def _per_row(self, x: Tensor, task: Tensor) -> Tensor:
        integer = not (task.is_floating_point() or task.is_complex() or task.dtype == torch.bool)
        if task.shape != x.shape[:-1] or not integer:
            raise ValueError(
                f"`TaskHeads(task=...)` must be integers of shape {tuple(x.shape[:-1])}, one per "
                f"row of x, but has shape {tuple(task.shape)} and dtype {task.dtype}."
            )
        ids = task.reshape(-1)  # index_select refuses ids out of range, also negative ones
        narrow = torch.bmm(x.reshape(-1, 1, x.shape[-1]), self.down.index_select(0, ids))
        wide = torch.bmm(narrow, self.up.index_select(0, ids))
        return wide.view(*task.shape, -1)

    def _check(self, task: int) -> None:
        _checks.integer("TaskHeads", "task", task, 0)
        if task >= self.tasks:
            raise ValueError(f"`TaskHeads(task=...)` must be below {self.tasks} but is: {task}.")

    def extra_repr(self) -> str:
        """The number of tasks and the rank."""
        return f"tasks={self.tasks}, rank={self.rank}"
