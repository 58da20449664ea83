"""What `run`, `compare` and `sweep` do alike: train with progress, then say how it ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from .display import Display, show_table
from .errors import INTERRUPTED

__all__ = ["carry_out", "finish", "print_json", "say"]


def say(text: str, *, quiet: bool = False, to_stderr: bool = False) -> None:
    """A line for the user."""
    if not quiet:
        typer.echo(text, err=to_stderr)


def carry_out(
    plan: Any,
    out: Path,
    *,
    resume: bool,
    overwrite: bool,
    workers: int | None,
    tensorboard: bool,
    quiet: bool,
) -> bool:
    """Train; exit with 130 when the user stopped it. True when every run came to its end."""
    from ..experiments import compare, environment

    def stopped(kind: str) -> typer.Exit:
        typer.echo(f"{kind} Go on with:\n  {environment.command('--resume')}", err=True)
        return typer.Exit(INTERRUPTED)

    try:
        with Display(len(plan.specs), plan.config.epochs, quiet=quiet) as display:
            outcomes = compare.execute(
                plan,
                out,
                resume=resume,
                overwrite=overwrite,
                workers_=workers,
                tensorboard=tensorboard,
                on_event=display,
            )
    except KeyboardInterrupt:
        raise stopped("Killed; what was saved before is kept.") from None
    if any(outcome.kind == "stopped" for outcome in outcomes):
        raise stopped("Stopped, and saved.")
    failed = [outcome for outcome in outcomes if outcome.kind == "failed"]
    for outcome in failed:
        typer.echo(f"{outcome.run} failed: {outcome.text}", err=True)
    return not failed


def finish(out: Path, *, as_json: bool, quiet: bool, plots: bool = True) -> None:
    """Table and report from the saved runs."""
    from ..experiments import compare, summary

    done = compare.conclude(out, plots=plots)
    if not quiet and done.table:
        show_table(summary.cells(done.table, done.page.metrics), err=as_json)
    for warning in done.warnings:
        typer.echo(f"Warning: {warning}", err=True)
    say(f"Report: {done.report}", quiet=quiet, to_stderr=as_json)
    if as_json:
        print_json({"methods": done.table})


def print_json(value: Any) -> None:
    """The last line on stdout."""
    from ..experiments.record import clean

    typer.echo(json.dumps(clean(value)))
