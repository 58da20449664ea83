"""The folder of a run: whole files or none, and reading them back.

Every file is written beside its place and then moved over it, so that a process that dies at any
moment leaves the old file or the new one. `result.json` is written last: it means finished.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from . import yaml_text
from .task import Row

__all__ = [
    "Comparison",
    "FolderError",
    "SavedRun",
    "atomic",
    "clean",
    "load_comparison",
    "load_run",
    "locked",
    "prepare",
    "read_json",
    "write_json",
    "write_rows",
    "write_text",
]

COMPARISON, RESULT, METRICS, CONFIG = (
    "comparison.json",
    "result.json",
    "metrics.jsonl",
    "config.yaml",
)
ENVIRONMENT, CHECKPOINT = "environment.json", "checkpoint.pt"


class FolderError(Exception):
    """A folder that cannot be used as asked."""


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that takes its place only when all is written and on disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with atomic(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file; NaN and infinities, which JSON lacks, become null."""
    write_text(path, json.dumps(clean(value), indent=1) + "\n")


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write JSON lines."""
    write_text(path, "".join(json.dumps(clean(row)) + "\n" for row in rows))


def clean(value: Any) -> Any:
    """Tensors and arrays as lists, tuples too; numbers that are not finite as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): clean(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_json(path: Path) -> Any:
    """Read a JSON file that these functions wrote."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise FolderError(f"{path} cannot be read: {error}.") from error


@contextlib.contextmanager
def locked(folder: Path, patience: float = 20.0) -> Iterator[None]:
    """Keep other processes out of a folder; where the system has no such locks, do nothing.

    Args:
        folder: it gets a file `.lock`; the lock itself ends with the process.
        patience: seconds to wait for a process that is about to stop.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (folder / ".lock").open("w") as file:
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > end:
                    raise FolderError(
                        f"Another process is at work in {folder}; wait for it, or stop it."
                    ) from None
                time.sleep(0.05)
        for left in folder.glob(".*.tmp"):  # of a process that was killed while writing
            left.unlink(missing_ok=True)
        yield


def prepare(folder: Path, *, resume: bool, overwrite: bool, kind: str = COMPARISON) -> None:
    """Make a folder, or refuse one that holds something.

    Args:
        folder: where runs will lie.
        resume: go on with what is there.
        overwrite: delete what is there, if it is ours.
        kind: the file by which a folder of ours is known.
    """
    if resume and overwrite:
        raise FolderError("--resume and --overwrite exclude each other.")
    if folder.exists() and not folder.is_dir():
        raise FolderError(f"{folder} is a file; choose another place with --out.")
    full = folder.is_dir() and any(folder.iterdir())
    ours = (folder / kind).exists()
    if full and not ours and not (resume and _only_leftovers(folder)):
        raise FolderError(
            f"{folder} is not empty and holds no {kind}: it does not look like a folder of runs. "
            "Choose another place with --out."
        )
    if any(folder.glob("*/seed-*")) and not (resume or overwrite):
        raise FolderError(
            f"{folder} has runs already. Go on with them: --resume. Delete them and start anew: "
            "--overwrite. Or choose another place: --out FOLDER."
        )
    if full and overwrite:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)


def _only_leftovers(folder: Path) -> bool:
    """Whether a process died before it wrote anything whole."""
    return all(each.name.startswith(".") for each in folder.iterdir())


@dataclass(frozen=True)
class SavedRun:
    """A run that lies on disk.

    Attributes:
        folder: where.
        name: of the method in tables.
        seed: of the run.
        config: of the experiment, without methods and seeds.
        method: settings of the method.
        rows: evaluations so far.
        result: what was written at the end, None for a run that is not finished.
        environment: versions and machine.
    """

    folder: Path
    name: str
    seed: int
    config: dict[str, Any]
    method: dict[str, Any]
    rows: list[Row]
    result: dict[str, Any] | None
    environment: dict[str, Any]

    @property
    def diverged(self) -> str | None:
        """Why it ended early, if it did."""
        return None if self.result is None else self.result["diverged"]

    @property
    def figures(self) -> Row:
        """Those of the last evaluation and of the end; empty for a run that is not finished."""
        return {} if self.result is None else {**self.result["final"], **self.result["end"]}


@dataclass(frozen=True)
class Comparison:
    """Runs of several methods and seeds.

    Attributes:
        folder: where they lie.
        meta: `comparison.json`: task, config, command, methods and seeds in order.
        runs: those that were begun, methods in order, then seeds.
    """

    folder: Path
    meta: dict[str, Any]
    runs: Sequence[SavedRun]

    def of(self, name: str) -> list[SavedRun]:
        """The runs of a method."""
        return [run for run in self.runs if run.name == name]


def load_comparison(folder: Path) -> Comparison:
    """Read back what `compare`, `run` or `sweep` left."""
    if not (folder / COMPARISON).is_file():
        raise FolderError(f"{folder} holds no {COMPARISON}: it is not a folder of runs.")
    meta = read_json(folder / COMPARISON)
    places = [folder / name / f"seed-{k}" for name in meta["methods"] for k in meta["seeds"]]
    return Comparison(folder, meta, [load_run(at) for at in places if (at / CONFIG).is_file()])


def load_run(folder: Path) -> SavedRun:
    """Read back one run."""
    said = yaml_text.parse((folder / CONFIG).read_text(encoding="utf-8"), str(folder / CONFIG))
    spec = said.plain()
    metrics, result, environment = (folder / each for each in (METRICS, RESULT, ENVIRONMENT))
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
    return SavedRun(
        folder=folder,
        name=spec["name"],
        seed=spec["seed"],
        config=spec["config"],
        method=spec["method"],
        rows=[_numbers(json.loads(line)) for line in lines],
        result=_numbers_of_result(read_json(result)) if result.is_file() else None,
        environment=read_json(environment) if environment.is_file() else {},
    )


def _numbers_of_result(result: dict[str, Any]) -> dict[str, Any]:
    return result | {key: _numbers(result[key]) for key in ("final", "end")}


def _numbers(row: Row) -> Row:
    """What was not finite when it was written comes back as NaN."""
    return {key: _number(value) for key, value in row.items()}


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(each) for each in value]
    return math.nan if value is None else value
