"""What figures mean, each meaning told once."""

from __future__ import annotations

from collections.abc import Sequence

from ..task import Metric

__all__ = ["meanings"]


def meanings(metrics: Sequence[Metric]) -> list[tuple[str, str]]:
    """Labels and meanings; the same meaning is told once."""
    said: dict[str, list[str]] = {}
    for metric in metrics:
        if metric.meaning:
            said.setdefault(metric.meaning, []).append(metric.label)
    return [(_joined(labels), meaning) for meaning, labels in said.items()]


def _joined(labels: Sequence[str]) -> str:
    """Labels in one; "AUC, test" and "AUC, train" as "AUC, test and train"."""
    parts = [label.rpartition(", ") for label in labels]
    stems = {stem for stem, _, _ in parts}
    if len(labels) < 2 or len(stems) > 1 or "" in stems:
        return "; ".join(labels)
    return f"{stems.pop()}, {' and '.join(part for _, _, part in parts)}"
