"""The command line `fcco` (needs the extra `fcco[cli]`)."""

from __future__ import annotations

import importlib.util
import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, or say what is missing for it."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"The command line needs {' and '.join(missing)}: install them with "
            "`pip install 'fcco[cli]'`. The library itself works without."
        )
    from .app import app

    try:
        app()
    except SystemExit as end:
        if end.code in (0, None) and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            # A thread of torch that asks for the interpreter while it shuts down aborts the whole
            # process, now and then, when all work is done and written.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        raise
