"""Data sets by their name: what there is, load it, look for it, fetch it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from .. import config
from ..task import Columns
from . import layouts, sources, synthetic, table
from .grouped import FairnessData, GroupedData, arrays
from .sources import Copy, Place, Sighting, WrongData

GENERATED: dict[str, Callable[..., GroupedData]] = {
    "synthetic": synthetic.two_groups_synthetic,
    "grouped-synthetic": synthetic.grouped_synthetic,
    "scenes-synthetic": synthetic.scenes_synthetic,
    "rare-synthetic": synthetic.rare_synthetic,
}


@dataclass(frozen=True)
class Card:
    """A file of the folder `cards`: what is known about a data set.

    The fields without a comment are options of `table.grouped`.
    """

    title: str  # what it is, in a few words
    rows: str  # how many there are, in words
    licence: str  # who may do what with it
    citation: str  # whom to cite
    copies: tuple[Copy, ...] = ()  # any one of them will do; generated data have none
    columns: Columns = field(default_factory=Columns)
    # Of columns: their values in order, and how each is called.
    values: dict[str, dict[str, str]] = field(default_factory=dict)
    classes: tuple[str, ...] = ()  # unless others are asked for
    reported: tuple[str, ...] = ()
    by_user: bool = False
    whole_groups: bool = False
    near: float | None = None
    summary: Literal["worst", "tenth"] = "worst"
    # For reports, by the name of a task: `title`, what `asks` a sample, its `groups`, and `notes`.
    words: dict[str, dict[str, str]] = field(default_factory=dict)
    name: str = ""  # of the file


FOLDER = Path(__file__).parent / "cards"


@functools.cache
def names() -> tuple[str, ...]:
    """The data sets that have a card."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.yaml")))


@functools.cache
def card(name: str) -> Card:
    """The card of a data set."""
    if name not in names():
        hint = config.did_you_mean(name, names())
        raise WrongData(
            f"There is no data set `{name}`{hint} There are {', '.join(names())}; or give the path "
            f"of a table ({', '.join(table.TABLES)})."
        )
    file = FOLDER / f"{name}.yaml"
    own = config.build(Card, config.parse(file.read_text(encoding="utf-8"), file.name))
    return replace(own, name=name)


def load(
    data: str | os.PathLike[str], folder: Place = None, *, seed: int = 0, **options: Any
) -> FairnessData:
    """`load_grouped` for a binary label and two groups, as arrays.

    The seed splits, and draws generated data, too.

    Example:
        >>> load("synthetic", rows=500).group_names
        ('group 0', 'group 1')
    """
    if not table.is_table(data) and not card(str(data)).copies:
        options["seed"] = seed
    return arrays(load_grouped(data, folder, **{"validation": 0.2, **options}), seed)


def _read(own: Card, folder: Place, download: bool) -> table.Table:
    copy, found = sources.locate(own.name, own.copies, folder, download=download)
    return layouts.READERS[copy.reader](found)


def load_grouped(
    data: str | os.PathLike[str],
    folder: Place = None,
    *,
    columns: Columns | None = None,
    size: tuple[int, int] = (224, 224),
    label: str = "",
    download: bool = True,
    **options: Any,
) -> GroupedData:
    """A data set by its name, or a table, as samples in groups.

    Files are taken from the first of these places that has them with the right checksum: `folder`,
    the folder that the environment variable `FCCO_DATA` names, the cache; then, with `download`,
    from the network.

    Args:
        data: name of a card, or the path of a table.
        folder: where to look first.
        columns: of a table.
        size: height and width that the images of a table are given.
        label: another column of a card's table; its classes are the groups.
        download: fetch what is not on this machine and keep it in the cache.
        options: of `table.grouped`; of generated data those of their function.

    Raises:
        MissingData: when a file is nowhere; it lists every place and why it failed.
        WrongData: when a file is there, but is not what it should be.

    Example:
        >>> load_grouped("grouped-synthetic", groups=4).kind
        'vector'
    """
    if table.is_table(data):
        columns = columns or Columns()
        read = table.read_table(data, columns, (size[0], size[1]))
        return table.grouped(str(data), read, columns, {}, **options)
    own = card(str(data))
    if not own.copies:
        return GENERATED[own.name](**options)
    read = _read(own, folder, download)
    columns = replace(own.columns, label=label, group=()) if label else own.columns
    if columns.split and columns.split not in read.frame:  # a copy without official parts
        columns = replace(columns, split="")
    return table.grouped(
        own.name, read, columns, own.values, near=own.near, summary=own.summary,
        reported=() if label else own.reported, by_user=own.by_user and not label,
        whole_groups=own.whole_groups and not label, **{"classes": own.classes, **options},
    )  # fmt: skip


def look(name: str, folder: Place = None) -> list[Sighting]:
    """What each place on this machine holds of a data set, good or not."""
    return [entry for _, found in sources.look(card(name).copies, folder) for entry in found]


def fetch(names: Sequence[str]) -> list[Sighting]:
    """See to it that data sets are on this machine; what is fetched goes into the cache.

    Raises:
        MissingData: for the first that can be had nowhere.
    """
    found: list[Sighting] = []
    for own in map(card, names):
        if own.copies:
            found += sources.locate(own.name, own.copies)[1]
    return found
