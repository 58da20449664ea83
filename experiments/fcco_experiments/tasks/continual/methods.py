"""From a method's settings to its objective: a contrastive term, and what keeps the old classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fcco

from ...task import Method
from ..base import Stepped, make_optimizer

__all__ = ["CONSTRAINED", "WORDS", "Built", "build"]

CONSTRAINED = ("sonex", "sox", "sonx", "alexr2")
WORDS = (*CONSTRAINED, "finetune", "weighted", "replay")
OURS = ("objective", "outer", "dim", "equality", "tolerance", "process_group")
"""Settings of `fcco.constrained` that the task decides."""
_CORRECTED = ("sonex", "sonx", "alexr2")


@dataclass
class Built(Stepped):
    """A method on this task.

    Attributes:
        contrast: the contrastive term of the objective.
        constrained: whether values of the constraints are asked for.
        everyone: whether the pairs of protected classes are anchors, too.
        weight: of the mean loss of the protected classes in the objective.
    """

    contrast: fcco.ContrastiveTerm
    constrained: bool
    everyone: bool = False
    weight: float = 0.0

    def loss(self, values: Callable[[], tuple[Tensor, Tensor]], index: Mapping[str, Tensor]) -> Any:
        """What is differentiated.

        Args:
            values: runs the model; gives the entries of the contrastive term and, for each sample
                of a protected class, its loss minus the old one.
            index: block ids of both.
        """
        if self.constrained:
            return self.objective(
                lambda: dict(zip(("objective", "constraints"), values(), strict=True)), dict(index)
            )
        if self.weight:
            return self.objective(lambda: self._weighted(*values()), index["objective"])
        return self.objective(lambda: values()[0], index["objective"])

    def _weighted(self, entries: Tensor, differences: Tensor) -> tuple[Tensor, Tensor]:
        # The old losses are constants: the differences have the gradient of the losses.
        return self.weight * differences, entries

    def multipliers(self) -> Tensor | None:
        """One per protected class, 0 where not seen; None for methods without constraints."""
        if not self.constrained:
            return None
        return self.objective.term.multipliers().detach().nan_to_num(nan=0.0)

    def tracked(self) -> Tensor | None:
        """The running values of the constraints, NaN where not seen."""
        if not self.constrained:
            return None
        tracker = self.objective.term.tracker
        return torch.where(tracker.seen, tracker.value.squeeze(-1), torch.nan)


def build(
    model: nn.Module,
    method: Method,
    protected: Sequence[str],
    pairs: Sequence[int],
    *,
    temperature: float,
    chunk: int = 0,
) -> Built:
    """A method with its optimizer.

    Settings of every method: `contrast_gamma` and `contrast_correction`, gamma_1 and gamma_1' of
    the contrastive term. Without them 0.8 and, for the methods with MSVR, 0.1 (0 for the others).

    Args:
        model: what is trained.
        method: its settings.
        protected: names of the protected classes.
        pairs: number of target pairs, and of pairs of protected classes.
        temperature: tau.
        chunk: rows of a strip of the matrix of scores; 0 holds the whole.
    """
    word, given = method.method, dict(method.settings)
    _check(word, given, method)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], method)
    gamma: Any = given.pop("contrast_gamma", 0.8)
    correction: Any = given.pop("contrast_correction", 0.1 if word in _CORRECTED else 0.0)
    targets, others = pairs
    parameter = next(model.parameters())
    contrast = fcco.ContrastiveTerm(
        targets + (others if word == "replay" else 0),
        temperature=temperature,
        gamma=gamma,
        correction=correction,
        offset=1 / others,
        normalize=False,  # the model's vectors have length 1
        chunk=chunk or None,
        device=parameter.device,
    )
    if word in CONSTRAINED:
        settings: dict[str, Any] = given
        objective = fcco.constrained(
            model, optimizer, list(protected), word, objective=contrast, **settings
        )
        stepped: Any = objective.optimizer
        return Built(objective, stepped, optimizer, contrast, True)
    plain = fcco.Compositional(model, optimizer, contrast)
    weight = float(given.get("weight", 0.0))
    return Built(plain, optimizer, optimizer, contrast, False, word == "replay", weight)


def _check(word: str, settings: dict[str, Any], method: Method) -> None:
    """Refuse what would be taken and then ignored, or fail without its name."""
    if word not in WORDS:
        raise ValueError(f"`method` must be one of {', '.join(WORDS)} but is: {word}.")
    for name in settings:
        if name in OURS:
            raise ValueError(f"`settings.{name}` of {word} is made by the task; leave it out.")
    if method.independent:
        raise ValueError(f"`independent` is not offered here but is set for {word}.")
    if word in CONSTRAINED:
        return
    known = {"contrast_gamma", "contrast_correction", *(("weight",) * (word == "weighted"))}
    if wrong := [name for name in settings if name not in known]:
        raise ValueError(f"`settings.{wrong[0]}` is not for {word}: {', '.join(sorted(known))}.")
    if word == "weighted" and not float(settings.get("weight", 0.0)) > 0:
        raise ValueError("`settings.weight` is needed for weighted, above 0.")
