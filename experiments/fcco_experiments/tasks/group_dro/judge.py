"""Which figures count: who solved the problem best, by how much, and what not to believe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from ...stats import spread
from ...task import Row
from .config import GroupDRO

__all__ = [
    "REFERENCES",
    "TENTH",
    "Curve",
    "references",
    "reported",
    "samples_to_reach",
    "score",
    "score_rule",
    "verdict",
    "warnings",
    "word_of",
]

REFERENCES = ("erm", "uniform")
"""Methods that minimise something else than the CVaR."""
TENTH = ("amazon",)
"""Data sets whose accuracies are summed up by the tenth percentile over users."""
SMALL = 20
"""A test group with fewer samples says little: one of them is more than five points."""
FAR = 0.5
"""A threshold that is off by more than this share of the CVaR counts the wrong groups."""

Curve = Sequence[tuple[float, float]]


def word_of(config: GroupDRO, name: str) -> str:
    """The method behind a name of the tables, such as `ooa` behind `ooa-cvar`."""
    family = name if name in config.methods else name.rpartition("@")[0]
    return config.methods[family].method if family in config.methods else name


def references(config: GroupDRO) -> tuple[str, ...]:
    """The methods of a config that minimise another average."""
    return tuple(name for name, each in config.methods.items() if each.method in REFERENCES)


def reported(config: GroupDRO) -> str:
    """What one figure of many accuracies is called."""
    tenth = config.data in TENTH
    return "tenth-percentile accuracy over users" if tenth else "worst-group accuracy"


def score(config: GroupDRO, row: Row) -> tuple[float, ...]:
    """The smaller the better, by `choose_by`; never from test figures."""
    needed = {"val_error": ("val_worst_accuracy", "val_cvar")}.get(
        config.choose_by, (config.choose_by,)
    )
    if missing := [key for key in needed if key not in row]:
        raise ValueError(f"`choose_by: {config.choose_by}` needs {missing[0]}, which no row has.")
    if config.choose_by == "val_error":
        return 1.0 - row["val_worst_accuracy"], row["val_cvar"]
    return (row[config.choose_by],)


def score_rule(config: GroupDRO) -> str:
    """The rule of `score` in words."""
    if config.choose_by == "val_error":
        return f"the highest {reported(config)} on validation data, then the lowest CVaR there"
    if config.choose_by == "val_cvar":
        return "the lowest CVaR on validation data"
    return "the lowest CVaR on training data (who solves the problem, not whose answer generalises)"


def samples_to_reach(curves: Sequence[Curve], target: float) -> float | None:
    """Samples after which a mean curve over seeds is first at or below a value; None if never.

    Args:
        curves: one per seed: (samples, value) at each evaluation. The k-th evaluations are
            averaged; where a seed has fewer, the curves end there.
        target: the value.

    Between two evaluations the curve is a straight line.

    Example:
        >>> samples_to_reach([[(0, 1.0), (100, 0.5)], [(0, 0.8), (100, 0.3)]], 0.65)
        50.0
    """
    before: tuple[float, float] | None = None
    for places in zip(*curves, strict=False):
        samples, value = (fmean(column) for column in zip(*places, strict=True))
        if value <= target:
            if before is None or not math.isfinite(before[1]):
                return samples
            share = (before[1] - target) / (before[1] - value)
            return before[0] + share * (samples - before[0])
        before = samples, value
    return None


def verdict(config: GroupDRO, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
    """Who has the lowest training CVaR and by how much, the worst groups on test data, the rule."""
    rows = {name: own for name, own in methods.items() if own}
    others = [name for name in rows if word_of(config, name) in REFERENCES]
    early = _ended_early(rows)
    ranked = sorted(
        (name for name in rows if name not in others and name not in early),
        key=lambda name: _mean(rows[name], "train_cvar"),
    )
    lines = []
    if ranked:
        best = ranked[0]
        lines += _best_on_test(config, rows, ranked)
        lines.append(_first(config, rows, ranked))
        lines += [_against(config, rows, best, name) for name in _rivals(config, ranked)]
        lines += _lower_references(rows, best, others)
    else:
        lines.append("No method that minimises the CVaR has finished.")
    if early:
        one = len(early) == 1
        stand = "has runs that ended early and is" if one else "have runs that ended early and are"
        lines.append(f"{' and '.join(early)} {stand} no candidate{'' if one else 's'}.")
    lines += _test_lines(config, rows, ranked, others)
    lines.append(f"The rule by which settings are chosen: {score_rule(config)}.")
    return tuple(lines)


def _best_on_test(
    config: GroupDRO, rows: Mapping[str, list[Row]], ranked: Sequence[str]
) -> list[str]:
    """Comes first where settings were chosen to generalise."""
    if config.choose_by == "train_cvar":
        return []
    best = min(ranked, key=lambda name: _mean(rows[name], "test_cvar"))
    return [f"{best} has the lowest CVaR on test data, {_figure(rows[best], 'test_cvar')}."]


def _first(config: GroupDRO, rows: Mapping[str, list[Row]], ranked: Sequence[str]) -> str:
    best = ranked[0]
    text = f"{best} has the lowest final training CVaR, {_figure(rows[best], 'train_cvar')}"
    text += f" over {len(rows[best])} seeds" if len(rows[best]) > 1 else ""
    share = f"{100 * config.ratio:g} %"
    return f"{text}: the average loss of the worst {share} of groups."


def _rivals(config: GroupDRO, ranked: Sequence[str]) -> list[str]:
    """The next one, and the next that is another method than the first."""
    word = word_of(config, ranked[0])
    other = next((name for name in ranked if word_of(config, name) != word), None)
    return list(dict.fromkeys([*ranked[1:2], *([other] if other else [])]))


def _against(config: GroupDRO, rows: Mapping[str, list[Row]], best: str, name: str) -> str:
    """How far a rival is behind, and whether seeds could have made the difference."""
    gaps = _differences(config, rows[name], rows[best], "train_cvar")
    mean, deviation = spread(gaps)
    first = word_of(config, name) == word_of(config, best)
    text = f"{name} follows with" if first else f"The best of the other methods, {name}, has"
    text += f" {_figure(rows[name], 'train_cvar')}"
    if len(gaps) < 2:
        return f"{text}, {mean:.4f} more; without several seeds of both, that may be chance."
    ahead = sum(gap > 0 for gap in gaps)
    text += (
        f", {mean:.4f} ± {deviation:.4f} more, seed by seed ({ahead} of {len(gaps)} seeds agree)"
    )
    if mean > deviation:
        return f"{text}: more than the spread over seeds."
    return f"{text}: within the spread over seeds, which does not tell the two apart."


def _lower_references(rows: Mapping[str, list[Row]], best: str, others: Sequence[str]) -> list[str]:
    top = _mean(rows[best], "train_cvar")
    return [
        f"But {name}, which minimises another average, ends lower: "
        f"{_figure(rows[name], 'train_cvar')}. So the others did not solve their own problem."
        for name in others
        if _mean(rows[name], "train_cvar") < top
    ]


def _test_lines(
    config: GroupDRO,
    rows: Mapping[str, list[Row]],
    ranked: Sequence[str],
    others: Sequence[str],
) -> list[str]:
    """Accuracy of the worst groups against training that ignores groups."""
    key, what = "test_worst_accuracy", reported(config)
    plain = next((name for name in others if word_of(config, name) == "erm"), None)
    if not ranked:
        return []
    top = max(ranked, key=lambda name: _mean(rows[name], key))
    lines = []
    for name in dict.fromkeys([ranked[0], top]):
        text = f"On test data {name} has a {what} of {_figure(rows[name], key, 3)}"
        text += ", the highest" if name == top and len(ranked) > 1 else ""
        if plain is not None:
            gaps = [100 * gap for gap in _differences(config, rows[name], rows[plain], key)]
            mean, deviation = spread(gaps)
            where = "above" if mean >= 0 else "below"
            text += f", {abs(mean):.1f}"
            text += f" ± {deviation:.1f}" if len(gaps) > 1 else ""
            text += f" points {where} {plain} ({_figure(rows[plain], key, 3)})"
            if len(gaps) > 1 and abs(mean) <= deviation:
                text += ", which is within the spread over seeds"
        lines.append(f"{text}.")
    return lines


def warnings(config: GroupDRO, row: Row) -> tuple[str, ...]:
    """Figures that mean less than they seem to."""
    found = []
    cvar, error = row["train_cvar"], row.get("tracking_error", 0.0)
    if error > cvar:
        found.append(
            f"The method does not see what it minimises: its running values of the group losses "
            f"are off by {error:.3g} (root mean square), more than the CVaR itself, {cvar:.3g}. "
            "Raise gamma, lower the learning rate, or draw more groups per batch."
        )
    if "threshold" in row and abs(row["threshold"] - row["threshold_exact"]) > FAR * cvar:
        found.append(
            f"The threshold is off: {row['threshold']:.3g} where the group losses ask for "
            f"{row['threshold_exact']:.3g}, so the wrong groups count as the worst."
        )
    smallest = row.get("test_smallest", SMALL)
    if smallest < SMALL:
        what = "users" if config.data in TENTH else "groups"
        found.append(
            f"Small test {what}: the smallest of those reported has {smallest} samples, and one "
            f"of them is {100 / smallest:.0f} points of its accuracy. Trust means over several "
            "splits alone."
        )
    if row["test_worst_accuracy"] <= 0 and row["test_accuracy"] > 0.5:
        found.append(
            "One answer for all? No sample of the worst test group is classified rightly, while "
            f"{100 * row['test_accuracy']:.1f} % of all samples are."
        )
    return tuple(found)


def _ended_early(rows: Mapping[str, list[Row]]) -> list[str]:
    """Methods with a run that diverged: its last figures are those of a shorter training."""
    last = max((row.get("epoch", 0) for own in rows.values() for row in own), default=0)
    return [
        name
        for name, own in rows.items()
        if any(row.get("epoch", last) < last or not math.isfinite(row["train_cvar"]) for row in own)
    ]


def _differences(
    config: GroupDRO, left: Sequence[Row], right: Sequence[Row], key: str
) -> list[float]:
    """Seed by seed; without all seeds of both, the difference of the means alone."""
    if len(left) == len(right) == len(config.seeds):
        return [a[key] - b[key] for a, b in zip(left, right, strict=True)]
    return [_mean(left, key) - _mean(right, key)]


def _mean(rows: Sequence[Row], key: str) -> float:
    return fmean(row[key] for row in rows)


def _figure(rows: Sequence[Row], key: str, digits: int = 4) -> str:
    mean, deviation = spread([row[key] for row in rows])
    text = f"{mean:.{digits}f}"
    return f"{text} ± {deviation:.{digits}f}" if len(rows) > 1 else text
