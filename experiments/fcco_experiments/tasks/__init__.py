"""The tasks, by name. Their modules are imported when they are asked for."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from ..config import ConfigError, did_you_mean, fields_of, from_plain
from ..store import Comparison
from ..task import Task

__all__ = ["get", "saved"]

_BUILT_IN = {
    "fairness": "fcco_experiments.tasks.fairness:TASK",
    "group-dro": "fcco_experiments.tasks.group_dro:TASK",
    "continual": "fcco_experiments.tasks.continual:TASK",
    "x-risk": "fcco_experiments.tasks.x_risk:TASK",
}
_USED: set[str] = set()
"""Places that the user of this process has named."""


def place_of(name: str) -> str:
    """`"module:attribute"` of a task, which another process can import."""
    if ":" not in name and name not in _BUILT_IN:
        hint = did_you_mean(name, _BUILT_IN)
        raise ConfigError(
            f"There is no task `{name}`{hint} Tasks: {', '.join(_BUILT_IN)}; or module:attribute."
        )
    return _BUILT_IN.get(name, name)


def get(name: str, *, saved: bool = False) -> Task:
    """The task of a name, or at `"module:attribute"`, which may lie in the current folder.

    Args:
        name: of the command line, or from a file.
        saved: the name was read from a folder, which may be anybody's. Then only tasks are imported
            that are built in, or that this process was told to use before.

    Raises:
        ConfigError: when there is none.
    """
    module, _, attribute = place_of(name).partition(":")
    if ":" in name:
        if saved and name not in (*_BUILT_IN.values(), *_USED):
            raise ConfigError(
                f"The runs are those of the task `{name}`, which is not built in: its code is run "
                "only when you name it yourself, as fcco report FOLDER --task MODULE:ATTRIBUTE."
            )
        _USED.add(name)
    here = os.getcwd()
    if ":" in name and not {"", here} & set(sys.path):
        sys.path.append(here)  # last, so that it hides no other module
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # a package that the task needs
        raise ConfigError(f"The task `{name}` cannot be imported: {error}.") from error
    task = vars(imported).get(attribute)
    if not isinstance(task, Task):
        what = f"has no {attribute}" if task is None else f"{attribute} is not a Task"
        raise ConfigError(f"The task `{name}` is not there: {module} {what}.")
    return task


def saved(comparison: Comparison) -> tuple[Task, Any]:
    """Task and config of saved runs; fields that the config had in earlier versions are ignored."""
    task = get(comparison.meta["task"], saved=True)
    known = fields_of(task.config)
    values = {key: value for key, value in comparison.meta["config"].items() if key in known}
    return task, from_plain(task.config, values, str(comparison.folder))
