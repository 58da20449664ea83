"""What `benchmarks.fleet` measures: the runs, the processes beside them, and the floor."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch
from fcco_experiments import data, environment
from fcco_experiments.data.synthetic import two_groups_synthetic
from fcco_experiments.task import Method
from fcco_experiments.tasks.fairness import Fairness, FairnessProblem
from torch import Tensor

SEEDS = 5
ADULT = {"rows": 32_561, "test_rows": 16_281, "features": 107}
METHODS = {
    "sonex": Method(
        "sonex",
        1e-3,
        settings={"penalty": 10, "smoothing": 2e-3, "gamma": 0.8, "correction": 0.1},
    ),
    "alexr2": Method(
        "alexr2",
        1e-3,
        independent=True,
        settings={
            "penalty": 10,
            "smoothing": 2e-3,
            "gamma": 0.8,
            "theta": 0.125,
            "nu": 0.1,
            "eta": 0.01,
            "inner_steps": 5,
        },
    ),
}
"""Adam-type both; the settings that the paper fixes, and values out of its grids."""

Step = Callable[[], Any]
Measure = Callable[[], float]
"""Seconds for one step of one run."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A method on a data set; plain values, so that another process can build the same.

    Args:
        method: its word.
        hidden: widths of the network.
        batch: samples.
        epochs: of a run.
        generated: shape of generated data; None for Adult.
    """

    method: str
    hidden: tuple[int, ...] = (64, 64)
    batch: int = 128
    epochs: int = 60
    generated: tuple[tuple[str, int], ...] | None = None

    def problem(self) -> FairnessProblem:
        """Data in cells; the paper's setting."""
        config = Fairness(
            data="adult" if self.generated is None else "synthetic",
            score="unbounded",
            temperature=1.0,
            hidden=self.hidden,
            batch=self.batch,
            epochs=self.epochs,
        )
        if self.generated is None:
            return FairnessProblem(config)
        return FairnessProblem(config, loaded=two_groups_synthetic(**dict(self.generated)))

    def runs(self, number: int) -> list[tuple[Method, int]]:
        """Settings times five seeds: each setting has a learning rate of its own."""
        base = METHODS[self.method]
        return [
            (dataclasses.replace(base, lr=base.lr * 1.0005 ** (place // SEEDS)), place % SEEDS)
            for place in range(number)
        ]


def found_adult() -> bool:
    """Whether Adult's files are on this machine."""
    files = data.look("adult")
    return {each.file for each in files} == {f.file for f in files if f.state == "found"}


def seconds_of(step: Step, number: int, device: str) -> float:
    """Seconds of one step out of several."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(number):
        step()
    _wait(device)
    return (time.perf_counter() - start) / number


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Meter:
    """Makes measurements of about the same time.

    Args:
        device: to wait for.
        seconds: of a measurement.
        threads: of the CPU.
    """

    def __init__(self, device: str, seconds: float, threads: int) -> None:
        self.device, self.seconds, self.threads = device, seconds, threads
        self.slowest = seconds

    def __call__(self, step: Step, runs: int) -> Measure:
        """A measurement of a step of so many runs; warms up."""
        torch.set_num_threads(self.threads)
        cost = min(seconds_of(step, 1, self.device) for _ in range(3))
        number = max(1, min(5_000, int(self.seconds / cost)))
        self.slowest = max(self.slowest, number * cost)

        def once() -> float:
            torch.set_num_threads(self.threads)
            return seconds_of(step, number, self.device) / runs

        return once


class Processes:
    """One process per core, each with a run of its own and one thread."""

    def __init__(self, case: Case, number: int | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.workers = [], []
        for seed in range(number or environment.available_cores()):
            own, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs, case, seed), daemon=True)
            worker.start()
            self.pipes.append(own)
            self.workers.append(worker)
        for pipe in self.pipes:
            pipe.recv()  # ready

    def __call__(self, seconds: float) -> float:
        """Train for some seconds at once; seconds for a step of one run, all cores together."""
        for pipe in self.pipes:
            pipe.send(seconds)
        return 1 / sum(1 / pipe.recv() for pipe in self.pipes)

    def close(self) -> None:
        """End them."""
        for pipe, worker in zip(self.pipes, self.workers, strict=True):
            pipe.send(None)
            worker.join()


def _work(pipe: Any, case: Case, seed: int) -> None:
    torch.set_num_threads(1)
    training = case.problem().start(METHODS[case.method], seed)
    for _ in range(5):
        training.step()
    pipe.send(True)
    while (seconds := _next(pipe)) is not None:
        start, number = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            training.step()
            number += 1
        pipe.send((time.perf_counter() - start) / number)


def _next(pipe: Any) -> float | None:
    """The next order; None when the benchmark has ended, or was killed."""
    try:
        return pipe.recv()
    except EOFError:
        return None


def products(case: Case, features: int, runs: int, passes: int, device: str) -> Step:
    """The matrix products of a step alone: some forward passes and one backward pass.

    Args:
        case: widths and batch.
        features: width of the inputs.
        runs: R.
        passes: forward, at w_t and w_{t-1}, of one batch or two.
        device: where.
    """
    widths = [features, *case.hidden, 1]
    shapes = list(itertools.pairwise(widths))
    inputs = [torch.randn(runs, case.batch, width, device=device) for width in widths]
    weights = [torch.randn(runs, *shape, device=device) for shape in shapes]

    def step() -> None:
        for _ in range(passes):
            for x, w in zip(inputs, weights, strict=False):
                torch.bmm(x, w)
        for layer, (x, w) in enumerate(zip(inputs, weights, strict=False)):
            slope = inputs[layer + 1]
            torch.bmm(x.mT, slope)
            if layer:
                torch.bmm(slope, w.mT)

    return step


def copies(state: dict[str, Tensor]) -> Step:
    """One read and one write of the whole state."""
    held = [value.clone() for value in state.values()]
    room = [value.clone() for value in held]

    def step() -> None:
        for place, value in zip(room, held, strict=True):
            place.copy_(value)

    return step
