"""Drawings that stand in the page itself: one copy for both palettes, thousands of dots in little.

A drawing in an address of its own (`canvas.twice`) is there twice, light and dark, and each dot of
it takes a hundred bytes. Here colours are the page's own variables, and dots are points of one path
with round ends, about eight bytes each.
"""

from __future__ import annotations

import re
from html import escape

import numpy as np

from .palette import METHODS, TOKENS

__all__ = ["FINE", "dots_path", "inline"]

FINE = 4
"""Steps of a point (1/72 inch) to which dots are rounded."""
_VARIABLES = {pair[0]: f"var(--{name})" for name, pair in TOKENS.items()} | {
    pair[0]: f"var(--method-{k})" for k, pair in enumerate(METHODS)
}


def inline(svg: str, prefix: str, alt: str, replaced: dict[str, str] | None = None) -> str:
    """A drawing of `canvas.svg_of` as an element of the page.

    Args:
        svg: the drawing.
        prefix: of its ids; no other drawing of the page may have it.
        alt: what it shows, in words.
        replaced: what stands in the place of the groups with these ids.
    """
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # would hold for the whole page
    svg = re.sub(r"<defs>\s*</defs>|<!--.*?-->", "", svg, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', svg))

    def named(found: re.Match[str]) -> str:
        return f' id="{prefix}-{found[1]}"' if found[1] in used else ""

    for name in replaced or {}:
        svg = re.sub(rf'<g id="{name}"\s*(/>|>.*?</g>)', f"<!--{name}-->", svg, flags=re.DOTALL)
    svg = re.sub(r'\sid="([^"]+)"', named, svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{prefix}-", svg).replace("xlink:href", "href")
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    for name, content in (replaced or {}).items():
        svg = svg.replace(f"<!--{name}-->", content)
    svg = re.sub(
        r" font-family: [^;\"]*;| transform=\"rotate\(-0 [^\"]*\"", "", svg
    )  # the page's font
    svg = re.sub(r'="(\d+\.\d{3,})"', lambda n: f'="{float(n[1]):.2f}"', svg)
    svg = re.sub(r"<g\s*/>", "", svg)
    box = re.search(r'viewBox="[^"]*"', svg)
    head = f'<svg class="drawing" {box[0] if box else ""} role="img" aria-label="{escape(alt)}">'
    body = re.sub(r"^<svg[^>]*>", head, svg.strip())
    return re.sub(r">\s+<(?!/?tspan)", "><", body)


def dots_path(x: np.ndarray, y: np.ndarray) -> str:
    """The data of a path with a dot at each place; places that round to the same are one.

    Args:
        x: points from the left.
        y: points from the top.

    >>> dots_path(np.array([1.0, 1.5, 1.01]), np.array([2.0, 1.0, 2.0]))
    'M4 8h0m2-4h0'
    """
    places = np.unique(np.rint(FINE * np.column_stack([x, y])).astype(int), axis=0)
    if not len(places):
        return ""
    steps = np.diff(places, axis=0)
    moves = (f"m{a}{'' if b < 0 else ' '}{b}h0" for a, b in steps.tolist())
    return f"M{places[0, 0]} {places[0, 1]}h0" + "".join(moves)
