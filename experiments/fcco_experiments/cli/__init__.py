"""The command line `fcco`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line."""
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
