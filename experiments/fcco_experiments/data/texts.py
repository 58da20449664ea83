"""Texts as samples."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Texts"]


@dataclass(frozen=True)
class Texts:
    """Samples that are strings in memory."""

    values: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: int) -> str:
        return self.values[row]
