"""The repository: one version, pins that agree, workflows, and what the built packages hold."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import fcco
from docs import llms

ROOT = Path(__file__).parent.parent
SKILL = ROOT / "src/fcco/.agents/skills/fcco/SKILL.md"
PROJECTS = {
    name: tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    for name, folder in {"fcco": ".", "fcco-experiments": "experiments"}.items()
}
EXTRAS = {name: each["optional-dependencies"] for name, each in PROJECTS.items()}
# A requirement: the name, the extras, and what it says of versions.
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,-]+)\])?(.*)")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / file).read_text(), re.MULTILINE)
    return {normal(name): version for name, version in found}


def required(project: str, *extras: str) -> dict[str, str]:
    """What a project and its extras ask for, by name; extras of our own packages are followed."""
    listed = list(PROJECTS[project]["dependencies"])
    for extra in extras:
        listed += EXTRAS[project][extra]
    found: dict[str, str] = {}
    for each in listed:
        match = _REQUIREMENT.fullmatch(each)
        assert match is not None, each
        name, more, version = match.groups()
        if name in PROJECTS:
            found |= required(name, *filter(None, (more or "").split(",")))
        else:
            found[normal(name)] = version
    return found


# --- versions ----------------------------------------------------------------------------------


def test_both_packages_have_one_version():
    """The citation, the home page and the newest release of the changelog name the same."""
    init = (ROOT / "experiments/fcco_experiments/__init__.py").read_text()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    home = (ROOT / "docs/index.md").read_text()
    found = {
        "fcco_experiments": re.findall(r'^__version__ = "(.+)"', init, re.MULTILINE),
        "CITATION.cff": re.findall(
            r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE
        ),
        "CHANGELOG.md": re.findall(r"^## (\d.*)$", changelog, re.MULTILINE)[:1],
        "docs/index.md": re.findall(r"^Version (\d\S+\d)", home, re.MULTILINE),
    }
    assert found == {name: [fcco.__version__] for name in found}
    assert re.findall(r"^## (.*)$", changelog, re.MULTILINE)[0] == "Unreleased"


# --- pins --------------------------------------------------------------------------------------


def test_the_pins_with_hashes_are_those_of_the_constraints():
    """Else: `make lock`. PyTorch has no hash, since its file depends on the machine."""
    pinned, hashed = pins("constraints.txt"), pins("requirements.txt")
    wanted = required("fcco", "dev") | required("fcco-experiments", "all")
    assert len(wanted) > 30 and wanted.keys() - hashed.keys() == {"torch"}
    # Others are for platforms where nothing is tested: there they may be any.
    assert {name: hashed[name] for name in hashed.keys() & pinned.keys()}.items() <= pinned.items()
    assert hashed.keys() - pinned.keys() <= {"colorama", "httpx2-jsfetch"}
    entries = re.split(r"\n(?=\S)", (ROOT / "requirements.txt").read_text().strip())
    assert len(entries) == len(hashed) and all("--hash=sha256:" in each for each in entries)


def test_libraries_of_published_tables_are_pinned():
    pinned, names = pins("constraints.txt"), {"cooper-optim", "fairlearn", "humancompatible-train"}
    bench = required("fcco", "bench")
    for name in names | {"lightgbm"}:
        assert bench[name] == f"=={pinned[name]}", name
    assert required("fcco", "libauc")["libauc"].startswith("==")


# --- workflows ---------------------------------------------------------------------------------


def workflows() -> dict[str, dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    files = sorted((ROOT / ".github/workflows").glob("*.yml"))
    return {file.stem: yaml.safe_load(file.read_text()) for file in files}


def test_workflows_test_what_the_package_promises():
    job = workflows()["test"]["jobs"]["versions"]["strategy"]["matrix"]
    promised = [each.split(" :: ")[-1] for each in PROJECTS["fcco"]["classifiers"]]
    assert job["python"] == [each for each in promised if re.fullmatch(r"3\.\d+", each)]
    lowest = required("fcco")["torch"].removeprefix(">=")
    assert job["torch"] == [f"torch=={lowest}.*", "torch"]


def test_actions_of_workflows_are_pinned_to_commits():
    """What a tag points to can be changed by others."""
    steps = [
        step
        for each in workflows().values()
        for job in each["jobs"].values()
        for step in job["steps"]
    ]
    used = [step["uses"] for step in steps if "uses" in step]
    assert len(used) > 8
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action


# --- what is built -----------------------------------------------------------------------------


def build(folder: Path, target: str, out: Path) -> Path:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = out.iterdir()
    return built


def test_the_wheel_holds_the_library_and_the_files_for_assistants(tmp_path: Path):
    built = build(ROOT, "wheel", tmp_path)
    assert built.stat().st_size < 500_000
    with zipfile.ZipFile(built) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        for name, source in {
            "fcco/.agents/skills/fcco/SKILL.md": SKILL,
            "fcco/llms.txt": ROOT / "docs/llms.txt",
        }.items():
            assert wheel.read(name) == source.read_bytes()
    modules = {f"fcco/{p.relative_to(ROOT / 'src/fcco')}" for p in (ROOT / "src").rglob("*.py")}
    assert names - modules == {
        "fcco/py.typed", "fcco/.agents/skills/fcco/SKILL.md", "fcco/llms.txt",
    }  # fmt: skip
    assert modules <= names


def test_the_source_distribution_holds_what_its_tests_read(tmp_path: Path):
    with tarfile.open(build(ROOT, "sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = (
        "src",
        "tests",
        "experiments",
        "studies",
        "benchmarks",
        "docs",
        "examples",
        ".github",
    )
    for folder in folders:
        files = [p for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".md", ".yml"}]
        assert files and {str(p.relative_to(ROOT)) for p in files} <= names, folder
    assert {"conftest.py", "Makefile", "requirements.txt", "constraints.txt"} <= names


def test_the_wheel_of_the_experiments_holds_configs_templates_and_the_licence(tmp_path: Path):
    package, licence = ROOT / "experiments/fcco_experiments", (ROOT / "LICENSE").read_bytes()
    with zipfile.ZipFile(build(ROOT / "experiments", "wheel", tmp_path)) as wheel:
        names = set(wheel.namelist())
        (found,) = [name for name in names if name.endswith("/licenses/LICENSE")]
        assert wheel.read(found) == licence
    wanted = [p for p in package.rglob("*") if p.suffix in {".py", ".yaml", ".j2", ".css"}]
    assert {p.suffix for p in wanted} >= {".py", ".yaml", ".j2", ".css"}
    assert {str(p.relative_to(package.parent)) for p in wanted} <= names


# --- for coding assistants ---------------------------------------------------------------------


def test_the_skill_is_short_and_says_when_it_applies():
    """Its programs are run with those of the pages."""
    lines = SKILL.read_text().splitlines()
    assert len(lines) <= 100
    assert lines[0] == lines[3] == "---" and lines[1] == "name: fcco"
    description = lines[2].removeprefix("description: ")
    assert "fcco" in description and len(description) <= 1024


def test_the_overview_is_up_to_date():
    """Else: `python -m docs.llms`."""
    assert (ROOT / "docs/llms.txt").read_text() == llms.overview()
    assert llms.overview().count("\n- [") > 50
