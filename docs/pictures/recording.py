"""A terminal recording as an animated SVG, and its last screen as a picture.

    python -m docs.pictures.recording    # runs the command anew and keeps what it printed

The recording is in docs/results/demo/recording.json: distinct screens with their times. Drawing
needs no run: it shows these screens, the long middle in a few seconds.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import pty
import re
import struct
import sys
import tempfile
import termios
import time
from html import escape
from pathlib import Path

from fcco_experiments.report.style import COLOURS, TOKENS

from .card import IMAGES, MONO, RESULTS

COMMAND = "fcco compare fairness --data adult --quick --out demo"
COLUMNS, ROWS = 60, 30
FILE = RESULTS / "demo/recording.json"
SCREENS = 40  # of the progress that are kept

Line = list[tuple[str, str]]
"""Runs of text, each with its style."""

_COLOURS = {
    "": TOKENS["ink"][1],
    "1": "#ffffff",
    "33": COLOURS[7][1],
    "36": COLOURS[0][1],
    "38;5;197": COLOURS[3][1],
    "38;5;237": TOKENS["rule"][1],
    "38;5;70": COLOURS[2][1],
    "prompt": TOKENS["muted"][1],
}
"""What the codes of the terminal look like."""


class Screen:
    """As much of a terminal as progress bars and tables need."""

    def __init__(self) -> None:
        self.cells: list[list[tuple[str, str]]] = [[]]
        self.row = self.column = 0
        self.style = ""

    def feed(self, text: str) -> None:
        """Take what a program printed."""
        for code, plain in re.findall(r"\x1b\[([0-9;?]*[A-Za-z])|(\x1b?[^\x1b])", text):
            if code:
                self._obey(code[:-1], code[-1])
            elif plain == "\n":
                self.row += 1
            elif plain == "\r":
                self.column = 0
            else:
                self._put(plain)
            while len(self.cells) <= self.row:
                self.cells.append([])

    def _obey(self, number: str, letter: str) -> None:
        if letter == "m":
            self.style = "" if number == "0" else number
        elif letter == "A":
            self.row = max(self.row - int(number or 1), 0)
        elif letter == "K":
            self.cells[self.row] = []

    def _put(self, letter: str) -> None:
        if self.column == COLUMNS:
            self.row, self.column = self.row + 1, 0
            self.cells += [[]] * (len(self.cells) <= self.row)
        line = self.cells[self.row]
        line += [(" ", "")] * (self.column + 1 - len(line))
        line[self.column] = (letter, self.style)
        self.column += 1

    def lines(self) -> list[Line]:
        """What is on it, without what is blank at the ends."""
        found = [
            [
                (style, "".join(letter for letter, _ in run))
                for style, run in itertools.groupby(line, key=lambda cell: cell[1])
            ]
            for line in self.cells
        ]
        while found and not "".join(text for _, text in found[-1]).strip():
            found.pop()
        return found


def record() -> None:
    """Run the command in a terminal of its own and keep the screens."""
    screen, seen = Screen(), []
    start = time.monotonic()
    called = "import sys; sys.argv[0] = 'fcco'; from fcco_experiments.cli import main; main()"
    for text in _output([sys.executable, "-c", called, *COMMAND.split()[1:]]):
        screen.feed(text)
        lines = screen.lines()
        if lines and (not seen or seen[-1][1] != lines):
            seen.append((round(time.monotonic() - start, 2), lines))
    # The last screens appear as they came, within a fraction of a second; of the others a few.
    progress = [each for each in seen if len(each[1]) < 8]
    kept = [progress[k * (len(progress) - 1) // (SCREENS - 1)] for k in range(SCREENS)]
    ends = [each for each in seen[len(progress) :] if each[1][-1]]
    FILE.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(json.dumps(each, ensure_ascii=False) for each in (*kept, *ends))
    FILE.write_text(f"[\n{rows}\n]\n")


def _output(command: list[str]) -> itertools.chain[str]:
    """What a program prints in a terminal, piece by piece; it runs in an empty folder."""
    path = os.pathsep.join(str(Path(place).resolve()) for place in sys.path if place)
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tempfile.mkdtemp())
        os.environ.update(TERM="xterm-256color", PYTHONPATH=path)
        os.execv(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))

    def pieces():
        while True:
            try:
                piece = os.read(terminal, 65536)
            except OSError:  # Linux says so when the program has ended
                piece = b""
            if not piece:
                break
            yield piece.decode(errors="replace")
        if os.waitpid(child, 0)[1]:
            raise SystemExit(f"{' '.join(command)} failed.")

    return itertools.chain(pieces())


# The drawing.

SIZE, WIDE, HIGH, EDGE, BAR = 16, 9.6, 22, 20, 34  # text, a cell, the margin, the title bar


def screen_svg(lines: list[Line], top: float = 0.0) -> str:
    """The lines of a screen."""
    parts = []
    for row, line in enumerate(lines):
        y = top + HIGH * row + 16
        column = 0
        for style, text in line:
            for piece in re.findall(r"[━╸╺]+|─+|(?:[^\s━╸╺─]| (?! ))+|\s+", text):
                x = WIDE * column
                column += len(piece)
                if piece.strip():
                    parts.append(_piece(piece, style, x, y))
    return "".join(parts)


def _piece(text: str, style: str, x: float, y: float) -> str:
    colour = _COLOURS[style]
    if text[0] in "━╸╺─":  # lines join better than letters
        begin = x + WIDE / 2 * (text[0] == "╺")
        end = x + WIDE * len(text) - WIDE / 2 * (text[-1] == "╸")
        thick = 1 if text[0] == "─" else 4
        d = f"M{begin:g} {y - 5:g}H{end:g}"
        return f'<path d="{d}" stroke="{colour}" stroke-width="{thick}"/>'
    lead = len(text) - len(text.lstrip())
    text = text.strip()
    bold = ' font-weight="700"' if style == "1" else ""
    return (
        f'<text x="{x + WIDE * lead:g}" y="{y:g}" fill="{colour}"{bold} '
        f'textLength="{WIDE * len(text):g}">{escape(text, quote=False)}</text>'
    )


def window(rows: int, inner: str, alt: str, style: str = "") -> str:
    """A terminal window; dark on every page, as terminals are.

    Args:
        rows: of text.
        inner: what is on the screen.
        alt: the same for those who cannot see it.
        style: rules of an animation.
    """
    width, height = round(COLUMNS * WIDE + 2 * EDGE), round(rows * HIGH + BAR + 2 * EDGE)
    ground, rule, muted = (TOKENS[name][1] for name in ("page", "rule", "muted"))
    dots = "".join(
        f'<circle cx="{EDGE + 18 * k}" cy="{BAR / 2 + 2:g}" r="5.5" fill="{rule}"/>'
        for k in range(3)
    )
    note = "census data, 6 methods, 2 seeds" + (", time compressed" if style else "")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img"><title>{escape(alt, quote=False)}</title>'
        f"<style>text{{font-family:{MONO};font-size:{SIZE}px;white-space:pre}}{style}</style>"
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="12" fill="{ground}" '
        f'stroke="{rule}"/>{dots}'
        f'<text x="{width - EDGE}" y="{BAR / 2 + 6:g}" text-anchor="end" fill="{muted}" '
        f'style="font-size:12px">{note}</text>'
        f'<svg x="{EDGE}" y="{BAR + EDGE / 2:g}" width="{COLUMNS * WIDE:g}" '
        f'height="{rows * HIGH + 6}">{inner}</svg></svg>\n'
    )


def draw() -> list[Path]:
    """The animation and its last screen."""
    seen = [(at, [[(s, t) for s, t in line] for line in lines]) for at, lines in _read()]
    prompt: Line = [("prompt", "$ "), ("1", COMMAND)]
    typed = [[prompt[0], ("1", COMMAND[:k])] for k in range(0, len(COMMAND), 4)]
    progress = [lines for _, lines in seen if len(lines) < 8]
    ends = [lines for _, lines in seen if len(lines) >= 8]
    frames = [(0.06, [line]) for line in typed] + [(0.6, [prompt])]
    frames += [(0.2, [prompt, *lines]) for lines in progress]
    frames += [(1.0, [prompt, *lines]) for lines in ends[:-1]] + [(9.0, [prompt, *ends[-1]])]
    rows = max(len(lines) for _, lines in frames)
    high, total, at = rows * HIGH + 40, sum(seconds for seconds, _ in frames), 0.0
    film, keys = [], []
    for number, (seconds, lines) in enumerate(frames):
        film.append(screen_svg(lines, number * high))
        keys.append(f"{100 * at / total:.2f}%{{transform:translateY({-number * high}px)}}")
        at += seconds
    last = f"translateY({-(len(frames) - 1) * high}px)"
    style = (
        f".film{{transform:{last};animation:film {total:.1f}s step-end infinite}}"
        f"@keyframes film{{{''.join(keys)}}}"
        "@media(prefers-reduced-motion:reduce){.film{animation:none}}"
    )
    text = "\n".join("".join(part for _, part in line).rstrip() for line in frames[-1][1])
    said = f"A terminal: {text}"
    paths = IMAGES / "demo.svg", IMAGES / "demo-table.svg"
    paths[0].write_text(window(rows, f'<g class="film">{"".join(film)}</g>', said, style))
    paths[1].write_text(window(rows, screen_svg(frames[-1][1]), said))
    return list(paths)


def _read() -> list[tuple[float, list[list[list[str]]]]]:
    return json.loads(FILE.read_text())


if __name__ == "__main__":
    record()
