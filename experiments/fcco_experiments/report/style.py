"""Colours, dashes and markers of methods (one map for all pages), and words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

TOKENS: dict[str, tuple[str, str]] = {
    "page": ("#fdfdfc", "#15181b"),
    "panel": ("#f3f4f4", "#1e2226"),
    "ink": ("#1c2024", "#e8eaec"),
    "muted": ("#565e67", "#a9b1ba"),
    "rule": ("#dadde1", "#343a41"),
    "grid": ("#e4e6e9", "#2b3036"),
    "limit": ("#3a4047", "#d5d9dd"),
    "batch": ("#b05a00", "#f5a742"),
    "link": ("#0a5a9c", "#7cc0f5"),
    "warning": ("#6a3403", "#f7d79b"),
    "warning-page": ("#fff3d9", "#33270f"),
    "warning-rule": ("#c26a08", "#e2a233"),
    "best": ("#0c5138", "#8fe3bf"),
    "best-page": ("#e2f3ea", "#14372b"),
    "broken": ("#8c1b13", "#ffb9ae"),
    "broken-page": ("#fdebe8", "#43201c"),
}
"""Colours of the page, light and dark; text on its ground has a contrast of at least 4.5."""

COLOURS: tuple[tuple[str, str], ...] = (
    ("#1769c0", "#7cc4ff"),
    ("#b34400", "#e88030"),
    ("#1f8060", "#5cf0a0"),
    ("#9c2f96", "#f0559a"),
    ("#2b323b", "#d8d8d0"),
    ("#5a55e0", "#9a86ff"),
    ("#5e1a0c", "#b08a6a"),
    ("#8f6d00", "#ffdc30"),
)
"""Colours of methods, light and dark; the first five differ for each kind of colour blindness."""

_WORDS = {
    "fcco": 0, "automatic": 0, "sonex": 0, "alexr2": 1, "sox": 2, "sonx": 3, "erm": 4,
    "finetune": 4, "unconstrained": 4, "ooa": 5, "icppac": 5, "uniform": 6, "weighted": 6, "ssg": 6,
    "msvr": 7, "replay": 7, "alexr": 1, "liu-xu": 7, "oss": 3,
    # Other libraries; none of them is on a page with the method whose colour it shares.
    "libauc": 1, "hct": 2, "fairlearn": 3, "cooper": 7,
}  # fmt: skip
"""The colour of each method word on every page; `fcco` is the library with its own settings."""

DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (7, 2, 1.5, 2), (3, 1.5), (9, 3))
SHAPES: dict[str, str] = {
    "o": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "s": "M-3.6-3.6h7.2v7.2h-7.2z",
    "^": "M0-4.6L4.4 3.6H-4.4z",
    "D": "M0-5L5 0L0 5L-5 0z",
    "v": "M0 4.6L4.4-3.6H-4.4z",
    "P": "M-1.6-4.6h3.2v3h3v3.2h-3v3h-3.2v-3h-3v-3.2h3z",
    "p": "M0-4.8L4.6-1.5L2.8 3.9H-2.8L-4.6-1.5z",
    "<": "M-4.6 0L3.6-4.4V4.4z",
    ">": "M4.6 0L-3.6-4.4V4.4z",
    "h": "M0-4.8L4.2-2.4V2.4L0 4.8L-4.2 2.4V-2.4z",
}
"""matplotlib's markers, and their outlines around (0, 0) for the swatches of the page."""


@dataclass(frozen=True)
class Style:
    """How a method looks."""

    number: int  # of its colour in `COLOURS`
    dash: tuple[float, ...]  # lengths on and off; empty for a solid line
    marker: str  # matplotlib's letter

    @property
    def colour(self) -> str:
        """In the light palette; the page replaces it with a CSS variable."""
        return COLOURS[self.number][0]


def colour(word: str) -> str:
    """The colour of a method word in the light palette.

    >>> colour("sonex") == colour("fcco") == COLOURS[0][0]
    True
    """
    return COLOURS[_WORDS[word]][0]


def styles(words: Mapping[str, str]) -> dict[str, Style]:
    """A style for each name on a page, by its method word.

    A word has the same colour on every page; names with the same word (SONEX with two optimizers)
    share it and differ in dash and marker. In an ablation, where all names have one word, colours
    go by position.

    >>> [style.number for style in styles({"SONEX": "sonex", "SOX": "sox"}).values()]
    [0, 2]
    """
    ablation = len(words) > 1 and len(set(words.values())) == 1
    taken = {_WORDS[word] for word in words.values() if word in _WORDS}
    free = [k for k in range(len(COLOURS)) if k not in taken] or list(range(len(COLOURS)))
    strange = [word for word in dict.fromkeys(words.values()) if word not in _WORDS]
    numbers = _WORDS | {word: free[k % len(free)] for k, word in enumerate(strange)}
    markers = tuple(SHAPES)
    seen: Counter[int] = Counter()
    result = {}
    for place, (name, word) in enumerate(words.items()):
        number = place % len(COLOURS) if ablation else numbers[word]
        k = place if ablation else number + seen[number]
        result[name] = Style(number, DASHES[k % len(DASHES)], markers[k % len(markers)])
        seen[number] += 1
    return result


_NAMES = {"numpy": "NumPy", "torch": "PyTorch", "fcco": "fcco", "lr": "lr", "start": "Started"}


def setting(value: object) -> str:
    """A value of a config."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {setting(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(setting, value)) or "none"
    return str(value)


def title(key: str) -> str:
    """A label out of a key that has none.

    >>> title("kkt_stationarity"), title("test_auc")
    ('KKT stationarity', 'Test AUC')
    """
    text = re.sub(r"\bval\b", "validation", key.replace("_", " ").strip())
    text = re.sub(r"\b(auc|kkt|tpr|fpr|roc|cvar|cpu|gpu)\b", lambda word: word[0].upper(), text)
    return _NAMES.get(text) or text[:1].upper() + text[1:]


def count(number: int, thing: str) -> str:
    """A number of things.

    >>> count(1, "run"), count(1200, "run")
    ('1 run', '1,200 runs')
    """
    return f"{number:,} {thing}" + "s" * (number != 1)
