"""One tracking step per optimizer step: accumulation, skipped steps, several optimizers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from problems import Point

import fcco

A = np.array([[1.0, 0.5], [-0.4, 1.2], [0.7, -0.9], [0.3, 0.8]])


def batch(rng: np.random.Generator, per_block: int = 4):
    """Samples of three of four blocks: ids, and offsets that belong to the samples."""
    ids = np.repeat(rng.choice(4, 3, replace=False), per_block)
    return ids, rng.normal(size=len(ids)) * 0.3


def values(w: torch.Tensor, ids, offsets) -> torch.Tensor:
    return (torch.as_tensor(A[ids]) @ w).square() + torch.as_tensor(offsets)


def split(ids, offsets, k):
    """k micro-batches that each hold samples of every block."""
    return [(ids[j::k], offsets[j::k]) for j in range(k)]


@pytest.mark.parametrize("log_space", [False, True])
def test_accumulated_steps_equal_one_batch_for_the_tracker_alone(log_space):
    """First visits too; the blocks of the whole step, not of a part, set the theory's weight."""
    rng = np.random.default_rng(0)
    make = lambda: fcco.msvr_tracker(5, 0.3, "theory", log_space=log_space, dtype=torch.float64)  # noqa: E731
    one, several = make(), make()
    several.wait_for_close()
    for _ in range(20):
        ids = torch.as_tensor(rng.integers(0, 5, 7))
        fresh = torch.as_tensor(rng.normal(size=7))
        past = fresh + 0.1 * torch.as_tensor(rng.normal(size=7))
        one(fresh, ids, past)
        for part in (slice(0, 2), slice(2, 3), slice(3, 7)):
            several(fresh[part], ids[part], past[part])
        several.close()
        np.testing.assert_allclose(several.value, one.value, rtol=0, atol=1e-13)
        assert torch.equal(several.seen, one.seen)
    assert several.steps == one.steps == 20


def test_evaluation_between_micro_batches_leaves_the_open_step_alone():
    def once(evaluate: bool):
        model = Point(np.array([0.8, -0.6]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        objective = fcco.sonex(model, optimizer, fcco.Hinge(2.0), 4, smoothing=3.0, gamma=0.3)
        rng = np.random.default_rng(3)
        for _ in range(4):
            for ids, offsets in split(*batch(rng), 2):
                inner = lambda ids=ids, offsets=offsets: values(model.w, ids, offsets)  # noqa: E731
                (objective(inner, torch.as_tensor(ids)) / 2).backward()
                if evaluate:
                    objective.eval()
                    objective(lambda: values(model.w, [0, 1], [0.0, 0.0]), torch.tensor([0, 1]))
                    objective.train()
                    with torch.no_grad():
                        objective(inner, torch.as_tensor(ids))
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([objective.term.tracker.value[:, 0], model.w.detach()])

    assert torch.equal(once(False), once(True))


@pytest.mark.parametrize("at, correction", [("average", 0.0), ("anchor", 0.5)])
def test_a_look_at_other_parameters_between_micro_batches_leaves_the_open_step_alone(
    at, correction
):
    """They come back, so that no parameter has moved; the graph of the batch stays valid too."""

    def once(look: bool):
        model = Point(np.array([0.8, -0.6]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        output = fcco.OutputIterate(optimizer, "average")
        proximal = fcco.ProximalPoint(optimizer, nu=0.5, eta=0.2, inner_steps=3)
        stepped, other = (optimizer, output.applied) if at == "average" else (
            proximal, proximal.anchored
        )  # fmt: skip
        tracker = fcco.msvr_tracker(4, 0.3, correction, dtype=torch.float64)
        term = fcco.CoupledTerm(fcco.Hinge(2.0), tracker, smoothing=3.0)
        objective = fcco.Compositional(model, stepped, term)
        rng, moved = np.random.default_rng(3), 0.0
        for step in range(5):
            for ids, offsets in split(*batch(rng), 2):
                inner = lambda i=ids, o=offsets: values(model.w, i, o)  # noqa: E731
                loss, here = objective(inner, torch.as_tensor(ids)), model.w.detach().clone()
                if look and step:
                    with other(), torch.no_grad():
                        objective(inner, torch.as_tensor(ids))
                        moved += (model.w - here).abs().sum().item()
                    assert torch.equal(model.w, here)
                loss.backward()
            stepped.step()
            stepped.zero_grad()
        assert tracker.steps == 5 and (moved > 0.01) == look
        return torch.cat([tracker.value[:, 0], model.w.detach()])

    assert torch.equal(once(False), once(True))
