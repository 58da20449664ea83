"""The task from config to report: vectors, and real backbones on small images in their layout."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fcco_experiments import backbones, compare, data, environment, store, tasks
from fcco_experiments.cli import app
from fcco_experiments.config import load
from fcco_experiments.data.grouped import Vectors
from fcco_experiments.run import processes
from fcco_experiments.tasks.group_dro import GroupDROProblem
from fcco_experiments.tasks.group_dro.training import GroupDRO
from group_dro_cases import METHODS
from grouped_fixtures import Faces, Patches, opinions, put, stand_in
from task_cases import one_thread  # noqa: F401 (one_thread is used by being here)

TASK: Any = tasks.get("group-dro")
FACES = ("--data", "celeba", "--pretrained", "false", "--size", "[32, 32]", "--batch", 16)
SONEX = ("--method", "sonex", "--lr", "0.01", "--settings.smoothing", "0.1")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FCCO_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path


@pytest.fixture
def faces(here, monkeypatch):
    content = Faces().archive()
    put(here / "data", stand_in(monkeypatch, "celeba", content), content)
    return here


def call(*words: object, code: int = 0):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output + done.stderr
    return done


def last(done) -> dict:
    return json.loads(done.stdout.splitlines()[-1])["methods"]


def test_features_of_a_frozen_backbone_are_made_once(faces):
    words = ("run", "group-dro", *FACES, *SONEX, "--epochs", 2)
    first = last(call(*words, "--out", faces / "a", "--json"))
    (kept,) = (faces / "cache").rglob("celeba-*.pt")
    stamp = kept.stat().st_mtime_ns
    second = last(call(*words, "--out", faces / "b", "--json"))
    assert kept.stat().st_mtime_ns == stamp
    for key, value in first["sonex"].items():
        assert key == "seconds" or second["sonex"][key] == value
    end = store.load_comparison(faces / "a").runs[0].result
    assert end is not None and len(end["end"]["losses_names"]) == 16
    assert len(end["final"]["test_reported"]) == 4


def test_a_backbone_is_trained_end_to_end_with_every_option(faces):
    words = ("run", "group-dro", *FACES, *SONEX, "--train", "all")
    words = (*words, "--epochs", 1, "--schedule", "constant", "--json")
    options = ("--precision", "bfloat16", "--spectrum")
    plain = last(call(*words, "--out", faces / "a"))["sonex"]
    mixed = last(call(*words, *options, "--out", faces / "b"))["sonex"]
    assert mixed["gram_smallest_with_s"]["mean"] >= mixed["gram_smallest"]["mean"] >= 0
    assert plain["train_cvar"]["mean"] == pytest.approx(mixed["train_cvar"]["mean"], rel=0.2)
    assert plain["train_cvar"] != mixed["train_cvar"]


def test_mistakes_are_said_before_anything_is_trained(here):
    made = ("run", "group-dro", "--data", "grouped-synthetic", "--out", here / "out")
    for words, said in (
        (("--backbone", "resnet5"), "no backbone `resnet5`"),
        (("--backbone", "resnet50"), "takes data of the kind image"),
        (("--method", "sonx", "--settings.smoothing", "0.1"), "with smoothing it is sonex"),
        (("--distinct",), "`distinct` is for texts"),
    ):
        assert said in call(*made, *words, code=2).stderr
    patches = Patches()
    (patches.write(here / "data") / "patches" / patches.path(patches.rows[0])).unlink()
    partial = call("run", "group-dro", "--data", "camelyon17", "--out", here / "out", code=2)
    assert "1 of 52 images" in partial.stderr
    missing = call("run", "group-dro", "--data", "celeba", "--out", here / "out", code=2)
    assert "celeba_first10000" in missing.stderr and "list_attr_celeba" in missing.stderr
    assert not list((here / "out").rglob("config.yaml"))


def test_a_folder_of_weights_brings_its_own_vocabulary_to_training(here, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]")
    (here / "backbone").mkdir()
    (here / "backbone/tokenizer.json").write_text(tokenizers.Tokenizer(model).to_str())
    content = opinions().to_csv(index=False).encode()
    put(here / "data", stand_in(monkeypatch, "sentiment", content), content)
    config = GroupDRO(
        data="sentiment", epochs=1, backbone="distilbert", train="all", tokens=8,
        weights=str(here / "backbone"),
    )  # fmt: skip
    monkeypatch.setattr(GroupDROProblem, "network", lambda self: None)  # there are no weights
    samples = GroupDROProblem(config).samples
    assert isinstance(samples, Vectors) and samples.values.shape[1] == 8
    assert torch.unique(samples.values).tolist() == [0, 1]


def test_weights_that_are_nowhere_are_missed_before_any_run(faces):
    config = GroupDRO(data="celeba", epochs=1, backbone="resnet50", train="all", size=(32, 32))
    with pytest.raises(backbones.WeightsError, match="torchvision"):
        TASK.load(config)


def test_the_summary_of_the_data_reaches_the_rows(monkeypatch):
    real = data.load_grouped
    monkeypatch.setattr(
        data,
        "load_grouped",
        lambda *words, **more: dataclasses.replace(real(*words, **more), summary="tenth"),
    )
    config = load(TASK, "grouped-synthetic", quick=True)
    found = GroupDROProblem(config).start(config.methods["erm"], 0).evaluate()
    assert "test_tenth_accuracy" in found and "test_worst_accuracy" not in found


@pytest.mark.parametrize(("place", "number"), [("cpu", 7), ("cuda", 1)])
def test_runs_do_not_share_a_gpu_unless_asked_to(monkeypatch, place, number):
    monkeypatch.setattr(environment, "available_cores", lambda: 7)
    monkeypatch.setattr(environment, "device", lambda wanted: torch.device(place))
    config = GroupDRO(data="grouped-synthetic", epochs=1, methods=METHODS, seeds=(0, 1))
    specs = compare.plan("group-dro", "name", config).specs
    assert processes(specs, None) == number and processes(specs, 3) == 3
