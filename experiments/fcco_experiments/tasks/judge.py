"""Who is first in a comparison, and whether that is decided: the terminal and the page ask here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..stats import Interval, figure, is_finite, paired, spread
from ..task import Experiment, Row, Rule, Task


class FinalRows:
    """Final rows of each method, one for each seed; methods without rows are left out.

    A row says its `seed`, or the rows of a method are those of all seeds, in order. `early` names
    the methods that are no candidates: where a run ended before the others, or where one of the
    figures `judged` is not finite.
    """

    def __init__(self, config: Experiment, methods: Mapping[str, list[Row]], *judged: str) -> None:
        self.rows = {name: rows for name, rows in methods.items() if rows}
        self.seeds = config.seeds
        epochs = [row.get("epoch", 0) for rows in self.rows.values() for row in rows]
        last = max((epoch for epoch in epochs if is_finite(epoch)), default=0)
        self.early = tuple(
            name
            for name, rows in self.rows.items()
            if any(row.get("epoch", last) != last for row in rows)
            or not all(is_finite(row.get(key)) for row in rows for key in judged)
        )

    @property
    def several(self) -> bool:
        """Whether some method has more than one run."""
        return any(len(rows) > 1 for rows in self.rows.values())

    def mean(self, name: str, key: str) -> float:
        """Mean of a figure over the runs of a method, NaN where it is not finite in one."""
        values = (row.get(key, math.nan) for row in self.rows[name])
        return spread(value if is_finite(value) else math.nan for value in values)[0]

    def text(self, name: str, key: str, digits: int = 4) -> str:
        """Mean and, with several runs, standard deviation."""
        mean, deviation = spread(row[key] for row in self.rows[name])
        several = len(self.rows[name]) > 1
        return " ".join(figure(mean, deviation if several else None, digits)).rstrip()

    def difference(self, left: str, right: str, key: str) -> Interval:
        """Left - right over the seeds that both have; without any, of the means, of no pairs."""
        first, second = self._by_seed(left, key), self._by_seed(right, key)
        if both := [seed for seed in first if seed in second]:
            return paired([first[seed] for seed in both], [second[seed] for seed in both])
        return Interval(self.mean(left, key) - self.mean(right, key), math.nan, math.nan, 0)

    def _by_seed(self, name: str, key: str) -> dict[int, float]:
        rows = self.rows[name]
        seeds = self.seeds if len(rows) == len(self.seeds) else [None] * len(rows)
        seeds = [row.get("seed", seed) for seed, row in zip(seeds, rows, strict=True)]
        pairs = zip(seeds, (row.get(key, math.nan) for row in rows), strict=True)
        return {seed: value for seed, value in pairs if seed is not None and is_finite(value)}


@dataclass(frozen=True)
class Judgement:
    """Who is first by the means of the judged figures, and whether seeds could turn it round.

    Args:
        final: what was judged.
        rule: by which.
        order: those within the limit by the objective, then the others, the nearest first.
        within: those whose mean is within the limit.
        leads: what the first is ahead of each other one by, in the objective; where only the first
            is within the limit, or none, in the figure that is limited.
    """

    final: FinalRows
    rule: Rule | None = None
    order: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    leads: Mapping[str, Interval] = field(default_factory=dict)

    @property
    def best(self) -> str | None:
        """The first."""
        return self.order[0] if self.order else None

    @property
    def wins(self) -> bool:
        """Whether the first is within the limit, and ahead of each other one whatever the seeds."""
        return bool(self.within and self.leads) and all(d.low > 0 for d in self.leads.values())


def judge(task: Task, config: Any, methods: Mapping[str, list[Row]]) -> Judgement:
    """The verdict on final rows, for every page and text: all methods compete, references too."""
    rule = task.judged(config)
    better = {metric.key: metric.better for metric in task.metrics(config)}
    if rule is None or better.get(rule.objective, "none") == "none":
        return Judgement(FinalRows(config, methods))
    final = FinalRows(config, methods, *filter(None, (rule.objective, rule.constraint)))
    competing = {name: rows for name, rows in final.rows.items() if name not in final.early}

    def over(name: str) -> float:
        return max(0.0, final.mean(name, rule.constraint) - rule.limit) if rule.constraint else 0.0

    sign = -1.0 if better[rule.objective] == "higher" else 1.0
    order = sorted(
        task.candidates(config, competing),
        key=lambda name: (over(name), sign * final.mean(name, rule.objective)),
    )
    leads = {}
    for other in order[1:]:
        pair = (order[0], other) if sign < 0 and not over(other) else (other, order[0])
        leads[other] = final.difference(*pair, rule.constraint if over(other) else rule.objective)
    within = tuple(name for name in order if not over(name))
    return Judgement(final, rule, tuple(order), within, leads)
