"""Options that several commands share, and keys of the config as options."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer import Argument, Option
from typer.core import TyperCommand

from .. import config as configs
from ..config import ConfigError, did_you_mean

T = TypeVar("T")

WRONG, INTERRUPTED = 2, 130
FREE = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of commands that take any key of the config."""
COLUMNS = ("label", "group", "text", "image", "features", "split", "files")
"""Keys of `columns`, which are options without the prefix; those of lists take commas."""
LISTS = ("group", "features")
TABLES = (".csv", ".tsv", ".parquet")


def fail(text: str, code: int = WRONG) -> typer.Exit:
    """Say what is wrong, of several processes (torchrun) on the first alone; to be raised."""
    from .. import distributed

    if distributed.is_first():
        typer.echo(f"Error: {text}", err=True)
    return typer.Exit(code)


class Command(TyperCommand):
    """Lists in its help what the config files have; a mistake is a few lines, not a traceback."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        lists = _Lists()
        parameter: Any
        for parameter in self.params:
            parameter.help = (parameter.help or "").format_map(lists)
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        from ..store import FolderError
        from ..workers import LoadError

        try:
            return super().invoke(ctx)
        except ConfigError as error:
            several = [""] if len(error.problems) > 1 else []
            raise fail("\n  ".join([*several, *error.problems])) from error
        except FolderError as error:
            raise fail(str(error)) from error
        except LoadError as error:
            raise fail("\n".join(filter(None, [str(error), error.details]))) from error
        except OSError as error:
            if error.filename is None:
                raise
            raise fail(f"{error.filename}: {error.strerror}.") from error
        except KeyboardInterrupt:
            raise fail("Interrupted.", INTERRUPTED) from None


class _Lists(dict[str, str]):
    """`"fairness: adult, compas; group-dro: ..."` by kind; the files are read when asked for."""

    def __missing__(self, kind: str) -> str:
        folders = sorted(folder for folder in configs.CONFIGS.iterdir() if folder.is_dir())
        if kind == "tasks":
            return ", ".join(folder.name for folder in folders)
        lists = {}
        for folder in folders:
            found = configs.settings_in(folder / "grids" if kind == "grids" else folder)
            names = list(found)
            if kind == "settings":
                names = sorted({setting for settings in found.values() for setting in settings})
            elif kind == "grids":
                names = [
                    n
                    for name, own in found.items()
                    for n in ([f"{name}-{s}" for s in own] or [name])
                ]
            lists[folder.name] = ", ".join(names)
        return "; ".join(f"{task}: {names}" for task, names in lists.items())


def _task_first(name: str) -> str:
    if name.startswith("-"):
        raise fail(f"Name the task first: fcco COMMAND TASK {name} ...")
    return name


TaskName = Annotated[
    str,
    Argument(
        metavar="TASK", callback=_task_first,
        help="The experiment: {tasks}; or module:attribute of your own.",
    ),
]  # fmt: skip
Data = Annotated[
    str | None,
    Option(metavar="NAME", help="The data set ({data}); or your own table, with --label."),
]
SettingName = Annotated[
    str | None,
    Option("--setting", metavar="NAME", help="A variant, if not the usual one ({settings})."),
]
ConfigName = Annotated[
    str | None, Option("--config", metavar="FILE", help="A config of your own, instead of --data.")
]
Method = Annotated[str | None, Option(metavar="NAME", help="If not the first of the config.")]
Methods = Annotated[str | None, Option(metavar="A,B,..", help="Only these methods.")]
Seed = Annotated[int, Option(min=0, metavar="N", help="Of weights and batches.")]
Seeds = Annotated[str | None, Option(metavar="0,1,..", help="A run of each method for each.")]
Quick = Annotated[bool, Option("--quick", help="The fast version of the experiment.")]
Out = Annotated[Path | None, Option(metavar="FOLDER", help="For the runs; runs/... unless given.")]
Resume = Annotated[bool, Option("--resume", help="Go on with the runs in the folder.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Delete the runs in the folder.")]
DataFolder = Annotated[
    Path | None, Option(metavar="FOLDER", help="Look for data here first; the same as FCCO_DATA.")
]
AsJson = Annotated[bool, Option("--json", help="The table as JSON, the last line of stdout.")]
TensorBoard = Annotated[bool, Option("--tensorboard", help="Log for TensorBoard too.")]
Quiet = Annotated[bool, Option("--quiet", help="No progress and no table.")]
Wide = Annotated[bool, Option("--wide", help="A table of all headline figures.")]
Workers = Annotated[
    int | None, Option(min=1, metavar="N", help="Processes; one per core, or one on a GPU.")
]
GridName = Annotated[
    str | None,
    Option(metavar="NAME", help="{grids}; or a YAML file; or --grid.METHOD.KEY '[0.1, 0.01]'."),
]
Limit = Annotated[int | None, Option(min=1, metavar="N", help="Settings of each method.")]
TuningSeeds = Annotated[str | None, Option(metavar="0,1,..", help="If not those of the grid.")]
Fleet = Annotated[
    bool | None,
    Option("--fleet/--no-fleet", help="Train runs together, where the task can, or each alone."),
]
Device = Annotated[
    str | None, Option(metavar="auto|cpu|cuda", help="Where to train; auto unless given.")
]
Chunk = Annotated[
    int | None, Option(min=1, metavar="N", help="Runs of a fleet at most; as many as fit.")
]


@dataclass(frozen=True)
class Asked:
    """What a command is about: a task, its config, and the name of that config for folders."""

    task: Any
    config: Any
    name: str
    quick: bool

    def folder(self, out: Path | None, *more: str) -> Path:
        """Where runs go."""
        parts = [self.task.name, self.name, *(["quick"] if self.quick else []), *more]
        return Path("runs") / "-".join(parts) if out is None else out


def extras(context: typer.Context) -> list[tuple[str, str]]:
    """What is left on the command line, as pairs: `--key value`, `--key=value`, `key=value`."""
    pairs: list[tuple[str, str]] = []
    words = list(context.args)
    while words:
        word = words.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and not equals:
            flag = not words or words[0].startswith("--")
            value = "true" if flag else words.pop(0)
        elif not equals or not key or key.startswith("-"):
            raise fail(f"`{word}` is not understood; keys of the config are --key value.")
        pairs.append((key, value))
    return pairs


def resolve(context: typer.Context, pairs: Sequence[tuple[str, str]] | None = None) -> Asked:
    """The config that the options of a command ask for.

    Args:
        context: of the command. One with an option `method` is for a single run.
        pairs: keys and values of the config, those of the context unless given.
    """
    from .. import tasks

    given: dict[str, Any] = {"methods": None, "seeds": None} | context.params
    data, setting, quick = given["data"], given["setting"], given["quick"]
    task, keys = tasks.get(given["task"]), extras(context) if pairs is None else pairs
    if given["config"] is None and data is None:
        there = ", ".join(configs.names(task))
        raise fail(f"Say which data: --data NAME (or --config FILE). Configs: {there or 'none'}.")
    if given["config"] is not None and setting is not None:
        raise fail("--config names the whole config: leave out --setting, or --config.")
    _refuse_options(context, [key for key, _ in keys], configs.fields_of(task.config))
    table = data is not None and data.lower().removesuffix(".gz").endswith(TABLES)
    if table and setting is None:  # the settings `text` and `image` have a network for them
        there = [word for word in ("text", "image") if word in dict(keys)]
        setting = next((word for word in there if f"table-{word}" in configs.names(task)), None)
    name = given["config"] or task.config_name("table" if table else str(data), setting)
    folder = Path(str(data)).name.partition(".")[0] if table else Path(name).stem
    method = None
    if "method" in given:
        methods = configs.load(task, name, quick=quick).methods
        method = given["method"] or next(iter(methods), "")
        pick(methods, method)
    overrides = list(_overrides(task, keys, method))
    if table and given["config"] is None:
        _check_table(str(data), overrides)
    if table or (data is not None and given["config"] is not None):
        overrides.append(f"data={json.dumps(data)}")
    config = configs.load(task, name, quick=quick, overrides=overrides)
    if method is not None:
        config = replace(config, methods={method: config.methods[method]}, seeds=(given["seed"],))
    if "grid" in given:  # methods and seeds of a sweep are those of its grid
        return Asked(task, config, folder, quick)
    if given["methods"] is not None:
        config = replace(config, methods=pick(config.methods, given["methods"]))
    if given["seeds"] is not None:
        seeds = numbers("--seeds", given["seeds"])
        config = configs.changed(config, configs.COMMAND_LINE, seeds=seeds)
    return Asked(task, config, folder, quick)


def _check_table(data: str, overrides: Sequence[str]) -> None:
    if not any(override.startswith("columns.label=") for override in overrides):
        raise fail(f"--data {data} is a table: say which column is the label with --label COLUMN.")
    if not Path(data).is_file():
        raise fail(f"--data: there is no file {data}.")


def _overrides(task: Any, keys: Sequence[tuple[str, str]], method: str | None) -> Iterator[str]:
    """`key=value` each: `label` is `columns.label`, `lr` of one method is `methods.NAME.lr`."""
    from ..task import Method

    fields = configs.fields_of(task.config)
    lists: dict[str, list[str]] = {}
    for key, value in keys:
        first, dot, rest = key.partition(".")
        word = first.replace("-", "_")
        if word in fields:
            yield f"{key}={value}"
        elif key in LISTS:  # may be given several times
            lists[key] = lists.get(key, []) + _split(value)
            yield f"columns.{key}={json.dumps(lists[key])}"
        elif key in COLUMNS:  # names of columns are texts, whatever they look like in YAML
            yield f"columns.{key}={json.dumps(value)}"
        elif method is not None and word in configs.fields_of(Method):
            yield f"methods.{method}.{word}{dot}{rest}={value}"
        else:
            yield f"{key}={value}"


def _refuse_options(context: typer.Context, keys: Sequence[str], fields: Sequence[str]) -> None:
    """An option with a typing error is not a key of the config."""
    options = [name for each in context.command.params for name in each.opts if name[:2] == "--"]
    known = [*options, *(f"--{name}" for name in COLUMNS)]
    for key in keys:
        option = f"--{key}"
        if "." in key or key.replace("-", "_") in fields or key in COLUMNS:
            continue
        if option in options:
            raise fail(f"`{option}` needs no value here, or stands twice.")
        if close := difflib.get_close_matches(option, known, n=1, cutoff=0.8):
            raise fail(f"There is no option `{option}`; did you mean `{close[0]}`?")


def pick(methods: Mapping[str, T], names: str) -> dict[str, T]:
    """Those of `a,b,c`, in that order."""
    for name in _split(names):
        if name not in methods:
            hint = did_you_mean(name, methods)
            raise fail(f"There is no method `{name}`{hint} There are: {', '.join(methods)}.")
    return {name: methods[name] for name in _split(names)}


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(option: str, text: str) -> tuple[int, ...]:
    """`0,1,2` as numbers."""
    try:
        return tuple(int(part) for part in _split(text))
    except ValueError:
        raise fail(f"`{option}` must be whole numbers such as 0,1,2 but is: {text}") from None


def fleets(task: Any, device: str | None, given: Mapping[str, Any]) -> Any:
    """`fleets` of `compare.execute` for a sweep; None where the runs are trained one by one.

    Args:
        task: whether it can train many runs at once.
        device: of fleets; None where it is a key of the config.
        given: the options fleet, chunk and tensorboard.
    """
    fleet, chunk, tensorboard = given["fleet"], given["chunk"], given["tensorboard"]
    if fleet and not task.fleets:
        raise fail(f"--fleet: the task {task.name} cannot train runs together; leave it out.")
    if fleet and tensorboard:
        raise fail("--fleet: a fleet has no curves for --tensorboard; leave one of them out.")
    if device not in (None, "auto", "cpu", "cuda"):
        raise fail(f"--device must be auto, cpu or cuda but is: {device}.")
    if fleet is False or not task.fleets or tensorboard:
        for option, value in (("--chunk", chunk), ("--device", device)):
            if value is not None:
                raise fail(f"{option} is for fleets, but these runs are trained one by one.")
        return None
    from ..fleets import train

    return functools.partial(train, device=device or "auto", chunk=chunk)
