"""BDD100K: frames of drives, with the weather as class and group."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .archives import members
from .cuts import OfficialTest, WithinGroups, check_classes, check_limit, kept
from .download import Progress
from .files import DataFile, Form, checksum
from .folders import Copy, Layout, WrongData, digest, few, locate, unchecked
from .frames import RELEASES, SPLITS, UNDEFINED, Frame, read_file, read_labels, read_lists
from .grouped import GroupedData
from .images import decoded, image_files

__all__ = ["COPIES", "SUBSET", "read_bdd100k", "read_bdd100k_subset"]

IMAGES = "images/100k"
COPIES = (
    Layout(
        "BDD100K, official files",
        "bdd100k",
        (IMAGES, *(f"{IMAGES}/{split}" for split in SPLITS)),
        loose=True,
        how="the official files, from https://bdd-data.berkeley.edu: the folder bdd100k with "
        "images/100k/{train,val} and labels/det_20/det_{train,val}.json (2020), "
        "labels/bdd100k_labels_images_{train,val}.json (2018) or labels/100k/{train,val}",
    ),
)
SUBSET = (
    Copy(
        DataFile(
            Form(
                "bdd100k_val_subset_256x144.tar",
                "8654538e0b399529f17416ce120bdcc9fb54a0e924c775d50b400d9729557e36",
                10_373_120,
            )
        ),
        how="bdd100k_val_subset_256x144.tar: 967 frames of the official val images at 256 x 144 "
        "with their labels in det_val.json, for those who have it",
    ),
)


def read_bdd100k(
    folder: str | os.PathLike[str] | None = None,
    *,
    classes: Sequence[str] = ("clear", "overcast", "snowy", "rainy", "partly cloudy", "foggy"),
    lists: Sequence[str | os.PathLike[str]] = (),
    download: bool = True,
    progress: Progress | None = None,
    limit: int = 0,
    verify: bool = True,
    copies: Sequence[Layout | Copy] = COPIES,
) -> GroupedData:
    """BDD100K: what is the weather, from the official images and label files.

    The test data are the official val images; a tenth of the train images of each class, by the
    seed, is to validate on. Frames without weather, or whose weather is `undefined`, are left out.

    Args:
        folder: where to look first.
        classes: kinds of weather in the order of their labels; frames of others are left out.
        lists: csv files with the columns path (inside `images/100k`) and weather, to be read
            instead of the official labels.
        download: has no effect, as a registration is needed.
        progress: has no effect.
        limit: frames of each class that are kept, of train and of val each; 0 keeps all.
        verify: refuse label files that name images which are not there; otherwise those frames are
            left out and counted.
        copies: what to look for; for tests.

    Raises:
        MissingData: when the folder is not found.
        WrongData: when it is broken, has gaps, or lacks a class.

    References:
        Yu et al. (2020). BDD100K: a diverse driving dataset for heterogeneous multitask learning.
        CVPR.
    """
    names = check_classes("read_bdd100k", classes)
    check_limit("read_bdd100k", limit)
    layout, found = locate("bdd100k", copies, folder, download=False)
    own = Path(found.detail)
    release, frames = ("lists", read_lists(lists)) if lists else read_labels(own)
    present = {f"{split}/{name}" for split in SPLITS for name in os.listdir(own / IMAGES / split)}
    chosen, facts = _chosen("bdd100k", frames, names, present, verify)
    group = _classes(chosen, names)
    test = torch.tensor([frame.path.startswith("val/") for frame in chosen])
    for split, rows in (("train", ~test), ("val", test)):
        _check_occupied("bdd100k", names, group[rows], f"the {split} images in {own}")
    rows = kept(2 * group + test, limit)
    chosen, group, test = [chosen[row] for row in rows.tolist()], group[rows], test[rows]
    samples = image_files(own / IMAGES, [frame.path for frame in chosen])
    told = (" ".join(frame) for frame in chosen)
    return GroupedData(
        name="bdd100k",
        kind="image",
        samples=samples,
        class_names=names,
        cut=OfficialTest(group, group, names, test),
        # With the size: many scale the images down where they lie.
        fingerprint=digest("bdd100k", *names, limit, *samples.size, *told),
        facts={"copy": layout.name, "place": found.place, "labels": release, **facts}
        | _summary(chosen),
    )


def read_bdd100k_subset(
    folder: str | os.PathLike[str] | None = None,
    *,
    classes: Sequence[str] = ("clear", "snowy", "rainy", "partly cloudy", "overcast"),
    download: bool = True,
    progress: Progress | None = None,
    limit: int = 0,
    verify: bool = True,
    copies: Sequence[Layout | Copy] = SUBSET,
) -> GroupedData:
    """967 val frames of BDD100K at 256 x 144: what is the weather. 841 have one of the classes.

    They come in one archive with the official layout. Each class is cut 8:1:1 by the seed. Only
    five of the frames are foggy.

    Args:
        folder: where to look first.
        classes: kinds of weather in the order of their labels; frames of others are left out.
        download: has no effect, as no place on the network has the archive.
        progress: has no effect.
        limit: frames of each class that are kept; 0 keeps all.
        verify: take the archive with its checksum only, and refuse one that lacks images.
        copies: what to look for; for tests.

    Raises:
        MissingData: when the archive is not found.
        WrongData: when it is broken, has gaps, or lacks a class.

    References:
        Yu et al. (2020). BDD100K: a diverse driving dataset for heterogeneous multitask learning.
        CVPR.
    """
    names = check_classes("read_bdd100k_subset", classes)
    check_limit("read_bdd100k_subset", limit)
    wanted = copies if verify else unchecked(copies)
    copy, found = locate("bdd100k-subset", wanted, folder, download=False)
    assert found.content is not None
    contents = members("bdd100k-subset", found)
    root, labels = _labels_in(contents, found.detail)
    stream = io.TextIOWrapper(io.BytesIO(contents[labels]), encoding="utf-8-sig")
    frames = read_file(labels, stream, "val")
    start = f"{root}{IMAGES}/"
    present = {path.removeprefix(start) for path in contents if path.startswith(start)}
    chosen, facts = _chosen("bdd100k-subset", frames, names, present, verify)
    group = _classes(chosen, names)
    _check_occupied("bdd100k-subset", names, group, found.detail)
    rows = kept(group, limit)
    chosen, group = [chosen[row] for row in rows.tolist()], group[rows]
    return GroupedData(
        name="bdd100k-subset",
        kind="image",
        samples=decoded(contents, [start + frame.path for frame in chosen]),
        class_names=names,
        cut=WithinGroups(group, group, names),
        fingerprint=digest("bdd100k-subset", checksum(found.content), *names, limit),
        facts={"copy": copy.name, "place": found.place, **facts} | _summary(chosen),
    )


def _labels_in(contents: dict[str, bytes], where: str) -> tuple[str, str]:
    """The folder of all files in an archive, and its label file."""
    for pattern in RELEASES.values():
        own = pattern.format("val")
        for path in contents:
            if path.endswith(own):
                return path.removesuffix(own), path
    raise WrongData(f"`bdd100k-subset`: {where} lacks {RELEASES['labels of 2020'].format('val')}.")


def _chosen(
    data: str, frames: Sequence[Frame], classes: Sequence[str], present: set[str], verify: bool
) -> tuple[list[Frame], dict[str, str]]:
    """Frames of the classes that have an image, and how many have not or are of no class."""
    wanted = [frame for frame in frames if frame.weather in classes]
    gaps = [frame.path for frame in wanted if frame.path not in present]
    if gaps and verify:
        raise WrongData(
            f"`{data}` is incomplete: {len(gaps):,} of {len(wanted):,} images that the labels name "
            f"are not in {IMAGES}: {few(gaps)} (verify=False leaves them out)."
        )
    undefined = sum(frame.weather == UNDEFINED for frame in frames)
    facts = {
        "frames without weather": f"{undefined:,}",
        "frames of other weather": f"{len(frames) - undefined - len(wanted):,}",
        "frames without image": f"{len(gaps):,}",
    }
    lost = set(gaps)
    return [frame for frame in wanted if frame.path not in lost], facts


def _classes(frames: Sequence[Frame], names: Sequence[str]) -> Tensor:
    return torch.tensor([names.index(frame.weather) for frame in frames], dtype=torch.int64)


def _check_occupied(data: str, names: Sequence[str], group: Tensor, where: str) -> None:
    present = set(group.tolist())
    empty = [name for index, name in enumerate(names) if index not in present]
    if empty:
        raise WrongData(f"`{data}`: no frame in {where} has the weather {' or '.join(empty)}.")


def _summary(frames: Sequence[Frame]) -> dict[str, str]:
    """How many there are, by time of day and by scene."""

    def counted(words: Sequence[str]) -> str:
        return ", ".join(f"{word} {count:,}" for word, count in Counter(words).most_common())

    return {
        "images": f"{len(frames):,}",
        "time of day": counted([frame.timeofday for frame in frames]),
        "scene": counted([frame.scene for frame in frames]),
    }
