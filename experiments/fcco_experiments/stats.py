"""Tables of saved runs, and differences between methods seed by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .store import Comparison
from .task import Metric, Rule

Table = dict[str, dict[str, dict[str, float]]]
"""By method and metric: `mean`, `std` (n - 1) and the number of `runs`."""
DIVERGED = "diverged"
_MINUS = "\N{MINUS SIGN}"
ARROWS = {"higher": "↑", "lower": "↓", "none": ""}


def table(
    comparison: Comparison, metrics: Sequence[Metric], names: Mapping[str, str] | None = None
) -> Table:
    """Mean and standard deviation (0 for one run) of each metric of each method.

    With `names`, the rows are those of these methods under other names.

    A run that diverged counts with its last finite figures, so that it does not flatter its method;
    `diverged` is then the share of such runs. A figure that no run has is left out.
    """
    result: Table = {}
    for name in comparison.meta["methods"] if names is None else names:
        finished = [run for run in comparison.of(name) if run.result is not None]
        if not finished:
            continue
        figures = [run.figures for run in finished]
        row = result[name if names is None else names[name]] = {}
        for metric in metrics:
            values = [run[metric.key] for run in figures if _is_number(run.get(metric.key))]
            if values:
                mean, deviation = spread(values)
                row[metric.key] = {"mean": mean, "std": deviation, "runs": len(values)}
        if diverged := sum(run.diverged is not None for run in finished):
            share = diverged / len(finished)
            row[DIVERGED] = {"mean": share, "std": 0.0, "runs": len(finished)}
    return result


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Mean and standard deviation (0 of one value); NaN without values, or if one is not finite."""
    runs = list(values)
    if not runs or not all(map(math.isfinite, runs)):
        return math.nan, math.nan
    return statistics.fmean(runs), statistics.stdev(runs) if len(runs) > 1 else 0.0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether a value of a row is a figure that can be judged."""
    return _is_number(value) and math.isfinite(value)


def met(row: Mapping[str, Mapping[str, float]], rule: Rule | None) -> bool | None:
    """Whether the mean of the judged constraint is within its limit; None where there is none."""
    value = row.get(rule.constraint) if rule is not None and rule.constraint else None
    return None if rule is None or value is None else value["mean"] <= rule.limit


def columns(metrics: Sequence[Metric], rule: Rule | None, *, wide: bool = False) -> list[Metric]:
    """Columns of the first table: objective, constraint and seconds; `wide`, all headline metrics.

    Without a rule the first two headline metrics take the place of objective and constraint.
    """
    known = {metric.key: metric for metric in metrics}
    headline = [metric.key for metric in metrics if metric.headline and metric.key != "seconds"]
    if rule is not None and rule.objective in known:
        first = [rule.objective, *([rule.constraint] if rule.constraint in known else [])]
    else:
        first = headline[:2]
    first.append("seconds")
    known.setdefault("seconds", Metric("seconds", "seconds", "none", 1, True))
    rest = [key for key in headline if key not in first] if wide else []
    return [known[key] for key in (*first, *rest)]


def cells(shown: Table, metrics: Sequence[Metric], rule: Rule | None = None) -> list[list[str]]:
    """A table as text: a header, then a row for each method.

    It has the metrics that some method has; the limited one has its limit in the head, then ✓ or ✗.
    """
    metrics = [metric for metric in metrics if any(metric.key in row for row in shown.values())]
    rows = [["method"]]
    for metric in metrics:
        limited = rule is not None and metric.key == rule.constraint
        limit = f" ≤ {rule.limit:g}" if limited and rule is not None else ""
        rows[0].append(f"{metric.label} {ARROWS[metric.better]}{limit}".rstrip())
    for name, row in shown.items():
        share = row.get(DIVERGED)
        rows.append([name if share is None else f"{name} ({share['mean']:.0%} diverged)"])
        for metric in metrics:
            value = row.get(metric.key)
            parts = ["-"] if value is None else list(filter(None, cell(value, metric.digits)))
            if rule is not None and metric.key == rule.constraint and value is not None:
                parts.append("✓" if met(row, rule) else "✗")
            rows[-1].append(" ".join(parts))
    return rows


def fixed(value: float, digits: int) -> str:
    """A figure with that many digits after the point.

    >>> fixed(-0.01234, 3), fixed(float("nan"), 3), fixed(3.2e9, 2)
    ('−0.012', 'n/a', '3.2e+09')
    """
    if math.isnan(value):
        return "n/a"
    if math.isinf(value):
        return "∞" if value > 0 else f"{_MINUS}∞"
    text = f"{value:.3g}" if abs(value) >= 1e7 else f"{value:.{digits}f}"
    if float(text) == 0:
        text = text.removeprefix("-")
    return text.replace("-", _MINUS) if text.startswith("-") else text


def plain(value: float, digits: int = 3) -> str:
    """A figure of unknown size with that many significant digits.

    >>> plain(0.017), plain(123.4), plain(0.0), plain(-9.31e-5, 2)
    ('0.0170', '123', '0', '−9.3e−5')
    """
    if not math.isfinite(value) or value == 0:
        return fixed(value, 0)
    text = f"{value:#.{digits}g}".removesuffix(".")
    if "e" in text:
        head, _, power = text.partition("e")
        text = f"{head.removesuffix('.')}e{int(power)}"
    return text.replace("-", _MINUS)


def figure(mean: float, deviation: float | None, digits: int) -> tuple[str, str]:
    """A mean, and `± deviation` where there is one, on the terminal and on the page.

    What so many digits would show as 0 gets significant ones instead.

    >>> figure(0.123, 0.01, 2), figure(1e-6, None, 4)
    (('0.12', '± 0.01'), ('1.00e−6', ''))
    """
    text, spread = fixed(mean, digits), partial(fixed, digits=digits)
    if mean != 0 and math.isfinite(mean) and not text.strip("0."):
        text, spread = plain(mean), partial(plain, digits=2)
    return text, "" if deviation is None else f"± {spread(deviation)}"


def cell(value: Mapping[str, float], digits: int) -> tuple[str, str]:
    """`figure` of an entry of a table, whose deviation is that of several runs."""
    several = value["runs"] > 1 and math.isfinite(value["std"])
    return figure(value["mean"], value["std"] if several else None, digits)


@dataclass(frozen=True)
class Interval:
    """A mean difference and where it lies with a given confidence."""

    mean: float
    low: float  # NaN for a single pair, as `high` is
    high: float
    pairs: int

    @property
    def decided(self) -> bool:
        """Whether the interval excludes 0, so that seeds alone do not explain the difference."""
        return self.low > 0 or self.high < 0


def paired(left: Sequence[float], right: Sequence[float], level: float = 0.95) -> Interval:
    r"""Student's t interval of the mean of left - right, pair by pair.

    .. math::
        \bar d \pm t_{n-1,\,(1+\text{level})/2}\; s_d / \sqrt n

    Example:
        >>> gap = paired([0.5, 0.6, 0.7], [0.4, 0.4, 0.4])
        >>> round(gap.mean, 3), round(gap.low, 3), round(gap.high, 3), gap.decided
        (0.2, -0.048, 0.448, False)
    """
    if len(left) != len(right) or not left:
        raise ValueError(f"`paired` needs pairs but got {len(left)} and {len(right)} values.")
    gaps = [a - b for a, b in zip(left, right, strict=True)]
    pairs, mean = len(gaps), math.fsum(gaps) / len(gaps)
    if pairs < 2:
        return Interval(mean, math.nan, math.nan, pairs)
    from scipy import stats

    error = statistics.stdev(gaps) / math.sqrt(pairs)
    reach = float(stats.t.ppf((1 + level) / 2, pairs - 1)) * error
    return Interval(mean, mean - reach, mean + reach, pairs)


def frontier(
    x: Sequence[float], y: Sequence[float], higher_x: bool = False, higher_y: bool = True
) -> list[int]:
    r"""Indices of the points that no other point dominates, ordered by `x`.

    .. math::
        j \text{ dominates } i \iff x_j \preceq x_i,\ y_j \preceq y_i
        \text{ and one of them is strict}

    where :math:`\preceq` is "at least as good". Points with a value that is not finite are left
    out. Of equal points all stay.

    >>> frontier([0.0, 1.0, 2.0, 3.0], [0.5, 0.7, 0.6, 0.9])
    [0, 1, 3]
    """
    sign_x, sign_y = (-1.0 if higher_x else 1.0), (-1.0 if higher_y else 1.0)
    finite = [i for i, point in enumerate(zip(x, y, strict=True)) if all(map(math.isfinite, point))]
    kept: list[int] = []
    for i in sorted(finite, key=lambda i: (sign_x * x[i], sign_y * y[i], i)):
        last = kept[-1] if kept else i  # as good in x, or better, than all that follow
        if i == last or sign_y * y[i] < sign_y * y[last] or (x[i], y[i]) == (x[last], y[last]):
            kept.append(i)
    return sorted(kept, key=lambda i: (x[i], sign_y * y[i], i))
