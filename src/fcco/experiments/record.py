"""The folders of runs: made, locked, refused, emptied, and read back.

Files are written whole or not at all. `result.json` is written last: it means finished.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from . import yaml_text
from .files import FolderError, atomic, clean, read_json, write_json, write_rows, write_text
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
    "read_meta",
    "read_result",
    "read_spec",
    "remove_runs",
    "sign",
    "signed_by",
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
_LOCK, _LAUNCH = ".lock", ".torchrun"
_SUMMARIES = ("table.json", "table.md", "report.html", "sweep.json", "runs.jsonl", "winners.yaml")


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
    with _open_lock(folder) as file:
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


def _open_lock(folder: Path) -> IO[str]:
    try:
        return (folder / _LOCK).open("w")
    except OSError as error:
        raise FolderError(f"{folder} cannot be written to: {error.strerror}.") from error


def prepare(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Make a folder, or refuse one that holds something. Nothing is deleted here.

    Args:
        folder: where runs will lie.
        resume: whether to go on with what is there.
        overwrite: whether what is there will be deleted, if it is ours.
    """
    if resume and overwrite:
        raise FolderError("--resume and --overwrite exclude each other.")
    if folder.exists() and not folder.is_dir():
        raise FolderError(f"{folder} is a file; choose another place with --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = [each.name for each in folder.iterdir()]
    except OSError as error:
        text = f"{folder} cannot be made or read: {error.strerror}. Choose another with --out."
        raise FolderError(text) from error
    # A process that died before it wrote anything whole leaves a lock and parts of files.
    full = not all(name in (_LOCK, _LAUNCH) or re.fullmatch(r"\..*\.tmp", name) for name in there)
    if full and COMPARISON not in there:
        raise FolderError(
            f"{folder} is not empty and holds no {COMPARISON}: it does not look like a folder of "
            "runs. Choose another place with --out."
        )
    if any(_run_folders(folder)) and not (resume or overwrite):
        raise FolderError(
            f"{folder} has runs already. Go on with them: --resume. Delete them and start anew: "
            "--overwrite. Or choose another place: --out FOLDER."
        )


def sign(folder: Path, launch: str | None) -> None:
    """Leave the id of a start of torchrun in a folder: its restarts may go on with what is there.

    Args:
        folder: of a comparison.
        launch: the id; None takes that of an earlier one away.
    """
    if launch is None:
        (folder / _LAUNCH).unlink(missing_ok=True)
    else:
        write_text(folder / _LAUNCH, launch)


def signed_by(folder: Path, launch: str | None) -> bool:
    """Whether the runs in a folder are of a start of torchrun."""
    path = folder / _LAUNCH
    return launch is not None and path.is_file() and path.read_text(encoding="utf-8") == launch


def remove_runs(folder: Path) -> None:
    """Delete the runs of a folder and what was made of them; leave all other files.

    Args:
        folder: of a comparison; the caller holds its lock.
    """
    for run in list(_run_folders(folder)):
        shutil.rmtree(run)
        with contextlib.suppress(OSError):  # it holds something else
            run.parent.rmdir()
    for name in (*_SUMMARIES, COMPARISON):  # the last says that the folder is ours
        (folder / name).unlink(missing_ok=True)


def _run_folders(folder: Path) -> Iterator[Path]:
    for each in folder.glob("*/seed-*"):
        if re.fullmatch(r"seed-\d+", each.name) and each.is_dir() and not each.is_symlink():
            yield each


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
    meta = read_meta(folder)
    places = [folder / name / f"seed-{k}" for name in meta["methods"] for k in meta["seeds"]]
    return Comparison(folder, meta, [load_run(at) for at in places if (at / CONFIG).is_file()])


def read_meta(folder: Path) -> dict[str, Any]:
    """`comparison.json` of a folder."""
    path = folder / COMPARISON
    if not path.is_file():
        raise FolderError(f"{folder} holds no {COMPARISON}: it is not a folder of runs.")
    meta = read_json(path)
    kinds = {"task": str, "config": dict, "methods": list, "seeds": list}
    there = meta if isinstance(meta, dict) else {}
    if wrong := [key for key, kind in kinds.items() if not isinstance(there.get(key), kind)]:
        raise FolderError(f"{path} is damaged: it has no {', '.join(wrong)}.")
    return meta


def read_spec(folder: Path) -> dict[str, Any]:
    """`config.yaml` of a run: all that it depends on."""
    path = folder / CONFIG
    try:
        spec = yaml_text.parse(path.read_text(encoding="utf-8"), str(path)).plain()
    except yaml_text.ConfigError as error:
        raise FolderError(str(error)) from error
    except (ValueError, OSError) as error:
        raise FolderError(f"{path} cannot be read: {error}.") from error
    missing = {"name", "seed", "config", "method"} - set(spec if isinstance(spec, dict) else ())
    if missing:
        raise FolderError(f"{path} is damaged: it has no {', '.join(sorted(missing))}.")
    return spec


def load_run(folder: Path) -> SavedRun:
    """Read back one run."""
    spec = read_spec(folder)
    metrics, result, environment = (folder / each for each in (METRICS, RESULT, ENVIRONMENT))
    return SavedRun(
        folder=folder,
        name=spec["name"],
        seed=spec["seed"],
        config=spec["config"],
        method=spec["method"],
        rows=_read_rows(metrics) if metrics.is_file() else [],
        result=read_result(folder) if result.is_file() else None,
        environment=read_json(environment) if environment.is_file() else {},
    )


def read_result(folder: Path) -> dict[str, Any]:
    """`result.json` of a run."""
    path = folder / RESULT
    result = read_json(path)
    there = result if isinstance(result, dict) else {}
    wrong = [key for key in ("final", "end") if not isinstance(there.get(key), dict)]
    if wrong := [*wrong, *({"diverged"} - set(there))]:
        raise FolderError(f"{path} is damaged: it has no {', '.join(wrong)}.")
    return there | {key: _numbers(there[key]) for key in ("final", "end")}


def _read_rows(path: Path) -> list[Row]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (ValueError, OSError) as error:
        raise FolderError(f"{path} cannot be read: {error}.") from error
    if not all(isinstance(row, dict) for row in rows):
        raise FolderError(f"{path} is damaged: a line is no mapping.")
    return [_numbers(row) for row in rows]


def _numbers(row: Row) -> Row:
    """What was not finite when it was written comes back as NaN."""
    return {key: _number(value) for key, value in row.items()}


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(each) for each in value]
    return math.nan if value is None else value
