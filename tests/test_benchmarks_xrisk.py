"""The benchmark of X-risks: metrics against pairs and sums, choice and figures, the command."""

from __future__ import annotations

import gzip
import json
import math
import statistics
import sys
from argparse import Namespace
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from studies.runner import Job
from studies.xrisk import __main__ as command
from studies.xrisk import methods, problems, speed, training


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_fpr, min_tpr", [(0.3, 0.0), (0.5, 0.5), (1.0, 0.0), (0.2, 0.75)])
def test_partial_auc_is_a_share_of_pairs(max_fpr: float, min_tpr: float, seed: int) -> None:
    """The hardest positives against the hardest negatives, when both are whole numbers."""
    generator = np.random.default_rng(seed)
    y = torch.tensor([1.0] * 20 + [0.0] * 60)
    scores = torch.from_numpy(generator.normal(size=80)) + 0.7 * y
    positive = np.sort(scores[y == 1])[: round(20 * (1 - min_tpr))]
    negative = np.sort(scores[y == 0])[::-1][: round(60 * max_fpr)]
    share = np.mean(positive[:, None] > negative[None])
    assert problems.partial_auc(y, scores, max_fpr, min_tpr) == pytest.approx(share)


def test_partial_auc_with_ties_beside_mcclish() -> None:
    generator = torch.Generator().manual_seed(0)
    y = (torch.rand(300, generator=generator) < 0.3).float()
    scores = (torch.randn(300, generator=generator) + y).round()
    rescaled = roc_auc_score(y, scores, max_fpr=0.3)
    least, most = 0.3**2 / 2, 0.3
    area = least + (2 * rescaled - 1) * (most - least)
    assert problems.partial_auc(y, scores, 0.3) == pytest.approx(area / 0.3)


def test_ndcg_by_hand() -> None:
    """Queries of unequal length in any order; one without a relevant row does not count."""
    query = torch.tensor([0, 1, 0, 2, 1, 0, 2])
    y = torch.tensor([2.0, 1.0, 0.0, 0.0, 3.0, 1.0, 0.0])
    scores = torch.tensor([0.1, 0.9, 0.5, 0.2, 0.3, 0.4, 0.7])
    part = problems.Part(torch.zeros(7, 1), y, query)
    first = (0 + 1 / math.log2(3)) / (3 + 1 / math.log2(3))  # the best two: gains 0 and 1
    second = (1 + 7 / math.log2(3)) / (7 + 1 / math.log2(3))
    assert problems.ndcg(part, scores, 2) == pytest.approx((first + second) / 2)


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
    for part, size in (("train", 400), ("val", 120), ("test", 120)):
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


def test_choice_and_paired_interval(arrays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting that is best on validation data, not on test data; the interval by hand."""
    settings = methods.PLAIN["bce"].grid

    def told(job: Job, arrays: Path) -> training.Figures:
        place = settings.index(job.setting)
        val, test = [0.1, 0.4, 0.3, 0.2][place], 0.5 - place / 10
        return training.Figures({"AP": val}, {"AP": test}, {}, 0)

    monkeypatch.setattr(command, "run", told)
    words = ["--data", "hiv", "--metric", "AP", "--method", "bce", "--arrays", str(arrays)]
    seen = {}
    monkeypatch.setattr(command, "tables", lambda found: seen.update(found) or "")
    threads = torch.get_num_threads()
    command.main(words)
    torch.set_num_threads(threads)
    ((setting, values),) = seen.values()
    assert setting == settings[1] and values == [0.4] * 10
    middle, half = command.interval([0.1, 0.3])
    assert middle == pytest.approx(0.2) and half == pytest.approx(12.7062 * 0.1, rel=1e-4)
    assert math.isnan(command.interval([0.1])[1])


def test_every_method_of_a_metric_has_as_many_settings() -> None:
    for rows in methods.METHODS.values():
        counts = [len(method.grid) for method in rows.values()]
        assert all(one == other for one, other in pairwise(counts))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("mib", [64])
def test_memory_of_a_known_allocation(mib: int) -> None:
    """A large process that starts the measuring one must not hide it."""
    large = torch.ones(300, 2**18)
    code = f"print(speed.growth(lambda: speed.torch.ones({mib}, 2**18)))"
    assert speed.in_process(code) == pytest.approx(mib, abs=8)
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


COUNTERPARTS = {"AP": "SOAP", "pAUC": "SOPA", "tpAUC": "STACO", "NDCG@5": "SONG", "NDCG@10": "SONG"}


def test_the_page_shows_what_the_runs_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of the page is that of the published runs, of which every seed is kept."""
    docs, runs = Path(__file__).parents[1] / "docs", tmp_path / "runs.jsonl"
    runs.write_bytes(gzip.decompress((docs / "results/xrisk/runs.jsonl.gz").read_bytes()))

    def refuse(job: Job, arrays: Path) -> training.Figures:
        raise AssertionError(f"a run is missing: {job}")

    monkeypatch.setattr(command, "run", refuse)
    options = Namespace(workers=1, out=runs, arrays=None, quick=False, steps=None, seeds=10)
    cells = [
        command.Cell(data, metric, method)
        for data in problems.DATA
        for metric in problems.metrics_of(data)
        for method in methods.METHODS[metric]
    ]
    found = command.train(cells, options)
    page, short = (
        (docs / f"research/{name}.md").read_text(encoding="utf-8")
        for name in ("details/ranking", "ranking")
    )
    assert command.markdown(found) in page
    titles = ["HIV molecules", "toxic comments", "bald faces", "gray hair", "query lists"]
    ahead: list[int] = []
    for data, title in zip(problems.DATA, titles, strict=True):
        for metric in problems.metrics_of(data):
            mine = found[command.Cell(data, metric, "ours")][1]
            row = f"| {title} | {metric} | {statistics.fmean(mine):.3f}"
            plain = "listwise" if data == "ranking" else "bce"
            for method in (f"libauc {COUNTERPARTS[metric]}", plain):
                values = found[command.Cell(data, metric, method)][1]
                gap, half = command.interval([a - b for a, b in zip(mine, values, strict=True)])
                ahead.append((gap > half) - (gap < -half))
                mark = "**" * (ahead[-1] != 0)
                row += f" | {mark}{statistics.fmean(values):.3f}{mark}"
                row += f" {COUNTERPARTS[metric]}" * (method != plain)
            assert f"{row} |" in short.splitlines()
    for sides, text in (
        (ahead[::2], "same metric on {}, by up to\n0.033, level on {} and behind on {}"),
        (ahead[1::2], "cross-entropy it is ahead on {}, level on {} and behind on {}"),
    ):
        assert text.format(*(sides.count(side) for side in (1, 0, -1))) in short


def test_the_page_shows_the_other_measurements() -> None:
    """Faces end to end, and time and memory of a step."""
    docs = Path(__file__).parents[1] / "docs"
    page = (docs / "research/details/ranking.md").read_text(encoding="utf-8")
    lines = (docs / "results/xrisk/faces.jsonl").read_text().splitlines()
    faces = [row for row in map(json.loads, lines) if row["seed"] >= 10]
    by_method = {m: [r["test"] for r in faces if r["method"] == m] for m in ("ours", "bce")}
    for values in by_method.values():
        assert len(values) == 5
        assert f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}" in page
    gaps = [a - b for a, b in zip(by_method["ours"], by_method["bce"], strict=True)]
    middle, half = command.interval(gaps)
    assert f"{middle:+.3f} ± {half:.3f}" in page
    found = json.loads((docs / "results/xrisk/speed.json").read_text())
    for metric, title in {
        "AP": "AP, ag",
        "pAUC": "partial AUC, ag",
        "tpAUC": "two-way, ag",
    }.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {title}")]
        ratios = [
            f"{found['step'][m][metric]['to_libauc']:.2f}" for m in ("mlp64", "mlp256", "cnn")
        ]
        mib = found["memory"][metric]
        cells = [*ratios, f"{mib['mib']:.0f} MiB against {mib['libauc_mib']:.0f}"]
        assert [cell.strip() for cell in row.split("|")[2:-1]] == cells
