"""A state holds what training has learned; a refused one changes nothing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fcco
from fcco import methods, xrisk

NUMBERS = {"penalty": 10.0, "smoothing": 0.1}
X = torch.randn(12, 2, generator=torch.manual_seed(0))
Y = torch.tensor([1.0, 0.0, 0.0] * 4)
NAMES = ("a", "b", "c")
LIMITS = dict.fromkeys(NAMES, 0.3)


def _constrained(method: str, **settings: Any) -> Callable[..., Any]:
    def build(model: nn.Module, limits: Any = LIMITS) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return fcco.constrained(model, optimizer, limits, method=method, **settings)

    return build


def _cvar(**settings: Any) -> Callable[[nn.Module], Any]:
    def build(model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return fcco.CVaRGroupDRO(model, optimizer, 3, 0.5, **settings)

    return build


def _adversary(model: nn.Module) -> Any:
    return methods.ooa(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)


def _risk(model: nn.Module) -> Any:
    return xrisk.AveragePrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), Y)


# By name: what builds the objective. Each keeps another kind of state.
BUILD: dict[str, Callable[..., Any]] = {
    "default": _constrained("multipliers"),
    "sonex": _constrained("sonex", gamma=0.5, correction=0.1, **NUMBERS),
    "alexr2": _constrained("alexr2", gamma=0.5, nu=0.5, eta=0.1, inner_steps=3, **NUMBERS),
    "squared hinge": _constrained("sox", penalty=10.0, gamma=0.5),
    "ssg": _constrained("ssg"),
    "oss": _constrained("oss", proximal=2.0, inner_steps=3),
    "cvar": _cvar(),
    "cvar, numbers": _cvar(gamma=0.5, smoothing=0.1, correction=0.1),
    "ooa": _adversary,
    "ap": _risk,
}


class Run:
    """A model, an objective and steps of it on random batches."""

    def __init__(self, name: str, **options: Any) -> None:
        torch.manual_seed(1)
        self.model: nn.Module = nn.Linear(2, 1)
        self.name, self.objective = name, BUILD[name](self.model, **options)

    def call(self) -> torch.Tensor:
        losses = lambda: (self.model(X).squeeze(1) - Y).square()  # noqa: E731
        if self.name == "ap":
            return self.objective(lambda: self.model(X).squeeze(1), Y, torch.arange(12))
        index = torch.arange(12) % 3
        if "cvar" in self.name or self.name == "ooa":
            return self.objective(losses, index)
        return self.objective(lambda: (losses().mean(), losses()), index)

    def train(self, steps: int = 12) -> Run:
        for _ in range(steps):
            self.call().backward()
            self.objective.optimizer.step()
            self.objective.optimizer.zero_grad()
        return self

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(self.objective.state_dict())


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.shape == right.shape and bool(((left == right) | (left != left)).all())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return left == right


def refused(run: Run, state: dict[str, Any], match: str | None = None) -> None:
    before = run.state()
    with pytest.raises(RuntimeError, match=match):
        run.objective.load_state_dict(state)
    assert same(before, run.state())


@pytest.mark.parametrize("name", ["default", "sonex", "alexr2", "squared hinge"])
def test_limits_are_those_of_the_program_not_of_the_checkpoint(name):
    """Item 1: a run with other limits was loaded, and its limits came with it."""
    loaded = Run(name).train()
    strict = Run(name, limits=dict.fromkeys(NAMES, 0.0))
    strict.objective.load_state_dict(loaded.state())
    report = strict.objective.report()
    assert [row.limit for row in report.rows] == [0.0, 0.0, 0.0]
    # The same in the gradient: with the tracked values of `loaded`, constraints that hold with
    # 0.3 are violated with 0. All three are above 0 after so few steps.
    violation = strict.objective.term.violation()
    assert torch.allclose(violation, loaded.objective.term.violation() + 0.3)


def test_names_and_their_order_are_compared():
    state = Run("default").train().state()
    for names in (("b", "a", "c"), ("a", "b", "d")):
        refused(Run("default", limits=dict.fromkeys(names, 0.3)), state, "names")


@pytest.mark.parametrize("name", BUILD)
def test_states_of_other_methods_and_sizes_are_refused_and_change_nothing(name):
    run = Run(name).train(3)
    for other in BUILD:
        if other not in (name, f"{name}, numbers") and f"{other}, numbers" != name:
            refused(run, Run(other).train(2).state())
    state = Run(name).train(13).state()  # another than the run's own: half a load would show
    key = next(k for k, v in state.items() if isinstance(v, torch.Tensor) and k.endswith("value"))
    refused(run, {**state, key: torch.cat([state[key], state[key]])}, "shape|size")
    refused(run, {k: v for k, v in state.items() if k != key}, "(?i)missing")


@pytest.mark.parametrize("name", BUILD)
def test_states_with_nonsense_are_refused_and_change_nothing(name):
    run, tried = Run(name).train(12), 0
    state = Run(name).train(13).state()
    for key, tensor in state.items():
        for nonsense in (None, "x", torch.zeros(0), torch.full((50,), 7, dtype=torch.uint8)):
            refused(run, {**state, key: nonsense})
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            continue
        for nonsense in (torch.nan, torch.inf):
            if tensor.numel() and not tensor.isnan().any():
                broken = tensor.clone()
                broken.view(-1)[-1] = nonsense
                refused(run, {**state, key: broken}, key.rpartition(".")[2])
                tried += 1
    assert tried
    run.objective.load_state_dict(state)  # and the sound one is taken


@pytest.mark.parametrize("name", ["default", "cvar"])
@pytest.mark.parametrize("key, value", [("visits", -1.0), ("difference", -1.0), ("pooled", 7.0)])
def test_numbers_that_no_training_gives_are_refused(name, key, value):
    run, state = Run(name).train(12), Run(name).train(13).state()
    (full,) = [k for k in state if k.endswith(f"estimate.{key}")]
    broken = state[full].clone()
    broken[-1] = value
    refused(run, {**state, full: broken}, key)


def test_states_of_methods_with_one_layout_are_refused():
    """Their terms are of one class and hold the same tensors: only the name tells them apart."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sonx = fcco.methods.sonx(model, optimizer, fcco.outer.Absolute(), 3)
    sonex = fcco.methods.sonex(model, optimizer, fcco.outer.Absolute(), 3, smoothing=0.1)
    with pytest.raises(RuntimeError, match="the method of the state: sonx"):
        sonex.load_state_dict(sonx.state_dict())


def test_the_previous_parameters_of_another_model_are_refused():
    """They were taken, and every later call failed."""
    other = Run("sonex")
    other.model = nn.Linear(2, 1, bias=False)
    other.objective = BUILD["sonex"](other.model)
    bias = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    wide = Run("sonex")
    wide.model, wide.objective = bias, BUILD["sonex"](bias)
    refused(Run("sonex").train(3), wide.train(3).state(), "another model")
    refused(other.train(3), Run("sonex").train(3).state(), "another model")


@pytest.mark.parametrize("name", BUILD)
def test_loading_forgets_an_open_step(name):
    """What an abandoned call had noted must not enter the first step after a resume."""
    state = Run(name).train(14).state()
    plain, interrupted = Run(name), Run(name)
    interrupted.train(3)
    abandoned = [interrupted.call() for _ in range(3)]  # and no step
    weights = copy.deepcopy(plain.model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for run in (plain, interrupted):
            run.model.load_state_dict(weights)
            run.objective.load_state_dict(state)
            abandoned.clear()  # losses that were never differentiated, of a run that is given up
            run.train(3)
    assert same(plain.state(), interrupted.state())
    assert same(plain.model.state_dict(), interrupted.model.state_dict())


@pytest.mark.parametrize("name", BUILD)
def test_a_state_goes_through_safetensors(name, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    run, again = Run(name).train(5), Run(name)
    state = run.objective.state_dict()
    safetensors.save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / "state")
    again.objective.load_state_dict(safetensors.load_file(tmp_path / "state"))
    assert same(again.state(), run.state())


@pytest.mark.parametrize("attribute", ["ratio", "num_groups"])
def test_settings_of_group_dro_cannot_be_changed_without_effect(attribute):
    dro = Run("cvar").objective
    assert getattr(dro, attribute) == {"ratio": 0.5, "num_groups": 3}[attribute]
    with pytest.raises(AttributeError):
        setattr(dro, attribute, 1)


def test_a_term_cannot_be_replaced_without_effect():
    objective = Run("sonex").objective
    other = Run("sonex").objective.term
    for name in ("inner", "another"):
        with pytest.raises(AttributeError, match="terms"):
            objective.terms[name] = other
    for remove in (objective.terms.clear, lambda: objective.terms.pop("inner")):
        with pytest.raises(AttributeError, match="terms"):
            remove()
    for change in (objective, "term"), (objective, "terms"), (objective.terms, "inner"):
        with pytest.raises(AttributeError, match="terms"):
            setattr(*change, other)
