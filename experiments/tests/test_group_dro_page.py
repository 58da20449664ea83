"""The pages on group DRO have the figures of the committed runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from studies.group_dro import report

DOCS = Path(__file__).parents[2] / "docs"
SHORT, DETAILS = (
    (DOCS / "research" / name).read_text(encoding="utf-8")
    for name in ("group-dro.md", "details/group-dro.md")
)
DATA = ("celeba", "sentiment", "amazon")
ABLATIONS = sorted(each.parent for each in DOCS.glob("results/group-dro-*/table.json"))


def read(path: str) -> Any:
    return json.loads((DOCS / "results" / path).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def networks() -> list[report.Run]:
    return report.read(DOCS / "results/group-dro/networks.jsonl.gz")


@pytest.fixture(scope="module")
def heads() -> list[report.Run]:
    return report.read(DOCS / "results/group-dro/heads.jsonl.gz")


@pytest.mark.parametrize("data", DATA)
def test_tables_of_networks(networks: list[report.Run], data: str) -> None:
    table = report.networks(networks, data)
    assert report.markdown(table) in DETAILS
    for name, row in table.items():
        (line,) = [each for each in SHORT.splitlines() if each.startswith(f"| {name} |")]
        shown = f"{row['test_cvar']['mean']:.3f} ({row['train_cvar']['mean']:.3f})"
        cell = line.split("|")[2 + DATA.index(data)]
        assert shown in cell, (name, data, shown)
        found = row["smallest_eigenvalue"]
        assert (found is None) == (data == "amazon")
        assert found is None or f"{found:.2g}" in DETAILS


def test_constant_outputs(networks: list[report.Run]) -> None:
    """The counts in the text: runs for twice as long, and the automatic method on CelebA."""
    longer = [run for run in networks if run["stage"] == "twice as long"]
    counts = {
        name: sum(report.is_constant(run) for run in longer if run["name"] == name)
        for name in report.NETWORKS
    }
    assert counts == {
        "automatic": 2, "sonex": 4, "alexr2": 4, "sonx": 0, "ooa-cvar": 1, "ooa": 1, "uniform": 0,
        "erm": 0,
    }  # fmt: skip
    assert report.networks(networks, "celeba")["automatic"]["collapsed"] == 2
    tuning = [r for r in networks if r["stage"] == "tuning" and r["name"] == "automatic"]
    own = [r["train_cvar"] for r in tuning if r["data"] == "celeba" and r["setting"]["lr"] < 3e-4]
    assert min(own) > 0.165 and max(own) < 0.215


@pytest.mark.parametrize("rule", ["val_cvar", "train_cvar"])
@pytest.mark.parametrize("data", DATA)
def test_tables_of_heads(heads: list[report.Run], data: str, rule: str) -> None:
    table = report.heads(heads, data, rule)
    assert {row["seeds"] for row in table.values()} == {10}
    assert report.markdown(table) in DETAILS


def test_figures_in_the_text(networks: list[report.Run], heads: list[report.Run]) -> None:
    trained = {
        data: {
            n: row["train_cvar"]["mean"]
            for n, row in report.heads(heads, data, "train_cvar").items()
        }
        for data in DATA
    }
    ours = [min(trained[d]["sonex"], trained[d]["sonex-adam"]) for d in DATA]
    rivals = [min(value for name, value in trained[d].items() if "ooa" in name) for d in DATA]
    for values in ([trained[d]["automatic"] for d in DATA], rivals):
        first, second, third = (f"{value:.3f}" for value in values)
        assert f"{first}, {second} and {third}" in " ".join(SHORT.split())
    assert f"ends at {ours[0]:.3f} on CelebA" in " ".join(SHORT.split())
    plain = report.heads(heads, "amazon", "train_cvar")["erm"]
    shown = f"ERM on Amazon, {plain['train_cvar']['mean']:.3f}"
    assert shown in SHORT and f"test CVaR is {plain['test_cvar']['mean']:.1f}" in SHORT
    behind = [trained[d]["sonx"] - value for d, value in zip(DATA, ours, strict=True)]
    assert "by {:.3f}, {:.3f} and {:.3f} in training CVaR".format(*behind) in DETAILS
    assert f"{min(behind):.2f} to {max(behind):.2f} with heads" in SHORT
    ends = [report.networks(networks, d) for d in DATA]
    gaps = [t["sonx"]["train_cvar"]["mean"] - t["sonex"]["train_cvar"]["mean"] for t in ends]
    assert f"{min(gaps):.2f} to {max(gaps):.2f} behind SONEX end to end" in SHORT


@pytest.mark.parametrize("data", DATA)
def test_samples_that_the_others_need(heads: list[report.Run], data: str) -> None:
    line = report.samples_line(heads, data)
    assert line in DETAILS, line


def test_settings_were_tuned_equally(networks: list[report.Run]) -> None:
    for data in DATA:
        tuning = [run for run in networks if run["data"] == data and run["stage"] == "tuning"]
        for name in report.NETWORKS:
            settings = [json.dumps(run["setting"]) for run in tuning if run["name"] == name]
            assert len(set(settings)) == 4, (data, name)


@pytest.mark.parametrize("folder", ABLATIONS, ids=lambda folder: folder.name)
def test_ablations(folder: Path) -> None:
    assert len(ABLATIONS) == 8, "four of two data sets"
    for name, figures in read(f"{folder.name}/table.json")["methods"].items():
        judged = figures["train_cvar"], figures["test_cvar"]
        wanted = [f"{figure['mean']:.3f} ± {figure['std']:.3f}" for figure in judged]
        rows = [line for line in DETAILS.splitlines() if line.startswith(f"| {name} |")]
        assert any(all(cell in row for cell in wanted) for row in rows), (name, wanted)


def test_speed() -> None:
    for case in read("group-dro-speed/speed.json")["cases"].values():
        cells = f"| {case['ema']:.3f} | {case['msvr']:.3f} | {case['msvr_over_bound']:.3f} |"
        rows = [line for line in DETAILS.splitlines() if cells in line]
        assert any(f"| {case['erm_per_second']:,} |" in row for row in rows)


def test_a_run_alone_has_no_interval() -> None:
    run = {"seed": 1, **dict.fromkeys(report.COLUMNS[:3], 1.0)}
    run |= {"test_worst_accuracy": 0.5, "test_accuracy": 0.5}
    row = report.row_of([run], [run])
    assert row["seeds"] == 1 and not row["test_cvar"]["decided"]
    assert not math.isnan(row["test_cvar"]["mean"])
