"""One run: evaluations, checkpoints, a result, and going on bitwise from wherever it stopped."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fcco_experiments import config, store
from fcco_experiments.run import engine
from fcco_experiments.store import Event, FolderError, RunSpec
from toy_task import TASK, Shape, ToyProblem

BASE = config.load(TASK, "quadratic")


def spec(name: str = "sonex", seed: int = 0, **changes: Any) -> RunSpec:
    return RunSpec("toy_task:TASK", name, BASE.methods[name], seed, replace(BASE, **changes))


def fail(event: Event) -> None:
    pytest.fail(f"nothing should happen, but: {event}")


def after(steps: int):
    """Asks to stop after so many steps of this process."""
    made = iter(range(steps - 1))
    return lambda: next(made, None) is None


def weights(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)["training"]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def result(folder: Path) -> dict[str, Any]:
    held = json.loads((folder / "result.json").read_text())
    held["final"].pop("seconds", None)
    return {k: v for k, v in held.items() if k != "seconds"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody stopped."""
    folder = tmp_path_factory.mktemp("whole")
    engine.train(spec(), folder)
    return folder


def test_a_run_leaves_everything_that_was_promised(tmp_path):
    events: list[Event] = []
    outcome = engine.train(spec(), tmp_path / "a", on_event=events.append)
    assert outcome.kind == "finished" and outcome.run == "sonex/seed-0"
    names = {each.name for each in (tmp_path / "a").iterdir()}
    assert names == {
        "config.yaml", "environment.json", "metrics.jsonl", "checkpoint.pt", "result.json", ".lock",
    }  # fmt: skip
    run = store.load_run(tmp_path / "a")
    assert (run.name, run.seed, run.method["lr"]) == ("sonex", 0, 0.02)
    held = store.read_spec(tmp_path / "a")["config"]
    assert "methods" not in held and held["shape"]["noise"] == 0.2
    assert [row["step"] for row in run.rows] == [0, 4, 8, 12, 16, 20, 24]
    assert [row["samples"] for row in run.rows] == [8 * row["step"] for row in run.rows]
    seconds = [row["seconds"] for row in run.rows]
    assert seconds[0] == 0 and seconds == sorted(seconds) and seconds[-1] > 0
    assert run.result is not None and run.result["final"] == run.rows[-1]
    assert run.result["samples"] == 192 and run.result["diverged"] is None
    assert run.result["fingerprint"] == "toy 5" and run.result["warnings"] == []
    norm = weights(tmp_path / "a")["model"]["weight"].norm().item()
    assert run.result["end"]["norm"] == pytest.approx(norm)
    assert run.result["end"]["unknown"] != run.result["end"]["unknown"]  # NaN comes back
    assert run.environment["threads"] >= 1 and run.environment["device"] == "cpu"
    kinds = [event.kind for event in events]
    assert kinds[0] == "started" and kinds[-1] == "finished" and "progress" in kinds
    assert events[-1].epoch == 6 and events[-1].figures["loss"] == run.rows[-1]["loss"]


def test_evaluations_and_checkpoints_come_when_asked(tmp_path, monkeypatch):
    saved: list[int] = []
    write = store.write_checkpoint
    monkeypatch.setattr(
        store, "write_checkpoint", lambda p, c: (saved.append(c["step"]), write(p, c))
    )
    engine.train(spec(epochs=7, evaluate_every=3, checkpoint_every=2), tmp_path)
    assert [row["epoch"] for row in rows(tmp_path)] == [0, 3, 6, 7]
    assert saved == [8, 16, 24, 28]


@pytest.mark.parametrize("name", ["sonex", "sox", "alexr2"])
def test_stopped_at_any_step_it_ends_the_same(name, tmp_path):
    """Also twice, and in the middle of an epoch and of an inner loop."""
    one = spec(name)
    engine.train(one, tmp_path / "whole")
    for cut in (1, 5, 8, 23, 24):
        folder = tmp_path / f"cut-{cut}"
        outcome = engine.train(one, folder, stop=after(cut))
        assert outcome.kind == ("stopped" if cut < 24 else "finished")
        assert torch.load(folder / "checkpoint.pt", weights_only=True)["step"] == cut
        if cut == 5:
            torch.manual_seed(99)
            assert engine.train(one, folder, stop=after(2)).kind == "stopped"
        torch.manual_seed(98)
        assert engine.train(one, folder).kind == "finished"
        assert equal(weights(folder), weights(tmp_path / "whole")), cut
        assert rows(folder) == rows(tmp_path / "whole")
        assert result(folder) == result(tmp_path / "whole")
    again = store.load_run(tmp_path / "cut-5").environment["resumed"]
    assert ["at step 5" in again[0], "at step 7" in again[1]] == [True, True]


def test_killed_between_two_files(whole, tmp_path):
    """After an evaluation, before the first checkpoint, and before the result."""
    engine.train(spec(), tmp_path / "a", stop=after(9))
    old = (tmp_path / "a/checkpoint.pt").read_bytes()
    engine.train(spec(), tmp_path / "a", stop=after(9))  # rows up to epoch 4
    (tmp_path / "a/checkpoint.pt").write_bytes(old)
    engine.train(spec(), tmp_path / "a", stop=after(1))
    assert rows(tmp_path / "a") == rows(whole)[:3], "later rows are made again"
    shutil.copytree(whole, tmp_path / "late")
    (tmp_path / "late/result.json").unlink()
    (tmp_path / "early").mkdir()
    shutil.copy(whole / "config.yaml", tmp_path / "early")
    (tmp_path / "early/metrics.jsonl").write_text("")
    for name in ("a", "late", "early"):
        engine.train(spec(), tmp_path / name)
        assert rows(tmp_path / name) == rows(whole)
        assert equal(weights(tmp_path / name), weights(whole))
        assert result(tmp_path / name) == result(whole)
    engine.train(spec(), tmp_path / "late", on_event=fail)  # nothing to do


def test_the_seed_and_the_config_matter(whole, tmp_path):
    """Otherwise the comparisons above would compare nothing."""
    for place, other in enumerate((spec(seed=1), spec(shape=Shape(noise=0.1)))):
        engine.train(other, tmp_path / str(place))
        assert not equal(weights(tmp_path / str(place))["model"], weights(whole)["model"])


def test_every_global_generator_comes_back():
    def draw() -> tuple[float, float, float, float]:
        return random.gauss(0, 1), np.random.normal(), np.random.rand(), torch.randn(()).item()

    engine.seed_all(3)
    first = draw()  # NumPy now holds the second of two normal draws
    state = engine.random_state()
    expected = [draw(), draw()]
    engine.seed_all(4)
    assert draw() not in expected
    engine.restore_random(state)
    assert [draw(), draw()] == expected
    engine.seed_all(3)
    assert draw() == first


def test_a_folder_with_another_run_is_refused_untouched(tmp_path):
    engine.train(spec(), tmp_path, stop=after(3))
    before = {each: each.read_bytes() for each in tmp_path.iterdir()}
    with pytest.raises(FolderError, match=r"`seed` was 0 and is 1 now.*`config.epochs` was 6 and"):
        engine.train(spec(seed=1, epochs=5), tmp_path)
    assert {each: each.read_bytes() for each in tmp_path.iterdir()} == before
    engine.train(spec(checkpoint_every=1), tmp_path)  # does not change the run


# --- checkpoints --------------------------------------------------------------------------------


def test_a_checkpoint_of_others_is_refused(tmp_path, monkeypatch):
    engine.train(spec(), tmp_path / "a", stop=after(3))
    engine.train(spec(seed=1), tmp_path / "b", stop=after(3))
    monkeypatch.setenv("TOY_DATA", "other data")
    with pytest.raises(FolderError, match=r"the data were toy 5 and are other data now"):
        engine.train(spec(), tmp_path / "a")
    monkeypatch.delenv("TOY_DATA")
    shutil.copy(tmp_path / "b/checkpoint.pt", tmp_path / "a/checkpoint.pt")
    with pytest.raises(FolderError, match=r"checkpoint\.pt is that of another run: `seed` was 1"):
        engine.train(spec(), tmp_path / "a")


class Trap:
    def __reduce__(self):
        return pytest.fail, ("code in a checkpoint was run",)


def test_no_code_in_a_checkpoint_is_run(tmp_path):
    """Not even where its checksum is right."""
    engine.train(spec(), tmp_path, stop=after(3))
    path = tmp_path / "checkpoint.pt"
    store.write_checkpoint(path, torch.load(path, weights_only=True) | {"rows": Trap()})
    with pytest.raises(FolderError, match="cannot be read"):
        engine.train(spec(), tmp_path)


def damages(content: bytes) -> list[bytes]:
    """Fifty random bit flips, and files that were cut off."""
    draw = random.Random(5)
    flipped = []
    for _ in range(50):
        place = draw.randrange(8 * len(content))
        other = bytearray(content)
        other[place // 8] ^= 1 << place % 8
        flipped.append(bytes(other))
    return [*flipped, b"", b"no checkpoint", content[: len(content) // 2], content[:-1]]


def test_no_damage_goes_unnoticed(tmp_path):
    engine.train(spec(), tmp_path, stop=after(11))
    path = tmp_path / "checkpoint.pt"
    for damaged in damages(path.read_bytes()):
        path.write_bytes(damaged)
        with pytest.raises(FolderError, match=r"checkpoint\.pt cannot be read.*Delete"):
            engine.train(spec(), tmp_path)
        assert path.read_bytes() == damaged, "untouched"


# --- ends before the end ------------------------------------------------------------------------


def diverging(**changes: Any) -> RunSpec:
    one = spec("sox", **changes)
    return replace(one, method=replace(one.method, lr=1e80))


def test_a_run_that_diverges_is_recorded_with_its_last_finite_figures(tmp_path):
    """Here fcco refuses the inner value."""
    events: list[Event] = []
    one = diverging(epochs=200, evaluate_every=100)
    outcome = engine.train(one, tmp_path, on_event=events.append)
    assert outcome.kind == "diverged" and "NaN or infinite" in outcome.text
    run = store.load_run(tmp_path)
    assert run.diverged == outcome.text == events[-1].text
    assert run.result is not None and run.result["final"] == run.rows[-1]
    assert run.result["end"] == {} and len(run.rows) == 1
    assert engine.train(one, tmp_path).kind == "diverged"


def test_figures_that_are_not_finite_end_a_run(tmp_path, monkeypatch):
    class Problem(ToyProblem):
        def start(self, method, seed):
            training = super().start(method, seed)
            evaluate = training.evaluate

            def odd():
                bad = {"excess": [0.0, float("nan")]} if training.done >= 8 else {}
                return evaluate() | bad

            monkeypatch.setattr(training, "evaluate", odd)
            return training

    outcome = engine.train(spec(), tmp_path, Problem(spec().config))  # type: ignore[arg-type]
    assert outcome.kind == "diverged" and outcome.text == "not finite at epoch 2: excess"
    assert [row["epoch"] for row in rows(tmp_path)] == [0, 1]


def test_other_errors_are_no_divergence(tmp_path):
    """Whatever their words are."""
    with pytest.raises(ValueError, match="infinite or NaN"):
        engine.train(spec(break_at=5), tmp_path)
    assert not (tmp_path / "result.json").exists()
