r"""Certificates: limits tested on new rows, which were used for nothing else.

With m limits each expectation is beyond its *bound* with a probability of at most (1 - level) / m,
so that all bounds hold together with the probability `level`, also if limits share rows.

* Values of 0 and 1: exact (Clopper and Pearson, 1934).
* Other values: mean + c s / sqrt(n), with the mean and the standard deviation s of the n rows. c is
  a quantile of sqrt(n) (truth - mean) / s in samples of n rows, drawn from the rows of every limit
  equally often, so that the errors of all limits are counted. Drawing accounts for rows that happen
  to lack the rare large losses: their mean and their s are both too small. Beyond 200 rows and
  20,000 draws c is extrapolated by the first term of its Edgeworth series. c is at least Student's
  quantile, s at least what the other limits suggest, and three tenths of the error probability are
  kept in reserve. Where c is over twice that of a normal distribution, the rows are too few.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import _checks
from .report import Table
from .terms.limits import AtLeast, Limit, bounds

__all__ = ["Certificate", "Tested", "certify"]

_LONGEST, _DRAWS, _DOUBTFUL, _SPENT = 200, 20_000, 2.0, 0.7
_VERDICTS = ("fail", "too few rows", "pass")


@dataclass(frozen=True)
class Tested:
    """The test of one limit.

    Attributes:
        value: the mean of its rows, None without any.
        bound: of the expectation, on the side of the limit; a pair where there are two sides. None
            if there are too few rows for one.
        limit: with the tolerance.
        verdict: "pass" if the bound keeps the limit, "fail" if the value does not, else "too few
            rows".
    """

    name: Any
    rows: int
    value: float | None
    bound: Any
    limit: Limit
    verdict: str


@dataclass(frozen=True)
class Certificate:
    """The tests of all limits; `print` shows a table.

    Attributes:
        level: the probability of all bounds together or, if not `joint`, of each.
    """

    rows: tuple[Tested, ...]
    level: float
    joint: bool

    @property
    def passed(self) -> bool:
        """Whether all limits pass: wrongly with a probability of at most 1 - level, joint or not.

        For if it is wrong, some limit is exceeded, and that one's own bound missed it.
        """
        return all(row.verdict == "pass" for row in self.rows)

    def json(self) -> str:
        """All of it as one line."""
        return json.dumps({"passed": self.passed, **asdict(self)})

    def __str__(self) -> str:
        table = Table([["limit on", "rows", "value", "bound", "limit", "verdict"]])
        for row in sorted(self.rows, key=lambda row: _VERDICTS.index(row.verdict)):
            numbers = map(_written, (row.value, row.bound, row.limit))
            table.append([str(row.name), str(row.rows), *numbers, row.verdict])
        kept = sum(row.verdict == "pass" for row in self.rows)
        summary = f"{'Passed' if self.passed else 'Not passed'}: {kept} of {len(self.rows)} limits"
        how = "together" if self.joint else "each by itself"
        return "\n".join([str(table), "", f"{summary} hold, {how} at {100 * self.level:g} %"])


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return " to ".join(map(_written, value))
    if isinstance(value, AtLeast):
        return str(value)
    return "none" if value is None else f"{value:.4g}"


def certify(
    values: Mapping[Any, Any], limits: Any, *, reference: Mapping[Any, Any] | None = None,
    level: float = 0.95, tolerance: float = 0.0, min_rows: int = 20, joint: bool = True,
    seed: int = 0,
) -> Certificate:  # fmt: skip
    """Test limits on the means of values of new rows.

    Args:
        values: by name, a value for each row, such as a loss, or the 0 or 1 of a rate. A row may
            count in several.
        limits: by name, or one for all: a number (at most), `fcco.AtLeast`, (low, high), or
            `fcco.Equal`, which needs a tolerance.
        reference: the same of another model: the limits are then those of the differences.
        tolerance: how far values may be beyond their limits.
        min_rows: limits with fewer rows are not tested, and do not count among the m.
        joint: False: each bound has the probability `level` by itself.
        seed: of the draws.
    """
    _checks.in_interval("certify", "level", level, 0.5, 1.0, open_high=True)
    _checks.finite("certify", "tolerance", tolerance, 0.0)
    _checks.integer("certify", "min_rows", min_rows, 2)
    samples = {name: _read(name, given) for name, given in values.items()}
    limits = limits if isinstance(limits, Mapping) else dict.fromkeys(samples, limits)
    for what, other in (("limits", limits), ("reference", reference or samples)):
        if not samples or set(other) != set(samples):
            raise ValueError(
                f"`certify(values=..., {what}=...)` must have the same names but have "
                f"{list(samples)} and {list(other)}."
            )
    ends = {}
    for name, own in samples.items():
        other = own if reference is None else _read(name, reference[name])
        if len(other) != len(own):
            raise ValueError(f"`reference` has {len(other)} rows of `{name}`, not those of values.")
        samples[name] = own if reference is None else _read(name, own - other)
        low, high = bounds("certify(limits=...)", name, limits[name])
        if low == high and tolerance == 0:
            raise ValueError(f"The equality of `{name}` needs a `tolerance`: rows cannot prove it.")
        ends[name] = low - tolerance, high + tolerance
    tested = [name for name, own in samples.items() if len(own) >= min_rows]
    sides = sum(math.isfinite(end) for name in tested for end in ends[name])
    chance = (1 - level) / (max(sides, 1) if joint else 1)
    tests = _bounds([samples[name] for name in tested], chance, reference is not None, seed)
    found, rows = dict(zip(tested, tests, strict=True)), []
    for name, own in samples.items():
        (low, high), (least, most) = ends[name], found.get(name, (-math.inf, math.inf))
        value = float(own.mean()) if len(own) else None
        verdict = "pass" if least >= low and most <= high else "too few rows"
        if name in found and not low <= own.mean() <= high:
            verdict = "fail"
        pair = tuple(None if math.isinf(end) else end for end in (least, most))
        bound, limit = pair, (low, high)
        if math.isinf(low) or math.isinf(high):
            bound, limit = (pair[0], AtLeast(low)) if high == math.inf else (pair[1], high)
        rows.append(Tested(name, len(own), value, bound, limit, verdict))
    return Certificate(tuple(rows), level, joint)


def _read(name: Any, given: Any) -> np.ndarray:
    own = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given, np.float64)
    if own.ndim != 1 or not np.isfinite(own).all():
        what = f"shape {own.shape}" if own.ndim != 1 else "NaN or infinity among them"
        raise ValueError(f"`{name}` needs a finite value for each row, not a mean, but has {what}.")
    return own


def _bounds(
    samples: Sequence[np.ndarray], chance: float, paired: bool, seed: int
) -> list[tuple[float, float]]:
    """A lower and an upper bound of each expectation, each missed with that chance."""
    found, real = [(-math.inf, math.inf)] * len(samples), []
    largest = max((np.abs(own).max() for own in samples), default=1)
    for k, own in enumerate(samples):
        size, hits = len(own), int(own.sum())
        if largest > 1 and own[0] in (0, 1) and (own == own[0]).all():
            # No rate, perhaps: other limits show how large a value is that these rows lack.
            few = largest * _rate(0, size, chance)
            found[k] = float(own[0] - few), float(own[0] + few)
        elif np.isin(own, (0, 1)).all():
            # A difference may be -1 in other rows, too.
            low = -_rate(0, size, chance) if paired else 1 - _rate(size - hits, size, chance)
            found[k] = low, _rate(hits, size, chance)
        elif own.std() > 0:  # values that are all alike say nothing about others
            real.append(k)
    if not real:
        return found
    moments = [(len(samples[k]), samples[k].mean(), samples[k].std(ddof=1)) for k in real]
    sizes, means, s = map(np.array, zip(*moments, strict=True))
    shapes = [(samples[k] - mean) / own for k, (_, mean, own) in zip(real, moments, strict=True)]
    # The logarithms of s differ by chance and between limits: empirical Bayes, by moments.
    noise, logs = (np.mean(np.concatenate(shapes) ** 4) - 1) / (4 * sizes), np.log(s)
    noise = np.maximum(noise, 0)  # of two values that come as often: -0.0
    between = max(logs.var() - noise.mean(), 0)
    share = between / np.maximum(between + noise, 1e-300)
    pooled = np.exp(share * logs + (1 - share) * logs.mean())
    factors = _factors(shapes, sizes, _SPENT * chance, seed)
    factors[factors > _DOUBTFUL * NormalDist().inv_cdf(1 - _SPENT * chance)] = np.inf
    widths = factors * np.maximum(s, pooled) / np.sqrt(sizes)
    for k, mean, (below, above) in zip(real, means, widths.T, strict=True):
        found[k] = float(mean - below), float(mean + above)
    return found


def _rate(hits: int, size: int, chance: float) -> float:
    """The rate at which at most so many hits have that chance, by bisection."""
    if hits == size:
        return 1.0
    # More than ten deviations below, terms add nothing.
    few = torch.arange(max(0, hits - 100 - int(10 * math.sqrt(size))), hits + 1).double()
    ways = math.lgamma(size + 1) - torch.lgamma(few + 1) - torch.lgamma(size - few + 1)
    low, high = hits / size, 1.0
    while high - low > 1e-12:
        rate = (low + high) / 2
        terms = ways + few * math.log(rate) + (size - few) * math.log1p(-rate)
        low, high = (rate, high) if terms.logsumexp(0) > math.log(chance) else (low, rate)
    return high


def _factors(shapes: list[np.ndarray], sizes: np.ndarray, chance: float, seed: int) -> np.ndarray:
    """The c of the lower bounds and that of the upper ones, shape (2, m)."""
    drawn = max(chance, 20 / _DRAWS)
    z, near = (NormalDist().inv_cdf(1 - each) for each in (chance, drawn))
    lengths = np.unique(np.geomspace(min(sizes.min(), _LONGEST), _LONGEST, 16).astype(int))
    flat, counts = np.concatenate(shapes), np.array([len(shape) for shape in shapes])
    starts, edges = np.cumsum(counts) - counts, np.concatenate([[0], lengths[:-1]])
    random, ratios = np.random.default_rng(seed), []
    for first in range(0, max(10_000, round(20 / drawn)), 5000):
        of = np.arange(first, first + 5000)[:, None] % len(shapes)
        rows = starts[of] + (random.random((5000, _LONGEST)) * counts[of]).astype(int)
        parts = (np.add.reduceat(flat[rows] ** power, edges, axis=1) for power in (1, 2))
        sums, squares = (part.cumsum(1) for part in parts)
        variance = np.maximum(squares - sums**2 / lengths, 1e-12) / (lengths - 1)
        ratios.append(sums / np.sqrt(lengths * variance))
    place = np.searchsorted(lengths, sizes, "right") - 1
    free = sizes - 1  # Student's quantile, by Cornish and Fisher
    student = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    found = []
    for sign in (-1, 1):
        ends = np.quantile(np.concatenate(ratios) * -sign, 1 - drawn, axis=0)[place]
        beyond = np.sqrt(lengths[place] / sizes) * (2 * z**2 + 1) / (2 * near**2 + 1)
        found.append(np.maximum(z + (ends - near) * beyond, student))
    return np.stack(found)
