"""The official layouts of Amazon-WILDS and Camelyon17-WILDS."""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fcco._checks import integer

from .grouped import PARTS, UNUSED, ByUser, GroupedData, Official, Texts, check_limit, kept, part
from .images import image_files
from .sources import (
    Copy,
    DataFile,
    Form,
    Layout,
    Progress,
    WrongData,
    checksum,
    digest,
    listed,
    locate,
    unchecked,
)
from .table import long_cells, rows_of

__all__ = [
    "AMAZON",
    "AMAZON_SIZES",
    "CAMELYON17",
    "CAMELYON17_SIZES",
    "read_amazon",
    "read_camelyon17",
]


REVIEWS = "reviews.csv"
SPLIT = "splits/user.csv"
AMAZON = (
    Layout(
        "Amazon-WILDS",
        "amazon_v2.1",
        (REVIEWS, "RELEASE_v2.1.txt", SPLIT),
        wilds="amazon",
        version="2.1",
        how="the folder amazon_v2.1 of WILDS (2 GB), https://wilds.stanford.edu/downloads",
    ),
    Copy(
        DataFile(
            Form(
                "amazon2018_5core_4categories_reviews.csv",
                "be0a304f51874a1f33b19330e330ccada1d704a5fba58076db0318dbb3143948",
                2_667_244,
            )
        ),
        how="amazon2018_5core_4categories_reviews.csv, for those who have it: the columns of "
        "reviews.csv of WILDS for the 5-core reviews of All_Beauty, AMAZON_FASHION, Gift_Cards and "
        "Appliances, https://nijianmo.github.io/amazon; a csv file of that name with other reviews "
        "is taken with verify=False",
    ),
)
AMAZON_COLUMNS = ("reviewerID", "overall", "reviewText")
# Of splits/user.csv; 2 and 4 are further reviews of training users, -1 is no part of the data.
OFFICIAL = {"0": "train", "1": "validation", "3": "test"}
AMAZON_SIZES = {"train": 245_502, "validation": 100_050, "test": 100_050}


def read_amazon(
    folder: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    progress: Progress | None = None,
    limit: int = 0,
    distinct: bool = False,
    min_reviews: int = 5,
    pool: int = 20,
    verify: bool = True,
    expected: Mapping[str, int] | None = None,
    copies: Sequence[Layout | Copy] = AMAZON,
) -> GroupedData:
    """Amazon reviews: how many stars does a text come with, over the users who wrote them.

    Amazon-WILDS has official parts whose users differ: 1,252 users to train on, 1,334 to validate
    and 1,334 to test on. The file of 10,450 reviews has none: see `ByUser` for how the seed cuts
    its 1,897 users. Figures over users are summed up by their tenth percentile, as WILDS does;
    users of few reviews count together there. The users' ids are not kept.

    The 10,450 reviews have 4,072 different pairs of user and text: the same review of several
    products. As whole users go to one part, few test texts are known from training.

    Args:
        folder: where to look first.
        download: let the package `wilds` download Amazon-WILDS when no copy is on this machine.
        progress: is told about downloads.
        limit: reviews of each user that are kept; 0 keeps all. Parts and pools stay the same.
        distinct: keep the first of equal texts of a user only, before users are counted.
        min_reviews: a user with fewer is not trained on.
        pool: users with fewer are put together in validation and test data.
        verify: take the file with its checksum only; check the numbers of reviews of WILDS.
        expected: these numbers, when they are not the official ones; for tests.
        copies: what to look for; for tests.

    Raises:
        MissingData: when no copy is found.
        WrongData: when a copy is broken or has gaps.

    References:
        Ni, Li and McAuley (2019). Justifying recommendations using distantly-labeled reviews and
        fine-grained aspects. EMNLP.
        Koh et al. (2021). WILDS: a benchmark of in-the-wild distribution shifts. ICML.
    """
    check_limit("read_amazon", limit)
    integer("read_amazon", "min_reviews", min_reviews, 1)
    integer("read_amazon", "pool", pool, 1)
    wanted = copies if verify else unchecked(copies)
    own, found = locate("amazon", wanted, folder, download=download, progress=progress)
    reviews = _Reviews(distinct)
    with long_cells():
        if isinstance(own, Copy):
            assert found.content is not None
            reviews.read(io.StringIO(found.content.decode(), newline=""), found.detail)
        else:
            path = Path(found.detail)
            parts = _split(path / SPLIT)
            with (path / REVIEWS).open(newline="", encoding="utf-8") as lines:
                reviews.read(lines, str(path / REVIEWS), parts)
            if verify:
                _check_counts(path, reviews.sizes, AMAZON_SIZES if expected is None else expected)
    user = torch.tensor(reviews.user)
    rows = kept(user, limit)
    part_of = None if isinstance(own, Copy) else torch.tensor(list(reviews.part_of))
    cut = ByUser(
        torch.tensor(reviews.label)[rows],
        user[rows],
        torch.bincount(user, minlength=len(reviews.users)),
        min_reviews,
        pool,
        part_of,
    )
    return GroupedData(
        name="amazon",
        kind="text",
        samples=Texts(tuple(reviews.text[row] for row in rows.tolist())),
        class_names=("1 star", *(f"{stars} stars" for stars in range(2, 6))),
        cut=cut,
        fingerprint=digest("amazon", reviews.hash.hexdigest(), limit, min_reviews, pool),
        summary="tenth",
        facts={
            "copy": own.name,
            "place": found.place,
            "reviews": f"{len(rows):,}",
            "users": f"{len(reviews.users):,}",
            "distinct": str(distinct),
        },
    )


@dataclass
class _Reviews:
    """Columns of the reviews that are used; users are numbered as they come."""

    distinct: bool
    user: list[int] = field(default_factory=list)
    label: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    users: dict[str, int] = field(default_factory=dict)
    part_of: list[int] = field(default_factory=list)
    sizes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.hash = hashlib.sha256()

    def read(self, lines: Iterable[str], name: str, parts: Sequence[str] | None = None) -> None:
        """Read a csv file; `parts` says for each row where it belongs."""
        seen: set[tuple[str, str]] = set()
        row = 0
        for row, (user, stars, text) in enumerate(
            rows_of("amazon", name, lines, AMAZON_COLUMNS), start=1
        ):
            if parts is not None and row > len(parts):
                break
            own = "" if parts is None else OFFICIAL.get(parts[row - 1])
            if own is None:
                continue
            self.sizes[own] += 1
            if self.distinct and (user, text) in seen:
                continue
            if stars not in ("1.0", "2.0", "3.0", "4.0", "5.0", "1", "2", "3", "4", "5"):
                raise WrongData(
                    f"`amazon`: row {row} of {name} must have 1.0 to 5.0 stars but has {stars!r}."
                )
            if self.distinct:
                seen.add((user, text))
            index = self.users.setdefault(user, len(self.users))
            place = PARTS.index(own) if own else UNUSED
            if index == len(self.part_of):
                self.part_of.append(place)
            elif self.part_of[index] != place:
                raise WrongData(
                    f"`amazon`: row {row} of {name} is the {own} review of a user who is also in "
                    f"{PARTS[self.part_of[index]]}: users must belong to one part."
                )
            self.user.append(index)
            self.label.append(int(stars[0]) - 1)
            self.text.append(text)
            self.hash.update(f"{index}\0{stars[0]}\0{own}\0{text}\0".encode())
        if parts is not None and row != len(parts):
            raise WrongData(
                f"`amazon`: {name} must have {len(parts):,} rows, as many as {SPLIT}, but has "
                f"{'more' if row > len(parts) else f'{row:,}'}."
            )
        if not self.text:
            raise WrongData(f"`amazon`: {name} has no reviews.")


def _split(path: Path) -> list[str]:
    """The part of each review, a number as text."""
    with path.open(newline="") as lines:
        parts = [cell for (cell,) in rows_of("amazon", SPLIT, lines, ("split",))]
    strange = sorted({*parts} - {*OFFICIAL, "2", "4", "-1"})
    if strange:
        raise WrongData(f"`amazon`: {path} must hold -1 to 4 but has {', '.join(strange[:3])}.")
    return parts


def _check_counts(path: Path, sizes: Mapping[str, int], expected: Mapping[str, int]) -> None:
    if dict(sizes) != dict(expected):
        own, other = (
            ", ".join(f"{counts.get(name, 0):,} ({name})" for name in PARTS)
            for counts in (expected, sizes)
        )
        raise WrongData(
            f"`amazon`: {path} must have {own} reviews but has {other} (verify=False takes it all "
            "the same)."
        )


TABLE = "metadata.csv"
CAMELYON17 = (
    Layout(
        "Camelyon17-WILDS",
        "camelyon17_v1.0",
        (TABLE, "RELEASE_v1.0.txt", "patches"),
        wilds="camelyon17",
        version="1.0",
        how="the folder camelyon17_v1.0 of WILDS (10 GB), https://wilds.stanford.edu/downloads",
    ),
)
CAMELYON17_COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split")
VALIDATION_CENTER, TEST_CENTER = 1, 2
# The patches of the same hospitals that WILDS sets aside; they are not used here.
SET_ASIDE = "validation of the training hospitals"
CAMELYON17_SIZES = {"train": 302_436, SET_ASIDE: 33_560, "validation": 34_904, "test": 85_054}


def read_camelyon17(
    folder: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    progress: Progress | None = None,
    limit: int = 0,
    verify: bool = True,
    expected: Mapping[str, int] | None = None,
    copies: Sequence[Layout | Copy] = CAMELYON17,
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
    wanted = dict(CAMELYON17_SIZES if expected is None else expected)
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
        for patient, node, x, y, *cells in rows_of("camelyon17", TABLE, lines, CAMELYON17_COLUMNS):
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
    return ", ".join(f"{counts[name]:,} ({name})" for name in CAMELYON17_SIZES if name in counts)
