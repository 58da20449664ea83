"""Tables of the study from its runs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from fcco_experiments.stats import paired

from studies import publish

Run = dict[str, Any]
FOLDER = "group-dro"

DATA = ("celeba", "sentiment", "amazon")
NETWORKS = ("automatic", "sonex", "alexr2", "sonx", "ooa-cvar", "ooa", "uniform", "erm")
HEADS = (
    "automatic", "sonex", "sonex-adam", "alexr2", "sonx", "ooa-cvar", "ooa-cvar-euclidean", "ooa",
    "uniform", "erm",
)  # fmt: skip
WORST = {"celeba": "worst of 4", "sentiment": "worst group", "amazon": "10th percentile"}
COLUMNS = {
    "train CVaR": "train_cvar", "validation CVaR": "val_cvar", "test CVaR": "test_cvar",
    "test worst": "accuracy", "test accuracy": "test_accuracy",
}  # fmt: skip


def published(part: str) -> list[Run]:
    """All runs of `heads` or `networks`."""
    with gzip.open(publish.RESULTS / FOLDER / f"{part}.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def write(part: str, runs: Sequence[Run], commit: str | None = None) -> None:
    """Publish runs of a data set in place of those that were there."""
    data, folder = {run["data"] for run in runs}, publish.RESULTS / FOLDER
    every = [*(run for run in published(part) if run["data"] not in data), *runs]
    revision = publish.about(commit=commit)["revision"]
    made = publish.table(FOLDER)["runs"] | {f"{part}.jsonl.gz": revision}
    publish.write(folder, {"runs": made}, commit=commit)
    packed = gzip.compress("".join(json.dumps(run) + "\n" for run in every).encode(), mtime=0)
    (folder / f"{part}.jsonl.gz").write_bytes(packed)


def figure(run: Run, column: str) -> float:
    """A figure of a run; the accuracy of the worst test group, or the tenth percentile of users."""
    if column == "accuracy":
        return run["test_worst_accuracy" if "test_worst_accuracy" in run else "test_tenth_accuracy"]
    return run[column]


def by_name(runs: Sequence[Run], names: Sequence[str]) -> dict[str, list[Run]]:
    found = {name: [run for run in runs if run["name"] == name] for name in names}
    return {name: own for name, own in found.items() if own}


def table(runs: Sequence[Run], names: Sequence[str], first: str) -> list[list[str]]:
    """Means and deviations; bold: the interval of the difference from `first` excludes 0."""
    worst = WORST.get(runs[0]["data"], "worst")
    rows = [["method", "seeds", *(key.replace("worst", worst) for key in COLUMNS)]]
    own = by_name(runs, names)
    base = {run["seed"]: run for run in own[first]}
    for name, mine in own.items():
        cells = []
        for column in COLUMNS.values():
            text = publish.mean_std([figure(run, column) for run in mine])
            pairs = [(figure(run, column), figure(base[run["seed"]], column))
                     for run in mine if run["seed"] in base]  # fmt: skip
            left, right = ([pair[k] for pair in pairs] for k in (0, 1))
            decided = bool(pairs) and paired(left, right).decided
            cells.append(f"**{text}**" if decided else text)
        rows.append([name, str(len(mine)), *cells])
    return rows


def fresh(runs: Sequence[Run], data: str) -> list[Run]:
    """Runs of networks on the fresh splits of a data set that SONEX has."""
    own = [run for run in runs if run["data"] == data and run["stage"] == "fresh"]
    seeds = {run["seed"] for run in own if run["name"] == "sonex"}
    return [run for run in own if run["seed"] in seeds]


def networks(data: str) -> list[list[str]]:
    """The table of the networks that were trained end to end."""
    return table(fresh(published("networks"), data), NETWORKS, "sonex")


def networks_short() -> list[list[str]]:
    """Test and training CVaR on all data."""
    runs = {data: by_name(fresh(published("networks"), data), NETWORKS) for data in DATA}
    head = ["test CVaR (training CVaR)"]
    for data, own in runs.items():
        title = {"celeba": "CelebA", "amazon": "Amazon"}.get(data, data)
        splits, fewest = len(own["sonex"]), min(own, key=lambda name: len(own[name]))
        fewer = f" ({fewest}: {len(own[fewest])})" if len(own[fewest]) < splits else ""
        head.append(f"{title}, {splits} splits{fewer}")
    rows = [head]
    for name in NETWORKS:
        ends = [[fmean(r[k] for r in runs[d][name]) for k in ("test_cvar", "train_cvar")]
                for d in DATA]  # fmt: skip
        rows.append([name, *(f"{test:.3f} ({train:.3f})" for test, train in ends)])
    return rows


def eigenvalues() -> list[list[str]]:
    """The smallest one of the groups' Gram matrix, first split, where it was computed."""
    rows = [["data", *NETWORKS]]
    for data in DATA:
        own = by_name(fresh(published("networks"), data), NETWORKS)
        found = [[r["gram_smallest"] for r in own[n] if "gram_smallest" in r] for n in NETWORKS]
        if all(found):
            rows.append([data, *(f"{values[0]:.2g}" for values in found)])
    return rows


def is_constant(run: Run) -> bool:
    """Whether a network ended with the loss of a constant output, ln 2 or a little more."""
    return run["train_loss"] > 0.65 and run["train_cvar"] - run["train_loss"] < 0.1


def chosen_by(runs: Sequence[Run], data: str, rule: str) -> list[Run]:
    """Heads whose settings were chosen by `val_cvar` or `train_cvar`."""
    return [run for run in runs if run["data"] == data and rule in run["stage"].split("/")]


def best_sonex(own: dict[str, list[Run]], rule: str) -> str:
    """The better of two optimizers."""
    both = [name for name in ("sonex", "sonex-adam") if name in own]
    return min(both, key=lambda name: fmean(run[rule] for run in own[name]))


def heads(data: str, rule: str) -> list[list[str]]:
    """The table of the heads, bold against the better SONEX."""
    runs = chosen_by(published("heads"), data, rule)
    return table(runs, HEADS, best_sonex(by_name(runs, HEADS), rule))
