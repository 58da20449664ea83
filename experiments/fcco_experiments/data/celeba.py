"""CelebA: blond or not, with sixteen groups of faces."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import torch

from fcco._checks import one_of

from .grouped import GroupedData, Samples, WithinGroups, check_limit, kept
from .images import decoded, image_files, members
from .sources import (
    Copy,
    DataFile,
    Form,
    Layout,
    Progress,
    Sighting,
    WrongData,
    checksum,
    digest,
    listed,
    locate,
    unchecked,
)
from .table import rows_of

__all__ = ["COPIES", "read_attributes", "read_celeba"]

IMAGES = "img_align_celeba"
TEXT = "list_attr_celeba.txt"
TABLE = "list_attr_celeba.csv"
COUNT = 202_599
MD5 = {  # of the official text files; any of them that is there is checked
    TEXT: "75e246fa4810816ffd6ee81facbd244c",
    "list_eval_partition.txt": "d32c9cbf5e040fd4025c592c306e6668",
}
FULL = (
    Layout(
        "CelebA, official files",
        "celeba",
        (TEXT, IMAGES),
        loose=True,
        how=f"the official files: {TEXT} and the unpacked folder {IMAGES} (img_align_celeba.zip), "
        "from https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
    ),
    Layout(
        "CelebA of WILDS",
        "celebA_v1.0",
        (TABLE, "RELEASE_v1.0.txt", "list_eval_partition.csv", IMAGES),
        wilds="celebA",
        version="1.0",
        how="the folder celebA_v1.0 of WILDS, https://wilds.stanford.edu/downloads",
    ),
)
SUBSET = (
    Copy(
        DataFile(
            Form(
                "celeba_first10000_89x109.tar",
                "9de256ba6a1ae6314256aff742a50e64414686d235725e8b4e8f4ef883786c84",
                36_638_720,
            )
        ),
        how="celeba_first10000_89x109.tar: the first 10,000 images at half size with their "
        f"{TEXT}, for those who have it (CelebA must not be redistributed)",
    ),
)
COPIES = (*FULL, *SUBSET)

ATTRIBUTES = ("Attractive", "Mouth_Slightly_Open", "Male", "Blond_Hair")
WORDS = (
    ("not attractive", "attractive"),
    ("mouth closed", "mouth open"),
    ("woman", "man"),
    ("not blond", "blond"),
)


def read_celeba(
    folder: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    progress: Progress | None = None,
    copy: Literal["auto", "full", "subset"] = "auto",
    limit: int = 0,
    verify: bool = True,
    copies: Sequence[Layout | Copy] = COPIES,
) -> GroupedData:
    """CelebA: is the hair blond, over the 16 groups of four attributes.

    The groups are the values of Attractive, Mouth_Slightly_Open, Male and Blond_Hair; accuracies
    are reported over the four of Male and Blond_Hair. Each group is cut 8:1:1 by the seed; the
    official partition is not used.

    Args:
        folder: where to look first.
        download: let the package `wilds` download the full set when no copy is on this machine.
        progress: is told about downloads.
        copy: `"full"`, all 202,599 images, in the official layout or that of WILDS; `"subset"`,
            the archive of the first 10,000 at half size; `"auto"`, what is found first.
        limit: images of each group that are kept; 0 keeps all.
        verify: check the checksums of the official text files and of the archive, and the number
            of images.
        copies: what to look for; for tests.

    Raises:
        MissingData: when no copy is found.
        WrongData: when a copy is broken or has gaps.

    References:
        Liu, Luo, Wang and Tang (2015). Deep learning face attributes in the wild. ICCV.
    """
    check_limit("read_celeba", limit)
    one_of("read_celeba", "copy", copy, ("auto", "full", "subset"))
    wanted = {"auto": (Layout, Copy), "full": Layout, "subset": Copy}[copy]
    copies = [each for each in copies if isinstance(each, wanted)]
    if not verify:
        copies = unchecked(copies)
    own, found = locate("celeba", copies, folder, download=download, progress=progress)
    if isinstance(own, Copy):
        source = _archive(found)
    else:
        source = _folder(own.needs[0], Path(found.detail), verify)
    bits = torch.tensor(list(source.values.values()), dtype=torch.int64)
    group = bits @ torch.tensor([8, 4, 2, 1])
    rows = kept(group, limit)
    names = list(source.values)
    bits, group, chosen = bits[rows], group[rows], [names[row] for row in rows.tolist()]
    return GroupedData(
        name="celeba",
        kind="image",
        samples=source.samples(chosen),
        class_names=WORDS[3],
        cut=WithinGroups(
            bits[:, 3],
            group,
            _names(WORDS),
            bits @ torch.tensor([0, 0, 2, 1]),
            _names(WORDS[2:]),
        ),
        fingerprint=digest("celeba", source.fingerprint, len(names), limit),
        facts={"copy": own.name, "place": found.place, "images": f"{len(chosen):,}"},
    )


@dataclass(frozen=True)
class _Source:
    """The four attributes of each image, by its name, and what the images are read from."""

    values: Mapping[str, tuple[int, ...]]
    fingerprint: str
    images: Path | Mapping[str, bytes]

    def samples(self, names: Sequence[str]) -> Samples:
        if isinstance(self.images, Path):
            return image_files(self.images, names)
        return decoded(self.images, names)


def _folder(index: str, own: Path, verify: bool) -> _Source:
    """All images, in files."""
    content = (own / index).read_bytes()
    if index == TABLE:
        lines = io.StringIO(_decoded(content, TABLE), newline="")
        rows = rows_of("celeba", TABLE, lines, ("image_id", *ATTRIBUTES))
        values = {name: _bits(name, cells, TABLE) for name, *cells in rows}
    else:
        if verify:
            _check_sums(own)
        values = read_attributes(content)
    if verify and len(values) != COUNT:
        raise WrongData(
            f"`celeba`: the list in {own} must have {COUNT:,} images but has {len(values):,} "
            "(verify=False takes it all the same)."
        )
    listed("celeba", own / IMAGES, {"": tuple(values)})
    return _Source(values, checksum(content), own / IMAGES)


def _archive(found: Sighting) -> _Source:
    """The first 10,000 images, in one archive that is held in memory."""
    assert found.content is not None
    contents = {PurePosixPath(path).name: own for path, own in members("celeba", found).items()}
    if TEXT not in contents:
        raise WrongData(f"`celeba`: {found.detail} lacks {TEXT}.")
    values = read_attributes(contents.pop(TEXT))
    gaps = [name for name in values if name not in contents]
    if gaps:
        raise WrongData(
            f"`celeba`: {found.detail} lacks {len(gaps):,} of {len(values):,} images, such as "
            f"{gaps[0]}."
        )
    return _Source(values, checksum(found.content), contents)


def read_attributes(content: bytes) -> dict[str, tuple[int, ...]]:
    r"""The values of the four attributes, 0 or 1, of each image in `list_attr_celeba.txt`.

    The file has the number of images, then the names of the attributes, then a line for each image
    with its name and -1 or 1 for each attribute.

    Raises:
        WrongData: when the content is something else.

    Example:
        >>> read_attributes(
        ...     b"1\nAttractive Male Mouth_Slightly_Open Blond_Hair \n000001.jpg 1 -1 -1  1\n"
        ... )
        {'000001.jpg': (1, 0, 0, 1)}
    """
    first, _, rest = _decoded(content, TEXT).partition("\n")
    head, _, rest = rest.partition("\n")
    header = head.split()
    gaps = [name for name in ATTRIBUTES if name not in header]
    if not first.strip().isdigit() or gaps:
        what = f"its second line lacks {', '.join(gaps)}" if gaps else "its first line is no number"
        raise WrongData(f"`celeba`: {TEXT} is not the list of attributes: {what}.")
    places = [1 + header.index(name) for name in ATTRIBUTES]
    values: dict[str, tuple[int, ...]] = {}
    for number, line in enumerate(rest.splitlines(), start=3):
        cells = line.split()
        if len(cells) != len(header) + 1:
            raise WrongData(
                f"`celeba`: line {number} of {TEXT} must have a name and {len(header)} values but "
                f"has {len(cells)} words."
            )
        values[cells[0]] = _bits(cells[0], [cells[place] for place in places], TEXT)
    if len(values) != int(first):
        raise WrongData(
            f"`celeba`: {TEXT} must have {int(first):,} images, as its first line says, but has "
            f"{len(values):,}."
        )
    return values


def _bits(name: str, cells: Sequence[str], file: str) -> tuple[int, ...]:
    if not {"-1", "1"}.issuperset(cells):
        raise WrongData(
            f"`celeba`: {file} must hold -1 or 1 but has {', '.join(cells)} for {name}."
        )
    return tuple(int(cell == "1") for cell in cells)


def _decoded(content: bytes, file: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise WrongData(f"`celeba`: {file} is no text: {error}.") from error


def _check_sums(folder: Path) -> None:
    for name, expected in MD5.items():
        if (folder / name).exists():
            own = hashlib.md5((folder / name).read_bytes(), usedforsecurity=False).hexdigest()
            if own != expected:
                raise WrongData(
                    f"`celeba`: {folder / name} must have the md5 sum {expected} but has {own} "
                    "(verify=False takes it all the same)."
                )


def _names(words: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Of all combinations, in the order of their binary number."""
    names: list[str] = [""]
    for off, on in words:
        names = [f"{name}, {word}" if name else word for name in names for word in (off, on)]
    return tuple(names)
