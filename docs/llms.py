"""Write llms.txt, an overview for language models: public objects, and the pages of the menu.

    python -m docs.llms

The site has it at its root, the wheel beside the modules.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import fcco

DOCS = Path(__file__).parent
HEAD = """\
# fcco

> Non-smooth coupled compositional optimisation for PyTorch: objectives for the worst groups, for
> limits that must be kept and for rankings, as losses in your own training loop, with any optimizer
> of torch and no settings to tune.

How to use it, with programs to copy: the file `.agents/skills/fcco/SKILL.md` in the installed
package `fcco`. More on an object: `help(fcco.NAME)`. Links are relative to the root of the site.

## Objects
"""


def overview() -> str:
    """The whole text. Pages of results come under the heading that readers may skip."""
    lines = [HEAD]
    for name in fcco.__all__:
        summary = (inspect.getdoc(getattr(fcco, name)) or "").split("\n\n")[0].replace("\n", " ")
        lines.append(f"- `fcco.{name}`: {summary}")
    menu = (DOCS.parent / "mkdocs.yml").read_text()
    rows = menu.split("\nnav:\n")[1].split("\n\n")[0].splitlines()
    for row in rows[1:]:  # without the home page
        if page := re.match(r" +- (.+): (\S+?)(/index)?\.md$", row):
            lines.append(f"- [{page[1]}]({page[2]}/)")
        elif section := re.match(r"  - (\w+):$", row):
            lines.append(f"\n## {section[1].replace('Research', 'Optional')}\n")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (DOCS / "llms.txt").write_text(overview())
