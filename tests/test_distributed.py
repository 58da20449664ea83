"""Two processes under DDP and FSDP2 equal one process on the global batch.

Each strategy is one start of two workers (`distributed_cases.py`) that run every case and leave
their results in files; the tests compare these with the same case in this process.
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
import pytest
import torch
from distributed_cases import CASES, STRATEGIES, WORLD, Record, full, losses

TOLERANCE, TIME_LIMIT = 1e-10, 150
STRATEGY = [strategy for group in STRATEGIES.values() for strategy in group]
RUNS = [(strategy, name) for strategy in STRATEGY for name in cases.names_of(strategy)]

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)


def start(strategies: str, folder: Path) -> None:
    """Run the workers of both ranks; leave their results and what they said in `folder`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    workers = []
    for rank in range(WORLD):
        # A file, not a port that somebody else could take.
        places = {"store": folder / "store", "out": folder / f"{rank}.pt"}
        options = {"strategies": strategies, "rank": rank, **places}
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        with open(folder / f"{rank}.txt", "w") as log:
            command = [sys.executable, cases.__file__, *words]
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
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[list[Any], str]]:
    """(strategies) -> results of both ranks, and the end of what the workers said."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # processes of pytest-xdist share one start

    @functools.cache
    def results(strategies: str) -> tuple[list[Any], str]:
        folder = base / f"distributed-{strategies}"
        try:
            folder.mkdir()
        except FileExistsError:
            deadline = time.monotonic() + TIME_LIMIT + 30
            while not (folder / "done").exists() and time.monotonic() < deadline:
                time.sleep(0.2)
        else:
            start(strategies, folder)
        said = "\n".join(f.read_text()[-2000:] for f in sorted(folder.glob("*.txt")))
        files = [folder / f"{rank}.pt" for rank in range(WORLD)]
        return [torch.load(file) if file.exists() else {} for file in files], said

    return results


@pytest.fixture
def ranks(outcome: Callable[[str], tuple[list[Any], str]]) -> Callable[[str, str], list[Any]]:
    """(strategy, case) -> what each rank has to say about it."""

    def look_up(strategy: str, name: str) -> list[Any]:
        results, said = outcome(strategy.split("-")[0])
        found = [result.get(f"{strategy}/{name}") for result in results]
        for rank, each in enumerate(found):
            if each is None:
                pytest.fail(f"{strategy}/{name} did not run on rank {rank}.\n{said}")
            if "failed" in each:
                pytest.fail(f"rank {rank}: {each['failed']}\n{said}")
        return found

    return look_up


@functools.cache
def alone(name: str, corrected: bool = True) -> Record:
    """The same case in one process, on the batches of all ranks together."""
    return cases.train(CASES[name], lambda model: model, list(range(WORLD)), corrected=corrected)


def assert_close(one: Any, two: Any, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(one, two, rtol=0, atol=tolerance, equal_nan=True)


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


@pytest.mark.parametrize(("strategy", "name"), RUNS)
def test_ranks_hold_the_same_trackers_to_the_last_bit(ranks, strategy, name):
    first, second = (result["state"] for result in ranks(strategy, name))
    assert first.keys() == second.keys() and any(key.endswith("value") for key in first)
    for key, value in first.items():
        torch.testing.assert_close(value, second[key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.sensitive])
def test_the_correction_matters(name):
    """Otherwise an evaluation at the wrong point would go unnoticed."""
    pairs = zip(alone(name).parameters, alone(name, corrected=False).parameters, strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) > 1e-5


def test_scalar_and_vector_g0_differ_when_batches_are_unequal():
    """The documented difference: a scalar weighs ranks equally, a vector weighs samples."""
    pairs = zip(alone("g0-scalar").parameters, alone("g0-vector").parameters, strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) > 1e-4


def test_cases_hold_what_they_promise():
    """Groups on both ranks, unequal and empty batches, absent names."""
    shared, empty = 0, 0
    for number in range(cases.STEPS):
        one, two = cases.draw(number, 0, cases.uneven(number))
        shared += len(set(cases.GROUP[one].tolist()) & set(cases.GROUP[two].tolist())) > 0
        empty += 0 in cases.sometimes_empty(number)
    assert shared > 0.9 * cases.STEPS and empty > 5
    assert {len(set(cases.uneven(n))) for n in range(3)} == {1, 2}


@pytest.mark.parametrize("where", ["value", "gradient batch", "surrogate", "second term"])
@pytest.mark.parametrize("strategy", STRATEGY)
def test_nan_on_one_rank(ranks, strategy, where):
    """Every rank refuses the batch, nothing has changed, and training goes on."""
    said = ranks(strategy, f"nan in {where}")
    assert said[0]["text"] == said[1]["text"]
    assert "NaN or infinite" in said[0]["text"] and "nothing was updated" in said[0]["text"]
    if where == "second term":
        assert "`mean`" in said[0]["text"]
    build, arguments = cases.sonex(), cases.per_sample
    if where == "second term":
        build, arguments = cases.build_several, cases.several
    model = cases.make_model()
    objective = build(model, True)
    for number in range(10):
        cases.step(cases.Case(build, arguments), objective, model, number, [0, 1])
    for result in said:
        assert result["unchanged"]
        assert_close(result["parameters"], [full(p) for p in model.parameters()])
        assert_close(result["state"], cases.tensors_of(objective))


@pytest.mark.parametrize("strategy", STRATEGY)
def test_resume_from_a_checkpoint_per_rank(ranks, strategy):
    for result in ranks(strategy, "resume"):
        assert result == {"previous": True, "parameters": True, "state": True}


@pytest.mark.parametrize("strategy", STRATEGY)
def test_evaluation_in_the_middle_of_a_round(ranks, strategy):
    for result in ranks(strategy, "anchored"):
        assert result["same"] and result["apart"]
        assert_close(result["parameters"], alone("alexr2").parameters)


@pytest.mark.parametrize("strategy", STRATEGY)
def test_weights_are_put_back_right_after_an_evaluation(ranks, strategy):
    for result in ranks(strategy, "loading"):
        assert result == {"moved": True, "back": True}


def test_ranks_in_different_calls_are_refused_and_can_go_on(ranks):
    case = CASES["sonex-old"]
    reference = cases.train(case, lambda model: model, list(range(WORLD)), steps=10)
    for result in ranks("ddp", "out of step"):
        assert "different calls" in result["text"] and result["unchanged"]
        assert_close(result["parameters"], reference.parameters)
        assert_close(result["state"], reference.state)


def test_process_groups(ranks):
    said = ranks("ddp", "process groups")
    case, model = CASES["sonex-old"], cases.make_model()
    objective = case.build(model, True)
    for number in range(3):
        cases.step(case, objective, model, number, [0])
    expected = cases.tensors_of(objective)
    for name in ("none", "alone", "not a member"):
        assert_close(said[0][name], expected)
    pooled = said[0]["everyone"]
    assert all(torch.equal(pooled[key], said[1]["everyone"][key]) for key in pooled)
    assert not torch.equal(
        pooled["terms.inner.tracker.value"], expected["terms.inner.tracker.value"]
    )


def test_batch_norm_and_dropout_under_ddp(ranks):
    said = ranks("ddp", "batch norm")
    for result in said:
        assert result["finite"] and result["random"] and result["buffers"]
        assert result["counted"] == 6, "the evaluation at w_{t-1} is no forward pass of its own"
    assert_close(said[0]["parameters"], said[1]["parameters"])
    assert_close(said[0]["state"], said[1]["state"])


def test_buffers_under_ddp(ranks):
    for result in ranks("ddp", "buffers"):
        assert result == {"same": True, "unchanged": True}


@pytest.mark.parametrize(
    "option", ["static_graph", "find_unused_parameters", "gradient_as_bucket_view"]
)
def test_options_of_ddp(ranks, option):
    for result in ranks("ddp", "options"):
        assert_close(result[option]["parameters"], alone("cvar-exact").parameters)
        assert_close(result[option]["state"], alone("cvar-exact").state)


def test_fsdp_with_mixed_precision(ranks):
    for result in ranks("fsdp-layers", "mixed precision"):
        assert result == {"same": True, "dtype": "torch.float32"}


def test_the_older_fsdp_is_refused_when_a_correction_needs_it(ranks):
    model = cases.make_model()
    objective = cases.sonex()(model, False)
    for number in range(3):
        cases.step(CASES["sonex-old"], objective, model, number, [0, 1])
    for result in ranks("fsdp-layers", "fsdp 1"):
        assert all("fully_shard" in text for text in result["texts"])
        assert_close(result["state"], cases.tensors_of(objective))


def test_import_does_not_load_dtensor():
    """It would slow `import fcco` down by half."""
    code = "import sys, fcco; print('torch.distributed.tensor' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_losses_depend_on_the_model():
    """The worker's data are the same in every process: they come from a seed."""
    model = cases.make_model()
    assert losses(model, torch.arange(3)).requires_grad
    assert len(cases.GROUP.unique()) == cases.GROUPS
