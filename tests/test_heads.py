"""Task-dependent heads: what they compute, and what they do to the constraints' Gram matrix."""

from __future__ import annotations

import copy

import pytest
import torch
from diagnostics_cases import gram
from torch import Tensor, nn

from fcco.continual import TaskHeads
from fcco.diagnostics import eigenvalues

DOUBLE = torch.float64
IN, OUT, TASKS, ROWS = 12, 3, 4, 20


def heads(rank: int = 5, bias: bool = True, seed: int = 0) -> TaskHeads:
    torch.manual_seed(seed)
    return TaskHeads(nn.Linear(IN, OUT, bias=bias, dtype=DOUBLE), TASKS, rank)


def moved(rank: int = 5) -> TaskHeads:
    """Heads that have left their start."""
    module = heads(rank)
    with torch.no_grad():
        module.up.normal_(std=0.3)
    return module


def weight(module: TaskHeads, task: int) -> Tensor:
    """W_k, shape (in, out)."""
    return module.base.weight.T + module.down[task] @ module.up[task]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("task", [None, 2, torch.arange(ROWS) % TASKS])
def test_every_head_starts_as_the_layer(task, bias):
    module, x = heads(bias=bias), torch.randn(ROWS, IN, dtype=DOUBLE)
    assert torch.equal(module(x, task), module.base(x))


def test_heads_equal_written_out_layers():
    """y = x (W + A_k B_k) + b, row by row in loops."""
    module, x = moved(), torch.randn(ROWS, IN, dtype=DOUBLE)
    task = torch.randint(TASKS, (ROWS,))
    together = module(x, task)
    for row, k in zip(range(ROWS), task.tolist(), strict=True):
        torch.testing.assert_close(together[row], x[row] @ weight(module, k) + module.base.bias)
    for k in range(TASKS):
        torch.testing.assert_close(module(x, k), x @ weight(module, k) + module.base.bias)
    sequence = x.view(4, 5, IN)
    torch.testing.assert_close(module(sequence, task.view(4, 5)), together.view(4, 5, OUT))
    torch.testing.assert_close(module(sequence, 1), module(x, 1).view(4, 5, OUT))


def test_only_the_heads_of_a_batch_get_a_gradient():
    module, x = moved(), torch.randn(ROWS, IN, dtype=DOUBLE)
    module(x, torch.full((ROWS,), 2)).square().sum().backward()
    assert module.up.grad is not None and module.down.grad is not None
    for grad in (module.up.grad, module.down.grad):
        assert (grad[2] != 0).all() and (grad[[0, 1, 3]] == 0).all()


def test_state_round_trip_is_bitwise():
    module, other = moved(), heads(seed=9)
    other.load_state_dict(copy.deepcopy(module.state_dict()))
    x, task = torch.randn(ROWS, IN, dtype=DOUBLE), torch.randint(TASKS, (ROWS,))
    assert torch.equal(module(x, task), other(x, task))

    half = TaskHeads(nn.Linear(4, 2, dtype=torch.bfloat16), 2)
    assert half.down.dtype == half.up.dtype == torch.bfloat16


@pytest.mark.parametrize("call, message", [
    (lambda m, x: m(x, TASKS), "below 4"),
    (lambda m, x: m(x, -1), "at least 0"),
    (lambda m, x: m(x, torch.zeros(3, dtype=torch.int64)), r"shape \(20,\)"),
    (lambda m, x: TaskHeads(nn.Linear(2, 2), 0), "tasks=...\\)` must be at least 1"),
    (lambda m, x: TaskHeads(nn.Linear(2, 2), 1, rank=0), "rank=...\\)` must be at least 1"),
])  # fmt: skip
def test_wrong_tasks_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(heads(), torch.randn(ROWS, IN, dtype=DOUBLE))


# The Gram matrix of the constraints' gradients (book, Lemma 6.4, made exact).


def task_losses(module: TaskHeads, own_heads: bool) -> tuple:
    """h_k: the loss of task k on its own data, near each other so that the Gram matrix is poor."""
    generator = torch.Generator().manual_seed(1)
    shared = torch.randn(ROWS, IN, generator=generator, dtype=DOUBLE)
    shift = 0.05 * torch.randn(TASKS, ROWS, IN, generator=generator, dtype=DOUBLE)
    target = torch.randn(ROWS, OUT, generator=generator, dtype=DOUBLE)

    def losses(index: Tensor) -> Tensor:
        values = []
        for k in index.tolist():
            out = module(shared + shift[k], k if own_heads else None)
            values.append((out - target).square().sum(1).mean())
        return torch.stack(values)

    return losses, shared, shift, target


def gradients_of_the_layer(module: TaskHeads) -> Tensor:
    """G_k = dh_k / dW_k, shape (tasks, in, out), written out: 2/N x^T (x W_k + b - target)."""
    _, shared, shift, target = task_losses(module, True)
    result = []
    for k in range(TASKS):
        x = shared + shift[k]
        error = x @ weight(module, k) + module.base.bias - target
        result.append(2 / ROWS * x.T @ error)
    return torch.stack(result).detach()


@pytest.mark.parametrize("start, rank", [(True, 1), (False, 5)])
def test_the_gram_matrix_grows_by_a_diagonal_matrix(start, rank):
    module = heads(rank) if start else moved(rank)
    losses = task_losses(module, True)[0]
    base = list(module.base.parameters())
    shared_part = gram(losses, TASKS, base)
    whole = gram(losses, TASKS, module.parameters())
    slope = gradients_of_the_layer(module)
    by_up = (module.down.mT @ slope).square().sum((1, 2))
    by_down = (slope @ module.up.mT).square().sum((1, 2))
    torch.testing.assert_close(whole, shared_part + torch.diag(by_up + by_down).detach())
    least, before = (eigenvalues(losses, TASKS, p)[0].item() for p in (module.parameters(), base))
    assert least >= before + (by_up + by_down).min() - 1e-12
    assert least > 2 * before, "the heads help here"
    if start:
        assert (by_down == 0).all()
        plain = gram(task_losses(module, False)[0], TASKS, base)
        torch.testing.assert_close(shared_part, plain)  # the same without heads


def test_a_head_sees_its_share_of_the_gradient(rank=6):
    """|A^T G|^2 is r/in |G|^2 on average."""
    slope = gradients_of_the_layer(heads())
    seen = [(heads(rank, seed=seed).down.mT @ slope).square().sum() for seed in range(100)]
    share = torch.stack(seen).mean() / slope.square().sum()
    # That of one head varies by at most sqrt(2 r) / in; the heads of 100 are averaged.
    assert share.item() == pytest.approx(rank / IN, abs=5 * (2 * rank / 100) ** 0.5 / IN)
