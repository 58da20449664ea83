"""The walks through the library: counted by hand on a small package, and against cProfile."""

from __future__ import annotations

import cProfile
import importlib
import inspect
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import walk

FIRST = """
from contextlib import contextmanager
from dataclasses import dataclass

from .second import leaf, twice

@dataclass
class Made:  # its __init__ is generated: no call of this file
    number: int

    def __post_init__(self):
        self.number += 1

@contextmanager
def opened():  # a generator, resumed once: one call
    leaf()
    yield
    leaf()

def outer(callback):
    total = sum([leaf() for _ in range(2)])
    with opened():
        callback()
    twice(lambda: Made(total))
"""
SECOND = """
def leaf():
    return 1

def twice(function):
    function()
    function()
"""
BY_HAND = [
    ("outer", "first.py", 1),
    ("leaf", "second.py", 2),
    ("leaf", "second.py", 2),
    ("opened", "first.py", 2),
    ("leaf", "second.py", 3),
    ("leaf", "second.py", 2),  # called by the test's callback, inside `outer`
    ("leaf", "second.py", 3),
    ("twice", "second.py", 2),
    ("outer.<locals>.<lambda>", "first.py", 3),
    ("Made.__post_init__", "first.py", 4),
    ("outer.<locals>.<lambda>", "first.py", 3),
    ("Made.__post_init__", "first.py", 4),
]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    folder = tmp_path / "walked"
    folder.mkdir()
    for name, text in (("__init__", ""), ("first", FIRST), ("second", SECOND)):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("walked.first")
    for name in [name for name in sys.modules if name.partition(".")[0] == "walked"]:
        del sys.modules[name]


def test_a_walk_counted_by_hand(package: Any) -> None:
    source = Path(package.__file__).parent
    calls = walk.record(lambda: package.outer(lambda: package.leaf()), source)
    assert [(call.name, call.file, call.depth) for call in calls] == BY_HAND
    assert walk.summary(calls) == {"calls": 12, "files": 2, "switches": 4, "depth": 4}
    line = 1 + FIRST.splitlines().index("def outer(callback):")
    assert walk.listing(calls).splitlines()[:2] == [
        f"first.py:{line}  outer",
        "second.py:2    leaf",
    ]


def test_cprofile_counts_the_same_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = cProfile.Profile()
    with monkeypatch.context() as patched:
        patched.setattr(walk, "record", profiler.runcall)
        walk.constrained_step()
    expected, resumed = {}, set()
    for entry in profiler.getstats():
        code: Any = entry.code  # a string for functions written in C
        if isinstance(code, str) or not Path(code.co_filename).is_relative_to(walk.SOURCE):
            continue
        if code.co_name not in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"):
            key = code.co_qualname, code.co_filename, code.co_firstlineno
            expected[key] = entry.callcount
            if inspect.CO_GENERATOR & code.co_flags:  # cProfile counts each resumption
                resumed.add(key)
    calls = walk.constrained_step()
    counts = Counter((call.name, str(walk.SOURCE / call.file), call.line) for call in calls)
    assert counts.keys() == expected.keys()
    for key, number in counts.items():
        assert number < expected[key] if key in resumed else number == expected[key], key


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    walk.main(["--json"])
    *lines, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    names = ["sonex_step", "constrained_step", "alexr2_round", "fleet_step", "build_constrained"]
    assert list(figures) == names and len(lines) == 6
    for row in figures.values():
        assert list(row) == ["calls", "files", "switches", "depth"]
        assert row["calls"] > row["switches"] >= row["files"] - 1 >= 1
    # A round is three steps, each as much of a walk as a constrained step.
    assert figures["alexr2_round"]["calls"] > 2 * figures["constrained_step"]["calls"]
    walk.main(["sonex_step"])
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 4 + figures["sonex_step"]["calls"] and told[3] == "sonex_step"
    with pytest.raises(SystemExit):
        walk.main(["sonex"])
    assert "no walk 'sonex'; there are sonex_step" in capsys.readouterr().err
