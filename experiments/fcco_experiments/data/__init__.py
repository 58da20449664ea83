"""Data sets with groups: found on this machine or fetched, checked, encoded, split.

`load("adult")`, `load("compas")` or, without any file, `load("synthetic")`: features, label and
group. `load("celeba")`, `load("camelyon17")`, `load("amazon")`, `load("sentiment")` or, without any
file, `load("grouped-synthetic")`: images, texts or vectors in many groups. `load("weather")`,
`load("bdd100k")`, `load("bdd100k-subset")` or `load("scenes-synthetic")`: scenes whose classes are
the groups. Every file is known by its sha256, so results do not depend on where it came from.

Example:
    >>> data = load("synthetic")
    >>> data.train.features.shape[1], len(data.train) + len(data.validation), len(data.test)
    (8, 4000, 2000)
"""

from .amazon import read_amazon
from .bdd100k import read_bdd100k, read_bdd100k_subset
from .camelyon17 import read_camelyon17
from .catalogue import DATA_SETS, DataSet
from .celeba import read_celeba
from .clusters import grouped_synthetic
from .download import Progress
from .files import DataFile, Form, Wheel
from .folders import Copy, Layout, WrongData
from .gather import MissingData
from .gaussian import synthetic
from .grouped import GroupedData, GroupedPart, Samples, Vectors
from .images import ImageFiles
from .pairs import PairedData, read_pairs
from .parts import Encoder, FairnessData, Part, Standardisation, stratified
from .places import Sighting, cache_folder
from .propublica import compas
from .registry import GroupedName, fetch, load, load_grouped, look
from .scenes import scenes_synthetic
from .sentiment import read_sentiment
from .texts import Texts
from .uci import adult
from .weather import read_weather

__all__ = [
    "DATA_SETS",
    "Copy",
    "DataFile",
    "DataSet",
    "Encoder",
    "FairnessData",
    "Form",
    "GroupedData",
    "GroupedName",
    "GroupedPart",
    "ImageFiles",
    "Layout",
    "MissingData",
    "PairedData",
    "Part",
    "Progress",
    "Samples",
    "Sighting",
    "Standardisation",
    "Texts",
    "Vectors",
    "Wheel",
    "WrongData",
    "adult",
    "cache_folder",
    "compas",
    "fetch",
    "grouped_synthetic",
    "load",
    "load_grouped",
    "look",
    "read_amazon",
    "read_bdd100k",
    "read_bdd100k_subset",
    "read_camelyon17",
    "read_celeba",
    "read_pairs",
    "read_sentiment",
    "read_weather",
    "scenes_synthetic",
    "stratified",
    "synthetic",
]
