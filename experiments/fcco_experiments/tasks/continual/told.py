"""What a reader must know about each data set, and numbers as they are said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["TOLD", "Told", "listed", "points", "share_of"]


def listed(names: Sequence[str]) -> str:
    """Names in a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def points(share: float) -> str:
    """A difference of accuracies in percentage points.

    >>> points(0.0123), points(0.01), points(-0.5), points(-0.0001)
    ('1.2 points', '1 point', '-50 points', '0 points')
    """
    text = f"{100 * share:.1f}".removesuffix(".0")
    text = "0" if text == "-0" else text
    return f"{text} point{'' if text in ('1', '-1') else 's'}"


def share_of(value: float) -> str:
    """A share in percent.

    >>> share_of(0.254)
    '25.4 %'
    """
    return f"{100 * value:.1f} %"


@dataclass(frozen=True)
class Told:
    """A data set in words.

    Args:
        title: its name.
        images: what its samples are.
        trusted: which figures to trust, and why.
    """

    title: str
    images: str = "images"
    trusted: str = (
        "Test accuracies are those of images that no training has seen; look at how many of each "
        "class there are."
    )


TOLD = {
    "weather": Told(
        "photos of weather",
        "photos of weather from the web",
        "The photos come from three collections and were scaled to 128 x 128; those that repeat "
        "another one were left out, so no test photo is a copy of a training photo. Still a "
        "collection may betray the class by more than its weather (much of the fog was taken "
        "from a car), which makes the target easier than it should be, for all methods alike. "
        "Snow is the smallest class, some forty test photos: one of them is more than two "
        "points. Every seed has its own split, so look at means over seeds.",
    ),
    "bdd100k-subset": Told(
        "BDD100K, 967 frames",
        "frames of drives (a part of the val images of BDD100K, at 256 x 144)",
        "The data are few: of the rarest class, partly cloudy, some 35 frames are training and 12 "
        "test data, so that one test frame is eight points. Whether a class was kept is therefore "
        "judged on training data, where the constraints are; of the test figures trust means over "
        "seeds, each of which has its own split. The labels are those of BDD100K, and overcast, "
        "partly cloudy and clear are not always told apart in them, least of all at night.",
    ),
    "bdd100k": Told(
        "BDD100K",
        "frames of drives (BDD100K)",
        "Test data are the official val images; seeds differ in what is held out for validation "
        "and in training. Of foggy frames there are few, in the val images only 13: one of them "
        "is eight points.",
    ),
    "scenes-synthetic": Told(
        "generated vectors",
        "vectors that stand for images",
        "The data are made up and small: these figures show that the code runs.",
    ),
}
