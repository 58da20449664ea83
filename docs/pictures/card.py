"""A drawing as an SVG file that can be read on a light and on a dark page.

It has a ground of its own, a card, and both sets of colours: a page in the other scheme than the
reader's system shows a light card on dark or a dark one on light, never text that cannot be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from fcco_experiments.report.plots import dress, element
from fcco_experiments.report.style import COLOURS, TOKENS, colour
from matplotlib.axes import Axes
from matplotlib.figure import Figure

IMAGES = Path(__file__).parent.parent / "images"
RESULTS = Path(__file__).parent.parent / "results"

INK, MUTED, GRID, PAGE, PANEL, RULE, BATCH, LIMIT = (
    TOKENS[name][0] for name in ("ink", "muted", "grid", "page", "panel", "rule", "batch", "limit")
)
OURS, ERM = colour("fcco"), colour("erm")

SANS = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
MONO = "ui-monospace,'SF Mono','Cascadia Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace"

_PAIRS = TOKENS | {f"method-{k}": pair for k, pair in enumerate(COLOURS)}


@contextmanager
def figure(width: float, height: float, size: float = 16) -> Iterator[Figure]:
    """A figure of that many pixels, whatever the user's matplotlibrc says.

    Args:
        width: of the card.
        height: of the card.
        size: of the text.
    """
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        own: Any = {
            "font.family": "DejaVu Sans",  # comes with matplotlib and is wide: what is drawn fits
            "font.size": size,
            "text.color": INK,
            "text.parse_math": False,
            "svg.fonttype": "none",
            "lines.solid_capstyle": "round",
        }
        matplotlib.rcParams.update(own)
        yield Figure(figsize=(width / 72, height / 72), dpi=72)


def quiet(axes: Axes, size: float) -> None:
    """Axes of a picture that is read from afar: few marks, large text."""
    dress(axes)
    axes.tick_params(labelsize=size, pad=4)
    axes.locator_params(axis="both", nbins=4)


def save(drawn: Figure, path: Path, alt: str) -> Path:
    """Write the figure as a card.

    Args:
        drawn: with the light palette.
        path: of the file.
        alt: what the picture shows, for those who cannot see it.
    """
    inner = element(drawn, path.stem)
    width, height = (round(72 * side) for side in drawn.get_size_inches())
    inner = inner[inner.index(">") + 1 : inner.rindex("</svg>")]
    path.write_text(svg(width, height, inner, alt))
    return path


def svg(width: float, height: float, inner: str, alt: str, style: str = "") -> str:
    """A card of that many pixels around elements whose colours are CSS variables.

    Args:
        width: of the card.
        height: of the card.
        inner: the elements.
        alt: what the picture shows.
        style: further rules.
    """
    used = set(re.findall(r"var\(--([\w-]+)\)", inner + style)) | {"page", "rule"}
    light, dark = (
        "".join(f"--{name}:{_PAIRS[name][k]};" for name in _PAIRS if name in used) for k in (0, 1)
    )
    rules = f"svg{{{light}font-family:{SANS}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img"><title>{escape(alt, quote=False)}</title>'
        f"<style>{rules}{style}</style>"
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="12" '
        'style="fill:var(--page);stroke:var(--rule)"/>'
        f"{inner}</svg>\n"
    )
