"""The report: one HTML file out of saved runs, with every plot inside and no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..store import Comparison, write_text
from ..task import Task
from .content import content
from .template import fill

__all__ = ["render", "write"]


def render(comparison: Comparison, task: Task, config: Any) -> str:
    """The page as text; the same runs give the same bytes.

    Args:
        comparison: saved runs, see `fcco_experiments.record.load_comparison`.
        task: its page, verdict and warnings.
        config: what `task.page` asks for.
    """
    return fill("page.html.j2", ("page.css",), content(comparison, task, config))


def write(comparison: Comparison, task: Task, config: Any) -> Path:
    """Write `report.html` into the folder of the comparison; its path.

    The file is there whole or not at all.
    """
    target = comparison.folder / "report.html"
    write_text(target, render(comparison, task, config))
    return target
