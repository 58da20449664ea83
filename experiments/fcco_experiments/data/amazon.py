"""Amazon reviews: the number of stars, with the users as groups."""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fcco._checks import integer

from .columns import long_cells, rows_of
from .cuts import check_limit, kept
from .download import Progress
from .files import DataFile, Form
from .folders import Copy, Layout, WrongData, digest, locate, unchecked
from .grouped import PARTS, GroupedData
from .texts import Texts
from .users import UNUSED, ByUser

__all__ = ["COPIES", "EXPECTED", "read_amazon"]

REVIEWS = "reviews.csv"
SPLIT = "splits/user.csv"
COPIES = (
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
COLUMNS = ("reviewerID", "overall", "reviewText")
# Of splits/user.csv; 2 and 4 are further reviews of training users, -1 is no part of the data.
OFFICIAL = {"0": "train", "1": "validation", "3": "test"}
EXPECTED = {"train": 245_502, "validation": 100_050, "test": 100_050}


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
    copies: Sequence[Layout | Copy] = COPIES,
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
                _check_counts(path, reviews.sizes, EXPECTED if expected is None else expected)
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
        for row, (user, stars, text) in enumerate(rows_of("amazon", name, lines, COLUMNS), start=1):
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
