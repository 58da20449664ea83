"""The commands that show what is there: `report` and `config`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options as o
from .errors import guarded
from .training import finish, tell_sweep

__all__ = ["report", "show_config"]


@guarded
def report(
    folder: Annotated[Path, typer.Argument(help="Of a comparison, a run or a sweep.")],
    task: Annotated[
        str | None,
        typer.Option(help="MODULE:ATTRIBUTE of its task, where that is not one of ours."),
    ] = None,
    as_json: o.AsJson = False,
    quiet: o.Quiet = False,
) -> None:
    """Write the table and the report anew from saved runs."""
    from .. import sweep, tasks

    o.needs(tensorboard=False)
    if task is not None:
        tasks.get(task)
    told = sweep.read(folder)
    if told is None:
        finish(folder, as_json=as_json, quiet=quiet)
    else:
        tell_sweep(told, folder, as_json=as_json, quiet=quiet)


@guarded
def show_config(
    context: typer.Context,
    task: o.TaskName,
    data: o.Data = None,
    methods: o.Methods = None,
    seeds: o.Seeds = None,
    setting: o.SettingName = None,
    config: o.ConfigName = None,
    quick: o.Quick = False,
) -> None:
    """Print the config that the other commands would use, as YAML."""
    from ..config import dump

    asked = o.resolve(context, task, data, setting, config, quick, methods=methods, seeds=seeds)
    typer.echo(dump(asked.config), nl=False)
