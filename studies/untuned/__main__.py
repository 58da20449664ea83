"""The library without any setting beside peers with their defaults, and the best tuned results.

    python -m studies.untuned --json --workers 2 --out build/untuned.jsonl
    python -m studies.untuned --quick --json           # one seed, under three minutes
    python -m studies.untuned --only '^adult: fcco$'   # ours alone, on one problem
    python -m studies.untuned --gpu --minutes 9        # also networks on a GPU, for so long

Problems are called `adult`, `adult / values x 100`, ..., `reviews`, `S2`,
`tabular MLP, 16 x 4, Adam 0.9`; `--only` takes a regular expression for `PROBLEM: METHOD`, and the
method `fcco` is ours. `studies.untuned.networks` says which networks there are.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fcco_experiments.stats import spread

from studies import publish
from studies.constrained import peers
from studies.runner import Job, Runner, available, command, note, parse

from . import constraints, groups, networks, tuned
from .constraints import LEVEL, Figures

OURS, TUNED = "fcco", "tuned"
SEEDS = range(10, 100)  # searches use seed 0, trials for the grids saw seeds below 10
FEATURES = ("celeba", "sentiment", "amazon")  # computed once by a backbone, which takes minutes
QUICK = {"Cooper simultaneous", "HCT ALM", "penalty by hand", "uniform", "OOA", "EMA + quantile"}


@dataclass(frozen=True)
class Entry:
    """A method on a problem: for each candidate (a learning rate, a shift, a setting) its jobs."""

    problem: str
    method: str
    candidates: dict[Any, list[Job]]

    def __str__(self) -> str:
        return f"{self.problem}: {self.method}"

    @property
    def base(self) -> str:
        """The problem itself, of which this may be a variant."""
        return self.problem.partition(" / ")[0]

    def ends(self, known: dict[str, Figures]) -> dict[Any, list[Figures]]:
        """The figures of each candidate, by seed."""
        return {key: [known[job.key] for job in jobs] for key, jobs in self.candidates.items()}


def plan_constraints(seeds: Sequence[int], quick: bool) -> list[Entry]:
    """Ours and the peers on every problem and variant, and the tuned ones.

    The quick plan has some peers on the problems themselves and in other units, and one tuned
    method on the problems themselves.
    """
    entries, methods = [], {OURS: {}, **constraints.installed()}
    for first in constraints.PROBLEMS:
        chosen = [each for each in tuned.CONSTRAINTS.get(first, []) if constraints.can_run(each[0])]
        for end in ("", *(f" / {variant}" for variant in constraints.VARIANTS)):
            name = first + end
            for method, setting in methods.items():
                some = method in QUICK and end in ("", " / values x 100")
                if not quick or method == OURS or some:
                    jobs = [Job(name, method, setting, seed) for seed in seeds]
                    entries.append(Entry(name, method, {0.0: jobs}))
            # Units and copies change nothing for a setting that is scaled with them: multipliers
            # and penalties are divided by the scale of the values and by the number of copies.
            own = name if end == " / tenth batch" else first
            paths = {
                (method, shift): [Job(own, method, setting, s, shift) for s in seeds]
                for method, setting in (chosen[: 1 if quick else None])
                for shift in tuned.SHIFTS[first]
            }
            if paths and not (quick and end):
                entries.append(Entry(name, TUNED, paths))
    return entries


def plan_groups(name: str, seeds: Sequence[int], quick: bool) -> list[Entry]:
    """Every method at every learning rate; the ratios on the problem that cannot interpolate."""
    methods, rates = {OURS: (OURS, {}), **groups.DEFAULTS}, groups.PROBLEMS[name]

    def jobs(method: str, **setting: Any) -> list[Job]:
        return [Job(name, method, setting, seed) for seed in seeds]

    entries = []
    for label, (method, setting) in methods.items():
        if not quick or label == OURS or label in QUICK:
            lrs = rates[1:2] if quick else rates
            runs = {lr: jobs(method, **setting, lr=lr) for lr in lrs}
            entries.append(Entry(name, label, runs))
    if chosen := tuned.GROUPS.get(name):
        runs = {k: jobs(method, **setting) for k, (method, setting) in enumerate(chosen)}
        entries.append(Entry(name, TUNED, runs))
    if name == "reviews":
        for ratio in groups.RATIOS:
            runs = {ratio: jobs(OURS, lr=rates[1], ratio=ratio)}
            entries.append(Entry(f"{name} / ratios", f"{OURS}, ratio {ratio:g}", runs))
    return entries


def figures(values: Sequence[float], name: str) -> dict[str, float]:
    """Mean and standard deviation over seeds; infinite and 0 when a run diverged."""
    mean, deviation = spread(values) if all(map(math.isfinite, values)) else (math.inf, 0.0)
    return {name: mean, f"{name}_std": deviation}


def constrained_figures(entry: Entry, known: dict[str, Figures]) -> dict[str, Any]:
    """Means over seeds; of a tuned entry the least objective at the accepted violation."""

    def means(runs: Sequence[Figures]) -> dict[str, float]:
        found = figures([each.objective for each in runs], "objective")
        return found | figures([each.violation for each in runs], "violation")

    ends = entry.ends(known)
    if entry.method != TUNED:
        (runs,) = ends.values()
        return means(runs) | {"seconds": spread(each.seconds for each in runs)[0]}
    paths: dict[str, list[tuple[float, float]]] = {}
    for (method, _), runs in ends.items():
        found = means(runs)
        paths.setdefault(method, []).append((found["violation"], found["objective"]))
    levels = {method: tuned.level(points, LEVEL) for method, points in paths.items()}
    best = min(levels, key=lambda m: (levels[m][1] > LEVEL * (1 + 1e-9), levels[m][0]))
    objective, violation = levels[best]
    return {"objective": objective, "violation": violation, "method": best, "paths": paths}


def group_figures(entry: Entry, known: dict[str, Figures]) -> dict[str, Any]:
    """The best candidate's mean CVaR over seeds, and the worst."""
    ends = entry.ends(known)
    rows = {key: figures([each.objective for each in runs], "cvar") for key, runs in ends.items()}
    best = min(rows, key=lambda key: rows[key]["cvar"])
    job = entry.candidates[best][0]
    found = {**rows[best], "lr": job.setting["lr"]}
    if entry.method == TUNED:
        return {**found, "method": job.method, "setting": job.setting}
    by_lr = {str(lr): row["cvar"] for lr, row in rows.items()}
    return {**found, "worst": max(by_lr.values()), "by_lr": by_lr}


def collect(entries: list[Entry], known: dict[str, Figures]) -> dict[str, Any]:
    """Everything in the form of the JSON."""
    found: dict[str, dict[str, dict[str, Any]]] = {"constraints": {}, "groups": {}}
    for entry in entries:
        if entry.base in constraints.PROBLEMS:
            row = constrained_figures(entry, known)
            found["constraints"].setdefault(entry.problem, {})[entry.method] = row
        elif " / " in entry.problem:  # trained for one ratio, seen at each
            (runs,) = entry.ends(known).values()
            for ratio in groups.RATIOS:
                row = figures([each.cvar[str(ratio)] for each in runs], "cvar")
                found["groups"].setdefault(f"{entry.base} / CVaR {ratio:g}", {})[entry.method] = row
        else:
            row = group_figures(entry, known)
            found["groups"].setdefault(entry.problem, {})[entry.method] = row
    return found


def ahead(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Feasibility first: a smaller objective among the feasible, else a smaller violation."""
    if max(mine["violation"], theirs["violation"]) <= LEVEL:
        return mine["objective"] < theirs["objective"]
    return mine["violation"] < theirs["violation"]


def equal_violation(best: dict[str, Any], violation: float) -> float:
    """The least objective of the tuned methods at that violation, or at the least they reach."""
    found = [tuned.level(points, violation) for points in best["paths"].values()]
    close = [f for f, v in found if v <= violation + 1e-9]
    return min(close) if close else min(found, key=lambda pair: pair[1])[0]


def goals(found: dict[str, Any]) -> list[str]:
    """One line for each problem where ours was run: what is asked for, and whether it is met."""
    told: dict[str, dict[str, bool]] = {}
    for name, rows in found["constraints"].items():
        if (mine := rows.get(OURS)) is None:
            continue
        own = told[name] = {f"violation {mine['violation']:+.4f}": mine["violation"] <= LEVEL}
        if TUNED in rows:
            ratio = mine["objective"] / equal_violation(rows[TUNED], mine["violation"])
            at_level = mine["objective"] / rows[TUNED]["objective"]
            text = f"objective {ratio:.4f} of tuned at equal violation, {at_level:.4f} at {LEVEL}"
            own[text] = ratio <= 1.01
        if others := {m: row for m, row in rows.items() if m not in (OURS, TUNED)}:
            behind = [m for m, row in others.items() if not ahead(mine, row)]
            own["ahead of all defaults" + f" but {', '.join(behind)}" * bool(behind)] = not behind
    for name, rows in found["groups"].items():
        if OURS in rows and len(rows) > 1:
            best = min(row["cvar"] for method, row in rows.items() if method != OURS)
            ratio, worst = rows[OURS]["cvar"] / best, rows[OURS]["worst"] / best
            text = f"{ratio:.3f} of the best of all, {worst:.3f} at the worst lr"
            told[name] = {text: ratio <= 1.05}
    told |= networks.goals(found["networks"])
    marks = {True: "met", False: "MISSED"}
    return [
        f"{name}: " + "; ".join(f"{marks[met]} ({text})" for text, met in own.items())
        for name, own in told.items()
    ]


def table(found: dict[str, Any]) -> str:
    """Figures of all methods."""
    rows = [["", "objective or CVaR", "std", "violation", "std", "constant", "by learning rate"]]
    keys = {"objective": ".4f", "objective_std": ".4f", "violation": "+.4f", "violation_std": ".4f"}
    for part in ("constraints", "groups", "networks"):
        for name, methods in found[part].items():
            rows.append([name, *[""] * 6])
            for method, row in methods.items():
                shown = {key.replace("cvar", "objective"): value for key, value in row.items()}
                cells = [f"{shown[k]:{form}}" if k in shown else "" for k, form in keys.items()]
                rates = (f"{lr}: {value:.4f}" for lr, value in row.get("by_lr", {}).items())
                label = f"{method} ({row['method']})" if method == TUNED else method
                constant = f"{row['constant']} of {row['runs']}" if "constant" in row else ""
                rows.append([f"  {label}", *cells, constant, "  ".join(rates)])
    return publish.plain(rows)


def make(name: str) -> Any:
    """A problem of any part."""
    if name in networks.NAMES:
        return networks.make(name)
    return (groups if name in groups.PROBLEMS else constraints).make(name)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("untuned", __doc__)
    add = parser.add_argument
    add("--only", default="", metavar="PATTERN", help="of PROBLEM: METHOD")
    add("--gpu", action="store_true", help="also networks on a GPU")
    add("--minutes", type=float, default=10, help="of these: runs that begin later are left out")
    options = parse(parser, arguments, (1, 5))
    if options.gpu and not torch.cuda.is_available():
        parser.error("--gpu: torch finds no GPU")
    for text in peers.notes():
        note(options.left_out, text)
    seeds, wanted = SEEDS[: options.seeds], re.compile(options.only)
    entries = plan_constraints(seeds, options.quick)
    for name in groups.PROBLEMS:
        if not (options.quick and name in FEATURES):
            entries += plan_groups(name, seeds, options.quick)
    entries = [entry for entry in entries if wanted.search(str(entry))]
    nets, gpu = (
        [job for job in jobs if wanted.search(f"{networks.cell(job)}: {job.method}")]
        for jobs in (
            networks.plan(seeds, options.quick),
            networks.plan_gpu() if options.gpu else [],
        )
    )
    names = [entry.base for entry in entries] + [job.problem for job in nets + gpu]
    there = available(dict.fromkeys(names), make, options.left_out)
    entries = [entry for entry in entries if entry.base in there]
    nets, gpu = ([job for job in jobs if job.problem in there] for jobs in (nets, gpu))
    runner = Runner(networks.run, Figures, options.workers, options.out)
    jobs = [job for entry in entries for own in entry.candidates.values() for job in own]
    runner(jobs + nets, "runs")
    if gpu:
        runner.workers = networks.SIDE_BY_SIDE
        runner(gpu, "networks on a GPU", time.time() + 60 * options.minutes)
        if late := sum(job.key not in runner.known for job in gpu):
            text = f"had not begun after {options.minutes:g} minutes and are left out"
            note(options.left_out, f"{late} of {len(gpu)} runs on the GPU {text}.")
    found = {
        **collect(entries, runner.known),
        "networks": networks.collect(nets + gpu, runner.known),
        "left_out": options.left_out,
    }
    print(table(found) + "\n\n" + "\n".join(goals(found)))
    if options.quick:
        print("(one seed: the spread over seeds is in the full run)")
    device = "cuda" if options.gpu else "cpu"
    publish.conclude(options, "untuned", found, device=device)


if __name__ == "__main__":
    main()
