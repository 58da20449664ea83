"""Pages of results: short, and their figures are those of the results and of the details."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from studies import publish

DOCS = Path(__file__).parents[1] / "docs"
SHORT = (
    "constrained", "continual", "estimators", "fairness", "group-dro", "identities", "ranking",
    "step-cost",
)  # fmt: skip


def text(page: str) -> str:
    return (DOCS / f"research/{page}.md").read_text(encoding="utf-8")


def rows(page: str) -> list[list[str]]:
    """The cells of all lines of tables."""
    lines = re.findall(r"^\|(.*)\|$", text(page).replace(r"\|", "¦"), re.MULTILINE)
    return [[cell.strip().replace("¦", r"\|") for cell in line.split("|")] for line in lines]


@pytest.mark.parametrize("page", SHORT)
def test_a_page_of_results_is_short(page: str) -> None:
    """At most 250 words outside of its one table, a command, and the way to the details."""
    page_ = text(page)
    prose = re.sub(r"^```.*?^```$|^\|.*?$|^!\[.*?$", "", page_, flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) <= 250
    assert len(re.findall(r"^\| ---", page_, re.MULTILINE)) == 1
    assert re.search(r"^```(ba)?sh$", page_, re.MULTILINE)
    assert f"(details/{page}.md)" in page_


def test_the_pages_of_the_menu_are_short_together() -> None:
    """Tables included."""
    pages = [path.read_text() for path in (DOCS / "research").glob("*.md")]
    words = [word for page in pages for word in page.split() if re.search(r"\w", word)]
    assert len(words) <= 4500


def test_constraints_untuned() -> None:
    """The first numbers of the page are those of its table."""
    found = publish.table("untuned")["constraints"]
    problems = [found[name] for name in ("adult", "compas", "convex", "sampled", "docs")]
    worst = {name: max(each[name]["violation"] for each in problems) for name in problems[0]}
    peers = [value for name, value in worst.items() if name.startswith(("Cooper", "HCT"))]
    page = " ".join(text("constrained").split())
    assert f"at most {worst['fcco']:.3f} on five problems" in page
    assert f"exceed one by {min(peers):.3f} to {max(peers):.3f}" in page


def test_step_costs() -> None:
    """What the prose says is what the table shows, which `docs/tables.py` writes."""
    short = [[float(cell) for cell in row[1:]] for row in rows("step-cost") if "H200," in row[0]]
    large = [ratio for row in short[1:] for ratio in row[1:]]
    prose = " ".join(text("step-cost").split())
    assert f"{min(large):.2f} to {max(large):.2f} times as long" in prose
    assert f"up to {max(short[0][1:]):.1f} times" in prose
