"""Runs as fleets: lines, chunks, stops, divergence, failures, damaged files, several processes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fcco_experiments import compare, config, store
from fcco_experiments.run import fleets
from fcco_experiments.store import Event, FolderError, Outcome
from fcco_experiments.task import Method
from fleet_toy import HUGE, TASK, ToyFleet, figures, noise
from test_experiments_cli import fcco

TOY = "fleet_toy:TASK"
RATES = (0.3, 0.1, 0.02)
BASE = config.load(TASK, "quadratic", overrides=["epochs=6", "steps=4"])
STEPS = 24


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    ToyFleet.made.clear()


def methods(*rates: float, update: Any = "sgd", word: str = "sox") -> dict[str, Method]:
    return {f"{word}-{update}@{k}": Method(word, lr, update) for k, lr in enumerate(rates)}


def plan(chosen: dict[str, Method], seeds: tuple[int, ...] = (0, 3), **changes: Any) -> Any:
    return compare.plan(TOY, "quadratic", replace(BASE, methods=chosen, seeds=seeds, **changes))


def execute(wanted: Any, out: str = "o", *, chunk: int | None = None, **options: Any) -> Any:
    return compare.execute(wanted, Path(out), fleets=fleets.Fleets(chunk=chunk), **options)


def lines(out: str = "o") -> dict[str, dict[str, Any]]:
    """Without the clock."""
    found = store.read_fleet_lines(Path(out))
    for line in found.values():
        assert line.pop("seconds") >= 0
        line["final"].pop("seconds", None)
    return found


def kinds(outcomes: list[Outcome]) -> dict[str, str]:
    return {outcome.run: outcome.kind for outcome in outcomes}


def literal(lr: float, seed: int, steps: int = STEPS) -> tuple[float, int | None]:
    """The weight after some steps, and the step of its divergence."""
    weight = 0.0
    for step in range(steps):
        new = weight - lr * (weight - 1 - noise(seed, step))
        if abs(new) > HUGE:
            return weight, step
        weight = new
    return weight, None


# --- what a fleet leaves -----------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_each_run_has_the_line_that_it_would_have_alone(chunk):
    wanted = plan(methods(*RATES) | methods(0.2, 0.05, update="adam"))
    ended = execute(wanted, chunk=chunk)
    assert set(kinds(ended).values()) == {"finished"}
    assert [outcome.run for outcome in ended] == [spec.label for spec in wanted.specs]
    found = lines()
    assert set(found) == {spec.label for spec in wanted.specs}
    for spec in wanted.specs:
        weight, _ = literal(spec.method.lr, spec.seed)
        row = figures(weight) | {"epoch": 6, "step": STEPS, "samples": 8 * STEPS}
        line = found[spec.label]
        assert line["final"] == pytest.approx(row, abs=1e-12)
        assert line["method"] == config.plain(spec.method) and line["diverged"] is None
        assert (line["step"], line["epoch"], line["samples"]) == (STEPS, 6, 8 * STEPS)
        assert line["warnings"] == list(TASK.warnings(None, row)) and line["end"] == {}
    assert ToyFleet.made == {None: [6, 4], 1: [1] * 10, 4: [3, 3, 4]}[chunk]
    assert not list(Path("o/fleet").glob("*.pt"))
    assert not list(Path("o").glob("*/seed-*"))


def test_a_comparison_reads_lines_and_folders_alike():
    chosen = methods(0.3, 0.1) | methods(0.1, word="alexr2", update="momentum")
    settings = {"penalty": 8, "smoothing": 0.01, "nu": 1.0, "eta": 0.02, "inner_steps": 5}
    chosen["alexr2-momentum@0"] = replace(chosen["alexr2-momentum@0"], settings=settings)
    ended = execute(plan(chosen), workers=1)
    assert set(kinds(ended).values()) == {"finished"}
    assert len(lines()) == 4
    assert len(list(Path("o").glob("*/seed-*/result.json"))) == 2
    found = store.load_comparison(Path("o"))
    assert [(run.name, run.seed) for run in found.runs] == [(n, k) for n in chosen for k in (0, 3)]
    for name, method in chosen.items():
        group = found.of(name)
        assert [run.seed for run in group] == [0, 3]
        assert all(run.method == config.plain(method) for run in group)
        assert all("val_loss" in run.figures and run.figures["epoch"] == 6 for run in group)
        assert all(run.environment["threads"] >= 1 for run in group)
    assert found.of("sox-sgd@0")[0].rows == [found.of("sox-sgd@0")[0].figures]
    assert found.of("nobody") == []


# --- stops -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """The lines of a sweep that nobody stopped: two fleets of 4 and 2 runs, one run diverges."""
    at = tmp_path_factory.mktemp("whole")
    execute(stoppable(), str(at / "o"))
    return lines(str(at / "o"))


def stoppable(**changes: Any) -> Any:
    return plan(methods(0.3, 9.0) | methods(0.1, update="adam"), **changes)


@pytest.mark.parametrize("step", [0, 5, 6, 22])
def test_a_stop_at_any_step_is_saved_at_once_and_goes_on_bitwise(step, whole, monkeypatch):
    monkeypatch.setenv("FLEET_STOP", str(step))
    events: list[Event] = []
    ended = kinds(execute(stoppable(), on_event=events.append))
    assert set(ended.values()) == {"stopped"} and lines() == {}
    told = [event.kind for event in events]
    assert told[-1] == "stopped" and told.count("stopping") == 1
    held = torch.load("o/fleet/checkpoint-0.pt", weights_only=True)
    assert held["step"] == step + 1 and len(held["runs"]) == 4
    monkeypatch.delenv("FLEET_STOP")
    made = len(ToyFleet.made)
    events.clear()
    ended = kinds(execute(stoppable(), resume=True, on_event=events.append))
    started = next(event for event in events if event.kind == "started")
    assert started.epoch == pytest.approx((step + 1) / 4) and started.count == 4
    assert ended["sox-sgd@1/seed-0"] == "diverged" and ended["sox-adam@0/seed-3"] == "finished"
    assert lines() == whole and ToyFleet.made[made:] == [4, 2]
    assert not list(Path("o/fleet").glob("checkpoint*"))


def test_a_stop_in_the_second_fleet_keeps_the_lines_of_the_first(whole, monkeypatch):
    """Each fleet of two runs gets the signal before its last step; the first one has made it."""
    monkeypatch.setenv("FLEET_STOP", str(STEPS - 1))
    wanted = stoppable()
    ended = kinds(execute(wanted, chunk=2))
    assert len(lines()) == 2 and list(ended.values()).count("stopped") == 4
    assert not list(Path("o/fleet").glob("checkpoint*")), "it came with the last step"
    monkeypatch.delenv("FLEET_STOP")
    events: list[Event] = []
    ended = kinds(execute(wanted, chunk=2, resume=True, on_event=events.append))
    assert sum(event.text == "was finished" for event in events) == 2
    assert lines() == whole and "stopped" not in ended.values()


def test_checkpoints_come_every_few_epochs(whole, monkeypatch):
    """As a process that was killed would leave them."""
    seen: list[int] = []
    saved = fleets._FleetRun.save

    def save(self: Any) -> None:
        saved(self)
        seen.append(self.step)
        if self.step == 16:
            raise KeyboardInterrupt

    monkeypatch.setattr(fleets._FleetRun, "save", save)
    with pytest.raises(KeyboardInterrupt):
        execute(stoppable(checkpoint_every=2))
    assert seen == [8, 16] and lines() == {}
    monkeypatch.setattr(fleets._FleetRun, "save", saved)
    with pytest.raises(FolderError, match="has runs already"):
        execute(stoppable(checkpoint_every=2))
    execute(stoppable(checkpoint_every=3), resume=True)  # how often does not matter
    assert lines() == whole


def test_more_settings_later_and_a_part_of_them(whole, monkeypatch):
    """A checkpoint is finished even when it is not asked for any more."""
    monkeypatch.setenv("FLEET_STOP", "5")
    execute(stoppable())
    monkeypatch.delenv("FLEET_STOP")
    some = plan(methods(0.3) | methods(0.1, update="adam") | methods(0.7, word="erm"))
    assert set(kinds(execute(some, resume=True)).values()) == {"finished"}
    assert {name: line for name, line in lines().items() if name in whole} == whole
    assert set(lines()) - set(whole) == {"erm-sgd@0/seed-0", "erm-sgd@0/seed-3"}
    assert set(store.read_meta(Path("o"))["methods"]) == {
        "sox-sgd@0", "sox-sgd@1", "sox-adam@0", "erm-sgd@0",
    }  # fmt: skip


# --- trouble -----------------------------------------------------------------------------------


def test_runs_that_diverge_are_told_in_one_line_and_change_no_other():
    rates = (0.3, 9.0, 5.0, 0.1)
    events: list[Event] = []
    ended = kinds(execute(plan(methods(*rates)), on_event=events.append))
    execute(plan(methods(0.3, 3.0, 2.5, 0.1)), "other")
    found, other = lines(), lines("other")
    for place, lr in enumerate(rates):
        for seed in (0, 3):
            name = f"sox-sgd@{place}/seed-{seed}"
            _, died = literal(lr, seed)
            assert ended[name] == ("finished" if died is None else "diverged")
            if died is None:
                assert found[name] == other[name]
                continue
            line = found[name]
            assert line["diverged"] == f"after {died} steps: not finite"
            assert (line["step"], line["samples"]) == (died, 8 * died)
            quarter = max(q for q in (0, 6, 12, 18) if q <= died)
            last = figures(literal(lr, seed, quarter)[0])
            assert line["final"]["step"] == quarter
            assert line["final"]["loss"] == pytest.approx(last["loss"], rel=1e-12)
    (event,) = [event for event in events if event.kind == "finished"]
    assert event.count == 8 and event.text.startswith("4 of them diverged, the first after")
    assert "diverged" not in [event.kind for event in events]


def test_figures_that_are_not_finite_are_a_divergence(monkeypatch):
    monkeypatch.setenv("FLEET_NAN", "0.1")
    ended = execute(plan(methods(0.3, 0.1)))
    assert kinds(ended)["sox-sgd@1/seed-0"] == "diverged"
    line = lines()["sox-sgd@1/seed-0"]
    assert line["diverged"] == "not finite at epoch 3: val_loss"
    assert line["final"]["step"] == 6 and line["step"] == STEPS
    assert lines()["sox-sgd@0/seed-0"]["diverged"] is None


def test_a_fleet_in_which_all_have_diverged_ends(monkeypatch):
    steps: list[int] = []
    real = ToyFleet.step
    monkeypatch.setattr(ToyFleet, "step", lambda self: (steps.append(1), real(self)))
    assert set(kinds(execute(plan(methods(50.0, 90.0)))).values()) == {"diverged"}
    assert len(steps) == 6


def test_a_fleet_that_does_not_fit_is_halved(monkeypatch):
    execute(plan(methods(*RATES)), "whole")
    ToyFleet.made.clear()
    monkeypatch.setenv("FLEET_FITS", "2")
    events: list[Event] = []
    assert set(kinds(execute(plan(methods(*RATES)), on_event=events.append)).values()) == {
        "finished"
    }
    assert lines() == lines("whole")
    assert ToyFleet.made == [6, 3, 1, 1, 1, 1, 1, 1]
    notes = [event.text for event in events if event.kind == "note"]
    assert len(notes) == 2 and "6 runs together: they do not fit" in notes[0]
    monkeypatch.setenv("FLEET_FITS", "0")
    ended = execute(plan(methods(0.3)), "none")
    assert set(kinds(ended).values()) == {"failed"} and "out of memory" in ended[0].text


def test_a_fleet_that_breaks_leaves_its_traceback_and_the_others_go_on(monkeypatch):
    monkeypatch.setenv("FLEET_BREAK", "0.3")
    wanted = plan(methods(0.3, 0.1) | methods(0.2, update="adam"))
    events: list[Event] = []
    ended = kinds(execute(wanted, on_event=events.append))
    assert [ended[spec.label] for spec in wanted.specs] == ["failed", "failed", "finished"] * 2
    (event,) = [event for event in events if event.kind == "failed"]
    assert "the shapes do not fit" in event.text and event.count == 4
    assert "Traceback" in Path(event.details).read_text()
    monkeypatch.delenv("FLEET_BREAK")
    assert set(kinds(execute(wanted, resume=True)).values()) == {"finished"}
    assert len(lines()) == 6


# --- folders -----------------------------------------------------------------------------------


def test_damaged_lines_are_named():
    execute(plan(methods(0.3, 0.1)))
    with Path("o/fleet/lines-0.jsonl").open("a") as file:
        file.write('{"name": "a", "seed": 0}\n')
    said = "lines-0.jsonl is damaged: line 5 has no method, fingerprint, final, end, diverged"
    with pytest.raises(FolderError, match=said):
        store.load_comparison(Path("o"))
    with pytest.raises(FolderError, match=said):
        execute(plan(methods(0.3, 0.1, 0.5)), resume=True)


def test_runs_of_another_config_or_other_data_are_refused(monkeypatch):
    execute(plan(methods(0.3)))
    before = Path("o/fleet/lines-0.jsonl").read_bytes()
    with pytest.raises(FolderError, match=r"`config\.steps` was 4 and is 5 now"):
        execute(plan(methods(0.3, 0.1), steps=5), resume=True)
    with pytest.raises(FolderError, match=r"lr` was 0\.3 and is 0\.4 now"):
        execute(plan(methods(0.4)), resume=True)
    monkeypatch.setenv("TOY_DATA", "others")
    with pytest.raises(FolderError, match=r"runs on other data: .* toy 5 and are others now"):
        execute(plan(methods(0.3, 0.1)), resume=True)
    assert Path("o/fleet/lines-0.jsonl").read_bytes() == before


def test_checkpoints_of_others_are_refused(monkeypatch):
    monkeypatch.setenv("FLEET_STOP", "9")
    execute(plan(methods(0.3, 0.1)))
    monkeypatch.delenv("FLEET_STOP")
    path = Path("o/fleet/checkpoint-0.pt")
    good, held = path.read_bytes(), torch.load(path, weights_only=True)
    other = held["spec"] | {"task": "other"}
    for changes, said in (
        ({"fingerprint": "other"}, "the data were other and are toy 5 now"),
        ({"spec": other}, "checkpoint-0.pt is that of another run: `task` was 'other'"),
    ):
        store.write_checkpoint(path, held | changes)
        with pytest.raises(FolderError, match=said):
            execute(plan(methods(0.3, 0.1)), resume=True)
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(FolderError, match=r"checkpoint-0\.pt cannot be read"):
        execute(plan(methods(0.3, 0.1)), resume=True)
    path.write_bytes(good)
    execute(plan(methods(0.3, 0.1)), resume=True)
    assert len(lines()) == 4 and not list(Path("o/fleet").glob("checkpoint*"))


def test_a_process_that_died_between_lines_and_checkpoint(monkeypatch):
    unlink = Path.unlink

    def keep(self: Path, missing_ok: bool = False) -> None:
        if self.suffix != ".pt":
            unlink(self, missing_ok)

    monkeypatch.setenv("FLEET_STOP", "9")
    execute(plan(methods(0.3)))
    monkeypatch.delenv("FLEET_STOP")
    monkeypatch.setattr(Path, "unlink", keep)
    execute(plan(methods(0.3)), resume=True)
    monkeypatch.setattr(Path, "unlink", unlink)
    assert Path("o/fleet/checkpoint-0.pt").exists()
    made = len(ToyFleet.made)
    execute(plan(methods(0.3, 0.1)), resume=True)
    assert ToyFleet.made[made:] == [2] and not Path("o/fleet/checkpoint-0.pt").exists()


@pytest.mark.parametrize("again", [{"resume": True}, {"overwrite": True}])
def test_what_a_killed_process_was_writing_is_removed(again, monkeypatch):
    monkeypatch.setenv("FLEET_STOP", "9")
    execute(plan(methods(0.3)))
    monkeypatch.delenv("FLEET_STOP")
    for name in (".checkpoint-0.pt.123.fcco-tmp", ".environment.json.9.fcco-tmp"):
        Path("o/fleet", name).write_bytes(b"half")
    execute(plan(methods(0.3)), **again)
    assert {path.name for path in Path("o/fleet").iterdir()} == {
        "environment.json",
        "lines-0.jsonl",
    }


# --- the command -------------------------------------------------------------------------------

GRID = ["--grid.sox.lr", "[0.02, 0.3]", "--seeds", "0,3"]
SWEEP = ["sweep", TOY, "--data", "quadratic", *GRID, "--epochs", "6", "--steps", "4", "--out", "s"]


def test_the_command_uses_fleets_by_itself():
    done = fcco(*SWEEP, "--chunk", "3", "--device", "cpu")
    assert ToyFleet.made == [2, 2] and len(lines("s")) == 4
    assert "sox: lr 0.02" in done.stdout
    assert sorted(p.name for p in Path("s").iterdir() if p.name[0] != ".") == [
        "comparison.json", "fleet", "settings.csv", "sweep.json.gz",
        "table.json", "winners.yaml",
    ]  # fmt: skip
    again = fcco("report", "s")
    assert again.stdout == done.stdout
    assert "was finished" not in fcco(*SWEEP, "--resume").stderr and ToyFleet.made == [2, 2]
    fcco(*SWEEP, "--overwrite", "--no-fleet", "--workers", "1")
    assert not Path("s/fleet").exists() and len(list(Path("s").glob("*/seed-*"))) == 4


PLAIN = ["sweep", "toy_task:TASK", *SWEEP[2:]]


@pytest.mark.parametrize(
    "words, said",
    [
        ([*PLAIN, "--fleet"], "cannot train runs together"),
        ([*PLAIN, "--chunk", "3"], "--chunk is for fleets"),
        ([*SWEEP, "--no-fleet", "--device", "cpu"], "--device is for fleets"),
        ([*SWEEP, "--device", "gpu"], "is not one of 'auto', 'cpu'"),
        (["sweep", "group-dro", "--data", "grouped-synthetic", "--device", "nowhere"], "device"),
    ],
)
def test_options_that_do_not_fit(words, said):
    assert said in fcco(*words, code=2).stderr
