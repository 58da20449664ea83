"""Numbers and names as a reader wants them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

__all__ = ["duration", "fixed", "plain", "seeds", "setting", "title"]

_MINUS = "\N{MINUS SIGN}"
_NAMES = {"numpy": "NumPy", "torch": "PyTorch", "fcco": "fcco", "lr": "lr", "start": "Started"}


def fixed(value: float, digits: int) -> str:
    """A figure with that many digits after the point; what is missing is a dash.

    >>> fixed(-0.01234, 3), fixed(float("nan"), 3), fixed(3.2e9, 2)
    ('−0.012', 'n/a', '3.2e+09')
    """
    if math.isnan(value):
        return "n/a"
    if math.isinf(value):
        return "∞" if value > 0 else f"{_MINUS}∞"
    text = f"{value:.3g}" if abs(value) >= 1e7 else f"{value:.{digits}f}"
    if float(text) == 0:
        text = text.removeprefix("-")
    return text.replace("-", _MINUS) if text.startswith("-") else text


def plain(value: float, digits: int = 3) -> str:
    """A figure of unknown size, with that many digits that mean something.

    >>> plain(0.017), plain(123.4), plain(0.0), plain(-9.31e-5, 2)
    ('0.0170', '123', '0', '−9.3e−5')
    """
    if not math.isfinite(value) or value == 0:
        return fixed(value, 0)
    text = f"{value:#.{digits}g}".removesuffix(".")
    if "e" in text:
        head, _, power = text.partition("e")
        text = f"{head.removesuffix('.')}e{int(power)}"
    return text.replace("-", _MINUS)


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
    """A label out of a key, where no one has given a better one.

    >>> title("kkt_stationarity"), title("test_auc")
    ('KKT stationarity', 'Test AUC')
    """
    text = re.sub(r"\bval\b", "validation", key.replace("_", " ").strip())
    text = re.sub(r"\b(auc|kkt|tpr|fpr|roc|cvar|cpu|gpu)\b", lambda word: word[0].upper(), text)
    return _NAMES.get(text) or text[:1].upper() + text[1:]


def seeds(some: Sequence[int], count: int) -> str:
    """Which seeds: all of them, or their numbers.

    >>> seeds([0, 1], 2), seeds([3], 5), seeds([0, 2], 5)
    ('all 2 seeds', 'seed 3', 'seeds 0, 2')
    """
    if len(some) == count > 1:
        return f"all {count} seeds"
    return ("seed " if len(some) == 1 else "seeds ") + ", ".join(map(str, some))


def duration(seconds: float) -> str:
    """A time.

    >>> duration(3.21), duration(187), duration(7260)
    ('3.2 s', '3 min 7 s', '2 h 1 min')
    """
    if not math.isfinite(seconds):
        return "n/a"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
