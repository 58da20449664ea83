"""Training CVaR of networks trained end to end, from the runs in docs/results."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from fcco_experiments.report.style import colour

from studies.group_dro.report import NETWORKS, fresh, is_constant, published

from . import card
from .card import GRID, IMAGES, INK, MUTED

DATA = {
    "celeba": "CelebA, 16 groups",
    "sentiment": "Sentiment, 14 groups",
    "amazon": "Amazon, 636 users",
}
LABELS = {
    "automatic": "automatic", "sonex": "SONEX", "alexr2": "ALEXR2", "sonx": "SONX",
    "ooa-cvar": "OOA-CVaR", "ooa": "OOA", "uniform": "uniform", "erm": "ERM",
}  # fmt: skip
HIGH = 22


def draw() -> list[Path]:
    """A panel for each data set: a dot for each split, a bar at the mean."""
    runs = published("networks")
    with card.figure(560, 90 + 3 * (HIGH * len(NETWORKS) + 52), 13) as figure:
        height, top = 72 * figure.get_figheight(), 52
        figure.text(0.03, 1 - 24 / height, "Training CVaR, worst 15 % of the groups", fontsize=15)
        for data, title in DATA.items():
            own = fresh(runs, data)
            panel = HIGH * len(NETWORKS)
            bottom = (height - top - 26 - panel) / height
            axes = figure.add_axes((0.2, bottom, 0.76, panel / height))
            card.quiet(axes, 12)
            axes.grid(axis="y", visible=False)
            axes.grid(axis="x", color=GRID, linewidth=0.8)
            axes.set(ylim=(len(NETWORKS) - 0.5, -0.5), xlim=(0, 2 if data != "sentiment" else 0.8))
            axes.set_yticks(range(len(NETWORKS)), [LABELS[name] for name in NETWORKS])
            axes.set_title(title, loc="left", fontsize=13, color=INK, pad=6)
            for place, name in enumerate(NETWORKS):
                mine = [run for run in own if run["name"] == name]
                word = {"automatic": "fcco", "ooa-cvar": "ooa"}.get(name, name)
                shade = colour(word)
                for run in mine:
                    face = "none" if is_constant(run) else shade
                    axes.plot(
                        run["train_cvar"], place, "o", markersize=6, markerfacecolor=face,
                        markeredgecolor=shade, alpha=0.75,
                    )  # fmt: skip
                mean = fmean(run["train_cvar"] for run in mine)
                axes.plot([mean, mean], [place - 0.36, place + 0.36], color=shade, linewidth=2.4)
                axes.get_yticklabels()[place].set_color(shade)
            top += panel + 52
        figure.text(
            0.03, 14 / height, "A dot for each split, a bar at their mean. Open: constant outputs.",
            fontsize=12, color=MUTED,
        )  # fmt: skip
        alt = (
            "Training CVaR of eight methods on CelebA, sentiment and Amazon, networks trained end "
            "to end. SONEX is lowest on CelebA and sentiment, ALEXR2 on Amazon."
        )
        return [card.save(figure, IMAGES / "worst-groups.svg", alt)]
