"""How each registered method is set up on each of its problems.

`TRANSCRIPTIONS` names the test that compares a method with its literal NumPy transcription;
`SETUPS` says how to run it. Tolerances: 0.12 on S2 and, on S3 and S3b, those of the numerical
checks that came with the specification (SONEX, ALEXR2, SSG and ICPPAC 0.08, the penalty methods
0.06, OSS 0.12). On S4 a step of size eta leaves the subgradient methods eta away from a kink and
steps end at zero, so what is left is the noise: 0.05. The smooth problem is strongly convex with a
known minimiser: 0.02.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from method_problems import KINDS, MethodProblem
from problems import Point

import fcco


@dataclass
class Setup:
    """A method ready to run.

    Attributes:
        objective: what is called; it has the optimizer to step.
        steps: optimizer steps.
        tolerance: allowed error at the end.
        draw: options of `MethodProblem.draw`.
        power: step sizes fall like (1 - t/T)^power; 0 leaves them alone.
        large: options of `draw` when this function says so.
        final: puts the output iterate into the model.
    """

    objective: Any
    steps: int
    tolerance: float
    draw: dict[str, Any]
    power: float = 1.0
    large: Callable[[], bool] | None = None
    final: Callable[[], None] | None = None


Build = Callable[[MethodProblem, Point], Setup]

TRANSCRIPTIONS: dict[str, str] = {
    "multipliers": "test_multipliers.py::test_the_rule_equals_its_transcription",
    "sonex": "test_transcription.py::test_sonex",
    "alexr2": "test_transcription.py::test_alexr2",
    "sonx": "test_transcription.py::test_sonx",
    "sox": "test_transcription.py::test_sox",
    "alexr": "test_alexr.py::test_equals_the_transcription",
    "ooa": "test_weights.py::test_equals_the_transcription",
    "ctc-dro": (
        "test_weights.py::test_averaged_losses_and_smoothed_weights_equal_the_transcription"
    ),
    "scent": "test_transcription.py::test_scent",
    "oss": "test_lagrangian.py::test_oss_equals_the_transcription",
    "icppac": "test_lagrangian.py::test_icppac_equals_the_transcription",
    "ssg": "test_switching.py::test_equals_the_transcription",
    "squared-hinge": "test_penalties.py::test_squared_hinge",
    "hinge": "test_penalties.py::test_hinge",
    "recursive-hinge": "test_penalties.py::test_recursive_hinge",
}

SETUPS: dict[tuple[str, str], Build] = {}


def setup(method: str, *problems: str) -> Callable[[Build], Build]:
    def enter(build: Build) -> Build:
        for problem in problems:
            SETUPS[method, problem] = build
        return build

    return enter


TOLERANCE = {"S2": 0.12, "S4": 0.05, "smooth": 0.02}
RATE = {"S2": 0.05, "S4": 0.05, "smooth": 0.1}
"""Step sizes of plain or momentum SGD."""


def name_of(problem: MethodProblem) -> str:
    return next(name for name, kind in KINDS.items() if isinstance(problem, kind))


def momentum(model: Point, lr: float, beta: float = 0.2) -> torch.optim.SGD:
    return fcco.optim.momentum_type(model.parameters(), lr=lr, beta=beta)


def sgd(model: Point, lr: float) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


# Outer functions: SONEX, ALEXR2, SONX, SOX, ALEXR, SCENT; OOA and CTC-DRO weigh groups.


@setup("sonex", "S2", "smooth")
def _(problem: MethodProblem, model: Point) -> Setup:
    name = name_of(problem)
    objective = fcco.methods.sonex(
        model, momentum(model, RATE[name]), problem.outer, problem.number,
        smoothing=0.0 if name == "smooth" else 0.05,
    )  # fmt: skip
    return Setup(objective, 2000, TOLERANCE[name], {})


@setup("sonx", "S2", "S4")
def _(problem: MethodProblem, model: Point) -> Setup:
    name = name_of(problem)
    objective = fcco.methods.sonx(model, sgd(model, RATE[name]), problem.outer, problem.number)
    return Setup(objective, 2000, TOLERANCE[name], {})


@setup("sox", "smooth")
def _(problem: MethodProblem, model: Point) -> Setup:
    objective = fcco.methods.sox(model, momentum(model, 0.1), problem.outer, problem.number)
    return Setup(objective, 2000, TOLERANCE["smooth"], {})


@setup("alexr2", "S2", "S4", "smooth")
def _(problem: MethodProblem, model: Point) -> Setup:
    name = name_of(problem)
    objective = fcco.methods.alexr2(
        model, momentum(model, 0.3, 0.5), problem.outer, problem.number,
        smoothing={"smooth": 1e-9, "S4": 0.01}.get(name, 0.05), nu=0.3, eta=RATE[name],
        inner_steps=5, gamma=0.2, theta=0.5,
    )  # fmt: skip
    return Setup(objective, 2000, TOLERANCE[name], {"independent": True})


@setup("alexr", "S2", "smooth")
def _(problem: MethodProblem, model: Point) -> Setup:
    objective = fcco.methods.alexr(
        model, sgd(model, 0.05), problem.outer, problem.number, dual_step=0.25, theta=0.5
    )
    return Setup(objective, 2000, TOLERANCE[name_of(problem)], {"independent": True})


@setup("ooa", "S2")
def _(problem: MethodProblem, model: Point) -> Setup:
    objective = fcco.methods.ooa(model, sgd(model, 0.1), problem.number, ratio=0.25, step=0.02)
    return Setup(objective, 2000, TOLERANCE["S2"], {})


@setup("ctc-dro", "S2")
def _(problem: MethodProblem, model: Point) -> Setup:
    objective = fcco.methods.ctc_dro(model, sgd(model, 0.1), problem.number, step=0.02)
    return Setup(objective, 2000, TOLERANCE["S2"], {})


@setup("scent", "exponents")
def _(problem: MethodProblem, model: Point) -> Setup:
    objective = fcco.methods.scent(model, sgd(model, 0.1), problem.number, temperature=0.5)
    return Setup(objective, 2000, 0.03, {"per_block": 4})


# Constraints: the penalties are exact, rho/m = 2 > multiplier, but for the squared hinge, where
# rho/m = 40 ends 0.7/41 = 0.017 above the limit.

BOTH: dict[str, bool] = {"every": True, "independent": True}


def limited(
    method: str, optimizer: Any, steps: int, tolerance: float, draw: Any, per_block: float = 2.0,
    power: float = 1.0, **settings: Any,
) -> None:  # fmt: skip
    """Enter a method for limits; `per_block` is its penalty over the number of constraints."""

    @setup(method, "S3", "S3b")
    def _(problem: MethodProblem, model: Point) -> Setup:
        more = dict(settings)
        if "penalty" in fcco.methods.METHODS[method].missing(more):
            more["penalty"] = per_block * problem.number
        objective: Any = fcco.constrained(model, optimizer(model), problem.number, method, **more)
        run = Setup(objective, steps, tolerance, draw, power)
        if method == "multipliers":  # its unit is the noise of the loss
            problem.loss_noise = 0.1
        if method == "recursive-hinge":
            run.large = lambda: objective.refresh_due
        if method == "ssg":
            feasible = lambda: float(objective.term.feasible)  # noqa: E731
            output = fcco.optim.OutputIterate(objective.optimizer, "average", weight=feasible)
            run.final = lambda: output.applied().__enter__()
        return run


def rate(lr: float) -> Callable[[Point], torch.optim.SGD]:
    return lambda model: sgd(model, lr)


limited("multipliers", rate(0.05), 2000, 0.08, {})
limited("sonex", lambda m: momentum(m, 0.02), 2000, 0.08, {}, smoothing=0.03, gamma=0.1)
limited(
    "alexr2", lambda m: momentum(m, 0.2, 0.5), 3000, 0.08, {"independent": True}, smoothing=0.03,
    gamma=0.1, theta=0.5, nu=0.2, eta=0.03, inner_steps=5,
)  # fmt: skip
limited("alexr", rate(0.03), 2000, 0.06, {"independent": True}, dual_step=0.1)
limited("hinge", rate(0.03), 2000, 0.06, {})
limited("squared-hinge", rate(0.005), 3000, 0.06, {}, per_block=40.0, gamma=0.2, read="old")
limited("recursive-hinge", rate(0.02), 2000, 0.06, BOTH, smoothing=0.01, refresh_every=20)
limited("ssg", rate(0.01), 2000, 0.08, {**BOTH, "per_block": 8}, power=0, threshold=0.01)
limited("oss", rate(1.0), 3000, 0.12, {"every": True}, power=0, proximal=2.5, inner_steps=200)
limited("icppac", rate(0.05), 2000, 0.08, BOTH, power=0, proximal=1.0, inner_steps=100)
del SETUPS["alexr", "S3b"]  # its saddle point is that of a convex problem
