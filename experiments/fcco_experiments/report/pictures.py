"""Plots in both palettes with their words: titles, notes, and texts for who cannot see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..store import SavedRun
from ..task import Page, Panel
from . import plots
from .canvas import SIZE, SMALL, twice
from .palette import Style, family_of
from .rows import rows
from .runs import entry_names
from .tradeoff import tradeoff
from .words import fixed, title

__all__ = ["Multiples", "Picture", "by_entry", "curves", "families", "tradeoffs"]

Runs = Mapping[str, Sequence[SavedRun]]
_WIDE, _SMALL = (tuple(round(144 * side) for side in size) for size in (SIZE, SMALL))
_CUT = "The frame is set for the later epochs and most methods: some lines leave it."


@dataclass(frozen=True)
class Picture:
    """A plot in both palettes.

    Args:
        light: address of the drawing.
        dark: the same in the dark palette.
        alt: what it shows, in words.
        title: above it.
        size: width and height, so that the page does not jump.
        note: below it.
    """

    light: str
    dark: str
    alt: str
    title: str
    size: tuple[int, ...]
    note: str = ""


@dataclass(frozen=True)
class Multiples:
    """Small plots that share their axes."""

    title: str
    pictures: tuple[Picture, ...]
    note: str


def tradeoffs(runs: Runs, page: Page, look: Mapping[str, Style]) -> list[Picture]:
    """Every trade-off of the page."""
    found = []
    sweep = any(family_of(name) != name for name in runs)
    for panel in (panel for panel in page.panels if panel.kind == "tradeoff"):
        drawing = tradeoff(runs, panel, look, page.metrics)
        if drawing is None:
            continue
        y, x = panel.label or title(panel.y), panel.x_label or title(panel.x)
        note = "Small dots are runs, large ones means over seeds. "
        if drawing.beaten:
            note += "One mean beats all others in both directions."
        else:
            note += "The lines are the frontiers" if sweep else "The line is the frontier"
            note += ": means that no other" + (" of the method" if sweep else "")
            note += " beats in both directions."
        for name, value in ((x, panel.x_reference), (y, panel.reference)):
            note += f" Dotted line: {name} = {value:g}." if value is not None else ""
        alt = f"Scatter plot of {y} against {x} at the end of training, by method."
        found.append(Picture(*twice(drawing.svg), alt, panel.title, _WIDE, note))
    return found


def curves(runs: Runs, page: Page, look: Mapping[str, Style]) -> list[Picture]:
    """Every curve of the page."""
    found = []
    for panel in (panel for panel in page.panels if panel.kind == "curve"):
        drawing = plots.curves(runs, panel, look)
        if drawing is not None:
            alt = f"{panel.label or title(panel.y)} over epochs, one line per method."
            note = [] if panel.reference is None else [f"Dotted line: {panel.reference:g}."]
            note += [_CUT] if drawing.cut else []
            found.append(Picture(*twice(drawing.svg), alt, panel.title, _WIDE, " ".join(note)))
    return found


def families(runs: Runs, page: Page, look: Mapping[str, Style]) -> list[Multiples]:
    """Every family of the page, a small plot per method."""
    found = []
    for panel in (panel for panel in page.panels if panel.kind == "family"):
        names = entry_names(runs, panel.y, page.entries.get(panel.y, ()))
        family = plots.families(runs, panel, names, look)
        pictures = []
        for name, svg in family.drawings.items():
            entry, value = family.worst[name]
            note = f"Highest at the end: {entry}, {fixed(value, 4)}"
            note += " (above the frame)" if value > family.top else ""
            what = panel.label or title(panel.y)
            alt = f"{what} of {name} over epochs, a line per entry. {note}."
            pictures.append(Picture(*twice(svg), alt, name, _SMALL, note))
        if pictures:
            found.append(Multiples(panel.title, tuple(pictures), _family_note(panel, family)))
    return found


def by_entry(runs: Runs, page: Page, look: Mapping[str, Style]) -> list[Picture]:
    """Every plot of the page that has a row per entry of a list."""
    found = []
    for panel in (panel for panel in page.panels if panel.kind in ("change", "dots")):
        names = entry_names(runs, panel.y, page.entries.get(panel.y, ()))
        drawing = rows(runs, panel, names, look)
        if drawing is None:
            continue
        what = panel.label or title(panel.y)
        ends = [
            f"{name} {fixed(value, 3)} ({entry})" for name, (entry, value) in drawing.worst.items()
        ]
        if panel.kind == "change":
            note = [
                "The upright mark is the value before training, dots are after it, mean over seeds."
            ]
            alt = f"{what} of each entry before and after training, by method. Largest after:"
        else:
            note = ["Dots are means over seeds, whiskers go from the smallest to the largest."]
            alt = f"{what} of each entry at the end of training, by method. Smallest:"
        note += [f"Dotted line: {panel.reference:g}."] if panel.reference is not None else []
        note += ["Some dots are out of the frame: see the table."] if drawing.cut else []
        size = tuple(round(144 * side) for side in drawing.size)
        alt = f"{alt} {', '.join(ends)}."
        found.append(Picture(*twice(drawing.svg), alt, panel.title, size, " ".join(note)))
    return found


def _family_note(panel: Panel, family: plots.Families) -> str:
    note = "All plots share their axes. A line is the mean over seeds; the bold one ends highest."
    if family.kinds:
        ways = (f"{way} lines: {kind}" for kind, way in family.kinds.items())
        text = ", ".join(ways)
        note += f" {text[0].upper()}{text[1:]}."
    if panel.reference is not None:
        note += f" Dotted across: the limit, {panel.reference:g}."
    return f"{note} {_CUT}" if family.cut else note
