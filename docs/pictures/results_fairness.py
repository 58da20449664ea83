"""Test AUC against the gap of rates: the method without settings beside tuned ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fcco_experiments.report.style import colour

from . import card
from .card import GRID, IMAGES, INK, MUTED, PAGE, RESULTS

DATA = {"adult": "Adult", "compas": "COMPAS"}
SHOWN = ("automatic", "sonex", "alexr2", "sox", "sonx", "icppac")
SIDES = {  # where the name of a method stands: its shift in points from the dot
    "adult": {"automatic": (-6, 11), "sonex": (-5, -12), "alexr2": (5, -12), "sonx": (6, -12)},
    "compas": {"automatic": (-6, 11), "sonex": (6, 10), "sonx": (6, -12)},
}


def methods(data: str) -> dict[str, Any]:
    """Figures of each method, the one without settings first."""
    own = (f"fairness-{data}-automatic", f"fairness-{data}")
    tables = [json.loads((RESULTS / name / "table.json").read_text())["methods"] for name in own]
    return tables[0] | tables[1]


def draw() -> list[Path]:
    """The chart."""
    told = []
    with card.figure(520, 640, 15) as figure:
        figure.text(0.03, 0.965, "AUC against the gap of rates, test data", va="center")
        for x, fill, text in ((0.03, True, "no settings"), (0.29, False, "best of 384 settings")):
            figure.text(x + 0.033, 0.927, text, fontsize=13, va="center", color=MUTED)
            axes = figure.add_axes((x, 0.917, 0.024, 0.02), frameon=False)
            axes.plot(
                0, 0, "o", color=MUTED if fill else PAGE, markeredgecolor=MUTED, markersize=9,
                markeredgewidth=2,
            )  # fmt: skip
            axes.axis("off")
        for number, (data, title) in enumerate(DATA.items()):
            found = methods(data)
            axes = figure.add_axes((0.13, 0.53 - 0.45 * number, 0.84, 0.315))
            card.quiet(axes, 12.5)
            axes.grid(axis="x", color=GRID, linewidth=0.8)
            axes.set_title(title, loc="left", fontsize=14, fontweight="bold", color=INK)
            for name in SHOWN:
                gap, auc = (found[name][key] for key in ("test_gap", "test_auc"))
                shade, own = colour(name), name == "automatic"
                axes.errorbar(
                    gap["mean"], auc["mean"], auc["std"] / math.sqrt(auc["runs"]),
                    gap["std"] / math.sqrt(gap["runs"]), fmt="o", color=shade, markersize=9,
                    markerfacecolor=shade if own else PAGE, markeredgewidth=2, elinewidth=1.5,
                    zorder=3,
                )  # fmt: skip
                shift = SIDES[data].get(name, (6, 11))
                axes.annotate(
                    name, (gap["mean"], auc["mean"]), shift, textcoords="offset points",
                    color=shade, fontweight="bold", fontsize=13, va="center",
                    ha="left" if shift[0] > 0 else "right",
                )  # fmt: skip
                told.append(f"{name} {auc['mean']:.4f} at {gap['mean']:.3f}")
            told[-len(SHOWN)] = f"{title}: {told[-len(SHOWN)]}"
            free, chance = found["erm"], found["sonex"]["test_gap_floor"]["mean"]
            axes.margins(0.14)
            axes.set_xlim(chance - 0.006, None)
            axes.axvline(chance, color=MUTED, linewidth=1.2, linestyle=(0, (2, 2)))
            axes.annotate(
                "by chance", (chance, 0), (4, 6), xycoords=("data", "axes fraction"),
                textcoords="offset points", color=MUTED, fontsize=12.5,
            )  # fmt: skip
            axes.axhline(free["test_auc"]["mean"], color=colour("erm"), linewidth=1.2, zorder=1)
            axes.annotate(
                f"no constraints: gap {free['test_gap']['mean']:.3f}",
                (1, free["test_auc"]["mean"]), (-2, 4), xycoords=("axes fraction", "data"),
                textcoords="offset points", ha="right", color=colour("erm"), fontsize=12.5,
            )  # fmt: skip
            axes.set_xlabel("largest gap (← better)", loc="right", fontsize=12.5, color=MUTED)
        alt = f"Test AUC and largest gap of TPR or FPR between two groups. {'; '.join(told)}."
        return [card.save(figure, IMAGES / "results-fairness.svg", alt)]
