"""The page on a user's own data: its commands on the table that it makes."""

from __future__ import annotations

import html
import re
import shlex
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from fcco_experiments import compare, store
from fcco_experiments import run as planning
from fcco_experiments.cli import app
from fcco_experiments.report.page import whole_commands

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
    other = {"x-risk": "ap,bce", "continual": "sonex,finetune", "group-dro": "sonex,erm"}
    methods = other.get(task, "automatic,erm")
    words = [*shlex.split(command)[1:], "--methods", methods, "--epochs", "2", "--workers", "1"]
    monkeypatch.setattr(sys, "argv", ["fcco", *words])
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    page = (folder / f"runs/{task}-my-quick/report.html").read_text(encoding="utf-8")
    commands = re.findall(r"<code>([^<]* (?:compare|sweep) [^<]*)</code>", page)
    told = re.findall(r"^ +(fcco .*)", done.output, re.MULTILINE)
    assert {html.unescape(each) for each in commands} >= set(told), "each on a line"
    assert not re.search(r"[`>]--[a-z]", page + done.output), "no option without its command"
    options = ("--epochs 4", "--seeds 0,1,2,3,4", f"fcco sweep {task}")
    out = Path(f"runs/{task}-my-quick")
    spans = whole_commands(" ".join(f"`{each}`" for each in options), store.load_comparison(out))
    lines = spans.split("`")[1::2]
    assert told and len(lines) == 3
    for line in [*told, *lines]:
        planned(line, monkeypatch)


def planned(line: str, monkeypatch) -> None:
    """Type a command that was proposed, up to the first step of its training."""
    plans = []

    def execute(plan, out, *, resume, overwrite, **options):
        store.prepare(out, resume=resume, overwrite=overwrite)
        if resume and out.exists():
            planning._earlier(plan, out)
        plans.append(plan)
        raise click.exceptions.Exit(0)

    with monkeypatch.context() as patch:
        patch.setattr(compare, "execute", execute)
        program, *words = shlex.split(line)
        done = CliRunner().invoke(app, words)
    assert program == "fcco" and done.exit_code == 0 and plans[0].specs, (line, done.output)


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
