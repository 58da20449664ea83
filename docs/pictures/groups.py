"""The program of README.md for the worst groups beside methods by hand, from docs/results."""

from __future__ import annotations

import statistics
from pathlib import Path

from fcco_experiments.report.style import colour

from studies.many_groups import SHOWN, published

from . import card
from .card import GRID, IMAGES, MUTED, OURS

HIGH = 45  # pixels of a row
ROWS = (
    "mean, balanced batches", "mean, random batches", "group DRO, step 0.01", "worst of each batch",
    "moving average", "group DRO", "fcco",
)  # fmt: skip


def draw() -> list[Path]:
    """Mean and standard deviation of the distance of each method from the best possible CVaR."""
    told = []
    with card.figure(480, 92 + HIGH * len(ROWS), 15) as figure:
        height = 72 * figure.get_figheight()
        axes = figure.add_axes((0.035, 34 / height, 0.93, HIGH * len(ROWS) / height))
        card.quiet(axes, 13)
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.set(xlim=(0, 0.15), ylim=(len(ROWS) - 0.5, -0.5), yticks=())
        axes.set_xticks((0, 0.05, 0.1), ("0", "0.05", "0.10"))
        for row, name in enumerate(ROWS):
            label, values = SHOWN[name], published(name)
            mean, deviation = statistics.fmean(values), statistics.stdev(values)
            look = OURS if name == "fcco" else colour("erm")
            bold = "bold" if name == "fcco" else "normal"
            axes.text(0.0015, row - 0.22, label, va="center", fontsize=14, fontweight=bold)
            axes.plot((0, mean), (row + 0.2,) * 2, color=look, linewidth=7, alpha=0.75)
            ends = (mean - deviation, mean + deviation)
            axes.plot(ends, (row + 0.2,) * 2, color=MUTED, linewidth=1.6, zorder=4)
            axes.text(
                ends[1] + 0.003, row + 0.2, f"{mean:.3f}", va="center", fontsize=13.5, color=look,
                fontweight="bold",
            )  # fmt: skip
            told.append(f"{label}: {mean:.3f}")
        title = "200 groups, 8 in a batch: CVaR above the best possible"
        figure.text(0.035, 1 - 28 / height, title, va="center", fontsize=14)
        alt = (
            "CVaR of the worst tenth of 200 groups, of which a batch holds 8, above the best "
            f"possible; mean of 10 seeds. {'; '.join(told)}."
        )
        return [card.save(figure, IMAGES / "many-groups.svg", alt)]
