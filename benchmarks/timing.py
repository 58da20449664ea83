"""Interleaved timing: every candidate runs in every round, ratios are taken within a round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timings:
    """Seconds per step of each candidate, by round."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Median seconds per step."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, base: str) -> float:
        """Median over rounds of the ratio to `base` in the same round."""
        pairs = zip(self.seconds[name], self.seconds[base], strict=True)
        return statistics.median(a / b for a, b in pairs)


def interleave(
    candidates: dict[str, Callable[[], None]],
    rounds: int,
    steps: int,
    *,
    warm_up: int = 3,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Time `steps` calls of each candidate per round; the order turns around every round.

    Args:
        candidates: what to time.
        rounds: how often; many short rounds are better than a few long ones, since what else the
            machine does then touches all candidates of a round alike, or few rounds.
        steps: calls of a candidate in a round.
        warm_up: calls of each before the clock runs.
        device: `"cuda"` to wait for the GPU before reading the clock.
        clock: `time.thread_time` ignores what other processes do with the core. It is right only
            for work that stays in the calling thread.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for step in candidates.values():
        for _ in range(warm_up):
            step()
    for number in range(rounds):
        order = list(candidates.items())
        for name, step in order if number % 2 == 0 else reversed(order):
            _wait(device)
            start = clock()
            for _ in range(steps):
                step()
            _wait(device)
            seconds[name].append((clock() - start) / steps)
    return Timings(seconds)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")
WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")


def launched(step: Callable[[], None]) -> tuple[int, int]:
    """What a step launches on the GPU, and how often the host waits for that."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(4):
            step()
    names = [event.name for event in profile.events() or ()]
    launches, waits = (
        sum(any(part in name for part in parts) for name in names) for parts in (LAUNCHES, WAITS)
    )
    return launches // 4, waits // 4  # the profiler itself waits once
