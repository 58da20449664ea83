"""Where and with what a run was made."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fcco import __version__

from . import store
from .config import ConfigError

_ONCE = ("--resume", "--overwrite")  # how to treat an old folder, not what to run


def now() -> str:
    """The time, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def available_cores() -> int:
    """CPU cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def device(wanted: str = "auto") -> torch.device:
    """The device of this process: `"cpu"`, `"cuda"`, or `"auto"`, a GPU when there is one."""
    if wanted != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if wanted == "cuda":
        raise ConfigError("`device` is cuda but torch sees no GPU; cpu or auto will do.")
    return torch.device("cpu")


def command(*more: str) -> str:
    """The command line of this process, to be typed again."""
    return program(*(word for word in sys.argv[1:] if word not in _ONCE), *more)


def program(*words: str) -> str:
    """A command line of fcco, as this process was called."""
    called = ["fcco"] if Path(sys.argv[0]).name == "fcco" else ["python", "-m", "fcco_experiments"]
    return shlex.join([*called, *words])


def describe(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Versions, machine and command of a run that is trained on a device."""
    place = torch.device(device)
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
        "device": "cpu" if place.type == "cpu" else f"cuda: {torch.cuda.get_device_name(place)}",
        "command": command(),
        "start": now(),
    }


def write(path: Path, device: torch.device, progress: str, resumed: object) -> None:
    """Describe this process in a file; with `resumed`, add a line to the one that is there."""
    here = describe(device)
    if resumed and path.is_file():
        before = store.read_json(path)
        line = f"{here['start']} at {progress}, fcco {here['fcco']}"
        if here["device"] != before.get("device"):
            line += f", device {here['device']}"
        here = before | {"resumed": [*before.get("resumed", ()), line]}
    store.write_json(path, here)


def _processor() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
        if found is not None:
            return found[1].strip()
    return platform.processor()


def _revision() -> str | None:
    """The git commit of fcco, when it is used from a checkout of its own."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or not (root / "pyproject.toml").exists():
        return None
    try:
        described = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None
