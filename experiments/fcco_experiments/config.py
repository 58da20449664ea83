"""Configs: YAML files and overrides, turned into the typed dataclass of a task.

A file may have three keys that are no fields:

- `extends: name` takes another file of the same folder (or of the package) as the base;
- `settings: {name: {...}}` holds variants of the experiment, one of which is put on top: `default`
  unless another one is named, as `file-name`. A section may have an `extends` of its own, in the
  place of that of the whole file;
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
import io
import itertools
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter

if TYPE_CHECKING:  # the help of the command line reads configs without torch
    from .task import Task

T = TypeVar("T")
Keys = tuple[Any, ...]
COMMAND_LINE = "command line"
CONFIGS = Path(__file__).parent / "configs"
DEFAULT = "default"
TABLE = "table"  # the config for a table of the user
_TEXT = "tag:yaml.org,2002:str"
_TAGS = [
    f"tag:yaml.org,2002:{kind}"
    for kind in ["null", "bool", "int", "float", "str", "timestamp", "seq", "map"]
]


class UserError(Exception):
    """What the user can mend: the command line shows the texts alone, one in a line."""

    def __str__(self) -> str:
        return "\n".join(filter(None, self.args))


class ConfigError(UserError):
    """A config that cannot be used, with everything that is wrong in it, one sentence each."""


@dataclass(frozen=True)
class Layer:
    """Values of one source, or of several that were merged.

    Args:
        values: a mapping, or any other value that YAML knows.
        places: file and line (or "command line") of each key by its path, the one that was written
            last at the end; that of `()` is the whole source.
    """

    values: Any
    places: dict[Keys, str]

    def place(self, path: Keys) -> str:
        """Where a key was written; that of the nearest mapping for one that was not."""
        starts = (path[:end] for end in range(len(path), -1, -1))
        return next(self.places[start] for start in starts if start in self.places)

    def section(self, key: str) -> Layer:
        """The mapping at a key, empty where there is none."""
        values = self.values.get(key, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{self.place((key,))}: `{key}` must be a mapping of keys to values.")
        inside = {path[1:]: at for path, at in self.places.items() if path[:1] == (key,)}
        return Layer(values, inside | {(): self.places[()]})

    def __or__(self, new: Layer) -> Layer:
        """With another layer on top. A mapping that is changed is wrong where it was changed."""
        places = {path: at for path, at in self.places.items() if path not in new.places}
        return Layer(_merged(self.values, new.values), places | new.places)


def _merged(base: Any, new: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(new, dict)):
        return new
    return base | {k: _merged(base[k], value) if k in base else value for k, value in new.items()}


def with_value(values: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy of nested mappings with a value at a path."""
    key, *rest = path
    return {**values, key: with_value(values.get(key, {}), rest, value) if rest else value}


# --- YAML ----------------------------------------------------------------------------------------


class _Constructor(SafeConstructor):
    """Dates are texts."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


class _Representer(SafeRepresenter):
    """Texts with odd white space in double quotes: other styles fold it."""

    def represent_str(self, data: Any) -> Any:
        return self.represent_scalar(_TEXT, data, style=None if data.isprintable() else '"')


_Representer.add_representer(str, _Representer.represent_str)


def parse(text: str, source: str, *, lines: bool = True) -> Layer:
    """Read YAML 1.2: `1e-3` is a number, `no` and `2020-01-01` are text, `010` is ten.

    Keys are texts; those that come twice and aliases are refused. `lines` puts line numbers into
    the places.

    Example:
        >>> parse("lr: 1e-3", "mine.yaml")
        Layer(values={'lr': 0.001}, places={(): 'mine.yaml', ('lr',): 'mine.yaml, line 1'})
    """
    places: dict[Keys, str] = {(): source}
    seen: set[int] = set()

    def place(mark: Any) -> str:
        return f"{source}, line {mark.line + 1}" if mark is not None and lines else source

    def wrong(where: str, reason: object) -> ConfigError:
        return ConfigError(f"{where}: this is not valid YAML: {reason}.")

    def visit(node: Any, path: Keys) -> None:
        if id(node) in seen:
            raise wrong(places[path], "aliases (`*name`) are not allowed: write the value out")
        seen.add(id(node))
        if node is not None and node.tag not in _TAGS:
            raise wrong(place(node.start_mark), f"the tag `{node.tag}` is not allowed")
        if isinstance(node, SequenceNode):
            for child in node.value:
                visit(child, path)
        elif isinstance(node, MappingNode):
            for key, child in node.value:
                if not isinstance(key, ScalarNode):
                    raise wrong(place(key.start_mark), "a key must be a word or a number")
                key.tag = _TEXT
                places[*path, key.value] = place(key.start_mark)
                visit(child, (*path, key.value))

    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor, yaml.max_depth = _Constructor, 40
    try:
        root = yaml.compose(text)
        visit(root, ())
        return Layer(None if root is None else yaml.constructor.construct_document(root), places)
    except MarkedYAMLError as error:
        raise wrong(place(error.problem_mark), error.problem) from error
    except (YAMLError, ValueError) as error:
        raise wrong(source, str(error).splitlines()[0].rstrip(".")) from error


def dump(value: Any) -> str:
    """A config or plain values as YAML, keys in their order; reading it gives an equal one.

    Example:
        >>> dump({"lr": 1e-5, "seeds": [0, 1], "note": "1e-3"}).splitlines()
        ['lr: 1e-05', 'seeds: [0, 1]', "note: '1e-3'"]
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.default_flow_style, yaml.allow_unicode, yaml.width = None, True, 100
    stream = io.StringIO()
    yaml.dump(plain(value), stream)
    return stream.getvalue()


# --- From plain values to dataclasses ------------------------------------------------------------


@functools.cache
def _adapter(cls: type) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    # A list, because pydantic takes a config for what holds a dataclass, not for a dataclass.
    strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    return TypeAdapter(list[cls], config=strict)  # type: ignore[valid-type]


def is_method_name(name: Any) -> bool:
    """Whether a method can be called so; folders are, hence there is no way out of them."""
    pattern = r"[A-Za-z0-9_+-][A-Za-z0-9._+-]*(@[0-9]+)?"
    return isinstance(name, str) and re.fullmatch(pattern, name) is not None


def build(cls: type[T], layer: Layer) -> T:
    """The dataclass `cls` with the values of a layer; raises `ConfigError` with all mistakes."""
    from pydantic import ValidationError

    problems = [
        f"{layer.place(('methods', name))}: the name of the method `{name}` must begin with a "
        "letter, a digit or one of - _ + and hold only these and dots."
        for name in layer.section("methods").values
        if not is_method_name(name)
    ]
    built: T | None = None
    try:  # as JSON, because its strict mode takes lists for tuples
        built = _adapter(cls).validate_json(json.dumps([layer.values]))[0]
    except ValidationError as invalid:
        errors: dict[Keys, list[Any]] = {}
        for error in invalid.errors(include_url=False):
            errors.setdefault(_path(error, layer.values), []).append(error)
        for path, group in errors.items():
            problems.append(_explain(cls, layer, path, group))
    if problems or built is None:
        raise ConfigError(*problems)
    return built


def _path(error: Any, values: Any) -> Keys:
    """The path of a wrong value. What pydantic adds for the members of a union is left out."""
    path: Keys = ()
    for key in error["loc"][1:]:
        try:
            values = values[key]
        except (KeyError, IndexError, TypeError):
            if error["type"] != "missing":
                break
        path = (*path, key)
    return path


def _explain(cls: type, layer: Layer, path: Keys, errors: Sequence[Any]) -> str:
    """A sentence about a wrong value, after its place."""
    name, kind, place = ".".join(map(str, path)), errors[0]["type"], layer.place(path)
    if kind == "value_error":
        return _explain_check(layer, path, str(errors[0]["ctx"]["error"]))
    if kind == "missing":
        return f"{place}: the key `{name}` is missing."
    if kind == "unexpected_keyword_argument":
        *above, key = path
        allowed = fields_of(_type_at(cls, above))
        hint = did_you_mean(key, allowed, "".join(f"{part}." for part in above))
        text = f"{place}: unknown key `{name}`{hint} Allowed: {', '.join(allowed)}."
        word = key.replace("-", "_")
        if "methods" in allowed and word in fields_of(_type_at(cls, ("methods", "any"))):
            text += f" `{word}` is a key of each method: write --methods.NAME.{word}."
        return text
    wanted = dict.fromkeys(error["msg"].removeprefix("Input should be ") for error in errors)
    return f"{place}: `{name}` must be {' or '.join(wanted)} but is: {errors[0]['input']!r:.80}"


def _explain_check(layer: Layer, path: Keys, text: str) -> str:
    """What a dataclass refused, after the place of the key that was written last.

    The keys are those that the text names: `key` in backquotes, or key = value.
    """
    named = {word for words in re.findall(r"`(\w+)|(\w+) = ", text) for word in words}
    written = [key for key in layer.places if key and key[:-1] == path and key[-1] in named]
    return f"{layer.place(written[-1] if written else path)}: {text}"


def _type_at(cls: Any, path: Sequence[Any]) -> Any:
    """The type of the value at a path of a dataclass."""
    for key in path:
        if dataclasses.is_dataclass(cls):
            cls = typing.get_type_hints(cls)[key]
        else:
            cls = typing.get_args(cls)[1 if typing.get_origin(cls) is dict else 0]
        if typing.get_origin(cls) in (typing.Union, types.UnionType):
            cls = next(member for member in typing.get_args(cls) if member is not type(None))
    return cls


def did_you_mean(word: str, allowed: Iterable[str], before: str = "") -> str:
    """`"; did you mean ..?"` when something similar is allowed."""
    close = difflib.get_close_matches(word, list(allowed), n=1)
    return f"; did you mean `{before}{close[0]}`?" if close else "."


# --- Files ---------------------------------------------------------------------------------------


def load(
    task: Task, name: str | Path, *, quick: bool = False, overrides: Iterable[str] = ()
) -> Any:
    """The config of a task with a name such as `celeba` or `celeba-beta`, or in a YAML file.

    `overrides` are `"a.b.c=value"` each, the value written as YAML.
    """
    layer = _with_variants(read(task, "config", name, quick))
    problems: list[str] = []
    for override in overrides:
        try:
            layer = _with_variants(layer | _override(layer, override, fields_of(task.config)))
        except ConfigError as error:
            problems += error.args
    try:
        config = build(task.config, layer)
    except ConfigError as error:
        raise ConfigError(*problems, *error.args) from None
    problems += [f"{layer.place(path)}: {text}" for path, text in task.check(config)]
    if problems:
        raise ConfigError(*problems)
    return config


def read(task: Task, kind: str, name: str | Path, quick: bool = False) -> Layer:
    """A file (a "config" or a "grid") with its setting and `quick`, on top of all it extends."""
    layers = _layers(task, kind, *_find(task, kind, str(name), None), ())
    quicker = [layer.section("quick") for layer in layers if quick]
    merged = functools.reduce(Layer.__or__, [*layers, *quicker])
    special = ("quick", "settings", "extends")
    return Layer({k: v for k, v in merged.values.items() if k not in special}, merged.places)


def _layers(
    task: Task, kind: str, file: Path, setting: str | None, above: tuple[str, ...]
) -> list[Layer]:
    """A file and the section of its setting, after those of what they extend."""
    label = file.name if file.parent == folder(task, kind) else str(file)
    whole = _read_file(file, label)
    settings = whole.section("settings")
    if setting is None and DEFAULT in settings.values:
        setting = DEFAULT
    title = label if setting in (None, DEFAULT) else f"{label} ({setting})"
    if title in above:
        raise ConfigError(f"{label}: the files extend each other: {' -> '.join((*above, title))}.")
    layers = [whole] if setting is None else [whole, settings.section(setting)]
    extending = next((layer for layer in reversed(layers) if "extends" in layer.values), None)
    if extending is None:
        return layers
    try:
        base = _find(task, kind, str(extending.values["extends"]), file.parent)
    except ConfigError as error:
        raise ConfigError(f"{extending.place(('extends',))}: `extends`: {error}") from None
    below = _layers(task, kind, *base, (*above, title))
    # Another section of the same file comes with the whole file.
    return below + (layers[1:] if whole in below else layers)


def _find(task: Task, kind: str, name: str, beside: Path | None) -> tuple[Path, str | None]:
    """A YAML file and its setting: a path, or a name beside a file or in the task's folder."""
    if name.endswith((".yaml", ".yml")) or "/" in name or "\\" in name:
        if not Path(name).is_file():
            raise ConfigError(f"There is no {kind} file {name}.")
        return Path(name), None
    folders = [place for place in (beside, folder(task, kind)) if place is not None]
    dashes = [dash.start() for dash in re.finditer("-", name)]
    splits = [(name, None), *((name[:at], name[at + 1 :]) for at in reversed(dashes))]
    for (stem, setting), place in itertools.product(splits, folders):
        file = place / f"{stem}.yaml"
        if file.is_file():
            settings = _read_file(file, file.name).section("settings").values
            if setting is None or setting in settings:
                return file, setting
    known = names(task, kind)
    listed = f" There are: {', '.join(known)}." if known else ""
    text = f"The task {task.name} has no {kind} `{name}`{did_you_mean(name, known)}{listed}"
    raise ConfigError(f"{text} Or give the path of a YAML file.")


def folder(task: Task, kind: str = "config") -> Path:
    """Where a task keeps its files: in the package, unless it has a folder `configs` of its own."""
    place = CONFIGS / task.name if task.configs is None else Path(task.configs)
    return place / "grids" if kind == "grid" else place


def _read_file(file: Path, label: str) -> Layer:
    """A YAML file that must hold a mapping; its name in errors is `label`."""
    try:
        layer = parse(file.read_text(encoding="utf-8"), label)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{label}: this is not a text file in UTF-8: {error}.") from error
    except OSError as error:
        raise ConfigError(f"{label}: cannot be read: {error.strerror}.") from error
    if not isinstance(layer.values, dict):
        raise ConfigError(f"{label}: must be a mapping of keys to values.")
    return layer


def names(task: Task, kind: str = "config") -> list[str]:
    """The configs (or grids) of a task, settings included, such as `celeba` and `celeba-beta`."""
    files = settings_in(folder(task, kind))
    return sorted([*files, *(f"{stem}-{setting}" for stem in files for setting in files[stem])])


def data_sets(task: Task) -> list[str]:
    """The data sets that a task has configs for."""
    return [name for name in settings_in(folder(task)) if name != TABLE]


@functools.cache
def settings_in(folder: Path) -> dict[str, list[str]]:
    """The settings of each config (or grid) of a folder, without the usual one.

    A config counts when its `data` are called as the file is.
    """
    files = {file.stem: _read_file(file, file.name) for file in sorted(folder.glob("*.yaml"))}
    return {
        stem: [setting for setting in layer.section("settings").values if setting != DEFAULT]
        for stem, layer in files.items()
        if folder.name == "grids" or layer.values.get("data") == stem
    }


# --- Methods and overrides -----------------------------------------------------------------------


def _with_variants(layer: Layer) -> Layer:
    """Methods without those that are null, and with lists of values written out."""
    methods: dict[str, Any] = {}
    places = {path: at for path, at in layer.places.items() if path[:1] != ("methods",)}
    places[("methods",)] = layer.place(("methods",))
    section = layer.section("methods")
    for name, method in section.values.items():
        inside = {path[1:]: at for path, at in section.places.items() if path[:1] == (name,)}
        for variant, values in _variants(name, method) if method is not None else ():
            if variant in methods:
                raise ConfigError(f"{section.place((name,))}: there are two methods `{variant}`.")
            methods[variant] = values
            places |= {("methods", variant, *path): at for path, at in inside.items()}
    return Layer(layer.values | {"methods": methods}, places)


def _variants(name: str, method: Any) -> Iterator[tuple[str, Any]]:
    """A method for each combination of the values in lists and mappings."""
    paths = [(key,) for key in method if key != "settings"] if isinstance(method, dict) else []
    if paths and isinstance(method.get("settings"), dict):
        paths += [("settings", key) for key in method["settings"]]
    choices: list[list[tuple[str, Keys, Any]]] = []
    for path in paths:
        values = functools.reduce(dict.__getitem__, path, method)
        if isinstance(values, list):
            values = {json.dumps(value).strip('"'): value for value in values}
        options = values.items() if isinstance(values, dict) else ()
        if options and not any(isinstance(value, (dict, list)) for _, value in options):
            choices.append([(label, path, value) for label, value in options])
    for combination in itertools.product(*choices):
        made = method
        for _, path, value in combination:
            made = with_value(made, path, value)
        yield "-".join([name, *(label for label, _, _ in combination)]), made


def _override(layer: Layer, text: str, fields: Sequence[str]) -> Layer:
    """`key=value` of the command line as a layer to put on top of `layer`."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{COMMAND_LINE}: `{text}` is not of the form key=value.")
    try:
        values = parse(value, COMMAND_LINE, lines=False).values
    except ConfigError as error:
        raise ConfigError(f"{COMMAND_LINE}: `{text:.80}`: {error}") from None
    first, *rest = key.split(".")
    if first not in fields and first.replace("-", "_") in fields:
        first = first.replace("-", "_")
    if first == "methods" and rest:
        known = layer.section("methods").values
        inside = ".".join(rest)  # a name may have dots itself
        fitting = [name for name in known if f"{inside}.".startswith(f"{name}.")]
        name = max(fitting, key=len, default=rest[0])
        rest = [name, *inside.removeprefix(name).split(".")[1:]]
        if name not in known and len(rest) > 1:
            raise ConfigError(
                f"{COMMAND_LINE}: `{key}`: there is no method `{name}`{did_you_mean(name, known)} "
                f"There are: {', '.join(known)}."
            )
    path = (first, *rest)
    places = {path[:end]: COMMAND_LINE for end in range(1, len(path) + 1)}
    return Layer(with_value({}, path, values), places)


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
    return build(cls, Layer(dict(values), {(): source}))


def changed(config: T, source: str, **values: Any) -> T:
    """A config with other values, from `source`; what it refuses is a `ConfigError`."""
    try:
        return dataclasses.replace(config, **values)  # type: ignore[type-var]
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error
