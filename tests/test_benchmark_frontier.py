"""The figures of the frontier benchmark on points worked out by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fairness_frontier import TABLE, best, lead

POINTS = {
    "a@0": (0.1, 0.80),
    "a@1": (0.3, 0.90),
    "a@2": (0.2, 0.70),  # beaten by a@0
    "b@0": (0.2, 0.84),
    "c@0": (0.05, 0.60),
}


def test_frontier_and_lead_by_hand():
    assert list(best(POINTS, ["a"])) == ["a@0", "a@1"]
    ours = best(POINTS, ["a"])
    assert lead(ours, *POINTS["b@0"]) == pytest.approx(0.01)  # half way: 0.85
    assert lead(ours, *POINTS["c@0"]) is None
    assert lead(ours, 0.5, 0.95) == pytest.approx(-0.05)  # right of its end: the last point


def test_the_committed_table_says_what_the_page_says():
    command = [sys.executable, "-m", "benchmarks.fairness_frontier", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=TABLE.parents[3])
    points = json.loads(done.stdout)["points"]
    leads = {row["method"]: row["lead"] for row in points if row["lead"] is not None}
    rivals = {n: v for n, v in leads.items() if not n.startswith("alexr2-one-batch")}
    behind = {name for name, value in rivals.items() if value < 0}
    page = Path(TABLE.parents[2] / "fairness.md").read_text()
    assert behind == {"sonx@1"} and "SONX with penalty 2" in page
    ahead = [value for name, value in rivals.items() if name not in behind]
    low, high = round(min(ahead), 4), round(max(ahead), 3)
    assert " ".join(f"{low} to {high}".split()) in " ".join(page.split())
