"""Progress on stderr, tables and texts; they fit 80 columns."""

from __future__ import annotations

import json
import re
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # it needs torch
    from ..store import Event

_BEFORE = "was finished"  # what the event of a run says that there was nothing to do for
_SAY_EVERY = 30.0  # seconds between two lines
_WORDS = {"finished": "finished", "diverged": "diverged", "stopped": "saved", "failed": "FAILED"}


def printable(text: str) -> str:
    r"""A text without control characters, which a terminal would obey: they are written out.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    odd = r"[^\n\t\x20-\x7e\xa0-\U0010ffff]|[\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(odd, lambda found: ascii(found[0])[1:-1], text)


class Display:
    """Shows the events it is called with: how runs end, and every half minute how far all are.

    `quiet` shows failures alone; `figures` are the keys of those that are shown, all unless given.
    """

    def __init__(
        self, runs: int, epochs: int, *, quiet: bool = False, figures: Sequence[str] | None = None
    ) -> None:
        self.runs, self.epochs, self.quiet, self.figures = runs, epochs, quiet, figures
        self.done: dict[str, float] = {}  # epochs of each run
        self.here = 0.0  # epochs that were trained since this process began
        self.loaded: set[str] = set()
        self.ended, self.said, self.start = 0, time.monotonic(), time.monotonic()

    def __call__(self, event: Event) -> None:
        """Show what happened."""
        if event.kind == "stopping":
            self._say("Stopping: each run ends its step and saves itself. Ctrl-C again kills.")
        elif event.kind == "note":
            self._say(event.text)
        elif event.kind != "loading":
            self._run(event)
        elif event.text not in self.loaded:  # each worker loads
            self.loaded.add(event.text)
            self._say(f"Loading {event.text} ...")

    def _run(self, event: Event) -> None:
        if not self.done:  # loading does not count
            self.start = self.said = time.monotonic()
        over = event.kind in _WORDS
        gone = event.epoch if event.kind in ("started", "progress", "stopped") else self.epochs
        gone *= event.count
        known = event.kind == "started" or event.text == _BEFORE
        self.here += 0.0 if known else gone - self.done.get(event.run, 0.0)
        self.done[event.run] = gone
        self.ended += event.count * (over and event.kind != "stopped")
        if event.kind == "failed":
            self._say(f"{event.run}: FAILED: {event.text}", always=True)
            if event.details:
                self._say(f"  traceback: {event.details}", always=True)
        elif over and event.text != _BEFORE:
            why = f": {event.text}" if event.text else ""
            text = f"{event.run}: {_WORDS[event.kind]}{why} {self._figures(event.figures)}".rstrip()
            self._say(f"{text} ({self.ended}/{self.runs}, {self._left()})")
        elif time.monotonic() - self.said > _SAY_EVERY:
            text = f"{self.ended} of {self.runs} runs, {self._left()}; {event.run}"
            self._say(f"{text} {self._figures(event.figures)}")

    def _figures(self, figures: Mapping[str, float]) -> str:
        """The first three."""
        keys = figures if self.figures is None else [key for key in self.figures if key in figures]
        return "  ".join(f"{key} {figures[key]:.4g}" for key in list(keys)[:3])

    def _left(self) -> str:
        """Time left, from the epochs that were trained here."""
        left = self.runs * self.epochs - sum(self.done.values())
        if self.here <= 0:
            return "time left not known yet"
        return f"about {(time.monotonic() - self.start) * left / self.here / 60:.1f} min left"

    def _say(self, text: str, *, always: bool = False) -> None:
        if always or not self.quiet:
            self.said = time.monotonic()
            click.echo(printable(text.rstrip()), err=True)


class Printer:
    """Prints results; with the option `json` stdout is for JSON alone, all else goes to stderr."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.as_json = given.get("as_json", False)
        self.console = Console(stderr=self.as_json, quiet=given.get("quiet", False))
        if given["wide"] and not self.console.is_terminal:
            self.console.width = 1000  # nothing limits a line of a file

    def text(self, *paragraphs: str, mark: str = "") -> None:
        """Paragraphs, each after a mark; lines that are too long go on below the text.

        A command between backticks has a line of its own, which is never broken.
        """
        for paragraph in paragraphs:
            parts = re.split(r"`([^`]*(?: compare | sweep )[^`]*)`", paragraph)
            for k, part in enumerate(parts):
                indent = " " * len(mark)
                text = f"{indent if k else mark}{part.replace('`', '').strip(' .,:')}"
                if k % 2:
                    self.line(f"{indent}  {part}")
                elif text.strip():
                    text += "." if part.rstrip().endswith(".") else ":" if parts[k + 1 :] else ""
                    self.line(textwrap.fill(text, self.console.width, subsequent_indent=indent))

    def line(self, text: str) -> None:
        """A line that is never broken, such as a path."""
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def table(self, rows: Sequence[Sequence[str]], *, numbers: bool = True) -> None:
        """A header and rows between empty lines, the first column a name; long cells are folded."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for column, head in enumerate(rows[0]):
            aligned: Any = "right" if column and numbers else "left"
            table.add_column(head, justify=aligned, overflow="fold", no_wrap=not column)
        for row in rows[1:]:
            table.add_row(*map(Text, map(printable, row)))
        self.console.print("", table, "", sep="\n", markup=False, highlight=False)

    def json(self, value: Any) -> None:
        """The last line on stdout, if asked for."""
        if self.as_json:
            from ..store import clean

            click.echo(json.dumps(clean(value)))
