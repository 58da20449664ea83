"""Camelyon17-WILDS: tumour in patches of lymph nodes, with hospitals and slides as groups."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .columns import rows_of
from .cuts import Official, check_limit, kept
from .download import Progress
from .files import checksum
from .folders import Copy, Layout, WrongData, digest, listed, locate
from .grouped import PARTS, GroupedData, part
from .images import image_files

__all__ = ["COPIES", "EXPECTED", "read_camelyon17"]

TABLE = "metadata.csv"
COPIES = (
    Layout(
        "Camelyon17-WILDS",
        "camelyon17_v1.0",
        (TABLE, "RELEASE_v1.0.txt", "patches"),
        wilds="camelyon17",
        version="1.0",
        how="the folder camelyon17_v1.0 of WILDS (10 GB), https://wilds.stanford.edu/downloads",
    ),
)
COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split")
VALIDATION_CENTER, TEST_CENTER = 1, 2
# The patches of the same hospitals that WILDS sets aside; they are not used here.
SET_ASIDE = "validation of the training hospitals"
EXPECTED = {"train": 302_436, SET_ASIDE: 33_560, "validation": 34_904, "test": 85_054}


def read_camelyon17(
    folder: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    progress: Progress | None = None,
    limit: int = 0,
    verify: bool = True,
    expected: Mapping[str, int] | None = None,
    copies: Sequence[Layout | Copy] = COPIES,
) -> GroupedData:
    """Camelyon17-WILDS: does the middle of a patch hold tumour, over the slides of hospitals.

    The official parts: the hospitals 0, 3 and 4 without the patches that are set aside for
    validation, 30 slides; hospital 1 to validate on; hospital 2 to test on. The groups are the
    slides, and accuracies are reported over them.

    Args:
        folder: where to look first.
        download: let the package `wilds` download it (10 GB) when it is not on this machine.
        progress: is told about downloads.
        limit: patches of each slide that are kept; 0 keeps all.
        verify: check the numbers of patches.
        expected: these numbers, when they are not the official ones; for tests.
        copies: what to look for; for tests.

    Raises:
        MissingData: when the folder is not found.
        WrongData: when it is broken or has gaps.

    References:
        Bandi et al. (2019). From detection of individual metastases to classification of lymph
        node status at the patient level: the CAMELYON17 challenge. IEEE Trans. Med. Imaging.
        Koh et al. (2021). WILDS: a benchmark of in-the-wild distribution shifts. ICML.
    """
    check_limit("read_camelyon17", limit)
    layout, found = locate("camelyon17", copies, folder, download=download, progress=progress)
    own = Path(found.detail)
    names, columns, parts = _table(own / TABLE)
    counts = dict(Counter(parts))
    wanted = dict(EXPECTED if expected is None else expected)
    if verify and counts != wanted:
        raise WrongData(
            f"`camelyon17`: {own / TABLE} must list {_words(wanted)} patches but lists "
            f"{_words(counts)} (verify=False takes it all the same)."
        )
    listed("camelyon17", own / "patches", _by_folder(names))
    used = torch.tensor([row for row, name in enumerate(parts) if name != SET_ASIDE])
    tumour, slide, center = columns[used].unbind(1)
    pairs, group = torch.unique(torch.stack([center, slide], 1), dim=0, return_inverse=True)
    rows = kept(group, limit)
    used, group = used[rows], group[rows]
    chosen = [parts[row] for row in used.tolist()]
    return GroupedData(
        name="camelyon17",
        kind="image",
        samples=image_files(own / "patches", [names[row] for row in used.tolist()]),
        class_names=("no tumour", "tumour"),
        cut=Official(
            {
                name: part(
                    torch.tensor([row for row, own in enumerate(chosen) if own == name]),
                    tumour[rows],
                    group,
                    [f"hospital {hospital}, slide {slide}" for hospital, slide in pairs.tolist()],
                )
                for name in PARTS
            }
        ),
        fingerprint=digest("camelyon17", checksum((own / TABLE).read_bytes()), len(names), limit),
        facts={"copy": layout.name, "place": found.place, "images": f"{len(chosen):,}"},
    )


def _table(path: Path) -> tuple[list[str], Tensor, list[str]]:
    """Path of each patch, its (tumour, slide, hospital), and its part."""
    names: list[str] = []
    numbers: list[tuple[int, int, int]] = []
    parts: list[str] = []
    with path.open(newline="") as lines:
        for patient, node, x, y, *cells in rows_of("camelyon17", TABLE, lines, COLUMNS):
            try:
                tumour, slide, center, split = (int(float(cell)) for cell in cells)
            except ValueError:
                tumour, slide, center, split = -1, -1, -1, -1
            if tumour not in (0, 1) or not 0 <= center <= 4 or split not in (0, 1):
                raise WrongData(
                    f"`camelyon17`: row {len(names) + 1} of {path} must have a tumor of 0 or 1, a "
                    f"slide, a center from 0 to 4 and a split of 0 or 1 but has {', '.join(cells)}."
                )
            inner = f"patient_{patient}_node_{node}"
            names.append(f"{inner}/patch_{inner}_x_{x}_y_{y}.png")
            numbers.append((tumour, slide, center))
            parts.append(_part(center, split))
    if not {*PARTS} <= {*parts}:
        raise WrongData(f"`camelyon17`: {path} must have hospitals to train, validate and test on.")
    return names, torch.tensor(numbers), parts


def _part(center: int, split: int) -> str:
    if center == VALIDATION_CENTER:
        return "validation"
    if center == TEST_CENTER:
        return "test"
    return SET_ASIDE if split == 1 else "train"


def _by_folder(names: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        inner, _, file = name.partition("/")
        found.setdefault(inner, []).append(file)
    return found


def _words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[name]:,} ({name})" for name in EXPECTED if name in counts)
