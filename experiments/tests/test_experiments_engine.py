"""One run: evaluations, checkpoints, a result, and going on bitwise from wherever it stopped."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fcco_experiments import checkpoint, config, engine, store
from fcco_experiments.store import Event, FolderError, RunSpec
from toy_task import TASK, Shape, ToyConfig, ToyProblem

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
    held = torch.load(folder / "checkpoint.pt", weights_only=True)
    return held["training"]


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


def test_a_run_leaves_everything_that_was_promised(tmp_path):
    events: list[Event] = []
    one = spec()
    outcome = engine.train(one, tmp_path / "a", on_event=events.append)
    assert outcome.kind == "finished" and outcome.run == "sonex/seed-0"
    names = {each.name for each in (tmp_path / "a").iterdir()}
    assert names == {
        "config.yaml", "environment.json", "metrics.jsonl", "checkpoint.pt", "result.json", ".lock",
    }  # fmt: skip
    run = store.load_run(tmp_path / "a")
    assert (run.name, run.seed, run.method["lr"]) == ("sonex", 0, 0.02)
    assert "methods" not in run.config and run.config["shape"]["noise"] == 0.2
    assert [row["epoch"] for row in run.rows] == [0, 1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in run.rows] == [0, 4, 8, 12, 16, 20, 24]
    assert [row["samples"] for row in run.rows] == [0, 32, 64, 96, 128, 160, 192]
    seconds = [row["seconds"] for row in run.rows]
    assert seconds[0] == 0 and seconds == sorted(seconds) and seconds[-1] > 0
    assert run.result is not None and run.result["final"] == run.rows[-1]
    assert run.result["samples"] == 192 and run.result["diverged"] is None
    assert run.result["fingerprint"] == "toy 5" and run.result["warnings"] == []
    assert run.result["end"]["norm"] == pytest.approx(
        weights(tmp_path / "a")["model"]["weight"].norm().item()
    )
    assert run.result["end"]["unknown"] != run.result["end"]["unknown"]  # NaN comes back
    assert {"python", "torch", "numpy", "fcco", "platform", "cores", "threads", "device", "command",
            "start", "revision"} <= run.environment.keys()  # fmt: skip
    kinds = [event.kind for event in events]
    assert kinds[0] == "started" and kinds[-1] == "finished" and "progress" in kinds
    assert events[-1].epoch == 6 and events[-1].figures["loss"] == run.rows[-1]["loss"]


def test_evaluations_and_checkpoints_come_when_asked(tmp_path, monkeypatch):
    saved: list[int] = []
    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda p, c: (saved.append(c.step), save(p, c)))
    engine.train(spec(epochs=7, evaluate_every=3, checkpoint_every=2), tmp_path / "a")
    assert [row["epoch"] for row in rows(tmp_path / "a")] == [0, 3, 6, 7]
    assert saved == [8, 16, 24, 28]


@pytest.mark.parametrize("name", ["sonex", "sox", "alexr2"])
def test_stopped_at_any_step_it_ends_the_same(name, tmp_path):
    """Also twice, and in the middle of an epoch and of an inner loop."""
    one = spec(name)
    engine.train(one, tmp_path / "whole")
    assert not equal(weights(tmp_path / "whole"), {})
    for cut in (1, 2, 5, 8, 9, 23, 24):
        folder = tmp_path / f"cut-{cut}"
        outcome = engine.train(one, folder, stop=after(cut))
        assert outcome.kind == ("stopped" if cut < 24 else "finished")
        assert torch.load(folder / "checkpoint.pt", weights_only=True)["step"] == cut
        if cut == 5:
            torch.manual_seed(99)
            assert engine.train(one, folder, resume=True, stop=after(2)).kind == "stopped"
        torch.manual_seed(98)
        assert engine.train(one, folder, resume=True).kind == "finished"
        assert equal(weights(folder), weights(tmp_path / "whole")), cut
        assert rows(folder) == rows(tmp_path / "whole")
        assert result(folder) == result(tmp_path / "whole")
    again = store.load_run(tmp_path / "cut-5").environment["resumed"]
    assert ["at step 5" in again[0], "at step 7" in again[1]] == [True, True]


def test_rows_after_the_checkpoint_are_made_again(tmp_path):
    """Killed between an evaluation and the next checkpoint."""
    one = spec()
    engine.train(one, tmp_path / "whole")
    engine.train(one, tmp_path / "a", stop=after(9))
    old = (tmp_path / "a/checkpoint.pt").read_bytes()
    engine.train(one, tmp_path / "a", resume=True, stop=after(9))  # rows up to epoch 4
    (tmp_path / "a/checkpoint.pt").write_bytes(old)
    assert len(rows(tmp_path / "a")) == 5
    engine.train(one, tmp_path / "a", resume=True, stop=after(1))
    assert rows(tmp_path / "a") == rows(tmp_path / "whole")[:3]
    engine.train(one, tmp_path / "a", resume=True)
    assert rows(tmp_path / "a") == rows(tmp_path / "whole")


def test_killed_before_the_first_checkpoint_or_before_the_result(tmp_path):
    one = spec()
    engine.train(one, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "late")
    (tmp_path / "late/result.json").unlink()
    engine.train(one, tmp_path / "whole", resume=True, on_event=fail)  # nothing to do
    engine.train(one, tmp_path / "late", resume=True)
    assert result(tmp_path / "late") == result(tmp_path / "whole")
    early = tmp_path / "early"
    early.mkdir()
    shutil.copy(tmp_path / "whole/config.yaml", early)
    (early / "metrics.jsonl").write_text("")
    engine.train(one, early, resume=True)
    assert equal(weights(early), weights(tmp_path / "whole"))


def test_the_seed_and_the_config_matter(tmp_path):
    """Otherwise the comparisons above would compare nothing."""
    engine.train(spec(), tmp_path / "a")
    for place, other in enumerate((spec(seed=1), spec(shape=Shape(noise=0.1)))):
        folder = tmp_path / str(place)
        engine.train(other, folder)
        assert not equal(weights(folder)["model"], weights(tmp_path / "a")["model"])


def test_a_folder_with_a_run_is_refused_untouched(tmp_path):
    engine.train(spec(), tmp_path, stop=after(3))
    before = {each: each.read_bytes() for each in tmp_path.iterdir()}
    with pytest.raises(FolderError, match=r"--resume.*--overwrite"):
        engine.train(spec(), tmp_path)
    with pytest.raises(FolderError, match=r"`seed` was 0 and is 1 now.*`config.epochs` was 6 and"):
        engine.train(spec(seed=1, epochs=5), tmp_path, resume=True)
    assert {each: each.read_bytes() for each in tmp_path.iterdir()} == before
    engine.train(spec(checkpoint_every=1), tmp_path, resume=True)  # does not change the run


def test_a_foreign_or_broken_checkpoint_is_refused(tmp_path, monkeypatch):
    engine.train(spec(), tmp_path / "a", stop=after(3))
    engine.train(spec(seed=1), tmp_path / "b", stop=after(3))
    monkeypatch.setenv("TOY_DATA", "other data")
    with pytest.raises(FolderError, match=r"the data were toy 5 and are other data now"):
        engine.train(spec(), tmp_path / "a", resume=True)
    monkeypatch.delenv("TOY_DATA")
    path = tmp_path / "a/checkpoint.pt"
    whole = path.read_bytes()
    shutil.copy(tmp_path / "b/checkpoint.pt", path)
    with pytest.raises(FolderError, match=r"checkpoint\.pt is that of another run: `seed` was 1"):
        engine.train(spec(), tmp_path / "a", resume=True)
    for broken in (whole[: len(whole) // 2], b"", b"not a checkpoint"):
        path.write_bytes(broken)
        with pytest.raises(FolderError, match=r"a/checkpoint\.pt cannot be read.*Delete"):
            engine.train(spec(), tmp_path / "a", resume=True)
        assert path.read_bytes() == broken
    path.write_bytes(whole)
    engine.train(spec(), tmp_path / "a", resume=True)


def test_a_checkpoint_holds_no_code(tmp_path):
    engine.train(spec(), tmp_path, stop=after(3))

    class Trap:
        def __reduce__(self):
            return pytest.fail, ("code in a checkpoint was run",)

    held = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    torch.save(held | {"rows": Trap()}, tmp_path / "checkpoint.pt")
    with pytest.raises(FolderError, match="cannot be read"):
        engine.train(spec(), tmp_path, resume=True)


def diverging(**changes: Any) -> RunSpec:
    one = spec("sox", **changes)
    return replace(one, method=replace(one.method, lr=1e80))


def test_a_run_that_diverges_is_recorded_with_its_last_finite_figures(tmp_path):
    """Here fcco refuses the inner value."""
    events: list[Event] = []
    one = diverging(epochs=200, evaluate_every=100)
    outcome = engine.train(one, tmp_path, on_event=events.append)
    assert outcome.kind == "diverged" and "NaN or infinite" in outcome.text
    held = store.load_run(tmp_path)
    assert held.diverged == outcome.text == events[-1].text
    assert held.result is not None and held.result["final"] == held.rows[-1]
    assert held.result["end"] == {} and len(held.rows) == 1
    assert engine.train(one, tmp_path, resume=True).kind == "diverged"


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


def test_other_errors_are_not_hidden(tmp_path):
    with pytest.raises(ValueError, match="the shapes do not fit"):
        engine.train(spec(break_at=5), tmp_path)
    assert not (tmp_path / "result.json").exists()


def test_scalars_for_tensorboard(tmp_path):
    board = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    engine.train(spec(), tmp_path, stop=after(9), tensorboard=True)
    engine.train(spec(), tmp_path, resume=True, tensorboard=True)
    read = board.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = [(each.step, each.value) for each in read.Scalars("loss")]
    expected = [(row["step"], row["loss"]) for row in rows(tmp_path)]
    assert scalars == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]
    assert len(read.Scalars("excess/0")) == len(expected)


def test_configs_are_of_the_toy_task():
    assert isinstance(BASE, ToyConfig)
