"""What one run is: a task, a method, a seed, a config. And how two such differ."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import fields_of, plain
from .task import Experiment, Method

__all__ = ["RunSpec", "differences"]

_MISSING = object()


@dataclass(frozen=True)
class RunSpec:
    """One run, as data.

    Args:
        task: its name, or `"module:attribute"`.
        name: of the method in tables and folders.
        method: and its settings.
        seed: of the run.
        config: of the experiment.
    """

    task: str
    name: str
    method: Method
    seed: int
    config: Experiment

    @property
    def label(self) -> str:
        """For messages, and the folder inside that of the comparison."""
        return f"{self.name}/seed-{self.seed}"

    def folder(self, out: Path) -> Path:
        """Where its files lie."""
        return out / self.name / f"seed-{self.seed}"

    def plain(self) -> dict[str, Any]:
        """All that the run depends on: the config without other methods and seeds."""
        # A sweep has thousands of methods: those of other runs are not even looked at.
        names = [key for key in fields_of(type(self.config)) if key not in ("methods", "seeds")]
        config = {name: plain(getattr(self.config, name)) for name in names}
        return {
            "task": self.task,
            "name": self.name,
            "seed": self.seed,
            "method": plain(self.method),
            "config": config,
        }

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """How a saved run differs from this, as sentences, apart from what is incidental."""
        return differences(saved, self.plain(), self.config.incidental)


def differences(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    incidental: Collection[str] = Experiment.incidental,
) -> list[str]:
    """What differs between two plain specs, as sentences.

    Args:
        saved: the old one.
        now: the new one.
        incidental: keys of the config that may differ, because they do not change a run.
    """
    old, new = dict(_flat(saved)), dict(_flat(now))
    found = []
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key, _MISSING), new.get(key, _MISSING)
        part, _, rest = key.partition(".")
        free = part == "config" and rest.partition(".")[0] in incidental
        if before != after and not free:
            found.append(f"`{key}` was {_word(before)} and is {_word(after)} now")
    return found


def _word(value: Any) -> str:
    return "not there" if value is _MISSING else repr(value)


def _flat(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, each in value.items():
        if isinstance(each, Mapping):
            yield from _flat(each, f"{before}{key}.")
        else:
            yield f"{before}{key}", each
