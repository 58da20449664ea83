"""Data sets with groups: found on this machine or fetched, checked, encoded, split.

`load("adult")`, `load("compas")` or, without any file, `load("synthetic")`: features, label and
group as arrays. `load_grouped("celeba")`, `load_grouped("sentiment")` or, without any file,
`load_grouped("grouped-synthetic")`: images, texts or vectors in many groups. Both take the path of
a table instead, with its `Columns`. `names()` are those of the cards, `card(name)` says what is
known about one.

Example:
    >>> data = load("synthetic")
    >>> data.train.features.shape[1], len(data.train) + len(data.validation), len(data.test)
    (8, 4000, 2000)
"""

from ..task import Columns
from .cards import Card, card, fetch, load, load_grouped, look, names
from .grouped import FairnessData, GroupedData, GroupedPart, Part, arrays
from .samples import ImageFiles, Samples, Vectors
from .sources import Copy, DataFile, MissingData, Sighting, WrongData
from .table import is_table, read_table

__all__ = [
    "Card",
    "Columns",
    "Copy",
    "DataFile",
    "FairnessData",
    "GroupedData",
    "GroupedPart",
    "ImageFiles",
    "MissingData",
    "Part",
    "Samples",
    "Sighting",
    "Vectors",
    "WrongData",
    "arrays",
    "card",
    "fetch",
    "is_table",
    "load",
    "load_grouped",
    "look",
    "names",
    "read_table",
]
