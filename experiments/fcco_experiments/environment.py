"""Where and with what a run was made."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fcco import __version__

from . import distributed

__all__ = ["available_cores", "command", "describe", "now", "program"]

_ONCE = ("--resume", "--overwrite")
"""Options that say how to treat an old folder, not what to run."""


def now() -> str:
    """The time, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def available_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def command(*more: str) -> str:
    """The command line of this process, to be typed again; with torchrun, where that started it.

    Args:
        more: options to add.
    """
    own = [each for each in sys.argv[1:] if each not in _ONCE]
    if started := distributed.launch_command():
        return shlex.join([*started, "-m", "fcco_experiments", *own, *more])
    return program(*own, *more)


def program(*words: str) -> str:
    """A command line of fcco, as this process was called."""
    called = ["fcco"] if Path(sys.argv[0]).name == "fcco" else ["python", "-m", "fcco_experiments"]
    return shlex.join([*called, *words])


def describe(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Versions, machine and command.

    Args:
        device: what the run was trained on.
    """
    several = {"processes": distributed.world_size()} if distributed.world_size() > 1 else {}
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "fcco": __version__,
        "revision": _revision(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "device": _named(torch.device(device)),
        **several,
        "command": command(),
        "start": now(),
    }


def _named(device: torch.device) -> str:
    """`cpu`, or `cuda` with the name of the GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type
    return f"cuda: {torch.cuda.get_device_name(device)}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


def _revision() -> str | None:
    """The git commit of fcco, when it is used from a checkout of its own."""
    package = Path(__file__).resolve().parent
    root = package.parents[1]
    if not (root / ".git").exists() or not (root / "pyproject.toml").exists():
        return None
    try:
        asked = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip() or None
