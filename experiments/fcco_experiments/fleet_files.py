"""Files of fleets: a line for each finished run, and checkpoints of the fleets under way.

`fleet.jsonl` has one line per run, as `result.json` of a run that was trained alone. In the folder
`fleet` lie checkpoints, and with several processes the lines of each until all have ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .config import from_plain
from .store import (
    FLEET_FOLDER,
    FLEET_LINES,
    FolderError,
    RunSpec,
    atomic,
    differences,
    label,
    read_fleet_lines,
    write_rows,
)
from .task import Experiment, Method, Row

__all__ = [
    "FleetCheckpoint",
    "Line",
    "add",
    "check_data",
    "checkpoints",
    "parts",
]

Line = dict[str, Any]


def add(path: Path, lines: Iterable[Line]) -> None:
    """Put lines beside those of a file, which is written whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, (read_fleet_lines(path) | {label(line): line for line in lines}).values())


def check_data(out: Path, fingerprint: str) -> None:
    """Refuse lines of other data."""
    for name, line in read_fleet_lines(out / FLEET_LINES).items():
        if line["fingerprint"] != fingerprint:
            raise FolderError(
                f"{out / FLEET_LINES} has runs on other data: those of {name} were "
                f"{line['fingerprint'][:12]} and are {fingerprint[:12]} now. Choose another place "
                "with --out, or start anew with --overwrite."
            )


def parts(out: Path) -> list[Path]:
    """Lines that single processes have left."""
    return sorted((out / FLEET_FOLDER).glob("lines-*.jsonl"))


def checkpoints(out: Path) -> dict[int, Path]:
    """Checkpoints by the number of the process that wrote them."""
    there = (out / FLEET_FOLDER).glob("checkpoint-*.pt")
    named = {re.fullmatch(r"checkpoint-(\d+)\.pt", each.name): each for each in there}
    return {int(found[1]): path for found, path in named.items() if found is not None}


@dataclass(frozen=True)
class FleetCheckpoint:
    """A fleet at a step.

    Attributes:
        step: steps made.
        seconds: training time so far.
        task: its name.
        config: of the experiment, plain, without methods and seeds.
        runs: name, seed and plain method of each.
        rows: the last figures of each; none before the first evaluation.
        reasons: why a run diverged, or None.
        fingerprint: of the data.
        training: the state.
    """

    step: int
    seconds: float
    task: str
    config: dict[str, Any]
    runs: list[dict[str, Any]]
    rows: list[Row]
    reasons: list[str | None]
    fingerprint: str
    training: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        shallow = {name: getattr(self, name) for name in self.__dataclass_fields__}
        with atomic(path) as file:
            torch.save(shallow, file)

    def specs(self, config: Experiment) -> list[RunSpec]:
        """Its runs."""
        return [
            RunSpec(
                self.task,
                run["name"],
                from_plain(Method, run["method"], "checkpoint"),
                run["seed"],
                config,
            )
            for run in self.runs
        ]

    @classmethod
    def read(cls, path: Path, like: RunSpec, fingerprint: str) -> FleetCheckpoint:
        """Read it, and refuse that of another experiment or of other data.

        Args:
            path: the file.
            like: any run that wants to go on.
            fingerprint: of its data.
        """
        way_out = f"Delete {path} to start its runs anew, or give --overwrite for all."
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            held = cls(**{name: loaded[name] for name in cls.__dataclass_fields__})
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            text = f"The checkpoint {path} cannot be read: {reason} {way_out}"
            raise FolderError(text) from error
        now = {key: like.plain()[key] for key in ("task", "config")}
        found = differences({"task": held.task, "config": held.config}, now, like.config.incidental)
        if held.fingerprint != fingerprint:
            found.append(f"the data were {held.fingerprint[:12]} and are {fingerprint[:12]} now")
        if found:
            raise FolderError(
                f"The checkpoint {path} is that of other runs: {'; '.join(found)}. {way_out}"
            )
        return held
