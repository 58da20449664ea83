"""Finding folders, downloads through `wilds`, and the commands `fcco data` for what has copies."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
from data_fixtures import generated
from fcco_experiments import data
from fcco_experiments.cli import data as commands
from fcco_experiments.data.sources import digest, few
from grouped_fixtures import Faces, Patches, Reviews, opinions, opinions_content, put, stand_in
from typer.testing import CliRunner, Result

patches = Patches()


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    monkeypatch.delenv("FCCO_DATA", raising=False)
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "wilds", None)  # not installed


def run(*arguments: object) -> Result:
    return CliRunner().invoke(commands.data_app, [str(argument) for argument in arguments])


def rows(result: Result) -> list[dict[str, str]]:
    return json.loads(result.stdout.splitlines()[-1])


class Wilds(types.ModuleType):
    """Stands for the package: writes a folder and notes how it was asked."""

    def __init__(self, write) -> None:
        super().__init__("wilds")
        self.write, self.calls = write, []

    def get_dataset(self, dataset, version=None, unlabeled=False, **options):
        print("Downloading dataset to somewhere...")
        self.calls.append((dataset, version, unlabeled, options))
        self.write(Path(options["root_dir"]))


@pytest.fixture
def package(monkeypatch) -> Wilds:
    stub = Wilds(patches.write)
    monkeypatch.setitem(sys.modules, "wilds", stub)
    return stub


def test_download_through_wilds(package, tmp_path, capsys):
    told = []
    for _ in range(2):
        loaded = data.load(
            "camelyon17", expected=patches.counts, progress=lambda *args: told.append(args)
        )
        assert len(loaded.samples) == 52
    root = str(tmp_path / "cache" / "data" / "wilds")
    assert package.calls == [("camelyon17", "1.0", False, {"download": True, "root_dir": root})], (
        "the second time it is in the cache"
    )
    assert told == [("camelyon17_v1.0 through wilds", 0, None)]
    out, err = capsys.readouterr()
    assert out == "" and "Downloading" in err, "the standard output may be JSON"


@pytest.mark.parametrize(
    ("name", "write", "asked"),
    [
        ("celeba", Faces().wilds, ("celebA", "1.0")),
        (
            "amazon",
            lambda root: Reviews({"A": 20, "B": 20, "C": 20}).wilds(root, {"A": 0, "B": 1, "C": 3}),
            ("amazon", "2.1"),
        ),
    ],
)
def test_other_sets_through_wilds(package, name, write, asked):
    package.write = write
    assert data.load_grouped(name, verify=False).name == name
    assert [call[:2] for call in package.calls] == [asked]


def test_download_false_asks_nothing(package):
    with pytest.raises(data.MissingData, match="wilds: not asked, because of download=False"):
        data.load("camelyon17", download=False)
    assert package.calls == []


def test_a_folder_that_is_there_is_not_downloaded(package, tmp_path):
    patches.write(tmp_path / "mine")
    data.load("camelyon17", tmp_path / "mine", expected=patches.counts)
    (tmp_path / "mine" / "camelyon17_v1.0" / "metadata.csv").unlink()
    with pytest.raises(data.WrongData, match=r"lacks metadata\.csv"):
        data.load("camelyon17", tmp_path / "mine")
    assert package.calls == []


def test_a_broken_download_is_mended(package, tmp_path):
    half = tmp_path / "cache" / "data" / "wilds" / "camelyon17_v1.0"
    half.mkdir(parents=True)
    (half / "archive.tar.gz").write_bytes(b"half")
    with pytest.raises(data.MissingData, match=r"lacks metadata.csv, RELEASE_v1.0.txt, patches"):
        data.load("camelyon17", download=False)

    def write(root: Path) -> None:
        (half / "archive.tar.gz").unlink()
        half.rmdir()
        patches.write(root)

    package.write = write
    assert data.load("camelyon17", expected=patches.counts).name == "camelyon17"


def test_downloads_that_fail(package):
    def fail(root: Path) -> None:
        raise FileNotFoundError("no metadata.csv")

    package.write = fail
    with pytest.raises(data.MissingData, match=r"get_dataset\('camelyon17'\) failed .*no metadata"):
        data.load("camelyon17")
    package.write = lambda root: None
    with pytest.raises(data.MissingData, match=r"wilds: .* is not a folder"):
        data.load("camelyon17")


@pytest.mark.parametrize("name", ["celeba", "camelyon17", "amazon"])
def test_missing_data_say_what_to_do(monkeypatch, tmp_path, name):
    monkeypatch.setenv("FCCO_DATA", str(tmp_path / "nothing"))
    (tmp_path / "mine").mkdir()
    with pytest.raises(data.MissingData) as caught:
        data.load_grouped(name, tmp_path / "mine")
    text = str(caught.value)
    folder = {"celeba": "celebA_v1.0", "camelyon17": "camelyon17_v1.0", "amazon": "amazon_v2.1"}
    for piece in (
        f"folder: {tmp_path / 'mine'} has no folder {folder[name]}",
        f"FCCO_DATA: {tmp_path / 'nothing'} is not a folder",
        f"cache: {tmp_path / 'cache' / 'data' / 'wilds'} is not a folder",
        "wilds: the package cannot be imported (ModuleNotFoundError",
        "install the package wilds (pip install wilds)",
        f"the folder {folder[name]} of WILDS",
        "name it by the environment variable FCCO_DATA",
    ):
        assert piece in text, text
    if name == "celeba":
        assert "has no folder celeba, nor list_attr_celeba.txt itself" in text
    assert "fcco data fetch" not in text
    assert not (tmp_path / "cache").exists()


def test_list_names_the_copy(monkeypatch, tmp_path):
    content = opinions_content(opinions())
    name = stand_in(monkeypatch, "sentiment", content)
    put(tmp_path / "named", name, content)
    patches.write(tmp_path / "named")
    Faces().official(tmp_path / "mine")
    monkeypatch.setenv("FCCO_DATA", str(tmp_path / "named"))
    listed = {
        row["name"]: row for row in rows(run("list", "--json", "--folder", tmp_path / "mine"))
    }
    assert listed["celeba"]["where"] == "folder (CelebA, official files)"
    assert listed["camelyon17"]["where"] == "FCCO_DATA (Camelyon17-WILDS)"
    assert listed["sentiment"]["where"] == "FCCO_DATA (sentiment_7domains.csv)"
    assert listed["amazon"]["where"] == "not found"
    assert "wilds.stanford.edu" in listed["amazon"]["how"]
    assert listed["grouped-synthetic"]["where"] == "generated"
    for row in listed.values():
        assert row["licence"] and row["rows"] and row["citation"]
    assert "no redistribution" in listed["celeba"]["licence"]
    assert "202,599" in listed["celeba"]["rows"]


def test_fetch_says_how_to_get_what_it_cannot_fetch(tmp_path):
    result = run("fetch", "sentiment", "amazon", "grouped-synthetic")
    assert result.exit_code == 1 and result.stdout == ""
    assert "`amazon` cannot" not in result.stderr and "`sentiment, amazon`" in result.stderr
    for piece in ("bert-AAD", "amazon_v2.1 of WILDS", "How to come by it", "pip install wilds"):
        assert piece in result.stderr
    assert "fcco data fetch" not in result.stderr and "Traceback" not in result.stderr


def test_fetch_what_is_there(monkeypatch, tmp_path):
    content = opinions_content(opinions())
    name = stand_in(monkeypatch, "sentiment", content)
    monkeypatch.setenv("FCCO_DATA", str(put(tmp_path / "named", name, content, compress=True)))
    folder = patches.write(tmp_path / "named")
    found = rows(run("fetch", "sentiment", "camelyon17", "--json"))
    assert [(row["from"], row["path"]) for row in found] == [
        ("FCCO_DATA", str(tmp_path / "named" / f"{name}.gz")),
        ("FCCO_DATA", str(folder)),
    ]
    mine = tmp_path / "mine"
    found = rows(run("fetch", "sentiment", "camelyon17", "--folder", mine, "--json"))
    assert [row["path"] for row in found] == [str(mine / name), str(folder)]
    assert (mine / name).read_bytes() == content
    (folder / "patches").rename(tmp_path / "moved")
    result = run("fetch", "camelyon17")
    assert result.exit_code == 1 and "lacks patches" in result.stderr


def test_fetch_through_wilds(package, tmp_path):
    result = run("fetch", "camelyon17", "--json")
    assert result.exit_code == 0 and rows(result)[0]["from"] == "wilds"
    assert "fetching camelyon17_v1.0 through wilds" in result.stderr
    assert run("fetch", "camelyon17", "--folder", tmp_path / "mine").exit_code == 0
    assert len(package.calls) == 1, "it is on this machine"
    package.write = Faces().wilds
    assert run("fetch", "celeba", "--folder", tmp_path / "mine").exit_code == 0
    assert (tmp_path / "mine" / "celebA_v1.0" / "list_attr_celeba.csv").is_file()


def test_verify(monkeypatch, tmp_path):
    result = run("verify", "camelyon17", "--json")
    assert result.exit_code == 1
    (row,) = rows(result)
    assert row["state"] == "missing" and "wilds.stanford.edu" in row["detail"]
    content = opinions_content(opinions())
    name = stand_in(monkeypatch, "sentiment", content)
    mine = put(tmp_path / "mine", name, content)
    assert run("verify", "sentiment", "--folder", mine).exit_code == 0
    patches.write(mine)
    (row,) = rows(run("verify", "camelyon17", "--folder", mine, "--json"))
    assert (row["state"], row["place"]) == ("ok", "folder")
    (mine / "camelyon17_v1.0" / "patches").rename(tmp_path / "moved")
    result = run("verify", "camelyon17", "--folder", mine, "--json")
    assert result.exit_code == 1 and rows(result)[0]["state"] == "corrupt"
    # all sets: those that cannot be fetched need not be there
    made = generated()
    made.write(mine)
    for other, entry in made.sets.items():
        monkeypatch.setitem(data.DATA_SETS, other, entry)
    assert run("verify", "--folder", mine).exit_code == 1, "but what is there must be whole"
    (tmp_path / "moved").rename(mine / "camelyon17_v1.0" / "patches")
    result = run("verify", "--folder", mine, "--json")
    assert result.exit_code == 0
    assert [row["data"] for row in rows(result)] == [
        *("adult", "adult", "compas", "compas"),
        *("camelyon17", "sentiment"),
    ]


def test_small_helpers():
    assert few(["a", "b", "c"]) == "a, b, c" and few(list("abcde")) == "a, b, c and 2 more"
    assert digest("ab", "c") != digest("a", "bc") and digest(b"a", 1) == digest("a", "1")
