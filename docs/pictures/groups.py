"""Accuracy of each group on test data: training on the mean against the worst groups.

Census data (Adult), 8 groups: sex, marital status and the label itself. A linear classifier, Adam
with a learning rate that falls from 0.01 to 0, five passes of batches of 256, five seeds. Training
on the mean and `fcco.CVaRGroupDRO` have the same learning rate and number of steps; a ratio of
0.25, two of the eight groups, is all that is set beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from fcco_experiments import data
from matplotlib.axes import Axes
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import fcco

from . import card
from .card import ERM, GRID, IMAGES, MUTED, OURS, PAGE, PANEL

SEEDS, BATCH_SIZE, EPOCHS, RATE, RATIO = range(5), 256, 5, 0.01, 0.25
HIGH = 45  # pixels of a row
NAMES = [
    f"{marital} {sex}, {income} $50,000"
    for income in ("up to", "above")
    for sex in ("women", "men")
    for marital in ("unmarried", "married")
]


def rows_of(part: data.Part, names: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
    """Features, label and group of each person."""
    statuses = ("Married-civ-spouse", "Married-AF-spouse")
    columns = [names.index(f"marital-status={status}") for status in statuses]
    married = (part.features[:, columns] > 0).any(axis=1)  # standardised: above 0 where it was 1
    group = 4 * part.label + 2 * part.group + married
    return (
        torch.tensor(part.features),
        torch.tensor(part.label, dtype=torch.float32),
        torch.tensor(group),
    )


def train(rows: tuple[torch.Tensor, ...], seed: int, worst: bool) -> torch.nn.Module:
    """A linear classifier, trained on the mean or on the worst groups."""
    torch.manual_seed(seed)
    x, y, group = rows
    model = torch.nn.Linear(x.shape[1], 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    steps = EPOCHS * len(x) // BATCH_SIZE
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    dro = fcco.CVaRGroupDRO(model, optimizer, len(NAMES), RATIO) if worst else None
    sampler = fcco.GroupBatchSampler(group, batch_size=BATCH_SIZE, seed=0)

    def losses(batch: Any) -> torch.Tensor:
        return bce(model(x[batch]).squeeze(1), y[batch], reduction="none")

    for _ in range(steps):
        batch = sampler.draw() if dro else torch.randint(len(x), (BATCH_SIZE,))
        if dro:
            loss = dro(lambda batch=batch: losses(batch), group[batch])
        else:
            loss = losses(batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def accuracies(model: torch.nn.Module, rows: tuple[torch.Tensor, ...]) -> list[float]:
    """That of each group, and that of all."""
    x, y, group = rows
    with torch.no_grad():
        right = ((model(x).squeeze(1) > 0) == (y > 0)).float()
    return [*fcco.group_mean(right, group).values.tolist(), right.mean().item()]


def measure() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], list[int]]:
    """Before and after, (groups + 1, seeds) each, and the sizes of the groups in the test data."""
    census = data.load("adult", validation=0.0)
    seen, test = (rows_of(part, census.feature_names) for part in (census.train, census.test))
    before, after = (
        np.array([accuracies(train(seen, seed, worst), test) for seed in SEEDS]).T
        for worst in (False, True)
    )
    return before, after, torch.bincount(test[2], minlength=len(NAMES)).tolist()


def draw() -> list[Path]:
    """The chart."""
    *found, sizes = measure()
    before, after = (100 * each.mean(1) for each in found)
    order = [*np.argsort(before[:-1]).tolist(), -1]
    names, sizes = [*NAMES, "all people"], [*sizes, sum(sizes)]
    with card.figure(480, 130 + HIGH * len(order), 15) as figure:
        height = 72 * figure.get_figheight()
        axes = figure.add_axes((0.035, 34 / height, 0.93, HIGH * len(order) / height))
        card.quiet(axes, 13)
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.set(xlim=(-1, 110), ylim=(len(order) - 0.5, -0.5), yticks=())
        axes.set_xticks((0, 25, 50, 75, 100), ("0", "25", "50", "75", "100 %"))
        axes.axhspan(-0.5, RATIO * len(NAMES) - 0.5, color=PANEL, linewidth=0, zorder=0)
        axes.axhline(len(NAMES) - 0.5, color=MUTED, linewidth=0.8)
        for place, group in enumerate(order):
            bad = place < RATIO * len(NAMES)
            axes.text(
                0, place - 0.2, names[group], fontsize=14.5, va="center",
                fontweight="bold" if bad else "normal",
            )  # fmt: skip
            axes.text(
                109, place - 0.2, f"{sizes[group]:,}", fontsize=13, va="center", ha="right",
                color=MUTED,
            )  # fmt: skip
            _dumbbell(axes, place + 0.2, before[group], after[group])
        line = 1 - 26 / height, 1 - 58 / height, 1 - 82 / height
        figure.text(0.035, line[0], "Right answers in each group, test data", va="center")
        figure.text(0.955, line[2], "people", fontsize=13, color=MUTED, ha="right", va="center")
        for x, text, colour in (
            (0.055, "trained on the mean", ERM),
            (0.5, "fcco.CVaRGroupDRO", OURS),
        ):
            figure.text(
                x + 0.03, line[1], text, color=colour, va="center", fontweight="bold", fontsize=14
            )
            _dot(axes, x, line[1], colour, transform=figure.transFigure, clip_on=False)
        alt = (
            "Accuracy of eight groups of the census data on test data, trained on the mean and on "
            "the worst groups. "
            + "; ".join(f"{names[k]}: {before[k]:.0f} and {after[k]:.0f} %" for k in order)
            + "."
        )
        return [card.save(figure, IMAGES / "groups-before-after.svg", alt)]


def _dumbbell(axes: Axes, y: float, before: float, after: float) -> None:
    axes.plot((before, after), (y, y), color=OURS, linewidth=3, alpha=0.45, zorder=2)
    for value, other, colour in ((before, after, ERM), (after, before, OURS)):
        _dot(axes, value, y, colour)
        side, way = ("right", -1) if value < other else ("left", 1)
        axes.annotate(
            f"{value:.0f}", (value, y), (10 * way, 0), textcoords="offset points", fontsize=13.5,
            va="center", ha=side, color=colour, fontweight="bold",
        )  # fmt: skip


def _dot(axes: Axes, x: float, y: float, colour: str, **options: Any) -> None:
    """Hollow for what was before."""
    fill = PAGE if colour == ERM else colour
    axes.plot(
        x, y, "o", color=fill, markeredgecolor=colour, markersize=10.5, markeredgewidth=2.2,
        zorder=3, **options,
    )  # fmt: skip
