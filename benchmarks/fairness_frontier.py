"""Frontiers of a fairness sweep, from its table: how far ours lie above each baseline's.

    python -m benchmarks.fairness_frontier [TABLE.json] [--ours alexr2,sonex] [--json]

Reads the table of `fcco sweep fairness --data adult --grid frontier`, whose settings are called
NAME@k. For every point on the frontier of a baseline (test AUC against the true test gap, means
over seeds) it prints the AUC of our frontier at the same gap, interpolated, less that of the
baseline; a dash where ours does not reach the gap.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from fcco.experiments.report.frontier import frontier

TABLE = Path(__file__).parent.parent / "docs/results/fairness-adult-frontier/table.json"


def best(points: dict[str, tuple[float, float]], families: list[str]) -> dict[str, Any]:
    """The frontier of some methods: (gap, AUC) by name, from the smallest gap on."""
    chosen = {name: at for name, at in points.items() if name.split("@")[0] in families}
    names, places = list(chosen), list(chosen.values())
    kept = frontier([gap for gap, _ in places], [auc for _, auc in places])
    return {names[k]: places[k] for k in kept}


def lead(ours: dict[str, Any], gap: float, auc: float) -> float | None:
    """How far our frontier lies above a point; None left of its end."""
    gaps, aucs = zip(*ours.values(), strict=True)
    return None if gap < gaps[0] else float(np.interp(gap, gaps, aucs) - auc)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", nargs="?", type=Path, default=TABLE)
    parser.add_argument("--ours", default="alexr2,sonex")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    table = json.loads(asked.table.read_text())["methods"]
    points = {n: (row["test_gap"]["mean"], row["test_auc"]["mean"]) for n, row in table.items()}
    mine = asked.ours.split(",")
    ours = best(points, mine)
    rows = [
        {"method": name, "gap": gap, "auc": auc, "lead": None if family in mine else above}
        for family in dict.fromkeys([*mine, *(name.split("@")[0] for name in points)])
        for name, (gap, auc) in best(points, [family]).items()
        for above in [lead(ours, gap, auc)]
    ]
    if asked.json:
        print(json.dumps({"ours": list(ours), "points": rows}))
        return
    print(f"Our frontier ({asked.ours}): {', '.join(ours)}")
    print(f"{'setting':22}{'true gap':>10}{'AUC':>9}{'ours above':>12}")
    for row in rows:
        above = "-" if row["lead"] is None else f"{row['lead']:+.4f}"
        print(f"{row['method']:22}{row['gap']:10.4f}{row['auc']:9.4f}{above:>12}")


if __name__ == "__main__":
    main()
