"""Every figure of the pages of results is one of the committed tables."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from fcco_experiments import sweep
from fcco_experiments.stats import Interval, paired

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"

Figures = dict[str, dict[str, Any]]


def table(*folders: str) -> Figures:
    """Mean, deviation and number of runs of each figure of each method."""
    found: Figures = {}
    for folder in folders:
        found |= json.loads((RESULTS / folder / "table.json").read_text())["methods"]
    return found


def runs(*folders: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Final figures of each method and seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for folder in folders:
        packed = (RESULTS / folder / "runs.jsonl.gz").read_bytes()
        for run in map(json.loads, gzip.decompress(packed).splitlines()):
            found.setdefault(run["name"], {})[run["seed"]] = run["result"]["final"]
    return found


def difference(found: Any, key: str, left: str, right: str) -> Interval:
    """Left - right, seed by seed."""
    seeds = sorted(found[left])
    assert seeds == sorted(found[right]) and len(seeds) == 5
    first, second = ([found[name][seed][key] for seed in seeds] for name in (left, right))
    return paired(first, second)


def tried(folder: str) -> dict[str, int]:
    """The number of settings of each method of a sweep."""
    found = sweep.read(RESULTS / folder)
    assert found is not None
    names = [entry["method"] for entry in found["settings"]]
    return {name: names.count(name) for name in names}


# Fairness.


def fairness() -> list[str]:
    data = ("adult", "compas")
    found = {name: table(f"fairness-{name}", f"fairness-{name}-automatic") for name in data}
    adult, compas = found.values()
    constrained = ("automatic", "sonex", "alexr2", "sox", "sonx", "icppac")
    facts = []

    def mean(own: Figures, name: str, key: str) -> float:
        return own[name][key]["mean"]

    floors = [mean(own, "sonex", "test_gap_floor") for own in found.values()]
    facts.append(f"would show {floors[0]:.3f} (Adult) and {floors[1]:.3f} (COMPAS) by chance")
    for own, place in ((adult, "on Adult"), (compas, "on COMPAS")):
        gaps = [mean(own, name, "test_gap") for name in ("erm", "sonex")]
        cost = mean(own, "erm", "test_auc") - mean(own, "sonex", "test_auc")
        facts.append(f"from {gaps[0]:.3f} to {gaps[1]:.3f} {place} for {cost:.4f}")
        excess = {name: mean(own, name, "train_violation") for name in constrained}
        assert min(excess, key=excess.__getitem__) == "automatic", "the smallest of all"
    least = [mean(own, "automatic", "train_violation") for own in found.values()]
    facts.append(f"an excess of {least[0]:.3f} and {least[1]:.3f}")
    for name, words in (("adult", ("less AUC", "a gap larger by ")), ("compas", ("less", ""))):
        own = runs(f"fairness-{name}", f"fairness-{name}-automatic")
        auc = difference(own, "test_auc", "sonex", "automatic")
        gap = difference(own, "test_gap", "automatic", "sonex")
        facts.append(f"{auc.mean:.4f} {words[0]}")
        facts.append(f"{auc.low:.4f} to {auc.high:.4f})")
        more = f"{words[1]}{gap.mean:.3f} " + ("" if words[1] else "more ")
        facts.append(f"{more}({gap.low:.3f} to {gap.high:.3f})")
    smallest = min(mean(adult, name, "test_gap") for name in constrained)
    assert smallest > 0.05, "no gap below 0.05 on Adult"
    return [*facts, "at most 0.005: 14 constraints", "(95 % interval", "below 0.05 on Adult"]


# Continual learning.

GAIN, LOST, ALL = "test_target_gain", "test_forgetting", "test_accuracy"
PENALTIES = ("automatic", "sonex", "sox")


def continual() -> list[str]:
    data, facts = ("weather", "bdd100k-subset"), []

    def points(gap: Interval) -> tuple[str, str]:
        return f"{100 * gap.mean:.1f}", f"{100 * gap.low:.1f} to {100 * gap.high:.1f}"

    def apart(name: str) -> Any:
        """Both halves, by method and seed; those of the held-out half with a mark."""
        held_out = runs(f"continual-{name}-held-out").items()
        return runs(f"continual-{name}-seen") | {f"{key}, held-out": own for key, own in held_out}

    whole = [runs(f"continual-{name}") for name in data]
    kept = {n: sum(row["train_kept"] for own in whole for row in own[n].values()) for n in whole[0]}
    facts.append(f"in {kept['automatic']:.0f} of 10 runs, SONEX (")
    facts.append(
        f"{tried('continual-weather-wide')['sonex']} settings tried) in {kept['sonex']:.0f}."
    )
    gains = [points(difference(own, GAIN, "sonex", "automatic")) for own in whole]
    facts.append(f"{gains[0][0]} points more on weather (95 % interval over seeds: {gains[0][1]})")
    facts.append(f"{gains[1][0]} on BDD100K ({gains[1][1]})")
    lost = {n: [100 * table(f"continual-{d}")[n][LOST]["mean"] for d in data] for n in PENALTIES}
    first, second = lost["automatic"], lost["sonex"]
    facts.append(f"loses {first[0]:.1f} and {first[1]:.1f} points, with SONEX ")
    facts.append(f"{second[0]:.1f} and {second[1]:.1f}.")
    weather, frames = map(apart, data)
    for own in (weather, frames):
        seen = difference(own, LOST, "automatic, held-out", "automatic")
        assert seen.low < 0 < seen.high, "held-out images alone do not help"
        sox = (
            difference(own, LOST, "sox, held-out", "sox"),
            difference(own, GAIN, "sox, held-out", "sox"),
        )
        assert max(gap.mean for gap in sox) < 0
        best = sorted(own, key=lambda n: -sum(row[ALL] for row in own[n].values()))[:2]
        assert set(best) == {"weighted, held-out", "replay, held-out"}
    assert difference(frames, LOST, "sonex, held-out", "sonex").mean < 0
    assert difference(frames, GAIN, "sonex, held-out", "sonex").mean < 0
    less = [
        points(difference(own, LOST, "automatic", "automatic-split, held-out"))
        for own in (weather, frames)
    ]
    cost = [
        points(difference(own, GAIN, "automatic", "automatic-split, held-out"))[0]
        for own in (weather, frames)
    ]
    facts.append(f"{less[0][0]} points less lost on weather ({less[0][1]}) for {cost[0]} of gain")
    facts.append(f"{less[1][0]} ({less[1][1]}) for {cost[1]}.")
    return [*facts, "within 1 point or one image", *["BDD100K"] * 2]


def prose(text: str) -> str:
    """What is left of a page without programs and addresses."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


@pytest.mark.parametrize(("name", "facts"), [("fairness", fairness), ("continual", continual)])
def test_every_figure_is_that_of_the_results(name: str, facts: Any) -> None:
    page = (DOCS / f"research/{name}.md").read_text(encoding="utf-8")
    lines = [line for line in prose(page).splitlines() if not line.startswith(("|", "<!--"))]
    text = re.sub(r"\s+", " ", "\n".join(lines))
    for fact in facts():
        assert fact in text, fact
        text = text.replace(fact, "", 1)
    assert not re.findall(r"[^.]{0,40}\d[^.]{0,40}", text), "figures that nothing was compared with"


def test_nothing_of_a_machine_is_in_the_results() -> None:
    paths = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert len(paths) > 60 and {path.suffix for path in paths} >= {".gz", ".json"}
    for path in paths:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        for place in (b"/tmp/", b"/root/", b"/home/"):
            assert place not in content, path
