"""Sentiment of texts from seven sources, with source and label as groups."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence

import torch

from .grouped import GroupedData, Texts, WithinGroups, check_limit, kept
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
from .table import long_cells, rows_of

__all__ = ["COPIES", "read_sentiment"]

COPIES = (
    Copy(
        DataFile(
            Form(
                "sentiment_7domains.csv",
                "4f221a7d53e7f8925e268542ccf5b420c3f9b6f982342a45e4f968d756c08cc9",
                10_635_372,
            )
        ),
        how="sentiment_7domains.csv, for those who have it: the columns domain, label, rating, "
        "asin, title and text of the data in https://github.com/bzantium/bert-AAD; a csv file of "
        "that name with other texts is taken with verify=False",
    ),
)
COLUMNS = ("domain", "label", "title", "text")
CLASSES = ("negative", "positive")


def read_sentiment(
    folder: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    progress: Progress | None = None,
    limit: int = 0,
    distinct: bool = False,
    verify: bool = True,
    copies: Sequence[Layout | Copy] = COPIES,
) -> GroupedData:
    """14,000 texts of seven domains: is the opinion positive, over the 14 domains by label.

    Books, DVDs, electronics and kitchen goods of Amazon, films of IMDb, airlines, and blogs. A
    text is its title, where it has one, a full stop, and its body. Each group is cut 8:1:1 by the
    seed, and accuracies are reported over all 14.

    Of the texts 1,707 repeat another one of the same group, 1,560 of them blogs: a cut puts copies
    of training texts into the test data, unless `distinct` leaves them out.

    Args:
        folder: where to look first.
        download: has no effect, as no place on the network has the file.
        progress: has no effect.
        limit: texts of each group that are kept; 0 keeps all.
        distinct: keep the first of equal texts of a group only.
        verify: take the file with its checksum only.
        copies: what to look for; for tests.

    Raises:
        MissingData: when the file is not found.
        WrongData: when it is broken.

    References:
        Blitzer, Dredze and Pereira (2007). Biographies, Bollywood, boom-boxes and blenders. ACL.
        Ryu and Lee (2020). Knowledge distillation for BERT unsupervised domain adaptation.
    """
    check_limit("read_sentiment", limit)
    wanted = copies if verify else unchecked(copies)
    _, found = locate("sentiment", wanted, folder, download=False)
    assert found.content is not None
    domains: dict[str, int] = {}
    texts: dict[tuple[int, int, str, int], None] = {}  # a set that keeps the order
    with long_cells():
        lines = io.StringIO(found.content.decode(), newline="")
        rows = rows_of("sentiment", found.file, lines, COLUMNS)
        for number, (domain, label, title, body) in enumerate(rows, start=1):
            if label not in ("0", "1") or not domain:
                raise WrongData(
                    f"`sentiment`: row {number} of {found.file} must have a domain and a label of "
                    f"0 or 1 but has {domain!r} and {label!r}."
                )
            index = domains.setdefault(domain, len(domains))
            text = f"{title}. {body}" if title else body
            texts[index, int(label), text, 0 if distinct else number] = None
    if not texts:
        raise WrongData(f"`sentiment`: {found.file} has no rows.")
    label = torch.tensor([key[1] for key in texts])
    group = torch.tensor([2 * key[0] + key[1] for key in texts])
    own = kept(group, limit)
    values = [key[2] for key in texts]
    return GroupedData(
        name="sentiment",
        kind="text",
        samples=Texts(tuple(values[row] for row in own.tolist())),
        class_names=CLASSES,
        cut=WithinGroups(
            label[own], group[own], tuple(f"{name}, {word}" for name in domains for word in CLASSES)
        ),
        fingerprint=digest("sentiment", checksum(found.content), limit, distinct),
        facts={"place": found.place, "texts": f"{len(own):,}", "distinct": str(distinct)},
    )
