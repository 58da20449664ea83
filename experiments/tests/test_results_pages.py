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
WORDS = 300

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
    return paired(*([found[name][seed][key] for seed in seeds] for name in (left, right)))


def spread(figure: dict[str, float], digits: int, scale: float = 1.0) -> str:
    assert figure["runs"] == 5
    return f"{scale * figure['mean']:.{digits}f} ± {scale * figure['std']:.{digits}f}"


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
    numbers = [
        tried(f"fairness-{n}-full-sweep") | tried(f"fairness-{n}-automatic-sweep") for n in data
    ]
    assert numbers[0] == numbers[1]
    constrained = ("automatic", "sonex", "alexr2", "sox", "sonx", "icppac")
    facts = []
    for name in (*constrained, "erm"):
        cells = [name, str(numbers[0].get(name, "-"))]
        for own in found.values():
            digits = {"test_auc": 4, "test_gap": 3, "train_violation": 4}
            cells += [spread(own[name][key], n) for key, n in digits.items()]
        facts.append(f"| {' | '.join(cells)} |")

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


def prose(text: str) -> str:
    """What is left of a page without programs and addresses."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


@pytest.mark.parametrize(("name", "facts"), [("fairness", fairness)])
def test_every_figure_is_that_of_the_results(name: str, facts: Any) -> None:
    page = (DOCS / f"research/results-{name}.md").read_text(encoding="utf-8")
    text = re.sub(r"\s+", " ", prose(page))
    for fact in facts():
        assert fact in text, fact
        text = text.replace(fact, "", 1)
    assert not re.findall(r"[^.]{0,40}\d[^.]{0,40}", text), "figures that nothing was compared with"
    words = [line for line in prose(page).splitlines() if not line.startswith(("|", "!"))]
    assert len(" ".join(words).split()) <= WORDS
    assert page.count("\n![") == 1 and page.count("\n|---") == 1
