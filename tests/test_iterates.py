"""The iterate to return: uniform or averaged over w_0, ..., w_{T-1}."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import fcco


def parameter(values=(1.0, -2.0)) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def test_the_average_is_the_mean_of_w_0_to_w_T_minus_1():
    rng = np.random.default_rng(0)
    w, path = parameter(), []
    optimizer = torch.optim.Adam([w], lr=0.3)
    output = fcco.optim.OutputIterate(optimizer, "average")
    with pytest.raises(RuntimeError, match="needs a step"), output.applied():
        pass
    for _ in range(50):
        path.append(w.detach().numpy().copy())
        w.grad = torch.as_tensor(rng.normal(size=2))
        optimizer.step()
    last = w.detach().clone()
    with pytest.raises(ZeroDivisionError), output.applied():
        np.testing.assert_allclose(w.detach(), np.mean(path, axis=0), rtol=1e-13)
        raise ZeroDivisionError
    assert torch.equal(w, last), "also after an exception"


def test_the_average_of_a_bfloat16_model_does_not_stall():
    w = nn.Parameter(torch.zeros((), dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([w], lr=1.0)
    output = fcco.optim.OutputIterate(optimizer, "average")
    for step in range(1000):
        w.grad = torch.tensor(-1.0 if step == 0 else 0.0, dtype=torch.bfloat16)
        optimizer.step()
    wide = nn.Parameter(torch.zeros(()))  # bfloat16 has nothing between 0.996 and 1
    again = fcco.optim.OutputIterate(torch.optim.SGD([wide], lr=1.0), "average")
    again.load_state_dict(output.state_dict())
    with again.applied():
        assert wide.item() == pytest.approx(0.999, rel=1e-4)


def test_the_outer_iterates_of_a_proximal_point_are_kept_not_the_inner_ones():
    w = parameter()
    outer = torch.optim.SGD([w], lr=0.3)
    optimizer = fcco.optim.ProximalPoint(outer, nu=0.4, eta=0.1, inner_steps=3)
    output, path = fcco.optim.OutputIterate(outer, "average"), []
    for step in range(12):
        if step % 3 == 0:
            path.append(w.detach().numpy().copy())
        w.grad = 2 * w.detach() - 1
        optimizer.step()
    with output.applied():
        np.testing.assert_allclose(w.detach(), np.mean(path, axis=0), atol=1e-14)


@pytest.mark.parametrize("rule", ["average", "random"])
def test_a_group_added_later_joins_the_kept_iterate(rule):
    w, late = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.full((1,), 5.0))
    optimizer = torch.optim.SGD([w], lr=1.0)
    output = fcco.optim.OutputIterate(optimizer, rule)
    w.grad = late.grad = -torch.ones(1)
    optimizer.step()
    optimizer.add_param_group({"params": [late]})
    optimizer.step()
    optimizer.step()
    with output.applied():
        expected = (1.0, 5 + 1 / 3) if rule == "average" else (w.item(), max(5.0, w.item() + 4))
        assert (w.item(), late.item()) == pytest.approx(expected)


def test_a_kept_iterate_of_another_model_is_refused():
    w, wider = parameter(), parameter((1.0, 2.0, 3.0))
    optimizer = torch.optim.SGD([w], lr=1.0)
    output = fcco.optim.OutputIterate(optimizer)
    w.grad = torch.ones(2, dtype=torch.float64)
    optimizer.step()
    other = fcco.optim.OutputIterate(torch.optim.SGD([wider], lr=1.0))
    with pytest.raises(ValueError, match="belongs to another model"):
        other.load_state_dict(output.state_dict())
    with pytest.raises(ValueError, match=r"OutputIterate\(rule=...\)` must be one of"):
        fcco.optim.OutputIterate(optimizer, "best")  # type: ignore[arg-type]


# A weight for each iterate.


def weighted(rule: str, weights: list[float], seed: int) -> float:
    """w_t = t has weight `weights[t]`; equal weights are none."""
    w, step = nn.Parameter(torch.zeros(())), iter(weights)
    optimizer = torch.optim.SGD([w], lr=1.0)
    weight = None if len(set(weights)) == 1 else lambda: next(step)
    output = fcco.optim.OutputIterate(optimizer, rule, seed, weight=weight)  # type: ignore[arg-type]
    w.grad = -torch.ones(())
    for _ in weights:
        optimizer.step()
    with output.applied():
        kept = w.item()
    assert w.item() == output.count == len(weights)
    return kept


@pytest.mark.parametrize("weights", [[0.0, 3.0, 0.0, 1.0, 2.0, 0.0], [1.0] * 6])
def test_the_random_iterate_has_probabilities_proportional_to_the_weights(weights):
    runs, state = 600, torch.get_rng_state()
    drawn = np.array([weighted("random", weights, seed) for seed in range(runs)], dtype=int)
    assert torch.equal(torch.get_rng_state(), state), "the global random stream is untouched"
    counts, expected = np.bincount(drawn, minlength=6), runs * np.array(weights) / sum(weights)
    some = expected > 0
    assert (counts[~some] == 0).all()
    chi_square = ((counts - expected)[some] ** 2 / expected[some]).sum()
    # Exceeded with probability 0.001; the degrees of freedom are one less than the iterates.
    assert chi_square < stats.chi2.isf(0.001, some.sum() - 1)
    average = weighted("average", weights, 0)
    assert average == pytest.approx(np.average(np.arange(6), weights=weights), rel=1e-6)


def test_without_any_weight_there_is_nothing_to_return():
    w = parameter()
    optimizer = torch.optim.SGD([w], lr=0.3)
    output = fcco.optim.OutputIterate(optimizer, weight=lambda: 0.0)
    w.grad = torch.ones(2, dtype=torch.float64)
    optimizer.step()
    with pytest.raises(RuntimeError, match="of a weight above 0"), output.applied():
        pass
    output.weight = lambda: -1.0
    with pytest.raises(ValueError, match=r"weight=...\)` must be at least 0.*: -1.0"):
        optimizer.step()
    assert output.count == 1


def test_a_weight_that_the_closure_decides_is_asked_after_it():
    w, decided = nn.Parameter(torch.zeros(())), []
    optimizer = torch.optim.SGD([w], lr=1.0)
    output = fcco.optim.OutputIterate(optimizer, "average", weight=lambda: decided[-1])
    for number in range(4):

        def closure(number=number):
            w.grad = -torch.ones(())
            decided.append(float(number % 2))

        optimizer.step(closure)  # type: ignore[arg-type]
    with output.applied():
        assert w.item() == 2.0  # the mean of w_1 = 1 and w_3 = 3


def test_the_sum_of_weights_survives_a_checkpoint():
    weights = iter([1.0, 4.0, 2.0, 0.5])
    w = parameter()
    optimizer = torch.optim.SGD([w], lr=0.3)
    output = fcco.optim.OutputIterate(optimizer, "average", weight=lambda: next(weights))
    w.grad = torch.ones(2, dtype=torch.float64)
    optimizer.step()
    optimizer.step()
    saved = output.state_dict()
    again = fcco.optim.OutputIterate(optimizer, "average", weight=lambda: 2.0)
    again.load_state_dict(saved)
    output.update()
    again.update()
    with output.applied():
        kept = w.detach().clone()
    with again.applied():
        assert torch.equal(kept, w)
