"""From runs to figures: the choice of a setting, the objective at equal violation, tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fcco_experiments.stats import paired, spread

from .problems import Setting
from .training import LIMIT, Trace

LEVELS = (0.01, 0.005)
AT = f"at_{LIMIT}"


@dataclass(frozen=True)
class Result:
    """A method on a problem.

    Attributes:
        method: its name.
        setting: the chosen one.
        runs: traces of the chosen setting by shift of the limits, one for each fresh seed.
    """

    method: str
    setting: Setting
    runs: dict[float, list[Trace]]

    def at(self, limit: float) -> list[float]:
        """The objective at equal violation, for each seed; empty where it is not reached.

        The limits are shifted until the mean violation over the seeds is `limit`; seeds differ in
        their violation by more than methods do, so they are not brought to it one by one.
        """
        path = [self.runs[shift] for shift in sorted(self.runs)]
        means = [
            (
                statistics.fmean(trace.tail_violation for trace in each),
                statistics.fmean(trace.tail_objective for trace in each),
            )
            for each in path
        ]
        found = place(means, limit)
        if found is None:
            return []
        k, share = found
        pairs = zip(path[k], path[min(k + 1, len(path) - 1)], strict=True)
        # A point of the path itself, beside one that may have diverged.
        return [
            a.tail_objective + share * (b.tail_objective - a.tail_objective)
            if share
            else a.tail_objective
            for a, b in pairs
        ]

    def summary(self, target: float) -> dict[str, Any]:
        """All figures of the tables; `target` is the objective that counts as reached."""
        base = self.runs[0.0]
        found: dict[str, Any] = {
            "setting": dict(self.setting),
            "objective": mean_and_error([t.tail_objective for t in base]),
            "violation": mean_and_error([t.tail_violation for t in base]),
            "settled": middle([t.settled() for t in base]),
            "reached": middle([t.reached(target) for t in base]),
            "seconds": statistics.fmean(t.seconds for t in base),
            "extra_forwards": base[0].extra_forwards,
        }
        found |= {f"at_{level}": mean_and_error(self.at(level)) for level in LEVELS}
        return found | {"seeds": self.at(LIMIT)}


def choose(traces: Sequence[Any], limit: float = LIMIT) -> int:
    """Feasibility first: the least objective within the limit, else the least violation."""
    feasible = [k for k, trace in enumerate(traces) if trace.tail_violation <= limit]
    if feasible:
        return min(feasible, key=lambda k: traces[k].tail_objective)
    return min(range(len(traces)), key=lambda k: traces[k].tail_violation)


def place(points: Sequence[tuple[float, float]], limit: float) -> tuple[int, float] | None:
    """Where a path of runs has its least objective with a violation of at most `limit`.

    Between neighbouring points (violation, objective) the path is a straight line; it is not
    continued beyond its ends. The answer is a point and the share of the way to the next; None
    when the path stays above the limit.
    """
    found = {(k, 0.0): f for k, (v, f) in enumerate(points) if v <= limit}
    for k, ((v0, f0), (v1, f1)) in enumerate(pairwise(points)):
        if (v0 - limit) * (v1 - limit) < 0 and math.isfinite(f0 + f1 + v0 + v1):
            share = (limit - v0) / (v1 - v0)
            found[k, share] = f0 + (f1 - f0) * share
    return min(found, key=lambda where: found[where], default=None)


def middle(values: Sequence[int | None]) -> float | None:
    """The median, where None (never) is larger than every number."""
    ordered = sorted(math.inf if value is None else value for value in values)
    value = statistics.median_low(ordered)
    return None if math.isinf(value) else value


def mean_and_error(values: Sequence[float]) -> list[float] | None:
    """Mean and standard error over seeds; None where there is none."""
    found, deviation = spread(values)
    return [found, deviation / len(values) ** 0.5] if values else None


def rank(row: Mapping[str, Any]) -> float:
    """The objective at the limit; who does not get there is the last."""
    return row[AT][0] if row[AT] else math.inf


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """Figures of every method; reached is an objective 2 % above the best at the limit."""
    ends = (mean_and_error(result.at(LIMIT)) for result in results)
    target = 1.02 * min((end[0] for end in ends if end), default=math.inf)
    return {result.method: result.summary(target) for result in results}


def against(methods: Mapping[str, Any]) -> dict[str, list[float]]:
    """Our best method less each peer at the limit, by seeds in pairs: mean and 95 % interval.

    With the same seed both start from the same weights and see the same batches.
    """
    ours = [row for name, row in methods.items() if not is_peer(name)]
    best = min(ours, key=rank)["seeds"] if ours else []
    gaps = {
        name: paired(best, row["seeds"])
        for name, row in methods.items()
        if is_peer(name) and row["seeds"] and best
    }
    return {name: [gap.mean, gap.low, gap.high] for name, gap in gaps.items()}


def families(methods: Mapping[str, Any]) -> list[str]:
    """The best of our methods, of Cooper and of HCT at the limit."""
    best: dict[str, Mapping[str, Any]] = {}
    for name, row in sorted(methods.items(), key=lambda item: rank(item[1])):
        best.setdefault(name.split()[0] if is_peer(name) else "fcco", row)
    return [_pair(best[library][AT]) for library in ("fcco", "Cooper", "HCT")]


def is_peer(method: str) -> bool:
    """Whether it is a method of another library."""
    return method.startswith(("Cooper", "HCT"))


HEAD = [
    "method", "objective", "largest violation", *(f"at violation {level}" for level in LEVELS),
    "settled", "reached", "seconds", "extra forwards",
]  # fmt: skip


def table(methods: Mapping[str, Any]) -> list[list[str]]:
    """Rows, best objective at the limit first."""
    rows = [
        [
            name.replace("|", "\\|"),
            _pair(row["objective"]),
            _pair(row["violation"], "+"),
            *(_pair(row[f"at_{level}"]) for level in LEVELS),
            *("-" if row[key] is None else f"{row[key]:.0f}" for key in ("settled", "reached")),
            f"{row['seconds']:.1f}",
            f"{row['extra_forwards']:g}",
        ]
        for name, row in sorted(methods.items(), key=lambda item: rank(item[1]))
    ]
    return [HEAD, *rows]


def _pair(figure: Sequence[float] | None, sign: str = "") -> str:
    """Mean and standard error."""
    return "-" if figure is None else f"{figure[0]:{sign}.4f} ± {figure[1]:.4f}"
