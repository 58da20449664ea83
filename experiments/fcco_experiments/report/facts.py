"""Settings, machine and files of a comparison, and what a sweep has chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import sweep as sweeps
from ..store import Comparison, SavedRun
from .words import setting, title

__all__ = ["chosen", "experiment_facts", "files", "machine_facts", "sweep"]


def experiment_facts(meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The config without its methods, which have a table of their own."""
    facts = [("Config", str(meta["config_name"]))] if meta.get("config_name") else []
    for key, value in (meta.get("config") or {}).items():
        if key not in ("methods", "seeds"):
            facts.append((title(key), setting(value)))
    if meta.get("seeds"):
        facts.append(("Seeds", setting(list(meta["seeds"]))))
    return facts


def machine_facts(runs: Sequence[SavedRun]) -> list[tuple[str, str]]:
    """Machine and versions; where runs differ, all that occur."""
    found: dict[str, list[str]] = {}
    for run in runs:
        for key, value in (run.environment or {}).items():
            text = setting(value)
            if key != "command" and text not in found.setdefault(key, []):
                found[key].append(text)
    facts = []
    for key, values in found.items():
        if len(values) > 1 and ("time" in key or "start" in key):
            values = [f"{min(values)} to {max(values)}"]
        facts.append((title(key), "; ".join(values[:4]) + ("; …" if len(values) > 4 else "")))
    return facts


def files(comparison: Comparison) -> list[tuple[str, str]]:
    """Names relative to the page: it may be moved together with them."""
    example = comparison.runs[0] if comparison.runs else None
    folder = f"{example.name}/seed-{example.seed}/" if example else "NAME/seed-0/"
    return [
        ("comparison.json", "what was run"),
        ("table.json, table.md", "the final table"),
        (folder, "one folder per run: config, environment, metrics, checkpoint, result and plots"),
    ]


def sweep(comparison: Comparison) -> dict[str, Any]:
    """What `sweep.json.gz` says; empty for a plain comparison."""
    return sweeps.read(comparison.folder) or {}


def chosen(comparison: Comparison, runs: Mapping[str, list[SavedRun]]) -> dict[str, list[SavedRun]]:
    """The runs to show one by one: all of a comparison, the winners of a sweep where it has any."""
    winners = set((sweep(comparison).get("winners") or {}).values())
    return {name: group for name, group in runs.items() if name in winners} or dict(runs)
