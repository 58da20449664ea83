"""Average precision, partial AUC and NDCG: ours beside LibAUC, plain losses and LambdaRank.

    python -m studies.xrisk --json --workers 14 --out build/xrisk.jsonl
    python -m studies.xrisk --quick --json               # under three minutes
    python -m studies.xrisk --data hiv --metric AP       # part of it
    python -m studies.xrisk --speed --json               # time and memory of a step

A multilayer perceptron on fixed features. Every X-risk starts from the same cross-entropy (a third
of the steps) and takes the same batches; cross-entropy and focal loss have as many steps in all.
Each method has four settings, chosen by the metric itself on validation data (mean of two seeds);
then come fresh seeds with the chosen one. Of each run counts the checkpoint that is best on
validation data: for an X-risk one after its start, for the plain losses any. Reported is the metric
on test data:

| metric | meaning |
|---|---|
| `AP` | average precision |
| `pAUC` | area of the ROC curve at FPR <= 0.3, over 0.3; not McClish's rescaling of it |
| `tpAUC` | area where FPR <= 0.5 and TPR >= 0.5, over 0.25 |
| `NDCG@5`, `NDCG@10` | mean over queries, gains 2^relevance - 1 |

The full benchmark takes two CPU-hours or so. Finished runs are kept in the file `--out`; another
run with the same file continues. LibAUC and LightGBM are left out where they are not installed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from studies.runner import Job, Runner, short

from . import speed
from .methods import METHODS, OURS, Setting, missing
from .problems import DATA, METRICS, load, metrics_of
from .training import Figures, run

TUNING_SEEDS = (0, 1)
SEEDS = range(10, 100)
QUICK_STEPS, QUICK_DATA = 90, ("hiv", "ranking")


@dataclass(frozen=True)
class Cell:
    """A method on a metric of a data set."""

    data: str
    metric: str
    method: str

    def job(self, setting: Setting, seed: int, steps: int | None) -> Job:
        """A plain loss is trained once for all metrics of its data."""
        plain = METHODS[self.metric][self.method].plain
        problem = self.data if plain else f"{self.data} / {self.metric}"
        return Job(problem, self.method, setting, seed, evaluations=steps)

    @property
    def settings(self) -> list[Setting]:
        """What it may choose from."""
        return METHODS[self.metric][self.method].grid


Found = dict[Cell, tuple[Setting, list[float]]]


def plan(options: argparse.Namespace) -> list[Cell]:
    """What the filters leave of the installed methods."""
    absent = missing()
    for prefix, reason in absent.items():
        options.left_out.append(f"{prefix} is left out: {reason}")
        print(options.left_out[-1], file=sys.stderr)
    there = []
    for data in options.data:
        print(f"{data}: reading", file=sys.stderr)
        try:
            load(data, options.arrays)  # before any worker does: features are computed once
            there.append(data)
        except FileNotFoundError as reason:
            options.left_out.append(f"{data} is left out: {short(reason)}")
            print(options.left_out[-1], file=sys.stderr)
    return [
        Cell(data, metric, method)
        for data in there
        for metric in metrics_of(data)
        for method in METHODS[metric]
        if metric in options.metric
        and any(method.startswith(name) for name in options.method)
        and not any(method.startswith(prefix) for prefix in absent)
    ]


def train(
    cells: list[Cell], options: argparse.Namespace
) -> dict[Cell, tuple[Setting, list[float]]]:
    """For each cell the chosen setting and the metric on test data by seed."""
    runner = Runner(partial(run, arrays=options.arrays), Figures, options.workers, options.out)

    def values(cell: Cell, setting: Setting, seeds: Iterable[int], part: str) -> list[float]:
        jobs = [cell.job(setting, seed, options.steps) for seed in seeds]
        return [getattr(runner.known[job.key], part)[cell.metric] for job in jobs]

    chosen = {cell: cell.settings[0] for cell in cells}
    if not options.quick:
        tuning = [
            cell.job(setting, seed, options.steps)
            for cell in cells
            for setting in cell.settings
            for seed in TUNING_SEEDS
        ]
        runner(tuning, "settings")
        for cell in cells:
            means = [mean(values(cell, each, TUNING_SEEDS, "val")) for each in cell.settings]
            chosen[cell] = cell.settings[means.index(max(means))]
    seeds = SEEDS[: options.seeds]
    runner([cell.job(chosen[cell], s, options.steps) for cell in cells for s in seeds], "seeds")
    return {cell: (chosen[cell], values(cell, chosen[cell], seeds, "test")) for cell in cells}


def mean(values: list[float]) -> float:
    """The mean; that of a run that diverged is less than any other."""
    return statistics.fmean(values) if all(map(math.isfinite, values)) else -math.inf


def interval(differences: list[float]) -> tuple[float, float]:
    """Mean and half width of the 95 % t interval."""
    from scipy.stats import t

    count = len(differences)
    if count < 2:
        return statistics.fmean(differences), math.nan
    half = t.ppf(0.975, count - 1) * statistics.stdev(differences) / math.sqrt(count)
    return statistics.fmean(differences), float(half)


def collect(found: Found) -> dict[str, Any]:
    """In the form of the JSON."""
    told: dict[str, Any] = {}
    for cell, (_, values) in found.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        row = {"mean": round(statistics.fmean(values), 5), "std": round(spread, 5)}
        told.setdefault(cell.data, {}).setdefault(cell.metric, {})[cell.method] = row
    return told


def tables(found: Found) -> str:
    """Means, paired differences of ours to each, settings."""
    lines = []
    for first in dict.fromkeys((cell.data, cell.metric) for cell in found):
        data, metric = first
        title = f"{data}, {metric}"
        lines.append(f"\n{title:<20}{'mean':>8}{'std':>8}   ours - it, 95 %     setting")
        mine = found.get(Cell(data, metric, OURS))
        for cell, (setting, values) in found.items():
            if (cell.data, cell.metric) != first:
                continue
            versus = ""
            if mine is not None and cell.method != OURS:
                pairs = zip(mine[1], values, strict=True)
                middle, half = interval([a - b for a, b in pairs])
                versus = f"{middle:+.4f} +- {half:.4f}"
            spread = statistics.stdev(values) if len(values) > 1 else math.nan
            told = " ".join(f"{key} {value}" for key, value in setting.items())
            lines.append(
                f"  {cell.method:<18}{statistics.fmean(values):>8.4f}{spread:>8.4f}"
                f"   {versus:<20}{told}"
            )
    return "\n".join(lines)


def markdown(found: Found) -> str:
    """The table of docs/research/details/ranking.md: means, and ours less each, with interval."""
    lines = ["| data, metric | method | mean ± std | ours − it, 95 % |", "|---|---|---|---|"]
    for cell, (_, values) in found.items():
        place, versus = f"{cell.data}, {cell.metric}", ""
        if cell.method != OURS:
            mine = found[Cell(cell.data, cell.metric, OURS)][1]
            middle, half = interval([a - b for a, b in zip(mine, values, strict=True)])
            versus = f"{middle:+.3f} ± {half:.3f}"
            # An interval without 0 is shown in bold.
            versus = f"**{versus}**" if abs(middle) > half else versus
        told = f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"
        lines.append(f"| {place} | {cell.method} | {told} | {versus} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m studies.xrisk", description=summary, epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--markdown", action="store_true", help="tables for a page instead")
    parser.add_argument("--quick", action="store_true", help="few steps, two seeds, no choice")
    parser.add_argument("--speed", action="store_true", help="time and memory of a step instead")
    parser.add_argument(
        "--data",
        nargs="+",
        choices=list(DATA),
        help="all; with --quick those without a backbone",
    )
    parser.add_argument("--metric", nargs="+", choices=list(METRICS), default=list(METRICS))
    parser.add_argument("--method", nargs="+", default=[""], help="beginnings of their names")
    parser.add_argument("--seeds", type=int, help="10, or 2 with --quick")
    parser.add_argument("--steps", type=int, help="of every run")
    parser.add_argument(
        "--workers", type=int, help="processes of one thread each; 1, or 2 with --quick"
    )
    parser.add_argument("--out", type=Path, help="file of JSON lines with finished runs")
    parser.add_argument("--arrays", type=Path, metavar="DIR", help="read DATA.npz from there")
    options = parser.parse_args(arguments)
    if options.speed:
        speed.report(options.quick, options.json)
        return
    options.seeds = options.seeds or (2 if options.quick else 10)
    options.workers = options.workers or (2 if options.quick else 1)
    options.steps = options.steps or (QUICK_STEPS if options.quick else None)
    # The features of a backbone take long, the first time.
    small = options.quick and options.arrays is None
    options.data = options.data or list(QUICK_DATA if small else DATA)
    options.left_out = []
    torch.set_num_threads(1)
    cells = plan(options)
    if not cells:
        parser.exit(1, "Nothing is left to train.\n")
    found = train(cells, options)
    print(markdown(found) if options.markdown else tables(found))
    if options.json:
        print(json.dumps({**collect(found), "left_out": options.left_out}))


if __name__ == "__main__":
    main()
