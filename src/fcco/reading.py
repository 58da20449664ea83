"""Reading a call: which blocks its entries belong to, and which values each term was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .inner import Parsed, parse
from .terms import AbstractTerm
from .tracker.blocks import Layout

__all__ = ["ONLY", "Index", "Reader"]

Index = Tensor | dict[str, Tensor] | None

ONLY = "inner"
"""The name of a term that was given without one."""


class Reader:
    """Brings the index and the values of a call to one form, term by term.

    Args:
        terms: the terms by name.
    """

    def __init__(self, terms: dict[str, AbstractTerm]) -> None:
        self.terms = terms
        self._only = set(terms) == {ONLY}

    def layouts(self, index: Index, counts: Index) -> dict[str, Layout | None]:
        """Check every index before the model runs; named blocks are known only afterwards."""
        terms = self.terms
        if isinstance(index, Tensor) and counts is None and len(terms) == 1:
            return {name: term.tracker.layout(index) for name, term in terms.items()}
        for what, given in (("index", index), ("counts", counts)):
            if isinstance(given, dict) and not set(given) <= set(terms):
                raise ValueError(
                    f"`Compositional({what}=...)` is given for {', '.join(map(str, given))} but "
                    f"the terms are: {', '.join(terms)}."
                )
        result: dict[str, Layout | None] = {}
        for name, term in terms.items():
            ids, number = _of_term(index, name), _of_term(counts, name)
            if ids is None and (len(terms) > 1 or term.names is not None) and number is None:
                result[name] = None
            else:
                result[name] = term.tracker.layout(ids, number)
        return result

    def layout(self, name: str, entry: Parsed, where: Layout | None) -> Layout:
        """The layout of one term's values, once they are known."""
        if entry.index is None and where is not None:
            return where
        if where is not None:
            raise ValueError(
                f"Inner values of `{name}` are given by name, which says their blocks: leave "
                "`index` and `counts` out."
            )
        return self.terms[name].tracker.layout(entry.index)

    def values(self, values: Any) -> dict[str, Parsed]:
        """Inner values by term."""
        if self._only:
            return {ONLY: self._of_one(ONLY, values)}
        if not isinstance(values, Mapping) or not set(values) <= set(self.terms):
            given = list(values) if isinstance(values, Mapping) else type(values).__name__
            raise ValueError(
                f"An objective with the terms {', '.join(self.terms)} needs inner values by term "
                f"but was given: {given}."
            )
        return {name: self._of_one(name, part) for name, part in values.items()}

    def _of_one(self, name: str, values: Any) -> Parsed:
        term = self.terms[name]
        if term.names is not None and isinstance(values, Mapping) and not values:
            nothing = term.tracker.value[:0]  # every named block is absent from this batch
            return Parsed(nothing, None, torch.empty(0, dtype=torch.int64))
        return parse(name, term.names, values)


def _of_term(index: Index, name: str) -> Tensor | None:
    return index.get(name) if isinstance(index, dict) else index
