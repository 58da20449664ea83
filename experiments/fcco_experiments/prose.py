"""Sentences of pages, kept in templates beside the tasks and in `report/templates`."""

from __future__ import annotations

import functools
import re
from typing import Any


@functools.cache
def _templates() -> Any:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=ChoiceLoader(
            [PackageLoader("fcco_experiments", place) for place in ("tasks", "report/templates")]
        ),
        undefined=StrictUndefined,  # a name with a typing error must not become an empty string
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # plain text: the page that shows it escapes it
    )


def paragraphs(template: str, block: str, /, **values: Any) -> tuple[str, ...]:
    """The paragraphs of one `{% block NAME %}` of a template such as `"fairness/page.j2"`.

    An empty line ends a paragraph; `values` are the names that the template uses.
    """
    page = _templates().get_template(template)
    text = "".join(page.blocks[block](page.new_context(values)))
    joined = (" ".join(part.split()) for part in text.split("\n\n"))
    return tuple(part for part in joined if part)


def printable(text: str) -> str:
    r"""A text without control characters, which a terminal would obey: they are written out.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    odd = r"[^\n\t\x20-\x7e\xa0-\U0010ffff]|[\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(odd, lambda found: ascii(found[0])[1:-1], text)
