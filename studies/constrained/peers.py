"""Peers: Cooper (PyPI: cooper-optim) and humancompatible-train, where they are installed."""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .problems import Batch, Builder, Problem, Setting, Stepper, adam, training_step

_MODULES = {"Cooper": "cooper", "HCT": "humancompatible.train.dual_optim"}


def installed(prefix: str) -> bool:
    """Whether the package can be imported: `"Cooper"` or `"HCT"`."""
    try:
        importlib.import_module(_MODULES[prefix])
    except ImportError:
        return False
    return True


def notes() -> list[str]:
    """A line for each library that is not installed, and so left out."""
    missing = [prefix for prefix in _MODULES if not installed(prefix)]
    names = {"Cooper": "Cooper", "HCT": "HCT (humancompatible-train)"}
    return [f"{names[p]} is left out: not installed (pip install '.[bench]')." for p in missing]


def cooper_problem(problem: Problem, model: nn.Module, penalty: float | None) -> Any:
    """A constrained minimisation problem with one vector constraint."""
    import cooper

    number = problem.num_constraints
    if problem.sampled:
        # Its sparse gradients make torch warn unless one says that the checks may stay off.
        torch.sparse.check_sparse_tensor_invariants.disable()
    kind, coefficient = "Indexed" if problem.sampled else "Dense", None
    formulation = cooper.formulations.Lagrangian
    if penalty is not None:
        # One coefficient for each constraint: Cooper multiplies them entry by entry.
        coefficients = getattr(cooper.penalty_coefficients, f"{kind}PenaltyCoefficient")
        coefficient = coefficients(torch.full((number,), penalty))
        formulation = cooper.formulations.AugmentedLagrangian

    class Constrained(cooper.ConstrainedMinimizationProblem):
        def __init__(self) -> None:
            super().__init__()
            self.constraint = cooper.Constraint(
                constraint_type=cooper.ConstraintType.INEQUALITY,
                formulation_type=formulation,
                multiplier=getattr(cooper.multipliers, f"{kind}Multiplier")(
                    num_constraints=number, device=next(model.parameters()).device
                ),
                penalty_coefficient=coefficient,
            )

        def compute_cmp_state(self, batch: Batch) -> Any:
            loss, values = problem.measure(model, batch)
            state = cooper.ConstraintState(violation=values, constraint_features=batch.index)
            return cooper.CMPState(loss=loss, observed_constraints={self.constraint: state})

    return Constrained()


def cooper_method(order: str, problem: Problem, model: nn.Module, setting: Setting) -> Stepper:
    """A step of a constrained optimizer.

    Args:
        order: the class of the optimizer without "Optimizer".
        problem: the problem.
        model: its model.
        setting: `dual_lr`; `penalty` for the augmented Lagrangian; `dual_decay`, whether the dual
            learning rate follows the primal schedule.
    """
    from cooper import optim

    constrained = cooper_problem(problem, model, setting.get("penalty"))
    lr, parameters = setting["dual_lr"], list(constrained.dual_parameters())
    twice = order == "ExtrapolationConstrained"
    if twice:
        primal: Any = optim.ExtraAdam(model.parameters(), lr=problem.schedule.lr)
        dual = optim.ExtraSGD(parameters, lr=lr, maximize=True)
    else:
        primal, dual = adam(problem, model), torch.optim.SGD(parameters, lr=lr, maximize=True)
    optimizer = getattr(optim, f"{order}Optimizer")(constrained, primal, dual)

    def step(batch: Batch) -> None:
        optimizer.roll(compute_cmp_state_kwargs={"batch": batch})

    followers = [primal, dual] if setting.get("dual_decay") else [primal]
    return Stepper(step, followers, gradients=1 + twice)


def hct_method(kind: str, problem: Problem, model: nn.Module, setting: Setting) -> Stepper:
    """A step with a dual optimizer.

    There are no sampled constraints in this package. A value of 0 for a constraint that is absent
    leaves its multiplier alone and adds nothing to the loss, so the sampled values are put into a
    vector of zeros.

    Args:
        kind: name of the class.
        problem: the problem.
        model: its model.
        setting: options of the class, of PBM the number of `epochs` too.
    """
    from humancompatible.train import dual_optim

    options, number = dict(setting), problem.num_constraints
    if kind == "PBM":
        options["epoch_length"] = max(1, problem.schedule.evaluations // options.pop("epochs"))
    if kind in ("ALM", "nuPI"):
        options["is_ineq"] = True
    dual, primal = getattr(dual_optim, kind)(m=number, **options), adam(problem, model)

    def full(values: Tensor, index: Tensor | None) -> Tensor:
        return values if index is None else torch.zeros(number).index_put((index,), values)

    def loss(batch: Batch) -> Tensor:
        loss, values = problem.measure(model, batch)
        return dual.forward_update(loss, full(values, batch.index))

    return Stepper(training_step(primal, loss), [primal])


_METHODS: dict[str, Builder] = {
    "Cooper simultaneous": partial(cooper_method, "Simultaneous"),
    "Cooper alternating": partial(cooper_method, "AlternatingDualPrimal"),
    "Cooper augmented": partial(cooper_method, "AlternatingDualPrimal"),
    "Cooper extrapolation": partial(cooper_method, "ExtrapolationConstrained"),
    "HCT ALM": partial(hct_method, "ALM"),
    "HCT nuPI": partial(hct_method, "nuPI"),
    "HCT PBM": partial(hct_method, "PBM"),
    "HCT SSG": partial(hct_method, "SSG"),
}


def methods() -> dict[str, Builder]:
    """Every method whose package is installed."""
    there = {prefix for prefix in _MODULES if installed(prefix)}
    return {name: build for name, build in _METHODS.items() if name.split()[0] in there}
