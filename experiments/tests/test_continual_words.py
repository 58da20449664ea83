"""The report of continual learning: its words fit the config, its keys are those of the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fcco_experiments.task import Method
from fcco_experiments.tasks.continual import figures, judge, told, words
from fcco_experiments.tasks.continual.config import Continual

DATA = ("weather", "bdd100k-subset", "bdd100k", "scenes-synthetic", "unknown")
WORDS = ("sonex", "sox", "sonx", "alexr2", "weighted", "replay", "finetune")
LISTS = {"constraints", "zero_one", "accuracies"}


def config(**changes: Any) -> Continual:
    methods = {f"my-{word}": Method(word, 0.1) for word in WORDS}
    usual: dict[str, Any] = {
        "data": "weather", "target": "foggy", "protected": ("clear", "cloudy", "rainy", "snowy"),
        "methods": methods, "seeds": (0, 1, 2),
    }  # fmt: skip
    return Continual(**(usual | changes))


def evaluated() -> set[str]:
    """Keys of a row, from the function that makes it."""
    found = figures.by_class(torch.eye(3), torch.arange(3))
    parts = ("train", "val", "test")
    keys = {key for part in parts for key in figures.changes(part, found, found, 0)}
    return keys | {"objective", "multipliers", "tracking_error"}


ENDS = {
    "kkt_stationarity", "kkt_feasibility", "kkt_complementarity", "kkt_best_stationarity",
    "kkt_best_complementarity", "best_multipliers", "penalty", "samples_per_second", "seconds",
}  # fmt: skip
UNSHOWN = {"accuracies", "val_constraints", "val_zero_one", "val_accuracies", "test_constraints"}
"""Lists that a table each would be too much for."""


@pytest.mark.parametrize("data", DATA)
def test_every_key_of_the_page_is_one_of_the_rows(data: str) -> None:
    page = words.page(config(data=data))
    known = evaluated() | ENDS
    keys = [metric.key for metric in page.metrics]
    assert len(set(keys)) == len(keys)
    asked = {*keys, *page.entries, *(panel.y for panel in page.panels)}
    asked |= {panel.x for panel in page.panels if panel.x}
    assert asked <= known
    assert known - asked == UNSHOWN


def test_lists_are_drawn_as_lists_and_numbers_as_numbers() -> None:
    panels = words.page(config()).panels
    for panel in panels:
        own = panel.y.removeprefix("test_") in LISTS | {"multipliers"}
        assert (panel.kind in ("family", "change", "dots")) == own, panel
    kinds = [(panel.kind, panel.y, panel.x) for panel in panels]
    assert len(set(kinds)) == len(kinds)
    for wanted in (
        ("curve", "train_target_gain", ""),  # Figure 3
        ("curve", "train_forgetting", ""),
        ("curve", "train_violation", ""),
        ("family", "zero_one", ""),  # Figures 4 and 5
        ("family", "constraints", ""),
        ("family", "multipliers", ""),
        ("change", "test_accuracies", ""),
        ("tradeoff", "test_target_gain", "train_forgetting"),
        ("curve", "objective", ""),
    ):
        assert wanted in kinds


def test_limits_are_those_of_the_config() -> None:
    panels = words.page(config(forget_limit=0.03)).panels
    assert {p.reference for p in panels if p.kind == "curve" and "forgetting" in p.y} == {0.03}
    assert {p.x_reference for p in panels if p.kind == "tradeoff"} == {0.03}
    for panel in panels:
        if panel.kind == "family":
            assert panel.reference == (None if panel.y == "multipliers" else 0.0)


def test_headline_and_directions() -> None:
    page = words.page(config())
    top = {metric.key: metric.better for metric in page.metrics if metric.headline}
    assert top == {
        "test_target_gain": "higher",
        "test_forgetting": "lower",
        "test_retained": "higher",
        "train_forgetting": "lower",
        "train_kept": "higher",
        "train_violation": "lower",
        "val_target_gain": "higher",
        "penalty": "none",
        "seconds": "none",
    }
    lower = ("forgetting", "violation", "loss", "excess", "images")
    for metric in page.metrics:
        part, _, rest = metric.key.partition("_")
        if part in ("train", "val", "test"):
            name = "validation" if part == "val" else part
            good = "lower" if rest.endswith(lower) else "higher"
            assert metric.better == good and metric.label.endswith(f", {name}"), metric
    assert page.references == ("my-finetune",)
    meanings = {metric.key: metric.meaning for metric in page.metrics}
    assert judge.allowed(config()) in meanings["train_kept"]


def test_entries_are_named_by_the_config() -> None:
    own = config(target="overcast", protected=("clear", "partly cloudy"))
    entries = words.page(own).entries
    for key, names in entries.items():
        wanted = ("clear", "partly cloudy")
        assert names == (wanted if "accuracies" not in key else (*wanted, "overcast")), key


def test_the_question_says_what_was_done() -> None:
    asked = config(epochs=7, steps_per_epoch=13, batch=24, negatives=36, per_class=5)
    text = " ".join(words.page(asked).question)
    for word in (
        "clear, cloudy, rainy and snowy", '"the weather is foggy."', "Four constraints stand",
        "7 times 13 of 24 pairs of foggy and 36", "5 images of each protected class",
        "from 3 seeds", judge.score_rule(asked), "more than the larger of 1 point and one image",
    ):  # fmt: skip
        assert word in text, word
    names = ("SONEX", "SOX", "SONX", "ALEXR2", "Weighted", "Replay", "Finetune")
    assert all(name in text for name in names)
    few = words.page(config(methods={"a": Method("sox", 0.1)}, seeds=(0,), classes_per_batch=2))
    assert "SOX" in few.question[3] and not any(n in few.question[3] for n in ("SONX", "ALEXR2"))
    assert "from one seed" in few.question[4] and "2 of the 4 protected" in few.question[4]
    one = words.page(config(protected=("clear",), methods={})).question
    assert "One constraint stands" in one[1] and one[3] == "No method is given."
    assert "Seven" not in one[1]


def test_the_question_says_what_is_trained() -> None:
    def said(**changes: Any) -> str:
        return words.page(config(**changes)).question[2]

    backbones = {"image_backbone": "efficientnet-lite0", "text_backbone": "minilm"}
    frozen = said(**backbones)
    assert "efficientnet-lite0 for images and minilm for texts (pretrained)" in frozen
    assert "stay as they are; the projections are trained" in frozen
    assert "the backbone of texts are trained" in said(**backbones, train="text")
    assert "(from random weights)" in said(**backbones, train="all", pretrained=False)
    assert "All of it is trained" in said(**backbones, train="all")
    assert "two linear maps" in said() and "for 5 epochs" in said()
    assert "a small network and a linear map" in said(hidden=8)
    assert "(rank 16)" in said() and "correction of their own" not in said(heads=0)
    assert "was given" in said(old="here.pt") and "epochs" not in said(old="here.pt")
    assert "another collection" in said(**backbones, extra_pairs="there")


@pytest.mark.parametrize("data", DATA)
def test_every_data_set_says_which_figures_to_trust(data: str) -> None:
    page = words.page(config(data=data))
    own = told.TOLD.get(data, told.Told(data))
    assert own.title in page.title and "foggy" in page.title
    assert own.images in page.question[0] and page.question[-1].endswith(own.trusted)
    assert len(own.trusted) > 50
