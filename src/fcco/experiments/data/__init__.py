"""Data sets with groups: found on this machine or fetched, checked, encoded, split.

`load("adult")`, `load("compas")` or, without any file, `load("synthetic")`. Every file is known by
its sha256, so results do not depend on where it came from.

Example:
    >>> data = load("synthetic")
    >>> data.train.features.shape[1], len(data.train) + len(data.validation), len(data.test)
    (8, 4000, 2000)
"""

from .download import Progress
from .files import DataFile, Form, Wheel
from .gather import MissingData
from .gaussian import synthetic
from .parts import Encoder, FairnessData, Part, Standardisation, stratified
from .places import Sighting, cache_folder
from .propublica import compas
from .registry import DATA_SETS, DataSet, fetch, load, look
from .uci import adult

__all__ = [
    "DATA_SETS",
    "DataFile",
    "DataSet",
    "Encoder",
    "FairnessData",
    "Form",
    "MissingData",
    "Part",
    "Progress",
    "Sighting",
    "Standardisation",
    "Wheel",
    "adult",
    "cache_folder",
    "compas",
    "fetch",
    "load",
    "look",
    "stratified",
    "synthetic",
]
