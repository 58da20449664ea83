"""The target's loss against the largest rise of a domain, from `studies.no_regressions`."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from studies import publish

from . import card
from .card import IMAGES, LIMIT, MUTED, OURS, PAGE

SIDES = {  # where a name stands, as a shift in points; on the right of its dot if not named
    "replay 0.1": (-4, -17), "weighted 0.3": (0, 9), "KL 0.1": (-46, -4), "fcco": (-14, -19),
    "Cooper 0.01": (-46, -34), "replay 0.25": (-64, -15),
}  # fmt: skip


def draw() -> list[Path]:
    """The chart."""
    table = publish.table("no-regressions")
    found = {
        name: (fmean(own["largest_rise"]), fmean(own["target"]))
        for name, own in table["methods"].items()
    }
    with card.figure(560, 420, 14) as figure:
        figure.text(0.03, 0.94, "Loss of the target, lower is better", va="center")
        axes = figure.add_axes((0.1, 0.16, 0.87, 0.7))
        card.quiet(axes, 12.5)
        axes.axvspan(table["tolerance"], 1, color=LIMIT, alpha=0.12, linewidth=0)
        axes.axvline(table["tolerance"], color=LIMIT, linewidth=1.4)
        for name, (rise, target) in found.items():
            ours = name == "fcco"
            shade = OURS if ours else MUTED
            axes.plot(
                rise, target, "o", color=shade, markerfacecolor=shade if ours else PAGE,
                markersize=10 if ours else 7, markeredgewidth=2, zorder=3 + ours,
            )  # fmt: skip
            axes.annotate(
                name, (rise, target), SIDES.get(name, (8, -4)), textcoords="offset points",
                color=shade, fontsize=12, fontweight="bold" if ours else "normal",
            )  # fmt: skip
        axes.set(xlim=(-0.24, 0.06), ylim=(1.22, 1.52))
        axes.set_xlabel("largest rise of the loss of a domain; the limit is 0.02", fontsize=13)
        told = "; ".join(f"{name} {y:.3f} at {x:+.3f}" for name, (x, y) in found.items())
        alt = f"The target's loss and the largest rise of a domain's loss. {told}."
        return [card.save(figure, IMAGES / "no-regressions.svg", alt)]
