"""One run: the method on the constraints, its steps, its figures, and how near it ends to KKT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

import fcco
from fcco import diagnostics, methods
from fcco.constraints import ConstantConEx
from fcco.methods.constrained import RECIPES

from ...task import Method, Row
from ..base import BaseTraining, Stepped, make_optimizer
from .config import Fairness
from .model import SMALLEST, CellBatches, Cells, Measure, figures, gaps, pairs, scorer, signed

__all__ = ["UNCONSTRAINED", "Built", "FairnessTraining", "PairSlopes", "build"]

UNCONSTRAINED = "erm"
_PAIRED = (methods.constrained_sonex, methods.constrained_alexr2, methods.hinge_penalty)
IN_PAIRS = tuple(word for word, recipe in RECIPES.items() if recipe in _PAIRED)
"""Methods with an outer function of our choice: the two-sided hinge on R^2."""
AVERAGED = (*IN_PAIRS, *(w for w, r in RECIPES.items() if r is methods.squared_hinge_penalty))
"""Methods whose multipliers follow from moving averages."""
OURS = ("outer", "dim", "equality", "tolerance", "schedule", "project", "process_group")
"""Settings of `fcco.constrained` that the constraints of the task decide."""
IN_WORDS = ("correction", "read", "constraint_optimizer", "on_nonfinite")
"""Settings that may be words."""


@dataclass
class Built(Stepped):
    """A method on this task.

    Attributes:
        state: from rates to the values that the objective wants; None without constraints.
    """

    state: Callable[[Tensor], Tensor] | None

    def multipliers(self, constraints: int) -> Tensor:
        """One per gap: what its two sides pull with together."""
        above, below = self.signed_multipliers(constraints).view(2, -1)
        return (above - below).abs()

    def signed_multipliers(self, constraints: int) -> Tensor:
        """Of gap <= kappa for each gap, then of -gap <= kappa.

        Dual methods may price both sides at once; the two-sided hinge the side of the tracked gap.
        """
        if self.objective is None:
            return torch.zeros(2 * constraints)
        values = self.objective.multipliers().detach().nan_to_num(nan=0.0)
        if len(values) == 2 * constraints:
            return values
        return torch.cat([values.clamp(min=0), (-values).clamp(min=0)])  # of pairs: by their sign


def build(model: nn.Module, method: Method, constraints: int, tolerance: float) -> Built:
    r"""A method with its optimizer.

    Penalties see :math:`\rho/m \sum_i f(g_i)` over the m gaps whichever way the gaps are stated.
    With `from_zero: true` the tracked gaps start at 0 and the multipliers with them: for penalties
    on moving averages; dual variables start at 0 in any case.

    Args:
        model: the scorer.
        method: its settings.
        constraints: the number m of gaps.
        tolerance: kappa.
    """
    optimizer = make_optimizer(model.parameters(), method)
    word, settings = method.method, dict[str, Any](method.settings)
    _check(word, settings, tolerance)
    if word == UNCONSTRAINED:
        return Built(None, optimizer, optimizer, None)
    from_zero = bool(settings.pop("from_zero", False))
    if word in IN_PAIRS:
        state: Callable[[Tensor], Tensor] = pairs
        hinge = fcco.TwoSidedHinge(tolerance - settings.pop("margin", 0.0), settings.pop("penalty"))
        objective = fcco.constrained(model, optimizer, constraints, word, outer=hinge, **settings)
    else:
        state = _both_sides
        if "penalty" in settings:
            settings["penalty"] *= 2  # of twice as many constraints
        if RECIPES.get(word) is methods.icppac:
            tau, theta = settings.pop("tau", 10.0), settings.pop("theta", 0.1)
            settings["schedule"] = ConstantConEx(tau=tau, theta=theta)
        objective = fcco.constrained(
            model, optimizer, 2 * constraints, word, tolerance=tolerance, **settings
        )
    if from_zero:
        tracker = objective.term.tracker
        tracker.set_values(None, torch.zeros(tracker.num_inner, tracker.dim))
    stepped: Any = objective.optimizer
    return Built(objective, stepped, optimizer, state)


def _both_sides(rates: Tensor) -> Tensor:
    return signed(rates, 0.0)  # the tolerance is the objective's


def _check(word: str, settings: dict[str, Any], tolerance: float) -> None:
    """Refuse what would be taken and then ignored, or fail in a step without its name."""
    for name, value in settings.items():
        if name in OURS:
            raise ValueError(f"`settings.{name}` of {word} is made by the task; leave it out.")
        if isinstance(value, str) and name not in IN_WORDS:
            raise ValueError(f"`settings.{name}` of {word} must be a number but is: {value!r}.")
        if isinstance(value, bool) and name != "from_zero":
            raise ValueError(f"`settings.{name}` of {word} must not be true or false: {value}.")
    if word == UNCONSTRAINED and settings:
        raise ValueError(f"`{word}` has no settings but got: {', '.join(settings)}.")
    if word in IN_PAIRS and "penalty" not in settings:
        raise ValueError(f"`settings.penalty` is needed for {word}.")
    if settings.get("from_zero") and word not in AVERAGED:
        raise ValueError(f"`settings.from_zero` is for {', '.join(AVERAGED)} but not for {word}.")
    if settings.get("margin", 0.0) > tolerance:
        raise ValueError(
            f"`settings.margin` of {word} must be at most the tolerance {tolerance:g} but is: "
            f"{settings['margin']}."
        )


class FairnessTraining(BaseTraining):
    """A method on a data set from a seed.

    Args:
        config: of the experiment.
        method: and its settings.
        seed: of the first weights and of the batches.
        parts: the data by name: train, validation (where there is one), test.
    """

    config: Fairness
    built: Built
    batches: CellBatches

    def __init__(
        self, config: Fairness, method: Method, seed: int, parts: Mapping[str, Cells]
    ) -> None:
        self.parts, self.train = dict(parts), parts["train"]
        self.measure = Measure.of(config, self.train)
        self.count = 2 * len(config.thresholds)
        model = scorer(config, seed, self.train)
        built = build(model, method, self.count, config.tolerance)
        batches = CellBatches(config, seed, self.train, 2 if method.independent else 1)
        super().__init__(config, method, model, built, batches, torch.device("cpu"))

    @property
    def samples_per_step(self) -> int:
        """The batch, or two."""
        return self.config.batch * self.batches.copies

    @property
    def steps_per_epoch(self) -> int:
        """As many steps as draw the number of training samples."""
        return self.batches.steps_per_epoch

    def update(self) -> None:
        """One batch, or two."""
        if self.config.threshold_kind == "quantile" and self.steps % self.steps_per_epoch == 0:
            self.model.calibrate(self.train.inputs)
        first, *others = (self.train.inputs[rows] for rows in self.batches.draw())
        if self.built.objective is None:
            loss = self._values(first)
        elif not others:
            loss = self.built.objective(lambda: self._values(first))
        else:
            loss = self.built.objective(
                lambda: self._values(first), gradient=lambda: self._values(others[0])
            )
        loss.backward()
        self.built.optimizer.step()
        self.built.optimizer.zero_grad()

    def _values(self, inputs: Tensor) -> Any:
        return self.measure.batch(self.model, inputs, self.built.state)

    def evaluate(self) -> Row:
        """AUC, violations and gaps on every part of the data; it changes nothing.

        In the middle of a round of a double loop the weights of its start are evaluated.
        """
        total = self.config.epochs * self.steps_per_epoch
        with self.evaluating():
            row = self._figures()
            # At the start and where a quarter ends.
            if 4 * self.steps % total == 0 and self.built.objective is not None:
                row.update(self.condition())
        return row

    @torch.no_grad()
    def _figures(self) -> Row:
        outputs = {name: self.model.body(part.inputs) for name, part in self.parts.items()}
        level = self.model.level(outputs["train"])
        found = figures(outputs, self.parts, level, self.measure, self.config.tolerance)
        row = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in found.items()}
        return row | {"multipliers": self.built.multipliers(self.count).tolist()}

    def finish(self) -> Row:
        """KKT residuals and the constraint Jacobian's smallest singular value, on full data."""
        with self.evaluating():
            return self.certificate()

    def _cells(self) -> list[Tensor]:
        """Scores of all training rows by cell, with a graph through their mean and deviation."""
        output = self.model.body(self.train.inputs)
        if self.model.normalised:
            centred = output - output.mean()
            output = centred / centred.square().mean().sqrt().clamp(min=SMALLEST)
        return self.train.split(output)

    def _violations(self, thresholds: Tensor, index: Tensor) -> Tensor:
        rates = self.measure.full_rates(self._cells(), thresholds)
        return (gaps(rates).abs() - self.config.tolerance)[index]

    def _full_loss(self) -> Callable[[], Tensor]:
        """The objective on all training data."""
        if self.config.objective == "auc":
            with torch.no_grad():
                slopes = PairSlopes.of(*_labels(self._cells()), self.config.pair_temperature)
            return lambda: slopes.loss(*_labels(self._cells()))
        return lambda: torch.nn.functional.binary_cross_entropy_with_logits(
            torch.cat(self._cells()), self.train.label
        )

    def condition(self) -> Row:
        """The least singular value of the constraints' Jacobian (assumption cons_cond), where some
        constraint is violated; nothing where all hold.
        """
        thresholds = self.model.thresholds.clone()
        found = diagnostics.constraint_condition(
            lambda index: self._violations(thresholds, index),
            self.count,
            list(self.model.parameters()),
            per_layer=False,
        )
        if found.feasible:
            return {}
        return {"singular_value": found.smallest, "singular_value_violated": found.violated}

    def certificate(self) -> Row:
        """KKT residuals with the method's multipliers and with the best ones, and `condition`."""
        thresholds, loss = self.model.thresholds.clone(), self._full_loss()
        parameters = list(self.model.parameters())

        def both_sides(index: Tensor) -> Tensor:
            rates = self.measure.full_rates(self._cells(), thresholds)
            return signed(rates, self.config.tolerance)[index]

        prices = self.built.signed_multipliers(self.count)
        own = diagnostics.kkt(loss, both_sides, 2 * self.count, parameters, multipliers=prices)
        best = diagnostics.kkt(
            loss,
            lambda index: self._violations(thresholds, index),
            self.count,
            parameters,
            per_layer=False,
        )
        return {
            "kkt_stationarity": own.stationarity,
            "kkt_feasibility": own.feasibility,
            "kkt_complementarity": own.complementarity,
            "kkt_best_stationarity": best.stationarity,
            "kkt_best_complementarity": best.complementarity,
            "best_multipliers": best.multipliers.tolist(),
            **self.condition(),
        }


def _labels(cells: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat(cells[1::2]), torch.cat(cells[0::2])


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
        """Look at all pairs, `rows` positive scores at a time."""
        total = positive.new_zeros((), dtype=torch.float64)
        rising, falling = [], torch.zeros_like(negative)
        for part in positive.split(rows):
            won = torch.sub(part[:, None], negative).div_(temperature).sigmoid_()
            total += won.sum()
            slope = won.addcmul_(won, won, value=-1)
            rising.append(slope.sum(1))
            falling += slope.sum(0)
        number = len(positive) * len(negative)
        scale = 1 / (number * temperature)
        return cls((-total / number).to(positive), -torch.cat(rising) * scale, falling * scale)

    def loss(self, positive: Tensor, negative: Tensor) -> Tensor:
        """F at the scores it was made for, with its gradient."""
        linear = self.positive @ positive + self.negative @ negative
        return self.value + (linear - linear.detach())
