"""The text of the pages on fairness and continual learning has the figures of the results."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

from fcco_experiments import sweep

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"
FAIRNESS, CONTINUAL = (
    (DOCS / f"research/details/{name}.md").read_text(encoding="utf-8").splitlines()
    for name in ("fairness", "continual")
)
DATA = {"adult": "Adult", "compas": "COMPAS"}


def read(path: str) -> Any:
    return json.loads((RESULTS / path).read_text(encoding="utf-8"))


def methods(folder: str) -> dict[str, Any]:
    return read(f"{folder}/table.json")["methods"]


def test_figures_in_the_text_on_fairness() -> None:
    text = " ".join(FAIRNESS)
    for ablation, words in (("beta", "the mean AUC is"), ("theta", "it is")):
        means = [own["train_auc"]["mean"] for own in methods(f"fairness-adult-{ablation}").values()]
        found = f"{words} {min(means):.4f} to {max(means):.4f} (`adult-{ablation}`"
        assert len(means) == 5 and found in text
    usual = [own for data in DATA for own in methods(f"fairness-{data}").values()]
    assert min(own["train_inside"]["mean"] for own in usual) >= 0.998 and "99.8 %" in text
    values = [own["singular_value"]["mean"] for own in methods("fairness-adult").values()]
    assert max(values) < 2e-7 and "below 2e-7" in text
    seconds = [
        [own["seconds"]["mean"] for own in methods(f"fairness-{data}").values()] for data in DATA
    ]
    (a, b), (c, d) = ((min(each), max(each)) for each in seconds)
    assert f"{a:.0f} to {b:.0f} s on Adult and {c:.0f} to {d:.0f} s on COMPAS" in text
    for pair in (("alexr2", "sox"), ("sonex", "sox"), ("sonex", "sonx")):
        one, other = (methods("fairness-adult")[name]["test_auc"] for name in pair)
        error = math.hypot(one["std"], other["std"]) / math.sqrt(one["runs"])
        assert f"{one['mean'] - other['mean']:.4f} ± {error:.4f}" in text, pair
    compas = methods("fairness-compas")
    ahead, more = (
        [compas["sox"][key]["mean"] - compas[name][key]["mean"] for name in ("alexr2", "sonex")]
        for key in ("test_auc", "test_gap")
    )
    assert f"ahead of ALEXR2 by {ahead[0]:.4f} and of SONEX by {ahead[1]:.4f}" in text
    assert f"larger by {more[0]:.3f} and {more[1]:.3f}" in text


def test_figures_in_the_text_on_unseen_images() -> None:
    own = methods("continual-weather-held-out")["automatic"]
    assert own["train_violation"]["mean"] + own["train_violation"]["std"] < 0
    lost = f"still loses {100 * own['train_forgetting']['mean']:.1f} points of accuracy"
    assert lost in " ".join(CONTINUAL)


def test_every_penalty_by_itself() -> None:
    text = " ".join(CONTINUAL)
    weather, frames = methods("continual-weather-rho"), methods("continual-bdd100k-subset-rho")
    lost = []
    for method in ("sonex-", "sox-"):
        for every in (weather, frames):
            own = [every[name]["test_target_gain"]["mean"] for name in every if method in name]
            assert len(own) == 8
            lost.append(f"{100 * (max(own) - min(own)):.1f}")
    one = "SONEX loses {} points of gain on weather and {} on BDD100K, SOX {} and {}:"
    assert one.format(*lost) in text
    less = [n for each in (weather, frames) for n in each if each[n]["train_kept"]["mean"] < 1]
    assert less == ["sonex-0.01"] and "but for SONEX 0.01 on weather (0.8)" in text
    assert weather["sonex-0.01"]["train_kept"]["mean"] == 0.8


def test_learning_rates_of_sonx() -> None:
    text = " ".join(CONTINUAL)
    swept = sweep.read(RESULTS / "continual-weather-finetune-sweep")
    found = {}
    for run in swept["settings"] if swept else ():
        if run["method"] == "sonx":
            figures = [run["figures"][key] for key in ("train_target_gain", "train_forgetting")]
            setting = run["setting"]["lr"], run["setting"]["settings.penalty"]
            found[setting] = [f"{100 * figure:.1f}" for figure in figures]
    assert len(found) == 8
    one, ten = found.pop((0.0001, 1)), found.pop((0.0001, 10))
    assert f"gains {one[0]} points and forgets {one[1]} with lr 0.0001 and rho 1" in text
    assert f"({ten[0]} and {ten[1]} with rho 10)" in text
    assert {forgotten for _, forgotten in found.values()} == {"100.0"}
    assert {rate for rate, _ in found} == {0.001, 0.01, 0.1}
    assert "with lr 0.001, 0.01 and 0.1 it forgets 100.0" in text


def test_nothing_of_a_machine_is_in_the_results() -> None:
    paths = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert len(paths) > 60 and {path.suffix for path in paths} >= {".gz", ".json"}
    for path in paths:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        for place in (b"/tmp/", b"/root/", b"/home/"):
            assert place not in content, path
