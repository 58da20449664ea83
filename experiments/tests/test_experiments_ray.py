"""A Ray cluster of two nodes on this machine, one of which is killed in the middle of its runs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fcco_experiments import store
from fcco_experiments.run import engine
from test_experiments_cli import TESTS, TOY, fcco
from test_experiments_engine import equal, result, rows, spec, weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray"),
]

SLOW = "0.4"  # seconds of a step on the cluster
LIMIT = 400


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    return os.environ | {"PYTHONPATH": path, "RAY_DISABLE_IMPORT_WARNING": "1", **more}


class Nodes:
    """A head and a second node, each a group of processes."""

    def __init__(self, at: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.at, self.address = at, f"127.0.0.1:{port}"
        self.head = self._start("--head", "--port", str(port), "--include-dashboard", "false")
        self._wait(1)
        self.second = self._start("--address", self.address)
        self._wait(2)

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        quick = {f"RAY_health_check_{key}_ms": "1000" for key in ("period", "timeout")}
        quick |= {"RAY_health_check_failure_threshold": "3", "TOY_SLOW": SLOW}
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1"]
        with (self.at / "nodes.txt").open("ab") as log:
            return subprocess.Popen(
                [*ray, "--node-ip-address", "127.0.0.1", "--disable-usage-stats", *words],
                env=environment(**quick), start_new_session=True, stdout=log, stderr=log,
                cwd=self.at,
            )  # fmt: skip

    def _wait(self, number: int) -> None:
        """Until so many nodes are there."""
        code = (
            "import ray\n"
            f"ray.init(address={self.address!r}, log_to_driver=False, logging_level='error')\n"
            f"assert sum(node['Alive'] for node in ray.nodes()) == {number}\n"
        )
        end = time.monotonic() + LIMIT
        while subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True,
                             check=False).returncode:  # fmt: skip
            assert time.monotonic() < end, (self.at / "nodes.txt").read_text()[-3000:]

    def kill(self, *nodes: subprocess.Popen[bytes]) -> None:
        """As a machine that loses its power; their workers are groups of their own."""
        for node in nodes:
            for process in [*children(node.pid), node.pid]:
                end(process)
            node.wait()


def children(pid: int) -> list[int]:
    """All processes below one, deepest first."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    below = parents.get(pid, [])
    return [each for child in below for each in [*children(child), child]]


def end(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    started = Nodes(tmp_path_factory.mktemp("nodes"))
    yield started
    started.kill(*(node for node in (started.second, started.head) if node.poll() is None))


def command(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fcco_experiments", *words], env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def ended(running: subprocess.Popen[str], code: int = 0) -> str:
    said, told = running.communicate(timeout=LIMIT)
    assert running.returncode == code, said + told
    return told


def wait_for(running: subprocess.Popen[str], ready: Any) -> None:
    end = time.monotonic() + LIMIT
    while not ready():
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_comparison_loses_a_machine_and_nothing_else(nodes, tmp_path, monkeypatch):
    """Each of two nodes has a run when the second is killed; its run goes on on the first."""
    monkeypatch.chdir(tmp_path)
    words = ["compare", TOY, "--data", "quadratic", "--methods", "sonex,alexr2", "--seeds", "0,1"]
    running = command(*words, "--out", "c", "--ray", nodes.address)
    begun = [Path(f"c/{name}/seed-0/checkpoint.pt") for name in ("sonex", "alexr2")]
    wait_for(running, lambda: all(path.exists() for path in begun))
    nodes.kill(nodes.second)
    told = ended(running)
    assert "its process was lost" in told, told
    resumed = 0
    for one in (spec(name, seed) for name in ("sonex", "alexr2") for seed in (0, 1)):
        engine.train(one, Path("here") / one.label)
        there, here = Path("c") / one.label, Path("here") / one.label
        assert equal(weights(there), weights(here)) and rows(there) == rows(here)
        assert result(there) == result(here)
        record = store.load_run(there).environment
        assert record["threads"] == 1 and "compare toy_task:TASK" in record["command"]
        resumed += any(" at step " in line for line in record.get("resumed", ()))
    assert resumed == 1, "one run went on from its checkpoint"
    assert Path("c/report.html").exists()


def lines(out: str) -> dict[str, Any]:
    found = store.read_fleet_lines(Path(out))
    for line in found.values():
        del line["seconds"]
        line["final"].pop("seconds", None)
    return found


def test_a_sweep_of_fleets_is_stopped_there_and_goes_on_here(nodes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        "sweep", "fleet_toy:TASK", "--data", "quadratic", "--grid.sox.lr", "[0.02, 0.1, 0.3]",
        "--seeds", "0,3", "--epochs", "6", "--steps", "4", "--chunk", "2", "--device", "cpu",
    ]  # fmt: skip
    ray = ["--ray", nodes.address]
    fcco(*words, "--out", "here")
    ended(command(*words, "--out", "there", *ray))
    assert lines("there") == lines("here") and len(lines("here")) == 6
    assert Path("there/winners.yaml").read_text() == Path("here/winners.yaml").read_text()
    running = command(*words, "--out", "cut", *ray)
    record = Path("cut/fleet/environment.json")  # with a line for each fleet after the first
    wait_for(running, lambda: record.exists() and store.read_json(record).get("resumed"))
    os.kill(running.pid, signal.SIGINT)
    told = ended(running, 130)
    assert 2 <= len(lines("cut")) < 6 and list(Path("cut/fleet").glob("checkpoint-*.pt"))
    again = shlex.split(told.splitlines()[-1])[3:]
    place = again.index("--ray")
    fcco(*again[:place], *again[place + 2 :])
    assert lines("cut") == lines("here")


def test_what_ray_cannot_do_is_one_line(nodes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["compare", TOY, "--config", "quadratic", "--methods", "sox", "--seeds", "0"]
    told = ended(command(*words, "--data", "nowhere", "--ray", nodes.address), 2)
    assert "Error: no file nowhere.csv in any of the places (on " in told
    told = ended(command(*words, "--ray", nodes.address, "--workers", "2"), 2)
    assert "Error: --workers are processes of this machine" in told
    told = ended(command(*words, "--ray", "127.0.0.1:1"), 2)
    assert "Error: --ray 127.0.0.1:1: no Ray cluster can be used" in told
