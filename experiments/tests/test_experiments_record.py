"""Run folders: whole files or none, refusals before anything is touched, reading back."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fcco_experiments import compare, engine, store
from fcco_experiments.config import ConfigError
from fcco_experiments.store import FolderError, differences
from test_experiments_engine import spec


def test_a_failure_in_the_middle_leaves_the_old_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    store.write_text(path, "old")
    with pytest.raises(RuntimeError, match="disk"), store.replacing(path) as file:
        file.write(b"ne")
        raise RuntimeError("disk")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_file_is_on_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    calls = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda n: (calls.append("sync"), sync(n)))

    def move(source: Path, target: Path) -> None:
        assert Path(source).parent == Path(target).parent, "a move between disks is a copy"
        calls.append(f"move {Path(source).read_text()}")
        replace(source, target)

    monkeypatch.setattr(os, "replace", move)
    store.write_text(tmp_path / "a", "whole")
    assert calls == ["sync", "move whole"]


def test_json_has_no_nan(tmp_path):
    row = {"a": math.nan, "b": [1.0, -math.inf], "c": torch.tensor([1, 2]), "d": np.float64(2.5)}
    store.write_json(tmp_path / "a.json", row)
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": None, "b": [1.0, None], "c": [1, 2], "d": 2.5,
    }  # fmt: skip


def test_full_folders_are_refused_untouched(tmp_path):
    out = tmp_path / "out"
    store.prepare(out, resume=False, overwrite=False)
    store.write_json(out / store.COMPARISON, {})
    store.prepare(out, resume=False, overwrite=False)  # the data were missing: no run was begun
    run = out / "sonex/seed-0/config.yaml"
    run.parent.mkdir(parents=True)
    run.write_text("x")
    with pytest.raises(FolderError, match=r"--resume.*--overwrite.*--out"):
        store.prepare(out, resume=False, overwrite=False)
    with pytest.raises(FolderError, match="exclude each other"):
        store.prepare(out, resume=True, overwrite=True)
    store.prepare(out, resume=True, overwrite=False)
    store.prepare(out, resume=False, overwrite=True)
    assert run.exists(), "nothing is deleted here"


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")


def test_only_what_is_ours_is_removed(tmp_path):
    """Not a folder that only has such a name, no file beside ours, and nothing behind a link."""
    out = tmp_path / "out"
    write(
        out, "sonex/seed-0/result.json", "sonex/seed-0/tensorboard/events", "sonex/seed-2/.lock",
        "sonex/seed-12/checkpoint.previous.pt", "sox@3/seed-1/config.yaml", "comparison.json",
        "table.json", "table.md", "report.html", "sweep.json.gz", "runs.jsonl", "winners.yaml",
        "fleet.jsonl", "fleet/lines-1.jsonl", "fleet/checkpoint-0.pt",
    )  # fmt: skip
    theirs = [
        "notes.txt", "table.xlsx", "sonex/idea.txt", "sonex/seed-data/a.csv", "seed-1/b",
        "potatoes/seed-7/harvest.csv", "sonex/seed-12/notes.txt", "fleet/ships.txt",
    ]  # fmt: skip
    write(out, *theirs)
    write(tmp_path, "seed-5/result.json", "seed-5/config.yaml", "fleets/checkpoint-0.pt")
    (out / "sonex/seed-5").symlink_to(tmp_path / "seed-5")
    (out / "linked").symlink_to(tmp_path)  # linked/seed-5 looks like a run
    (out / "sonex/seed-0/tensorboard/events").unlink()
    (out / "sonex/seed-0/tensorboard").rmdir()
    (out / "sonex/seed-0/tensorboard").symlink_to(tmp_path / "fleets")
    outside = [path for path in tmp_path.rglob("*") if out not in path.parents]
    store.remove_runs(out)
    left = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file() and not p.is_symlink()}
    assert left == set(theirs)
    assert not (out / "sox@3").exists()
    assert all(path.exists() for path in outside)
    (out / "fleet/ships.txt").unlink()
    (out / "fleet").rmdir()
    (out / "fleet").symlink_to(tmp_path / "fleets")
    store.remove_runs(out)
    assert (tmp_path / "fleets/checkpoint-0.pt").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"methods": ["../victim"]},
        {"methods": ["/etc"]},
        {"methods": [".."]},
        {"methods": [""]},
        {"methods": [3]},
        {"seeds": ["0/../../.."]},
        {"seeds": [-1]},
    ],
)
def test_no_name_leads_out_of_the_folder(wrong, tmp_path):
    """Neither from somebody's comparison.json nor from a config."""
    write_whole(tmp_path / "victim")
    (tmp_path / "victim/a/seed-0").rename(tmp_path / "victim/seed-0")  # as ../victim/seed-0
    meta = {"task": "toy_task:TASK", "config": {}, "methods": ["a"], "seeds": [0]}
    (tmp_path / "out").mkdir()
    store.write_json(tmp_path / "out/comparison.json", meta | wrong)
    with pytest.raises(FolderError, match=r"out/comparison\.json is damaged"):
        store.load_comparison(tmp_path / "out")


def test_a_method_whose_name_cannot_be_a_folder_is_refused(tmp_path):
    base = replace(spec().config, methods={"../victim": spec().method})
    with pytest.raises(ConfigError, match=r"'../victim' cannot be the name of a method"):
        compare.plan("toy_task:TASK", "quadratic", base)
    with pytest.raises(FolderError, match="cannot be the name of a folder"):
        replace(spec(), name="a/../../b").folder(tmp_path)


def test_a_place_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(FolderError, match=r"file/runs cannot be made or read: Not a directory"):
        store.prepare(tmp_path / "file/runs", resume=False, overwrite=False)


def test_what_a_dead_process_left_does_not_make_a_folder_full(tmp_path):
    write(tmp_path, ".lock", ".comparison.json.77.fcco-tmp")
    store.prepare(tmp_path, resume=False, overwrite=False)
    (tmp_path / ".git").mkdir()
    with pytest.raises(FolderError, match="does not look like a folder of runs"):
        store.prepare(tmp_path, resume=False, overwrite=False)


def test_two_processes_do_not_share_a_folder(tmp_path, monkeypatch):
    """What a killed process has left is cleared away; the user's files are not."""
    theirs = {".draft.tmp", ".metrics.jsonl.99.tmp", ".a.fcco-tmp"}
    write(tmp_path, *theirs)

    def killed(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    monkeypatch.setattr(Path, "unlink", lambda *args, **kwargs: None)
    with pytest.raises(KeyboardInterrupt):
        store.write_text(tmp_path / "metrics.jsonl", "half a fi")
    monkeypatch.undo()
    assert len(os.listdir(tmp_path)) == 4
    with store.locked(tmp_path):
        assert set(os.listdir(tmp_path)) == {".lock", *theirs}
        with pytest.raises(FolderError, match="Another process"), store.locked(tmp_path, 0.1):
            pass
    with store.locked(tmp_path, 0.1):
        pass


def test_a_full_disk_is_a_clear_error(tmp_path, monkeypatch):
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for call in (
        lambda: store.write_json(tmp_path / "a.json", {}),
        lambda: engine.write_checkpoint(tmp_path / "a.pt", {"step": 1}),
    ):
        with pytest.raises(FolderError, match=r"a\.\w+ cannot be written: No space left on device"):
            call()
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_is_full_in_the_middle_of_a_checkpoint(tmp_path, monkeypatch):
    """torch hides the reason behind an error of its own."""

    @contextlib.contextmanager
    def full(path: Path):
        with open("/dev/full", "wb", buffering=0) as file:
            yield file

    monkeypatch.setattr(store, "atomic", full)
    with pytest.raises(FolderError, match=r"a\.pt cannot be written: No space left on device"):
        engine.write_checkpoint(tmp_path / "a.pt", {"weight": torch.zeros(1000)})


def write_whole(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    meta = {"task": "toy_task:TASK", "config": {}, "methods": ["a"], "seeds": [0]}
    store.write_json(folder / "comparison.json", meta)
    (folder / "a/seed-0").mkdir(parents=True)
    spec = "{name: a, seed: 0, config: {}, method: {}}"
    (folder / "a/seed-0/config.yaml").write_text(spec)
    (folder / "a/seed-0/metrics.jsonl").write_text('{"loss": 1.0}\n')
    result = {"final": {"loss": 1.0}, "end": {}, "diverged": None}
    store.write_json(folder / "a/seed-0/result.json", result)


@pytest.mark.parametrize(
    "name, content",
    [
        ("comparison.json", b"{"),
        ("comparison.json", b"[]"),
        ("comparison.json", b'{"task": "a", "config": {}, "methods": 3, "seeds": []}'),
        ("a/seed-0/config.yaml", b"{name: a"),
        ("a/seed-0/config.yaml", b"\xff\xfe"),
        ("a/seed-0/config.yaml", b"3"),
        ("a/seed-0/config.yaml", b"name: a"),
        ("a/seed-0/metrics.jsonl", b'{"loss": 1.0}\n{"lo'),
        ("a/seed-0/metrics.jsonl", b"3\n"),
        ("a/seed-0/result.json", b"{"),
        ("a/seed-0/result.json", b'{"final": 3}'),
    ],
)
def test_damaged_files_are_named(name, content, tmp_path):
    write_whole(tmp_path)
    assert len(store.load_comparison(tmp_path).runs) == 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FolderError) as caught:
        store.load_comparison(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("resume, overwrite", [(False, False), (True, False), (False, True)])
def test_a_folder_of_something_else_is_never_used(tmp_path, resume, overwrite):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FolderError, match=r"holds no comparison\.json"):
        store.prepare(tmp_path, resume=resume, overwrite=overwrite)
    assert os.listdir(tmp_path) == ["thesis.tex"]
    with pytest.raises(FolderError, match="is a file"):
        store.prepare(tmp_path / "thesis.tex", resume=resume, overwrite=overwrite)


def test_differences_are_named():
    saved = {"seed": 1, "config": {"epochs": 3, "checkpoint_every": 5, "a": [1]}, "method": {}}
    now = {"seed": 1, "config": {"epochs": 4, "checkpoint_every": 2}, "method": {"lr": 0.1}}
    assert differences(saved, saved) == []
    assert differences(saved, now) == [
        "`config.epochs` was 3 and is 4 now",
        "`config.a` was [1] and is not there now",
        "`method.lr` was not there and is 0.1 now",
    ]
