"""One colour, dash and marker per method, on every plot, swatch and palette."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "DASHES",
    "MARKERS",
    "METHODS",
    "SHAPES",
    "TOKENS",
    "Style",
    "dark",
    "family_of",
    "styles",
]

TOKENS: dict[str, tuple[str, str]] = {
    "page": ("#fdfdfc", "#15181b"),
    "panel": ("#f3f4f4", "#1e2226"),
    "ink": ("#1c2024", "#e8eaec"),
    "muted": ("#565e67", "#a9b1ba"),
    "rule": ("#dadde1", "#343a41"),
    "grid": ("#e4e6e9", "#2b3036"),
    "limit": ("#3a4047", "#d5d9dd"),
    "link": ("#0a5a9c", "#7cc0f5"),
    "warning": ("#6a3403", "#f7d79b"),
    "warning-page": ("#fff3d9", "#33270f"),
    "warning-rule": ("#c26a08", "#e2a233"),
    "best": ("#0c5138", "#8fe3bf"),
    "best-page": ("#e2f3ea", "#14372b"),
    "broken": ("#8c1b13", "#ffb9ae"),
    "broken-page": ("#fdebe8", "#43201c"),
}
"""Colours of the page, light and dark; text on its ground keeps a contrast of 4.5."""

METHODS: tuple[tuple[str, str], ...] = (
    ("#1769c0", "#7cc4ff"),
    ("#b34400", "#e88030"),
    ("#1f8060", "#5cf0a0"),
    ("#9c2f96", "#f0559a"),
    ("#2b323b", "#d8d8d0"),
    ("#5a55e0", "#9a86ff"),
    ("#5e1a0c", "#b08a6a"),
    ("#8f6d00", "#ffdc30"),
)
"""Colours of methods, light and dark; the first five stay apart for each kind of colour blindness.

Dash and marker tell the others apart.
"""

DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (7, 2, 1.5, 2), (3, 1.5), (9, 3))
MARKERS: tuple[str, ...] = ("o", "s", "^", "D", "v", "P", "p", "<", ">", "h")
SHAPES: dict[str, str] = {
    "o": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "s": "M-3.6-3.6h7.2v7.2h-7.2z",
    "^": "M0-4.6L4.4 3.6H-4.4z",
    "D": "M0-5L5 0L0 5L-5 0z",
    "v": "M0 4.6L4.4-3.6H-4.4z",
    "P": "M-1.6-4.6h3.2v3h3v3.2h-3v3h-3.2v-3h-3v-3.2h3z",
    "p": "M0-4.8L4.6-1.5L2.8 3.9H-2.8L-4.6-1.5z",
    "<": "M-4.6 0L3.6-4.4V4.4z",
    ">": "M4.6 0L-3.6-4.4V4.4z",
    "h": "M0-4.8L4.2-2.4V2.4L0 4.8L-4.2 2.4V-2.4z",
}
"""Outlines of the markers around (0, 0), for swatches."""


@dataclass(frozen=True)
class Style:
    """How a method looks.

    Args:
        number: of its colour in `METHODS`.
        dash: lengths on and off; empty for a solid line.
        marker: matplotlib's letter.
    """

    number: int
    dash: tuple[float, ...]
    marker: str

    @property
    def colour(self) -> str:
        """In the light palette."""
        return METHODS[self.number][0]


def family_of(name: str) -> str:
    """The method of a setting of a sweep.

    >>> family_of("SONEX@12"), family_of("SONEX")
    ('SONEX', 'SONEX')
    """
    head, at, tail = name.rpartition("@")
    return head if at and tail.isdigit() else name


def styles(names: Iterable[str]) -> dict[str, Style]:
    """A style per name: colours, dashes and markers go round at different lengths.

    So the first 120 methods all differ in one of them, and colour alone never tells two apart.
    """
    families = list(dict.fromkeys(family_of(name) for name in names))
    return {
        name: Style(k % len(METHODS), DASHES[k % len(DASHES)], MARKERS[k % len(MARKERS)])
        for k, name in enumerate(families)
    }


def dark(svg: str) -> str:
    """The same drawing in the dark palette."""
    for light, night in (*TOKENS.values(), *METHODS):
        svg = svg.replace(light, night.upper())  # upper case: not replaced a second time
    return svg
