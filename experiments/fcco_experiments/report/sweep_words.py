"""Sentences of a sweep's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..task import Metric
from .cloud import Cloud
from .study import Study
from .words import title

__all__ = ["Words", "words"]


@dataclass(frozen=True)
class Words:
    """Paragraphs and notes, named after what they stand by."""

    summary: str
    chosen: tuple[str, ...]
    tried: str
    won: tuple[str, ...]
    figures: str
    compare: str
    cloud: str
    clouds: tuple[str, ...]
    further: str
    profile: str
    importance: str
    drawn: str
    files: tuple[tuple[str, str], ...]


def words(
    found: Study, meta: Mapping[str, Any], every: Sequence[Cloud], top: Sequence[Metric]
) -> Words:
    """All of them.

    Args:
        found: the sweep.
        meta: `comparison.json`.
        every: the clouds that are drawn.
        top: figures of the tables.
    """
    mean = "Mean ± standard deviation over the tuning seeds"
    several = any(len(trial.runs) > 1 for trial in found.trials)
    mean = f"{mean}." if several else "Means over the tuning seeds."
    if len(found.seeds) < 2:
        mean = "One tuning seed, so there is no deviation."
    return Words(
        summary=_summary(found, meta),
        chosen=_chosen(found),
        tried=_tried(found),
        won=_won(found),
        figures=f"{mean} ↑ higher is better, ↓ lower is better. No figure is of test data.",
        compare=f"fcco compare {meta.get('task')} --config winners.yaml" if found.winners else "",
        cloud=_cloud(found),
        clouds=tuple(_below(each) for each in every),
        further="Further: " + "; ".join(each.panel.title for each in every[2:]),
        profile="The profile of a hyperparameter is, for each of its values, the best setting by "
        "the rule that has this value, whatever the others are: it says what is lost by a wrong "
        "value when all else is tuned well.",
        importance="Range of the profile: how far apart the best settings of the best and of the "
        "worst value are, in the figure named below it"
        + (
            ", among values that reach a feasible setting. A value that reaches none costs more "
            "than any range: such hyperparameters come first."
            if found.limited
            else "."
        ),
        drawn="For each value, thin bars hold the middle 80 % of all "
        + ("runs" if found.saved else "settings")
        + " that have it, thick ones the middle 50 %, and the dash is their median, over "
        "all other hyperparameters. The line with dots is the profile"
        + (", hollow where it is not feasible" if found.limited else "")
        + "; ★ is the winner. What is far out leaves the frame. The hyperparameter that matters "
        "most comes first.",
        files=(
            ("sweep.json", "every setting with its means, score and rank"),
            ("runs.jsonl", "every run as a line: settings and figures"),
            ("winners.yaml", "the config of the winners, for the comparison"),
            ("table.json, table.md", "the winners' figures"),
            ("comparison.json", "what was run"),
        ),
    )


def _summary(found: Study, meta: Mapping[str, Any]) -> str:
    config = meta.get("config") or {}
    runs = sum(trial.begun if found.saved else trial.finished for trial in found.trials)
    parts = [f"data: {config['data']}"] if config.get("data") else []
    parts.append(_count(len(found.families), "method"))
    parts += [_count(len(found.trials), "setting"), _count(runs, "run")]
    parts += [_count(config["epochs"], "epoch")] if config.get("epochs") else []
    parts += ["quick version"] if meta.get("quick") else []
    parts += [str(meta["created"])[:10]] if meta.get("created") else []
    return " · ".join(parts)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + "s" * (number != 1)


def _chosen(found: Study) -> tuple[str, ...]:
    seeds = found.seeds
    several = (
        f"the mean of its figures over {len(seeds)} tuning seeds"
        if seeds[1:]
        else "its run with a tuning seed"
    )
    first = f"Each setting is judged by {several} ({', '.join(map(str, seeds))}), at the end of "
    first += "training. "
    if found.limited:
        first += (
            "Feasibility comes first: any setting within the limit is better than any beyond it; "
            "among those beyond it, the nearest is the best. "
        )
    first += (
        "Test data took no part: the rule never sees them. A setting of which a run diverged or is "
        "missing is not ranked."
    )
    return (first,)


def _tried(found: Study) -> str:
    note = "Settings times seeds make the runs. Ranked: every run of the setting came to its end."
    if found.limited:
        good = sum(map(found.feasible, found.trials))
        share = f"{good:,} of {_count(len(found.trials), 'setting')}"
        note += f" Feasible: within the limit of the rule on the mean over seeds; in all, {share}."
        none = [name for name, own in found.families.items() if not any(map(found.feasible, own))]
        if none:
            note += f" Without a feasible setting: {', '.join(none)}."
    return note


def _won(found: Study) -> tuple[str, ...]:
    if not found.winners:
        return ("No setting came to its end in all its runs, so there is no winner.",)
    ordered = sorted(found.winners, key=lambda name: found.winners[name].score or ())
    lines = []
    if len(ordered) > 1:
        text = f"By the rule the winners come in this order: {', '.join(ordered)}. This is no "
        text += "result yet. "
    else:
        text = ""
    text += (
        "Figures of a winner are flattered, for it was chosen by them, among many. Test figures of "
        "these runs are not shown: read here, they would become part of the choice. They are for "
        "fresh seeds, with which nothing was tuned."
    )
    lines.append(text)
    bad = [n for n in ordered if found.limited and not found.feasible(found.winners[n])]
    if bad:
        which = "the nearest to the limit was chosen"
        lines.append(f"No setting of {', '.join(bad)} is feasible; {which}.")
    return tuple(lines)


def _cloud(found: Study) -> str:
    if found.saved:
        text = "Every dot is a run of the sweep at the end of training, in the colour of its "
        text += "method"
    else:
        text = "The runs are not saved here, so every dot is the mean of a setting over its "
        text += "seeds, in the colour of its method"
    if any(map(found.feasible, found.trials)):
        text += ": deep where the setting is feasible by the rule, pale where it is not"
    text += (
        ". The lines are frontiers, one for each method: means over seeds of the settings that no "
        "other setting of the method beats in both figures. ★ is the winner of a method."
    )
    diverged = sum(trial.diverged for trial in found.trials)
    if diverged:
        text += f" {_count(diverged, 'run')} that diverged {'is' if diverged == 1 else 'are'} "
        text += "not drawn."
    return text


def _below(cloud: Cloud) -> str:
    panel = cloud.panel
    total = sum(own.x.size for own in cloud.dots.values())
    notes = []
    for name, value, (low, high) in (
        (panel.x_label or title(panel.x), panel.x_reference, cloud.x_limits),
        (panel.label or title(panel.y), panel.reference, cloud.y_limits),
    ):
        if value is not None and low <= value <= high:
            notes.append(f"Dotted line: {name} = {value:g}.")
    if cloud.outside:
        notes.append(
            f"{cloud.outside:,} of {total:,} dots lie far out, outside the frame, which is set "
            "for the rest."
        )
    else:
        notes.append(f"All {total:,} dots are in the frame.")
    out = [name for name, at in cloud.winners.items() if not cloud.shows(at)]
    if out:
        notes.append(f"Winners outside: {', '.join(out)}.")
    return " ".join(notes)
