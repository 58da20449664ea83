"""The report: columns, plots, the rule, who learned without forgetting, and what not to believe."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...prose import paragraphs
from ...task import Metric, Page, Panel, Row, Rule
from ..verdict import FinalRows, glossary, keyed
from .config import Continual

__all__ = ["next_steps", "page", "rule", "score", "verdict", "warnings"]

PAGE = "continual/page.j2"
REFERENCES = ("finetune",)
"""Methods that do not try to keep anything."""
SMALL = 50
"""A test class with fewer images says little: one of them is more than two points."""
NEAR = 0.01
"""A logistic loss that rose by no more than this counts as kept, and a gap below it as noise."""
CHANCE = 0.05
"""A mean accuracy of the classes no further above that of guessing is that of guessing."""
_ROUNDING = 1e-9

_NAMES = {"test": "test", "train": "train", "val": "validation"}
_COLUMNS: tuple[tuple[str, str, Any, int, str], ...] = (  # the last: parts with a headline column
    ("target_gain", "gain", "higher", 3, "test val"),
    ("excess", "forgotten beyond limit", "lower", 4, "train"),
    ("forgetting", "forgetting", "lower", 3, "test train"),
    ("kept", "kept", "higher", 2, "train"),
    ("retained", "retained", "higher", 2, "test"),
    ("violation", "worst constraint", "lower", 4, "train"),
    ("target_accuracy", "target accuracy", "higher", 3, ""),
    ("target_loss", "target loss", "lower", 3, ""),
    ("protected_accuracy", "protected", "higher", 3, ""),
    ("protected_change", "change of protected", "higher", 3, ""),
    ("accuracy", "accuracy", "higher", 3, ""),
    ("forgotten_images", "images forgotten", "lower", 1, ""),
)
_ENDING: tuple[tuple[str, str, Any, int], ...] = (
    ("penalty", "rho", "none", 2),
    ("seconds", "seconds", "none", 1),
    ("objective", "contrastive loss", "lower", 4),
    ("tracking_error", "tracking error", "lower", 4),
    ("kkt_stationarity", "KKT stationarity", "lower", 4),
    ("kkt_feasibility", "KKT feasibility", "lower", 4),
    ("kkt_complementarity", "KKT complementarity", "lower", 4),
    ("kkt_best_stationarity", "KKT stationarity, best multipliers", "lower", 4),
    ("kkt_best_complementarity", "KKT complementarity, best multipliers", "lower", 4),
    ("samples_per_second", "samples a second", "none", 0),
)
_PROTECTED = ("constraints", "zero_one", "test_zero_one", "multipliers", "best_multipliers")


def points(share: float) -> str:
    """A difference of accuracies in percentage points.

    >>> points(0.0123), points(0.01), points(-0.5), points(-0.0001)
    ('1.2 points', '1 point', '-50 points', '0 points')
    """
    number = _bare(share)
    return f"{number} point{'' if number in ('1', '-1') else 's'}"


def _bare(share: float) -> str:
    text = f"{100 * share:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def listed(names: Sequence[str]) -> str:
    """Names in a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _words(block: str, **values: Any) -> tuple[str, ...]:
    return paragraphs(PAGE, block, points=points, bare=_bare, listed=listed, **values)


def _allowed(config: Continual) -> str:
    """What a protected class may lose on training data, in words."""
    if config.forget_limit <= 0:
        return "one image"
    return f"the larger of {points(config.forget_limit)} and one image"


# The rule.


def score(config: Continual, row: Row) -> tuple[float, ...]:
    """The smaller the better: what is forgotten, the target's accuracy, the largest constraint.

    Protected classes are judged on training data, where the constraints live, the target on
    validation data; test figures are never looked at.
    """
    beyond = row["train_excess"]
    forgotten = beyond if beyond > _ROUNDING else 0.0
    return forgotten, -row["val_target_accuracy"], row["train_violation"]


def rule(config: Continual) -> Rule:
    """What is forgotten beyond the limit first, then the accuracy of the target."""
    (text,) = _words("rule", config=config, allowed=_allowed(config))
    return Rule(
        text,
        functools.partial(score, config),
        objective="test_target_gain",
        constraint="train_excess",
        limit=0.0,
        limited=True,
    )


# The verdict.


def _method_of(config: Continual, name: str) -> str:
    """The method behind a name of the tables, such as `sonex` behind `sonex-rho-10@3`."""
    family = name if name in config.methods else name.rpartition("@")[0]
    return config.methods[family].method if family in config.methods else name


def _penalty_of(config: Continual, name: str, rows: Sequence[Row]) -> float | None:
    """The weight rho of a method's penalty: of its runs, or of the config."""
    found = {row["penalty"] for row in rows if "penalty" in row}
    if len(found) == 1:
        return float(found.pop())
    family = name if name in config.methods else name.rpartition("@")[0]
    if found or family not in config.methods:
        return None
    given = config.methods[family].settings.get("penalty")
    return None if given is None else float(given)


class _Points(FinalRows):
    """Final rows whose figures are said in percentage points."""

    def gain(self, name: str, key: str = "test_target_gain") -> str:
        """Mean and, with several runs, standard deviation."""
        mean, rows = self.mean(name, key), self.rows[name]
        if len(rows) == 1:
            return points(mean)
        squares = math.fsum((row[key] - mean) ** 2 for row in rows)
        return f"{_bare(mean)} ± {_bare(math.sqrt(squares / (len(rows) - 1)))} points"

    def worst(self, name: str, part: str) -> str:
        """The largest accuracy that a protected class lost in any run; 0 where all improved."""
        return points(max(0.0, *(row[f"{part}_forgetting"] for row in self.rows[name])))

    def kept(self, name: str) -> int:
        """Runs in which no protected class lost more than is allowed on training data."""
        return sum(row["train_kept"] == 1 for row in self.rows[name])

    def retained(self, name: str, part: str) -> int:
        """Runs in which no protected class lost any accuracy."""
        return sum(row[f"{part}_retained"] == 1 for row in self.rows[name])


def _outcome(config: Continual, methods: Mapping[str, list[Row]]) -> dict[str, Any]:
    """What the sentences of the verdict are made from: who is judged, and in which order.

    Of each method one setting competes, the one that the rule prefers: test data choose none.
    Methods that keep every protected class in every run come first, by their gain on test data.
    """
    final = _Points(config, methods, "objective")
    names = [
        name
        for name in final.rows
        if name not in final.early and _method_of(config, name) not in REFERENCES
    ]

    def mean_score(name: str) -> tuple[float, ...]:
        rows = final.rows[name]
        scores = zip(*(score(config, row) for row in rows), strict=True)
        return tuple(math.fsum(column) / len(rows) for column in scores)

    preferred: dict[str, str] = {}
    for name in sorted(names, key=mean_score):
        preferred.setdefault(_method_of(config, name), name)
    keepers = [name for name in names if final.kept(name) == len(final.rows[name])]
    chosen = [name for name in preferred.values() if name in keepers]
    order = sorted(chosen, key=lambda name: -final.mean(name, "test_target_gain"))
    best = order[0] if order else min(names, key=mean_score, default=None)
    duel = None
    if "sonex" in preferred and "sox" in preferred:
        ours, theirs = preferred["sonex"], preferred["sox"]
        rho = [_penalty_of(config, name, final.rows[name]) for name in (ours, theirs)]
        gap = final.difference(ours, theirs, "test_target_gain")
        duel = {"ours": ours, "theirs": theirs, "gap": gap, "rho": rho}
    return {
        "config": config, "final": final, "allowed": _allowed(config), "names": names,
        "keepers": keepers, "order": order, "best": best, "duel": duel,
        "behind": final.difference(order[0], order[1], "test_target_gain") if order[1:] else None,
        "shown": [name for name in names if name in preferred.values()],
        "free": [
            name
            for name in final.rows
            if _method_of(config, name) in REFERENCES and name not in final.early
        ],
    }  # fmt: skip


def verdict(config: Continual, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
    """Who learns most among those that forget nothing, smoothed against squared hinge, the rest."""
    return _words("verdict", **_outcome(config, methods))


def next_steps(config: Continual, methods: Mapping[str, list[Row]]) -> tuple[str, ...]:
    """What to try next, by the outcome."""
    return _words("next_steps", **_outcome(config, methods))


# Warnings.


def warnings(config: Continual, row: Row) -> tuple[str, ...]:
    """Figures that mean less than they seem to."""
    lost, constraints = row["zero_one"], row["constraints"]
    gain, error = row["train_target_gain"], row.get("tracking_error", 0.0)
    counts = row.get("test_counts", ())
    return _words(
        "warnings",
        config=config,
        row=row,
        guessing=row["train_accuracy"] <= 1 / len(config.classes) + CHANCE,
        still=gain == 0 and not any(lost) and max(map(abs, constraints)) < 1e-3,
        error=error if error > max(NEAR, *map(abs, constraints)) else 0.0,
        near=NEAR if row["train_violation"] <= NEAR and row["train_kept"] < 1 else 0.0,
        worst=max(range(len(lost)), key=lost.__getitem__),
        capped=_capped(config, row, error),
        smallest=min(range(len(counts)), key=counts.__getitem__)
        if counts and min(counts) < SMALL
        else None,
    )


def _capped(config: Continual, row: Row, error: float) -> list[str]:
    """Classes that are forgotten although their multiplier is the most that the penalty can pay."""
    if "penalty" not in row or "multipliers" not in row:
        return []
    cap, multipliers = row["penalty"] / len(config.protected), row["multipliers"]
    if max(multipliers) > (1 + 1e-3) * cap:  # a squared hinge has no such limit
        return []
    return [
        name
        for name, value, own in zip(config.protected, row["constraints"], multipliers, strict=True)
        if own >= (1 - 1e-3) * cap and value > max(NEAR, error)
    ]


# The page.


def page(config: Continual) -> Page:
    """What a reader sees, in order."""
    (title,) = _words("title", config=config)
    return Page(
        title=title,
        question=_words("question", config=config, allowed=_allowed(config), rule=rule(config)),
        metrics=tuple(sorted(_metrics(config), key=lambda metric: not metric.headline)),
        panels=tuple(_panels(config)),
        entries={
            **dict.fromkeys(_PROTECTED, config.protected),
            "test_accuracies": config.classes,
        },
        references=tuple(
            name for name, method in config.methods.items() if method.method in REFERENCES
        ),
        glossary=glossary(PAGE, config.methods),
    )


def _metrics(config: Continual) -> Iterator[Metric]:
    meanings = keyed(PAGE, "metrics", config=config, allowed=_allowed(config))
    for part, name in _NAMES.items():
        for key, label, better, digits, headline in _COLUMNS:
            shown = part in headline.split()
            whole = f"{label}, {name}"
            yield Metric(f"{part}_{key}", whole, better, digits, shown, meanings[key])
    for key, label, better, digits in _ENDING:
        shown = key in ("penalty", "seconds")
        yield Metric(key, label, better, digits, shown, meanings[key])


def _panels(config: Continual) -> Iterator[Panel]:
    target, limit = config.target, config.forget_limit
    gain, lost = f"gain of {target}", "largest loss of accuracy"
    for part, title in (
        ("train", "What is learned, what is forgotten: up and left"),
        ("test", "The same on test data"),
    ):
        yield Panel(
            "tradeoff",
            y="test_target_gain",
            x=f"{part}_forgetting",
            title=title,
            label=f"{gain}, test",
            x_label=f"{lost} of a protected class, {part}",
            reference=0.0,
            x_reference=limit,
        )
    for part in ("train", "test"):
        title = f"Accuracy gained on {target}, {part}"
        yield Panel("curve", y=f"{part}_target_gain", title=title, label=gain)
    for part in ("train", "test"):
        title = f"Largest accuracy that a protected class lost, {part}"
        yield Panel("curve", y=f"{part}_forgetting", title=title, label=lost, reference=limit)
    yield Panel(
        "curve",
        y="train_violation",
        title="Worst constraint on training data: at most 0 is asked",
        label="largest rise of a loss",
        reference=0.0,
    )
    title = f"Contrastive loss of {target}, all pairs"
    yield Panel("curve", y="objective", title=title, label="loss")
    yield Panel(
        "change",
        y="test_accuracies",
        title="Accuracy of every class before and after (test data)",
        label="test accuracy by class",
    )
    for key, name in (("zero_one", "training"), ("test_zero_one", "test")):
        yield Panel(
            "dots",
            y=key,
            title=f"Accuracy lost by every protected class on {name} data",
            label=f"accuracy lost by class, {name} data",
            reference=0.0,
        )
    title = "Accuracy lost by every protected class (train), by method"
    yield Panel("family", y="zero_one", title=title, label="accuracy lost", reference=0.0)
    title = "Rise of every protected class's loss (train), by method"
    yield Panel("family", y="constraints", title=title, label="loss - old loss", reference=0.0)
    title = "Multipliers: the price of each class"
    yield Panel("family", y="multipliers", title=title, label="multiplier")
