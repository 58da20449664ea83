"""What a reader must not overlook: diverged, missing, unfinished runs; warnings of the task."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..store import SavedRun
from ..task import Task
from .palette import family_of
from .words import seeds

__all__ = ["Notice", "notices", "other_data"]


_DIVERGED = "Diverged: {}. Tables have its last finite figures, curves leave it out."
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
    told = {id(run): _warnings(task, config, run) for group in runs.values() for run in group}
    common = _common([told[id(run)] for group in runs.values() for run in group if _counts(run)])
    families: dict[str, list[SavedRun]] = {}
    settings: dict[str, list[str]] = {}
    for name, group in runs.items():
        families.setdefault(family_of(name), []).extend(group)
        settings.setdefault(family_of(name), []).append(name)
    for name, group in families.items():
        reasons = [(run, run.diverged) for run in group if run.diverged is not None]
        diverged += _grouped(
            name, group, [(run, _DIVERGED.format(why.rstrip("."))) for run, why in reasons]
        )
        open_ones = [run for run in group if run.result is None]
        unfinished += _grouped(name, group, [(run, _UNFINISHED) for run in open_ones])
        there = {(run.name, run.seed) for run in group}
        absent = [(n, k) for n in settings[name] for k in wanted if (n, k) not in there]
        if absent:
            who = _who(name, absent, len(wanted) * len(settings[name]))
            missing.append(Notice(who, "Not started."))
        own = [(run, text) for run in group for text in told[id(run)]]
        if len(families) > 1:
            own = [(run, text) for run, text in own if _shape(text) not in common]
        said += _grouped(name, group, own)
    if len(families) > 1:
        every = [run for group in families.values() for run in group]
        pairs = [(run, text) for run in every for text in told[id(run)] if _shape(text) in common]
        said += [replace(each, who="All methods") for each in _grouped("", every, pairs)]
    return [*other_data(runs), *diverged, *unfinished, *missing, *said]


def _counts(run: SavedRun) -> bool:
    return run.result is not None and run.diverged is None


def _common(told: Sequence[Sequence[str]]) -> set[str]:
    """What every run that counts was told, but for its numbers: that is about the data."""
    shapes = [set(map(_shape, texts)) for texts in told]
    return set.intersection(*shapes) if shapes else set()


def _shape(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "#", text)


def other_data(runs: Mapping[str, Sequence[SavedRun]]) -> list[Notice]:
    """A warning where runs were not made on the same data."""
    results = [run.result for group in runs.values() for run in group if run.result is not None]
    if len({result.get("fingerprint") for result in results}) < 2:
        return []
    return [Notice("All runs", "They were made on different data; do not compare them.")]


def _warnings(task: Task, config: Any, run: SavedRun) -> list[str]:
    if run.result is None or not _counts(run):
        return []
    told = [*task.warnings(config, run.figures), *map(str, run.result.get("warnings") or ())]
    return list(dict.fromkeys(told))


def _grouped(
    name: str, group: Sequence[SavedRun], told: Iterable[tuple[SavedRun, str]]
) -> list[Notice]:
    """One notice for texts that differ in their numbers alone; the first one's are shown."""
    texts: dict[str, list[tuple[SavedRun, str]]] = {}
    for run, text in told:
        texts.setdefault(_shape(text), []).append((run, text))
    found = []
    for same in texts.values():
        first, text = same[0]
        if any(other != text for _, other in same):
            where = (
                f"seed {first.seed}" if first.name == name else f"{first.name}, seed {first.seed}"
            )
            text += f" (Numbers of {where}.)"
        some = list(dict.fromkeys((run.name, run.seed) for run, _ in same))
        found.append(Notice(_who(name, some, len(group)), text))
    return found


def _who(name: str, some: Sequence[tuple[str, int]], count: int) -> str:
    """A method and its seeds; of a sweep, how many of its runs."""
    if all(setting == name for setting, _ in some):
        return f"{name}, {seeds([seed for _, seed in some], count)}"
    return f"{name}, {len(some)} of {count} runs"
