"""The real files: `FCCO_DATA=... pytest -m data`."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from fcco_experiments import data
from fcco_experiments.data.bdd100k import IMAGES
from PIL import Image
from scenes_fixtures import unpack

pytestmark = pytest.mark.data

# Counted by a second program, from the manifests.
VAL = {
    "clear": 5346, "overcast": 1239, "undefined": 1157, "snowy": 769, "rainy": 738,
    "partly cloudy": 738, "foggy": 13,
}  # fmt: skip
USUAL = ("clear", "snowy", "rainy", "partly cloudy", "overcast")


@pytest.fixture(autouse=True)
def only_the_named_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))


def folder() -> Path:
    return Path(os.environ["FCCO_DATA"])


def sizes(loaded: data.GroupedData) -> dict[str, int]:
    """Of the classes, over all parts."""
    counts: Counter[str] = Counter()
    for part in loaded.cut(0).values():
        assert part.group_names == loaded.class_names
        counts.update(loaded.class_names[label] for label in part.label.tolist())
    return dict(counts)


def test_weather():
    every = data.load("weather", download=False, distinct=False)
    assert isinstance(every.samples, data.Vectors)
    assert every.samples.values.shape == (2050, 3, 128, 128)
    counts = {"clear": 452, "cloudy": 500, "rainy": 414, "snowy": 200, "foggy": 484}
    assert sizes(every) == counts
    loaded = data.load("weather", download=False)
    assert sizes(loaded) == {"clear": 427, "cloudy": 460, "rainy": 391, "snowy": 200, "foggy": 455}
    equal = data.load("weather", download=False, tolerance=0)
    assert len(equal.samples) == 2050 - 35
    parts = loaded.cut(0)
    assert [len(parts[name]) for name in parts] == [1545, 194, 194]
    blue = loaded.samples.values[parts["train"].rows].float().mean((2, 3))  # type: ignore[attr-defined]
    clear = blue[parts["train"].label == 0].mean(0)
    assert clear[2] > clear[0], "a clear sky is blue, and the channels are in the order RGB"


def test_all_classes_of_weather():
    classes = ("clear", "cloudy", "rainy", "snowy", "foggy", "stormy", "sunrise")
    every = data.load("weather", download=False, classes=classes, distinct=False)
    assert len(every.samples) == 2660 and sizes(every)["stormy"] == 253
    equal = data.load("weather", download=False, classes=classes, tolerance=0)
    loaded = data.load("weather", download=False, classes=classes)
    assert len(equal.samples) == 2660 - 85 and len(loaded.samples) == 2660 - 190


def test_no_weather_photo_has_a_copy_in_another_class_or_near_the_limit():
    """By the bytes and the brightness of the pictures in the archive, with another program."""
    names, small = [], []
    with tarfile.open(folder() / "weather_photos_128.tar.gz") as archive:
        for member in archive:
            stream = archive.extractfile(member)
            if stream is not None:
                with Image.open(io.BytesIO(stream.read())) as image:
                    pixels = np.asarray(image, dtype=float).mean(2)
                small.append(pixels.reshape(16, 8, 16, 8).mean((1, 3)).ravel())
                names.append(member.name.split("/")[1])
    table = torch.tensor(np.array(small))
    apart = torch.cdist(table, table, compute_mode="donot_use_mm_for_euclid_dist") / 16
    pairs = torch.triu_indices(len(names), len(names), 1)
    apart = apart[pairs[0], pairs[1]]
    assert not ((apart > 3.3) & (apart < 4.6)).any(), "a gap around the usual tolerance of 4"
    merged = {"sunny": "shine", "cloudy": "clouds", "rainy": "rain", "fog_driving": "fog"}
    classes = [merged.get(name, name) for name in names]
    for place in torch.nonzero(apart < 4).squeeze(1).tolist():
        first, second = pairs[:, place].tolist()
        assert classes[first] == classes[second]


def test_bdd100k_subset():
    loaded = data.load("bdd100k-subset", download=False)
    assert isinstance(loaded.samples, data.Vectors) and loaded.class_names == USUAL
    assert loaded.samples.values.shape == (841, 3, 144, 256)
    counts = {"clear": 485, "snowy": 94, "rainy": 75, "partly cloudy": 58, "overcast": 129}
    assert sizes(loaded) == counts
    assert loaded.facts["frames without weather"] == "121"
    assert loaded.facts["frames of other weather"] == "5"
    assert loaded.facts["time of day"] == "daytime 422, night 344, dawn/dusk 75"
    assert [len(part) for part in loaded.cut(0).values()] == [673, 84, 84]
    foggy = data.load("bdd100k-subset", download=False, classes=(*USUAL, "foggy"))
    assert sizes(foggy)["foggy"] == 5


def test_bdd100k_with_the_attributes_of_all_val_frames(tmp_path):
    """Label files made from the attributes of the 10,000 val frames, as official ones."""
    with gzip.open(folder() / "bdd100k_val_attributes_10000.csv.gz", "rt") as lines:
        rows = list(csv.DictReader(lines))
    keys = ("weather", "timeofday", "scene")
    records = [{"name": row["name"], "attributes": {key: row[key] for key in keys}} for row in rows]
    assert Counter(row["weather"] for row in rows) == VAL
    root = tmp_path / "bdd100k"
    content = json.dumps(records).encode()
    unpack({f"labels/det_20/det_{split}.json": content for split in ("train", "val")}, root)
    for split in ("train", "val"):
        (root / IMAGES / split).mkdir(parents=True)
    with tarfile.open(folder() / "bdd100k_val_subset_256x144.tar.gz") as archive:
        for member in archive:
            stream = archive.extractfile(member)
            if stream is not None and member.name.endswith(".jpg"):
                name = member.name.rpartition("/")[2]
                (root / IMAGES / "val" / name).write_bytes(stream.read())
                (root / IMAGES / "train" / name).symlink_to(root / IMAGES / "val" / name)
    with pytest.raises(data.WrongData, match="15,994 of 17,686 images"):
        data.load("bdd100k", tmp_path, download=False)
    loaded = data.load("bdd100k", tmp_path, download=False, verify=False)
    assert loaded.facts["frames without weather"] == f"{2 * VAL['undefined']:,}"
    assert loaded.facts["frames without image"] == "15,994"
    test = loaded.cut(0)["test"]
    counts = dict(zip(test.group_names, test.label.bincount().tolist(), strict=True))
    wanted = {"clear": 485, "overcast": 129, "snowy": 94, "rainy": 75}
    assert counts == wanted | {"partly cloudy": 58, "foggy": 5}
