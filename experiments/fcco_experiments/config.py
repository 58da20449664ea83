"""Configs: YAML files and overrides, turned into the typed dataclass of a task.

A file may have three keys that are no fields:

- `extends: name` takes another file of the same folder (or of the package) as the base;
- `settings: {name: {...}}` holds variants of the experiment, one of which is put on top: `default`
  unless another one is named. A section may have an `extends` of its own: another section of the
  file, or a file in the place of the one that the whole file extends;
- `quick: {...}` is put on top for a fast version.

Mappings are merged key by key, everything else is replaced. `null` for a method removes it. A
method with a list in the place of a value stands for one method per entry: `sonex: {lr: [0.1, 0.2],
...}` are the methods `sonex-0.1` and `sonex-0.2`; with a mapping, its keys end the names.

Layers, later ones win: the extended file, the file, its setting, `quick`, the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.resources
import io
import itertools
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .task import Experiment, Method, Task

__all__ = [
    "COMMAND_LINE",
    "ConfigError",
    "Node",
    "build",
    "changed",
    "did_you_mean",
    "dump",
    "fields_of",
    "from_plain",
    "load",
    "names",
    "parse",
    "plain",
    "problems_of",
    "read",
]

T = TypeVar("T")
Keys = tuple[Any, ...]
COMMAND_LINE = "command line"
DEFAULT = "default"
BYTES, NODES, DEPTH, DIGITS = 2**20, 100_000, 40, 100
"""The most that a YAML file may have: bytes, values with aliases written out, depth, digits."""


class ConfigError(Exception):
    """A config that cannot be used, with everything that is wrong in it.

    Args:
        problems: one sentence each.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class _NotFound(ConfigError):
    """There is no such file."""


@dataclass(frozen=True)
class Node:
    """A value, and where it was written; a mapping holds nodes.

    Args:
        value: a mapping of nodes, or any plain value.
        where: a file with its line, or "command line".
        layer: number of the layer that wrote it; later layers win.
    """

    value: Any
    where: str
    layer: int = 0

    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return self.value

    def at(self, path: Keys) -> Node | None:
        """What lies at a path, None where nothing was written."""
        node: Node | None = self
        for key in path:
            node = node.value.get(key) if node and isinstance(node.value, dict) else None
        return node

    def place(self, path: Keys) -> str:
        """Where a key was written; that of the nearest mapping for one that was not."""
        ends = (self.at(path[:end]) for end in range(len(path), -1, -1))
        return next(node.where for node in ends if node is not None)


# --- YAML ----------------------------------------------------------------------------------------


def parse(text: str, source: str, *, lines: bool = True) -> Node:
    """Read YAML 1.2: `1e-3` is a number, `no` and `2020-01-01` are text, `010` is ten.

    Keys that come twice are refused, and so are texts that would fill the memory: see `BYTES`.

    Args:
        text: what to read.
        source: the file, for errors.
        lines: whether the places have line numbers.

    Example:
        >>> parse("lr: 1e-3", "mine.yaml").value["lr"]
        Node(value=0.001, where='mine.yaml, line 1', layer=0)
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    if len(text) > BYTES:
        raise ConfigError(f"{source}: a YAML file may have at most {BYTES:,} bytes.")
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise ConfigError(f"{source}, line {line}: this is not a text file: it has a NUL byte.")
    yaml = YAML(typ="safe", pure=True)
    yaml.max_depth = DEPTH
    try:
        root = yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{source}, line {mark.line + 1}" if mark is not None and lines else source
        raise ConfigError(f"{place}: this is not valid YAML: {error.problem}.") from error
    except (YAMLError, ValueError) as error:  # a ValueError: `%YAML 1.x`
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"{source}: this is not valid YAML: {reason}.") from error
    if root is None:
        return Node(None, source)
    reader = _Reader(source, lines)
    return Node(reader.value(root, ()), reader.where(root))


class _Reader:
    """Turns the nodes of ruamel.yaml into ours, with limits on what aliases write out.

    Args:
        source: the file, for errors.
        lines: whether the places have line numbers.
    """

    _INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
    _FLOAT = re.compile(
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    )

    def __init__(self, source: str, lines: bool) -> None:
        self.source, self.lines, self.count = source, lines, 0

    def where(self, node: Any) -> str:
        """The place of a node."""
        return f"{self.source}, line {node.start_mark.line + 1}" if self.lines else self.source

    def error(self, node: Any, text: str) -> ConfigError:
        """What is wrong with a node."""
        return ConfigError(f"{self.where(node)}: this is not valid YAML: {text}.")

    def value(self, node: Any, above: tuple[Any, ...]) -> Any:
        """A mapping of nodes, a list of plain values, or a scalar.

        Args:
            node: of ruamel.yaml.
            above: the nodes that hold it.
        """
        from ruamel.yaml.nodes import MappingNode, SequenceNode

        self.count += 1
        if any(node is outer for outer in above):
            raise self.error(node, "an alias refers to a value that holds the alias itself")
        if self.count > NODES:
            text = f"with its aliases written out it has more than {NODES:,} values"
            raise self.error(node, text)
        if len(above) > DEPTH:
            raise self.error(node, f"it is nested more than {DEPTH} deep")
        if isinstance(node, SequenceNode):
            values = (self.value(child, (*above, node)) for child in node.value)
            return [Node(value, "").plain() for value in values]
        if isinstance(node, MappingNode):
            return self.mapping(node, above)
        return self.scalar(node)

    def mapping(self, node: Any, above: tuple[Any, ...]) -> dict[str, Node]:
        """Its nodes by key; those of `<<` come first and are replaced by its own."""
        from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

        merged: dict[str, Node] = {}
        own: dict[str, Node] = {}
        for key, content in node.value:
            if not isinstance(key, ScalarNode):
                raise self.error(key, "a key must be a word or a number")
            name = str(self.scalar(key))
            if name in own:
                raise self.error(key, f"the key `{name}` is there twice")
            if key.tag != "tag:yaml.org,2002:merge":  # a quoted "<<" is a word
                own[name] = Node(self.value(content, (*above, node)), self.where(key))
                continue
            bases = content.value if isinstance(content, SequenceNode) else [content]
            if not all(isinstance(base, MappingNode) for base in bases):
                raise self.error(content, "`<<` must be a mapping or a list of mappings")
            for base in reversed(bases):
                merged |= self.value(base, (*above, node))
        return merged | own

    def scalar(self, node: Any) -> Any:
        """A number, a truth value, null or text."""
        text, kind = node.value, str(node.tag).removeprefix("tag:yaml.org,2002:")
        if "\0" in text:
            raise self.error(node, "text must not have a NUL byte")
        integer = kind == "int" and self._INTEGER.fullmatch(text)
        if integer or (kind == "float" and self._FLOAT.fullmatch(text)):
            if len(text) > DIGITS:
                raise self.error(node, f"a number may have at most {DIGITS} digits")
            if integer:
                return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind in ("str", "int", "float", "timestamp", "merge", "value", "yaml"):
            return text
        raise self.error(node, f"the tag {node.tag} is not known")


def dump(value: Any) -> str:
    """A config or plain values as YAML, keys in their order; reading it gives an equal one.

    Example:
        >>> dump({"lr": 1e-5, "seeds": [0, 1], "note": "1e-3"}).splitlines()
        ['lr: 1.0e-05', 'seeds: [0, 1]', "note: '1e-3'"]
    """
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _representer()
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.default_flow_style, yaml.allow_unicode, yaml.width = False, True, 100
    stream = io.StringIO()
    yaml.dump(plain(value), stream)
    return stream.getvalue().removesuffix("...\n")


@functools.cache
def _representer() -> Any:
    from ruamel.yaml.representer import SafeRepresenter

    class Representer(SafeRepresenter):
        """Lists on one line, and what neither YAML 1.1 nor 1.2 reads as something else."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

        def represent_list(self, data: Any) -> Any:
            flat = not any(isinstance(value, (dict, list)) for value in data)
            return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)

        def represent_float(self, data: Any) -> Any:
            node = super().represent_float(data)
            if "." not in node.value:
                node.value = node.value.replace("e", ".0e")
            return node

        def represent_str(self, data: Any) -> Any:
            word = re.fullmatch(
                r"(?i)y|n|yes|no|on|off|[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9]*)?", data
            )
            # Other styles fold odd white space: it would not come back.
            style = ("'" if word else None) if data.isprintable() else '"'
            return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    Representer.add_representer(list, Representer.represent_list)
    Representer.add_representer(float, Representer.represent_float)
    Representer.add_representer(str, Representer.represent_str)
    return Representer


# --- From plain values to dataclasses ------------------------------------------------------------

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list such as [1, 2]",
    "list_type": "a list such as [1, 2]",
    "dict_type": "a mapping of keys to values",
    "dataclass_type": "a mapping of keys to values",
    "none_required": "null",
}


def build(cls: type[T], node: Node) -> T:
    """The dataclass `cls` with the values of `node`; raises `ConfigError` with all mistakes."""
    from pydantic import ValidationError

    data = node.plain()
    problems = [
        f"{node.place(path)}: {text}"
        for path, text in [*_unknown_keys(cls, data), *_wrong_names(data)]
    ]
    try:
        # JSON, because its strict mode takes lists for tuples and mappings for dataclasses.
        built = _adapter(cls).validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        by_path = _by_path(error.errors(include_url=False), data)
        problems += [_problem(node, path, errors, data) for path, errors in by_path.items()]
    else:
        if not problems:
            return built
    raise ConfigError(*problems)


@functools.cache
def _adapter(cls: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def did_you_mean(word: str, allowed: Iterable[str], before: str = "") -> str:
    """`"; did you mean ..?"` when something similar is allowed."""
    close = difflib.get_close_matches(word, list(allowed), n=1)
    return f"; did you mean `{before}{close[0]}`?" if close else "."


def _dotted(path: Keys) -> str:
    """A path as one writes it on the command line."""
    return ".".join(str(part) for part in path)


def _unknown_keys(cls: Any, data: Any, path: Keys = ()) -> Iterator[tuple[Keys, str]]:
    """Keys that no dataclass has, at any depth."""
    if dataclasses.is_dataclass(cls) and isinstance(data, dict):
        allowed = fields_of(typing.cast(type, cls))
        hints = _hints(cls)  # type: ignore[arg-type]
        for key, value in data.items():
            here = (*path, key)
            if key in allowed:
                yield from _unknown_keys(hints[key], value, here)
                continue
            text = f"unknown key `{_dotted(here)}`"
            text += f"{did_you_mean(key, allowed, _dotted((*path, '')))} Allowed: "
            text += f"{', '.join(allowed)}."
            word = key.replace("-", "_")
            if issubclass(cls, Experiment) and word in fields_of(Method):  # type: ignore[arg-type]
                text += f" `{word}` is a key of each method: write --methods.NAME.{word}."
            yield here, text
        return
    origin, inner = typing.get_origin(cls), typing.get_args(cls)
    if origin in (typing.Union, types.UnionType):
        members = [member for member in inner if member is not type(None)]
        if len(members) == 1:
            yield from _unknown_keys(members[0], data, path)
    elif origin is dict and isinstance(data, dict):
        for key, value in data.items():
            yield from _unknown_keys(inner[1], value, (*path, key))
    elif origin in (list, tuple) and isinstance(data, list):
        for index, value in enumerate(data):
            yield from _unknown_keys(inner[0], value, (*path, index))


def _wrong_names(data: Any) -> Iterator[tuple[Keys, str]]:
    """Names of methods that cannot be names of folders: where, and why."""
    methods = data.get("methods") if isinstance(data, dict) else None
    for name in methods if isinstance(methods, dict) else ():
        if not re.fullmatch(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]*(@[0-9]+)?", name):
            text = "must begin with a letter, a digit or one of - _ + and hold only these and dots."
            yield ("methods", name), f"the name of the method `{name}` {text}"


def _by_path(errors: Iterable[Any], data: Any) -> dict[Keys, list[Any]]:
    """Errors of one value together: those of a union come one for each member."""
    by_path: dict[Keys, list[Any]] = {}
    for error in errors:
        path: list[Any] = []
        value: Any = data
        for key in error["loc"]:
            inside = isinstance(value, dict) and key in value
            inside |= isinstance(value, list) and isinstance(key, int) and key < len(value)
            if not inside and error["type"] != "missing":
                break
            path.append(key)
            value = value[key] if inside else None
        by_path.setdefault(tuple(path), []).append(error)
    return by_path


def _problem(node: Node, path: Keys, errors: list[Any], data: Any) -> str:
    """The errors of one value as a sentence with its place."""
    first, name = errors[0], _dotted(path)
    if first["type"] == "value_error":
        text = str(first["ctx"]["error"])
        where, notes = _blame(node, path, text)
        return f"{where}: {f'`{name}`: ' if path else ''}{text}{notes}"
    if first["type"] == "missing":
        return f"{node.place(path)}: the key `{name}` is missing."
    value = functools.reduce(lambda inner, key: inner[key], path, data)
    if first["type"] == "literal_error":
        allowed = re.findall(r"'([^']*)'", first["ctx"]["expected"])
        hint = did_you_mean(value, allowed) if isinstance(value, str) else "."
        text = f"`{name}` must be one of {', '.join(allowed)} but is: {value!r}{hint}"
    else:
        words = [_EXPECTED.get(str(error["type"]), str(error["msg"])) for error in errors]
        shown = repr(value) if len(repr(value)) <= 80 else f"{value!r:.77}..."
        text = f"`{name}` must be {' or '.join(dict.fromkeys(words))} but is: {shown}."
    return f"{node.place(path)}: {text}"


def _blame(node: Node, path: Keys, text: str) -> tuple[str, str]:
    """Where to mend what the check of a dataclass refuses, and where its other keys come from.

    Its sentence names keys as `key` or as key = value. The last layer that wrote one of them made
    the values contradict each other.
    """
    keys = dict.fromkeys(a or b for a, b in re.findall(r"`([\w.]+)`|\b(\w+) = ", text))
    paths = {key: (*path, *key.split(".")) for key in keys}
    written = {key: found for key in keys if (found := node.at(paths[key])) is not None}
    if not written:
        return node.place(path), ""
    key = max(written, key=lambda key: written[key].layer)
    where = written[key].where
    others = {other: found.where for other, found in written.items() if found.where != where}
    said = [f"`{other}` is set in {place}" for other, place in others.items()]
    return where, f" ({'; '.join(said)}.)" if said else ""


# --- Layers --------------------------------------------------------------------------------------


def load(
    task: Task,
    name: str | Path,
    *,
    setting: str | None = None,
    quick: bool = False,
    overrides: Iterable[str] = (),
) -> Any:
    """The config `name` of a task.

    Args:
        task: whose dataclass it becomes.
        name: of a config in the package (`celeba`, `celeba-beta`), or the path of a YAML file.
        setting: the section of its `settings` to put on top, for a file given by its path.
        quick: whether to put the part `quick` on top.
        overrides: `"a.b.c=value"` each, the value written as YAML.
    """
    node = read(task, name, setting=setting, quick=quick)
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
    problems += [f"{node.place(path)}: {text}" for path, text in problems_of(task, config)]
    if problems:
        raise ConfigError(*problems)
    return config


def problems_of(task: Task, config: Any) -> list[tuple[tuple[str, ...], str]]:
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


def names(task: Task, kind: str = "config") -> tuple[str, ...]:
    """The configs (or grids) of a task, settings included, such as `celeba` and `celeba-beta`."""
    return tuple(sorted(_names_in(_folder(task, kind))))


def read(
    task: Task,
    name: str | Path,
    *,
    kind: str = "config",
    setting: str | None = None,
    quick: bool = False,
) -> Node:
    """A config (or a grid) with all its layers, as plain values with their places."""
    layers = _layers(task, kind, name, setting, None, ())
    node = Node({}, layers[-1].where)
    for number, layer in enumerate(layers, 1):
        node = _merge(node, _numbered(layer, number))
    value = dict(node.value)
    on_top = value.pop("quick", None)
    node = Node(value, node.where, node.layer)
    if on_top is not None and not isinstance(on_top.value, dict):
        raise ConfigError(f"{on_top.where}: `quick` must be a mapping of keys to values.")
    if quick and on_top is not None:
        node = _merge(node, _numbered(on_top, len(layers) + 1))
    return _with_variants(node) if kind == "config" else node


def _folder(task: Task, kind: str) -> Any:
    """Where a task keeps its files: in the package, unless it has a folder `configs` of its own."""
    package = importlib.resources.files("fcco_experiments") / "configs" / task.name
    folder = package if task.configs is None else Path(task.configs)
    return folder / "grids" if kind == "grid" else folder


def _names_in(folder: Any) -> Iterator[str]:
    for file in folder.iterdir() if folder.is_dir() else ():
        stem, dot, ending = file.name.rpartition(".")
        if not (dot and ending == "yaml" and file.is_file()):
            continue
        yield stem
        for section in _sections(_read_mapping(file, file.name)):
            if section != DEFAULT:
                yield f"{stem}-{section}"


def _find(task: Task, kind: str, name: str | Path, beside: Any) -> tuple[Any, str, str | None]:
    """A YAML file, its label in errors and its setting: a path, beside a file, or a name."""
    if isinstance(name, Path) or name.endswith((".yaml", ".yml")) or "/" in name or "\\" in name:
        path = Path(name)
        if not path.is_file():
            raise _NotFound(f"There is no {kind} file {path}.")
        return path, str(path), None
    folders = [folder for folder in (beside, _folder(task, kind)) if folder is not None]
    dashes = [place.start() for place in re.finditer("-", name)]
    splits = [(name, None), *((name[:at], name[at + 1 :]) for at in reversed(dashes))]
    for (stem, section), folder in itertools.product(splits, folders):
        if not (file := folder / f"{stem}.yaml").is_file():
            continue
        label = str(file) if isinstance(file, Path) and folder is beside else file.name
        if section is None or section in _sections(_read_mapping(file, label)):
            return file, label, section
    known = sorted({known for folder in folders for known in _names_in(folder)})
    listed = f" There are: {', '.join(known)}." if known else ""
    text = f"The task {task.name} has no {kind} `{name}`{did_you_mean(name, known)}{listed}"
    raise _NotFound(f"{text} Or give the path of a YAML file.")


def _read_mapping(file: Any, label: str) -> Node:
    """A YAML file that must hold a mapping.

    Args:
        file: of the package, or a path.
        label: its name in errors.
    """
    try:
        with file.open("rb") as stream:
            text = stream.read(BYTES + 1).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{label}: this is not a text file in UTF-8: {error}.") from error
    except OSError as error:
        raise ConfigError(f"{label}: cannot be read: {error.strerror}.") from error
    node = parse(text.replace("\r\n", "\n"), label)
    if not isinstance(node.value, dict):
        raise ConfigError(f"{label}: must be a mapping of keys to values.")
    return Node(node.value, label)


def _sections(file: Node) -> dict[str, Node]:
    """The settings of a file by name."""
    settings = file.at(("settings",))
    if settings is None:
        return {}
    if not isinstance(settings.value, dict):
        raise ConfigError(f"{settings.where}: `settings` must be a mapping of names to mappings.")
    for name, section in settings.value.items():
        if not isinstance(section.value, dict):
            raise ConfigError(f"{section.where}: `settings.{name}` must be a mapping.")
    return settings.value


def _layers(
    task: Task,
    kind: str,
    name: str | Path,
    setting: str | None,
    beside: Any,
    above: tuple[str, ...],
) -> list[Node]:
    """A file and its setting, after all that they extend."""
    file, label, named = _find(task, kind, name, beside)
    whole = _read_mapping(file, label)
    sections = _sections(whole)
    setting = setting or named
    if setting is None and DEFAULT in sections:
        setting = DEFAULT
    title = label if setting in (None, DEFAULT) else f"{label} ({setting})"
    if title in above:
        chain = " -> ".join((*above, title))
        raise ConfigError(f"{label}: the files extend each other: {chain}.")
    parts = [Node({k: v for k, v in whole.value.items() if k != "settings"}, label)]
    chain: list[str] = []
    while setting is not None:
        if setting not in sections:
            there = ", ".join(sections) or "none"
            hint = did_you_mean(setting, sections)
            raise ConfigError(f"{label} has no setting `{setting}`{hint} There are: {there}.")
        if setting in chain:
            raise ConfigError(
                f"{sections[setting].where}: the settings extend each other: "
                f"{' -> '.join((*chain, setting))}."
            )
        chain.append(setting)
        section = sections[setting]
        base = section.at(("extends",))
        inner = base is not None and base.value != setting and base.value in sections
        setting = base.value if base is not None and inner else None
        kept = {k: v for k, v in section.value.items() if not (inner and k == "extends")}
        parts.insert(1, Node(kept, label))
    extends = next((e for part in reversed(parts) if (e := part.at(("extends",)))), None)
    parts = [Node({k: v for k, v in part.value.items() if k != "extends"}, label) for part in parts]
    if extends is None:
        return parts
    folder = file.parent if isinstance(file, Path) else beside
    try:
        below = _layers(task, kind, str(extends.value), None, folder, (*above, title))
    except _NotFound as error:
        raise ConfigError(f"{extends.where}: `extends`: {error}") from None
    return [*below, *parts]


def _numbered(node: Node, layer: int) -> Node:
    if not isinstance(node.value, dict):
        return Node(node.value, node.where, layer)
    value = {key: _numbered(child, layer) for key, child in node.value.items()}
    return Node(value, node.where, layer)


def _merge(base: Node, new: Node, path: tuple[str, ...] = ()) -> Node:
    """`new` on top of `base`."""
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
    kept = {key: node for key, node in value.items() if node is not None}
    return Node(kept, where, new.layer)


def _with_variants(node: Node) -> Node:
    """Methods with lists of values written out, one method for each combination."""
    methods = node.at(("methods",))
    if methods is None or not isinstance(methods.value, dict):
        return node
    value: dict[str, Node] = {}
    for name, method in methods.value.items():
        for variant, made in _variants(name, method):
            if variant in value:
                raise ConfigError(f"{method.where}: there are two methods `{variant}`.")
            value[variant] = made
    whole = Node(value, methods.where, methods.layer)
    return Node(node.value | {"methods": whole}, node.where, node.layer)


def _variants(name: str, method: Node) -> list[tuple[str, Node]]:
    choices: list[list[tuple[str, Keys, Node]]] = []
    fields = method.value if isinstance(method.value, dict) else {}
    leaves = {(key,): leaf for key, leaf in fields.items() if key != "settings"}
    settings = method.at(("settings",))
    if settings is not None and isinstance(settings.value, dict):
        leaves |= {("settings", key): leaf for key, leaf in settings.value.items()}
    for path, leaf in leaves.items():
        if isinstance(leaf.value, list):
            plain = [Node(value, leaf.where, leaf.layer) for value in leaf.value]
            choices.append([(json.dumps(n.value).strip('"'), path, n) for n in plain])
        elif isinstance(leaf.value, dict):
            choices.append([(label, path, child) for label, child in leaf.value.items()])
    if not all(choices) or any(
        isinstance(node.value, (dict, list)) for choice in choices for _, _, node in choice
    ):
        return [(name, method)]  # refused by its type
    variants = []
    for combination in itertools.product(*choices):
        made = method
        for _, path, leaf in combination:
            made = _replaced(made, path, leaf)
        variants.append(("-".join([name, *(label for label, _, _ in combination)]), made))
    return variants


def _replaced(node: Node, path: Keys, leaf: Node) -> Node:
    """A mapping with another value at a path."""
    if not path:
        return leaf
    child = _replaced(node.value[path[0]], path[1:], leaf)
    return Node(node.value | {path[0]: child}, node.where, node.layer)


def _override(node: Node, key: str, text: str, fields: tuple[str, ...]) -> Node:
    """Put `key=text` of the command line on top."""
    try:
        value = parse(text, COMMAND_LINE, lines=False)
    except ConfigError as error:
        raise ConfigError(f"{COMMAND_LINE}: `{key}={text:.80}`: {error}") from None
    path = _path(node, key.split("."), fields)
    methods = node.at(("methods",))
    known = list(methods.value) if methods is not None and isinstance(methods.value, dict) else []
    if path[0] == "methods" and len(path) > 2 and path[1] not in known:
        hint = did_you_mean(path[1], known)
        raise ConfigError(
            f"{COMMAND_LINE}: `{key}`: there is no method `{path[1]}`{hint} "
            f"There are: {', '.join(known)}."
        )
    for part in reversed(path):
        value = Node({part: value}, COMMAND_LINE)
    return _merge(node, _numbered(value, node.layer + 1))


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


# --- Plain values --------------------------------------------------------------------------------


def fields_of(cls: type) -> tuple[str, ...]:
    """The keys of a config."""
    return tuple(field.name for field in dataclasses.fields(cls) if field.init)


def plain(value: Any) -> Any:
    """Dataclasses, tuples and paths as what JSON and YAML know."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in fields_of(type(value))}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def from_plain(cls: type[T], values: Mapping[str, Any], source: str) -> T:
    """The typed config of plain values, such as those of a saved file."""
    return build(cls, _with_place(dict(values), source))


def _with_place(value: Any, source: str) -> Node:
    if isinstance(value, dict):
        return Node({key: _with_place(inner, source) for key, inner in value.items()}, source)
    return Node(value, source)
