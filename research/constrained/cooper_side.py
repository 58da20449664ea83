"""Cooper (PyPI: cooper-optim): Lagrangian formulations and their constrained optimizers."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .problems import Batch, Form, Problem
from .stepper import Builder, Setting, Stepper, adam

__all__ = ["METHODS", "build", "installed"]


def installed() -> bool:
    """Whether the package can be imported."""
    try:
        import cooper  # noqa: F401
    except ImportError:
        return False
    return True


def _problem_class(
    problem: Problem, model: nn.Module, penalty: float | None, form: Form
) -> tuple[Any, Any]:
    """A constrained minimisation problem with one vector constraint."""
    import cooper

    number = problem.num_constraints // (2 if form == "absolute" else 1)
    indexed = problem.sampled
    if indexed:
        # Its sparse gradients make torch warn unless one says that the checks may stay off.
        torch.sparse.check_sparse_tensor_invariants.disable()
    multiplier = "IndexedMultiplier" if indexed else "DenseMultiplier"
    augmented = penalty is not None
    coefficient = None
    if augmented:
        # One coefficient for each constraint: Cooper multiplies them entry by entry.
        kind = "IndexedPenaltyCoefficient" if indexed else "DensePenaltyCoefficient"
        coefficient = getattr(cooper.penalty_coefficients, kind)(torch.full((number,), penalty))
    formulations = cooper.formulations
    formulation = formulations.AugmentedLagrangian if augmented else formulations.Lagrangian

    class Constrained(cooper.ConstrainedMinimizationProblem):
        def __init__(self) -> None:
            super().__init__()
            self.constraint = cooper.Constraint(
                constraint_type=cooper.ConstraintType.INEQUALITY,
                formulation_type=formulation,
                multiplier=getattr(cooper.multipliers, multiplier)(num_constraints=number),
                penalty_coefficient=coefficient,
            )

        def compute_cmp_state(self, batch: Batch) -> Any:
            loss, values = problem.measure(model, batch, form)
            state = cooper.ConstraintState(violation=values, constraint_features=batch.index)
            return cooper.CMPState(loss=loss, observed_constraints={self.constraint: state})

    return cooper, Constrained()


def build(order: str, problem: Problem, model: nn.Module, setting: Setting) -> Stepper:
    """A step of a constrained optimizer.

    Args:
        order: `"simultaneous"`, `"alternating"` (dual first) or `"extrapolation"`.
        problem: the problem.
        model: its model.
        setting: `dual_lr`; `penalty` for the augmented Lagrangian; `kp` and `nu` for nuPI;
            `momentum` of the dual SGD; `dual_decay`, whether the dual learning rate follows the
            primal schedule; `form`.
    """
    form = setting.get("form", "signed")
    cooper, constrained = _problem_class(problem, model, setting.get("penalty"), form)
    lr, parameters = setting["dual_lr"], list(constrained.dual_parameters())
    if order == "extrapolation":
        primal = cooper.optim.ExtraAdam(model.parameters(), lr=problem.schedule.lr)
        dual = cooper.optim.ExtraSGD(parameters, lr=lr, maximize=True)
    else:
        primal = adam(problem, model)
        if "kp" in setting:
            dual = cooper.optim.nuPI(
                parameters, lr=lr, Kp=setting["kp"], ema_nu=setting["nu"], maximize=True
            )
        else:
            momentum = setting.get("momentum", 0.0)
            dual = torch.optim.SGD(
                parameters, lr=lr, momentum=momentum, dampening=momentum, maximize=True
            )
    optimizers = {
        "simultaneous": "SimultaneousOptimizer",
        "alternating": "AlternatingDualPrimalOptimizer",
        "extrapolation": "ExtrapolationConstrainedOptimizer",
    }
    optimizer = getattr(cooper.optim, optimizers[order])(constrained, primal, dual)

    def step(batch: Batch) -> None:
        optimizer.roll(compute_cmp_state_kwargs={"batch": batch})

    followers = [primal, dual] if setting.get("dual_decay") else [primal]
    return Stepper(step, followers, gradients=2 if order == "extrapolation" else 1)


def _of(order: str) -> Callable[[Problem, nn.Module, Setting], Stepper]:
    return partial(build, order)


METHODS: dict[str, Builder] = {
    "Cooper simultaneous": _of("simultaneous"),
    "Cooper alternating": _of("alternating"),
    "Cooper augmented": _of("alternating"),
    "Cooper augmented |gap|": _of("alternating"),
    "Cooper nuPI": _of("alternating"),
    "Cooper extrapolation": _of("extrapolation"),
}
