"""How much a hyperparameter matters: the best that each of its values reaches."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .study import Study, Trial

__all__ = ["Profile", "key_name", "profile", "profiles", "varied"]


@dataclass(frozen=True)
class Profile:
    """A hyperparameter of a method.

    Attributes:
        key: dotted.
        values: those that were tried, in order.
        groups: settings with each of them, the best first.
        best: the first of each group by the rule; None where none has a score.
        part: of the score that is compared: 0 is what is beyond the limit, where there is one.
        lost: values that reach no feasible setting while another one does.
        range: largest less smallest of that part among the values that can be compared.
    """

    key: str
    values: tuple[Any, ...]
    groups: tuple[tuple[Trial, ...], ...]
    best: tuple[Trial | None, ...]
    part: int
    lost: tuple[Any, ...]
    range: float

    @property
    def worst(self) -> int | None:
        """Place of the value whose best setting is the last by the rule."""
        scored = [(t.score, k) for k, t in enumerate(self.best) if t and t.score is not None]
        return max(scored)[1] if scored else None

    @property
    def top(self) -> int | None:
        """Place of the value whose best setting is the first: the winner's."""
        scored = [(t.score, k) for k, t in enumerate(self.best) if t and t.score is not None]
        return min(scored)[1] if scored else None


def key_name(key: str) -> str:
    """A hyperparameter as a reader knows it.

    >>> key_name("settings.penalty"), key_name("lr")
    ('penalty', 'lr')
    """
    return key.removeprefix("settings.")


def varied(trials: Sequence[Trial]) -> dict[str, list[Any]]:
    """Keys of which several values were tried, and these: numbers in order, others as they came."""
    found: dict[str, dict[str, Any]] = {}
    for trial in trials:
        for key, value in trial.values.items():
            found.setdefault(key, {}).setdefault(_same(value), value)
    several = {key: list(values.values()) for key, values in found.items() if len(values) > 1}
    return {k: sorted(v) if all(map(is_number, v)) else v for k, v in several.items()}


def is_number(value: object) -> bool:
    """Whether a value has a place on an axis; yes and no have none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _same(value: Any) -> str:
    """Equal for values that are: 1 and 1.0 are one value, true is another."""
    return repr(float(value)) if is_number(value) else json.dumps(value, sort_keys=True)


def profile(found: Study, trials: Sequence[Trial], key: str, values: Sequence[Any]) -> Profile:
    r"""The best setting that each value of a hyperparameter reaches, whatever the others are.

    .. math::
        p(v) = \min\{\operatorname{score}(s) : s_{\text{key}} = v\}

    where scores are compared part by part.

    Args:
        found: the sweep, for its rule.
        trials: settings of one method, the best first.
        key: the hyperparameter.
        values: its values.
    """
    by_value: dict[str, list[Trial]] = {_same(value): [] for value in values}
    for trial in trials:
        if key in trial.values:
            by_value[_same(trial.values[key])].append(trial)
    groups = tuple(tuple(group) for group in by_value.values())
    best = tuple(next((t for t in group if t.score is not None), None) for group in groups)
    met = [trial is not None and found.feasible(trial) for trial in best]
    part = 1 if any(met) else 0
    lost = tuple(v for v, good in zip(values, met, strict=True) if any(met) and not good)
    parts = [
        trial.score[part]
        for trial, good in zip(best, met, strict=True)
        if trial and trial.score and (good or not any(met))
    ]
    finite = [value for value in parts if math.isfinite(value)]
    apart = max(finite) - min(finite) if finite else 0.0
    return Profile(key, tuple(values), groups, best, part, lost, apart)


def profiles(found: Study, trials: Sequence[Trial]) -> list[Profile]:
    """All hyperparameters of a method, the one that matters most first.

    First those with values that reach nothing feasible, by the share of such values; then by range.
    """
    every = [profile(found, trials, key, values) for key, values in varied(trials).items()]
    return sorted(every, key=lambda each: (-len(each.lost) / len(each.values), -each.range))
