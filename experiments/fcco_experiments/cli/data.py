"""The commands `fcco data list`, `fetch` and `verify`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .display import Printer, printable
from .options import PATH

if TYPE_CHECKING:  # it needs torch
    from .. import data

Row = dict[str, str]
WIDTH = 80

_folder = click.option("--folder", type=PATH, help="Look here before FCCO_DATA and the cache.")
_json = click.option("--json", "as_json", is_flag=True, help="As one JSON list, on the last line.")


@click.group("data", context_settings={"help_option_names": ["-h", "--help"]})
def data_sets() -> None:
    """List, fetch and verify the data sets: what there is, where it lies, is it whole."""


@data_sets.command("list")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@_folder
@_json
def show_list(names: Sequence[str], folder: Path | None, as_json: bool) -> None:
    """List the data sets: rows, and where each was found. With NAME: all that is known."""
    rows = [
        {
            "name": card.name,
            "what": card.title,
            "rows": card.rows,
            "licence": card.licence,
            "citation": card.citation,
            "where": _where(card, folder),
            "source": "; or ".join(copy.source for copy in card.copies),
            "get it": f"fcco data fetch {card.name}" * any(c.fetchable for c in card.copies),
        }
        for card in _cards(names)
    ]
    if names and not as_json:
        for row in rows:
            for key, text in row.items():
                click.echo(textwrap.fill(f"{key}: {text}", WIDTH, subsequent_indent="  "))
            click.echo()
        return
    short = [{key: row[key] for key in ("name", "rows", "where")} for row in rows]
    _show(rows if as_json else short, as_json)


@data_sets.command("fetch")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@_json
def fetch_data(names: Sequence[str], as_json: bool) -> None:
    """Fetch data sets that are not on this machine into the cache.

    For those that cannot be fetched it says where anyone gets them. Pretrained weights of backbones
    (efficientnet-lite0, minilm) are fetched, too.
    """
    import logging

    from .. import backbones, data

    data.sources.LOG.addHandler(logging.StreamHandler())  # to the error stream
    networks = [name for name in names if name in backbones.names()]
    wanted = [name for name in names if name not in networks]
    cards = _cards(wanted) if wanted else []
    try:
        found = data.fetch(wanted)
        for name in networks:
            found += backbones.fetch(name)
    except (data.MissingData, data.WrongData) as error:
        click.echo(printable(str(error)), err=True)
        raise click.exceptions.Exit(1) from None
    for card in cards:
        if not card.copies:
            click.echo(f"{card.name} is generated: there is nothing to fetch.", err=True)
    _show([{"file": e.file, "from": e.place, "path": e.detail} for e in found], as_json)


@data_sets.command("verify")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@_folder
@_json
def verify_data(names: Sequence[str], folder: Path | None, as_json: bool) -> None:
    """Check every copy of the files against its checksum.

    Of folders of images it checks that all they need is there. Ends with 1 when a copy is corrupt,
    or when a data set that is named has no good copy.
    """
    from .. import data

    rows: list[Row] = []
    for card in _cards(names):
        there = [entry for entry in data.look(card.name, folder) if entry.state != "missing"]
        found = [(e.file, e.state, e.place, e.detail) for e in there]
        if names and _where(card, folder) == "not found":
            found.append(("-", "missing", "-", f"see: fcco data list {card.name}"))
        for file, state, place, detail in found:
            about = {"file": file, "state": state, "place": place, "detail": detail}
            rows.append({"data": card.name, **about})
    _show(rows, as_json)
    if any(row["state"] in ("corrupt", "missing") for row in rows):
        raise click.exceptions.Exit(1)


def _cards(names: Sequence[str]) -> list[data.Card]:
    """Of the data sets with these names, of all by default."""
    from .. import data

    known = data.names()
    for name in names:
        if name not in known:
            raise click.BadParameter(
                f"must be one of {', '.join(known)} but is: {name}", param_hint="NAME"
            )
    return [data.card(name) for name in names or known]


def _where(card: data.Card, folder: Path | None) -> str:
    """The first place with a whole copy."""
    from .. import data

    if not card.copies:
        return "generated"
    for _, found in data.sources.look(card.copies, folder):
        if all(entry.state == "found" for entry in found):
            return found[0].place
    return "not found"


def _show(rows: Sequence[Row], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(rows))
    elif rows:
        lines = [list(rows[0]), *(list(row.values()) for row in rows)]
        Printer({"wide": True}).table(lines, numbers=False)
