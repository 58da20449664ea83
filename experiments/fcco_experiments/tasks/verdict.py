"""Final rows of a comparison, for the verdicts of the tasks; keyed sentences of their templates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..prose import paragraphs
from ..stats import Interval, paired, spread
from ..task import Experiment, Method, Metric, Panel, Row


class FinalRows:
    """Final rows of each method, one for each seed; methods without rows are left out.

    `early` names the methods that are no candidates: where a run ended before the others, or where
    the figure `judged` is not finite.
    """

    def __init__(self, config: Experiment, methods: Mapping[str, list[Row]], judged: str) -> None:
        self.rows = {name: rows for name, rows in methods.items() if rows}
        self.seeds = len(config.seeds)
        last = max((row.get("epoch", 0) for rows in self.rows.values() for row in rows), default=0)
        self.early = tuple(
            name
            for name, rows in self.rows.items()
            if any(row.get("epoch", last) < last or not math.isfinite(row[judged]) for row in rows)
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
