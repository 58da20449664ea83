"""What a reader must know about each data set, and the names of its groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from .figures import FEW
from .judge import TENTH

__all__ = ["QUANTILES", "TOLD", "Told", "entries", "shown_names"]

QUANTILES = tuple(f"{level} %" for level in range(0, 101, 10))
"""Names of the entries of a list that stands for many groups."""


@dataclass(frozen=True)
class Told:
    """A data set in words.

    Args:
        title: its name.
        asked: what the network learns, after "learns".
        groups: what the groups are.
        worst: label of the figure that sums up the accuracies of groups.
        worst_meaning: what that figure is.
        curve: title of its curve.
        each: the losses of groups, in titles.
        reported: whose accuracies are shown one by one.
        trusted: which test figures to trust, and why.
        repeats: what repeated samples do to that.
        without: the same once they were dropped.
    """

    title: str
    asked: str
    groups: str
    worst: str = "worst group"
    worst_meaning: str = "accuracy of the group that has the lowest"
    curve: str = "Test accuracy of the worst group"
    each: str = "Loss of every group"
    reported: str = "every group"
    trusted: str = "Test accuracies are those of every group of the test data."
    repeats: str = ""
    without: str = ""


TOLD = {
    "celeba": Told(
        "CelebA",
        "to see on a photo of a face whether the hair is blond",
        "16 of them, all combinations of four attributes (attractive, mouth slightly open, male, "
        "blond hair); blond men are rare",
        worst="worst of 4 groups",
        worst_meaning="lowest accuracy of the four groups man or woman, blond or not",
        curve="Test accuracy of the worst of the four groups man or woman, blond or not",
        reported="the four groups that are large enough",
        trusted="Test accuracies are reported for four groups, male or not and blond or not, and "
        "not for all 16: of 10,000 faces the smallest of the 16 groups have 12 to 28, a tenth "
        "of which is test data, and the accuracy on two photos means nothing. Even the "
        "blond men are few, so look at means over several splits; every seed has its own.",
    ),
    "sentiment": Told(
        "opinions from seven places",
        "whether a text is positive or negative",
        "14 of them, the place it comes from (books, DVDs, electronics, kitchen, films, airlines, "
        "blogs) with the label",
        trusted="Test accuracies are those of all 14 groups, of about 100 texts each: the accuracy "
        "of one group is known to some three points, and the lowest of 14 lies lower by chance. "
        "Compare methods, seed by seed; every seed has its own split.",
        repeats="Of 2,000 blogs 1,560 repeat another one, so the test data hold copies of training "
        "texts, which flatters all methods alike.",
        without="Texts that repeat another of their group were dropped, 1,560 of 2,000 blogs among "
        "them, so the two groups of blogs have only some 20 test texts each.",
    ),
    "amazon": Told(
        "Amazon reviews",
        "how many stars, one to five, come with the text of a review",
        "the users who wrote them",
        worst="10th percentile",
        worst_meaning="accuracy that nine of ten users have or exceed, as WILDS reports it",
        curve="Test accuracy that nine of ten users have or exceed",
        each="Losses of the users",
        reported="the users (those of few reviews pooled)",
        trusted="The worst user of many is worst by chance, so the test figure is the tenth "
        "percentile of the accuracy over users, as WILDS has it. They are other users than in "
        "training, and those of few reviews are pooled until they have 20: with one review an "
        "accuracy is 0 or 1.",
        repeats="In the copy of 10,450 reviews many repeat one of the same user: 4,072 differ. No "
        'user is in two parts, but short texts such as "great" are.',
    ),
    "camelyon17": Told(
        "Camelyon17",
        "to see whether a patch of lymph node tissue contains a tumour",
        "30 of them, the slides of three hospitals",
        worst="worst slide",
        worst_meaning="accuracy of the slide that has the lowest",
        curve="Test accuracy of the worst slide",
        reported="the slides of another hospital",
        trusted="Test data come from a hospital that training has not seen. Its slides are large, "
        "so the accuracy of each means something; the split is the official one, and seeds differ "
        "in training alone.",
    ),
    "grouped-synthetic": Told(
        "generated vectors",
        "the class of a vector",
        "large ones, whose labels follow one rule, and small ones with another",
        trusted="The data are made up and small: these figures show that the code runs.",
    ),
}


def shown_names(names: Sequence[str]) -> list[str]:
    """Names of the values that `figures.shown` gives for these groups.

    >>> shown_names(["a", "b"]), shown_names(["a"] * 100)[:3]
    (['a', 'b'], ['0 %', '10 %', '20 %'])
    """
    return list(names if len(names) <= FEW else QUANTILES)


def entries(data: str) -> dict[str, tuple[str, ...]]:
    """Names of the entries of the lists of the rows; empty where the runs alone know them."""
    groups = shown = QUANTILES if data in TENTH else ()
    if data == "celeba":
        from ...data.celeba import WORDS  # pictures are not needed for their names

        groups, shown = (tuple(map(", ".join, product(*each))) for each in (WORDS, WORDS[2:]))
    return {"losses": groups, "test_reported": shown, "weights": groups}
