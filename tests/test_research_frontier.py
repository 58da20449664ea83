"""The frontier benchmark on points worked out by hand, and on a sweep written by hand."""

import json
import math
import subprocess
import sys

import pytest
from fcco_experiments import sweep as sweeps

from research import fairness_frontier
from research.fairness_frontier import (
    FILES,
    Point,
    best,
    compared,
    error,
    from_sweep,
    height,
    match,
    read,
    told,
    write,
)


def point(name, val, test, spread=0.0, chosen=False):
    """A setting with three seeds whose figures are `spread` apart; its standard error is known."""
    steps = (-spread, 0.0, spread)
    gaps = [[place[0] + s for s in steps] for place in (val, test)]
    aucs = [[place[1] + s for s in steps] for place in (val, test)]
    return Point(name, {"lr": 0.1}, chosen, gaps[0], aucs[0], gaps[1], aucs[1])


OURS = [
    point("a@0", (0.10, 0.80), (0.10, 0.80), 0.01),
    point("a@1", (0.20, 0.85), (0.30, 0.90), 0.02),
    point("b@0", (0.30, 0.90), (0.40, 0.70)),  # on the frontier of validation data, not of test
]
BEATEN = point("a@2", (0.25, 0.84), (0.01, 0.99))  # the best on test data, but nobody could know
RIVAL = point("c@0", (0.22, 0.86), (0.20, 0.84), 0.03)


def test_settings_are_kept_by_validation_data_alone():
    kept = best([BEATEN, *OURS], "val")
    assert [each.name for each in kept] == ["a@0", "a@1", "b@0"]
    assert [each.name for each in best(OURS, "test")] == ["a@0", "a@1"]


def test_of_equal_settings_the_first_is_kept():
    twins = [point("a@5", (0.1, 0.8), (0.2, 0.7)), point("a@3", (0.1, 0.8), (0.3, 0.6))]
    assert [each.name for each in best(twins, "val")] == ["a@5"]


def test_height_between_two_points_and_its_error():
    front = OURS[:2]
    assert error([1.0, 2.0, 3.0]) == pytest.approx(1 / math.sqrt(3))
    value, spread = height(front, 0.20) or (math.nan, math.nan)
    assert value == pytest.approx(0.85)
    pair = [0.5 * 0.01 / math.sqrt(3), 0.5 * 0.02 / math.sqrt(3)]
    assert spread == pytest.approx(math.sqrt(pair[0] ** 2 + pair[1] ** 2))
    value, spread = height(front, 0.15) or (math.nan, math.nan)
    assert value == pytest.approx(0.825)
    assert spread == pytest.approx(math.hypot(0.75 * 0.01, 0.25 * 0.02) / math.sqrt(3))
    assert height(front, 0.05) is None
    assert height(front, 0.50) == pytest.approx((0.90, 0.02 / math.sqrt(3)))
    at_its_end = height(front, front[0].at("test")[0])
    assert at_its_end == pytest.approx((0.80, 0.01 / math.sqrt(3)))


def test_the_match_looks_at_validation_data():
    assert match(OURS, RIVAL) is OURS[1]
    assert match(OURS, point("c@1", (0.10, 0.1), (0.0, 0.0))) is OURS[0]
    assert match(OURS, point("c@2", (0.05, 0.9), (0.5, 0.9))) is None


def test_rows_of_a_comparison():
    rows = {row["name"]: row for row in compared([RIVAL, BEATEN, *OURS], ["a", "b"])}
    assert list(rows)[-1] == "c@0"  # ours first
    assert [name for name, row in rows.items() if row["ours"]] == ["a@0", "a@1", "b@0"]
    row = rows["c@0"]
    assert row["above"] == pytest.approx(0.01)  # 0.85 at a gap of 0.20
    own = math.sqrt((0.005**2 + 0.01**2 + 0.03**2) / 3)
    assert row["above_errors"] == pytest.approx(0.01 / own)
    # a@1 less c@0, seed by seed: 0.06 - 0.01 s and 0.10 - 0.01 s for s = -1, 0, 1.
    assert row["matched"] == "a@1"
    assert row["matched_auc"] == pytest.approx(0.06)
    assert row["matched_auc_errors"] == pytest.approx(0.06 / (0.01 / math.sqrt(3)))
    assert row["matched_gap"] == pytest.approx(0.10)
    assert row["matched_gap_errors"] == pytest.approx(0.10 / (0.01 / math.sqrt(3)))
    assert "above" not in rows["a@0"] and "matched" not in rows["a@0"]
    text = told({"data": "x", "val_floor": 0.1, "test_floor": 0.1}, list(rows.values()), "a,b")
    assert "+0.0100 (+0.5)" in text and "+0.0600 (+10.4)" in text


def run(name, seed, val, test, diverged=None):
    figures = dict(zip(fairness_frontier.FIGURES, (*val, *test), strict=True))
    figures |= {"val_gap_floor": 0.06, "test_gap_floor": 0.04}
    return {"name": name, "seed": seed, "method": {"method": "sox"}, "final": figures, "end": {},
            "diverged": diverged, "fingerprint": "f"}  # fmt: skip


def test_a_sweep_is_read_run_by_run(tmp_path):
    names = ["a@0", "a@1", "a@2", "a@3", "b@0"]
    meta = {"task": "fairness", "config": {"data": "toy"}, "methods": names, "seeds": [7, 8]}
    (tmp_path / "comparison.json").write_text(json.dumps(meta))
    lines = [
        run("a@0", 7, (0.1, 0.8), (0.2, 0.7)),
        run("a@0", 8, (0.3, 0.6), (0.4, 0.5)),  # means on validation data: 0.2, 0.7
        run("a@1", 7, (0.3, 0.6), (0.0, 1.0)),
        run("a@1", 8, (0.3, 0.6), (0.0, 1.0)),  # beaten by a@0 where it counts
        run("a@2", 7, (0.0, 0.9), (0.1, 0.9)),
        run("a@2", 8, (0.0, 0.9), (0.1, 0.9), diverged="not finite"),
        run("a@3", 7, (0.0, 0.9), (0.1, 0.9)),  # its second run is missing
        run("b@0", 7, (0.5, 0.5), (0.5, 0.5)),
        run("b@0", 8, (0.5, 0.5), (0.5, 0.1234567)),
    ]
    (tmp_path / "fleet.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    entries = [{"name": n, "method": n[0], "setting": {"lr": k}} for k, n in enumerate(names)]
    ranking = {"a": names[:4], "b": ["b@0"]}
    sweep = {
        "rule": "",
        "limited": False,
        "settings": entries,
        "ranking": ranking,
        "winners": {"a": "a@0"},
    }
    sweeps.write(tmp_path, sweep)
    found = from_sweep(tmp_path)
    assert found["settings"] == {"a": 4, "b": 1} and found["seeds"] == [7, 8]
    assert (found["data"], found["val_floor"], found["test_floor"]) == ("toy", 0.06, 0.04)
    write(tmp_path / "there/frontier.json", found)
    head, points = read(tmp_path / "there/frontier.json")
    assert head["settings"] == found["settings"]
    assert points == [
        Point("a@0", {"lr": 0}, True, [0.1, 0.3], [0.8, 0.6], [0.2, 0.4], [0.7, 0.5]),
        Point("b@0", {"lr": 4}, False, [0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.123457]),
    ]


def test_the_command_on_the_committed_files(tmp_path):
    call = [sys.executable, "-m", "research.fairness_frontier", "--json"]
    call += ["--plot", str(tmp_path / "plot.png")]
    done = subprocess.run(call, capture_output=True, text=True, check=True, cwd=FILES[0].parents[3])
    rows = json.loads(done.stdout)
    assert set(rows) == {"adult", "compas"}
    assert (tmp_path / "plot.png").stat().st_size > 20_000
    for path in FILES:
        head, points = read(path)
        assert head["seeds"] == [1000, 1001, 1002, 1003, 1004]
        assert set(head["settings"].values()) == {384} and len(head["settings"]) == 7
        assert all(len(each.test_auc) == 5 for each in points)
        for method in head["settings"]:
            own = [each for each in points if each.method == method]
            assert best(own, "val") == own, "each is kept because no other beats it"
