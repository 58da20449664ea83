"""The idea in one picture: what is judged by a noisy batch is above a limit by chance.

A small run of the library: 20 groups, six of which follow another line than the rest, linear
regression, `fcco.CVaRGroupDRO` on the worst fifth of the groups, six samples of each group in a
batch. The picture follows the first group, and compares what is known of its loss with a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes

import fcco

from . import card
from .card import BATCH, IMAGES, INK, LIMIT, MUTED, OURS, PAGE

GROUPS, SIZE, PER_GROUP, RATIO, STEPS, LATE = 20, 500, 6, 0.2, 800, 400
MOST, TOP = 0.85, 1.75  # the limit; the end of the axis: the few values above it are left out


@dataclass(frozen=True)
class Run:
    """A training run as the picture needs it, by step.

    Attributes:
        batch: loss of the group in the batch.
        tracked: what the library tracks.
        error: its standard error as the library knows it.
        true: loss on all data of the group.
    """

    batch: np.ndarray[Any, Any]
    tracked: np.ndarray[Any, Any]
    error: np.ndarray[Any, Any]
    true: np.ndarray[Any, Any]


def train(seed: int = 4) -> Run:
    """Train, and note what is seen of the first group in each step."""
    torch.manual_seed(seed)
    group = torch.arange(GROUPS).repeat_interleave(SIZE)
    x = torch.randn(GROUPS * SIZE, 1)
    slope = torch.tensor([-0.1, -0.1, 0.0, 0.0, 0.1, 0.1] + [1.0] * (GROUPS - 6))
    y = slope[group] * x[:, 0] + 0.6 * torch.randn(GROUPS * SIZE)
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():  # where training on the mean would end
        model.weight.fill_(1.0)
        model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, STEPS)
    sampler = fcco.GroupBatchSampler(group, batch_size=GROUPS * PER_GROUP, seed=0)
    dro = fcco.CVaRGroupDRO(model, optimizer, num_groups=GROUPS, ratio=RATIO)

    def losses(rows: Any) -> torch.Tensor:
        return (model(x[rows]).squeeze(1) - y[rows]).square()

    table = []
    for _ in range(STEPS):
        rows = sampler.draw()
        dro(lambda rows=rows: losses(rows), group[rows]).backward()
        with torch.no_grad():
            batch, true = losses(rows)[group[rows] == 0].mean(), losses(group == 0).mean()
        tracker = dro.term.tracker
        row = (batch, tracker.rows[0], tracker.error()[0], true)
        table.append([float(value) for value in row])
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return Run(*np.array(table).T)


def excess(run: Run) -> dict[str, float]:
    """How far above the limit on average, in the second half: what a penalty would be."""
    values = {"truth": run.true, "batch": run.batch, "fcco": run.tracked}
    return {name: float(np.maximum(own[LATE:] - MOST, 0).mean()) for name, own in values.items()}


def losses(axes: Axes, run: Run, size: float) -> None:
    """The loss of the group as batches show it, as it is tracked, and as it is."""
    card.quiet(axes, size - 2)
    axes.grid(visible=False)
    steps = np.arange(2, STEPS, 3)  # the first two have no error yet
    shown = steps[run.batch[steps] < TOP]
    axes.plot(shown, run.batch[shown], "o", color=BATCH, markersize=5, markeredgewidth=0, alpha=0.5)
    tracked, error = run.tracked[steps], run.error[steps]
    axes.fill_between(steps, tracked - error, tracked + error, color=OURS, alpha=0.25, linewidth=0)
    axes.plot(steps, run.true[steps], color=INK, linewidth=1.8)
    axes.plot(steps, tracked, color=OURS, linewidth=2.6)
    axes.axhline(MOST, color=LIMIT, linewidth=1.8, linestyle=(0, (3, 2)))
    axes.set(xlim=(0, STEPS), ylim=(0, TOP), xticks=(0, 400, 800), yticks=(0, 0.5, 1, 1.5))
    axes.set_xlabel("training step", loc="right", fontsize=size - 2, color=MUTED)
    axes.set_title("Loss of one group in training", loc="left", fontsize=size, pad=12, color=INK)
    _write(axes, STEPS - 6, 1.62, "in a batch of 6 people", BATCH, size)
    _write(axes, STEPS - 6, 1.12, "tracked by fcco, with error", OURS, size)
    _write(axes, STEPS - 6, MOST + 0.07, "limit", LIMIT, size - 2)


def bars(axes: Axes, run: Run, size: float) -> None:
    """What is judged to be above the limit, on average."""
    card.quiet(axes, size - 2)
    axes.grid(visible=False)
    found = excess(run)
    rows = {
        "in truth": (found["truth"], INK),
        "in a batch": (found["batch"], BATCH),
        "tracked": (found["fcco"], OURS),
    }
    for place, (name, (value, shade)) in enumerate(rows.items()):
        axes.barh(place, value, color=shade, height=0.42)
        _write(axes, 0, place - 0.4, name, shade, size, "left")
        axes.text(
            value + 0.004, place, f"{value:.3f}", va="center", color=shade, fontsize=size,
            fontweight="bold",
        )  # fmt: skip
    axes.set(xlim=(0, 1.35 * max(found.values())), ylim=(2.5, -0.8), xticks=(), yticks=())
    axes.spines["bottom"].set_visible(False)
    axes.axvline(0, color=MUTED, linewidth=1.2)
    axes.set_title(
        "Above the limit, on average", loc="left", fontsize=size, pad=12, color=INK
    )  # fmt: skip


def _write(
    axes: Axes, x: float, y: float, text: str, colour: str, size: float, side: str = "right"
) -> None:
    """Text on a little ground, so that it can be read over dots."""
    axes.annotate(
        text, (x, y), color=colour, fontsize=size, ha=side, va="center", fontweight="bold",
        bbox={"facecolor": PAGE, "edgecolor": "none", "alpha": 0.8, "pad": 1.0},
    )  # fmt: skip


def draw() -> list[Path]:
    """Both layouts."""
    run = train()
    found = excess(run)
    alt = (
        "The loss of one group in training and its limit. The values of single batches scatter far "
        "above and below it; the value that fcco tracks stays near the truth. Above the limit on "
        f"average, in the second half: in truth {found['truth']:.3f}, in a batch "
        f"{found['batch']:.3f}, tracked {found['fcco']:.3f}."
    )
    with card.figure(960, 400) as figure:
        losses(figure.add_axes((0.05, 0.15, 0.55, 0.7)), run, 17)
        bars(figure.add_axes((0.68, 0.15, 0.29, 0.7)), run, 17)
        wide = card.save(figure, IMAGES / "idea.svg", alt)
    with card.figure(400, 640) as figure:
        losses(figure.add_axes((0.11, 0.54, 0.84, 0.39)), run, 16)
        bars(figure.add_axes((0.06, 0.03, 0.9, 0.36)), run, 16)
        return [wide, card.save(figure, IMAGES / "idea-narrow.svg", alt)]
