"""The task from config to report: vectors, lists, a table, faces; its words by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from fcco_experiments import sweep, tasks
from fcco_experiments.cli.app import app
from fcco_experiments.config import load, names
from fcco_experiments.task import Columns, Method, Row
from fcco_experiments.tasks.x_risk import TASK, XRisk, XRiskProblem
from fcco_experiments.tasks.x_risk import data as arrays
from fcco_experiments.tasks.x_risk.training import XRiskTraining
from grouped_fixtures import Faces, put, stand_in
from sklearn.metrics import average_precision_score
from x_risk_cases import one_thread  # noqa: F401 (used by being here)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FCCO_DATA", str(tmp_path / "data"))
    return tmp_path


def call(*words: object, code: int = 0):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output + done.stderr
    return done


def last(done) -> dict:
    return json.loads(done.stdout.splitlines()[-1])["methods"]


def compare(out: Path, *words: object) -> tuple[dict, str]:
    words = ("compare", "x-risk", *words, "--workers", 1, "--json", "--out", out)
    table = last(call(*words))
    return table, (out / "report.html").read_text(encoding="utf-8")


def test_a_comparison_from_data_to_report(here):
    table, page = compare(here / "out", "--data", "rare-synthetic", "--quick", "--epochs", 3)
    assert list(table) == ["ap", "pauc", "tpauc", "auc", "bce", "focal"]
    keys = {f"{part}_{key}" for part in ("train", "val", "test") for key in ("ap", "pauc")}
    assert keys < set(table["ap"]) and table["ap"]["test_positives"]["mean"] == 20
    first = max(table, key=lambda name: table[name]["test_ap"]["mean"])
    assert f"{first} has the highest average precision" in page
    lists, page = compare(here / "lists", "--data", "lists-synthetic", "--quick", "--epochs", 3)
    first = max(lists, key=lambda name: lists[name]["test_ndcg"]["mean"])
    assert f"{first} has the highest NDCG" in page and lists["ndcg"]["test_queries"]["mean"] == 30


def test_a_table_with_words_as_labels_and_one_of_lists(here):
    random = np.random.default_rng(0)
    table = pd.DataFrame(random.standard_normal((300, 3)), columns=["a", "b", "c"])
    table["stars"] = np.where(table["a"] > 1.3, 5, random.integers(1, 5, 300))
    table["query"] = np.arange(300) // 10
    table["grade"] = np.where(table["b"] > 0.5, 4, np.where(table["b"] > -0.5, 2, 0))
    table.to_csv("my.csv", index=False)
    words = ("--data", "my.csv", "--label", "stars=5", "--features", "a,b,c", "--epochs", 8)
    found, _ = compare(here / "out", *words, "--methods", "pauc,bce", "--risk", "pauc", "--quick")
    assert found["pauc"]["test_pauc"]["mean"] > 0.8
    words = ("--data", "my.csv", "--setting", "lists", "--label", "grade", "--group", "query")
    words = (*words, "--features", "a,b,c", "--quick", "--methods", "listwise")
    found, _ = compare(here / "lists", *words)
    assert found["listwise"]["test_ndcg"]["mean"] > 0.8


def test_grades_are_taken_as_numbers_not_as_places(here):
    """Grades 0, 2, 4 are not 0, 1, 2."""
    table = pd.DataFrame({"q": np.arange(60) // 6, "x": np.arange(60), "r": [0, 2, 4] * 20})
    table.to_csv("my.csv", index=False)
    columns = Columns(label="r", group=("q",), features=("x",))
    config = XRisk(data="my.csv", columns=columns, risk="ndcg", epochs=2)
    assert XRiskProblem(config).values.tolist() == [0, 2, 4]


def test_figures_are_those_of_the_arrays_in_the_order_of_the_rows(here):
    """The rows of a part, its scores and its labels belong together."""
    config = load(TASK, "rare-synthetic", quick=True)
    run = XRiskProblem(config).start(Method("bce", 0.01), 3)
    part = arrays.load("rare-synthetic", seed=3)
    train = part["train"].features.astype(np.float64)
    mean, deviation = train.mean(0), train.std(0, ddof=1)
    linear: Any = run.model.top[0]
    weight = linear.weight.detach().numpy().ravel().astype(np.float64)
    row = run.evaluate()
    for name, key in (("train", "train"), ("validation", "val"), ("test", "test")):
        scores = ((part[name].features - mean) / deviation) @ weight
        wanted = average_precision_score(part[name].label, scores)
        assert row[f"{key}_ap"] == pytest.approx(wanted, abs=1e-4)


def test_a_sweep_chooses_by_the_risk_on_validation_data(here):
    call(
        "sweep", "x-risk", "--data", "rare-synthetic", "--quick", "--methods", "ap", "--risk",
        "tpauc", "--grid.ap.lr", "[1e-6, 0.02]", "--seeds", "7", "--workers", 1, "--out", "out",
    )  # fmt: skip
    told = sweep.read(here / "out")
    assert told is not None
    trials = {entry["setting"]["lr"]: entry for entry in told["settings"]}
    for entry in trials.values():
        assert entry["score"] == [-entry["figures"]["val_tpauc"]]
    best = min(trials, key=lambda lr: trials[lr]["score"])
    assert load(TASK, here / "out/winners.yaml").methods["ap"].lr == best


def test_a_run_that_goes_on_is_the_same(here, monkeypatch):
    words = ("--data", "rare-synthetic", "--methods", "ap", "--seeds", 0, "--epochs", 8)
    words = (*words, "--checkpoint_every", 1, "--warm", 0.5)
    whole, _ = compare(here / "whole", *words)
    step, calls = XRiskTraining.step, itertools.count(1)

    def stops(self: XRiskTraining) -> None:
        if next(calls) == 300:
            raise RuntimeError("power cut")
        step(self)

    with monkeypatch.context() as patch:
        patch.setattr(XRiskTraining, "step", stops)
        call("compare", "x-risk", *words, "--workers", 1, "--out", here / "cut", code=1)
    cut, _ = compare(here / "cut", *words, "--resume")
    keys = [key for key in whole["ap"] if "second" not in key]
    assert [cut["ap"][key] for key in keys] == [whole["ap"][key] for key in keys]


def test_faces_on_features_and_end_to_end(here, monkeypatch):
    content = Faces().archive()
    put(here / "data", stand_in(monkeypatch, "celeba", content), content)
    words = ("run", "x-risk", "--data", "celeba", "--label", "Smiling", "--pretrained", "false")
    words = (*words, "--size", "[32, 32]", "--epochs", 2, "--batch", 8, "--method", "ap", "--json")
    frozen = last(call(*words, "--out", here / "a"))["ap"]
    again = last(call(*words, "--out", here / "b", "--risk", "auc"))["ap"]
    assert frozen["test_ap"] == again["test_ap"], "the risk judges, it does not train"
    whole = last(call(*words, "--out", here / "c", "--train", "all"))["ap"]
    assert whole["train_ap"] != frozen["train_ap"]


def test_mistakes_are_said_before_anything_is_trained(here):
    Path("my.csv").write_text("x,y,z\n" + "".join(f"{i},{i % 3},a{i % 2}\n" for i in range(60)))
    made, own = ("--data", "rare-synthetic"), ("--data", "my.csv", "--label")
    for words, said in (
        ((*made, "--risk", "ndcg"), "must be one of ndcg, listwise, pointwise"),
        ((*made, "--methods.ap.settings.max_fpr", "0.1"), "is made by the task"),
        ((*made, "--methods.bce.settings.gamma", "0.1"), "`bce` has no setting gamma"),
        ((*made, "--max_fpr", "0"), "`max_fpr` must be in (0, 1]"),
        ((*made, "--min_tpr", "1"), "`min_tpr` must be in [0, 1)"),
        ((*made, "--warm", "1"), "`warm` must be in [0, 1)"),
        ((*made, "--positives", "64"), "`positives` must be below batch = 64"),
        ((*made, "--backbone", "minilm"), "takes data of the kind text"),
        ((*own, "y"), "`label` must have two values but has 3"),
        ((*own, "z", "--group", "y"), "`group` is the query of a row"),
        ((*own, "y", "--setting", "lists"), "say which column is the query"),
        ((*own, "z", "--setting", "lists", "--group", "x"), "relevance must be numbers"),
        ((*own, "x", "--setting", "lists", "--group", "y"), "too few groups"),
    ):
        done = call("compare", "x-risk", *words, "--out", here / "out", code=2)
        assert said in done.stderr, (words, done.stderr)
    assert not list((here / "out").rglob("config.yaml"))


@pytest.mark.parametrize("name", names(TASK))
def test_every_config_can_be_loaded(name):
    for quick in (False, True):
        config = load(TASK, name, quick=quick)
        assert not list(TASK.check(config))
        page = TASK.page(config)
        assert set(page.glossary) == set(config.methods) and all(page.glossary.values())
        assert "Average precision" in " ".join(page.question) or config.lists
        judged = TASK.rule(config).objective
        assert judged in {metric.key for metric in page.metrics if metric.headline}


# Words.


def config(**changes: Any) -> XRisk:
    methods = {name: Method(name, 0.1) for name in ("ap", "auc", "bce", "focal")}
    usual: dict[str, Any] = {"data": "hiv", "seeds": (0, 1, 2), "methods": methods, "epochs": 5}
    return XRisk(**(usual | changes))


def rows(*values: float, risk: str = "ap") -> list[Row]:
    return [{"epoch": 5, f"test_{risk}": value, f"train_{risk}": 0.5} for value in values]


def test_the_verdict_names_the_best_and_the_best_loss_of_single_samples():
    found = " ".join(
        TASK.verdict(
            config(),
            {"ap": rows(0.5, 0.6, 0.7), "auc": rows(0.4, 0.4, 0.4), "bce": rows(0.3, 0.4, 0.5),
             "focal": rows(0.1, 0.1, 0.1)},
        )
    )  # fmt: skip
    assert found.startswith("Not decided: ap has the highest average precision on test data, 0.600")
    assert "0.2000 above bce" in found and "more than seeds alone explain" in found
    found = " ".join(
        TASK.verdict(
            config(risk="auc"),
            {"ap": rows(0.2, risk="auc"), "bce": rows(0.5, risk="auc")},
        )
    )
    assert (
        "Not decided: bce has the highest AUC" in found
        and "ap has 0.2000, 0.3000 below bce" in found
    )
    steps = TASK.next_steps(config(), {"ap": rows(0.2), "bce": rows(0.5)})
    assert any("fcco sweep x-risk" in text for text in steps)


def test_few_positives_are_a_warning():
    assert TASK.warnings(config(), {"test_positives": 20})
    assert not TASK.warnings(config(), {"test_positives": 500})
    assert not TASK.warnings(config(), {"test_queries": 5})


def test_it_is_a_task_of_the_command_line():
    assert tasks.get("x-risk") is TASK
