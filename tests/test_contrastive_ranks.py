"""Two and three processes compute what one process computes on the global batch."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import contrastive_cases as cases
import numpy as np
import pytest
import torch
from contrastive_cases import CASES, SHARDED, STEPS, Record
from reference_contrastive import loop_means

WORLDS, TIME_LIMIT = (2, 3), 150
RUNS = [*CASES, *(f"sharded/{name}" for name in SHARDED)]

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)


def start(world: int, folder: Path) -> None:
    """Run a worker for each rank; its results and its output go into `folder`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    workers = []
    for rank in range(world):
        arguments = ["--rank", str(rank), "--world", str(world), "--folder", str(folder)]
        with open(folder / f"{rank}.txt", "w") as log:
            command = [sys.executable, cases.__file__, *arguments]
            workers.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    deadline = time.monotonic() + TIME_LIMIT
    for process in workers:
        try:
            process.wait(timeout=max(deadline - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    (folder / "done").touch()


@pytest.fixture(scope="session", params=WORLDS)
def ranks(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each rank."""
    base, world = tmp_path_factory.getbasetemp(), request.param
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # the workers run once for all processes of pytest-xdist
    folder = base / f"contrastive-{world}"
    try:
        folder.mkdir()
    except FileExistsError:
        deadline = time.monotonic() + TIME_LIMIT + 30
        while not (folder / "done").exists() and time.monotonic() < deadline:
            time.sleep(0.2)
    else:
        start(world, folder)
    files = [folder / f"{rank}.pt" for rank in range(world)]
    if not all(file.exists() for file in files):
        logs = "\n".join(f.read_text()[-3000:] for f in sorted(folder.glob("*.txt")))
        pytest.fail(f"a rank did not finish:\n{logs}")
    return [torch.load(file) for file in files]


@functools.cache
def alone(name: str) -> Record:
    """The same case on one process."""
    return cases.train(CASES[name], lambda model: model, 0, 1)


def close(one: Any, two: Any) -> None:
    torch.testing.assert_close(one, two, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", RUNS)
def test_ranks_equal_one_process(ranks, name):
    """Losses, gradients of every step, parameters and the table of u."""
    reference = alone(name.split("/")[-1])
    spread = torch.stack(reference.gradients).std(0).max()
    assert spread > 1e-3 and len(reference.loss) == STEPS + 1
    for result in (rank[name] for rank in ranks):
        close(result["gradients"], reference.gradients)
        close(result["parameters"], reference.parameters)
        close(result["state"], reference.state)
    # An ordinary loss of a rank is that of its own pairs: the mean over ranks is the loss.
    mean = torch.tensor([rank[name]["loss"] for rank in ranks], dtype=torch.float64).mean(0)
    close(mean, torch.tensor(reference.loss, dtype=torch.float64))


@pytest.mark.parametrize("name", RUNS)
def test_ranks_hold_the_same_table_to_the_last_bit(ranks, name):
    for other in ranks[1:]:
        for key, value in ranks[0][name]["state"].items():
            assert torch.equal(value, other[name]["state"][key])


def test_each_rank_excludes_its_own_pairs_from_the_negatives(ranks):
    """A diagonal taken at rank 0's place gave rank 1 a loss of 22.536 instead of 22.418."""
    world = len(ranks)
    parts = cases.batches(0, world)
    ids = torch.cat(parts)
    ends = np.cumsum([len(part) for part in parts])
    expected = np.split(loop_means(cases.X[ids], cases.T[ids], 0.8), ends[:-1])
    for rank, rows in zip(ranks, expected, strict=True):
        np.testing.assert_allclose(rank["rows"]["torch.float64"].numpy(), rows, atol=1e-12)
        half = rank["rows"]["torch.bfloat16"]
        assert half.dtype == torch.float32
        np.testing.assert_allclose(half.numpy(), rows, atol=0.2)


def test_every_rank_raises_if_pairs_have_no_negative(ranks):
    for rank in ranks:
        assert "leaves pairs without a negative" in rank["one label"]
        assert "at least two pairs" in rank["one pair"] and "has: 1" in rank["one pair"]


def test_without_a_group_nothing_is_gathered(ranks):
    expected = loop_means(cases.X[:5], cases.T[:5], 0.8)
    for rank in ranks:
        np.testing.assert_allclose(rank["local"].numpy(), expected, atol=1e-12)
