"""The command line `fcco`. What needs torch is imported inside, so that `--help` is fast."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from .. import __version__
from .. import config as configs
from ..config import ConfigError, UserError
from . import options as o
from .display import Display, Printer, printable
from .gate import gate

if TYPE_CHECKING:  # it needs torch
    from .. import data

_KEYS = """TASK is fairness, group-dro, continual or x-risk; or your own, as module:attribute. Every
key of the config is an option, with dots for what is nested: COMMAND TASK --help lists them, `fcco
config TASK --data NAME` prints their values. Columns of your own table: --label, --group or
--overlapping, --features, --text, --image, --split; and --files for the folder of the images.
"""


class _App(click.Group):
    """Commands whose errors are a few lines."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            lines = str(error).splitlines()
            _fail("\n  ".join(["", *lines] if len(lines) > 1 else lines), error)
        except OSError as error:
            if error.filename is None:
                raise
            _fail(f"{error.filename}: {error.strerror}.", error)
        except KeyboardInterrupt as error:
            _fail("Interrupted.", error, o.INTERRUPTED)


def _fail(text: str, cause: BaseException, code: int = 2) -> NoReturn:
    click.echo(printable(f"Error: {text}"), err=True)
    raise click.exceptions.Exit(code) from cause


def _examples(*lines: str) -> str:
    return "\n".join(["\n\b", "Examples:", *(f"  {line}" for line in lines)])


@click.group(
    "fcco",
    cls=_App,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_examples(
        "fcco compare fairness --data synthetic --quick",
        "fcco compare fairness --data people.csv --label income --group sex",
        "fcco sweep group-dro --data celeba --grid wide --limit 6",
        "fcco COMMAND --help",
    ),
)
@click.version_option(__version__, message="%(version)s")
def app() -> None:
    """Train for the worst group, under constraints, without forgetting: experiments as commands."""


def main() -> None:
    """Run the command line."""
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        sys.exit(
            "Error: fcco is one process; start it without torchrun. Many runs on several machines: "
            "--ray. One model on several GPUs: a loop of your own, docs/recipes/several-machines.md"
        )
    app()


def command(name: str, *examples: str, takes: str = "") -> Callable[[Callable[..., None]], Any]:
    """Register a command with these lines in its help.

    `takes` are names of options that it shares with others; with `data` among them, every key of
    the config is an option.
    """
    keys = "data" in takes.split()
    about = (_KEYS if keys else "") + _examples(*examples)
    kind = o.Command if keys else None
    return app.command(name, cls=kind, epilog=about, params=o.options(takes))


command(
    "gate",
    "fcco gate old new --data losses.csv --segments region,device --tolerance 0.01",
    "fcco gate score_v1 score_v2 --label clicked --data clicks.parquet --segments country --json",
    "fcco gate v1 v2 --label species --data birds.csv --segments site",
)(gate)

_WHAT = "setting config quick"
_HOW = "data_folder wide as_json quiet"


@command(
    "run",
    "fcco run fairness --data compas --method alexr2 --lr 0.01 --settings.penalty 20",
    "fcco run group-dro --data people.csv --label income --group sex,race",
    takes=f"task data method seed {_WHAT} out resume overwrite {_HOW}",
)
@click.pass_context
def run(context: click.Context, **given: Any) -> None:
    """Train one method with one seed. Keys of the method need no prefix here."""
    if any(key == "seeds" for key, _ in o.extras(context)):
        raise ConfigError("`run` trains once: give --seed NUMBER. Several seeds: fcco compare.")
    if "," in (given["method"] or ""):
        raise ConfigError(
            "`run` trains one method: give --method NAME. Several: fcco compare --methods."
        )
    request = o.resolve(context)
    seed = f"seed-{request.config.seeds[0]}"
    _compare(context, request, request.folder(given["out"], *request.config.methods, seed))


@command(
    "compare",
    "fcco compare fairness --data synthetic --quick",
    "fcco compare group-dro --data celeba --methods sonex,erm --seeds 0,1",
    "fcco compare fairness --data adult --setting paper --methods.sonex.lr 0.003",
    "fcco compare fairness --data people.csv --label income --group sex",
    takes=f"task data methods seeds {_WHAT} out resume overwrite workers ray {_HOW}",
)
@click.pass_context
def compare(context: click.Context, **given: Any) -> None:
    """Train several methods with several seeds, and write a table and a report."""
    request = o.resolve(context)
    if not (request.config.methods and request.config.seeds):
        raise ConfigError("There is nothing to run: the config has no methods or no seeds.")
    _compare(context, request, request.folder(given["out"]))


@command(
    "sweep",
    "fcco sweep fairness --data adult --grid wide --limit 6 --out runs/my-sweep",
    "fcco sweep group-dro --data sentiment --grid.sonex.lr '[0.01, 0.1]'",
    "fcco compare fairness --config runs/my-sweep/winners.yaml",
    takes=f"task data grid limit methods seeds {_WHAT} out resume overwrite workers ray fleet "
    f"device chunk {_HOW}",
)
@click.pass_context
def sweep(context: click.Context, **given: Any) -> None:
    """Try many settings of each method and keep the best.

    The best settings on validation data are written to winners.yaml, a config for `fcco compare`.
    Tasks that support it (fairness) train runs together, thousands at a time on a GPU.
    """
    from .. import sweep as sweeps
    from .. import tasks

    task, device, grid = given["task"], given["device"], given["grid"]
    pairs = o.extras(context)
    inline = [(key.removeprefix("grid."), text) for key, text in pairs if key[:5] == "grid."]
    pairs = [pair for pair in pairs if pair[0][:5] != "grid."]
    if device is not None and "device" in configs.fields_of(tasks.get(task).config):
        pairs, device = [*pairs, ("device", device)], None
    request = o.resolve(context, pairs)
    fleets = o.fleets(request.task, device, given)
    named = grid is not None
    if grid is None and not inline:
        grid = request.task.grid_name(request.config)
    whole = sweeps.Grid() if grid is None else sweeps.read_grid(request.task, grid)
    if not named:  # the task's own grid, of which a config may have a part
        own = {n: g for n, g in whole.methods.items() if g.base or n in request.config.methods}
        whole = dataclasses.replace(whole, methods=own)
    whole = sweeps.with_inline(whole, inline)
    if given["methods"] is not None:
        whole = dataclasses.replace(whole, methods=o.pick(whole.methods, given["methods"]))
    chosen = sweeps.settings_of(
        whole, request.config, limit=given["limit"], source=grid or "command line"
    )
    tuning = whole.seeds if given["seeds"] is None else given["seeds"]
    plan = sweeps.plan_sweep(
        task, request.name, request.config, chosen, tuning, quick=request.quick
    )
    folder = request.folder(given["out"], "sweep")
    _, code = _train(given, plan, folder, hidden="test", fleets=fleets)
    final = request.config.seeds
    _interruptible(folder, lambda: sweeps.choose(folder, chosen, final))
    _conclude(folder, given)
    raise click.exceptions.Exit(code)


@command(
    "report",
    "fcco report runs/fairness-adult",
    "fcco report runs/fairness-adult --publish docs/results/mine",
    "fcco report runs/mine --task my_module:TASK",
    takes="wide as_json quiet",
)
@click.argument("folder", type=o.PATH)
@click.option(
    "--task",
    metavar="MODULE:ATTRIBUTE",
    help="The task, if it is not built in; its code is imported only if you name it.",
)
@click.option(
    "--publish",
    metavar="FOLDER",
    type=o.PATH,
    help="Also write small files for a repository to this folder.",
)
def report(folder: Path, task: str | None, publish: Path | None, **given: Any) -> None:
    """Write the table and the report again, from saved or published runs."""
    from .. import report as reports
    from .. import tasks

    if task is not None:
        tasks.get(task)
    _conclude(folder, given)
    if publish is not None:
        for path in _interruptible(folder, lambda: reports.publish(folder, publish)):
            click.echo(printable(f"Published: {path}"), err=True)


@command(
    "config",
    "fcco config fairness --data adult > mine.yaml",
    "fcco compare fairness --config mine.yaml",
    takes=f"task data methods seeds {_WHAT}",
)
@click.pass_context
def show_config(context: click.Context, **given: Any) -> None:
    """Print the config that the other commands would use, as YAML."""
    click.echo(configs.dump(o.resolve(context).config), nl=False)


@command("methods", "fcco methods --for limits", "fcco methods --wide --json")
@click.option(
    "--for",
    "use",
    type=click.Choice(["groups", "limits", "general"]),
    help="List only methods for this purpose.",
)
@click.option("--wide", is_flag=True, help="Show all columns.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON list.")
def show_methods(use: str | None, wide: bool, as_json: bool) -> None:
    """List every method, what it is for and what it needs."""
    from fcco import methods

    rows = [row.facts() for row in methods.ROWS if use is None or use in row.use]
    if as_json:
        click.echo(json.dumps(rows))
        return
    columns = list(rows[0]) if wide else ["method", "needs", "use it when"]
    table = methods.table(use, columns)  # type: ignore[arg-type]
    Printer({"wide": wide}).table(table, numbers=False)


# --- data -----------------------------------------------------------------------------------------

Row = dict[str, str]
WIDTH = 80

_folder = click.option("--folder", type=o.PATH, help="Look here before FCCO_DATA and the cache.")
_json = click.option("--json", "as_json", is_flag=True, help="Print a JSON list on the last line.")


@app.group("data")
def data_sets() -> None:
    """List, fetch and verify data sets."""


@data_sets.command("list")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@_folder
@_json
def show_list(names: Sequence[str], folder: Path | None, as_json: bool) -> None:
    """List the data sets with their size and where each was found; all details with NAME."""
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

    For data that cannot be fetched, say where to get them. Pretrained weights (efficientnet-lite0,
    minilm) can be fetched too.
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

    For folders of images, check that no file is missing. The exit code is 1 if a copy is corrupt,
    or if a named data set has no good copy.
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


# --- Parts of several commands -------------------------------------------------------------------


def _compare(context: click.Context, request: o.Request, out: Path) -> None:
    """Train and conclude; exit with 1 when a run failed, or all diverged."""
    from .. import compare

    task = context.params["task"]
    plan = compare.plan(task, request.name, request.config, quick=request.quick)
    failed, code = _train(context.params, plan, out)
    if failed < len(plan.specs):
        _conclude(out, context.params)
    raise click.exceptions.Exit(code)


def _train(
    given: Mapping[str, Any],
    plan: Any,
    out: Path,
    hidden: str | None = None,
    fleets: Any = None,
) -> tuple[int, int]:
    """Train; the number of runs that failed, and the exit code. It exits with 130 on Ctrl-C."""
    from .. import compare, environment, tasks

    if (folder := given["data_folder"]) is not None:
        if not folder.is_dir():
            raise ConfigError(f"--data-folder: there is no folder {folder}.")
        os.environ["FCCO_DATA"] = str(folder.resolve())  # for the workers, too

    if given.get("ray") is not None and given["workers"] is not None:
        raise ConfigError("--workers are processes of this machine: leave it out, or --ray.")
    quiet = given["quiet"]
    metrics = [] if quiet else tasks.get(plan.task).metrics(plan.config)
    figures = [m.key for m in metrics if m.headline and not (hidden and m.key.startswith(hidden))]
    display = Display(len(plan.specs), plan.config.epochs, quiet=quiet, figures=figures)
    try:
        outcomes = compare.execute(
            plan, out, resume=given["resume"], overwrite=given["overwrite"],
            workers=given.get("workers", 1), on_event=display, fleets=fleets, ray=given.get("ray"),
        )  # fmt: skip
        kinds = [outcome.kind for outcome in outcomes]
        stopped = "Stopped, and saved." if "stopped" in kinds else ""
    except KeyboardInterrupt:
        kinds, stopped = [], "Killed; what was saved before is kept."
    failed, text = kinds.count("failed"), ""
    if stopped:
        text = f"{stopped} Continue with:\n  {environment.command('--resume')}"
    elif failed:
        text = f"{failed} of {len(kinds)} runs failed, see above."
    elif set(kinds) == {"diverged"}:
        text = "All runs diverged: try a smaller learning rate, and look at the data for outliers."
    if text:
        click.echo(printable(text), err=True)
    if stopped:
        raise click.exceptions.Exit(o.INTERRUPTED)
    return failed, 1 if text else 0


def _conclude(out: Path, given: Mapping[str, Any]) -> None:
    """Write table and report of saved runs; print the verdict, the table and what to try next."""
    from .. import compare, stats

    done = _interruptible(out, lambda: compare.conclude(out))
    printer = Printer(given)
    printer.text(*done.verdict)
    printer.text(*done.winners, mark="- ")
    if done.table:
        columns = stats.columns(done.metrics, done.rule, wide=given["wide"])
        printer.table(stats.cells(done.table, columns, done.rule))
    if done.next_steps:
        printer.line("Next:")
        printer.text(*done.next_steps, mark="- ")
    printer.line(f"{'All settings' if done.winners else 'Report'}: {done.report}")
    if done.compare:
        printer.line(f"Compare the winners: {done.compare}")
    for warning in done.warnings:
        click.echo(printable(f"Warning: {warning}"), err=True)
    printer.json({"methods": done.table})


def _interruptible(out: Path, work: Callable[[], Any]) -> Any:
    """What `work` on a folder of runs returns; Ctrl-C prints the command that makes the report."""
    from .. import environment, store

    try:
        with store.reading(out):
            return work()
    except KeyboardInterrupt:
        again = environment.program("report", str(out))
        text = f"Interrupted; the runs are saved. Their report:\n  {again}"
        click.echo(printable(text), err=True)
        raise click.exceptions.Exit(o.INTERRUPTED) from None
