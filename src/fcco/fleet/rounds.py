"""Where each run stands in its double loop; known without a look at the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .run import Flag, Phase

__all__ = ["Rounds"]


class Rounds:
    """Counters of rounds, one per run.

    Args:
        lengths: K of each run, a number or a function of the round.
        device: of the masks.

    Example:
        >>> rounds = Rounds([1, 2], torch.device("cpu"))
        >>> rounds.phase()
        Phase(begins=True, ends=tensor([ True, False]))
        >>> rounds.advance()
        >>> rounds.phase()
        Phase(begins=tensor([ True, False]), ends=True)
    """

    def __init__(self, lengths: Sequence[int | Callable[[int], int]], device: torch.device) -> None:
        self.lengths, self.device = list(lengths), device
        self.inner = np.zeros(len(self.lengths), dtype=np.int64)
        self.round = np.zeros_like(self.inner)
        self.current = self._lengths(range(len(self.lengths)))

    def _lengths(self, runs: Sequence[int] | range) -> np.ndarray[Any, Any]:
        found = ((self.lengths[run], int(self.round[run])) for run in runs)
        return np.array([k(number) if callable(k) else k for k, number in found])

    def phase(self) -> Phase:
        """Which runs begin a round with the next step, and which end one."""
        return Phase(self._flag(self.inner == 0), self._flag(self.inner + 1 >= self.current))

    def _flag(self, mask: np.ndarray[Any, Any]) -> Flag:
        if mask.all() or not mask.any():
            return bool(mask[0])
        return torch.from_numpy(mask).to(self.device)

    def advance(self) -> None:
        """Count a step."""
        self.inner += 1
        over = np.flatnonzero(self.inner >= self.current)
        self.inner[over] = 0
        self.round[over] += 1
        if len(over):
            self.current[over] = self._lengths([int(r) for r in over])

    def state_dict(self) -> dict[str, Any]:
        """The counters."""
        return {"inner": torch.tensor(self.inner), "round": torch.tensor(self.round)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.inner[:] = state["inner"].numpy()
        self.round[:] = state["round"].numpy()
        self.current = self._lengths(range(len(self.lengths)))
