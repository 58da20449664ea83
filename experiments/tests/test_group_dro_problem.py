"""What the task makes of its config before the first step: samples, weights, early errors."""

from __future__ import annotations

import pytest
import torch
from fcco_experiments import backbones, compare, tasks, workers
from fcco_experiments.data.grouped import Vectors
from fcco_experiments.tasks.group_dro.config import GroupDRO
from fcco_experiments.tasks.group_dro.task import GroupDROProblem
from group_dro_cases import METHODS
from grouped_fixtures import Faces, opinions, opinions_content, put, stand_in

TASK = tasks.get("group-dro")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FCCO_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path


def test_a_folder_of_weights_brings_its_own_vocabulary_to_training(here, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[PAD]": 0, "[UNK]": 1}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    (here / "backbone").mkdir()
    (here / "backbone/tokenizer.json").write_text(tokenizers.Tokenizer(model).to_str())
    content = opinions_content(opinions())
    put(here / "data", stand_in(monkeypatch, "sentiment", content), content)
    config = GroupDRO(
        data="sentiment", epochs=1, backbone="distilbert", train="all", tokens=8,
        weights=str(here / "backbone"),
    )  # fmt: skip
    samples = GroupDROProblem(config).samples
    assert isinstance(samples, Vectors) and samples.values.shape[1] == 8
    assert torch.unique(samples.values).tolist() == [0, 1]


def test_what_is_for_texts_alone_is_refused_in_the_config():
    config = GroupDRO(
        data="celeba", epochs=1, backbone="resnet50", distinct=True, precision="float16",
        methods={"sonex": METHODS["sonex"], "double": METHODS["alexr2"]},
    )  # fmt: skip
    ((path, text),) = TASK.check(config)  # pyright: ignore[reportAttributeAccessIssue]
    assert path == ("distinct",) and "is for texts" in text, "one may leave out double"


@pytest.mark.parametrize(("place", "number"), [("cpu", 7), ("cuda", 1)])
def test_runs_do_not_share_a_gpu_unless_asked_to(tmp_path, monkeypatch, place, number):
    made = []

    class Pool:
        def __init__(self, specs, order, tell, asked, number):
            made.append(number)

        def run(self):
            return []

    def here(*words):
        made.append(1)
        return []

    monkeypatch.setattr(workers, "Pool", Pool)
    monkeypatch.setattr(workers, "_here", here)
    monkeypatch.setattr(workers, "available_cores", lambda: 7)
    monkeypatch.setattr(workers.launch, "device", lambda wanted: torch.device(place))
    config = GroupDRO(data="grouped-synthetic", epochs=1, methods=METHODS, seeds=(0, 1))
    specs = compare.plan("group-dro", "name", config).specs
    workers.run(specs, tmp_path)
    workers.run(specs, tmp_path, workers=3)
    assert made == [number, 3]


def test_weights_that_are_nowhere_are_missed_before_any_run(here, monkeypatch):
    content = Faces().archive()
    put(here / "data", stand_in(monkeypatch, "celeba", content), content)
    config = GroupDRO(data="celeba", epochs=1, backbone="resnet50", train="all", size=(32, 32))
    with pytest.raises(backbones.WeightsError, match="torchvision"):
        TASK.fetch(config)  # pyright: ignore[reportAttributeAccessIssue]
