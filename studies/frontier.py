"""Frontiers of fairness sweeps: settings chosen on validation data, figures from test data.

    python -m studies.frontier [FRONTIER.json ...] [--json] [--plot IMAGE.png]
    python -m studies.frontier --sweep FOLDER --out FRONTIER.json

With `--sweep` it reads all runs of `fcco sweep fairness --grid full`, keeps of each method the
settings that no other of its settings beats on validation data (mean over seeds of the AUC and of
the true gap), and writes their test figures, which took no part in that choice, seed by seed.

Without, it reads such files (the committed ones, unless named) and prints for each setting of a
baseline:

* above: the test AUC of our frontier at the same test gap, interpolated, less that of the setting;
  behind it the same in standard errors of the difference. A dash where ours does not reach the gap.
* matched: what a user would get who cannot see test data: of our settings whose validation gap is
  no larger, the one with the highest validation AUC; its test AUC and its test gap less those of
  the baseline's setting, paired by seed, each in standard errors too.

Our frontier are the settings of `--ours` together that no other of them beats on validation data;
on test data it is drawn through those of them that no other of them beats there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fcco_experiments import store, sweep
from fcco_experiments.report.style import TOKENS, styles
from fcco_experiments.stats import frontier

RESULTS = Path(__file__).parent.parent / "docs/results"
FILES = [RESULTS / f"fairness-{data}-frontier/frontier.json" for data in ("adult", "compas")]
OURS = "alexr2,sonex"
TITLES = {"adult": "Adult", "compas": "COMPAS"}
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
        own = {"val": (self.val_gap, self.val_auc), "test": (self.test_gap, self.test_auc)}[part]
        return math.fsum(own[0]) / len(own[0]), math.fsum(own[1]) / len(own[1])


def error(values: Sequence[float]) -> float:
    """Standard error of a mean."""
    return statistics.stdev(values) / math.sqrt(len(values))


def best(points: Sequence[Point], part: str) -> list[Point]:
    """Those that no other beats, from the smallest gap on; of equal ones the first."""
    places = [point.at(part) for point in points]
    kept = frontier([gap for gap, _ in places], [auc for _, auc in places])
    return list({places[k]: points[k] for k in reversed(kept)}.values())[::-1]


def height(ours: Sequence[Point], gap: float) -> tuple[float, float] | None:
    """Test AUC of a frontier at a gap, and its standard error; None left of its end."""
    places = [point.at("test") for point in ours]
    if gap < places[0][0]:
        return None
    errors = [error(point.test_auc) for point in ours]
    right = next((k for k, (x, _) in enumerate(places) if x > gap), None)
    if right is None:
        return places[-1][1], errors[-1]
    (a, low), (b, high) = places[right - 1], places[right]
    t = (gap - a) / (b - a)
    return low + t * (high - low), math.hypot((1 - t) * errors[right - 1], t * errors[right])


def match(ours: Sequence[Point], point: Point) -> Point | None:
    """Of ours with no larger validation gap, the one with the highest validation AUC."""
    able = [each for each in ours if each.at("val")[0] <= point.at("val")[0]]
    return max(able, key=lambda each: each.at("val")[1], default=None)


def ratio(value: float, spread: float) -> float | None:
    return value / spread if spread > 0 else None


def compared(points: Sequence[Point], mine: Sequence[str]) -> list[dict[str, Any]]:
    """A row per setting, ours first."""
    ours = best([point for point in points if point.method in mine], "val")
    shown = best(ours, "test")
    rows = []
    for point in sorted(points, key=lambda each: each.method not in mine):
        gap, auc = point.at("test")
        row: dict[str, Any] = {"name": point.name, "method": point.method}
        row |= {"setting": point.setting, "chosen": point.chosen, "ours": point in ours}
        row |= dict(zip(FIGURES, (*point.at("val"), gap, auc), strict=True))
        row |= {"gap_error": error(point.test_gap), "auc_error": error(point.test_auc)}
        found = None if point.method in mine else height(shown, gap)
        if found is not None:
            row["above"] = found[0] - auc
            row["above_errors"] = ratio(row["above"], math.hypot(found[1], row["auc_error"]))
        other = None if point.method in mine else match(ours, point)
        if other is not None:
            row["matched"] = other.name
            for key in ("auc", "gap"):
                two = (getattr(each, f"test_{key}") for each in (other, point))
                own = [a - b for a, b in zip(*two, strict=True)]
                row[f"matched_{key}"] = math.fsum(own) / len(own)
                row[f"matched_{key}_errors"] = ratio(row[f"matched_{key}"], error(own))
        rows.append(row)
    return rows


def from_sweep(folder: Path) -> dict[str, Any]:
    """What `frontier.json` holds: the kept settings of each method, and how many there were.

    A setting with a run that diverged or is not finished cannot be chosen.
    """
    comparison, told = store.load_comparison(folder), sweep.read(folder)
    if told is None:
        raise SystemExit(f"{folder} holds no sweep.json: it is not a finished sweep.")
    counts: dict[str, int] = {}
    families: dict[str, list[Point]] = {}
    for entry in told["settings"]:
        counts[entry["method"]] = counts.get(entry["method"], 0) + 1
        runs = [run for run in comparison.of(entry["name"]) if run.result is not None]
        if len(runs) < len(comparison.meta["seeds"]) or any(run.diverged for run in runs):
            continue
        own = {key: [round(float(run.figures[key]), 6) for run in runs] for key in FIGURES}
        chosen = told["winners"].get(entry["method"]) == entry["name"]
        point = Point(entry["name"], entry["setting"], chosen, **own)
        families.setdefault(entry["method"], []).append(point)
    kept = [point for own in families.values() for point in best(own, "val")]
    floors = {
        f"{part}_floor": round(float(comparison.runs[0].figures[f"{part}_gap_floor"]), 6)
        for part in ("val", "test")
    }
    said = {"data": comparison.meta["config"]["data"], "seeds": comparison.meta["seeds"]}
    return {**said, **floors, "settings": counts, "points": [asdict(point) for point in kept]}


def write(path: Path, found: Mapping[str, Any]) -> None:
    """One line for each setting."""
    lines = [json.dumps(point) for point in found["points"]]
    head = json.dumps({key: value for key, value in found.items() if key != "points"})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head[:-1]}, "points": [\n' + ",\n".join(lines) + "\n]}\n")


def read(path: Path) -> tuple[dict[str, Any], list[Point]]:
    """The head and the settings."""
    found = json.loads(path.read_text())
    return found, [Point(**point) for point in found.pop("points")]


def told(head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], mine: str) -> str:
    """The table as text."""
    kept = [row["name"] for row in rows if row["ours"]]
    lines = [f"{head['data']}: our frontier ({mine}) on validation data: {', '.join(kept)}"]
    lines += [f"by chance: {head['val_floor']:.4f} validation, {head['test_floor']:.4f} test"]
    names = (
        "val gap",
        "val AUC",
        "test gap",
        "test AUC",
        "above (s.e.)",
        "matched AUC, gap (s.e.)",
    )
    lines += [f"{'setting':23}{names[0]:>8}{names[1]:>8}{names[2]:>17}{names[3]:>17}"
              f"{names[4]:>16}  {names[5]}"]  # fmt: skip
    for row in rows:
        text = f"{row['name'] + ('*' if row['chosen'] else ''):23}"
        text += f"{row['val_gap']:8.4f}{row['val_auc']:8.4f}"
        text += f"  {row['test_gap']:.4f} ± {row['gap_error']:.4f}"
        text += f"  {row['test_auc']:.4f} ± {row['auc_error']:.4f}"
        text += f"{_pair(row, 'above'):>16}"
        if "matched" in row:
            text += f"  {_pair(row, 'matched_auc')}, {_pair(row, 'matched_gap')} {row['matched']}"
        lines.append(text)
    return "\n".join([*lines, "* chosen by the rule of the task", ""])


def _pair(row: Mapping[str, Any], key: str) -> str:
    if key not in row:
        return "-"
    errors = row[f"{key}_errors"]
    return f"{row[key]:+.4f} ({'-' if errors is None else f'{errors:+.1f}'})"


def plot(files: Mapping[str, tuple[Mapping[str, Any], Sequence[Point]]], path: Path) -> None:
    """A panel per data set: test AUC against the true test gap, with standard errors."""
    import matplotlib
    from fcco_experiments.report.plots import dress
    from matplotlib.figure import Figure

    order = list(dict.fromkeys(p.method for _, points in files.values() for p in points))
    ours = OURS.split(",")
    look = styles({name: name for name in (*ours, *(name for name in order if name not in ours))})
    page, ink, muted = (TOKENS[name][0] for name in ("page", "ink", "muted"))
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "font.size": 9.0}):
        figure = Figure(figsize=(5.6 * len(files), 4.6), facecolor=page)
        for axes, (title, (head, points)) in zip(
            figure.subplots(1, len(files), squeeze=False)[0], files.items(), strict=True
        ):
            dress(axes)
            axes.grid(axis="x", color=TOKENS["grid"][0], linewidth=0.8)
            for name, style in look.items():
                own = [point for point in points if point.method == name]
                x, y = zip(*(point.at("test") for point in own), strict=True)
                axes.errorbar(
                    x, y, [error(p.test_auc) for p in own], [error(p.test_gap) for p in own],
                    fmt=style.marker, color=style.colour, markersize=4, elinewidth=0.7, alpha=0.4,
                    markeredgewidth=0,
                )  # fmt: skip
                # The line: of the kept settings those that no other of them beats on test data.
                axes.plot(
                    *zip(*(point.at("test") for point in best(own, "test")), strict=True),
                    color=style.colour, dashes=style.dash or (None, None), linewidth=1.4,
                    marker=style.marker, markersize=5, markeredgecolor=page, label=name,
                )  # fmt: skip
                for point in own:
                    if point.chosen:
                        axes.plot(
                            *([value] for value in point.at("test")), color=style.colour,
                            marker="*", markersize=15, markeredgecolor=page, zorder=4,
                        )  # fmt: skip
            axes.axvline(head["test_floor"], color=muted, linewidth=1.1, linestyle=(0, (2, 2)))
            axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=ink)
            axes.set_xlabel("largest true gap of TPR or FPR, test (← better)", loc="right")
            axes.set_ylabel("AUC, test (↑ better)", loc="top")
            axes.margins(0.03)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper left", ncols=len(labels), frameon=False)
        figure.tight_layout(rect=(0, 0, 1, 0.94))
        figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, default=FILES)
    parser.add_argument("--sweep", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, metavar="FRONTIER.json")
    parser.add_argument("--ours", default=OURS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="IMAGE.png")
    asked = parser.parse_args()
    if asked.sweep is not None:
        if asked.out is None:
            parser.error("--sweep needs --out FRONTIER.json")
        write(asked.out, from_sweep(asked.sweep))
        return
    found = {path: read(path) for path in asked.files}
    rows = [compared(points, asked.ours.split(",")) for _, points in found.values()]
    heads = [head for head, _ in found.values()]
    if asked.plot is not None:
        plot({TITLES.get(pair[0]["data"], "data"): pair for pair in found.values()}, asked.plot)
    if asked.json:
        print(json.dumps({head["data"]: own for head, own in zip(heads, rows, strict=True)}))
    else:
        for head, own in zip(heads, rows, strict=True):
            print(told(head, own, asked.ours))


if __name__ == "__main__":
    main()
