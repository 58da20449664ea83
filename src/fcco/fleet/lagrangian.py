"""Proximal Lagrangians: OSS and ICPPAC."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..constraints.lagrangian import LagrangianTerm
from ..constraints.linearised import regularised
from ..constraints.rounds import proximal_value, pull_strength, running_average
from .member import State, Unsupported
from .run import Outcome, Run, Seen, choose, finite
from .shapes import Shape
from .updates import Update, scaled
from .values import attached, entries, excess, limit_numbers, pooled

__all__ = ["Lagrangian", "RoundUpdate"]


@dataclass(frozen=True)
class Dual:
    """How the multipliers of a run move, see `fcco.constraints.DualRule`.

    Args:
        rule: the rule without its numbers.
    """

    rule: Shape

    @property
    def follows_step(self) -> bool:
        """Whether the multipliers move after the weights."""
        return self.rule.template.follows_step

    def linearised(
        self, run: Run, point: Tensor, move: Tensor, values: Tensor | None = None
    ) -> Tensor:
        """l_t: the regularised constraints at a point, linear along a move.

        Args:
            run: its step.
            point: x.
            move: v.
            values: of another batch than the derivative, where these are apart.
        """
        apart = values is not None
        batch, index = (run.other, run.other_index) if apart else (run.batch, run.index)
        index = run.index if index is None else index
        found, change = run.along(point, move, batch)
        number = len(run.state["multiplier"])
        means = [pooled(_wide(each), index, number)[0] for each in (found, change)]
        if apart:
            means[0] = values
        anchor = choose(run.phase.begins, lambda: run.weights, lambda: run.state["anchor"])
        proximal = run.numbers["coefficient"] * proximal_value(point - anchor, move)
        return regularised(excess(run, means[0]), means[1], proximal)

    def first(self, run: Run) -> Tensor:
        """The multipliers before the step."""
        y = run.state["multiplier"]
        if self.rule.template.warm_start:
            return y
        return choose(run.phase.begins, lambda: torch.zeros_like(y), lambda: y)

    def ascend(self, run: Run, y: Tensor, values: Tensor) -> State:
        """The next multipliers, from l_t."""
        before = choose(run.phase.begins, lambda: values, lambda: run.state["last"])
        rule, within = self.rule.build(run.numbers), inner_step(run)
        steps = run.numbers["inner_steps"]
        return {
            "multiplier": rule.dual(y, values, before, within.to(steps), steps),
            "last": values,
        }


def inner_step(run: Run) -> Tensor:
    """t, the step within the round."""
    within = run.state["within"]
    return choose(run.phase.begins, lambda: torch.zeros_like(within), lambda: within)


@functools.cache
def _load_forward_mode() -> None:
    """Torch scripts some of its rules when they are first needed, and warns about how it does."""
    one = torch.ones(())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.func.jvp(torch.sin, (one,), (one,))


def _wide(values: Tensor) -> Tensor:
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return values.squeeze(-1) if values.dim() > 1 else values


@dataclass(frozen=True)
class Lagrangian:
    """g_0 + sum_i y_i g_i, and ConEx's multipliers, see `fcco.constraints.ProximalLagrangian`.

    Args:
        dual: how y moves.
    """

    dual: Dual

    @property
    def remembers(self) -> bool:
        """Whether it needs w_{t-1}: where y moves before the step."""
        return not self.dual.follows_step

    @classmethod
    def read_from(cls, term: LagrangianTerm) -> tuple[Lagrangian, dict[str, Any], State]:
        """The estimator of a term, its numbers and its state."""
        rule, numbers = Shape.of(term.rule, "rule")
        state = {"multiplier": term.multiplier.clone(), "last": term.last.clone()}
        _load_forward_mode()
        return cls(Dual(rule)), {**numbers, **limit_numbers(term.limits)}, state

    def gradient(self, run: Run) -> Outcome:
        """G_t of one run, without the pull to the anchor."""
        dual, changed, measured = self.dual, {}, None
        y = dual.first(run)
        if run.other is not None and dual.rule.template.exact_values:
            raise Unsupported(
                f"{dual.rule.kind.__name__} is for exact values, not for an independent batch."
            )
        if not dual.follows_step:
            previous = run.previous
            measured = dual.linearised(run, previous, run.weights - previous)
            changed = dual.ascend(run, y, measured)
            y = changed["multiplier"]
        else:
            changed["multiplier"] = y
        batch, index = run.batch, run.index
        if run.other is not None:
            batch = run.other
            index = index if run.other_index is None else run.other_index

        def scalar(seen: Seen) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            carrier = entries(seen, carrier=True)
            if seen.values is not None and seen.values.surrogate is not None:
                raise Unsupported("A fleet has no derivative of `Measured` values along a step.")
            loss = seen.loss + attached(carrier, y, index)
            return loss, (seen.loss.detach(), entries(seen).detach())

        before: State = {}
        if run.other is not None and dual.follows_step and run.task.moving:
            seen, before = run.pass_at(run.weights, run.batch)
            measured = entries(seen)  # a pass that nobody reads would be left out of the program
        gradient, (loss, fresh), moved = run.after(before).differentiate(scalar, batch)
        good = finite(loss, fresh, measured)
        return Outcome(gradient, {**changed, **moved}, loss, good)


@dataclass(frozen=True)
class RoundUpdate:
    """Primal steps around an anchor that end at their average, see `ProximalRound`.

    Args:
        primal: makes the steps.
        dual: how y moves; rules that follow the step do so here.
    """

    primal: Update
    dual: Dual

    def start(self, weights: Tensor) -> State:
        """Anchor, average, step of the round, and the state of the primal steps."""
        wide = torch.promote_types(weights.dtype, torch.float32)
        zero = weights.new_zeros((), dtype=torch.float64)
        own = {"anchor": weights.clone(), "average": weights.to(wide, copy=True)}
        return {**own, "within": zero, "total": zero.clone(), **self.primal.start(weights)}

    def step(self, run: Run, point: Tensor, gradient: Tensor, state: State) -> State:
        """One inner step; where a round ends, the weights become the average."""
        begins, y = run.phase.begins, state["multiplier"]
        anchor = choose(begins, lambda: point, lambda: state["anchor"])
        strength = pull_strength(run.numbers["coefficient"], y.sum())
        gradient = gradient + (point - anchor) * strength.to(point)
        rule, within, steps = self.dual.rule.build(run.exact), inner_step(run), "inner_steps"
        factor, weight = (f(within, run.exact[steps]) for f in (rule.step, rule.weight))
        changed = self.primal.step(scaled(run, factor), point, gradient, state)
        reached = changed["weights"]
        if self.dual.follows_step:
            values = None
            if run.other is not None:
                fresh = entries(run.look(point, run.batch))
                values = pooled(fresh, run.index, len(y))[0]
            ahead = self.dual.linearised(run, point, reached - point, values)
            changed |= self.dual.ascend(run, y, ahead)
        total, average = state["total"], state["average"]
        total = choose(begins, lambda: torch.zeros_like(total), lambda: total) + weight
        average = choose(begins, lambda: anchor.to(average), lambda: average)
        average = running_average(average, reached, torch.ones_like(total) * weight, total)
        changed["weights"] = choose(run.phase.ends, lambda: average.to(reached), lambda: reached)
        own = {"anchor": anchor, "average": average, "within": within + 1, "total": total}
        return {**changed, **own}
