"""Many runs: the same over any number of processes; a dead process is one failed run."""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fcco_experiments import compare, config, store
from fcco_experiments.run.engine import LoadError
from fcco_experiments.store import Event, FolderError, Outcome, RunSpec
from test_experiments_engine import diverging, equal, result, rows, spec, weights
from toy_task import ToyProblem


def specs(**changes: Any) -> list[RunSpec]:
    return [spec(name, seed, **changes) for seed in (0, 1) for name in ("sonex", "alexr2")]


def execute(specs: list[RunSpec], out: Path, **options: Any) -> list[Outcome]:
    made = compare.Plan("toy_task:TASK", "quadratic", spec().config, tuple(specs))
    return compare.execute(made, out, **options)


@pytest.mark.slow
def test_processes_change_nothing_and_one_that_dies_is_one_failed_run(tmp_path, monkeypatch):
    """Two workers; the process of the run with seed 1 kills itself with signal 9."""
    runs = [spec("alexr2", seed, kill=(1, 10)) for seed in (0, 1)]
    runs.append(diverging(seed=2, kill=(1, 10)))
    events: list[Event] = []
    ended = execute(runs, tmp_path / "two", workers=2, on_event=events.append)
    kinds = {outcome.run: outcome.kind for outcome in ended}
    expected = ["finished", "failed", "diverged"]
    assert kinds == {run.label: kind for run, kind in zip(runs, expected, strict=True)}
    (failed,) = [event for event in events if event.kind == "failed"]
    assert failed.run == "alexr2/seed-1" and "signal 9" in failed.text
    assert {"started", "progress", "finished", "diverged"} <= {event.kind for event in events}

    monkeypatch.setenv("TOY_SPARE", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        execute(runs, tmp_path / "one", workers=1)
        assert torch.get_num_threads() == 2, "put back"
    finally:
        torch.set_num_threads(threads)
    assert store.load_run(runs[0].folder(tmp_path / "one")).environment["threads"] == 1
    ended = execute(runs, tmp_path / "two", workers=1, resume=True)
    assert {outcome.kind for outcome in ended} == {"finished"}
    for one in runs:
        single, several = one.folder(tmp_path / "one"), one.folder(tmp_path / "two")
        assert rows(single) == rows(several) and result(single) == result(several)
        if one.name != "sox":
            assert equal(weights(single), weights(several))


def test_a_run_that_fails_leaves_its_traceback_and_the_others_go_on(tmp_path):
    wrong = replace(spec("sox"), method=replace(spec("sox").method, settings={"penaltee": 1.0}))
    events: list[Event] = []
    ended = execute([wrong, spec()], tmp_path, workers=1, on_event=events.append)
    assert [outcome.kind for outcome in ended] == ["failed", "finished"]
    assert "no such setting: `penaltee`" in ended[0].text
    (event,) = [event for event in events if event.kind == "failed"]
    assert "Traceback" in (tmp_path / "sox/seed-0/failure.txt").read_text()
    assert event.details == str(tmp_path / "sox/seed-0/failure.txt")


def test_data_that_cannot_be_loaded_stop_everything_at_once(tmp_path):
    """Also where a worker process says it."""
    with pytest.raises(LoadError, match=r"no file nowhere\.csv") as caught:
        execute(specs(data="nowhere"), tmp_path, workers=2)
    assert "Traceback" not in str(caught.value), "the message says all"
    assert not list(tmp_path.glob("*/seed-*"))


def test_a_full_disk_is_a_clear_line(tmp_path, monkeypatch):
    """No room even for the traceback."""
    monkeypatch.setenv("TOY_FULL", "1")
    monkeypatch.setattr(os, "fsync", os.fsync)  # put back after the test
    events: list[Event] = []
    ended = execute([spec(), spec(seed=1)], tmp_path, workers=1, on_event=events.append)
    assert [outcome.kind for outcome in ended] == ["failed", "failed"]
    for event in (event for event in events if event.kind == "failed"):
        assert "cannot be written: No space left on device" in event.text and not event.details


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_saves_and_stops(name, tmp_path):
    """Even when nobody can be told any more, because the terminal is gone."""
    runs, number = specs(), getattr(signal, name)
    handler = signal.getsignal(number)
    events: list[Event] = []

    def tell(event: Event) -> None:
        events.append(event)
        if event.kind == "progress" and event.epoch == 2:
            os.kill(os.getpid(), number)
        if event.kind == "stopping":
            raise OSError(errno.EIO, "Input/output error")

    ended = execute(runs, tmp_path, workers=1, on_event=tell)
    assert [event.kind for event in events].count("stopping") == 1
    assert signal.getsignal(number) is handler, "put back"
    assert [outcome.kind for outcome in ended] == ["stopped"] * 4
    held = torch.load(runs[0].folder(tmp_path) / "checkpoint.pt", weights_only=True)
    assert held["step"] == 9, "it ends the step after"
    assert not runs[1].folder(tmp_path).exists()


def test_nohup_is_respected(tmp_path):
    def tell(event: Event) -> None:
        if event.kind == "started":
            os.kill(os.getpid(), signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert execute([spec()], tmp_path, workers=1, on_event=tell)[0].kind == "finished"
    finally:
        signal.signal(signal.SIGHUP, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_second_interrupt_kills(tmp_path):
    def tell(event: Event) -> None:
        if event.kind == "started":
            threading.Timer(0.2, interrupt).start()  # during the first, long step
            threading.Timer(0.4, interrupt).start()

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        execute([spec(slow=9.0)], tmp_path, workers=1, on_event=tell)
    assert time.monotonic() - start < 9


# --- comparisons -------------------------------------------------------------------------------


def plan(**changes: Any) -> compare.Plan:
    base = replace(spec().config, **{"seeds": (0,), **changes})
    return compare.plan("toy_task:TASK", "quadratic", base)


here = functools.partial(compare.execute, workers=1)


def test_a_comparison_goes_on_where_it_was(tmp_path, monkeypatch):
    """Finished runs are left alone, new methods and seeds are added."""

    def trained(outcomes: list[Outcome]) -> set[str]:
        return {outcome.run for outcome in outcomes if outcome.text != "was finished"}

    full = plan().config
    monkeypatch.setattr(sys, "argv", ["fcco", "first"])
    only = {name: full.methods[name] for name in ("sox", "sonex")}
    assert trained(here(plan(methods=only, seeds=(3,)), tmp_path)) == {"sox/seed-3", "sonex/seed-3"}
    before = store.load_comparison(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fcco", "second"])
    two = {name: full.methods[name] for name in ("alexr2", "sox")}
    ended = here(plan(methods=two, seeds=(0, 3)), tmp_path, resume=True)
    assert {each.run for each in ended} == {f"{n}/seed-{k}" for n in two for k in (0, 3)}
    assert trained(ended) == {"alexr2/seed-0", "sox/seed-0", "alexr2/seed-3"}
    again = store.load_comparison(tmp_path)
    assert again.meta["methods"] == ["sox", "sonex", "alexr2"] and again.meta["seeds"] == [3, 0]
    assert again.meta["command"] == "fcco first" and again.meta["created"] == before.meta["created"]
    assert [(run.name, run.seed) for run in again.runs] == [
        ("sox", 3), ("sox", 0), ("sonex", 3), ("alexr2", 3), ("alexr2", 0),
    ]  # fmt: skip
    assert again.of("sonex") == before.of("sonex"), "left alone"
    read = config.from_plain(type(full), again.meta["config"], "saved")
    assert list(read.methods) == again.meta["methods"] and read.seeds == (3, 0)
    here(plan(checkpoint_every=1), tmp_path, resume=True)  # may differ
    ended = here(plan(), tmp_path, overwrite=True)
    assert trained(ended) == {"sonex/seed-0", "sox/seed-0", "alexr2/seed-0"}
    assert not (tmp_path / "sox/seed-3").exists()


def test_runs_of_another_experiment_are_refused_untouched(tmp_path):
    here(plan(), tmp_path)
    foreign = spec("sox", 1, epochs=9)
    (tmp_path / "sox/seed-1").mkdir()
    store.write_text(tmp_path / "sox/seed-1/config.yaml", config.dump(foreign.plain()))
    before = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    other = {"sonex": replace(plan().config.methods["sonex"], lr=0.5)}
    for wanted, resume, said in (
        (plan(), False, "--resume"),
        (plan(epochs=9), True, r"runs of another config: `config.epochs` was 6 and is"),
        (plan(methods=other), True, r"config: `methods.sonex.lr` was 0.02 and is 0.5 now\."),
        (replace(plan(), task="fairness"), True, r"`task` was 'toy_task:TASK' and is 'fairness'"),
        (plan(seeds=(0, 1)), True, r"sox/seed-1 has another run: `config.epochs` was 9"),
    ):
        with pytest.raises(FolderError, match=said):
            here(wanted, tmp_path, resume=resume)
    assert {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()} == before


def test_overwriting_keeps_the_users_files_and_waits_for_the_lock(tmp_path, monkeypatch):
    out = tmp_path / "out"
    here(plan(seeds=(0, 1)), out)
    (out / "notes.txt").write_text("mine")
    before = {each for each in out.rglob("*") if each.is_file()}
    monkeypatch.setattr(store, "locked", functools.partial(store.locked, patience=0.1))
    with store.locked(out), pytest.raises(FolderError, match="Another process is at work"):
        here(plan(), out, overwrite=True)
    assert {each for each in out.rglob("*") if each.is_file()} == before
    with pytest.raises(LoadError, match="the network is down"):
        here(plan(data="unreachable"), out, overwrite=True)
    assert {each for each in out.rglob("*") if each.is_file()} == before, "no data: nothing lost"
    here(plan(), out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"
    assert store.load_comparison(out).meta["seeds"] == [0] and not (out / "sox/seed-1").exists()


def test_data_are_loaded_before_anything_is_changed(tmp_path):
    before = ToyProblem.built
    compare.execute(plan(epochs=1), tmp_path / "out", workers=1)
    assert ToyProblem.built == before + 1, "what was built to check the data is used"
    compare.execute(plan(epochs=1), tmp_path / "out", resume=True)
    assert ToyProblem.built == before + 1, "nothing to do, no data"
    with pytest.raises(LoadError, match="network is down"):
        compare.execute(plan(data="unreachable", epochs=1), tmp_path / "out", overwrite=True)
    assert len(list((tmp_path / "out").glob("*/seed-*/result.json"))) == len(plan(epochs=1).specs)
