"""CelebA in its three layouts."""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from pathlib import Path

import pytest
import torch
from fcco_experiments import data
from fcco_experiments.data import celeba
from grouped_fixtures import FACE, Faces, image, put, stand_in
from torch.utils.data import DataLoader

faces = Faces()


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    monkeypatch.delenv("FCCO_DATA", raising=False)
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def official(monkeypatch, tmp_path) -> Path:
    monkeypatch.setattr(celeba, "COUNT", len(faces.names))
    for name in ("list_attr_celeba.txt", "list_eval_partition.txt"):
        content = faces.official(tmp_path / name) / name
        md5 = hashlib.md5(content.read_bytes()).hexdigest()
        monkeypatch.setitem(celeba.MD5, name, md5)
    return faces.official(tmp_path / "mine" / "celeba")


def number_of(sample) -> int:
    """Which image it is, by its colour."""
    assert sample.shape == (3, *FACE) and sample.dtype == torch.uint8
    red, green, _ = (round(value / 4) for value in sample.float().mean((1, 2)).tolist())
    return red + 64 * green


def check(loaded: data.GroupedData, numbers: list[int]) -> None:
    """Every row has the attributes that its image was made with."""
    assert (loaded.name, loaded.kind, loaded.summary) == ("celeba", "image", "worst")
    assert loaded.class_names == ("not blond", "blond") and len(loaded.samples) == len(numbers)
    words = [("not attractive", "attractive"), ("mouth closed", "mouth open"), ("woman", "man")]
    words.append(("not blond", "blond"))
    parts = loaded.cut(5)
    assert sorted(row for part in parts.values() for row in part.rows.tolist()) == list(
        range(len(numbers))
    )
    for part in parts.values():
        assert len(part.group_names) == 16 and len(part.reported_names) == 4
        for place, row in enumerate(part.rows.tolist()):
            number = number_of(loaded.samples[row])
            assert number == numbers[row]
            bits = [int(bit) for bit in f"{faces.groups[number]:04b}"]
            own = [pair[bit] for pair, bit in zip(words, bits, strict=True)]
            assert part.label[place] == bits[3]
            assert part.group_names[part.group[place]] == ", ".join(own)
            assert part.reported_names[part.reported[place]] == ", ".join(own[2:])


ALL = list(range(len(faces.names)))


@pytest.mark.parametrize("where", ["celeba", "."])
def test_official_layout(official, where):
    folder = official if where == "." else official.parent
    loaded = data.load("celeba", folder)
    check(loaded, ALL)
    assert loaded.facts["copy"] == "CelebA, official files"
    assert str(folder) not in str(loaded.facts), "facts may be published"
    parts = loaded.cut(0)
    for group, count in Counter(faces.groups).items():
        sizes = [int((part.group == group).sum()) for part in parts.values()]
        assert sizes == [count - 2, 1, 1]
    first, again, other = (loaded.cut(seed)["test"].rows for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_wilds_layout_and_archive_agree(official, monkeypatch, tmp_path):
    faces.wilds(tmp_path / "w")
    name = stand_in(monkeypatch, "celeba", faces.archive())
    put(tmp_path / "a", name, faces.archive(), compress=True)
    texts = data.load("celeba", official)
    for folder, copy in (
        (tmp_path / "w", "CelebA of WILDS"),
        (tmp_path / "w" / "celebA_v1.0", "CelebA of WILDS"),
        (tmp_path / "a", name),
    ):
        loaded = data.load("celeba", folder)
        assert loaded.facts["copy"] == copy
        check(loaded, ALL)
        for seed in (0, 3):
            for key, part in loaded.cut(seed).items():
                assert torch.equal(part.rows, texts.cut(seed)[key].rows)
        assert loaded.fingerprint != texts.fingerprint
    assert isinstance(loaded.samples, data.Vectors), "decoded once"
    assert isinstance(texts.samples, data.ImageFiles), "decoded when read"


def test_the_best_copy_of_the_first_place_is_taken(official, monkeypatch, tmp_path):
    name = stand_in(monkeypatch, "celeba", faces.archive())
    mine, named = official.parent, tmp_path / "named"
    monkeypatch.setenv("FCCO_DATA", str(named))
    put(named, name, faces.archive())
    faces.wilds(named)

    def copy(folder=None, **options) -> str:
        return data.load("celeba", folder, download=False, **options).facts["copy"]

    assert copy(mine) == "CelebA, official files"
    assert copy() == "CelebA of WILDS"
    assert copy(copy="subset") == copy(mine, copy="subset") == name
    put(tmp_path / "b", name, faces.archive())
    assert copy(tmp_path / "b") == name, "what the caller names comes first"
    assert copy(tmp_path / "b", copy="full") == "CelebA of WILDS"
    with pytest.raises(ValueError, match="copy"):
        copy(copy="half")


def test_checksums_and_counts(official, monkeypatch):
    first = data.load("celeba", official).fingerprint
    path = official / "list_eval_partition.txt"
    before = path.read_text()
    path.write_text(before + " ")
    with pytest.raises(data.WrongData, match=r"list_eval_partition.txt must have the md5 sum \w+"):
        data.load("celeba", official)
    assert data.load("celeba", official, verify=False).fingerprint == first
    path.unlink()  # it is not needed
    assert data.load("celeba", official).fingerprint == first
    path = official / "list_attr_celeba.txt"
    path.write_text(path.read_text().replace("Young \n", "Young\n"))
    with pytest.raises(data.WrongData, match=r"list_attr_celeba.txt must have the md5 sum"):
        data.load("celeba", official)
    monkeypatch.setattr(celeba, "COUNT", 202_599)
    monkeypatch.setitem(celeba.MD5, path.name, hashlib.md5(path.read_bytes()).hexdigest())
    with pytest.raises(data.WrongData, match=f"must have 202,599 images but has {len(ALL)}"):
        data.load("celeba", official)


def test_the_known_sums():
    """As torchvision has them."""
    assert celeba.MD5 == {
        "list_attr_celeba.txt": "75e246fa4810816ffd6ee81facbd244c",
        "list_eval_partition.txt": "d32c9cbf5e040fd4025c592c306e6668",
    }
    assert celeba.COUNT == 202_599


def test_gaps_in_the_image_folder(official):
    for name in faces.names[3:8]:
        (official / "img_align_celeba" / name).unlink()
    with pytest.raises(data.WrongData) as caught:
        data.load("celeba", official)
    assert f"5 of {len(ALL)} images are not in {official / 'img_align_celeba'}" in str(caught.value)
    assert "000004.jpg, 000005.jpg, 000006.jpg and 2 more" in str(caught.value)


@pytest.mark.parametrize(
    ("gap", "rest"),
    [("list_attr_celeba.txt", "img_align_celeba"), ("img_align_celeba", "list_attr_celeba.txt")],
)
def test_a_folder_without_a_part_is_refused(official, monkeypatch, tmp_path, gap, rest):
    """No other copy is taken in its stead."""
    (official / gap).rename(tmp_path / "moved")
    name = stand_in(monkeypatch, "celeba", faces.archive())
    put(official.parent, name, faces.archive())
    with pytest.raises(data.WrongData, match=f"celeba lacks {gap}\\. Complete"):
        data.load("celeba", official.parent)
    assert (official / rest).exists()
    assert data.load("celeba", official.parent, copy="subset").facts["copy"] == name


def spoil(text: str, kind: str) -> str:
    lines = text.split("\n")
    if kind == "count":
        lines[0] = "7"
    elif kind == "no count":
        lines[0] = "name"
    elif kind == "header":
        lines[1] = lines[1].replace("Blond_Hair", "Blonde_Hair")
    elif kind == "short":
        lines[4] = lines[4][:-3]
    elif kind == "value":
        lines[4] = lines[4].replace("1", "0")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("count", f"must have 7 images, as its first line says, but has {len(ALL)}"),
        ("no count", "its first line is no number"),
        ("header", "its second line lacks Blond_Hair"),
        ("short", "line 5 of list_attr_celeba.txt must have a name and 40 values but has 40 words"),
        ("value", "must hold -1 or 1 but has .*0.* for 000003"),
    ],
)
def test_broken_lists(official, kind, reason):
    text = spoil(faces.text(), kind).replace("000003.jpg", "000003")
    (official / "list_attr_celeba.txt").write_text(text)
    with pytest.raises(data.WrongData, match=reason):
        data.load("celeba", official, verify=False)


def test_broken_lists_of_wilds(tmp_path):
    folder = faces.wilds(tmp_path)
    path = folder / "list_attr_celeba.csv"
    text = path.read_text()
    with pytest.raises(data.WrongData, match="must have 202,599 images"):
        data.load("celeba", tmp_path)
    path.write_text(text.replace("Male", "Man"))
    with pytest.raises(data.WrongData, match=r"list_attr_celeba.csv lacks the columns Male"):
        data.load("celeba", tmp_path, verify=False)
    path.write_text(text.rstrip().rsplit(",", 1)[0])
    with pytest.raises(data.WrongData, match="must have 41 cells, as its header, but has 40"):
        data.load("celeba", tmp_path, verify=False)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(data.WrongData, match="is no text"):
        data.load("celeba", tmp_path, verify=False)


def test_broken_images_are_named(official):
    images = official / "img_align_celeba"
    (images / "000002.jpg").write_bytes(image(1)[:200])
    (images / "000003.jpg").write_bytes(image(1, (30, 20)))
    (images / "000004.jpg").write_bytes(b"")
    samples = data.load("celeba", official).samples
    assert number_of(samples[0]) == 0
    for row, reason in ((1, "cannot be decoded"), (2, "20 x 24, but has 20 x 30"), (3, "cannot")):
        with pytest.raises(data.WrongData, match=f"{faces.names[row]} .*{reason}"):
            samples[row]


def test_grey_images_become_rgb(official):
    from PIL import Image

    Image.new("L", (FACE[1], FACE[0]), 100).save(official / "img_align_celeba" / "000002.jpg")
    sample = data.load("celeba", official).samples[1]
    assert isinstance(sample, torch.Tensor) and sample.shape == (3, *FACE)
    assert (sample.float() - 100).abs().max() < 3


def test_limit(official, monkeypatch, tmp_path):
    loaded = data.load("celeba", official, limit=4)
    numbers = [number_of(sample) for sample in loaded.samples]  # pyright: ignore
    assert numbers == sorted(numbers)
    own = Counter(faces.groups[number] for number in numbers)
    assert own == {g: min(4, count) for g, count in Counter(faces.groups).items()}
    check(loaded, numbers)
    assert loaded.fingerprint != data.load("celeba", official).fingerprint
    # the archive's others are not decoded
    left_out, kept = faces.names[next(n for n in ALL if n not in numbers)], faces.names[numbers[0]]
    for spoilt, limit, works in ((left_out, 4, True), (left_out, 0, False), (kept, 4, False)):
        content = faces.archive(spoilt=spoilt)
        name = stand_in(monkeypatch, "celeba", content)
        folder = put(tmp_path / f"{spoilt}{limit}", name, content)
        if works:
            check(data.load("celeba", folder, limit=limit), numbers)
        else:
            with pytest.raises(data.WrongData, match=f"{spoilt} cannot be decoded"):
                data.load("celeba", folder, limit=limit)
    for limit in (-1, 1, 2):
        with pytest.raises(ValueError, match="limit"):
            data.load("celeba", official, limit=limit)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (faces.archive(without=("list_attr_celeba.txt",)), "lacks list_attr_celeba.txt"),
        (faces.archive(without=("000007.jpg", "000009.jpg")), "lacks 2 of .* such as 000007.jpg"),
        (b"no archive" * 100, "is no tar archive"),
    ],
)
def test_broken_archives(monkeypatch, tmp_path, content, reason):
    name = stand_in(monkeypatch, "celeba", content)
    with pytest.raises(data.WrongData, match=reason):
        data.load("celeba", put(tmp_path / "a", name, content), download=False)


def test_an_archive_with_another_checksum(monkeypatch, tmp_path):
    folder = put(tmp_path / "a", "celeba_first10000_89x109.tar", faces.archive())
    with pytest.raises(data.MissingData, match="checksum mismatch"):
        data.load("celeba", folder, download=False)
    check(data.load("celeba", folder, download=False, verify=False), ALL)


def test_samples_travel_to_workers(official):
    loaded = pickle.loads(pickle.dumps(data.load("celeba", official)))
    check(loaded, ALL)
    samples: torch.utils.data.Dataset = loaded.samples
    (batch,) = DataLoader(samples, batch_size=len(ALL))
    assert batch.shape == (len(ALL), 3, *FACE) and number_of(batch[9]) == 9


def test_attributes_by_hand():
    text = (
        "2\nBlond_Hair Young Male Attractive Mouth_Slightly_Open \n"
        "000001.jpg  1 -1 -1  1 -1\n"
        "000002.jpg -1  1  1 -1  1\n"
    )
    expected = {"000001.jpg": (1, 0, 0, 1), "000002.jpg": (0, 1, 1, 0)}
    assert celeba.read_attributes(text.encode()) == expected
    assert celeba.read_attributes(text.replace("\n", "\r\n").encode()) == expected
