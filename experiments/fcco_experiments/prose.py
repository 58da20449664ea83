"""Sentences of pages, kept in templates beside the tasks and in `report/templates`."""

from __future__ import annotations

import functools
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
