"""What stands on the page, as plain data for the template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..record import Comparison, SavedRun
from ..task import Page, Panel, Task
from . import plots, tables
from .canvas import SIZE, SMALL, twice
from .facts import experiment_facts, files, machine_facts, sweep_of
from .notices import notices
from .palette import METHODS, SHAPES, TOKENS, Style, family_of, styles
from .runs import by_method
from .tradeoff import tradeoff
from .words import fixed, title

__all__ = ["Picture", "content"]

Runs = Mapping[str, Sequence[SavedRun]]
_WIDE, _SMALL = (tuple(round(144 * side) for side in size) for size in (SIZE, SMALL))


@dataclass(frozen=True)
class Picture:
    """A plot in both palettes.

    Args:
        light: address of the drawing.
        dark: the same in the dark palette.
        alt: what it shows, in words.
        title: above or below it.
        size: width and height.
        note: below it.
        method: whose it is, for a swatch.
    """

    light: str
    dark: str
    alt: str
    title: str
    size: tuple[int, ...]
    note: str = ""
    method: str = ""


def content(comparison: Comparison, task: Task, config: Any) -> dict[str, Any]:
    """Everything the template asks for."""
    page = task.page(config)
    everything = by_method(comparison)
    look = styles(everything)
    runs = sweep_of(comparison, everything)
    meta = comparison.meta
    wanted = [int(seed) for seed in meta.get("seeds", ())]
    final = {name: [run.figures for run in group] for name, group in runs.items()}
    final = {name: [row for row in rows if row] for name, rows in final.items()}
    final = {name: rows for name, rows in final.items() if rows}
    small = _families(runs, page, look)
    single = _entries(runs, page)
    drawn = _curves(runs, page, look)
    dots = _tradeoffs(everything, page, look)
    constrained = any(
        panel.reference is not None for panel in page.panels if panel.kind == "family"
    )
    entry_title = "Every constraint by itself" if constrained else "One by one"
    top = [metric for metric in page.metrics if metric.headline] or list(page.metrics)
    seeds = max((len(group) for group in runs.values()), default=0)
    contents = [("question", "What was asked"), ("winner", "Who won")]
    contents += [("tradeoff", "The trade-off")] if dots else []
    contents += [("curves", "Over training")] if drawn else []
    contents += [("entries", entry_title)] if small or single else []
    contents += [("figures", "All figures"), ("settings", "Settings"), ("repeat", "Repeat it")]
    return {
        "title": page.title,
        "kicker": f"fcco experiment · {meta.get('task', task.name)}",
        "summary": _summary(everything, meta),
        "contents": contents,
        "notices": notices(task, config, everything, wanted),
        "question": page.question,
        "verdict": task.verdict(config, final) if final else ("No run has finished yet.",),
        "headline": tables.scores(runs, top, "Final figures of each method", across=True),
        "spread_note": _spread_note(seeds, bool(runs and len(runs) < len(everything))),
        "meanings": [metric for metric in top if metric.meaning],
        "tradeoffs": dots,
        "curves": drawn,
        "band_note": "Line: mean over seeds. Band: from the smallest to the largest seed."
        if seeds > 1
        else "One seed, so there is no band.",
        "entry_title": entry_title,
        "families": small,
        "entries": single,
        "full": tables.scores(
            everything,
            page.metrics,
            "All figures of the final evaluation, mean and standard deviation over seeds",
            across=len(everything) > 16,
        ),
        "ending": tables.ending(runs, page.metrics, "Figures at the end of training"),
        "all_meanings": [metric for metric in page.metrics if metric.meaning],
        "many": len(everything) > 16,
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


def _summary(runs: Runs, meta: Mapping[str, Any]) -> str:
    families = len({family_of(name) for name in runs})
    count = sum(map(len, runs.values()))
    parts = [f"{families} method{'s' * (families != 1)}"]
    if len(runs) > families:
        parts.append(f"{len(runs)} settings")
    parts.append(f"{count} run{'s' * (count != 1)}")
    config = meta.get("config") or {}
    if config.get("data"):
        parts.insert(0, f"data: {config['data']}")
    if config.get("epochs"):
        parts.append(f"{config['epochs']} epochs")
    if meta.get("quick"):
        parts.append("quick version")
    if meta.get("created"):
        parts.append(str(meta["created"])[:10])
    return " · ".join(parts)


def _spread_note(seeds: int, chosen: bool) -> str:
    note = f"Mean ± standard deviation over {seeds} seeds." if seeds > 1 else "One seed."
    return note + (" Of each method the setting that the sweep chose." if chosen else "")


def _tradeoffs(runs: Runs, page: Page, look: Mapping[str, Style]) -> list[Picture]:
    found = []
    sweep = any(family_of(name) != name for name in runs)
    for panel in (panel for panel in page.panels if panel.kind == "tradeoff"):
        svg = tradeoff(runs, panel, look, page.metrics)
        if svg is None:
            continue
        y, x = panel.label or title(panel.y), panel.x_label or title(panel.x)
        note = "Small dots: runs. Large dots: means over seeds. "
        note += "Lines: the frontier of each method" if sweep else "Line: the frontier of the means"
        note += ", what nothing else beats in both directions."
        marks = [
            f"{axis} at {value:g}"
            for axis, value in (("across", panel.reference), ("upright", panel.x_reference))
            if value is not None
        ]
        note += f" Dashed: {', '.join(marks)}." if marks else ""
        alt = f"Scatter plot of {y} against {x} at the end of training, by method."
        found.append(Picture(*twice(svg), alt, panel.title, _WIDE, note))
    return found


def _curves(runs: Runs, page: Page, look: Mapping[str, Style]) -> list[Picture]:
    found = []
    for panel in (panel for panel in page.panels if panel.kind == "curve"):
        svg = plots.curves(runs, panel, look)
        if svg is not None:
            alt = f"{panel.label or title(panel.y)} over epochs, one line per method."
            note = "" if panel.reference is None else f"Dashed line: {panel.reference:g}."
            found.append(Picture(*twice(svg), alt, panel.title, _WIDE, note))
    return found


def _families(runs: Runs, page: Page, look: Mapping[str, Style]) -> list[dict[str, Any]]:
    found = []
    for panel in (panel for panel in page.panels if panel.kind == "family"):
        family = plots.families(runs, panel, page.entries.get(panel.y, ()), look)
        pictures = []
        for name, svg in family.drawings.items():
            entry, value = family.worst[name]
            note = f"highest at the end: {entry}, {fixed(value, 4)}"
            alt = (
                f"{panel.label or title(panel.y)} of {name} over epochs, a line per entry; {note}."
            )
            pictures.append(Picture(*twice(svg), alt, name, _SMALL, note, method=family_of(name)))
        if pictures:
            found.append(
                {"title": panel.title, "pictures": pictures, "note": _family_note(panel, family)}
            )
    return found


def _family_note(panel: Panel, family: plots.Families) -> str:
    note = "All plots share their axes. A line is the mean over seeds; the bold one ends highest."
    if panel.reference is not None:
        note += f" Dotted across: the limit, {panel.reference:g}."
    if family.kinds:
        ways = (f"{way}: {kind}" for kind, way in family.kinds.items())
        note += f" {', '.join(ways).capitalize()}."
    return note


def _entries(runs: Runs, page: Page) -> list[dict[str, Any]]:
    limits = {p.y: p.reference for p in page.panels if p.kind == "family"}
    multipliers = "multipliers"
    found = []
    for key, names in page.entries.items():
        if key == multipliers:
            continue
        limit = limits.get(key)
        if limit is None:  # test_constraints have the limit of constraints
            limit = next((limits[other] for other in limits if key.endswith(other)), None)
        caption = f"{title(key)} at the end of training, mean over seeds"
        table = tables.entries(runs, key, names, limit, caption, multipliers)
        if table is None:
            continue
        note = f"▲ above the limit of {limit:g}." if limit is not None else ""
        if any("ν" in cell.note for line in table.lines for cell in line.cells):
            note += " ν: multiplier, the price of the constraint."
        found.append({"title": title(key), "table": table, "note": note.strip()})
        multipliers = ""  # they belong to the first list
    return found
