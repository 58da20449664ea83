"""Reading a call: what the user's function may return, and which blocks its values belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._checks import meant
from ._distributed import Group, sum_over_ranks
from .index import Memberships, check_range, read_index
from .terms import AbstractTerm
from .tracker import Blocks, Entries, NonFiniteValue

__all__ = [
    "ONLY",
    "CallReader",
    "Index",
    "Measured",
    "mean_loss",
    "parse",
    "rows_by_block",
    "split",
]

Index = Any
"""Block of each entry: a tensor, an array or a list. Or all blocks of each sample: a boolean matrix
with a column per block, or a list of lists. With several terms a dict of these."""

ONLY = "inner"
"""The name of a term that was given without one."""


class Measured(NamedTuple):
    """A measured statistic with a differentiable stand-in.

    The tracker follows `value` (an accuracy, a 0/1 rate: no gradient needed); the gradient is
    that of `surrogate`, which has the same shape.
    """

    value: Tensor
    surrogate: Tensor


def split(result: Any) -> tuple[Tensor | None, Any]:
    """Separate the ordinary loss g0 from the inner values."""
    if isinstance(result, tuple) and not isinstance(result, Measured):
        if len(result) != 2:
            raise ValueError(
                "Your function must return values or a pair (loss, values) but returned a "
                f"tuple of {len(result)}. Several values are one tensor, `torch.stack([...])`, or "
                "a dict by name."
            )
        return result
    return None, result


def parse(
    term: str, names: Sequence[str] | None, values: Any, dim: int = 1
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Bring the inner values of one term to tensors.

    Args:
        term: the term's name, for the error text.
        names: the names of its blocks, or None.
        values: a tensor, a `Measured` pair, or either by block name; absent blocks are left alone.
        dim: how many numbers a block has.

    Returns:
        The values to track, the values that carry the gradient (None when they are the same), and
        the block ids when values were given by name.
    """
    if isinstance(values, Tensor):
        return values, None, None
    if isinstance(values, Measured) and all(isinstance(part, Tensor) for part in values):
        return values.value, values.surrogate, None
    if not isinstance(values, Mapping):
        raise TypeError(
            f"The values{_of(term)} must be a tensor, fcco.Measured of two tensors or a dict by "
            f"name but are: {type(values).__name__}."
            + (" Write `torch.stack(values)`." if isinstance(values, (list, tuple)) else "")
        )
    known = {name: k for k, name in enumerate(names or ())}
    unknown = [name for name in values if name not in known]
    if unknown or not values:
        near = meant(str(unknown[0]), known) if unknown else ""
        raise ValueError(
            f"The values{_of(term)} are given for {unknown or 'no name'}, but the names are: "
            f"{', '.join(known) or 'not given (pass names=... or a tensor)'}"
            + (f" ({near})." if near else ".")
        )
    index = torch.tensor([known[name] for name in values])
    parts = [parse(name, None, value) for name, value in values.items()]
    for name, part in zip(values, parts, strict=True):
        for each in part[:2]:
            if each is not None and each.numel() != dim:
                raise ValueError(
                    f"The value of `{name}` must be {'one number' if dim == 1 else dim} but has "
                    f"shape {tuple(each.shape)}: return the mean over the samples, `.mean()`."
                )
    tracked = torch.stack([value for value, _, _ in parts])
    if all(surrogate is None for _, surrogate, _ in parts):
        return tracked, None, index
    carriers = [value if surrogate is None else surrogate for value, surrogate, _ in parts]
    return tracked, torch.stack(carriers), index


def rows_by_block(term: AbstractTerm, values: Any, index: Index) -> dict[Any, Tensor]:
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


def _of(name: str) -> str:
    return "" if name == ONLY else f" of `{name}`"


def mean_loss(loss: Any, group: Group | None = None, *, check: bool = False) -> Tensor:
    """g0 as a scalar: per-sample losses are averaged over the batches of all ranks.

    Args:
        loss: a scalar, or per-sample losses.
        group: the ranks.
        check: refuse NaN and infinity on all ranks together.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(
            "Your function must return values or a pair (loss, values) with a tensor as loss "
            f"but the loss is: {type(loss).__name__}."
        )
    if loss.dim() > 1:
        raise ValueError(
            f"The loss g0 must be a scalar or per-sample losses but has shape {tuple(loss.shape)}."
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


class CallReader:
    """Brings the index and the values of a call to one form, term by term.

    Args:
        terms: the terms by name.
        shared_index: whether one index may be meant for all terms; when their blocks are of
            different things, a tensor does not say whose it is.
    """

    def __init__(self, terms: Mapping[str, AbstractTerm], shared_index: bool = True) -> None:
        self.terms, self._shared_index = dict(terms), shared_index
        self._only = set(terms) == {ONLY}

    def blocks(self, index: Index) -> dict[str, Blocks | None]:
        """Check every index before the model runs; named blocks are known only afterwards."""
        if self._only and index is not None and not isinstance(index, Mapping):
            return {ONLY: self._found(ONLY, index)}
        if index is not None and not isinstance(index, Mapping) and not self._shared_index:
            raise ValueError(
                "`index` must be a dict with keys among "
                f"{', '.join(f'`{name}`' for name in self.terms)}, because each of these terms "
                "has its own blocks."
            )
        if isinstance(index, Mapping) and not set(index) <= set(self.terms):
            raise ValueError(
                f"`index` is given for {', '.join(map(str, index))} but the terms are: "
                f"{', '.join(self.terms)}."
            )
        result: dict[str, Blocks | None] = {}
        for name, term in self.terms.items():
            ids = index.get(name) if isinstance(index, Mapping) else index
            by_name = len(self.terms) > 1 or term.names is not None
            result[name] = None if ids is None and by_name else self._found(name, ids)
        return result

    def _found(self, name: str, ids: Index) -> Blocks:
        term = self.terms[name]
        blocks = term.tracker.blocks(ids)
        if blocks.rows is not None and not term.overlapping:
            raise ValueError(
                f"`{type(term).__name__}` needs the one block of each entry as `index`, integers "
                "of shape (E,), not a matrix or lists of the blocks that each sample belongs to."
            )
        return blocks

    def entries(
        self,
        blocks: Mapping[str, Blocks | None],
        values: Any,
        past: Any = None,
        carriers: Any = None,
        carrier_blocks: Mapping[str, Blocks | None] | None = None,
    ) -> dict[str, Entries]:
        """The values of a batch by term.

        Args:
            blocks: of each term, as far as they are known.
            values: what the function returned beside the loss.
            past: the same at w_{t-1}, or None.
            carriers: the same of an independent batch that carries the gradient, or None.
            carrier_blocks: its blocks, None when they are the same.
        """
        if self._only and carriers is None and isinstance(values, Tensor):  # the usual call
            only, own = self.terms[ONLY].tracker, blocks[ONLY]
            if own is not None and (past is None or isinstance(past, Tensor)):
                if values.dim() == 0 or values.shape[0] != own.size:
                    raise ValueError(_wrong_number(ONLY, values, own, only.dim))
                return {ONLY: only.entries(own, values, past)}
        fresh = self._by_term(values)
        before = None if past is None else self._by_term(past)
        other = None if carriers is None else self._by_term(carriers)
        if other is not None and set(other) != set(fresh):
            raise ValueError(
                "`gradient=` must return the same terms as the first function, "
                f"{', '.join(fresh)}, but returned: {', '.join(other)}."
            )
        result = {}
        for name, given in fresh.items():
            tracker = self.terms[name].tracker
            value, carrier, ids = self._parse(name, given)
            own = self._own_blocks(name, blocks[name], ids)
            if value.dim() == 0 or value.shape[0] != own.size:
                raise ValueError(_wrong_number(name, value, own, tracker.dim))
            previous = None if before is None else self._parse(name, before[name])[0]
            apart = None
            if other is not None:
                value_there, surrogate, ids = self._parse(name, other[name])
                carrier = value_there if surrogate is None else surrogate
                apart = own
                if carrier_blocks is not None or ids is not None:
                    apart = self._own_blocks(name, (carrier_blocks or {}).get(name), ids)
            result[name] = tracker.entries(own, value, previous, carrier, apart)
        return result

    def no_entries(self, name: str, previous: bool, independent: bool) -> Entries:
        """The entries of a term that this rank has none of."""
        tracker = self.terms[name].tracker
        nothing, blocks = tracker.value[:0], tracker.blocks(torch.empty(0, dtype=torch.int64))
        apart = blocks if independent else None
        return tracker.entries(blocks, nothing, nothing if previous else None, nothing, apart)

    def _by_term(self, values: Any) -> Mapping[str, Any]:
        if self._only:
            return {ONLY: values}
        if not isinstance(values, Mapping) or not set(values) <= set(self.terms):
            given = list(values) if isinstance(values, Mapping) else type(values).__name__
            raise ValueError(
                f"An objective with the terms {', '.join(self.terms)} needs inner values by term "
                f"but was given: {given}."
            )
        return values

    def _parse(self, name: str, values: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        term = self.terms[name]
        if term.names is not None and isinstance(values, Mapping) and not values:
            nothing = term.tracker.value[:0]  # every named block is absent from this batch
            return nothing, None, torch.empty(0, dtype=torch.int64)
        return parse(name, term.names, values, term.tracker.dim)

    def _own_blocks(self, name: str, blocks: Blocks | None, ids: Tensor | None) -> Blocks:
        if ids is None and blocks is not None:
            return blocks
        if blocks is not None:
            raise ValueError(
                f"The values{_of(name)} are given by name, which says their blocks: leave `index` "
                "out."
            )
        return self.terms[name].tracker.blocks(ids)


def _wrong_number(name: str, values: Tensor, blocks: Blocks, dim: int) -> str:
    size = blocks.size
    shape = f"({size},)" if dim == 1 else f"({size}, {dim})"
    each = f"one row per {'entry' if blocks.rows is None else 'row'} of `index`"
    if blocks.inverse is None:
        each = "one row for each of all blocks in order, because the call has no `index`"
    text = (
        f"The values{_of(name)} must have shape {shape}, {each}, but "
        f"have shape {tuple(values.shape)}."
    )
    if values.dim():
        return text
    return (
        f"{text} Return the losses of the samples themselves, not their mean: "
        '`cross_entropy(model(x), y, reduction="none")`; for limits, the pair (loss, values).'
    )
