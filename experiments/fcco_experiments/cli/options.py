"""Options that several commands share, and keys of the config as options."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer import Argument, Option
from typer.core import TyperCommand

from .. import config as configs
from ..config import ConfigError, did_you_mean
from ..prose import printable

T = TypeVar("T")

INTERRUPTED = 130  # exit code
FREE = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of commands that take any key of the config."""
COLUMNS = ("label", "group", "overlapping", "text", "image", "features", "split", "files")
"""Keys of `columns`, which are options without the prefix; those of lists take commas."""
LISTS = ("group", "overlapping", "features")
TABLES = (".csv", ".tsv", ".parquet")


class Command(TyperCommand):
    """A command whose help lists what the config files have, and whose errors are a few lines."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["words"] = list(args)  # `--help` comes before any of them is understood
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        named = [word for word in ctx.meta["words"] if word in _tasks() or ":" in word]
        task = named[0] if named and any(each.name == "task" for each in self.params) else None
        parameters: list[Any] = self.params
        before = [each.help for each in parameters]
        for each in parameters:
            each.help = (each.help or "").format(**_lists(task))
        super().format_help(ctx, formatter)
        for each, text in zip(parameters, before, strict=True):
            each.help = text
        if task is not None:
            from .. import tasks
            from .keys import listed

            with formatter.section(f"Keys of {task}"):
                formatter.write_dl(list(listed(tasks.get(task).config)), col_max=34)
        # Metavars and texts say it all: types and ranges of typer are left out.
        text = re.sub(r"\s+\[x>=\d\]|(?<=\d); x>=\d", "", "".join(formatter.buffer))
        text = re.sub(r"\{([A-Z]+)\}", r"\1", text)
        formatter.buffer = [re.sub(r"<(str|path)>", lambda match: " " * len(match[0]), text)]

    def invoke(self, ctx: Any) -> Any:
        from ..run.engine import LoadError
        from ..store import FolderError

        code = 2
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            several = [""] if len(error.problems) > 1 else []
            text, cause = "\n  ".join([*several, *error.problems]), error
        except FolderError as error:
            text, cause = str(error), error
        except LoadError as error:
            text, cause = f"{error}\n{error.details}".rstrip(), error
        except OSError as error:
            if error.filename is None:
                raise
            text, cause = f"{error.filename}: {error.strerror}.", error
        except KeyboardInterrupt as error:
            text, cause, code = "Interrupted.", error, INTERRUPTED
        typer.echo(printable(f"Error: {text}"), err=True)
        raise typer.Exit(code) from cause


def _tasks() -> list[str]:
    return sorted(folder.name for folder in configs.CONFIGS.iterdir() if folder.is_dir())


@functools.cache
def _lists(task: str | None) -> dict[str, str]:
    """`"adult, compas"`: data sets, settings and grids of a task, or those of each; the tasks."""
    found: dict[str, list[str]] = {"data": [], "settings": [], "grids": []}
    for name in _tasks() if task is None else [task]:
        folder = _folder(name)
        files = {k: v for k, v in configs.settings_in(folder).items() if k != configs.TABLE}
        grids = [
            grid
            for name, variants in configs.settings_in(folder / "grids").items()
            for grid in [f"{name}-{variant}" for variant in variants] or [name]
        ]
        settings = sorted({name for names in files.values() for name in names})
        for kind, names in (("data", files), ("settings", settings), ("grids", grids)):
            found[kind].append((f"{name}: " if task is None else "") + ", ".join(names))
    lists = {kind: "; ".join(parts) for kind, parts in found.items()}
    return lists | {"tasks": ", ".join(_tasks())}


def _folder(task: str) -> Path:
    """Of the configs of a task; only one that is not built in must be imported for it."""
    if ":" not in task:
        return configs.CONFIGS / task
    from .. import tasks

    return configs.folder(tasks.get(task))


_OPTIONS: dict[str, tuple[type, str | None, str]] = {
    "task": (str, "TASK", "The experiment: {tasks}; or module:attribute of your own."),
    "data": (str, "NAME", "The data set ({data}); or your own table, with --label."),
    "method": (str, "NAME", "If not the first of the config."),
    "seed": (int, "N", "Of weights and batches; 0 unless given."),
    "grid": (str, "NAME", "{grids}; or a YAML file; or --grid.METHOD.KEY '[0.1, 0.01]'."),
    "limit": (int, "N", "Settings of each method."),
    "methods": (str, "A,B,..", "Only these methods."),
    "seeds": (str, "0,1,..", "A run of each method for each; those of the config or grid."),
    "setting": (str, "NAME", "A variant, if not the usual one ({settings})."),
    "config": (str, "FILE", "A config of your own, instead of --data."),
    "quick": (bool, None, "The fast version of the experiment."),
    "out": (Path, "FOLDER", "For the runs; runs/... unless given."),
    "resume": (bool, None, "Go on with the runs in the folder."),
    "overwrite": (bool, None, "Delete the runs in the folder."),
    "workers": (int, "N", "Processes; one per core, or one on a GPU."),
    "ray": (str, "ADDRESS", "Train on a Ray cluster; auto for that of this machine."),
    "fleet": (bool, None, "Train runs together, where the task can, or each alone."),
    "device": (str, "auto|cpu|cuda", "Where to train; auto unless given."),
    "chunk": (int, "N", "Runs of a fleet at most; as many as fit."),
    "tensorboard": (bool, None, "Log for TensorBoard too."),
    "data_folder": (Path, "FOLDER", "Look for data here first; the same as FCCO_DATA."),
    "wide": (bool, None, "A table of all headline figures."),
    "as_json": (bool, None, "The table as JSON, the last line of stdout."),
    "quiet": (bool, None, "No progress and no table."),
}
"""Type, metavar and help of the options that several commands have."""
_FLAGS = {"as_json": "--json", "fleet": "--fleet/--no-fleet"}


def parameters(names: str) -> list[inspect.Parameter]:
    """Options of the table, as parameters that typer knows."""
    return [_parameter(name) for name in names.split()]


def _parameter(name: str) -> inspect.Parameter:
    kind, metavar, text = _OPTIONS[name]
    given: Any = Option(
        _FLAGS.get(name, f"--{name.replace('_', '-')}"), metavar=metavar, help=text,
        min={"seed": 0}.get(name, 1) if kind is int else None,
    )  # fmt: skip
    default: Any = False if kind is bool and name != "fleet" else None
    if name == "task":
        given, default = Argument(metavar=metavar, help=text), inspect.Parameter.empty
    hint: Any = Annotated[kind if default is not None else kind | None, given]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


@dataclass(frozen=True)
class Request:
    """What the options of a command ask for."""

    task: Any
    config: Any
    name: str  # of the config, for folders
    quick: bool

    def folder(self, out: Path | None, *more: str) -> Path:
        """Where runs go."""
        parts = [self.task.name, self.name, *(["quick"] if self.quick else []), *more]
        return Path("runs") / "-".join(parts) if out is None else out


def extras(context: typer.Context) -> list[tuple[str, str]]:
    """What is left on the command line, as pairs: `--key value`, `--key=value`, `key=value`."""
    if (task := context.params["task"]).startswith("-"):
        raise ConfigError(f"Name the task first: fcco COMMAND TASK {task} ...")
    pairs: list[tuple[str, str]] = []
    words = list(context.args)
    while words:
        word = words.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and not equals:
            flag = not words or words[0].startswith("--")
            value = "true" if flag else words.pop(0)
        elif not equals or not key or key.startswith("-"):
            raise ConfigError(f"`{word}` is not understood; keys of the config are --key value.")
        pairs.append((key, value))
    return pairs


def resolve(context: typer.Context, pairs: Sequence[tuple[str, str]] | None = None) -> Request:
    """The config that a command asks for; a command with an option `method` is for a single run.

    `pairs` are keys and values of the config, those of the context unless given.
    """
    from .. import tasks

    given: dict[str, Any] = {"methods": None, "seeds": None} | context.params
    data, setting, quick = given["data"], given["setting"], given["quick"]
    task, keys = tasks.get(given["task"]), extras(context) if pairs is None else pairs
    if given["config"] is not None and setting is not None:
        raise ConfigError("--config names the whole config: leave out --setting, or --config.")
    _refuse_options(context, [key for key, _ in keys], configs.fields_of(task.config))
    table = data is not None and data.lower().removesuffix(".gz").endswith(TABLES)
    if table and setting is None:  # the settings `text` and `image` have a network for them
        there = [word for word in ("text", "image") if word in dict(keys)]
        setting = next((word for word in there if f"table-{word}" in configs.names(task)), None)
    if given["config"] is None and not table:
        _check_data(task, data)
    name = given["config"] or task.config_name(configs.TABLE if table else str(data), setting)
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
        config = replace(
            config, methods={method: config.methods[method]}, seeds=(given["seed"] or 0,)
        )
    if "grid" in given:  # methods and seeds of a sweep are those of its grid
        return Request(task, config, folder, quick)
    if given["methods"] is not None:
        config = replace(config, methods=pick(config.methods, given["methods"]))
    if given["seeds"] is not None:
        seeds = numbers("--seeds", given["seeds"])
        config = configs.changed(config, configs.COMMAND_LINE, seeds=seeds)
    return Request(task, config, folder, quick)


def _check_data(task: Any, data: str | None) -> None:
    known = configs.data_sets(task)
    there = f"There are: {', '.join(known)}; or your own table ({', '.join(TABLES)})."
    if data is None:
        raise ConfigError(f"Say which data: --data NAME (or --config FILE). {there}")
    if data not in known and data not in configs.names(task):  # such as adult-paper
        hint = did_you_mean(data, known)
        raise ConfigError(f"There is no data set `{data}` for {task.name}{hint} {there}")


def _check_table(data: str, overrides: Sequence[str]) -> None:
    if not any(override.startswith("columns.label=") for override in overrides):
        raise ConfigError(
            f"--data {data} is a table: say which column is the label with --label COLUMN."
        )
    if not Path(data).is_file():
        raise ConfigError(f"--data: there is no file {data}.")


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
            raise ConfigError(f"`{option}` needs no value here, or stands twice.")
        if close := difflib.get_close_matches(option, known, n=1, cutoff=0.8):
            raise ConfigError(f"There is no option `{option}`; did you mean `{close[0]}`?")


def pick(methods: Mapping[str, T], names: str) -> dict[str, T]:
    """Those of `a,b,c`, in that order."""
    for name in _split(names):
        if name not in methods:
            hint = did_you_mean(name, methods)
            raise ConfigError(f"There is no method `{name}`{hint} There are: {', '.join(methods)}.")
    return {name: methods[name] for name in _split(names)}


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(option: str, text: str) -> tuple[int, ...]:
    """`0,1,2` as numbers."""
    try:
        return tuple(int(part) for part in _split(text))
    except ValueError:
        raise ConfigError(
            f"`{option}` must be whole numbers such as 0,1,2 but is: {text}"
        ) from None


def fleets(task: Any, device: str | None, given: Mapping[str, Any]) -> Any:
    """`fleets` of `compare.execute` for a sweep; None where the runs are trained one by one.

    `device` is that of fleets, None where it is a key of the config.
    """
    reasons = {
        f"the task {task.name} cannot train runs together": not task.fleets,
        "a fleet has no curves for --tensorboard": given["tensorboard"],
        "--no-fleet was given": given["fleet"] is False,
    }
    reason = next((text for text, applies in reasons.items() if applies), None)
    for option, value in (
        ("--fleet", given["fleet"]), ("--chunk", given["chunk"]), ("--device", device)
    ):  # fmt: skip
        if reason is not None and value:
            raise ConfigError(f"{option} is for fleets of runs, but {reason}.")
    if device not in (None, "auto", "cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu or cuda but is: {device}.")
    if reason is not None:
        return None
    from ..run.fleets import Fleets

    return Fleets(device or "auto", given["chunk"])
