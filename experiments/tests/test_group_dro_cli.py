"""The task on the command line: vectors, and real backbones on small images in the exact layout."""

from __future__ import annotations

import json

import pytest
from fcco_experiments import store, sweep, tasks
from fcco_experiments.cli.app import app
from fcco_experiments.config import load, names
from group_dro_cases import one_thread  # noqa: F401 (used by being here)
from grouped_fixtures import Faces, Patches, put, stand_in
from typer.testing import CliRunner

TASK = tasks.get("group-dro")
FACES = ("--data", "celeba", "--pretrained", "false", "--size", "[32, 32]", "--batch", 16)
SONEX = ("--method", "sonex", "--lr", "0.01", "--settings.smoothing", "0.1")


@pytest.fixture
def faces(tmp_path, monkeypatch):
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))
    content = Faces().archive()
    put(tmp_path / "data", stand_in(monkeypatch, "celeba", content), content)
    monkeypatch.setenv("FCCO_DATA", str(tmp_path / "data"))


def call(*words: object, code: int = 0):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output + done.stderr
    return done


def last(done) -> dict:
    return json.loads(done.stdout.splitlines()[-1])["methods"]


def test_a_comparison_from_data_to_report(tmp_path):
    out = tmp_path / "out"
    words = ("compare", "group-dro", "--data", "grouped-synthetic", "--quick", "--out", out)
    done = call(*words, "--methods", "sonex,ooa-cvar,erm", "--workers", 1, "--json")
    table = last(done)
    assert list(table) == ["sonex", "ooa-cvar", "erm"]
    for key in ("train_cvar", "test_cvar", "test_worst_accuracy", "val_cvar", "samples_per_second"):
        assert all(key in own for own in table.values()), key
    assert "tracking_error" in table["sonex"] and "tracking_error" not in table["erm"]
    assert table["sonex"]["train_cvar"]["mean"] < table["erm"]["train_cvar"]["mean"]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "lowest final training CVaR" in page and "group 3" in page
    runs = store.load_comparison(out).runs
    assert [row["epoch"] for row in runs[0].rows] == [0, 1, 2, 3, 4, 5]
    again = call(*words, "--methods", "sonex,ooa-cvar,erm", "--resume", "--json")
    assert last(again) == table


def test_a_sweep_chooses_by_the_training_cvar(tmp_path):
    out = tmp_path / "out"
    call(
        "sweep", "group-dro", "--data", "grouped-synthetic", "--quick", "--methods", "sonex",
        "--grid.sonex.lr", "[1e-6, 0.1]", "--seeds", "7", "--choose_by", "train_cvar",
        "--workers", 1, "--out", out,
    )  # fmt: skip
    told = sweep.read(out)
    scores = {entry["setting"]["lr"]: entry["score"][0] for entry in told["settings"]}
    assert scores[0.1] < scores[1e-6] and told["winners"] == {"sonex": "sonex@1"}
    assert load(TASK, out / "winners.yaml").methods["sonex"].lr == 0.1


def test_features_of_a_frozen_backbone_are_made_once(tmp_path, faces):
    words = ("run", "group-dro", *FACES, *SONEX, "--epochs", 2)
    first = last(call(*words, "--out", tmp_path / "a", "--json"))
    kept = list((tmp_path / "cache").rglob("celeba-*.pt"))
    assert len(kept) == 1
    stamp = kept[0].stat().st_mtime_ns
    second = last(call(*words, "--out", tmp_path / "b", "--json"))
    assert kept[0].stat().st_mtime_ns == stamp
    skip = ("seconds", "samples_per_second")
    for key, value in first["sonex"].items():
        assert key in skip or second["sonex"][key] == value
    end = store.load_comparison(tmp_path / "a").runs[0].result
    assert end is not None and len(end["end"]["losses_names"]) == 16
    assert len(end["final"]["test_reported"]) == 4


def test_a_backbone_is_trained_end_to_end_with_every_option(tmp_path, faces):
    words = ("run", "group-dro", *FACES, *SONEX, "--train", "all")
    words = (*words, "--epochs", 1, "--schedule", "constant", "--json")
    options = ("--recompute", "--accumulate", 2, "--precision", "bfloat16", "--spectrum")
    plain = last(call(*words, "--out", tmp_path / "a"))["sonex"]
    mixed = last(call(*words, *options, "--out", tmp_path / "b"))["sonex"]
    assert mixed["gram_smallest_with_s"]["mean"] >= mixed["gram_smallest"]["mean"] >= 0
    assert plain["train_cvar"]["mean"] == pytest.approx(mixed["train_cvar"]["mean"], rel=0.2)
    assert plain["train_cvar"] != mixed["train_cvar"]


def test_mistakes_are_said_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FCCO_DATA", str(tmp_path))
    made = ("run", "group-dro", "--data", "grouped-synthetic", "--out", tmp_path / "out")
    assert "no backbone `resnet5`" in call(*made, "--backbone", "resnet5", code=2).stderr
    assert "takes data of the kind image" in call(*made, "--backbone", "resnet50", code=2).stderr
    wrong = call(*made, "--method", "sonx", "--settings.smoothing", "0.1", code=2)
    assert "with smoothing it is sonex" in wrong.stderr
    Patches().write(tmp_path)
    partial = call("run", "group-dro", "--data", "camelyon17", "--out", tmp_path / "o", code=2)
    assert "302,436" in partial.stderr
    missing = call("run", "group-dro", "--data", "celeba", "--out", tmp_path / "p", code=2)
    assert "celeba_first10000" in missing.stderr and "list_attr_celeba" in missing.stderr
    assert not list((tmp_path / "out").rglob("config.yaml"))


@pytest.mark.parametrize("name", names(TASK))
def test_every_config_can_be_loaded(name):
    for quick in (False, True):
        config = load(TASK, name, quick=quick)
        assert config.ratio == 0.15
    sizes = {
        "camelyon17": (10, 256, 8, 0.01, "step", 0.3, "densenet121"),
        "amazon-paper": (4, 32, 8, 0.01, "linear", 0.2, "distilbert"),
        "celeba-paper": (15, 64, 4, 0.02, "step", 0.2, "resnet50"),
    }  # the paper's appendix
    if name in sizes:
        config = load(TASK, name)
        found = (config.epochs, config.batch, config.groups_per_batch)
        decays = {method.weight_decay for method in config.methods.values()}
        assert (*found, *decays, config.schedule, config.decay, config.backbone) == sizes[name]
