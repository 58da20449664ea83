"""The estimator of a plain average loss."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .run import Outcome, Run, Seen, finite

__all__ = ["Plain"]


@dataclass(frozen=True)
class Plain:
    """The gradient of the loss of a batch, nothing else."""

    remembers = False

    def gradient(self, run: Run) -> Outcome:
        """G_t of one run."""

        def scalar(seen: Seen) -> tuple[Tensor, Tensor]:
            return seen.loss, seen.loss.detach()

        batch = run.batch if run.other is None else run.other
        gradient, loss, moved = run.differentiate(scalar, batch)
        return Outcome(gradient, moved, loss, finite(loss))
