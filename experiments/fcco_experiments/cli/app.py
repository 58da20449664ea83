"""The commands."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fcco import __version__, methods

from . import commands, show
from .data import data_app
from .options import FREE

__all__ = ["app"]

app = typer.Typer(
    name="fcco",
    help="Non-smooth coupled compositional optimisation for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def fcco(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Non-smooth coupled compositional optimisation for PyTorch."""


def _allow(option: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise typer.BadParameter(
            f"must be one of {', '.join(allowed)} but is: {value}", None, None, option
        )


@app.command("methods")
def show_methods(
    as_json: Annotated[bool, typer.Option("--json", help="All facts, as one JSON list.")] = False,
    constraints: Annotated[
        str | None, typer.Option(help="Only methods whose constraints are 'sampled' or 'all'.")
    ] = None,
    problem: Annotated[
        str | None, typer.Option(help="Only methods that solve this test problem: S1, S2, ...")
    ] = None,
) -> None:
    """List every method: what it solves, what a step costs, where it comes from."""
    _allow("--constraints", constraints, ("sampled", "all"))
    _allow("--problem", problem, tuple(methods.registry.PROBLEMS))
    chosen = methods.table()
    if constraints is not None:
        chosen = chosen.only(constraints=constraints)
    if problem is not None:
        chosen = chosen.only(problems=problem)
    if as_json:
        typer.echo(json.dumps(chosen.as_dicts()))
        return
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width: one line per method
        typer.echo(str(chosen))
        return
    shown = Table(title="Methods", show_lines=True)
    for column in chosen.COLUMNS:
        shown.add_column(column, no_wrap=column == "name", overflow="fold")
    for row in chosen.rows():
        shown.add_row(*row)
    console.print(shown)


_EPILOG = (
    "Every key of the config is an option: --epochs 10, --methods.sonex.lr 0.01. "
    "`fcco config TASK --data NAME` prints them."
)

for _train in (commands.run, commands.compare, commands.sweep):
    app.command(context_settings=FREE, epilog=_EPILOG)(_train)
app.command()(show.report)
app.command("config", context_settings=FREE)(show.show_config)
app.add_typer(data_app, name="data")
