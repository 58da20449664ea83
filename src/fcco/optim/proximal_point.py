"""The proximal point: a torch optimizer whose inner loop solves a strongly convex problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import _checks
from ..previous import parameters_at, unwrap
from ..rules.proximal import envelope_gradient, proximal_step
from .wrapper import MethodOptimizer


class ProximalPoint(MethodOptimizer):
    r"""Double loop of ALEXR2 as one optimizer: step it like any other.

    .. math::
        z_{t,k+1} = \frac{\nu z_{t,k} + \eta w_t - \eta\nu G_{t,k}}{\eta+\nu},
            \qquad z_{t,0} = w_t, \qquad G_t = (w_t - z_{t,K_t})/\nu

    Each call of `step()` is one inner step on the gradients in `.grad`; after K_t of them the
    parameters go back to w_t and the outer optimizer steps on G_t, the gradient of the Moreau
    envelope of the objective. Between steps the parameters hold z.

    Args:
        outer: the optimizer of the outer loop over the same parameters.
        nu: the proximal parameter, below 1/rho_F.
        eta: the inner step size; the group entry `lr`, so schedulers can drive it.
        inner_steps: K_t, a number or a function of the round t.
    """

    def __init__(
        self,
        outer: torch.optim.Optimizer,
        nu: float,
        eta: float,
        inner_steps: int | Callable[[int], int],
    ) -> None:
        _checks.positive("ProximalPoint", "nu", nu)
        _checks.positive("ProximalPoint", "eta", eta)
        if not callable(inner_steps):
            _checks.integer("ProximalPoint", "inner_steps", inner_steps, 1)
        self.outer = unwrap(outer)
        self.wrapped = (self.outer,)
        self.inner_steps = inner_steps
        self.inner_step, self.round = 0, 0
        groups = [{"params": list(group["params"])} for group in self.outer.param_groups]
        super().__init__(groups, {"lr": eta, "nu": nu})

    @property
    def round_begins(self) -> bool:
        return self.inner_step == 0

    @property
    def round_length(self) -> int:
        if not callable(self.inner_steps):
            return self.inner_steps
        length = self.inner_steps(self.round)
        _checks.integer("ProximalPoint", "inner_steps", length, 1)
        return length

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters here and to the outer optimizer, which would not move them otherwise."""
        super().add_param_group(param_group)
        known = {p for group in self.outer.param_groups for p in group["params"]}
        new = [p for p in self.param_groups[-1]["params"] if p not in known]
        if new:
            self.outer.add_param_group({"params": new})

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """Inside, the parameters are w_t, the point between rounds: evaluate or save it here."""
        moved = {} if self.round_begins else self.state
        points = {z: state["anchor"] for z, state in moved.items() if state["moved"]}
        with parameters_at(points, self.model):
            yield

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One inner step; the last one of a round ends with a step of the outer optimizer."""
        loss = self._evaluated(closure)
        length, begins = self.round_length, self.round_begins
        for group in self.param_groups:
            for z in group["params"]:
                state = self.state[z]
                if begins or not state:
                    state["anchor"], state["moved"] = z.detach().clone(), False
                if z.grad is None and not state["moved"]:
                    continue
                gradient = torch.zeros_like(z) if z.grad is None else z.grad
                z.copy_(proximal_step(z, state["anchor"], gradient, group["lr"], group["nu"]))
                state["moved"] = True
        self.inner_step += 1
        if self.inner_step >= length:
            self._end_round()
        return loss

    def _end_round(self) -> None:
        for group in self.param_groups:
            for z in group["params"]:
                if not self.state[z]["moved"]:
                    continue  # frozen or unused: the outer optimizer must not touch it either
                anchor = self.state[z]["anchor"]
                # The outer optimizer steps on the gradient of the envelope, not on yours.
                z.grad = envelope_gradient(anchor, z, group["nu"])
                z.copy_(anchor)
        self.step_wrapped(self.outer)
        self.inner_step, self.round = 0, self.round + 1

    def own_state(self) -> dict[str, Any]:
        return {"inner_step": self.inner_step, "round": self.round}

    def load_own_state(self, state: dict[str, Any]) -> None:
        self.inner_step, self.round = state["inner_step"], state["round"]
