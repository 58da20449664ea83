"""Reports: a table of the values an objective has tracked, and findings with their remedies.

`_TESTS` lists the findings: a new one is a row of it, and docs/recipes/troubleshooting.md has a
table of the kinds. `tests/test_report_alarms.py` counts how often each is right. Some need the
user's function, as `report(function=..., index=...)`. A report reads numbers from the device: make
one now and then, not in every step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .inputs import Index
from .outer import project_capped_simplex
from .rules.arrays import tensor
from .rules.track import Pooled, best_gamma, correction_weight
from .terms.limits import Limit
from .tracker import Entries, InnerTracker

__all__ = [
    "ConstraintReport", "Finding", "GroupReport", "Report", "Row", "Table", "constraint_report",
    "group_report",
]  # fmt: skip

Name = str | int


class Table(list[list[str]]):
    """Rows of cells, the head first, that print as a table of at most 20 rows."""

    def __str__(self) -> str:
        shown, left = self[:21], len(self) - 21
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        padded = ([c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in shown)
        lines = ["  ".join(row).rstrip() for row in padded]
        return "\n".join([*lines, f"... and {left} more"] if left > 0 else lines)


@dataclass(frozen=True)
class Finding:
    """A finding of a report: its kind, what was found, and what to do about it."""

    kind: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text} {self.remedy}"


@dataclass(frozen=True)
class Row:
    """The row of a report for one group or constraint.

    Attributes:
        value: its loss or value g_i; for a constraint on vectors, the violation. NaN: never seen.
        error: the standard error of the value; NaN where it is unknown, 0 for given values.
        weight: of a group in the gradient; of a constraint, its multiplier.
        capped: whether the weight is the largest possible.
        limit: of a constraint, as it is written (0 for one on vectors), None for a group.
        excess: how far a constraint is violated, on the side where it is, None for a group.
    """

    name: Name
    value: float
    error: float
    weight: float
    capped: bool
    limit: Limit | None = None
    excess: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the constraint holds; None for a group, or before it was seen."""
        return None if self.excess is None or math.isnan(self.excess) else self.excess <= 0

    @property
    def badness(self) -> float:
        """The loss, or the excess; the least of all if it was never seen."""
        size = self.value if self.excess is None else self.excess
        return -math.inf if math.isnan(size) else size

    def cells(self) -> list[str]:
        """The row of a printed table."""
        value = f"{self.value:.4g}"
        if math.isnan(self.value):
            value = "never seen"
        elif self.error != 0:
            value += " ± " + ("?" if math.isnan(self.error) else f"{self.error:.1g}")
        weight = "?" if math.isnan(self.weight) else f"{self.weight:.3g}"
        limit, capped = self.limit, "at cap" if self.capped else ""
        if limit is None:
            return [str(self.name), value, weight, capped]
        met = {True: "yes", False: "no", None: ""}[self.met]
        if abs(self.excess or 0) < 2 * self.error:  # no with an unknown error
            met += "?"
        shown = f"{limit:.4g}" if isinstance(limit, float) else str(limit)
        if isinstance(limit, tuple):
            shown = f"{limit[0]:.4g} to {limit[1]:.4g}"
        return [str(self.name), value, shown, weight, capped, met]


@dataclass(frozen=True)
class Report:
    """A table of groups or constraints, and findings.

    Attributes:
        rows: one for each group or constraint, in order; printed, the worst come first.
        findings: what the numbers say about the settings.
        worst: the group with the largest loss, or the constraint with the largest excess.
        seen: how many groups or constraints have a value.
    """

    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    worst: Name
    seen: int

    def _text(self, header: list[str], summary: str) -> str:
        rows = sorted(self.rows, key=lambda row: row.badness, reverse=True)
        table = Table([header, *(row.cells() for row in rows)])
        return "\n".join([str(table), "", summary, *(f"* {each}" for each in self.findings)])


@dataclass(frozen=True)
class GroupReport(Report):
    """The losses and weights of groups, with findings.

    Attributes:
        cvar: CVaR of the losses of the groups seen.
        mean: their mean.
        at_cap: how many have the largest weight.
        share: how much of a batch carries the weight: the noise of the gradient is that of a plain
            mean over this share of it.
        differences: the losses are differences from those of a reference.
    """

    cvar: float
    mean: float
    at_cap: int
    share: float
    differences: bool = False

    def __str__(self) -> str:
        summary = (
            f"CVaR {self.cvar:.4g}, mean {self.mean:.4g}, {self.seen} of {len(self.rows)} groups "
            f"seen, {self.at_cap} at the cap"
        )
        if self.share < 0.95:
            summary += f"\n{self.share:.0%} of a batch carries the weight: one "
            summary += f"{1 / self.share:.1f} times as large has the noise of a plain mean"
        loss = "loss - reference" if self.differences else "loss"
        return self._text(["group", loss, "weight", ""], summary)


@dataclass(frozen=True)
class ConstraintReport(Report):
    """The values, limits and multipliers of constraints, with findings.

    Attributes:
        violation: how far a value is outside its limit at most; above 0 that is violated.
        violated: how many constraints are outside their limits.
        multiplier: the largest multiplier, in absolute value (those of equalities have a sign).
    """

    violation: float
    violated: int
    multiplier: float

    def __str__(self) -> str:
        upper = all(isinstance(row.limit, float) for row in self.rows)
        return self._text(
            ["constraint", "value", "limit", "multiplier", "", "met"],
            f"{self.violated} of {self.seen} constraints {'above' if upper else 'outside'} their "
            f"limits; {self.worst!r} has the largest excess, {self.violation:.3g}",
        )


_NO_VALUES = "`report()` needs values: the first come with the first `optimizer.step()`."


def group_report(
    objective: Any,
    weights: Tensor,
    function: Callable[[], Any] | None,
    index: Index,
    held_out: Any,
    compared: Any = None,
) -> GroupReport:
    """See `GroupObjective.report`; the weights are those of each group in the gradient.

    `compared` are the rows of the reference, as in `ConstrainedObjective.report`.
    """
    term, tracker = objective.term, objective.term.tracker
    known = tracker.seen_rows()
    if not len(known):
        raise ValueError(_NO_VALUES)
    losses, errors = torch.where(tracker.seen, tracker.rows, torch.nan), tracker.error()
    cap = min(1.0, 1 / (term.ratio * len(losses)))
    rows = _rows(term.names, losses, errors, weights, weights >= cap * (1 - 1e-5))
    facts = _Facts(
        term,
        rows,
        errors.tolist(),
        entries=_measured(objective, function, index, compared),
        held_out=[] if held_out is None else _held_out(rows, held_out),
    )
    some = weights[tracker.seen]
    return GroupReport(
        rows=rows,
        findings=_findings(facts),
        worst=max(rows, key=lambda row: row.badness).name,
        seen=len(known),
        cvar=term.value().item(),
        mean=known.mean().item(),
        at_cap=sum(row.capped for row in rows),
        share=(some.sum().square() / some.square().sum() / len(rows)).item(),
        differences=objective.reference is not None,
    )


def _held_out(rows: Sequence[Row], given: Any) -> list[tuple[float, float]]:
    """Loss and number of samples of each group: NaN without a loss, 10 if it is not known."""
    losses, index, counts = given if isinstance(given, tuple) else (given, range(len(rows)), None)
    if isinstance(losses, Mapping):
        names = {row.name: k for k, row in enumerate(rows)}
        index, losses = [names.get(name, -1) for name in losses], list(losses.values())
    losses, index = torch.as_tensor(losses).double(), torch.as_tensor(index).tolist()
    if losses.shape != (len(index),) or not {*index} <= {*range(len(rows))}:
        raise ValueError(
            f"`report(held_out=...)` needs one loss for each of the {len(rows)} groups, a dict by "
            f"group, or what `group_mean` returns, but is: {given}."
        )
    counts = torch.full_like(losses, 10) if counts is None else counts
    found = dict(zip(index, zip(losses.tolist(), counts.tolist(), strict=True), strict=True))
    return [found.get(k, (math.nan, 10.0)) for k in range(len(rows))]


def constraint_report(
    objective: Any,
    values: Tensor | None,
    function: Callable[[], Any] | None,
    index: Index,
    compared: Any = None,
) -> ConstraintReport:
    """See `ConstrainedObjective.report`."""
    term, tracker = objective.term, objective.term.tracker
    error = shown_error = _largest(tracker.error())
    if values is None:
        violation, multipliers = term.violation(), term.multipliers()
    else:
        violation, multipliers = term.violation_at(values), term.multipliers_at(values)
        shown_error = torch.zeros_like(error)
    excess = _largest(violation)
    if bool(excess.isnan().all()):
        raise ValueError(_NO_VALUES)
    shown, limits = excess, [0.0] * tracker.num_inner
    if tracker.dim == 1:  # an excess does not tell the value: that of an equality is a distance
        limits, shown = term.limits.written(), term.values() if values is None else values
        shown = torch.where(excess.isnan(), torch.nan, shown)
    columns = shown, shown_error, _largest(multipliers, signed=True), term.capped(values)
    rows = _rows(term.limits.names, *columns, limits, excess)
    facts = _Facts(
        term,
        rows,
        error.tolist(),
        given=values is not None,
        entries=_measured(objective, function, index, compared),
        parameters=tuple(each for each in objective.model.parameters() if each.requires_grad),
    )
    worst = max(rows, key=lambda row: row.badness)
    return ConstraintReport(
        rows=rows,
        findings=_findings(facts),
        worst=worst.name,
        seen=sum(row.met is not None for row in rows),
        violation=worst.badness,
        violated=sum(row.met is False for row in rows),
        multiplier=max(0.0 if math.isnan(row.weight) else abs(row.weight) for row in rows),
    )


def _rows(names: Sequence[Name] | None, *columns: Any) -> tuple[Row, ...]:
    lists = [each.tolist() if isinstance(each, Tensor) else each for each in columns]
    return tuple(Row(*each) for each in zip(names or range(len(lists[0])), *lists, strict=True))


def _largest(rows: Tensor, signed: bool = False) -> Tensor:
    """One number per block: the largest or, `signed`, the one of largest magnitude."""
    if rows.dim() == 1:
        return rows
    rows = rows.flatten(1)
    if not signed:
        return rows.amax(1)
    return rows.gather(1, rows.abs().argmax(1, keepdim=True)).squeeze(1)


def _measured(
    objective: Any, function: Callable[[], Any] | None, index: Index, compared: Any
) -> Entries | None:
    """What the function returns for the term of the report; None without a function."""
    if function is None:
        return None
    with torch.enable_grad():
        entries = objective.entries(function, index, compared)
    name = next(name for name, term in objective.terms.items() if term is objective.term)
    if name not in entries:
        raise ValueError(f"`report(function=...)` must return values of {name!r}.")
    return entries[name]


# What findings are told by.

LEVEL = 0.01
"""Of a false alarm: the chance that one among all groups or constraints is so far off by noise."""

_SETTLED = 100
"""Steps in which a multiplier, which moves by 1 % a step, has begun to answer."""

_MOST_GRADIENTS = 8
"""Gradients that are compared, each as large as the parameters."""


@dataclass(frozen=True)
class _Facts:
    """What findings are told by.

    Attributes:
        term: the term of the report.
        rows: its rows.
        errors: of the tracked values, one per row.
        given: whether the values of the rows are the user's, instead of the tracked ones.
        entries: what the user's function returned, if there is one.
        parameters: of the model, where their gradients are wanted.
        held_out: loss and number of samples of each group, apart from training.
    """

    term: Any
    rows: Sequence[Row]
    errors: Sequence[float]
    given: bool = False
    entries: Entries | None = None
    parameters: Sequence[Tensor] = ()
    held_out: Sequence[tuple[float, float]] = ()

    @property
    def tracker(self) -> InnerTracker:
        return self.term.tracker

    @property
    def of_groups(self) -> bool:
        return self.rows[0].limit is None

    @cached_property
    def far(self) -> float:
        """How many errors the furthest of all rows is off by chance, but in `LEVEL` of reports."""
        return statistics.NormalDist().inv_cdf(1 - LEVEL / len(self.rows))

    @cached_property
    def noise(self) -> float:
        """The median error of the values; NaN if it is not known."""
        known = [error for error in self.errors if not math.isnan(error)]
        return statistics.median_low(known) if known else math.nan

    @cached_property
    def losses(self) -> list[float]:
        """Those of the groups seen, in increasing order; none of constraints."""
        known = (row.value for row in self.rows if not math.isnan(row.value))
        return sorted(known) if self.of_groups else []

    @cached_property
    def motion(self) -> tuple[float, float] | None:
        """Variances of a batch value and of the way between two visits, of all blocks together.

        None before blocks came again in twenty steps, and where it is not measured.
        """
        if self.tracker.estimate is None:
            return None
        known = Pooled(*self.tracker.estimate.pooled.tolist())
        return known.noise_and_drift()[:2] if known.steps >= 20 else None

    @cached_property
    def violated(self) -> list[Row]:
        """The constraints that are further outside than noise explains, the worst first."""
        pairs = zip(self.rows, self.errors, strict=True)
        rows = [row for row, e in pairs if row.met is False and not row.badness <= self.far * e]
        return sorted(rows, key=lambda row: row.badness, reverse=True)

    def gradients(self) -> tuple[list[Name], Tensor]:
        """The names of violated constraints, and their gradients scaled to length 1."""
        entries, tracker, names, units = self.entries, self.tracker, list[Name](), list[Tensor]()
        if entries is None or not self.parameters or not entries.carrier.requires_grad:
            return names, tracker.rows
        blocks = entries.carrier_blocks.as_tensors()
        sums = blocks.sums(entries.carrier, tracker.log_space)
        count = blocks.counts.to(sums) if sums.dim() == 1 else blocks.counts.to(sums).unsqueeze(1)
        means = sums - count.log() if tracker.log_space else sums / count
        values = tracker.rows.detach().clone().index_copy(0, blocks.index, means.to(tracker.rows))
        excess = _largest(self.term.violation_at(values))
        # Of a limit that is met, or was by this batch, nothing has to be said.
        present = set(blocks.index[excess[blocks.index] > 0].tolist())
        violated = [k for row in self.violated if (k := self.rows.index(row)) in present]
        for k in violated[:_MOST_GRADIENTS]:
            parts = torch.autograd.grad(
                excess[k], self.parameters, retain_graph=True, materialize_grads=True
            )
            flat = torch.cat([part.flatten().float() for part in parts])
            if (length := flat.norm()) > 0:
                units.append(flat / length)
                names.append(self.rows[k].name)
        return names, torch.stack(units) if units else tracker.rows


def _least_norm(gram: Tensor) -> Tensor:
    """The y on the simplex with the least y^T G y, by projected gradient steps."""
    shares = torch.full_like(gram[0], 1 / len(gram))
    step = 1 / gram.diagonal().sum()  # at most 1 / the largest eigenvalue
    for _ in range(300):
        shares = project_capped_simplex(shares - step * (gram @ shares), 1.0)
    return shares


def _listed(names: Sequence[Name]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more


# The findings. A test returns the numbers of its texts, or None if there is nothing to say.

_Found = Mapping[str, Any] | None


def _never_seen(facts: _Facts) -> _Found:
    names = _listed([row.name for row in facts.rows if math.isnan(row.value)])
    return {"names": names, "steps": facts.tracker.steps} if names else None


def _exceeded(facts: _Facts, rows: Sequence[Row]) -> _Found:
    if not rows:
        return None
    errors = rows[0].badness / max(facts.errors[facts.rows.index(rows[0])], 1e-30)
    return {"names": _listed([row.name for row in rows]), "excess": rows[0].badness,
            "errors": f" ({errors:.0f} standard errors)" if errors < 1e6 else "",
            "weight": max(abs(row.weight) for row in rows), "steps": facts.term.step,
            "they": "they cannot all hold" if len(rows) > 1 else "it cannot hold"}  # fmt: skip


def _small_penalty(facts: _Facts) -> _Found:
    """A violated constraint has the largest multiplier its penalty allows."""
    return _exceeded(facts, [row for row in facts.violated if row.capped])


def _late(facts: _Facts, moves: bool) -> _Found:
    """Constraints are violated though their multipliers had time; their values move, or never."""
    if facts.of_groups or not facts.term.integrates or facts.term.step < _SETTLED:
        return None
    errors = dict(zip([row.name for row in facts.rows], facts.errors, strict=True))
    return _exceeded(facts, [row for row in facts.violated if (errors[row.name] > 0) == moves])


def _wide_zone(facts: _Facts) -> _Found:
    """A zone so wide that the ratio has lost its meaning; an automatic one is as wide as needed."""
    term, losses, width = facts.term, facts.losses[::-1], facts.term.kink_width
    if not losses or not width or term.automatic or any(row.capped for row in facts.rows):
        return None
    above = math.floor(term.ratio * len(facts.rows) + 1e-9)  # groups that CVaR gives the cap
    if not 0 < above < len(losses) == len(facts.rows) or losses[0] == losses[above]:
        return None
    # If no weight were at the cap in a zone this narrow, the worst `above` groups together would
    # have less than weight 1, and none of the others would have any.
    widest = losses[0] - losses[above]
    return {"ratio": term.ratio, "width": width, "widest": widest, "asked": 0.95 * widest}


def _narrow_zone(facts: _Facts) -> _Found:
    """The rounded kink is narrower than the median error; an automatic one follows the error."""
    width, noise = facts.term.kink_width, facts.noise
    if width is None or facts.term.automatic or not width < noise:
        return None
    kink = f"The rounded kink is {width:.2g} wide" if width else "The kink is not smoothed"
    return {"kink": kink, "noise": noise, "asked": 2 * noise}


def _behind(facts: _Facts) -> _Found:
    """Estimates lag by over a quarter of the steps, and a far larger gamma would be better.

    Of a motion that keeps its direction, a moving average is n/(gamma B1) steps behind, and the
    correction makes up for gamma'/gamma of them.
    """
    tracker, motion = facts.tracker, facts.motion
    number, blocks, gamma = tracker.num_inner, tracker.blocks_per_step, tracker.gamma
    if facts.given or not blocks or not gamma:
        return None
    made_up = correction_weight(tracker.rule.correction, gamma, number, blocks)
    lag = (number / blocks - made_up) / gamma
    if lag <= max(2, tracker.steps / 4):
        return None
    if tracker.estimate is not None and (
        motion is None or best_gamma(*motion) <= min(3 * gamma, 0.9)
    ):
        return None
    return {"lag": lag, "blocks": blocks, "number": number, "gamma": gamma,
            "steps": tracker.steps}  # fmt: skip


def _plateau(facts: _Facts) -> _Found:
    """All losses stay at one value, or at two (one for each label): the noise of data is gone."""
    losses, motion = facts.losses, facts.motion
    if len(losses) < 2 or motion is None:
        return None
    size = 0.01 * abs(statistics.fmean(losses))
    if not max(facts.noise, math.sqrt(motion[1])) < size:
        return None
    gaps = [b - a for a, b in pairwise(losses)]
    cut = gaps.index(max(gaps)) + 1 if len(losses) > 3 else len(losses)
    if any(statistics.pstdev(part) > size for part in (losses[:cut], losses[cut:]) if part):
        return None
    return {"where": " or ".join(sorted({f"{losses[0]:.3g}", f"{losses[-1]:.3g}"}))}


def _same_within_groups(facts: _Facts) -> _Found:
    """The losses of a batch spread by less than 1 % within groups."""
    entries = facts.entries
    if not facts.of_groups or entries is None or entries.blocks.inverse is None:
        return None
    blocks, losses = entries.blocks.as_tensors(), tensor(entries.fresh).double()
    mean = blocks.sums(losses) / blocks.counts
    spread, size = (losses - blocks.of_entries(mean)).square().sum(), losses.square().mean()
    if len(mean) < 2 or spread >= 1e-4 * size * (len(losses) - len(mean)):
        return None
    return {"where": f"{mean.mean():.3g}"}


def _swinging(facts: _Facts) -> _Found:
    """Losses move by as much as they differ, to and fro: not by noise, and not all one way."""
    losses, motion, tracker = facts.losses, facts.motion, facts.tracker
    # Early in training all losses move, and where u is the last value alone it cannot be told.
    early = tracker.steps < max(100, 10 * tracker.num_inner / max(tracker.blocks_per_step, 1))
    if len(losses) < 2 or motion is None or early or tracker.gamma == 1:
        return None
    assert tracker.estimate is not None
    last = (tracker.estimate.latest - tracker.rows)[tracker.seen]  # (1 - gamma) x the last surprise
    step, spread = math.sqrt(motion[1]), statistics.pstdev(losses)
    one_way = last.mean().square() > last.var(correction=0)
    if motion[1] < 2 * motion[0] or 2.5 * step < spread or bool(one_way):
        return None
    return {"step": step, "spread": spread, "asked": 4 * step}


def _overfitted(facts: _Facts) -> _Found:
    """Held-out losses are above training losses by more than noise.

    That of a mean over k samples is taken as twice the training loss over sqrt(k): losses of
    networks spread by more than their mean.
    """
    estimate, found = facts.tracker.estimate, []
    if estimate is None or not facts.held_out:
        return None
    columns = facts.rows, facts.errors, estimate.visits.tolist(), facts.held_out
    for row, error, visits, (loss, samples) in zip(*columns, strict=True):
        by_chance = math.hypot(error, 2 * (abs(row.value) + 2 * error) / samples**0.5)
        # A group that came a few times is not overfitted yet, and its error is not known well.
        if visits >= 10 and loss - row.value > max(facts.far * by_chance, abs(row.value) / 2):
            found.append((loss - row.value, loss, row))
    found.sort(key=lambda each: each[0], reverse=True)
    return {"names": _listed([row.name for _, _, row in found]), "loss": found[0][1],
            "trained": found[0][2].value} if found else None  # fmt: skip


def _no_common_step(facts: _Facts) -> _Found:
    """No direction of the parameters lowers all violated constraints."""
    names, units = facts.gradients()
    if len(names) < 2:
        return None
    gram = (units @ units.T).double().cpu()
    shares = _least_norm(gram)
    least = math.sqrt(max((shares @ gram @ shares).item(), 0.0))
    opposed = [name for name, share in zip(names, shares.tolist(), strict=True) if share > 0.01]
    return {"names": _listed(opposed), "least": least} if least < 0.25 else None


_CONSTANT = (
    "That is a constant output (of two classes: ln 2 = 0.693). Start again with a learning rate "
    "that is smaller or warms up over the first 60 steps, or with a wider zone, fcco.Width(...)."
)

# Kind, test, what it says with the numbers of the test, and the remedy.
_TESTS: tuple[tuple[str, Callable[[_Facts], _Found], str, str], ...] = (
    (
        "never-seen", _never_seen,
        "There is no value yet, after {steps} steps, of {names}.",
        "Early that is chance; later check the ids, which count from 0, and how they are drawn "
        "(`GroupBatchSampler` and `BlockSampler` draw all).",
    ),
    (
        "multiplier-at-cap", _small_penalty,
        "The multipliers of {names} are at their cap, {weight:.3g}, and the limits exceeded by up "
        "to {excess:.2g}{errors}: the penalty cannot push harder.",
        "If that stays so, give a larger `penalty` (twice, say); if with any, {they}.",
    ),
    (
        "multiplier-rising", partial(_late, moves=True),
        "After {steps} steps the limits of {names} are exceeded, by up to {excess:.2g}{errors}, "
        "and the multipliers still rise.",
        "Train longer. If a later report says the same, {they}: loosen a limit that is exceeded.",
    ),
    (
        "value-constant", partial(_late, moves=False),
        "After {steps} steps the limits of {names} are exceeded, by up to {excess:.2g}, and "
        "their values never changed.",
        "A value without a gradient cannot be trained: return `fcco.Measured(value, surrogate)`.",
    ),
    (
        "no-group-at-cap", _wide_zone,
        "ratio={ratio:g} has little effect, no group has the largest weight: the rounded kink is "
        "{width:.2g} wide, and the worst r n groups are at most {widest:.2g} above the others.",
        "Use smoothing=fcco.Width({asked:.2g}) or less, unless noise asks for more.",
    ),
    (
        "zone-below-noise", _narrow_zone,
        "{kink}, the estimates have a standard error of {noise:.2g}: weights and multipliers "
        "follow the noise.",
        "Use smoothing=fcco.Width({asked:.2g}), which the methods 'sonex' and 'alexr2' take, "
        "more samples of each block, or a smaller gamma.",
    ),
    (
        "estimates-lag", _behind,
        "The estimates are about {lag:.0f} steps behind (n / (gamma B1), with {blocks} of "
        "{number} blocks in a batch and gamma={gamma:g}), and {steps} steps were done.",
        "Train longer before you read them; or use a larger gamma, or more blocks in a batch.",
    ),
    (
        "collapse", _plateau,
        "All group losses stay at {where}, and samples make no difference.",
        _CONSTANT,
    ),
    (
        "collapse", _same_within_groups,
        "Within each group all samples have the same loss, {where} on average.",
        _CONSTANT,
    ),
    (
        "swinging", _swinging,
        "From one visit to the next a loss moves by {step:.2g}, to and fro, and the losses differ "
        "by {spread:.2g}: the weights jump between groups.",
        "Use a smaller learning rate, less momentum, or smoothing=fcco.Width({asked:.2g}).",
    ),
    (
        "overfitted", _overfitted,
        "The held-out losses are far above those in training of {names}: {loss:.3g} against "
        "{trained:.3g}.",
        "These groups are overfitted, and their weights are too small: regularise, stop "
        "earlier, or join small groups.",
    ),
    (
        "constraints-oppose", _no_common_step,
        "No step of the parameters lowers {names} together: a mean of their gradients, each of "
        "length 1, has length {least:.2g}. They cannot all hold near these parameters.",
        "Loosen one of their limits, or use a model that can tell their samples apart.",
    ),
)  # fmt: skip


def _findings(facts: _Facts) -> tuple[Finding, ...]:
    found = ((kind, test(facts), *texts) for kind, test, *texts in _TESTS)
    return tuple(
        Finding(kind, *(text.format_map(numbers) for text in texts))
        for kind, numbers, *texts in found
        if numbers is not None
    )
