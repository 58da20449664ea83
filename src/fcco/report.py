"""Reports: a table of the values an objective has tracked, and findings with their remedies.

| kind of finding | what is tested |
|---|---|
| `never-seen` | a block has no value yet |
| `multiplier-at-cap` | a violated constraint has the largest multiplier its penalty allows |
| `no-group-at-cap` | no group has the weight 1/(r n) that CVaR gives the worst ones |
| `zone-below-noise` | the rounded kink is narrower than the median error of the estimates |
| `estimates-lag` | they lag by over a quarter of the steps (gamma "auto": and more than noise) |
| `estimates-lag` (function) | they differ from its values by more than the kink's width |
| `collapse` | the group losses spread by less than their median error |
| `collapse` (function) | its losses spread by less than 1 % within every group |
| `multiplier-rising` | a constraint is violated, and its multiplier still grows |
| `multiplier-zero` | a constraint is violated, and nothing pulls at it |
| `constraints-oppose` (function) | gradients of violated constraints point against each other |

Those marked so need the user's function, as `report(function=..., index=...)`. The lag is
n/(gamma B1) - gamma'/gamma steps. For the last three, a violation is more than twice the error. A
report reads numbers from the device: make one now and then, not in every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .inputs import CallReader, Index, split
from .outer import project_simplex
from .rules.arrays import tensor
from .rules.track import correction_weight, standard_errors
from .terms import AbstractTerm, CoupledTerm, CVaRTerm, DualTerm, MultiplierTerm, OuterTerm
from .terms.limits import Limit
from .tracker import Entries, InnerTracker

__all__ = [
    "ConstraintReport",
    "Finding",
    "GroupReport",
    "Report",
    "Row",
    "constraint_report",
    "group_report",
]

Name = str | int


@dataclass(frozen=True)
class Finding:
    """Something that the numbers of an objective say about its settings.

    Attributes:
        kind: one word, see `fcco.report`.
        text: what was found.
        remedy: what to do about it.
    """

    kind: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text} {self.remedy}"


@dataclass(frozen=True)
class Row:
    """One group or constraint.

    Attributes:
        name: its name or number.
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


_SHOWN = 20
"""Rows that a printed report has at most."""


@dataclass(frozen=True)
class Report:
    """A table and findings.

    Attributes:
        rows: one per block, in order.
        findings: what the numbers say about the settings.
    """

    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]

    def _text(self, header: list[str], summary: str) -> str:
        # The worst first, those never seen last.
        def badness(row: Row) -> float:
            size = row.value if row.excess is None else row.excess
            return -math.inf if math.isnan(size) else size

        worst = sorted(self.rows, key=badness, reverse=True)[:_SHOWN]
        lines = aligned([header, *map(_cells, worst)])
        left = len(self.rows) - len(worst)
        lines += [f"... and {left} more"] * (left > 0)
        lines += ["", summary, *(f"* {finding}" for finding in self.findings)]
        return "\n".join(lines)


@dataclass(frozen=True)
class GroupReport(Report):
    """The losses of groups.

    Attributes:
        cvar: CVaR of the losses of the groups seen.
        mean: their mean.
        worst: the group with the largest loss.
        seen: how many groups were seen.
        at_cap: how many have the largest weight.
    """

    cvar: float
    mean: float
    worst: Name
    seen: int
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
        worst: the constraint it belongs to, by name or by number.
        violated: how many constraints are outside their limits.
        seen: out of how many; a constraint that was never seen has no value yet.
        multiplier: the largest multiplier, in absolute value (those of equalities have a sign).
    """

    violation: float
    worst: Name
    violated: int
    seen: int
    multiplier: float

    def __str__(self) -> str:
        upper = all(isinstance(row.limit, float) for row in self.rows)
        return self._text(
            ["constraint", "value", "limit", "multiplier", "", "met"],
            f"{self.violated} of {self.seen} constraints {'above' if upper else 'outside'} their "
            f"limits; {self.worst!r} has the largest excess, {self.violation:.3g}",
        )


def _cells(row: Row) -> list[str]:
    value = f"{row.value:.4g}"
    if math.isnan(row.value):
        value = "never seen"
    elif row.error != 0:
        value += " ± " + ("?" if math.isnan(row.error) else f"{row.error:.1g}")
    weight = "?" if math.isnan(row.weight) else f"{row.weight:.3g}"
    cells = [str(row.name), value, weight, "at cap" if row.capped else ""]
    if row.limit is None:
        return cells
    met = {True: "yes", False: "no", None: ""}[row.met]
    unsure = row.excess is not None and abs(row.excess) < 2 * row.error  # no with an unknown error
    limit = f"{row.limit:.4g}" if isinstance(row.limit, float) else str(row.limit)
    if isinstance(row.limit, tuple):
        limit = f"{row.limit[0]:.4g} to {row.limit[1]:.4g}"
    return [*cells[:2], limit, *cells[2:], met + "?" * unsure]


def aligned(table: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    pairs = [zip(cells, widths, strict=True) for cells in table]
    return ["  ".join(cell.ljust(width) for cell, width in row).rstrip() for row in pairs]


def group_report(
    objective: Any, weights: Tensor, function: Callable[[], Any] | None, index: Index
) -> GroupReport:
    """The report of an objective over the losses of groups.

    Args:
        objective: with a term that has a `ratio`.
        weights: of each group in the gradient.
        function: as in a call of the objective, or None.
        index: the group of each of its values.
    """
    term = objective.term
    tracker: InnerTracker = term.tracker
    seen, number = tracker.seen, tracker.num_inner
    losses = torch.where(seen, tracker.rows, torch.nan)
    known = tracker.seen_rows()
    if not len(known):
        raise ValueError("`report()` needs values: no group has been seen yet.")
    error = tracker.error()
    cap = min(1.0, 1 / (term.ratio * number))
    capped = weights >= cap * (1 - 1e-5)
    columns = (each.tolist() for each in (losses, error, weights, capped))
    rows = [Row(*row) for row in zip(term.names or range(number), *columns, strict=True)]
    findings = [
        _never_seen(rows, tracker, "group"),
        _no_group_at_cap(term, known, capped),
        _zone_below_noise(term, error),
        _behind(tracker),
        _equal_losses(known, error[seen]),
    ]
    if function is not None:
        samples = _Samples.of(_measured(objective, function, index))
        findings += [_off(term, samples), _same_within_groups(samples)]
    return GroupReport(
        rows=tuple(rows),
        findings=tuple(each for each in findings if each is not None),
        cvar=term.value().item(),
        mean=known.mean().item(),
        worst=rows[int(losses.nan_to_num(nan=-torch.inf).argmax())].name,
        seen=len(known),
        at_cap=int(capped.sum()),
    )


def constraint_report(
    objective: Any,
    values: Tensor | None,
    average: Tensor | None,
    function: Callable[[], Any] | None,
    index: Index,
) -> ConstraintReport:
    """The report of a constrained objective.

    Args:
        objective: with a term that has `limits`.
        values: g_i of all constraints, or None for those tracked.
        average: the running average of the multipliers, if there is one.
        function: as in a call of the objective, or None.
        index: the constraint of each of its values.
    """
    term, tracker = objective.term, objective.term.tracker
    if values is None:
        excess, multipliers = term.violation(), term.multipliers()
        error = _per_block(tracker.error(), "amax")
    else:
        excess, multipliers = term.at(values)
        error = excess.new_zeros(tracker.num_inner)
    excess, multipliers = _per_block(excess, "amax"), _per_block(multipliers, "largest")
    seen = int((~excess.isnan()).sum())
    if not seen:
        raise ValueError("`report()` needs values: no constraint has been seen yet.")
    shown, limits = excess, [0.0] * tracker.num_inner
    if tracker.dim == 1:
        limits, shown = term.limits.written(), values
        if shown is None:  # an excess does not tell it: that of an equality is a distance
            shown = tracker.rows
            if isinstance(term, DualTerm):  # keeps the last excess beside v
                shown = tracker.latest + term.limits.of(None) - term.limits.margin
        shown = torch.where(excess.isnan(), torch.nan, shown)
    capped = _capped(term, values, excess, average)
    names = term.limits.names or range(tracker.num_inner)
    columns = [each.tolist() for each in (shown, error, multipliers, capped)]
    rows = [Row(*row) for row in zip(names, *columns, limits, excess.tolist(), strict=True)]
    findings = [_never_seen(rows, tracker, "constraint"), _too_small_penalty(rows)]
    if isinstance(term, MultiplierTerm):
        findings += _not_kept(term, rows)
    if values is None:
        findings += [_zone_below_noise(term, error), _behind(tracker)]
    if function is not None:
        entries = _measured(objective, function, index)
        parameters = [each for each in objective.model.parameters() if each.requires_grad]
        findings += [_off(term, _Samples.of(entries)), _opposing(term, rows, entries, parameters)]
    worst = int(excess.nan_to_num(nan=-torch.inf).argmax())
    return ConstraintReport(
        rows=tuple(rows),
        findings=tuple(each for each in findings if each is not None),
        violation=excess[worst].item(),
        worst=rows[worst].name,
        violated=int((excess > 0).sum()),
        seen=seen,
        multiplier=multipliers.nan_to_num(nan=0.0).abs().max().item(),
    )


def _per_block(rows: Tensor, how: str) -> Tensor:
    """One number per block: the largest, or the one of largest magnitude with its sign."""
    if rows.dim() == 1:
        return rows
    rows = rows.flatten(1)
    if how == "amax":
        return rows.amax(1)
    return rows.gather(1, rows.abs().argmax(1, keepdim=True)).squeeze(1)


def _listed(names: Sequence[Name], noun: str) -> str:
    shown = ", ".join(map(repr, names[:5]))
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{noun}{'s' if len(names) > 1 else ''} {shown}{more}"


def _never_seen(rows: Sequence[Row], tracker: InnerTracker, noun: str) -> Finding | None:
    missing = [row.name for row in rows if math.isnan(row.value)]
    if not missing:
        return None
    return Finding(
        "never-seen",
        f"{len(missing)} of {len(rows)} {noun}s have no value after {tracker.steps} steps: "
        f"{_listed(missing, noun)}.",
        "Early in training that is chance; later check the ids, which count from 0, and how they "
        "are drawn (`GroupBatchSampler` and `BlockSampler` draw all of them).",
    )


def _width(term: AbstractTerm) -> float | None:
    """The width of the rounded kink; None for a term without one."""
    if not isinstance(term, OuterTerm) or isinstance(term, DualTerm) or term.outer.jump is None:
        return None
    return term.smoothing * term.outer.jump


def _median(error: Tensor) -> float:
    known = error[~error.isnan() & (error > 0)]
    return known.median().item() if len(known) else math.nan


def _zone_below_noise(term: AbstractTerm, error: Tensor) -> Finding | None:
    width, noise = _width(term), _median(error)
    if width is None or not width < noise:
        return None
    kink = f"The rounded kink is {width:.2g} wide" if width else "The kink is not smoothed"
    return Finding(
        "zone-below-noise",
        f"{kink}, the estimates have a standard error of {noise:.2g}: weights and multipliers "
        "follow the noise.",
        f"Use smoothing=fcco.Width({2 * noise:.2g}), which the methods 'sonex' and 'alexr2' take, "
        "more samples of each block, or a smaller gamma.",
    )


def _behind(tracker: InnerTracker) -> Finding | None:
    """Estimates that are old compared with the training."""
    number, blocks, gamma = tracker.num_inner, tracker.blocks_per_step, tracker.gamma
    if not blocks or not gamma:
        return None
    # Of a motion that keeps its direction, a moving average is n/(gamma B1) steps behind, and the
    # correction makes up for gamma'/gamma of them.
    ahead = correction_weight(tracker.correction, gamma, number, blocks)
    lag = (number / blocks - ahead) / gamma
    if lag <= max(2, tracker.steps / 4):
        return None
    if tracker.automatic and tracker.estimate is not None:
        difference, innovation, steps, gain = tracker.estimate.pooled.tolist()
        by_noise, by_lag = standard_errors(difference, innovation, gain)
        if steps > 10 and by_lag <= by_noise:  # then a larger gamma would not be better
            return None
    return Finding(
        "estimates-lag",
        f"The estimates are about {lag:.0f} steps behind (n / (gamma B1), with {blocks} of "
        f"{number} blocks in a batch and gamma={gamma:g}), and {tracker.steps} steps were done.",
        "Train longer before you read them; or use a larger gamma, or more blocks in a batch.",
    )


@dataclass(frozen=True)
class _Samples:
    """The values of a batch by block, of the blocks with two samples or more.

    Attributes:
        index: the blocks, (B,).
        mean: of each block's samples, (B,) or (B, d1).
        variance: of one sample within each block.
        count: samples per block, shaped to divide `variance`.
    """

    index: Tensor
    mean: Tensor
    variance: Tensor
    count: Tensor

    @classmethod
    def of(cls, entries: Entries) -> _Samples | None:
        """None where entries are no samples, or no block has two of them."""
        blocks, values = entries.blocks, tensor(entries.fresh).double()
        if blocks.inverse is None:
            return None
        blocks = blocks.as_tensors()
        count = blocks.counts.to(values)
        count = count if values.dim() == 1 else count.unsqueeze(1)
        mean = blocks.sums(values) / count
        squares = blocks.sums((values - blocks.of_entries(mean)).square())
        several = blocks.counts > 1
        if not bool(several.any()):
            return None
        count = count[several]
        variance = squares[several] / (count - 1)
        return cls(blocks.index[several], mean[several], variance, count)


def _off(term: AbstractTerm, samples: _Samples | None) -> Finding | None:
    """Estimates that are further from fresh values than the zone is wide."""
    width = _width(term)
    if samples is None or width is None or term.tracker.log_space:
        return None
    distance = (term.tracker.rows.double()[samples.index] - samples.mean).square().mean()
    noise = (samples.variance / samples.count).mean()
    off = math.sqrt(max((distance - noise).item(), 0.0))
    if off <= max(width, 2 * math.sqrt(noise.item())):
        return None
    return Finding(
        "estimates-lag",
        f"The estimates are {off:.2g} away from the values of this batch (root mean square, its "
        f"noise taken off), further than the rounded kink is wide ({width:.2g}).",
        "The weights answer what the model was some steps ago: use read='new', a larger gamma, "
        f"more blocks in a batch, or smoothing=fcco.Width({2 * off:.2g}). On data that were not "
        "trained on, the model itself may differ so much.",
    )


def _no_group_at_cap(term: AbstractTerm, losses: Tensor, capped: Tensor) -> Finding | None:
    """A zone so wide that the ratio has lost its meaning."""
    if not isinstance(term, CVaRTerm) or not term.smoothing or term.ratio == 1:
        return None
    if isinstance(term.smoothing_schedule, str):  # as wide as the losses cannot be told apart
        return None
    number = term.tracker.num_inner
    above = math.floor(term.ratio * number + 1e-9)  # groups that CVaR gives the cap
    if bool(capped.any()) or not above or len(losses) < number:
        return None
    # If no weight were at the cap in a zone this narrow, the worst `above` groups together would
    # have less than weight 1, and none of the others would have any.
    ordered = losses.sort(descending=True).values
    widest = (ordered[0] - ordered[above]).item()
    if widest == 0:  # all of them tie
        return None
    carrying = int((term.weights() > 0).sum())
    return Finding(
        "no-group-at-cap",
        f"ratio={term.ratio:g} has little effect: no group has the largest weight, 1/(r n) = "
        f"{1 / (term.ratio * number):.2g}, and {carrying} of {number} groups share it, because the "
        f"rounded kink is {term.smoothing / term.ratio:.2g} wide and the largest loss is only "
        f"{widest:.2g} above that of rank {above + 1}.",
        f"Use smoothing=fcco.Width({0.95 * widest:.2g}) or less, unless noise asks for more.",
    )


def _equal_losses(losses: Tensor, error: Tensor) -> Finding | None:
    """Group losses that their errors cannot tell apart."""
    if len(losses) < 2:
        return None
    spread, noise = losses.std().item(), _median(error)
    if not spread < noise:
        return None
    return Finding(
        "collapse",
        f"All group losses are {losses.mean().item():.3g} within their errors (they spread by "
        f"{spread:.2g}, the standard error is {noise:.2g}).",
        _CONSTANT,
    )


_CONSTANT = (
    "If that is the loss of a constant output (ln 2 = 0.693 for two classes), the model ignores "
    "its input: use a smaller learning rate, a wider zone (smoothing=fcco.Width(...)), or fresher "
    "estimates (read='new', a larger gamma). If not, all groups are equally good, and all is well."
)


def _same_within_groups(samples: _Samples | None) -> Finding | None:
    """Losses that do not depend on the sample."""
    if samples is None or len(samples.index) < 2:
        return None
    spread = samples.variance.max().sqrt().item()
    size = samples.mean.square().mean().sqrt().item()
    if spread >= 0.01 * size:
        return None
    return Finding(
        "collapse",
        f"Within each group all samples have the same loss, to {spread:.1g} at a mean of "
        f"{samples.mean.mean().item():.3g}.",
        _CONSTANT,
    )


def _capped(
    term: AbstractTerm,
    values: Tensor | None,
    excess: Tensor,
    average: Tensor | None,
) -> Tensor:
    """Which multipliers are the largest that the penalty allows."""
    if not isinstance(term, CoupledTerm) or term.outer.smooth:
        return torch.zeros_like(excess, dtype=torch.bool)
    own = values is None or isinstance(term, DualTerm)
    point = term.excess(None if own else values)
    hard, soft = term.outer.multiplier(point), term.smoothed.multiplier(point)
    if term.smoothing:
        at_cap = (hard != 0) & ((hard - soft).abs() <= 1e-5 * hard.abs())
    elif average is not None:
        # Without smoothing each multiplier is 0 or at its cap: only its mean tells.
        scale = term.weight / term.tracker.num_inner
        at_cap = (hard != 0) & (average.abs() >= 0.95 * scale * hard.abs())
    else:  # beyond what noise explains; never with an unknown error, also for given values
        error = _per_block(term.tracker.error(), "amax")
        at_cap = (hard != 0) & (excess > 2 * error).view(-1, *(1 for _ in hard.shape[1:]))
    return at_cap.flatten(1).any(1) if at_cap.dim() > 1 else at_cap


def _too_small_penalty(rows: Sequence[Row]) -> Finding | None:
    held = [row for row in rows if row.capped and row.met is False]
    if not held:
        return None
    which = _listed([row.name for row in held], "constraint")
    cap, excess = max(abs(row.weight) for row in held), max(row.excess or 0 for row in held)
    return Finding(
        "multiplier-at-cap",
        f"The multiplier is at its cap, {cap:.3g}, for {which}, and the limit is exceeded by up to "
        f"{excess:.2g}: the penalty cannot push harder.",
        "If that stays so, give a larger `penalty` (twice, say); if it does so with any penalty, "
        "the constraints cannot all hold.",
    )


def _not_kept(term: MultiplierTerm, rows: Sequence[Row]) -> list[Finding]:
    """Violated constraints whose multipliers still grow, or are 0."""
    # One that settles grows less and less; one that grows evenly doubles in as many steps.
    growth = (term.rise() * term.step).tolist()
    late = [each for each in zip(rows, growth, strict=True) if each[0].violated]
    rising = [row for row, each in late if each > 0.2 * abs(row.weight) > 1e-20]
    idle = [row for row, _ in late if abs(row.weight) < 1e-20]
    findings = []
    for kind, found, state, remedy in (
        (
            "multiplier-rising", rising, "its multiplier still grows",
            "Train longer; if the value stays while its multiplier grows, the model cannot keep "
            "this limit beside the others: loosen it.",
        ),
        (
            "multiplier-zero", idle, "nothing pulls at it",
            "A value that never changes from batch to batch has no unit to act in: return "
            "`fcco.Measured(value, surrogate)`, or the mean over a batch.",
        ),
    ):  # fmt: skip
        if found and term.step >= 100:  # before, none is expected to have settled
            worst, more = max(found, key=lambda row: row.excess or 0), len(found) - 1
            text = f"After {term.step} steps the limit of {worst.name!r}"
            text += (
                f" (and of {more} more)" * (more > 0) + f" is exceeded by {worst.excess:.2g}, and"
            )
            findings.append(Finding(kind, f"{text} {state}.", remedy))
    return findings


def _measured(objective: Any, function: Callable[[], Any], index: Index) -> Entries:
    """What the function returns for the term of the report."""
    terms = dict(objective.terms.items())
    reader = CallReader(terms, shared_index=len(terms) == 1)
    with torch.enable_grad():
        entries = reader.entries(reader.blocks(index), split(function())[1])
    name = next(name for name, term in terms.items() if term is objective.term)
    if name not in entries:
        raise ValueError(f"`report(function=...)` must return values of {name!r}.")
    return entries[name]


_MOST_GRADIENTS = 8
"""Gradients that are compared, each as large as the parameters."""


def _opposing(
    term: Any, rows: Sequence[Row], entries: Entries, parameters: Sequence[Tensor]
) -> Finding | None:
    """Violated constraints of which no direction of the parameters lowers all."""
    blocks, tracker = entries.carrier_blocks.as_tensors(), term.tracker
    if not entries.carrier.requires_grad:
        return None
    sums = blocks.sums(entries.carrier, tracker.log_space)
    count = blocks.counts.to(sums) if sums.dim() == 1 else blocks.counts.to(sums).unsqueeze(1)
    means = sums - count.log() if tracker.log_space else sums / count
    values = tracker.rows.detach().clone().index_copy(0, blocks.index, means.to(tracker.rows))
    excess = _per_block(term.at(values)[0], "amax")
    # Of a limit that is met, or was by this batch, nothing has to be said.
    present = set(blocks.index[excess[blocks.index] > 0].tolist())
    violated = [k for k, row in enumerate(rows) if row.violated and k in present]
    violated.sort(key=lambda k: rows[k].excess or 0, reverse=True)
    units, chosen = [], []
    for k in violated[:_MOST_GRADIENTS]:
        parts = torch.autograd.grad(excess[k], parameters, retain_graph=True, allow_unused=True)
        flat = torch.cat(
            [
                (torch.zeros_like(each) if part is None else part).flatten().float()
                for each, part in zip(parameters, parts, strict=True)
            ]
        )
        length = flat.norm()
        if length > 0:
            units.append(flat / length)
            chosen.append(k)
    if len(chosen) < 2:
        return None
    gram = torch.stack([torch.stack([a @ b for b in units]) for a in units]).double().cpu()
    shares = _least_norm(gram)
    least = math.sqrt(max((shares @ gram @ shares).item(), 0.0))
    if least < 0.1:
        names = [rows[chosen[k]].name for k, share in enumerate(shares.tolist()) if share > 0.01]
        text = (
            f"No step of the parameters lowers {_listed(names, 'constraint')} together: a mean of "
            f"their gradients, each of length 1, has length {least:.2g}. They cannot all hold near "
            "these parameters."
        )
    else:
        lowest = int(gram.argmin())
        first, second = divmod(lowest, len(chosen))
        cosine = gram[first, second].item()
        if cosine > -0.5:
            return None
        pair = [rows[chosen[first]].name, rows[chosen[second]].name]
        text = (
            f"The gradients of {_listed(pair, 'constraint')} point against each other (cosine "
            f"{cosine:.2f}): what lowers one raises the other."
        )
    return Finding(
        "constraints-oppose",
        text,
        "Loosen one of their limits, or use a model that can tell their samples apart.",
    )


def _least_norm(gram: Tensor) -> Tensor:
    """The y on the simplex with the least y^T G y, by projected gradient steps."""
    shares = torch.full_like(gram[0], 1 / len(gram))
    step = 1 / gram.diagonal().sum()  # at most 1 / the largest eigenvalue
    for _ in range(1000):
        shares = project_simplex(shares - step * (gram @ shares))
    return shares
