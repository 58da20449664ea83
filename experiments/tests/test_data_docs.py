"""The page on a user's own data: its commands on the table that it makes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from fcco_experiments.cli.app import app
from typer.testing import CliRunner

TEXT = (Path(__file__).parents[2] / "docs/recipes/your-data.md").read_text()
COMMANDS = [line for line in re.findall(r"^fcco .*", TEXT, re.MULTILINE) if "my.csv" in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("page")


def test_the_page_has_a_command_for_each_task():
    found = [line.split()[2] for line in COMMANDS]
    assert found == ["group-dro", "fairness", "continual", "x-risk"]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda line: line.split()[2])
def test_commands_of_the_page(folder, monkeypatch, command):
    monkeypatch.chdir(folder)
    exec(TEXT.split("```python\n")[1].split("```")[0], {})
    task = command.split()[2]
    method = "ap" if task == "x-risk" else "sonex"
    words = [*shlex.split(command)[1:], "--methods", method, "--epochs", "2", "--workers", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert (folder / f"runs/{task}-my-quick/report.html").is_file()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--label 5 --group a --group b,c", ["label: '5'", "group: [a, b, c]", "backbone: none"]),
        ("--label x --text t", ["text: t", "backbone: minilm"]),
        ("--label x --image i --files f", ["files: f", "backbone: efficientnet-lite0"]),
        ("--label x --features 'x*,y' --split s", ["features: [x*, y]", "split: s"]),
    ],
)
def test_options_become_columns(folder, monkeypatch, words, wanted):
    monkeypatch.chdir(folder)
    Path("my.csv").write_text("x\n1\n")
    done = CliRunner().invoke(app, ["config", "group-dro", "--data", "my.csv", *shlex.split(words)])
    assert done.exit_code == 0, done.output
    assert all(text in done.stdout for text in wanted), done.stdout
