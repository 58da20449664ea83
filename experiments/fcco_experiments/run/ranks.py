"""What all ranks of a run agree on: its plan, its data, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from fcco import NonFiniteValue

from .. import distributed
from ..config import ConfigError
from ..store import FolderError, RunSpec, differences
from ..task import Problem

T = TypeVar("T")

_AGREE_EVERY = 0.5  # seconds between two exchanges whether to stop


class Diverged(Exception):
    """Training has left the finite numbers after so many steps."""

    def __init__(self, text: str, step: int) -> None:
        super().__init__(text)
        self.step = step


class Consensus:
    """Whether a run goes on, stops or has diverged: the same answer at the same step on all ranks.

    Messages after every step would be slow. Rank 0 measures the steps and chooses after how many
    the ranks exchange their states again, about half a second apart; a single process need not.
    Divergence is what the library and torch report as such: `NonFiniteValue`, `FloatingPointError`.
    """

    def __init__(self, stop: Callable[[], bool]) -> None:
        self._stop = stop
        self._interval, self._next = 1, 0
        self._last_step, self._last_time = 0, time.monotonic()
        self._diverged: tuple[int, str] | None = None

    def step(self, call: Callable[[], None], step: int, agree: bool) -> bool:
        """Make a step; whether to stop after it.

        A rank that diverges alone keeps stepping until the next exchange: the others need it in the
        collectives of their steps. Then all raise `Diverged`.

        Args:
            call: `Training.step`, on every rank.
            step: steps made before.
            agree: whether other messages follow, so that all ranks must agree first.
        """
        self._attempt(call, step)
        if distributed.world_size() > 1 and not agree and step < self._next:
            return False
        now = time.monotonic()
        per_second = (step - self._last_step) / max(now - self._last_time, 1e-9)
        # At most twice as many as before: the first steps are slow.
        interval = min(max(int(_AGREE_EVERY * per_second), 1), 2 * self._interval)
        stop, self._interval = self._exchange(self._stop(), interval)
        self._next, self._last_step, self._last_time = step + self._interval, step, now
        return stop

    def run(self, call: Callable[[], T], step: int) -> T:
        """The result of an evaluation after so many steps, unless any rank diverged."""
        value = self._attempt(call, step)
        self._exchange(False, 0)
        return value  # type: ignore[return-value]

    def _attempt(self, call: Callable[[], T], step: int) -> T | None:
        try:
            return call()
        except (FloatingPointError, NonFiniteValue) as error:
            self._diverged = self._diverged or (step, f"after {step} steps: {error}")
            return None

    def _exchange(self, stop: bool, interval: int) -> tuple[bool, int]:
        """Whether any rank stops, and the interval of rank 0; raises when any has diverged."""
        stops, diverged, intervals = zip(
            *distributed.all_gather((stop, self._diverged, interval)), strict=True
        )
        if any(diverged):
            step, text = min(filter(None, diverged))
            raise Diverged(text, step)
        return any(stops), intervals[0]


def check_same_plan(specs: Sequence[RunSpec]) -> None:
    """Refuse ranks that want other runs than rank 0: their config files differ."""
    plans = distributed.all_gather({str(place): spec.plain() for place, spec in enumerate(specs)})
    for place, other in enumerate(plans):
        if changes := differences(plans[0], other, ()):
            raise ConfigError(
                f"Rank {place} has another plan than rank 0, run.setting: {changes[0]}. Give every "
                "machine the same files and the same command."
            )


def fingerprint(problem: Problem) -> str:
    """The fingerprint of the data, which must be the same on all ranks."""
    prints = distributed.all_gather(problem.fingerprint())
    for place, other in enumerate(prints):
        if other != prints[0]:
            raise FolderError(
                f"The data of rank {place}, {other[:12]}, are not those of rank 0, "
                f"{prints[0][:12]}: give every machine the same files."
            )
    return prints[0]
