"""Run the tutorials: their pictures, and a notebook of each.

    python docs/notebooks.py                 # all pages of docs/tutorials
    python docs/notebooks.py worst-groups    # one of them

A page is the source. Its Python blocks run in order in one namespace, as a reader would run them.
Figures that a block leaves open become docs/images/tutorials/PAGE-N.svg, which the page must show
after that block; what a block prints must be its output block. The notebook has the same text and
code, and the outputs embedded.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["PAGES", "Cell", "build", "cells_of", "notebook", "run"]

DOCS = Path(__file__).resolve().parent
IMAGES = DOCS / "images" / "tutorials"
PAGES = [
    page for page in sorted((DOCS / "tutorials").glob("*.md")) if "```python" in page.read_text()
]

_INK = "#7c8591"  # of text and lines, readable on light and on dark pages
STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": _INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "figure.facecolor": "none",
    "font.size": 10,
    "grid.alpha": 0.25,
    "grid.color": _INK,
    "legend.frameon": False,
    "savefig.bbox": "tight",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "fcco",  # the same file in every run
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}
"""Settings of matplotlib for the committed pictures; a reader's own run has the reader's own."""

_BLOCK = re.compile(
    r'^```(?P<kind>python|text title="output")\n(?P<body>.*?)^```[ ]*\n', re.MULTILINE | re.DOTALL
)
_IMAGE = re.compile(r"^!\[(?P<alt>[^\]]*)\]\((?P<path>[^)]+)\)\n", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?![a-z]+:)[^)]+\)")
_FOLD = re.compile(r"^</?(?:details|summary)\b.*\n", re.MULTILINE)  # around drawing code
_DOWNLOAD = re.compile(r"^.*\]\([\w-]+\.ipynb\).*\n", re.MULTILINE)


@dataclass
class Cell:
    """A part of a page: text, or a program with what it prints and draws.

    Attributes:
        kind: "markdown" or "code".
        source: the text or program.
        printed: the output block of the page.
        images: the pictures that the page shows after it, alternative text and path.
    """

    kind: str
    source: str
    printed: str = ""
    images: list[tuple[str, str]] = field(default_factory=list)


def cells_of(text: str) -> list[Cell]:
    """The cells of a page.

    The notebook needs no link to itself; links to other pages become their text, and pictures are
    outputs of the program above them.
    """
    cells: list[Cell] = []

    def prose(part: str) -> None:
        for image in _IMAGE.finditer(part):
            if not cells or cells[-1].kind != "code":
                raise ValueError(f"{image[0]!r} does not follow the program that draws it.")
            cells[-1].images.append((image["alt"], image["path"]))
        part = _LINK.sub(r"\g<text>", _IMAGE.sub("", _DOWNLOAD.sub("", _FOLD.sub("", part))))
        part = re.sub(r"\n{3,}", "\n\n", part).strip()
        if part:
            cells.append(Cell("markdown", part))

    end = 0
    for block in _BLOCK.finditer(text):
        prose(text[end : block.start()])
        if block["kind"] == "python":
            cells.append(Cell("code", block["body"].rstrip("\n")))
        else:
            cells[-1].printed = block["body"]
        end = block.end()
    prose(text[end:])
    return cells


def run(cells: list[Cell], name: str) -> list[tuple[str, list[tuple[bytes, bytes]]]]:
    """What each program prints, and its figures as SVG and PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses and pickle look their own module up
    results = []
    plt.close("all")
    for cell in cells:
        if cell.kind != "code":
            continue
        printed = io.StringIO()
        with plt.rc_context(STYLE):
            with contextlib.redirect_stdout(printed):
                exec(compile(cell.source, f"{name}, a program", "exec"), module.__dict__)
            figures = [_drawn(plt.figure(number)) for number in plt.get_fignums()]
        plt.close("all")
        results.append((printed.getvalue(), figures))
    return results


def _drawn(figure: Any) -> tuple[bytes, bytes]:
    from PIL import Image

    svg, png, small = io.BytesIO(), io.BytesIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    figure.savefig(png, format="png", dpi=80, facecolor="white")
    colours = Image.open(png).convert("RGB").quantize(48)
    colours.save(small, format="png", optimize=True)
    text = re.sub(rb"[ ]+$", b"", svg.getvalue(), flags=re.MULTILINE)
    text = text.replace(b"#000000", _INK.encode())  # a line that a program draws in black
    # A hundredth of a point cannot be seen. Numbers between tags are text and stay whole.
    text = re.sub(rb"<[^>]*>", lambda tag: re.sub(rb"(\.\d\d)\d+", rb"\1", tag[0]), text)
    return text, small.getvalue()


def notebook(
    name: str, cells: list[Cell], results: list[tuple[str, list[tuple[bytes, bytes]]]]
) -> dict[str, Any]:
    """The notebook, in format 4."""
    outputs = iter(results)
    found = []
    for number, cell in enumerate(cells):
        entry: dict[str, Any] = {
            "cell_type": cell.kind,
            "id": f"{name}-{number}",
            "metadata": {},
            "source": cell.source.splitlines(keepends=True),
        }
        if cell.kind == "code":
            printed, figures = next(outputs)
            lines = printed.splitlines(keepends=True)
            entry["execution_count"] = None
            entry["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}]
            entry["outputs"] = entry["outputs"] if lines else []
            for (_, png), (alt, _) in zip(figures, cell.images, strict=True):
                data = {"image/png": base64.b64encode(png).decode(), "text/plain": [alt]}
                entry["outputs"].append(
                    {"data": data, "metadata": {}, "output_type": "display_data"}
                )
        found.append(entry)
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return {"cells": found, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def build(page: Path) -> tuple[dict[str, Any], dict[Path, bytes]]:
    """Run a page: its notebook, and the pictures by path; raises where the page says otherwise."""
    name, cells = page.stem, cells_of(page.read_text())
    results = run(cells, "tutorial_" + page.stem.replace("-", "_"))
    pictures: dict[Path, bytes] = {}
    programs = [cell for cell in cells if cell.kind == "code"]
    for cell, (printed, figures) in zip(programs, results, strict=True):
        if printed != cell.printed:
            raise ValueError(f"{page.name}: a program prints\n{printed}\nbut has\n{cell.printed}")
        paths = [IMAGES / f"{name}-{len(pictures) + k}.svg" for k in range(1, len(figures) + 1)]
        shown = [(page.parent / path).resolve() for _, path in cell.images]
        if shown != paths or not all(alt for alt, _ in cell.images):
            wanted = ", ".join(path.name for path in paths) or "no picture"
            raise ValueError(f"{page.name} must show {wanted} after\n{cell.source}")
        pictures |= {path: svg for path, (svg, _) in zip(paths, figures, strict=True)}
    return notebook(name, cells, results), pictures


def main(names: list[str]) -> None:
    """Write notebooks and pictures."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        if names and page.stem not in names:
            continue
        content, pictures = build(page)
        for old in IMAGES.glob(f"{page.stem}-[0-9].svg"):
            old.unlink()
        for path, svg in pictures.items():
            path.write_bytes(svg)
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        page.with_suffix(".ipynb").write_text(text, encoding="utf-8")
        sizes = ", ".join(f"{path.name} {len(svg) / 1e3:.0f} KB" for path, svg in pictures.items())
        sys.stdout.write(f"{page.stem}: notebook {len(text) / 1e3:.0f} KB, {sizes}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
