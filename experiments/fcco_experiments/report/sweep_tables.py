"""Tables of a sweep's report: what was tried, who was chosen, the best ten, what matters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..stats import ARROWS
from ..task import Metric
from .profile import Profile, key_name, varied
from .study import Study, Trial, decisive
from .tables import HINTS, Cell, Head, Line, Table
from .words import fixed, plain, setting

__all__ = ["best", "importance", "matters", "tried", "values_text", "winners"]

TOP = 10
_STAYS = "\N{NO-BREAK SPACE}"


def tried(found: Study) -> Table:
    """By method: settings, seeds, runs, what diverged, what is feasible."""
    lines = []
    for name, trials in found.families.items():
        scored = [trial for trial in trials if trial.score is not None]
        runs = sum(trial.begun if found.saved else trial.finished for trial in trials)
        diverged = sum(trial.diverged for trial in trials)
        missing = len(trials) * len(found.seeds) - sum(trial.finished for trial in trials)
        cells = [len(trials), len(found.seeds), runs, diverged, missing, len(scored)]
        if found.limited:
            cells.append(sum(map(found.feasible, trials)))
        lines.append(Line(Head(name, method=name), tuple(Cell(f"{n:,}") for n in cells)))
    heads = ["Settings", "Seeds", "Runs", "Runs that diverged", "Runs missing", "Settings ranked"]
    heads += ["Settings feasible"] if found.limited else []
    return Table("What was tried", "Method", tuple(map(Head, heads)), tuple(lines))


def values_text(trial: Trial) -> str:
    """A setting in one line."""
    pairs = (f"{key_name(key)} {setting(value)}" for key, value in trial.values.items())
    return " · ".join(pair.replace(" ", _STAYS) for pair in pairs)


def winners(found: Study, shown: Sequence[Metric]) -> Table:
    """The setting chosen of each method with its figures, or that none came to its end."""
    heads = (Head("Setting", wide=True), *_heads(shown))
    if found.limited:
        heads = (heads[0], Head("Feasible"), *heads[1:])
    lines = []
    for name, trials in found.families.items():
        won = found.winners.get(name)
        if won is None:
            cells = (Cell("none came to its end", wide=True), *[Cell("–")] * (len(heads) - 1))
        else:
            cells = (Cell(values_text(won) or "as in the config", wide=True),)
            cells += (Cell("yes" if found.feasible(won) else "no"),) if found.limited else ()
            cells += tuple(_figure(won, metric) for metric in shown)
        note = f"{won.name}, best of {len(trials):,}" if won else ""
        lines.append(Line(Head(name, method=name, note=note), cells))
    return Table("The setting chosen of each method", "Method", heads, tuple(lines))


def best(found: Study, name: str, shown: Sequence[Metric]) -> Table:
    """The ten best settings of a method by the rule."""
    trials = [trial for trial in found.families[name] if trial.score is not None][:TOP]
    keys = list(varied(found.families[name]))
    heads = (*(Head(key_name(key)) for key in keys), *_heads(shown))
    if found.limited:
        heads = (*heads[: len(keys)], Head("Feasible"), *heads[len(keys) :])
    lines = []
    for rank, trial in enumerate(trials, 1):
        cells = [Cell(setting(trial.values.get(key))) for key in keys]
        cells += [Cell("yes" if found.feasible(trial) else "no")] if found.limited else []
        cells += [_figure(trial, metric) for metric in shown]
        lines.append(Line(Head(f"{rank}", note=trial.name), tuple(cells)))
    return Table(f"The best settings of {name} by the rule", "Rank", heads, tuple(lines))


def _heads(shown: Sequence[Metric]) -> tuple[Head, ...]:
    return tuple(Head(each.label, ARROWS[each.better], HINTS[each.better]) for each in shown)


def _figure(trial: Trial, metric: Metric) -> Cell:
    mean, deviation = trial.spread(metric.key)
    several = len(trial.runs) > 1 and math.isfinite(deviation)
    return Cell(
        fixed(mean, metric.digits), f"± {fixed(deviation, metric.digits)}" if several else ""
    )


def importance(
    found: Study, by_method: Mapping[str, Sequence[Profile]], shown: Sequence[Metric]
) -> Table:
    """Which hyperparameter matters: best and worst value, and what lies between them."""
    lines = []
    for name, own in by_method.items():
        for each in own:
            top, worst = each.top, each.worst
            label, digits = _part(found, each.part, shown)
            lost = ", ".join(map(setting, each.lost)) or "none"
            cells = (
                Cell(f"{len(each.values)}"),
                Cell("–" if top is None else setting(each.values[top])),
                Cell("–" if worst is None else setting(each.values[worst])),
                Cell("–" if top is None else fixed(each.range, digits), note=label),
                *([Cell(lost, wide=True)] if found.limited else []),
            )
            lines.append(Line(Head(key_name(each.key), method=name, note=name), cells))
    names = ("Values", "Best value", "Worst value", "Range of the profile")
    heads = tuple(map(Head, names))
    heads += (Head("Values with nothing feasible", wide=True),) if found.limited else ()
    return Table("What matters, by method", "Hyperparameter", heads, tuple(lines))


def _part(found: Study, part: int, shown: Sequence[Metric]) -> tuple[str, int]:
    """Name of a part of the score, and digits after the point."""
    metric = decisive(found, shown, part)
    if metric is not None:
        return metric.label, metric.digits
    return ("excess over the limit" if found.limited and part == 0 else "score"), 4


def matters(found: Study, name: str, own: Sequence[Profile], shown: Sequence[Metric]) -> str:
    """A sentence: the hyperparameter of a method that matters most, and the one that does least."""
    scored = [each for each in own if each.top is not None]
    if not own:
        return f"{name} has no hyperparameter with more than one value."
    if not scored:
        return f"No setting of {name} came to its end in all runs, so nothing can be said."
    first, last = scored[0], scored[-1]
    key = key_name(first.key)
    label, _ = _part(found, first.part, shown)
    if not first.lost and first.range == 0:
        return f"For {name} no hyperparameter matters: each value reaches the same “{label}”."
    text = f"For {name}, {key} matters most: "
    if first.lost:
        values = ", ".join(map(setting, first.lost))
        text += f"with {key} = {values} no setting is feasible, whatever the others are"
        if first.range > 0:
            text += (
                f"; among the other values the best “{label}” differs by {plain(first.range, 2)}"
            )
    else:
        text += f"between its best value, {_value(first, first.top)}, and its worst, "
        text += f"{_value(first, first.worst)}, the best reachable “{label}” differs by "
        text += plain(first.range, 2)
    if len(scored) > 1:
        text += f". {key_name(last.key)} matters least"
        text += f" ({plain(last.range, 2)})" if not last.lost else ""
    return f"{text}."


def _value(profile: Profile, place: int | None) -> str:
    return "none" if place is None else setting(profile.values[place])
