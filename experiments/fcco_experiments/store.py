"""Run folders: what is in them, how it is written, locked, checked and read back.

Files are written whole or not at all. `result.json` is written last: it means finished.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import math
import re
import traceback
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from fcco._files import TEMPORARY, atomic

from .config import ConfigError, UserError, fields_of, is_method_name, parse, plain
from .task import Experiment, Method, Row

# Files of a run.
CONFIG, ENVIRONMENT, METRICS = "config.yaml", "environment.json", "metrics.jsonl"
RESULT, FAILURE = "result.json", "failure.txt"
CHECKPOINT, LOCK = "checkpoint.pt", ".lock"
_RUN_FILES = (CONFIG, ENVIRONMENT, METRICS, RESULT, FAILURE, CHECKPOINT, LOCK)
# Files of a comparison.
COMPARISON, SWEEP, WINNERS = "comparison.json", "sweep.json.gz", "winners.yaml"
TABLE, RUNS, SETTINGS = "table.json", "runs.jsonl.gz", "settings.csv"
FLEET_FOLDER = "fleet"
_SUMMARIES = (TABLE, "report.html", SWEEP, SETTINGS, WINNERS, CONFIG)
_FLEET_FILE = r"(checkpoint|lines|failure)-\d+\.(pt|jsonl|txt)|environment\.json"


class FolderError(UserError):
    """A folder that cannot be used as asked."""


# --- files ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file, whole or not at all; what the system refuses is a `FolderError`."""
    try:
        with atomic(path) as file:
            yield file
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise FolderError(f"{path} cannot be written: {reason}.") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file."""
    with replacing(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file; NaN and infinities, which JSON lacks, become null."""
    write_text(path, json.dumps(clean(value), indent=1) + "\n")


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write JSON lines, packed where the name ends with `.gz`; equal rows give the same bytes."""
    lines = (json.dumps(clean(row), separators=(",", ":")) + "\n" for row in rows)
    content = "".join(lines).encode()
    with replacing(path) as file:
        file.write(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def to_list(value: Any) -> Any:
    """A tensor or an array as a list or a number; anything else as it is."""
    return value.tolist() if isinstance(value, (Tensor, np.ndarray, np.generic)) else value


def clean(value: Any) -> Any:
    """Tensors and arrays as lists, tuples too; numbers that are not finite as None."""
    value = to_list(value)
    if isinstance(value, Mapping):
        return {str(key): clean(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_json(path: Path) -> Any:
    """Read a JSON file, packed or not."""
    return _read(path, json.loads)


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    try:
        content = path.read_bytes()
        return parse((gzip.decompress(content) if path.suffix == ".gz" else content).decode())
    except (ValueError, OSError, EOFError, zlib.error, ConfigError) as error:
        raise FolderError(f"{path} cannot be read: {error}.") from error


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """What fails inside because files of a folder were changed is a `FolderError`."""
    try:
        yield
    except (FolderError, ConfigError, OSError):
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise FolderError(
            f"{folder} cannot be used: one of its files was changed, or is of another version. "
            f"{type(error).__name__}: {error!s:.200} ({Path(at.filename).name}, line {at.lineno})."
        ) from error


def _read_lines(path: Path, kinds: Mapping[str, type]) -> list[dict[str, Any]]:
    """Mappings that have these keys, from JSON lines; none where there is no file."""
    if not path.is_file():
        return []
    rows = _read(path, lambda text: [json.loads(line) for line in text.splitlines()])
    return [_require(path, row, kinds, f"line {number}") for number, row in enumerate(rows, 1)]


def numbers(value: Any) -> Any:
    """Rows as they were before they were written: null becomes NaN."""
    if isinstance(value, dict):
        return {key: numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [numbers(entry) for entry in value]
    return math.nan if value is None else value


def _require(path: Path, value: Any, kinds: Mapping[str, type], at: str = "it") -> dict[str, Any]:
    """The mapping, if it has these keys with values of these types."""
    if not isinstance(value, dict):
        raise FolderError(f"{path} is damaged: {at} is not a mapping.")
    wrong = [k for k, kind in kinds.items() if k not in value or not isinstance(value[k], kind)]
    if wrong:
        raise FolderError(f"{path} is damaged: {at} has no {', '.join(wrong)}.")
    return value


# --- events and runs ------------------------------------------------------------------------------

Kind = Literal[
    "loading", "started", "progress", "finished", "diverged", "stopping", "stopped", "failed",
    "note",
]  # fmt: skip


@dataclass(frozen=True)
class Event:
    """Something happened to a run."""

    kind: Kind
    run: str  # its label, `name/seed-k`
    epoch: float = 0.0
    epochs: int = 0  # how far it goes
    figures: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    text: str = ""  # why it diverged or failed
    details: str = ""  # file with the traceback of a failure
    count: int = 1  # a fleet speaks for all of its runs


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run: str
    kind: Kind  # finished, diverged, stopped or failed
    text: str = ""  # why it diverged or failed


@dataclass(frozen=True)
class RunSpec:
    """One run, as data."""

    task: str  # its name, or `module:attribute`
    name: str  # of the method in tables and folders
    method: Method
    seed: int
    config: Experiment

    def __post_init__(self) -> None:
        if not is_method_name(self.name):
            raise FolderError(f"The method name {self.name!r} cannot be the name of a folder.")

    @property
    def label(self) -> str:
        """For messages, and the path of its folder inside that of the comparison."""
        return f"{self.name}/seed-{self.seed}"

    def folder(self, out: Path) -> Path:
        return out / self.label

    def plain(self) -> dict[str, Any]:
        """All that the run depends on: the config without other methods and seeds."""
        # A sweep has thousands of methods: those of other runs are not even looked at.
        names = [key for key in fields_of(type(self.config)) if key not in ("methods", "seeds")]
        config = {name: plain(getattr(self.config, name)) for name in names}
        own = {"task": self.task, "name": self.name, "seed": self.seed}
        return {**own, "method": plain(self.method), "config": config}


_MISSING = object()


def differences(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    incidental: Collection[str] = Experiment.incidental,
) -> list[str]:
    """What differs between two plain specs, as sentences; `incidental` keys of the config may."""
    old, new = dict(flat(saved)), dict(flat(now))
    changes = []
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key, _MISSING), new.get(key, _MISSING)
        part, _, rest = key.partition(".")
        free = part == "config" and rest.partition(".")[0] in incidental
        if before != after and not free:
            words = ["not there" if v is _MISSING else repr(v) for v in (before, after)]
            changes.append(f"`{key}` was {words[0]} and is {words[1]} now")
    more = len(changes) - 8
    return [*changes[:8], f"and {more} more differences"] if more > 1 else changes


def refuse(what: str, changes: Sequence[str]) -> None:
    """Raise an error if files are those of other runs."""
    if changes:
        raise FolderError(
            f"{what}: {'; '.join(changes)}. Choose another place with --out, or start again with "
            "--overwrite."
        )


def flat(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of nested mappings by dotted key."""
    for key, entry in value.items():
        if isinstance(entry, Mapping):
            yield from flat(entry, f"{before}{key}.")
        else:
            yield f"{before}{key}", entry


# --- folders --------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path, patience: float = 20.0) -> Iterator[None]:
    """Make a folder and keep other processes out; wait a little for one that is about to stop."""
    lock = FileLock(folder / LOCK, timeout=patience, poll_interval=0.05, thread_local=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise FolderError(
            f"Another process is at work in {folder}; wait for it, or stop it."
        ) from None
    except OSError as error:
        raise FolderError(
            f"{folder} cannot be made or written to: {error.strerror}. Choose another with --out."
        ) from error
    try:
        for left in (*folder.glob(".*"), *folder.glob(f"{FLEET_FOLDER}/.*")):
            if TEMPORARY.fullmatch(left.name):  # of a process that was killed while writing
                left.unlink(missing_ok=True)
        yield
    finally:
        lock.release()


def prepare(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that holds something else, or runs already. Nothing is changed here."""
    if resume and overwrite:
        raise FolderError("--resume and --overwrite exclude each other.")
    if not folder.exists():
        return
    try:
        there = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise FolderError(
            f"{folder} cannot be used: {error.strerror}. Choose another with --out."
        ) from error
    # A process that died before it wrote anything whole leaves a lock and parts of files.
    full = not all(name == LOCK or TEMPORARY.fullmatch(name) for name in there)
    if full and COMPARISON not in there:
        raise FolderError(
            f"{folder} is not empty and holds no {COMPARISON}: it does not look like a folder of "
            "runs. Choose another place with --out."
        )
    if (any(_runs(folder)) or fleet_files(folder)) and not (resume or overwrite):
        raise FolderError(
            f"{folder} has runs already. To continue them: --resume. To delete them first:"
            " --overwrite. To use another folder: --out FOLDER."
        )


def remove_runs(folder: Path) -> None:
    """Delete the files that runs have left in a folder, and no others; links are not followed."""
    for run in list(_runs(folder)):
        for name in _RUN_FILES:
            (run / name).unlink(missing_ok=True)
        _remove_empty(run, run.parent)
    for path in fleet_files(folder):
        path.unlink(missing_ok=True)
    _remove_empty(folder / FLEET_FOLDER)
    for name in (*_SUMMARIES, COMPARISON):  # the last says that the folder is ours
        (folder / name).unlink(missing_ok=True)


def _remove_empty(*folders: Path) -> None:
    with contextlib.suppress(OSError):  # it is not there, or holds something else
        for folder in folders:
            folder.rmdir()


def _runs(folder: Path) -> Iterator[Path]:
    for run in folder.glob("*/seed-*"):
        linked = run.is_symlink() or run.parent.is_symlink()
        begun = any((run / name).is_file() for name in _RUN_FILES)
        if begun and not linked and re.fullmatch(r"seed-\d+", run.name):
            yield run


def fleet_files(out: Path) -> list[Path]:
    """Files of fleets in their folder."""
    folder = out / FLEET_FOLDER
    if folder.is_symlink() or not folder.is_dir():
        return []
    return [path for path in sorted(folder.iterdir()) if re.fullmatch(_FLEET_FILE, path.name)]


# --- checkpoints ----------------------------------------------------------------------------------


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write a file of `torch.save`, followed by the sha256 of all bytes before it."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with replacing(path) as file:
        file.write(buffer.getbuffer())
        file.write(hashlib.sha256(buffer.getbuffer()).digest())


def read_checkpoint(
    path: Path, spec: Mapping[str, Any], incidental: Collection[str], fingerprint: str
) -> dict[str, Any] | None:
    """A checkpoint that is intact; None where there is none.

    One whose spec differs from the present one, by more than incidental keys of the config, or that
    was made on other data, is refused.
    """
    if not path.exists():
        return None
    try:
        whole = memoryview(path.read_bytes())
        if hashlib.sha256(whole[:-32]).digest() != whole[-32:]:
            raise ValueError("its checksum is wrong, it is damaged or of another version")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, pickle and zipfile raise different ones
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise FolderError(
            f"The checkpoint {path} cannot be read: {reason}. Delete it to start this run again."
        ) from error
    changes = differences(content["spec"], spec, incidental)
    if content["fingerprint"] != fingerprint:
        words = f"the data were {content['fingerprint'][:12]} and are {fingerprint[:12]} now"
        changes = [*changes, words]
    refuse(f"The checkpoint {path} is that of another run", changes)
    return content


# --- reading back ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedRun:
    """A run that lies on disk."""

    folder: Path
    name: str  # of the method in tables
    seed: int
    method: dict[str, Any]
    rows: list[Row]  # evaluations so far
    result: dict[str, Any] | None  # None for a run that is not finished
    environment: dict[str, Any]  # versions and machine

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
    """Runs of several methods and seeds."""

    folder: Path
    meta: dict[str, Any]  # `comparison.json`: task, config, command, methods and seeds in order
    runs: Sequence[SavedRun]  # those that were begun, methods in order, then seeds

    def of(self, name: str) -> list[SavedRun]:
        """The runs of a method."""
        return self._by_name.get(name, [])

    @cached_property
    def _by_name(self) -> dict[str, list[SavedRun]]:
        groups: dict[str, list[SavedRun]] = {}
        for run in self.runs:
            groups.setdefault(run.name, []).append(run)
        return groups


def load_comparison(folder: Path) -> Comparison:
    """Read back what `compare`, `run` or `sweep` left.

    Of a run that was trained alone its folder is read, of one in a fleet its line. Published
    results are read too.
    """
    if not (folder / COMPARISON).is_file() and (published := _published(folder)) is not None:
        return published
    meta = read_meta(folder)
    lines = read_fleet_lines(folder)
    described = folder / FLEET_FOLDER / ENVIRONMENT
    environment = read_json(described) if lines and described.is_file() else {}
    runs = []
    for name in meta["methods"]:
        for seed in meta["seeds"]:
            line, place = lines.get(f"{name}/seed-{seed}"), folder / name / f"seed-{seed}"
            if line is not None and not (place / RESULT).is_file():
                method, rows = line["method"], [line["final"]] if line["final"] else []
                runs.append(SavedRun(folder, name, seed, method, rows, line, environment))
            elif (place / CONFIG).is_file():
                runs.append(load_run(place))
    return Comparison(folder, meta, runs)


def _published(folder: Path) -> Comparison | None:
    """A published comparison, None for a folder without one."""
    if not (folder / RUNS).is_file():
        return None
    meta = read_json(folder / TABLE)["meta"]
    runs = []
    for line in _read_lines(folder / RUNS, {}):
        name, seed, method, rows = (line[key] for key in ("name", "seed", "method", "rows"))
        result, about = _with_nan(line["result"]), meta["environment"]
        runs.append(SavedRun(folder, name, seed, method, numbers(rows), result, about))
    return Comparison(folder, meta, runs)


def read_sweep(folder: Path) -> dict[str, Any] | None:
    """What `sweep.choose` left in a folder, None for one of no sweep."""
    path = folder / SWEEP
    if not path.is_file():
        return None
    keys = ["task", "rule", "limited", "settings", "ranking", "winners"]
    return _require(path, read_json(path), dict.fromkeys(keys, object))


def read_meta(folder: Path) -> dict[str, Any]:
    """`comparison.json` of a folder; its methods and seeds can be used as names of folders."""
    path = folder / COMPARISON
    if not path.is_file():
        raise FolderError(f"{folder} holds no {COMPARISON}: it is not a folder of runs.")
    kinds = {"task": str, "config": dict, "methods": list, "seeds": list}
    meta = _require(path, read_json(path), kinds)
    wrong = [name for name in meta["methods"] if not is_method_name(name)]
    wrong += [seed for seed in meta["seeds"] if type(seed) is not int or seed < 0]
    if wrong:
        raise FolderError(
            f"{path} is damaged: {wrong[0]!r} is neither the name of a method nor a seed."
        )
    return meta


def read_spec(folder: Path) -> dict[str, Any]:
    """`config.yaml` of a run: all that it depends on."""
    path = folder / CONFIG
    spec = _read(path, lambda text: parse(text, str(path)).values)
    return _require(path, spec, {"name": str, "seed": int, "config": dict, "method": dict})


def load_run(folder: Path) -> SavedRun:
    """Read back one run."""
    spec, about = read_spec(folder), folder / ENVIRONMENT
    rows = numbers(_read_lines(folder / METRICS, {}))
    result = read_result(folder) if (folder / RESULT).is_file() else None
    environment = read_json(about) if about.is_file() else {}
    return SavedRun(folder, spec["name"], spec["seed"], spec["method"], rows, result, environment)


_RESULT_KINDS = {"final": dict, "end": dict, "diverged": object}
_LINE_KINDS = {"name": str, "seed": int, "method": dict, "fingerprint": str, **_RESULT_KINDS}


def read_result(folder: Path) -> dict[str, Any]:
    """`result.json` of a run."""
    path = folder / RESULT
    return _with_nan(_require(path, read_json(path), _RESULT_KINDS))


def _with_nan(result: dict[str, Any]) -> dict[str, Any]:
    return result | {key: numbers(result[key]) for key in ("final", "end")}


def label(line: Mapping[str, Any]) -> str:
    """The label of a run, as in its spec."""
    return f"{line['name']}/seed-{line['seed']}"


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Results of runs in fleets by label; none where there is no file."""
    return {label(line): _with_nan(line) for line in _read_lines(path, _LINE_KINDS)}


def read_fleet_lines(out: Path) -> dict[str, dict[str, Any]]:
    """Results of all runs in fleets by label, whatever process has written them."""
    files = [path for path in fleet_files(out) if path.suffix == ".jsonl"]
    return {name: line for path in files for name, line in read_results(path).items()}
