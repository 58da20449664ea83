"""The keys of a config for the help of a task: their types, and what the code says of them."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

GIVEN = ("data", "columns", "seeds", "methods")  # which are options of their own
_KINDS = {int: "N", float: "X", str: "TEXT", bool: "true|false", tuple: "LIST", dict: "MAPPING"}


def listed(cls: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Options such as `--epochs N` with their meanings; those of a part after its name."""
    hints, texts = typing.get_type_hints(cls), _texts(cls)
    for field in dataclasses.fields(cls):
        if field.name in GIVEN or not field.init:
            continue
        kind = hints[field.name]
        if isinstance(kind, types.UnionType):
            kind = next(part for part in typing.get_args(kind) if part is not types.NoneType)
        if dataclasses.is_dataclass(kind):
            yield from listed(kind, f"{prefix}{field.name}.")
            continue
        words = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
        metavar = "|".join(map(str, words)) or _KINDS.get(typing.get_origin(kind) or kind, "VALUE")
        yield f"--{prefix}{field.name} {metavar}", texts.get(field.name, "")


def _texts(cls: type) -> dict[str, str]:
    """What a class and its bases say of their fields, in `Args` or in a comment on their line."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        told = (inspect.getdoc(base) or "").partition("Args:")[2]
        for name, text in re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", told, re.MULTILINE):
            found[name] = " ".join(text.split())
        source = inspect.getsource(base) if dataclasses.is_dataclass(base) else ""
        found |= re.findall(r"^    (\w+): .*?  # (.+)$", source, re.MULTILINE)
    return found
