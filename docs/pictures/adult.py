"""The pictures of `make demo`: ROC curves before and after a limit, and the worst groups."""

from __future__ import annotations

from pathlib import Path

from examples import adult, adult_page
from studies import demo

from . import card
from .card import IMAGES


def draw() -> list[Path]:
    """Both, the first in two layouts."""
    runs = demo.published()
    shown = {"Trained on the mean loss": adult.MEAN, "With a limit on the gap": adult.LIMITED}
    alt = "ROC curves on census data. " + " ".join(
        "{}: {}.".format(title, ", ".join(
            f"{name} above 50K found {rates[1]:.0%}"
            for name, rates in runs[method]["test"][0]["rates"].items()
        ))
        for title, method in shown.items()
    )  # fmt: skip
    layouts = {
        "demo-limit": ((860, 400), ((0.085, 0.15, 0.385, 0.72), (0.58, 0.15, 0.385, 0.72))),
        "demo-limit-narrow": ((400, 720), ((0.18, 0.58, 0.75, 0.36), (0.18, 0.08, 0.75, 0.36))),
    }
    drawn = []
    for name, (size, places) in layouts.items():
        with card.figure(*size) as figure:
            for place, (title, method) in zip(places, shown.items(), strict=True):
                adult_page.roc(figure.add_axes(place), runs[method]["test"][0], title, 15)
            drawn.append(card.save(figure, IMAGES / f"{name}.svg", alt))
    rows = adult_page.by_group(runs, (adult.MEAN, *adult.BALANCED))
    with card.figure(560, 300) as figure:
        axes = figure.add_axes((0.04, 0.16, 0.92, 0.8))
        adult_page.groups(axes, rows, 14, adult.OURS)
        alt = "Accuracy of the worst of eight groups on test rows: " + ", ".join(
            f"{name} {min(values):.0%}" for name, values in rows.items()
        )
        drawn.append(card.save(figure, IMAGES / "demo-groups.svg", f"{alt}."))
    return drawn
