"""Grids of settings: which ones a sweep tries.

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

`base` may be left out where the config has a method of that name.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import yaml_text
from .config import find, from_plain, plain, read_mapping
from .task import Experiment, Method, Task
from .validate import build, did_you_mean
from .yaml_text import ConfigError

__all__ = ["Grid", "MethodGrid", "Setting", "read", "settings"]

Values = dict[str, Any]


@dataclass(frozen=True)
class MethodGrid:
    """The settings of one method to try.

    Args:
        grid: values to try by dotted key of the method, such as `settings.penalty`.
        base: the rest of the method; that of the config unless given.
        limit: at most so many settings.
    """

    grid: dict[str, list[Any]]
    base: dict[str, Any] | None = None
    limit: int | None = None


@dataclass(frozen=True)
class Grid:
    """The settings of several methods to try.

    Args:
        methods: by name.
        limit: settings of each, where a method says nothing.
        seeds: of the tuning runs; better not those of the final comparison.
    """

    methods: dict[str, MethodGrid] = field(default_factory=dict)
    limit: int | None = None
    seeds: tuple[int, ...] = (1000,)


@dataclass(frozen=True)
class Setting:
    """One point of a grid.

    Args:
        family: name of the method.
        index: number of the setting.
        values: what was chosen, by dotted key.
        method: the whole method.
    """

    family: str
    index: int
    values: Values
    method: Method

    @property
    def name(self) -> str:
        """The name of its runs."""
        return f"{self.family}@{self.index}"


def read(task: Task, name: str) -> Grid:
    """A grid by name or path."""
    file, called = find(task, "grid", name)
    return build(Grid, read_mapping(file, called))


def with_inline(grid: Grid, inline: Iterable[tuple[str, str]]) -> Grid:
    """A grid with `("sonex.lr", "[0.1, 0.01]")` of the command line put in."""
    methods = dict(grid.methods)
    for key, text in inline:
        name, dot, inside = key.partition(".")
        values = yaml_text.parse(text, "command line", lines=False).plain()
        if not dot or not isinstance(values, list) or not values:
            raise ConfigError(
                f"command line: `grid.{key}`: write --grid.METHOD.KEY '[value, value]', such as "
                f"--grid.sonex.lr '[0.1, 0.01]', but it is: {text}"
            )
        old = methods.get(name, MethodGrid({}))
        methods[name] = dataclasses.replace(old, grid={**old.grid, inside: values})
    return dataclasses.replace(grid, methods=methods)


def settings(
    grid: Grid, config: Experiment, *, limit: int | None = None, source: str = "grid"
) -> list[Setting]:
    """All points of a grid, or a spread of them.

    Args:
        grid: what to try.
        config: where methods without a base are taken from.
        limit: of each method; wins over the file.
        source: for errors.
    """
    found: list[Setting] = []
    problems: list[str] = []
    for name, each in grid.methods.items():
        most = next((n for n in (limit, each.limit, grid.limit) if n is not None), None)
        try:
            base = _base(name, each, config)
            for index, values in enumerate(spread(each.grid, most)):
                method = _method(base, values, f"{source}: methods.{name}")
                found.append(Setting(name, index, values, method))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    return found


def spread(grid: Mapping[str, Sequence[Any]], limit: int | None) -> list[Values]:
    """The points of a grid in order, or `limit` of them that show each value equally often.

    Each key gets its values in turn, shuffled with a fixed seed; points that come twice are
    replaced by others. The choice depends on the grid alone.

    Example:
        >>> spread({"lr": [0.1, 0.01], "beta": [0.1, 0.5]}, None)[:2]
        [{'lr': 0.1, 'beta': 0.1}, {'lr': 0.1, 'beta': 0.5}]
        >>> spread({"lr": [0.1, 0.01], "beta": [0.1, 0.5]}, 2)
        [{'lr': 0.1, 'beta': 0.1}, {'lr': 0.01, 'beta': 0.5}]
    """
    sizes = [len(values) for values in grid.values()]
    total = math.prod(sizes)
    if limit is None or limit >= total:
        return [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())]
    random = np.random.default_rng(0)
    columns = [random.permutation(np.arange(limit) % size) for size in sizes]
    chosen = dict.fromkeys(zip(*(column.tolist() for column in columns), strict=True))
    while len(chosen) < limit:
        chosen[tuple(int(random.integers(size)) for size in sizes)] = None
    return [
        {key: grid[key][place] for key, place in zip(grid, point, strict=True)}
        for point in sorted(chosen)
    ]


def _base(name: str, each: MethodGrid, config: Experiment) -> Values:
    if each.base is not None:
        return each.base
    if name not in config.methods:
        hint = did_you_mean(name, config.methods)
        raise ConfigError(
            f"grid: `methods.{name}` needs a `base`, for the config has no such method{hint} "
            f"It has: {', '.join(config.methods)}."
        )
    return plain(config.methods[name])


def _method(base: Values, values: Values, source: str) -> Method:
    full = plain(base)
    for key, value in values.items():
        *path, last = key.split(".")
        place = full
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return from_plain(Method, full, source)
