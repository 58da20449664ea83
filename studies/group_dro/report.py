"""Tables of the study from its runs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fcco_experiments.stats import paired

Run = dict[str, Any]

NETWORKS = ("automatic", "sonex", "alexr2", "sonx", "ooa-cvar", "ooa", "uniform", "erm")
HEADS = (
    "automatic", "sonex", "sonex-adam", "alexr2", "sonx", "ooa-cvar", "ooa-cvar-euclidean", "ooa",
    "uniform", "erm",
)  # fmt: skip
COLUMNS = ("train_cvar", "val_cvar", "test_cvar", "accuracy", "test_accuracy")
"""`accuracy` is that of the worst test group, or the tenth percentile over test users."""


def read(file: Path) -> list[Run]:
    """The runs in a compressed file of JSON lines."""
    with gzip.open(file, "rt") as lines:
        return [json.loads(line) for line in lines]


def row_of(runs: Sequence[Run], first: Sequence[Run]) -> dict[str, Any]:
    """Means and deviations over seeds, and paired intervals of the difference from `first`."""
    found: dict[str, Any] = {"seeds": len(runs)}
    by_seed = {run["seed"]: run for run in first}
    for column in COLUMNS:
        values = [figure(run, column) for run in runs]
        found[column] = {"mean": fmean(values), "std": stdev(values) if len(values) > 1 else 0.0}
        both = [run for run in runs if run["seed"] in by_seed]
        gap = paired(
            [figure(run, column) for run in both],
            [figure(by_seed[run["seed"]], column) for run in both],
        )
        found[column] |= {"less_first": gap.mean, "decided": gap.decided}
    return found


def figure(run: Run, column: str) -> float:
    """A figure of a run."""
    if column == "accuracy":
        return run["test_worst_accuracy" if "test_worst_accuracy" in run else "test_tenth_accuracy"]
    return run[column]


def fresh(runs: Sequence[Run], data: str) -> list[Run]:
    """Runs on the fresh splits of a data set that SONEX has."""
    own = [run for run in runs if run["data"] == data and run["stage"] == "fresh"]
    seeds = {run["seed"] for run in own if run["name"] == "sonex"}
    return [run for run in own if run["seed"] in seeds]


def networks(runs: Sequence[Run], data: str) -> dict[str, dict[str, Any]]:
    """The table of the networks that were trained end to end, by method."""
    own = fresh(runs, data)
    by = {name: [run for run in own if run["name"] == name] for name in NETWORKS}
    table = {}
    for name, mine in by.items():
        if mine:
            spectrum = [run["gram_smallest"] for run in mine if "gram_smallest" in run]
            table[name] = {**row_of(mine, by["sonex"]), "setting": mine[0]["setting"]}
            table[name]["smallest_eigenvalue"] = spectrum[0] if spectrum else None
            table[name]["collapsed"] = sum(is_constant(run) for run in mine)
    return table


def is_constant(run: Run) -> bool:
    """Whether a network ended with the loss of a constant output, ln 2 or a little more."""
    return run["train_loss"] > 0.65 and run["train_cvar"] - run["train_loss"] < 0.1


def heads(runs: Sequence[Run], data: str, rule: str) -> dict[str, dict[str, Any]]:
    """The table of the heads whose settings were chosen by `val_cvar` or `train_cvar`."""
    own = [run for run in runs if run["data"] == data and rule in run["stage"].split("/")]
    by = {name: [run for run in own if run["name"] == name] for name in HEADS}
    first = min(
        (by[name] for name in ("sonex", "sonex-adam") if by[name]),
        key=lambda mine: fmean(run[rule] for run in mine),
    )
    return {name: row_of(mine, first) for name, mine in by.items() if mine}


def samples(runs: Sequence[Run], data: str, target: float) -> dict[str, float | None]:
    """The share of the training after which the mean training CVaR is below a target.

    From curves after each epoch, straight between them; None where it never is.
    """
    own = [run for run in runs if run["data"] == data and "train_cvar" in run["stage"].split("/")]
    found: dict[str, float | None] = {}
    for name in HEADS:
        curves = [run["curve"] for run in own if run["name"] == name]
        if curves:
            mean = [fmean(values) for values in zip(*curves, strict=True)]
            found[name] = _reached(mean, target)
    return found


def samples_line(runs: Sequence[Run], data: str) -> str:
    """A row: the share of the training until the CVaR at which the best SONEX ends."""
    table = heads(runs, data, "train_cvar")
    target = min(table[name]["train_cvar"]["mean"] for name in ("sonex", "sonex-adam"))
    shares = samples(runs, data, target * 1.0001)  # its own curve is rounded
    cells = ["–" if share is None else f"{share:.2f}" for share in shares.values()]
    return f"| {data} | {target:.3f} | " + " | ".join(cells) + " |"


def _reached(curve: Sequence[float], target: float) -> float | None:
    """The share of a curve after which it is first at or below a value.

    Example:
        >>> _reached([0.8, 0.6, 0.4, 0.3], 0.5)
        0.625
    """
    for place, value in enumerate(curve):
        if value <= target:
            if place == 0:
                return 1 / len(curve)
            before = curve[place - 1]
            return (place + (before - target) / (before - value)) / len(curve)
    return None


def markdown(table: dict[str, dict[str, Any]]) -> str:
    """The rows of a table; bold: the interval of the difference from SONEX excludes 0."""
    lines = []
    for name, row in table.items():
        cells = []
        for column in COLUMNS:
            text = f"{row[column]['mean']:.3f} ± {row[column]['std']:.3f}"
            cells.append(f"**{text}**" if row[column]["decided"] else text)
        lines.append(f"| {name} | {row['seeds']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
