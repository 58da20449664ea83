"""Estimate how many runs fit into a fleet, by measuring the memory of small fleets."""

from __future__ import annotations

import gc
import itertools
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fcco import _checks

__all__ = ["LiveBytes", "available", "capacity", "chunks"]

DEFAULT = 4 << 30
"""Bytes of memory where the system does not report any: 4 GiB."""
F = TypeVar("F")
PROBES = (16, 64)
"""Sizes of the fleets that are measured, after one of a single run."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that were made inside and are still in use, each storage once.

    Memory that an operation allocates and frees within itself is not counted.

    Attributes:
        now: bytes at this moment.
        peak: the most so far.

    Example:
        >>> with LiveBytes() as live:
        ...     total = (torch.zeros(100) + 1).sum()
        >>> live.now, live.peak
        (4, 800)
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and record the storages of its result."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._record(leaf)
        return result

    def _record(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":  # a shape without memory, such as tracing makes
            return
        key, size = storage._cdata, storage.nbytes()
        reference, before = self._known.get(key, (None, 0))
        if reference is None or reference() is None:
            reference, before = weakref.ref(storage, lambda gone: self._forget(key, gone)), 0
        self._known[key] = (reference, size)  # an `out=` may have grown
        self.now += size - before
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int, gone: weakref.ref[Any]) -> None:
        reference, size = self._known.get(key, (None, 0))
        if reference is gone:
            del self._known[key]
            self.now -= size


def available(device: torch.device | str) -> int:
    """Bytes that new tensors can take on a device.

    On a GPU: free memory, and what the allocator of this process has reserved but does not use. On
    the host (also for other devices, which share its memory): on Linux `MemAvailable`, or the rest
    of the control groups of this process when that is less; elsewhere the free pages, half of the
    memory, or `DEFAULT`, whichever the system reports first.

    Example:
        >>> available("cpu") > 0
        True
    """
    device = torch.device(device)
    if device.type != "cuda":
        return _host()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def capacity(
    make: Callable[[int], F],
    step: Callable[[F], Any],
    runs: int,
    device: torch.device | str,
    *,
    share: float = 0.8,
) -> int:
    r"""How many runs can be in one fleet.

    .. math::
        R = \Bigl\lfloor \frac{\text{share}\cdot\text{available} - a}{b} \Bigr\rfloor, \qquad
        \text{peak}(r) = a + b\,r,

    with the fixed bytes a and the bytes b of a run from the peaks of small fleets, of at most 64
    runs.

    Args:
        make: builds a fleet of r runs, or an object that holds one. These runs should be typical:
            when runs share data, the first 16 should use most of them.
        step: makes its most expensive steps, evaluations included; twice for a fleet whose first
            step differs from the others.
        runs: the number of all runs.
        device: of the fleets.
        share: of the memory that may be used; peaks are not quite linear.

    Returns:
        Between 1 and `runs`.

    Raises:
        MemoryError: when not even one run fits.

    Example:
        >>> from fcco.fleet import Fleet, Member
        >>> def make(runs):
        ...     models = [torch.nn.Linear(10, 1) for _ in range(runs)]
        ...     one = [Member(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in models]
        ...     return Fleet(one, lambda m, x: m(x).square().mean(), streams=[0] * runs)
        >>> capacity(make, lambda fleet: fleet.step(torch.ones(1, 8, 10)), 50, "cpu")
        50
    """
    _checks.integer("capacity", "runs", runs, 1)
    _checks.in_interval("capacity", "share", share, 0, 1, open_low=True)
    device = torch.device(device)
    sizes, peaks = [1], [_peak(make, step, 1, device)]
    budget = int(share * available(device))
    if peaks[0] > budget:
        raise MemoryError(
            f"`capacity`: one run takes {_size(peaks[0])} on {device}, but {share:g} of what is "
            f"available is {_size(budget)}. Take smaller batches, or evaluate in chunks."
        )
    for most in PROBES:
        safe = budget * sizes[-1] // max(1, peaks[-1])  # more fit, because some bytes are fixed
        if (size := min(runs, most, safe)) > sizes[-1]:
            sizes.append(size)
            peaks.append(_peak(make, step, size, device))
    if sizes[-1] == runs and peaks[-1] <= budget:
        return runs
    if len(sizes) == 1:
        return 1
    # The last two: the first runs may bring data that all others share, and libraries workspaces.
    per_run = (peaks[-1] - peaks[-2]) / (sizes[-1] - sizes[-2])
    if per_run <= 0:
        return runs
    return max(1, min(runs, sizes[-1] + int((budget - peaks[-1]) // per_run)))


def chunks(runs: int, size: int) -> list[range]:
    """Split runs into as few parts as their size allows, of nearly equal length.

    Args:
        runs: the number of runs.
        size: the largest number of runs in a part.

    Example:
        >>> chunks(10, 4)
        [range(0, 4), range(4, 7), range(7, 10)]
    """
    _checks.integer("chunks", "runs", runs, 1)
    _checks.integer("chunks", "size", size, 1)
    parts = -(-runs // size)
    small, more = divmod(runs, parts)
    edges = [k * small + min(k, more) for k in range(parts + 1)]
    return [range(start, end) for start, end in itertools.pairwise(edges)]


def _peak(
    make: Callable[[int], F], step: Callable[[F], Any], runs: int, device: torch.device
) -> int:
    """The peak of the bytes in use while a fleet is built and stepped."""
    make(runs)  # what is loaded once and kept, such as data, is not a part of a fleet
    gc.collect()
    if device.type != "cuda":
        with LiveBytes() as live:
            step(make(runs))
        return live.peak
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step(make(runs))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    gc.collect()  # the graphs of a fleet may refer to it
    torch.cuda.empty_cache()
    return peak


def _size(number: float) -> str:
    """A number of bytes with its unit."""
    return f"{number / 2**20:,.1f} MiB" if number < 2**30 else f"{number / 2**30:,.2f} GiB"


def _host(root: Path = Path("/")) -> int:
    """Bytes of memory that this process can still take."""
    limits = _left_by_groups(root)
    free = _available(root / "proc/meminfo")
    if free is not None:
        limits.append(free)
    if limits:
        return max(0, min(limits))
    for name, part in (("SC_AVPHYS_PAGES", 1.0), ("SC_PHYS_PAGES", 0.5)):
        try:
            pages = os.sysconf(name)
        except (AttributeError, OSError, ValueError):  # not on every system
            continue
        if pages > 0:
            return int(part * pages * os.sysconf("SC_PAGE_SIZE"))
    return DEFAULT


def _available(file: Path) -> int | None:
    for line in _lines(file):
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return None


def _left_by_groups(root: Path) -> list[int]:
    """What each control group of this process leaves: its limit less what cannot be dropped."""
    mount, left = root / "sys/fs/cgroup", []
    names = {
        "": ("memory.max", "memory.current", "inactive_file"),
        "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    for line in [*_lines(root / "proc/self/cgroup"), "0::/", "0:memory:/"]:
        _, controllers, path = line.split(":", 2)
        hierarchy = "memory" if "memory" in controllers.split(",") else controllers
        if hierarchy not in names:
            continue
        limit, usage, droppable = names[hierarchy]
        own = Path(path.strip("/"))
        for folder in {mount / hierarchy / part for part in (own, *own.parents)}:
            most, used = (_lines(folder / name) for name in (limit, usage))
            if not most or not used or not most[0].isdigit():  # no limit is "max"
                continue
            stat = dict(each.split(" ", 1) for each in _lines(folder / "memory.stat"))
            left.append(int(most[0]) - int(used[0]) + int(stat.get(droppable, "0")))
    return left


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
