"""Ways to run the step of a fleet: as it is, traced, as a CUDA graph, compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from .program import Inputs, Program
from .reading import Kind
from .run import Task

__all__ = ["MODES", "Stepper"]

MODES = ("auto", "eager", "traced", "graph", "compiled")


class Stepper:
    """Makes steps, and freezes runs that leave the finite numbers.

    Args:
        task: model and function.
        kind: the rules.
        mode: one of `MODES`; `"auto"` is `"graph"` on a GPU and `"traced"` elsewhere.
        device: of the fleet.
    """

    def __init__(self, task: Task, kind: Kind, mode: str, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.mode = ("graph" if on_gpu else "traced") if mode == "auto" else mode
        self.program = Program(task, kind, "eager" if mode == "eager" else "traced")

    def __call__(self, inputs: Inputs, died: Tensor, step: int) -> Tensor:
        """One step: changes `inputs.state` and, for runs that are frozen now, `died`."""
        state, good, loss = self.program(inputs)
        alive = died < 0
        if not bool((good & alive).all()):
            state = frozen(inputs.state, state, good & alive)
            died.copy_(torch.where(alive & ~good, step, died))
        inputs.state = state
        return loss


def frozen(before: dict[str, Tensor], after: dict[str, Tensor], good: Tensor) -> dict[str, Tensor]:
    """The new state of the runs whose step was good, the old one of the others."""

    def kept(name: str) -> Tensor:
        new = after[name]
        return torch.where(good.view(-1, *(1 for _ in new.shape[1:])), new, before[name])

    return {name: kept(name) for name in after}
