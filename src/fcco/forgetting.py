"""What the old model could do: its loss on each protected sample, computed once."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import _checks
from ._distributed import Group, find_group, gather_rows, row_counts
from ._state import KeepsPrecision
from .files import DamagedFile, read_values, write_values
from .fingerprint import state_checksum

__all__ = ["OldLosses"]

Rows = Tensor | Sequence[int]
Losses = Tensor | Callable[[], Tensor]
Batches = Iterable[tuple[Rows, Losses]]

_VERSION = 1  # to be raised when the same model and data give other losses


class OldLosses(KeepsPrecision):
    r"""The losses of the model before fine-tuning, one per protected sample.

    .. math::
        h_k(w) = \frac1{n_k}\sum_{i\in D_k}\bigl(\ell_i(w) - \ell_i(w_{\text{old}})\bigr) \le 0,
        \qquad k = 1,\dots,m

    says that no protected class, task or domain k may get worse. Measure the old losses once and
    return per-sample differences as values of the constraints, with the class as index: the
    tracker averages them. On the same samples much of the noise of a batch cancels. They are losses
    in evaluation mode: train without dropout, or the constraint takes its effect for forgetting.

    Args:
        losses: one finite number per sample, shape (N,).

    Example:
        >>> import torch, fcco
        >>> from torch.nn.functional import cross_entropy
        >>> x, label = torch.randn(60, 5), torch.arange(60) % 3
        >>> model = torch.nn.Linear(5, 4)
        >>> def losses(rows):
        ...     return cross_entropy(model(x[rows]), label[rows], reduction="none")
        >>> def protected():
        ...     for rows in torch.arange(60).split(16):
        ...         yield rows, losses(rows)
        >>> old = fcco.OldLosses.measure(model, protected, size=60)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> objective = fcco.constrained(model, optimizer, 3, penalty=3.0, smoothing=0.1)
        >>> new_x, new_label, rows = torch.randn(8, 5), torch.full((8,), 3), torch.arange(12)
        >>> loss = objective(
        ...     lambda: (cross_entropy(model(new_x), new_label), losses(rows) - old(rows)),
        ...     label[rows])
        >>> objective.violation()
        tensor([0., 0., 0.])

    References:
        G. Li et al., Model developmental safety: a safety-centric method and applications in
        vision-language models, 2024 (arXiv:2410.03955).
    """

    value: Tensor

    def __init__(self, losses: Tensor) -> None:
        super().__init__()
        if losses.dim() != 1 or not losses.is_floating_point():
            raise ValueError(
                "`OldLosses(losses=...)` must hold one number per sample, shape (N,), but has "
                f"shape {tuple(losses.shape)} and dtype {losses.dtype}."
            )
        _refuse_nonfinite(losses)
        wide = torch.promote_types(losses.dtype, torch.float32)
        self.register_buffer("value", losses.detach().to(wide, copy=True))

    @property
    def size(self) -> int:
        """N, the number of protected samples."""
        return self.value.shape[0]

    def forward(self, rows: Tensor) -> Tensor:
        """The old losses of these samples, in this order."""
        return self.value.index_select(0, rows.to(self.value.device))

    @classmethod
    def measure(
        cls,
        model: nn.Module,
        batches: Batches | Callable[[], Batches],
        size: int,
        *,
        data: str = "",
        cache: str | os.PathLike[str] | None = None,
        process_group: Any = "auto",
    ) -> OldLosses:
        """Measure them, or read them from a file where they were measured before.

        The model is in evaluation mode meanwhile, without gradient; each of its modules has its
        own mode again afterwards. The result is on the device of the model's first parameter.

        On several ranks all end with the same numbers. Either the ranks share the rows, each row
        on one of them, and their losses are pooled; or every rank has all rows, and those of the
        first rank count, so that no rounding of another GPU makes ranks differ. With a cache, a
        file that any rank finds serves all, and the first rank writes it.

        Args:
            model: the old model, as it is now.
            batches: pairs of row numbers and the losses of these rows, shape (R,), or a function
                without arguments that computes them. Give a generator function: its losses are
                then computed here and not outside with the model in training mode, and not at all
                when a file holds them. Every row 0, ..., N - 1 comes once.
            size: N.
            data: names the data and the loss for the file: whatever changes a loss and is not in
                the model. A checksum of the data is best.
            cache: a folder for the file. Its name depends on the model's parameters and buffers,
                `data` and N, so other models and data have other files. A file that is damaged is
                computed anew, with a warning.
            process_group: see `Compositional`.
        """
        _checks.integer("OldLosses.measure", "size", size, 1)
        if cache is not None and not data:
            raise ValueError(
                "`OldLosses.measure(data=...)` is needed with a cache: a file must know which data "
                "and loss it is for, or it would serve others too."
            )
        if cache is not None and Path(cache).expanduser().is_file():
            raise ValueError(f"`OldLosses.measure(cache=...)` is a folder, but {cache} is a file.")
        group = find_group(process_group)
        device = next((each.device for each in _tensors(model)), torch.device("cpu"))
        path, key, facts = _place(model, size, data, cache)
        found = None if path is None else _kept(path, key)
        if path is not None and group is not None:
            found = _of_first_holder(found, group, device)
        if found is None:
            with _evaluating(model):
                found = _collected(batches, size, group, device)
            if path is not None and (group is None or group.rank == 0):
                _keep(path, key, found, facts)
        return cls(found.to(device))

    def extra_repr(self) -> str:
        """The number of samples."""
        return f"size={self.size}"


def _collected(
    batches: Batches | Callable[[], Batches], size: int, group: Group | None, device: torch.device
) -> Tensor:
    """The losses of all rows in order, over all ranks."""
    tables = [torch.empty(0, 3, dtype=torch.float64)]
    for rows, losses in batches() if callable(batches) else batches:
        tables.append(_table(rows, losses if isinstance(losses, Tensor) else losses()))
    table = torch.cat(tables)
    if group is not None:
        counts = row_counts(table.to(device), group)
        table = gather_rows(table.to(device), group, counts).cpu()
        if counts == [size] * group.size:  # every rank has measured everything
            table = table[:size]
    rows = table[:, 0].long()
    _refuse_rows(rows, size, group is not None)
    losses = torch.empty(size, dtype=_dtype(table))
    losses[rows] = table[:, 1].to(losses.dtype)
    _refuse_nonfinite(losses)
    return losses


def _table(rows: Rows, losses: Tensor) -> Tensor:
    """Rows, losses and whether these are float64: three columns, exact in float64, on the CPU."""
    rows = torch.as_tensor(rows)
    if losses.requires_grad:
        raise ValueError(
            "`OldLosses.measure(batches=...)`: the losses carry a graph, so they were computed "
            "before and perhaps in training mode; give a generator function, or functions."
        )
    if rows.dim() != 1 or rows.is_floating_point() or losses.shape != rows.shape:
        raise ValueError(
            "`OldLosses.measure(batches=...)` must give one loss per row, integers of shape (R,) "
            f"and numbers of shape (R,), but gives: {tuple(rows.shape)} {rows.dtype} and "
            f"{tuple(losses.shape)}."
        )
    wide = torch.full(rows.shape, losses.dtype == torch.float64)
    return torch.stack([part.detach().cpu().double() for part in (rows, losses, wide)], 1)


def _dtype(table: Tensor) -> torch.dtype:
    return torch.float64 if bool(table[:, 2].any()) else torch.float32


def _refuse_rows(rows: Tensor, size: int, ranks: bool) -> None:
    """Raise unless every row is there once."""
    call = "`OldLosses.measure(batches=...)`"
    outside = rows[(rows < 0) | (rows >= size)]
    if len(outside):
        raise ValueError(f"{call}: row {int(outside[0])} is not in 0, ..., {size - 1}.")
    times = torch.bincount(rows, minlength=size)
    for what, which in (("come more than once", times > 1), ("are missing", times == 0)):
        if which.any():
            number, first = int(which.sum()), int(which.nonzero()[0, 0])
            hint = (
                " Ranks must share the rows, or each have all of them (a DistributedSampler "
                "repeats some, so that ranks have equally many)."
            )
            raise ValueError(
                f"{call} must give every row 0, ..., {size - 1} once, but {number} {what}, first "
                f"row {first}.{hint * ranks}"
            )


def _refuse_nonfinite(losses: Tensor) -> None:
    bad = (~torch.isfinite(losses)).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"`OldLosses`: the loss of row {bad[0]} is {losses[bad[0]].item()} (rows that are not "
            f"finite: {len(bad)}); a constraint on it would mean nothing."
        )


def _of_first_holder(found: Tensor | None, group: Group, device: torch.device) -> Tensor | None:
    """The losses of the first rank that has a file; None when no rank has one."""
    own = torch.empty(0) if found is None else found
    table = _table(torch.arange(len(own)), own).to(device)
    counts = row_counts(table, group)
    holders = [rank for rank, count in enumerate(counts) if count]
    if not holders:
        return None
    counts = [count if rank == holders[0] else 0 for rank, count in enumerate(counts)]
    table = gather_rows(table[: counts[group.rank]], group, counts).cpu()
    return table[:, 1].to(_dtype(table))


def _place(
    model: nn.Module, size: int, data: str, cache: str | os.PathLike[str] | None
) -> tuple[Path | None, str, dict[str, Any]]:
    """The file of the cache, its key and what that stands for."""
    if cache is None:
        return None, "", {}
    facts = {"version": _VERSION, "model": state_checksum(model), "data": data, "size": size}
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return Path(cache).expanduser() / f"old-losses-{key[:16]}.pt", key, facts


def _kept(path: Path, key: str) -> Tensor | None:
    try:
        return read_values(path, key)
    except DamagedFile as error:
        warnings.warn(f"Old losses are measured anew: {error}.", stacklevel=3)
        return None


def _keep(path: Path, key: str, losses: Tensor, facts: dict[str, Any]) -> None:
    try:
        write_values(path, key, losses, facts=facts)
    except OSError as error:
        warnings.warn(f"Old losses cannot be kept in {path.parent}: {error}.", stacklevel=3)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradient; every module's own mode on exit."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
