"""Options that several commands share, keys of the config as options, and their help."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from .. import config as configs
from ..config import ConfigError, did_you_mean

T = TypeVar("T")

INTERRUPTED = 130  # exit code
COLUMNS = ("label", "group", "overlapping", "text", "image", "features", "split", "files")
"""Keys of `columns`, which are options without the prefix; those of lists take commas."""
LISTS = ("group", "overlapping", "features")
TABLES = (".csv", ".tsv", ".parquet")


# --- options and their help -----------------------------------------------------------------------


class _Option(click.Option):
    """An option whose help names what the config files of the task have."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        return record and (record[0], record[1].format(**_lists(_named_task(ctx))))


class Command(click.Command):
    """A command that takes any key of the config, and lists those of a task in its help."""

    ignore_unknown_options = allow_extra_args = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["words"] = list(args)  # `--help` comes before any of them is understood
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if (task := _named_task(ctx)) is not None:
            from .. import tasks

            with formatter.section(f"Keys of {task}"):
                formatter.write_dl(list(_keys(tasks.get(task).config)), col_max=34)


def _named_task(ctx: click.Context) -> str | None:
    words = ctx.meta.get("words", ())
    return next((word for word in words if word in _tasks() or ":" in word), None)


def _tasks() -> list[str]:
    return sorted(folder.name for folder in configs.CONFIGS.iterdir() if folder.is_dir())


@functools.cache
def _lists(task: str | None) -> dict[str, str]:
    """`"adult, compas"`: data sets, settings and grids of a task, or those of each."""
    found: dict[str, list[str]] = {"data": [], "settings": [], "grids": []}
    for name in _tasks() if task is None else [task]:
        folder = configs.CONFIGS / name
        if ":" in name:  # only a task that is not built in must be imported for its folder
            from .. import tasks

            folder = configs.folder(tasks.get(name))
        files = {k: v for k, v in configs.settings_in(folder).items() if k != configs.TABLE}
        grids = [
            grid
            for name, variants in configs.settings_in(folder / "grids").items()
            for grid in [f"{name}-{variant}" for variant in variants] or [name]
        ]
        settings = sorted({name for names in files.values() for name in names})
        for kind, names in (("data", files), ("settings", settings), ("grids", grids)):
            found[kind].append((f"{name}: " if task is None else "") + ", ".join(names))
    return {kind: "; ".join(parts) for kind, parts in found.items()}


_KINDS = {int: "N", float: "X", str: "TEXT", bool: "true|false", tuple: "LIST", dict: "MAPPING"}


def _keys(cls: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Keys of a config as `--epochs N`, with their meanings; those of a part after its name."""
    hints, texts = typing.get_type_hints(cls), _meanings(cls)
    for name in configs.fields_of(cls):
        if name in ("data", "columns", "seeds", "methods"):  # which are options of their own
            continue
        kind = hints[name]
        if isinstance(kind, types.UnionType):
            kind = next(part for part in typing.get_args(kind) if part is not types.NoneType)
        if dataclasses.is_dataclass(kind):
            yield from _keys(kind, f"{prefix}{name}.")
            continue
        words = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
        metavar = "|".join(map(str, words)) or _KINDS.get(typing.get_origin(kind) or kind, "VALUE")
        yield f"--{prefix}{name} {metavar}", texts.get(name, "")


def _meanings(cls: type) -> dict[str, str]:
    """What a class and its bases say of their fields, in `Args` or in a comment on their line."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        told = (inspect.getdoc(base) or "").partition("Args:")[2]
        for name, text in re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", told, re.MULTILINE):
            found[name] = " ".join(text.split())
        source = inspect.getsource(base) if dataclasses.is_dataclass(base) else ""
        found |= re.findall(r"^    (\w+): .*?  # (.+)$", source, re.MULTILINE)
    return found


def split(text: str) -> list[str]:
    """`a, b` as a list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, split(text)))
    except ValueError:
        raise ConfigError(f"`--seeds` must be whole numbers such as 0,1,2 but is: {text}") from None


PATH = click.Path(path_type=Path)
_NUMBER = click.IntRange(min=1)
_OPTIONS: list[click.Parameter] = [
    click.Argument(["task"]),
    _Option(["--data"], metavar="NAME",
            help="The data set ({data}); or your own table, with --label."),
    _Option(["--method"], metavar="NAME", help="The method; the first of the config unless given."),
    _Option(["--seed"], metavar="N", type=click.IntRange(min=0),
            help="Seed of weights and batches; 0 unless given."),
    _Option(["--grid"], metavar="NAME",
            help="Settings to try ({grids}); or a YAML file; or --grid.METHOD.KEY '[0.1, 0.01]'."),
    _Option(["--limit"], metavar="N", type=click.IntRange(min=0),
             help="At most N settings of each method; 0: the whole grid."),
    _Option(["--methods"], metavar="A,B,..", type=split, help="Train only these methods."),
    _Option(["--seeds"], metavar="0,1,..", type=_seeds,
            help="One run of each method per seed; unless given, the seeds of the config or grid."),
    _Option(["--setting"], metavar="NAME", help="A variant of the experiment ({settings})."),
    _Option(["--config"], metavar="FILE", help="Your own config file, instead of --data."),
    _Option(["--quick"], is_flag=True, help="Run a fast version of the experiment."),
    _Option(["--out"], metavar="FOLDER", type=PATH,
            help="Folder of the runs; runs/... unless given."),
    _Option(["--resume"], is_flag=True, help="Continue the runs in the folder."),
    _Option(["--overwrite"], is_flag=True, help="Delete the runs in the folder first."),
    _Option(["--workers"], metavar="N", type=_NUMBER,
            help="Number of processes; one per core, or one on a GPU, unless given."),
    _Option(["--ray"], metavar="ADDRESS",
            help="Train on the Ray cluster at this address; auto finds it on this machine."),
    _Option(["--fleet/--no-fleet"], default=None,
            help="Train runs together where the task supports it, or each by itself."),
    _Option(["--device"], type=click.Choice(["auto", "cpu", "cuda"]),
            help="Where to train; auto unless given."),
    _Option(["--chunk"], metavar="N", type=_NUMBER,
            help="At most N runs in a fleet; as many as fit unless given."),
    _Option(["--data-folder"], metavar="FOLDER", type=PATH,
            help="Look for data here first; like FCCO_DATA."),
    _Option(["--wide"], is_flag=True, help="Show all headline figures in the table."),
    _Option(["--json", "as_json"], is_flag=True, help="Print the table as JSON on the last line."),
    _Option(["--quiet"], is_flag=True, help="Show neither progress nor table."),
]  # fmt: skip


def options(names: str) -> list[click.Parameter]:
    """Those that a command shares with others, in its own order."""
    known = {each.name: each for each in _OPTIONS}
    return [known[name] for name in names.split()]


# --- what they ask for ----------------------------------------------------------------------------


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


def extras(context: click.Context) -> list[tuple[str, str]]:
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


def resolve(context: click.Context, pairs: Sequence[tuple[str, str]] | None = None) -> Request:
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
        pick(methods, [method])
    overrides = list(_overrides(task, keys, method))
    if table and given["config"] is None:
        if not any(override.startswith("columns.label=") for override in overrides):
            raise ConfigError(
                f"--data {data} is a table: say which column is the label with --label COLUMN."
            )
        if not Path(str(data)).is_file():
            raise ConfigError(f"--data: there is no file {data}.")
    if table or (data is not None and given["config"] is not None):
        overrides.append(f"data={json.dumps(data)}")
    config = configs.load(task, name, quick=quick, overrides=overrides)
    if method is not None:
        one = {method: config.methods[method]}
        config = replace(config, methods=one, seeds=(given["seed"] or 0,))
    if "grid" not in given:  # methods and seeds of a sweep are those of its grid
        if given["methods"] is not None:
            config = replace(config, methods=pick(config.methods, given["methods"]))
        if given["seeds"] is not None:
            config = configs.changed(config, configs.COMMAND_LINE, seeds=given["seeds"])
    return Request(task, config, folder, quick)


def _check_data(task: Any, data: str | None) -> None:
    known = configs.data_sets(task)
    there = f"There are: {', '.join(known)}; or your own table ({', '.join(TABLES)})."
    if data is None:
        raise ConfigError(f"Say which data: --data NAME (or --config FILE). {there}")
    if data not in known and data not in configs.names(task):  # such as adult-paper
        hint = did_you_mean(data, known)
        raise ConfigError(f"There is no data set `{data}` for {task.name}{hint} {there}")


def _overrides(task: Any, keys: Sequence[tuple[str, str]], method: str | None) -> Iterator[str]:
    """`key=value` each: `label` is `columns.label`, `lr` of one method is `methods.NAME.lr`."""
    from ..task import Method

    fields = configs.fields_of(task.config)
    lists: dict[str, list[str]] = {}
    for key, value in keys:
        first, dot, rest = key.partition(".")
        word = first.replace("-", "_")
        if key in LISTS and word not in fields:  # may be given several times
            lists[key] = lists.get(key, []) + split(value)
            yield f"columns.{key}={json.dumps(lists[key])}"
        elif key in COLUMNS and word not in fields:  # names of columns are texts
            yield f"columns.{key}={json.dumps(value)}"
        elif method is not None and word in configs.fields_of(Method) and word not in fields:
            yield f"methods.{method}.{word}{dot}{rest}={value}"
        else:
            yield f"{key}={value}"


def _refuse_options(context: click.Context, keys: Sequence[str], fields: Sequence[str]) -> None:
    """An option with a typing error is not a key of the config."""
    there = [name for each in context.command.params for name in each.opts if name[:2] == "--"]
    known = [*there, *(f"--{name}" for name in COLUMNS)]
    for key in keys:
        option = f"--{key}"
        if "." in key or key.replace("-", "_") in fields or key in COLUMNS:
            continue
        if option in there:
            raise ConfigError(f"`{option}` needs no value here, or stands twice.")
        if close := difflib.get_close_matches(option, known, n=1, cutoff=0.8):
            raise ConfigError(f"There is no option `{option}`; did you mean `{close[0]}`?")


def pick(methods: Mapping[str, T], names: Sequence[str]) -> dict[str, T]:
    """Those with these names, in that order."""
    for name in names:
        if name not in methods:
            hint = did_you_mean(name, methods)
            raise ConfigError(f"There is no method `{name}`{hint} There are: {', '.join(methods)}.")
    return {name: methods[name] for name in names}


def fleets(task: Any, device: str | None, given: Mapping[str, Any]) -> Any:
    """`fleets` of `compare.execute` for a sweep; None where the runs are trained one by one.

    `device` is that of fleets, None where it is a key of the config.
    """
    from ..run.fleets import Fleets

    reasons = {
        f"the task {task.name} cannot train runs together": not task.fleets,
        "--no-fleet was given": given["fleet"] is False,
    }
    reason = next((text for text, applies in reasons.items() if applies), None)
    asked = {"--fleet": given["fleet"], "--chunk": given["chunk"], "--device": device}
    for option in (name for name, value in asked.items() if value and reason is not None):
        raise ConfigError(f"{option} is for fleets of runs, but {reason}.")
    return None if reason is not None else Fleets(device or "auto", given["chunk"])
