"""README and documentation: every program in them runs, every link leads somewhere.

Python blocks of a page share one namespace and run in order. A block may be followed by a block
`text title="output"`, which must then be what it prints. `<!-- docs-test: skip REASON -->` before a
block leaves it out.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import functools
import importlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import fcco

ROOT = Path(__file__).resolve().parent.parent
DOCS, SOURCE = ROOT / "docs", ROOT / "src" / "fcco"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PROJECT_FILES = [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
MOST_SKIPS = 3  # blocks that are not run, over all pages

_FENCE = re.compile(
    r"(?:<!-- docs-test: skip(?P<reason>[^\n]*?)-->\s*)?"
    r"^(?P<indent> *)```(?P<language>[\w-]*)(?P<rest>[^\n]*)\n(?P<body>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    code: str
    skip: str | None
    output: str | None = None

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(path: Path) -> list[Block]:
    """All fenced blocks; an output block is attached to the block above it."""
    text, page = path.read_text(), path.relative_to(ROOT).as_posix()
    found: list[Block] = []
    end = 0
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        indent = len(match["indent"])
        code = "".join(row[indent:] for row in match["body"].splitlines(keepends=True))
        if 'title="output"' in match["rest"]:
            between = text[end : match.start()]
            assert found and found[-1].language == "python" and not between.strip(), (
                f"{page}:{line}: an output block must follow a Python block at once"
            )
            found[-1].output = code
        else:
            skip = None if match["reason"] is None else match["reason"].strip()
            found.append(Block(page, line, match["language"], code, skip))
        end = match.end()
    return found


BLOCKS = {path: blocks_of(path) for path in PAGES}
PYTHON = [block for blocks in BLOCKS.values() for block in blocks if block.language == "python"]


@dataclass
class Page:
    """The programs of a page, run in order as far as a test asks for."""

    blocks: list[Block]
    folder: Path
    done: list[tuple[str, Exception | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A module, because dataclasses and pickle look their own one up.
        self.module = types.ModuleType("docs_page_" + re.sub(r"\W", "_", self.blocks[0].page))
        sys.modules[self.module.__name__] = self.module

    def run(self, number: int) -> tuple[str, Exception | None]:
        """What a block prints and how it ends; blocks before it run first, once."""
        while len(self.done) <= number:
            block = self.blocks[len(self.done)]
            if block.skip is not None or missing_packages(block.code):
                self.done.append(("", None))
                continue
            self.done.append(execute(block.code, block.id, self.module.__dict__, self.folder))
        return self.done[number]


def execute(
    code: str, name: str, namespace: dict[str, Any], folder: Path
) -> tuple[str, Exception | None]:
    """Run a program in a folder of its own; give back what it printed and its exception."""
    torch.manual_seed(0)
    printed = io.StringIO()
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
            exec(compile(code, name, "exec"), namespace)
    except Exception as error:
        return printed.getvalue(), error
    return printed.getvalue(), None


def missing_packages(code: str) -> list[str]:
    """The packages that a program imports and this environment lacks."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return sorted(name for name in names if importlib.util.find_spec(name) is None)


@functools.cache
def page_of(name: str, folder: Path) -> Page:
    return Page([block for block in PYTHON if block.page == name], folder)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


# Remarks of third-party packages about themselves; those of fcco and torch stay errors.
@pytest.mark.filterwarnings("ignore::Warning:(lightning|pytorch_lightning|torchmetrics)")
@pytest.mark.filterwarnings("ignore::Warning:(accelerate|transformers|huggingface_hub|datasets)")
@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.id)
def test_python_block(block: Block, folder: Path):
    if block.skip is not None:
        pytest.skip(block.skip)
    if missing := missing_packages(block.code):
        pytest.skip(f"needs {', '.join(missing)}")
    page = page_of(block.page, folder)
    number = page.blocks.index(block)
    printed, error = page.run(number)
    if error is not None:
        for earlier, (_, cause) in zip(page.blocks[:number], page.done, strict=False):
            if cause is not None:
                pytest.fail(f"{earlier.id} fails, on which this block may build: {cause!r}")
        raise error
    if block.output is not None:
        assert printed == block.output


def test_blocks_are_found_and_hardly_any_is_skipped():
    assert len(PYTHON) >= 20
    assert {block.page for block in PYTHON} >= {"README.md", "docs/index.md", "docs/faq.md"}
    skipped = [block for block in PYTHON if block.skip is not None]
    assert all(block.skip for block in skipped), "a skipped block needs a reason"
    assert len(skipped) <= MOST_SKIPS, [block.id for block in skipped]


def test_a_skip_comment_belongs_to_a_python_block():
    for path, blocks in BLOCKS.items():
        comments = path.read_text().count("docs-test: skip")
        skipped = [b for b in blocks if b.skip is not None and b.language == "python"]
        assert comments == len(skipped), path


def test_a_wrong_program_or_output_is_noticed(tmp_path: Path):
    """The machinery above can fail."""
    page = tmp_path / "page.md"
    page.write_text(
        '```python\nx = 1\nprint(x)\n```\n\n```text title="output"\n2\n```\n\n'
        "<!-- docs-test: skip no device -->\n```python\nraise ValueError\n```\n\n"
        "* item\n\n    ```python\n    print(x + y)\n    ```\n"
    )
    text, root = page.read_text(), ROOT
    try:
        globals()["ROOT"] = tmp_path
        blocks = blocks_of(page)
    finally:
        globals()["ROOT"] = root
    assert [block.skip for block in blocks] == [None, "no device", None]
    assert [block.output for block in blocks] == ["2\n", None, None]
    assert blocks[2].code == "print(x + y)\n"
    assert text.splitlines()[blocks[2].line - 1].strip() == "```python"
    runner = Page(blocks, tmp_path)
    assert runner.run(0) == ("1\n", None)
    assert isinstance(runner.run(2)[1], NameError)
    assert missing_packages("import no_such_package.part, torch") == ["no_such_package"]


# --- the quick start ---------------------------------------------------------------------------


def readme_diff() -> tuple[str, str]:
    """The program before and after the diff of the README."""
    (block,) = [block for block in BLOCKS[ROOT / "README.md"] if block.language == "diff"]
    before, after = [], []
    for row in block.code.splitlines():
        mark, rest = row[:1], row[1:]
        assert mark in ("", " ", "+", "-"), f"not a line of a diff: {row!r}"
        if mark != "+":
            before.append(rest)
        if mark != "-":
            after.append(rest)
    return "\n".join(before), "\n".join(after)


def test_readme_diff_runs_and_helps_the_worst_groups(tmp_path: Path):
    """The README says: from about 0.7 to about 0.45 for the two hard groups."""
    results = []
    for program in readme_diff():
        namespace: dict[str, Any] = {}
        _, error = execute(program, "README diff", namespace, tmp_path)
        if error is not None:
            raise error
        x, y, group = namespace["data"].tensors
        with torch.no_grad():
            losses = namespace["bce"](namespace["model"](x).squeeze(1), y, reduction="none")
        results.append(fcco.group_mean(losses, group).values[:2].mean().item())
    assert results[0] == pytest.approx(0.7, abs=0.06)
    assert results[1] == pytest.approx(0.45, abs=0.06)


def test_readme_constraint_is_active_as_the_text_says(folder: Path):
    page = page_of("README.md", folder)
    assert page.run(len(page.blocks) - 1)[1] is None
    names = page.module.__dict__
    with torch.no_grad():
        losses = names["bce"](names["model"](names["x"]).squeeze(1), names["y"], reduction="none")
    women, men = fcco.group_mean(losses, names["group"]).values.tolist()
    assert women == pytest.approx(0.5, abs=0.04)  # 0.8 without the constraint
    assert men < 0.4
    multipliers = names["objective"].multipliers()
    assert multipliers["women"] > 0 and multipliers["men"] == 0


def test_the_diff_is_small():
    before, after = readme_diff()
    changed = set(after.splitlines()) - set(before.splitlines())
    assert "fcco" not in before
    assert 1 < len(changed) <= 6


def test_readme_names_the_two_commands():
    text = (ROOT / "README.md").read_text()
    first = next(block for block in BLOCKS[ROOT / "README.md"])
    assert [row.split("#")[0].strip() for row in first.code.splitlines()] == [
        "make demo",
        "make test",
    ]
    assert text.index("make demo") < 600, "on the first screen"
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in re.findall(r"\bmake ([a-z]+)\b", text):
        assert command in targets, command


def test_contributing_names_targets_and_layers():
    """Its commands and files exist, and imports go upwards in its list of files."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in re.findall(r"`?make ([a-z]+)\b", text):
        assert command in targets, command
    listing = text.split("src/fcco/\n")[1].split("\ntests/")[0]
    layers: dict[str, int] = {}
    for number, row in enumerate(listing.splitlines()):
        for name in re.findall(r"(?:^ {4}|, )(\w+)(?:\.py|/)", row):
            layers[name] = number
    there = {path.stem for path in SOURCE.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert set(layers) == there - {"__init__", "__main__", "__pycache__"}
    checked = 0
    for path in SOURCE.rglob("*.py"):
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level > 0:
                for target in _relative_targets(node, path):
                    if target != own and {own, target} <= set(layers):
                        checked += 1
                        assert layers[target] <= layers[own], f"{path}: imports {target}"
    assert checked > 50


def _relative_targets(node: ast.ImportFrom, path: Path) -> Iterator[str]:
    """The top-level parts of the package that a relative import refers to."""
    base = path.parents[node.level - 1]
    parts = base.relative_to(SOURCE).parts + tuple((node.module or "").split("."))
    parts = tuple(part for part in parts if part)
    if parts:
        yield parts[0]
    else:
        yield from (alias.name for alias in node.names)


# --- doctests ----------------------------------------------------------------------------------


def modules_with_examples() -> list[str]:
    """By the text of their files, so that one broken import does not hide all other tests."""
    files = sorted(path for path in SOURCE.rglob("*.py") if ">>> " in path.read_text())
    names = [".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in files]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize("name", modules_with_examples())
def test_doctests(name: str):
    torch.manual_seed(0)
    module = importlib.import_module(name)
    report = io.StringIO()
    with contextlib.redirect_stdout(report):
        result = doctest.testmod(module, name=name)
    assert result.attempted > 0
    assert result.failed == 0, report.getvalue()


def test_most_public_classes_have_an_example():
    finder = doctest.DocTestFinder(recurse=False)
    public = [getattr(fcco, name) for name in dir(fcco) if name[0].isupper()]
    public += [getattr(fcco.outer, name) for name in fcco.outer.__all__ if name[0].isupper()]
    with_example = [
        each for each in public if any(test.examples for test in finder.find(each, each.__name__))
    ]
    assert len(with_example) > 0.8 * len(public)


# --- links -------------------------------------------------------------------------------------

_LINK = re.compile(r"(?<!\!)\[(?:[^\]\[]|\[[^\]]*\])*\]\((?P<target>[^)\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))


def anchors(path: Path) -> set[str]:
    """The anchors of the headings of a page, as the site and GitHub make them."""
    headings = re.findall(r"^#+ +(.+?) *$", _FENCE.sub("", path.read_text()), re.MULTILINE)
    plain = [re.sub(r"[`*$\\]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading)) for heading in plain}


def relative_links(path: Path) -> Iterator[tuple[str, str]]:
    for match in _LINK.finditer(without_code(path.read_text())):
        target = match["target"]
        if not re.match(r"[a-z]+:", target):
            file, _, anchor = target.partition("#")
            yield file, anchor


@pytest.mark.parametrize(
    "path", [*PAGES, *PROJECT_FILES], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_relative_links(path: Path):
    for file, anchor in relative_links(path):
        target = (path.parent / file).resolve() if file else path
        assert target.is_file(), f"{path.name}: {file} does not exist"
        if anchor:
            assert anchor in anchors(target), f"{path.name}: {file}#{anchor} does not exist"


def test_links_are_found():
    links = list(relative_links(ROOT / "README.md"))
    assert len(links) > 8
    assert ("docs/how-to-choose.md", "smoothing") in links


def test_docstrings_name_pages_that_exist():
    mentions = set()
    for path in (ROOT / "src").rglob("*.py"):
        mentions |= set(re.findall(r"docs/[\w-]+\.md", path.read_text()))
    assert "docs/mathematics.md" in mentions
    for mention in mentions:
        assert (ROOT / mention).is_file(), mention


# --- the site ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "default"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return target


def html(site: Path) -> dict[str, str]:
    return {str(path.relative_to(site)): path.read_text() for path in site.rglob("*.html")}


def test_site_builds_and_has_every_page(site: Path):
    pages = html(site)
    for path in DOCS.rglob("*.md"):
        name = path.relative_to(DOCS).with_suffix("")
        file = name.parent / "index.html" if name.name == "index" else name / "index.html"
        assert str(file) in pages, file
    assert not list(site.rglob("*.py"))


def test_site_renders_math(site: Path):
    """No directive or role of the docstrings is left, and formulas are marked for MathJax."""
    pages = html(site)
    for name, text in pages.items():
        assert ".. math::" not in text and ":math:" not in text, name
        assert "$$" not in text, name
    formulas = {name: len(re.findall(r'class="arithmatex"', text)) for name, text in pages.items()}
    for name in ("methods", "objectives", "outer", "tracker", "diagnostics", "theory"):
        assert formulas[f"api/{name}/index.html"] >= 2, name
    assert formulas["mathematics/index.html"] > 100
    assert "tex-mml-chtml.js" in pages["mathematics/index.html"]


def test_site_shows_docstrings_as_written(site: Path):
    """Examples are code, not nested quotes; subscripts and stars are not emphasis."""
    for name, text in html(site).items():
        if name.startswith("api/"):
            assert "<blockquote>" not in text, name
            assert not re.search(r"<em>[^<]*(?:\]|\+|=)[^<]*</em>", text), name
    outer = html(site)["api/outer/index.html"]
    assert "rho [u]_+" in outer
    assert "<code>AbstractOuter</code>" in outer


def test_site_documents_every_public_name(site: Path):
    text = "".join(text for name, text in html(site).items() if name.startswith("api/"))
    ids = set(re.findall(r'id="([\w.]+)"', text))
    packages = "outer tracker terms optim constraints methods storm groups contrastive continual"
    modules = [getattr(fcco, name) for name in (packages + " diagnostics theory").split()]
    public = {name for name in dir(fcco) if not name.startswith("_")}
    public = {name for name in public if not isinstance(getattr(fcco, name), types.ModuleType)}
    for module in modules:
        public |= set(module.__all__)
    documented = {each.split(".")[-1] for each in ids}
    assert public - documented == set()


@pytest.fixture(scope="session")
def hooks() -> Any:
    pytest.importorskip("griffe")
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONVERSIONS = {
    "role": ("a :math:`x_i^2` b", r"a \(x_i^2\) b"),
    "line": ("A.\n\n.. math:: x = 1\n\nB.", "A.\n\n\n$$\nx = 1\n$$\n\nB."),
    "block": (
        "A.\n\n.. math::\n    x &= 1 \\\\\n      &= 2\n\nB.",
        "A.\n\n\n$$\n\\begin{aligned}\nx &= 1 \\\\\n&= 2\n\\end{aligned}\n$$\n\nB.",
    ),
    "subscript": ("[u]_+ and [v]_+", r"[u]\_+ and [v]\_+"),
    "name": ("num_inner: n", "num_inner: n"),
    "star": ("f*(y) <= f* here", r"f\*(y) &lt;= f\* here"),
    "emphasis": ("the *same* samples", "the *same* samples"),
    "bullet": ("* one\n* two", "* one\n* two"),
    "code": ("`a_ * b_` and `[u]_+`", "`a_ * b_` and `[u]_+`"),
    "link": ("see `Hinge`", "see [`Hinge`][fcco.Hinge]"),
    "page": ("see docs/mathematics.md.", "see [Mathematics][mathematics]."),
    "example": ("Example:\n    >>> x_ * y_\n    1 * 2", "Examples:\n    >>> x_ * y_\n    1 * 2"),
}


@pytest.mark.parametrize("case", CONVERSIONS)
def test_docstring_to_markdown(hooks: Any, case: str):
    before, after = CONVERSIONS[case]
    assert hooks.to_markdown(before, {"Hinge": "fcco.Hinge"}) == after


# --- project files -----------------------------------------------------------------------------


def test_citation_agrees_with_the_package():
    config = pytest.importorskip("fcco_experiments.config")
    citation = config.parse((ROOT / "CITATION.cff").read_text(), "CITATION.cff").plain()
    assert citation["version"] == fcco.__version__
    paper = citation["preferred-citation"]
    readme = (ROOT / "README.md").read_text()
    for author in paper["authors"]:
        assert f"{author['family-names']}, {author['given-names']}" in readme
    assert paper["url"] in readme
    assert fcco.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_the_number_of_outer_functions_is_right():
    """README and changelog count them; the base class, `Custom` and the envelope are no such."""
    classes = [name for name in fcco.outer.__all__ if isinstance(getattr(fcco.outer, name), type)]
    number = len(set(classes) - {"AbstractOuter", "Custom", "MoreauEnvelope"})
    for name in ("README.md", "CHANGELOG.md"):
        assert f"{number} outer functions" in (ROOT / name).read_text(), name


def test_the_demo_exists():
    """It runs a command that there is, on a config that there is."""
    from fcco_experiments import config, tasks

    makefile = (ROOT / "Makefile").read_text()
    (line,) = re.findall(r"fcco compare (\w+) --data (\w+) --quick", makefile)
    task = tasks.get(line[0])
    quick = config.load(task, task.config_name(line[1], None), quick=True)
    assert {"alexr2", "sonex", "sox", "sonx", "icppac"} <= set(quick.methods)
    if shutil.which("make"):
        plan = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True)
        assert plan.returncode == 0 and "fcco compare" in plan.stdout
