"""What `run`, `compare` and `sweep` do alike: train with progress, then say how it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from .. import distributed
from .data import fetching
from .display import Display, show_table
from .errors import INTERRUPTED

__all__ = ["carry_out", "finish", "tell_sweep"]


def carry_out(
    plan: Any,
    out: Path,
    *,
    resume: bool,
    overwrite: bool,
    workers: int | None,
    tensorboard: bool,
    quiet: bool,
    runner: Any = None,
) -> bool:
    """Train; exit with 130 when the user stopped it. True when every run came to its end.

    Of several processes (torchrun) the first alone shows how it goes; failures, any.
    """
    from .. import compare, distributed, environment

    def stopped(kind: str) -> typer.Exit:
        _say(f"{kind} Go on with:\n  {environment.command('--resume')}")
        return typer.Exit(INTERRUPTED)

    quiet = quiet or not distributed.is_first()
    device = plan.config.preferred_device or "cpu"
    try:
        with (
            distributed.process_group(device),
            Display(len(plan.specs), plan.config.epochs, quiet=quiet) as display,
        ):
            outcomes = compare.execute(
                plan,
                out,
                resume=resume,
                overwrite=overwrite,
                workers_=workers,
                tensorboard=tensorboard,
                on_event=display,
                fetching=None if quiet else fetching(),
                **({} if runner is None else {"runner": runner}),
            )
    except KeyboardInterrupt:
        raise stopped("Killed; what was saved before is kept.") from None
    if any(outcome.kind == "stopped" for outcome in outcomes):
        raise stopped("Stopped, and saved.")
    failed = [outcome for outcome in outcomes if outcome.kind == "failed"]
    if failed:
        _say(f"{len(failed)} of {len(outcomes)} runs failed, see above.")
    return not failed


def _say(text: str) -> None:
    if distributed.is_first():
        typer.echo(text, err=True)


def finish(out: Path, *, as_json: bool, quiet: bool) -> None:
    """Table and report from the saved runs, by the first process."""
    from .. import compare, stats

    if not distributed.is_first():
        return

    done = _interruptible(out, lambda: compare.conclude(out))
    if not quiet and done.table:
        show_table(stats.cells(done.table, done.page.metrics, done.rule), err=as_json)
    for warning in done.warnings:
        typer.echo(f"Warning: {warning}", err=True)
    if not quiet:
        typer.echo(f"Report: {done.report}", err=as_json)
    if as_json:
        _print_json({"methods": done.table})


def tell_sweep(told: dict[str, Any], out: Path, *, as_json: bool, quiet: bool) -> None:
    """Winners and report of a sweep."""
    from .. import stats
    from ..report import sweep_page

    done = _interruptible(out, lambda: sweep_page.conclude(out, told))
    if not quiet:
        if done.table:
            show_table(stats.cells(done.table, done.metrics), err=as_json)
        settings = {entry["name"]: entry for entry in told["settings"]}
        lines = [f"Chosen by: {told['rule']}"]
        for name, ranked in told["ranking"].items():
            chosen = told["winners"].get(name)
            values = settings[chosen]["setting"] if chosen else "none came to its end"
            lines.append(f"  {name}: {values} (best of {len(ranked)})")
        lines.append(f"Report: {done.report}")
        lines.append(f"Winners: {out / 'winners.yaml'} (for --config of `fcco compare`)")
        typer.echo("\n".join(lines), err=as_json)
    if as_json:
        _print_json({"methods": done.table})


def _interruptible(out: Path, work: Callable[[], Any]) -> Any:
    """What `work` returns; a user who stops it is told how to do it again."""
    from .. import environment

    try:
        return work()
    except KeyboardInterrupt:
        again = environment.program("report", str(out))
        typer.echo(f"Interrupted; the runs are saved. Their report:\n  {again}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _print_json(value: Any) -> None:
    """The last line on stdout."""
    from ..store import clean

    typer.echo(json.dumps(clean(value)))
