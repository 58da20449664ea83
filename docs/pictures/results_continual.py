"""What the worst protected class loses on test images, by the images that the constraints use."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fcco_experiments.report.style import colour

from . import card
from .card import GRID, IMAGES, INK, MUTED, PAGE, RESULTS

DATA = {"weather": "Weather photos", "bdd100k-subset": "BDD100K frames"}
METHODS = ("automatic", "sonex", "sox", "weighted", "replay")
WHERE = {
    "constraints on training images": ("seen", "", "o"),
    "constraints on held-out images": ("held-out", "", "s"),
    "measured on held-out, enforced on training images": ("held-out", "-split", "D"),
}
"""Where a constraint lives: the table, the end of a method's name there, and the marker."""
HIGH = 40  # pixels of a row


def tables(data: str) -> dict[str, dict[str, Any]]:
    """Figures of each method, by the setting."""
    return {
        name: json.loads((RESULTS / f"continual-{data}-{name}" / "table.json").read_text())[
            "methods"
        ]
        for name in ("seen", "held-out")
    }


def draw() -> list[Path]:
    """The chart."""
    told, high = [], HIGH * len(METHODS)
    with card.figure(540, 164 + len(DATA) * (high + 62), 15) as figure:
        height = 72 * figure.get_figheight()
        figure.text(
            0.03, 1 - 26 / height, "Accuracy lost by the worst protected class", va="center"
        )
        figure.text(
            0.03, 1 - 48 / height, "in points, on test images that no model has seen", va="center",
            fontsize=13, color=MUTED,
        )  # fmt: skip
        for row, (text, (_, _, marker)) in enumerate(WHERE.items()):
            y = 1 - (76 + 22 * row) / height
            axes = figure.add_axes((0.03, y - 0.01, 0.02, 0.02), frameon=False)
            _mark(axes, 0, 0, MUTED, marker)
            axes.axis("off")
            figure.text(0.066, y, text, fontsize=13, va="center", color=MUTED)
        for number, (data, title) in enumerate(DATA.items()):
            found = tables(data)
            low = height - 172 - high - number * (high + 62)
            axes = figure.add_axes((0.2, low / height, 0.76, high / height))
            card.quiet(axes, 12.5)
            axes.grid(axis="y", visible=False)
            axes.grid(axis="x", color=GRID, linewidth=0.8)
            axes.set_title(title, loc="left", fontsize=14, fontweight="bold", color=INK)
            axes.set(ylim=(len(METHODS) - 0.5, -0.5), yticks=())
            for place, name in enumerate(METHODS):
                axes.annotate(
                    name, (0, place), (-8, 0), xycoords=("axes fraction", "data"),
                    textcoords="offset points", ha="right", va="center", color=colour(name),
                    fontweight="bold", fontsize=13.5,
                )  # fmt: skip
                for step, (table, end, marker) in enumerate(WHERE.values()):
                    own = found[table].get(name + end)
                    if own is None:
                        continue
                    lost = own["test_forgetting"]
                    x, error = 100 * lost["mean"], 100 * lost["std"] / math.sqrt(lost["runs"])
                    y = place + 0.22 * (step - 1)
                    axes.plot((x - error, x + error), (y, y), color=colour(name), linewidth=1.5)
                    _mark(axes, x, y, colour(name), marker)
                    told.append(f"{name}{end}, {table}, {data}: {x:.1f}")
            free = 100 * found["seen"]["finetune"]["test_forgetting"]["mean"]
            axes.axvline(free, color=colour("finetune"), linewidth=1.4, linestyle=(0, (2, 2)))
            axes.annotate(
                "plain fine-tuning", (free, 1), (0, 5), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="center", fontsize=12.5, color=colour("finetune"),
            )  # fmt: skip
            told.append(f"plain fine-tuning, {data}: {free:.1f}")
            axes.set_xlim(0, 1.06 * max(free, axes.get_xlim()[1]))
        alt = f"Points that the worst protected class loses on test images. {'; '.join(told)}."
        return [card.save(figure, IMAGES / "results-continual.svg", alt)]


def _mark(axes: Any, x: float, y: float, shade: str, marker: str) -> None:
    """Filled where values come from images that carry no gradient."""
    axes.plot(
        x, y, marker, color=shade if marker == "D" else PAGE, markeredgecolor=shade,
        markersize=8 if marker != "o" else 9, markeredgewidth=2, zorder=3, clip_on=False,
    )  # fmt: skip
