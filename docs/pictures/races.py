"""The bias of a penalty on the values of a batch, from docs/results; what pictures share."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from matplotlib.figure import Figure

from studies import publish

from . import card
from .card import BATCH, IMAGES, MUTED, OURS, PAGE

GREY = {"color": MUTED, "alpha": 0.4, "linewidth": 1.3, "zorder": 1}


def draw() -> list[Path]:
    """The picture."""
    return [bias()]


def bias() -> Path:
    """How wrong a penalty on mini-batch values is, against the batch size."""
    found = publish.table("constrained-bias")["bias"]
    with card.figure(480, 350, 15) as figure:
        axes = figure.add_axes((0.13, 0.15, 0.84, 0.69))
        card.quiet(axes, 13)
        for source, shade, text, y in (
            ("batch", BATCH, "value of the batch", 5.5),
            ("tracked", OURS, "tracked value", 1.6),
        ):
            values = [abs(value) for value in found[f"hinge {source}"]]
            axes.loglog(found["batch"], values, "o-", color=shade, linewidth=2.4, markersize=7)
            axes.text(
                found["batch"][-1], y * max(values[-2:]), text, color=shade, ha="right",
                fontweight="bold",
            )  # fmt: skip
        axes.axhline(0.005, color=MUTED, linewidth=1.4, linestyle=(0, (3, 2)))
        axes.text(16, 0.0054, "tolerance", color=MUTED, fontsize=13)
        axes.set_ylim(1e-4, 0.1)
        axes.set_xticks(found["batch"], [f"{size:.0f}" for size in found["batch"]])
        axes.set_yticks((1e-4, 1e-3, 1e-2, 1e-1), ("0.0001", "0.001", "0.01", "0.1"))
        axes.minorticks_off()
        axes.set_xlabel("batch size", loc="right", fontsize=13, color=MUTED)
        figure.text(0.03, 0.93, "Error of a hinge on a gap of rates, COMPAS", va="center")
        alt = (
            "Absolute error of the hinge of a gap of rates against the batch size, 16 to 512. From "
            f"the batch: {found['hinge batch'][0]:.3f} to {found['hinge batch'][-1]:.3f}, above "
            "the tolerance of 0.005 at every size. From the tracked value: below 0.003 everywhere, "
            "mostly below 0.0007."
        )
        return card.save(figure, IMAGES / "batch-bias.svg", alt)


def legend(
    figure: Figure,
    entries: list[tuple[str, str]],
    y: float,
    places: tuple[float, ...],
    hollow: Collection[str] = (),
) -> None:
    """A row of labels, each with a mark of its colour."""
    axes = figure.add_axes((0, 0, 1, 1), frameon=False, zorder=-1)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.axis("off")
    for x, (label, shade) in zip(places, entries, strict=True):
        axes.plot(
            x + 0.012, y, "o", color=PAGE if label in hollow else shade, markersize=9,
            markeredgecolor=shade, markeredgewidth=2 if label in hollow else 1,
            alpha=0.4 if shade == MUTED else 1,
        )  # fmt: skip
        axes.text(x + 0.033, y, label, color=shade, fontsize=13, va="center", fontweight="bold")
