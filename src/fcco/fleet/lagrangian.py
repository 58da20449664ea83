"""Proximal Lagrangians: OSS and ICPPAC.

The estimator moves the multipliers before the step or, for rules that follow the step, the update
moves them after it.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..methods.lagrangian import (
    LagrangianTerm,
    ProximalRound,
    proximal_value,
    pull_strength,
    regularised,
    running_average,
)
from ..terms.limits import excess, side
from .estimators import Parts, limits_of, numbers_of_limits
from .numbers import Numbers, Template
from .run import Estimate, Run, State, Unsupported, block_means, choose
from .updates import Update, read_torch_optimizer

__all__ = ["Lagrangian", "RoundUpdate"]


@dataclass(frozen=True)
class Lagrangian:
    """The gradient of g_0 + sum_i y_i g_i, and how y moves."""

    rule: Template

    @property
    def needs_previous(self) -> bool:
        """Where y moves before the step."""
        return not self.rule.example.follows_step

    @classmethod
    def of(cls, term: LagrangianTerm) -> Parts:
        rule, numbers = Template.of(term.rule, "rule")
        numbers |= numbers_of_limits(term.limits)
        numbers |= {"coefficient": term.rounds.coefficient, "inner_steps": term.rounds.inner_steps}
        state = {"multiplier": term.multiplier.clone(), "last": term.last.clone()}
        if term.rule.follows_step:
            state["values"] = term.tracker.rows.clone()
        _load_forward_mode()
        return cls(rule), numbers, state

    def gradient(self, run: Run) -> Estimate:
        """G_t of one run, without the pull to the anchor."""
        rule, y = self.rule.example, run.state["multiplier"]
        if not rule.warm_start:
            warm = y
            y = choose(run.flags.begins, lambda: torch.zeros_like(warm), lambda: warm)
        if rule.follows_step:
            values, blocks, forward = run.passes(y)
            measured = block_means(values, blocks)  # NaN for a constraint that is not in the batch
            changed = {"multiplier": y, "values": self._excess(run, measured)}
        else:
            previous = run.previous
            changed = self.ascended(
                run, previous, run.weights - previous, (run.data.batch, run.data.index), y
            )
            forward, measured = run.differentiate(y), changed["last"]
        slope = changed["multiplier"] * side(y, *limits_of(run.numbers))
        return forward.estimate(slope, changed, forward.values, measured)

    def _excess(self, run: Run, values: Tensor) -> Tensor:
        return excess(values, *limits_of(run.numbers), run.numbers["margin"])

    def ascended(
        self,
        run: Run,
        point: Tensor,
        move: Tensor,
        batch: tuple[Any, Tensor | None],
        y: Tensor,
        known: Tensor | None = None,
    ) -> State:
        """The next multipliers, from the constraints at a point, linear along a move.

        Args:
            run: the run.
            point: x.
            move: v.
            batch: a batch, and the block of each of its entries.
            y: the multipliers.
            known: g(x) - tolerance, where it was measured before.
        """
        begins = run.flags.begins
        anchor = choose(begins, lambda: run.weights, lambda: run.state["anchor"])
        values, change = run.along(point, move, batch, y, functools.partial(self._excess, run))
        proximal = run.numbers["coefficient"] * proximal_value(point - anchor, move)
        now = regularised(values if known is None else known, change, proximal)
        before = choose(begins, lambda: now, lambda: run.state["last"])
        rule = self.rule.build(run.numbers)
        return {"multiplier": rule.dual(y, now, before, run.numbers["inner_steps"]), "last": now}


@functools.cache
def _load_forward_mode() -> None:
    """Torch scripts some rules of forward mode when they are first used, with a warning."""
    one = torch.ones(())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.func.jvp(torch.sin, (one,), (one,))


@dataclass(frozen=True)
class RoundUpdate:
    """Steps of `primal` around an anchor that end at their average; some rules then move y."""

    primal: Update
    lagrangian: Lagrangian

    @classmethod
    def of(cls, optimizer: ProximalRound) -> tuple[RoundUpdate, Numbers, int]:
        if optimizer.inner_step:
            raise Unsupported("A fleet starts between rounds, but ProximalRound is within one.")
        primal, numbers = read_torch_optimizer(optimizer.wrapped[0])
        rule, _ = Template.of(optimizer.rule, "rule")
        return cls(primal, Lagrangian(rule)), numbers, optimizer.inner_steps

    def start(self, weights: Tensor) -> State:
        wide = torch.promote_types(weights.dtype, torch.float32)
        return {
            "anchor": weights.clone(),
            "average": weights.to(wide, copy=True),
            "inner_step": weights.new_zeros((), dtype=torch.float64),
            **self.primal.start(weights),
        }

    def step(self, run: Run, gradient: Tensor, state: State) -> State:
        """One inner step; where a round ends, the weights become the average."""
        begins, point, y, exact = run.flags.begins, state["weights"], state["multiplier"], run.exact
        anchor = choose(begins, lambda: point, lambda: state["anchor"])
        strength = pull_strength(run.numbers["coefficient"], y.sum())
        gradient = gradient + (point - anchor) * strength.to(point)
        rule = self.lagrangian.rule.build(exact)
        lr = exact["lr"] * rule.step(exact["inner_steps"])
        numbers = run.numbers | {"lr": lr.to(point)}
        scaled = run._replace(exact={**exact, "lr": lr}, numbers=numbers)
        changed = self.primal.step(scaled, gradient, state)
        reached = changed["weights"]
        if rule.follows_step:
            move, known = reached - point, state["values"]
            changed |= self.lagrangian.ascended(run, point, move, run.gradient_batch, y, known)
        count, average = state["inner_step"], state["average"]
        count = choose(begins, lambda: torch.zeros_like(count), lambda: count) + 1
        average = choose(begins, lambda: anchor.to(average), lambda: average)
        average = running_average(average, reached, count)
        changed["weights"] = choose(run.flags.ends, lambda: average.to(reached), lambda: reached)
        return {**changed, "anchor": anchor, "average": average, "inner_step": count}
