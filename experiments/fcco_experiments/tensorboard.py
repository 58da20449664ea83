"""Figures of a run for TensorBoard."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .task import Row

__all__ = ["Board"]


class Board:
    """Writes the numbers of each evaluation as scalars; does nothing unless wanted.

    Args:
        folder: of the run; the event files go to `tensorboard/` in it.
        rows: evaluations before this process, written again from the first.
        wanted: whether to write at all.
    """

    def __init__(self, folder: Path, rows: Iterable[Row], wanted: bool) -> None:
        self._writer: Any = None
        if not wanted:
            return
        from torch.utils.tensorboard import SummaryWriter  # type: ignore[attr-defined]

        # Events after the checkpoint would stand beside those of the steps made again.
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        self._writer = SummaryWriter(str(folder / "tensorboard"))
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """One evaluation; lists become one scalar for each entry."""
        if self._writer is None:
            return
        for key, value in row.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, row["step"])
            elif isinstance(value, list):
                for place, each in enumerate(value):
                    self._writer.add_scalar(f"{key}/{place}", each, row["step"])

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
