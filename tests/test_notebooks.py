"""The notebooks of the tutorials are their pages; `pytest -m slow` runs them in full.

docs/notebooks.py makes them from the pages, whose programs test_docs.py runs.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SPEC = importlib.util.spec_from_file_location("docs_notebooks", ROOT / "docs" / "notebooks.py")
assert SPEC is not None and SPEC.loader is not None
notebooks = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = notebooks  # its dataclass looks it up
SPEC.loader.exec_module(notebooks)

pages = pytest.mark.parametrize("page", notebooks.PAGES, ids=lambda page: page.stem)


def committed(page: Path) -> dict[str, Any]:
    return json.loads(page.with_suffix(".ipynb").read_text(encoding="utf-8"))


def texts(notebook: dict[str, Any]) -> list[tuple[str, str, str, int]]:
    """Kind, source, printed text and number of pictures of each cell."""
    found = []
    for cell in notebook["cells"]:
        outputs = cell.get("outputs", [])
        printed = "".join("".join(each["text"]) for each in outputs if "text" in each)
        pictures = sum("image/png" in each.get("data", {}) for each in outputs)
        found.append((cell["cell_type"], "".join(cell["source"]), printed, pictures))
    return found


@pages
def test_a_notebook_is_its_page(page: Path):
    """`python docs/notebooks.py` makes it anew."""
    cells = notebooks.cells_of(page.read_text())
    expected = [(cell.kind, cell.source, cell.printed, len(cell.images)) for cell in cells]
    notebook = committed(page)
    assert texts(notebook) == expected
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)  # cells have ids
    assert len({cell["id"] for cell in notebook["cells"]}) == len(cells)
    assert 1 <= sum(len(cell.images) for cell in cells) <= 3
    for alt, path in [image for cell in cells for image in cell.images]:
        assert alt and (page.parent / path).stat().st_size < 50_000
    assert page.with_suffix(".ipynb").stat().st_size < 100_000
    assert f"]({page.stem}.ipynb)" in page.read_text().split("##")[0]


def test_pages_are_found():
    assert len(notebooks.PAGES) >= 5


def test_a_page_that_says_something_else_is_refused(tmp_path: Path):
    page = tmp_path / "page.md"
    text = "# A\n\n[This](a.ipynb).\n\n```python\nprint(1)\n```\n"
    right = text + '\n```text title="output"\n1\n```\n\nSee [B](b.md).\n'
    page.write_text(right)
    content, pictures = notebooks.build(page)
    assert [cell[:3] for cell in texts(content)] == [
        ("markdown", "# A", ""), ("code", "print(1)", "1\n"), ("markdown", "See B.", ""),
    ]  # fmt: skip
    assert pictures == {}
    drawn = text.replace("print(1)", "import matplotlib.pyplot as plt\nplt.plot([1])")
    for wrong, message in (
        (text, "a program prints"),
        (right.replace("See", "![a](a.svg)\n\nSee"), "must show no picture after"),
        (drawn, "must show page-1.svg after"),
    ):
        page.write_text(wrong)
        with pytest.raises(ValueError, match=message):
            notebooks.build(page)


@pytest.mark.slow
@pages
def test_a_notebook_runs(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """It prints what is in it, without the seed that test_docs.py sets before each program."""
    if "import gguf" in page.read_text():
        pytest.importorskip("gguf")  # the reader of a model's weights, which is no extra
    monkeypatch.chdir(tmp_path)
    content, pictures = notebooks.build(page)
    assert texts(content) == texts(committed(page))
    assert all(path.exists() for path in pictures)
    assert not list(tmp_path.iterdir())
