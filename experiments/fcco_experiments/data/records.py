"""Records of long json lists, read one by one so that memory stays small."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

from .folders import WrongData

__all__ = ["records"]

CHUNK = 1 << 20  # characters
LONGEST = 1 << 26  # of one record: a damaged file is not read to its end


def records(data: str, name: str, stream: TextIO, chunk: int = CHUNK) -> Iterator[dict[str, Any]]:
    """The objects of a json list.

    Args:
        data: name of the data set, for errors.
        name: of the file, for errors.
        stream: the file, as text.
        chunk: characters that are read at a time.

    Raises:
        WrongData: when the file is something else, or ends too early.

    Example:
        >>> import io
        >>> [each["name"] for each in records("a", "b", io.StringIO('[{"name": 1}, {"name": 2}]'))]
        [1, 2]
    """
    window = _Window(stream, chunk)
    number = 0
    try:
        window.take("[", "a list of records must begin with `[`")
        while window.mark() != "]":
            if number:
                window.take(",", "a comma or `]` must follow")
            yield window.record()
            number += 1
        window.take("]", "")
        if window.mark():
            raise _Damaged("something follows the end of the list")
    except (_Damaged, UnicodeDecodeError) as error:
        raise WrongData(
            f"`{data}`: {name} is damaged after {number:,} records: {error}."
        ) from error


class _Damaged(Exception):
    """The text is not what it should be."""


class _Window:
    """A piece of a long text, and a place in it."""

    def __init__(self, stream: TextIO, chunk: int) -> None:
        self.stream = stream
        self.chunk = chunk
        self.text = ""
        self.place = 0
        self.decoder = json.JSONDecoder()

    def more(self) -> bool:
        """Drop what has been read; append at least as much as is left, so that pieces double."""
        rest = self.text[self.place :]
        new = self.stream.read(max(self.chunk, len(rest)))
        self.text, self.place = rest + new, 0
        return bool(new)

    def mark(self) -> str:
        """The next character that is not blank; none at the end."""
        while True:
            while self.place < len(self.text):
                if not self.text[self.place].isspace():
                    return self.text[self.place]
                self.place += 1
            if not self.more():
                return ""

    def take(self, mark: str, reason: str) -> None:
        if self.mark() != mark:
            raise _Damaged(reason)
        self.place += 1

    def record(self) -> dict[str, Any]:
        if self.mark() != "{":
            raise _Damaged("a record must begin with `{`")
        while True:
            try:
                found, self.place = self.decoder.raw_decode(self.text, self.place)
                return found
            except json.JSONDecodeError as error:
                # Either the record goes on behind the piece, or it is damaged.
                if len(self.text) - self.place > LONGEST or not self.more():
                    raise _Damaged(error.msg) from error
            except (ValueError, RecursionError) as error:  # endless numbers, endless brackets
                raise _Damaged(str(error)) from error
