"""From plain values to typed dataclasses: every mistake is found, named and placed."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from .task import Experiment, Method
from .yaml_text import ConfigError, Node

__all__ = ["build", "check_names", "did_you_mean", "unknown_keys"]

T = TypeVar("T")
Path = tuple[Any, ...]

_WORDS = {
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


def build(kind: type[T], node: Node) -> T:
    """The dataclass `kind` with the values of `node`; raises `ConfigError` with all mistakes."""
    from pydantic import TypeAdapter, ValidationError

    data = node.plain()
    problems = [
        f"{node.place(path)}: {text}"
        for path, text in [*unknown_keys(kind, data), *check_names(data)]
    ]
    try:
        # JSON, because its strict mode takes lists for tuples and mappings for dataclasses.
        built = TypeAdapter(kind).validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        found = _by_path(error.errors(include_url=False), data)
        for path, errors in found.items():
            text = _sentence(path, errors, data)
            problems.append(f"{node.place((*path, *_meant(errors)))}: {text}")
    else:
        if not problems:
            return built
    raise ConfigError(*problems)


def did_you_mean(word: str, allowed: Iterable[str], before: str = "") -> str:
    """`"; did you mean ..?"` when something similar is allowed."""
    close = difflib.get_close_matches(word, list(allowed), n=1)
    return f"; did you mean `{before}{close[0]}`?" if close else "."


def dotted(path: Path) -> str:
    """A path as one writes it on the command line."""
    return ".".join(str(part) for part in path)


def unknown_keys(kind: Any, data: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Keys that no dataclass has, at any depth."""
    if dataclasses.is_dataclass(kind) and isinstance(data, dict):
        fields = {field.name for field in dataclasses.fields(kind) if field.init}
        hints = typing.get_type_hints(kind)
        for key, value in data.items():
            here = (*path, key)
            if key in fields:
                yield from unknown_keys(hints[key], value, here)
            else:
                allowed = [field.name for field in dataclasses.fields(kind) if field.init]
                hint = did_you_mean(key, allowed, dotted((*path, "")))
                text = f"unknown key `{dotted(here)}`{hint} Allowed: {', '.join(allowed)}."
                yield here, text + _of_a_method(kind, key)
        return
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        classes = [each for each in inside if each is not type(None)]
        if len(classes) == 1:
            yield from unknown_keys(classes[0], data, path)
    elif origin is dict and isinstance(data, dict):
        for key, value in data.items():
            yield from unknown_keys(inside[1], value, (*path, key))
    elif origin in (list, tuple) and isinstance(data, list):
        for place, value in enumerate(data):
            yield from unknown_keys(inside[0], value, (*path, place))


def _of_a_method(kind: Any, key: str) -> str:
    """What to write for a key of one method that stands among those of the experiment."""
    word = key.replace("-", "_")
    if not issubclass(kind, Experiment) or word not in Method.__dataclass_fields__:
        return ""
    return f" `{word}` is a key of each method: write --methods.NAME.{word}."


def check_names(data: Any) -> Iterator[tuple[Path, str]]:
    """Names of methods that cannot be names of folders: where, and why."""
    methods = data.get("methods") if isinstance(data, dict) else None
    for name in methods if isinstance(methods, dict) else ():
        if not re.fullmatch(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]*(@[0-9]+)?", name):
            text = "must begin with a letter, a digit or one of - _ + and hold only these and dots."
            yield ("methods", name), f"the name of the method `{name}` {text}"


def _by_path(errors: Iterable[Any], data: Any) -> dict[Path, list[Any]]:
    """Errors of one value together: those of a union come one for each member."""
    found: dict[Path, list[Any]] = {}
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
        found.setdefault(tuple(path), []).append(error)
    return found


def _meant(errors: list[Any]) -> list[str]:
    """The key that the range check of a dataclass complains about: the first in its sentence."""
    said = str(errors[0]["ctx"]["error"]) if errors[0]["type"] == "value_error" else ""
    named = re.search(r"`([\w.]+)`", said)
    return named[1].split(".") if named else []


def _sentence(path: Path, errors: list[Any], data: Any) -> str:
    first = errors[0]
    if first["type"] == "missing":
        return f"the key `{dotted(path)}` is missing."
    if first["type"] == "value_error":
        text = str(first["ctx"]["error"])
        return f"`{dotted(path)}`: {text}" if path else text
    value = data
    for key in path:
        value = value[key]
    if first["type"] == "literal_error":
        allowed = re.findall(r"'([^']*)'", first["ctx"]["expected"])
        hint = did_you_mean(value, allowed) if isinstance(value, str) else "."
        return f"`{dotted(path)}` must be one of {', '.join(allowed)} but is: {value!r}{hint}"
    words = [_WORDS.get(str(each["type"]), str(each["msg"])) for each in errors]
    wanted = " or ".join(dict.fromkeys(words))
    return f"`{dotted(path)}` must be {wanted} but is: {_short(value)}."


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
