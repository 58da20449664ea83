"""The task from config to report: vectors, lists, a table, faces; its words by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from fcco_experiments.cli import app
from fcco_experiments.config import load
from fcco_experiments.task import Columns, Method
from fcco_experiments.tasks.x_risk import TASK, XRisk, XRiskProblem
from fcco_experiments.tasks.x_risk import data as arrays
from grouped_fixtures import Faces, put, stand_in
from sklearn.metrics import average_precision_score
from task_cases import one_thread  # noqa: F401 (one_thread is used by being here)


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


def test_faces_on_features_and_end_to_end(here, monkeypatch):
    content = Faces().archive()
    put(here / "data", stand_in(monkeypatch, "celeba", content), content)
    words = ("run", "x-risk", "--data", "celeba", "--label", "Attractive", "--pretrained", "false")
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


# Words.


def config(**changes: Any) -> XRisk:
    methods = {name: Method(name, 0.1) for name in ("ap", "auc", "bce", "focal")}
    usual: dict[str, Any] = {"data": "hiv", "seeds": (0, 1, 2), "methods": methods, "epochs": 5}
    return XRisk(**(usual | changes))


def test_few_positives_are_a_warning():
    assert TASK.warnings(config(), {"test_positives": 20})
    assert not TASK.warnings(config(), {"test_positives": 500})
    assert not TASK.warnings(config(), {"test_queries": 5})
