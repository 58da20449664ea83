"""Settings for the convex problem with ten constraints."""

from __future__ import annotations

from itertools import product

from . import rows as r
from .stepper import Setting

__all__ = ["GRID"]

GRID: dict[str, list[Setting]] = {
    "SONEX": r.rows(
        r.PENALTY,
        [
            (20.0, 1e-3, None, 0.01, 0.5, 0.0),
            (20.0, 3e-3, None, 0.01, 0.5, 0.0),
            (20.0, 3e-3, None, 0.01, 0.5, 0.005),
            (20.0, 1e-2, 0.25, 0.01, 0.5, 0.01),
            (20.0, 1e-2, 0.5, 0.01, "auto", 0.0),
            (20.0, 3e-2, 0.5, 0.005, "auto", 0.005),
            (20.0, 3e-2, 0.5, 0.01, "auto", 0.005),
            (20.0, 3e-2, 0.5, 0.02, "auto", 0.005),
        ],
        warm_up=25,
    ),
    "ALEXR2": r.rows(
        r.PROXIMAL,
        [
            (20.0, 3e-3, None, 0.01, 1.0, 0.0, 0.5, 0.02, 2),
            (20.0, 1e-2, 0.5, 0.01, 1.0, 0.0, 0.5, 0.02, 2),
            (20.0, 3e-2, 0.5, 0.01, 1.0, 0.0, 0.5, 0.02, 2),
            (20.0, 3e-2, 0.5, 0.01, 1.0, 0.005, 0.5, 0.02, 2),
            (20.0, 3e-2, 0.5, 0.02, 1.0, 0.005, 0.5, 0.02, 2),
            (20.0, 3e-2, 0.5, 0.02, 1.0, 0.005, 0.5, 0.1, 2),
            (20.0, 3e-2, 0.5, 0.02, 1.0, 0.005, 0.5, 0.02, 5),
            (20.0, 3e-2, 0.75, 0.02, 1.0, 0.0, 0.5, 0.02, 2),
        ],
    ),
    "ALEXR": r.rows(
        "ki kp",
        [
            (0.005, 0.1),
            (0.01, 0.1),
            (0.01, 0.3),
            (0.01, 1.0),
            (0.015, 0.3),
            (0.02, 0.3),
            (0.03, 0.1),
            (0.03, 1.0),
        ],
        penalty=100.0,
    ),
    "SONX": r.rows(
        "penalty gamma correction",
        [
            (3.0, 0.01, "auto"),
            (5.0, 0.005, "auto"),
            (5.0, 0.01, "auto"),
            (5.0, 0.02, 0.5),
            (10.0, 0.005, "auto"),
            (10.0, 0.005, 0.2),
            (10.0, 0.02, 0.5),
            (20.0, 0.01, "auto"),
        ],
        method="hinge",
        warm_up=25,
    ),
    "squared hinge": r.rows(
        "penalty gamma",
        product((50.0, 100.0, 200.0, 400.0), (0.02, 0.1)),
        method="squared-hinge",
        read="old",
        margin=0.005,
        warm_up=25,
    ),
    "SSG": r.rows("threshold constraint_lr", product((0.2, 0.3, 0.4, 0.6), (2e-2, 5e-2))),
    "OSS": r.rows("inner_steps proximal", product((100, 500, 1000, 2000), (1e-3, 1e-2))),
    "ICPPAC": r.rows(
        "inner_steps tau theta", product((10, 50), (60.0, 100.0), (0.1, 1.0)), proximal=2e-3
    ),
    "Cooper simultaneous": r.ascent(0.005, 0.01, 0.02, 0.05),
    "Cooper alternating": r.ascent(0.005, 0.01, 0.02, 0.05),
    "Cooper extrapolation": r.ascent(0.01, 0.02, 0.04, 0.1),
    **r.augmented(
        (0.01, 0.03, False),
        (0.01, 0.1, False),
        (0.01, 0.3, False),
        (0.015, 0.03, False),
        (0.02, 0.1, False),
        (0.03, 0.03, False),
        (0.01, 0.03, True),
        (0.02, 0.1, True),
    ),
    **r.controllers(
        (0.01, 0.03, 0.0),
        (0.01, 0.1, 0.0),
        (0.01, 0.1, 0.9),
        (0.01, 0.3, 0.9),
        (0.015, 0.1, 0.9),
        (0.02, 0.3, 0.9),
        (0.03, 0.3, 0.9),
        (0.01, 1.0, 0.99),
    ),
    "HCT PBM": r.penalty_barrier(
        ("const", 0.9, 0.03, 1.0),
        ("const", 0.8, 0.03, 1.0),
        ("const", 0.95, 0.1, 1.0),
        ("const", 0.9, 0.1, 1.0),
        ("const", 0.9, 0.1, 3.0),
        ("const", 0.8, 0.1, 3.0),
        ("const", 0.9, 0.3, 1.0),
        ("dimin_adapt", 0.9, 0.05, 1.0),
    ),
    "HCT SSG": r.switching(0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0),
    "HCT Moreau": r.moreau([(0.01, 0.03), (0.01, 0.1), (0.015, 0.03), (0.03, 0.03)], (0.01, 0.1)),
}
