"""Continual learning: fine-tune a model under the constraint that no protected task gets worse."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import _checks
from ._distributed import Group, find_group, gather_rows
from ._files import DamagedFile, read_values, state_checksum, write_values
from ._state import KeepsPrecision
from .inputs import Measured, split

__all__ = ["ReferenceLosses", "TaskHeads"]


class ReferenceLosses(KeepsPrecision):
    r"""Losses of another model, one per sample: of the model before fine-tuning, for example.

    .. math::
        h_k(w) = \frac1{n_k}\sum_{i\in D_k}\bigl(\ell_i(w) - \ell_i(w_{\text{old}})\bigr) \le 0,
        \qquad k = 1,\dots,m

    are limits by which no protected class, task or domain k may get worse. As `reference` of an
    objective the losses are subtracted from the values of the rows that a call names; on the same
    samples much noise cancels. With `tokens`, the mean of h_k is over tokens. The losses are
    measured in evaluation mode: with dropout in training, its effect counts as forgetting.

    Args:
        losses: one finite number per sample, shape (N,).
        tokens: number of tokens of each sample, shape (N,), where its loss is their mean.

    Example:
        >>> import fcco, torch
        >>> old = fcco.ReferenceLosses(torch.tensor([0.5, 0.2, 0.9]))
        >>> old.paired(lambda: torch.tensor([1.0, 0.5]), rows=[2, 0])()
        tensor([0.1000, 0.0000])

    References:
        G. Li et al., Model developmental safety, 2024 (arXiv:2410.03955).
    """

    value: Tensor
    tokens: Tensor | None

    def __init__(self, losses: Tensor, tokens: Tensor | None = None) -> None:
        super().__init__()
        if losses.dim() != 1 or not losses.is_floating_point():
            raise ValueError(
                "`ReferenceLosses(losses=...)` must hold one number per sample, shape (N,), but "
                f"has shape {tuple(losses.shape)} and dtype {losses.dtype}."
            )
        _check_finite(losses)
        dtype = torch.promote_types(losses.dtype, torch.float32)
        self.register_buffer("value", losses.detach().to(dtype, copy=True))
        if tokens is not None:
            if tokens.shape != losses.shape or not bool((tokens > 0).all()):
                raise ValueError("`ReferenceLosses(tokens=...)` must be above 0, one per loss.")
            tokens = tokens.detach().to(self.value, copy=True)
        self.register_buffer("tokens", tokens)

    def forward(self, rows: Any) -> Tensor:
        return self._of(self.value, rows)

    def _of(self, table: Tensor, rows: Any) -> Tensor:
        # index_select refuses a negative row number, which value[rows] would count from the end.
        return table.index_select(0, torch.as_tensor(rows, device=table.device))

    def weights(self, rows: Any) -> Tensor | None:
        """The number of tokens of some rows; None where each counts once."""
        return None if self.tokens is None else self._of(self.tokens, rows)

    def paired(self, function: Callable[[], Any], rows: Any) -> Callable[[], Any]:
        """Your function with the losses of the same rows subtracted from its values.

        Args:
            function: returns a loss per row, or (loss, these).
            rows: number of the row of each value, shape (E,).
        """
        before = self(rows)

        def differences() -> Any:
            loss, values = split(function())
            own = values.value if isinstance(values, Measured) else values
            if not isinstance(own, Tensor) or own.shape != before.shape:
                raise ValueError(
                    f"A function whose values are compared with `reference` must return one for "
                    f"each of the {len(before)} `rows`, a tensor of shape {tuple(before.shape)}."
                )
            own = own - before.to(own)
            values = Measured(own, values.surrogate) if isinstance(values, Measured) else own
            return values if loss is None else (loss, values)

        return differences

    @classmethod
    def measure(
        cls,
        model: nn.Module,
        batches: Callable[[], Iterable[tuple[Tensor | Sequence[int], Tensor]]],
        size: int,
        *,
        tokens: Tensor | None = None,
        data: str = "",
        cache: str | os.PathLike[str] | None = None,
    ) -> ReferenceLosses:
        """Measure the losses, or read them from a file of an earlier measurement.

        The model is in evaluation mode, without gradients. On several ranks all get the same
        numbers: the ranks share the rows; or each measures all, and those of the first rank count.

        Args:
            model: the model before fine-tuning.
            batches: a generator function that yields row numbers and their losses, both of shape
                (R,), with each row 0, ..., N - 1 once.
            size: N.
            tokens: see the class.
            data: for `cache`: names all that changes a loss and is not in the model: the data,
                the preprocessing and the loss function. A checksum of the data is best.
            cache: a folder for the file, whose name depends on the model's state, `data` and N.
        """
        call = "ReferenceLosses.measure"
        _checks.integer(call, "size", size, 1)
        if not callable(batches):
            raise ValueError(
                f"`{call}(batches=...)` must be a generator function, so that the losses are "
                f"computed in evaluation mode, but is a {type(batches).__name__}."
            )
        if cache is not None and not data:
            raise ValueError(f"`{call}(data=...)` is needed with a cache: it names the file.")
        group = find_group()
        first_rank = group is None or group.rank == 0
        tensors = chain(model.parameters(), model.buffers())
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        file = None if cache is None else _file(Path(cache), model, data, size)
        nothing = torch.empty(0, 3, dtype=torch.float64)
        table = _gather(_read(*file) if file and first_rank else nothing, group, device)
        if measured := not len(table):
            with _evaluation(model):
                parts = [nothing, *(_table(rows, losses) for rows, losses in batches())]
            table = _gather(torch.cat(parts), group, device)
            if group is not None and len(table) == size * group.size:  # every rank measured all
                table = table[:size]
        losses = _in_order(table, size, group)
        if measured and file is not None and first_rank:
            try:
                write_values(*file, losses)
            except OSError as error:
                warnings.warn(f"Reference losses cannot be kept: {error}.", stacklevel=2)
        return cls(losses.to(device), tokens)


def _table(rows: Tensor | Sequence[int], losses: Tensor) -> Tensor:
    """Row number, loss and whether the losses are float64, (R, 3): one tensor for one gather."""
    rows = torch.as_tensor(rows)
    if rows.dim() != 1 or rows.is_floating_point() or losses.shape != rows.shape:
        raise ValueError(
            "`ReferenceLosses.measure(batches=...)` must yield row numbers and losses, both of "
            f"shape (R,), but yields: {tuple(rows.shape)} {rows.dtype} and {tuple(losses.shape)}."
        )
    is_double = torch.full(rows.shape, losses.dtype == torch.float64)
    return torch.stack([part.detach().cpu().double() for part in (rows, losses, is_double)], 1)


def _gather(table: Tensor, group: Group | None, device: torch.device) -> Tensor:
    # On the device of the model, because NCCL cannot send tensors of the CPU.
    return table if group is None else gather_rows(table.to(device), group).cpu()


def _in_order(table: Tensor, size: int, group: Group | None) -> Tensor:
    """The losses of rows 0, ..., N - 1; raises unless each row occurs once with a finite loss."""
    call, rows = "`ReferenceLosses.measure(batches=...)`", table[:, 0].long()
    outside = rows[(rows < 0) | (rows >= size)]
    if len(outside):
        raise ValueError(f"{call}: row {int(outside[0])} is not in 0, ..., {size - 1}.")
    times = torch.bincount(rows, minlength=size)
    hint = " Ranks must share the rows (a DistributedSampler repeats some), or each has all."
    for problem, wrong in (("occur more than once", times > 1), ("are missing", times == 0)):
        if wrong.any():
            raise ValueError(
                f"{call} must yield every row 0, ..., {size - 1} once, but {int(wrong.sum())} "
                f"{problem}, first row {int(wrong.nonzero()[0, 0])}.{hint if group else ''}"
            )
    losses = torch.empty(size, dtype=torch.float64 if table[:, 2].any() else torch.float32)
    losses[rows] = table[:, 1].to(losses.dtype)
    _check_finite(losses)
    return losses


def _check_finite(losses: Tensor) -> None:
    bad = (~torch.isfinite(losses)).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"`ReferenceLosses`: the loss of row {bad[0]} is {losses[bad[0]].item()} (rows that "
            f"are not finite: {len(bad)})."
        )


def _file(folder: Path, model: nn.Module, data: str, size: int) -> tuple[Path, str]:
    """The file of these losses, and its key; all ranks must call it if the model is sharded."""
    content = {"model": state_checksum(model), "data": data, "size": size}
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return folder.expanduser() / f"reference-losses-{key[:16]}.pt", key


def _read(path: Path, key: str) -> Tensor:
    """The losses of a file as `_table`; an empty table if there is no file or it is damaged."""
    losses = None
    try:
        losses = read_values(path, key)
    except DamagedFile as error:
        warnings.warn(f"Reference losses are measured again: {error}.", stacklevel=3)
    losses = torch.empty(0) if losses is None else losses
    return _table(torch.arange(len(losses)), losses)


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    # Not model.train() on exit: a user may have put some modules, e.g. batch norm, in eval mode.
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class TaskHeads(nn.Module):
    r"""A linear layer with a weight of its own for each task.

    .. math::
        W_k = W + A_k B_k, \qquad A_k \in \mathbb R^{\text{in}\times r},\;
        B_k \in \mathbb R^{r\times\text{out}}, \qquad
        (A_k)_{ij} \sim \mathcal N(0, 1/\text{in}),\; B_k = 0 \text{ at the start}

    At the start every head equals the layer. A_k and B_k enter the constraint h_k alone: they add
    :math:`\|G_k B_k^\top\|^2 + \|A_k^\top G_k\|^2` with :math:`G_k = \partial h_k/\partial W_k` to
    the diagonal of the Gram matrix of the constraints' gradients and so raise its least eigenvalue.

    Args:
        linear: the layer, kept as `base` and trained with the rest unless you freeze it.
        tasks: number of tasks.
        rank: r.

    References:
        G. Li et al., Model developmental safety, 2024 (on the text projection, r = 16).
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
        if not isinstance(task, Tensor):
            _checks.integer("TaskHeads", "task", task, 0)
            if task >= self.tasks:
                raise ValueError(f"`TaskHeads(task=...)` must be below {self.tasks}: {task}.")
            return out + x @ self.down[task] @ self.up[task]
        if task.shape != x.shape[:-1]:
            raise ValueError(
                f"`TaskHeads(task=...)` must have shape {tuple(x.shape[:-1])}, one per row of x, "
                f"but has shape {tuple(task.shape)}."
            )
        # index_select, not self.down[ids]: it refuses -1, and all that are no integers.
        ids = task.reshape(-1)
        narrow = torch.bmm(x.reshape(-1, 1, x.shape[-1]), self.down.index_select(0, ids))
        wide = torch.bmm(narrow, self.up.index_select(0, ids))
        return out + wide.view_as(out)
