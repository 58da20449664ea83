"""Run folders: whole files or none, refusals before anything is touched, reading back."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from fcco_experiments import checkpoint, stats, store
from fcco_experiments.store import Comparison, FolderError, SavedRun, differences
from fcco_experiments.task import Metric


def test_a_failure_in_the_middle_leaves_the_old_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    store.write_text(path, "old")
    with pytest.raises(RuntimeError, match="disk"), store.atomic(path) as file:
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
    (out / "sonex/seed-0").mkdir(parents=True)
    with pytest.raises(FolderError, match=r"--resume.*--overwrite.*--out"):
        store.prepare(out, resume=False, overwrite=False)
    with pytest.raises(FolderError, match="exclude each other"):
        store.prepare(out, resume=True, overwrite=True)
    assert (out / "sonex").exists()
    store.prepare(out, resume=True, overwrite=False)
    assert (out / "sonex").exists()
    store.prepare(out, resume=False, overwrite=True)
    assert (out / "sonex/seed-0").exists(), "nothing is deleted here"


def test_only_what_is_ours_is_removed(tmp_path):
    ours = ["sonex/seed-0/result.json", "sonex/seed-12/x", "sox@3/seed-1/config.yaml"]
    ours += [
        "comparison.json",
        "table.json",
        "table.md",
        "report.html",
        "sweep.json.gz",
        "runs.jsonl",
    ]
    ours += ["winners.yaml"]
    theirs = ["notes.txt", "table.xlsx", "sonex/idea.txt", "sonex/seed-data/a.csv", "seed-1/b"]
    for name in (*ours, *theirs):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/c").write_text("x")
    (tmp_path / "sonex/seed-5").symlink_to(tmp_path / "elsewhere")
    store.remove_runs(tmp_path)
    left = {str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*") if each.is_file()}
    assert left == {*theirs, "elsewhere/c"}
    assert not (tmp_path / "sox@3").exists() and not (tmp_path / "sonex/seed-0").exists()


def test_a_place_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(FolderError, match=r"file/runs cannot be made or read: Not a directory"):
        store.prepare(tmp_path / "file/runs", resume=False, overwrite=False)


def test_what_a_dead_process_left_does_not_make_a_folder_full(tmp_path):
    (tmp_path / ".lock").write_text("")
    (tmp_path / ".comparison.json.77.tmp").write_text("{")
    store.prepare(tmp_path, resume=False, overwrite=False)
    (tmp_path / ".git").mkdir()
    with pytest.raises(FolderError, match="does not look like a folder of runs"):
        store.prepare(tmp_path, resume=False, overwrite=False)


def write_whole(folder: Path) -> None:
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


def test_two_processes_do_not_share_a_folder(tmp_path):
    (tmp_path / ".metrics.jsonl.99999.tmp").write_text("half a fi")
    with store.locked(tmp_path):
        assert os.listdir(tmp_path) == [".lock"], "what a killed process left is gone"
        with pytest.raises(FolderError, match="Another process"), store.locked(tmp_path, 0.1):
            pass
    with store.locked(tmp_path, 0.1):
        pass


def test_differences_are_named():
    saved = {"seed": 1, "config": {"epochs": 3, "checkpoint_every": 5, "a": [1]}, "method": {}}
    now = {"seed": 1, "config": {"epochs": 4, "checkpoint_every": 2}, "method": {"lr": 0.1}}
    assert differences(saved, saved) == []
    assert differences(saved, now) == [
        "`config.epochs` was 3 and is 4 now",
        "`config.a` was [1] and is not there now",
        "`method.lr` was not there and is 0.1 now",
    ]


def test_every_global_generator_comes_back():
    def draw() -> tuple[float, float, float, float]:
        return random.gauss(0, 1), np.random.normal(), np.random.rand(), torch.randn(()).item()

    checkpoint.seed_all(3)
    draw()  # NumPy now holds the second of two normal draws
    held = checkpoint.random_state()
    expected = [draw(), draw()]
    checkpoint.seed_all(4)
    assert draw() not in expected
    checkpoint.restore_random(held)
    assert [draw(), draw()] == expected
    checkpoint.seed_all(3)
    first = draw()
    checkpoint.seed_all(3)
    assert draw() == first


def saved(name: str, seed: int, final: dict, end: dict, diverged: str | None = None) -> SavedRun:
    result = {"final": final, "end": end, "diverged": diverged}
    return SavedRun(Path(name), name, seed, {}, {}, [final], result, {})


def test_the_table_is_mean_and_standard_deviation():
    metrics = (Metric("auc", "AUC", "higher", 3, headline=True), Metric("kkt", "KKT", meaning="m"))
    runs = [
        saved("b", 0, {"auc": 0.8}, {"kkt": 1.0}),
        saved("b", 1, {"auc": 0.9}, {"kkt": 3.0}),
        saved("b", 2, {"auc": 0.7}, {}, "after 3 steps: NaN"),
        saved("a", 0, {"auc": 0.5}, {"kkt": math.nan}),
        SavedRun(Path("a"), "a", 1, {}, {}, [{"auc": 0.1}], None, {}),  # not finished
        SavedRun(Path("c"), "c", 0, {}, {}, [], None, {}),
    ]
    meta = {"methods": ["b", "a", "c"], "seeds": [0, 1, 2]}
    table = stats.table(Comparison(Path(), meta, runs), metrics)
    assert list(table) == ["b", "a"]
    assert table["b"] == {
        "auc": {"mean": pytest.approx(0.8), "std": pytest.approx(np.std([0.8, 0.9, 0.7], ddof=1))},
        "kkt": {"mean": 2.0, "std": pytest.approx(math.sqrt(2))},
        "diverged": {"mean": pytest.approx(1 / 3), "std": 0.0},
    }
    assert table["a"]["auc"] == {"mean": 0.5, "std": 0.0}
    assert math.isnan(table["a"]["kkt"]["mean"])
    assert stats.cells(table, metrics) == [
        ["method", "AUC ↑"],
        ["b (33% diverged)", "0.800 ± 0.100"],
        ["a", "0.500 ± 0.000"],
    ]
    text = stats.markdown(table, metrics)
    assert "| b (33% diverged) | 0.800 ± 0.100 | 2.0000 ± 1.4142 |" in text
    assert "| a | 0.500 ± 0.000 | not finite |" in text and "* **KKT**: m" in text
