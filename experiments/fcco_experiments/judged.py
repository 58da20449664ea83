"""The part of a task that two modules of it say: the words of its report, and its judgement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .task import Page, Row

__all__ = ["Judged"]


class Judged:
    """Members of a `Task` that its modules `words` and `judge` hold.

    A subclass names them: `words` with `page`; `judge` with `verdict`, `warnings`, `score` and
    `score_rule`.
    """

    words: ClassVar[Any]
    judge: ClassVar[Any]

    def config_name(self, data: str, setting: str | None) -> str:
        """`celeba`, `celeba-paper`, ...: the usual setting has the bare name."""
        return data if setting is None else f"{data}-{setting}"

    def page(self, config: Any) -> Page:
        """The report's words and plots."""
        return self.words.page(config)

    def verdict(self, config: Any, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
        """Who won."""
        return self.judge.verdict(config, methods)

    def warnings(self, config: Any, row: Row) -> tuple[str, ...]:
        """What a reader must know about a run."""
        return self.judge.warnings(config, row)

    def score(self, config: Any, row: Row) -> tuple[float, ...]:
        """The rule of a sweep: smaller is better; never test figures."""
        return self.judge.score(config, row)

    def score_rule(self, config: Any) -> str:
        """The same in words."""
        return self.judge.score_rule(config)
