"""Which figures count: who learned the target without forgetting, and what not to believe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...stats import spread
from ...task import Row
from .cautions import warnings as warnings
from .config import Continual
from .told import listed, points

__all__ = [
    "REFERENCES",
    "allowed",
    "keeps",
    "penalty_of",
    "references",
    "score",
    "score_rule",
    "verdict",
    "warnings",
    "word_of",
]

REFERENCES = ("finetune",)
"""Methods that do not try to keep anything."""
_ROUNDING = 1e-9

Rows = Mapping[str, list[Row]]


def word_of(config: Continual, name: str) -> str:
    """The method behind a name of the tables, such as `sonex` behind `sonex-rho-10`."""
    family = name if name in config.methods else name.rpartition("@")[0]
    return config.methods[family].method if family in config.methods else name


def references(config: Continual) -> tuple[str, ...]:
    """The methods of a config that solve another problem: they forget what they like."""
    return tuple(name for name, each in config.methods.items() if each.method in REFERENCES)


def allowed(config: Continual) -> str:
    """What a protected class may lose on training data, in words."""
    if config.forget_limit <= 0:
        return "one image"
    return f"the larger of {points(config.forget_limit)} and one image"


def score(config: Continual, row: Row) -> tuple[float, ...]:
    """The smaller the better: what is forgotten, the target's accuracy, the largest constraint.

    Protected classes are judged on training data, where the constraints live, the target on
    validation data; test figures are never looked at.
    """
    beyond = row["train_excess"]
    forgotten = beyond if beyond > _ROUNDING else 0.0
    return forgotten, -row["val_target_accuracy"], row["train_violation"]


def score_rule(config: Continual) -> str:
    """The rule of `score` in words."""
    return (
        f"no protected class may lose more accuracy on training data than {allowed(config)} (by "
        f"how much one does counts first), then the highest accuracy of {config.target} on "
        "validation data, then the lowest of the largest constraint values on training data"
    )


def keeps(rows: Sequence[Row]) -> bool:
    """Whether every protected class is kept on training data in every run."""
    return all(row["train_kept"] == 1 for row in rows)


def penalty_of(config: Continual, name: str, rows: Sequence[Row]) -> float | None:
    """The weight rho of a method's penalty: of its runs, or of the config."""
    found = {row["penalty"] for row in rows if "penalty" in row}
    if len(found) == 1:
        return float(found.pop())
    family = name if name in config.methods else name.rpartition("@")[0]
    if found or family not in config.methods:
        return None
    given = config.methods[family].settings.get("penalty")
    return None if given is None else float(given)


def verdict(config: Continual, methods: Rows) -> tuple[str, ...]:
    """Who learns most among those that forget nothing, smoothed against squared hinge, the rest."""
    rows = {name: own for name, own in methods.items() if own}
    early = _ended_early(rows)
    candidates = {
        name: own
        for name, own in rows.items()
        if word_of(config, name) not in REFERENCES and name not in early
    }
    best = _best_by_word(config, candidates)
    lines = _first(config, candidates, list(best.values()))
    lines += _duel(config, candidates, best)
    lines += _retention(candidates, list(best.values()))
    lines += [
        line
        for name, own in rows.items()
        if word_of(config, name) in REFERENCES
        for line in _plain(config, name, own, name in early)
    ]
    if early:
        one = len(early) == 1
        stand = "has runs that ended early and is" if one else "have runs that ended early and are"
        lines.append(f"{listed(early)} {stand} no candidate{'' if one else 's'}.")
    lines.append(f"The rule by which settings are chosen: {score_rule(config)}.")
    return tuple(lines)


def _first(config: Continual, rows: Rows, preferred: Sequence[str]) -> list[str]:
    """The winner on test data, or who comes nearest to keeping what is to be kept.

    Of each method one setting competes, the one that the rule prefers: test data choose none.
    """
    if not rows:
        return ["No method that tries to keep the protected classes has finished."]
    keepers = [name for name in rows if keeps(rows[name])]
    if not keepers:
        best = min(rows, key=lambda name: _mean_score(config, rows[name]))
        own = rows[best]
        number = sum(row["train_kept"] == 1 for row in own)
        return [
            f"No method keeps every protected class on training data (losing no more than "
            f"{allowed(config)}) in every seed. {best} comes nearest: it does in {number} of "
            f"{len(own)} runs, a protected class loses up to {_worst(own, 'train')} there, and "
            f"{config.target} gains {_figure(own, 'test_target_gain')} on test data."
        ]
    # The rule looks at what is kept first, so it prefers a keeper where a method has one.
    chosen = [name for name in keepers if name in preferred] or keepers
    best = max(chosen, key=lambda name: _mean(rows[name], "test_target_gain"))
    own = rows[best]
    seeds = f" over {len(own)} seeds" if len(own) > 1 else ""
    text = f"{best} learns most without forgetting: it gains {_figure(own, 'test_target_gain')} of "
    text += f"accuracy on {config.target}{seeds}, on test data. "
    one = len(keepers) == 1
    who = "the only method" if one else f"one of {len(keepers)} methods"
    text += f"It is {who} (of {len(rows)})"
    text += f" that keep{'s' * one} every protected class: no run loses more of one on training "
    text += f"data than {allowed(config)}. In its own runs a protected class loses at most "
    text += f"{_worst(own, 'train')} on training data and {_worst(own, 'test')} on test data."
    lines = [text]
    if _mean(own, "test_target_gain") <= 0:
        lines.append("But that is no gain: the methods that forget nothing learn nothing either.")
    return lines


def _duel(config: Continual, rows: Rows, best: Mapping[str, str]) -> list[str]:
    """The smoothed hinge (SONEX) against the squared hinge (SOX), seed by seed."""
    if "sonex" not in best or "sox" not in best:
        return []
    ours, theirs = best["sonex"], best["sox"]
    gaps = _differences(config, rows[ours], rows[theirs], "test_target_gain")
    mean, deviation = spread(gaps)
    more = "more" if mean >= 0 else "less"
    text = f"Smoothed against squared hinge: {ours} gains {_bare(abs(mean))}"
    if len(gaps) < 2:
        text += f" points {more} than {theirs} on test data"
        text += "; without several seeds of both, that may be chance."
    else:
        agree = sum(gap * mean > 0 for gap in gaps)
        text += f" ± {_bare(deviation)} points {more} than {theirs} on test data, seed by seed "
        text += f"({agree} of {len(gaps)} seeds agree)"
        told = abs(mean) > deviation
        text += ": more than the spread over seeds." if told else ": within the spread over seeds."
    text += (
        f" The most that a protected class loses on training data is {_worst(rows[ours], 'train')} "
        f"against {_worst(rows[theirs], 'train')}, on test data {_worst(rows[ours], 'test')} "
        f"against {_worst(rows[theirs], 'test')} (largest over classes and seeds)."
    )
    return [text + _penalties(*(penalty_of(config, name, rows[name]) for name in (ours, theirs)))]


def _penalties(ours: float | None, theirs: float | None) -> str:
    if not ours or not theirs:
        return ""
    ratio = theirs / ours
    text = f" The weights rho of their penalties are {ours:g} and {theirs:g}"
    if ratio == 1:
        return f"{text}."
    more = f"{ratio:.3g} times smaller" if ratio > 1 else f"{1 / ratio:.3g} times larger"
    return f"{text}: that of the smoothed hinge is {more}."


def _retention(rows: Rows, names: Sequence[str]) -> list[str]:
    """The retention ratio of the best setting of each method."""
    told = []
    for name in (name for name in rows if name in names):
        ratios = (
            f"{sum(row[f'{part}_retained'] == 1 for row in rows[name])} of {len(rows[name])}"
            for part in ("train", "test")
        )
        told.append(f"{name} {' and '.join(ratios)}")
    return [
        "Runs in which every protected class keeps all of its accuracy, on training data and on "
        f"test data: {'; '.join(told)}."
    ] * bool(told)


def _plain(config: Continual, name: str, rows: list[Row], early: bool) -> list[str]:
    """What fine-tuning without any care gains and forgets."""
    if early:
        return []
    text = (
        f"Plain fine-tuning ({name}) gains {_figure(rows, 'test_target_gain')} on {config.target} "
        "(test data)"
    )
    lost = f"{_figure(rows, 'train_forgetting')} on training data and "
    lost += f"{_figure(rows, 'test_forgetting')} on test data"
    if keeps(rows):
        return [
            f"{text} and forgets nothing (the class that loses most: {lost}), so there is nothing "
            "to protect here."
        ]
    return [f"{text} and forgets: the protected class that loses most loses {lost}."]


def _ended_early(rows: Rows) -> list[str]:
    """Methods with a run that diverged: its last figures are those of a shorter training."""
    last = max((row.get("epoch", 0) for own in rows.values() for row in own), default=0)
    return [
        name
        for name, own in rows.items()
        if any(row.get("epoch", last) < last or not math.isfinite(row["objective"]) for row in own)
    ]


def _best_by_word(config: Continual, rows: Rows) -> dict[str, str]:
    """Of each method the setting that the rule of `score` prefers: test data must not choose."""
    found: dict[str, str] = {}
    for name in sorted(rows, key=lambda name: _mean_score(config, rows[name])):
        found.setdefault(word_of(config, name), name)
    return found


def _mean_score(config: Continual, rows: Sequence[Row]) -> tuple[float, ...]:
    scores = zip(*(score(config, row) for row in rows), strict=True)
    return tuple(math.fsum(column) / len(rows) for column in scores)


def _differences(
    config: Continual, left: Sequence[Row], right: Sequence[Row], key: str
) -> list[float]:
    """Seed by seed; without all seeds of both, the difference of the means alone."""
    if len(left) == len(right) == len(config.seeds):
        return [a[key] - b[key] for a, b in zip(left, right, strict=True)]
    return [_mean(left, key) - _mean(right, key)]


def _mean(rows: Sequence[Row], key: str) -> float:
    return math.fsum(row[key] for row in rows) / len(rows)


def _worst(rows: Sequence[Row], part: str) -> str:
    """The largest accuracy that a protected class lost in any run; 0 where all became better."""
    return points(max(0.0, *(row[f"{part}_forgetting"] for row in rows)))


def _figure(rows: Sequence[Row], key: str) -> str:
    """Mean and deviation over runs, in points."""
    mean, deviation = spread([row[key] for row in rows])
    return f"{_bare(mean)} ± {_bare(deviation)} points" if len(rows) > 1 else points(mean)


def _bare(value: float) -> str:
    return points(value).split()[0]
