"""The idea in one picture: a batch is noisy, a tracked value is not, and the kink is rounded.

A small run of the library: 20 groups, six of which follow another line than the rest, linear
regression, `fcco.CVaRGroupDRO` on the worst fifth of the groups, six samples of each group in a
batch. The picture follows the first group.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

import fcco

from . import card
from .card import BATCH, IMAGES, INK, MUTED, OURS, PAGE

GROUPS, SIZE, PER_GROUP, RATIO, STEPS = 20, 500, 6, 0.2, 800
COLOURS = 40  # of the animation
TOP = 1.8  # of the axis of losses; the few values above it are left out

ALT = (
    "Left: the loss of one group during training. The values of single batches scatter widely "
    "around the true loss; the value that fcco tracks follows it, with a narrow error band. Right: "
    "a kink. The average of what batches make of it is too high; fcco rounds it, over a width "
    "that follows from the error of the tracked value."
)


@dataclass(frozen=True)
class Run:
    """A training run as the picture needs it, by step.

    Attributes:
        batch: loss of the group in the batch.
        tracked: what the library tracks.
        error: its standard error as the library knows it.
        true: loss on all data of the group.
        threshold: of the CVaR.
        width: of the rounded kink.
        noise: batch values around the true loss, for the last model.
    """

    batch: np.ndarray[Any, Any]
    tracked: np.ndarray[Any, Any]
    error: np.ndarray[Any, Any]
    true: np.ndarray[Any, Any]
    threshold: np.ndarray[Any, Any]
    width: np.ndarray[Any, Any]
    noise: np.ndarray[Any, Any]


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
        tracker, term = dro.term.tracker, dro.term
        row = (batch, tracker.rows[0], tracker.error()[0], true, term.threshold, term.width)
        table.append([float(value) for value in row])
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        own = losses(group == 0)
    draws = own[torch.randint(SIZE, (20_000, PER_GROUP))].mean(1) - own.mean()
    return Run(*np.array(table).T, noise=draws.numpy())


def hinge(loss: Any, threshold: float) -> Any:
    """The kink: what the loss is above the threshold."""
    return np.maximum(loss - threshold, 0)


def rounded(loss: Any, threshold: float, width: float) -> Any:
    """The Moreau envelope of the kink, whose slope rises over that width."""
    slope = np.clip((loss - threshold) / width, 0, 1)
    return slope * (loss - threshold - width * slope / 2)


def averaged(run: Run, loss: Any, threshold: float) -> Any:
    """The mean of the kink over batches, for a group with that true loss."""
    return np.array([hinge(each + run.noise, threshold).mean() for each in np.atleast_1d(loss)])


def losses(axes: Axes, run: Run, size: float, end: int = STEPS) -> None:
    """The run up to a step."""
    card.quiet(axes, size - 2)
    shown = np.arange(0, end, 3)
    shown = shown[run.batch[shown] < TOP]
    axes.plot(
        shown, run.batch[shown], "o", color=BATCH, markersize=4.5, markeredgewidth=0, alpha=0.55
    )
    steps = np.arange(2, end, 2)  # the first two have no error yet
    tracked, error = run.tracked[steps], run.error[steps]
    axes.plot(steps, run.threshold[steps], color=MUTED, linewidth=1.6, linestyle=(0, (3, 2)))
    axes.fill_between(steps, tracked - error, tracked + error, color=OURS, alpha=0.25, linewidth=0)
    axes.plot(steps, tracked, color=OURS, linewidth=2.4)
    axes.plot(steps, run.true[steps], color=INK, linewidth=1.6)
    axes.set(xlim=(0, STEPS), ylim=(0, TOP), xticks=(0, 400, 800), yticks=(0, 0.5, 1, 1.5))
    axes.set_xlabel("training step", loc="right", fontsize=size - 2, color=MUTED)
    _heading(axes, "Loss of one group, in training", size)
    _write(axes, STEPS - 6, 1.65, "what a batch says", BATCH, size, bold=True)
    _write(axes, STEPS - 6, 1.06, "what fcco tracks", OURS, size, bold=True)
    _write(axes, STEPS - 6, 0.33, "the worst groups begin here", MUTED, size - 3)
    _write(axes, 70, 1.36, "the truth", INK, size - 3, side="left")


def kink(axes: Axes, run: Run, size: float, step: int = STEPS - 1) -> None:
    """The kink at a step: itself, what batches make of it, and rounded."""
    card.quiet(axes, size - 2)
    threshold, width, end = run.threshold[step], run.width[step], 1.4
    x = np.linspace(0, end, 141)
    axes.axvspan(threshold, min(threshold + width, end), color=OURS, alpha=0.14, linewidth=0)
    axes.plot(x, averaged(run, x, threshold), color=BATCH, linewidth=2.8)
    axes.plot(x, rounded(x, threshold, width), color=OURS, linewidth=3.2)
    axes.plot(x, hinge(x, threshold), color=INK, linewidth=1.6)
    axes.set(xlim=(0, end), ylim=(-0.02, 0.8), xticks=(0, 0.5, 1), yticks=(0, 0.25, 0.5, 0.75))
    axes.set_xlabel("its loss", loc="right", fontsize=size - 2, color=MUTED)
    _heading(axes, "What it adds to the objective", size)
    _write(axes, 0.03, 0.36, "batches,\non average:\ntoo much", BATCH, size, "left", True)
    if rounded(end, threshold, width) > 0.66:  # else the curve is where the words would be
        _write(axes, end, 0.21, "the rounded\nkink", OURS, size, bold=True)
        _write(axes, end, 0.09, "width: from the error", OURS, size - 3)
    _write(axes, 1.12, 0.7, "the kink", INK, size - 3)


def _heading(axes: Axes, text: str, size: float) -> None:
    axes.set_title(text, loc="left", fontsize=size, pad=14, color=INK, x=-0.02)


def _write(
    axes: Axes, x: float, y: float, text: str, colour: str, size: float, side: str = "right",
    bold: bool = False,
) -> None:  # fmt: skip
    """Text on a little ground, so that it can be read over dots; lines at equal distances."""
    ground = 0.8 if axes.get_xlim()[1] == STEPS else 0  # dots are on one of the panels only
    for number, line in enumerate(text.split("\n")):
        axes.annotate(
            line, (x, y), (0, -1.25 * size * number), textcoords="offset points",
            color=colour, fontsize=size, ha=side, va="center", annotation_clip=False,
            fontweight="bold" if bold else "normal",
            bbox={"facecolor": PAGE, "edgecolor": "none", "alpha": ground, "pad": 1.0},
        )  # fmt: skip


def draw() -> list[Path]:
    """Both layouts and the animation."""
    run = train()
    with card.figure(960, 430) as figure:
        losses(figure.add_axes((0.055, 0.14, 0.48, 0.7)), run, 17)
        kink(figure.add_axes((0.61, 0.14, 0.365, 0.7)), run, 17)
        wide = card.save(figure, IMAGES / "idea.svg", ALT)
    with card.figure(400, 700) as figure:
        losses(figure.add_axes((0.11, 0.575, 0.84, 0.36)), run, 16)
        kink(figure.add_axes((0.13, 0.075, 0.82, 0.36)), run, 16)
        narrow = card.save(figure, IMAGES / "idea-narrow.svg", ALT)
    return [wide, narrow, animate(run, IMAGES / "idea.gif")]


def animate(run: Run, path: Path) -> Path:
    """The same step by step, as a GIF: it plays wherever images are shown."""
    ends = [*range(4, 60, 6), *range(60, 200, 14), *range(200, STEPS, 50), STEPS]
    frames = []
    for end in ends:
        with card.figure(760, 340) as figure:
            figure.patch.set_facecolor(PAGE)
            losses(figure.add_axes((0.055, 0.16, 0.48, 0.66)), run, 14, end)
            kink(figure.add_axes((0.61, 0.16, 0.365, 0.66)), run, 14, end - 1)
            frames.append(_pixels(figure))
    # One table of colours for all frames, and only what changes is drawn: the rest is transparent.
    table = frames[-1].quantize(COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    flat = [np.array(frame.quantize(palette=table, dither=Image.Dither.NONE)) for frame in frames]
    drawn = [flat[0]]
    drawn += [np.where(b == a, COLOURS, b) for a, b in itertools.pairwise(flat)]
    images = [Image.fromarray(each.astype(np.uint8), "P") for each in drawn]
    for image in images:
        image.putpalette(table.getpalette() or [])
    images[0].save(
        path, save_all=True, append_images=images[1:], loop=0, optimize=False, disposal=1,
        transparency=COLOURS, duration=[150] * (len(images) - 1) + [5000],
    )  # fmt: skip
    return path


def _pixels(figure: Figure) -> Image.Image:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
