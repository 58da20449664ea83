"""What a reader must not overlook: diverged, missing, unfinished runs; warnings of the task."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..record import SavedRun
from ..task import Task
from .words import seeds

__all__ = ["Notice", "notices"]


_DIVERGED = "Diverged, so not in the tables: {}"
_UNFINISHED = "Not finished, so not in the tables."


@dataclass(frozen=True)
class Notice:
    """A warning, and the runs it is about."""

    who: str
    text: str


def notices(
    task: Task, config: Any, runs: Mapping[str, Sequence[SavedRun]], wanted: Sequence[int]
) -> list[Notice]:
    """All of them, the gravest first; the same one of several seeds is told once.

    Args:
        task: gives its warnings about each final row.
        config: of the comparison.
        runs: by method.
        wanted: the seeds that each method should have.
    """
    diverged, unfinished, missing, said = ([] for _ in range(4))
    for name, group in runs.items():
        count = len(group)
        reasons = ((run.seed, run.diverged) for run in group if run.diverged is not None)
        diverged += _grouped(name, count, ((seed, _DIVERGED.format(why)) for seed, why in reasons))
        open_ones = [run.seed for run in group if run.result is None]
        if open_ones:
            unfinished.append(Notice(_who(name, open_ones, count), _UNFINISHED))
        absent = [seed for seed in wanted if seed not in {run.seed for run in group}]
        if absent:
            missing.append(Notice(_who(name, absent, len(wanted)), "Not started."))
        texts = ((run.seed, text) for run in group for text in _warnings(task, config, run))
        said += _grouped(name, count, texts)
    return [*_other_data(runs), *diverged, *unfinished, *missing, *said]


def _other_data(runs: Mapping[str, Sequence[SavedRun]]) -> list[Notice]:
    results = [run.result for group in runs.values() for run in group if run.result is not None]
    if len({result.get("fingerprint") for result in results}) < 2:
        return []
    return [Notice("All runs", "They were made on different data; do not compare them.")]


def _warnings(task: Task, config: Any, run: SavedRun) -> list[str]:
    if run.result is None or run.diverged is not None:
        return []
    told = [*task.warnings(config, run.figures), *map(str, run.result.get("warnings") or ())]
    return list(dict.fromkeys(told))


def _grouped(name: str, count: int, said: Iterable[tuple[int, str]]) -> list[Notice]:
    """One notice for texts that differ in their numbers alone; the first one's are shown."""
    texts: dict[str, list[tuple[int, str]]] = {}
    for seed, text in said:
        shape = re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "#", text)
        texts.setdefault(shape, []).append((seed, text))
    found = []
    for group in texts.values():
        some = list(dict.fromkeys(seed for seed, _ in group))
        first = group[0][1]
        if any(text != first for _, text in group):
            first += f" (Numbers of seed {some[0]}.)"
        found.append(Notice(_who(name, some, count), first))
    return found


def _who(name: str, some: Sequence[int], count: int) -> str:
    return f"{name}, {seeds(some, count)}"
