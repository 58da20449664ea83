"""The page of a sweep: its rule, the winners, a dot per setting, what each hyperparameter does.

It is made from `sweep.json.gz`, the means of every setting over the tuning seeds, and never shows
a test figure. Runs add the deviations of the winners and warnings about them, where they are there.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import stats
from ..store import Comparison
from ..task import Metric, Page, Panel, Row, Rule, Task
from . import plots, tables
from .page import Alert, alerts, command, common, glossary, other_data, summary
from .plots import number
from .style import Style, count, fixed, setting, styles
from .tables import Cell, Head, Table, metric_head

TOP = 10  # settings of a method in the table of the best


@dataclass(frozen=True)
class Trial:
    """A setting of a method."""

    name: str
    family: str  # its method
    values: Mapping[str, Any]  # what was chosen, by dotted key
    score: tuple[float, ...] | None  # the smaller the better; None: a run diverged or is missing
    feasible: bool  # it has a score and exceeds no limit
    figures: Row  # means over its runs
    finished: int
    diverged: int

    def at(self, panel: Panel) -> tuple[float, float]:
        """The two figures of a plot."""
        return number(self.figures.get(panel.x)), number(self.figures.get(panel.y))


@dataclass(frozen=True)
class Sweep:
    """A sweep: the settings of each method, the best first, and those that were chosen."""

    rule: str
    seeds: tuple[int, ...]
    families: Mapping[str, tuple[Trial, ...]]
    winners: Mapping[str, Trial]
    limited: bool  # whether the rule asks for feasibility before anything else

    @property
    def trials(self) -> list[Trial]:
        """Settings of all methods."""
        return [trial for family in self.families.values() for trial in family]


def read(told: Mapping[str, Any]) -> Sweep:
    """A sweep from what `fcco_experiments.sweep.read` gives."""
    trials: dict[str, Trial] = {}
    for entry in told["settings"]:
        parts = entry["score"]
        trials[entry["name"]] = Trial(
            name=entry["name"],
            family=entry["method"],
            values=dict(_flat(entry["setting"])),
            # Infinities are null in the file.
            score=tuple(math.inf if p is None else float(p) for p in parts) if parts else None,
            feasible=bool(told["limited"] and parts and entry["feasible"]),
            figures={k: v for k, v in entry["figures"].items() if not k.startswith("test")},
            finished=entry["finished"],
            diverged=entry["diverged"],
        )
    return Sweep(
        rule=str(told["rule"]),
        seeds=tuple(told["seeds"]),
        families={n: tuple(trials[name] for name in own) for n, own in told["ranking"].items()},
        winners={name: trials[won] for name, won in told["winners"].items()},
        limited=bool(told["limited"]),
    )


def _flat(values: Mapping[str, Any], head: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{head}{key}.")
        else:
            yield f"{head}{key}", value


def metrics(page: Page, sweep: Sweep) -> list[Metric]:
    """Those of the page that settings have; validation takes the place of test, once."""
    there = {key for trial in sweep.trials for key in trial.figures}
    known = {metric.key: metric for metric in page.metrics}
    result: dict[str, Metric] = {}
    for metric in page.metrics:
        key = _validation(metric.key)
        if key in there:
            own = known.get(key) or dataclasses.replace(
                metric, key=key, label=_reworded(metric.label)
            )
            headline = metric.headline or (key in result and result[key].headline)
            result[key] = dataclasses.replace(own, headline=headline)
    return list(result.values())


def panels(page: Page, sweep: Sweep) -> list[Panel]:
    """Plots of two figures that the settings have; validation takes the place of test."""
    there = {key for trial in sweep.trials for key in trial.figures}
    given = page.clouds or tuple(panel for panel in page.panels if panel.kind == "tradeoff")
    result: dict[tuple[str, str], Panel] = {}
    for panel in given:
        x, y = _validation(panel.x), _validation(panel.y)
        if {x, y} <= there:
            title, label, x_label = map(_reworded, (panel.title, panel.label, panel.x_label))
            own = dataclasses.replace(panel, x=x, y=y, title=title, label=label, x_label=x_label)
            result.setdefault((x, y), panel if (x, y) == (panel.x, panel.y) else own)
    return list(result.values())


def _validation(key: str) -> str:
    """The key of the same figure on validation data."""
    return re.sub(r"^test_", "val_", key)


def _reworded(text: str) -> str:
    return re.sub(r"\btest\b", "validation", text)


# Every setting as a dot.


def scatter(
    sweep: Sweep, panel: Panel, shown: Sequence[Metric], look: Mapping[str, Style], prefix: str
) -> dict[str, Any] | None:
    """All settings with a score, a frontier of each method, a star for its winner, and the limit.

    The frame is set for most of the dots and the winners that are feasible.
    """
    trials = {
        name: [t for t in own if t.score is not None and all(map(math.isfinite, t.at(panel)))]
        for name, own in sweep.families.items()
    }
    dots = [(trial, *trial.at(panel)) for own in trials.values() for trial in own]
    if not dots:
        return None
    must = [won.at(panel) for won in sweep.winners.values() if won.feasible]
    x_limits = plots.robust([x for _, x, _ in dots], panel.x_reference, *(x for x, _ in must))
    y_limits = plots.robust([y for _, _, y in dots], *(y for _, y in must))

    def inside(x: float, y: float) -> bool:
        return x_limits[0] <= x <= x_limits[1] and y_limits[0] <= y <= y_limits[1]

    good = plots.directions(panel, shown)
    some_feasible = any(trial.feasible for trial, _, _ in dots)
    fronts = {}
    with plots.canvas(*plots.SIZE) as (figure, axes):
        axes.set_xlim(*x_limits)
        axes.set_ylim(*y_limits)
        plots.frame_tradeoff(figure, axes, panel, good)
        for name in sorted(trials, key=lambda name: -len(trials[name])):  # few dots above many
            for feasible, alpha in ((False, 0.25 if some_feasible else 0.5), (True, 0.6)):
                own = [t.at(panel) for t in trials[name] if t.feasible == feasible]
                _dots(axes, [p for p in own if inside(*p)], look[name].colour, alpha)
        for name, own in trials.items():
            x, y = zip(*(t.at(panel) for t in own), strict=True) if own else ((), ())
            fronts[name] = [own[k] for k in stats.frontier(x, y, *good)]
            corners = [trial.at(panel) for trial in fronts[name]]
            line: Any = {"dashes": look[name].dash or (None, None), "zorder": 2.2}
            axes.plot(*np.array(corners).reshape(-1, 2).T, color=plots.PAGE, lw=3.0, alpha=0.7)
            axes.plot(*np.array(corners).reshape(-1, 2).T, color=look[name].colour, lw=1.5, **line)
        stars = {name: won.at(panel) for name, won in sweep.winners.items()}
        seen = {name: at for name, at in stars.items() if inside(*at)}
        taken = plots.boxes(axes, seen.values(), 7.0)
        for name, (x, y) in seen.items():
            star: Any = {"marker": "*", "markersize": 15, "markeredgecolor": plots.PAGE}
            axes.plot([x], [y], color=look[name].colour, zorder=4, **star)
            plots.write(axes, name, (x, y), look[name].colour, taken, [])
        svg = plots.element(figure, prefix)
    return {
        "panel": panel,
        "svg": svg,
        "fronts": fronts,
        "total": len(dots),
        "outside": sum(not inside(x, y) for _, x, y in dots),
        "lost": [name for name in stars if name not in seen],
    }


def _dots(axes: Any, points: Sequence[tuple[float, float]], colour: str, alpha: float) -> None:
    """One path for all dots, a few bytes each: lines of no length with round ends."""
    if points:
        gap = [math.nan, math.nan]
        x, y = np.array([row for p in points for row in (p, p, gap)], dtype=float).T
        way: Any = {"solid_capstyle": "round", "lw": 2.6 if len(points) > 300 else 3.6}
        axes.plot(x, y, color=colour, alpha=alpha, zorder=1.6, **way)


# What each hyperparameter does.


@dataclass(frozen=True)
class Profile:
    """A hyperparameter of a method."""

    key: str
    values: tuple[Any, ...]  # those that were tried, in order
    groups: tuple[tuple[Trial, ...], ...]  # settings with each of them, the best first
    best: tuple[Trial | None, ...]  # the first of each group by the rule that has a score
    part: int  # of the score that is compared: 0 is what is beyond the limit, where there is one
    lost: tuple[Any, ...]  # values that reach no feasible setting while another one does
    range: float  # largest less smallest of that part among the values that can be compared

    @property
    def name(self) -> str:
        """The hyperparameter as a reader knows it."""
        return self.key.removeprefix("settings.")

    @property
    def order(self) -> list[int]:
        """Places of the values whose best setting has a score, the winner's first."""
        scored = [(t.score, k) for k, t in enumerate(self.best) if t and t.score is not None]
        return [k for _, k in sorted(scored)]


def varied(trials: Sequence[Trial]) -> dict[str, list[Any]]:
    """Keys of which several values were tried, and these: numbers in order, others as they came."""
    found: dict[str, dict[str, Any]] = {}
    for trial in trials:
        for key, value in trial.values.items():
            found.setdefault(key, {}).setdefault(_same(value), value)
    several = {key: list(values.values()) for key, values in found.items() if len(values) > 1}
    return {k: sorted(v) if all(map(_is_number, v)) else v for k, v in several.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _same(value: Any) -> str:
    """Equal for values that are: 1 and 1.0 are one value, true is another."""
    return repr(float(value)) if _is_number(value) else json.dumps(value, sort_keys=True)


def profiles(trials: Sequence[Trial]) -> list[Profile]:
    r"""The best setting that each value of each hyperparameter reaches, whatever the others are.

    .. math::
        p(v) = \min\{\operatorname{score}(s) : s_{\text{key}} = v\}

    where scores are compared part by part. The hyperparameter that matters most comes first: those
    with values that reach nothing feasible, by the share of such values, then by range.

    Args:
        trials: settings of one method, the best first.
    """
    every = []
    for key, values in varied(trials).items():
        by_value: dict[str, list[Trial]] = {_same(value): [] for value in values}
        for trial in trials:
            if key in trial.values:
                by_value[_same(trial.values[key])].append(trial)
        groups = tuple(map(tuple, by_value.values()))
        best = tuple(next((t for t in group if t.score is not None), None) for group in groups)
        met = [trial is not None and trial.feasible for trial in best]
        part = 1 if any(met) else 0
        lost = tuple(v for v, good in zip(values, met, strict=True) if any(met) and not good)
        compared = [t for t, good in zip(best, met, strict=True) if t and (good or not any(met))]
        finite = [t.score[part] for t in compared if t.score and math.isfinite(t.score[part])]
        apart = max(finite) - min(finite) if finite else 0.0
        every.append(Profile(key, tuple(values), groups, best, part, lost, apart))
    return sorted(
        every, key=lambda profile: (-len(profile.lost) / len(profile.values), -profile.range)
    )


def places(values: Sequence[Any]) -> list[float]:
    """Where values stand on an axis: by their logarithm where they span decades, words in steps.

    >>> places([0.01, 0.1, 1]), places([0.1, 0.5]), places(["a", "b"])
    ([-2.0, -1.0, 0.0], [0.1, 0.5], [0.0, 1.0])
    """
    if not all(map(_is_number, values)):
        return [float(k) for k in range(len(values))]
    log = plots.spans_decades(map(float, values))
    return [math.log10(value) if log else float(value) for value in values]


def sensitivity(sweep: Sweep, profile: Profile, metric: Metric, style: Style, prefix: str) -> str:
    """A hyperparameter: bars of all settings with a value (middle 80 % and 50 %), and the best."""
    at, colour = places(profile.values), style.colour
    with plots.canvas(plots.SMALL[0], 2.0) as (figure, axes):
        ends = []
        for x, group in zip(at, profile.groups, strict=True):
            values = [number(t.figures.get(metric.key)) for t in group if t.score is not None]
            if finite := [value for value in values if math.isfinite(value)]:
                low, first, middle, third, high = np.quantile(finite, (0.1, 0.25, 0.5, 0.75, 0.9))
                bar: Any = {"color": colour, "alpha": 0.38, "zorder": 2}
                axes.vlines(x, low, high, lw=1.2, **bar)
                axes.vlines(x, first, third, lw=5.0, **bar)
                axes.plot([x], [middle], marker="_", markersize=7, color=colour)
                ends += [float(low), float(high)]
        best = [(x, t) for x, t in zip(at, profile.best, strict=True) if t is not None]
        y = [number(trial.figures.get(metric.key)) for _, trial in best]
        axes.plot([x for x, _ in best], y, color=colour, linewidth=1.3, zorder=3)
        for (x, trial), value in zip(best, y, strict=True):
            won = sweep.winners.get(trial.family) is trial
            mark: Any = {"marker": "*", "markersize": 11} if won else {"marker": "o", "ms": 4.8}
            filled = colour if trial.feasible or not sweep.limited else plots.PAGE
            axes.plot([x], [value], color=colour, markerfacecolor=filled, zorder=4, **mark)
        # The profile must be seen, but for a value that is far off.
        near = plots.robust(y)
        axes.set_ylim(*plots.robust(ends, *(v for v in y if near[0] <= v <= near[1])))
        gap = min((b - a for a, b in zip(sorted(at), sorted(at)[1:], strict=False)), default=1.0)
        room = 0.08 * (max(at) - min(at)) + 0.5 * gap * (len(at) < 4)
        axes.set_xlim(min(at) - room, max(at) + room)
        axes.set_xticks(at, _labels(profile.values, at, 2.9 / (max(at) - min(at) + 2 * room)))
        plots.frame(figure, axes, profile.name, metric.label)
        return plots.element(figure, prefix)


def _labels(values: Sequence[Any], at: Sequence[float], scale: float) -> list[str]:
    """Names of marks; one that would touch its neighbour is left out."""
    names, end = [], -math.inf
    for value, x in zip(values, at, strict=True):
        text = setting(value)
        half = 0.075 * len(text) / 2  # inches
        names.append(text if scale * x - half > end else "")
        end = scale * x + half + 0.04 if names[-1] else end
    return names


# The page.


def compare_winners(comparison: Comparison) -> str:
    """The command that compares the winners."""
    return command(comparison, "compare", f"{comparison.folder}-winners")


def winners_table(comparison: Comparison, sweep: Sweep, shown: Sequence[Metric]) -> stats.Table:
    """Figures of the winners by method, without deviations where the runs were not kept."""
    if not comparison.runs:
        return {
            name: {
                metric.key: {
                    "mean": number(won.figures.get(metric.key)),
                    "std": math.nan,
                    "runs": won.finished,
                }
                for metric in shown
            }
            for name, won in sweep.winners.items()
        }
    names = {won.name: name for name, won in sweep.winners.items()}
    runs = [run for run in comparison.runs if run.name in names]
    meta = comparison.meta | {"methods": list(names)}
    table = stats.table(dataclasses.replace(comparison, meta=meta, runs=runs), shown)
    return {names[name]: row for name, row in table.items()}


def content(
    comparison: Comparison, told: Mapping[str, Any], task: Task, config: Any
) -> dict[str, Any]:
    """Everything the template of a sweep asks for."""
    page, meta, sweep = task.page(config), comparison.meta, read(told)
    methods = meta["config"].get("methods") or {}
    words = {}
    for name, own in sweep.families.items():
        method = methods.get(name) or methods.get(own[0].name) or {}
        words[name] = str(method.get("method", name))
    look, shown = styles(words), metrics(page, sweep)
    top = [metric for metric in shown if metric.headline] or shown
    drawn = (scatter(sweep, p, shown, look, f"c{k}") for k, p in enumerate(panels(page, sweep)))
    judged = _judged(task.judged(config), sweep, shown)
    order = sorted(sweep.winners, key=lambda name: sweep.winners[name].score or ())
    without = [n for n, own in sweep.families.items() if not any(t.feasible for t in own)]
    runs = sum(trial.finished for trial in sweep.trials)
    counts = count(len(sweep.families), "method"), count(len(sweep.trials), "setting")
    return common(comparison, task) | {
        "title": page.title,
        "summary": summary(meta, *counts, count(runs, "run")),
        "alerts": _alerts(comparison, sweep, task, config),
        "sweep": sweep,
        "several": bool(comparison.runs),
        "compare_winners": compare_winners(comparison),
        "feasible": sum(trial.feasible for trial in sweep.trials),
        "order": order,
        "without": without,
        "beyond": [name for name in order if sweep.limited and name in without],
        "tried": _tried(sweep),
        "question": page.question,
        "winners": _winners(sweep, winners_table(comparison, sweep, top), top),
        "glossary": glossary(top),
        "scatters": [scatter for scatter in drawn if scatter],
        "sensitivity": [
            {"name": name, "profiles": _drawn(sweep, name, judged, look, f"p{k}")}
            for k, name in enumerate(sweep.families)
        ],
        "parts": [metric.label if metric else "score" for metric in judged],
        "best": [(name, _best(sweep, name, top)) for name in sweep.families],
        "looks": look,
    }


def _judged(
    rule: Rule | None, sweep: Sweep, shown: Sequence[Metric]
) -> tuple[Metric | None, Metric | None]:
    """The figures of the first two parts of the score: constraint and objective, where limited."""
    known = {metric.key: metric for metric in shown}
    objective = None if rule is None else known.get(_validation(rule.objective))
    constraint = None if rule is None else known.get(_validation(rule.constraint))
    return (constraint, objective) if sweep.limited else (objective, None)


def _drawn(
    sweep: Sweep,
    name: str,
    judged: Sequence[Metric | None],
    look: Mapping[str, Style],
    prefix: str,
) -> list[tuple[Profile, str]]:
    """Hyperparameters of a method with their plots; without one, where nothing can be drawn."""
    found = []
    for k, profile in enumerate(profiles(sweep.families[name])):
        metric, drawing = judged[profile.part], ""
        if metric is not None and profile.order:
            drawing = sensitivity(sweep, profile, metric, look[name], f"{prefix}-{k}")
        found.append((profile, drawing))
    return found


def _alerts(comparison: Comparison, sweep: Sweep, task: Task, config: Any) -> list[Alert]:
    """Warnings of the task about the winners; what they say of test data is not for here."""
    names = {won.name: name for name, won in sweep.winners.items()}
    runs: dict[str, list[Any]] = {name: [] for name in sweep.winners}
    for run in comparison.runs:
        if run.name in names:
            runs[names[run.name]].append(dataclasses.replace(run, name=names[run.name]))
    won = dataclasses.replace(
        comparison, runs=[run for group in runs.values() for run in group],
        meta=comparison.meta | {"methods": list(runs), "seeds": []},
    )  # fmt: skip
    about = [a for a in alerts(task, config, won) if "test" not in a.text.lower().split()]
    return about or other_data(comparison.runs)


def _tried(sweep: Sweep) -> Table:
    """By method: settings, runs, what diverged, what is feasible."""
    lines = []
    for name, own in sweep.families.items():
        finished = sum(trial.finished for trial in own)
        cells = [len(own), finished, sum(trial.diverged for trial in own)]
        cells += [len(own) * len(sweep.seeds) - finished]
        cells += [sum(trial.score is not None for trial in own)]
        cells += [sum(trial.feasible for trial in own)] if sweep.limited else []
        lines.append((Head(name, method=name), [Cell(f"{number:,}") for number in cells]))
    heads = ["Settings", "Runs", "Runs that diverged", "Runs missing", "Settings ranked"]
    heads += ["Settings feasible"] if sweep.limited else []
    return Table("What was tried", "Method", list(map(Head, heads)), lines)


def _winners(sweep: Sweep, table: stats.Table, shown: Sequence[Metric]) -> Table:
    """The setting chosen of each method with its figures, or that none came to its end."""
    heads = [Head("Setting", wide=True), *_heads(sweep, shown)]
    lines = []
    for name, trials in sweep.families.items():
        won = sweep.winners.get(name)
        if won is None:
            cells = [Cell("none came to its end", wide=True), *[Cell("–")] * (len(heads) - 1)]
            lines.append((Head(name, method=name), cells))
            continue
        pairs = (f"{k.removeprefix('settings.')} {setting(v)}" for k, v in won.values.items())
        text = " · ".join(pair.replace(" ", "\N{NO-BREAK SPACE}") for pair in pairs)
        cells = [Cell(text or "as in the config", wide=True), *_feasible(sweep, won)]
        row = table[name]
        cells += [tables.figure(row[m.key], m.digits) if m.key in row else Cell("–") for m in shown]
        note = f"{won.name}, best of {len(trials):,}"
        lines.append((Head(name, method=name, note=note), cells))
    return Table("The setting chosen of each method", "Method", heads, lines)


def _best(sweep: Sweep, name: str, shown: Sequence[Metric]) -> Table:
    """The ten best settings of a method by the rule."""
    trials = [trial for trial in sweep.families[name] if trial.score is not None][:TOP]
    keys = list(varied(sweep.families[name]))
    lines = []
    for rank, trial in enumerate(trials, 1):
        cells = [Cell(setting(trial.values.get(key))) for key in keys] + _feasible(sweep, trial)
        cells += [Cell(fixed(number(trial.figures.get(m.key)), m.digits)) for m in shown]
        lines.append((Head(f"{rank}", note=trial.name), cells))
    heads = [*(Head(key.removeprefix("settings.")) for key in keys), *_heads(sweep, shown)]
    return Table(f"The best settings of {name} by the rule", "Rank", heads, lines)


def _heads(sweep: Sweep, shown: Sequence[Metric]) -> list[Head]:
    return [*([Head("Feasible")] if sweep.limited else []), *map(metric_head, shown)]


def _feasible(sweep: Sweep, trial: Trial) -> list[Cell]:
    """Whether a setting is feasible, where there is a limit."""
    return [Cell("yes" if trial.feasible else "no", met=trial.feasible)] if sweep.limited else []
