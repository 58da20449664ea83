"""Continual learning on two processes equals one process."""

from __future__ import annotations

import copy
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from continual_cases import METHODS, one_thread, problem, steps  # noqa: F401 (a fixture)
from fcco_experiments import distributed

CASES = ("sonex", "replay", "alexr2")


def figures(name: str) -> dict[str, Any]:
    """After some steps on batches of unequal parts, and after going on from a checkpoint."""
    own = problem(batch=7, negatives=9)
    run, again = own.start(METHODS[name], 0), own.start(METHODS[name], 0)
    rows = [run.evaluate()]
    steps(run, 7)  # in the middle of a round of alexr2
    again.load_state_dict(copy.deepcopy(run.state_dict()))
    rows += [run.evaluate(), steps(run, 5).evaluate()]
    assert steps(again, 5).evaluate() == rows[-1], "resumed"
    return {"rows": rows, "old": run.old_losses.value.tolist()}


def work(rank: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with distributed.process_group():
        torch.save({name: figures(name) for name in CASES}, f"{folder}/{rank}.pt")
    # Threads of DDP outlive its group: one that asks for the interpreter while it shuts down aborts
    # the process, now and then.
    os._exit(0)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_two_ranks_equal_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, so up to its rounding; the old model is trained by one rank alone."""
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first == second, "the same figures on every rank"
    assert len(list((tmp_path / "cache/data/old").glob("scenes-synthetic-0-*.pt"))) == 1
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "alone"))
    for name, found in first.items():
        one = figures(name)
        assert found["old"] == one["old"]
        assert one["rows"][0]["objective"] - one["rows"][2]["objective"] > 0.01, "it must move"
        for before, after in zip(one["rows"], found["rows"], strict=True):
            assert set(before) == set(after)
            for key, value in before.items():
                assert after[key] == pytest.approx(value, abs=3e-5), key
