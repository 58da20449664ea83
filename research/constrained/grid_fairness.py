"""Settings for gaps of rates: Adult and COMPAS."""

from __future__ import annotations

from itertools import product

from . import rows as r
from .stepper import Setting

__all__ = ["GRID"]

_AUGMENTED = r.augmented(
    (0.005, 0.1, False),
    (0.005, 0.3, False),
    (0.01, 0.03, False),
    (0.01, 0.1, False),
    (0.01, 0.2, False),
    (0.02, 0.1, False),
    (0.02, 0.3, False),
    (0.03, 0.3, True),
)

GRID: dict[str, list[Setting]] = {
    "SONEX": r.rows(
        r.PENALTY,
        [
            (14.0, 1e-3, None, 0.001, 0.02, 0.003),
            (14.0, 2e-3, None, 0.001, 0.02, 0.004),
            (14.0, 2e-3, None, 0.001, 0.04, 0.004),
            (14.0, 2e-3, None, 0.002, 0.04, 0.004),
            (14.0, 3e-3, None, 0.001, 0.03, 0.005),
            (14.0, 3e-3, None, 0.002, 0.04, 0.005),
            (14.0, 4e-3, None, 0.001, 0.03, 0.005),
            (14.0, 4e-3, None, 0.002, 0.04, 0.005),
        ],
        from_zero=True,
    ),
    "ALEXR2": r.rows(
        r.PROXIMAL,
        [
            (14.0, 2e-3, None, 0.02, 1.0, 0.004, 0.5, 0.02, 2),
            (14.0, 4e-3, None, 0.005, 1.0, 0.005, 0.5, 0.1, 2),
            (14.0, 2e-2, 0.75, 0.05, 1.0, 0.0, 0.5, 0.02, 2),
            (14.0, 2e-2, 0.75, 0.1, 1.0, 0.0, 0.5, 0.02, 2),
            (14.0, 2e-2, 0.75, 0.1, 1.0, 0.0, 0.5, 0.1, 2),
            (14.0, 2e-2, 0.75, 0.1, 1.0, 0.0, 0.5, 0.1, 5),
            (14.0, 4e-2, 1.0, 0.05, 1.0, 0.0, 0.5, 0.1, 2),
            (14.0, 4e-2, 1.0, 0.1, 1.0, 0.0, 0.5, 0.1, 2),
        ],
        from_zero=True,
    ),
    "ALEXR": r.rows(
        "ki kp",
        [
            (0.003, 0.3),
            (0.003, 1.0),
            (0.01, 0.1),
            (0.01, 0.3),
            (0.01, 1.0),
            (0.01, 3.0),
            (0.03, 1.0),
            (0.03, 3.0),
        ],
        penalty=100.0,
    ),
    "SONX": r.rows(
        "penalty gamma correction",
        [
            (1.4, 0.002, 0.1),
            (2.8, 0.002, 0.05),
            (2.8, 0.002, 0.1),
            (2.8, 0.02, 0.1),
            (2.8, 0.02, "auto"),
            (5.6, 0.002, 0.1),
            (5.6, 0.005, "auto"),
            (5.6, 0.02, "auto"),
        ],
        method="hinge",
        from_zero=True,
    ),
    "squared hinge": r.rows(
        "penalty gamma",
        [
            (50.0, 0.01),
            (50.0, 0.05),
            (100.0, 0.005),
            (100.0, 0.02),
            (100.0, 0.1),
            (250.0, 0.01),
            (250.0, 0.05),
            (500.0, 0.05),
        ],
        method="squared-hinge",
        read="old",
        margin=0.004,
        from_zero=True,
    ),
    "SSG": r.rows("threshold constraint_lr", product((0.01, 0.02, 0.03, 0.04), (5e-3, 1e-2))),
    "OSS": r.rows("inner_steps proximal", product((100, 500, 1000, 2000), (1e-3, 1e-2))),
    "ICPPAC": r.rows(
        "inner_steps tau theta", product((5, 10), (100.0, 200.0), (0.1, 1.0)), proximal=2e-3
    ),
    "Cooper simultaneous": r.ascent(0.002, 0.005, 0.01, 0.03),
    "Cooper alternating": r.ascent(0.002, 0.005, 0.01, 0.03),
    "Cooper extrapolation": r.ascent(0.005, 0.01, 0.03, 0.1),
    **_AUGMENTED,
    # The constraint stated as |gap| <= kappa, as one would write it first.
    **{
        f"{method} |gap|": [{**setting, "form": "absolute"} for setting in settings]
        for method, settings in _AUGMENTED.items()
    },
    **r.controllers(
        (0.005, 0.05, 0.0),
        (0.005, 0.1, 0.0),
        (0.0075, 0.1, 0.0),
        (0.01, 0.1, 0.0),
        (0.01, 0.2, 0.0),
        (0.01, 0.1, 0.9),
        (0.02, 0.2, 0.0),
        (0.03, 0.3, 0.0),
    ),
    "HCT PBM": r.penalty_barrier(
        ("const", 0.9, 0.03, 1.0),
        ("const", 0.9, 0.05, 0.5),
        ("const", 0.95, 0.05, 0.5),
        ("const", 0.9, 0.1, 0.3),
        ("const", 0.9, 0.1, 0.5),
        ("const", 0.95, 0.1, 0.5),
        ("const", 0.9, 0.1, 1.0),
        ("dimin_adapt", 0.9, 0.1, 1.0),
    ),
    "HCT SSG": r.switching(0.0, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.07),
    "HCT Moreau": r.moreau([(0.005, 0.1), (0.01, 0.1), (0.01, 0.2), (0.02, 0.3)], (0.01, 0.1)),
}
