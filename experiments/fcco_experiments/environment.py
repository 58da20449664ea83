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

from . import distributed, store

_ONCE = ("--resume", "--overwrite")  # how to treat an old folder, not what to run


def now() -> str:
    """The time, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def available_cores() -> int:
    """CPU cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def command(*more: str) -> str:
    """The command line of this process, to be typed again; with torchrun, where that started it."""
    words = [word for word in sys.argv[1:] if word not in _ONCE]
    if launcher := distributed.launch_command():
        return shlex.join([*launcher, "-m", "fcco_experiments", *words, *more])
    return program(*words, *more)


def program(*words: str) -> str:
    """A command line of fcco, as this process was called."""
    called = ["fcco"] if Path(sys.argv[0]).name == "fcco" else ["python", "-m", "fcco_experiments"]
    return shlex.join([*called, *words])


def describe(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Versions, machine and command of a run that is trained on a device."""
    processes = distributed.world_size()
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
        "device": _name(torch.device(device)),
        **({"processes": processes} if processes > 1 else {}),
        "command": command(),
        "start": now(),
    }


def write(path: Path, device: torch.device, progress: str, resumed: object) -> None:
    """Describe this process in a file.

    Args:
        path: the file.
        device: where it trains.
        progress: how far the training is, as `step 7`.
        resumed: whether it goes on: then a file that is there is kept, and a line added to it.
    """
    here = describe(device)
    if resumed and path.is_file():
        before = store.read_json(path)
        line = f"{here['start']} at {progress}, fcco {here['fcco']}" + "".join(
            f", {key} {here.get(key, 1)}"
            for key in ("device", "processes")
            if here.get(key) != before.get(key)
        )
        here = before | {"resumed": [*before.get("resumed", ()), line]}
    store.write_json(path, here)


def _name(device: torch.device) -> str:
    """`cpu`, or `cuda` with the name of the GPU."""
    return device.type if device.type == "cpu" else f"cuda: {torch.cuda.get_device_name(device)}"


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
