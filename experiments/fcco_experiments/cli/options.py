"""Options that several commands share, and keys of the config as options."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from .errors import fail, require

__all__ = ["Asked", "extras", "needs", "numbers", "pick", "resolve", "runner", "use_data"]

T = TypeVar("T")

FREE = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of commands that take any key of the config."""


def _task_first(name: str) -> str:
    if name.startswith("-"):
        raise fail(f"Name the task first: fcco COMMAND TASK {name} ...")
    return name


TaskName = Annotated[
    str,
    typer.Argument(help="The experiment: fairness, group-dro, continual.", callback=_task_first),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="The data set. For fairness: adult, compas, synthetic. For group-dro: celeba, "
        "sentiment, amazon, camelyon17, grouped-synthetic. For continual: weather, bdd100k-subset, "
        "bdd100k, scenes-synthetic."
    ),
]
SettingName = Annotated[
    str | None,
    typer.Option(
        "--setting",
        help="A variant of the experiment. For fairness: meaningful (the usual), paper. For "
        "group-dro: train, finetune, scratch, paper, and those of the ablations. For continual: "
        "rho, finetune, overcast (bdd100k).",
    ),
]
ConfigName = Annotated[
    str | None, typer.Option("--config", help="A config by name, or the path of a YAML file.")
]
Quick = Annotated[bool, typer.Option("--quick", help="The fast version of the experiment.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the runs; runs/... unless given.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the runs in the folder.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete the runs in the folder.")]
DataFolder = Annotated[
    Path | None,
    typer.Option("--data-folder", help="Look for the data here first; the same as FCCO_DATA."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the table as one line of JSON, the last on stdout.")
]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Log for TensorBoard too.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no table.")]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Processes; unless given, as many as there are cores, or 1 on a GPU."),
]
Fleet = Annotated[
    bool | None,
    typer.Option(
        "--fleet/--no-fleet",
        help="Train runs of one kind together as one program; by itself where the task can "
        "(fairness). Or each run alone, with curves.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="auto, cpu or cuda: where to train. Unless given, a GPU if there is one."),
]
Chunk = Annotated[
    int | None,
    typer.Option(min=1, help="Runs of a fleet at most; unless given, as many as fit."),
]
Methods = Annotated[str | None, typer.Option(help="Only these methods, as a,b,c.")]
Seeds = Annotated[str | None, typer.Option(help="Seeds, as 0,1,2.")]


@dataclass(frozen=True)
class Asked:
    """What a command is about.

    Attributes:
        task: the experiment.
        config: resolved.
        config_name: for folders.
        quick: whether it is the fast version.
    """

    task: Any
    config: Any
    config_name: str
    quick: bool

    def folder(self, out: Path | None, *more: str) -> Path:
        """Where runs go."""
        parts = [self.task.name, self.config_name, *(["quick"] if self.quick else []), *more]
        return Path("runs") / "-".join(parts) if out is None else out


def extras(context: typer.Context) -> list[tuple[str, str]]:
    """What is left on the command line, as pairs: `--key value`, `--key=value`, `key=value`."""
    found: list[tuple[str, str]] = []
    words = iter(context.args)
    word = next(words, None)
    while word is not None:
        following = next(words, None)
        key, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and not equals:
            if following is None or following.startswith("--"):
                value = "true"  # a flag
            else:
                value, following = following, next(words, None)
        elif not equals or not key or key.startswith("-"):
            raise fail(f"`{word}` is not understood; keys of the config are --key value.")
        found.append((key, value))
        word = following
    return found


def resolve(
    context: typer.Context,
    task_name: str,
    data: str | None,
    setting: str | None,
    config_name: str | None,
    quick: bool,
    *,
    methods: str | None = None,
    seeds: str | None = None,
    method: str | None = None,
    pairs: Sequence[tuple[str, str]] | None = None,
) -> Asked:
    """The config that a command line asks for.

    Args:
        context: holds the keys that are no options.
        task_name: the experiment.
        data: the data set.
        setting: a variant.
        config_name: a config by name or path; that of the data set unless given.
        quick: the fast version.
        methods: names, with commas.
        seeds: numbers, with commas.
        method: the only method, to which short keys such as `lr` refer.
        pairs: keys and values, those of the context unless given.
    """
    from .. import config as configs
    from .. import tasks

    task = tasks.get(task_name)
    if config_name is None and data is None:
        there = ", ".join(configs.names(task))
        raise fail(f"Say which data: --data NAME (or --config FILE). Configs: {there or 'none'}.")
    if config_name is not None and setting is not None:
        raise fail("--config names the whole config: leave out --setting, or --config.")
    name = config_name or _name_of(task, data, setting)
    keys = list(extras(context) if pairs is None else pairs)
    if data is not None and config_name is not None:
        keys.append(("data", data))
    _refuse_options(context, [key for key, _ in keys], configs.fields_of(task.config))
    overrides = [f"{key}={value}" for key, value in _short_forms(task, keys, method)]
    config = configs.load(task, name, quick=quick, overrides=overrides)
    if methods is not None:
        config = replace(config, methods=pick(config.methods, methods))
    if seeds is not None:
        config = configs.changed(config, configs.COMMAND_LINE, seeds=numbers("--seeds", seeds))
    return Asked(task, config, Path(name).stem, quick)


def _name_of(task: Any, data: str | None, setting: str | None) -> str:
    try:
        return task.config_name(data, setting)
    except (ValueError, LookupError) as error:
        raise fail(str(error)) from error


def _short_forms(
    task: Any, keys: Sequence[tuple[str, str]], method: str | None
) -> Iterator[tuple[str, str]]:
    """`lr` as `methods.NAME.lr`, where the config has no such key and there is one method."""
    from .. import config as configs
    from ..task import Method

    for key, value in keys:
        first, dot, rest = key.partition(".")
        word = first.replace("-", "_")
        own = word not in configs.fields_of(task.config) and word in configs.fields_of(Method)
        if method is not None and own:
            yield f"methods.{method}.{word}{dot}{rest}", value
        else:
            yield key, value


def _refuse_options(context: typer.Context, keys: Sequence[str], fields: Sequence[str]) -> None:
    """An option with a typing error is not a key of the config."""
    import difflib

    options = [name for each in context.command.params for name in each.opts if name[:2] == "--"]
    for key in keys:
        option = f"--{key}"
        if "." in key or key.replace("-", "_") in fields:
            continue
        close = difflib.get_close_matches(option, options, n=1, cutoff=0.8)
        if option in options:
            raise fail(f"`{option}` needs no value here, or stands twice.")
        if close:
            raise fail(f"There is no option `{option}`; did you mean `{close[0]}`?")


def pick(methods: Mapping[str, T], names: str) -> dict[str, T]:
    """Those of `a,b,c`, in that order."""
    from ..config import did_you_mean

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


def runner(
    task: Any, fleet: bool | None, device: str | None, chunk: int | None, tensorboard: bool
) -> Any:
    """What does the runs of a sweep; None for one process per run, as always.

    Args:
        task: whether it can train many runs at once.
        fleet: what the user wants; None leaves it to the task.
        device: of fleets; None where it is a key of the config.
        chunk: runs of a fleet at most.
        tensorboard: a fleet has no curves to log.
    """
    able = task.fleets
    if fleet and not able:
        raise fail(f"--fleet: the task {task.name} cannot train runs together; leave it out.")
    if fleet and tensorboard:
        raise fail("--fleet: a fleet has no curves for --tensorboard; leave one of them out.")
    if device not in (None, "auto", "cpu", "cuda"):
        raise fail(f"--device must be auto, cpu or cuda but is: {device}.")
    if not (able and not tensorboard if fleet is None else fleet):
        for option, given in (("--chunk", chunk), ("--device", device)):
            if given is not None:
                raise fail(f"{option} is for fleets, but these runs are trained one by one.")
        return None
    from .. import fleets

    return functools.partial(fleets.run, device=device or "auto", chunk=chunk)


def needs(tensorboard: bool) -> None:
    """What a training with a report needs, checked before it starts."""
    require("jinja2", "matplotlib", "scipy")
    if tensorboard:
        require("tensorboard", extra="tensorboard")


def use_data(folder: Path | None) -> None:
    """Let this process and its workers look for data in a folder first."""
    if folder is None:
        return
    if not folder.is_dir():
        raise fail(f"--data-folder: there is no folder {folder}.")
    os.environ["FCCO_DATA"] = str(folder.resolve())
