"""Write what the programs of pages print into the pages.

    python docs/outputs.py [PAGE ...]     # all pages unless given

Only output blocks that stand after a program change. `tests/test_docs.py` compares them.
"""

from __future__ import annotations

import sys
import tempfile
import textwrap
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1])]

import test_docs as pages  # noqa: E402


def renew(path: Path) -> bool:
    """Run the programs of a page and replace their outputs; return whether any changed."""
    text = path.read_text()
    with tempfile.TemporaryDirectory() as folder:
        found = pages.run_page(pages.page_id(path), text, Path(folder))
    printed = {block.line: output for block, output in found}
    parts, end, line = [], 0, 0
    for match in pages._FENCE.finditer(text):
        if 'title="output"' not in match["rest"]:
            line = text.count("\n", 0, match.start("language")) + 1
        elif line in printed:
            body = textwrap.indent(printed[line], match["indent"])
            parts += [text[end : match.start("body")], body]
            end = match.end("body")
    renewed = "".join([*parts, text[end:]])
    path.write_text(renewed)
    return renewed != text


def main() -> None:
    """Renew the pages that are named, or all."""
    chosen = [Path(name).resolve() for name in sys.argv[1:]] or pages.WITH_PROGRAMS
    warnings.simplefilter("ignore")
    for path in chosen:
        if renew(path):
            print(pages.page_id(path))  # noqa: T201


if __name__ == "__main__":
    main()
