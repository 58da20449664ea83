"""The best that tuning gives, by any library: settings that searches with seed 0 chose, as data.

Of the methods that lead each table of docs/research/details/constrained.md the row of its grid
(`studies.constrained.grids`) that has the least objective at a violation of 0.005, read off a path
of shifted limits. The searches were those of `python -m studies.untuned.tuned` at commit 8eabf04.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from studies.constrained import grids
from studies.constrained.report import place

Tuned = list[tuple[str, dict[str, Any]]]

# Limits in training relative to the stated ones. Gaps of rates may not be shifted below zero.
SHIFTS = {
    "adult": (-0.005, -0.0025, 0.0),
    "compas": (-0.005, -0.0025, 0.0),
    "convex": (-0.015, -0.01, -0.005, 0.0),
    "sampled": (-0.06, -0.04, -0.02, 0.0),
    "docs": (-0.01, -0.005, 0.0, 0.005),
}


def level(points: Sequence[tuple[float, float]], limit: float) -> tuple[float, float]:
    """Objective and violation of a path of (violation, objective) where it is at the limit.

    A path that never comes down to the limit gives its least violation.
    """
    found = place(points, limit)
    if found is None:
        violation, objective = min(points)
        return objective, violation
    k, share = found
    (v0, f0), (v1, f1) = points[k], points[min(k + 1, len(points) - 1)]
    return f0 + share * (f1 - f0), v0 + share * (v1 - v0)


# Methods, best first, each with the row of its grid.
_ROWS = {
    "adult": (("SONEX", 2), ("ALEXR", 5), ("HCT ALM", 4)),
    "compas": (("HCT PBM", 2), ("SONEX", 5), ("Cooper simultaneous", 5)),
    "convex": (("SONEX", 5), ("squared hinge", 4), ("Cooper extrapolation", 2)),
    "sampled": (("ALEXR2", 1), ("SONEX", 2), ("Cooper augmented", 4)),
}
CONSTRAINTS: dict[str, Tuned] = {
    name: [(method, dict(grids.settings(name, method)[row])) for method, row in rows]
    for name, rows in _ROWS.items()
} | {
    "docs": [
        ("Cooper augmented", {"dual_lr": 0.3, "penalty": 10.0, "dual_decay": False}),
        ("ALEXR", {"ki": 0.3, "kp": 10.0, "penalty": 100.0}),
        (
            "SONEX",
            {
                "smoothing": 0.01, "gamma": 0.02, "correction": "auto", "margin": 0.026,
                "penalty": 8.0,
            },
        ),
    ]
}  # fmt: skip
