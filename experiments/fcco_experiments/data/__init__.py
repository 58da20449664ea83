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

from .bdd100k import read_bdd100k, read_bdd100k_subset
from .cards import DATA_SETS, DataSet, GroupedName, fetch, load, load_grouped, look
from .celeba import read_celeba
from .grouped import GroupedData, GroupedPart, Samples, Texts, Vectors
from .images import ImageFiles
from .pairs import PairedData, read_pairs
from .sentiment import read_sentiment
from .sources import (
    Copy,
    DataFile,
    Form,
    Layout,
    MissingData,
    Progress,
    Sighting,
    Wheel,
    WrongData,
    cache_folder,
)
from .synthetic import grouped_synthetic, scenes_synthetic, synthetic
from .tabular import Encoder, FairnessData, Part, Standardisation, adult, compas, stratified
from .weather import read_weather
from .wilds import read_amazon, read_camelyon17

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
