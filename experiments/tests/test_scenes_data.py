"""Weather photos, as an archive and in folders, and the generated scenes."""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from fcco_experiments import data
from fcco_experiments.data.images import decode, distinct_rows
from grouped_fixtures import put, stand_in
from PIL import Image
from scenes_fixtures import FOLDERS, MERGED, photos, picture, saved, tar, unpack

USUAL = ("clear", "cloudy", "rainy", "snowy", "foggy")


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    monkeypatch.delenv("FCCO_DATA", raising=False)
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))


def archive(monkeypatch, folder, members, compress=False):
    content = tar(members)
    return put(folder, stand_in(monkeypatch, "weather", content), content, compress)


def classes_of(loaded: data.GroupedData, members: dict[str, bytes]) -> list[str]:
    """The class of each row, known again by its pixels; the parts must agree with it."""
    pixels = {decode(own, name).numpy().tobytes(): name for name, own in members.items()}
    found = []
    for row in range(len(loaded.samples)):
        sample = loaded.samples[row]
        assert isinstance(sample, torch.Tensor) and sample.shape == (3, 128, 128)
        found.append(MERGED[pixels[sample.numpy().tobytes()].split("/")[-2]])
    rows = []
    for part in loaded.cut(3).values():
        assert torch.equal(part.label, part.group) and part.group_names == loaded.class_names
        assert [loaded.class_names[own] for own in part.label] == [found[row] for row in part.rows]
        rows += part.rows.tolist()
    assert sorted(rows) == list(range(len(found)))
    return found


@pytest.mark.parametrize("compress", [False, True])
def test_weather_archive(monkeypatch, tmp_path, compress):
    members = photos()
    folder = archive(monkeypatch, tmp_path / "mine", members, compress)
    loaded = data.load("weather", folder)
    assert (loaded.name, loaded.kind, loaded.class_names) == ("weather", "image", USUAL)
    wanted = Counter()
    for name, count in FOLDERS.items():
        wanted[MERGED[name]] += count
    assert Counter(classes_of(loaded, members)) == {name: wanted[name] for name in USUAL}
    sizes = {name: part.label.bincount().tolist() for name, part in loaded.cut(0).items()}
    assert sizes["test"] == sizes["validation"] == [1] * 5
    assert loaded.facts["images"] == str(sum(wanted[name] for name in USUAL)) == "45"
    assert loaded.facts["repeats left out"] == "0" and str(tmp_path) not in str(loaded.facts)
    first, again, other = (loaded.cut(seed)["train"].rows.tolist() for seed in (0, 0, 1))
    assert first == again != other


def test_order_of_classes_is_the_callers(monkeypatch, tmp_path):
    members = photos()
    folder = archive(monkeypatch, tmp_path / "mine", members)
    classes = ["sunrise", "foggy", "stormy"]
    loaded = data.load("weather", folder, classes=classes)
    assert loaded.class_names == tuple(classes)
    assert Counter(classes_of(loaded, members)) == {"foggy": 11, "stormy": 4, "sunrise": 3}
    few = data.load("weather", folder, classes=classes, limit=3)
    assert Counter(classes_of(few, members)) == {"foggy": 3, "stormy": 3, "sunrise": 3}
    own = data.load("weather", folder, classes=("sunny", "rain"))
    assert len(own.samples) == FOLDERS["sunny"] + FOLDERS["rain"], "folders by their own names"
    options: list[dict[str, Any]] = [{}, {"classes": classes}, {"limit": 3}, {"distinct": False}]
    assert len({data.load("weather", folder, **each).fingerprint for each in options}) == 4


def test_repeats_are_left_out(monkeypatch, tmp_path):
    """An equal photo, one that was scaled and compressed again, and a darker one."""
    members = photos()
    name = next(name for name in members if "/fog/" in name)
    members["weather/fog_driving/zz.jpg"] = members[name]
    members["weather/rain/zz.jpg"] = members[name]
    with Image.open(io.BytesIO(members[name])) as original:
        again = original.resize((96, 96)).resize((128, 128))
        members["weather/fog/zz.jpg"] = saved(again, "JPEG", quality=40)
        darker = Image.fromarray((np.asarray(original) * 0.8).astype(np.uint8))
        members["weather/fog/zy.jpg"] = saved(darker)
    folder = archive(monkeypatch, tmp_path / "mine", members)
    every = data.load("weather", folder, distinct=False)
    equal = data.load("weather", folder, tolerance=0)
    loaded = data.load("weather", folder)
    assert [len(each.samples) for each in (every, equal, loaded)] == [49, 47, 46]
    assert loaded.facts["repeats left out"] == "3"
    assert len({each.fingerprint for each in (every, equal, loaded)}) == 3
    # of the copies in fog, fog_driving and rain the first by name stays: the one in fog
    assert data.load("weather", folder).cut(0)["train"].group_names == USUAL
    counts = sum(part.label.bincount(minlength=5) for part in loaded.cut(0).values())
    assert isinstance(counts, torch.Tensor) and counts.tolist() == [11, 9, 7, 7, 12]
    nothing = data.load("weather", folder, classes=("rainy", "snowy"))
    assert len(nothing.samples) == 15, "photos of classes that are left out drop no others"


def test_distinct_rows_against_a_loop(monkeypatch):
    """Also where a is near b and b near c: b goes, so c stays. Blocks do not matter."""
    from fcco_experiments.data import images as repeats

    random = np.random.default_rng(0)
    base = random.integers(60, 180, size=(4, 3, 32, 32))
    shift = random.integers(-8, 9, size=40)
    images = (base[random.integers(0, 4, size=40)] + shift[:, None, None, None]).astype(np.uint8)
    small = images.astype(float).mean(1).reshape(40, 16, 2, 16, 2).mean((2, 4)).reshape(40, 256)
    for tolerance in (0.5, 2.2, 4.5):
        wanted: list[int] = []
        for row in range(40):
            near = (np.sqrt(((small[row] - small[own]) ** 2).mean()) for own in wanted)
            wanted += [] if any(distance <= tolerance for distance in near) else [row]
        for block in (3, 1024):
            monkeypatch.setattr(repeats, "BLOCK", block)
            found = distinct_rows(data.Vectors(torch.from_numpy(images)), tolerance).tolist()
            assert found == wanted and 4 <= len(found) < 40


def test_own_photos_in_folders(tmp_path):
    """Any size and format; wide and high ones lose their edges."""
    stripes = np.zeros((60, 180, 3), np.uint8)
    stripes[:, :60, 0], stripes[:, 60:120, 1], stripes[:, 120:, 2] = 250, 250, 250
    members = {f"weather/clear/{n}.png": saved(picture(n, (64 + n, 90))) for n in range(4)}
    members |= {f"weather/hail/{n}.jpeg": saved(picture(9 + n), "JPEG") for n in range(5)}
    members["weather/hail/wide.PNG"] = saved(Image.fromarray(stripes))
    turned = Image.fromarray(np.rot90(stripes))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: turn the picture by 90 degrees to the right
    half = np.zeros((100, 100, 3), np.uint8)
    half[:50] = 250
    members["weather/clear/turned.png"] = saved(Image.fromarray(half), exif=exif)
    members["weather/clear/high.png"] = saved(turned)
    members["weather/hail/note.txt"] = b"no photo"
    members["weather/hail/._1.jpeg"] = b"what macOS puts beside a photo"
    members["weather/hail/album.jpeg/1.txt"] = b"a folder"
    root = unpack(members, tmp_path / "mine")
    for folder in (root, root / "weather"):
        loaded = data.load("weather", folder, classes=("clear", "hail"), distinct=False)
        assert len(loaded.samples) == 12 and isinstance(loaded.samples, data.ImageFiles)
        assert loaded.facts["copy"] == "weather photos in folders"
        names = loaded.samples.names
        for name in ("clear/high.png", "hail/wide.PNG"):
            sample = loaded.samples[names.index(name)]
            assert sample.shape == (3, 128, 128)
            assert torch.equal(sample[1, 3:-3, 3:-3], torch.full((122, 122), 250).byte())
        upright = loaded.samples[names.index("clear/turned.png")].float().mean((0, 1))
        assert upright[:60].max() < 10 and upright[-60:].min() > 240, "its top went to the right"
    once = data.load("weather", root, classes=("clear", "hail"))
    assert len(once.samples) == 11, "wide and high show the same field"
    (root / "weather/clear/0.png").write_bytes(saved(picture(77)))
    other = data.load("weather", root, classes=("clear", "hail"))
    assert other.fingerprint != once.fingerprint
    with pytest.raises(
        data.WrongData, match=r"has no photo of foggy, sleet; its folders are clear"
    ):
        data.load("weather", root, classes=("clear", "foggy", "sleet"))
    (root / "weather/hail/0.jpeg").write_bytes(b"no image")
    with pytest.raises(data.WrongData, match=r"0\.jpeg cannot be decoded"):
        data.load("weather", root, classes=("clear", "hail"))


def test_broken_weather(monkeypatch, tmp_path):
    members = photos()
    name = stand_in(monkeypatch, "weather", tar(members))
    other = {**members, "weather/rain/more.jpg": saved(picture(500), "JPEG")}
    folder = put(tmp_path / "mine", name, tar(other))
    with pytest.raises(data.MissingData, match="weather") as caught:
        data.load("weather", folder)
    assert "checksum mismatch" in str(caught.value) or "too long" in str(caught.value)
    assert "your own photos" in str(caught.value), "it says what else will do"
    assert len(data.load("weather", folder, verify=False).samples) == 46
    put(folder, name, b"no archive" * 100)
    with pytest.raises(data.WrongData, match="is no tar archive"):
        data.load("weather", folder, verify=False)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        link = tarfile.TarInfo("weather/fog/link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "nowhere.jpg"
        archive.addfile(link)
    put(folder, name, stream.getvalue())
    with pytest.raises(data.WrongData, match=r"is no tar archive.*nowhere\.jpg"):
        data.load("weather", folder, verify=False)
    put(folder, name, tar({**members, "weather/fog/bad.jpg": b"no image"}))
    with pytest.raises(data.WrongData, match=r"weather/fog/bad\.jpg cannot be decoded"):
        data.load("weather", folder, verify=False)
    put(folder, name, tar({**members, "weather/fog/small.png": saved(picture(1, (64, 64)))}))
    with pytest.raises(data.WrongData, match="must have the size of the others"):
        data.load("weather", folder, verify=False)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"classes": ("clear",)}, "at least two different names"),
        ({"classes": "clear"}, "at least two different names"),
        ({"classes": ("clear", "foggy", "clear")}, "at least two different names"),
        ({"classes": ("clear", "shine")}, "the folder shine cannot be in both clear and shine"),
        ({"limit": 2}, "must be 0 .* or at least 3"),
        ({"tolerance": -1.0}, "must be at least 0"),
    ],
)
def test_wrong_options(options, reason):
    with pytest.raises(ValueError, match=reason):
        data.read_weather(**options)


def test_generated_scenes():
    loaded = data.load("scenes-synthetic", seed=1)
    assert (loaded.kind, len(loaded.samples), loaded.class_names) == ("vector", 2000, USUAL)
    parts = loaded.cut(0)
    sizes = parts["train"].label.bincount().tolist()
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 2 * sizes[-1] > 100
    assert isinstance(loaded.samples, data.Vectors)
    table, label = loaded.samples.values, parts["train"].label
    means = torch.stack([table[parts["train"].rows][label == k].mean(0) for k in range(5)])
    apart = torch.cdist(means, means)
    # expected: sqrt(18) = 4.2 between old classes; new: sqrt(6.75) = 2.6 to two, sqrt(15.75) = 4.0
    assert apart[-1, 2:4].max() < 3.0 < 3.6 < apart[-1, :2].min()
    assert (apart[:4, :4] + 9 * torch.eye(4)).min() > 3.8
    again, other = (data.load("scenes-synthetic", seed=seed) for seed in (1, 2))
    assert again.fingerprint == loaded.fingerprint != other.fingerprint
    small = data.load("scenes-synthetic", samples=60, classes=("a", "b"), dim=2, limit=12)
    assert len(small.samples) == 24 and small.cut(0)["test"].group_names == ("a", "b")
    wrong: list[dict[str, Any]] = [{"samples": 49}, {"dim": 4}, {"classes": ("a",)}]
    for options in wrong:
        with pytest.raises(ValueError, match="scenes_synthetic"):
            data.load("scenes-synthetic", **options)


def test_learning_the_last_scene_alone_forgets_its_neighbours():
    loaded = data.load("scenes-synthetic")
    assert isinstance(loaded.samples, data.Vectors)
    table = loaded.samples.values
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 5)
    train, test = loaded.cut(0)["train"], loaded.cut(0)["test"]

    def fit(chosen: torch.Tensor, steps: int) -> list[float]:
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        features, label = table[train.rows][chosen], train.label[chosen]
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(features), label).backward()
            optimizer.step()
        right = model(table[test.rows]).argmax(1) == test.label
        return [float(right[test.label == k].float().mean()) for k in range(5)]

    before = fit(train.label < 4, 300)
    after = fit(train.label == 4, 60)
    assert min(before[:4]) > 0.8 and before[4] == 0 and after[4] > 0.8
    lost = [old - new for old, new in zip(before, after, strict=True)]
    assert min(lost[2:4]) > 0.2 and sum(lost[2:4]) > 2 * sum(lost[:2])
