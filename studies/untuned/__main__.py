"""Constraints without any setting, beside peers with their defaults and the best tuned results.

    python -m studies.untuned --json --workers 2 --out build/untuned.jsonl
    python -m studies.untuned --quick --json           # one seed, under three minutes
    python -m studies.untuned --only '^adult: fcco$'   # ours alone, on one problem

Problems are called `adult`, `adult / values x 100`, ...; `--only` takes a regular expression for
`PROBLEM: METHOD`, and the method `fcco` is ours. What a setting of CVaR changes is measured by
`studies.untuned.settings`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fcco_experiments.stats import spread

from studies import publish
from studies.constrained import peers
from studies.constrained.training import Figures
from studies.runner import Job, Runner, available, command, note, parse

from . import constraints, tuned
from .constraints import LEVEL

OURS, TUNED = "fcco", "tuned"
SEEDS = range(10, 100)  # the search used seed 0, trials for its grids saw seeds below 10
QUICK = {"Cooper simultaneous", "HCT ALM", "penalty by hand"}


@dataclass(frozen=True)
class Entry:
    """A method on a problem, by the shift of the limits; only the tuned one has several."""

    problem: str
    method: str
    jobs: dict[float, list[Job]]

    @property
    def base(self) -> str:
        """The problem itself, of which this may be a variant."""
        return self.problem.partition(" / ")[0]


def plan(seeds: Sequence[int], quick: bool) -> list[Entry]:
    """Ours and the peers on every problem and variant, and the tuned ones on the problems.

    The quick plan has some peers on the problems themselves and in other units.
    """
    entries, methods = [], {OURS: {}, **constraints.installed()}
    for first in constraints.PROBLEMS:
        for end in ("", *(f" / {variant}" for variant in constraints.VARIANTS)):
            name = first + end
            for method, setting in methods.items():
                some = method in QUICK and end in ("", " / values x 100")
                if not quick or method == OURS or some:
                    jobs = [Job(name, method, setting, seed) for seed in seeds]
                    entries.append(Entry(name, method, {0.0: jobs}))
        method, setting = tuned.CONSTRAINTS.get(first, ("", {}))
        if constraints.can_run(method):
            path = {
                shift: [Job(first, method, setting, seed, shift) for seed in seeds]
                for shift in tuned.SHIFTS[first]
            }
            entries.append(Entry(first, TUNED, path))
    return entries


def means(runs: Sequence[Figures]) -> dict[str, float]:
    """Means and standard deviations over seeds; infinite and 0 when a run diverged."""
    found = {}
    for name in ("objective", "violation"):
        values = [getattr(each, name) for each in runs]
        finite = all(map(math.isfinite, values))
        found[name], found[f"{name}_std"] = spread(values) if finite else (math.inf, 0.0)
    return found


def figures(entry: Entry, runner: Runner) -> dict[str, Any]:
    """Means over seeds; of a tuned entry the least objective at the accepted violation."""
    if entry.method != TUNED:
        (jobs,) = entry.jobs.values()
        runs = runner.of(jobs)
        return means(runs) | {"seconds": spread(each.seconds for each in runs)[0]}
    ends = [means(runner.of(jobs)) for jobs in entry.jobs.values()]
    path = [(end["violation"], end["objective"]) for end in ends]
    objective, violation = tuned.level(path, LEVEL)
    method = tuned.CONSTRAINTS[entry.problem][0]
    return {"objective": objective, "violation": violation, "method": method, "path": path}


def collect(entries: Sequence[Entry], runner: Runner) -> dict[str, dict[str, Any]]:
    """By problem and method."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        found.setdefault(entry.problem, {})[entry.method] = figures(entry, runner)
    return found


KEYS = {"objective": ".4f", "objective_std": ".4f", "violation": "+.4f", "violation_std": ".4f"}


def table(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Figures of all methods."""
    rows = [["", "objective", "std", "violation", "std"]]
    for name, methods in found.items():
        rows.append([name, *[""] * len(KEYS)])
        for method, row in methods.items():
            cells = [f"{row[key]:{form}}" if key in row else "" for key, form in KEYS.items()]
            rows.append([f"  {method}" + f" ({row.get('method')})" * (method == TUNED), *cells])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("untuned", __doc__)
    parser.add_argument("--only", default="", metavar="PATTERN", help="of PROBLEM: METHOD")
    options = parse(parser, arguments, (1, 5))
    for text in peers.notes():
        note(options.left_out, text)
    wanted = re.compile(options.only)
    entries = [
        entry
        for entry in plan(SEEDS[: options.seeds], options.quick)
        if wanted.search(f"{entry.problem}: {entry.method}")
    ]
    names = dict.fromkeys(entry.base for entry in entries)
    there = available(names, constraints.make, options.left_out)
    entries = [entry for entry in entries if entry.base in there]
    runner = Runner(constraints.run, Figures, options.workers, options.out)
    runner([job for entry in entries for own in entry.jobs.values() for job in own], "runs")
    found = collect(entries, runner)
    print(publish.plain(table(found)))
    publish.conclude(options, "untuned", {"constraints": found, "left_out": options.left_out})


if __name__ == "__main__":
    main()
