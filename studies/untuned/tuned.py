"""The best that tuning gives, by any library: settings chosen by a search, as data.

    python -m studies.untuned.tuned [--workers 2] [--cache FILE] [PATTERN]

searches again and prints what it chose. Constraints: the methods that lead each table of
docs/research/details/constrained.md with the grids of that study (`docs` has a grid here); of each
method the settings that win on the tuning seed at a violation of 0.005 and of 0.01 are trained for
several shifts of the limits, and the objective is read at 0.005. Groups: every method, its
settings, the learning rates, in batches of the library's own shape; the best of them also in 8 x 8.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from studies.constrained import grids, peers
from studies.constrained.report import choose, place
from studies.runner import Job, Runner, available

from . import constraints, groups
from .constraints import LEVEL, Figures

Tuned = list[tuple[str, dict[str, Any]]]

# Limits in training relative to the stated ones. Gaps of rates may not be shifted below zero.
SHIFTS = {
    "adult": (-0.005, -0.0025, 0.0),
    "compas": (-0.005, -0.0025, 0.0),
    "convex": (-0.015, -0.01, -0.005, 0.0),
    "sampled": (-0.06, -0.04, -0.02, 0.0),
    "docs": (-0.01, -0.005, 0.0, 0.005),
}

_DUAL = [(lr, penalty, False) for lr, penalty in product((0.03, 0.1, 0.3, 1.0), (1.0, 10.0))]
_DOCS: dict[str, list[Any]] = {
    **grids.augmented(_DUAL),
    "ALEXR": grids.rows("ki kp", product((0.03, 0.1, 0.3, 1.0), (1.0, 10.0)), penalty=100.0),
    "SONEX": grids.rows(
        grids.PENALTY,
        [
            (s, None, g, "auto", round(2.6 * s, 6))
            for s, g in product((1e-3, 2e-3, 5e-3, 1e-2), (0.02, 0.1))
        ],
        penalty=8.0,
    ),
}
_LEADERS = {
    "adult": ("ALEXR", "SONEX", "HCT ALM"),
    "compas": ("SONEX", "Cooper simultaneous", "HCT PBM"),
    "convex": ("SONEX", "squared hinge", "Cooper extrapolation"),
    "sampled": ("SONEX", "ALEXR2", "Cooper augmented"),
    "docs": ("SONEX", "ALEXR", "Cooper augmented"),
}


def run(job: Job) -> Figures:
    """Train as the job says, under constraints or over groups."""
    return (groups if job.problem in groups.PROBLEMS else constraints).run(job)


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


def _at_level(points: Sequence[tuple[float, float]]) -> tuple[bool, float]:
    """To be small: first whether it stays above the limit, then the objective there."""
    objective, violation = level(points, LEVEL)
    return violation > LEVEL * (1 + 1e-9), objective


def _grid(name: str) -> dict[str, list[Any]]:
    return _DOCS if name == "docs" else grids.GRIDS[grids.family(name)]


def search_constraints(name: str, runner: Runner, seed: int = 0) -> Tuned:
    """The three best methods of a problem, each with its best setting, best first."""
    methods = filter(constraints.can_run, _LEADERS[name])
    jobs = {m: [Job(name, m, dict(s), seed) for s in _grid(name)[m]] for m in methods}
    runner([job for own in jobs.values() for job in own], f"{name}, grid")
    paths: list[tuple[str, dict[str, Any], list[Job]]] = []
    for method, own in jobs.items():
        found: list[Any] = [runner.known[job.key] for job in own]
        traces: Any = [_Tail(each) for each in found]
        for k in {choose(traces, LEVEL), choose(traces, 2 * LEVEL)}:
            setting = own[k].setting
            paths.append(
                (method, setting, [Job(name, method, setting, seed, s) for s in SHIFTS[name]])
            )
    runner([job for *_, own in paths for job in own], f"{name}, shifts")
    best: dict[str, tuple[Any, dict[str, Any]]] = {}
    for method, setting, own in paths:
        ends = [runner.known[job.key] for job in own]
        score = _at_level([(end.violation, end.objective) for end in ends])
        if method not in best or score < best[method][0]:
            best[method] = score, setting
    ordered = sorted(best, key=lambda method: best[method][0])
    for method in ordered:
        print(f"  {name}: {method} {best[method]}", file=sys.stderr)
    return [(method, best[method][1]) for method in ordered[:3]]


class _Tail:
    """What `choose` reads of a trace."""

    def __init__(self, figures: Figures) -> None:
        self.tail_objective, self.tail_violation = figures.objective, figures.violation


def search_groups(name: str, runner: Runner, seed: int = 0) -> Tuned:
    """The three best methods, each with its best setting, learning rate and shape, best first."""
    problem = groups.make(name)
    tried: Tuned = [("uniform", {}), ("ERM", {})]
    tried += [("OOA", {"step": s, "plain": p}) for s in (0.001, 0.01, 0.1) for p in (False, True)]
    tried += [("EMA + quantile", {"gamma": g}) for g in (0.1, 0.3, 0.9)]
    for smoothing, gamma in product((0.0, 0.02, 0.1, 1.0), (0.1, 0.3, 0.9)):
        own = {"smoothing": smoothing, "gamma": gamma}
        tried.append(("fcco", {**own, "read": "new", "correction": 0.0}))
        if gamma < 0.9 and smoothing in (0.02, 0.1):
            tried.append(("fcco", {**own, "read": "old", "correction": 0.1}))
    jobs = [
        Job(name, method, {**setting, "lr": lr, "shape": "own", "ratio": problem.ratio}, seed)
        for (method, setting), lr in product(tried, problem.lrs)
    ]
    ends = dict(zip(map(_text, jobs), _all(jobs, problem, runner), strict=True))
    order = sorted(jobs, key=lambda job: ends[_text(job)])
    if problem.batch_size == 64 and groups.shape(problem) != (8, 8):
        more = [replace(job, setting={**job.setting, "shape": [8, 8]}) for job in order[:8]]
        ends |= dict(zip(map(_text, more), _all(more, problem, runner), strict=True))
        order = sorted([*order, *more], key=lambda job: ends[_text(job)])
    for job in order[:8]:
        print(f"  {ends[_text(job)]:.4f} {_text(job)}", file=sys.stderr)
    best = {job.method: job.setting for job in reversed(order)}
    ranked = dict.fromkeys(job.method for job in order)
    return [(method, best[method]) for method in list(ranked)[:3]]


def _all(jobs: list[Job], problem: groups.Groups, runner: Runner) -> list[float]:
    ends = runner([groups.placed(job, problem) for job in jobs], f"{jobs[0].problem}, grid")
    return [end.objective for end in ends]


def _text(job: Job) -> str:
    return f"{job.problem}: {job.method} {job.setting}"


# The choice: methods, best first, each with the row of its grid.
_CHOSEN = {
    "adult": (("SONEX", 2), ("ALEXR", 5), ("HCT ALM", 4)),
    "compas": (("HCT PBM", 2), ("SONEX", 5), ("Cooper simultaneous", 5)),
    "convex": (("SONEX", 5), ("squared hinge", 4), ("Cooper extrapolation", 2)),
    "sampled": (("ALEXR2", 1), ("SONEX", 2), ("Cooper augmented", 4)),
    "docs": (("Cooper augmented", 5), ("ALEXR", 5), ("SONEX", 6)),
}
CONSTRAINTS: dict[str, Tuned] = {
    name: [(method, dict(_grid(name)[method][row])) for method, row in chosen]
    for name, chosen in _CHOSEN.items()
}
GROUPS: dict[str, Tuned] = {
    "celeba": [
        ("OOA", {"step": 0.01, "lr": 0.01, "shape": [8, 8]}),
        ("fcco", {"smoothing": 0.1, "gamma": 0.9, "read": "new", "correction": 0.0, "lr": 0.01}),
        ("EMA + quantile", {"gamma": 0.3, "lr": 0.01}),
    ],
    "sentiment": [
        ("OOA", {"step": 0.01, "lr": 0.01}),
        (
            "fcco",
            {
                "smoothing": 0.1,
                "gamma": 0.1,
                "read": "new",
                "correction": 0.0,
                "lr": 0.01,
                "shape": [8, 8],
            },
        ),
        ("uniform", {"lr": 0.01}),
    ],
    "amazon": [
        ("fcco", {"smoothing": 0.02, "gamma": 0.9, "read": "new", "correction": 0.0, "lr": 0.01}),
        ("EMA + quantile", {"gamma": 0.9, "lr": 0.01}),
        ("ERM", {"lr": 0.1}),
    ],
    "reviews": [
        ("fcco", {"smoothing": 0.0, "gamma": 0.1, "read": "new", "correction": 0.0, "lr": 0.03}),
        ("EMA + quantile", {"gamma": 0.1, "lr": 0.03}),
        ("OOA", {"step": 0.1, "lr": 0.03}),
    ],
    "S2": [
        ("fcco", {"smoothing": 0.1, "gamma": 0.3, "read": "old", "correction": 0.1, "lr": 0.01}),
        ("ERM", {"lr": 0.1}),
        ("uniform", {"lr": 0.01}),
    ],
    "quick start": [
        ("OOA", {"step": 0.1, "lr": 0.03, "shape": [8, 8]}),
        ("fcco", {"smoothing": 0.02, "gamma": 0.1, "read": "old", "correction": 0.1, "lr": 0.03}),
        ("EMA + quantile", {"gamma": 0.1, "lr": 0.03}),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("pattern", nargs="?", default="", help="of the problems")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cache", type=Path)
    options = parser.parse_args()
    runner = Runner(run, Figures, options.workers, options.cache)
    for note in peers.notes():
        print(note, file=sys.stderr)
    for part, search in ((constraints, search_constraints), (groups, search_groups)):
        # Of the problems of `kinds` no setting has been searched yet.
        known = [name for name in part.PROBLEMS if part is groups or name in _LEADERS]
        names = filter(re.compile(options.pattern).search, known)
        for name in available(names, part.make, []):
            print(f"    {name!r}: {search(name, runner)!r},", flush=True)


if __name__ == "__main__":
    main()
