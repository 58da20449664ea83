"""What all ranks of a run must agree on: to go on, to stop, that it diverged, which data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from fcco import NonFiniteValue

from . import ranks
from .record import FolderError
from .spec import RunSpec, differences
from .task import Problem
from .yaml_text import ConfigError

__all__ = ["Diverged", "agreed", "check_plan", "fingerprint"]

T = TypeVar("T")

_ALONE = 60.0  # seconds that a rank which diverged waits for the others
_ON, _STOP, _DIVERGED = range(3)


class Diverged(Exception):
    """Training has left the finite numbers."""


def agreed(
    call: Callable[[], T], stop: Callable[[], bool] = lambda: False, *, steps: int = 0
) -> tuple[T, bool]:
    """What a training says, and whether any rank is asked to stop.

    A `FloatingPointError` or `fcco.NonFiniteValue` on any rank ends the run on all of them; other
    errors are bugs and leave as they are.

    Args:
        call: of the training, on every rank.
        stop: whether this rank is asked to.
        steps: made so far.

    Raises:
        Diverged: on every rank.
    """
    try:
        value = call()
    except (FloatingPointError, NonFiniteValue) as error:
        reason = f"after {steps} steps: {error}"
        try:
            ranks.highest(_DIVERGED, _ALONE)
        except RuntimeError as late:  # the others are in the middle of something
            raise RuntimeError(f"rank {ranks.rank()} alone diverged {reason}") from late
        raise Diverged(_first(reason)) from error
    word = ranks.highest(_STOP if stop() else _ON)
    if word == _DIVERGED:
        raise Diverged(_first(""))
    return value, word == _STOP


def _first(reason: str) -> str:
    return next(filter(None, ranks.everyone(reason)))


def check_plan(specs: Sequence[RunSpec]) -> None:
    """Refuse ranks that want other runs than rank 0: their config files differ."""
    plans = ranks.everyone([spec.plain() for spec in specs])
    for place, other in enumerate(plans):
        first, here = ({str(at): each for at, each in enumerate(p)} for p in (plans[0], other))
        if found := differences(first, here, ()):
            raise ConfigError(
                f"Rank {place} has another plan than rank 0, run.setting: {found[0]}. Give every "
                "machine the same files and the same command."
            )


def fingerprint(problem: Problem) -> str:
    """Of the data, which must be the same on all ranks."""
    found = ranks.everyone(problem.fingerprint())
    for place, other in enumerate(found):
        if other != found[0]:
            raise FolderError(
                f"The data of rank {place}, {other[:12]}, are not those of rank 0, "
                f"{found[0][:12]}: give every machine the same files."
            )
    return found[0]
