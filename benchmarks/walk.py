"""How far a reader walks through the library to follow one step: its calls, indented by depth.

    python -m benchmarks.walk sonex_step    # or constrained_step, xrisk_step

A walk runs under `sys.setprofile`, which reports every Python call. Shown are calls of functions
written in a file of `fcco`: not those of torch, of the caller's own function, of generated code (a
dataclass's `__init__`), and not comprehensions. A generator counts once, however often it resumes.

Walks are warm steps (the call, backward, optimizer step, zero_grad) of `CVaRGroupDRO`, of
`constrained(...)` without settings and of `xrisk.AveragePrecision`.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import fcco

from .cases import stepping

SOURCE = Path(fcco.__file__).parent
LIMITS = {"a": 0.5, "b": 0.4, "c": 0.5, "d": 0.4}
INDEX = torch.arange(len(LIMITS)).repeat_interleave(2)  # two samples of each


class Call(NamedTuple):
    """A call: qualified name of the function, its file and line, and the depth from 1 on."""

    name: str
    file: str
    line: int
    depth: int


def record(action: Callable[[], Any], source: Path = SOURCE) -> list[Call]:
    """The calls of functions written under `source` while `action` runs, in order."""
    calls: list[Call] = []
    generators: set[FrameType] = set()
    depth = 0

    def counted(code: CodeType) -> bool:
        if not code.co_filename.startswith(f"{source}{os.sep}"):
            return False
        # Bodies of modules and classes are not "optimized"; comprehensions are named <listcomp>.
        named = code.co_name == "<lambda>" or not code.co_name.startswith("<")
        return named and bool(code.co_flags & inspect.CO_OPTIMIZED)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth
        code = frame.f_code
        if event not in ("call", "return") or not counted(code):
            return
        if event == "return":
            depth -= 1
            return
        depth += 1
        if frame not in generators:
            file = Path(code.co_filename).relative_to(source).as_posix()
            calls.append(Call(code.co_qualname, file, code.co_firstlineno, depth))
        if code.co_flags & inspect.CO_GENERATOR:  # resuming it is another "call" of this frame
            generators.add(frame)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(before)
    return calls


def problem() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(5, 1)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return softplus(model(x).squeeze(-1))


def warm(step: Callable[[], Any], steps: int = 4) -> list[Call]:
    """The walk of a step after a few of them: first visits and imports are over."""
    for _ in range(steps):
        step()
    return record(step)


def sonex_step() -> list[Call]:
    model, optimizer = problem()
    dro = fcco.CVaRGroupDRO(model, optimizer, num_groups=10, ratio=0.2)
    x = torch.randn(len(INDEX), 5)
    return warm(stepping(optimizer, lambda: dro(lambda: losses(model, x), INDEX)))


def constrained_step() -> list[Call]:
    model, optimizer = problem()
    objective = fcco.constrained(model, optimizer, LIMITS)
    x = torch.randn(len(INDEX), 5)
    step = stepping(optimizer, lambda: objective(lambda: (losses(model, x),) * 2, INDEX))
    return warm(step, 15)  # the first ten only measure


def xrisk_step() -> list[Call]:
    model, optimizer = problem()
    x, index = torch.randn(8, 5), torch.arange(8)
    labels = index % 2
    risk = fcco.xrisk.AveragePrecision(model, optimizer, labels)
    return warm(stepping(optimizer, lambda: risk(lambda: model(x).squeeze(1), labels, index)))


WALKS: dict[str, Callable[[], list[Call]]] = {
    walk.__name__: walk for walk in (sonex_step, constrained_step, xrisk_step)
}


def listing(calls: Sequence[Call]) -> str:
    """One line per call: file and line, and the name indented by depth."""
    places = [f"{call.file}:{call.line}" for call in calls]
    width = 2 + max(map(len, places), default=0)
    rows = zip(places, calls, strict=True)
    return "\n".join(f"{place:<{width}}{'  ' * (c.depth - 1)}{c.name}" for place, c in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("walk", choices=list(WALKS))
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    print(listing(WALKS[options.walk]()))


if __name__ == "__main__":
    main()
