"""What a config of continual learning becomes before the first step: old models, backbones, pairs."""  # noqa: E501

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from continual_cases import (
    CONFIG,
    METHODS,
    TinyClip,
    TinyImages,
    TinyTexts,
    moved,
    one_thread,  # noqa: F401 (used by being here)
    own_cache,  # noqa: F401
    problem,
    recorded,
    steps,
    weights,
    with_backbones,
)
from fcco_experiments import data, tasks
from fcco_experiments.data.grouped import GroupedPart, Vectors, part
from fcco_experiments.task import Method
from fcco_experiments.tasks.continual.model import Texts
from fcco_experiments.tasks.continual.problem import ContinualProblem
from fcco_experiments.tasks.continual.training import by_class
from scenes_fixtures import picture, saved

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


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[key], other[key]) for key in one)


# The old model.


def test_the_old_model_is_trained_once(trained, own_cache):  # noqa: F811
    first = problem()
    run, again = first.start(SONEX, 0), first.start(METHODS["replay"], 0)
    assert trained == [0] and torch.equal(weights(run), weights(again))
    second = problem(batch=4, epochs=9, per_class=2, methods=METHODS)  # nothing to it
    assert trained == [0] and same(first.old_state(0), second.old_state(0))
    assert len(list(own_cache.glob("scenes-synthetic-0-*.pt"))) == 1
    first.old_state(1)
    assert trained == [0, 1] and not same(first.old_state(0), first.old_state(1))


@pytest.mark.parametrize(
    "changes",
    [
        {"old_epochs": 3}, {"old_lr": 2e-3}, {"old_batch": 30}, {"width": 7}, {"heads": 3},
        {"temperature": 0.3}, {"captions": ("a {}",)}, {"prompt": "{}"}, {"sample_limit": 39},
        {"target": "snowy", "protected": ("clear", "cloudy", "rainy", "foggy")},
        {"shares": (0.5, 0.25, 0.25)}, {"hidden": 4}, {"fingerprint": "another"},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_another_config_and_other_data_have_another_old_model(trained, changes):
    problem().old_state(0)
    own = problem() if "fingerprint" in changes else problem(**changes)
    if "fingerprint" in changes:
        own.data = dataclasses.replace(own.data, **changes)
    own.old_state(0)
    assert trained == [0, 0]


@pytest.mark.parametrize("content", [b"", b"no file of weights", None])
def test_a_damaged_file_is_trained_anew(trained, own_cache, content):  # noqa: F811
    found = problem().old_state(0)
    (path,) = own_cache.glob("scenes-synthetic-0-*.pt")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.warns(UserWarning, match="The old model is trained anew: .* cannot be read"):
        again = problem().old_state(0)
    assert same(again, found) and trained == [0, 0]
    problem().old_state(0)
    assert trained == [0, 0], "it was written again"


def test_the_old_model_of_a_seed_does_not_depend_on_what_was_done_before(tmp_path, monkeypatch):
    fields = with_backbones(tmp_path, monkeypatch, 5)
    for changes in ({}, fields, fields | {"train": "text"}):
        monkeypatch.setenv("FCCO_CACHE", str(tmp_path / f"one-{len(changes)}"))
        alone = problem(**changes).old_state(1)
        monkeypatch.setenv("FCCO_CACHE", str(tmp_path / f"two-{len(changes)}"))
        own = problem(**changes)
        own.start(SONEX, 0)
        assert same(own.old_state(1), alone), changes.get("train", changes.get("data"))


def test_the_old_model_has_learned_the_protected_classes_alone():
    own = problem(sample_limit=0, old_epochs=10, width=16, old_lr=3e-3)
    row = own.start(SONEX, 0).evaluate()
    first, state = own.network(0).state_dict(), own.old_state(0)
    for key in ("text_projection.down", "text_projection.up"):
        assert torch.equal(first[key], state[key]), "heads rest meanwhile"
    assert min(row["test_accuracies"][:4]) > 0.5 and row["test_target_accuracy"] < 0.2
    fresh = problem(sample_limit=0, old_epochs=0, width=16).start(SONEX, 0).evaluate()
    assert fresh["test_protected_accuracy"] < 0.5


def test_an_old_model_may_be_given(tmp_path, trained):
    state = problem().old_state(0)
    for content in (state, {"values": state, "key": "a"}):
        torch.save(content, tmp_path / "old.pt")
        own = problem(old=str(tmp_path / "old.pt"))
        run = own.start(SONEX, 3)
        assert trained == [0] and same(run.model.state_dict(), state)
    with pytest.raises(ValueError, match="`old` does not fit the model of this config"):
        problem(old=str(tmp_path / "old.pt"), width=5).start(SONEX, 0)
    with pytest.raises(ValueError, match="there is none at"):
        problem(old=str(tmp_path / "nowhere.pt")).old_state(0)
    for content in ([1, 2], {"a": 3}, {"values": [1]}):
        torch.save(content, tmp_path / "bad.pt")
        with pytest.raises(ValueError, match="must hold a state dict, names with tensors"):
            problem(old=str(tmp_path / "bad.pt")).old_state(0)
    (tmp_path / "bad.pt").write_bytes(b"bad")
    with pytest.raises(ValueError, match="is no file of weights"):
        problem(old=str(tmp_path / "bad.pt")).old_state(0)


def test_fetch_prepares_every_seed(trained):
    config = dataclasses.replace(CONFIG, seeds=(0, 2))
    told: list[Any] = []
    task: Any = tasks.get("continual")
    task.fetch(config, lambda *words: told.append(words))
    assert trained == [0, 2] and ("old models", 1, 2) in told
    task.load(config).start(SONEX, 2)
    assert trained == [0, 2]


# Data and texts.


def test_classes_are_in_the_order_of_the_config():
    own = problem(protected=("snowy", "clear"), target="rainy")
    names = own.parts(0)["train"].group_names
    assert names == ("snowy", "clear", "rainy")
    assert own.texts.words[:3] == tuple(CONFIG.prompt.format(n) for n in names)
    run = own.start(SONEX, 0)
    assert len(run.evaluate()["constraints"]) == 2


def test_shares_and_missing_classes(monkeypatch):
    parts = problem(shares=(0.5, 0.25, 0.25)).parts(0)
    assert [len(parts[name]) for name in ("train", "validation", "test")] == [100, 50, 50]
    own = problem()
    cut = own.data.cut(0)
    held = cut["test"]
    without = held.label < 4
    less = part_of(held.rows[without], own)
    own.data = dataclasses.replace(own.data, cut=lambda seed: {**cut, "test": less})
    with pytest.raises(ValueError, match="the test data lack a class; they have clear, cloudy"):
        own.start(SONEX, 0)
    found = dataclasses.replace(own.data, kind="image")
    monkeypatch.setattr(data, "load_grouped", lambda *names, **options: found)
    with pytest.raises(ValueError, match="none` takes data of the kind vector, but weather is of"):
        problem(data="weather")


def part_of(rows: torch.Tensor, own: ContinualProblem) -> GroupedPart:
    label = own.texts.head[own.texts.prompts][0].new_zeros(len(own.samples))
    for each in own.data.cut(0).values():
        label[each.rows] = each.label
    return part(rows, label, label, own.config.classes)


def test_captions_belong_to_the_class_and_depend_on_the_row_alone():
    label = torch.arange(400) % 5
    texts = Texts.of(CONFIG, label)
    assert texts.of_classes == len(texts.words) == 15, "one caption is the prompt itself"
    found = [texts.words[k] for k in texts.captions.tolist()]
    for text, y in zip(found, label.tolist(), strict=True):
        assert text in [each.format(CONFIG.classes[y]) for each in CONFIG.captions]
    assert len(set(found)) == 15
    for word, head in zip(texts.words, texts.head.tolist(), strict=True):
        owner = next(k for k, name in enumerate(CONFIG.classes) if name in word)
        assert head == (owner if owner < 4 else -1)
    other = Texts.of(CONFIG, label.flip(0))
    kind = [[CONFIG.captions.index(t.replace(CONFIG.classes[y], "{}"))
             for t, y in zip((x.words[k] for k in x.captions.tolist()), y_, strict=True)]
            for x, y_ in ((texts, label.tolist()), (other, label.flip(0).tolist()))]  # fmt: skip
    assert kind[0] == kind[1]


def test_an_extra_caption_that_reads_like_one_of_a_class_is_a_text_of_its_own():
    sentences = [CONFIG.captions[0].format("clear"), "fog.", CONFIG.prompt.format("foggy")]
    texts = Texts.of(CONFIG, torch.arange(20) % 5, [*sentences, *sentences])
    assert texts.of_classes == 15 and texts.words[15:] == tuple(sentences)
    assert texts.head[15:].tolist() == [-1, -1, -1]
    assert texts.captions[20:].tolist() == [15, 16, 17, 15, 16, 17]
    plain = Texts.of(CONFIG, torch.arange(20) % 5)
    assert torch.equal(texts.captions[:20], plain.captions)
    assert texts.words[:15] == plain.words and torch.equal(texts.head[:15], plain.head)


# Backbones.


class OtherImages(TinyImages):
    """The same backbone with other weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))


def test_old_losses_are_those_of_the_own_backbones(photos, tmp_path):
    """Frozen backbones are not in the weights that a file of losses is known by."""
    torch.save(problem(**photos).old_state(0), tmp_path / "old.pt")
    for backbone in (photos["image_backbone"], f"{__name__}:OtherImages"):
        fields = photos | {"image_backbone": backbone, "old": str(tmp_path / "old.pt")}
        run = problem(**fields).start(SONEX, 0)
        part, number = run.parts["train"], len(run.config.protected)
        seen, read = run.encoder.all(run.samples, part.rows, run.encoder.texts.prompts)
        direct = by_class(run.encoder.scores(seen, read), part.label).loss[:number]
        label = run.streams.label
        kept = torch.stack([run.old_losses.value[label == k].mean() for k in range(number)])
        torch.testing.assert_close(kept.double(), direct, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pretrained", [False, True])
def test_random_backbones_that_are_trained_are_those_of_the_scaling(photos, pretrained):
    """The features that scale a side come from seed 0, whatever the seed of the run."""
    own = problem(**photos, train="all")
    own.config = dataclasses.replace(own.config, pretrained=pretrained)
    models: list[Any] = [own.network(seed) for seed in (3, 4)]
    for side, kind in (("image", TinyImages), ("text", TinyTexts)):
        first, second = (getattr(model, side)[0].state_dict() for model in models)
        torch.manual_seed(0)
        wanted = kind(weights="words" if pretrained else "", pretrained=pretrained).state_dict()
        assert same(first, second) is not pretrained
        assert same(first, wanted) is not pretrained
    seen = [model.image_projection.weight for model in models]
    assert not torch.equal(*seen), "the rest is of the run's seed"


@pytest.fixture
def photos(tmp_path, monkeypatch):
    return with_backbones(tmp_path, monkeypatch)


def trainable(run: Any) -> set[str]:
    return {name.partition(".")[0] for name, p in run.model.named_parameters() if p.requires_grad}


def test_frozen_backbones_are_not_a_part_of_the_model(photos):
    own = problem(**photos, certificate=True)
    run = own.start(SONEX, 0)
    assert isinstance(own.samples, Vectors) and own.samples.values.shape == (50, 5)
    assert own.inputs.shape == (15, 7)
    assert trainable(run) == {"image_projection", "text_projection"}
    assert not any("conv" in name or "words" in name for name, _ in run.model.named_parameters())
    torch.manual_seed(0)
    backbone = TinyImages()
    rows = own.parts(0)["train"].rows[:3].tolist()
    wanted = backbone(torch.stack([own.data.samples[row] for row in rows])).detach()  # type: ignore[misc]
    torch.testing.assert_close(own.samples.values[rows], wanted)
    end = steps(run, 3).finish()
    assert end["kkt_best_stationarity"] > 0


@pytest.mark.parametrize("train", ["text", "all"])
def test_what_is_trained_moves_and_nothing_else(photos, train):
    own = problem(**photos, train=train, certificate=True)
    run = own.start(SONEX, 0)
    sides = {"text", "all"} & {train}
    wanted = {"image_projection", "text_projection", "text"} | (
        {"image"} if train == "all" else set()
    )
    assert sides and trainable(run) == wanted
    kinds = {type(m) for m in run.model.modules()}
    assert TinyTexts in kinds and (TinyImages in kinds) == (train == "all")
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    row = run.evaluate()
    assert row["train_violation"] == 0 and row["constraints"] == [0.0] * 4
    steps(run, 4)
    for name, value in run.model.named_parameters():
        assert not torch.equal(value, before[name]), name
    for name, _ in run.model.named_buffers():
        assert "mean" in name or "deviation" in name, name
    assert not any(key.startswith("kkt") for key in run.finish()), "for frozen backbones alone"
    assert isinstance(own.samples, Vectors) == (train == "text")


def test_images_from_files_are_read_by_a_loader_and_resume(photos):
    own = problem(**photos, train="all")
    assert not isinstance(own.samples, Vectors)
    whole = steps(own.start(SONEX, 0), 10)
    first, second = steps(own.start(SONEX, 0), 4), own.start(SONEX, 0)
    second.load_state_dict(first.state_dict())
    assert torch.equal(weights(steps(second, 6)), weights(whole))
    assert whole.evaluate() == second.evaluate()


def test_a_projection_that_comes_with_a_backbone_is_taken_over(photos):
    fields = photos | {"image_backbone": "continual_cases:TinyClip", "old_epochs": 0}
    own = problem(**fields)
    model = own.network(3)
    torch.manual_seed(0)
    wanted = TinyClip().projection().weight
    found: Any = model.image_projection
    assert torch.equal(found.weight, wanted) and isinstance(model.image, torch.nn.Identity)
    base: Any = model.text_projection
    assert base.base.out_features == 6, "the space is that of the projection"
    other: Any = own.network(3).image_projection
    assert other is not found, "each model has its own"


def test_extra_pairs_become_anchors(photos, tmp_path):
    folder = tmp_path / "pairs"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.png").write_bytes(saved(picture(900 + number, (40, 60))))
        (folder / f"{number}.txt").write_text(f"fog in a road {number % 2}")
    for train in ("projections", "all"):
        own = problem(**photos, train=train, extra_pairs=str(folder))
        plain = problem(**photos, train=train)
        assert own.fingerprint() != plain.fingerprint()
        assert len(own.samples) == 53 and own.texts.of_classes == 15 and len(own.texts.words) == 17
        assert own.texts.head[15:].tolist() == [-1, -1]
        scaled: list[Any] = [each.network(0).text for each in (own, plain)]
        if train == "projections":
            assert torch.equal(scaled[0].mean, scaled[1].mean), "of the texts of classes alone"
        run = own.start(SONEX, 0)
        assert len(run.streams.anchors) == len(plain.start(SONEX, 0).streams.anchors) + 3
        assert run.streams.anchors[-3:].tolist() == [50, 51, 52]
        batches = recorded(run)
        steps(run, 6)
        drawn = torch.cat([run.streams.anchors[batch.anchors] for batch in batches])
        assert {50, 51, 52} <= set(drawn.tolist())
        texts = own.texts.captions[run.streams.anchors[-3:]].tolist()
        assert [own.texts.words[k] for k in texts] == [f"fog in a road {n}" for n in (0, 1, 0)]
        if train == "all":
            image: Any = own.samples[51]
            assert torch.equal(image, own.extra.samples[1])  # type: ignore[union-attr]
            assert image.shape == own.samples[0].shape  # type: ignore[union-attr]


def test_the_certificate_counts_extra_pairs(photos, tmp_path):
    """They are a part of the loss that was minimised."""
    (tmp_path / "pairs").mkdir()
    for number in range(5):
        (tmp_path / f"pairs/{number}.png").write_bytes(saved(picture(900 + number, (40, 60))))
        (tmp_path / f"pairs/{number}.txt").write_text("road fog in a road")
    own = problem(**photos, extra_pairs=str(tmp_path / "pairs"), certificate=True)
    run = steps(moved(own.start(Method("finetune", 0.02, "sgd"), 0)), 1)
    streams, encoder = run.streams, run.encoder
    rows = torch.cat([streams.anchors, streams.negatives])
    images: Any = run.samples
    seen, read = encoder(images.values[rows], encoder.texts.captions[rows])
    first, others = len(streams.anchors), len(streams.negatives)
    total = torch.zeros(())
    for i in range(first):
        for s in (seen[i] @ read[first:].T, seen[first:] @ read[i]):
            g = torch.exp((s - seen[i] @ read[i]) / CONFIG.temperature).mean()
            total = total + CONFIG.temperature * torch.log(g + 1 / others) / first
    prompts = encoder(images.values[streams.negatives], encoder.texts.prompts)
    each = torch.nn.functional.cross_entropy(
        encoder.scores(*prompts), streams.label, reduction="none"
    )
    parameters = list(run.model.parameters())

    def flat(value: Any) -> Any:
        parts = torch.autograd.grad(value, parameters, retain_graph=True)
        return torch.cat([part.reshape(-1) for part in parts])

    found = run.finish()
    price = torch.tensor(found["best_multipliers"])
    slopes = torch.stack([flat(each[streams.label == k].mean()) for k in range(4)])
    wanted = (flat(total) + price @ slopes).norm().item()
    assert found["kkt_best_stationarity"] == pytest.approx(wanted, rel=1e-4)


def test_a_folder_that_is_not_there(photos):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        problem(**photos, extra_pairs="nowhere")
    with pytest.raises(ValueError, match="takes data of the kind image, but scenes-synthetic"):
        problem(**(photos | {"data": "scenes-synthetic"}))
