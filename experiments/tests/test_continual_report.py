"""Figures of classes, who learned without forgetting, what not to believe, and the report's words."""  # noqa: E501

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from fcco_experiments.task import Method, Row
from fcco_experiments.tasks.continual import TASK, Continual, report
from fcco_experiments.tasks.continual.training import METHODS, Classes, by_class, changes
from hypothesis import given
from hypothesis import strategies as st

# Figures.


@pytest.mark.parametrize("seed", range(3))
def test_accuracies_and_losses_of_classes(seed: int) -> None:
    random = np.random.default_rng(seed)
    label = np.concatenate([np.arange(4), random.integers(0, 4, 40)])
    scores = 20 * random.standard_normal((44, 4)).astype(np.float32)
    right, loss, count = np.zeros(4), np.zeros(4), np.zeros(4)
    for row, y in zip(scores.astype(np.float64), label, strict=True):
        count[y] += 1
        right[y] += int(np.argmax(row) == y)
        loss[y] += math.log(sum(math.exp(s - row.max()) for s in row)) + row.max() - row[y]
    found = by_class(torch.from_numpy(scores), torch.from_numpy(label))
    assert found.accuracy.tolist() == pytest.approx(right / count, abs=1e-12)
    assert found.loss.tolist() == pytest.approx(loss / count, rel=1e-10)
    assert found.count.tolist() == count.tolist() and found.loss.dtype == torch.float64


def test_small_losses_keep_their_digits() -> None:
    """In float32 the loss of a sure answer would be 0 and its change rounding alone."""
    found = by_class(torch.tensor([[20.0, 0.0], [0.0, 30.0]]), torch.tensor([0, 1]))
    assert found.loss.tolist() == pytest.approx([math.exp(-20), math.exp(-30)], rel=1e-4)


def classes(right: list[int], count: list[int], loss: list[float]) -> Classes:
    share = [r / n for r, n in zip(right, count, strict=True)]
    return Classes(
        torch.tensor(share, dtype=torch.float64),
        torch.tensor(loss, dtype=torch.float64),
        torch.tensor(count),
    )


COUNT = [400, 20, 30]  # the last one is the target


def test_changes_by_hand() -> None:
    old = classes([380, 18, 3], COUNT, [0.5, 0.7, 2.0])
    now = classes([372, 19, 24], COUNT, [0.6, 0.2, 0.3])
    row = changes("val", now, old, limit=0.01)
    wanted = {
        "target_accuracy": 24 / 30, "target_gain": 21 / 30, "target_loss": 0.3,
        "protected_accuracy": (372 / 400 + 19 / 20) / 2,
        "protected_change": (-8 / 400 + 1 / 20) / 2,
        "accuracy": (372 / 400 + 19 / 20 + 24 / 30) / 3,
        "forgetting": 8 / 400, "forgotten_images": 8, "violation": 0.1, "retained": 0, "kept": 0,
        "excess": 8 / 400 - 0.01,
    }  # fmt: skip
    lists = {
        "val_constraints": [0.1, -0.5], "val_zero_one": [8 / 400, -1 / 20],
        "val_accuracies": [372 / 400, 19 / 20, 24 / 30],
    }  # fmt: skip
    assert set(row) == {f"val_{key}" for key in wanted} | set(lists)
    for key, value in wanted.items():
        assert row[f"val_{key}"] == pytest.approx(value, abs=1e-8), key
    for key, values in lists.items():
        assert row[key] == pytest.approx(values, abs=1e-12), key


@pytest.mark.parametrize(
    ("lost", "limit", "kept", "beyond"),
    [
        ([4, 1], 0.01, 1, 0.0),  # one point of 400, one of 20 images: both allowed
        ([5, 0], 0.01, 0, 1 / 400),
        ([4, 2], 0.01, 0, 1 / 20),
        ([1, 1], 0.0, 1, 0.0),
        ([2, 0], 0.0, 0, 1 / 400),
        ([-9, 1], 0.01, 1, 0.0),
    ],
)
def test_one_image_is_always_allowed(
    lost: list[int], limit: float, kept: int, beyond: float
) -> None:
    old = classes([380, 18, 3], COUNT, [0.0] * 3)
    now = classes([380 - lost[0], 18 - lost[1], 0], COUNT, [0.0] * 3)
    row = changes("train", now, old, limit)
    assert row["train_kept"] == kept
    assert row["train_excess"] == pytest.approx(beyond, abs=1e-8)
    assert (row["train_excess"] == 0) == bool(kept)  # exactly: it is the first figure of a choice
    assert row["train_retained"] == (max(lost) <= 0)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=2, max_size=5))
def test_laws_of_changes(pairs: list[tuple[int, int]]) -> None:
    count = [60] * len(pairs)
    old, now = (classes(list(each), count, [0.0] * len(count)) for each in zip(*pairs, strict=True))
    row = changes("test", now, old, 0.01)
    lost = [a - b for a, b in pairs[:-1]]
    assert row["test_forgotten_images"] == pytest.approx(sum(max(each, 0) for each in lost))
    assert row["test_forgetting"] == pytest.approx(max(lost) / 60)
    assert row["test_retained"] == all(each <= 0 for each in lost)
    assert row["test_kept"] == all(each <= 1 for each in lost)


# The rule.

PENALTIES = {"sonex": 2.0, "sonex-rho-10": 10.0, "sox": 40.0, "sonx": 1.0}
WORDS = {"sonex-rho-10": "sonex", "plain": "finetune"}


def config(**changes: Any) -> Continual:
    names = (*PENALTIES, "weighted", "replay", "plain")
    methods = {
        name: Method(
            WORDS.get(name, name),
            0.1,
            settings={"penalty": PENALTIES[name]} if name in PENALTIES else {},
        )
        for name in names
    }
    usual: dict[str, Any] = {"data": "weather", "target": "foggy", "protected": ("clear", "rainy")}
    usual |= {"methods": methods, "seeds": (0, 1, 2)}
    return Continual(**(usual | changes))


def row(**changes: Any) -> Row:
    """A run that learned and kept everything."""
    usual: Row = {
        "epoch": 5, "objective": 0.1, "constraints": [-0.3, -0.1], "zero_one": [0.0, -0.01],
        "multipliers": [0.1, 0.0], "train_accuracy": 0.8, "test_counts": [60, 50, 70],
    }  # fmt: skip
    for part in ("train", "val", "test"):
        usual |= {
            f"{part}_target_accuracy": 0.6, f"{part}_target_gain": 0.4, f"{part}_forgetting": 0.0,
            f"{part}_kept": 1.0, f"{part}_retained": 1.0, f"{part}_excess": 0.0,
            f"{part}_violation": -0.1,
        }  # fmt: skip
    return usual | changes


def rows(key: str, *values: float, **changes: Any) -> list[Row]:
    return [row(**{key: value}, **changes) for value in values]


def forgetful(*lost: float, **changes: Any) -> list[Row]:
    """Runs in which a protected class loses so much."""
    return [
        row(
            train_forgetting=each, test_forgetting=each, train_kept=0.0, train_retained=0.0,
            test_retained=0.0, train_excess=each - 0.01, **changes,
        )
        for each in lost
    ]  # fmt: skip


def test_kept_comes_before_the_target_and_test_data_never_count() -> None:
    rule = TASK.rule(config())
    best, good = row(val_target_accuracy=0.9), row(val_target_accuracy=0.8, train_violation=-1.0)
    close = forgetful(0.02, val_target_accuracy=0.99)[0]
    far = forgetful(0.05, val_target_accuracy=1.0)[0]
    tied = row(val_target_accuracy=0.8, train_violation=0.5)
    assert sorted([far, tied, close, good, best], key=rule.score) == [best, good, tied, close, far]
    assert rule.feasible(rule.score(tied)) and not rule.feasible(rule.score(close))
    for key in row():
        if key.startswith("test_"):
            assert rule.score(row(**{key: 0.123})) == rule.score(row())
    assert "the larger of 1 point and one image" in rule.text
    assert "than one image (by" in TASK.rule(config(forget_limit=0.0)).text


def test_the_judged_figures_are_columns_of_the_first_table() -> None:
    rule = TASK.rule(config())
    shown = {metric.key: metric for metric in TASK.page(config()).metrics if metric.headline}
    assert {rule.objective, rule.constraint} < shown.keys() and rule.limit == 0.0
    assert shown[rule.objective].better == "higher" and shown[rule.constraint].better == "lower"
    # What the judged figure says is what the verdict says: kept in every run.
    assert all(
        (r[rule.constraint] <= 0) == (r["train_kept"] == 1) for r in [row(), *forgetful(0.1)]
    )


# The verdict.


def line(found: tuple[str, ...], start: str) -> str:
    (said,) = (each for each in found if each.startswith(start))
    return said


def test_the_largest_gain_of_those_that_keep_wins() -> None:
    methods = {
        "sonex": rows("test_target_gain", 0.40, 0.42, 0.44, test_forgetting=0.03),
        "sonx": rows("test_target_gain", *[0.2] * 3),
        "sox": [*rows("test_target_gain", 0.9, 0.9), *forgetful(0.02, test_target_gain=0.9)],
        "plain": forgetful(0.10, 0.20, 0.30, test_target_gain=0.5),
    }
    said = TASK.verdict(config(), methods)
    assert said[0].startswith("sonex learns most without forgetting: foggy gains 42 ± 2 points")
    assert "none of its 3 runs a protected class" in said[0] and "0 points, and 3 points" in said[0]
    plain = line(said, "Plain fine-tuning (plain) gains 50 ± 0 points")
    assert "forgets 20 ± 10 points" in plain and "cuts that to at most 0 points" in plain
    assert plain.endswith("for 8 points of gain.")
    # Student's t over three seeds: 0.22 -+ 4.303 * 0.02 / sqrt 3.
    follows = line(said, "2 of 3 methods")
    assert "sonx follows, 22 points behind (95 % interval over 3 seeds: 17 to 27)" in follows
    assert follows.endswith("more than seeds alone explain.")
    assert line(said, "Runs in which").endswith("sox 2 of 3 and 2 of 3.")


def test_smoothed_against_squared_hinge() -> None:
    methods = {
        "sonex": rows("test_target_gain", 0.50, 0.60, 0.70),
        "sox": rows("test_target_gain", 0.39, 0.50, 0.61, train_forgetting=0.008),
    }  # 11, 10 and 9 points: 10 -+ 4.303 / sqrt 3
    said = line(TASK.verdict(config(), methods), "Smoothed")
    assert (
        "sonex gains 10 points more than sox on test data (95 % interval over 3 seeds: 7.5" in said
    )
    assert "more than seeds alone explain" in said and "is 0 points against 0.8 points" in said
    assert said.endswith("penalties are 2 and 40: that of the smoothed hinge is 20 times smaller.")
    # 1 point of difference with |mean| above the standard deviation, but an interval around 0.
    methods["sox"] = rows("test_target_gain", 0.481, 0.59, 0.699)  # 1.9, 1 and 0.1 points
    said = line(TASK.verdict(config(), methods), "Smoothed")
    assert "(95 % interval over 3 seeds: -1.2 to 3.2): too little to tell" in said
    methods = {"sonex": rows("penalty", 40.0), "sox": rows("penalty", 8.0)}
    assert line(TASK.verdict(config(), methods), "Smoothed").endswith("hinge is 5 times larger.")


def test_settings_of_one_method_are_chosen_by_the_rule_and_not_by_test_data() -> None:
    methods = {
        "sonex": rows("val_target_accuracy", *[0.9] * 3, test_target_gain=0.1),
        "sonex-rho-10": rows("val_target_accuracy", *[0.8] * 3, test_target_gain=0.9),
        "sox": rows("val_target_accuracy", *[0.7] * 3, test_target_gain=0.3),
    }
    said = TASK.verdict(config(), methods)
    assert said[0].startswith("sox learns most without forgetting"), "90 points were not chosen"
    assert "sonex gains 20 points less than sox" in line(said, "Smoothed")
    methods["sonex"] = forgetful(0.2, 0.2, 0.2, val_target_accuracy=0.9)
    said = line(TASK.verdict(config(), methods), "Smoothed")
    assert "sonex-rho-10 gains 60 points more" in said and "10 and 40: that" in said


def test_one_seed_prints_no_spread_and_says_so() -> None:
    methods = {"sonex": rows("test_target_gain", 0.5), "sox": rows("test_target_gain", 0.2)}
    for own in (config(seeds=(0,)), config()):  # or a single finished one
        said = TASK.verdict(own, methods)
        assert "±" not in " ".join(said) and "interval" not in " ".join(said)
        assert said[-1].startswith("One seed") and "in its run no protected class" in said[0]
        assert "that may be chance" in line(said, "Smoothed")


def test_nobody_keeps() -> None:
    methods = {
        "sonex": [*rows("test_target_gain", 0.1, 0.2), *forgetful(0.05, test_target_gain=0.3)],
        "sox": forgetful(0.2, 0.2, 0.2),
    }
    first = TASK.verdict(config(), methods)[0]
    assert first.startswith("No method keeps every protected class on training data")
    assert "sonex comes nearest: it does in 2 of 3 runs, a class loses 1.3 points beyond" in first
    assert "up to 5 points in all" in first and "foggy gains 20 ± 10 points" in first
    assert "fcco sweep continual --data weather" in TASK.next_steps(config(), methods)[0]


def test_what_is_said_of_special_outcomes() -> None:
    still = {"sonex": rows("test_target_gain", -0.1, 0.0, 0.1)}
    assert "learned nothing either" in TASK.verdict(config(), still)[0]
    assert "Lower the weight rho" in TASK.next_steps(config(), still)[0]
    calm = {"plain": rows("test_target_gain", *[0.9] * 3), "sonex": rows("epoch", 5, 5, 5)}
    assert "nothing to protect here" in line(TASK.verdict(config(), calm), "Plain")
    steps = TASK.next_steps(config(), calm)
    assert "--seeds" in steps[0] and "50 points of gain are left" in steps[1]
    cut = [*rows("test_target_gain", 0.9, 0.9), row(test_target_gain=0.9, epoch=2)]
    said = TASK.verdict(config(), {"sonx": cut, "sonex": rows("epoch", 5, 5, 5)})
    assert said[0].startswith("sonex learns")
    assert "sonx has runs that ended early and is no candidate." in said
    broken = rows("objective", 0.1, math.nan)
    said = TASK.verdict(config(), {"sonx": broken, "plain": broken, "sox": []})
    assert said[0] == "No method that tries to keep the protected classes has finished."
    assert "sonx and plain have runs that ended early and are no candidates." in said
    assert TASK.next_steps(config(), {"sox": []}) == ()


# Warnings.

FORGETS = {"train_kept": 0.0, "zero_one": [0.02, 0.035], "train_forgetting": 0.035}
BROKEN = {"constraints": [0.2, 0.3], "train_violation": 0.3, "penalty": 4.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"tracking_error": 0.31}, "does not see its constraints.* off by 0.31"),
        ({"tracking_error": 0.011, "constraints": [0.0, -0.005]}, "does not see"),
        ({"tracking_error": 0.009, "constraints": [0.0, -0.005]}, None),
        ({"train_target_gain": 0.0}, "Nothing was learned: .* foggy .* is 60.0 % and was 60.0 %"),
        ({"train_target_gain": -0.1}, "is 60.0 % and was 70.0 % before"),
        (
            {"train_target_gain": 0.0, "zero_one": [0.0, 0.0], "constraints": [1e-5, -1e-5]},
            "^Did not move",
        ),
        ({"train_accuracy": 0.38, "train_target_gain": -0.1}, "Fell apart.* 3 classes .* 38.0 %"),
        ({"train_accuracy": 0.39}, None),
        ({**FORGETS, "train_violation": 0.01}, "name only.* but rainy lost 3.5 points"),
        ({**FORGETS, "train_violation": 0.02}, None),
        ({"test_counts": [60, 50, 49]}, "foggy has 49 images, and one of them is 2 points"),
        ({**BROKEN, "multipliers": [2.0, 2.0]}, "clear and rainy.* rho = 4 can give, 2, .* to 0.3"),
        ({**BROKEN, "multipliers": [1.9, 2.0]}, "Penalty too small for rainy:"),
        ({**BROKEN, "multipliers": [1.9, 1.9]}, None),
        ({**BROKEN, "multipliers": [2.0, 2.5]}, None),  # a squared hinge
        ({**BROKEN, "multipliers": [2.0, 0.0], "constraints": [0.009, -1.0]}, None),
        ({**BROKEN, "multipliers": [2.0, 0.0], "tracking_error": 0.25}, None),
    ],
)
def test_warnings(changes: dict[str, Any], said: str | None) -> None:
    found = TASK.warnings(config(), row(**changes))
    assert len(found) == (said is not None)
    assert said is None or re.search(said, found[0])


# The page.

DATA = ("weather", "bdd100k-subset", "bdd100k", "scenes-synthetic", "my/table.csv")
ENDS = {
    "kkt_stationarity", "kkt_feasibility", "kkt_complementarity", "kkt_best_stationarity",
    "kkt_best_complementarity", "best_multipliers", "penalty", "samples_per_second", "seconds",
}  # fmt: skip
UNSHOWN = {"accuracies", "val_constraints", "val_zero_one", "val_accuracies", "test_constraints"}
"""Lists that a table each would be too much for."""


def test_every_key_of_the_page_is_one_of_the_rows() -> None:
    page = TASK.page(config())
    found = by_class(torch.eye(3), torch.arange(3))
    known = {k for part in ("train", "val", "test") for k in changes(part, found, found, 0)}
    known |= {"objective", "multipliers", "tracking_error"} | ENDS
    keys = [metric.key for metric in page.metrics]
    assert len(set(keys)) == len(keys) and all(metric.meaning for metric in page.metrics)
    asked = {*keys, *page.entries, *(panel.y for panel in page.panels)}
    asked |= {panel.x for panel in page.panels if panel.x}
    assert asked <= known and known - asked == UNSHOWN
    lists = {"constraints", "zero_one", "accuracies", "multipliers"}
    for panel in page.panels:
        own = panel.y.removeprefix("test_") in lists
        assert (panel.kind in ("family", "change", "dots")) == own, panel
    assert page.references == ("plain",)
    assert page.entries["zero_one"] == ("clear", "rainy")
    assert page.entries["test_accuracies"] == ("clear", "rainy", "foggy")
    panels = TASK.page(config(forget_limit=0.03)).panels
    assert {p.reference for p in panels if p.kind == "curve" and "forgetting" in p.y} == {0.03}
    assert {p.x_reference for p in panels if p.kind == "tradeoff"} == {0.03}


@pytest.mark.parametrize("data", DATA)
def test_the_question_says_what_was_done(data: str) -> None:
    asked = config(data=data, epochs=7, steps_per_epoch=13, batch=24, negatives=36, per_class=5)
    page = TASK.page(asked)
    text = " ".join(page.question)
    for words in (
        "clear and rainy", '"the weather is foggy."', "2 constraints stand", TASK.rule(asked).text,
        "7 times 13 of 24 pairs of foggy and 36", "5 images of each protected class",
        "from 3 seeds", "no more than the larger of 1 point and one image",
    ):  # fmt: skip
        assert words in text, words
    assert "foggy" in page.title and len(page.question[-1]) > 300

    def told(**changes: Any) -> str:
        return " ".join(TASK.page(config(**changes)).question)

    nets = {"image_backbone": "efficientnet-lite0", "text_backbone": "minilm"}
    assert "The backbones stay as they are" in told(**nets)
    assert "the backbone of texts are trained" in told(**nets, train="text")
    assert "(from random weights)" in told(**nets, train="all", pretrained=False)
    assert "a small network and a linear map" in told(hidden=8)
    assert "correction of their own" not in told(heads=0)
    assert "was given" in told(old="here.pt") and "another collection" in told(
        **nets, extra_pairs="there"
    )


def test_every_method_has_a_line_in_the_glossary() -> None:
    own = config(methods={f"my-{word}": Method(word, 0.1) for word in METHODS})
    lines = TASK.page(own).glossary
    assert list(lines) == list(own.methods) and all(len(text) > 60 for text in lines.values())
    assert len({text.split(":")[0] for text in lines.values()}) == len(METHODS)
    assert report.points(0.0123) == "1.2 points"
