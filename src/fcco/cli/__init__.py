"""The command line `fcco` (needs the extra `fcco[cli]`)."""

from __future__ import annotations

import importlib.util
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

    app()
