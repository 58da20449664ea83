"""The command line `fcco`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line."""
    from .app import app

    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        sys.exit(
            "Error: fcco is one process; start it without torchrun. Many runs on several machines: "
            "--ray. One model on several GPUs: a loop of your own, docs/recipes/several-machines.md"
        )
    app()
