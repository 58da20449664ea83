"""Sweeps: many settings of each method, ranked on validation data by the rule of the task.

A grid file (`configs/<task>/grids/<name>.yaml`, or your own) reads

```yaml
limit: 24            # settings of each method, unless it says otherwise
seeds: [1000]        # tuning seeds
methods:
  sonex:
    base: {method: sonex, lr: 0.1, settings: {penalty: 14, smoothing: 0.01}}
    grid:
      lr: [0.1, 0.01]
      settings.penalty: [7, 14, 28]
    limit: 6
```

`base` may be left out where the config has a method of that name. On disk a sweep is a comparison
whose methods are called `NAME@0`, `NAME@1`, ... Test figures stay in the folders of the runs: no
summary of a sweep has them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from . import config as configs
from . import store, tasks
from .config import ConfigError, from_plain, plain
from .run import Plan, plan
from .store import SWEEP, Comparison
from .store import read_sweep as read
from .task import Experiment, Method, Metric, Row, Rule, Task

Values = dict[str, Any]


@dataclass(frozen=True)
class MethodGrid:
    """The settings of one method to try."""

    grid: dict[str, list[Any]]  # by dotted key of the method, such as `settings.penalty`
    base: dict[str, Any] | None = None  # the rest of the method; that of the config unless given
    limit: int | None = None  # at most so many settings


@dataclass(frozen=True)
class Grid:
    """The settings of several methods to try."""

    methods: dict[str, MethodGrid] = field(default_factory=dict)
    limit: int | None = None  # settings of each method that says nothing
    seeds: tuple[int, ...] = (1000,)  # of the tuning runs, not of the final comparison


@dataclass(frozen=True)
class Setting:
    """One point of a grid."""

    family: str  # name of the method
    index: int
    values: Values  # what was chosen, by dotted key
    method: Method

    @property
    def name(self) -> str:
        """The name of its runs."""
        return f"{self.family}@{self.index}"


def read_grid(task: Task, name: str) -> Grid:
    """A grid by name or path."""
    return configs.build(Grid, configs.read(task, "grid", name))


def with_inline(grid: Grid, inline: Iterable[tuple[str, str]]) -> Grid:
    """A grid with `("sonex.lr", "[0.1, 0.01]")` of the command line put in."""
    methods = dict(grid.methods)
    for key, text in inline:
        name, dot, inside = key.partition(".")
        values = configs.parse(text, configs.COMMAND_LINE, lines=False).values
        if not dot or not isinstance(values, list) or not values:
            raise ConfigError(
                f"{configs.COMMAND_LINE}: `grid.{key}`: write --grid.METHOD.KEY '[value, value]', "
                f"such as --grid.sonex.lr '[0.1, 0.01]', but it is: {text}"
            )
        old = methods.get(name, MethodGrid({}))
        methods[name] = replace(old, grid={**old.grid, inside: values})
    return replace(grid, methods=methods)


def settings_of(
    grid: Grid, config: Experiment, *, limit: int | None = None, source: str = "grid"
) -> list[Setting]:
    """All points of a grid, or `limit` (0: all) of each method, which wins over that of the grid.

    `config` has the methods that have no base in the grid.
    """
    settings: list[Setting] = []
    problems: list[str] = []
    for name, part in grid.methods.items():
        most = next((n for n in (limit, part.limit, grid.limit) if n is not None), None)
        if part.base is None and name not in config.methods:
            hint = configs.did_you_mean(name, config.methods)
            problems.append(
                f"grid: `methods.{name}` needs a `base`, for the config has no such method{hint} "
                f"It has: {', '.join(config.methods)}."
            )
            continue
        base = plain(config.methods[name]) if part.base is None else part.base
        for index, values in enumerate(spread(part.grid, most)):
            full = base
            for key, value in values.items():
                full = configs.with_value(full, key.split("."), value)
            try:
                method = from_plain(Method, full, f"{source}: methods.{name}")
                settings.append(Setting(name, index, values, method))
            except ConfigError as error:
                problems += error.args
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    return settings


def spread(grid: Mapping[str, Sequence[Any]], limit: int | None) -> list[Values]:
    """The points of a grid in order, or `limit` (0: all) of them, each value equally often.

    Each key gets its values in turn, shuffled with a fixed seed; points that come twice are
    replaced by others. The choice depends on the grid alone.

    Example:
        >>> spread({"lr": [0.1, 0.01], "beta": [0.1, 0.5]}, None)[:2]
        [{'lr': 0.1, 'beta': 0.1}, {'lr': 0.1, 'beta': 0.5}]
        >>> spread({"lr": [0.1, 0.01], "beta": [0.1, 0.5]}, 2)
        [{'lr': 0.1, 'beta': 0.1}, {'lr': 0.01, 'beta': 0.5}]
        >>> len(spread({"lr": [0.1, 0.01], "beta": [0.1, 0.5]}, 0))
        4
    """
    sizes = [len(values) for values in grid.values()]
    total = math.prod(sizes)
    if not limit or limit >= total:
        return [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())]
    random = np.random.default_rng(0)
    columns = [random.permutation(np.arange(limit) % size) for size in sizes]
    chosen = dict.fromkeys(zip(*(column.tolist() for column in columns), strict=True))
    while len(chosen) < limit:
        chosen[tuple(int(random.integers(size)) for size in sizes)] = None
    return [
        {key: grid[key][index] for key, index in zip(grid, point, strict=True)}
        for point in sorted(chosen)
    ]


def plan_sweep(
    task: str,
    config_name: str,
    config: Experiment,
    settings: Sequence[Setting],
    seeds: Sequence[int],
    *,
    quick: bool = False,
) -> Plan:
    """Every setting with every tuning seed; what is wrong is found here, before the training."""
    known = tasks.get(task)
    rule_of(known, config)
    if not settings:
        raise ConfigError("The grid has no settings: give --grid, or --grid.METHOD.KEY '[...]'.")
    methods = {setting.name: setting.method for setting in settings}
    swept = configs.changed(config, "tuning seeds", methods=methods, seeds=tuple(seeds))
    # What is wrong with a key of the grid is wrong with each of its settings: say it once.
    families = {setting.name: setting.family for setting in settings}
    problems: dict[str, None] = {}
    for path, text in known.check(swept):
        if path[0] == "methods":
            text = text.replace(path[1], families[path[1]])
        problems[f"grid: {'.'.join(families.get(key, key) for key in path)}: {text}"] = None
    if problems:
        raise ConfigError(*problems)
    return plan(task, config_name, swept, quick=quick)


def rule_of(task: Task, config: Any) -> Rule:
    """The rule by which a task chooses."""
    try:
        rule = task.rule(config)
    except ValueError as error:
        raise ConfigError(f"The task {task.name} cannot choose: {error}") from error
    if rule is None:
        raise ConfigError(f"The task {task.name} has no rule to choose by.")
    return rule


def choose(out: Path, settings: Sequence[Setting], final_seeds: Sequence[int]) -> dict[str, Any]:
    """Rank the settings of each method; write `sweep.json.gz` and `winners.yaml`.

    The task scores the last figures of a setting, averaged over the tuning seeds: a limit is
    compared with the mean, not with each noisy figure. Figures whose name begins with `test` are
    left out before. A setting with a run that diverged comes last. Settings of earlier sweeps in
    the folder are ranked too; `winners.yaml` gets the final seeds.
    """
    comparison = store.load_comparison(out)
    task, config = tasks.saved(comparison)
    rule = rule_of(task, config)
    tried = {entry["name"]: entry["setting"] for entry in (read(out) or {}).get("settings", ())}
    tried |= {setting.name: setting.values for setting in settings}
    entries = [
        _entry(rule, name, tried.get(name, plain(method)), comparison)
        for name, method in config.methods.items()
    ]
    ranking: dict[str, list[str]] = {}
    for entry in sorted(entries, key=lambda entry: (entry["score"] is None, entry["score"] or [])):
        ranking.setdefault(entry["method"], []).append(entry["name"])
    scored = {entry["name"] for entry in entries if entry["score"] is not None}
    winners = {name: ranked[0] for name, ranked in ranking.items() if ranked[0] in scored}
    sweep = {
        "task": comparison.meta["task"],
        "rule": rule.text,
        "limited": rule.limited,
        "seeds": comparison.meta["seeds"],
        "settings": entries,
        "ranking": ranking,
        "winners": winners,
    }
    store.write_rows(out / SWEEP, [sweep])
    methods = {name: config.methods[winner] for name, winner in winners.items()}
    best = replace(config, methods=methods, seeds=tuple(final_seeds))
    head = f"# Winners of a sweep. Rule: {' '.join(rule.text.split())}\n"
    store.write_text(out / store.WINNERS, head + configs.dump(best))
    return sweep


def _entry(rule: Rule, name: str, values: Values, comparison: Comparison) -> dict[str, Any]:
    runs = [run for run in comparison.of(name) if run.result is not None]
    rows = [without_test(run.figures) for run in runs]
    diverged = sum(run.diverged is not None for run in runs)
    complete = len(runs) == len(comparison.meta["seeds"])
    figures = _means(rows)
    score = list(rule.score(figures)) if complete and not diverged else []
    valid = bool(score) and not any(map(math.isnan, score))
    return {
        "name": name,
        "method": name.rpartition("@")[0],
        "setting": values,
        "score": score if valid else None,
        "feasible": valid and rule.feasible(score),
        "diverged": diverged,
        "finished": len(runs),
        "figures": figures,
    }


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


def validated(metrics: Sequence[Metric], sweep: Mapping[str, Any]) -> list[Metric]:
    """The metrics that settings have, first those that are in the first table for test data."""
    there = {key for entry in sweep["settings"] for key in entry["figures"]}
    first = {re.sub("^test_", "val_", metric.key) for metric in metrics if metric.headline}
    found = [replace(m, headline=m.key in first) for m in metrics if m.key in there]
    return sorted(found, key=lambda metric: not metric.headline)


def rows(sweep: Mapping[str, Any]) -> list[Row]:
    """A line for each setting, for a table of all: of each method, the best by the rule first."""
    entries = {entry["name"]: entry for entry in sweep["settings"]}
    return [
        {
            "method": method, "rank": rank, "name": name,
            "chosen": sweep["winners"].get(method) == name,
            "feasible": bool(sweep["limited"] and entries[name]["feasible"]),
            "runs": entries[name]["finished"], "diverged": entries[name]["diverged"],
            **dict(store.flat(entries[name]["setting"])), **entries[name]["figures"],
        }
        for method, ranked in sweep["ranking"].items()
        for rank, name in enumerate(ranked, 1)
    ]  # fmt: skip
