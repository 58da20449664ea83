"""Several processes for one run, as torchrun starts them.

One start is shared by all tests: `inside` runs the checks of `ranks_cases.py` in two processes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ranks_cases
import torch
from fcco_experiments import config, distributed, environment, store
from fcco_experiments import strategy as strategies
from fcco_experiments.config import ConfigError
from fcco_experiments.run import engine, ranks
from ranks_cases import spec
from test_experiments_engine import equal, result, rows, weights

TESTS, LIMIT = Path(__file__).parent, 180

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
        reason="needs torch.distributed with gloo",
    ),
]


def torchrun(*words: str, at: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = (*command, "--nproc-per-node", "2", *words)
    running = subprocess.Popen(
        words, cwd=at, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        said, told = running.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        running.terminate()  # it ends its processes, which a kill would leave
        said, told = running.communicate()
    return subprocess.CompletedProcess(words, running.returncode, said, told)


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], Any]:
    """The folder, what each rank found, and how torchrun ended."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # processes of pytest-xdist share one start
    at = base / "ranks-inside"
    try:
        at.mkdir()
    except FileExistsError:
        end = time.monotonic() + LIMIT
        while not (at / "ended.json").exists() and time.monotonic() < end:
            time.sleep(0.2)
    else:
        (at / "config.yaml").write_text(config.dump(ranks_cases.build()))
        done = torchrun(str(TESTS / "ranks_cases.py"), ".", at=at)
        store.write_json(at / "ended.json", {"code": done.returncode, "stderr": done.stderr})
    ended = store.read_json(at / "ended.json")
    files = [at / f"{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), ended["stderr"][-3000:]
    return at, [json.loads(file.read_text()) for file in files], ended


def test_what_one_rank_refuses_all_refuse_and_one_says(inside):
    first, second = (found["refusals"] for found in inside[1])
    for own in (first, second):
        assert own["full"]["kind"] == "FolderError" and "has a run already" in own["full"]["text"]
        assert own["nowhere"]["kind"] == "LoadError"
        assert own["nowhere"]["text"] == "rank 1 has no file"
        assert [each["kind"] for each in own["ended"]] == ["failed", "failed"], "the next is tried"
        assert "data of rank 1, data 1, are not those of rank 0" in own["ended"][0]["text"]
        assert own["plan"]["kind"] == "ConfigError"
        assert "`0.config.epochs` was 4 and is 5 now" in own["plan"]["text"]
    assert first["kinds"].count("failed") == 2 and "failed" not in second["kinds"]
    assert "On rank 0" not in (inside[0] / "different/first/seed-0/failure.txt").read_text()
    both = [found["commands"] for found in inside[1]]
    done, again, wrong = zip(*both, strict=True)
    assert [each["code"] for each in done] == [0, 0] and "first" in done[0]["stdout"]
    assert [each["code"] for each in again] == [2, 2] and "has runs already" in again[0]["stderr"]
    assert [each["code"] for each in wrong] == [2, 2] and "`epochs` must be" in wrong[0]["stderr"]
    assert all(each[1]["stdout"] + each[1]["stderr"] == "" for each in (done, again, wrong))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs in this process."""
    at = tmp_path_factory.mktemp("alone")
    for name in ranks_cases.build().methods:
        assert engine.train(spec(name), at / name).kind == "finished"
    return at


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(
        torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64),
        rtol=0, atol=1e-10,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["first", "second"])
def test_two_ranks_equal_one_process(inside, alone, name):
    one, two = alone / name, inside[0] / "whole" / name
    assert [row["step"] for row in rows(one)] == [row["step"] for row in rows(two)]
    for before, after in zip(rows(one), rows(two), strict=True):
        close(before["groups"], after["groups"])
    assert rows(one)[0]["loss"] - rows(one)[-1]["loss"] > 0.05, "the case must move"
    close(result(one)["end"]["weights"], result(two)["end"]["weights"])
    draws = result(two)["end"]["draws"]
    assert len(set(draws)) == 2 and draws[0] == result(one)["end"]["draws"][0]
    assert store.load_run(two).environment["processes"] == 2
    assert "processes" not in store.load_run(one).environment


@pytest.mark.parametrize("name", ["erm", "alexr2"])
def test_group_dro_on_two_ranks_equals_one_process(inside, tmp_path, name):
    """In float32, so up to its rounding."""
    assert engine.train(ranks_cases.spec_group_dro(name), tmp_path / name).kind == "finished"
    one, two = rows(tmp_path / name), rows(inside[0] / "whole" / name)
    assert abs(one[0]["train_cvar"] - one[-1]["train_cvar"]) > 0.05, "the case must move"
    for key in ("train_cvar", "val_cvar", "test_loss", "losses"):
        for before, after in zip(one, two, strict=True):
            assert before[key] == pytest.approx(after[key], abs=1e-5), key


@pytest.mark.parametrize("name", ["ap", "tpauc", "ndcg"])
def test_x_risks_on_two_ranks_equal_one_process(inside, tmp_path, name):
    """The order of the scores is the same, unless rounding turns a pair round.

    Two-way partial AUC has a kink: in single precision the order of the samples in a batch alone
    moves weights by 0.07 within 128 steps (by 3e-10 in double precision, where the library's own
    tests compare).
    """
    assert engine.train(ranks_cases.spec_x_risk(name), tmp_path / name).kind == "finished"
    one, two = rows(tmp_path / name), rows(inside[0] / "whole" / name)
    key = "train_ndcg" if name == "ndcg" else "train_ap"
    assert abs(one[0][key] - one[-1][key]) > 0.05, "the case must move"
    for before, after in zip(one, two, strict=True):
        assert before[key] == pytest.approx(after[key], abs=0.02 if name == "tpauc" else 1e-4)


@pytest.mark.parametrize("name", ["first", "second"])
def test_stopped_by_one_rank_and_resumed_it_ends_the_same(inside, name):
    at, found, _ = inside
    for own in found:
        assert own["endings"][name] == ["stopped", "stopped", "finished"]
    whole, cut = at / "whole" / name, at / "cut" / name
    assert equal(weights(cut), weights(whole)) and rows(cut) == rows(whole)
    assert result(cut) == result(whole), "the random draws of each rank too"
    again = store.load_run(cut).environment["resumed"]
    assert len(again) == 2


def test_a_signal_or_a_divergence_on_one_rank_ends_the_run_on_all(inside):
    at, found, _ = inside
    for own in found:
        assert own["endings"]["nan"] == ["diverged", "after 7 steps: the loss is NaN"]
        assert own["endings"]["term"] == ["stopped", "stopped"]
        assert own["endings"]["odd"] == "finished", "the figures of rank 0 count"
    assert store.read_result(at / "nan")["diverged"] == "after 7 steps: the loss is NaN"
    held = torch.load(at / "term/first/seed-0/checkpoint.pt", weights_only=True)
    assert held["step"] >= 8 and not (at / "term/second").exists()


def test_a_failure_on_one_rank_ends_all_and_its_traceback_is_kept(inside):
    at, _, ended = inside
    assert ended["code"] != 0
    told = [line for line in ended["stderr"].splitlines() if line.startswith("FAILED: ")]
    assert told == ["FAILED: broken at second:1:7 (rank 1 of 2)"]
    text = (at / "broken/second/seed-0/failure.txt").read_text()
    assert "Traceback" in text and text.rstrip().endswith("RuntimeError: broken at second:1:7")
    assert not (at / "broken/first").exists(), "the ranks were out of step"


def test_the_number_of_ranks_may_change(inside, alone, tmp_path):
    """From two ranks to this process."""
    shutil.copytree(inside[0] / "term/first/seed-0", tmp_path / "first")
    held = torch.load(tmp_path / "first/checkpoint.pt", weights_only=True)
    assert len(held["random"]) == 2 and not equal(*held["random"])
    assert engine.train(spec(), tmp_path / "first", resume=True).kind == "finished"
    close(result(tmp_path / "first")["end"]["weights"], result(alone / "first")["end"]["weights"])
    assert result(tmp_path / "first")["end"]["draws"] == result(alone / "first")["end"]["draws"]
    (again,) = store.load_run(tmp_path / "first").environment["resumed"]
    assert again.endswith("processes 1")


# --- a single process ---------------------------------------------------------------------------


def test_whether_to_stop_is_not_asked_after_every_step(monkeypatch):
    """Steps of a quarter of a millisecond: soon there is one question for 2,000 of them."""
    now, asked = [0.0], list[float]()

    def gather(value: Any) -> list[Any]:
        asked.append(now[0])
        return [value, value]

    def work() -> None:
        now[0] += 0.00025

    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_gather", gather)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    consensus = ranks.Consensus(lambda: False)
    for step in range(10_000):
        assert not consensus.step(work, step, agree=False)
    assert len(asked) < 20
    assert asked[-1] - asked[-2] == pytest.approx(0.5, abs=0.01) and now[0] - asked[-1] < 0.51
    consensus.step(work, 10_000, agree=True)
    assert asked[-1] == now[0], "before other messages they agree"


def test_a_single_process_is_rank_0_of_1():
    with distributed.process_group("cuda"):
        assert (distributed.world_size(), distributed.rank()) == (1, 0) and distributed.is_first()
        assert distributed.any_rank(True) and not distributed.any_rank(False)
        assert distributed.run_on_first(lambda: 3) == distributed.run_on_all(lambda: 3) == 3
        with pytest.raises(ZeroDivisionError) as caught:
            distributed.run_on_each_machine(lambda: 1 / 0)
        assert distributed.raised_on_all(caught.value)
    model = torch.nn.Linear(2, 1)
    assert strategies.wrap(model, "cpu") is model is strategies.unwrapped(model)


def test_the_environment_of_torchrun(monkeypatch):
    assert environment.describe()["device"] == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert environment.describe(torch.device("cuda", 1))["device"] == "cuda: GPU 1"
    assert (
        distributed.device("auto") == torch.device("cuda", 1)
        and distributed.device("cpu").type == "cpu"
    )
    monkeypatch.setattr(sys, "argv", ["/x/fcco/__main__.py", "run", "a b", "--overwrite"])
    said = {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for key, value in (said | {"MASTER_ADDR": "x", "GROUP_WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(key, value)
    assert not distributed.is_first() and distributed.device() == torch.device("cuda", 1)
    assert environment.command("--resume") == (
        "torchrun --nnodes 4 --nproc-per-node 2 -m fcco_experiments run 'a b' --resume"
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="3 processes on a machine with 2 GPUs"):
        distributed.device()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert distributed.device().type == "cpu"
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        distributed.device("cuda")
