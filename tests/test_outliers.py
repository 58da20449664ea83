"""One value, however large, and one batch that comes again do not spoil the estimates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from problems import take_step
from torch import nn

import fcco

GROUPS, PER_GROUP = 8, 8


class Loop:
    """Group losses level + noise, seen in batches of all groups; the model does not matter.

    The noise of each batch is new, unless a batch is given again.
    """

    def __init__(
        self, ratio: float = 0.25, noise: float = 1.0, dtype: Any = torch.float32, **more: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1).to(dtype)
        nn.init.zeros_(self.model.bias)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.dro = fcco.CVaRGroupDRO(self.model, self.optimizer, GROUPS, ratio, dtype=dtype, **more)
        self.level = torch.linspace(1.0, 3.0, GROUPS, dtype=dtype)
        self.index = torch.arange(GROUPS).repeat_interleave(PER_GROUP)
        self.noise, self.rng = noise, np.random.default_rng(1)

    def batch(self) -> torch.Tensor:
        noise = torch.as_tensor(self.rng.normal(size=len(self.index)))
        return self.level[self.index] + self.noise * noise.to(self.level)

    def call(self, losses: torch.Tensor) -> torch.Tensor:
        return self.dro(lambda: losses + self.model.bias, self.index)

    def step(self, losses: torch.Tensor) -> None:
        take_step(self.dro, lambda: losses + self.model.bias, self.index)

    @property
    def gain(self) -> float:
        return self.dro.term.tracker.gamma

    def said_error(self) -> float:
        return self.dro.term.tracker.error().mean().item()

    def worst_weight(self) -> float:
        return self.dro.group_weights()[-1].item()


# A batch that comes again.


def again(loop: Loop, how: str) -> None:
    """300 batches of pure noise, each used twice."""
    for _ in range(300):
        losses = loop.batch()
        if how == "two steps":
            loop.step(losses)
            loop.step(losses)
        elif how == "SAM":  # up, evaluate, down, step
            loop.call(losses).backward()
            with torch.no_grad():
                loop.model.bias.add_(1e-3)
            loop.optimizer.zero_grad()
            loop.call(losses).backward()
            with torch.no_grad():
                loop.model.bias.sub_(1e-3)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        else:
            loop.step(losses)


@pytest.mark.parametrize("how", ["two steps", "SAM"])
def test_a_batch_that_comes_again_is_no_new_visit(how):
    """Noise of the second time is that of the first: it was read as drift, and the gain was .95."""
    once, twice = Loop(), Loop()
    again(once, "once")
    again(twice, how)
    assert once.gain < 0.15 and twice.gain < 0.15
    # The same samples, the same knowledge: errors by noise of a mean of 8 samples.
    assert twice.said_error() == pytest.approx(once.said_error(), rel=0.25)
    torch.testing.assert_close(twice.dro.group_losses(), once.dro.group_losses(), rtol=0, atol=0.05)


@pytest.mark.parametrize("sam", [False, True])
def test_the_second_evaluation_of_sam_is_no_new_visit_of_a_constraint(sam):
    """Here there are no samples to recognise; what is known is that no step was made."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    objective = fcco.constrained(model, optimizer, {"a": 5.0, "b": 5.0})
    rng = np.random.default_rng(0)
    for _ in range(200):
        a, b = torch.as_tensor(rng.normal(size=2)).float()
        call = lambda a=a, b=b: (  # noqa: E731
            model.bias.square().sum(),
            {"a": model.bias.squeeze() + a, "b": model.bias.squeeze() + b},
        )
        objective(call).backward()
        if sam:
            with torch.no_grad():
                model.bias.add_(1e-3)
            optimizer.zero_grad()
            objective(call).backward()
            with torch.no_grad():
                model.bias.sub_(1e-3)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(objective.term.variance, torch.ones(2), rtol=0, atol=0.35)


def test_training_on_all_data_is_not_taken_for_a_batch_that_comes_again():
    """Values without noise that move: u must follow at once, as without any rule for batches."""
    loop = Loop(noise=0.0)
    spread = torch.as_tensor(np.random.default_rng(2).normal(size=len(loop.index))).float()
    for step in range(100):
        loop.step(loop.level[loop.index] + spread + 0.01 * step)
    means = (loop.level[loop.index] + spread).view(GROUPS, -1).mean(1) + 0.01 * 99
    lag = (means - loop.dro.group_losses()).abs().max()
    assert loop.gain > 0.8 and lag < 0.005
    assert loop.worst_weight() > 0.2, "not all groups alike"


def test_mini_batches_and_then_all_data():
    """The rule lets go: one batch for good is all the data there is."""
    loop = Loop()
    again(loop, "once")
    last = loop.batch()
    for _ in range(200):
        loop.step(last)
    means = last.view(GROUPS, -1).mean(1)
    torch.testing.assert_close(loop.dro.group_losses(), means, rtol=0, atol=0.05)


# One value that is far off.


@pytest.mark.parametrize("size", [1e3, 1e6, 1e12, 1e30])
@pytest.mark.parametrize("group", [0, GROUPS - 1])
def test_one_outlier_does_not_switch_the_worst_group_off(size, group):
    loop, plain = Loop(), Loop()
    for step in range(150):
        losses = loop.batch()
        plain.step(losses.clone())
        if step == 100:
            losses[loop.index == group] *= torch.tensor([size] + [1.0] * (PER_GROUP - 1))
        loop.step(losses)
        if step > 102:
            assert loop.worst_weight() > 0.8 * plain.worst_weight(), step
    # What is known of the noise hardly changed, and u has come back.
    assert loop.said_error() == pytest.approx(plain.said_error(), rel=0.3)
    torch.testing.assert_close(loop.dro.group_losses(), plain.dro.group_losses(), rtol=0, atol=0.3)
    assert all(bool(b.isfinite().all()) for b in loop.dro.buffers())


@pytest.mark.parametrize("size", [1e3, 1e6, 1e12])
@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_one_outlier_in_the_first_batches_is_forgotten(size, at):
    """There is hardly anything yet that tells how large values are."""
    loop, plain = Loop(), Loop()
    for step in range(300):
        losses = loop.batch()
        plain.step(losses.clone())
        if step == at:
            losses[-1] *= size
        loop.step(losses)
    assert loop.worst_weight() > 0.8 * plain.worst_weight()
    assert loop.said_error() < 2.5 * plain.said_error()
    torch.testing.assert_close(loop.dro.group_losses(), plain.dro.group_losses(), rtol=0, atol=0.3)


@pytest.mark.parametrize("dtype, size", [(torch.float32, 1e37), (torch.float64, 1e200)])
def test_a_first_value_that_cannot_be_squared_is_refused_and_changes_nothing(dtype, size):
    loop = Loop(dtype=dtype)
    before = {k: v.clone() for k, v in loop.dro.named_buffers()}
    with pytest.raises(ValueError, match="large"):
        loop.call(loop.batch() * size)
    assert all(torch.equal(v, before[k]) or v.isnan().all() for k, v in loop.dro.named_buffers())
    for _ in range(20):
        loop.step(loop.batch())
    assert all(bool(b.isfinite().all()) for b in loop.dro.buffers())


@pytest.mark.parametrize("how", ["skip", "late"])
def test_a_first_value_that_cannot_be_squared_is_left_out_where_errors_are_not_wanted(
    how, monkeypatch
):
    """Where a program would wait for its GPU, the error comes late; there are no groups without."""
    monkeypatch.setattr("fcco.rules.arrays.USE_NUMPY", how == "skip")
    loop = Loop(on_nonfinite="skip" if how == "skip" else "raise")
    losses = loop.batch()
    losses[-1] = 1e37
    loop.step(losses)
    if how == "late":
        with pytest.raises(fcco.NonFiniteValue, match=r"\[7\].*earlier"):
            loop.call(loop.batch())
    for _ in range(100):
        loop.step(loop.batch())
    torch.testing.assert_close(loop.dro.group_losses(), loop.level, rtol=0, atol=0.5)
    assert loop.said_error() < 0.2


@pytest.mark.parametrize("size", [1e3, 1e9, 1e15])
def test_a_bad_first_value_is_forgotten(size):
    """Whatever is accepted can be recovered from: here all groups, in the first batch of all."""
    loop = Loop()
    loop.step(loop.batch() * size)
    for _ in range(60):
        loop.step(loop.batch())
    torch.testing.assert_close(loop.dro.group_losses(), loop.level, rtol=0, atol=0.7)
    for _ in range(100 if size > 1e6 else 1600):
        loop.step(loop.batch())
    assert loop.said_error() < 0.2  # 0.35 is the noise of a batch value


def test_a_real_change_of_level_is_followed():
    loop = Loop()
    again(loop, "once")
    for _ in range(3):  # one group alone starts anew with the third value
        losses = loop.batch()
        losses[loop.index == 3] += 500
        loop.step(losses)
    assert abs(loop.dro.group_losses()[3] - loop.level[3] - 500) < 1.5
    loop.level[3] += 500
    for _ in range(60):  # all groups at once: the gain rises
        loop.step(loop.batch() + 1000)
    torch.testing.assert_close(loop.dro.group_losses(), loop.level + 1000, rtol=0, atol=1.5)


def test_rare_events_keep_their_mean():
    """Once in 100 visits and nothing in between: ten standard deviations off, and no outlier."""
    loop = Loop(noise=0.0)
    loop.level.zero_()
    found = []
    for step in range(3000):
        losses = loop.batch()
        losses[loop.index == 0] = float(step % 100 == 50)
        loop.step(losses)
        found.append(loop.dro.group_losses()[0].item())
    assert np.mean(found[500:]) == pytest.approx(1 / 100, rel=0.1)


@pytest.mark.parametrize("dtype, size", [(torch.float32, 1e30), (torch.float64, 1e200)])
@pytest.mark.parametrize("at", [1, 5, 60])
def test_one_loss_far_off_does_not_silence_the_constraints(dtype, size, at):
    """The unit of multipliers is the noise of the loss; the rule squares differences of it."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    objective = fcco.constrained(model, optimizer, {"w": 0.3}, dtype=dtype)
    noise = np.random.default_rng(0)
    for step in range(800):
        w, e = model.weight.view(1), torch.as_tensor(0.1 * noise.normal(size=2)).to(dtype)
        loss = (w - 1 + e[0]).square().sum() / 2
        loss = loss + size if step == at else loss
        take_step(objective, lambda loss=loss, w=w, e=e: (loss, {"w": (w + e[1]).squeeze()}))
    assert model.weight.item() == pytest.approx(0.3, abs=0.06)
