"""How close the last point is to a KKT point, and whether the paper's assumption holds there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from fcco import diagnostics

from ...task import Row
from .rates import gaps, signed
from .score import SMALLEST

if TYPE_CHECKING:
    from .training import FairnessTraining

__all__ = ["PairSlopes", "certificate", "condition"]


@dataclass(frozen=True)
class PairSlopes:
    r"""The pairwise sigmoid AUC loss over all pairs and its exact gradient, in little memory.

    .. math::
        F = -\frac1{n_+n_-}\sum_{i,j}\sigma((s_i - s_j)/T)

    The matrix of pairs is made in strips, once and without a graph. `loss` attaches the gradient
    to scores that have one, as a linear function of them.
    """

    value: Tensor
    positive: Tensor
    negative: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, positive: Tensor, negative: Tensor, temperature: float, rows: int = 256) -> Self:
        """Look at all pairs.

        Args:
            positive: scores of the positive samples.
            negative: of the negative ones.
            temperature: T.
            rows: positive samples of a strip.
        """
        total = positive.new_zeros((), dtype=torch.float64)
        rising, falling = [], torch.zeros_like(negative)
        for part in positive.split(rows):
            won = torch.sub(part[:, None], negative).div_(temperature).sigmoid_()
            total += won.sum()
            slope = won.addcmul_(won, won, value=-1)
            rising.append(slope.sum(1))
            falling += slope.sum(0)
        pairs = len(positive) * len(negative)
        scale = 1 / (pairs * temperature)
        return cls((-total / pairs).to(positive), -torch.cat(rising) * scale, falling * scale)

    def loss(self, positive: Tensor, negative: Tensor) -> Tensor:
        """F at the scores it was made for, with its gradient."""
        linear = self.positive @ positive + self.negative @ negative
        return self.value + (linear - linear.detach())


def _cells(run: FairnessTraining) -> list[Tensor]:
    """Scores of all training rows by cell, with a graph through their mean and deviation."""
    output = run.model.body(run.train.inputs)
    if run.model.normalised:
        centred = output - output.mean()
        output = centred / centred.square().mean().sqrt().clamp(min=SMALLEST)
    return run.train.split(output)


def _excess(run: FairnessTraining, thresholds: Tensor, index: Tensor) -> Tensor:
    rates = run.measure.full_rates(_cells(run), thresholds)
    return (gaps(rates).abs() - run.config.tolerance)[index]


def _labels(cells: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat(cells[1::2]), torch.cat(cells[0::2])


def _loss(run: FairnessTraining) -> Callable[[], Tensor]:
    """The objective on all training data."""
    if run.config.objective == "auc":
        with torch.no_grad():
            slopes = PairSlopes.of(*_labels(_cells(run)), run.config.pair_temperature)
        return lambda: slopes.loss(*_labels(_cells(run)))
    return lambda: torch.nn.functional.binary_cross_entropy_with_logits(
        torch.cat(_cells(run)), run.train.label
    )


def condition(run: FairnessTraining) -> Row:
    """The least singular value of the constraints' Jacobian (assumption cons_cond), where some
    constraint is violated; nothing where all hold.
    """
    thresholds = run.model.thresholds.clone()
    found = diagnostics.constraint_condition(
        lambda index: _excess(run, thresholds, index),
        run.count,
        list(run.model.parameters()),
        per_layer=False,
    )
    if found.feasible:
        return {}
    return {"singular_value": found.smallest, "singular_value_violated": found.violated}


def certificate(run: FairnessTraining) -> Row:
    """KKT residuals with the method's multipliers and with the best ones, and `condition`."""
    thresholds, loss = run.model.thresholds.clone(), _loss(run)
    parameters = list(run.model.parameters())

    def inner(index: Tensor) -> Tensor:
        return _excess(run, thresholds, index)

    def both_sides(index: Tensor) -> Tensor:
        rates = run.measure.full_rates(_cells(run), thresholds)
        return signed(rates, run.config.tolerance)[index]

    prices = run.built.signed_multipliers(run.count)
    own = diagnostics.kkt(loss, both_sides, 2 * run.count, parameters, multipliers=prices)
    best = diagnostics.kkt(loss, inner, run.count, parameters, per_layer=False)
    return {
        "kkt_stationarity": own.stationarity,
        "kkt_feasibility": own.feasibility,
        "kkt_complementarity": own.complementarity,
        "kkt_best_stationarity": best.stationarity,
        "kkt_best_complementarity": best.complementarity,
        "best_multipliers": best.multipliers.tolist(),
        **condition(run),
    }
