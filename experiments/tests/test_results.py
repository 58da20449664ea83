"""Published results: what is in the files, pages made from them, and what is not overwritten."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from fcco_experiments import compare, config, report, store, sweep
from fcco_experiments.cli import app
from fcco_experiments.store import FolderError
from test_experiments_report import cells, checked
from toy_task import TASK

BASE = config.load(TASK, "quadratic")
NAMES = ("sonex", "sox")


def train(plan: compare.Plan, folder: Path) -> Path:
    compare.execute(plan, folder, workers=1)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Two methods, three seeds, 31 evaluations."""
    methods = {name: BASE.methods[name] for name in NAMES}
    own = replace(BASE, epochs=30, methods=methods, seeds=(0, 1, 2), steps=1, checkpoint_every=99)
    plan = compare.plan("toy_task:TASK", "quadratic", own)
    return train(plan, tmp_path_factory.mktemp("runs") / "all")


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, gzip.decompress((folder / store.RUNS).read_bytes()).splitlines()))


def test_the_table_can_be_checked_with_the_runs(trained, tmp_path):
    done = CliRunner().invoke(app, ["report", str(trained), "--publish", str(tmp_path / "small")])
    assert done.exit_code == 0 and "Published: " in done.output, done.output
    small = json.loads((tmp_path / "small/table.json").read_text())
    lines = lines_of(tmp_path / "small")
    assert [(line["name"], line["seed"]) for line in lines] == [
        (n, s) for n in NAMES for s in range(3)
    ]
    for name, row in small["methods"].items():
        for key, value in row.items():
            figures = [
                (line["result"]["final"] | line["result"]["end"])[key]
                for line in lines
                if line["name"] == name
            ]
            expected = np.mean(figures), np.std(figures, ddof=1), 3
            shown = value["mean"], value["std"], value["runs"]
            assert shown == pytest.approx(expected, rel=1e-4, abs=1e-9), (name, key)
    meta = small["meta"]
    assert (meta["task"], meta["seeds"], meta["methods"]) == (
        "toy_task:TASK",
        [0, 1, 2],
        list(NAMES),
    )
    assert meta["config"]["epochs"] == 30 and meta["environment"].keys() >= {"torch", "processor"}
    for line, run in zip(lines, store.load_comparison(trained).runs, strict=True):
        assert line["method"] == run.method and line["result"]["diverged"] is None
        whole = {row["epoch"]: row["loss"] for row in run.rows}
        thin = {row["epoch"]: row["loss"] for row in line["rows"]}
        assert len(whole) == 31 and len(thin) == 20 and {0, 30} <= set(thin)
        assert all(value == float(f"{whole[epoch]:.6g}") for epoch, value in thin.items())
        assert line["result"]["final"]["excess"], "a short list stays"
    before = (tmp_path / "small" / store.RUNS).read_bytes()
    report.publish(trained, tmp_path / "small")
    assert (tmp_path / "small" / store.RUNS).read_bytes() == before


def test_the_page_is_the_same_from_the_small_files(trained, tmp_path):
    report.publish(trained, tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    whole = compare.conclude(trained)
    small = compare.conclude(tmp_path)
    assert (small.verdict, small.warnings) == (whole.verdict, whole.warnings)
    one, other = (checked(done.report.read_text(encoding="utf-8")) for done in (whole, small))
    for table in ("Final figures", "All figures", "What each method ran with"):
        assert cells(one, table) == cells(other, table)
    assert 'id="curves"' in other and "runs.jsonl.gz" in other and "PyTorch" in other
    assert {n: (tmp_path / n).read_bytes() for n in files} == files, "they are left as they are"
    assert (tmp_path / "table.json").read_bytes() == files["table.json"]


def test_nothing_good_is_overwritten(trained, tmp_path):
    """With one run less, and with none at all."""
    folder, small = tmp_path / "runs", tmp_path / "small"
    shutil.copytree(trained, folder)
    report.publish(folder, small)
    compare.conclude(folder)
    kept = {path: path.read_bytes() for path in [*folder.glob("*.*"), *small.iterdir()]}
    assert {path.name for path in kept} >= {"report.html", "table.json", "runs.jsonl.gz"}
    for left in (2, 0):
        for run in list(folder.glob("*/seed-*"))[: -left or None]:
            shutil.rmtree(run)
        reason = "nothing to report" if left == 0 else r"more runs than there are now \(sonex"
        for work in (compare.conclude, lambda out: report.publish(out, small)):
            with pytest.raises(FolderError, match=reason):
                work(folder)
        assert CliRunner().invoke(app, ["report", str(folder)]).exit_code != 0
        assert {path: path.read_bytes() for path in kept} == kept
    with pytest.raises(FolderError, match="not a folder of runs"):
        report.publish(small, tmp_path / "again")


def test_a_place_of_this_machine_is_not_published(trained, tmp_path):
    report.publish(trained, tmp_path)
    folder = tmp_path / "other"
    shutil.copytree(trained, folder)
    meta = store.read_json(folder / "comparison.json")
    command = "fcco compare toy --out '/home/me/a b' --data-folder=/data --seeds 0,1,2"
    store.write_json(folder / "comparison.json", meta | {"command": command})
    report.publish(folder, tmp_path / "small")
    small = json.loads((tmp_path / "small/table.json").read_text())
    assert small["meta"]["command"] == "fcco compare toy --seeds 0,1,2"


def test_a_sweep_from_runs_to_its_small_file(tmp_path):
    grid = sweep.Grid({name: sweep.MethodGrid({"lr": [0.1, 0.01]}) for name in NAMES})
    chosen = sweep.settings_of(grid, BASE)
    plan = sweep.plan_sweep("toy_task:TASK", "quadratic", replace(BASE, epochs=1), chosen, (7, 8))
    found = sweep.choose(train(plan, tmp_path / "all"), chosen, BASE.seeds)
    done = compare.conclude(tmp_path / "all")
    assert list(done.table) == list(found["winners"])
    comparison = store.load_comparison(tmp_path / "all")
    for name, won in found["winners"].items():
        for key, value in done.table[name].items():
            figures = [run.figures[key] for run in comparison.of(won)]
            expected = np.mean(figures), np.std(figures, ddof=1)
            assert (value["mean"], value["std"]) == pytest.approx(expected)
    assert "test" not in json.dumps(done.table), "sweeps print no test figure"
    report.publish(tmp_path / "all", tmp_path / "small")
    assert [path.name for path in (tmp_path / "small").iterdir()] == [store.SWEEP]
    small = sweep.read(tmp_path / "small")
    assert small and small["ranking"] == found["ranking"]
    for entry, own in zip(found["settings"], small["settings"], strict=True):
        assert own["setting"] == entry["setting"]
        for key in ("val_loss", "val_excess"):
            assert own["figures"][key] == pytest.approx(entry["figures"][key], rel=1e-5)
    lines = list(csv.DictReader((tmp_path / "all" / store.SETTINGS).read_text().splitlines()))
    entries = {entry["name"]: entry for entry in found["settings"]}
    wanted = [(method, k, name) for method, names in found["ranking"].items()
              for k, name in enumerate(names, 1)]  # fmt: skip
    assert [(line["method"], int(line["rank"]), line["name"]) for line in lines] == wanted
    for line in lines:
        entry = entries[line["name"]]
        for key in ("val_loss", "val_excess"):
            assert float(line[key]) == entry["figures"][key]
        assert float(line["lr"]) == entry["setting"]["lr"]
        assert (line["chosen"] == "True") == (line["name"] in found["winners"].values())
    assert not any(key.startswith("test") for key in lines[0])
    with pytest.raises(FolderError, match="not a folder of runs"):
        compare.conclude(tmp_path / "small")
