"""One run from its first step to its result, or from its checkpoint: the same, bit for bit."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .. import distributed, environment, store, tasks
from ..config import dump, plain
from ..distributed import Consensus, Diverged, fingerprint
from ..store import Event, FolderError, Kind, Outcome, RunSpec
from ..task import FleetTraining, Problem, Row, Task, Training

Tell = Callable[[Event], None]

TELL_EVERY = 0.2  # seconds between two progress events of a run


def finished_result(spec: RunSpec, folder: Path, *, resume: bool) -> dict[str, Any] | None:
    """The result of a finished run; refuses a folder that cannot be used, and changes nothing."""
    if not store.has_run(folder):
        return None
    if not resume:
        raise FolderError(
            f"{folder} has a run already. Go on with it: --resume. Delete it and start anew: "
            "--overwrite."
        )
    saved = store.read_spec(folder) if (folder / store.CONFIG).is_file() else None
    if saved is not None and (changes := spec.differences(saved)):
        raise FolderError(
            f"{folder} has another run: {'; '.join(changes)}. Choose another place with --out, "
            "or start anew with --overwrite."
        )
    return store.read_result(folder) if (folder / store.RESULT).is_file() else None


def train(
    spec: RunSpec,
    folder: Path,
    problem: Problem | None = None,
    *,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
    on_event: Tell = lambda event: None,
    tensorboard: bool = False,
) -> Outcome:
    """Train, evaluate and save as the spec says.

    An epoch is `steps_per_epoch` steps. Evaluations come before the first step, every
    `evaluate_every` epochs and at the end; checkpoints every `checkpoint_every` epochs, at the end
    and when asked to stop.

    With `resume` a run goes on from its checkpoint, if there is one, and a finished one is left as
    it is. `stop` is asked after each step; when true, the run saves itself and ends.

    On several ranks all of them call this with the same arguments. Rank 0 checks, writes and sends
    events; its errors are raised on all. They stop when any of them is asked to.
    """
    result = distributed.run_on_first(lambda: finished_result(spec, folder, resume=resume))
    if result is not None:
        return outcome_of(spec.label, result)
    task = tasks.get(spec.task)
    if problem is None:
        problem = distributed.run_on_all(lambda: task.load(spec.config))
    with contextlib.ExitStack() as lock:
        distributed.run_on_first(lambda: lock.enter_context(store.locked(folder)))
        return _Run(spec, folder, task, problem, on_event, stop).go(tensorboard)


def outcome_of(label: str, result: Mapping[str, Any]) -> Outcome:
    """How a run with this result ended."""
    reason = result["diverged"]
    return Outcome(label, "finished" if reason is None else "diverged", reason or "")


class _Run:
    """A run in memory: what the checkpoint holds, and the loop."""

    def __init__(
        self,
        spec: RunSpec,
        folder: Path,
        task: Task,
        problem: Problem,
        on_event: Tell,
        stop: Callable[[], bool],
    ) -> None:
        self.spec, self.folder, self.task = spec, folder, task
        self.first, self.on_event = distributed.rank() == 0, on_event
        self.data = distributed.run_on_all(lambda: fingerprint(problem))
        self.headline = [m.key for m in task.metrics(spec.config) if m.headline]
        self.step, self.seconds, self.rows = 0, 0.0, list[Row]()
        seed_all(spec.seed)
        self.training: Training = problem.start(spec.method, spec.seed)
        self.total = spec.config.epochs * self.training.steps_per_epoch
        self.board: Any = None  # a SummaryWriter
        self.consensus = Consensus(stop)

    @property
    def epoch(self) -> float:
        return epochs_of(self.step, self.training.steps_per_epoch)

    def go(self, tensorboard: bool) -> Outcome:
        self._load()
        if self.first:
            self._begin(tensorboard)
        self._tell("started")
        try:
            if self._loop():
                self._tell("stopped")
                return Outcome(self.spec.label, "stopped")
            end = store.clean(self.consensus.run(self.training.finish, self.step))
        except Diverged as reason:
            self.step = reason.step
            return self._end({}, str(reason))
        finally:
            if self.board is not None:
                self.board.close()
        return self._end(end, None)

    def _begin(self, tensorboard: bool) -> None:
        """Write config, environment and the evaluations of the checkpoint, before the first step.

        Evaluations after the checkpoint belong to steps that will be made again.
        """
        store.write_text(self.folder / store.CONFIG, dump(self.spec.plain()))
        environment.write(
            self.folder / store.ENVIRONMENT, self.training.device, f"step {self.step}", self.step
        )
        store.write_rows(self.folder / store.METRICS, self.rows)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # type: ignore[attr-defined]

            shutil.rmtree(self.folder / store.TENSORBOARD, ignore_errors=True)
            self.board = SummaryWriter(str(self.folder / store.TENSORBOARD))
            for row in self.rows:
                self._add_scalars(row)

    def _add_scalars(self, row: Row) -> None:
        """One evaluation for TensorBoard; lists become one scalar for each entry."""
        for key, value in row.items():
            for place, entry in enumerate(value if isinstance(value, list) else [value]):
                name = f"{key}/{place}" if isinstance(value, list) else key
                if isinstance(entry, (int, float)):
                    self.board.add_scalar(name, entry, row["step"])

    def _loop(self) -> bool:
        """Step until the end (False) or until asked to stop (True)."""
        config, per_epoch = self.spec.config, self.training.steps_per_epoch
        if not self.rows:
            self._evaluate()
        told = start = time.perf_counter()
        while self.step < self.total:
            made = self.step + 1
            last = made == self.total
            evaluate = last or made % (config.evaluate_every * per_epoch) == 0
            due = last or made % (config.checkpoint_every * per_epoch) == 0
            asked = self.consensus.step(self.training.step, self.step, evaluate or due)
            self.step, save = made, asked or due
            now = time.perf_counter()
            if evaluate or save:
                self.seconds += now - start
                if evaluate:
                    self._evaluate()
                if save:
                    self._save()
                start = time.perf_counter()
            if evaluate or now - told > TELL_EVERY:
                told = now
                self._tell("progress")
            if asked and not last:
                return True
        return False

    def _evaluate(self) -> None:
        figures = self.consensus.run(self.training.evaluate, self.step)
        figures = {key: store.to_list(value) for key, value in figures.items()}
        row = evaluation(self.training, self.step, self.seconds, figures)
        row = distributed.broadcast(row)
        wrong = [key for key, value in row.items() if not _is_finite(value)]
        if wrong:
            raise Diverged(f"not finite at epoch {self.epoch:g}: {', '.join(wrong)}", self.step)
        self.rows.append(row)
        if self.first:
            store.write_rows(self.folder / store.METRICS, self.rows)
        if self.board is not None:
            self._add_scalars(row)

    def _save(self) -> None:
        state: Any = self.training.state_dict()
        generators = distributed.all_gather(random_state())
        if self.training.sharded:
            # On the CPU: a rank would open those tensors on the devices of the others.
            state = distributed.all_gather(tree_map_only(Tensor, Tensor.cpu, state))
        if self.first:
            content = {
                "step": self.step,
                "seconds": self.seconds,
                "rows": self.rows,
                "training": state,
                "fingerprint": self.data,
                "spec": self.spec.plain(),
                "random": generators,
            }
            write_checkpoint(self.folder / store.CHECKPOINT, content)

    def _load(self) -> None:
        """Go on from the checkpoint, if there is one."""
        saved = distributed.run_on_first(self._read)
        if saved is None:
            return
        rank, state, generators = distributed.rank(), saved["training"], saved["random"]
        self.training.load_state_dict(state[rank] if isinstance(state, list) else state)
        self.step, self.seconds, self.rows = saved["step"], saved["seconds"], saved["rows"]
        # All ranks were seeded alike: one that was not there before takes the place of the first.
        restore_random(generators[rank if rank < len(generators) else 0])  # last: loading may draw

    def _read(self) -> dict[str, Any] | None:
        """The checkpoint, refused when it is that of another run, of other data or shards."""
        path = self.folder / store.CHECKPOINT
        warn = lambda text: self._tell("note", text)  # noqa: E731
        saved = read_checkpoint(path, self.spec.differences, self.data, warn)
        if saved is None:
            return None
        old = len(saved["training"]) if isinstance(saved["training"], list) else "no"
        new = distributed.world_size() if self.training.sharded else "no"
        if old != new:
            raise FolderError(
                f"The checkpoint {path} holds {old} shards but here it needs {new}: start as many "
                "processes as before (torchrun --nproc-per-node), or anew with --overwrite."
            )
        return saved

    def _end(self, end: Row, diverged: str | None) -> Outcome:
        result = result_of(
            self.spec, self.task, self.rows[-1] if self.rows else {}, end=end, diverged=diverged,
            seconds=self.seconds, samples=self.step * self.training.samples_per_step,
            fingerprint=self.data,
        )  # fmt: skip
        if self.first:
            store.write_json(self.folder / store.RESULT, result)
            (self.folder / store.PREVIOUS).unlink(missing_ok=True)
        outcome = outcome_of(self.spec.label, result)
        self._tell(outcome.kind, outcome.text)
        return outcome

    def _tell(self, kind: Kind, text: str = "") -> None:
        if self.first:
            last = self.rows[-1] if self.rows else {}
            figures = {key: last[key] for key in self.headline if isinstance(last.get(key), float)}
            epochs = self.spec.config.epochs
            self.on_event(Event(kind, self.spec.label, self.epoch, epochs, figures, text))


def epochs_of(step: int, per_epoch: int) -> float:
    """Steps in epochs; a whole number where it is one."""
    whole, rest = divmod(step, per_epoch)
    return whole if rest == 0 else step / per_epoch


def evaluation(training: Training | FleetTraining, step: int, seconds: float, figures: Row) -> Row:
    """A row: the figures of a training after so many steps, and what they took."""
    return {
        "epoch": epochs_of(step, training.steps_per_epoch),
        "step": step,
        "samples": step * training.samples_per_step,
        "seconds": seconds,
        **figures,
    }


def result_of(spec: RunSpec, task: Task, final: Row, **facts: Any) -> dict[str, Any]:
    """What is kept of a run that has ended: its last evaluation, warnings and more facts."""
    return {
        "name": spec.name,
        "seed": spec.seed,
        "method": plain(spec.method),
        "final": final,
        "warnings": list(task.warnings(spec.config, final)) if final else [],
        **facts,
    }


def _is_finite(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


# --- checkpoint files -----------------------------------------------------------------------------
#
# A file of `torch.save`, followed by a line with the version of the format and the sha256 of all
# bytes before it. torch.load ignores what follows the archive, so it can open the file as well.


class _HashingFile:
    """A file that `torch.save` writes to. It keeps the reason of a write that fails (no space left,
    say), which torch replaces by an error of its own.
    """

    def __init__(self, file: Any) -> None:
        self.file, self.digest = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _last_line(digest: str) -> bytes:
    return f"fcco-checkpoint 0002 {digest}\n".encode()


def previous(path: Path) -> Path:
    """Where the checkpoint before the newest lies."""
    return path.with_suffix(f".previous{path.suffix}")


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint, whole or not at all; the one before it is kept beside it."""
    with store.replacing(path) as file:
        hashing: Any = _HashingFile(file)
        try:
            torch.save(content, hashing)
        except RuntimeError as error:
            raise hashing.error or error from None
        file.write(_last_line(hashing.digest.hexdigest()))
        file.flush()
        os.fsync(file.fileno())  # whole, before the old one gives up its name
        if path.exists():
            os.replace(path, previous(path))


def read_checkpoint(
    path: Path,
    differences: Callable[[Mapping[str, Any]], list[str]],
    fingerprint: str,
    warn: Callable[[str], None],
) -> dict[str, Any] | None:
    """The newest checkpoint that is intact; None where there is none.

    Args:
        path: the newest; where it is damaged, the one before takes its place and `warn` is called.
        differences: of a saved `spec` to the present one; a checkpoint with any is refused.
        fingerprint: of the data, likewise.
        warn: called with a sentence.
    """
    way_out = f"Delete {path.with_suffix('')}*.pt to start anew, or give --overwrite for all runs."
    damaged = None
    for file in (path, previous(path)):
        if not file.exists():
            continue
        try:
            content = _read_verified(file)
        except Exception as error:  # torch, pickle and zipfile raise different ones
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            damaged = damaged or f"The checkpoint {file} cannot be read: {reason}."
            continue
        changes = differences(content["spec"])
        if content["fingerprint"] != fingerprint:
            words = f"the data were {content['fingerprint'][:12]} and are {fingerprint[:12]} now"
            changes = [*changes, words]
        if changes:
            text = f"The checkpoint {file} is that of another run: {'; '.join(changes)}. {way_out}"
            raise FolderError(text)
        if damaged is not None:
            warn(f"{damaged} Going on from the checkpoint before it.")
        if file != path:
            os.replace(file, path)  # or the next one would push the good one out
        return content
    if damaged is not None:
        raise FolderError(f"{damaged} {way_out}")
    return None


def _read_verified(path: Path) -> dict[str, Any]:
    digest, left = hashlib.sha256(), max(path.stat().st_size - len(_last_line("0" * 64)), 0)
    with path.open("rb") as file:
        while left and (piece := file.read(min(left, 1 << 20))):
            digest.update(piece)
            left -= len(piece)
        if file.read() != _last_line(digest.hexdigest()):
            raise ValueError("its checksum is wrong, it is damaged or of another version")
    content = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("step", "seconds"):
        if not 0 <= content[key] < math.inf:
            raise ValueError(f"`{key}` must be at least 0 but is: {content[key]}")
    return content


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint and the one before it."""
    for file in (previous(path), path):
        file.unlink(missing_ok=True)


# --- the global random generators -----------------------------------------------------------------


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """What `restore_random` needs."""
    numpy_state: Any = np.random.get_state(legacy=False)
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy_key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy_position": int(numpy_state["state"]["pos"]),
        "numpy_gauss": (int(numpy_state["has_gauss"]), float(numpy_state["gauss"])),
    }
    if torch.cuda.is_initialized():
        # One GPU is used; asking all would start work on those of other processes.
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random(state: Mapping[str, Any]) -> None:
    """Go back to a state."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    key = state["numpy_key"].numpy().astype(np.uint32)
    has_gauss, cached = state["numpy_gauss"]
    np.random.set_state(("MT19937", key, state["numpy_position"], has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
