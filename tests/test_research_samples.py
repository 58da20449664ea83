"""Samples to SONEX's training CVaR, from folders of runs written by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fcco_experiments import config
from fcco_experiments.store import load_comparison, write_json, write_rows, write_text

from research.group_dro_samples import compare, curves, main, met

Lines = dict[str, tuple[str, list[list[tuple[float, float]]]]]


def folder(at: Path, runs: Lines, broken: tuple[str, ...] = ()) -> Path:
    """A comparison; names in `broken` have a further seed that diverged and one without an end."""
    seeds = range(max(len(lines) for _, lines in runs.values()) + 2)
    meta = {"task": "group-dro", "config": {}, "methods": list(runs), "seeds": list(seeds)}
    at.mkdir()
    write_json(at / "comparison.json", meta)
    for name, (word, lines) in runs.items():
        bad = [[(0, 9.0), (100, -9.0)]] * 2 if name in broken else []
        for seed, line in enumerate([*lines, *bad]):
            own = at / name / f"seed-{seed}"
            own.mkdir(parents=True)
            spec: dict[str, Any] = {"name": name, "seed": seed, "config": {}}
            spec["method"] = {"method": word, "lr": 0.1}
            write_text(own / "config.yaml", config.dump(spec))
            rows = [{"samples": x, "train_cvar": y} for x, y in line]
            write_rows(own / "metrics.jsonl", rows)
            why = "not finite" if seed == len(lines) else None
            if seed <= len(lines):
                end = {"final": rows[-1], "end": {}, "diverged": why}
                write_json(own / "result.json", end)
    return at


RUNS: Lines = {
    "sonex": ("sonex", [[(0, 1.0), (100, 0.7), (200, 0.5)], [(0, 1.0), (100, 0.5), (200, 0.3)]]),
    "sonex-adam": ("sonex", [[(0, 1.0), (200, 0.45)]]),  # worse than the mean of sonex, 0.4
    "sonx": ("sonx", [[(0, 1.0), (100, 0.9), (200, 0.8)]]),
    "ooa": ("ooa", [[(0, 1.0), (100, 0.2), (200, 0.3)]]),
    "erm": ("erm", [[(0, 1.0), (200, 1.2)]]),
}
LONGER: Lines = {
    "sonx": ("sonx", [[(0, 1.0), (200, 0.8), (400, 0.2)]]),
    "other": ("alexr2", [[(0, 1.0), (400, 0.1)]]),
    "slow": ("ooa", [[(0, 1.0), (400, 0.8)]]),
}


def test_figures_by_hand(tmp_path: Path) -> None:
    told = compare(
        curves(load_comparison(folder(tmp_path / "a", RUNS, broken=("sonex", "ooa")))), {}
    )
    assert (told["sonex"], told["samples"], told["seeds"]) == ("sonex", 200, 2)
    assert told["final"] == pytest.approx(0.4)
    rows = {row["method"]: row for row in told["baselines"]}
    assert list(rows) == ["sonx", "ooa", "erm"]
    # sonx ends at 0.8; the mean of sonex, 1.0 then 0.6, is there after 50 of 200 samples.
    assert rows["sonx"]["needs"] is None and rows["sonx"]["more_than"] == 1.0
    assert rows["sonx"]["matched_after"] == pytest.approx(0.25)
    # ooa is at 0.4 after 75 samples, and sonex never at its 0.3.
    assert rows["ooa"]["needs"] == pytest.approx(75 / 200) and rows["ooa"]["more_than"] is None
    assert rows["ooa"]["matched_after"] is None and rows["ooa"]["seeds"] == 1
    assert rows["erm"]["matched_after"] == 0.0
    assert told["met"] is False


def test_a_longer_run_takes_the_place_of_the_short_one(tmp_path: Path) -> None:
    short = curves(load_comparison(folder(tmp_path / "a", RUNS)))
    long = curves(load_comparison(folder(tmp_path / "b", LONGER)))
    rows = {row["method"]: row for row in compare(short, long)["baselines"]}
    # From 0.8 at 200 to 0.2 at 400: at 0.4 after 200 + 2/3 of 200.
    assert rows["sonx"]["needs"] == pytest.approx((200 + 400 / 3) / 200)
    # Its final 0.2 is never reached by sonex; "other" is there too.
    assert rows["sonx"]["matched_after"] is None and rows["other"]["samples"] == 400
    # sonex is at the 0.8 of "slow" after 50 samples, an eighth of those of "slow".
    assert rows["slow"]["matched_after"] == pytest.approx(50 / 400)
    assert rows["slow"]["more_than"] == pytest.approx(2.0)
    assert rows["other"]["needs"] == pytest.approx((400 * 0.6 / 0.9) / 200)


@pytest.mark.parametrize(
    ("needs", "more_than", "expected"),
    [
        ([1.5, 2.0], [None, None], True),
        ([1.4, 2.0], [None, None], False),
        ([None, 1.4], [9.0, None], False),
        ([None, 2.0], [1.5, None], True),
        ([None, 2.0], [1.0, None], None),  # not there, but it had no more samples
        ([], [], None),
    ],
)
def test_the_goal(needs: Any, more_than: Any, expected: bool | None) -> None:
    names = ("sonx", "ooa")
    rows = [
        {"word": word, "needs": own, "more_than": more}
        for word, own, more in zip(names, needs, more_than, strict=False)
    ]
    quick = {"word": "erm", "needs": 0.1, "more_than": None}  # no rival of the goal
    assert met([*rows, quick]) is expected


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short, long = folder(tmp_path / "a", RUNS), folder(tmp_path / "b", LONGER)

    def run(*more: str) -> str:
        monkeypatch.setattr(sys, "argv", ["group_dro_samples", *more])
        main()
        return capsys.readouterr().out

    table = run(str(short))
    assert "> 1.00: sonx is not there within its 200 samples." in table
    assert "0.37" in table and "never" in table and "25 %" in table and "missed" in table
    told = json.loads(run(str(short), "--long", str(long), "--json"))
    assert {row["method"] for row in told["baselines"]} == {"sonx", "ooa", "erm", "other", "slow"}
    with pytest.raises(SystemExit, match=r"holds no comparison\.json"):
        run(str(tmp_path))
    with pytest.raises(SystemExit, match="no finished run of sonex"):
        run(str(folder(tmp_path / "c", {"sonx": RUNS["sonx"]})))
