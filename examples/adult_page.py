"""What `examples.adult` says of its runs: sentences, tables, pictures, and the page of them all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from string import Template
from typing import Any

from fcco_experiments.report.plots import canvas, dress, element
from fcco_experiments.report.style import COLOURS, TOKENS
from fcco_experiments.stats import paired, spread
from matplotlib.axes import Axes

INK, MUTED, GRID, GROUND = (TOKENS[name][0] for name in ("ink", "muted", "grid", "page"))
TEMPLATE = Path(__file__).with_suffix(".html")
SEXES = {"women": COLOURS[1][0], "men": COLOURS[0][0]}
Table = Sequence[Sequence[str]]
Runs = dict[str, dict[str, list[dict[str, Any]]]]  # by method, then "train" or "test", by seed
LIMIT, WORST = 0.02, 2
MEAN, LIMITED = "mean loss", "fcco.constrained"
BALANCED_MEAN, BY_HAND, OURS = "balanced batches", "group DRO by hand", "fcco.CVaRGroupDRO"
BALANCED = (BALANCED_MEAN, BY_HAND, OURS)


def verdicts(runs: Runs) -> list[str]:
    """What the figures say, and what they cannot."""

    def test(name: str, key: str) -> list[float]:
        return [run[key] for run in runs[name]["test"]]

    women, men = (fmean(run["rates"][n][1] for run in runs[MEAN]["test"]) for n in ("women", "men"))
    training = [run["gap"] for run in runs[LIMITED]["train"]]
    kept = sum(abs(value) <= LIMIT for value in training)
    after, deviation = spread(test(LIMITED, "gap"))
    error = math.hypot(fmean(test(LIMITED, "error")), deviation / math.sqrt(len(training)))
    excess = abs(after) - LIMIT
    told = "within the limit" if excess < 0 else "above the limit"
    if abs(excess) < 2 * error:
        told += ", though these rows have too few such women to be sure"
    cost = paired(test(MEAN, "accuracy"), test(LIMITED, "accuracy"))
    first = (
        f"Trained on the mean loss, the model finds {women:.0%} of the women above 50K and "
        f"{men:.0%} of the men. With a limit of {LIMIT:g} on that gap, it is "
        f"{fmean(training):+.3f} on training rows (kept in {kept} of {len(training)} runs), and "
        f"{after:+.3f} ± {error:.3f} instead of {fmean(test(MEAN, 'gap')):+.3f} on test rows: "
        f"{told}. It costs {100 * cost.mean:.1f} points of accuracy."
    )
    compared = []
    for name in (BALANCED_MEAN, BY_HAND):
        gain = paired(test(name, "worst"), test(OURS, "worst"))
        word = "lower" if gain.mean > 0 else "higher"
        sure = "" if gain.decided else " (which other seeds may reverse)"
        reach = gain.high - gain.mean
        compared.append(f"{abs(gain.mean):.3f} ± {reach:.3f} {word} than with {name}{sure}")
    second = (
        f"The loss of the worst {WORST} groups is {fmean(test(MEAN, 'worst')):.2f} after training "
        f"on the mean loss. Balanced batches do most of what helps: with them it is "
        f"{fmean(test(BALANCED_MEAN, 'worst')):.3f}. With fcco it is {' and '.join(compared)}; "
        "95 % intervals over seeds."
    )
    return [first, second]


def tables(runs: Runs) -> list[list[list[str]]]:
    """The limit, and the worst groups: means and standard deviations over seeds."""

    def row(name: str, *columns: str) -> list[str]:
        cells = []
        for part, key in (column.split(maxsplit=1) for column in columns):
            average, deviation = spread(run[key] for run in runs[name][part])
            average = round(average, 3) + 0.0  # not -0.000
            cells.append(f"{average:{'+' * (key == 'gap')}.3f} ± {deviation:.3f}")
        return [name, *cells]

    keys = ("test accuracy", "train gap", "test gap", "test ROC gap")
    heads = ["a limit", "accuracy", "gap, training", "gap, test", "ROC gap, test"]
    limits = [heads, *(row(name, *keys) for name in runs if name not in BALANCED)]
    keys = ("test accuracy", "train worst", "test worst", "test lowest")
    heads = [
        "the worst groups", "accuracy", "worst two, training", "worst two, test", "lowest accuracy",
    ]  # fmt: skip
    return [limits, [heads, *(row(name, *keys) for name in (MEAN, *BALANCED))]]


def roc(axes: Axes, run: Mapping[str, Any], title: str, size: float) -> None:
    """The ROC curves of women and men, each with a dot where the model decides."""
    dress(axes)
    axes.grid(visible=True, axis="both", color=GRID, linewidth=0.8)
    for name, colour in SEXES.items():
        axes.plot(*run["curves"][name], color=colour, linewidth=2)
    for name, colour in SEXES.items():
        x, y = run["rates"][name]
        axes.axhline(y, color=colour, linewidth=1.2, linestyle=(0, (3, 2)))
        axes.plot(x, y, "o", color=colour, markersize=9, markeredgecolor=GROUND, zorder=4)
    found = {name: rates[1] for name, rates in run["rates"].items()}
    upper = max(found, key=lambda name: found[name])
    for name, colour in SEXES.items():
        axes.annotate(
            f"{name}: {found[name]:.0%}", (0.30, found[name]), (0, 7 if name == upper else -7),
            textcoords="offset points", ha="right", va="bottom" if name == upper else "top",
            color=colour, fontsize=size, fontweight="bold",
        )  # fmt: skip
    axes.set(xlim=(0, 0.3), ylim=(0.3, 1), xticks=(0, 0.1, 0.2, 0.3), yticks=(0.4, 0.6, 0.8, 1))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.tick_params(labelsize=size - 2)
    axes.set_title(title, loc="left", fontsize=size + 1, color=INK, pad=8)
    axes.set_xlabel("below 50K, predicted above", loc="right", fontsize=size - 1, color=MUTED)
    axes.set_ylabel("above 50K, found", fontsize=size - 1, color=MUTED)


def groups(axes: Axes, rows: Mapping[str, Sequence[float]], size: float, ours: str) -> None:
    """A dot for the accuracy of each group, a row for each method, the lowest in figures."""
    dress(axes)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color=GRID, linewidth=0.8)
    for place, (name, values) in enumerate(rows.items()):
        colour = COLOURS[0][0] if name == ours else COLOURS[4][0]
        axes.plot(values, [place] * len(values), "o", color=colour, markersize=8, alpha=0.6)
        axes.annotate(
            f"{min(values):.0%}", (min(values), place), (-8, 0), textcoords="offset points",
            ha="right", va="center", color=colour, fontsize=size, fontweight="bold",
        )  # fmt: skip
        axes.annotate(
            name, (0, place), (0, 13), textcoords="offset points", va="center", fontsize=size,
            color=colour if name == ours else INK, fontweight="bold" if name == ours else "normal",
        )  # fmt: skip
    axes.set(xlim=(0, 1.02), ylim=(len(rows) - 0.6, -0.8), yticks=())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.tick_params(labelsize=size - 2)
    axes.set_xlabel("accuracy on test rows", loc="right", fontsize=size - 1, color=MUTED)


def by_group(runs: Runs, names: Iterable[str]) -> dict[str, list[float]]:
    """The accuracy of each group on test rows, mean over seeds."""
    lists = {name: [run["groups"] for run in runs[name]["test"]] for name in names}
    return {name: [fmean(each) for each in zip(*own, strict=True)] for name, own in lists.items()}


def page(
    sentences: Sequence[str], tables: Sequence[Table], runs: Runs, names: Sequence[str]
) -> str:
    """The whole page.

    Args:
        sentences: the verdict on the limit, and that on the worst groups.
        tables: of both.
        runs: figures by method, part and seed.
        names: of the groups.
    """
    drawn = []
    for name, title in {"mean loss": "Mean loss", "fcco.constrained": "With the limit"}.items():
        with canvas(4.6, 3.9) as (figure, axes):
            roc(axes, runs[name]["test"][0], title, 10)
            drawn.append(element(figure, f"roc-{len(drawn)}"))
    methods = [row[0] for row in tables[1][1:]]
    accuracies = by_group(runs, methods)
    with canvas(5, 3) as (figure, axes):
        groups(axes, accuracies, 10, methods[-1])
        drawn.append(element(figure, "groups"))
    every = [["accuracy of each group", *methods]]
    every += [
        [name, *(f"{accuracies[method][k]:.3f}" for method in methods)]
        for k, name in enumerate(names)
    ]
    shades = TOKENS | {f"method-{k}": pair for k, pair in enumerate(COLOURS)}
    light, dark = ("".join(f"--{name}:{pair[k]};" for name, pair in shades.items()) for k in (0, 1))
    return Template(TEMPLATE.read_text()).substitute(
        light=light, dark=dark, limit=escape(sentences[0]), groups=escape(sentences[1]),
        before=drawn[0], after=drawn[1], dots=drawn[2], limits=html(tables[0]),
        worst=html(tables[1]), every=html(every), seeds=len(runs["mean loss"]["test"]),
    )  # fmt: skip


def html(table: Table) -> str:
    """A table that scrolls where it is too wide; the library's rows stand out."""
    rows = []
    for number, (first, *others) in enumerate(table):
        tag, mark = ("td" if number else "th"), ' class="ours"' * first.startswith("fcco")
        cells = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in others)
        rows.append(f'<tr{mark}><th scope="row">{escape(first)}</th>{cells}</tr>')
    return f'<div class="scroll" tabindex="0"><table>{"".join(rows)}</table></div>'
