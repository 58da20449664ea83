"""Rows set apart: their values are measured, and their gradients are not used."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import _checks
from ..index import Memberships, check_range, read_index

Ints = NDArray[np.int64]


class HoldOut:
    """Sets a share of every group apart, to measure values on rows that are not trained on.

    A model fits the rows that it learns from, so that their losses and rates look better than those
    of new ones. Here the values come from rows apart and the gradient from the rest:

        objective(lambda: losses(same), group[rows], gradient=lambda: losses(rows))

    Args:
        groups: of the N samples, see `Index`; those without a group are not set apart.
        share: of each group; a sample of it at least is set apart, and one stays.
        seed: of the choice.

    Attributes:
        rest: the rows to learn from, in order.
        apart: the others.

    Example:
        >>> group = torch.arange(100) % 4
        >>> held = HoldOut(group, 0.2, seed=0)
        >>> group[held.rest].bincount().tolist(), group[held.apart].bincount().tolist()
        ([20, 20, 20, 20], [5, 5, 5, 5])
        >>> same = held.draw(group[:8])
        >>> torch.equal(group[same], group[:8]), len(set(same.tolist()))
        (True, 8)
    """

    def __init__(self, groups: Any, share: float, seed: int | None = None) -> None:
        _checks.in_interval("HoldOut", "share", share, 0.0, 1.0, open_low=True, open_high=True)
        place = "`HoldOut(groups=...)`"
        found = read_index(place, groups)
        if not isinstance(found, Memberships):
            number = int(found.max()) + 1 if len(found) else 0
            found = Memberships(torch.arange(len(found)), found, len(found), number)
        sample, group = found.sample.cpu().numpy(), found.group.cpu().numpy()
        if len(group):
            check_range(place, int(group.min()), int(group.max()))
        sizes = np.bincount(group, minlength=found.groups)
        if (sizes == 1).any():
            raise ValueError(
                f"{place}: group {sizes.tolist().index(1)} has one sample, too few to set apart."
            )
        random = np.random.default_rng(seed)
        numbers = np.random.RandomState(0).randint(1, 2**31, len(sizes))
        cells = np.zeros((found.samples, 1), dtype=np.int64)  # all groups of a sample as one number
        np.add.at(cells[:, 0], sample, numbers[group])
        apart, some = np.zeros(found.samples, dtype=bool), np.flatnonzero(cells)
        apart[some[split_rows(cells[some], share, random)[1]]] = True
        for wanted in (True, False):  # a group that is too small for its share
            inside = np.bincount(group[apart[sample] == wanted], minlength=len(sizes))
            for lacking in np.flatnonzero((inside == 0) & (sizes > 0)):
                apart[random.choice(sample[group == lacking])] = wanted
        self.rest, self.apart = (torch.from_numpy(np.flatnonzero(k)) for k in (~apart, apart))
        own = np.flatnonzero(apart[sample])
        own = own[np.lexsort((random.random(len(own)), group[own]))]
        self._rows = torch.from_numpy(sample[own])
        self._counts = torch.from_numpy(np.bincount(group[own], minlength=len(sizes)))
        self._starts = self._counts.cumsum(0) - self._counts

    def draw(self, groups: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A row apart for each of these group ids, (b,), of the same group.

        Rows of one group are different, unless more are asked for than there are. The numbers come
        from `generator`, or from torch's own.
        """
        groups = torch.as_tensor(groups).cpu()
        order = groups.argsort(stable=True)
        ids, place, times = groups.unique(return_inverse=True, return_counts=True)
        number = torch.empty_like(order)  # the how many-th of its group
        number[order] = torch.arange(len(order)) - (times.cumsum(0) - times)[place[order]]
        counts = self._counts[ids]
        first = (torch.rand(len(ids), generator=generator, dtype=torch.float64) * counts).long()
        return self._rows[self._starts[groups] + (first[place] + number) % counts[place]]


def split_rows(cells: NDArray[Any], share: float, random: Any) -> tuple[Ints, Ints]:
    """Rows to stay, and a share of rows to set apart: the same of every cell.

    Args:
        cells: (n, k); equal rows are of one cell.
        share: of the rows.
        random: a generator of NumPy, old or new.
    """
    # One number for each row, which is much faster to sort. Two cells that share it are one.
    weights = np.random.RandomState(0).randint(1, 2**31, cells.shape[1])
    cell = cells.astype(np.int64) @ weights
    # Rows in the order of their cells, at random within each: every k-th of them is set apart.
    order = np.lexsort((random.random(len(cells)), cell))
    marks = np.floor(np.arange(len(cells) + 1) * share + random.random())
    apart = np.diff(marks) > 0
    return np.sort(order[~apart]), np.sort(order[apart])
