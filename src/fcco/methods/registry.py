"""The registry: every method with what it is for, what it needs and who proposed it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from .. import _checks
from ..report import Table
from . import tracked
from .lagrangian import Icppac, Oss
from .settings import Settings, TrackedSettings
from .switching import Ssg

Use = Literal["groups", "limits", "general"]


class Method(NamedTuple):
    """One row of the registry."""

    settings: type[Settings]  # its docstring holds the update
    use: tuple[Use, ...]
    second_pass: bool  # whether a step runs your function at earlier weights too
    when: str  # use it when ...
    reference: str

    @property
    def name(self) -> str:
        return self.settings.word

    @property
    def needs(self) -> list[str]:
        """The settings that must be given, to `constrained` where it is for limits."""
        if "outer" in _names(self.settings) and "limits" not in self.use:
            return ["outer"]
        return self.settings.missing({})

    def facts(self) -> dict[str, Any]:
        """The row as plain values."""
        return {
            "method": self.name,
            "for": list(self.use),
            "needs": self.needs,
            "without settings": "groups" if self.needs and "groups" in self.use else not self.needs,
            "second forward pass": self.second_pass,
            "use it when": self.when,
            "reference": self.reference,
            "limits per step": "some" if self.settings.sampled else "all",
        }


_ANY: tuple[Use, ...] = ("groups", "limits", "general")
_LIMITS: tuple[Use, ...] = ("limits",)

ROWS = (
    Method(tracked.Multipliers, _LIMITS, False, "there are limits: of any kind, nothing to tune",
           "Bertsekas 1982, measured units"),
    Method(tracked.Sonex, _ANY, True, "you want the paper's method", "the paper, Algorithm 1"),
    Method(tracked.Alexr2, _ANY, True, "the g_i have kinks", "the paper, Algorithm 2"),
    Method(tracked.Sonx, ("groups", "general"), True, "f must not be smoothed",
           "Hu, Zhu and Yang 2023"),
    Method(tracked.Sox, ("general",), False, "f is smooth", "Wang and Yang 2022"),
    Method(tracked.Alexr, ("limits", "general"), True, "the problem is convex",
           "Wang and Yang 2023"),
    Method(tracked.Ooa, ("groups",), False, "you compare with group DRO", "Sagawa et al. 2020"),
    Method(tracked.CtcDro, ("groups",), False, "group DRO puts all weight on the noisiest group",
           "Bartelds et al. 2026"),
    Method(tracked.Scent, ("general",), False, "f is log-mean-exp, with many blocks",
           "Wei et al. 2026"),
    Method(tracked.HingePenalty, _LIMITS, True, "you compare with SONX on a penalty",
           "Yang et al. 2025"),
    Method(tracked.SquaredHingePenalty, _LIMITS, False, "you compare with work on forgetting",
           "Li et al. 2024"),
    Method(tracked.RecursiveHinge, _LIMITS, True, "a large batch at times is cheap",
           "Liu and Xu 2025"),
    Method(Ssg, _LIMITS, False, "batches are large, their noise small", "Huang and Lin 2023"),
    Method(Oss, _LIMITS, False, "you compare with virtual queues", "Ma, Lin and Yang 2020"),
    Method(Icppac, _LIMITS, True, "you compare with a primal-dual loop",
           "Boob, Deng and Lan 2023"),
)  # fmt: skip

METHODS: dict[str, type[Settings]] = {row.name: row.settings for row in ROWS}
"""The settings of each method by its word."""

ALIASES = {
    "smoothed-hinge": "sonex", "proximal-hinge": "alexr2", "dual": "alexr", "sonx": "hinge",
    "yang2025": "hinge", "sox": "squared-hinge", "li2024": "squared-hinge",
    "liu2025": "recursive-hinge", "switching": "ssg", "queues": "oss", "conex": "icppac",
}  # fmt: skip
"""Other words for methods of `constrained`: plain words, algorithms, papers."""


def settings_of(call: str, word: str, given: Mapping[str, Any]) -> Settings:
    """Settings of a method from the keywords of a call; errors say what is wrong, and whose."""
    kind = METHODS[word]
    known = _names(kind)
    missing = kind.missing(given)
    wrong = [name for name in given if name not in known]
    if not wrong and not missing:
        return kind(**given)
    parts = []
    if wrong:
        parts.append("has no such setting: " + "; ".join(_explained(n, known) for n in wrong))
    if missing:
        needed = " and ".join(f"`{name}`" for name in missing)
        parts.append(f"needs {needed} (`multipliers`, the default for limits, needs no setting)")
    raise ValueError(f"`{call}` {'; and '.join(parts)}. Settings: {', '.join(known)}.")


def _names(kind: type[Settings]) -> list[str]:
    # Those that many methods share come last.
    shared = {field.name for field in dataclasses.fields(TrackedSettings)}
    return sorted((field.name for field in dataclasses.fields(kind)), key=shared.__contains__)


def _explained(name: str, known: Sequence[str]) -> str:
    owners = [word for word, kind in METHODS.items() if name in _names(kind)]
    whose = f"a setting of {', '.join(owners)}" if owners else _checks.meant(name, known)
    return f"`{name}` ({whose or 'unknown'})"


def table(
    use: Use | None = None,
    columns: Sequence[str] = ("method", "for", "needs", "use it when", "reference"),
) -> Table:
    """The methods, all or those for one use; `columns` are keys of `Method.facts`."""
    facts = [row.facts() for row in ROWS if use is None or use in row.use]
    return Table([list(columns), *([_cell(row[name]) for name in columns] for row in facts)])


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else ", ".join(value) or "nothing"
