"""The package as a whole: what importing it costs, how its files depend on each other."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterable
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


# What each part of the library may use besides itself, foundations first.
CHECKS, RANKS = {"_checks", "_schedules"}, {"_distributed", "_state"}
VALUES = CHECKS | RANKS | {"outer", "rules", "tracker", "previous", "terms"}
CALLS = VALUES | {"_watch", "optim", "inputs", "objective"}
OBJECTIVES = {"groups", "report", "group_dro", "constraints", "contrastive", "methods", "xrisk"}
MAY_USE = {
    "_checks": set(),
    "index": set(),
    "_distributed": set(),
    "_state": set(),
    "_schedules": {"_checks"},
    "_files": {"previous"},
    "_watch": {"optim", "previous", "terms", "tracker"},
    "_cuda_graphs": set(),
    "_replay": {"_cuda_graphs", "rules", "terms", "tracker"},
    "outer": {"_checks"},
    "rules": {"_checks", "outer"},
    "groups": {"_checks", "_files", "index"} | RANKS,
    "previous": {"_state"},
    "tracker": {"_checks", "index", "rules"} | RANKS,
    "diagnostics": {"_checks", "tracker"},
    "optim": CHECKS | {"_state", "previous", "rules"},
    "terms": VALUES,
    "inputs": {"_checks", "_distributed", "index", "tracker", "terms"},
    "report": VALUES | {"inputs"},
    "certificate": {"_checks", "report", "terms"},
    "objective": CALLS | {"_replay", "certificate", "continual"},
    "group_dro": CALLS | {"continual", "report"},
    "constraints": CALLS | {"report"},
    "contrastive": CALLS,
    "xrisk": CALLS,
    "methods": CALLS | {"continual", "report", "group_dro", "constraints"},
    "continual": {"_checks", "_files", "inputs"} | RANKS,
    "fleet": CALLS | {"group_dro", "constraints", "methods"},
    "integrations": CALLS | OBJECTIVES | {"continual", "index"},
}


def parts_used(file: Path) -> set[str]:
    """The parts of fcco that a file imports, anywhere in it but for type checkers."""
    package = ["fcco", *file.relative_to(SOURCE).parts[:-1]]
    used: set[str] = set()

    def collect(nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                parent = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*parent, *filter(None, [node.module])])
                names = [f"{base}.{alias.name}" for alias in node.names]
            else:
                collect(ast.iter_child_nodes(node))
                continue
            used.update(name.split(".")[1] for name in names if name.startswith("fcco."))

    collect(ast.parse(file.read_text()).body)
    return used & PARTS.keys()


PARTS: dict[str, list[Path]] = {}
for file in FILES:
    PARTS.setdefault(file.relative_to(SOURCE).with_suffix("").parts[0], []).append(file)


def test_the_table_of_dependencies_lists_every_part():
    assert PARTS.keys() - {"__init__"} == MAY_USE.keys()


@pytest.mark.parametrize("part", MAY_USE)
def test_parts_do_not_know_what_is_built_on_them(part):
    for file in PARTS[part]:
        assert parts_used(file) - {part} <= MAY_USE[part], file.name


# Private names stay private.

FOREIGN = {
    # torch: counters and registries without a public reader
    "_version", "_buffers", "_modules", "_backward_hooks", "_post_accumulate_grad_hooks",
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
    "_static_graph_delay_allreduce_enqueued", "_sequence_nr",
    # Lightning: no hook lies between its call of `train_dataloader` and the first batches
    "_data_connector", "_prepare_dataloader", "_data_fetcher",
    "_current_frames",  # of sys, public in spite of its name, as are those of a NamedTuple
    "_replace", "_fields", "_asdict", "_make",
}  # fmt: skip


def test_no_object_reaches_into_another():
    """`other._x` is for the file that defines `_x`; what torch offers no public name for aside."""
    for file in FILES:
        nodes = list(ast.walk(ast.parse(file.read_text())))
        own = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        for node in (n for n in nodes if isinstance(n, ast.Attribute)):
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            owner = ast.unparse(node.value)
            if private and owner not in ("self", "cls", "super()", "torch", "torch.autograd"):
                assert node.attr in FOREIGN | own, f"{file.name}, line {node.lineno}"


PROBES = {
    "optimizer",  # Accelerate's wrapper of an optimizer is no subclass of torch's
    "_fsdp_flattened",  # FSDP 1 marks parameters so
    "_wrapped_by_lr_sched",  # a scheduler marks the step that it counts so
    "_orig_mod",  # the module inside torch.compile
    "__self__",  # the owner of a bound method
    "_asdict",  # a NamedTuple
    "columns",  # the names in a data frame, of whatever library
}


def test_no_behaviour_is_found_by_looking_for_an_attribute():
    """`hasattr`, or `getattr` with a default: only for marks that Python and others leave."""
    for file in FILES:
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


# Tests for a GPU.


def test_tests_for_a_gpu_need_torch_numpy_and_pytest_only():
    """The documented command, on a machine without a GPU and without the other packages."""
    program = """
        import importlib.abc, sys, pytest, torch
        class Missing(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in sys.argv[1].split(","):
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        for name in set(sys.modules) & set(sys.argv[1].split(",")):
            del sys.modules[name]
        sys.meta_path.insert(0, Missing())
        sys.exit(pytest.main(["-m", "gpu", "-p", "no:cacheprovider", "-q", "-rs"]))
    """
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = {name for extra in config["optional-dependencies"].values() for name in extra}
    names = {re.split(r"[\[><=~! ]", name)[0].replace("-", "_") for name in listed}
    missing = (names | {"fcco_experiments", "pydantic", "ruamel", "rich", "click", "sklearn"}) - {
        "fcco", "pytest",
    }  # fmt: skip
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), ",".join(missing)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env=os.environ | {
            "PYTHONPATH": str(ROOT / "src"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": "",
        },
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    assert "needs a CUDA device" in found.stdout
    assert int(re.findall(r"(\d+) skipped", found.stdout)[0]) > 25
