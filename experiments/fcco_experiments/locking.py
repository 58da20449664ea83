"""A lock that keeps other processes out of a folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from .files import FolderError

__all__ = ["LOCK", "locked"]

LOCK = ".lock"


@contextlib.contextmanager
def locked(folder: Path, patience: float = 20.0) -> Iterator[None]:
    """Keep other processes out of a folder; where the system has no such locks, do nothing.

    Args:
        folder: it gets a file `.lock`; the lock itself ends with the process.
        patience: seconds to wait for a process that is about to stop.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with _open_lock(folder) as file:
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > end:
                    raise FolderError(
                        f"Another process is at work in {folder}; wait for it, or stop it."
                    ) from None
                time.sleep(0.05)
        for left in folder.glob(".*.tmp"):  # of a process that was killed while writing
            left.unlink(missing_ok=True)
        yield


def _open_lock(folder: Path) -> IO[str]:
    try:
        return (folder / LOCK).open("w")
    except OSError as error:
        raise FolderError(f"{folder} cannot be written to: {error.strerror}.") from error
