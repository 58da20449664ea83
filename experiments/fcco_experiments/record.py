"""The folders of runs: made, locked, refused, emptied, and read back.

Files are written whole or not at all. `result.json` is written last: it means finished.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from . import fleet_files, yaml_text
from .files import (
    FolderError,
    atomic,
    clean,
    numbers,
    read_json,
    read_rows,
    write_json,
    write_rows,
    write_text,
)
from .locking import LOCK, locked
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
_OF_ALL = ("methods", "seeds")  # keys of a config that say nothing of a single run
_LAUNCH = ".torchrun"
_SUMMARIES = ("table.json", "table.md", "report.html", "sweep.json", "runs.jsonl", "winners.yaml")


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
    full = not all(name in (LOCK, _LAUNCH) or re.fullmatch(r"\..*\.tmp", name) for name in there)
    if full and COMPARISON not in there:
        raise FolderError(
            f"{folder} is not empty and holds no {COMPARISON}: it does not look like a folder of "
            "runs. Choose another place with --out."
        )
    there_are_runs = any(_run_folders(folder)) or fleet_files.is_there(folder)
    if there_are_runs and not (resume or overwrite):
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
    fleet_files.remove(folder)
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
        return self._by_name.get(name, [])

    @cached_property
    def _by_name(self) -> dict[str, list[SavedRun]]:
        found: dict[str, list[SavedRun]] = {}
        for run in self.runs:
            found.setdefault(run.name, []).append(run)
        return found


def load_comparison(folder: Path) -> Comparison:
    """Read back what `compare`, `run` or `sweep` left.

    Of a run that was trained alone its folder is read, of one in a fleet its line.
    """
    meta = read_meta(folder)
    lines = fleet_files.read(folder / fleet_files.LINES)
    said = folder / fleet_files.FOLDER / ENVIRONMENT
    environment = read_json(said) if lines and said.is_file() else {}
    config = {key: value for key, value in meta["config"].items() if key not in _OF_ALL}
    runs = []
    for name in meta["methods"]:
        for seed in meta["seeds"]:
            line, place = lines.get(f"{name}/seed-{seed}"), folder / name / f"seed-{seed}"
            if line is not None and not (place / RESULT).is_file():
                method, rows = line["method"], [line["final"]] if line["final"] else []
                runs.append(SavedRun(folder, name, seed, config, method, rows, line, environment))
            elif (place / CONFIG).is_file():
                runs.append(load_run(place))
    return Comparison(folder, meta, runs)


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
        rows=read_rows(metrics) if metrics.is_file() else [],
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
    return there | {key: numbers(there[key]) for key in ("final", "end")}
