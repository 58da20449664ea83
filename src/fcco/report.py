"""Reports: a table of the values an objective has tracked, and findings with their remedies.

`_TESTS` lists the findings: a new one is a row of it, and docs/recipes/how-to-choose.md has a table
of the kinds. Some need the user's function, as `report(function=..., index=...)`. A report reads
numbers from the device: make one now and then, not in every step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .inputs import Index
from .outer import project_capped_simplex
from .rules.arrays import tensor
from .rules.track import Pooled, correction_weight
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
    """What was found, of which kind (one word), and what to do about it."""

    kind: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text} {self.remedy}"


@dataclass(frozen=True)
class Row:
    """One group or constraint.

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
    def violated(self) -> bool:
        """Whether the constraint is violated by more than two errors, if its error is known."""
        return self.met is False and not (self.excess or 0) <= 2 * self.error

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
    """A table and findings.

    Attributes:
        rows: one per block, in order; printed, the worst come first, those never seen last.
        findings: what the numbers say about the settings.
        worst: the group with the largest loss, or the constraint with the largest excess.
        seen: how many blocks have a value.
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
    """The losses of groups.

    Attributes:
        cvar: CVaR of the losses of the groups seen.
        mean: their mean.
        at_cap: how many have the largest weight.
    """

    cvar: float
    mean: float
    at_cap: int

    def __str__(self) -> str:
        return self._text(
            ["group", "loss", "weight", ""],
            f"CVaR {self.cvar:.4g}, mean {self.mean:.4g}, {self.seen} of {len(self.rows)} groups "
            f"seen, {self.at_cap} at the cap",
        )


@dataclass(frozen=True)
class ConstraintReport(Report):
    """The values of constraints.

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


def group_report(
    objective: Any, weights: Tensor, function: Callable[[], Any] | None, index: Index
) -> GroupReport:
    """See `GroupObjective.report`; the weights are those of each group in the gradient."""
    term, tracker = objective.term, objective.term.tracker
    known = tracker.seen_rows()
    if not len(known):
        raise ValueError("`report()` needs values: no group has been seen yet.")
    losses = torch.where(tracker.seen, tracker.rows, torch.nan)
    cap = min(1.0, 1 / (term.ratio * len(losses)))
    rows = _rows(term.names, losses, tracker.error(), weights, weights >= cap * (1 - 1e-5))
    return GroupReport(
        rows=rows,
        findings=_findings(_Facts(term, rows, entries=_measured(objective, function, index))),
        worst=max(rows, key=lambda row: row.badness).name,
        seen=len(known),
        cvar=term.value().item(),
        mean=known.mean().item(),
        at_cap=sum(row.capped for row in rows),
    )


def constraint_report(
    objective: Any,
    values: Tensor | None,
    function: Callable[[], Any] | None,
    index: Index,
) -> ConstraintReport:
    """See `ConstrainedObjective.report`."""
    term, tracker = objective.term, objective.term.tracker
    if values is None:
        violation, multipliers = term.violation(), term.multipliers()
        error = _largest(tracker.error())
    else:
        violation, multipliers = term.violation_at(values), term.multipliers_at(values)
        error = torch.zeros(tracker.num_inner)
    excess = _largest(violation)
    if bool(excess.isnan().all()):
        raise ValueError("`report()` needs values: no constraint has been seen yet.")
    shown, limits = excess, [0.0] * tracker.num_inner
    if tracker.dim == 1:  # an excess does not tell the value: that of an equality is a distance
        limits, shown = term.limits.written(), term.values() if values is None else values
        shown = torch.where(excess.isnan(), torch.nan, shown)
    capped = term.capped(values)
    columns = shown, error, _largest(multipliers, signed=True), capped
    rows = _rows(term.limits.names, *columns, limits, excess)
    facts = _Facts(
        term,
        rows,
        given=values is not None,
        entries=_measured(objective, function, index),
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


def _measured(objective: Any, function: Callable[[], Any] | None, index: Index) -> Entries | None:
    """What the function returns for the term of the report; None without a function."""
    if function is None:
        return None
    with torch.enable_grad():
        entries = objective.entries(function, index)
    name = next(name for name, term in objective.terms.items() if term is objective.term)
    if name not in entries:
        raise ValueError(f"`report(function=...)` must return values of {name!r}.")
    return entries[name]


# What findings are told by.


class _Samples(NamedTuple):
    """The values of a batch by block, of the blocks with two samples or more."""

    index: Tensor
    mean: Tensor  # of each block's samples
    variance: Tensor  # of one sample
    count: Tensor


class _Gradients(NamedTuple):
    """The gradients of violated constraints, each scaled to length 1."""

    names: list[Name]  # of the constraints
    gram: Tensor  # the cosines
    shares: Tensor  # of each gradient in the shortest mean of them
    least: float  # its length


_MOST_GRADIENTS = 8
"""Gradients that are compared, each as large as the parameters."""


@dataclass(frozen=True)
class _Facts:
    """What findings are told by.

    Attributes:
        term: the term of the report.
        rows: its rows.
        given: whether their values are the user's, instead of the tracked ones.
        entries: what the user's function returned, if there is one.
        parameters: of the model, where their gradients are wanted.
    """

    term: Any
    rows: Sequence[Row]
    given: bool = False
    entries: Entries | None = None
    parameters: Sequence[Tensor] = ()

    @property
    def tracker(self) -> InnerTracker:
        return self.term.tracker

    @property
    def noun(self) -> str:
        return "group" if self.rows[0].limit is None else "constraint"

    @property
    def width(self) -> float | None:
        """The width of the rounded kink; None for a term without one."""
        return self.term.kink_width

    @property
    def rise(self) -> Tensor | None:
        """By how much each multiplier grows in a step; None where none does."""
        return None if self.noun == "group" else self.term.rise()

    @cached_property
    def noise(self) -> float:
        """The median error of the values; NaN if it is not known."""
        known = [row.error for row in self.rows if row.error > 0]
        return statistics.median_low(known) if known else math.nan

    @cached_property
    def samples(self) -> _Samples | None:
        """None where entries are no samples, or no block has two of them."""
        if self.entries is None or self.entries.blocks.inverse is None:
            return None
        blocks, values = self.entries.blocks.as_tensors(), tensor(self.entries.fresh).double()
        count = blocks.counts.to(values)
        count = count if values.dim() == 1 else count.unsqueeze(1)
        mean = blocks.sums(values) / count
        squares = blocks.sums((values - blocks.of_entries(mean)).square())
        several = blocks.counts > 1
        if not bool(several.any()):
            return None
        count = count[several]
        variance = squares[several] / (count - 1)
        return _Samples(blocks.index[several], mean[several], variance, count)

    @cached_property
    def gradients(self) -> _Gradients | None:
        """Those of violated constraints; None unless there are two."""
        entries, tracker = self.entries, self.tracker
        if entries is None or not self.parameters or not entries.carrier.requires_grad:
            return None
        blocks = entries.carrier_blocks.as_tensors()
        sums = blocks.sums(entries.carrier, tracker.log_space)
        count = blocks.counts.to(sums) if sums.dim() == 1 else blocks.counts.to(sums).unsqueeze(1)
        means = sums - count.log() if tracker.log_space else sums / count
        values = tracker.rows.detach().clone().index_copy(0, blocks.index, means.to(tracker.rows))
        excess = _largest(self.term.violation_at(values))
        # Of a limit that is met, or was by this batch, nothing has to be said.
        present = set(blocks.index[excess[blocks.index] > 0].tolist())
        violated = [k for k, row in enumerate(self.rows) if row.violated and k in present]
        violated.sort(key=lambda k: self.rows[k].badness, reverse=True)
        names, units = [], []
        for k in violated[:_MOST_GRADIENTS]:
            parts = torch.autograd.grad(
                excess[k], self.parameters, retain_graph=True, materialize_grads=True
            )
            flat = torch.cat([part.flatten().float() for part in parts])
            length = flat.norm()
            if length > 0:
                units.append(flat / length)
                names.append(self.rows[k].name)
        if len(names) < 2:
            return None
        gram = torch.stack([torch.stack([a @ b for b in units]) for a in units]).double().cpu()
        shares = _least_norm(gram)
        least = math.sqrt(max((shares @ gram @ shares).item(), 0.0))
        return _Gradients(names, gram, shares, least)


def _least_norm(gram: Tensor) -> Tensor:
    """The y on the simplex with the least y^T G y, by projected gradient steps."""
    shares = torch.full_like(gram[0], 1 / len(gram))
    step = 1 / gram.diagonal().sum()  # at most 1 / the largest eigenvalue
    for _ in range(1000):
        shares = project_capped_simplex(shares - step * (gram @ shares), 1.0)
    return shares


def _listed(names: Sequence[Name], noun: str) -> str:
    shown = ", ".join(map(repr, names[:5]))
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{noun}{'s' if len(names) > 1 else ''} {shown}{more}"


# The findings. A test returns the numbers of its texts, or None if there is nothing to say.

_Found = Mapping[str, Any] | None


@dataclass(frozen=True)
class _Test:
    """A finding: its kind, its test, and what it says, with the numbers of the test."""

    kind: str
    test: Callable[[_Facts], _Found]
    text: str
    remedy: str


def _findings(facts: _Facts) -> tuple[Finding, ...]:
    found = ((row, row.test(facts)) for row in _TESTS)
    return tuple(
        Finding(row.kind, row.text.format_map(numbers), row.remedy.format_map(numbers))
        for row, numbers in found
        if numbers is not None
    )


def _never_seen(facts: _Facts) -> _Found:
    missing = [row.name for row in facts.rows if math.isnan(row.value)]
    if not missing:
        return None
    return {"missing": len(missing), "number": len(facts.rows), "noun": facts.noun,
            "steps": facts.tracker.steps, "names": _listed(missing, facts.noun)}  # fmt: skip


def _small_penalty(facts: _Facts) -> _Found:
    """A violated constraint has the largest multiplier its penalty allows."""
    held = [row for row in facts.rows if row.capped and row.met is False]
    if not held:
        return None
    cap, excess = max(abs(row.weight) for row in held), max(row.badness for row in held)
    names = _listed([row.name for row in held], "constraint")
    return {"cap": cap, "excess": excess, "names": names}


def _rising(facts: _Facts) -> _Found:
    """A constraint is violated, and its multiplier still grows."""
    growth = facts.rise
    if growth is None:
        return None
    # One that settles grows less and less; one that grows evenly doubles in as many steps.
    growth = (growth * facts.term.step).tolist()
    late = zip(facts.rows, growth, strict=True)
    return _late(facts, [row for row, by in late if by > 0.2 * abs(row.weight) > 1e-20])


def _idle(facts: _Facts) -> _Found:
    """A constraint is violated, and nothing pulls at it."""
    if facts.rise is None:
        return None
    return _late(facts, [row for row in facts.rows if abs(row.weight) < 1e-20])


def _late(facts: _Facts, rows: Sequence[Row]) -> _Found:
    rows = [row for row in rows if row.violated]
    if not rows or facts.term.step < 100:  # before, none is expected to have settled
        return None
    worst, more = max(rows, key=lambda row: row.badness), len(rows) - 1
    name = repr(worst.name) + (f" (and of {more} more)" if more else "")
    return {"steps": facts.term.step, "name": name, "excess": worst.badness}


def _wide_zone(facts: _Facts) -> _Found:
    """A zone so wide that the ratio has lost its meaning."""
    term, rows, width = facts.term, facts.rows, facts.width
    if facts.noun != "group" or not width or term.ratio == 1:
        return None
    above = math.floor(term.ratio * len(rows) + 1e-9)  # groups that CVaR gives the cap
    losses = sorted((row.value for row in rows if not math.isnan(row.value)), reverse=True)
    # An automatic zone is as wide as the losses cannot be told apart.
    if term.automatic or any(row.capped for row in rows) or not above or len(losses) < len(rows):
        return None
    # If no weight were at the cap in a zone this narrow, the worst `above` groups together would
    # have less than weight 1, and none of the others would have any.
    widest = losses[0] - losses[above]
    if widest == 0:  # all of them tie
        return None
    return {"ratio": term.ratio, "width": width, "widest": widest, "rank": above + 1,
            "asked": 0.95 * widest}  # fmt: skip


def _narrow_zone(facts: _Facts) -> _Found:
    """The rounded kink is narrower than the median error of the estimates."""
    width, noise = facts.width, facts.noise
    if width is None or not width < noise:
        return None
    kink = f"The rounded kink is {width:.2g} wide" if width else "The kink is not smoothed"
    return {"kink": kink, "noise": noise, "asked": 2 * noise}


def _behind(facts: _Facts) -> _Found:
    """Estimates lag by over a quarter of the steps and, with an automatic gamma, more than noise.

    Of a motion that keeps its direction, a moving average is n/(gamma B1) steps behind, and the
    correction makes up for gamma'/gamma of them.
    """
    tracker = facts.tracker
    number, blocks, gamma = tracker.num_inner, tracker.blocks_per_step, tracker.gamma
    if facts.given or not blocks or not gamma:
        return None
    lag = (
        number / blocks - correction_weight(tracker.rule.correction, gamma, number, blocks)
    ) / gamma
    if lag <= max(2, tracker.steps / 4):
        return None
    if tracker.rule.gamma is None and tracker.estimate is not None:
        pooled = Pooled(*tracker.estimate.pooled.tolist())
        noise, drift = pooled.noise_and_drift()
        by_noise, by_lag = (pooled.of_noise - 1) * noise, (pooled.of_drift - 1) * drift
        if pooled.steps > 10 and by_lag <= by_noise:  # then a larger gamma would not be better
            return None
    return {"lag": lag, "blocks": blocks, "number": number, "gamma": gamma,
            "steps": tracker.steps}  # fmt: skip


def _off(facts: _Facts) -> _Found:
    """Estimates are further from fresh values than the kink is wide."""
    samples, width, tracker = facts.samples, facts.width, facts.tracker
    if samples is None or width is None or tracker.log_space:
        return None
    distance = (tracker.rows.double()[samples.index] - samples.mean).square().mean()
    noise = (samples.variance / samples.count).mean()
    off = math.sqrt(max((distance - noise).item(), 0.0))
    if off <= max(width, 2 * math.sqrt(noise.item())):
        return None
    return {"off": off, "width": width, "asked": 2 * off}


def _equal_losses(facts: _Facts) -> _Found:
    """The group losses spread by less than their median error."""
    losses = [row.value for row in facts.rows if not math.isnan(row.value)]
    if facts.noun != "group" or len(losses) < 2:
        return None
    spread, noise = statistics.stdev(losses), facts.noise
    if not spread < noise:
        return None
    return {"mean": statistics.mean(losses), "spread": spread, "noise": noise}


def _same_within_groups(facts: _Facts) -> _Found:
    """The losses spread by less than 1 % within every group."""
    samples = facts.samples
    if facts.noun != "group" or samples is None or len(samples.index) < 2:
        return None
    spread = samples.variance.max().sqrt().item()
    size = samples.mean.square().mean().sqrt().item()
    return {"spread": spread, "mean": samples.mean.mean().item()} if spread < 0.01 * size else None


def _no_common_step(facts: _Facts) -> _Found:
    """No direction of the parameters lowers all violated constraints."""
    found = facts.gradients
    if found is None or found.least >= 0.1:
        return None
    shares = zip(found.names, found.shares.tolist(), strict=True)
    names = _listed([name for name, share in shares if share > 0.01], "constraint")
    return {"names": names, "least": found.least}


def _opposite(facts: _Facts) -> _Found:
    """Gradients of two violated constraints point against each other."""
    found = facts.gradients
    if found is None or found.least < 0.1 or (cosine := found.gram.min().item()) > -0.5:
        return None
    pair = divmod(int(found.gram.argmin()), len(found.names))
    return {"names": _listed([found.names[k] for k in pair], "constraint"), "cosine": cosine}


_CONSTANT = (
    "If that is the loss of a constant output (ln 2 = 0.693 for two classes), the model ignores "
    "its input: use a smaller learning rate, a wider zone (smoothing=fcco.Width(...)), or fresher "
    "estimates (read='new', a larger gamma). If not, all groups are equally good, and all is well."
)
_APART = "Loosen one of their limits, or use a model that can tell their samples apart."

_TESTS = (
    _Test(
        "never-seen", _never_seen,
        "{missing} of {number} {noun}s have no value after {steps} steps: {names}.",
        "Early in training that is chance; later check the ids, which count from 0, and how they "
        "are drawn (`GroupBatchSampler` and `BlockSampler` draw all of them).",
    ),
    _Test(
        "multiplier-at-cap", _small_penalty,
        "The multiplier is at its cap, {cap:.3g}, for {names}, and the limit is exceeded by up to "
        "{excess:.2g}: the penalty cannot push harder.",
        "If that stays so, give a larger `penalty` (twice, say); if it does so with any penalty, "
        "the constraints cannot all hold.",
    ),
    _Test(
        "multiplier-rising", _rising,
        "After {steps} steps the limit of {name} is exceeded by {excess:.2g}, and its multiplier "
        "still grows.",
        "Train longer; if the value stays while its multiplier grows, the model cannot keep "
        "this limit beside the others: loosen it.",
    ),
    _Test(
        "multiplier-zero", _idle,
        "After {steps} steps the limit of {name} is exceeded by {excess:.2g}, and nothing pulls "
        "at it.",
        "A value that never changes from batch to batch has no unit to act in: return "
        "`fcco.Measured(value, surrogate)`, or the mean over a batch.",
    ),
    _Test(
        "no-group-at-cap", _wide_zone,
        "ratio={ratio:g} has little effect: no group has the largest weight, 1/(r n), because the "
        "rounded kink is {width:.2g} wide and the largest loss is only {widest:.2g} above that of "
        "rank {rank}.",
        "Use smoothing=fcco.Width({asked:.2g}) or less, unless noise asks for more.",
    ),
    _Test(
        "zone-below-noise", _narrow_zone,
        "{kink}, the estimates have a standard error of {noise:.2g}: weights and multipliers "
        "follow the noise.",
        "Use smoothing=fcco.Width({asked:.2g}), which the methods 'sonex' and 'alexr2' take, "
        "more samples of each block, or a smaller gamma.",
    ),
    _Test(
        "estimates-lag", _behind,
        "The estimates are about {lag:.0f} steps behind (n / (gamma B1), with {blocks} of "
        "{number} blocks in a batch and gamma={gamma:g}), and {steps} steps were done.",
        "Train longer before you read them; or use a larger gamma, or more blocks in a batch.",
    ),
    _Test(
        "estimates-lag", _off,
        "The estimates are {off:.2g} away from the values of this batch (root mean square, its "
        "noise taken off), further than the rounded kink is wide ({width:.2g}).",
        "The weights answer what the model was some steps ago: use read='new', a larger gamma, "
        "more blocks in a batch, or smoothing=fcco.Width({asked:.2g}). On data that were not "
        "trained on, the model itself may differ so much.",
    ),
    _Test(
        "collapse", _equal_losses,
        "All group losses are {mean:.3g} within their errors (they spread by {spread:.2g}, the "
        "standard error is {noise:.2g}).",
        _CONSTANT,
    ),
    _Test(
        "collapse", _same_within_groups,
        "Within each group all samples have the same loss, to {spread:.1g} at a mean of "
        "{mean:.3g}.",
        _CONSTANT,
    ),
    _Test(
        "constraints-oppose", _no_common_step,
        "No step of the parameters lowers {names} together: a mean of their gradients, each of "
        "length 1, has length {least:.2g}. They cannot all hold near these parameters.",
        _APART,
    ),
    _Test(
        "constraints-oppose", _opposite,
        "The gradients of {names} point against each other (cosine {cosine:.2f}): what lowers "
        "one raises the other.",
        _APART,
    ),
)  # fmt: skip
