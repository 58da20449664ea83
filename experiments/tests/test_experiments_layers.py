"""A part of the application knows only those below it, and no module waits for itself."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import fcco_experiments
import pytest

ROOT = Path(fcco_experiments.__file__).parent
LAYERS = [
    "config", "task", "data", "store", "environment",
    "backbones", "stats", "tasks", "run", "sweep", "report", "compare", "cli",
    "__main__",
]  # fmt: skip


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in ROOT.rglob("*.py")}


def imported(name: str) -> Iterator[str]:
    """The modules of the application that one imports, also inside of functions."""
    package = name.split(".") if MODULES[name].name == "__init__.py" else name.split(".")[:-1]
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    typing = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    typing = [node for node in typing if "TYPE_CHECKING" in ast.unparse(node.test)]
    left_out = {id(inner) for node in typing for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(each.name.startswith("fcco_experiments") for each in node.names), name
        if not isinstance(node, ast.ImportFrom) or id(node) in left_out or not node.level:
            continue
        base = [*package[: len(package) - node.level + 1], *filter(None, [node.module])]
        for each in node.names:
            inner = ".".join([*base, each.name])
            yield inner if inner in MODULES else ".".join(base)


GRAPH = {name: set(imported(name)) - {name, ""} for name in MODULES}


def test_every_part_has_a_layer():
    assert {name.split(".")[0] for name in MODULES} - {""} == set(LAYERS)


@pytest.mark.parametrize("part", LAYERS)
def test_a_part_knows_only_those_below_it(part):
    below = set(LAYERS[: LAYERS.index(part) + 1])
    own = {name: used for name, used in GRAPH.items() if name.split(".")[0] == part}
    above = {f"{name} -> {each}" for name, used in own.items() for each in used
             if each.split(".")[0] not in below}  # fmt: skip
    assert not above


def test_there_is_no_cycle():
    graphlib.TopologicalSorter(GRAPH).prepare()
    with pytest.raises(graphlib.CycleError):  # it can fail
        graphlib.TopologicalSorter({**GRAPH, "config": {"cli"}}).prepare()
