"""Photos of weather from the web, with the kind of weather as class and group."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from fcco._checks import at_least

from .grouped import GroupedData, Samples, Vectors, WithinGroups, check_classes, check_limit, kept
from .images import ImageFiles, decoded, distinct_rows, members
from .sources import (
    Copy,
    DataFile,
    Form,
    Layout,
    Progress,
    WrongData,
    checksum,
    digest,
    locate,
    unchecked,
)

__all__ = ["COPIES", "FOLDERS", "read_weather"]

COPIES = (
    Copy(
        DataFile(
            Form(
                "weather_photos_128.tar",
                "fe58ff4122ce35c05d6d644e23f36fd803715363ce08cbc110283561984ce893",
                12_421_120,
            )
        ),
        how="weather_photos_128.tar: 2,660 photos of 128 x 128, for those who have it (the rights "
        "are with the photographers), from https://github.com/pmlodzianowski/WeatherClassification,"
        " https://github.com/Luqhhh/weather-classification and the fog of the data set DAWN",
    ),
    Layout(
        "weather photos in folders",
        "weather",
        (),
        how="your own photos: a folder weather with a folder of images for each class, such as "
        "weather/clear, weather/rainy and weather/foggy",
    ),
)
FOLDERS: Mapping[str, tuple[str, ...]] = {
    "clear": ("clear", "sunny", "shine"),
    "cloudy": ("cloudy", "clouds"),
    "rainy": ("rainy", "rain"),
    "snowy": ("snowy", "snow"),
    "foggy": ("foggy", "fog", "fog_driving"),
    "stormy": ("stormy", "storm"),
}
"""Folders of each class; a class that is not here is the folder of its name."""
SIZE = (128, 128)
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


def read_weather(
    folder: str | os.PathLike[str] | None = None,
    *,
    classes: Sequence[str] = ("clear", "cloudy", "rainy", "snowy", "foggy"),
    download: bool = True,
    progress: Progress | None = None,
    limit: int = 0,
    distinct: bool = True,
    tolerance: float = 4.0,
    verify: bool = True,
    copies: Sequence[Layout | Copy] = COPIES,
) -> GroupedData:
    """Photos of weather: which kind is it; the classes are the groups.

    The archive joins three collections, so a class may have several folders: `clear` is sunny and
    shine, `cloudy` is cloudy and clouds, `rainy` is rainy and rain, `foggy` is fog and fog_driving;
    there are `snowy`, `stormy` (storm) and `sunrise` too. Each class is cut 8:1:1 by the seed.

    Of the 2,660 photos 85 repeat another one pixel by pixel and 105 more do so after being scaled
    or compressed again, all within their class: a cut would put copies of training photos into the
    test data, so `distinct` leaves them out.

    Args:
        folder: where to look first.
        classes: in the order of their labels; photos of others are left out.
        download: has no effect, as no place on the network has the archive.
        progress: has no effect.
        limit: photos of each class that are kept; 0 keeps all.
        distinct: leave out photos that repeat an earlier one, see `distinct_rows`.
        tolerance: up to which difference of brightness photos are copies; with 0 only those with
            equal pixels. In the archive no pair is between 3.2 and 4.8: those below are copies,
            those above mostly different photos of dense fog.
        verify: take the archive with its checksum only.
        copies: what to look for; for tests.

    Photos in folders may have any size: they are scaled and cut to 128 x 128 when they are read.

    Raises:
        MissingData: when neither archive nor folder is found.
        WrongData: when a class has no photo, or a photo cannot be read.
    """
    names = check_classes("read_weather", classes)
    check_limit("read_weather", limit)
    at_least("read_weather", "tolerance", tolerance, 0)
    own_folders = _folders(names)
    wanted = copies if verify else unchecked(copies)
    copy, found = locate("weather", wanted, folder, download=False)
    source: dict[str, bytes] | Path
    if isinstance(copy, Copy):
        assert found.content is not None
        source = members("weather", found)
        paths, mark = sorted(source), checksum(found.content)
    else:
        source = Path(found.detail)
        paths, mark = _listing(source)
    chosen = [path for path in paths if _parent(path) in own_folders]
    group = torch.tensor([own_folders[_parent(path)] for path in chosen], dtype=torch.int64)
    _check_occupied(found.detail, names, group, sorted({_parent(path) for path in paths}))
    if isinstance(source, Path):
        samples: Samples = ImageFiles(str(source), tuple(chosen), SIZE, fit=True)
    else:
        samples = decoded(source, chosen)
    rows = distinct_rows(samples, tolerance) if distinct else torch.arange(len(chosen))
    repeats = len(chosen) - len(rows)
    rows = rows[kept(group[rows], limit)]
    group = group[rows]
    return GroupedData(
        name="weather",
        kind="image",
        samples=_rows_of(samples, rows),
        class_names=names,
        cut=WithinGroups(group, group, names),
        fingerprint=digest("weather", mark, *names, limit, distinct, tolerance),
        facts={
            "copy": copy.name,
            "place": found.place,
            "images": f"{len(rows):,}",
            "repeats left out": f"{repeats:,}",
        },
    )


def _folders(classes: Sequence[str]) -> dict[str, int]:
    """The class of each folder, by number."""
    found: dict[str, int] = {}
    for index, name in enumerate(classes):
        for own in FOLDERS.get(name, (name,)):
            if own in found:
                raise ValueError(
                    f"`read_weather(classes=...)`: the folder {own} cannot be in both "
                    f"{classes[found[own]]} and {name}."
                )
            found[own] = index
    return found


def _parent(path: str) -> str:
    return PurePosixPath(path).parent.name


def _listing(root: Path) -> tuple[list[str], str]:
    """Images in the folders of a folder, and a mark that changes when one of them does."""
    found: dict[str, str] = {}
    for inner in (each for each in root.iterdir() if each.is_dir()):
        for file in inner.iterdir():
            # Files with a dot in front are not the user's: macOS puts `._name.jpg` beside photos.
            if file.suffix.lower() in SUFFIXES and file.name[0] != "." and file.is_file():
                found[f"{inner.name}/{file.name}"] = checksum(file.read_bytes())
    paths = sorted(found)
    return paths, digest(*(f"{path} {found[path]}" for path in paths))


def _check_occupied(
    where: str, classes: Sequence[str], group: Tensor, folders: Sequence[str]
) -> None:
    present = set(group.tolist())
    empty = [name for index, name in enumerate(classes) if index not in present]
    if empty:
        raise WrongData(
            f"`weather`: {where} has no photo of {', '.join(empty)}; its folders are "
            f"{', '.join(folders) or 'none'}."
        )


def _rows_of(samples: Samples, rows: Tensor) -> Samples:
    if isinstance(samples, ImageFiles):
        return replace(samples, names=tuple(samples.names[row] for row in rows.tolist()))
    assert isinstance(samples, Vectors)
    return Vectors(samples.values[rows])
