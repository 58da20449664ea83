"""One run from its first step to its result, or from its checkpoint: the same, bit for bit."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from . import checkpoint, distributed, environment, store, tasks
from .config import dump
from .distributed import Consensus, Diverged, fingerprint
from .store import Event, FolderError, Kind, Outcome, RunSpec
from .task import Problem, Row, Task, Training

__all__ = ["Board", "check_folder", "train"]

_EVERY = 0.2  # seconds between two progress events of a run


def check_folder(spec: RunSpec, folder: Path, *, resume: bool) -> bool:
    """Whether a run is finished; raises when its folder cannot be used, and touches nothing.

    Args:
        spec: the run.
        folder: its place.
        resume: whether to go on with what is there.
    """
    there = folder.is_dir() and any(not each.name.startswith(".") for each in folder.iterdir())
    if there and not resume:
        raise FolderError(
            f"{folder} has a run already. Go on with it: --resume. Delete it and start anew: "
            "--overwrite."
        )
    saved = store.read_spec(folder) if there and (folder / store.CONFIG).is_file() else None
    if saved is not None and (found := spec.differences(saved)):
        raise FolderError(
            f"{folder} has another run: {'; '.join(found)}. Choose another place with --out, "
            "or start anew with --overwrite."
        )
    return (folder / store.RESULT).is_file()


def train(
    spec: RunSpec,
    folder: Path,
    problem: Problem | None = None,
    *,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
    on_event: Callable[[Event], None] = lambda event: None,
    tensorboard: bool = False,
) -> Outcome:
    """Train, evaluate and save as the spec says.

    An epoch is `steps_per_epoch` steps. Evaluations come before the first step, every
    `evaluate_every` epochs and at the end; checkpoints every `checkpoint_every` epochs, at the end
    and when asked to stop.

    On several ranks all of them call this with the same arguments. Rank 0 checks, writes and tells;
    what it refuses, all refuse. They stop when any of them is asked to.

    Args:
        spec: the run.
        folder: its place.
        problem: data and model; loaded when not given.
        resume: go on from the checkpoint, if there is one. A finished run is left as it is.
        stop: asked after each step; when true, the run saves itself and ends.
        on_event: told what happens.
        tensorboard: whether to write scalars for TensorBoard.
    """
    ended = distributed.run_on_first(lambda: _ended(spec, folder, resume))
    if ended is not None:
        return ended
    task = tasks.get(spec.task)
    if problem is None:
        problem = distributed.run_on_all(lambda: task.load(spec.config))
    with contextlib.ExitStack() as held:
        distributed.run_on_first(lambda: _occupy(folder, held))
        return _Run(spec, folder, task, problem, on_event, stop).go(tensorboard)


def _ended(spec: RunSpec, folder: Path, resume: bool) -> Outcome | None:
    if not check_folder(spec, folder, resume=resume):
        return None
    return Outcome(spec.label, _how(store.read_result(folder)))


def _occupy(folder: Path, held: contextlib.ExitStack) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    held.enter_context(store.locked(folder))


def _how(result: Mapping[str, Any]) -> Kind:
    return "finished" if result["diverged"] is None else "diverged"


class _Run:
    """A run in memory: what the checkpoint holds, and the loop."""

    def __init__(
        self,
        spec: RunSpec,
        folder: Path,
        task: Task,
        problem: Problem,
        on_event: Callable[[Event], None],
        stop: Callable[[], bool],
    ) -> None:
        self.spec, self.folder, self.task = spec, folder, task
        self.first = distributed.rank() == 0
        self.tell = on_event if self.first else _silent
        self.data = distributed.run_on_all(lambda: fingerprint(problem))
        self.headline = [m.key for m in task.page(spec.config).metrics if m.headline]
        self.step, self.seconds, self.rows = 0, 0.0, list[Row]()
        checkpoint.seed_all(spec.seed)
        self.training: Training = problem.start(spec.method, spec.seed)
        self.begun: dict[str, Any] = environment.describe(self.training.device)
        self.board: Board | None = None
        self.consensus = Consensus(stop)

    @property
    def epoch(self) -> float:
        whole, rest = divmod(self.step, self.training.steps_per_epoch)
        return whole if rest == 0 else self.step / self.training.steps_per_epoch

    @property
    def total(self) -> int:
        return self.spec.config.epochs * self.training.steps_per_epoch

    def go(self, tensorboard: bool) -> Outcome:
        self._load()
        if self.first:
            self._begin()
            self.board = Board(self.folder, self.rows, tensorboard)
        self._tell("started")
        try:
            stopped = self._loop()
            end = (
                {} if stopped else store.clean(self.consensus.run(self.training.finish, self.step))
            )
        except Diverged as reason:
            self.step = reason.step
            return self._end({}, str(reason))
        finally:
            if self.board is not None:
                self.board.close()
        if stopped:
            self._tell("stopped")
            return Outcome(self.spec.label, "stopped")
        return self._end(end, None)

    def _begin(self) -> None:
        """Say what this is before the first step."""
        store.write_text(self.folder / store.CONFIG, dump(self.spec.plain()))
        said = self.folder / store.ENVIRONMENT
        if self.step and said.is_file():
            before = store.read_json(said)
            again = f"{self.begun['start']} at step {self.step}, fcco {self.begun['fcco']}"
            again += "".join(
                f", {key} {self.begun.get(key, 1)}"
                for key in ("device", "processes")
                if self.begun.get(key) != before.get(key)
            )
            self.begun = before | {"resumed": [*before.get("resumed", ()), again]}
        store.write_json(said, self.begun)
        # Rows after the checkpoint belong to steps that will be made again.
        store.write_rows(self.folder / store.METRICS, self.rows)

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
            if evaluate or now - told > _EVERY:
                told = now
                self._tell("progress")
            if asked and not last:
                return True
        return False

    def _evaluate(self) -> None:
        samples = self.step * self.training.samples_per_step
        row: Row = {"epoch": self.epoch, "step": self.step, "samples": samples}
        row |= {
            "seconds": self.seconds,
            **_plain(self.consensus.run(self.training.evaluate, self.step)),
        }
        row = distributed.broadcast(row)
        wrong = [key for key, value in row.items() if not _is_finite(value)]
        if wrong:
            raise Diverged(f"not finite at epoch {self.epoch:g}: {', '.join(wrong)}", self.step)
        self.rows.append(row)
        if self.first:
            store.write_rows(self.folder / store.METRICS, self.rows)
        if self.board is not None:
            self.board.add(row)

    def _save(self) -> None:
        collected = checkpoint.collect(self.training)
        if collected is None:
            return
        state, random = collected
        held = checkpoint.Checkpoint(
            step=self.step,
            epoch=self.epoch,
            seconds=self.seconds,
            rows=self.rows,
            training=state,
            fingerprint=self.data,
            spec=self.spec.plain(),
            random=random,
        )
        checkpoint.save(self.folder / store.CHECKPOINT, held)

    def _load(self) -> None:
        """Go on from the checkpoint, if there is one."""
        path = self.folder / store.CHECKPOINT

        def read() -> checkpoint.Checkpoint | None:
            if not path.exists():
                return None
            return checkpoint.read(path, self.spec, self.data, self.training)

        held = checkpoint.distribute(read, self.training)
        if held is not None:
            self.step, self.seconds, self.rows = held.step, held.seconds, held.rows
            checkpoint.restore_random(held.random[0])  # last: loading may draw

    def _end(self, end: Row, diverged: str | None) -> Outcome:
        final = self.rows[-1] if self.rows else {}
        result = {
            "name": self.spec.name,
            "seed": self.spec.seed,
            "method": self.spec.plain()["method"],
            "final": final,
            "end": end,
            "warnings": list(self.task.warnings(self.spec.config, final)) if final else [],
            "seconds": self.seconds,
            "samples": self.step * self.training.samples_per_step,
            "diverged": diverged,
            "fingerprint": self.data,
        }
        if self.first:
            store.write_json(self.folder / store.RESULT, result)
        kind = _how(result)
        self._tell(kind, diverged or "")
        return Outcome(self.spec.label, kind, diverged or "")

    def _tell(self, kind: Kind, text: str = "") -> None:
        last = self.rows[-1] if self.rows else {}
        figures = {key: last[key] for key in self.headline if isinstance(last.get(key), float)}
        epochs = self.spec.config.epochs
        self.tell(Event(kind, self.spec.label, self.epoch, epochs, figures, text))


def _silent(event: Event) -> None:
    """What the other ranks tell."""


def _plain(row: Row) -> Row:
    """Tensors and arrays as numbers and lists, not yet cleaned of what is not finite."""
    return {
        key: value.tolist() if hasattr(value, "tolist") else value for key, value in row.items()
    }


def _is_finite(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_finite(each) for each in value)
    return not isinstance(value, float) or math.isfinite(value)


class Board:
    """Writes the numbers of each evaluation as scalars; does nothing unless wanted.

    Args:
        folder: of the run; the event files go to `tensorboard/` in it.
        rows: evaluations before this process, written again from the first.
        wanted: whether to write at all.
    """

    def __init__(self, folder: Path, rows: Iterable[Row], wanted: bool) -> None:
        self._writer: Any = None
        if not wanted:
            return
        from torch.utils.tensorboard import SummaryWriter  # type: ignore[attr-defined]

        # Events after the checkpoint would stand beside those of the steps made again.
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        self._writer = SummaryWriter(str(folder / "tensorboard"))
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """One evaluation; lists become one scalar for each entry."""
        if self._writer is None:
            return
        for key, value in row.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, row["step"])
            elif isinstance(value, list):
                for place, each in enumerate(value):
                    self._writer.add_scalar(f"{key}/{place}", each, row["step"])

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
