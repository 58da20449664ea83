"""The memory of pairs and the loss for open_clip: transcriptions, unbiasedness, ranks."""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from integration_cases import run_on_two_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import fcco
from fcco.integrations.open_clip import GlobalClipLoss, PairMemory

PAIRS = 11


def features(number: int = PAIRS, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [
        normalize(torch.randn(number, 5, generator=draw, dtype=torch.float64), dim=1)
        for _ in range(2)
    ]


def scale(value: float = 9.0) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def clip_loss(images: Tensor, texts: Tensor, logit_scale: Tensor) -> Tensor:
    """open_clip's `ClipLoss.forward` on one process."""
    logits_per_image = logit_scale * images @ texts.T
    logits_per_text = logit_scale * texts @ images.T
    labels = torch.arange(len(images))
    return (cross_entropy(logits_per_image, labels) + cross_entropy(logits_per_text, labels)) / 2


def log_sums(images: Tensor, texts: Tensor, c: float) -> np.ndarray:
    """log G of both directions, by loops."""
    scores = c * (images.detach() @ texts.detach().T).numpy()
    number = len(scores)
    rows = [
        [
            sum(math.exp(each[i, j] - scores[i, i]) for j in range(number) if j != i)
            for each in (scores, scores.T)
        ]
        for i in range(number)
    ]
    return np.log(rows)


def assert_close(ours: Any, theirs: Any, atol: float = 1e-12) -> None:
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=atol)


# --- the whole data set ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", [9.0, 18.0])
def test_all_pairs_as_one_batch_is_clip_loss(value):
    """Sums up to e^12, and beyond e^20, from where torch's softplus drops the 1 by default."""
    images, texts = (each.requires_grad_() for each in features())
    c = scale(value)
    loss = GlobalClipLoss(PAIRS, gamma=1.0).double()
    order = torch.randperm(PAIRS, generator=torch.Generator().manual_seed(1))
    ours = loss(images[order], texts[order], c, output_dict=True, index=order)
    theirs = clip_loss(images, texts, c)
    assert list(ours) == ["contrastive_loss"]
    inputs = (images, texts, c)
    assert_close([ours["contrastive_loss"]], [theirs])
    assert_close(
        torch.autograd.grad(ours["contrastive_loss"], inputs), torch.autograd.grad(theirs, inputs)
    )
    sums = log_sums(images, texts, value)
    np.testing.assert_allclose(loss.memory.value, sums, rtol=0, atol=1e-12)
    assert (sums.max() > 20) == (value > 9)


def test_a_batch_estimates_sums_and_gradient_without_bias():
    """The mean over all batches; that of the loss of a batch is another gradient."""
    images, texts = (each.requires_grad_() for each in features(7))
    c, batches = scale(6.0), [list(b) for b in itertools.combinations(range(7), 3)]
    exact = torch.tensor(log_sums(images, texts, 6.0))
    inputs = (images, texts, c)
    whole = torch.autograd.grad(clip_loss(images, texts, c), inputs)

    sums = torch.zeros(7, 2, dtype=torch.float64)
    means = {name: [torch.zeros_like(each) for each in inputs] for name in ("memory", "batch")}
    for ids in batches:
        fresh = GlobalClipLoss(7, gamma=1.0).double()
        fresh(images[ids], texts[ids], c, index=torch.tensor(ids))
        sums[ids] += fresh.memory.value[ids].exp() / 15  # 15 of the 35 batches have a given pair
        memory = GlobalClipLoss(7, gamma=1e-12).double()
        memory.memory.value.copy_(exact)
        losses = {
            "memory": memory(images[ids], texts[ids], c, index=torch.tensor(ids)),
            "batch": clip_loss(images[ids], texts[ids], c),
        }
        for name, loss in losses.items():
            for mean, slope in zip(means[name], torch.autograd.grad(loss, inputs), strict=True):
                mean += slope / len(batches)
    np.testing.assert_allclose(sums, exact.exp(), rtol=1e-12)
    assert_close(means["memory"], whole, 1e-9)
    assert float((means["batch"][0] - whole[0]).abs().max()) > 0.1 * float(whole[0].abs().max())


@pytest.mark.parametrize(("columns", "symmetric"), [(2, False), (2, True), (3, False), (3, True)])
def test_stored_pairs_complete_a_batch(columns, symmetric):
    """With all others stored, and features that stay, a small batch has the exact gradient."""
    number, size = 12, 4
    rows = [*features(number), *features(number, seed=1)][:columns]
    memory = PairMemory("", number, 1.0, symmetric, number - size, dtype=torch.float64)
    # Once to fill the store; the second time all sums are complete; the third uses these.
    for start in 3 * list(range(0, number, size)):
        batch = [each[start : start + size].clone().requires_grad_() for each in rows]
        loss = memory(batch, 7.0, torch.arange(start, start + size))
        loss.backward()
    whole = [each.clone().requires_grad_() for each in rows]
    own, scores = torch.arange(number), 7 * whole[0] @ torch.cat(whole[1:]).T
    losses = cross_entropy(scores, own, reduction="none")
    if symmetric:
        back = cross_entropy(7 * whole[1] @ whole[0].T, own, reduction="none")
        losses = (losses + back) / 2
    losses.mean().backward()
    assert loss.item() == pytest.approx(losses[-size:].mean().item(), abs=1e-12)
    for one, two in zip(batch, whole, strict=True):
        assert one.grad is not None and two.grad is not None
        assert_close([one.grad * size / number], [two.grad[-size:]])


def test_fewer_negatives_stand_for_all():
    """The loss of K of n - 1 negatives; the stored pairs change nothing before there are any."""
    images, texts = (each.requires_grad_() for each in features())
    loss = GlobalClipLoss(PAIRS, gamma=1.0, stored_pairs=5, negatives=4).double()
    found = loss(images, texts, scale(), index=torch.arange(PAIRS))
    sums = np.exp(log_sums(images, texts, 9.0)) * 4 / (PAIRS - 1)
    assert found.item() == pytest.approx(np.log1p(sums).mean(), abs=1e-12)
    assert GlobalClipLoss(PAIRS, negatives=10 * PAIRS).memory.negatives == PAIRS - 1


class Backbones(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(5, 4), nn.Linear(5, 4)
        self.log_scale = nn.Parameter(torch.tensor(1.5))
        self.double()

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        images, texts = self.image(images), self.text(texts)
        return normalize(images, dim=1), normalize(texts, dim=1), self.log_scale.exp()


def batches(steps: int = 30, size: int = 4) -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randperm(PAIRS, generator=draw)[:size] for _ in range(steps)]


def trained(chosen: slice | None = None) -> tuple[Backbones, GlobalClipLoss]:
    """The plain loop; `chosen` are the pairs of each batch that this rank has, of several."""
    model: Any = Backbones()
    wrapped = nn.parallel.DistributedDataParallel(model) if chosen else model
    loss, (images, texts) = GlobalClipLoss(PAIRS, gamma=0.5).double(), features()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for ids in batches():
        ids = ids[chosen or slice(None)]
        loss(*wrapped(images[ids], texts[ids]), index=ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, loss


def test_training_equals_the_objective_of_the_library():
    """`GlobalContrastive` tracks means and has both directions, not their mean: half of it."""
    ours, loss = trained()
    model, (images, texts) = Backbones(), features()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    objective = fcco.GlobalContrastive(
        model, optimizer, PAIRS, temperature=lambda: (-model.log_scale).exp(), gamma=0.5,
        correction=0.0, scaled=False,
    )  # fmt: skip
    for ids in batches():
        (objective(lambda ids=ids: model(images[ids], texts[ids])[:2], ids) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(ours.parameters(), model.parameters(), 1e-10)
    means = objective.term.tracker.value + math.log(PAIRS - 1)
    assert_close([loss.memory.value], [means], 1e-10)
    assert float((ours.log_scale - 1.5).detach().abs()) > 0.01


# --- state, evaluation, precision -----------------------------------------------------------------


def test_evaluation_needs_no_index_and_changes_nothing():
    x, t = features()
    loss = GlobalClipLoss(PAIRS, gamma=0.5).double()
    ids = torch.tensor([1, 4, 9])
    with torch.no_grad():
        value = loss(x[ids], t[ids], scale())
    assert value == loss.eval()(x[ids], t[ids], scale())
    assert loss.memory.value.isnan().all()
    expected = np.log1p(np.exp(log_sums(x[ids], t[ids], 9.0)) * (PAIRS - 1) / 2).mean()
    assert float(value) == pytest.approx(expected, abs=1e-12)


def test_half_precision_and_autocast():
    x, t = features(8)
    exact = GlobalClipLoss(8).double()
    reference = [each.bfloat16().double().requires_grad_() for each in (x, t)]
    exact(*reference, torch.tensor(50.0), index=torch.arange(8)).backward()
    for enabled in (False, True):
        loss = GlobalClipLoss(8).bfloat16()
        narrow = [each.bfloat16().requires_grad_() for each in (x, t)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            value = loss(*narrow, torch.tensor(50.0), index=torch.arange(8))
        value.backward()
        assert loss.memory.value.dtype == torch.float32
        torch.testing.assert_close(
            loss.memory.value.double(), exact.memory.value, rtol=0, atol=1e-4
        )
        for one, two in zip(narrow, reference, strict=True):
            assert one.grad is not None and two.grad is not None
            torch.testing.assert_close(one.grad.double(), two.grad, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("ids", [[2, 7, 2, 5], [2, 2, 7, 2, 5]])
def test_the_order_of_a_pair_that_comes_twice_does_not_matter(ids):
    """With other views of the pair each time, as after augmentation: its sums G are averaged."""
    (x, t), (u, v) = features(), features(seed=1)
    tables, number = [], len(ids)
    rows = torch.tensor(ids)
    images, texts = x[rows] + 0.3 * u[:number], t[rows] + 0.3 * v[:number]
    for order in itertools.permutations(range(number)):
        loss = GlobalClipLoss(PAIRS, gamma=0.6).double()
        loss(x, t, scale(), index=torch.arange(PAIRS))
        before = loss.memory.value.clone()
        at = torch.tensor(order)
        loss(images[at], texts[at], scale(), index=rows[at])
        tables.append(loss.memory.value.clone())
    for table in tables[1:]:
        torch.testing.assert_close(table, tables[0], rtol=0, atol=1e-13)
    for pair in set(ids):
        expected = []
        for i in (rows == pair).nonzero().flatten():
            scores = 9.0 * torch.stack([texts @ images[i], images @ texts[i]], 1)
            fresh = (scores[rows != pair] - scores[i]).exp().mean(0) * (PAIRS - 1)
            expected.append(0.4 * before[pair].exp() + 0.6 * fresh)
        torch.testing.assert_close(tables[0][pair], torch.stack(expected).mean(0).log())


@pytest.mark.parametrize("stored_pairs", [0, 3])
def test_a_pair_without_negatives_keeps_its_sums(stored_pairs):
    """Nothing is stored yet, or only the pair itself."""
    x, t = (each.requires_grad_() for each in features())
    loss = GlobalClipLoss(PAIRS, gamma=0.5, stored_pairs=stored_pairs).double()
    for ids in ([4], [4, 4], [4]):
        value = loss(x[ids], t[ids], scale(), index=ids)
        (slope,) = torch.autograd.grad(value, x)
        assert value.item() == 0 and not slope.any()
        assert loss.memory.value.isnan().all()
    loss(x[:6], t[:6], scale(), index=range(6))
    before = loss.memory.value.clone()
    assert not before[4].isnan().any()
    if stored_pairs == 0:
        loss(x[[4, 4]], t[[4, 4]], scale(), index=[4, 4])
        torch.testing.assert_close(loss.memory.value, before, rtol=0, atol=1e-15, equal_nan=True)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (None, "missing.*11 pairs"),
        (torch.rand(4), "integers.*float32"),
        (torch.zeros(4, 1, dtype=torch.int64), r"vector of integers.*\(4, 1\)"),
        (torch.tensor([0, 1, 2, 11]), r"\[0, 10\].*contains: 11"),
        (torch.tensor([0, -1, 2, 3]), r"\[0, 10\].*contains: -1"),
        (torch.tensor([0, 1, 1, 0]), "2 different numbers in a batch of 4"),
        (torch.tensor([0, 1, 2]), "4 pairs of features but the numbers of 3"),
    ],
)
def test_wrong_numbers_of_pairs(index, error):
    x, t = (each[:4].requires_grad_() for each in features())
    loss = GlobalClipLoss(PAIRS)
    with pytest.raises((ValueError, IndexError), match=error):
        loss(x, t, scale(), index=index)
    assert loss.memory.value.isnan().all()


def test_wrong_settings():
    with pytest.raises(ValueError, match=r"gamma=.*\(0.0, 1.0\]"):
        GlobalClipLoss(10, gamma=0.0)


# --- two processes --------------------------------------------------------------------------------


def worker(out: str) -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    # Unequal shares: three pairs of each batch, and one. DDP averages with equal weight, so the
    # loss itself must weigh the pairs.
    model, loss = trained(slice(3) if rank == 0 else slice(3, None))
    torch.save([[p.detach() for p in model.parameters()], loss.memory.value], f"{out}.{rank}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path):
    """Each rank has a part of the pairs: the same as one process with all of them."""
    run_on_two_ranks(__file__, tmp_path / "out")
    model, loss = trained()
    for rank in (0, 1):
        parameters, value = torch.load(tmp_path / f"out.{rank}")
        assert_close(parameters, (p.detach() for p in model.parameters()), 1e-10)
        assert_close([value], [loss.memory.value], 1e-10)


if __name__ == "__main__":
    worker(*sys.argv[1:])
