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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ruamel.yaml import YAML
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
BYTES, DIGITS = 2**20, 100
"""The most that a YAML file, and a number in it, may have."""


class ConfigError(Exception):
    """A config that cannot be used, with everything that is wrong in it, one sentence each."""

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
    """

    value: Any
    where: str

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

    def leaves(self, path: Keys = ()) -> Iterator[Keys]:
        """The paths of all values that are no mappings."""
        if not isinstance(self.value, dict):
            yield path
            return
        for key, node in self.value.items():
            yield from node.leaves((*path, key))

    def replaced(self, path: Keys, new: Node | None) -> Node:
        """With another node at a path, or with none."""
        key, *rest = path
        child = self.value[key].replaced(tuple(rest), new) if rest else new
        value = {k: child if k == key else node for k, node in self.value.items()}
        return Node({k: node for k, node in value.items() if node is not None}, self.where)


# --- YAML ----------------------------------------------------------------------------------------


def parse(text: str, source: str, *, lines: bool = True) -> Node:
    """Read YAML 1.2: `1e-3` is a number, `no` and `2020-01-01` are text, `010` is ten.

    Keys that come twice and aliases are refused.

    Args:
        text: what to read.
        source: the file, for errors.
        lines: whether the places have line numbers.

    Example:
        >>> parse("lr: 1e-3", "mine.yaml").value["lr"]
        Node(value=0.001, where='mine.yaml, line 1')
    """
    if len(text) > BYTES:
        raise ConfigError(f"{source}: a YAML file may have at most {BYTES:,} bytes.")

    def place(mark: Any) -> str:
        return f"{source}, line {mark.line + 1}" if mark is not None and lines else source

    def wrong(where: str, reason: str) -> ConfigError:
        return ConfigError(f"{where}: this is not valid YAML: {reason}.")

    yaml = YAML(typ="safe", pure=True)
    yaml.max_depth = 40
    try:
        root = yaml.compose(text)
    except MarkedYAMLError as error:
        raise wrong(place(error.problem_mark), str(error.problem)) from error
    except (YAMLError, ValueError, RecursionError) as error:  # a ValueError: `%YAML 1.x`
        raise wrong(source, str(error).splitlines()[0].rstrip(".")) from error
    seen: set[int] = set()

    def read(node: Any, where: str) -> Node:
        if id(node) in seen:
            raise wrong(where, "aliases (`*name`) are not allowed: write the value out")
        seen.add(id(node))
        if isinstance(node, SequenceNode):
            return Node([read(child, where).plain() for child in node.value], where)
        if isinstance(node, MappingNode):
            value: dict[str, Node] = {}
            for key, child in node.value:
                line = place(key.start_mark)
                if not isinstance(key, ScalarNode):
                    raise wrong(line, "a key must be a word or a number")
                if key.value in value:
                    raise wrong(line, f"the key `{key.value}` is there twice")
                value[key.value] = read(child, line)
            return Node(value, where)
        try:
            return Node(_scalar(node.value, str(node.tag).rpartition(":")[2]), where)
        except ValueError as error:
            raise wrong(place(node.start_mark), str(error)) from error

    return Node(None, source) if root is None else read(root, place(root.start_mark))


def _scalar(text: str, tag: str) -> Any:
    """A number, a truth value, null or text."""
    if "\0" in text:
        raise ValueError("text must not have a NUL character")
    if tag in ("int", "float") and len(text) > DIGITS:
        raise ValueError(f"a number may have at most {DIGITS} digits")
    if tag == "int":
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if tag == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if tag == "null":
        return None
    if tag == "bool":
        return text.lower() == "true"
    if tag in ("str", "timestamp", "merge", "value"):
        return text
    raise ValueError(f"the tag !{tag} is not known")


class _Representer(SafeRepresenter):
    """Texts with odd white space in double quotes: other styles fold it."""

    def represent_str(self, data: Any) -> Any:
        style = None if data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Representer.add_representer(str, _Representer.represent_str)


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
    return TypeAdapter(list[cls], config=ConfigDict(extra="forbid", strict=True))  # type: ignore[valid-type]


def _validate(cls: type[T], data: Any) -> tuple[T | None, dict[Keys, list[Any]]]:
    """The dataclass, and the errors by the path of the wrong value.

    Of a union there is an error for each member: what comes after the path of the value is left
    out, so that they lie together.
    """
    from pydantic import ValidationError

    try:  # as JSON, because its strict mode takes lists for tuples
        return _adapter(cls).validate_json(json.dumps([data]))[0], {}
    except ValidationError as invalid:
        errors: dict[Keys, list[Any]] = {}
        for error in invalid.errors(include_url=False):
            path: Keys = ()
            value: Any = data
            for key in error["loc"][1:]:
                inside = isinstance(value, list if isinstance(key, int) else dict)
                inside = inside and (isinstance(key, int) or key in value)
                if not inside and error["type"] != "missing":
                    break
                path, value = (*path, key), value[key] if inside else None
            errors.setdefault(path, []).append(error)
        return None, errors


Merge = Callable[[Sequence[Node]], Node]


def build(cls: type[T], *layers: Node, merge: Merge | None = None) -> T:
    """The dataclass `cls` with the values of `layers`; raises `ConfigError` with all mistakes."""
    merge = merge or _merged
    node = merge(layers)
    data = node.plain()
    built, errors = _validate(cls, data)
    problems = [
        f"{node.place(('methods', name))}: the name of the method `{name}` must begin with a "
        "letter, a digit or one of - _ + and hold only these and dots."
        for name in _mapping(node, "methods")
        if not re.fullmatch(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]*(@[0-9]+)?", name)
    ]
    for path, group in errors.items():
        if group[0]["type"] == "value_error":
            text = str(group[0]["ctx"]["error"])
            problems.append(_blame(cls, layers, merge, text) or f"{node.place(path)}: {text}")
        else:
            problems.append(f"{node.place(path)}: {_explain(cls, path, group)}")
    if problems or built is None:
        raise ConfigError(*problems)
    return built


def did_you_mean(word: str, allowed: Iterable[str], before: str = "") -> str:
    """`"; did you mean ..?"` when something similar is allowed."""
    close = difflib.get_close_matches(word, list(allowed), n=1)
    return f"; did you mean `{before}{close[0]}`?" if close else "."


def _explain(cls: type, path: Keys, errors: Sequence[Any]) -> str:
    """What is wrong with a value, as a sentence."""
    name, kind, value = ".".join(map(str, path)), errors[0]["type"], errors[0]["input"]
    if kind == "missing":
        return f"the key `{name}` is missing."
    if kind == "unexpected_keyword_argument":
        *above, key = path
        allowed = fields_of(_type_at(cls, above))
        hint = did_you_mean(key, allowed, "".join(f"{part}." for part in above))
        text = f"unknown key `{name}`{hint} Allowed: {', '.join(allowed)}."
        word = key.replace("-", "_")
        if "methods" in allowed and word in fields_of(_type_at(cls, ("methods", "any"))):
            text += f" `{word}` is a key of each method: write --methods.NAME.{word}."
        return text
    wanted = dict.fromkeys(error["msg"].removeprefix("Input should be ") for error in errors)
    return f"`{name}` must be {' or '.join(wanted)} but is: {value!r:.80}"


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


def _blame(cls: type, layers: Sequence[Node], merge: Merge, text: str) -> str | None:
    """Which value to mend when the checks of a dataclass refuse several values together.

    A value is to blame when the check passes without it, or with what the layers below have. The
    one of the last layer made them contradict each other; the others are named as well.
    """
    guilty: list[tuple[str, str]] = []
    owner = {path: number for number, layer in enumerate(layers) for path in layer.leaves()}
    for path in sorted(owner, key=lambda path: (-owner[path], f"`{path[-1]}`" not in text)):
        layer = layers[owner[path]]
        bare = [node.replaced(path, None) if node.at(path) else node for node in layers]
        for rest in (bare, [bare[k] if node is layer else node for k, node in enumerate(layers)]):
            errors = [
                error
                for group in _validate(cls, merge(rest).plain())[1].values()
                for error in group
            ]
            gone = all(str(error.get("ctx", {}).get("error")) != text for error in errors)
            if gone and all(error["type"] != "missing" for error in errors):
                guilty.append((".".join(map(str, path)), layer.place(path)))
                break
    if not guilty:
        return None
    where = guilty[0][1]
    others = dict.fromkeys(f"`{key}` is set in {place}" for key, place in guilty if place != where)
    return f"{where}: {text}" + (f" ({'; '.join(others)}.)" if others else "")


# --- Layers --------------------------------------------------------------------------------------


def load(
    task: Task, name: str | Path, *, quick: bool = False, overrides: Iterable[str] = ()
) -> Any:
    """The config `name` of a task.

    Args:
        task: whose dataclass it becomes.
        name: of a config in the package (`celeba`, `celeba-beta`), or the path of a YAML file.
        quick: whether to put the part `quick` on top.
        overrides: `"a.b.c=value"` each, the value written as YAML.
    """
    files = layers_of(task, "config", name, quick)
    layers, problems = list(files), []

    def merge(nodes: Sequence[Node]) -> Node:
        node = _with_variants(_merged(nodes[: len(files)]))
        node = _with_variants(_merged([node, *nodes[len(files) :]]))
        return Node(node.value, files[-1].where)

    for override in overrides:
        try:
            layers.append(_override(merge(layers), override, fields_of(task.config)))
        except ConfigError as error:
            problems += error.problems
    try:
        config = build(task.config, *layers, merge=merge)
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from None
    node = merge(layers)
    problems += [f"{node.place(path)}: {text}" for path, text in task.check(config)]
    if problems:
        raise ConfigError(*problems)
    return config


def changed(config: T, source: str, **values: Any) -> T:
    """A config with other values, from `source`; what it refuses is a `ConfigError`."""
    try:
        return dataclasses.replace(config, **values)  # type: ignore[type-var]
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error


def names(task: Task, kind: str = "config") -> list[str]:
    """The configs (or grids) of a task, settings included, such as `celeba` and `celeba-beta`."""
    settings = settings_in(_folder(task, kind)).items()
    return sorted(
        name for stem, own in settings for name in (stem, *(f"{stem}-{each}" for each in own))
    )


@functools.cache
def settings_in(folder: Path) -> dict[str, list[str]]:
    """The settings of each config (or grid) of a folder, without the usual one.

    A config counts when its `data` are called as the file is.
    """
    found: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*.yaml")):
        node = _read_file(file, file.name)
        data = node.at(("data",))
        if folder.name == "grids" or (data is not None and data.value == file.stem):
            found[file.stem] = [name for name in _mapping(node, "settings") if name != DEFAULT]
    return found


def _folder(task: Task, kind: str) -> Path:
    """Where a task keeps its files: in the package, unless it has a folder `configs` of its own."""
    folder = CONFIGS / task.name if task.configs is None else Path(task.configs)
    return folder / "grids" if kind == "grid" else folder


def _find(task: Task, kind: str, name: str, beside: Path | None) -> tuple[Path, str | None]:
    """A YAML file and its setting: a path, or a name beside a file or in the task's folder."""
    if name.endswith((".yaml", ".yml")) or "/" in name or "\\" in name:
        if not Path(name).is_file():
            raise _NotFound(f"There is no {kind} file {name}.")
        return Path(name), None
    folders = [folder for folder in (beside, _folder(task, kind)) if folder is not None]
    dashes = [place.start() for place in re.finditer("-", name)]
    splits = [(name, None), *((name[:at], name[at + 1 :]) for at in reversed(dashes))]
    for (stem, section), folder in itertools.product(splits, folders):
        file = folder / f"{stem}.yaml"
        if file.is_file() and section in (None, *_mapping(_read_file(file, file.name), "settings")):
            return file, section
    known = names(task, kind)
    listed = f" There are: {', '.join(known)}." if known else ""
    text = f"The task {task.name} has no {kind} `{name}`{did_you_mean(name, known)}{listed}"
    raise _NotFound(f"{text} Or give the path of a YAML file.")


def _read_file(file: Path, label: str) -> Node:
    """A YAML file that must hold a mapping; its name in errors is `label`."""
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


def _mapping(node: Node, key: str) -> dict[str, Node]:
    """The mapping at a key of a mapping; empty where there is none."""
    inside = node.value.get(key, Node({}, ""))
    if not isinstance(inside.value, dict):
        raise ConfigError(f"{inside.where}: `{key}` must be a mapping of keys to values.")
    return inside.value


def layers_of(task: Task, kind: str, name: str | Path, quick: bool = False) -> list[Node]:
    """A file, its setting and `quick`, after all that they extend."""
    parts = _parts(task, kind, str(name), None, ())
    special = ("quick", "settings", "extends")
    layers = [
        Node({key: node for key, node in part.value.items() if key not in special}, part.where)
        for part in parts
    ]
    return layers + [Node(_mapping(part, "quick"), part.where) for part in parts if quick]


def _parts(
    task: Task, kind: str, name: str, beside: Path | None, above: tuple[str, ...]
) -> list[Node]:
    """A file and the section of its setting, after those of what they extend."""
    file, setting = _find(task, kind, name, beside)
    label = file.name if file.parent == _folder(task, kind) else str(file)
    whole = _read_file(file, label)
    sections = _mapping(whole, "settings")
    if setting is None and DEFAULT in sections:
        setting = DEFAULT
    title = label if setting in (None, DEFAULT) else f"{label} ({setting})"
    if title in above:
        raise ConfigError(f"{label}: the files extend each other: {' -> '.join((*above, title))}.")
    own, extends = [whole], whole.at(("extends",))
    if setting is not None:
        section = Node(_mapping(Node(sections, label), setting), label)
        own, extends = [whole, section], section.at(("extends",)) or extends
    if extends is None:
        return own
    try:
        below = _parts(task, kind, str(extends.value), file.parent, (*above, title))
    except _NotFound as error:
        raise ConfigError(f"{extends.where}: `extends`: {error}") from None
    # Another section of the same file comes with the whole file.
    return below + (own[1:] if whole in below else own)


def _merged(layers: Sequence[Node]) -> Node:
    """All layers as one; later ones win."""
    return functools.reduce(_merge, layers)


def _merge(base: Node, new: Node) -> Node:
    """`new` on top of `base`. A mapping that is changed is wrong where it was changed."""
    if not (isinstance(base.value, dict) and isinstance(new.value, dict)):
        return new
    merged = {
        key: _merge(base.value[key], node) if key in base.value else node
        for key, node in new.value.items()
    }
    return Node(base.value | merged, new.where)


def _with_variants(node: Node) -> Node:
    """Methods without those that are null, and with lists of values written out."""
    value: dict[str, Node] = {}
    for name, method in _mapping(node, "methods").items():
        for variant, made in _variants(name, method) if method.value is not None else ():
            if variant in value:
                raise ConfigError(f"{method.where}: there are two methods `{variant}`.")
            value[variant] = made
    return node.replaced(("methods",), Node(value, node.place(("methods",))))


def _variants(name: str, method: Node) -> Iterator[tuple[str, Node]]:
    """A method for each combination of the values in lists and mappings."""
    if not isinstance(method.value, dict) or not isinstance(
        method.value.get("settings", Node({}, "")).value, dict
    ):
        yield name, method  # refused by its type
        return
    choices: list[list[tuple[str, Keys, Node]]] = []
    keys = [(key,) for key in method.value if key != "settings"]
    for path in [*keys, *(("settings", key) for key in _mapping(method, "settings"))]:
        leaf = method.at(path) or method
        nodes = leaf.value if isinstance(leaf.value, dict) else {}
        if isinstance(leaf.value, list):
            nodes = {json.dumps(v).strip('"'): Node(v, leaf.where) for v in leaf.value}
        if nodes and not any(isinstance(node.value, (dict, list)) for node in nodes.values()):
            choices.append([(label, path, node) for label, node in nodes.items()])
    for combination in itertools.product(*choices):
        made = method
        for _, path, leaf in combination:
            made = made.replaced(path, leaf)
        yield "-".join([name, *(label for label, _, _ in combination)]), made


def _override(node: Node, text: str, fields: Sequence[str]) -> Node:
    """The layer of `key=value` of the command line, which goes on top of `node`."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{COMMAND_LINE}: `{text}` is not of the form key=value.")
    try:
        layer = parse(value, COMMAND_LINE, lines=False)
    except ConfigError as error:
        raise ConfigError(f"{COMMAND_LINE}: `{text:.80}`: {error}") from None
    first, *path = key.split(".")
    if first not in fields and first.replace("-", "_") in fields:
        first = first.replace("-", "_")
    if first == "methods" and path:
        known = _mapping(node, "methods")
        inside = ".".join(path)  # a name may have dots itself
        fitting = [name for name in known if f"{inside}.".startswith(f"{name}.")]
        name = max(fitting, key=len, default=path[0])
        path = [name, *inside.removeprefix(name).split(".")[1:]]
        if name not in known and len(path) > 1:
            raise ConfigError(
                f"{COMMAND_LINE}: `{key}`: there is no method `{name}`{did_you_mean(name, known)} "
                f"There are: {', '.join(known)}."
            )
    for part in reversed([first, *path]):
        layer = Node({part: layer}, COMMAND_LINE)
    return layer


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

    def placed(value: Any) -> Node:
        inside = {k: placed(v) for k, v in value.items()} if isinstance(value, dict) else value
        return Node(inside, source)

    return build(cls, placed(dict(values)))
