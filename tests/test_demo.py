"""`make demo`: the command itself on a few rows, and its figures beside scikit-learn and SciPy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp
from torch.utils.data import TensorDataset

pytest.importorskip("fcco_experiments")

from examples import adult
from studies import demo

ROOT = Path(__file__).parents[1]


def people(number: int, seed: int) -> TensorDataset:
    random = np.random.default_rng(seed)
    x = torch.tensor(random.standard_normal((number, 3)), dtype=torch.float32)
    woman, married = (torch.tensor(random.random(number) < share) for share in (0.4, 0.5))
    y = (x[:, 0] + 0.5 * woman > 0.3).long()
    return TensorDataset(x, y.float(), woman, 4 * ~woman + 2 * married + y)


def test_figures_of_a_model() -> None:
    from sklearn.metrics import accuracy_score, log_loss, recall_score

    rows = people(700, 0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 1))
    found = adult.measure(model, rows)
    x, y, woman, group = (each.numpy() for each in rows.tensors)
    scores = model(torch.tensor(x)).detach().squeeze(1).numpy()
    chosen = scores > 0
    recall = [recall_score(y[own], chosen[own]) for own in (woman, ~woman)]
    assert found["gap"] == pytest.approx(recall[0] - recall[1], abs=1e-6)
    assert found["accuracy"] == pytest.approx(accuracy_score(y, chosen))
    tests: list[Any] = [
        ks_2samp(scores[woman & (y == label)], scores[~woman & (y == label)]) for label in (0, 1)
    ]
    largest = max(each.statistic for each in tests)
    assert found["ROC gap"] == pytest.approx(largest, abs=1e-6)
    chance = 1 / (1 + np.exp(-scores.astype(float)))
    own = [log_loss(y[group == k], chance[group == k], labels=[0, 1]) for k in range(8)]
    assert found["worst"] == pytest.approx(np.sort(own)[-2:].mean(), rel=1e-5)
    right = [accuracy_score(y[group == k], chosen[group == k]) for k in range(8)]
    assert found["groups"] == pytest.approx(right) and found["lowest"] == min(found["groups"])
    draws = np.random.default_rng(0)
    shares = [draws.binomial(n := int((own & (y == 1)).sum()), r, 20_000) / n
              for own, r in zip((woman, ~woman), recall, strict=True)]  # fmt: skip
    assert found["error"] == pytest.approx((shares[0] - shares[1]).std(), rel=0.03)


def test_a_limit_closes_a_gap_that_plain_training_leaves() -> None:
    """Women follow another rule, and are few: their share that is found falls behind."""
    rows = people(6000, 1)
    x, y, woman, _ = rows.tensors
    y[woman] = (x[woman, 1] > 0).float()
    y[woman & (torch.arange(6000) % 3 == 0)] = 1.0
    group = torch.where(woman, 0, 4) + y.long()
    rows = TensorDataset(x, y, woman, group)
    gaps = {
        n: adult.measure(adult.train(n, rows, 0, 60), rows)["gap"]
        for n in (adult.MEAN, adult.LIMITED)
    }
    assert abs(gaps[adult.MEAN]) > 0.1 and abs(gaps[adult.LIMITED]) < 0.05


def test_the_command_of_the_makefile(monkeypatch, tmp_path, capsys) -> None:
    recipe = (ROOT / "Makefile").read_text().split("\ndemo:\n")[1].split("\n\n")[0]
    assert re.findall(r"\S*/python (-m examples\S*)", recipe) == ["-m examples.adult"]
    monkeypatch.setattr(adult, "load", lambda: (people(1500, 2), people(800, 3)))
    runs = adult.main(tmp_path, seeds=(0, 1), epochs=1)
    printed, page = capsys.readouterr().out, (tmp_path / "report.html").read_text()
    assert list(runs) == [*adult.LIMITS, *adult.BALANCED]
    assert all(len(own[part]) == 2 for own in runs.values() for part in ("train", "test"))
    assert json.loads((tmp_path / "figures.json").read_text()) == runs
    for sentence in adult.verdicts(runs):
        assert sentence in page and " ".join(printed.split()).count(sentence) == 1
    assert all(name in printed and name in page for name in runs)
    assert page.count("<svg") == 3 and "$" not in page
    assert not re.search(r"(src|href)=.https?:|@import|url\(http", page)  # nothing from a network


def test_the_readme_has_the_verdicts_of_the_published_run() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert all(sentence in readme for sentence in adult.verdicts(demo.published()))
