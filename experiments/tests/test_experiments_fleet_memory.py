"""How many runs fit: bytes counted by hand, systems made up, chunks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fcco_experiments import fleet_memory as memory
from torch import Tensor, nn

from fcco.fleet import Fleet, Member

WIDE = 1000


def test_live_bytes_by_hand() -> None:
    """Float32 of 1000 entries is 4000 bytes."""
    outside = torch.zeros(WIDE)
    with memory.LiveBytes() as live:
        first = torch.zeros(WIDE)
        assert live.now == 4000
        view = first.view(10, 100)[2:]  # no bytes of its own
        assert live.now == 4000
        outside.add_(1)  # noted when an operation returns it
        second = first + view.sum()  # the sum, 4 bytes, is gone when the addition is done
        assert live.now == 12000 and live.peak == 12004
        del first
        assert live.now == 12000  # the view holds the storage
        del view
        gc.collect()
        assert live.now == 8000
        second.mul_(2)
        halves = second.double().split(500)
        assert live.now == 16000
        del halves, second
        gc.collect()
        assert live.now == 4000
    assert live.peak == 16000


def test_live_bytes_without_shapes_that_have_no_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with memory.LiveBytes() as live:
        shape = torch.zeros(WIDE, device="meta") + 1
        with FakeTensorMode():
            fake = torch.zeros(WIDE) + 1
    assert shape.shape == fake.shape and live.peak == 0


def test_live_bytes_see_the_tensors_of_a_backward_pass() -> None:
    weight = torch.zeros(10, 10, requires_grad=True)
    with memory.LiveBytes() as live:
        inputs = torch.ones(100, 10)  # 4000
        hidden = torch.tanh(inputs @ weight)  # 4000, and the product that tanh does not keep: 4000
        assert (live.now, live.peak) == (8000, 12000)
        hidden.sum().backward()
        del hidden
        gc.collect()
        assert live.now == 4000 + 400  # the gradient stays


def test_live_bytes_of_a_step_by_hand() -> None:
    """One weight vector w of a plain SGD run, loss sum(w x): a step makes known tensors."""

    class Dot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(WIDE))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w * x).sum()

    def peak(runs: int) -> int:
        def make(number: int) -> Fleet:
            models = [Dot() for _ in range(number)]
            own = [Member(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in models]
            return Fleet(own, lambda model, x: model(x), mode="eager")

        batch = torch.zeros(runs, WIDE)
        return memory._peak(make, lambda fleet: fleet.step(batch), runs, torch.device("cpu"))

    vectors = (peak(9) - peak(1)) / 8 / (4 * WIDE)
    # Held: the module, the state; at most: gradient, with decay, scaled, decay itself, new weights.
    assert 4 <= vectors <= 8


def make_with(bytes_of: Callable[[int], int]) -> tuple[Any, Any, list[int]]:
    """A stand-in for a fleet that takes a given number of bytes."""
    built: list[int] = []

    def make(runs: int) -> Tensor:
        built.append(runs)
        return torch.zeros(bytes_of(runs), dtype=torch.uint8)

    return make, lambda fleet: fleet.add_(1), built


def test_capacity_from_small_fleets(monkeypatch: pytest.MonkeyPatch) -> None:
    make, step, built = make_with(lambda runs: 5000 + 300 * runs)
    monkeypatch.setattr(memory, "available", lambda device: 100_000)
    found = memory.capacity(make, step, 10_000, "cpu")
    assert found == (80_000 - 5000) // 300
    assert max(built) <= 64
    assert memory.capacity(make, step, 10_000, "cpu", share=0.5) == (50_000 - 5000) // 300
    assert memory.capacity(make, step, 7, "cpu") == 7  # there are no more
    assert memory.capacity(make, step, 1, "cpu") == 1


def test_capacity_with_data_that_runs_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five seeds: the first five runs bring data, the others none."""
    make, step, _ = make_with(lambda runs: 20_000 * min(runs, 5) + 300 * runs)
    monkeypatch.setattr(memory, "available", lambda device: 1_000_000)
    assert memory.capacity(make, step, 10_000, "cpu") == (800_000 - 100_000) // 300


def test_capacity_with_data_that_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cache: dict[int, Tensor] = {}

    def make(runs: int) -> Tensor:
        for seed in range(min(runs, 5)):
            if seed not in cache:
                cache[seed] = torch.zeros(50_000, dtype=torch.uint8)
        return torch.zeros(300 * runs, dtype=torch.uint8)

    monkeypatch.setattr(memory, "available", lambda device: 100_000)
    assert memory.capacity(make, lambda fleet: fleet.add_(1), 10_000, "cpu") == 80_000 // 300


def test_capacity_never_builds_what_may_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    make, step, built = make_with(lambda runs: 1000 * runs)
    monkeypatch.setattr(memory, "available", lambda device: 5000)
    assert memory.capacity(make, step, 100, "cpu") == 4
    assert max(built) == 4
    monkeypatch.setattr(memory, "available", lambda device: 25_000)
    assert memory.capacity(make, step, 100, "cpu") == 20
    assert max(built) == 20
    monkeypatch.setattr(memory, "available", lambda device: 1300)
    assert memory.capacity(make, step, 100, "cpu") == 1


def test_capacity_when_not_even_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    make, step, _ = make_with(lambda runs: 3 << 20)
    monkeypatch.setattr(memory, "available", lambda device: 1 << 20)
    with pytest.raises(MemoryError, match=r"one run takes 3.0 MiB on cpu, but 0.8 .* 0.8 MiB"):
        memory.capacity(make, step, 10, "cpu")


def test_capacity_of_runs_that_take_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    make, step, _ = make_with(lambda runs: 1000)
    monkeypatch.setattr(memory, "available", lambda device: 5000)
    assert memory.capacity(make, step, 10**6, "cpu") == 10**6


@pytest.mark.parametrize(("runs", "share"), [(0, 0.8), (1, 0.0), (1, 1.5)])
def test_capacity_errors(runs: int, share: float) -> None:
    make, step, _ = make_with(lambda runs: 1)
    with pytest.raises(ValueError, match="capacity"):
        memory.capacity(make, step, runs, "cpu", share=share)


@pytest.mark.parametrize(("runs", "size"), [(1, 1), (10, 3), (10, 100), (1000, 7), (5, 5), (6, 5)])
def test_chunks(runs: int, size: int) -> None:
    parts = memory.chunks(runs, size)
    assert [r for part in parts for r in part] == list(range(runs))
    lengths = [len(part) for part in parts]
    assert max(lengths) <= size and max(lengths) - min(lengths) <= 1
    assert len(parts) == -(-runs // size)


@pytest.mark.parametrize("given", [(0, 1), (1, 0), (2.5, 1)])
def test_chunks_errors(given: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="chunks"):
        memory.chunks(*given)


# --- what a system tells --------------------------------------------------------------------------


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 64 kB\nMemAvailable:      48 kB\nBuffers: 1 kB\n"}
FREE = 48 * 1024


def test_memory_of_linux(tmp_path: Path) -> None:
    assert memory._host(system(tmp_path, MEMINFO)) == FREE


@pytest.mark.parametrize(
    ("limit", "used", "left"),
    [("20000", "15000", 20000 - 15000 + 700), ("max", "15000", FREE), ("20000", "99999", 0)],
)
@pytest.mark.parametrize("folder", ["", "a", "a/b"])
def test_memory_of_a_control_group(
    tmp_path: Path, folder: str, limit: str, used: str, left: int
) -> None:
    """The limit may be that of a group above."""
    group = f"sys/fs/cgroup/{folder}/"
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        f"{group}memory.max": f"{limit}\n",
        f"{group}memory.current": f"{used}\n",
        f"{group}memory.stat": "anon 5\ninactive_file 700\n",
    }
    assert memory._host(system(tmp_path, MEMINFO | files)) == left


def test_memory_of_a_control_group_of_the_first_version(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/a/"
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/a\n0::/\n",
        f"{group}memory.limit_in_bytes": "9000\n",
        f"{group}memory.usage_in_bytes": "4000\n",
        f"{group}memory.stat": "cache 1\ntotal_inactive_file 30\n",
    }
    assert memory._host(system(tmp_path, MEMINFO | files)) == 5030


def test_memory_of_other_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"SC_AVPHYS_PAGES": 10, "SC_PHYS_PAGES": 100, "SC_PAGE_SIZE": 4096}

    def told(name: str) -> int:
        if name not in pages:
            raise ValueError("unrecognized configuration name")
        return pages[name]

    monkeypatch.setattr(memory.os, "sysconf", told, raising=False)
    assert memory._host(tmp_path) == 40960
    del pages["SC_AVPHYS_PAGES"]
    assert memory._host(tmp_path) == 50 * 4096
    del pages["SC_PHYS_PAGES"]
    assert memory._host(tmp_path) == memory.DEFAULT
    monkeypatch.delattr(memory.os, "sysconf")
    assert memory._host(tmp_path) == memory.DEFAULT


def test_memory_of_this_machine() -> None:
    assert 1 << 20 < memory.available("cpu") < 1 << 50


def test_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free, and what the allocator holds without use."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 120)
    assert memory.available("cuda:0") == 1180


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_capacity_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(runs: int) -> Tensor:
        return torch.zeros(runs * (1 << 20), dtype=torch.uint8, device="cuda")

    monkeypatch.setattr(memory, "available", lambda device: 100 << 20)
    assert memory.capacity(make, lambda fleet: fleet + 1, 1000, "cuda") == 40  # two copies
