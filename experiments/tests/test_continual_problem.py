"""What a config of continual learning becomes before the first step: old models, backbones, pairs."""  # noqa: E501

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from continual_cases import (
    CONFIG,
    METHODS,
    TinyClip,
    TinyImages,
    own_cache,  # noqa: F401 (used by being here)
    problem,
    with_backbones,
)
from fcco_experiments import tasks
from fcco_experiments.data.grouped import Vectors
from fcco_experiments.tasks.continual import ContinualProblem
from fcco_experiments.tasks.continual.model import Texts
from fcco_experiments.tasks.continual.training import by_class
from task_cases import one_thread, steps, weights  # noqa: F401 (one_thread is used by being here)

SONEX = METHODS["sonex"]


@pytest.fixture
def trained(monkeypatch):
    """The seeds of the old models that are trained from now on."""
    made: list[int] = []
    train = ContinualProblem._train_old

    def noted(self: ContinualProblem, seed: int) -> Any:
        made.append(seed)
        return train(self, seed)

    monkeypatch.setattr(ContinualProblem, "_train_old", noted)
    return made


@pytest.fixture
def photos(tmp_path, monkeypatch):
    return with_backbones(tmp_path, monkeypatch)


def old(own: ContinualProblem, seed: int = 0) -> dict[str, torch.Tensor]:
    return own.old_model(seed).state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[key], other[key]) for key in one)


# The old model.


def test_the_old_model_is_trained_once_for_each_seed(trained, own_cache):  # noqa: F811
    first = problem()
    run, again = first.start(SONEX, 0), first.start(METHODS["replay"], 0)
    assert trained == [0] and torch.equal(weights(run), weights(again))
    second = problem(batch=4, epochs=9, per_class=2, methods=METHODS)  # nothing to it
    assert same(old(first), old(second)) and trained == [0]
    assert len(list(own_cache.glob("scenes-synthetic-0-*.pt"))) == 1
    task: Any = tasks.get("continual")
    config = dataclasses.replace(CONFIG, seeds=(0, 2))
    task.load(config)
    assert trained == [0, 2] and not same(old(first), old(first, 2))
    task.load(config).start(SONEX, 2)
    assert trained == [0, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"old_epochs": 3}, {"old_lr": 2e-3}, {"old_batch": 30}, {"width": 7}, {"heads": 3},
        {"temperature": 0.3}, {"captions": ("a {}",)}, {"prompt": "{}"}, {"sample_limit": 39},
        {"target": "snowy", "protected": ("clear", "cloudy", "rainy", "foggy")},
        {"old_share": 0.5}, {"fingerprint": "another"},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_another_config_and_other_data_have_another_old_model(trained, changes):
    problem().make_old(0)
    own = problem() if "fingerprint" in changes else problem(**changes)
    if "fingerprint" in changes:
        own.data = dataclasses.replace(own.data, **changes)
    own.make_old(0)
    assert trained == [0, 0]


@pytest.mark.parametrize("content", [b"no file of weights", None])
def test_a_damaged_file_is_trained_anew(trained, own_cache, content):  # noqa: F811
    found = problem().make_old(0)
    (path,) = own_cache.glob("scenes-synthetic-0-*.pt")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.warns(UserWarning, match="The old model is trained again: .* cannot be read"):
        again = problem().make_old(0)
    assert same(again, found) and trained == [0, 0]
    problem().make_old(0)
    assert trained == [0, 0], "it was written again"


@pytest.mark.parametrize("backbones", [False, True])
def test_the_old_model_of_a_seed_does_not_depend_on_what_was_done_before(
    tmp_path, monkeypatch, photos, backbones
):
    alone = problem(**(photos if backbones else {})).make_old(1)
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "other"))
    own = problem(**(photos if backbones else {}))
    own.start(SONEX, 0)
    assert same(own.make_old(1), alone)


def test_the_old_model_has_learned_the_protected_classes_alone():
    own = problem(sample_limit=0, old_epochs=10, width=16, old_lr=3e-3)
    row = own.start(SONEX, 0).evaluate()
    first, state = own.network(0).state_dict(), old(own)
    for key in ("text_projection.down", "text_projection.up"):
        assert torch.equal(first[key], state[key]), "heads rest meanwhile"
    assert min(row["test_accuracies"][:4]) > 0.5 and row["test_target_accuracy"] < 0.2


def test_held_out_images_are_those_that_the_old_model_has_not_seen():
    """Halves of each protected class; the target, validation and test data stay."""
    whole, seen, unseen = (problem(old_share=share, protect=protect) for share, protect in (
        (1.0, "train"), (0.5, "train"), (0.5, "held-out")))  # fmt: skip
    learned, label = seen.learned(3)
    held_out, other = unseen.protected(3)
    rows, _ = whole.protected(3)
    assert torch.equal(torch.cat([learned, held_out]).sort().values, rows)
    assert torch.equal(torch.bincount(label), torch.bincount(other)), "24 of each class"
    assert torch.equal(seen.protected(3)[0], learned) and torch.equal(unseen.learned(3)[0], learned)
    for own in (seen, unseen):
        for name, part in whole.parts(3).items():
            kept = part.rows if name != "train" else part.rows[part.label == 4]
            assert set(kept.tolist()) <= set(own.parts(3)[name].rows.tolist())
    assert same(old(seen, 3), old(unseen, 3))
    assert isinstance(unseen.samples, Vectors)
    values = unseen.samples.values.clone()
    values[held_out] += torch.randn(len(held_out), values.shape[1])
    unseen.samples = Vectors(values)
    assert same(unseen._train_old(3), old(seen, 3))
    values[learned] += 1
    assert not same(unseen._train_old(3), old(seen, 3))


# Data and texts.


def test_classes_are_in_the_order_of_the_config_and_all_must_be_there():
    own = problem(protected=("snowy", "clear"), target="rainy")
    parts = own.parts(0)
    assert parts["train"].group_names == ("snowy", "clear", "rainy")
    assert [len(part) for part in parts.values()] == [72, 24, 24]
    assert len(own.start(SONEX, 0).evaluate()["constraints"]) == 2
    cut = problem().data.cut(0)  # of all five classes
    own = problem(protected=("clear", "cloudy", "rainy", "foggy"), target="snowy")
    less = dataclasses.replace(cut["test"], group_names=cut["test"].group_names)
    object.__setattr__(less, "group_names", ("clear", "cloudy"))
    own.data = dataclasses.replace(own.data, cut=lambda seed: {**cut, "test": less})
    with pytest.raises(ValueError, match="the test data lack a class; they have clear, cloudy"):
        own.start(SONEX, 0)


def test_captions_belong_to_the_class_and_depend_on_the_row_alone():
    label = torch.arange(400) % 5
    texts, other = Texts.of(CONFIG, label), Texts.of(CONFIG, label.flip(0))
    assert len(texts.words) == 15, "one caption is the prompt itself"
    patterns = []
    for found, own in ((texts, label), (other, label.flip(0))):
        pattern = []
        for text, y in zip(found.captions.tolist(), own.tolist(), strict=True):
            word, name = found.words[text], CONFIG.classes[y]
            assert found.head[text] == (y if y < 4 else -1)
            pattern.append(CONFIG.captions.index(word.replace(name, "{}")))
        patterns.append(pattern)
    assert patterns[0] == patterns[1] and set(patterns[0]) == {0, 1, 2}


# Backbones.


class OtherImages(TinyImages):
    """The same backbone with other weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))


def test_old_losses_are_those_of_the_own_backbones(photos):
    for backbone in (photos["image_backbone"], f"{__name__}:OtherImages"):
        run = problem(**photos | {"image_backbone": backbone}).start(SONEX, 0)
        part = run.parts["train"]
        seen, read = run.encoder.all(run.samples, part.rows, run.encoder.texts.prompts)
        direct = by_class(run.encoder.scores(seen, read), part.label).loss[:4]
        kept = torch.stack([run.old_losses.value[run.label == k].mean() for k in range(4)])
        torch.testing.assert_close(kept.double(), direct, rtol=1e-5, atol=1e-6)


def trainable(run: Any) -> set[str]:
    return {name.partition(".")[0] for name, p in run.model.named_parameters() if p.requires_grad}


def test_frozen_backbones_are_not_a_part_of_the_model(photos):
    own = problem(**photos)
    run = own.start(SONEX, 0)
    assert isinstance(own.samples, Vectors) and own.samples.values.shape == (50, 5)
    assert trainable(run) == {"image_projection", "text_projection"}
    torch.manual_seed(0)
    backbone = TinyImages()
    rows = own.parts(0)["train"].rows[:3].tolist()
    wanted = backbone(torch.stack([own.data.samples[row] for row in rows])).detach()
    torch.testing.assert_close(own.samples.values[rows], wanted)


def test_backbones_that_are_trained_move_and_images_are_read_from_files(photos):
    own = problem(**photos, train="all")
    run = own.start(SONEX, 0)
    assert trainable(run) == {"image_projection", "text_projection", "text", "image"}
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    assert run.evaluate()["constraints"] == [0.0] * 4
    whole, second = steps(run, 4), own.start(SONEX, 0)
    second.load_state_dict(copy.deepcopy(whole.state_dict()))
    assert torch.equal(weights(steps(second, 6)), weights(steps(whole, 6)))
    assert whole.evaluate() == second.evaluate()
    for name, value in run.model.named_parameters():
        assert not torch.equal(value, before[name]), name


def test_a_projection_that_comes_with_a_backbone_is_taken_over(photos):
    own = problem(**(photos | {"image_backbone": "continual_cases:TinyClip", "old_epochs": 0}))
    model: Any = own.network(3)
    torch.manual_seed(0)
    assert torch.equal(model.image_projection.weight, TinyClip().projection().weight)
    assert isinstance(model.image, torch.nn.Identity)
    assert model.text_projection.base.out_features == 6, "the space is that of the projection"
    assert own.network(3).image_projection is not model.image_projection, "each has its own"


def test_data_that_do_not_fit_the_backbones(photos):
    with pytest.raises(ValueError, match="takes data of the kind image, but scenes-synthetic"):
        problem(**(photos | {"data": "scenes-synthetic"}))
