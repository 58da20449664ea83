"""The commands `fcco data list`, `fetch` and `verify`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from .. import backbones, data
from ..prose import printable

data_app = typer.Typer(
    name="data",
    help="The data sets: what there is, where it lies, is it whole.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
Folder = Annotated[
    Path | None, typer.Option(help="Look here first, before FCCO_DATA and the cache.")
]
Target = Annotated[
    Path | None, typer.Option(help="Put the files here; by default they go into the cache.")
]
Names = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME]...", help="Data sets; all by default.")
]
Wanted = Annotated[
    list[str], typer.Argument(metavar="NAME...", help="Data sets, or backbones with weights.")
]
Json = Annotated[bool, typer.Option("--json", help="As one JSON list, on the last line.")]

Row = dict[str, str]
WIDTH = 80


@data_app.command("list")
def show_list(names: Names = None, folder: Folder = None, as_json: Json = False) -> None:
    """List the data sets: rows, and where each was found. With NAME: all that is known."""
    rows = [_listed(data.card(name), folder) for name in _known(names or data.names())]
    if as_json:
        typer.echo(json.dumps(rows))
    elif names:
        for row in rows:
            for key, text in row.items():
                typer.echo(textwrap.fill(f"{key}: {text}", WIDTH, subsequent_indent="  "))
            typer.echo()
    else:
        _show([{key: row[key] for key in ("name", "rows", "where")} for row in rows], False)


@data_app.command("fetch")
def fetch_data(names: Wanted, folder: Target = None, as_json: Json = False) -> None:
    """Fetch data sets that are not on this machine.

    For those that cannot be fetched it says where anyone gets them. Pretrained weights of backbones
    (efficientnet-lite0, minilm) go into the cache.
    """
    networks = [name for name in names if name in backbones.names()]
    names = [name for name in names if name not in networks]
    try:
        with fetching() as progress:
            found = data.fetch(_known(names), folder, progress=progress)
            for name in networks:
                found += backbones.fetch(name, progress)
    except (data.MissingData, data.WrongData) as error:
        typer.echo(printable(str(error)), err=True)
        raise typer.Exit(1) from None
    for name in names:
        if not data.card(name).copies:
            typer.echo(f"{name} is generated: there is nothing to fetch.", err=True)
    _show([{"file": e.file, "from": e.place, "path": e.detail} for e in found], as_json)


@data_app.command("verify")
def verify_data(names: Names = None, folder: Folder = None, as_json: Json = False) -> None:
    """Check every copy of the files against its checksum.

    Of folders of images it checks that all they need is there. Ends with 1 when a copy is corrupt,
    or when a data set that is named has no good copy.
    """
    rows: list[Row] = []
    bad = False
    for name in _known(names or data.names()):
        there = [entry for entry in data.look(name, folder) if entry.state != "missing"]
        rows += [
            {"data": name, "file": e.file, "state": e.state, "place": e.place, "detail": e.detail}
            for e in there
        ]
        bad |= any(entry.state == "corrupt" for entry in there)
        if names and data.card(name).copies and _where(data.card(name), folder) == "not found":
            bad = True
            how = f"see: fcco data list {name}"
            rows.append(
                {"data": name, "file": "-", "state": "missing", "place": "-", "detail": how}
            )
    _show(rows, as_json)
    if bad:
        raise typer.Exit(1)


def _listed(card: data.Card, folder: Path | None) -> Row:
    """What is known about a data set, in words."""
    fetchable = any(copy.fetchable for copy in card.copies)
    return {
        "name": card.name,
        "what": card.title,
        "rows": card.rows,
        "licence": card.licence,
        "citation": card.citation,
        "where": _where(card, folder),
        "source": "; or ".join(copy.source for copy in card.copies),
        "get it": f"fcco data fetch {card.name}" if fetchable else "",
    }


def _where(card: data.Card, folder: Path | None) -> str:
    """The first place with a whole copy."""
    if not card.copies:
        return "generated"
    for _, found in data.sources.look(card.copies, folder):
        if all(entry.state == "found" for entry in found):
            return found[0].place
    return "not found"


def _known(names: Sequence[str]) -> Sequence[str]:
    for name in names:
        if name not in data.names():
            raise typer.BadParameter(
                f"must be one of {', '.join(data.names())} but is: {name}", param_hint="NAME"
            )
    return names


@contextmanager
def fetching() -> Iterator[data.Progress]:
    """Bars of downloads on a terminal, one line for each elsewhere; always on the error stream."""
    console = Console(stderr=True)
    seen: dict[str, Any] = {}
    if not console.is_terminal:

        def tell(what: str, done: int, total: int | None) -> None:
            if what not in seen:
                seen[what] = True
                typer.echo(f"fetching {what}", err=True)

        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Bars(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:

        def draw(what: str, done: int, total: int | None) -> None:
            if what not in seen:
                seen[what] = bars.add_task(what, total=total)
            bars.update(seen[what], completed=done, total=total)

        yield draw


def _show(rows: Sequence[Row], as_json: bool) -> None:
    """Columns of text under their names, one line for each row."""
    if as_json:
        typer.echo(json.dumps(rows))
        return
    lines = [list(rows[0]), *(list(row.values()) for row in rows)] if rows else []
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        typer.echo(printable("  ".join(cells).rstrip()))
