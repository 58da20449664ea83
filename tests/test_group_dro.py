"""CVaR group DRO: its threshold, its weights, and runs to known optima."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import LogisticGroups, Point, decay, take_step
from scipy.optimize import linprog, minimize_scalar

import fcco
from fcco.rules.cvar import mean_of_worst, threshold


def smoothed_hinge(x: np.ndarray, ratio: float, lam: float) -> np.ndarray:
    """f_lambda of (1/r) [x]_+, and the hinge itself for lambda = 0."""
    top = 1 / ratio
    if lam == 0:
        return top * np.maximum(x, 0)
    return np.where(x < lam * top, np.maximum(x, 0) ** 2 / (2 * lam), top * x - lam * top**2 / 2)


def of_threshold(s: float, u: np.ndarray, ratio: float, lam: float) -> float:
    return s + smoothed_hinge(u - s, ratio, lam).mean()


@st.composite
def losses_and_ratios(draw: st.DrawFn) -> tuple[np.ndarray, float]:
    u = np.array(draw(st.lists(st.integers(-30, 30), min_size=1, max_size=12)), dtype=float) / 8
    share = draw(st.one_of(st.integers(1, len(u)).map(lambda k: k / len(u)), st.floats(0.02, 1.0)))
    return u, share  # ties are common, and r n is an integer half of the time


# The exact threshold.


@settings(max_examples=40, deadline=None)
@given(losses_and_ratios(), st.sampled_from([0.0, 1e-3, 0.05, 0.7, 6.0]))
def test_exact_threshold_minimises(case, lam):
    u, ratio = case
    s = threshold(torch.as_tensor(u), ratio, lam)[0].item()
    reached = of_threshold(s, u, ratio, lam)
    low, high = u.min() - lam / ratio - 1, u.max() + 1
    candidates = np.concatenate([np.linspace(low, high, 100), u, u - lam / ratio])
    best: Any = minimize_scalar(
        of_threshold, bounds=(low, high), args=(u, ratio, lam), method="bounded"
    )
    assert reached <= min(best.fun, *(of_threshold(c, u, ratio, lam) for c in candidates)) + 1e-10
    if lam:
        assert np.clip((u - s) / lam, 0, 1 / ratio).mean() == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_thresholds_where_a_share_is_a_whole_number_of_groups(dtype):
    """0.1 * 30 rounds to more than 3 in some precisions: the fourth group must not count."""
    for number in range(1, 60):
        u = torch.randperm(number, generator=torch.Generator().manual_seed(number)).to(dtype)
        every = torch.ones(number, dtype=torch.bool)
        for count in range(1, number + 1, 3):
            ratio = count / number
            worst = u.sort(descending=True).values[:count].double()
            for table, seen in ((u, every), (u, None), (u.numpy(), None)):
                s, kink = threshold(table, ratio, 0.0, seen)
                assert float(s) == worst[-1], (number, count)
                assert float(kink) == pytest.approx(1 / ratio, rel=1e-5)
                mean = float(mean_of_worst(table, ratio, seen))
                assert mean == pytest.approx(worst.mean().item(), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("number, spread, offset, lam", [
    (30, 0.01, 100.0, 1e-3), (30, 0.01, 100.0, 1e-7), (3000, 5.0, 0.0, 1e-1), (3000, 5.0, 0.0, 1e-5)
])  # fmt: skip
def test_exact_threshold_survives_single_precision(number, spread, offset, lam):
    """Small differences of large losses, or of long sums of them, must not cancel."""
    u = offset + spread * torch.rand(number, generator=torch.Generator().manual_seed(0))
    exact = threshold(u.double(), 0.15, lam)[0]
    assert threshold(u, 0.15, lam)[0].item() == pytest.approx(exact.item(), abs=1e-5)


def dro(model: torch.nn.Module, number: int, ratio: float, **options: Any) -> fcco.CVaRGroupDRO:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return fcco.CVaRGroupDRO(model, optimizer, number, ratio, **options)


@pytest.mark.filterwarnings("ignore:.*is less than one")
@settings(max_examples=15, deadline=None)
@given(losses_and_ratios(), st.sampled_from([1e-2, 0.3, 4.0]))
def test_eliminated_threshold_is_the_vector_cvar_of_n_lambda(case, lam):
    u, ratio = case
    number, model = len(u), Point(u)
    vector = fcco.outer.MoreauEnvelope(fcco.outer.CVaR(ratio), number * lam)
    p = vector.gradient(torch.as_tensor(u))
    objective = dro(model, number, ratio, smoothing=lam, gamma=1.0, read="new")
    objective(lambda: model.w).backward()
    np.testing.assert_allclose(model.w.grad, p, atol=1e-9)  # type: ignore[arg-type]
    objective.close()
    np.testing.assert_allclose(objective.group_weights(), p, atol=1e-9)


@pytest.mark.parametrize(
    "ratio, smoothing", [(1.0, 1e-9), (1 / 6, 0.0), (0.5, 0.0), (0.55, 1e-9), (0.25, 0.0)]
)
def test_weights_solve_the_linear_program_of_cvar(ratio, smoothing):
    """Mean at r = 1, the worst group at r = 1/n, a part of a group in between; at every step."""
    model = Point([0.3, 1.2, 0.7, -0.2, 0.9, 0.1])
    objective = dro(model, 6, ratio, smoothing=smoothing, gamma=1.0)
    optimizer: Any = objective.optimizer
    for step in range(4):
        u = model.w.detach().numpy() ** 2
        lp = linprog(-u, A_eq=np.ones((1, 6)), b_eq=[1.0], bounds=(0, 1 / (6 * ratio)))
        for repeat in range(2):  # the second time reads the u and the s of the same w
            loss = objective(lambda: model.w.square())
            gradient = torch.autograd.grad(loss, model.w)[0]
            if step == 0 or repeat == 1:
                np.testing.assert_allclose(gradient / 2 / model.w.detach(), lp.x, atol=1e-7)
                assert loss.item() == pytest.approx(-lp.fun)
            model.w.grad = gradient
            optimizer.param_groups[0]["lr"] = 0.1 * repeat
            optimizer.step()
            assert objective.group_weights().sum().item() == pytest.approx(1)
        assert objective.cvar().item() == pytest.approx(-lp.fun)
        assert objective.cvar(torch.as_tensor(u)).item() == pytest.approx(-lp.fun)


# The threshold as state.


@pytest.mark.parametrize("read", ["old", "new"])
@pytest.mark.parametrize("lam", [0.0, 0.3])
def test_the_threshold_by_hand_with_accumulated_batches(read, lam):
    """Weights are those of the table before or after the batch, with its own best s."""
    number, ratio, gamma = 5, 0.4, 0.5
    rng = np.random.default_rng(1)
    start, model = rng.normal(size=number), Point([0.0])
    objective = dro(model, number, ratio, smoothing=lam, gamma=gamma, correction=0.0, read=read)
    objective.term.tracker.set_values(None, torch.as_tensor(start))

    def best_of(u: np.ndarray) -> Any:
        return minimize_scalar(
            of_threshold, bounds=(u.min() - 2, u.max()), args=(u, ratio, lam), method="bounded"
        )

    for _ in range(6):
        samples: list[list[float]] = [[] for _ in range(number)]
        after, before = start, objective.threshold.item()
        for _ in range(2):  # two batches before the optimizer steps
            index, values = rng.choice(number, 3, replace=False), rng.normal(size=3)
            for i, value in zip(index, values, strict=True):
                samples[i].append(value)
            data = torch.as_tensor(values).requires_grad_()
            objective(lambda data=data: data + 0 * model.w, torch.as_tensor(index)).backward()
            after = np.array([
                (1 - gamma) * u_i + gamma * np.mean(seen) if seen else u_i
                for u_i, seen in zip(start, samples, strict=True)
            ])  # fmt: skip
            u = start if read == "old" else after
            best, top = best_of(u), 1 / ratio
            found = data.grad.numpy() * len(index)  # type: ignore[union-attr]
            if lam:
                # A group within the zone tells the s that its gradient was made with.
                for value, share in zip(u[index], found, strict=True):
                    if 1e-9 < share < top - 1e-9:
                        s = value - lam * share
                        assert of_threshold(s, u, ratio, lam) <= best.fun + 1e-9
                expected = np.clip((u[index] - best.x) / lam, 0, top)
                np.testing.assert_allclose(found, expected, atol=1e-4)
            elif read == "old":  # the group at the kink has what is left of 1
                s = np.sort(u)[-2]
                expected = np.where(u[index] == s, number - top, (u[index] > s) * top)
                np.testing.assert_allclose(found, expected)
            assert objective.threshold.item() == pytest.approx(before, nan_ok=True, abs=0)
        objective.optimizer.step()  # type: ignore[union-attr]
        reached = of_threshold(objective.threshold.item(), after, ratio, lam)
        assert reached <= best_of(after).fun + 1e-9
        np.testing.assert_allclose(objective.group_losses(), after)
        assert objective.group_weights().sum().item() == pytest.approx(1)
        start = after


@pytest.mark.parametrize("read, lam", [("new", 0.0), ("old", 0.2), ("old", 0.0)])
def test_unseen_groups_and_foreign_steps_bring_no_nan(read, lam):
    model = Point([1.0, -2.0, 3.0, 0.5])
    objective = dro(model, 4, 0.5, smoothing=lam, read=read, on_nonfinite="skip")
    assert objective.cvar().isnan() and objective.group_losses().isnan().all()
    model.w.sum().backward()
    objective.optimizer.step()  # type: ignore[union-attr]
    bad = take_step(objective, lambda: model.w[:2] + torch.nan, torch.tensor([0, 1]))
    assert bad == 0 and objective.threshold.isnan(), "nothing is known yet"
    for _ in range(5):
        loss = take_step(objective, lambda: model.w[:2].square(), torch.tensor([0, 2]))
        assert np.isfinite(loss) and objective.threshold.isfinite() and model.w.isfinite().all()
    for values in (objective.group_losses(), objective.group_weights()):
        assert values.isnan().tolist() == [False, True, False, True]
    assert objective.cvar().isfinite()
    kept = objective.threshold.clone()
    model.w.sum().backward()
    objective.optimizer.step()  # type: ignore[union-attr]
    assert torch.equal(kept, objective.threshold), "a step on another loss moves no threshold"
    take_step(objective, lambda: model.w[:2] + torch.nan, torch.tensor([0, 1]))
    assert torch.equal(kept, objective.threshold), "no sampled group, no move"


# Runs to known optima.


@pytest.mark.parametrize("method", ["momentum", "adam", "alexr2"])
def test_logistic_regression_ends_within_one_percent_of_cvxpy(method):
    problem, steps = LogisticGroups(), 700
    model = Point(np.zeros(5))
    optimizer: Any = fcco.optim.momentum_type(model.parameters(), lr=0.2)
    options: dict[str, Any] = {"gamma": 0.2}
    if method == "adam":
        optimizer = fcco.optim.adam_type(model.parameters(), lr=0.03)
    if method == "alexr2":
        outer = fcco.optim.momentum_type(model.parameters(), lr=0.5)
        optimizer = fcco.optim.ProximalPoint(outer, nu=1.0, eta=0.1, inner_steps=5)
        options = {"gamma": 0.5, "correction": 0.5 * 0.125, "read": "new"}
    objective = fcco.CVaRGroupDRO(
        model, optimizer, problem.number, problem.ratio, smoothing=0.01, **options
    )
    sampler = fcco.GroupBatchSampler(problem.group, groups_per_batch=4, per_group=32, seed=0)
    for step in range(steps):
        decay(optimizer, (1 - step / steps) ** 1.5)
        index = torch.as_tensor(sampler.draw())
        take_step(objective, lambda i=index: problem.batch(model.w, i), problem.group[index])
    _, best = problem.solve()
    gap = problem.value(model.w.detach().numpy()) / best - 1
    assert 0 <= gap < 0.01
    assert problem.solve(average=True)[1] > 1.1 * best, "the mean over groups is clearly worse"


def test_the_largest_of_several_minimisers_is_taken():
    """r n = 1 and losses 1 apart: every s between 1 and 2 - lambda/r is best, 1.9 is the last."""
    for shift in (0.0, 0.1, 0.3, 1e3, -7.7):
        losses = torch.tensor([0.0, 1.0, 2.0, 0.5], dtype=torch.float64) + shift
        s = threshold(losses, ratio=0.25, smoothing=0.025)[0]
        assert s.item() == pytest.approx(1.9 + shift, abs=1e-9)


def test_the_first_threshold_after_a_warm_up_knows_all_groups():
    model = torch.nn.Linear(1, 4, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dro = fcco.CVaRGroupDRO(model, optimizer, 4, ratio=0.5, smoothing=0.0)
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    dro.warm_up([(lambda: losses, torch.arange(4))])
    dro(lambda: losses[:2] + 0 * model.weight.sum(), torch.tensor([0, 1]))
    dro.close()
    assert dro.threshold.item() == 3.0


def cvar_by_sorting(losses: np.ndarray, ratio: float) -> float:
    """The mean of the worst r n losses, the last of them in part."""
    weight = np.clip(ratio * len(losses) - np.arange(len(losses)), 0, 1)
    return float(np.sort(losses)[::-1] @ weight / weight.sum())


@pytest.mark.parametrize("ratio", [0.15, 0.5, 1.0])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"smoothing": 0.1, "gamma": 0.3, "correction": 0.1, "read": "old"},
        {"smoothing": 0.0, "gamma": 0.3},
        {"smoothing": fcco.Width(0.2), "gamma": "auto"},
    ],
)
def test_the_value_of_the_loss_is_cvar_of_the_tracked_losses(settings, ratio):
    """From the first step on; with a zone of 100/r, s + mean f(u - s) was -292 in the second."""
    torch.manual_seed(0)
    model, level = torch.nn.Linear(1, 1), torch.linspace(0.2, 1.5, 9)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    objective = fcco.CVaRGroupDRO(model, optimizer, 9, ratio, **settings)
    for step in range(40):
        index = torch.randint(9, (6,)).repeat(3)
        noise = 0.3 * torch.randn(len(index))
        losses = lambda i=index, e=noise: level[i] + e + 0 * model.bias  # noqa: E731
        loss = objective(losses, index)
        objective.eval()  # there it is that of the batch alone
        found = objective(losses, index).item()
        means = [(level[i] + noise[index == i]).mean().item() for i in index.unique()]
        assert found == pytest.approx(cvar_by_sorting(np.array(means), ratio), rel=1e-5)
        objective.train()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        u = objective.group_losses().numpy()
        expected = cvar_by_sorting(u[~np.isnan(u)], ratio)
        assert loss.item() == pytest.approx(expected, rel=1e-5), step


@pytest.mark.parametrize("ratio", [0.0, 2])
def test_a_ratio_is_a_share_of_the_groups(ratio: float) -> None:
    with pytest.raises(ValueError, match="ratio"):
        dro(Point([0.0]), 4, ratio)
