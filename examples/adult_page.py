"""The page of `examples.adult`, demo/report.html: one file for light and dark screens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from string import Template
from typing import Any

from fcco_experiments.report.plots import canvas, dress, element
from fcco_experiments.report.style import COLOURS, TOKENS
from matplotlib.axes import Axes

INK, MUTED, GRID, GROUND = (TOKENS[name][0] for name in ("ink", "muted", "grid", "page"))
TEMPLATE = Path(__file__).with_suffix(".html")
SEXES = {"women": COLOURS[1][0], "men": COLOURS[0][0]}
Table = Sequence[Sequence[str]]
Runs = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]  # by method, part and seed


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
