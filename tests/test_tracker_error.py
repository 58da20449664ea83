"""The error of the estimates, and what follows from it: gamma, the width of the kink, Group DRO."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from problems import take_step
from torch import Tensor, nn

import fcco
from fcco.tracker import OpenStep

DOUBLE = torch.float64


def tracker(number: int, gamma: Any = "auto", **options: Any) -> fcco.tracker.InnerTracker:
    settings: dict[str, Any] = {
        "correction": 0.0, "read": "new", "measure": True, "dtype": DOUBLE,
    }  # fmt: skip
    return fcco.tracker.InnerTracker(number, gamma=gamma, **(settings | options))


def draws(seed: int, steps: int, number: int, size: int, *shape: int) -> list[tuple[Any, Any]]:
    """Batches of `size` blocks, in any order, and standard normal numbers for them."""
    draw = np.random.default_rng(seed)
    return [
        (
            torch.tensor(draw.permutation(number)[:size]),
            torch.tensor(draw.normal(size=(size, *shape))),
        )
        for _ in range(steps)
    ]


# Written by hand.


class ByHand:
    """One block after the other, in Python's numbers."""

    def __init__(self, number: int, dim: int, gamma: float | None, least: float = 0.0) -> None:
        self.u = np.zeros((number, dim))
        self.last, self.spread, self.slow = (np.zeros((number, dim)) for _ in range(3))
        self.earlier = np.zeros((number, dim))
        self.visits, self.a, self.b = [0] * number, [0.0] * number, [0.0] * number
        self.gamma, self.gain, self.least = gamma, 0.5, least
        self.means, self.steps = np.zeros(9), 0

    def step(self, index: list[int], values: np.ndarray) -> None:
        rows, memory = [], 1 + 128 * self.means[4] / self.u.size
        for i, fresh in zip(index, values, strict=True):
            k, a, b = self.visits[i], self.a[i], self.b[i]
            weight = self.gamma
            if weight is None:
                weight = max(3 / (k + 3), self.gain, self.least)
            weight = weight if k else 1.0
            slowly = max(1 / (min(k, 100) + 1), 1 / memory)
            for c in range(len(fresh)):
                if k > 0:
                    moved = (fresh[c] - self.last[i, c]) ** 2
                    missed = (fresh[c] - self.u[i, c]) ** 2
                    self.spread[i, c] += (moved - self.spread[i, c]) / min(k, 100)
                    turned = moved - (fresh[c] - self.earlier[i, c]) ** 2 if k > 1 else 0.0
                self.u[i, c] += (fresh[c] - self.u[i, c]) * weight
                self.slow[i, c] += (self.u[i, c] - self.slow[i, c]) * slowly
                self.earlier[i, c], self.last[i, c] = self.last[i, c], fresh[c]
                if k > 0:
                    ahead = self.u[i, c] - self.slow[i, c]
                    rows.append((moved, missed, 1 + a, b + 1, ahead, turned, k > 1))
            self.a[i] = (1 - weight) ** 2 * a + weight**2
            self.b[i] = (1 - weight) ** 2 * (b + 1)
            self.visits[i] += 1
        if not rows:
            return
        self.steps += 1
        *means, ahead, turned, share = np.mean(rows, axis=0)
        step = np.array([*means, len(rows), ahead, turned, turned**2, share])
        self.means += (step - self.means) / min(self.steps, 50)
        if self.gamma is None:
            noise, drift, _ = self.solve()
            ratio = drift / noise if noise else math.inf
            best = 1.0 if noise == 0 else (math.sqrt(ratio**2 + 4 * ratio) - ratio) / 2
            self.gain += (min(max(best, 0.05), 0.95) - self.gain) / 50

    def solve(self) -> tuple[float, float, float]:
        """Of D, D_2 and V the noise, the drift, and how far successive values are opposed.

        Where the equations are told apart; without a third visit, or if values are not opposed, of
        D and V alone.
        """
        if not self.steps:
            return 0.0, 0.0, 0.0
        difference, innovation, one_a, b_one, _, _, turned, squared, share = self.means
        a, b = one_a - 1, b_one - 1
        if share > 0:
            # Unknowns: noise, drift, and kappa times noise.
            equations = np.array([[2, 1, 2], [2, 2, 0], [1 + a, b + 1, 2 * a]])
            known = np.array([difference, difference - turned / share, innovation])
            drift = np.linalg.solve(equations, known)[1] if b else 0.0
            drift = np.clip(drift * b**2 / (b**2 + 1e-3), 0, difference)
            noise, opposed = np.linalg.solve(equations[:2, ::2], known[:2] - [drift, 2 * drift])
            spread = abs(squared - turned**2)
            chance = math.sqrt(spread / min(self.steps, 50)) / share / 2
            if self.steps > 10 and noise > 0 and opposed > 2.5 * chance:
                kappa = min((opposed - chance) / (noise + chance), 0.5)
                return (difference - drift) / (2 + 2 * kappa), drift, kappa
        equations = np.array([[2, 1], [one_a, b_one]])
        if abs(apart := np.linalg.det(equations)) < 1e-9:
            return difference / 2, 0.0, 0.0
        drift = np.linalg.solve(equations, [difference, innovation])[1]
        drift = np.clip(drift * apart**2 / (apart**2 + 1e-3), 0, difference)
        return (difference - drift) / 2, drift, 0.0

    def error(self) -> np.ndarray:
        found, (noise, drift, kappa) = np.full_like(self.u, math.nan), self.solve()
        for i, k in enumerate(self.visits):
            if not (k and self.steps):
                continue
            since = self.b[i] + 1 - self.means[4] / self.u.size
            a = self.a[i]
            a *= 1 - 2 * kappa * (1 - a) / (1 + a)
            share = (noise * a + drift * since) / self.means[0]
            own = ((k - 1) * self.spread[i] + 8 * self.means[0]) / (k + 7)
            found[i] = np.sqrt(share * (own if k <= 20 else self.spread[i]))
        return found


@pytest.mark.parametrize("gamma, dim", [(0.3, 3), (1.0, 1), (None, 3)])
def test_equals_what_is_written_by_hand(gamma, dim):
    number = 6
    by_hand = ByHand(number, dim, gamma)
    tracked = tracker(number, "auto" if gamma is None else gamma, dim=dim)
    drift = np.cumsum(np.random.default_rng(5).normal(size=(120, 1, dim)), axis=0)
    for step, (index, noise) in enumerate(draws(4, 120, number, 3, dim)):
        values = 0.4 * drift[step] + noise.numpy()
        by_hand.step(index.tolist(), values)
        read = tracked(torch.tensor(values).requires_grad_(), index)
        order = index.sort().values
        np.testing.assert_allclose(read.detach().view(-1, dim), by_hand.u[order], atol=1e-12)
        np.testing.assert_allclose(
            tracked.error().view(-1, dim), by_hand.error(), rtol=1e-9, atol=1e-12
        )
        if gamma is None:
            assert tracked.gamma == pytest.approx(by_hand.gain, abs=1e-12)
    np.testing.assert_allclose(tracked.value, by_hand.u, atol=1e-12)
    estimate = tracked.estimate
    assert estimate is not None
    pooled = [*by_hand.means, min(by_hand.steps, 50)]
    np.testing.assert_allclose(estimate.pooled[:10], pooled, rtol=1e-12)
    np.testing.assert_allclose(estimate.slow.view(-1, dim), by_hand.slow, atol=1e-12)
    assert max(by_hand.visits) > 50 and estimate.visits.tolist() == [
        min(each, 100) for each in by_hand.visits
    ]


@pytest.mark.parametrize("settings", [
    {"gamma": 0.3, "correction": 0.6}, {"gamma": 0.2, "correction": "auto"},
    {"gamma": 0.3, "refresh_every": 7}, {"gamma": 0.5, "correction": "theory", "read": "old"},
])  # fmt: skip
def test_a_tracker_that_measures_tracks_the_same(settings):
    """As long as no value is far off."""
    plain, measured = (tracker(5, measure=measure, **settings) for measure in (False, True))
    for (index, values), (_, moved) in zip(draws(0, 60, 5, 3), draws(1, 60, 5, 3), strict=True):
        past = values - 0.1 * moved
        found = [each(values, index, past) for each in (plain, measured)]
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(measured.value, plain.value, rtol=0, atol=1e-12)


# What counts as a visit.


def buffers(tracked: fcco.tracker.InnerTracker) -> dict[str, Tensor]:
    return {
        name: value.clone() for name, value in tracked.state_dict().items() if "extra" not in name
    }


@pytest.mark.parametrize("use_numpy", [True, False])
def test_two_batches_of_one_step_are_one_visit_and_a_dropped_step_is_none(use_numpy, monkeypatch):
    monkeypatch.setattr("fcco.rules.arrays.USE_NUMPY", use_numpy)
    pooled, parts = tracker(4), tracker(4)
    for (index, values), (_, more) in zip(draws(0, 9, 4, 3), draws(1, 9, 4, 3), strict=True):
        pooled(torch.cat([values, more]), torch.cat([index, index]))
        before, blocks, step = buffers(parts), parts.blocks(index), OpenStep()
        parts.track(parts.entries(blocks, 7 * more), OpenStep())
        for each in (values, more):
            parts.track(parts.entries(blocks, each), step)
        torch.testing.assert_close(buffers(parts), before, rtol=0, atol=0)
        parts.close(step.updates[parts])
    torch.testing.assert_close(buffers(parts), buffers(pooled), rtol=1e-12, atol=1e-12)
    assert pooled.estimate is not None and pooled.estimate.visits.sum() == 27


@pytest.mark.parametrize("gamma", ["auto", 0.3])
def test_a_value_that_is_not_finite_is_no_visit(gamma, monkeypatch):
    monkeypatch.setattr("fcco.rules.arrays.USE_NUMPY", False)  # "raise" is then late
    deferred, skipping = (tracker(3, gamma, on_nonfinite=how) for how in ("raise", "skip"))
    good = tracker(3, gamma)
    for step, (_, values) in enumerate(draws(0, 12, 3, 3)):
        bad = values.clone()
        keep = torch.tensor([True, step % 3 != 1, True])
        bad[~keep] = math.nan
        good(values[keep], torch.arange(3)[keep])
        skipping(bad)
        try:
            deferred(bad)
        except fcco.NonFiniteValue:  # of the step before
            deferred(bad)
    for other in (deferred, skipping):
        torch.testing.assert_close(buffers(other), buffers(good), rtol=1e-12, atol=1e-12)
    empty = buffers(skipping)
    skipping(torch.full((3,), math.nan, dtype=DOUBLE))
    torch.testing.assert_close(buffers(skipping), empty, rtol=0, atol=0)


def test_values_set_by_hand_are_a_first_visit():
    """Else the first batch would replace them as a whole, and be compared with nothing."""
    tracked = tracker(2)
    tracked.set_values([0], torch.tensor([4.0], dtype=DOUBLE))
    tracked(torch.tensor([6.0, 1.0], dtype=DOUBLE))
    assert tracked.rows.tolist() == [5.5, 1.0]  # the second value has weight 3/4
    # One difference: D = 4, all of it noise of variance 2 as far as one can know.
    torch.testing.assert_close(tracked.error(), torch.tensor([1.25, 2.0], dtype=DOUBLE).sqrt())
    tracked.set_values([0], torch.tensor([100.0], dtype=DOUBLE))
    torch.testing.assert_close(tracked.error(), torch.tensor([2.0, 2.0], dtype=DOUBLE).sqrt())
    tracked(torch.tensor([101.0], dtype=DOUBLE), [0])
    assert tracked.error()[0] <= 1, "what was known is about other values"


# The width of the rounded kink.


class Values(nn.Module):
    """Inner values that the test writes, with a parameter that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.zeros((), dtype=DOUBLE))

    def step(self, objective: fcco.Compositional, values: Tensor, index: Tensor) -> None:
        objective(lambda: values + self.point, index).backward()
        objective.optimizer.step()  # type: ignore[union-attr]


def coupled(outer: Any, gamma: Any) -> tuple[Values, fcco.Compositional]:
    model = Values()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    term = fcco.terms.CoupledTerm(outer, tracker(6, gamma), smoothing="auto")
    return model, fcco.Compositional(model, optimizer, term)


@pytest.mark.parametrize("gamma", [0.3, "auto"])
def test_the_width_follows_noise_drift_and_progress(gamma):
    model, objective = coupled(fcco.outer.Hinge(5.0), gamma)
    term: Any = objective.term
    by_hand = ByHand(6, 1, None if gamma == "auto" else gamma)

    def width() -> float:
        (noise, drift, _), values = by_hand.solve(), by_hand.means[4]
        by_noise = math.sqrt(noise * max(by_hand.means[2] - 1, 0))
        drifted = 32 * values / 6 * math.sqrt(drift)
        assert step < 9 or min(by_noise, abs(by_hand.means[5])) > 0
        return 4 * by_noise + drifted + abs(by_hand.means[5])

    for step, (index, noise) in enumerate(draws(0, 80, 6, 3)):
        values, known = noise - 0.1 * step, width()
        model.step(objective, values, index)
        by_hand.step(index.tolist(), values.numpy()[:, None])
        assert term.width.item() == pytest.approx(known, rel=1e-6, abs=1e-11)
        assert term.smoothing * 5.0 == pytest.approx(term.width.item())
    with torch.no_grad():
        objective(lambda: 1e3 * noise, index)
    assert term.smoothing * 5.0 == pytest.approx(known, rel=1e-6), "no step, no change"


@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_the_width_of_a_trend_without_noise(ratio):
    """With gamma = 1 a step of d between visits counts as noise of variance d^2 / 2."""
    model = Values()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dro: Any = fcco.CVaRGroupDRO(model, optimizer, 8, ratio, gamma=1.0, read="new")
    for step in range(1500):
        index = torch.arange(8)[step % 2 :: 2]
        model.step(dro, index - 0.01 * step, index)
    width = 4 * 0.02 / math.sqrt(2) + 128 * 0.01 / ratio
    assert dro.term.width.item() == pytest.approx(width, rel=1e-3)


def test_lambda_stays_below_the_limit_of_a_weakly_convex_function():
    outer = fcco.outer.OneSidedMCP(1.0, 0.5)
    model, objective = coupled(outer, "auto")
    for index, noise in draws(0, 20, 6, 3):
        model.step(objective, 1e3 * noise, index)
    term: Any = objective.term
    assert term.smoothing == pytest.approx(0.5 / outer.weak_convexity)


# Group DRO without a setting.


class Groups:
    """Groups whose best weights differ; the loss of one is |w - center|^2 + 1 in expectation."""

    def __init__(self, number: int = 20, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        # Most centers are close together, some are far out on one side.
        distance = torch.linspace(0, 1, number, dtype=DOUBLE) ** 3 * 2
        direction = torch.randn(number, 2, generator=draw, dtype=DOUBLE)
        direction[:, 0] = direction[:, 0].abs()
        self.number = number
        self.center = distance[:, None] * direction / direction.norm(dim=1, keepdim=True)

    def batch(self, draw: torch.Generator, blocks: int, each: int) -> tuple[Tensor, Tensor, Tensor]:
        group = torch.randperm(self.number, generator=draw)[:blocks].repeat_interleave(each)
        x = torch.randn(len(group), 2, generator=draw, dtype=DOUBLE)
        noise = torch.randn(len(group), generator=draw, dtype=DOUBLE)
        return x, (x * self.center[group]).sum(1) + noise, group

    def losses(self, model: nn.Module) -> Tensor:
        (weight,) = model.parameters()
        return (weight.detach() - self.center).square().sum(1) + 1

    def train(
        self, steps: int, scale: float = 1.0, lr: float = 0.05, **options: Any
    ) -> tuple[nn.Module, fcco.CVaRGroupDRO]:
        model = nn.Linear(2, 1, bias=False).to(DOUBLE)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr / scale)
        settings: dict[str, Any] = {"ratio": 0.2, **options}
        dro = fcco.CVaRGroupDRO(model, optimizer, self.number, **settings)
        draw = torch.Generator().manual_seed(1)
        for step in range(steps):
            x, y, group = self.batch(draw, 5, 8)
            optimizer.param_groups[0]["lr"] = lr / scale * (1 - step / steps)
            take_step(dro, lambda x=x, y=y: scale * (model(x).squeeze(1) - y).square(), group)
        return model, dro


def test_units_of_the_loss_do_not_matter():
    (one, dro), (other, scaled) = (Groups().train(120, scale) for scale in (1.0, 100.0))
    torch.testing.assert_close(other.weight, one.weight, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(scaled.group_weights(), dro.group_weights(), rtol=1e-6, atol=1e-8)
    assert scaled.term.width.item() == pytest.approx(100 * dro.term.width.item(), rel=1e-7)
    assert scaled.term.tracker.gamma == pytest.approx(dro.term.tracker.gamma, rel=1e-9)
    shares = dro.group_weights()
    assert shares.max() > 3 * shares.min()


@pytest.mark.slow
def test_the_ratio_is_what_is_minimised():
    """Training with r gives the lowest CVaR_r where groups must trade off."""
    groups, ratios = Groups(), (0.05, 0.15, 0.5, 1.0)
    found = []
    for ratio in ratios:
        model, _ = groups.train(900, ratio=ratio)
        losses = groups.losses(model)
        found.append([fcco.outer.CVaR(each)(losses).item() for each in ratios])
    table = np.array(found)  # trained with (row), judged by (column)
    assert (table.argmin(0) == np.arange(len(ratios))).all(), table


def test_at_first_all_groups_count_alike_whatever_the_batches_hold():
    model = nn.Linear(1, 1, bias=False)
    for read in ("old", "new"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        dro = fcco.CVaRGroupDRO(model, optimizer, 40, 1 / 40, read=read)
        for group in range(40):
            dro(lambda k=group: k + 0 * model.weight.view(1), [group]).backward()
            optimizer.step()
            weights = dro.group_weights()[: group + 1]
            torch.testing.assert_close(weights, torch.full_like(weights, 1 / 40), rtol=0.1, atol=0)
        # Second visits say that there is no noise: when there were 50 of them, also of few
        # groups, the worst group counts.
        for again in range(51):
            assert dro.group_weights()[39] == pytest.approx(1 / 40, rel=0.1)
            dro(lambda k=again % 8: k + 0 * model.weight.view(1), [again % 8]).backward()
            optimizer.step()
        assert dro.group_weights()[39] == pytest.approx(1)
