"""Pages of results: short, and their figures are those of the results and of the details."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from studies import publish
from studies.constrained import report

DOCS = Path(__file__).parents[1] / "docs"
SHORT = (
    "constrained", "continual", "convergence", "estimators", "fairness", "group-dro", "identities",
    "ranking", "step-cost",
)  # fmt: skip


def text(page: str) -> str:
    return (DOCS / f"research/{page}.md").read_text(encoding="utf-8")


def rows(page: str) -> list[list[str]]:
    """The cells of all lines of tables."""
    lines = re.findall(r"^\|(.*)\|$", text(page).replace(r"\|", "¦"), re.MULTILINE)
    return [[cell.strip().replace("¦", r"\|") for cell in line.split("|")] for line in lines]


@pytest.mark.parametrize("page", SHORT)
def test_a_page_of_results_is_short(page: str) -> None:
    """At most 300 words, one picture, one table, a command, and the way to the details."""
    page_ = text(page)
    prose = re.sub(
        r"^```.*?^```$|^\|.*?$|^!\[.*?$|^<!--.*?-->$", "", page_, flags=re.MULTILINE | re.DOTALL
    )
    prose = re.sub(r"\]\([^)]*\)", "]", prose)  # addresses are not read
    assert len(re.findall(r"[^\W_]+(?:[.,'’-][^\W_]+)*", prose)) <= 300
    assert page_.count("\n![") == 1 and len(re.findall(r"^\|[ -|]*---", page_, re.MULTILINE)) == 1
    assert "```bash" in page_ or "```sh" in page_
    assert f"(details/{page}.md)" in page_
    assert "?" in page_.split("\n\n")[1], "the question in plain words first"


def test_constraints_tuned() -> None:
    """The last rows of the short page are the best of each library."""
    problems = publish.table("constrained")["problems"].values()
    columns = [report.families(each["methods"]) for each in problems]
    for library, *cells in zip(("fcco", "Cooper", "HCT"), *columns, strict=True):
        assert [f"best of {library}", *cells, ""] in rows("constrained")


def test_constraints_untuned() -> None:
    """The lines of the short page are lines of the details; its first numbers follow from them."""
    details = rows("details/untuned")
    short = [row for row in rows("constrained") if " / " in row[1]]
    assert len(short) == 5 and all(row in details for row in short)
    head = details.index(next(row for row in details if row[0] == "**fcco, no setting**"))
    worst = [
        max(float(cell.split(" / ")[1].replace("−", "-")) for cell in row[1:])
        for row in details[head : head + 7]
    ]
    peers = worst[1:7]
    found = f"at most {worst[0]:.3f} on five problems"
    page = " ".join(text("constrained").split())
    assert found in page and f"exceed one by {min(peers):.3f} to {max(peers):.3f}" in page


def test_step_costs() -> None:
    """What the prose says is what the table shows, which `docs/tables.py` writes."""
    short = [[float(cell) for cell in row[1:]] for row in rows("step-cost") if "H200," in row[0]]
    large = [ratio for row in short[1:] for ratio in row[1:]]
    prose = " ".join(text("step-cost").split())
    assert f"{min(large):.2f} to {max(large):.2f} times as long" in prose
    assert f"up to {max(short[0][1:]):.1f} times" in prose
