"""The command line, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import fcco


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = ["-m", "fcco_experiments", *arguments] if code is None else ["-c", code]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True)


def test_methods_as_json_is_the_registry():
    result = run("methods", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == fcco.methods.table().as_dicts()


def test_methods_as_text_and_filtered():
    result = run("methods", "--problem", "S4")
    assert result.stdout.rstrip() == str(fcco.methods.table().only(problems="S4"))
    assert "oss" in run("methods", "--constraints", "all").stdout


def test_a_wrong_filter_is_refused():
    for option, allowed in (("--problem", "S1, S2, S3"), ("--constraints", "sampled, all")):
        result = run("methods", option, "S9")
        assert result.returncode == 2 and allowed in result.stderr and "S9" in result.stderr


def test_a_table_for_the_terminal_leaves_nothing_out():
    code = """
from rich.console import Console
import fcco_experiments.cli.app as app
app.Console = lambda: Console(force_terminal=True, width=100, color_system=None)
app.show_methods()
"""
    shown = run(code=code).stdout
    words = {word for line in str(fcco.methods.table()).splitlines()[1:] for word in line.split()}
    missing = {word for word in words if word.strip(";,") not in shown}
    assert len(missing) < len(words) / 10, missing  # only words that had to be folded
    assert "…" not in shown


def test_version_and_help():
    assert run("--version").stdout.strip() == fcco.__version__
    assert "methods" in run("--help").stdout


def test_without_typer_it_says_what_to_install():
    code = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "typer" else find(name, *a)
from fcco_experiments.cli import main
main()
"""
    result = run(code=code)
    assert result.returncode == 1 and "pip install 'fcco[cli]'" in result.stderr
