"""The tasks, by name. Their modules are imported when they are asked for."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from ..task import Task
from ..validate import did_you_mean
from ..yaml_text import ConfigError

__all__ = ["get", "names", "portable", "register"]

_BUILT_IN = {
    "fairness": "fcco_experiments.tasks.fairness:TASK",
    "group-dro": "fcco_experiments.tasks.group_dro:TASK",
    "continual": "fcco_experiments.tasks.continual:TASK",
}
_PLACES: dict[str, str] = dict(_BUILT_IN)


def names() -> tuple[str, ...]:
    """The names that `get` knows."""
    return tuple(_PLACES)


def register(name: str, place: str) -> None:
    """Give a task a name.

    Args:
        name: as on the command line.
        place: `"module:attribute"` of the `Task`; imported by every worker process.
    """
    if ":" not in place:
        raise ValueError(f"`register(place=...)` must be 'module:attribute' but is: {place!r}.")
    _PLACES[name] = place


def place_of(name: str) -> str:
    """`"module:attribute"` of a task, which another process can import."""
    if ":" in name:
        return name
    if name not in _PLACES:
        hint = did_you_mean(name, _PLACES)
        raise ConfigError(
            f"There is no task `{name}`{hint} Tasks: {', '.join(_PLACES)}; or module:attribute."
        )
    return _PLACES[name]


def portable(name: str) -> str:
    """A name that every process knows: that of a built-in task, or `"module:attribute"`."""
    place = place_of(name)
    return name if _BUILT_IN.get(name) == place else place


def get(name: str) -> Task:
    """The task of a name, or at `"module:attribute"`, which may lie in the current folder.

    Raises:
        ConfigError: when there is none.
    """
    module, _, attribute = place_of(name).partition(":")
    here = os.getcwd()
    if ":" in name and not {"", here} & set(sys.path):
        sys.path.append(here)  # last, so that it hides no other module
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # a package that the task needs
        raise ConfigError(f"The task `{name}` cannot be imported: {error}.") from error
    if not hasattr(found, attribute):
        raise ConfigError(f"The task `{name}` is not there: {module} has no {attribute}.")
    return getattr(found, attribute)
