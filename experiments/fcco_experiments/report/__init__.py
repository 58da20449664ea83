"""The report: one HTML file out of saved runs, with every plot inside and no network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..stats import Table
from ..store import Comparison
from ..task import Task
from . import gate, page, sweep

__all__ = ["render", "render_gate", "render_sweep"]


def render(comparison: Comparison, values: Table, task: Task, config: Any) -> str:
    """The page as text; the same runs give the same bytes.

    Args:
        comparison: saved runs; there may be none, where only the table was kept.
        values: from `fcco_experiments.results.table`.
        task: its page, verdict and warnings.
        config: what `task.page` asks for.
    """
    return _fill("page.html.j2", page.content(comparison, values, task, config))


def render_sweep(comparison: Comparison, told: Mapping[str, Any], task: Task, config: Any) -> str:
    """The page of a sweep as text; the same sweep gives the same bytes.

    Args:
        comparison: its runs; there may be none, where only the means were kept.
        told: from `fcco_experiments.sweep.read`.
        task: its page, rule and warnings.
        config: what `task.page` asks for.
    """
    return _fill("sweep.html.j2", sweep.content(comparison, told, task, config))


def render_gate(found: Mapping[str, Any], summary: str, old: str, new: str, data: str) -> str:
    """The page of a gate as text; see `gate.content`."""
    return _fill("gate.html.j2", gate.content(found, summary, old, new, data))


def _fill(template: str, content: Mapping[str, Any]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    from .style import count, fixed, plain, setting, title

    def marked(text: str) -> Markup:
        """Escaped, with `code` between backticks."""
        parts = str(text).split("`")
        if len(parts) % 2 == 0:
            return escape(text)
        return Markup("").join(
            Markup("<code>%s</code>") % part if k % 2 else escape(part)
            for k, part in enumerate(parts)
        )

    environment = Environment(
        loader=PackageLoader("fcco_experiments", "report/templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"marked": marked, "fixed": fixed, "plain": plain}
    environment.filters |= {"setting": setting, "count": count, "label": title}
    css = Markup((Path(__file__).parent / "templates/page.css").read_text(encoding="utf-8"))
    return environment.get_template(template).render(css=css, **content)
