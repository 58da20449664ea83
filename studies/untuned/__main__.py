"""The library without any setting beside peers with their defaults, and the best tuned results.

    python -m studies.untuned --json --workers 2 --cache build/untuned.jsonl
    python -m studies.untuned --quick --json           # one seed, under three minutes
    python -m studies.untuned --only '^adult: fcco$'   # ours alone, on one problem
    python -m studies.untuned --gpu --json             # also networks on a GPU, ten minutes
    python -m studies.untuned --record                 # ours on groups, into earlier.json

Problems are called `adult`, `adult / values x 100`, ..., `reviews`, `S2`,
`tabular MLP, 16 x 4, Adam 0.9`; `--only` takes a regular expression for `PROBLEM: METHOD`, and the
method `fcco` is ours. Finished runs of peers and of tuned settings are kept in the file `--cache`;
those of `fcco` are made anew each time, for they change with the library. earlier.json holds what
the library reached on groups before its rules changed last: they must not make it worse.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fcco_experiments import environment

from studies import publish
from studies.constrained import peers
from studies.runner import Job, Runner, available

from . import alarms, calibration, constraints, groups, networks, tuned
from .constraints import LEVEL, Figures

OURS, TUNED = "fcco", "tuned"
SEEDS = range(10, 100)  # searches use seed 0, trials for the grids saw seeds below 10
FEATURES = ("celeba", "sentiment", "amazon")  # computed once by a backbone, which takes minutes
EARLIER = Path(__file__).with_name("earlier.json")
PARTS = {"calibration": calibration.run, "alarms": alarms.run}
QUICK = {"Cooper simultaneous", "HCT ALM", "penalty by hand", "uniform", "OOA", "EMA + quantile"}


@dataclass(frozen=True)
class Entry:
    """A method on a problem: for each candidate (a learning rate, a shift, a setting) its jobs."""

    problem: str
    method: str
    candidates: dict[Any, list[Job]]

    def __str__(self) -> str:
        return f"{self.problem}: {self.method}"


def plan_constraints(seeds: Iterable[int], quick: bool) -> list[Entry]:
    """Ours and the peers on every problem and variant, and the tuned ones.

    The quick plan has some peers on the problems themselves and in other units, and one tuned
    method on the problems themselves.
    """
    seeds, entries = list(seeds), []
    methods = {OURS: {}, **constraints.installed()}
    for first in constraints.PROBLEMS:
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
            chosen = [
                each for each in tuned.CONSTRAINTS.get(first, []) if constraints.can_run(each[0])
            ]
            chosen = chosen[: 1 if quick else None]
            if quick and own != first:
                chosen = []
            paths = {
                (method, k, shift): [Job(own, method, setting, s, shift) for s in seeds]
                for k, (method, setting) in enumerate(chosen)
                for shift in tuned.SHIFTS[first]
            }
            if paths:
                entries.append(Entry(name, TUNED, paths))
    return entries


def plan_groups(names: Iterable[str], seeds: Iterable[int], quick: bool) -> list[Entry]:
    """Every method at every learning rate; the ratios on the problem that cannot interpolate."""
    seeds, entries = list(seeds), []
    methods: dict[str, Any] = {OURS: (OURS, {}), **groups.DEFAULTS}
    for name in names:
        problem = groups.make(name)

        def jobs(
            method: str,
            setting: dict[str, Any],
            name: str = name,
            problem: groups.Groups = problem,
        ) -> list[Job]:
            full = {"shape": "own", "ratio": problem.ratio, **setting}
            return [groups.placed(Job(name, method, full, s), problem) for s in seeds]

        for label, (method, setting) in methods.items():
            if not quick or label == OURS or label in QUICK:
                lrs = problem.lrs[1:2] if quick else problem.lrs
                rates = {lr: jobs(method, {**setting, "lr": lr}) for lr in lrs}
                entries.append(Entry(name, label, rates))
        if chosen := tuned.GROUPS.get(name):
            paths = {k: jobs(method, setting) for k, (method, setting) in enumerate(chosen)}
            entries.append(Entry(name, TUNED, paths))
        if name == "reviews":
            for ratio in groups.RATIOS:
                own = jobs(OURS, {"lr": problem.lrs[1], "ratio": ratio})
                entries.append(Entry(f"{name} / ratios", f"{OURS}, ratio {ratio:g}", {ratio: own}))
    return entries


def mean(values: Iterable[float]) -> float:
    """Infinite when one is."""
    found = list(values)
    return statistics.fmean(found) if all(map(math.isfinite, found)) else math.inf


def spread(values: Iterable[float]) -> float:
    """Standard deviation over seeds."""
    found = [value for value in values if math.isfinite(value)]
    return statistics.stdev(found) if len(found) > 1 else 0.0


def constrained_figures(entry: Entry, known: dict[str, Figures]) -> dict[str, Any]:
    """Means over seeds; of a tuned entry the least objective at the accepted violation."""
    ends = {key: [known[job.key] for job in jobs] for key, jobs in entry.candidates.items()}
    if entry.method != TUNED:
        (runs,) = ends.values()
        return {
            "objective": mean(each.objective for each in runs),
            "violation": mean(each.violation for each in runs),
            "objective_std": spread(each.objective for each in runs),
            "violation_std": spread(each.violation for each in runs),
            "seconds": mean(each.seconds for each in runs),
        }
    paths: dict[str, list[tuple[float, float]]] = {}
    for (method, _, _), runs in ends.items():
        point = mean(e.violation for e in runs), mean(e.objective for e in runs)
        paths.setdefault(method, []).append(point)
    found = {method: tuned.level(points, LEVEL) for method, points in paths.items()}
    best = min(found, key=lambda m: (found[m][1] > LEVEL * (1 + 1e-9), found[m][0]))
    objective, violation = found[best]
    return {"objective": objective, "violation": violation, "method": best, "paths": paths}


def group_figures(entry: Entry, known: dict[str, Figures]) -> dict[str, Any]:
    """The best candidate's mean CVaR over seeds, and the worst."""
    ends = {key: [known[job.key] for job in jobs] for key, jobs in entry.candidates.items()}
    means = {key: mean(each.objective for each in runs) for key, runs in ends.items()}
    best = min(means, key=lambda key: means[key])
    job = entry.candidates[best][0]
    found = {
        "cvar": means[best],
        "cvar_std": spread(each.objective for each in ends[best]),
        "lr": job.setting["lr"],
    }
    if entry.method == TUNED:
        return {**found, "method": job.method, "setting": job.setting}
    return {
        **found,
        "worst": max(means.values()),
        "by_lr": {str(lr): value for lr, value in means.items()},
        "by_seed": {str(lr): [round(e.objective, 5) for e in runs] for lr, runs in ends.items()},
    }


def collect(entries: list[Entry], known: dict[str, Figures]) -> dict[str, Any]:
    """Everything in the form of the JSON."""
    found: dict[str, dict[str, dict[str, Any]]] = {"constraints": {}, "groups": {}}
    for entry in entries:
        first = entry.problem.partition(" / ")[0]
        if first in constraints.PROBLEMS:
            row = constrained_figures(entry, known)
            found["constraints"].setdefault(entry.problem, {})[entry.method] = row
        elif entry.problem != first:  # trained for one ratio, seen at each
            ((_, jobs),) = entry.candidates.items()
            for ratio in groups.RATIOS:
                row = {"cvar": mean(known[job.key].cvar[str(ratio)] for job in jobs)}
                found["groups"].setdefault(f"{first} / CVaR {ratio:g}", {})[entry.method] = row
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


def constrained_goals(found: dict[str, Any]) -> list[str]:
    """One line for each problem where ours was run: which goals are met."""
    lines = []
    for name, rows in found.items():
        if OURS not in rows:
            continue
        mine, goals = rows[OURS], {}
        goals[f"violation {mine['violation']:+.4f}"] = mine["violation"] <= LEVEL
        if TUNED in rows:
            ratio = mine["objective"] / equal_violation(rows[TUNED], mine["violation"])
            at_level = mine["objective"] / rows[TUNED]["objective"]
            text = f"objective {ratio:.4f} of tuned at equal violation, {at_level:.4f} at {LEVEL}"
            goals[text] = ratio <= 1.01
        first = found.get(name.partition(" / ")[0], {}).get(OURS)
        several = mine["objective_std"] > 0  # one seed has no spread to compare with
        if first is not None and first is not mine and several:
            off = [abs(mine[key] - first[key]) for key in ("objective", "violation")]
            allowed = [max(mine[key], first[key]) for key in ("objective_std", "violation_std")]
            text = "off the original by {:.4f}, {:.4f} (std {:.4f}, {:.4f})".format(*off, *allowed)
            goals[text] = off[0] <= allowed[0] and off[1] <= allowed[1]
        peers = {m: row for m, row in rows.items() if m not in (OURS, TUNED)}
        behind = [m for m, row in peers.items() if not ahead(mine, row)]
        if peers:
            text = "ahead of all defaults" + (f" but {', '.join(behind)}" if behind else "")
            goals[text] = not behind
        lines.append(f"{name}: " + "; ".join(_mark(text, met) for text, met in goals.items()))
    return lines


def group_goals(found: dict[str, Any], earlier: dict[str, Any]) -> list[str]:
    """Likewise for groups; `earlier` has the CVaR by problem, learning rate and seed."""
    lines = []
    for name, rows in found.items():
        if " / CVaR " in name:
            ratio = name.rpartition(" ")[2]
            own = rows.get(f"{OURS}, ratio {ratio}")
            if own is not None:
                met = own["cvar"] <= min(row["cvar"] for row in rows.values())
                lines.append(f"{name}: " + _mark(f"training for {ratio} gives the lowest", met))
        elif OURS in rows and len(rows) > 1:
            best = min(rows[m]["cvar"] for m in rows if m != OURS)
            ratio = rows[OURS]["cvar"] / best
            text = (
                f"{ratio:.3f} of the best of all, {rows[OURS]['worst'] / best:.3f} at the worst lr"
            )
            lines.append(f"{name}: " + _mark(text, ratio <= 1.05))
        before, now = earlier.get(name, {}), rows.get(OURS, {}).get("by_seed", {})
        pairs = {lr: list(zip(before[lr], now[lr], strict=False)) for lr in now if lr in before}
        if more := [mean(new - old for old, new in own) for own in pairs.values()]:
            best = [min(mean(pair[k] for pair in own) for own in pairs.values()) for k in (0, 1)]
            text = f"{best[1] - best[0]:+.4f} against earlier, {max(more):+.4f} at the worst lr"
            lines.append(f"{name}: " + _mark(text, max(more) <= 0.005))
    return lines


def network_goals(found: dict[str, Any]) -> list[str]:
    """Likewise for networks."""
    return [
        f"{name}: " + "; ".join(_mark(text, met) for text, met in own.items())
        for name, own in networks.goals(found).items()
    ]


def _mark(text: str, met: bool) -> str:
    return f"{'met' if met else 'MISSED'} ({text})"


def tables(found: dict[str, Any]) -> str:
    """Figures of all methods."""
    lines = []
    for name, rows in found["constraints"].items():
        lines.append(f"\n{name:<34}{'objective':>10}{'std':>8}{'violation':>11}{'std':>8}")
        for method, row in rows.items():
            stds = [row.get(f"{key}_std", math.nan) for key in ("objective", "violation")]
            label = f"{method} ({row['method']})" if method == TUNED else method
            lines.append(
                f"  {label:<32}{row['objective']:>10.4f}{stds[0]:>8.4f}"
                f"{row['violation']:>+11.4f}{stds[1]:>8.4f}"
            )
    for name, rows in found["groups"].items():
        lines.append(f"\n{name:<34}{'CVaR':>10}{'std':>8}   by learning rate")
        for method, row in rows.items():
            label = f"{method} ({row['method']})" if method == TUNED else method
            rates = "  ".join(f"{lr}: {value:.4f}" for lr, value in row.get("by_lr", {}).items())
            std = row.get("cvar_std", math.nan)
            lines.append(f"  {label:<32}{row['cvar']:>10.4f}{std:>8.4f}   {rates}")
    return "\n".join(lines) + "\n" + networks.table(found["networks"])


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train everything that `--only` names."""
    torch.set_num_threads(1)
    left_out = peers.notes()
    for note in left_out:
        print(note, file=sys.stderr)
    seeds, wanted = SEEDS[: 1 if options.quick else options.seeds], re.compile(options.only)
    entries = [
        entry for entry in plan_constraints(seeds, options.quick) if wanted.search(str(entry))
    ]
    first = {entry.problem.partition(" / ")[0] for entry in entries}
    there = available(sorted(first), constraints.make, left_out)
    entries = [each for each in entries if each.problem.partition(" / ")[0] in there]
    labels = [f": {label}" for label in (OURS, TUNED, *groups.DEFAULTS)]
    labels += [f" / ratios: {OURS}, ratio {ratio:g}" for ratio in groups.RATIOS]
    names = [
        name
        for name in groups.PROBLEMS
        if any(wanted.search(name + label) for label in labels)
        and not (options.quick and name in FEATURES)
    ]
    planned = plan_groups(available(names, groups.make, left_out), seeds, options.quick)
    entries += [entry for entry in planned if wanted.search(str(entry))]
    jobs = [job for entry in entries for own in entry.candidates.values() for job in own]
    ours = Runner(tuned.run, Figures, options.workers)
    others = Runner(tuned.run, Figures, options.workers, options.cache)
    others([job for job in jobs if not untouched(job)], "peers and tuned")
    ours([job for job in jobs if untouched(job)], "fcco")
    return {
        **collect(entries, {**others.known, **ours.known}),
        "networks": train_networks(options, seeds, wanted, left_out),
        "left_out": left_out,
    }


def train_networks(
    options: argparse.Namespace, seeds: Iterable[int], wanted: re.Pattern[str], notes: list[str]
) -> dict[str, Any]:
    """Likewise for networks, on the CPU; with `--gpu` on a GPU, too."""
    jobs: list[Any] = [
        job
        for job in networks.plan(seeds, options.quick)
        if wanted.search(f"{job.cell}: {job.method}")
    ]
    there = available(sorted({job.network for job in jobs}), networks.make, notes)
    jobs = [job for job in jobs if job.network in there]
    cache = options.cache and options.cache.with_suffix(".nets")
    others = Runner(networks.run, networks.Result, options.workers, cache)
    ours = Runner(networks.run, networks.Result, options.workers)
    others([job for job in jobs if job.method != OURS], "networks, others")
    ours([job for job in jobs if job.method == OURS], "networks, fcco")
    known = {**others.known, **ours.known}
    found = networks.collect((job, known[job.key]) for job in jobs)
    if options.gpu and available(["faces"], networks.make, notes):
        data, out = Path("build/faces.pt"), Path("build/networks.jsonl")
        networks.prepare(data)
        out.unlink(missing_ok=True)
        found |= networks.study(data, out, "cuda", 10.0, 14)
    return found


def record(options: argparse.Namespace) -> None:
    """Write ours on groups to earlier.json, with the commit and the command."""
    options.only = rf"^(?!.*/)({'|'.join(groups.PROBLEMS)}): {OURS}$"
    found = train(options)["groups"]
    about = environment.describe()
    content = {
        "command": "python -m studies.untuned --record",
        **{key: about[key] for key in ("revision", "torch", "numpy")},
        "seeds": list(SEEDS[: options.seeds]),
        "cvar": {name: rows[OURS]["by_seed"] for name, rows in found.items()},
    }
    EARLIER.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer methods, one seed")
    parser.add_argument("--only", default="", metavar="PATTERN", help="of PROBLEM: METHOD")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, help="processes; 1, or 2 with --quick")
    parser.add_argument("--cache", type=Path, help="file with finished runs of all but ours")
    parser.add_argument("--gpu", action="store_true", help="also networks on a GPU")
    parser.add_argument("--record", action="store_true", help="write earlier.json, and stop")
    parser.add_argument("--publish", action="store_true", help="write docs/results/untuned")
    options = parser.parse_args()
    if options.publish:
        publish.refuse_dirty(publish.about())
    options.workers = options.workers or (2 if options.quick else 1)
    if options.record:
        record(options)
        return
    found = train(options)
    for name, part in PARTS.items():
        if re.search(options.only, name):
            found[name] = part(options.quick)
    print(tables(found))
    goals = constrained_goals(found["constraints"])
    goals += group_goals(found["groups"], json.loads(EARLIER.read_text())["cvar"])
    goals += network_goals(found["networks"])
    print("\n" + "\n".join(goals))
    if options.quick:
        print("(one seed: the spread over seeds is in the full run)")
    if options.publish:
        publish.write(publish.RESULTS / "untuned", found)
    if options.json:
        print(json.dumps(publish.finite(found)))


def untouched(job: Job) -> bool:
    """Whether it is ours with no setting."""
    return job.method == OURS and set(job.setting) <= {"lr", "shape", "ratio"}


if __name__ == "__main__":
    main()
