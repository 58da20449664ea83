"""Pages out of templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["fill"]


def fill(template: str, styles: Sequence[str], content: Mapping[str, Any]) -> str:
    """A page as text.

    Args:
        template: its file.
        styles: files of the style sheet, joined.
        content: all that the template asks for; a name that is missing is an error.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    css = Markup("".join((here / name).read_text(encoding="utf-8") for name in styles))
    return environment.get_template(template).render(css=css, **content)
