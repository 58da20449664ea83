"""Who is first in a comparison, and whether that is decided; keyed sentences of templates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..prose import paragraphs
from ..stats import Interval, is_finite, paired, spread
from ..task import Experiment, Method, Metric, Panel, Row, Rule, Task


class FinalRows:
    """Final rows of each method, one for each seed; methods without rows are left out.

    `early` names the methods that are no candidates: where a run ended before the others, or where
    one of the figures `judged` is not finite.
    """

    def __init__(self, config: Experiment, methods: Mapping[str, list[Row]], *judged: str) -> None:
        self.rows = {name: rows for name, rows in methods.items() if rows}
        self.seeds = len(config.seeds)
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
        """Mean of a figure over the runs of a method."""
        return math.fsum(row[key] for row in self.rows[name]) / len(self.rows[name])

    def text(self, name: str, key: str, digits: int = 4) -> str:
        """Mean and, with several runs, standard deviation."""
        mean, deviation = spread(row[key] for row in self.rows[name])
        several = len(self.rows[name]) > 1
        return f"{mean:.{digits}f} ± {deviation:.{digits}f}" if several else f"{mean:.{digits}f}"

    def difference(self, left: str, right: str, key: str) -> Interval:
        """Left - right seed by seed; without all seeds of both, of the means, without interval."""
        first, second = self.rows[left], self.rows[right]
        if len(first) == len(second) == self.seeds:
            return paired([row[key] for row in first], [row[key] for row in second])
        return Interval(self.mean(left, key) - self.mean(right, key), math.nan, math.nan, 1)


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
    better = {metric.key: metric.better for metric in task.page(config).metrics}
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


def keyed(template: str, block: str, **values: Any) -> dict[str, str]:
    """Paragraphs of the form `key: text`, by key."""
    pairs = (text.partition(": ") for text in paragraphs(template, block, **values))
    return {key: text for key, _, text in pairs}


def glossary(
    template: str, methods: Mapping[str, Method], aliases: Mapping[str, str] | None = None
) -> dict[str, str]:
    """One line for each method of a config, from the template's block `methods`."""
    lines, result = keyed(template, "methods"), {}
    for name, method in methods.items():
        word = (aliases or {}).get(method.method, method.method)
        (step,) = paragraphs("words.j2", "step", method=method)
        result[name] = f"{lines.get(word, lines.get(method.method, ''))} {step}".strip()
    return result


def metrics(template: str, parts: Mapping[str, str], **values: Any) -> tuple[Metric, ...]:
    """Columns from the template's block `metrics`, of paragraphs

        key | label | better | digits | headline | meaning

    A key such as `*_auc` stands for a column of each part of the data; `headline` names the parts
    (or `once`) whose column is in the first table. `parts` has the label of each part by its key.
    """
    lines = [text.split(" | ") for text in paragraphs(template, "metrics", **values)]
    columns = [
        Metric(f"{part}{key[1:]}", f"{label}, {name}", better, int(digits), part in shown, meaning)  # type: ignore[arg-type]
        for part, name in parts.items()
        for key, label, better, digits, shown, meaning in lines
        if key.startswith("*")
    ]
    return (
        *columns,
        *(
            Metric(key, label, better, int(digits), "once" in shown, meaning)  # type: ignore[arg-type]
            for key, label, better, digits, shown, meaning in lines
            if not key.startswith("*")
        ),
    )


def panels(template: str, block: str, **values: Any) -> tuple[Panel, ...]:
    """Plots from a block of a template, of paragraphs `kind | title | y=... | label=... | ...`.

    The words before the equals signs are those of `Panel`; an empty value is left out.
    """
    result = []
    for text in paragraphs(template, block, **values):
        kind, title, *rest = text.split(" | ")
        fields: dict[str, Any] = dict(part.split("=", 1) for part in rest)
        for name in ("reference", "x_reference"):
            if name in fields:
                fields[name] = float(fields[name]) if fields[name] else None
        fields["log"] = fields.get("log") == "yes"
        result.append(Panel(kind, title=title, **fields))  # type: ignore[arg-type]
    return tuple(result)
