"""Loops that run but do not do what was meant say so; loops that are right stay silent.

Every warning is an error in this suite, so that a loop without `pytest.warns` is one that must be
silent.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from problems import Point, take_step
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import fcco
from fcco import xrisk
from fcco.methods import constrained

GROUPS, SIZE = 6, 12
warns = functools.partial(pytest.warns, fcco.UsageWarning)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 1))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)


def dro(model: nn.Module, optimizer: Any, correction: float = 0.4, **more: Any) -> Any:
    return fcco.CVaRGroupDRO(
        model, optimizer, GROUPS, 0.5, gamma=0.5, correction=correction, **more
    )


class Data:
    """Batches of samples, their groups drawn equally."""

    def __init__(self, groups: int = GROUPS) -> None:
        self.draw, self.groups = np.random.default_rng(0), groups

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.tensor(self.draw.normal(size=(SIZE, 3)), dtype=torch.float32)
        group = torch.tensor(self.draw.integers(self.groups, size=SIZE))
        return x, (x[:, 0] + 0.3 * group > 0.5).float(), group


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return bce(model(x).squeeze(1), y, reduction="none")


def call(objective: Any, model: nn.Module, data: Data) -> Tensor:
    x, y, group = data.batch()
    return objective(lambda: losses(model, x, y), group)


def train(
    objective: Any, model: nn.Module, step: Callable[[], Any], calls: int, every: int = 1
) -> None:
    data = Data()
    for number in range(1, calls + 1):
        call(objective, model, data).backward()
        if number % every == 0:
            step()
            model.zero_grad()


# Steps that the objective does not see.


def by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(0.1 * p.grad)  # type: ignore[operator]


def stepped_elsewhere(case: str) -> tuple[Any, nn.Module, Callable[[], Any]]:
    """An objective, a model and a step of it that the objective's optimizer has no part in."""
    model: Any = nn.Sequential(nn.Linear(3, 1)) if case == "exchanged" else network()
    optimizer = sgd(model)
    objective = dro(model, optimizer, 0.0 if case == "fused" else 0.4)
    if case == "by hand":
        return objective, model, lambda: by_hand(model)
    if case == "copied":
        model, optimizer = copy.deepcopy((model, optimizer))
        return objective, model, optimizer.step
    if case == "exchanged":
        model[0] = nn.Linear(3, 1)
        return objective, model, sgd(model).step
    anew = torch.optim.AdamW(model.parameters(), fused=case == "fused")
    return objective, model, anew.step


@pytest.mark.parametrize("case, message", [
    ("made anew", r"SGD, made no step.*with the optimizer that is stepped .*RobustTrainer"),
    ("fused", "SGD, made no step.*is another optimizer stepped"),
    ("by hand", r"`objective.close\(\)` after each update"),
    ("copied", "SGD, made no step.*a copy of the model"),
    ("exchanged", "SGD, made no step.*has the model got other parameters"),
])  # fmt: skip
def test_steps_of_something_else_are_noticed(case, message):
    objective, model, step = stepped_elsewhere(case)
    with warns(match=message) as said:
        train(objective, model, step, 120)
    assert len(said) == 1 and said[0].filename == __file__


def test_an_optimizer_of_another_model_is_refused_or_noticed():
    model, other = network(), network(1)
    with pytest.raises(ValueError, match="no parameter of this Sequential"):
        dro(model, sgd(other))
    with warns(match="no parameter of this Sequential"):
        dro(model, sgd(other), correction=0.0)


@pytest.mark.parametrize("correction", [0.4, 0.0])
@pytest.mark.parametrize("kept", [False, True])
def test_evaluations_that_are_tracked_as_training_are_noticed(correction, kept):
    """At once; and they do not enter the estimates, unless their losses are kept."""
    model = network().eval()  # without dropout
    optimizer = sgd(model)
    objective = dro(model, optimizer, correction)
    train(objective, model, optimizer.step, 5)
    before, data, sums = objective.group_losses(), Data(), []
    with warns(match=r"evaluations, use `objective.eval\(\)`") as said:
        for _ in range(4):
            loss = call(objective, model, data)
            sums.append(loss if kept else loss.item())
        del loss
        if not kept:
            last = call(objective, model, data)
            inside = objective.group_losses()
            last.backward()
        optimizer.step()
    assert len(said) == 1 and said[0].filename == __file__
    if kept:
        return
    model.zero_grad()
    twin = network().eval()
    other = sgd(twin)
    plain = dro(twin, other, correction)
    train(plain, twin, other.step, 5)
    assert torch.equal(plain.group_losses(), before)
    data = Data()
    for _ in range(4):
        data.batch()
    call(plain, twin, data).backward()
    torch.testing.assert_close(inside, plain.group_losses(), equal_nan=True)


@pytest.mark.parametrize("order", ["at the end", "before backward"])
def test_one_evaluation_an_epoch_that_is_tracked_as_training_is_noticed(order):
    """Alone between two steps, also where gradients of the last step are still there."""
    model, data = network(), Data()
    optimizer = sgd(model)
    objective = dro(model, optimizer, 0.0)
    with warns(match=r"evaluations, use `objective.eval\(\)`") as said:
        for _ in range(4):
            for _ in range(3):
                loss = call(objective, model, data)
                if order == "before backward":
                    optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if order == "at the end":
                    optimizer.zero_grad()
            call(objective, model, data).item()
    assert len(said) == 1


def test_a_single_loss_that_is_dropped_and_losses_that_are_summed_are_fine():
    model, data = network(), Data()
    optimizer = sgd(model)
    objective = dro(model, optimizer)
    call(objective, model, data)  # a look at the first loss, say
    for _ in range(3):
        sum(call(objective, model, data) for _ in range(3)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(3):
        gradients = torch.autograd.grad(call(objective, model, data), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()


@pytest.mark.parametrize("order", ["before the call", "before backward", "at the end", "to zero"])
def test_a_missing_step_is_noticed_within_25_calls(order):
    model, data = network(), Data()
    optimizer = sgd(model)
    objective = dro(model, optimizer, 0.0)
    with warns(match=r"between `loss.backward\(\)` and `zero_grad\(\)`") as said:
        for _ in range(25):
            if order == "before the call":
                optimizer.zero_grad()
            loss = call(objective, model, data)
            if order == "before backward":
                optimizer.zero_grad()
            loss.backward()
            if order in ("at the end", "to zero"):
                optimizer.zero_grad(set_to_none=order == "at the end")
    assert len(said) == 1


def test_a_copy_of_the_objective_alone_is_noticed_at_its_first_call():
    model, data = network(), Data()
    optimizer = sgd(model)
    objective = dro(model, optimizer, 0.0)
    train(objective, model, optimizer.step, 3)
    alone = copy.deepcopy(objective)
    with warns(match="copy.*runs another model.*deepcopy"):
        call(alone, model, data).backward()
    own = copy.deepcopy(objective)
    call(own, own.model, data).backward()
    objective, model, optimizer = copy.deepcopy((objective, model, optimizer))
    train(objective, model, optimizer.step, 30)


@pytest.mark.parametrize("method", ["alexr2", "ssg", "oss"])
def test_the_optimizer_inside_a_method_is_refused(method):
    settings: dict[str, Any] = {
        "alexr2": {"penalty": 1.0, "smoothing": 0.1, "nu": 0.5, "eta": 0.1},
        "ssg": {"threshold": 0.1},
        "oss": {"proximal": 1.0, "inner_steps": 5},
    }[method]
    model = Point([1.0, 2.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objective = constrained(model, optimizer, 2, method, **settings)
    objective(lambda: (model.w.square().sum(), model.w)).backward()
    with pytest.raises(RuntimeError, match=r"Step `objective.optimizer`"):
        optimizer.step()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with warns(match=r"Step `objective.optimizer`"):
        for _ in range(25):
            objective(lambda: (model.w.square().sum(), model.w)).backward()
            other.step()


# eval() mode.


def test_a_step_on_a_loss_of_eval_mode_is_noticed():
    model = network()
    optimizer = sgd(model)
    objective = dro(model, optimizer)
    train(objective, model, optimizer.step, 3)
    holder = nn.ModuleList([objective]).eval()
    with warns(match=r"eval\(\)` mode.*objective.train\(\)") as said:
        train(objective, model, optimizer.step, 3)
    assert len(said) == 1
    holder.train()
    before = objective.term.step
    train(objective, model, optimizer.step, 3)
    assert objective.term.step == before + 3


def test_gradients_in_eval_mode_without_a_step_are_fine():
    """Adversarial examples, or the norm of the gradient on held-out data."""
    model = network()
    optimizer, data = sgd(model), Data()
    objective = dro(model, optimizer)
    for _ in range(5):
        objective.eval()
        x, y, group = data.batch()
        x.requires_grad_()
        objective(lambda x=x, y=y: losses(model, x, y), group).backward()
        optimizer.zero_grad()
        objective.train()
        near = (x + 0.1 * x.grad.sign()).detach()  # type: ignore[union-attr]
        take_step(objective, lambda near=near, y=y: losses(model, near, y), group)


@pytest.mark.parametrize("index", [None, torch.arange(SIZE)])
def test_a_step_on_a_loss_of_a_risk_in_eval_mode_is_noticed(index):
    model = network()
    optimizer, (x, y, _) = sgd(model), Data().batch()
    risk = xrisk.AveragePrecision(model, optimizer, y).eval()
    with warns(match=r"eval\(\)` mode"):
        risk(lambda: model(x).squeeze(1), y, index).backward()
        optimizer.step()


# Scores that are probabilities.

LABELS = torch.arange(200) % 2
RISKS: dict[str, Callable[..., Any]] = {
    "AveragePrecision": lambda m, o, **more: xrisk.AveragePrecision(m, o, LABELS, **more),
    "PartialAUC": lambda m, o, **more: xrisk.PartialAUC(m, o, LABELS, max_fpr=0.3, **more),
    "TwoWayPartialAUC": lambda m, o, **more: xrisk.TwoWayPartialAUC(
        m, o, LABELS, max_fpr=0.3, min_tpr=0.5, **more
    ),
    "ListwiseCrossEntropy": lambda m, o: xrisk.ListwiseCrossEntropy(m, o, LABELS, 0 * LABELS),
}


def score(name: str, of: Callable[[Tensor], Tensor], calls: int, size: int, **more: Any) -> None:
    """Train a risk with the scores `of(logits)`."""
    model, draw = network(), torch.Generator().manual_seed(0)
    optimizer = sgd(model, 0.01)
    risk = RISKS[name](model, optimizer, **more)
    for _ in range(calls):
        half = torch.randperm(100, generator=draw)[: size // 2]
        ids = torch.cat([2 * half, 2 * half + 1])  # equally many of each class
        x = torch.randn(size, 3, generator=draw)
        labels = () if name == "ListwiseCrossEntropy" else (LABELS[ids],)
        risk(lambda x=x: of(model(x).squeeze(1)), *labels, ids).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", RISKS)
def test_probabilities_in_place_of_logits_are_noticed(name):
    with warns(match=rf"`{name}`.*\[0, 1\].*logits") as said:
        score(name, torch.sigmoid, calls=80, size=50)
    assert len(said) == 1


@pytest.mark.parametrize("name", RISKS)
def test_logits_and_few_or_intended_probabilities_are_fine(name):
    score(name, lambda h: 0.01 * h, calls=80, size=50)  # logits, small ones
    score(name, lambda h: 2 * h.sigmoid(), calls=80, size=50)
    score(name, torch.sigmoid, calls=10, size=50)  # few calls
    score(name, torch.sigmoid, calls=80, size=4)  # few values
    if name != "ListwiseCrossEntropy":
        score(name, torch.sigmoid, calls=80, size=50, activation=None, margin=1.0)


# Functions that return what was computed before.


@pytest.mark.parametrize("outside", ["losses", "logits", "view"])
def test_values_from_outside_the_function_are_noticed(outside):
    model, data = nn.Linear(3, 1), Data()
    optimizer = sgd(model)
    objective = dro(model, optimizer)

    def function(x: Tensor, y: Tensor) -> Callable[[], Tensor]:
        if outside == "losses":
            values = losses(model, x, y)
            return lambda: values
        if outside == "logits":
            logits = model(x).squeeze(1)
            return lambda: bce(logits, y, reduction="none")
        weight, bias = model.weight.view(3), model.bias.view(())
        return lambda: bce(x @ weight + bias, y, reduction="none")

    with warns(match="computed before it was called.*run the model inside") as said:
        for _ in range(6):
            x, y, group = data.batch()
            take_step(objective, function(x, y), group)
    assert len(said) == 1


def test_inputs_and_other_modules_from_outside_are_fine():
    """Also where they need a gradient, and where only a part of the model runs inside."""
    model, encoder, data = network(), nn.Linear(3, 3), Data()
    optimizer = sgd(model)
    objective = dro(model, optimizer)
    for _ in range(6):
        x, y, group = data.batch()
        noise = torch.zeros(3, requires_grad=True)
        moved = encoder(x) + noise
        take_step(objective, lambda moved=moved, y=y: losses(model, moved, y), group)


def test_bare_parameters_weights_and_casts_are_fine():
    """A weight norm runs no module; autocast keeps casts of weights from before the call."""
    model, data = network(), Data()
    optimizer = sgd(model)
    settings: dict[str, Any] = {"penalty": 1.0, "smoothing": 0.1}
    objective = constrained(model, optimizer, {"norm": 3.0}, "sonex", **settings)
    for _ in range(5):
        x, y, _ = data.batch()
        with torch.autocast("cpu", torch.bfloat16):
            model(x)  # fills the cache of casts
            loss = objective(
                lambda x=x, y=y: (
                    losses(model, x, y),
                    {"norm": sum(p.square().sum() for p in model.parameters())},
                )
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_constraints_without_a_gradient_are_noticed():
    model, data = network(), Data()
    optimizer = sgd(model)
    objective = constrained(model, optimizer, ["rate"], "sonex", penalty=1.0, smoothing=0.1)

    def function(stand_in: bool) -> Any:
        x, y, _ = data.batch()
        score = model(x).squeeze(1)
        rate, soft = (score > 0).float().mean(), torch.sigmoid(score).mean()
        values = fcco.Measured(rate, soft) if stand_in else rate
        return bce(score, y), {"rate": values}

    def run(stand_in: bool) -> None:
        for _ in range(60):
            take_step(objective, lambda: function(stand_in))

    with warns(match="no gradient .*fcco.Measured"):
        run(False)
    objective = constrained(model, optimizer, ["rate"], "sonex", penalty=1.0, smoothing=0.1)
    run(True)


# Which groups come.


def visit(objective: Any, model: nn.Module, batches: Iterable[Any]) -> None:
    for group in batches:
        group = torch.as_tensor(group)
        x = torch.ones(len(group), 3)
        take_step(objective, lambda x=x: model(x).squeeze(1), group)


def shuffled(sizes: list[int], batch: int, batches: int) -> Iterable[Any]:
    draw, groups = np.random.default_rng(0), np.repeat(np.arange(len(sizes)), sizes)
    for _ in range(batches):
        yield draw.choice(groups, size=batch)


@pytest.mark.parametrize("kind", ["cvar", "ooa"])
def test_a_loader_without_the_group_sampler_is_noticed_where_groups_are_rare(kind):
    model = nn.Linear(3, 1)
    make = {
        "cvar": lambda: fcco.CVaRGroupDRO(model, sgd(model), 4, 0.5, correction=0.0),
        "ooa": lambda: fcco.methods.ooa(model, sgd(model), 4),
    }[kind]
    with warns(match=r"group 3.*GroupBatchSampler\(groups") as said:
        visit(make(), model, shuffled([60, 30, 8, 2], 8, 250))
    assert len(said) == 1
    # Large batches hold every group: each counts once a batch, whatever its size.
    visit(make(), model, shuffled([60, 30, 8, 2], 400, 60))


def test_the_group_sampler_is_silent():
    sizes = [60, 30, 8, 2, 7, 100, 31]
    groups, model = np.repeat(np.arange(7), sizes), nn.Linear(3, 1)
    sampler = fcco.GroupBatchSampler(groups, 2, 3)
    objective = fcco.CVaRGroupDRO(model, sgd(model), 7, 0.5, correction=0.0)
    visit(objective, model, (groups[sampler.draw()] for _ in range(400)))


@pytest.mark.parametrize("number, draw, message", [
    (40, (0, 10), r"30 of 40 groups \(10, 11, 12, 13, 14, \.\.\.\).*`num_groups`"),
    (6, (1, 6), "Group 0 of 6 .*start at 1"),
])  # fmt: skip
def test_groups_that_never_come_are_noticed(number, draw, message):
    model, random = nn.Linear(3, 1), np.random.default_rng(0)
    objective = fcco.CVaRGroupDRO(model, sgd(model), number, 0.5, correction=0.0)
    with warns(match=message):
        visit(objective, model, (random.integers(*draw, size=8) for _ in range(20)))
    for group, message in ([1, 2, number], "start at 1"), ([0, number + 1], rf": {number + 1}\.$"):
        with pytest.raises(IndexError, match=message):
            visit(objective, model, [group])


def test_groups_have_names():
    names = ["ann", "bob", "cid", "dan"]
    model = nn.Linear(3, 1)
    objective = fcco.CVaRGroupDRO(model, sgd(model), ratio=0.5, names=names)
    with warns(match="group ann .* as group dan.*one sampler for all epochs"):
        visit(objective, model, shuffled([60, 30, 8, 2], 8, 250))
    report = objective.report()
    assert [row.name for row in report.rows] == names and report.worst in names
    assert all(name in str(report) for name in names)
    with pytest.raises(fcco.NonFiniteValue, match="for `cid`; nothing"):
        visit(objective, model, [[0, 1]])
        objective(lambda: model.weight.sum() * torch.tensor([1.0, torch.nan]), [0, 2])
    few = fcco.CVaRGroupDRO(model, sgd(model), 4, 0.5, names=names)
    with warns(match="Group ann of 4"):
        visit(few, model, [[1, 2, 3]] * 20)
    by_name = fcco.CVaRGroupDRO(model, sgd(model), ratio=0.5, names=names)
    take_step(by_name, lambda: {"dan": model.weight.sum(), "bob": model.bias.sum()})
    known = [row.name for row in by_name.report().rows if not math.isnan(row.value)]
    assert known == ["bob", "dan"]
    for number, wrong in ((3, names), (2, ["a", "a"])):
        with pytest.raises(ValueError, match=f"{number} different names"):
            fcco.CVaRGroupDRO(model, sgd(model), number, ratio=0.5, names=wrong)
    with pytest.raises(TypeError, match=r"such as 0\.2"):
        fcco.CVaRGroupDRO(model, sgd(model), names=names)
    with pytest.raises(TypeError, match=r"`ration` .*`ratio`"):
        fcco.CVaRGroupDRO(model, sgd(model), names=names, ration=0.5)
    with pytest.raises(TypeError, match="num_groups or names"):
        fcco.CVaRGroupDRO(model, sgd(model), ratio=0.5)


def test_a_ratio_of_less_than_one_group_is_noticed():
    model = nn.Linear(3, 1)
    with warns(match=r"ratio=0.1\)` of 6 groups .* the worst group"):
        fcco.CVaRGroupDRO(model, sgd(model), 6, 0.1)
    fcco.CVaRGroupDRO(model, sgd(model), 6, 1 / 6)


# Right loops are silent.


@pytest.mark.parametrize("every, correction", [(1, 0.4), (50, 0.0)])
def test_plain_loops_and_accumulation_are_silent(every, correction):
    model = network()
    optimizer = sgd(model)
    train(dro(model, optimizer, correction), model, optimizer.step, 200, every)


def test_a_resumed_run_is_silent():
    model = network()
    optimizer = sgd(model)
    objective = dro(model, optimizer)
    train(objective, model, optimizer.step, 30)
    saved = [copy.deepcopy(each.state_dict()) for each in (model, optimizer, objective)]
    for _ in range(15):  # also when states are loaded again and again, as by early stopping
        for each, state in zip((model, optimizer, objective), saved, strict=True):
            each.load_state_dict(copy.deepcopy(state))
        call(objective, model, Data()).backward()
        optimizer.step()
        optimizer.zero_grad()
    fresh = network(1)
    again = sgd(fresh)
    resumed = dro(fresh, again)
    for each, state in zip((fresh, again, resumed), saved, strict=True):
        each.load_state_dict(state)
    train(resumed, fresh, again.step, 120)


def test_updates_by_hand_that_close_the_step_and_detached_objectives_are_silent():
    model, data = network(), Data()
    objective = dro(model, sgd(model))

    for _ in range(30):
        call(objective, model, data).backward()
        by_hand(model)
        objective.close()
    objective.detach_hooks()
    for _ in range(30):
        call(objective, model, data).backward()
        by_hand(model)


# Errors in the words of the call.


@pytest.mark.parametrize("given", [torch.ones(3), None, (torch.ones(3),)])
def test_losses_in_place_of_a_function_are_refused_with_the_line_to_write(given):
    model = network()
    objective: Any = dro(model, sgd(model))
    line = r"`CVaRGroupDRO` needs a function .*: \w+\. Write `objective\(lambda: losses_of\(model"
    with pytest.raises(TypeError, match=line):
        objective(given, torch.tensor([0, 1, 2]))
    with pytest.raises(TypeError, match="`gradient=` is: Tensor"):
        objective(lambda: torch.ones(3), torch.tensor([0, 1, 2]), gradient=torch.ones(3))
    assert not objective.term.tracker.seen.any()


@pytest.mark.parametrize("returned, index, message", [
    (lambda v: v.mean(), [0, 1, 2], r"shape \(3,\), one row per entry .* reduction=\"none\""),
    (lambda v: v[:2], [0, 1, 2], r"shape \(3,\), one row per entry of `index`, but .*\(2,\)"),
    (lambda v: list(v), [0, 1, 2], "list.*torch.stack"),
    (lambda v: (v.mean(), v.mean()), [0, 1, 2], "reduction="),
    (lambda v: v.detach(), [0, 1, 2], r"no gradient.*`.detach\(\)`.*`objective.eval\(\)`"),
    (lambda v: v, None, r"shape \(6,\).* has no `index`, but have shape \(3,\)"),
])  # fmt: skip
def test_wrong_values_are_refused_with_the_line_to_write(returned, index, message):
    model = Point([1.0, 2.0, 3.0])
    objective = dro(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises((TypeError, ValueError), match=message):
        objective(lambda: returned(model.w), index)
    assert not objective.term.tracker.seen.any()


@pytest.mark.parametrize("wrong, near, build", [
    ("setp", "step", lambda m, o, **s: fcco.methods.ooa(m, o, 3, **s)),
    ("gama", "gamma", lambda m, o, **s: constrained(m, o, 3, **s)),
    ("inner_step", "inner_steps", lambda m, o, **s: constrained(m, o, 2, "icppac", **s)),
])  # fmt: skip
def test_a_misspelt_setting_is_refused_with_the_nearest(wrong, near, build):
    model = network()
    with pytest.raises(ValueError, match=rf"`{wrong}` \(did you mean `{near}`\?\)"):
        build(model, sgd(model), **{wrong: 0.5})


@pytest.mark.parametrize("returned, message", [
    (lambda w: w.sum(), r"pair \(loss, values\)"),
    (lambda w: {"women": w[0], "men": w[1]}, r"pair \(loss, values\)"),
    (lambda w: (w.sum(), {"women": w, "men": w[1]}), r"`women` must be one number .*\.mean\(\)"),
    (lambda w: (w.sum(), {"woman": w[0], "men": w[1]}), "woman.*are: women, men .*mean `women`"),
    (lambda w: (w.sum(), {"women": w[0].item(), "men": w[1]}), "`women` must be a tensor.*float"),
    (lambda w: (w.sum(), {"women": w[:0].mean(), "men": w[1]}), "`women`; nothing was updated.*no "
     "samples"),
    (lambda w: (w.sum().detach(), {"women": w[0].detach(), "men": w[1].detach()}), "no gradient"),
])  # fmt: skip
@pytest.mark.parametrize("settings", [{}, {"method": "sonex", "penalty": 6.0, "smoothing": 0.1}])
def test_wrong_values_of_constraints_are_refused_in_their_names(returned, message, settings):
    model = Point([1.0, 2.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objective: Any = constrained(model, optimizer, {"women": 0.5, "men": 0.5}, **settings)
    if settings and "pair" in message and isinstance(returned(model.w), dict):
        return  # a penalty may stand alone
    with pytest.raises((TypeError, ValueError), match=message):
        objective(lambda: returned(model.w))
    assert not objective.term.tracker.seen.any()
    constant = lambda: (model.w.sum(), {"women": torch.tensor(0.3), "men": model.w[1]})  # noqa: E731
    measured = lambda: (  # noqa: E731
        model.w.sum(), {"women": fcco.Measured(torch.tensor(0.3), model.w[0]), "men": model.w[1]}
    )  # fmt: skip
    for right in (constant, measured):
        take_step(objective, right)
    assert objective.term.tracker.seen.all()


def test_model_and_optimizer_in_the_wrong_order():
    model = nn.Linear(3, 1)
    optimizer: Any = sgd(model)
    for make in (
        lambda m, o: fcco.CVaRGroupDRO(m, o, 3, 0.5),
        lambda m, o: fcco.methods.sonex(m, o, fcco.outer.Hinge(), 3),
        lambda m, o: fcco.methods.alexr2(m, o, fcco.outer.Hinge(), 3, smoothing=0.1),
        lambda m, o: fcco.methods.ooa(m, o, 3),
        lambda m, o: fcco.xrisk.AveragePrecision(m, o, [0, 1, 1]),
        lambda m, o: fcco.GlobalContrastive(m, o, 3),
        lambda m, o: constrained(m, o, {"a": 0.5}),
        lambda m, o: constrained(m, o, {"a": 0.5}, "ssg"),
        lambda m, o: constrained(m, o, {"a": 0.5}, "oss", proximal=1.0, inner_steps=5),
    ):
        with pytest.raises(TypeError, match="model comes first"):
            make(optimizer, model)


def test_a_misspelt_name_of_the_module_is_answered_with_the_nearest():
    for wrong in ("GroupDRO", "CVarGroupDRO"):
        with pytest.raises(AttributeError, match=f"{wrong}.*did you mean `CVaRGroupDRO`"):
            getattr(fcco, wrong)


# Limits by name.


def test_wrong_limits_are_refused():
    model = network()
    settings: dict[str, Any] = {"method": "sonex", "penalty": 1.0, "smoothing": 0.1}
    with pytest.raises(ValueError, match="leave `tolerance` out"):
        constrained(model, sgd(model), {"a": 0.5}, tolerance=0.1, **settings)
    for limit in ("0.5", None, [0.5], (0.1, 0.2, 0.3), ("0.1", 0.2), fcco.AtLeast("0.9")):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="that of `a` is"):
            constrained(model, sgd(model), {"a": limit}, **settings)  # type: ignore[dict-item]
    for limit in (math.inf, torch.tensor(math.nan)):
        with pytest.raises(ValueError, match=r"finite limit .* that of `a` is: .*(inf|nan)"):
            constrained(model, sgd(model), {"a": limit})  # type: ignore[dict-item]
        with pytest.raises(ValueError, match=r"tolerance=...\)` must be finite"):
            constrained(model, sgd(model), ["a"], tolerance=limit)
    for limit in ((0.3, 0.2), (None, None), fcco.Equal(math.nan), fcco.AtLeast(-math.inf)):
        with pytest.raises(ValueError, match=r"finite limit .* that of `a` is: (\(|Eq|AtL)"):
            constrained(model, sgd(model), {"a": limit})
    with pytest.raises(ValueError, match="must be at least 1"):
        constrained(model, sgd(model), {}, **settings)
