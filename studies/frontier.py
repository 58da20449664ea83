"""Frontiers of fairness sweeps: settings chosen on validation data, figures from test data.

    python -m studies.frontier [--json]
    python -m studies.frontier --sweep FOLDER --publish

With `--sweep` it reads all runs of `fcco sweep fairness --grid full`, keeps of each method the
settings that no other of its settings beats on validation data (mean over seeds of the AUC and of
the true gap), and publishes their test figures, which took no part in that choice, seed by seed.

Without, it reads the published ones and sets our frontier against the kept settings of each
baseline. Compared is what a user would get who cannot see test data: of our settings whose
validation gap is no larger, the one with the highest validation AUC; its test AUC and its test gap
less those of the baseline's setting. Our frontier are the settings of SONEX and ALEXR2 together
that no other of them beats on validation data.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fcco_experiments import store, sweep
from fcco_experiments.stats import frontier, spread

from studies import publish
from studies.runner import command, parse

DATA = {"adult": "Adult", "compas": "COMPAS"}
OURS = ("alexr2", "sonex")
FIGURES = ("val_gap", "val_auc", "test_gap", "test_auc")


@dataclass(frozen=True)
class Point:
    """A setting, with its figures seed by seed.

    Attributes:
        name: in the sweep.
        setting: the values of the grid.
        chosen: whether it won by the rule of the task.
        val_gap: true gaps on validation data.
        val_auc: AUC on validation data.
        test_gap: true gaps on test data.
        test_auc: AUC on test data.
    """

    name: str
    setting: dict[str, Any]
    chosen: bool
    val_gap: list[float]
    val_auc: list[float]
    test_gap: list[float]
    test_auc: list[float]

    @property
    def method(self) -> str:
        """Its method."""
        return self.name.rpartition("@")[0] or self.name

    def at(self, part: str) -> tuple[float, float]:
        """Mean gap and mean AUC."""
        gap, auc = (spread(getattr(self, f"{part}_{key}"))[0] for key in ("gap", "auc"))
        return gap, auc


def error(values: Sequence[float]) -> float:
    """Standard error of a mean."""
    return spread(values)[1] / len(values) ** 0.5


def best(points: Sequence[Point], part: str) -> list[Point]:
    """Those that no other beats, from the smallest gap on; of equal ones the first."""
    places = [point.at(part) for point in points]
    kept = frontier([gap for gap, _ in places], [auc for _, auc in places])
    return list({places[k]: points[k] for k in reversed(kept)}.values())[::-1]


def match(ours: Sequence[Point], point: Point) -> Point | None:
    """Of ours with no larger validation gap, the one with the highest validation AUC."""
    able = [each for each in ours if each.at("val")[0] <= point.at("val")[0]]
    return max(able, key=lambda each: each.at("val")[1], default=None)


def compared(points: Sequence[Point], mine: Sequence[str] = OURS) -> list[dict[str, Any]]:
    """A row for each setting of a baseline; no figures where none of ours has so small a gap."""
    ours, rows = best([point for point in points if point.method in mine], "val"), []
    for point in (each for each in points if each.method not in mine):
        row: dict[str, Any] = {"name": point.name, "method": point.method}
        if (other := match(ours, point)) is not None:
            gap, auc = (a - b for a, b in zip(other.at("test"), point.at("test"), strict=True))
            row |= {"matched": other.name, "matched_gap": gap, "matched_auc": auc}
        rows.append(row)
    return rows


def table() -> list[list[str]]:
    """Our frontier against each baseline, on all data."""
    rows = [["data", "baseline", "kept", "AUC", "gap", "more AUC", "smaller gap"]]
    for data, title in DATA.items():
        every = compared(published(data)[1])
        for rival in ("sox", "sonx", "icppac", "sonx-adam"):
            own = [row for row in every if row["method"] == rival]
            auc, gap = (
                [row[key] for row in own if key in row] for key in ("matched_auc", "matched_gap")
            )
            rows.append([
                title, rival, str(len(own)),
                f"{statistics.fmean(auc):+.4f}", f"{statistics.fmean(gap):+.4f}",
                f"{sum(value > 0 for value in auc)}/{len(auc)}",
                f"{sum(value < 0 for value in gap)}/{len(gap)}",
            ])  # fmt: skip
    return rows


def from_sweep(folder: Path) -> dict[str, Any]:
    """The kept settings of each method, and how many there were.

    A setting with a run that diverged or is not finished cannot be chosen.
    """
    comparison, found = store.load_comparison(folder), sweep.read(folder)
    if found is None:
        raise SystemExit(f"{folder} holds no sweep.json: it is not a finished sweep.")
    counts: dict[str, int] = {}
    families: dict[str, list[Point]] = {}
    for entry in found["settings"]:
        counts[entry["method"]] = counts.get(entry["method"], 0) + 1
        runs = [run for run in comparison.of(entry["name"]) if run.result is not None]
        if len(runs) < len(comparison.meta["seeds"]) or any(run.diverged for run in runs):
            continue
        own = {key: [round(float(run.figures[key]), 6) for run in runs] for key in FIGURES}
        chosen = found["winners"].get(entry["method"]) == entry["name"]
        point = Point(entry["name"], entry["setting"], chosen, **own)
        families.setdefault(entry["method"], []).append(point)
    kept = [asdict(point) for own in families.values() for point in best(own, "val")]
    floors = {
        f"{part}_floor": round(float(comparison.runs[0].figures[f"{part}_gap_floor"]), 6)
        for part in ("val", "test")
    }
    said = {"data": comparison.meta["config"]["data"], "seeds": comparison.meta["seeds"]}
    return {**said, **floors, "settings": counts, "points": kept}


def published(data: str) -> tuple[Mapping[str, Any], list[Point]]:
    """The head and the settings."""
    found = publish.table(f"fairness-{data}-frontier")
    return found, [Point(**point) for point in found["points"]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("frontier", __doc__)
    parser.add_argument("--sweep", type=Path, metavar="FOLDER")
    options = parse(parser, arguments, (1, 1))
    if options.sweep is not None:
        found = from_sweep(options.sweep)
        publish.conclude(options, f"fairness-{found['data']}-frontier", found)
        return
    print(publish.plain(table()))
    if options.json:
        print(json.dumps({data: compared(published(data)[1]) for data in DATA}))


if __name__ == "__main__":
    main()
