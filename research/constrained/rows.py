"""Short ways to write settings down."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

from .stepper import Setting

__all__ = [
    "PENALTY",
    "PROXIMAL",
    "ascent",
    "augmented",
    "controllers",
    "moreau",
    "penalty_barrier",
    "rows",
    "switching",
]

# Names of the columns of our grids.
PENALTY = "penalty smoothing follow gamma correction margin"
PROXIMAL = "penalty smoothing follow gamma theta margin nu eta inner_steps"

Dual = tuple[float, float, bool]


def rows(names: str, table: Iterable[tuple[Any, ...]], **common: Any) -> list[Setting]:
    """Settings from rows of numbers; None leaves an entry out."""
    keys = names.split()
    return [
        {**common, **{k: v for k, v in zip(keys, row, strict=True) if v is not None}}
        for row in table
    ]


def ascent(*steps: float) -> list[Setting]:
    """Dual steps, constant and decaying."""
    return rows("dual_lr dual_decay", product(steps, (False, True)))


def augmented(*table: Dual, **common: Any) -> dict[str, list[Setting]]:
    """The augmented Lagrangian of both packages: dual step, penalty, whether the step decays."""
    return {
        "Cooper augmented": rows("dual_lr penalty dual_decay", table, **common),
        "HCT ALM": rows("lr penalty dual_decay", table, **common),
    }


def controllers(*table: tuple[float, float, float]) -> dict[str, list[Setting]]:
    """The PI controller of both packages: integral step, proportional gain, memory."""
    return {
        "Cooper nuPI": rows("dual_lr kp nu", [(i, round(p / i, 6), nu) for i, p, nu in table]),
        "HCT nuPI": rows("ki kp nu", table),
    }


def moreau(pairs: Iterable[tuple[float, float]], scales: tuple[float, float]) -> list[Setting]:
    """Dual step and penalty of the ALM, by mu of the Moreau envelope."""
    return [
        {"lr": lr, "penalty": penalty, "moreau": {"mu": mu, "beta": 0.5}}
        for (lr, penalty), mu in product(pairs, scales)
    ]


def penalty_barrier(*table: tuple[str, float, float, float]) -> list[Setting]:
    """Rule for the penalties, gamma, first multipliers, largest penalty."""
    return [
        {
            "penalty_update": update,
            "gamma": gamma,
            "penalty_mult": 0.99,
            "init_duals": dual,
            "penalty_range": [min(0.1, penalty), penalty],
            "epochs": 10,
        }
        for update, gamma, dual, penalty in table
    ]


def switching(*tolerances: float) -> list[Setting]:
    """Violations above which a step is made on the constraint."""
    return rows("constraint_tol", [(tolerance,) for tolerance in tolerances])
