"""From configs to methods of continual learning: what is built, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from continual_cases import CONFIG, METHODS
from fcco_experiments import tasks
from fcco_experiments.task import Method
from fcco_experiments.tasks.continual.config import Continual
from fcco_experiments.tasks.continual.training import METHODS as WORDS
from fcco_experiments.tasks.continual.training import build

import fcco

NAMES = ("clear", "rainy", "snowy")


def built(method: Method) -> Any:
    return build(torch.nn.Linear(2, 2), method, NAMES, (20, 50), temperature=0.07, chunk=4)


def test_each_word_becomes_its_method():
    found = {name: built(method) for name, method in METHODS.items()}
    assert {method.method for method in METHODS.values()} == set(WORDS)
    for name, own in found.items():
        correction = {"sonex": 0.1, "sonx": 0.1, "alexr2": 0.1, "weighted": 0.2}
        tracker = own.contrast.tracker
        assert tracker.correction == correction.get(METHODS[name].method, 0.0), name
        assert tracker.gamma == (0.6 if name == "replay" else 0.8)
        assert tracker.num_inner == (70 if name == "replay" else 20)
        loss = own.contrast.evaluate(torch.tensor([[0.0, math.log(2)]])).item()
        assert loss == pytest.approx(0.07 * (math.log(1 + 1 / 50) + math.log(2 + 1 / 50)))
        assert own.contrast.chunk == 4 and not own.contrast.normalize and own.contrast.scaled
        assert own.everyone == (name == "replay")
        assert own.weight == (0.7 if name == "weighted" else 0.0)
        assert own.constrained == (name not in ("weighted", "replay", "finetune"))
    sonex, sox, sonx, alexr2 = (
        found[name].objective.terms["constraints"] for name in ("sonex", "sox", "sonx", "alexr2")
    )
    assert isinstance(sonex.outer, fcco.Hinge) and sonex.smoothing == 0.05
    assert isinstance(sox.outer, fcco.SquaredHinge) and sox.outer.scale == 20.0
    assert sox.tracker.correction == 0.0
    assert isinstance(sonx.outer, fcco.Hinge) and sonx.smoothing == 0.0
    assert alexr2.tracker.read == "new"
    assert sonex.names == NAMES and sonex.tracker.num_inner == 3
    assert isinstance(found["alexr2"].optimizer, fcco.ProximalPoint)
    assert isinstance(found["alexr2"].scheduled, torch.optim.SGD)
    assert isinstance(found["sonex-adam"].optimizer, torch.optim.AdamW)


def test_what_was_not_seen_is_said():
    own = built(METHODS["sonex"])
    assert own.multipliers().tolist() == [0.0] * 3 and own.tracked().isnan().all()
    for name in ("weighted", "replay", "finetune"):
        assert built(METHODS[name]).multipliers() is None and built(METHODS[name]).tracked() is None


SONEX = METHODS["sonex"]


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (Method("sonax", 0.1), "`method` must be one of sonex, sox"),
        (Method("sonex", 0.1, settings={"penalty": 1}), "needs a number as `smoothing`"),
        (Method("sonex", 0.1, settings={"smoothing": 1}), "penalty=...` is needed|penalty"),
        (Method("sox", 0.1, settings={"penalty": 1, "smoothing": 1}), "no such setting.*smoothing"),
        (Method("sonx", 0.1, settings={"penalty": 1, "gama": 1}), "gama"),
        (Method("sonx", 0.1, settings={"penalty": -1}), "penalty"),
        (Method("sonx", 0.1, settings={"objective": 1}), "is made by the task"),
        (Method("sox", 0.1, settings={"penalty": 1, "tolerance": 1}), "is made by the task"),
        (Method("weighted", 0.1), "`settings.weight` is needed for weighted"),
        (Method("weighted", 0.1, settings={"weight": 0}), "above 0"),
        (Method("finetune", 0.1, settings={"weight": 1}), "`settings.weight` is not for finetune"),
        (Method("replay", 0.1, settings={"penalty": 1}), "`settings.penalty` is not for replay"),
        (dataclasses.replace(SONEX, independent=True), "`independent` is not offered"),
        (dataclasses.replace(SONEX, beta=0.0), "beta"),
        (Method("finetune", 0.1, settings={"contrast_gamma": 1.5}), "gamma"),
    ],
)
def test_what_is_refused(method, said):
    with pytest.raises((TypeError, ValueError), match=said):
        built(method)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": "clear"}, "must be different classes"),
        ({"protected": ()}, "one protected at least"),
        ({"protected": ("a", "a")}, "must be different classes"),
        ({"prompt": "the weather"}, r"must hold one \{\}.* but: 'the weather'"),
        ({"captions": ("{}", "{} and {}")}, r"must hold one \{\}"),
        ({"captions": ("{} in {town}",)}, r"must hold one \{\}, and no other braces"),
        ({"captions": ("{} and {0}",)}, r"must hold one \{\}, and no other braces"),
        ({"prompt": "a { and {}"}, r"must hold one \{\}, and no other braces"),
        ({"captions": ()}, "`captions` must hold a sentence"),
        ({"batch": 0}, "`batch` must be at least 1"),
        ({"negatives": 0}, "`negatives` must be at least 1"),
        ({"per_class": 0}, "`per_class` must be at least 1"),
        ({"steps_per_epoch": 0}, "`steps_per_epoch` must be at least 1"),
        ({"heads": -1}, "`heads` must be at least 0"),
        ({"forget_limit": -0.1}, "`forget_limit` must be at least 0"),
        ({"temperature": 0.0}, "`temperature` must be above 0"),
        ({"old_lr": 0.0}, "`old_lr` must be above 0"),
        ({"classes_per_batch": 5}, "must be at most 4, the number of protected"),
        ({"shares": (0.5, 0.5, 0.0)}, "three parts of 1"),
        ({"shares": (0.5, 0.2, 0.2)}, "three parts of 1"),
        ({"size": (0, 5)}, "height and a width"),
        ({"train": "all"}, "`train: all` needs an image backbone and a text backbone"),
        ({"image_backbone": "resnet50"}, "must both be given, or both none"),
        ({"extra_pairs": "here"}, "`extra_pairs` are images with texts"),
        ({"precision": "float16"}, "use bfloat16"),
        ({"epochs": 0}, "`epochs` must be at least 1"),
        ({"decay": 0.0}, "`decay` must be in"),
    ],
)
def test_configs_that_cannot_be_trained(changes, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(CONFIG, **changes)


def test_the_task_checks_methods_and_backbones():
    task: Any = tasks.get("continual")
    assert task.check(dataclasses.replace(CONFIG, methods=METHODS)) == []
    methods = {"good": SONEX, "bad": Method("weighted", 0.1)}
    backbones = {"image_backbone": "minilm", "text_backbone": "nothing"}
    found = task.check(dataclasses.replace(CONFIG, methods=methods, **backbones))
    said = dict(found)
    assert set(said) == {("image_backbone",), ("text_backbone",), ("methods", "bad")}
    assert "takes texts, not images" in said["image_backbone",]
    assert "There is no backbone `nothing`" in said["text_backbone",]
    assert "weight" in said["methods", "bad"]
    assert task.config is Continual and task.config_name("weather", None) == "weather"
    assert task.config_name("weather", "rho") == "weather-rho"
