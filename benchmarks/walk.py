"""How far a reader walks through the library to follow one step.

    python -m benchmarks.walk --json        # a table; last line: one JSON object
    python -m benchmarks.walk sonex_step    # the calls of a walk, indented by depth: a guided tour

A walk runs under `sys.setprofile`, which reports every Python call. Counted are calls of functions
written in a file of `fcco`: not those of torch, of the caller's own function, of generated code (a
dataclass's `__init__`), and not comprehensions. A generator counts once, however often it resumes.

Walks are warm steps (the call, backward, optimizer step, zero_grad) of `CVaRGroupDRO`, of
`constrained(...)` without settings and of `xrisk.AveragePrecision`; an eager step of a fleet of
three default constrained runs; and `constrained(...)` of four named limits itself.

Keys of each walk in the JSON: `calls`; `files`, the distinct files among them; `switches`, how
often a call lies in another file than the call before; `depth`, the deepest nesting of calls.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
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

    gc.collect()
    gc.disable()  # finalizers of older objects are no part of the walk
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


def summary(calls: Sequence[Call]) -> dict[str, int]:
    """The figures of a walk."""
    return {
        "calls": len(calls),
        "files": len({call.file for call in calls}),
        "switches": sum(a.file != b.file for a, b in pairwise(calls)),
        "depth": max((call.depth for call in calls), default=0),
    }


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


def fleet_step() -> list[Call]:
    members = []
    for _ in range(3):
        model, optimizer = problem()
        objective = fcco.constrained(model, optimizer, len(LIMITS))
        members.append(fcco.fleet.Member(model, optimizer, objective))

    def inner(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values = losses(model, x)
        return values.mean(), values.view(len(LIMITS), -1).mean(1)

    fleet = fcco.fleet.Fleet(members, inner, mode="eager")
    batch = torch.randn(len(members), len(INDEX), 5)
    return warm(lambda: fleet.step(batch))


def build_constrained() -> list[Call]:
    problems = iter([problem() for _ in range(5)])
    return warm(lambda: fcco.constrained(*next(problems), LIMITS))


WALKS: dict[str, Callable[[], list[Call]]] = {
    walk.__name__: walk
    for walk in (sonex_step, constrained_step, xrisk_step, fleet_step, build_constrained)
}


def listing(calls: Sequence[Call]) -> str:
    """One line per call: file and line, and the name indented by depth."""
    places = [f"{call.file}:{call.line}" for call in calls]
    width = 2 + max(map(len, places), default=0)
    rows = zip(places, calls, strict=True)
    return "\n".join(f"{place:<{width}}{'  ' * (c.depth - 1)}{c.name}" for place, c in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("walks", nargs="*", metavar="walk", help=", ".join(WALKS))
    parser.add_argument("--json", action="store_true", help="no calls; last line: one JSON object")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.walks if name not in WALKS]:
        parser.error(f"no walk {unknown[0]!r}; there are {', '.join(WALKS)}")
    torch.manual_seed(0)
    walks = {name: WALKS[name]() for name in options.walks or WALKS}
    figures = {name: summary(calls) for name, calls in walks.items()}
    print(f"{'walk':<18}" + "".join(f"{key:>10}" for key in summary([])))
    for name, row in figures.items():
        print(f"{name:<18}" + "".join(f"{number:>10}" for number in row.values()))
    if options.json:
        print(json.dumps(figures))
        return
    for name, calls in walks.items():
        print(f"\n{name}\n{listing(calls)}")


if __name__ == "__main__":
    main()
