"""What is read from runs: the fairness frontier and the samples to SONEX's CVaR, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from research.fairness_frontier import Point, compared
from research.group_dro_samples import compare, samples_to_reach


def point(name, val, test, spread=0.0):
    """A setting with three seeds whose figures are `spread` apart; its standard error is known."""
    steps = (-spread, 0.0, spread)
    gaps = [[place[0] + s for s in steps] for place in (val, test)]
    aucs = [[place[1] + s for s in steps] for place in (val, test)]
    return Point(name, {"lr": 0.1}, False, gaps[0], aucs[0], gaps[1], aucs[1])


OURS = [
    point("a@0", (0.10, 0.80), (0.10, 0.80), 0.01),
    point("a@1", (0.20, 0.85), (0.30, 0.90), 0.02),
    point("b@0", (0.30, 0.90), (0.40, 0.70)),  # on the frontier of validation data, not of test
]
BEATEN = point("a@2", (0.25, 0.84), (0.01, 0.99))  # the best on test data, but nobody could know
RIVAL = point("c@0", (0.22, 0.86), (0.20, 0.84), 0.03)


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
    assert row["matched_gap"] == pytest.approx(0.10)
    assert row["matched_gap_errors"] == pytest.approx(0.10 / (0.01 / math.sqrt(3)))


# Samples


def lines(**curves_of: list[list[tuple[float, float]]]) -> dict[str, Any]:
    return {name: (name.partition("_")[0], own) for name, own in curves_of.items()}


RUNS = lines(
    sonex=[[(0, 1.0), (100, 0.7), (200, 0.5)], [(0, 1.0), (100, 0.5), (200, 0.3)]],
    sonex_adam=[[(0, 1.0), (200, 0.45)]],  # worse than the mean of sonex, 0.4
    sonx=[[(0, 1.0), (100, 0.9), (200, 0.8)]],
    ooa=[[(0, 1.0), (100, 0.2), (200, 0.3)]],
)


def test_samples_by_hand():
    told = compare(RUNS, {})
    assert (told["sonex"], told["samples"], told["seeds"]) == ("sonex", 200, 2)
    assert told["final"] == pytest.approx(0.4)
    rows = {row["method"]: row for row in told["baselines"]}
    # sonx ends at 0.8; the mean of sonex, 1.0 then 0.6, is there after 50 of 200 samples.
    assert rows["sonx"]["needs"] is None and rows["sonx"]["more_than"] == 1.0
    assert rows["sonx"]["matched_after"] == pytest.approx(0.25)
    # ooa is at 0.4 after 75 samples, and sonex never at its 0.3.
    assert rows["ooa"]["needs"] == pytest.approx(75 / 200) and rows["ooa"]["more_than"] is None
    assert rows["ooa"]["matched_after"] is None and told["met"] is False
    # A longer run takes the place of the short one: from 0.8 at 200 to 0.2 at 400.
    longer = compare(RUNS, lines(sonx=[[(0, 1.0), (200, 0.8), (400, 0.2)]]))["baselines"]
    assert longer[0]["needs"] == pytest.approx((200 + 400 / 3) / 200)


def test_samples_to_reach_a_value_by_hand():
    # Means: 0.9 at 0, 0.6 at 100, 0.7 at 200, 0.2 at 300.
    one = [(0, 1.0), (100, 0.7), (200, 0.8), (300, 0.2)]
    two = [(0, 0.8), (100, 0.5), (200, 0.6), (300, 0.2)]
    for target, wanted in ((0.9, 0), (0.75, 50), (0.6, 100), (0.45, 250)):
        assert samples_to_reach([one, two], target) == pytest.approx(wanted)
    assert samples_to_reach([one, two], 0.1) is None
    assert samples_to_reach([one, two[:2]], 0.45) is None  # where a seed ends, so does the mean
    other = [[(0, 1.0), (100, 0.0)], [(0, 1.0), (200, 0.0)]]  # averaged evaluation by evaluation
    assert samples_to_reach(other, 0.5) == pytest.approx(75)
    assert samples_to_reach([[(0, math.nan), (100, 0.4)]], 0.5) == 100  # no line from there
    assert samples_to_reach([[(0, 1.0), (100, math.nan)]], 0.5) is None
