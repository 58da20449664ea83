"""What only a GPU can show; run with `pytest -m gpu`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fcco

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def network(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1)
    )


def run(device: str, steps: int = 30, index_device: str = "cpu", **options) -> torch.Tensor:
    torch.manual_seed(0)
    model = network().double().to(device)
    optimizer = fcco.adam_type(model.parameters(), lr=1e-2)
    dro = fcco.CVaRGroupDRO(model, optimizer, 6, 0.4, smoothing=0.5, gamma=0.3, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(24, 5, generator=generator, dtype=torch.float64).to(device)
        group = torch.randint(6, (24,), generator=generator).to(index_device)
        dro(lambda x=x: (model(x).squeeze(1) - x[:, 0]).square(), group).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


@pytest.mark.parametrize("threshold", ["exact", "gradient", "table"])
@pytest.mark.parametrize("index_device", ["cpu", "cuda"])
def test_training_on_the_gpu_equals_training_on_the_cpu(threshold, index_device):
    expected = run("cpu", threshold=threshold)
    ours = run("cuda", index_device=index_device, threshold=threshold)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)
    without = run("cuda", threshold=threshold, correction=0.0)
    assert (without - expected).abs().max() > 1e-4


def test_dropout_masks_and_the_random_stream_are_replayed():
    model = network(0.5).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    previous = fcco.PreviousParameters(model, optimizer)
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
    objective = fcco.sonex(model, optimizer, fcco.Hinge(), 4, smoothing=0.5, gamma=0.3)
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
    tracker = fcco.msvr(4, 0.1, device="cuda")
    with pytest.raises(IndexError, match="must lie in"):
        tracker(torch.rand(2, device="cuda"), torch.tensor([0, 4], device="cuda"))
    tracker(torch.rand(2, device="cuda"), torch.tensor([0, 3], device="cuda"))
    assert tracker.seen.tolist() == [True, False, False, True]


def test_compiled_model_on_the_gpu_is_evaluated_at_the_previous_point():
    model = network().cuda()
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    previous = fcco.PreviousParameters(model, optimizer)
    x = torch.randn(16, 5, device="cuda")
    before = model(x).detach()
    compiled(x).sum().backward()
    optimizer.step()
    torch.testing.assert_close(previous.evaluate(lambda: compiled(x)), before, rtol=1e-4, atol=1e-5)
    assert (compiled(x) - before).abs().max() > 1e-2


def test_deferred_checks_never_wait_for_the_gpu_and_still_raise():
    torch.manual_seed(0)
    model = network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    objective = fcco.sonex(
        model, optimizer, fcco.Hinge(), 4, smoothing=0.5, on_nonfinite="deferred"
    )
    group, x = torch.arange(4).repeat_interleave(8), torch.randn(32, 5, device="cuda")

    def step(scale: torch.Tensor) -> None:
        objective(lambda: scale * model(x).squeeze(1).square(), group).backward()
        optimizer.step()
        optimizer.zero_grad()

    one = torch.ones((), device="cuda")
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
    torch.cuda.synchronize()
    assert torch.equal(objective.term.tracker.value, kept)
    with pytest.raises(ValueError, match="in an earlier step"):
        objective(lambda: model(x).squeeze(1), group)
