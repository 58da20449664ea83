"""humancompatible-train: dual optimizers around the user's own step."""

# pyright: reportMissingImports=false
from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .problems import Batch, Problem
from .stepper import Builder, Setting, Stepper, adam

__all__ = ["METHODS", "build", "installed"]


def installed() -> bool:
    """Whether the package can be imported."""
    try:
        import humancompatible.train.dual_optim  # noqa: F401
    except ImportError:
        return False
    return True


def _dual(kind: str, number: int, setting: Setting) -> Any:
    from humancompatible.train import dual_optim

    options = dict(setting)
    if kind in ("ALM", "nuPI"):
        options["is_ineq"] = True
        options.setdefault("dual_range", (0.0, 1e4))  # its default clamps at 100
    return getattr(dual_optim, kind)(m=number, **options)


def build(kind: str, problem: Problem, model: nn.Module, setting: Setting) -> Stepper:
    """A step with a dual optimizer.

    There are no sampled constraints in this package. A value of 0 for a constraint that is absent
    leaves its multiplier alone and adds nothing to the loss, so the sampled values are put into a
    vector of zeros.

    Args:
        kind: name of the class.
        problem: the problem.
        model: its model.
        setting: options of the class, with `moreau` (mu of the wrapper around the primal
            optimizer), `dual_decay` (whether the dual step follows the primal schedule) and
            `form`.
    """
    options = dict(setting)
    form, moreau = options.pop("form", "signed"), options.pop("moreau", None)
    decay = options.pop("dual_decay", False)
    number = problem.num_constraints // (2 if form == "absolute" else 1)
    if kind == "PBM":
        options["epoch_length"] = max(1, problem.schedule.evaluations // options.pop("epochs"))
    dual = _dual(kind, number, options)
    primal = optimizer = adam(problem, model)
    if moreau is not None:
        from humancompatible.train.dual_optim import MoreauEnvelope

        optimizer = MoreauEnvelope(primal, **moreau)

    def full(values: Tensor, index: Tensor | None) -> Tensor:
        return values if index is None else torch.zeros(number).index_put((index,), values)

    def step(batch: Batch) -> None:
        loss, values = problem.measure(model, batch, form)
        dual.forward_update(loss, full(values, batch.index)).backward()
        optimizer.step()
        primal.zero_grad()

    return Stepper(step, [primal, dual] if decay else [primal])


METHODS: dict[str, Builder] = {
    "HCT ALM": partial(build, "ALM"),
    "HCT ALM |gap|": partial(build, "ALM"),
    "HCT nuPI": partial(build, "nuPI"),
    "HCT PBM": partial(build, "PBM"),
    "HCT SSG": partial(build, "SSG"),
    "HCT Moreau": partial(build, "ALM"),
}
