"""YAML whose numbers are numbers (`1e-3`), with the place of every key.

The rules for plain words are those of YAML 1.2: only `true` and `false` are truth values, `010` is
ten, a date is text. A key that is given twice is an error.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["ConfigError", "Node", "dump", "parse"]

_PLAIN = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
)


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

    def place(self, path: tuple[Any, ...]) -> str:
        """Where a key was written; that of the nearest mapping for one that was not."""
        node = self
        for key in path:
            if not isinstance(node.value, dict) or key not in node.value:
                break
            node = node.value[key]
        return node.where


def parse(text: str, source: str, *, lines: bool = True) -> Node:
    """Read YAML.

    Args:
        text: what to read.
        source: the file, for errors.
        lines: whether the places have line numbers.

    Example:
        >>> parse("lr: 1e-3", "mine.yaml").value["lr"]
        Node(value=0.001, where='mine.yaml, line 1')
    """
    import yaml

    loader = _loader()(text)
    try:
        root = loader.get_single_node()
        return Node(None, source) if root is None else _node(loader, root, source, lines)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{source}, line {mark.line + 1}" if mark is not None and lines else source
        reason = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{place}: this is not valid YAML: {reason}.") from error
    finally:
        loader.dispose()


def dump(value: Any) -> str:
    """Plain values as YAML, keys in their order.

    Example:
        >>> dump({"lr": 1e-5, "seeds": [0, 1], "note": "1e-3"}).splitlines()
        ['lr: 1.0e-05', 'seeds: [0, 1]', "note: '1e-3'"]
    """
    import yaml

    return yaml.dump(value, Dumper=_dumper(), sort_keys=False, allow_unicode=True, width=100)


def _node(loader: Any, node: Any, source: str, lines: bool) -> Node:
    import yaml

    where = f"{source}, line {node.start_mark.line + 1}" if lines else source
    if not isinstance(node, yaml.MappingNode):
        return Node(loader.construct_object(node, deep=True), where)
    _refuse_duplicates(loader, node)
    loader.flatten_mapping(node)
    value = {}
    for key, content in node.value:
        child = _node(loader, content, source, lines)
        if lines:  # a mapping begins on the line of its key
            child = Node(child.value, f"{source}, line {key.start_mark.line + 1}")
        value[str(loader.construct_object(key, deep=True))] = child
    return Node(value, where)


def _refuse_duplicates(loader: Any, node: Any) -> None:
    import yaml

    seen = set()
    for key, _ in node.value:
        name = str(loader.construct_object(key, deep=True))
        if name in seen:
            raise yaml.constructor.ConstructorError(
                problem=f"the key `{name}` is there twice", problem_mark=key.start_mark
            )
        seen.add(name)


@functools.cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own name for its table)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _refuse_duplicates(self, node)
            return super().construct_mapping(node, deep)

    _add_rules(Loader)
    Loader.add_constructor("tag:yaml.org,2002:int", _integer)
    Loader.add_constructor("tag:yaml.org,2002:float", _float)
    return Loader


def _integer(loader: Any, node: Any) -> int:
    text = node.value
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _float(loader: Any, node: Any) -> float:
    return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))


@functools.cache
def _dumper() -> Any:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Quotes what a YAML 1.1 or a YAML 1.2 reader would not take for text."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    _add_rules(Dumper)
    Dumper.add_representer(list, _on_one_line)
    Dumper.add_representer(str, _text)
    return Dumper


def _on_one_line(dumper: Any, value: list[Any]) -> Any:
    flat = not any(isinstance(each, (dict, list)) for each in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=flat)


def _text(dumper: Any, value: str) -> Any:
    # PyYAML folds odd white space in other styles: it would not come back.
    style = None if value.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


def _add_rules(kind: Any) -> None:
    for name, pattern, first in _PLAIN:
        letters = [letter if letter != "\0" else "" for letter in first]
        kind.add_implicit_resolver(
            f"tag:yaml.org,2002:{name}", re.compile(f"^({pattern})$"), letters
        )
