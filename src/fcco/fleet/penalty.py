"""The estimator of a coupled term: SONEX, SONX, SOX, and ALEXR2 inside a proximal point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..methods.penalties import RampedTerm
from ..outer.base import AbstractOuter
from ..outer.envelope import MoreauEnvelope
from ..terms import CoupledTerm, weighted_mean
from ..tracker import Tracked
from ..tracker.blocks import Batch, per_row
from ..tracker.update import Rule, correction_weight, log_track
from .member import Numbers, State, Unsupported
from .run import Outcome, Run, Seen
from .shapes import Shape
from .values import in_two, layout, limit_numbers

__all__ = ["Penalty"]


@dataclass(frozen=True)
class Penalty:
    """An outer function times a tracker, see `fcco.CoupledTerm`.

    Args:
        outer: f without its numbers.
        number: n.
        dim: d1.
        read: which u enters the gradient.
        correction: `"number"`, `"theory"` or `"auto"`.
        rule: of the tracker.
        remembers: whether values at w_{t-1} are needed.
        smoothed: whether f is.
        bounded: whether u is clamped.
    """

    outer: Shape
    number: int
    dim: int
    read: str
    correction: str
    rule: Rule
    remembers: bool
    smoothed: bool
    bounded: bool

    @classmethod
    def read_from(cls, term: CoupledTerm) -> tuple[Penalty, dict[str, Any], State]:
        """The estimator of a term, its numbers and its state."""
        tracker, limits = term.tracker, term.limits
        if tracker.refresh_every is not None or tracker.on_nonfinite == "skip":
            raise Unsupported(
                "A fleet has no tracker with `refresh_every` or `on_nonfinite='skip'`."
            )
        outer, numbers = Shape.of(term.outer, "outer")
        word = tracker.correction
        found: dict[str, Any] = {**numbers, "gamma": tracker.gamma, "smoothing": term.schedule}
        found["weight"] = term.weight_at if isinstance(term, RampedTerm) else term.weight
        if not isinstance(word, str):
            found["correction"] = word
        if tracker.bounds is not None:
            found |= {"low": tracker.bounds[0], "high": tracker.bounds[1]}
        found |= limit_numbers(limits)
        own = cls(
            outer,
            tracker.num_inner,
            tracker.dim,
            tracker.read,
            word if isinstance(word, str) else "number",
            tracker.rule,
            tracker.needs_previous,
            callable(term.schedule) or term.schedule != 0,
            tracker.bounds is not None,
        )
        table = tracker.value.squeeze(-1) if tracker.dim == 1 else tracker.value
        return own, found, {"tracked": table.clone(), "seen": tracker.seen.clone()}

    def slope(self, excess: Tensor, blocks: Tensor | int, numbers: Numbers) -> Tensor:
        """The gradient of the term with respect to u, of f_lambda or, where lambda is 0, of f."""
        outer: AbstractOuter = self.outer.build(numbers)
        _, slope = weighted_mean(outer, excess, numbers["weight"], blocks)
        if not self.smoothed:
            return slope
        smoothing = numbers["smoothing"]
        some = smoothing > 0  # schedules may end at 0
        envelope = MoreauEnvelope(outer, torch.where(some, smoothing, 1))  # type: ignore[arg-type]
        _, smooth = weighted_mean(envelope, excess, numbers["weight"], blocks)
        return torch.where(some, smooth, slope)

    def gradient(self, run: Run) -> Outcome:
        """G_t of one run (Alg. 1, lines 5-9; Alg. 2, lines 5-10)."""
        past = None
        if self.remembers:
            past = self._entries(run.look(run.previous, run.batch), run)

        def decide(fresh: Tensor) -> tuple[tuple[Tensor, Tensor | int], State]:
            point, blocks, changed = self._track(run, fresh, past)
            return (point, blocks), changed

        def scalar(seen: Seen, decided: tuple[Tensor, Any], index: Tensor | None) -> Tensor:
            return self._attach(run, seen, index, *decided)

        return in_two(run, decide, scalar, lambda seen: self._entries(seen, run), past)

    def _entries(self, seen: Seen, run: Run) -> Tensor:
        if seen.values is None:
            raise ValueError("The function of a fleet must return (loss, values) for this method.")
        return self._shaped(seen.values.value, run)

    def _carrier(self, seen: Seen, run: Run) -> Tensor:
        assert seen.values is not None
        return self._shaped(seen.values.carrier, run)

    def _shaped(self, entries: Tensor, run: Run) -> Tensor:
        """Entries in the shape and precision of the table."""
        tracked = run.state["tracked"]
        entries = entries.to(tracked.dtype)
        return entries.squeeze(-1) if entries.dim() > tracked.dim() else entries

    def _track(
        self, run: Run, fresh: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor | int, State]:
        """The u that the gradient reads, the number of blocks, and what changed."""
        numbers, old, seen = run.numbers, run.state["tracked"], run.state["seen"]
        where, log = layout(run.index, self.number, old), self.rule is log_track
        present = where.counts > 0
        blocks: Tensor | int = self.number if run.index is None else present.sum()
        batch = Batch(
            where.index, where.counts, where.sums(fresh, log), None, log, None, where.whole
        )
        fresh = batch.mean(batch.fresh)
        if past is not None:
            past = batch.mean(where.sums(past, log))
        weight = numbers.get("correction", self.correction)
        gamma = numbers["gamma"]
        correction = correction_weight(weight, gamma, self.number, blocks)
        before, after = self.rule(old, per_row(seen, old), fresh, past, gamma, correction)
        if self.bounded:
            low, high = numbers["low"], numbers["high"]
            before, after = before.clamp(low, high), after.clamp(low, high)
        point = before if self.read == "old" else after
        if run.index is not None:  # absent blocks have 0/0 in all of these
            after = torch.where(per_row(present, old), after, old)
            point = torch.where(per_row(present, old), point, old)
        return point, blocks, {"tracked": after, "seen": seen | present}

    def _attach(
        self, run: Run, seen: Seen, index: Tensor | None, point: Tensor, blocks: Tensor | int
    ) -> Tensor:
        """A scalar with the gradient of g_0 plus sum_i <slope_i, grad g_i>."""
        numbers, carrier = run.numbers, self._carrier(seen, run)
        limit = numbers["tolerance"]
        limit = limit if self.dim == 1 else limit.unsqueeze(-1)
        excess = point - limit + numbers["margin"]
        slope = self.slope(excess, blocks, numbers)
        where = layout(index, self.number, point)
        tracked = Tracked(
            point, where.index, carrier, where, where.counts, log=self.rule is log_track
        )
        return seen.loss + (carrier * tracked.factors(slope)).sum()
