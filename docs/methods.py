"""Write the tables of methods into the pages that show them, from the registry.

    python docs/methods.py

A table follows a line `<!-- methods: COLUMN | COLUMN -->`, whose columns are facts of the registry.
`tests/test_methods.py` finds one that is not up to date.
"""

from __future__ import annotations

import re
from pathlib import Path

from fcco.methods import table

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "src/fcco/__init__.py", ROOT / "docs/reference/methods.md"]
_MARK = re.compile(r"(<!-- methods: (?P<columns>.*?) -->\n\n)(\|.*\n)*")


def renewed(text: str) -> str:
    """The text with every table of methods written anew."""

    def write(match: re.Match[str]) -> str:
        columns = [column.strip() for column in match["columns"].split("|")]
        head, *rows = table(columns=columns)
        lines = [head, ["---"] * len(head), *([f"`{row[0]}`", *row[1:]] for row in rows)]
        return match[1] + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    return _MARK.sub(write, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(renewed(page.read_text()))
