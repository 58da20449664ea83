"""A run, or a fleet of them: the method on the constraints, steps, figures, distance from KKT."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import fcco
from fcco import diagnostics
from fcco.fleet import Fleet, Member
from fcco.methods import ALIASES

from ...task import FleetTraining, Method, Row
from ..base import BaseTraining, Stepped, check_method, learning_rate_factor, make_optimizer
from .model import (
    SMALLEST,
    CellBatches,
    Cells,
    Fairness,
    Scorer,
    both_sides,
    by_label,
    gaps,
    pairs,
)

UNCONSTRAINED = "erm"
AUTOMATIC = "automatic"
"""`fcco.constrained` without settings."""
PAIRED = ("sonex", "alexr2", "hinge")
"""Methods with an outer function of our choice: the two-sided hinge on pairs of rates."""
AVERAGED = (*PAIRED, "squared-hinge")
"""Methods whose multipliers follow from moving averages."""
_BY_TASK = ("outer", "dim", "tolerance", "process_group")
"""Settings of `fcco.constrained` that the constraints of the task decide."""
_BUDGET = 1 << 28, 1 << 32
"""Bytes for the figures of some runs of a fleet at a time, on the CPU and on a GPU."""


class BuiltMethod(Stepped):
    r"""A method on this task: optimizer, objective, and the values that it wants of a batch.

    Penalties see :math:`\rho/m \sum_i f(g_i)` over the m gaps whichever way the gaps are stated.
    With `from_zero: true` the tracked gaps start at 0 and the multipliers with them: for penalties
    on moving averages; dual variables start at 0 in any case.
    """

    def __init__(self, model: nn.Module, method: Method, config: Fairness) -> None:
        optimizer = make_optimizer(model.parameters(), method)
        super().__init__(None, optimizer, optimizer)
        self.count = 2 * len(config.thresholds)
        name, settings = method.method, dict[str, Any](method.settings)
        word = ALIASES.get(name, name)
        check_method(method, _BY_TASK)
        if word in (UNCONSTRAINED, AUTOMATIC) and settings:
            raise ValueError(f"`{name}` has no settings but got: {', '.join(settings)}.")
        if word == UNCONSTRAINED:
            return
        from_zero = settings.pop("from_zero", False)
        if from_zero and word not in AVERAGED:
            raise ValueError(
                f"`settings.from_zero` is for {', '.join(AVERAGED)} but not for {name}."
            )
        number = self.count
        if word in PAIRED:
            if "penalty" not in settings:
                raise ValueError(f"`settings.penalty` is needed for {name}.")
            settings["outer"] = fcco.outer.TwoSidedHinge(config.tolerance, settings.pop("penalty"))
        else:
            number, settings["tolerance"] = 2 * self.count, config.tolerance
            if type(settings.get("penalty")) in (int, float):
                settings["penalty"] *= 2  # a mean over twice as many constraints
        self.values_of = pairs if word in PAIRED else both_sides
        if word != AUTOMATIC:
            settings["method"] = name
        self.objective = fcco.constrained(model, optimizer, number, **settings)
        self.optimizer = self.objective.optimizer  # another one for double loops
        if from_zero:
            tracker = self.objective.term.tracker
            tracker.set_values(None, torch.zeros(tracker.num_inner, tracker.dim))

    def values(self, model: Any, inputs: Tensor) -> Any:
        """Loss of a batch and, where the method has constraints, its inner values."""
        cells = model(inputs)
        if self.objective is None:
            return model.loss(cells)
        return model.loss(cells), self.values_of(model.rates(cells))

    def multipliers(self) -> Tensor:
        """One per gap: what its two sides pull with together."""
        above, below = self.signed_multipliers().view(2, -1)
        return (above - below).abs()

    def signed_multipliers(self) -> Tensor:
        """Of gap <= kappa for each gap, then of -gap <= kappa.

        Dual methods may price both sides at once; the two-sided hinge the side of the tracked gap.
        """
        if self.objective is None:
            return torch.zeros(2 * self.count)
        values = self.objective.multipliers().detach().nan_to_num(nan=0.0)
        if len(values) == 2 * self.count:
            return values
        return torch.cat([values.clamp(min=0), (-values).clamp(min=0)])  # of pairs: by their sign


class FairnessTraining(BaseTraining):
    """A method on a data set (its parts by name) from a seed."""

    config: Fairness
    built: BuiltMethod
    batches: CellBatches

    def __init__(
        self, config: Fairness, method: Method, seed: int, parts: Mapping[str, Cells]
    ) -> None:
        self.parts, self.train = dict(parts), parts["train"]
        model = Scorer(config, seed, self.train)
        built = BuiltMethod(model, method, config)
        batches = CellBatches(config, seed, self.train, 1 + method.independent)
        epoch = batches.steps_per_epoch, config.batch * batches.copies
        super().__init__(config, method, model, built, batches, torch.device("cpu"), epoch)
        self.parameters = list(model.parameters())

    def loss(self) -> Tensor:
        def values(rows: Tensor) -> Any:
            return self.built.values(self.model, self.train.inputs[rows])

        first, *second = self.batches.draw()
        if self.built.objective is None:
            return values(first)
        if not second:
            return self.built.objective(lambda: values(first))
        return self.built.objective(lambda: values(first), gradient=lambda: values(*second))

    def evaluate(self) -> Row:
        total = self.config.epochs * self.steps_per_epoch
        with self.evaluating():
            with torch.no_grad():
                outputs = {name: self.model.body(part.inputs) for name, part in self.parts.items()}
                figures = self.model.figures(outputs, self.parts)
            row = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in figures.items()}
            row["multipliers"] = self.built.multipliers().tolist()
            # At the start and where a quarter ends.
            if 4 * self.steps % total == 0 and self.built.objective is not None:
                row |= self.condition()
        return row

    def _cells(self) -> list[Tensor]:
        """Scores of all training rows by cell, with a graph through their mean and deviation."""
        output = self.model.body(self.train.inputs)
        if self.config.score == "normalised":
            centred = output - output.mean()
            output = centred / centred.square().mean().sqrt().clamp(min=SMALLEST)
        return self.train.split(output)

    def _loss(self) -> Tensor:
        """The objective on all training data."""
        return pair_loss(*by_label(self._cells()))

    def _violations(self, index: Tensor) -> Tensor:
        rates = self.model.full_rates(self._cells())
        return (gaps(rates).abs() - self.config.tolerance)[index]

    def _signed_violations(self, index: Tensor) -> Tensor:
        rates = self.model.full_rates(self._cells())
        return (both_sides(rates) - self.config.tolerance)[index]

    def condition(self) -> Row:
        """The least singular value of the constraints' Jacobian (assumption cons_cond), where some
        constraint is violated; nothing where all hold.
        """
        values = diagnostics.constraint_condition(
            self._violations, self.built.count, self.parameters
        )
        keys = ("singular_value", "singular_value_violated")
        return {} if values is None else dict(zip(keys, values, strict=True))

    def finish(self) -> Row:
        """KKT residuals with the method's multipliers and with the best ones, and `condition`."""
        with self.evaluating():
            used = diagnostics.kkt(
                self._loss, self._signed_violations, 2 * self.built.count, self.parameters,
                multipliers=self.built.signed_multipliers(),
            )  # fmt: skip
            best = diagnostics.kkt(self._loss, self._violations, self.built.count, self.parameters)
            return {
                "kkt_stationarity": used.stationarity,
                "kkt_feasibility": used.feasibility,
                "kkt_complementarity": used.complementarity,
                "kkt_best_stationarity": best.stationarity,
                "kkt_best_complementarity": best.complementarity,
                "best_multipliers": best.multipliers.tolist(),
                **self.condition(),
            }


def pair_loss(positive: Tensor, negative: Tensor, rows: int = 256) -> Tensor:
    r"""The pairwise sigmoid AUC loss over all pairs of scores, with its exact gradient.

    .. math::
        F = -\frac1{n_+n_-}\sum_{i,j}\sigma(s_i - s_j)

    The matrix of pairs would not fit in memory with a graph: it is made in strips of `rows`
    positive scores without one, and the gradient attached as a linear function of the scores.
    """
    with torch.no_grad():
        total = positive.new_zeros((), dtype=torch.float64)
        rising, falling = [], torch.zeros_like(negative)
        for part in positive.split(rows):
            won = torch.sub(part[:, None], negative).sigmoid_()
            total += won.sum()
            slope = won.addcmul_(won, won, value=-1)
            rising.append(slope.sum(1))
            falling += slope.sum(0)
        number = len(positive) * len(negative)
        scale = 1 / number
        value = (-total / number).to(positive)
    linear = (-torch.cat(rising) * scale) @ positive + (falling * scale) @ negative
    return value + (linear - linear.detach())


class FairnessFleet(FleetTraining):
    """Runs (a method and a seed each) of one kind, with as many steps in an epoch.

    `built` makes a method with its objective; nobody steps it, so that runs may share it.
    """

    def __init__(
        self,
        config: Fairness,
        runs: Sequence[tuple[Method, int]],
        parts: Callable[[int], Mapping[str, Cells]],
        built: Callable[[Method], BuiltMethod],
        device: torch.device,
    ) -> None:
        self.config, self.device, self.steps = config, device, 0
        seeds = list(dict.fromkeys(seed for _, seed in runs))
        self.parts = [parts(seed) for seed in seeds]
        number = 1 + runs[0][0].independent
        self.batches = [
            CellBatches(config, seed, data["train"], number)
            for seed, data in zip(seeds, self.parts, strict=True)
        ]
        self.steps_per_epoch = self.batches[0].steps_per_epoch
        self.samples_per_step = config.batch * number
        models = [
            Scorer(config, seed, data["train"])
            for seed, data in zip(seeds, self.parts, strict=True)
        ]
        methods = [built(method) for method, _ in runs]
        streams = [seeds.index(seed) for _, seed in runs]
        members = [
            Member(models[stream], method.optimizer, method.objective)
            for method, stream in zip(methods, streams, strict=True)
        ]
        self.constrained = methods[0].objective is not None
        self.fleet = Fleet(members, methods[0].values, streams=streams, device=device)
        self.model = copy.deepcopy(models[0]).to(device)
        self.runs_of_seed = [
            [run for run, stream in enumerate(streams) if stream == k] for k in range(len(seeds))
        ]
        self._rates = torch.tensor([method.lr for method, _ in runs], dtype=torch.float64)
        self._inputs = [
            {name: part.inputs.to(device) for name, part in data.items()} for data in self.parts
        ]
        self._train = torch.cat([data["train"] for data in self._inputs])
        self._forget_epoch()

    def _forget_epoch(self) -> None:
        self._rows: Tensor | None = None
        self._factor = float("nan")

    @property
    def died(self) -> list[int]:
        return self.fleet.died.tolist()

    def step(self) -> None:
        epoch, within = divmod(self.steps, self.steps_per_epoch)
        if self._rows is None or within == 0:
            self._rows = self._epoch(epoch)
        factor = learning_rate_factor(self.config, self.steps / self.steps_per_epoch)
        if factor != self._factor:
            self._factor = factor
            self.fleet.set_hyperparameters(lr=factor * self._rates)
        first, *second = self._rows[within]
        other = self._gathered(*second) if second and self.constrained else None
        self.fleet.step(self._gathered(first), other)
        self.steps += 1

    def _epoch(self, epoch: int) -> Tensor:
        """Rows of an epoch: steps, copies, then the batches of all seeds in one line."""
        rows, start = [], 0
        for batches in self.batches:
            rows.append(start + batches.epoch(epoch))
            start += len(batches.train)
        return torch.stack(rows, 2).flatten(2).to(self.device)

    def _gathered(self, rows: Tensor) -> Tensor:
        """Samples (seeds, batch, features) of rows of all seeds."""
        width = self._train.shape[1]
        return self._train.index_select(0, rows).view(len(self.batches), -1, width)

    def _portions(self) -> list[tuple[int, Tensor]]:
        """Runs of one seed at a time, as many as the memory for figures allows."""
        widest = max(len(part) for data in self.parts for part in data.values())
        numbers = self._train.shape[1] + sum(self.config.hidden) + 16
        numbers += 8 * len(self.config.thresholds)
        budget = _BUDGET[self.device.type == "cuda"]
        size = max(1, budget // (widest * numbers * self._train.element_size()))
        return [
            (seed, torch.tensor(runs[start : start + size], device=self.device))
            for seed, runs in enumerate(self.runs_of_seed)
            for start in range(0, len(runs), size)
        ]

    @torch.no_grad()
    def evaluate(self) -> list[Row]:
        """The figures of each run that are numbers, as `FairnessTraining.evaluate` has them."""
        weights = {k.removeprefix("body."): v for k, v in self.fleet.weights().items()}
        rows: list[Row] = [{} for _ in self._rates]
        for seed, runs in self._portions():
            chosen = {name: value.index_select(0, runs) for name, value in weights.items()}
            outputs = {
                name: vmap(lambda values, x=x: functional_call(self.model.body, values, (x,)))(
                    chosen
                )
                for name, x in self._inputs[seed].items()
            }
            figures = self.model.figures(outputs, self.parts[seed])
            facts = {key: value for key, value in figures.items() if not isinstance(value, Tensor)}
            numbers = {
                key: value.double()
                for key, value in figures.items()
                if isinstance(value, Tensor) and value.dim() == 1
            }
            table = torch.stack(list(numbers.values()), 1).tolist()
            for run, line in zip(runs.tolist(), table, strict=True):
                rows[run] = dict(zip(numbers, line, strict=True)) | facts
        return rows

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "fleet": self.fleet.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.fleet.load_state_dict(state["fleet"])
        self.steps = int(state["steps"])
        self._forget_epoch()
