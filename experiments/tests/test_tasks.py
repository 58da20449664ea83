"""What holds for every task: its configs, its page, its verdict, and that runs can go on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import continual_cases
import fairness_cases
import group_dro_cases
import numpy as np
import pytest
import torch
import x_risk_cases
from click.testing import CliRunner
from continual_cases import own_cache  # noqa: F401 (used by being here)
from fcco_experiments import sweep, tasks
from fcco_experiments.cli import app
from fcco_experiments.config import load, names
from fcco_experiments.task import Method
from fcco_experiments.tasks.judge import judge
from hypothesis import given, settings
from hypothesis import strategies as st
from task_cases import one_thread, same, steps, stored  # noqa: F401 (one_thread is used by being here)

START: dict[str, Any] = {
    "fairness": fairness_cases.start,
    "group-dro": group_dro_cases.training,
    "continual": continual_cases.training,
    "x-risk": x_risk_cases.training,
}
METHODS = {
    "fairness": fairness_cases.METHODS, "group-dro": group_dro_cases.METHODS,
    "continual": continual_cases.METHODS, "x-risk": (*x_risk_cases.BINARY, *x_risk_cases.LISTS),
}  # fmt: skip
CONFIGS = [(task, name) for task in tasks._BUILT_IN for name in names(tasks.get(task))]
PARTS = {"base", "unbounded", "methods"}  # what other configs are made of


@pytest.mark.parametrize(("task", "name"), CONFIGS)
def test_every_config_fits_its_methods_and_has_a_page(task: str, name: str) -> None:
    own: Any = tasks.get(task)
    for quick in (False, True):
        config = load(own, name, quick=quick)
        if config.methods or name.partition("-")[0] not in PARTS:
            assert config.methods and not list(own.check(config))
        page, rule = own.page(config), own.rule(config)
        assert page.title
        assert all(metric.meaning for metric in page.metrics)
        assert rule.text and len(page.question) > 2
        shown = {metric.key: metric.better for metric in page.metrics}
        assert shown[rule.objective] in ("higher", "lower")
        assert not rule.constraint or shown[rule.constraint] == "lower"


# Runs.


def cuts(task: str, method: str) -> list[int]:
    """Steps before a checkpoint: in the middle of a round, of an epoch, of the first losses."""
    if task != "x-risk":
        return [5]
    warm = START[task](method).warm_steps
    return [2, warm, warm + 3]


@pytest.mark.parametrize(
    ("task", "method"), [(task, method) for task, own in METHODS.items() for method in own]
)
def test_neither_evaluation_nor_a_checkpoint_changes_a_run(task: str, method: str) -> None:
    for cut in cuts(task, method):
        plain, watched, resumed = (START[task](method) for _ in range(3))
        watched.evaluate()
        steps(plain, cut)
        steps(watched, cut)
        random = torch.get_rng_state()
        assert watched.evaluate() == watched.evaluate()
        assert torch.get_rng_state().equal(random) and watched.model.training
        resumed.load_state_dict(stored(watched.state_dict()))
        assert resumed.evaluate() == watched.evaluate()
        for run in (plain, watched, resumed):
            steps(run, 6)
        assert same(plain.state_dict(), resumed.state_dict())
        assert same(plain.state_dict(), watched.state_dict())
        assert plain.evaluate() == resumed.evaluate()
        ends = [run.finish() for run in (plain, resumed)]
        assert same(*({k: v for k, v in end.items() if "second" not in k} for end in ends))


@pytest.mark.parametrize(
    ("task", "method"), [("fairness", "alexr2"), ("fairness", "icppac"), ("group-dro", "alexr2")]
)
def test_a_double_loop_is_evaluated_between_its_rounds(task: str, method: str) -> None:
    run, inside, key = START[task](method), 0, "test_auc" if task == "fairness" else "test_cvar"
    between = run.evaluate()[key]
    for _ in range(12):
        run.step()
        if run.built.optimizer.round_begins:
            assert run.evaluate()[key] != between
            between = run.evaluate()[key]
        else:
            inside += 1
            assert run.evaluate()[key] == between
    assert inside > 3


# Figures of the page are those of the rows.

ENDS: dict[str, list[dict[str, Any]]] = {
    "fairness": [{}],
    "group-dro": [{"summary": summary, "spectrum": True} for summary in ("worst", "tenth")],
    "continual": [{}],
    "x-risk": [{}],
}


@pytest.mark.parametrize("task", METHODS)
def test_every_figure_of_the_page_is_one_of_the_rows(task: str) -> None:
    own: Any = tasks.get(task)
    found: dict[str, Any] = {"seconds": 1.0}
    for changes in ENDS[task]:
        run = START[task]("ap" if task == "x-risk" else "sonex", **changes)
        found |= steps(run, 8).evaluate() | run.finish()
    if task == "continual":
        found["penalty"] = 1.0
    known: Any = METHODS[task] if task != "x-risk" else {"ap": Method("ap", 0.1)}
    config = dataclasses.replace(run.config, methods=dict(known))
    page = own.page(config)
    keys = [metric.key for metric in page.metrics]
    assert len(set(keys)) == len(keys)
    for metric in page.metrics:
        assert isinstance(found[metric.key], float | int), metric.key
    for panel in page.panels:
        assert isinstance(found[panel.y], float)
        assert panel.kind != "tradeoff" or isinstance(found[panel.x], float)
    references = {"fairness": ["erm"], "group-dro": ["uniform", "erm"], "continual": ["finetune"]}
    assert list(own.named(config)) == references.get(task, [])


# The verdict says what the judge says.

VALUES = st.lists(st.floats(0.1, 0.9).map(lambda value: round(value, 3)), min_size=3, max_size=3)


@pytest.mark.parametrize("task", METHODS)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_the_verdict_names_the_first_and_says_whether_it_wins(task: str, data: Any) -> None:
    own: Any = tasks.get(task)
    some = {
        "fairness": "adult", "group-dro": "celeba", "continual": "weather", "x-risk": "hiv",
    }[task]  # fmt: skip
    config = dataclasses.replace(load(own, some), seeds=(0, 1, 2))
    rule, rows = own.rule(config), {}
    for name in data.draw(st.lists(st.sampled_from(list(config.methods)), unique=True)):
        seeds = data.draw(st.integers(1, 3))
        level = data.draw(st.sampled_from([0.0, 0.4, 0.9]))
        usual = {metric.key: level for metric in own.metrics(config)} | {"epoch": config.epochs}
        usual["train_violation"] = data.draw(st.sampled_from([0.0, 0.4]))
        if task == "continual":
            usual |= {"constraints": [0.0] * 4, "zero_one": [0.0] * 4}
        rows[name] = [dict(usual) for _ in range(seeds)]
        for key in filter(None, (rule.objective, rule.constraint)):
            for row, value in zip(rows[name], data.draw(VALUES), strict=False):
                row[key] = value if key == rule.objective else value - 0.5
    judged = judge(own, config, rows)
    said = own.verdict(config, rows)
    own.next_steps(config, rows)
    assert said
    if judged.best is None:
        assert said[0].startswith("No method")
    else:
        assert judged.best in said[0]
        assert ("wins" in said[0]) == judged.wins


# From the command to the report.


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))
    return tmp_path


def called(*words: object) -> Any:
    done = CliRunner().invoke(app, [*map(str, words), "--workers", "1", "--out", "out"])
    assert done.exit_code == 0, done.output + done.stderr
    return done


@pytest.mark.parametrize(
    ("task", "data", "methods"),
    [
        ("fairness", "synthetic", "alexr2,sonex,erm"),
        ("group-dro", "grouped-synthetic", "sonex,ooa-cvar,erm"),
        ("continual", "scenes-synthetic", "automatic,sonex,finetune"),
        ("x-risk", "rare-synthetic", "ap,pauc,bce"),
    ],
)
def test_a_comparison_from_data_to_report(task, data, methods, here) -> None:
    words = ("--data", data, "--methods", methods, "--epochs", 3, "--quick", "--json")
    done = called("compare", task, *words)
    table = json.loads(done.stdout.splitlines()[-1])["methods"]
    assert list(table) == methods.split(",")
    page = Path("out/report.html").read_text(encoding="utf-8")
    verdict = page[page.index('<div class="verdict">') : page.index("</div>")]
    own: Any = tasks.get(task)
    config = load(own, data, quick=True)
    better = {metric.key: metric.better for metric in own.metrics(config)}
    rule = own.rule(config)
    within = [
        name for name in table
        if not rule.constraint or table[name][rule.constraint]["mean"] <= rule.limit
    ]  # fmt: skip
    if within:
        choose = max if better[rule.objective] == "higher" else min
        assert choose(within, key=lambda name: table[name][rule.objective]["mean"]) in verdict


@pytest.mark.parametrize(
    ("task", "data", "method", "chosen", "sign"),
    [
        ("group-dro", "grouped-synthetic", "sonex", ("--choose_by", "train_cvar"), 1),
        ("x-risk", "rare-synthetic", "ap", ("--risk", "tpauc"), -1),
    ],
)
def test_a_sweep_chooses_by_the_figure_asked_for(task, data, method, chosen, sign, here) -> None:
    grid = (f"--grid.{method}.lr", "[1e-6, 0.1]", "--seeds", 7)
    called("sweep", task, "--data", data, "--quick", "--methods", method, *grid, *chosen)
    found = sweep.read(here / "out")
    assert found is not None
    key = chosen[1] if task == "group-dro" else f"val_{chosen[1]}"
    scores = {entry["setting"]["lr"]: entry["score"] for entry in found["settings"]}
    for entry in found["settings"]:
        assert entry["score"] == [sign * entry["figures"][key]]
    own: Any = tasks.get(task)
    best = min(scores, key=lambda lr: scores[lr])
    assert load(own, here / "out/winners.yaml").methods[method].lr == best
    assert np.isfinite(list(scores.values())).all()
