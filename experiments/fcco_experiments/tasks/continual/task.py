"""The task: its configs, its problem, and the words of its report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ... import backbones
from ...task import Page, Progress, Row, Rule, Task
from . import report
from .config import Continual
from .problem import ContinualProblem
from .training import build

__all__ = ["TASK", "ContinualTask"]


class ContinualTask(Task):
    """Contrastive fine-tuning under non-forgetting constraints."""

    name = "continual"
    config = Continual

    def grid_name(self, config: Any) -> str:
        """The paper's grids of rho, or wider ones for projections on features."""
        return "paper" if config.train == "all" else "wide"

    def fetch(self, config: Any, progress: Progress | None = None) -> None:
        """Data, weights, features and old models, once, before several processes load them."""
        problem = ContinualProblem(config, progress)
        for number, seed in enumerate(config.seeds):
            if progress is not None:
                progress("old models", number, len(config.seeds))
            problem.make_old(seed)  # the first rank of a machine alone is here

    def load(self, config: Any) -> ContinualProblem:
        """Data and models."""
        return ContinualProblem(config)

    def check(self, config: Any) -> list[tuple[tuple[str, ...], str]]:
        """Backbones and methods that do not fit, before any training: where, and why."""
        problems: list[tuple[tuple[str, ...], str]] = []
        for side, wanted in (("image_backbone", "image"), ("text_backbone", "text")):
            name = getattr(config, side)
            if name == "none":
                continue
            try:
                kind = backbones.kind(name)
            except ValueError as error:
                problems.append(((side,), str(error)))
                continue
            if kind != wanted:
                problems.append(((side,), f"`{side}: {name}` takes {kind}s, not {wanted}s."))
        for name, method in config.methods.items():
            tiny = nn.Linear(1, 1)
            try:
                build(tiny, method, config.protected, (2, 2), temperature=config.temperature)
            except (TypeError, ValueError) as error:
                problems.append((("methods", name), str(error)))
        return problems

    def page(self, config: Any) -> Page:
        """The report's words and plots."""
        return report.page(config)

    def verdict(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        """Who won."""
        return report.verdict(config, methods)

    def next_steps(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        """What to try next."""
        return report.next_steps(config, methods)

    def warnings(self, config: Any, row: Row) -> tuple[str, ...]:
        """What a reader must know about a run."""
        return report.warnings(config, row)

    def rule(self, config: Any) -> Rule:
        """How settings are chosen: never by test figures."""
        return report.rule(config)


TASK = ContinualTask()
