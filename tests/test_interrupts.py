"""Ctrl-C at any line: the state is one between two lines of the loop, and training goes on."""

from __future__ import annotations

import copy
import signal
import sys
from typing import Any

import pytest
import torch
from torch import nn

import fcco
from fcco._state import Uninterrupted

X = torch.randn(12, 2, generator=torch.manual_seed(0))
Y = torch.tensor([1.0, 0.0, 0.0] * 4)
INDEX = torch.arange(12) % 3


def _cvar(model: nn.Module, **settings: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fcco.CVaRGroupDRO(model, optimizer, 3, 0.5, **settings)


def _constrained(model: nn.Module, **settings: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fcco.constrained(model, optimizer, {"a": 0.3, "b": 0.1, "c": 0.2}, **settings)


NUMBERS = {"penalty": 10.0, "smoothing": 0.1, "gamma": 0.5, "correction": 0.1}
BUILD = {
    "cvar": _cvar,
    "cvar, second pass": lambda model: _cvar(model, gamma=0.5, correction=0.1),
    "constrained": _constrained,
    "sonex": lambda model: _constrained(model, method="sonex", **NUMBERS),
    "ooa": lambda m: fcco.methods.ooa(m, torch.optim.SGD(m.parameters(), lr=0.1), 3),
}


class Run:
    """A run, and what a user's loop could save between its lines."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.2))
        self.alone = name.startswith(("cvar", "ooa"))
        self.objective = BUILD[name](self.model)
        for _ in range(12):
            self.call().backward()
            self.finish()

    def call(self) -> torch.Tensor:
        losses = lambda: (self.model(X).squeeze(1) - Y).square()  # noqa: E731
        both = lambda: (losses().mean(), losses())  # noqa: E731
        return self.objective(losses if self.alone else both, INDEX)

    def finish(self) -> None:
        self.objective.optimizer.step()
        self.objective.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        tensors = {**self.objective.state_dict(), **self.model.state_dict()}
        return copy.deepcopy(tensors)


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return all(torch.equal(left[k], right[k]) for k in left.keys() | right.keys())


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


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger or coverage traces")
def test_an_interrupt_leaves_a_state_of_the_users_loop_and_an_objective_that_works(name):
    run = Run(name)
    start, random = copy.deepcopy(run), torch.get_rng_state()
    allowed = [run.state()]
    loss = run.call()
    loss.backward()
    allowed.append(run.state())
    run.finish()
    allowed.append(run.state())
    interrupted = 0
    for line in range(1, 5000):
        one = copy.deepcopy(start)
        torch.set_rng_state(random)
        inject = Interrupt(line)
        try:
            with inject:
                one.call().backward()
                one.finish()
        except KeyboardInterrupt:
            interrupted += 1
        if inject.left > 0:
            break
        # A step of the optimizer: w_{t-1} is copied, the parameters change, the tracking step ends.
        copied = {k: allowed[2][k] for k in allowed[2] if k.startswith("previous")}
        stepped = {k: allowed[2][k] for k in one.model.state_dict()}
        within = ({**allowed[1], **copied}, {**allowed[1], **copied, **stepped})
        assert any(same(one.state(), each) for each in (*allowed, *within)), f"line {line}"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        one.objective.optimizer.zero_grad()
        one.call().backward()
        one.finish()
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
