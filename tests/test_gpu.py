"""What only a GPU can show.

    PYTHONPATH=src python -m pytest -m gpu -p no:cacheprovider

runs all tests marked `gpu`, here and in other files, from a checkout. It needs torch with CUDA,
numpy and pytest only: conftest.py does without the other packages of the extra `test`.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from reference_contrastive import naive_means
from torch import nn

import fcco
from fcco._state import unpack
from fcco.contrastive import log_means

pytestmark = [
    pytest.mark.gpu,
    # Remarks of torch on its own features; any other warning is an error.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]


def network(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1)
    )


def run(device: str, steps: int = 30, index_device: str = "cpu", **options) -> torch.Tensor:
    torch.manual_seed(0)
    model = network().double().to(device)
    optimizer = fcco.optim.adam_type(model.parameters(), lr=1e-2)
    dro = fcco.CVaRGroupDRO(model, optimizer, 6, 0.4, smoothing=0.5, gamma=0.3, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(24, 5, generator=generator, dtype=torch.float64).to(device)
        group = torch.randint(6, (24,), generator=generator).to(index_device)
        dro(lambda x=x: (model(x).squeeze(1) - x[:, 0]).square(), group).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


@pytest.mark.parametrize(("read", "index_device"), [("old", "cpu"), ("new", "cuda")])
def test_training_on_the_gpu_equals_training_on_the_cpu(read, index_device):
    corrected: dict[str, Any] = {"read": read, "correction": "auto"}
    expected = run("cpu", **corrected)
    ours = run("cuda", index_device=index_device, **corrected)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)
    without = run("cuda", read=read, correction=0.0)
    assert (without - expected).abs().max() > 1e-4


def test_dropout_masks_and_the_random_stream_are_replayed():
    model = network(0.5).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    previous = fcco.previous.PreviousParameters(model, optimizer)
    x = torch.randn(64, 5, device="cuda")
    model(x).sum().backward()
    optimizer.step()  # a step of length zero: both points are equal, so only masks can differ
    torch.cuda.manual_seed(3)
    statistics = copy.deepcopy(model[1].state_dict())
    stale = previous.evaluate(lambda: model(x))
    assert all(torch.equal(v, statistics[k]) for k, v in model[1].state_dict().items())
    fresh = model(x)
    torch.cuda.manual_seed(3)
    again = model(x)
    torch.testing.assert_close(stale, fresh)
    torch.testing.assert_close(fresh, again)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_grad_scaler(dtype):
    torch.manual_seed(0)
    model = network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16, init_scale=2.0**24)
    objective = fcco.methods.sonex(
        model, optimizer, fcco.outer.Hinge(), 4, smoothing=0.5, gamma=0.3
    )
    group = torch.arange(4).repeat_interleave(8)
    x = torch.randn(32, 5, device="cuda")
    first = last = None
    for _ in range(60):
        with torch.autocast("cuda", dtype=dtype):
            loss = objective(lambda: (model(x).squeeze(1) - x[:, 0]).square(), group)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        first = loss.item() if first is None else first
        last = loss.item()
    assert objective.term.tracker.value.dtype == torch.float32
    assert last is not None and first is not None and last < 0.8 * first


def test_a_bad_index_on_the_gpu_is_refused_before_any_kernel_fails():
    tracker = fcco.tracker.InnerTracker(4, gamma=0.1, device="cuda")
    with pytest.raises(IndexError, match="must lie in"):
        tracker(torch.rand(2, device="cuda"), torch.tensor([0, 4], device="cuda"))
    tracker(torch.rand(2, device="cuda"), torch.tensor([0, 3], device="cuda"))
    assert tracker.seen.tolist() == [True, False, False, True]


def test_compiled_model_on_the_gpu_is_evaluated_at_the_previous_point():
    model = network().cuda()
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    previous = fcco.previous.PreviousParameters(model, optimizer)
    x = torch.randn(16, 5, device="cuda")
    before = model(x).detach()
    compiled(x).sum().backward()
    optimizer.step()
    torch.testing.assert_close(previous.evaluate(lambda: compiled(x)), before, rtol=1e-4, atol=1e-5)
    assert (compiled(x) - before).abs().max() > 1e-2


@pytest.mark.parametrize("offload", [False, True])
def test_deferred_checks_never_wait_for_the_gpu_and_still_raise(offload):
    torch.manual_seed(0)
    model = network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    objective = fcco.methods.sonex(
        model, optimizer, fcco.outer.Hinge(), 4, smoothing=0.5, offload=offload
    )
    group, x = torch.arange(4).repeat_interleave(8), torch.randn(32, 5, device="cuda")

    def step(scale: torch.Tensor) -> None:
        objective(lambda: scale * model(x).squeeze(1).square(), group).backward()
        optimizer.step()
        optimizer.zero_grad()

    one = torch.ones((), device="cuda")
    step(one)
    step(one)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # any wait for the device raises
    try:
        step(one)
        step(one)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    kept = objective.term.tracker.value.clone()
    objective(lambda: float("nan") * model(x).squeeze(1), group)
    objective.close()
    torch.cuda.synchronize()
    assert torch.equal(objective.term.tracker.value, kept)
    with pytest.raises(ValueError, match="in an earlier step"):
        objective(lambda: model(x).squeeze(1), group)


def offloaded(
    offload: bool, steps: int = 8, dropout: float = 0.5
) -> tuple[list[torch.Tensor], fcco.Compositional]:
    torch.manual_seed(0)
    model = network(dropout).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    objective = fcco.methods.sonex(
        model, optimizer, fcco.outer.Hinge(), 4, smoothing=0.5, gamma=0.3,
        offload=offload,
    )  # fmt: skip
    group, x = torch.arange(4).repeat_interleave(8), torch.randn(32, 5, device="cuda")
    for _ in range(steps):
        objective(lambda: model(x).squeeze(1).square(), group).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], objective


def test_an_offloaded_copy_gives_the_same_training_bit_by_bit():
    (kept, one), (away, other) = offloaded(False), offloaded(True)
    assert all(torch.equal(a, b) for a, b in zip(kept, away, strict=True))
    saved = other.previous.tensors.values()  # type: ignore[union-attr]
    assert all(copied.device.type == "cpu" and copied.is_pinned() for copied in saved)
    first, second = (unpack(each.state_dict()["previous._extra_state"]) for each in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[key]) for key, value in first.items())


def test_an_offloaded_copy_is_read_when_it_is_there():
    """The host and the device see what was before the step, however long the queue is."""
    model = nn.Linear(2048, 2048, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    previous = fcco.previous.PreviousParameters(model, optimizer, offload=True)
    busy = torch.randn(4096, 4096, device="cuda")
    for step in range(4):
        with torch.no_grad():
            model.weight.fill_(float(step))
        model.weight.grad = torch.ones_like(model.weight)
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        optimizer.step()
        if step % 2:  # the host first
            (found,) = unpack(previous.get_extra_state()).values()
            assert bool((found == step).all())
        at = previous.evaluate(lambda: model.weight * 1)
        assert bool((at == step).all()) and bool((model.weight == step - 1).all())
        assert bool((previous.moved()[model.weight] == -1).all())
    model.double()
    assert bool((previous.evaluate(lambda: model.weight * 1) == 3).all())


def test_an_offloaded_copy_takes_no_memory_between_steps():
    held, size = {}, 4 * 2048 * 2048
    for offload in (True, False, True):  # the first round also allocates what cuBLAS keeps
        model = nn.Linear(2048, 2048, bias=False).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = torch.cuda.memory_allocated()
        previous = fcco.previous.PreviousParameters(model, optimizer, offload=offload)
        for _ in range(3):
            model(torch.randn(4, 2048, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            previous.evaluate(lambda model=model: model(torch.ones(1, 2048, device="cuda")))
        torch.cuda.synchronize()
        held[offload] = torch.cuda.memory_allocated() - before
        del model, optimizer, previous
        gc.collect()  # hooks of the optimizer make cycles, which would be freed at any time
    assert abs(held[False] - held[True] - size) <= 0.01 * size


def test_shards_of_one_rank_with_an_offloaded_copy():
    """FSDP2 exchanges the content of shards, from the host's memory as from the GPU's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        model = nn.Linear(4, 3, bias=False).cuda()
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        previous = fcco.previous.PreviousParameters(model, optimizer, offload=True)
        x = torch.randn(5, 4, device="cuda")
        before = model(x).detach().clone()
        model(x).sum().backward()
        optimizer.step()
        torch.testing.assert_close(previous.evaluate(lambda: model(x)), before, rtol=0, atol=0)
        assert (model(x) - before).abs().max() > 0.1
        assert all(copied.is_pinned() for copied in previous.tensors.values())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_contrastive_means_on_the_gpu_equal_those_of_loops_on_the_cpu(chunk, kind):
    """Values and gradients, labels and anchors; half precision is widened before the products."""
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(37, 8, generator=draw).to(kind) for _ in range(2)]
    label, anchor = torch.arange(37) // 2, torch.arange(37) % 3 != 0
    weight = torch.randn(int(anchor.sum()), 2, generator=draw, dtype=torch.float64)
    # A copy: in double precision `double()` would return the tensor itself, and a `cuda()` of what
    # requires a gradient is no leaf.
    wanted = [each.to(torch.float64, copy=True).requires_grad_() for each in given]
    tau = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    means = naive_means(wanted[0], wanted[1], tau, label.tolist(), anchor.tolist()).log()
    (means * weight).sum().backward()

    ours = [each.cuda().requires_grad_() for each in given]
    temperature = torch.tensor(0.7, dtype=torch.float64, device="cuda", requires_grad=True)
    found = log_means(
        ours[0], ours[1], temperature, label=label.cuda(), anchor=anchor.cuda(), chunk=chunk
    )
    assert found.dtype == (torch.float64 if kind == torch.float64 else torch.float32)
    (found * weight.cuda()).sum().backward()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 2e-2}[kind]
    value_tolerance = 1e-12 if kind == torch.float64 else 1e-4
    torch.testing.assert_close(found.double().cpu(), means, rtol=0, atol=value_tolerance)
    pairs = zip([*ours, temperature], [*wanted, tau], strict=True)
    for mine, reference in pairs:
        assert mine.grad is not None and reference.grad is not None
        size = float(reference.grad.abs().max())
        difference = (mine.grad.double().cpu() - reference.grad).abs().max()
        assert float(difference) <= tolerance * max(size, 1.0)
