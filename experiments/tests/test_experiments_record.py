"""Run folders: whole files or none, refusals before anything is touched, reading back."""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fcco_experiments import compare, store
from fcco_experiments.store import FolderError, differences
from test_experiments_engine import spec


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    """It is on disk before it takes its place, and a failure in the middle leaves the old one."""
    calls = []
    sync, move = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda n: (calls.append("sync"), sync(n)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append(a.read_text()), move(a, b)))
    path = tmp_path / "metrics.jsonl"
    store.write_text(path, "old")
    assert calls == ["sync", "old"]
    with pytest.raises(RuntimeError, match="disk"), store.replacing(path) as file:
        file.write(b"ne")
        raise RuntimeError("disk")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


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
    assert not out.exists()
    out.mkdir()
    store.write_json(out / store.COMPARISON, {})
    store.prepare(out, resume=False, overwrite=False)  # the data were missing: no run was begun
    write(out, "sonex/seed-0/config.yaml")
    with pytest.raises(FolderError, match=r"--resume.*--overwrite.*--out"):
        store.prepare(out, resume=False, overwrite=False)
    with pytest.raises(FolderError, match="exclude each other"):
        store.prepare(out, resume=True, overwrite=True)
    store.prepare(out, resume=True, overwrite=False)
    store.prepare(out, resume=False, overwrite=True)
    assert (out / "sonex/seed-0/config.yaml").exists(), "nothing is deleted here"


@pytest.mark.parametrize("resume, overwrite", [(False, False), (True, False), (False, True)])
def test_a_folder_of_something_else_is_never_used(tmp_path, resume, overwrite):
    write(tmp_path, ".lock", ".comparison.json.77.fcco-tmp")  # as a process that died leaves them
    store.prepare(tmp_path, resume=resume, overwrite=overwrite)
    write(tmp_path, "thesis.tex")
    with pytest.raises(FolderError, match=r"holds no comparison\.json"):
        store.prepare(tmp_path, resume=resume, overwrite=overwrite)
    assert (tmp_path / "thesis.tex").exists()
    with pytest.raises(FolderError, match="Not a directory"):
        store.prepare(tmp_path / "thesis.tex", resume=resume, overwrite=overwrite)


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")


def test_only_what_is_ours_is_removed(tmp_path):
    """Not a folder that only has such a name, no file beside ours, and nothing behind a link."""
    out = tmp_path / "out"
    write(
        out, "sonex/seed-0/result.json", "sonex/seed-2/.lock",
        "sonex/seed-12/checkpoint.pt", "sox@3/seed-1/config.yaml", "comparison.json",
        "table.json", "report.html", "sweep.json.gz", "settings.csv",
        "winners.yaml", "fleet/lines-1.jsonl", "fleet/checkpoint-0.pt",
    )  # fmt: skip
    theirs = [
        "notes.txt", "table.xlsx", "sonex/idea.txt", "sonex/seed-data/a.csv", "seed-1/b",
        "potatoes/seed-7/harvest.csv", "sonex/seed-12/notes.txt", "fleet/ships.txt",
    ]  # fmt: skip
    write(out, *theirs)
    write(tmp_path, "seed-5/result.json", "seed-5/config.yaml", "fleets/checkpoint-0.pt")
    (out / "sonex/seed-5").symlink_to(tmp_path / "seed-5")
    (out / "linked").symlink_to(tmp_path)  # linked/seed-5 looks like a run
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
        {"methods": [".."]},
        {"methods": [3]},
        {"seeds": ["0/../../.."]},
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


def test_a_method_whose_name_cannot_be_a_folder_is_refused():
    base = replace(spec().config, methods={"../victim": spec().method})
    with pytest.raises(FolderError, match=r"'../victim' cannot be the name of a folder"):
        compare.plan("toy_task:TASK", "quadratic", base)


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_is_full_in_the_middle_of_a_checkpoint(tmp_path, monkeypatch):
    """torch hides the reason behind an error of its own."""

    @contextlib.contextmanager
    def full(path: Path):
        with open("/dev/full", "wb", buffering=0) as file:
            yield file

    monkeypatch.setattr(store, "atomic", full)
    with pytest.raises(FolderError, match=r"a\.pt cannot be written: No space left on device"):
        store.write_checkpoint(tmp_path / "a.pt", {"weight": torch.zeros(1000)})


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
        ("comparison.json", b"[]"),
        ("a/seed-0/config.yaml", b"{name: a"),
        ("a/seed-0/config.yaml", b"\xff\xfe"),
        ("a/seed-0/config.yaml", b"name: a"),
        ("a/seed-0/metrics.jsonl", b'{"loss": 1.0}\n{"lo'),
        ("a/seed-0/metrics.jsonl", b"3\n"),
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


def test_differences_are_named():
    saved = {"seed": 1, "config": {"epochs": 3, "checkpoint_every": 5, "a": [1]}, "method": {}}
    now = {"seed": 1, "config": {"epochs": 4, "checkpoint_every": 2}, "method": {"lr": 0.1}}
    assert differences(saved, saved) == []
    assert differences(saved, now) == [
        "`config.epochs` was 3 and is 4 now",
        "`config.a` was [1] and is not there now",
        "`method.lr` was not there and is 0.1 now",
    ]
