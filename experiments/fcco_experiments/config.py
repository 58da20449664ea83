"""Configs: YAML files and overrides, turned into the typed dataclass of a task.

A file may have two keys that are no fields: `extends: name` takes another file of the same folder
(or of the package) as the base, and `quick: {...}` is put on top for a fast version. Mappings are
merged key by key, everything else is replaced. `null` for a method removes it.

Layers, later ones win: the extended file, the file, its `quick` part, the command line.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from . import yaml_text
from .task import Experiment, Task
from .validate import build, did_you_mean
from .yaml_text import ConfigError, Node

__all__ = [
    "ConfigError",
    "changed",
    "check",
    "dump",
    "fields_of",
    "from_plain",
    "load",
    "names",
    "plain",
    "read",
]

T = TypeVar("T")
COMMAND_LINE = "command line"


class _NotFound(ConfigError):
    """There is no such file."""


def load(
    task: Task, name: str | Path, *, quick: bool = False, overrides: Iterable[str] = ()
) -> Any:
    """The config `name` of a task.

    Args:
        task: whose dataclass it becomes.
        name: of a config in the package, or the path of a YAML file.
        quick: whether to put the part `quick` on top.
        overrides: `"a.b.c=value"` each, the value written as YAML.
    """
    node = read(task, name, quick=quick)
    problems: list[str] = []
    for override in overrides:
        key, equals, value = override.partition("=")
        try:
            if not equals:
                raise ConfigError(f"{COMMAND_LINE}: `{override}` is not of the form key=value.")
            node = _override(node, key, value, fields_of(task.config))
        except ConfigError as error:
            problems += error.problems
    try:
        config = build(task.config, node)
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from None
    problems += [f"{node.place(path)}: {text}" for path, text in check(task, config)]
    if problems:
        raise ConfigError(*problems)
    return config


def check(task: Task, config: Any) -> list[tuple[tuple[str, ...], str]]:
    """What a task finds wrong in a config that types cannot say: where, and why."""
    return [(tuple(path), text) for path, text in task.check(config)]


def changed(config: T, source: str, **values: Any) -> T:
    """A config with other values; what it refuses is a `ConfigError`.

    Args:
        config: stays as it is.
        source: of the values, for errors.
        values: by field.
    """
    try:
        return dataclasses.replace(config, **values)  # type: ignore[type-var]
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error


def names(task: Task) -> tuple[str, ...]:
    """The configs of a task in the package."""
    folder = _folder(task)
    if not folder.is_dir():
        return ()
    files = (each.name for each in folder.iterdir() if each.is_file())
    return tuple(sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml")))


def read(task: Task, name: str | Path, *, quick: bool = False) -> Node:
    """A file with those it extends, as plain values with their places."""
    node = _extended(task, name, None, ())
    value = dict(node.value)
    on_top = value.pop("quick", None)
    node = Node(value, node.where)
    if on_top is not None and not isinstance(on_top.value, dict):
        raise ConfigError(f"{on_top.where}: `quick` must be a mapping of keys to values.")
    return _merge(node, on_top) if quick and on_top is not None else node


def find(task: Task, kind: str, name: str | Path, beside: Any = None) -> tuple[Any, str]:
    """A YAML file and what to call it: a path, beside another file, or in the package."""
    if isinstance(name, Path) or name.endswith((".yaml", ".yml")) or "/" in name or "\\" in name:
        path = Path(name)
        if not path.is_file():
            raise _NotFound(f"There is no {kind} file {path}.")
        return path, str(path)
    places = [each for each in (beside, _folder(task, kind)) if each is not None]
    for folder in places:
        if (file := folder / f"{name}.yaml").is_file():
            return file, str(file) if isinstance(file, Path) and folder is beside else file.name
    there = sorted(
        file.name.removesuffix(".yaml")
        for folder in places
        if folder.is_dir()
        for file in folder.iterdir()
        if file.name.endswith(".yaml")
    )
    listed = f" There are: {', '.join(there)}." if there else ""
    text = f"The task {task.name} has no {kind} `{name}`{did_you_mean(str(name), there)}{listed}"
    raise _NotFound(f"{text} Or give the path of a YAML file.")


def read_mapping(file: Any, called: str) -> Node:
    """A YAML file that must hold a mapping.

    Args:
        file: of the package, or a path.
        called: its name in errors.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{called}: this is not a text file in UTF-8: {error}.") from error
    except OSError as error:
        raise ConfigError(f"{called}: cannot be read: {error.strerror}.") from error
    node = yaml_text.parse(text, called)
    if not isinstance(node.value, dict):
        raise ConfigError(f"{called}: must be a mapping of keys to values.")
    return Node(node.value, called)


def _folder(task: Task, kind: str = "config") -> Any:
    """Where a task keeps its files: in the package, unless it has a folder `configs` of its own."""
    own = task.configs
    package = importlib.resources.files("fcco_experiments") / "configs" / task.name
    folder = package if own is None else Path(own)
    return folder / "grids" if kind == "grid" else folder


def _extended(task: Task, name: str | Path, beside: Any, above: tuple[str, ...]) -> Node:
    file, called = find(task, "config", name, beside)
    if called in above:
        raise ConfigError(
            f"{called}: the files extend each other: {' -> '.join((*above, called))}."
        )
    node = read_mapping(file, called)
    value = dict(node.value)
    base = value.pop("extends", None)
    own = Node(value, node.where)
    if base is None:
        return own
    folder = file.parent if isinstance(file, Path) else beside
    try:
        return _merge(_extended(task, str(base.value), folder, (*above, called)), own)
    except _NotFound as error:
        raise ConfigError(f"{base.where}: `extends`: {error}") from None


def _merge(base: Node, new: Node, path: tuple[str, ...] = ()) -> Node:
    if not (isinstance(base.value, dict) and isinstance(new.value, dict)):
        return new
    value = dict(base.value)
    for key, node in new.value.items():
        here = (*path, key)
        if node.value is None and path in (("methods",), ("quick", "methods")):
            # In `quick` the removal must last until quick is put on top.
            value[key] = node if path[0] == "quick" else None
        else:
            value[key] = _merge(value[key], node, here) if key in value else node
    # A mapping that is changed is wrong where it was changed; the whole is that of its file.
    where = base.where if not path and new.where == COMMAND_LINE else new.where
    return Node({key: node for key, node in value.items() if node is not None}, where)


def _override(node: Node, key: str, text: str, fields: tuple[str, ...]) -> Node:
    """Put `key=text` of the command line on top."""
    try:
        value = yaml_text.parse(text, COMMAND_LINE, lines=False)
    except ConfigError as error:
        raise ConfigError(f"{COMMAND_LINE}: `{key}={text}`: {error}") from None
    path = _path(node, key.split("."), fields)
    methods = node.value.get("methods")
    there = list(methods.value) if methods is not None and isinstance(methods.value, dict) else []
    if path[0] == "methods" and len(path) > 2 and path[1] not in there:
        hint = did_you_mean(path[1], there)
        raise ConfigError(
            f"{COMMAND_LINE}: `{key}`: there is no method `{path[1]}`{hint} "
            f"There are: {', '.join(there)}."
        )
    for part in reversed(path):
        value = Node({part: value}, COMMAND_LINE)
    return _merge(node, value)


def _path(node: Node, parts: list[str], fields: tuple[str, ...]) -> list[str]:
    """The keys of a dotted name; a key that is there may have dots itself."""
    if parts[0] not in fields and parts[0].replace("-", "_") in fields:
        parts = [parts[0].replace("-", "_"), *parts[1:]]
    path: list[str] = []
    while parts:
        inside = node.value if isinstance(node.value, dict) else {}
        length = next((n for n in range(len(parts), 1, -1) if ".".join(parts[:n]) in inside), 1)
        path.append(".".join(parts[:length]))
        node = inside.get(path[-1], Node(None, ""))
        parts = parts[length:]
    return path


def fields_of(kind: type) -> tuple[str, ...]:
    """The keys of a config."""
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


def plain(value: Any) -> Any:
    """Dataclasses, tuples and paths as what JSON and YAML know."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in fields_of(type(value))}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def dump(config: Experiment) -> str:
    """A config as YAML; reading it gives an equal one."""
    return yaml_text.dump(plain(config))


def from_plain(kind: type[T], values: Mapping[str, Any], source: str) -> T:
    """The typed config of plain values, such as those of a saved file."""
    return build(kind, _with_place(dict(values), source))


def _with_place(value: Any, source: str) -> Node:
    if isinstance(value, dict):
        return Node({key: _with_place(each, source) for key, each in value.items()}, source)
    return Node(value, source)
