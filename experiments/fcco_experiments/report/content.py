"""What stands on the page, as plain data for the template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import stats
from ..store import Comparison, SavedRun
from ..task import Page, Task
from . import pictures, tables
from .facts import chosen, experiment_facts, files, machine_facts, sweep
from .meanings import meanings
from .notices import notices
from .palette import METHODS, SHAPES, TOKENS, family_of, styles
from .runs import by_method, entry_names, finished
from .words import title

__all__ = ["content"]

Runs = Mapping[str, Sequence[SavedRun]]
_MULTIPLIERS = "multipliers"
_BY_ENTRY = ("by_entry", "families", "entries")
_MANY = 16
"""More methods than this (settings of a sweep) are not drawn one by one."""


def content(comparison: Comparison, task: Task, config: Any) -> dict[str, Any]:
    """Everything the template asks for."""
    page, meta = task.page(config), comparison.meta
    everything = by_method(comparison)
    runs = chosen(comparison, everything)
    look = styles(everything)
    values = stats.table(comparison, page.metrics)
    final = {name: [run.figures for run in finished(group)] for name, group in runs.items()}
    final = {name: [row for row in rows if row] for name, rows in final.items()}
    final = {name: rows for name, rows in final.items() if rows}
    top = [metric for metric in page.metrics if metric.headline] or list(page.metrics)
    ends = tables.end_keys(runs)
    steady = [metric for metric in page.metrics if metric.key not in ends]
    drawn = runs if len(runs) <= _MANY else {}
    found = {
        "tradeoffs": pictures.tradeoffs(everything, page, look),
        "curves": pictures.curves(drawn, page, look),
        "families": pictures.families(drawn, page, look),
        "by_entry": pictures.by_entry(drawn, page, look),
        "entries": _entries(drawn, page),
    }
    limited = any(p.reference is not None for p in page.panels if p.kind == "family")
    entry_title = "Every constraint by itself" if limited else "One by one"
    several = any(len(finished(group)) > 1 for group in runs.values())
    many = len(everything) > _MANY
    return {
        **found,
        "title": page.title,
        "kicker": f"fcco experiment · {meta.get('task', task.name)}",
        "summary": _summary(everything, meta),
        "contents": _contents(found, entry_title),
        "entry_title": entry_title,
        "notices": notices(task, config, everything, list(meta.get("seeds", ()))),
        "question": page.question,
        "verdict": task.verdict(config, final) if final else ("No run has finished yet.",),
        "headline": tables.scores(
            runs, values, top, "Final figures of each method", True, page.references
        ),
        "table_note": _table_note(
            runs, several, str(sweep(comparison).get("rule", "")), page.references
        ),
        "meanings": meanings(top),
        "all_meanings": meanings(page.metrics),
        "band_note": "Lines are means over seeds, bands go from the smallest to the largest seed."
        if several
        else "One seed, so there is no band.",
        "full": tables.scores(
            everything,
            values,
            steady,
            "All figures of the final evaluation",
            many,
            page.references,
        ),
        "ending": tables.ending(runs, page.metrics, "Figures at the end of training"),
        "many": many,
        "settings": tables.settings(everything, "What each method ran with"),
        "experiment": experiment_facts(meta),
        "listing": tables.listing(everything, "Runs of each method"),
        "machine": machine_facts(comparison.runs),
        "command": str(meta.get("command") or ""),
        "files": files(comparison),
        "footer": f"Written by fcco {meta.get('fcco', '')}".strip() + " from saved runs.",
        "looks": look,
        "shapes": SHAPES,
        "tokens": TOKENS,
        "colours": METHODS,
    }


def _contents(found: Mapping[str, Sequence[Any]], entry_title: str) -> list[tuple[str, str]]:
    """Anchors and names of the sections that are there."""
    return [
        ("question", "What was asked"),
        ("winner", "Who won"),
        *([("tradeoff", "The trade-off")] if found["tradeoffs"] else []),
        *([("curves", "Over training")] if found["curves"] else []),
        *([("entries", entry_title)] if any(found[key] for key in _BY_ENTRY) else []),
        ("figures", "All figures"),
        ("settings", "Settings"),
        ("repeat", "Repeat it"),
    ]


def _summary(runs: Runs, meta: Mapping[str, Any]) -> str:
    config = meta.get("config") or {}
    methods = len({family_of(name) for name in runs})
    parts = [f"data: {config['data']}"] if config.get("data") else []
    parts.append(_count(methods, "method"))
    if len(runs) > methods:
        parts.append(_count(len(runs), "setting"))
    parts.append(_count(sum(map(len, runs.values())), "run"))
    if config.get("epochs"):
        parts.append(_count(config["epochs"], "epoch"))
    if meta.get("quick"):
        parts.append("quick version")
    if meta.get("created"):
        parts.append(str(meta["created"])[:10])
    return " · ".join(parts)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + "s" * (number != 1)


def _table_note(runs: Runs, several: bool, rule: str, references: Sequence[str]) -> str:
    note = "★ best of its column; ↑ higher is better, ↓ lower is better."
    note += " Mean ± standard deviation over seeds." if several else " One seed."
    if any(run.diverged is not None for group in runs.values() for run in group):
        note += " A method of which a run diverged gets no ★."
    shown = [name for name in references if name in runs]
    if shown:
        plural = len(shown) > 1
        note += f" {' and '.join(shown)} {'are' if plural else 'is'} there for reference and "
        note += "get none." if plural else "gets none."
    if rule:
        note += f" Of each method, the setting that the sweep chose; its rule: {rule}."
    return note


def _entries(runs: Runs, page: Page) -> list[dict[str, Any]]:
    """Tables of the lists that have names; multipliers stand with the first list."""
    limits = {panel.y: panel.reference for panel in page.panels if panel.kind == "family"}
    named = {p.y: p.label for p in page.panels if p.kind in ("change", "dots") and p.label}
    multipliers = _MULTIPLIERS
    found = []
    for key in (key for key in page.entries if key != _MULTIPLIERS):
        same = (limits[other] for other in limits if key == other or key.endswith(f"_{other}"))
        limit = next((limit for limit in same if limit is not None), None)  # test_... as train's
        name = named.get(key) or title(key)
        name = name[:1].upper() + name[1:]
        caption = f"{name} at the end of training, mean over seeds"
        names = entry_names(runs, key, page.entries[key])
        table = tables.entries(runs, key, names, limit, caption, multipliers)
        if table is None:
            continue
        cells = [cell for line in table.lines for cell in line.cells]
        note = []
        if limit is not None:
            note.append(f"▲ above the limit, {limit:g}.")
        if any("seeds" in cell.note for cell in cells):
            note.append("k of n seeds: so many are above it.")
        if any("ν" in cell.note for cell in cells):
            note.append("ν: multiplier, the price of the constraint.")
        found.append({"title": name, "table": table, "note": " ".join(note)})
        multipliers = ""
    return found
