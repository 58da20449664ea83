"""The benchmark of X-risks: metrics against pairs and sums, choice and figures, the command."""

from __future__ import annotations

import gzip
import json
import math
import sys
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fcco_experiments.tasks.x_risk import data

from studies import publish
from studies.runner import Job, Runner
from studies.xrisk import __main__ as command
from studies.xrisk import methods, problems, training


def test_metrics_are_plain_areas_and_means_over_queries() -> None:
    """The hardest positives against the hardest negatives; NDCG of two queries by hand."""
    generator = np.random.default_rng(0)
    y = torch.tensor([1.0] * 20 + [0.0] * 60)
    scores = torch.from_numpy(generator.normal(size=80)) + 0.7 * y
    for name, positives, negatives in (("pAUC", 20, 18), ("tpAUC", 10, 30)):
        hard = np.sort(scores[y == 1])[:positives], np.sort(scores[y == 0])[::-1][:negatives]
        share = np.mean(hard[0][:, None] > hard[1][None])
        part = problems.Part(torch.zeros(80, 1), y)
        assert problems.figures(part, scores)[name] == pytest.approx(share)
    query = torch.tensor([0, 1, 0, 2, 1, 0, 2])
    y = torch.tensor([2.0, 1.0, 0.0, 0.0, 3.0, 1.0, 0.0])  # the last query has no relevant row
    scores = torch.tensor([0.1, 0.9, 0.5, 0.2, 0.3, 0.4, 0.7])
    first = (1 / math.log2(3) + 3 / 2) / (3 + 1 / math.log2(3))
    second = (1 + 7 / math.log2(3)) / (7 + 1 / math.log2(3))
    found = problems.figures(problems.Part(torch.zeros(7, 1), y, query), scores)
    assert found["NDCG@5"] == pytest.approx((first + second) / 2)


def test_batches() -> None:
    y = (torch.arange(1000) % 10 == 0).float()
    part = problems.Part(torch.zeros(1000, 1), y)
    draw = training.batches(part, False, 0)
    for rows in (next(draw) for _ in range(20)):
        assert len(rows) == training.BATCH
        assert y[rows].sum() == training.POSITIVES
    query = torch.arange(90) // 3
    queries = training.batches(problems.Part(torch.zeros(90, 1), y[:90], query), False, 0)
    rows = next(queries)
    assert len(rows) == 3 * training.QUERIES
    assert all((query == each).sum() == (query[rows] == each).sum() for each in query[rows])


def test_listwise_is_a_softmax_of_each_query() -> None:
    """The step against that of a softmax written out, by the same optimizer."""
    x, y = torch.tensor([[0.0], [1.0], [0.0], [2.0]]), torch.tensor([0.0, 1.0, 2.0, 0.0])
    part = problems.Part(x, y, torch.tensor([0, 0, 1, 1]))
    one, two = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    two.load_state_dict(one.state_dict())
    other = torch.optim.AdamW(two.parameters(), 0.1, weight_decay=0.0)
    optimizer, found = methods.build("listwise", one, part, "NDCG@5", {"lr": 0.1})
    for _ in range(3):
        found(torch.arange(4)).backward()
        optimizer.step()
        optimizer.zero_grad()
        first, second = two(x).squeeze(1).split(2)
        loss = first.logsumexp(0) - first[1] + second.logsumexp(0) - second[0]
        other.zero_grad()
        (loss / 2).backward()
        other.step()
    torch.testing.assert_close(one.weight, two.weight)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small data instead of `hiv` and `ranking`; the others are not there."""

    def load(name: str, label: str) -> dict[str, Any]:
        if name not in ("hiv", "ranking"):
            raise FileNotFoundError(f"There is no {name}.")
        generator, found = np.random.default_rng(0), {}
        for part, size in (("train", 400), ("validation", 120), ("test", 120)):
            row = np.arange(size)
            label_of = (row % 5 == 0) if name == "hiv" else row % 4
            x = generator.normal(size=(size, 6)) + label_of[:, None] * (1 if name == "hiv" else 0.5)
            found[part] = data.Part(x, label_of.astype(float), row // 8 if name != "hiv" else None)
        return found

    monkeypatch.setattr(data, "load", load)
    problems._read.cache_clear()


@pytest.mark.usefixtures("small")
def test_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shape of the JSON; the file of finished runs is continued."""
    out = tmp_path / "runs.jsonl"
    words = f"--quick --json --workers 1 --out {out} --data hiv toxicity ranking".split()
    monkeypatch.setitem(sys.modules, "lightgbm", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "libauc", None)
    monkeypatch.setattr(command, "QUICK_STEPS", 30)
    threads = torch.get_num_threads()
    try:
        command.main(words)
        told = capsys.readouterr()
        figures = json.loads(told.out.splitlines()[-1])
        left_out = figures.pop("left_out")
        for name in ("toxicity", "lambdarank", "libauc"):
            assert any(note.startswith(f"{name} is left out") for note in left_out)
        means = {(place, method): mean for place, method, mean, _ in figures["rows"][1:]}
        places = ["hiv, AP", "hiv, pAUC", "hiv, tpAUC", "ranking, NDCG@5", "ranking, NDCG@10"]
        assert list(dict.fromkeys(place for place, _ in means)) == places
        assert {name for place, name in means if place == "hiv, AP"} == {"bce", "focal", "ours"}
        assert float(means["hiv, AP", "bce"].split()[0]) > 0.5  # guessing has 0.2
        assert "toxicity is left out" in told.err
        # Two seeds: one run of each plain loss for all metrics, one of ours for each.
        assert out.read_text().count("\n") == 2 * (2 + 3) + 2 * (1 + 2)
        command.main([*words[:-2], "--seeds", "3"])
        assert out.read_text().count("\n") == 16 + 5
    finally:
        torch.set_num_threads(threads)
        problems._read.cache_clear()


def test_choice_is_that_of_validation_data() -> None:
    settings = methods.SAMPLES["bce"]

    def told(job: Job) -> dict[str, dict[str, float]]:
        place = settings.index(job.setting)
        return {"val": {"AP": [0.1, 0.4, 0.3, 0.2][place]}, "test": {"AP": 0.5 - place / 10}}

    cell = command.Cell("hiv", "AP", "bce")
    assert command.train([cell], Runner(told, dict, show=None), 10) == {cell: [0.4] * 10}


def test_every_method_of_a_metric_has_as_many_settings() -> None:
    for rows in methods.METHODS.values():
        counts = [len(grid) for grid in rows.values()]
        assert all(one == other for one, other in pairwise(counts))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("problem, method, first", [("hiv / AP", "ours", 21), ("hiv", "bce", 3)])
def test_no_checkpoint_of_the_warm_start_counts(
    monkeypatch: pytest.MonkeyPatch, problem: str, method: str, first: int
) -> None:
    """All X-risks share it: choosing one would compare cross-entropy with itself."""
    falling = count()
    names = problems.metrics_of("hiv")
    monkeypatch.setattr(
        training, "figures", lambda part, scores: dict.fromkeys(names, -float(next(falling)))
    )
    figures = training.run(Job(problem, method, {"lr": 1e-3}, 0, evaluations=60))
    assert figures["step"]["AP"] == first  # of 60 steps, 20 of warm start, a checkpoint every 3


def test_published_runs_are_all_there() -> None:
    """One figure by another way: from the file, with nothing of the command."""
    found = command.published()
    assert {len(values) for values in found.values()} == {10}
    ends: dict[str, list[tuple[float, float]]] = {}
    with gzip.open(publish.runs("xrisk"), "rt") as lines:
        for line in map(json.loads, lines):
            job, trace = json.loads(line["job"]), line["trace"]
            if (job["problem"], job["method"]) == ("hiv / AP", "ours"):
                own = ends.setdefault(json.dumps(job["setting"]), [])
                own.append((job["seed"], trace["val" if job["seed"] < 10 else "test"]["AP"]))
    best = max(ends.values(), key=lambda own: sum(v for seed, v in own if seed < 10))
    assert found[command.Cell("hiv", "AP", "ours")] == [v for seed, v in sorted(best) if seed > 9]
