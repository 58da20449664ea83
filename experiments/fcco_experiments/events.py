"""What the engine tells while it works, and how a run ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Event", "Kind", "Outcome"]

Kind = Literal[
    "loading",
    "started",
    "progress",
    "finished",
    "diverged",
    "stopping",
    "stopped",
    "failed",
    "note",
]


@dataclass(frozen=True)
class Event:
    """Something happened to a run.

    Args:
        kind: what.
        run: its label, `name/seed-k`.
        epoch: how far it is.
        epochs: how far it goes.
        figures: headline figures of the last evaluation.
        text: why it diverged or failed; of a fleet, whose figures these are, or what ended.
        details: file with the traceback of a failure.
        count: runs that it stands for; a fleet speaks for all of its runs.
    """

    kind: Kind
    run: str
    epoch: float = 0.0
    epochs: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    text: str = ""
    details: str = ""
    count: int = 1


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Args:
        run: its label.
        kind: `"finished"`, `"diverged"`, `"stopped"` or `"failed"`.
        text: why it diverged or failed.
    """

    run: str
    kind: Kind
    text: str = ""
