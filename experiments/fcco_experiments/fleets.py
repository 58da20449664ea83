"""A runner that trains runs of one kind together, as fleets, in the place of `workers.run`.

With several processes (torchrun) each trains a part of the runs on a device of its own. They meet
at the start and at the end; between, nobody waits for another.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from . import distributed, environment, store
from .fleet_work import Fleets
from .store import Outcome, RunSpec
from .workers import Stop, Tell, interruptible, load
from .workers import run as run_alone

__all__ = ["run"]


def run(
    specs: Sequence[RunSpec],
    out: Path,
    *,
    workers: int | None = None,
    resume: bool = False,
    tensorboard: bool = False,
    on_event: Tell = lambda event: None,
    device: str = "auto",
    chunk: int | None = None,
) -> list[Outcome]:
    """Do all runs, as `workers.run` does: those that a fleet can hold together, the others alone.

    Runs of a fleet leave one line each in `fleet.jsonl` and no curves. Each rank trains an equal
    part of the runs of each kind.

    Args:
        specs: of one experiment, whose problem has `fleet_kind` and `fleet`.
        out: folder of the comparison.
        workers: processes for the runs that no fleet can hold.
        resume: go on from checkpoints.
        tensorboard: for runs that no fleet can hold.
        on_event: told what happens.
        device: `"auto"`, `"cpu"` or `"cuda"`; a field `device` of the config rules.
        chunk: runs of a fleet at most; unless given as many as fit, on a CPU into its caches.

    Raises:
        LoadError: when the task cannot load its data.
        FolderError: when the folder holds fleets of other runs.
    """
    if not specs:
        return []
    wanted = specs[0].config.preferred_device or device
    place = distributed.run_on_all(lambda: distributed.device(wanted))
    with interruptible() as asked, _prepared(place):
        stop = Stop(asked, on_event)
        problem = distributed.run_on_all(lambda: load(specs[0], on_event))
        begun = distributed.run_on_first(lambda: _begun(specs, out) if resume else set[str]())
        together, alone = _sorted(problem, specs, begun)
        fleets = Fleets(problem, specs[0], out, place, chunk, on_event, stop)
        done = fleets.run(together)
        stopped = distributed.any_rank(stop())
    if alone and not stopped:
        ended = run_alone(
            alone, out, workers=workers, resume=resume, tensorboard=tensorboard, on_event=on_event
        )
        done |= {outcome.run: outcome for outcome in ended}
    return [done.get(spec.label, Outcome(spec.label, "stopped")) for spec in specs]


@contextlib.contextmanager
def _prepared(device: torch.device) -> Iterator[None]:
    """All cores for this process, unless the environment says otherwise; and its GPU."""
    held = torch.get_num_threads()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(environment.available_cores())
    try:
        yield
    finally:
        torch.set_num_threads(held)


def _begun(specs: Sequence[RunSpec], out: Path) -> set[str]:
    """Runs that an earlier command has begun to train alone: they go on so."""
    return {s.label for s in specs if (s.folder(out) / store.CHECKPOINT).is_file()}


def _sorted(
    problem: Any, specs: Sequence[RunSpec], begun: set[str]
) -> tuple[dict[Hashable, list[RunSpec]], list[RunSpec]]:
    """Runs by kind, and those that no fleet can hold."""
    together: dict[Hashable, list[RunSpec]] = {}
    alone: list[RunSpec] = []
    for spec in specs:
        kind = problem.fleet_kind(spec.method, spec.seed)
        fits = kind is not None and spec.label not in begun
        (together.setdefault(kind, []) if fits else alone).append(spec)
    return together, alone
