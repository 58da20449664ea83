"""The benchmark of X-risks: metrics against pairs and sums, choice and figures, the command."""

from __future__ import annotations

import gzip
import json
import math
import sys
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import risk_steps
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
        assert problems.METRICS[name](part, scores) == pytest.approx(share)
    query = torch.tensor([0, 1, 0, 2, 1, 0, 2])
    y = torch.tensor([2.0, 1.0, 0.0, 0.0, 3.0, 1.0, 0.0])  # the last query has no relevant row
    scores = torch.tensor([0.1, 0.9, 0.5, 0.2, 0.3, 0.4, 0.7])
    first = (1 / math.log2(3) + 3 / 2) / (3 + 1 / math.log2(3))
    second = (1 + 7 / math.log2(3)) / (7 + 1 / math.log2(3))
    found = problems.METRICS["NDCG@5"](problems.Part(torch.zeros(7, 1), y, query), scores)
    assert found == pytest.approx((first + second) / 2)


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
    step = methods.listwise(one, part, "NDCG@5", {"lr": 0.1})
    for _ in range(3):
        step(torch.arange(4))
        first, second = two(x).squeeze(1).split(2)
        loss = first.logsumexp(0) - first[1] + second.logsumexp(0) - second[0]
        other.zero_grad()
        (loss / 2).backward()
        other.step()
    torch.testing.assert_close(one.weight, two.weight)


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """Two small data sets in the form of `--arrays`."""
    generator = np.random.default_rng(0)
    found: dict[str, dict[str, np.ndarray]] = {"hiv": {}, "ranking": {}}
    for part, size in (("train", 400), ("validation", 120), ("test", 120)):
        y = (np.arange(size) % 5 == 0).astype(np.int64)
        found["hiv"] |= {f"{part}_x": generator.normal(size=(size, 6)) + y[:, None], f"{part}_y": y}
        relevance = np.arange(size) % 4
        x = generator.normal(size=(size, 6)) + relevance[:, None] / 2
        query = np.arange(size) // 8
        found["ranking"] |= {f"{part}_x": x, f"{part}_y": relevance, f"{part}_q": query}
    for name, each in found.items():
        np.savez(tmp_path / f"{name}.npz", **each)  # type: ignore[arg-type]
    return tmp_path


def test_command(
    arrays: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shape of the JSON; the file of finished runs is continued."""
    out = arrays / "runs.jsonl"
    words = (
        f"--quick --json --workers 1 --steps 30 --arrays {arrays} --out {out} "
        "--method bce focal listwise ours lambdarank"
    )
    monkeypatch.setitem(sys.modules, "lightgbm", None)  # as if it were not installed
    threads = torch.get_num_threads()
    try:
        command.main(words.split())
        told = capsys.readouterr()
        figures = json.loads(told.out.splitlines()[-1])
        left_out = figures.pop("left_out")
        for name in ("toxicity", "lambdarank"):
            assert any(note.startswith(f"{name} is left out") for note in left_out)
        assert {data: list(rows) for data, rows in figures.items()} == {
            "hiv": ["AP", "pAUC", "tpAUC"], "ranking": ["NDCG@5", "NDCG@10"],
        }  # fmt: skip
        assert set(figures["hiv"]["AP"]) == {"bce", "focal", "ours"}
        assert figures["hiv"]["AP"]["bce"]["mean"] > 0.5  # guessing has 0.2
        assert "toxicity is left out" in told.err
        # Two seeds: one run of each plain loss for all metrics, one of ours for each.
        assert out.read_text().count("\n") == 2 * (2 + 3) + 2 * (1 + 2)
        command.main([*words.split(), "--seeds", "3", "--metric", "AP"])
        assert out.read_text().count("\n") == 16 + 3
    finally:
        torch.set_num_threads(threads)


def test_choice_is_that_of_validation_data() -> None:
    settings = methods.PLAIN["bce"].grid

    def told(job: Job) -> training.Figures:
        place = settings.index(job.setting)
        val, test = [0.1, 0.4, 0.3, 0.2][place], 0.5 - place / 10
        return training.Figures({"AP": val}, {"AP": test}, {}, 0)

    cells = command.cells(["hiv"], ["AP"], ["bce"])
    found = command.train(cells, Runner(told, training.Figures, show=None), 10)
    assert found == {("hiv", "AP", "bce"): [0.4] * 10}


def test_every_method_of_a_metric_has_as_many_settings() -> None:
    for rows in methods.METHODS.values():
        counts = [len(method.grid) for method in rows.values()]
        assert all(one == other for one, other in pairwise(counts))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("mib", [64])
def test_memory_of_a_known_allocation(mib: int) -> None:
    """A large process that starts the measuring one must not hide it."""
    large = torch.ones(300, 2**18)
    code = f"print(risk_steps.growth(lambda: risk_steps.torch.ones({mib}, 2**18)))"
    assert risk_steps.in_process(code) == pytest.approx(mib, abs=8)
    assert large.all()


@pytest.mark.parametrize("problem, method, first", [("hiv / AP", "ours", 21), ("hiv", "bce", 3)])
def test_no_checkpoint_of_the_warm_start_counts(
    arrays: Path, monkeypatch: pytest.MonkeyPatch, problem: str, method: str, first: int
) -> None:
    """All X-risks share it: choosing one would compare cross-entropy with itself."""
    falling = count()
    monkeypatch.setitem(training.METRICS, "AP", lambda part, scores: -float(next(falling)))
    figures = training.run(Job(problem, method, {"lr": 1e-3}, 0, evaluations=60), arrays)
    assert figures.step["AP"] == first  # of 60 steps, 20 of warm start, a checkpoint every 3


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
