"""The fairness frontier by hand, and a run of group DRO."""

from __future__ import annotations

import pytest

from studies.frontier import Point, compared
from studies.group_dro.training import run as train
from studies.runner import Job


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
    assert list(rows) == ["c@0"]
    row = rows["c@0"]
    # a@1 less c@0: not a@2, which is beaten on validation data.
    assert row["matched"] == "a@1"
    assert row["matched_auc"] == pytest.approx(0.06)
    assert row["matched_gap"] == pytest.approx(0.10)


# Group DRO


def test_a_run_of_group_dro_is_one_of_the_task():
    setting = {"method": "sonex", "lr": 0.01}
    job = Job("grouped-synthetic", "automatic", setting, 2000)
    one, two = (train(job, (f"epochs={k}", "device=cpu")) for k in (1, 2))
    assert two["epochs"] == 2 and two["train_cvar"] < one["train_cvar"]
