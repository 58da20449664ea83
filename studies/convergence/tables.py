"""The results as Markdown tables."""

from __future__ import annotations

import math
from typing import Any

OUTPUTS = {"last": "last iterate", "average": "averaged iterate"}


def markdown(results: dict[str, Any]) -> str:
    """All tables."""
    parts = []
    for output, title in OUTPUTS.items():
        parts += [f"### Samples relative to SONEX, {title}\n", _relative(results, output), ""]
    for name, problem in results["problems"].items():
        parts.append(f"### {name}\n")
        for output, title in OUTPUTS.items():
            parts += [f"Samples, {title}:\n", _samples(problem, output), ""]
        parts += ["Exponents and cost of a step:\n", _exponents(problem), ""]
    parts += ["### SONX against SONEX\n", _ratios(results), ""]
    parts += ["### STORM on top of SONEX\n", _storm(results), ""]
    if results.get("scaling"):
        parts += ["### Batch sizes\n", _scaling(results["scaling"]), ""]
    return "\n".join(parts)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def number(value: float | None) -> str:
    """A count with a thousands separator, `-` where there is none."""
    return "-" if value is None else f"{value:,.0f}"


def relative(problem: dict[str, Any], method: str, base: str, output: str) -> tuple[float, int]:
    """The geometric mean of the ratio of samples over the accuracies that both reach; how many."""
    pair = [problem["methods"][each][output]["samples"] for each in (method, base)]
    logs = [math.log(a / b) for a, b in zip(*pair, strict=True) if a is not None and b is not None]
    return (math.exp(sum(logs) / len(logs)), len(logs)) if logs else (math.nan, 0)


def _relative(results: dict[str, Any], output: str) -> str:
    problems = results["problems"]
    methods = list(dict.fromkeys(m for each in problems.values() for m in each["methods"]))
    rows = []
    for method in methods:
        cells = [method]
        for problem in problems.values():
            base = "SONEX" if "SONEX" in problem["methods"] else "SONX"  # S4 is not for SONEX
            if method not in problem["methods"] or base not in problem["methods"]:
                cells.append("")
                continue
            ratio, number = relative(problem, method, base, output)
            cells.append(f"{ratio:.2f} ({number})" if number else "-")
        rows.append(cells)
    names = [n if "SONEX" in p["methods"] else f"{n} (to SONX)" for n, p in problems.items()]
    return _table(["method", *names], rows)


def _samples(problem: dict[str, Any], output: str) -> str:
    methods = problem["methods"]
    rows = []
    for k, level in enumerate(problem["accuracies"]):
        found = [row[output]["samples"][k] for row in methods.values()]
        known = [each for each in found if each is not None]
        if not known:
            continue
        cells = [f"**{number(f)}**" if f == min(known) else number(f) for f in found]
        rows.append([f"{level:.2g}", *cells])
    return _table(["accuracy", *(row["label"] for row in methods.values())], rows)


def _exponents(problem: dict[str, Any]) -> str:
    rows = []
    for row in problem["methods"].values():
        cells = [row["label"]]
        for output in ("last", "average"):
            value, error = row[output]["exponent"], row[output]["exponent_se"]
            cells.append("-" if value is None else f"{value} ± {error}")
        seconds = row["seconds_per_step"]
        last = [(k, s) for k, s in enumerate(row["last"]["steps"]) if s is not None]
        cells.append("-" if seconds is None else f"{1000 * seconds:.2f}")
        if seconds is None or not last:
            cells.append("-")
        else:
            k, steps = last[-1]
            cells.append(f"{seconds * steps:.2f} s to {problem['accuracies'][k]:.2g}")
        rows.append(cells)
    head = ["method", "exponent, last", "exponent, averaged", "ms per step", "seconds, last"]
    return _table(head, rows)


def _summary(found: dict[str, Any]) -> list[str]:
    if not found["compared"]:
        return ["0", "-", "-", "-", "-"]
    ratios = [row["ratio"] for row in found["rows"]]
    return [
        str(found["compared"]),
        f"{found['geometric_mean']:.2f}",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
        str(found["worse"]),
        str(found["worse_by_two_se"]),
    ]


_HEAD = ["accuracies", "mean ratio", "range", "below 1", "by 2 s.e."]


def _ratios(results: dict[str, Any]) -> str:
    rows = [
        [name, output, *_summary(found[output])]
        for name, found in results["sonx_over_sonex"].items()
        for output in ("last", "average")
    ]
    table = _table(["problem", "output", *_HEAD], rows)
    budgets = results["sonx_over_sonex_by_settings"]
    counts = sorted({count for row in budgets.values() for count in row}, key=int)
    more = [
        [name, *("-" if row.get(c) is None else f"{row[c]:.2f}" for c in counts)]
        for name, row in budgets.items()
    ]
    text = "Mean ratio (last iterate) when only the first so many settings may be used:"
    return f"{table}\n\n{text}\n\n{_table(['problem', *counts], more)}"


def _storm(results: dict[str, Any]) -> str:
    rows = [
        [name, output, *_summary(found[output])]
        for name, found in results["storm_over_sonex"].items()
        for output in ("last", "average")
    ]
    return _table(["problem", "output", *_HEAD], rows)


def _scaling(scaling: dict[str, Any]) -> str:
    rows = []
    for name, methods in scaling.items():
        for method, fits in methods.items():
            cells = [name, method]
            for batch in ("B1", "B2"):
                found = fits[batch]
                value = found["exponent"]
                if value is None:
                    cells.append("-")
                    continue
                levels = [row["accuracy"] for row in found["rows"]]
                where = f"{len(levels)} accuracies, {min(levels):.2g} to {max(levels):.2g}"
                cells.append(f"{value} ± {found['spread']} ({where})")
            rows.append(cells)
    return _table(["problem", "method", "exponent of B1", "exponent of B2"], rows)
