"""The text on group DRO has the figures of the committed runs."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from studies.group_dro import report

DOCS = Path(__file__).parents[2] / "docs"
SHORT, DETAILS = (
    (DOCS / "research" / name).read_text(encoding="utf-8")
    for name in ("group-dro.md", "details/group-dro.md")
)


@pytest.fixture(scope="module")
def networks() -> list[report.Run]:
    return report.published("networks")


def test_constant_outputs(networks: list[report.Run]) -> None:
    """The counts in the text: runs for twice as long, and the automatic method on CelebA."""
    longer = [run for run in networks if run["stage"] == "twice as long"]
    counts = {
        name: sum(map(report.is_constant, own))
        for name, own in report.by_name(longer, report.NETWORKS).items()
    }
    assert counts == {
        "automatic": 2, "sonex": 4, "alexr2": 4, "sonx": 0, "ooa-cvar": 1, "ooa": 1, "uniform": 0,
        "erm": 0,
    }  # fmt: skip
    own = report.by_name(report.fresh(networks, "celeba"), report.NETWORKS)["automatic"]
    assert sum(map(report.is_constant, own)) == 2
    tuning = [r for r in networks if r["stage"] == "tuning" and r["name"] == "automatic"]
    slow = [r["train_cvar"] for r in tuning if r["data"] == "celeba" and r["setting"]["lr"] < 3e-4]
    assert min(slow) > 0.165 and max(slow) < 0.215


def test_settings_were_tuned_equally(networks: list[report.Run]) -> None:
    for data in report.DATA:
        tuning = [run for run in networks if run["data"] == data and run["stage"] == "tuning"]
        for name in report.NETWORKS:
            settings = [json.dumps(run["setting"]) for run in tuning if run["name"] == name]
            assert len(set(settings)) == 4, (data, name)


def test_figures_in_the_text(networks: list[report.Run]) -> None:
    heads = report.published("heads")

    def ends(data: str, key: str) -> dict[str, float]:
        own = report.by_name(report.chosen_by(heads, data, "train_cvar"), report.HEADS)
        assert {len(runs) for runs in own.values()} == {10}
        return {name: fmean(run[key] for run in runs) for name, runs in own.items()}

    trained = {data: ends(data, "train_cvar") for data in report.DATA}
    ours = [min(own["sonex"], own["sonex-adam"]) for own in trained.values()]
    rivals = [min(v for name, v in own.items() if "ooa" in name) for own in trained.values()]
    text = " ".join(SHORT.split())
    for values in ([own["automatic"] for own in trained.values()], rivals):
        assert "{:.3f}, {:.3f} and {:.3f}".format(*values) in text
    assert f"ends at {ours[0]:.3f} on CelebA" in text
    assert f"ERM on Amazon, {trained['amazon']['erm']:.3f}" in SHORT
    assert f"test CVaR is {ends('amazon', 'test_cvar')['erm']:.1f}" in SHORT
    behind = [own["sonx"] - best for own, best in zip(trained.values(), ours, strict=True)]
    assert "by {:.3f}, {:.3f} and {:.3f} in training CVaR".format(*behind) in DETAILS
    assert f"{min(behind):.2f} to {max(behind):.2f} with heads" in SHORT
    gaps = []
    for data in report.DATA:
        own = report.by_name(report.fresh(networks, data), report.NETWORKS)
        sonx, sonex = (fmean(run["train_cvar"] for run in own[name]) for name in ("sonx", "sonex"))
        gaps.append(sonx - sonex)
    assert f"{min(gaps):.2f} to {max(gaps):.2f} behind SONEX end to end" in SHORT
