"""A sweep: many settings of each method, ranked on validation data by the rule of the task.

On disk a sweep is a comparison whose methods are called `NAME@0`, `NAME@1`, ... What is run (a
plan) is apart from how it is run (`compare.execute`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import store, tasks, yaml_text
from .compare import Plan, plan
from .config import changed, check, from_plain, plain
from .grid import Setting
from .store import COMPARISON, Comparison, SavedRun
from .task import Experiment, Row, Rule, Task
from .yaml_text import ConfigError

__all__ = ["choose", "plan_sweep", "read", "rule_of", "without_test"]

SWEEP = "sweep.json"


def plan_sweep(
    task: str,
    config_name: str,
    config: Experiment,
    chosen: Sequence[Setting],
    seeds: Sequence[int],
    *,
    quick: bool = False,
) -> Plan:
    """Every setting with every tuning seed.

    Args:
        task: its name, or `"module:attribute"`.
        config_name: for the folder.
        config: of the experiment; its methods and seeds are replaced.
        chosen: what to try.
        seeds: of the tuning runs.
        quick: whether it is the fast version.
    """
    found = tasks.get(task)  # all that can be wrong is found before hours of training, not after
    rule_of(found, config)
    if not chosen:
        raise ConfigError("The grid has no settings: give --grid, or --grid.METHOD.KEY '[...]'.")
    methods = {setting.name: setting.method for setting in chosen}
    swept = changed(config, "tuning seeds", methods=methods, seeds=tuple(seeds))
    # What is wrong with a key of the grid is wrong with each of its settings: say it once.
    said = [f"grid: {'.'.join(path)}: {text}" for path, text in check(found, swept)]
    if problems := dict.fromkeys(re.sub(r"@\d+", "", each) for each in said):
        raise ConfigError(*problems)
    return plan(task, config_name, swept, quick=quick)


def rule_of(task: Task, config: Any) -> Rule:
    """The rule by which a task chooses."""
    try:
        found = task.rule(config)
    except ValueError as error:
        raise ConfigError(f"The task {task.name} cannot choose: {error}") from error
    if found is None:
        raise ConfigError(f"The task {task.name} has no rule to choose by.")
    return found


def choose(out: Path, chosen: Sequence[Setting], final_seeds: Sequence[int]) -> dict[str, Any]:
    """Rank the settings of each method; write `sweep.json`, `runs.jsonl` and `winners.yaml`.

    A setting's score is the task's score of its last figures, averaged over the tuning seeds
    first: a limit is compared with the mean, not with each noisy figure. The task never sees
    figures whose name begins with `test`. A setting with a run that diverged comes last.

    Args:
        out: folder of the sweep.
        chosen: its settings; those of earlier sweeps in the folder are added.
        final_seeds: those that `winners.yaml` is to be compared with.
    """
    comparison = store.load_comparison(out)
    task: Any = tasks.get(comparison.meta["task"])
    config = from_plain(task.config, comparison.meta["config"], str(out / COMPARISON))
    chosen = [*_before(out, config, chosen), *chosen]
    rule = rule_of(task, config)
    entries = [_entry(rule, setting, comparison) for setting in chosen]
    ranking: dict[str, list[str]] = {}
    for entry in sorted(entries, key=_order):
        ranking.setdefault(entry["method"], []).append(entry["name"])
    scored = {entry["name"] for entry in entries if entry["score"] is not None}
    winners = {name: ranked[0] for name, ranked in ranking.items() if ranked[0] in scored}
    told = {
        "task": comparison.meta["task"],
        "rule": rule.text,
        "seeds": comparison.meta["seeds"],
        "settings": entries,
        "ranking": ranking,
        "winners": winners,
    }
    store.write_json(out / SWEEP, told)
    store.write_rows(out / "runs.jsonl", (_line(run) for run in comparison.runs))
    methods = {setting.name: setting.method for setting in chosen}
    best = dataclasses.replace(
        config,
        methods={name: methods[winner] for name, winner in winners.items()},
        seeds=tuple(final_seeds),
    )
    head = f"# Winners of a sweep. Rule: {' '.join(told['rule'].split())}\n"
    store.write_text(out / "winners.yaml", head + yaml_text.dump(plain(best)))
    return told


def read(out: Path) -> dict[str, Any] | None:
    """What `choose` left in a folder, None for one of no sweep."""
    path = out / SWEEP
    if not path.is_file():
        return None
    told = store.read_json(path)
    keys = ("rule", "settings", "ranking", "winners")
    if missing := [key for key in keys if not isinstance(told, dict) or key not in told]:
        raise store.FolderError(f"{path} is damaged: it has no {', '.join(missing)}.")
    return told


def _before(out: Path, config: Any, chosen: Sequence[Setting]) -> list[Setting]:
    """Settings of the folder that an earlier sweep tried."""
    told = read(out) or {"settings": []}
    values = {entry["name"]: entry["setting"] for entry in told["settings"]}
    names = {setting.name for setting in chosen}
    found = []
    for name, method in config.methods.items():
        family, _, index = name.rpartition("@")
        if name not in names and family:
            own = values[name] if name in values else plain(method)
            found.append(Setting(family, int(index), own, method))
    return found


def _entry(rule: Rule, setting: Setting, comparison: Comparison) -> dict[str, Any]:
    runs = [run for run in comparison.of(setting.name) if run.result is not None]
    rows = [without_test(run.figures) for run in runs]
    diverged = sum(run.diverged is not None for run in runs)
    complete = len(runs) == len(comparison.meta["seeds"])
    figures = _means(rows)
    score = list(rule.score(figures)) if complete and not diverged else []
    return {
        "name": setting.name,
        "method": setting.family,
        "setting": setting.values,
        "score": score if score and not any(map(math.isnan, score)) else None,
        "diverged": diverged,
        "finished": len(runs),
        "figures": figures,
    }


def _order(entry: dict[str, Any]) -> tuple[bool, list[float]]:
    return entry["score"] is None, entry["score"] or []


def without_test(row: Row) -> Row:
    """The figures by which a setting may be chosen."""
    return {key: value for key, value in row.items() if not key.startswith("test")}


def _means(rows: Sequence[Row]) -> dict[str, float]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return {
        key: math.fsum(row[key] for row in rows) / len(rows)
        for key in keys
        if all(isinstance(row.get(key), (int, float)) for row in rows)
    }


def _line(run: SavedRun) -> Row:
    """A run as one flat line of a table."""
    method = {key: value for key, value in run.method.items() if key != "settings"}
    method |= {f"settings.{key}": value for key, value in run.method["settings"].items()}
    scalars = {k: v for k, v in run.figures.items() if isinstance(v, (int, float))}
    said = {"name": run.name, "seed": run.seed, "diverged": run.diverged}
    return {**said, **method, **scalars, "finished": run.result is not None}
