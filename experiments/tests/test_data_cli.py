"""The commands `fcco data`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from data_fixtures import adult_contents, change_card, put
from fcco_experiments import data
from fcco_experiments.cli import app

ADULT = adult_contents(3)


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """Adult's files in the folder `mine`, nothing else, no network."""
    monkeypatch.delenv("FCCO_DATA", raising=False)
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    change_card(monkeypatch, "adult", **ADULT)
    for name, content in ADULT.items():
        put(tmp_path / "mine", name, content)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


def rows(result: Result) -> list[dict[str, str]]:
    return json.loads(result.stdout.splitlines()[-1])


def test_list(tmp_path):
    lines = [line.rstrip() for line in run("list").stdout.splitlines() if line.strip()]
    assert lines[0].split() == ["name", "rows", "where"] and len(lines) == 2 + len(data.names())
    assert max(map(len, lines)) <= 80
    where = {row["name"]: row["where"] for row in rows(run("list", "--json"))}
    assert (where["adult"], where["synthetic"]) == ("not found", "generated")
    found = rows(run("list", "--json", "--folder", tmp_path / "mine"))
    assert {row["name"]: row["where"] for row in found} == {**where, "adult": "folder"}
    told = run("list", "celeba", "adult").stdout
    assert "702f8f7" in told and "get it: fcco data fetch adult" in told
    assert max(map(len, told.splitlines())) <= 110, "an address is not cut"


def test_fetch_then_verify(tmp_path, monkeypatch):
    assert run("fetch", "adult").exit_code == 1, "no network"
    monkeypatch.setenv("FCCO_DATA", str(tmp_path / "mine"))
    result = run("fetch", "adult", "synthetic", "--json")
    assert [Path(row["path"]) for row in rows(result)] == [tmp_path / "mine" / n for n in ADULT]
    assert "synthetic is generated" in result.stderr
    result = run("verify", "adult")
    assert result.exit_code == 0 and result.stdout.count("found") == 2
    (tmp_path / "mine" / "adult.data").write_bytes(b"spoilt")
    result = run("verify")
    assert result.exit_code == 1 and "checksum mismatch" in result.stdout


def test_what_cannot_be_had():
    assert run("verify").exit_code == 0, "nothing is wrong where nothing is"
    result = run("verify", "celeba")
    assert result.exit_code == 1 and "fcco data list celeba" in result.stdout
    result = run("fetch", "sentiment")
    assert result.exit_code == 1 and "bert-AAD at commit cbe2e0c" in result.stderr
    assert "fcco data fetch" not in result.stderr, "it cannot be fetched"
    for command in ("list", "fetch", "verify"):
        result = run(command, "adlt")
        assert result.exit_code == 2 and "must be one of adult" in result.stderr
