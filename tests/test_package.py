"""The package as a whole: what importing it costs, how its files depend on each other."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fcco

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "fcco"
FILES = sorted(SOURCE.rglob("*.py"))


def python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True)


def test_import_is_silent_and_needs_only_torch_and_numpy():
    first = "import sys, torch, numpy; bare = set(sys.modules); import fcco"
    ours = python(f"{first}; sys.stderr.write(' '.join(set(sys.modules) - bare))")
    assert ours.returncode == 0 and ours.stdout == ""
    loaded = set(ours.stderr.split())
    assert "fcco" in loaded and "fcco.objective" in loaded
    allowed = {"fcco", "torch", "numpy", *sys.stdlib_module_names}
    assert {name for name in loaded if name.partition(".")[0] not in allowed} == set()
    slow = {"scipy", "matplotlib", "torch.distributed.tensor", "torch.distributed.fsdp"}
    assert loaded & slow == set()


# Dependencies between files.


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(body: list[ast.stmt], everywhere: bool) -> Iterator[ast.stmt]:
    """Import statements at the top of a module, or also inside its functions."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif everywhere or not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            children = [child for child in ast.walk(node) if child is not node]
            yield from (c for c in children if isinstance(c, (ast.Import, ast.ImportFrom)))


def imports(file: Path, everywhere: bool = False) -> set[str]:
    """The fcco modules that a file imports."""
    own, found = module_name(file), set()
    package = own if file.name == "__init__.py" else own.rpartition(".")[0]
    for node in statements(ast.parse(file.read_text()).body, everywhere):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        assert isinstance(node, ast.ImportFrom)
        base = node.module or ""
        if node.level:
            parent = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            base = f"{parent}.{base}".rstrip(".")
        found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found & MODULES - {own}


MODULES = {module_name(file) for file in FILES}


def test_no_import_cycles():
    graph = {module_name(f): imports(f) for f in FILES if module_name(f) != "fcco"}
    assert sum(map(len, graph.values())) > 50, "the parser sees the imports"
    # Importing a.b runs a/__init__ first, but a package may import its own parts.
    finished: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"cycle: {' -> '.join((*path, name))}"
        if name not in finished:
            for other in graph.get(name, set()):
                if not name.startswith(f"{other}."):
                    visit(other, (*path, name))
            finished.add(name)

    for name in graph:
        visit(name, ())


# What each part of the library may use besides itself, foundations first.
CHECKS, RANKS = {"_checks", "_schedules"}, {"_distributed", "_state"}
VALUES = CHECKS | RANKS | {"outer", "tracker", "previous", "terms"}
CALLS = VALUES | {"_derivatives", "_watch", "optim", "inputs", "objective"}
MAY_USE = {
    "_checks": set(),
    "_distributed": set(),
    "_state": set(),
    "_schedules": {"_checks"},
    "_derivatives": {"_distributed"},
    "_files": {"previous"},
    "_watch": {"optim", "previous", "terms", "tracker"},
    "outer": {"_checks"},
    "groups": {"_checks"},
    "previous": {"_state"},
    "tracker": {"_checks"} | RANKS,
    "theory": {"_checks", "outer", "tracker"},
    "diagnostics": {"_checks", "outer", "tracker", "terms", "objective"},
    "optim": CHECKS | {"previous"},
    "terms": VALUES,
    "inputs": {"_distributed", "tracker", "terms"},
    "objective": CALLS,
    "report": VALUES | {"inputs"},
    "group_dro": CALLS | {"report"},
    "constraints": CALLS | {"report"},
    "storm": CALLS,
    "contrastive": CALLS,
    "methods": CALLS | {"group_dro", "constraints", "storm"},
    "continual": {"_checks", "_files"} | RANKS,
    "fleet": CALLS | {"group_dro", "constraints", "methods"},
}


def part_of(file: Path) -> str:
    """The module or package directly below fcco that a file belongs to."""
    return file.relative_to(SOURCE).with_suffix("").parts[0]


LIBRARY = FILES


def test_the_table_of_dependencies_lists_every_part():
    assert {part_of(file) for file in LIBRARY} - {"__init__"} == set(MAY_USE)


@pytest.mark.parametrize("part", MAY_USE)
def test_parts_do_not_know_what_is_built_on_them(part):
    for file in (file for file in LIBRARY if part_of(file) == part):
        used = {name.split(".")[1] for name in imports(file, everywhere=True) if "." in name}
        assert used - {part} <= MAY_USE[part], file.name


# Private names stay private.

FOREIGN = {
    # torch: counters and registries without a public reader
    "_version", "_buffers", "_modules", "_backward_hooks", "_post_accumulate_grad_hooks",
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
    "_static_graph_delay_allreduce_enqueued", "_sequence_nr",
    "_replace", "_fields", "_asdict",  # of a NamedTuple, public in spite of their names
}  # fmt: skip


def test_no_object_reaches_into_another():
    """`other._x` is for the file that defines `_x`; what torch offers no public name for aside."""
    for file in LIBRARY:
        nodes = list(ast.walk(ast.parse(file.read_text())))
        own = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        for node in (n for n in nodes if isinstance(n, ast.Attribute)):
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            owner = ast.unparse(node.value)
            if private and owner not in ("self", "cls", "super()", "torch", "torch.autograd"):
                assert node.attr in FOREIGN | own, f"{file.name}, line {node.lineno}"


PROBES = {
    "optimizer",  # Accelerate's wrapper of an optimizer is no subclass of torch's
    "found_inf",  # a GradScaler leaves it on a fused optimizer
    "_fsdp_flattened",  # FSDP 1 marks parameters so
    "_wrapped_by_lr_sched",  # a scheduler marks the step that it counts so
    "_orig_mod",  # the module inside torch.compile
    "__self__",  # the owner of a bound method
    "_asdict",  # a NamedTuple
}


def test_no_behaviour_is_found_by_looking_for_an_attribute():
    """`hasattr`, or `getattr` with a default: only for marks that Python and others leave."""
    for file in LIBRARY:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            function, place = ast.unparse(node.func), f"{file.name}, line {node.lineno}"
            if function == "hasattr" or (function == "getattr" and len(node.args) == 3):
                assert ast.literal_eval(node.args[1]) in PROBES, place
            assert not function.startswith("getattr("), f"calls what it finds: {place}"


# Public names.


def test_dir_shows_the_public_names_and_all_of_them_exist():
    assert dir(fcco) == sorted(set(fcco.__all__)) and len(dir(fcco)) == len(fcco.__all__)
    assert all(hasattr(fcco, name) for name in fcco.__all__)


def test_every_module_of_the_library_lists_its_public_names():
    for file in LIBRARY:
        body = ast.parse(file.read_text()).body
        targets = [ast.unparse(n.targets[0]) for n in body if isinstance(n, ast.Assign)]
        assert "__all__" in targets, file.relative_to(SOURCE)


def public_objects() -> Iterator[tuple[str, object]]:
    for name in fcco.__all__:
        yield f"fcco.{name}", getattr(fcco, name)
    for info in pkgutil.walk_packages(fcco.__path__, "fcco."):
        module = importlib.import_module(info.name)
        yield info.name, module
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            yield f"{info.name}.{name}", thing
            members = vars(thing).items() if inspect.isclass(thing) else ()
            for key, member in members:
                if not key.startswith("_"):
                    yield f"{info.name}.{name}.{key}", member


def test_every_public_name_has_a_docstring():
    def speaks(thing: object) -> bool:
        return (
            inspect.isclass(thing)
            or inspect.ismodule(thing)
            or inspect.isroutine(thing)
            or isinstance(thing, property)
        )

    things = {name: thing for name, thing in public_objects() if speaks(thing)}
    assert len(things) > 200
    assert {name for name, thing in things.items() if not inspect.getdoc(thing)} == set()


def test_typed_and_versioned():
    assert (SOURCE / "py.typed").exists()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in settings["project"]["dynamic"]
    assert settings["tool"]["hatch"]["version"]["path"] == "src/fcco/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", fcco.__version__)
    changelog = ROOT / "CHANGELOG.md"
    if changelog.exists():
        newest = re.search(r"\n## .*?(\d+\.\d+\.\d+)", changelog.read_text(), re.DOTALL)
        assert newest and newest[1] == fcco.__version__
