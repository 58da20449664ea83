"""Two processes under DDP and FSDP2 equal one process on the global batch.

Two workers (`distributed_cases.py`) start once, run every case under every strategy and leave their
results in files; the tests compare these with the same case in this process.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed_cases as cases
import numpy as np
import pytest
import torch
from distributed_cases import CASES, RUNNABLE, STRATEGIES, WORLD, Record
from reference_contrastive import loop_means
from test_reference_losses import check_ranks

from fcco import _distributed

TOLERANCE, TIME_LIMIT = 1e-10, 150
SHARDED = STRATEGIES[1:]
RUNS = [(strategy, name) for strategy in STRATEGIES for name in cases.names_of(strategy)]

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)


def start(folder: Path) -> None:
    """Run the workers of both ranks; leave their results and what they said in `folder`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    workers = []
    for rank in range(WORLD):
        with open(folder / f"{rank}.txt", "w") as log:
            command = [sys.executable, cases.__file__, "--rank", str(rank), "--folder", str(folder)]
            workers.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    deadline = time.monotonic() + TIME_LIMIT
    for process in workers:
        try:
            process.wait(timeout=max(deadline - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    (folder / "done").touch()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[Any]]:
    """(strategy, case) -> what each rank has to say about it."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # processes of pytest-xdist share one start
    folder = base / "distributed"
    try:
        folder.mkdir()
    except FileExistsError:
        deadline = time.monotonic() + TIME_LIMIT + 30
        while not (folder / "done").exists() and time.monotonic() < deadline:
            time.sleep(0.2)
    else:
        start(folder)
    said = "\n".join(f.read_text()[-2000:] for f in sorted(folder.glob("*.txt")))
    files = [folder / f"{rank}.pt" for rank in range(WORLD)]
    results = [torch.load(file) if file.exists() else {} for file in files]

    def look_up(strategy: str, name: str) -> list[Any]:
        if strategy not in RUNNABLE:
            pytest.skip("FSDP2 on the CPU needs torch 2.10")
        found = [result.get(f"{strategy}/{name}") for result in results]
        for rank, each in enumerate(found):
            if each is None:
                pytest.fail(f"{strategy}/{name} did not run on rank {rank}.\n{said}")
            if "failed" in each:
                pytest.fail(f"rank {rank}: {each['failed']}\n{said}")
        return found

    return look_up


@functools.cache
def alone(name: str, corrected: bool = True, steps: int = cases.STEPS) -> Record:
    """The same case in one process, on the batches of all ranks together."""
    whole = list(range(WORLD))
    return cases.train(CASES[name], lambda model: model, whole, corrected=corrected, steps=steps)


def assert_close(one: Any, two: Any, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(one, two, rtol=0, atol=tolerance, equal_nan=True)


def apart(one: Record, two: Record) -> float:
    pairs = zip(one.parameters, two.parameters, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize(("strategy", "name"), RUNS)
def test_equals_one_process(ranks, strategy, name):
    said, reference = ranks(strategy, name), alone(name)
    assert reference.moved > 0.02, "the case must move"
    tolerance = TOLERANCE if CASES[name].dtype == torch.float64 else 1e-5
    for result in said:
        assert_close(result["parameters"], reference.parameters, tolerance)
        assert_close(result["state"], reference.state, tolerance)
        assert_close(result["previous"], reference.previous, tolerance)
    # g0 of a rank is that of its own samples: the mean over ranks is the loss.
    mean = torch.tensor([result["loss"] for result in said], dtype=torch.float64).mean(0)
    assert_close(mean, torch.tensor(reference.loss, dtype=torch.float64), tolerance)
    first, second = (result["state"] for result in said)
    assert first.keys() == second.keys()
    for key, value in first.items():  # the same trackers to the last bit
        torch.testing.assert_close(value, second[key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.sensitive])
def test_the_correction_matters(name):
    """Otherwise an evaluation at the wrong point would go unnoticed."""
    assert apart(alone(name), alone(name, corrected=False)) > 1e-5


@pytest.mark.parametrize(
    ("strategy", "where"),
    [
        ("ddp", "value"), ("ddp", "gradient batch"), ("ddp", "surrogate"), ("ddp", "second term"),
        ("ddp", "score"), ("ddp", "loss beside scores"),
        ("fsdp-layers", "value"), ("fsdp-unsharded", "value"),
    ],
)  # fmt: skip
def test_nan_on_one_rank(ranks, strategy, where):
    """Every rank refuses the batch, nothing has changed, and training goes on."""
    said = ranks(strategy, f"nan in {where}")
    assert said[0]["text"] == said[1]["text"]
    assert "NaN or infinite" in said[0]["text"] and "nothing was updated" in said[0]["text"]
    if where == "second term":
        assert "`mean`" in said[0]["text"]
    reference = alone(cases.NAN_IN.get(where, "sonex"), steps=10)
    for result in said:
        assert result["unchanged"]
        assert_close(result["parameters"], reference.parameters)
        assert_close(result["state"], reference.state)


def test_ranks_in_different_calls_are_refused_and_can_go_on(ranks):
    for result in ranks("ddp", "out of step"):
        assert "different calls" in result["text"] and result["unchanged"]
        assert_close(result["parameters"], alone("sonex", steps=10).parameters)
        assert_close(result["state"], alone("sonex", steps=10).state)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resume_from_a_checkpoint_per_rank(ranks, strategy):
    for result in ranks(strategy, "resume"):
        assert result == {"previous": True, "parameters": True, "state": True}


@pytest.mark.parametrize("strategy", SHARDED)
def test_other_parameters_for_a_while_on_shards(ranks, strategy):
    for result in ranks(strategy, "anchored"):
        assert result["same"] and result["apart"]
        assert_close(result["parameters"], alone("alexr2").parameters)
    for result in ranks(strategy, "loading"):
        assert result == {"moved": True, "back": True}


def test_two_ranks_share_the_rows_of_reference_losses_or_each_have_all(ranks):
    check_ranks(ranks("ddp", "reference losses"))


def test_process_groups(ranks):
    said = ranks("ddp", "process groups")
    model = cases.make_model()
    objective = CASES["sonex"].build(model, True)
    for number in range(3):
        cases.step(CASES["sonex"], objective, model, number, [0])
    expected = cases.tensors_of(objective)
    for name in ("none", "alone", "not a member"):
        assert_close(said[0][name], expected)
    pooled = said[0]["everyone"]
    assert cases.same(pooled, said[1]["everyone"]) and not cases.same(pooled, expected)


def test_models_under_ddp(ranks):
    """Batch normalisation, dropout, other buffers, and DDP's own options."""
    said = ranks("ddp", "batch norm")
    for result in said:
        assert result["finite"] and result["random"] and result["buffers"]
        assert result["counted"] == 6, "the evaluation at w_{t-1} is no forward pass of its own"
    assert_close(said[0]["parameters"], said[1]["parameters"])
    assert_close(said[0]["state"], said[1]["state"])
    for result in ranks("ddp", "buffers"):
        assert result == {"same": True, "unchanged": True}
    for result in ranks("ddp", "options"):
        for name, run in result.items():
            expected = alone(name.split(",")[0])
            assert_close(run["parameters"], expected.parameters)
            assert_close(run["state"], expected.state)


def test_fsdp_with_mixed_precision(ranks):
    for result in ranks("fsdp-layers", "mixed precision"):
        assert result == {"same": True, "dtype": "torch.float32"}


def test_the_older_fsdp_is_refused_when_a_correction_needs_it(ranks):
    for result in ranks("fsdp-layers", "fsdp 1"):
        assert all("fully_shard" in text for text in result["texts"])
        assert_close(result["state"], alone("sonex", corrected=False, steps=3).state)


def test_pairs_without_negatives_are_refused_by_all_ranks(ranks):
    local = loop_means(cases.X[:5], cases.T[:5], 0.8)
    for result in ranks("ddp", "contrastive values"):
        assert "leaves pairs without a negative" in result["one label"]
        assert "at least two pairs" in result["one pair"] and "has: 1" in result["one pair"]
        np.testing.assert_allclose(result["local"], local, atol=1e-12)


WAITING = """
import sys, datetime, torch, torch.distributed as dist
import fcco, fcco._distributed
fcco._distributed.WAIT = 0.5
rank = int(sys.argv[1])
limit = datetime.timedelta(seconds=4)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2,
                        timeout=limit)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dro = fcco.CVaRGroupDRO(model, optimizer, 2, 0.5)
dist.barrier()  # imports take one rank longer on a busy machine
for step in range(3 - rank):  # rank 0 makes a call more
    dro(lambda: model(torch.ones(4, 1)).squeeze(1), torch.arange(4) % 2)
import time
time.sleep(3)  # rank 1 is busy with something else
"""


def test_a_rank_that_waits_for_the_others_says_so(tmp_path):
    """One call more on one rank: torch says nothing until its timeout, half an hour."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", WAITING]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "ranks")],
            stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [worker.communicate(timeout=60)[1] for worker in workers]
    assert "Rank 0 has waited" in said[0] and "same calls" in said[0]
    assert "waited" not in said[1]


def test_a_host_that_waits_for_the_result_says_so_too(monkeypatch, caplog):
    """On a GPU a collective returns at once, and reading what it gives waits."""
    monkeypatch.setattr(_distributed, "WAIT", 0.1)
    monkeypatch.setattr(_distributed, "patience", _distributed._Patience())
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 0)
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: (time.sleep(0.5), tolist(x))[1])
    assert _distributed.sum_over_ranks(torch.ones(2), _distributed.Group(None, 2)) == [1, 1]
    assert "Rank 0 has waited" in caplog.text
