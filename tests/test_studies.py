"""What studies share: jobs that resume, the choice of settings, published files and tables."""

from __future__ import annotations

import gzip
import importlib
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest

from studies import publish
from studies.runner import Job, Runner, available, short, tuned


@dataclass(frozen=True)
class Square:
    value: float


def square(job: Job) -> Square:
    return Square(job.setting["x"] ** 2 + job.seed / 100)


def job(x: float, seed: int = 0) -> Job:
    return Job("p", "m", {"x": x}, seed)


def counted(made: list[Job]):
    def run(job: Job) -> Square:
        made.append(job)
        return square(job)

    return run


def test_finished_jobs_are_not_run_again(tmp_path: Path) -> None:
    file, made = tmp_path / "build/runs.jsonl", []
    first = Runner(counted(made), Square, cache=file, show=None)
    assert first([job(2), job(3), job(2)], "runs") == [Square(4), Square(9), Square(4)]
    assert len(made) == 2
    with file.open("a") as lines:
        lines.write('{"job": "stopped in the mid')  # a run was killed while it wrote
    again = Runner(counted(made), Square, cache=file, show=None)
    assert again([job(3), job(2)], "runs") == [Square(9), Square(4)] and len(made) == 2
    packed = tmp_path / "runs.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    published = Runner(square, Square, 0, packed)
    assert published([job(2)], "runs") == [Square(4)]
    with pytest.raises(LookupError, match="runs: 1 runs are missing"):
        published([job(5)], "runs")
    Runner(square, Square, cache=packed, show=None)([job(5)], "runs")
    assert Runner(square, Square, 0, packed)([job(5), job(2)], "runs") == [Square(25), Square(4)]


def test_other_processes_give_the_same(tmp_path: Path) -> None:
    jobs = [job(x) for x in range(4)]
    apart = Runner(square, Square, 2, tmp_path / "runs", show=None)
    assert apart(jobs, "runs") == [square(each) for each in jobs]
    assert (tmp_path / "runs").read_text().count("\n") == 4


def slow_unless_wrong(job: Job) -> Square:
    if job.setting["x"] < 0:
        raise ArithmeticError("x")
    time.sleep(0.2)
    return square(job)


def test_a_job_that_fails_stops_those_that_wait(tmp_path: Path) -> None:
    runner = Runner(slow_unless_wrong, Square, 2, tmp_path / "runs", show=None)
    jobs = [job(x) for x in (1, -1, *range(2, 40))]
    with pytest.raises(ArithmeticError):
        runner(jobs, "runs")
    assert len(runner.known) < 20


@pytest.mark.parametrize("name", ["estimators", "group_dro", "identities", "xrisk"])
def test_other_processes_can_import_what_runs_a_job(name: str) -> None:
    """A process that is started anew does not import the `__main__` of a package."""
    command = importlib.import_module(f"studies.{name}.__main__")
    assert command.run.__module__ != command.__name__


def test_settings_are_chosen_on_tuning_seeds_and_shown_on_others() -> None:
    runner = Runner(square, Square, show=None)
    grids = {"a": [3.0, 1.0, 2.0], "b": [5.0, 4.0]}

    def choose(tried):
        means = {
            cell: [fmean(r.value for r in own) for own in some] for cell, some in tried.items()
        }
        return {cell: values.index(min(values)) for cell, values in means.items()}

    found = tuned(runner, grids, lambda cell, x, seed: job(x, seed), (0, 1), (10, 11), choose)
    assert found == {
        "a": (1.0, [Square(1.1), Square(1.11)]),
        "b": (4.0, [Square(16.1), Square(16.11)]),
    }
    first = tuned(runner, grids, lambda cell, x, seed: job(x, seed), (), (10,), choose)
    assert [setting for setting, _ in first.values()] == [3.0, 5.0]


def test_what_is_not_there_is_left_out_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    def make(name: str) -> None:
        if name == "gone":
            raise FileNotFoundError("`gone` is nowhere.\nand more")
        if name == "bare":
            raise ImportError("No module named 'x'")

    notes: list[str] = []
    assert available(["here", "gone", "bare"], make, notes) == ["here"]
    assert notes == [
        f"gone is left out: {short(FileNotFoundError('`gone` is nowhere.'))}",
        "bare is left out: No module named 'x'.",
    ]
    assert notes[0] in capsys.readouterr().err


def test_published_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They name the command without places of this machine, and are the same each time."""
    words = "/bin/python3 -m studies.xrisk --out /home/me/a --publish --seeds 3 --commit=abc1234"
    monkeypatch.setattr(sys, "orig_argv", words.split())
    runs = {job(2).key: {"value": 4.0}}
    for _ in range(2):
        publish.write(tmp_path, {"mean": [math.inf, 1.0]}, runs, commit="abc1234")
        found = json.loads((tmp_path / publish.TABLE).read_text())
        assert found["mean"] == [None, 1.0]
        assert found["meta"]["command"] == "python -m studies.xrisk --seeds 3"
        assert found["meta"]["revision"] == "abc1234" and "torch" in found["meta"]
        packed = (tmp_path / publish.RUNS).read_bytes()
        assert packed == gzip.compress(gzip.decompress(packed), mtime=0)
    assert Runner(square, Square, 0, tmp_path / publish.RUNS)([job(2)], "runs") == [Square(4.0)]
    for commit in ("abc1234-dirty", None):
        facts = dict.fromkeys(publish.FACTS) | {"device": "cpu", "revision": commit}
        monkeypatch.setattr(publish, "machine", lambda device, facts=facts: facts)
        with pytest.raises(SystemExit, match="Nothing is published"):
            publish.write(tmp_path / "other", {})
    assert not (tmp_path / "other").exists()


def test_tables() -> None:
    rows = [["", "a"], ["x \\| y", "**1.5**"]]
    assert publish.plain(rows) == "         a\nx | y  1.5"
    assert (
        publish.mean_std([1.0, 3.0], 2) == "2.00 ± 1.41"
        and publish.mean_std([1.0]) == "1.000 ± 0.000"
    )
    # t of 1 degree of freedom: 12.7062; the differences 0.1 and 0.3 have the error 0.1.
    assert publish.ahead_by([0.1, 0.3], [0.0, 0.0]) == "+0.200 ± 1.271"
    assert publish.ahead_by([0.2, 0.2001], [0.0, 0.0], 1) == "**+0.2 ± 0.0**"
