"""Figures 2 and 3 of the paper as it draws them, from the runs in docs/results: means over seeds.

The others need histories that are not published; `report.html` of the commands in
docs/research/paper.md draws them.
"""

from __future__ import annotations

import gzip
import json
import statistics
from pathlib import Path
from typing import Any

from fcco_experiments.report.style import colour

from studies import publish

from . import card
from .card import IMAGES, INK, MUTED
from .races import legend

PENALTIES = {"alexr2": "smH", "sonex": "smH", "sox": "SH", "sonx": "H"}
"""Smoothed, squared and plain hinge."""

Runs = list[dict[str, Any]]


def draw() -> list[Path]:
    """Both."""
    return [
        drawn(
            "paper-figure-2",
            {"Adult": "fairness-adult-paper", "COMPAS": "fairness-compas-paper"},
            ("alexr2", "sox", "sonx", "icppac"),
            {"train_auc": "training AUC", "train_violation": "worst constraint, training"},
        ),
        drawn(
            "paper-figure-3",
            {"weather, foggy": "continual-weather"},
            ("sonex", "sox"),
            {"train_target_gain": "gain of the target", "train_violation": "worst constraint"},
        ),
    ]


def runs(folder: str) -> Runs:
    """What was published."""
    packed = gzip.decompress(publish.runs(folder).read_bytes())
    return [json.loads(line) for line in packed.splitlines()]


def label(name: str, own: Runs) -> str:
    """As in the paper: "ALEXR2 (smH, 6)"."""
    penalty = own[0]["method"]["settings"].get("penalty")
    return f"{name.upper()} ({PENALTIES[name]}, {penalty:g})" if penalty else name.upper()


def drawn(stem: str, data: dict[str, str], names: tuple[str, ...], keys: dict[str, str]) -> Path:
    """A row of panels for each data set.

    Args:
        stem: of the file.
        data: folder of results by title.
        names: of the methods.
        keys: of the figures, with titles.
    """
    told, high = [], 300
    with card.figure(600, high * len(data), 13) as figure:
        height = 72 * figure.get_figheight()
        for row, (title, folder) in enumerate(data.items()):
            found = runs(folder)
            lines = {name: [run for run in found if run["name"] == name] for name in names}
            top = 1 - (30 + high * row) / height
            figure.text(0.03, top, title, va="center", fontweight="bold")
            entries = [(label(name, own), colour(name)) for name, own in lines.items()]
            gap = 0.265 if len(entries) > 3 else 0.32
            places = tuple(0.02 + gap * k for k in range(len(entries)))
            legend(figure, entries, top - 30 / height, places)
            for column, (key, name_of) in enumerate(keys.items()):
                left, low = 0.09 + 0.49 * column, top - (high - 72) / height
                axes = figure.add_axes((left, low, 0.4, (high - 156) / height))
                card.quiet(axes, 12)
                axes.set_title(name_of, loc="left", fontsize=13, color=INK)
                for name, own in lines.items():
                    curves = [[line for line in run["rows"] if key in line] for run in own]
                    epochs = [line["epoch"] for line in curves[0]]
                    seeds = zip(*curves, strict=True)
                    means = [statistics.fmean(line[key] for line in lines_) for lines_ in seeds]
                    axes.plot(epochs, means, color=colour(name), linewidth=2.2)
                    told.append(f"{title}, {name}: {name_of} {means[-1]:.3f}")
                if key == "train_violation":
                    axes.axhline(0, color=MUTED, linewidth=1.2, linestyle=(0, (2, 2)))
                axes.set_xlabel("epoch", loc="right", fontsize=12, color=MUTED)
        alt = f"Curves over training, means over seeds. At the end: {'; '.join(told)}."
        return card.save(figure, IMAGES / f"{stem}.svg", alt)
