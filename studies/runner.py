"""Jobs as data, and what runs them: processes, progress, a file of finished ones."""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from fcco_experiments.data import MissingData

from . import publish


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        problem: its name.
        method: its name.
        setting: of the method.
        seed: of the initial weights and of the batches.
        shift: of the limits in training.
        evaluations: gradient evaluations, when not those of the problem.
    """

    problem: str
    method: str
    setting: dict[str, Any]
    seed: int
    shift: float = 0.0
    evaluations: int | None = None

    @property
    def key(self) -> str:
        """A text that tells jobs apart."""
        return json.dumps(asdict(self), sort_keys=True)


def as_dict(trace: Any) -> dict[str, Any]:
    """A result, which is a dataclass or a dictionary itself."""
    return trace if isinstance(trace, dict) else asdict(trace)


@dataclass
class Runner:
    """Runs jobs and remembers their results.

    Args:
        run: what is done with a job; a function of a module, since processes import it.
        result: the class of its answer, made again from its fields.
        workers: processes; 1 runs here, 0 runs nothing: a job that is not known is an error.
        cache: a file of JSON lines with finished jobs, read at the start and added to; compressed
            if its name ends with `.gz`, as those of published runs do.
        show: where progress goes, None for nowhere.
    """

    run: Callable[[Any], Any]
    result: Callable[..., Any]
    workers: int = 1
    cache: Path | None = None
    show: Any = sys.stderr
    known: dict[str, Any] = field(default_factory=dict)
    _said: float = 0.0
    _broken: bool = False

    def __post_init__(self) -> None:
        if self.cache is not None and self.cache.exists():
            with self._open("rt") as lines:
                for line in lines:
                    # The line that was being written when a run was stopped has no end.
                    self._broken = not line.endswith("\n")
                    try:
                        entry = json.loads(line)
                    except json.JSONDecodeError:
                        continue
                    self.known[entry["job"]] = self.result(**entry["trace"])

    def __call__(self, jobs: Sequence[Job], title: str) -> list[Any]:
        """The results of the jobs, in their order."""
        waiting = list({job.key: job for job in jobs if job.key not in self.known}.values())
        if waiting and not self.workers:
            raise LookupError(f"{title}: {len(waiting)} runs are missing, such as {waiting[0]}.")
        start = time.monotonic()
        if waiting and self.show is not None:
            print(f"{title}: {len(waiting)} jobs", file=self.show, flush=True)
        for done, (job, trace) in enumerate(self._finished(waiting), start=1):
            self._keep(job, trace)
            self._say(title, done, len(waiting), start)
        return self.of(jobs)

    def each(self, jobs: Mapping[Any, Sequence[Job]], title: str = "runs") -> dict[Any, list[Any]]:
        """The results by key; seed by seed, so that what was stopped has compared something."""
        every = [job for own in jobs.values() for job in own]
        self(sorted(every, key=lambda job: job.seed), title)
        return {key: self.of(own) for key, own in jobs.items()}

    def of(self, jobs: Sequence[Job]) -> list[Any]:
        """The results of jobs that are known."""
        return [self.known[job.key] for job in jobs]

    def entries(self) -> dict[str, Any]:
        """All results for a file, by the key of their job."""
        return {key: as_dict(trace) for key, trace in self.known.items()}

    def _finished(self, jobs: list[Any]) -> Iterator[tuple[Any, Any]]:
        if self.workers <= 1 or len(jobs) <= 1:
            yield from ((job, self.run(job)) for job in jobs)
            return
        # A fresh interpreter for each worker: threads of torch do not survive a fork.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            self.workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            futures = {pool.submit(self.run, job): job for job in jobs}
            try:
                yield from ((futures[each], each.result()) for each in as_completed(futures))
            except BaseException:
                # Otherwise the error is seen only after all other jobs, whose results are lost.
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _keep(self, job: Any, trace: Any) -> None:
        # A result is always what a reader of the file would get.
        entry = {"job": job.key, "trace": as_dict(trace)}
        self.known[job.key] = self.result(**entry["trace"])
        if self.cache is not None:
            self.cache.parent.mkdir(parents=True, exist_ok=True)
            with self._open("at") as file:
                file.write("\n" * self._broken + json.dumps(entry) + "\n")
                self._broken = False

    def _open(self, mode: str) -> Any:
        assert self.cache is not None
        return (gzip.open if self.cache.suffix == ".gz" else open)(self.cache, mode)

    def _say(self, title: str, done: int, total: int, start: float) -> None:
        """A line every half minute."""
        now = time.monotonic()
        if self.show is not None and (done == total or now - self._said >= 30):
            self._said = now
            left = (now - start) / done * (total - done) / 60
            text = f"{title}: {done}/{total} jobs, {left:.1f} min left"
            print(text, file=self.show, flush=True)


def published_runs(name: str) -> Runner:
    """The published runs of a study; a job that is not among them is an error."""
    return Runner(dict, dict, 0, publish.runs(name))


def tuned(
    runner: Runner,
    grids: Mapping[Any, Sequence[Any]],
    job: Callable[[Any, Any, int], Job],
    tuning: Sequence[int],
    seeds: Sequence[int],
    choose: Callable[[dict[Any, list[list[Any]]]], dict[Any, int]],
) -> dict[Any, tuple[Any, list[Any]]]:
    """For each cell the chosen setting, and the results of fresh seeds with it.

    Args:
        runner: runs the jobs.
        grids: the settings of each cell.
        job: of a cell, a setting and a seed.
        tuning: seeds for the choice; none for the first setting of each.
        seeds: fresh ones.
        choose: the place of the best setting of each cell, from results by setting and seed.
    """
    places = dict.fromkeys(grids, 0)
    if tuning:
        tried = {
            cell: [[job(cell, setting, seed) for seed in tuning] for setting in grid]
            for cell, grid in grids.items()
        }
        runner([each for own in tried.values() for some in own for each in some], "settings")
        places = choose({cell: [runner.of(own) for own in some] for cell, some in tried.items()})
    chosen = {cell: grid[places[cell]] for cell, grid in grids.items()}
    fresh = {cell: [job(cell, own, seed) for seed in seeds] for cell, own in chosen.items()}
    return {cell: (chosen[cell], runs) for cell, runs in runner.each(fresh, "seeds").items()}


def short(missing: Exception) -> str:
    """One line of what is said about missing data, and where they are looked for."""
    return f"{str(missing).splitlines()[0]} The variable FCCO_DATA names the folder of the data."


def available(names: Iterable[str], make: Callable[[str], Any], notes: list[str]) -> list[str]:
    """Problems whose files and packages are there; a note, also on stderr, for each other."""
    found = []
    for name in names:
        try:
            make(name)
            found.append(name)
        except (MissingData, FileNotFoundError) as reason:
            note(notes, f"{name} is left out: {short(reason)}")
        except ImportError as reason:
            note(notes, f"{name} is left out: {reason}.")
    return found


def note(notes: list[str], text: str) -> None:
    """Say what is left out, here and in the results."""
    notes.append(text)
    print(text, file=sys.stderr)


def command(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The options that studies share; `--help` shows the text of the module."""
    summary, _, details = (doc or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog=f"python -m studies.{name}", description=summary, epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--json", action="store_true", help="last line: one JSON object")
    add("--quick", action="store_true", help="few steps, seeds and settings")
    add("--seeds", type=int, help="fresh seeds")
    add("--workers", type=int, help="processes of one thread each; 1, or 2 with --quick")
    add("--out", type=Path, help="file of JSON lines with finished runs; another run continues it")
    add("--publish", action="store_true", help="write docs/results, at a clean commit")
    add("--commit", help="of the code, where git is not at hand")
    return parser


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, seeds: tuple[int, int]
) -> argparse.Namespace:
    """The options, with defaults that depend on `--quick`; `seeds` are those with it and without.

    Notes on what is left out come into `left_out`. From here on torch has one thread.
    """
    options = parser.parse_args(arguments)
    options.seeds = options.seeds or seeds[not options.quick]
    options.workers = options.workers or (2 if options.quick else 1)
    options.left_out = []
    if options.publish:
        publish.refuse_dirty(publish.about(commit=options.commit))
    torch.set_num_threads(1)
    return options
