"""From runs to figures: the choice of a setting, the objective at equal violation, tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .problems import Setting
from .training import LIMIT, Trace

LEVELS = (0.01, 0.005)


@dataclass(frozen=True)
class Result:
    """A method on a problem.

    Attributes:
        method: its name.
        setting: the chosen one.
        tuning: traces of all settings on the tuning seed.
        runs: traces of the chosen setting by shift of the limits, one for each fresh seed.
    """

    method: str
    setting: Setting
    tuning: list[Trace]
    runs: dict[float, list[Trace]]

    @property
    def ours(self) -> bool:
        """Whether it is a method of this library."""
        return not self.method.startswith(("Cooper", "HCT"))

    @property
    def base(self) -> list[Trace]:
        """The runs with the limits as stated."""
        return self.runs[0.0]

    def at(self, limit: float) -> list[float]:
        """The objective at equal violation, for each seed.

        The limits are shifted until the mean violation over the seeds is `limit`; seeds differ in
        their violation by more than methods do, so they are not brought to it one by one.
        """
        shifts = sorted(self.runs)
        means = [
            (
                statistics.fmean(t.tail_violation for t in self.runs[s]),
                statistics.fmean(t.tail_objective for t in self.runs[s]),
            )
            for s in shifts
        ]
        found = place(means, limit)
        if found is None:
            return [math.inf] * len(self.base)
        k, share = found
        here = [t.tail_objective for t in self.runs[shifts[k]]]
        there = [t.tail_objective for t in self.runs[shifts[min(k + 1, len(shifts) - 1)]]]
        return [f0 + share * (f1 - f0) if share else f0 for f0, f1 in zip(here, there, strict=True)]

    def summary(self, target: float) -> dict[str, Any]:
        """All figures of the tables; `target` is the objective that counts as reached."""
        objective, objective_error = mean_and_error([t.tail_objective for t in self.base])
        violation, violation_error = mean_and_error([t.tail_violation for t in self.base])
        found: dict[str, Any] = {
            "setting": dict(self.setting),
            "objective": objective,
            "objective_error": objective_error,
            "violation": violation,
            "violation_error": violation_error,
            "settled": middle([t.settled() for t in self.base]),
            "reached": middle([t.reached(target) for t in self.base]),
            "seconds": statistics.fmean(t.seconds for t in self.base),
            "extra_forwards": self.base[0].extra_forwards,
            "tuning": [[t.tail_violation, t.tail_objective] for t in self.tuning],
        }
        for level in LEVELS:
            mean, error = mean_and_error(self.at(level))
            found[f"at_{level}"], found[f"at_{level}_error"] = mean, error
            found[f"at_{level}_seeds"] = self.at(level)
        shares = (0.25, 0.5, 1.0)
        found["anytime"] = [mean_and_error([t.best(s) for t in self.base])[0] for s in shares]
        return found


def choose(traces: Sequence[Trace], limit: float = LIMIT) -> int:
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


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error; infinite when a value is."""
    if not all(map(math.isfinite, values)):
        return math.inf, math.inf
    if len(values) == 1:
        return values[0], 0.0
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def middle(values: Sequence[int | None]) -> float | None:
    """The median, where None (never) is larger than every number."""
    ordered = sorted(math.inf if value is None else value for value in values)
    value = statistics.median_low(ordered)
    return None if math.isinf(value) else value


def target_of(results: Sequence[Result]) -> float:
    """An objective that counts as reached: 2 % above the best method's at the limit."""
    best = min(mean_and_error(result.at(LIMIT))[0] for result in results)
    return best + 0.02 * abs(best)


def verdict(summaries: dict[str, dict[str, Any]], ours: Sequence[str]) -> dict[str, Any]:
    """How our best method stands against every peer at the limit.

    `against` holds, by peer, the mean over seeds of our objective less theirs and its standard
    error: with the same seed both start from the same weights and see the same batches, so seeds
    are compared in pairs. Not worse: no mean is above its error. Ahead: each is below minus that.
    """
    peers = [method for method in summaries if method not in ours]
    if not peers or not ours:
        return {}

    def first(methods: Sequence[str], key: str) -> str:
        values = {m: summaries[m][key] for m in methods}
        return min(values, key=lambda m: math.inf if values[m] is None else values[m])

    best = first(ours, f"at_{LIMIT}")
    against = {peer: _difference(summaries[best], summaries[peer]) for peer in peers}
    return {
        "ours": best,
        "best_peer": first(peers, f"at_{LIMIT}"),
        "against": against,
        "not_worse": all(mean <= error for mean, error in against.values()),
        "ahead": all(mean < -error for mean, error in against.values()),
        **{
            name: {m: summaries[m][name] for m in (first(ours, name), first(peers, name))}
            for name in ("settled", "reached")
        },
    }


def _difference(mine: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, float]:
    """Ours less theirs, in pairs; who never got to the limit is infinitely behind."""
    name = f"at_{LIMIT}"
    if math.isinf(theirs[name]):
        return (math.inf if math.isinf(mine[name]) else -math.inf), 0.0
    pairs = zip(mine[f"{name}_seeds"], theirs[f"{name}_seeds"], strict=True)
    return mean_and_error([a - b for a, b in pairs])


def table(summaries: dict[str, dict[str, Any]]) -> str:
    """Markdown, best objective at the limit first."""
    lines = [
        "| method | objective | largest violation | at violation 0.01 | at 0.005 | settled | "
        "reached | seconds | extra forwards |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for method, row in sorted(summaries.items(), key=lambda item: item[1][f"at_{LIMIT}"]):
        cells = [
            method.replace("|", "\\|"),
            _pair(row["objective"], row["objective_error"]),
            _pair(row["violation"], row["violation_error"], "+"),
            *(_pair(row[f"at_{level}"], row[f"at_{level}_error"]) for level in LEVELS),
            *("-" if row[name] is None else f"{row[name]:.0f}" for name in ("settled", "reached")),
            f"{row['seconds']:.1f}",
            f"{row['extra_forwards']:g}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _pair(mean: float, error: float, sign: str = "") -> str:
    return "-" if math.isinf(mean) else f"{mean:{sign}.4f} ± {error:.4f}"
