"""Run folders: what is in them, how it is written, locked, checked and read back.

Files are written whole or not at all. `result.json` is written last: it means finished.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from fcco._files import atomic

from .config import ConfigError, fields_of, parse, plain
from .task import Experiment, Method, Row

__all__ = [
    "CHECKPOINT",
    "COMPARISON",
    "CONFIG",
    "ENVIRONMENT",
    "FLEET_FOLDER",
    "FLEET_LINES",
    "METRICS",
    "RESULT",
    "SWEEP",
    "Comparison",
    "Event",
    "FolderError",
    "Kind",
    "Outcome",
    "RunSpec",
    "SavedRun",
    "atomic",
    "clean",
    "differences",
    "finished_in_fleets",
    "label",
    "load_comparison",
    "load_run",
    "locked",
    "prepare",
    "read_fleet_lines",
    "read_json",
    "read_meta",
    "read_result",
    "read_spec",
    "remove_runs",
    "write_json",
    "write_rows",
    "write_text",
]


class FolderError(Exception):
    """A folder that cannot be used as asked."""


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


def read_rows(path: Path) -> list[Row]:
    """Read rows that `write_rows` wrote."""
    return [numbers(row) for row in read_lines(path)]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines as they are."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (ValueError, OSError) as error:
        raise FolderError(f"{path} cannot be read: {error}.") from error
    if not all(isinstance(row, dict) for row in rows):
        raise FolderError(f"{path} is damaged: a line is no mapping.")
    return rows


def numbers(row: Row) -> Row:
    """What was not finite when it was written comes back as NaN."""
    return {key: _number(value) for key, value in row.items()}


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(each) for each in value]
    return math.nan if value is None else value


Kind = Literal[
    "loading",
    "started",
    "progress",
    "finished",
    "diverged",
    "stopping",
    "stopped",
    "failed",
    "note",
]


@dataclass(frozen=True)
class Event:
    """Something happened to a run.

    Args:
        kind: what.
        run: its label, `name/seed-k`.
        epoch: how far it is.
        epochs: how far it goes.
        figures: headline figures of the last evaluation.
        text: why it diverged or failed; of a fleet, whose figures these are, or what ended.
        details: file with the traceback of a failure.
        count: runs that it stands for; a fleet speaks for all of its runs.
    """

    kind: Kind
    run: str
    epoch: float = 0.0
    epochs: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    text: str = ""
    details: str = ""
    count: int = 1


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Args:
        run: its label.
        kind: `"finished"`, `"diverged"`, `"stopped"` or `"failed"`.
        text: why it diverged or failed.
    """

    run: str
    kind: Kind
    text: str = ""


_MISSING = object()


@dataclass(frozen=True)
class RunSpec:
    """One run, as data.

    Args:
        task: its name, or `"module:attribute"`.
        name: of the method in tables and folders.
        method: and its settings.
        seed: of the run.
        config: of the experiment.
    """

    task: str
    name: str
    method: Method
    seed: int
    config: Experiment

    @property
    def label(self) -> str:
        """For messages, and the folder inside that of the comparison."""
        return f"{self.name}/seed-{self.seed}"

    def folder(self, out: Path) -> Path:
        """Where its files lie."""
        return out / self.name / f"seed-{self.seed}"

    def plain(self) -> dict[str, Any]:
        """All that the run depends on: the config without other methods and seeds."""
        # A sweep has thousands of methods: those of other runs are not even looked at.
        names = [key for key in fields_of(type(self.config)) if key not in ("methods", "seeds")]
        config = {name: plain(getattr(self.config, name)) for name in names}
        return {
            "task": self.task,
            "name": self.name,
            "seed": self.seed,
            "method": plain(self.method),
            "config": config,
        }

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """How a saved run differs from this, as sentences, apart from what is incidental."""
        return differences(saved, self.plain(), self.config.incidental)


def differences(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    incidental: Collection[str] = Experiment.incidental,
) -> list[str]:
    """What differs between two plain specs, as sentences.

    Args:
        saved: the old one.
        now: the new one.
        incidental: keys of the config that may differ, because they do not change a run.
    """
    old, new = dict(_flat(saved)), dict(_flat(now))
    found = []
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key, _MISSING), new.get(key, _MISSING)
        part, _, rest = key.partition(".")
        free = part == "config" and rest.partition(".")[0] in incidental
        if before != after and not free:
            found.append(f"`{key}` was {_word(before)} and is {_word(after)} now")
    return found


def _word(value: Any) -> str:
    return "not there" if value is _MISSING else repr(value)


def _flat(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, each in value.items():
        if isinstance(each, Mapping):
            yield from _flat(each, f"{before}{key}.")
        else:
            yield f"{before}{key}", each


LOCK = ".lock"


@contextlib.contextmanager
def locked(folder: Path, patience: float = 20.0) -> Iterator[None]:
    """Keep other processes out of a folder.

    Args:
        folder: it gets a file `.lock`; the lock itself ends with the process.
        patience: seconds to wait for a process that is about to stop.
    """
    lock = FileLock(folder / LOCK, timeout=patience, poll_interval=0.05, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        text = f"Another process is at work in {folder}; wait for it, or stop it."
        raise FolderError(text) from None
    except OSError as error:
        raise FolderError(f"{folder} cannot be written to: {error.strerror}.") from error
    try:
        for left in folder.glob(".*.tmp"):  # of a process that was killed while writing
            left.unlink(missing_ok=True)
        yield
    finally:
        lock.release()


COMPARISON, RESULT, METRICS, CONFIG = (
    "comparison.json",
    "result.json",
    "metrics.jsonl",
    "config.yaml",
)
ENVIRONMENT, CHECKPOINT, SWEEP = "environment.json", "checkpoint.pt", "sweep.json.gz"
_OF_ALL = ("methods", "seeds")  # keys of a config that say nothing of a single run
_SUMMARIES = ("table.json", "table.md", "report.html", SWEEP, "runs.jsonl", "winners.yaml")


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
    full = not all(name == LOCK or re.fullmatch(r"\..*\.tmp", name) for name in there)
    if full and COMPARISON not in there:
        raise FolderError(
            f"{folder} is not empty and holds no {COMPARISON}: it does not look like a folder of "
            "runs. Choose another place with --out."
        )
    there_are_runs = any(_run_folders(folder)) or _has_fleets(folder)
    if there_are_runs and not (resume or overwrite):
        raise FolderError(
            f"{folder} has runs already. Go on with them: --resume. Delete them and start anew: "
            "--overwrite. Or choose another place: --out FOLDER."
        )


def remove_runs(folder: Path) -> None:
    """Delete the runs of a folder and what was made of them; leave all other files.

    Args:
        folder: of a comparison; the caller holds its lock.
    """
    for run in list(_run_folders(folder)):
        shutil.rmtree(run)
        with contextlib.suppress(OSError):  # it holds something else
            run.parent.rmdir()
    _remove_fleets(folder)
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

    Of a run that was trained alone its folder is read, of one in a fleet its line. Published
    results are read too.
    """
    from . import results

    if not (folder / COMPARISON).is_file() and (published := results.read(folder)) is not None:
        return published
    meta = read_meta(folder)
    lines = read_fleet_lines(folder / FLEET_LINES)
    said = folder / FLEET_FOLDER / ENVIRONMENT
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
        spec = parse(path.read_text(encoding="utf-8"), str(path)).plain()
    except ConfigError as error:
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


# --- runs of fleets -----------------------------------------------------------------------------

FLEET_LINES, FLEET_FOLDER = "fleet.jsonl", "fleet"
_LINE = {"name": str, "seed": int, "method": dict, "final": dict, "end": dict, "fingerprint": str}
_FLEET_FILE = r"(checkpoint|lines|failure)-\d+\.(pt|jsonl|txt)|environment\.json"


def label(line: Mapping[str, Any]) -> str:
    """The label of a run, as in its spec."""
    return f"{line['name']}/seed-{line['seed']}"


def read_fleet_lines(path: Path) -> dict[str, dict[str, Any]]:
    """Results of runs in fleets by label; none where there is no file.

    Raises:
        FolderError: when the file is damaged.
    """
    if not path.is_file():
        return {}
    found = {}
    for number, line in enumerate(read_lines(path), 1):
        wrong = [key for key, kind in _LINE.items() if not isinstance(line.get(key), kind)]
        if wrong := [*wrong, *({"diverged"} - set(line))]:
            raise FolderError(
                f"{path} is damaged: line {number} has no {', '.join(wrong)}. Delete the line to "
                "train that run again, or start anew with --overwrite."
            )
        read_back = {key: numbers(line[key]) for key in ("final", "end")}
        found[label(line)] = line | read_back
    return found


def finished_in_fleets(out: Path, specs: Iterable[RunSpec]) -> set[str]:
    """Labels of the runs that have a line.

    Raises:
        FolderError: when a line is that of other settings.
    """
    lines = read_fleet_lines(out / FLEET_LINES)
    found = set()
    for spec in specs if lines else ():
        if (line := lines.get(spec.label)) is None:
            continue
        found.add(spec.label)
        if other := differences({"method": line["method"]}, {"method": plain(spec.method)}, ()):
            raise FolderError(
                f"{out / FLEET_LINES} has another run {spec.label}: {'; '.join(other)}. Choose "
                "another place with --out, or start anew with --overwrite."
            )
    return found


def _fleet_files(out: Path) -> list[Path]:
    there = sorted((out / FLEET_FOLDER).glob("*"))
    return [each for each in there if re.fullmatch(_FLEET_FILE, each.name)]


def _has_fleets(out: Path) -> bool:
    there = [path.name for path in _fleet_files(out) if path.suffix in (".pt", ".jsonl")]
    return (out / FLEET_LINES).exists() or bool(there)


def _remove_fleets(out: Path) -> None:
    for path in (out / FLEET_LINES, *_fleet_files(out)):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # there is none, or it holds something else
        (out / FLEET_FOLDER).rmdir()
