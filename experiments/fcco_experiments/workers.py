"""Many runs: in this process or over several, the same bit for bit."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from . import launch, ranks
from .environment import available_cores
from .events import Event, Outcome
from .pool import Pool
from .spec import RunSpec
from .work import LoadError, Order, Tell, load, one

__all__ = ["LoadError", "Stop", "interruptible", "run"]


def run(
    specs: Sequence[RunSpec],
    out: Path,
    *,
    workers: int | None = None,
    resume: bool = False,
    tensorboard: bool = False,
    on_event: Tell = lambda event: None,
    threads: int = 1,
) -> list[Outcome]:
    """Do all runs; one that diverges or fails does not stop the others.

    On Ctrl-C (or SIGTERM) every run under way ends its step, saves itself and is `"stopped"`, as
    are those not begun. A second Ctrl-C kills.

    On several ranks (torchrun) the runs come one after another, each on all ranks.

    Args:
        specs: of one experiment.
        out: folder of the comparison.
        workers: processes; unless given, as many as this process has cores, or one on a GPU,
            whose memory they would share; 1 works in this process, as several ranks always do.
        resume: go on from checkpoints.
        tensorboard: whether to write scalars for TensorBoard.
        on_event: told what happens, in this process.
        threads: of torch in each process; another number may round differently.

    Raises:
        LoadError: when the task cannot load its data.
    """
    order = Order(out, resume, tensorboard, threads)
    number = min(_usual(specs) if workers is None else workers, len(specs))
    with interruptible() as asked:
        if number > 1 and ranks.size() == 1:
            outcomes = Pool(specs, order, on_event, asked, number).run()
        else:
            outcomes = _here(specs, order, on_event, asked)
    ended = {outcome.run: outcome for outcome in outcomes}
    return [ended.get(spec.label, Outcome(spec.label, "stopped")) for spec in specs]


def _usual(specs: Sequence[RunSpec]) -> int:
    """Processes when no number was given."""
    wanted = (specs[0].config.preferred_device if specs else None) or "cpu"
    return 1 if launch.device(wanted).type == "cuda" else available_cores()


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Whether the user has asked to stop; asking twice raises."""
    times = 0

    def handle(*signal_and_frame: Any) -> None:
        nonlocal times
        times += 1
        if times > 1:
            raise KeyboardInterrupt

    def asked() -> bool:
        return times > 0

    if threading.current_thread() is not threading.main_thread():
        yield asked  # signals reach the main thread alone
        return
    held = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)


class Stop:
    """Whether the user has asked to stop; says so once.

    Args:
        asked: whether.
        tell: told when.
    """

    def __init__(self, asked: Callable[[], bool], tell: Tell) -> None:
        self.asked, self.tell, self.told = asked, tell, False

    def __call__(self) -> bool:
        """Ask."""
        if self.asked() and not self.told:
            self.told = True
            self.tell(Event("stopping", ""))
        return self.told


def _here(
    specs: Sequence[RunSpec], order: Order, tell: Tell, asked: Callable[[], bool]
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(order.threads)
    stop = Stop(asked, tell)
    try:
        problem = ranks.together(lambda: load(specs[0], tell)) if specs else None
        for spec in specs:
            if ranks.any_rank(stop()):
                break
            assert problem is not None
            outcomes.append(one(spec, problem, order, tell, stop))
    finally:
        torch.set_num_threads(threads)
    return outcomes
