"""A state holds what training has learned; a refused one, or an interrupt, changes nothing."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fcco
from fcco import methods, xrisk
from fcco._state import Uninterrupted

X = torch.randn(12, 2, generator=torch.manual_seed(0))
Y = torch.tensor([1.0, 0.0, 0.0] * 4)
INDEX = torch.arange(12) % 3
NAMES = ("a", "b", "c")
LIMITS: dict[str, Any] = dict.fromkeys(NAMES, 0.3)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def limited(method: str, **settings: Any) -> Callable[..., Any]:
    def build(model: nn.Module, limits: Any = LIMITS) -> Any:
        return fcco.constrained(model, sgd(model), limits, method, **settings)

    return build


def cvar(**settings: Any) -> Callable[[nn.Module], Any]:
    return lambda model: fcco.CVaRGroupDRO(model, sgd(model), 3, 0.5, **settings)


def general(make: Any, *outer: Any, **settings: Any) -> Callable[[nn.Module], Any]:
    return lambda model: make(model, sgd(model), *outer, 3, **settings)


def coupled(model: nn.Module) -> Any:
    """Two tables inside one proximal point."""
    own = fcco.terms.CoupledTerm(fcco.outer.SquaredHinge(), fcco.tracker.ema_tracker(3, gamma=0.3))
    return limited("alexr2", objective=own, **DOUBLE_LOOP)(model)


def contrastive(**settings: Any) -> Callable[[nn.Module], Any]:
    return lambda model: fcco.GlobalContrastive(model, sgd(model), 12, gamma=0.5, **settings)


def switching(model: nn.Module) -> Any:
    """Two optimizers with states of their own, of which the second takes some of the steps."""
    first, second = (torch.optim.Adam(model.parameters(), lr=lr) for lr in (0.02, 0.05))
    falling = fcco.Annealed(1.0, 0.01, steps=12)
    return fcco.constrained(
        model, first, LIMITS, "ssg", threshold=falling, constraint_optimizer=second
    )


NUMBERS: dict[str, Any] = {"penalty": 10.0, "smoothing": 0.1, "gamma": 0.5}
DOUBLE_LOOP: dict[str, Any] = NUMBERS | {"nu": 0.5, "eta": 0.1, "inner_steps": 3}
INDIVIDUAL: dict[str, Any] = {"temperature": "individual", "radius": 1.0, "temperature_lr": 0.02}
ROUND: dict[str, Any] = {"proximal": 2.0, "inner_steps": 3}
# By name, what builds the objective. Each keeps another kind of state.
BUILD: dict[str, Callable[..., Any]] = {
    "multipliers": limited("multipliers"),
    "sonex": limited("sonex", correction=0.1, **NUMBERS),
    "alexr2": limited("alexr2", **DOUBLE_LOOP),
    "alexr": limited("alexr", penalty=10.0, dual_step=0.1),
    "hinge": limited("hinge", penalty=1.0),
    "squared-hinge": limited("squared-hinge", penalty=10.0, gamma=0.5),
    "recursive-hinge": limited("recursive-hinge", penalty=10.0, smoothing=0.1, refresh_every=4),
    "ssg": switching,
    "oss": limited("oss", **ROUND),
    "icppac": limited("icppac", **ROUND),
    "coupled": coupled,
    "cvar": cvar(),
    "cvar, numbers": cvar(gamma=0.5, smoothing=0.1, correction=0.1),
    "ooa": general(methods.ooa),
    "ctc-dro": general(methods.ctc_dro),
    "scent": general(methods.scent),
    "sonx": general(methods.sonx, fcco.outer.Absolute()),
    "sox": general(methods.sox, fcco.outer.SquaredHinge()),
    "annealed": general(
        methods.sonex,
        fcco.outer.Absolute(),
        gamma=0.4,
        correction="theory",
        on_nonfinite="skip",
        smoothing=fcco.Annealed(2.0, 0.1, steps=20),
    ),
    "ap": lambda model: xrisk.AveragePrecision(model, sgd(model), Y),
    "contrastive": contrastive(correction=0.2),
    "contrastive, temperatures": contrastive(**INDIVIDUAL),
}
# One of each layout; for what is tried with each of the others, or with each entry of a state.
LAYOUTS = (
    "multipliers", "sonex", "alexr2", "squared-hinge", "ssg", "oss", "cvar", "cvar, numbers", "ooa",
    "ap",
)  # fmt: skip


class Run:
    """A model, an objective and steps of it."""

    def __init__(self, name: str, dropout: float = 0.0, **options: Any) -> None:
        torch.manual_seed(1)
        self.model: nn.Module = nn.Sequential(nn.Linear(2, 1), nn.Dropout(dropout))
        self.name, self.objective = name, BUILD[name](self.model, **options)

    def call(self, factor: float = 1.0) -> torch.Tensor:
        def score() -> torch.Tensor:
            return factor * self.model(X).squeeze(1)

        def losses() -> torch.Tensor:
            return (score() - Y).square()

        def beside() -> Any:
            values = losses()
            return values.mean(), values

        if self.name == "ap":
            return self.objective(score, Y, torch.arange(12))
        if "contrastive" in self.name:  # features of two dimensions
            return self.objective(lambda: (torch.stack([score(), X[:, 0]], 1), X), torch.arange(12))
        if self.name == "coupled":
            terms = ("objective", "constraints")
            return self.objective(
                lambda: dict.fromkeys(terms, losses()), dict.fromkeys(terms, INDEX)
            )
        is_limited = isinstance(self.objective, fcco.constraints.ConstrainedObjective)
        return self.objective(beside if is_limited else losses, INDEX)

    def finish(self) -> None:
        self.objective.optimizer.step()
        self.objective.optimizer.zero_grad()

    def train(self, steps: int = 12) -> Run:
        for _ in range(steps):
            self.call().backward()
            self.finish()
        return self

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(self.objective.state_dict())


@functools.cache
def state_of(name: str, steps: int) -> dict[str, Any]:
    return Run(name).train(steps).state()


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


# Resuming and copies.


@pytest.mark.parametrize("name", BUILD)
def test_a_resumed_run_is_the_uninterrupted_one(name):
    """Also in an objective with an open step: what an abandoned call had noted is forgotten."""
    whole, fresh, interrupted = Run(name).train(14), Run(name), Run(name).train(3)
    abandoned = [interrupted.call() for _ in range(3)]  # and no step
    file = io.BytesIO()
    parts = ("model", "objective")
    saved = {part: getattr(whole, part).state_dict() for part in parts}
    torch.save(saved | {"optimizer": whole.objective.optimizer.state_dict()}, file)
    whole.train(7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for run in (fresh, interrupted):
            file.seek(0)
            state = torch.load(file, weights_only=True)
            for part in parts:
                getattr(run, part).load_state_dict(state[part])
            run.objective.optimizer.load_state_dict(state["optimizer"])
            abandoned.clear()  # losses that were never differentiated, of a run that is given up
            run.train(7)
            assert same(whole.state(), run.state())
            assert same(whole.model.state_dict(), run.model.state_dict())
    optimizers = [str(run.objective.optimizer.state_dict()) for run in (whole, fresh)]
    assert optimizers[0] == optimizers[1]


@pytest.mark.parametrize("name", [name for name in BUILD if name != "annealed"])  # which skips them
def test_evaluations_and_bad_values_change_nothing(name):
    run = Run(name).train(3)
    before = run.state()
    run.objective.eval()
    loss = run.call()
    run.objective.train()
    with torch.no_grad():
        assert torch.equal(run.call(), loss) and loss.isfinite()
    with pytest.raises(ValueError, match="NaN or infinite"):
        run.call(factor=torch.nan)
    assert same(before, run.state())


def through_a_file(run: Run) -> Run:
    file = io.BytesIO()
    torch.save(run, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = (copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run)), through_a_file)


@pytest.mark.parametrize("name, copied", [*zip(BUILD, itertools.cycle(COPIES), strict=False)])
def test_a_copy_trains_on_as_the_original_does_and_apart_from_it(name, copied):
    run = Run(name).train(4)
    other = copied(run)
    run.train(5)
    kept = copy.deepcopy(run.model.state_dict())
    other.train(5)
    assert same(run.model.state_dict(), kept) and same(other.model.state_dict(), kept)
    buffers = [dict(each.objective.named_buffers()) for each in (run, other)]
    assert same(*buffers)
    pairs = zip(run.model.parameters(), other.model.parameters(), strict=True)
    assert all(mine is not theirs for mine, theirs in pairs)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_state_goes_through_safetensors(name, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    state, again = state_of(name, 5), Run(name)
    safetensors.save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / "state")
    again.objective.load_state_dict(safetensors.load_file(tmp_path / "state"))
    assert same(again.state(), state)


# What is refused.


@pytest.mark.parametrize("name", ["multipliers", "sonex", "alexr2", "squared-hinge"])
def test_limits_are_those_of_the_program_not_of_the_checkpoint(name):
    """A run with other limits was loaded, and its limits came with it."""
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
    state = Run("multipliers").train().state()
    for names in (("b", "a", "c"), ("a", "b", "d")):
        refused(Run("multipliers", limits=dict.fromkeys(names, 0.3)), state, "names")


@pytest.mark.parametrize("name", LAYOUTS)
def test_states_of_other_methods_and_sizes_are_refused_and_change_nothing(name):
    run = Run(name).train(3)
    for other in LAYOUTS:
        if other not in (name, f"{name}, numbers") and f"{other}, numbers" != name:
            refused(run, state_of(other, 2))
    state = state_of(name, 13)  # another than the run's own: half a load would show
    key = next(k for k, v in state.items() if isinstance(v, torch.Tensor) and k.endswith("value"))
    refused(run, {**state, key: torch.cat([state[key], state[key]])}, "shape|size")
    refused(run, {k: v for k, v in state.items() if k != key}, "(?i)missing")


@pytest.mark.parametrize("name", LAYOUTS)
def test_states_with_nonsense_are_refused_and_change_nothing(name):
    run, tried = Run(name).train(12), 0
    state = state_of(name, 13)
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


@pytest.mark.parametrize("name", ["multipliers", "cvar"])
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
    sonex = general(methods.sonex, fcco.outer.Absolute(), smoothing=0.1)(model)
    with pytest.raises(RuntimeError, match="the method of the state: sonx"):
        sonex.load_state_dict(state_of("sonx", 1))


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


# Ctrl-C at any line: the state is one between two lines of the loop, and training goes on.


class Interrupt:
    """Sends this process a SIGINT before the line with a given number of the library."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if "/fcco/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self

    def __enter__(self) -> Interrupt:
        self.before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self.before)


@pytest.mark.parametrize("name", ["cvar", "cvar, numbers", "multipliers", "sonex", "ooa"])
@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger or coverage traces")
def test_an_interrupt_leaves_a_state_of_the_users_loop_and_an_objective_that_works(name):
    def held(run: Run) -> dict[str, Any]:
        return {**run.state(), **copy.deepcopy(run.model.state_dict())}

    run = Run(name, dropout=0.2).train(12)
    start, random = copy.deepcopy(run), torch.get_rng_state()
    allowed = [held(run)]
    loss = run.call()
    loss.backward()
    allowed.append(held(run))
    run.finish()
    allowed.append(held(run))
    interrupted = 0
    for line in range(1, 5000):
        one = copy.deepcopy(start)
        torch.set_rng_state(random)
        inject = Interrupt(line)
        try:
            with inject:
                one.train(1)
        except KeyboardInterrupt:
            interrupted += 1
        if inject.left > 0:
            break
        # A step of the optimizer: w_{t-1} is copied, the parameters change, the tracking step ends.
        copied = {k: allowed[2][k] for k in allowed[2] if k.startswith("previous")}
        stepped = {k: allowed[2][k] for k in one.model.state_dict()}
        within = ({**allowed[1], **copied}, {**allowed[1], **copied, **stepped})
        assert any(same(held(one), each) for each in (*allowed, *within)), f"line {line}"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        one.objective.optimizer.zero_grad()
        one.train(1)
    assert inject.left > 0 and interrupted == line - 1 > 50


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_handlers_that_are_not_of_python_stay_in_place(handler):
    """A signal that such a handler would act on cannot be passed on later."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        with Uninterrupted():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_at_the_entry_of_no_grad_does_not_switch_gradients_off():
    """Between the two lines of its `__enter__` and the block nobody would switch them on again."""
    run = Run("cvar")

    def interrupted() -> None:
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.objective(interrupted, INDEX)
    run.call().backward()
