"""What the user's function may return: an ordinary loss, and inner values in several forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._checks import meant
from ._distributed import Group, sum_over_ranks
from .index import Memberships, check_range, read_index
from .tracker import NonFiniteValue

Index = Any
"""Block of each entry: a tensor, an array or a list. Or all blocks of each sample: a boolean matrix
with a column per block, or a list of lists. With several terms a dict of these."""

ONLY = "inner"
"""The name of a term that was given without one."""


class Measured(NamedTuple):
    """A value that has no gradient, such as a rate or an accuracy, with a differentiable stand-in.

    What is tracked and compared with the limit is `value`; the gradient is that of `surrogate`,
    which has the same shape.

    Example:
        >>> import fcco, torch
        >>> score = torch.tensor([-1.0, 0.5, 2.0], requires_grad=True)
        >>> rate = fcco.Measured((score > 0).float().mean(), torch.sigmoid(score).mean())
        >>> rate.value
        tensor(0.6667)
    """

    value: Tensor
    surrogate: Tensor


def split(result: Any) -> tuple[Tensor | None, Any]:
    """Separate the ordinary loss g0 from the inner values."""
    if not isinstance(result, tuple) or isinstance(result, Measured):
        return None, result
    if len(result) != 2:
        raise ValueError(
            "Your function must return values or a pair (loss, values) but returned a tuple of "
            f"{len(result)}. Several values are one tensor, `torch.stack(...)`, or a dict by name."
        )
    if isinstance(result[0], Mapping) and isinstance(result[1], Tensor):
        raise TypeError("Your function must return the pair (loss, values): the loss comes first.")
    return result


def parse(
    term: str, names: Sequence[str] | None, values: Any, dim: int = 1
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Bring the inner values of one term to tensors: one, a `Measured` pair, or these by name.

    `names` are those of the blocks, of `dim` numbers each. Returns the values to track, the values
    that carry the gradient (None when they are the same), and the block ids of values by name.
    """
    if isinstance(values, Tensor):
        return values, None, None
    if isinstance(values, Measured) and all(isinstance(part, Tensor) for part in values):
        return values.value, values.surrogate, None
    if not isinstance(values, Mapping):
        raise TypeError(
            f"The values{term_name(term)} must be a tensor, fcco.Measured of two tensors or a dict "
            f"by name but are: {type(values).__name__}."
            + (" Write `torch.stack(values)`." if isinstance(values, (list, tuple)) else "")
        )
    ids = {name: k for k, name in enumerate(names or ())}
    unknown = [name for name in values if name not in ids]
    if unknown or not values:
        hint = meant(str(unknown[0]), ids) if unknown else ""
        raise ValueError(
            f"The values{term_name(term)} are given for {unknown or 'no name'}, but the names are: "
            f"{', '.join(ids) or 'not given (pass names=... or a tensor)'}"
            + (f" ({hint})." if hint else ".")
        )
    parts = [parse(name, None, value)[:2] for name, value in values.items()]
    for name, part in zip(values, parts, strict=True):
        for each in part:
            if each is not None and each.numel() != dim:
                raise ValueError(
                    f"The value of `{name}` must be {'one number' if dim == 1 else dim} but has "
                    f"shape {tuple(each.shape)}: return the mean over the samples, `.mean()`."
                )
    tracked = torch.stack([value for value, _ in parts])
    apart = any(surrogate is not None for _, surrogate in parts)
    carriers = [value if surrogate is None else surrogate for value, surrogate in parts]
    index = torch.tensor([ids[name] for name in values])
    return tracked, torch.stack(carriers) if apart else None, index


def rows_by_block(term: Any, values: Any, index: Index) -> dict[Any, Tensor]:
    """The values of new rows that belong to each block, by its name or number.

    Args:
        term: with the blocks.
        values: a value per row and the blocks of each as `index`; without it a column per block,
            or the rows of some blocks by name. Of `Measured` pairs the first counts.
        index: see `Index`.
    """
    number = term.tracker.num_inner
    names: Sequence[Any] = term.names or range(number)
    values = values.value if isinstance(values, Measured) else values
    if isinstance(values, Mapping):
        if unknown := [name for name in values if name not in names]:
            raise ValueError(f"Values are given for {unknown}, but the names are: {[*names]}.")
        nothing = term.tracker.value.new_empty(0)
        given = {name: values.get(name, nothing) for name in names}
        return {n: v.value if isinstance(v, Measured) else v for n, v in given.items()}
    if index is None and values.dim() == 2 and values.shape[1] == number:
        return dict(zip(names, values.unbind(1), strict=True))
    if index is None or values.dim() != 1:
        raise ValueError(
            "A certificate needs a value for each row, (N,), with an `index`; or a column for each "
            f"of the {number} blocks without one; but the values have shape {tuple(values.shape)}"
            f"{' and there is no `index`' if index is None else ''}."
        )
    found = read_index("`index`", index, number)
    if isinstance(found, Memberships):
        samples, ids, size = found.sample.cpu(), found.group.cpu(), found.samples
    else:
        samples, ids, size = torch.arange(len(found)), found.cpu(), len(found)
    if size != len(values):
        raise ValueError(f"`index` must have a row for each of the {len(values)} values: {size}.")
    if len(ids):
        check_range("`index`", int(ids.min()), int(ids.max()), number)
    counts = torch.bincount(ids, minlength=number).tolist()
    rows = values.detach().cpu()[samples[ids.argsort(stable=True)]].split(counts)
    return dict(zip(names, rows, strict=True))


def term_name(name: str) -> str:
    """The name of a term after "the values", for errors."""
    return "" if name == ONLY else f" of `{name}`"


def mean_loss(loss: Any, group: Group | None = None, *, check: bool = False) -> Tensor:
    """g0 as a scalar: per-sample losses are averaged over the batches of all ranks.

    With `check`, NaN and infinity are refused on all ranks together.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"The loss that you return must be a tensor but is: {type(loss).__name__}.")
    if loss.dim() > 1:
        raise ValueError(
            "The loss that you return must be one number or one for each sample, shape (N,), but "
            f"has shape {tuple(loss.shape)}."
        )
    if group is None:
        if loss.numel() == 0:
            raise ValueError("The loss g0 holds no samples: its mean is not a number.")
        return loss.mean() if loss.dim() else loss
    bad = check and not bool(torch.isfinite(loss).all())
    own = torch.tensor([float(loss.numel()), float(bad)], device=loss.device)
    count, wrong = sum_over_ranks(own, group)
    if wrong:
        raise NonFiniteValue(
            "The ordinary loss g0 is NaN or infinite on at least one rank; nothing was updated."
        )
    return loss.sum() * (group.size / count) if loss.dim() else loss
