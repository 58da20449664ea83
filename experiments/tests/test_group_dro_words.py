"""The report of group DRO: its words fit the data, its keys are those of the rows."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from fcco_experiments.data import celeba
from fcco_experiments.data.grouped import GroupedPart
from fcco_experiments.task import Method
from fcco_experiments.tasks.group_dro import figures, told, words
from fcco_experiments.tasks.group_dro.config import GroupDRO

DATA = ("celeba", "sentiment", "amazon", "camelyon17", "grouped-synthetic")
WORDS = ("sonex", "sonx", "alexr2", "ooa", "erm", "uniform")


def config(**changes: Any) -> GroupDRO:
    methods = {f"my-{word}": Method(word, 0.1) for word in WORDS}
    usual: dict[str, Any] = {"data": "celeba", "methods": methods, "seeds": (0, 1, 2)}
    return GroupDRO(**(usual | changes))


def evaluated() -> set[str]:
    """Keys of a row, from the function that makes it."""
    ids = torch.tensor([0, 0, 1, 2])
    part = GroupedPart(ids, ids, ids, ("a", "b", "c"), ids, ("a", "b", "c"))
    found = set()
    for name in ("train", "val", "test"):
        row, _ = figures.figures(name, part, torch.ones(4), torch.ones(4), 0.15, "worst")
        found |= set(row)
    return found


ADDED = {"losses", "weights", "tracking_error", "threshold", "threshold_exact", "seconds"}
ENDS = {"gram_smallest", "gram_smallest_with_s", "gram_largest", "samples_per_second"}


@pytest.mark.parametrize("data", DATA)
def test_every_key_of_the_page_is_one_of_the_rows(data: str) -> None:
    page = words.page(config(data=data))
    known = evaluated() | ADDED | ENDS
    keys = [metric.key for metric in page.metrics]
    assert len(set(keys)) == len(keys)
    asked = {*keys, *page.entries, *(panel.y for panel in page.panels)}
    asked |= {panel.x for panel in page.panels if panel.x}
    assert asked <= known
    # and nothing of the rows is left out, but what serves the warnings
    assert known - asked == {"test_smallest"}


def test_lists_are_drawn_as_lists_and_numbers_as_numbers() -> None:
    lists = {"losses", "weights", "test_reported"}
    for panel in words.page(config()).panels:
        assert (panel.kind in ("family", "change", "dots")) == (panel.y in lists), panel
    kinds = {(panel.kind, panel.y) for panel in words.page(config()).panels}
    for wanted in (
        ("curve", "train_cvar"),
        ("curve", "test_accuracy"),
        ("curve", "test_worst_accuracy"),
        ("curve", "tracking_error"),
        ("family", "losses"),
        ("change", "losses"),
        ("dots", "test_reported"),
    ):
        assert wanted in kinds


@pytest.mark.parametrize("data", DATA)
def test_headline_and_directions(data: str) -> None:
    page = words.page(config(data=data))
    top = {metric.key: metric.better for metric in page.metrics if metric.headline}
    assert top == {
        "train_cvar": "lower",
        "test_cvar": "lower",
        "test_worst_accuracy": "higher",
        "test_accuracy": "higher",
        "seconds": "none",
    }
    for metric in page.metrics:
        good = "higher" if "accuracy" in metric.key else "lower"
        part = metric.key.split("_")[0]
        if part in ("train", "val", "test"):
            name = "validation" if part == "val" else part
            assert metric.better == good and metric.label.endswith(f", {name}"), metric
    assert page.references == ("my-erm", "my-uniform")


def test_the_accuracy_of_groups_is_named_by_its_data() -> None:
    def label(data: str) -> str:
        metrics = words.page(config(data=data)).metrics
        return next(m.label for m in metrics if m.key == "test_worst_accuracy")

    assert label("celeba") == "worst of 4 groups, test"
    assert label("amazon") == "10th percentile, test"
    assert label("camelyon17") == "worst slide, test"
    assert label("sentiment") == label("unknown") == "worst group, test"


def test_the_question_says_what_was_done() -> None:
    asked = config(ratio=0.25, groups_per_batch=8, batch=32, epochs=7, choose_by="val_error")
    text = " ".join(words.page(asked).question)
    for word in ("worst 25 % of groups", "8 groups with 4 samples", "7 passes", "3 seeds"):
        assert word in text
    for word in ("blond", "12 to 28", "worst-group accuracy on validation data", "threshold"):
        assert word in text
    names = ("SONEX", "SONX", "ALEXR2", "OOA", "ERM", "Uniform")
    assert all(name in text for name in names)
    few = words.page(config(methods={"a": Method("sonex", 0.1)}, seeds=(0,))).question
    assert "SONEX" in few[2] and not any(name in few[2] for name in names[1:])
    assert "one seed" in few[3]


def test_the_question_says_what_is_trained() -> None:
    def first(**changes: Any) -> str:
        return words.page(config(**changes)).question[0]

    frozen = first(backbone="resnet50", train="head")
    assert frozen.startswith("A network (resnet50, pretrained)") and "stays as it is" in frozen
    whole = first(backbone="resnet50", train="all", pretrained=False)
    assert "(resnet50, from random weights)" in whole and "stays as it is" not in whole
    assert first().startswith("A linear classifier") and "stays" not in first()
    assert first(hidden=(8,)).startswith("A small network")


@pytest.mark.parametrize("data", DATA)
def test_every_data_set_says_which_test_figures_to_trust(data: str) -> None:
    page = words.page(config(data=data))
    own = told.TOLD[data]
    assert own.title in page.title and len(own.trusted) > 50
    assert page.question[-1] == f"{own.trusted} {own.repeats}".strip()
    without = words.page(config(data=data, distinct=True)).question[-1]
    assert without == f"{own.trusted} {own.without}".strip()


def test_names_of_faces_are_in_the_order_of_the_reader() -> None:
    names = words.page(config()).entries
    bits = list(product((0, 1), repeat=4))  # the reader's id: the bits as a binary number
    for number, values in enumerate(bits):
        wanted = [pair[bit] for pair, bit in zip(celeba.WORDS, values, strict=True)]
        assert sum(bit << (3 - place) for place, bit in enumerate(values)) == number
        assert names["losses"][number] == names["weights"][number] == ", ".join(wanted)
    assert names["test_reported"] == (
        "woman, not blond", "woman, blond", "man, not blond", "man, blond",
    )  # fmt: skip


def test_many_groups_are_shown_as_quantiles() -> None:
    assert words.page(config(data="amazon")).entries["losses"] == told.QUANTILES
    for number in (3, 64, 65, 200):
        values = figures.shown(torch.arange(number, dtype=torch.float64))
        names = told.shown_names([f"user {k}" for k in range(number)])
        assert len(values) == len(names)
        assert (names == list(told.QUANTILES)) == (number > 64)
    assert told.QUANTILES[0] == "0 %" and told.QUANTILES[10] == "100 %"


def test_names_that_only_the_runs_know_are_left_to_them() -> None:
    for data in ("sentiment", "camelyon17", "grouped-synthetic", "unknown"):
        entries = words.page(config(data=data)).entries
        assert set(entries) == {"losses", "test_reported", "weights"}
        assert not any(entries.values())
