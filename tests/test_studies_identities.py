"""The benchmark of identities: groups and weights, rates against counting, choice, the command."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import beta
from sklearn.metrics import roc_auc_score

from studies import publish, small_batches
from studies.identities import __main__ as command
from studies.identities import comments, training
from studies.runner import Job

GROUPS = list(comments.WORDS)


def test_identities_are_whole_words_in_any_case() -> None:
    texts = ["A GAY man's blog", "manifold whitewash", "Turkey; turkish", ""]
    found = [[GROUPS[k] for k in row.nonzero()[0]] for row in comments.named(texts)]
    assert found == [["men", "LGBT"], [], ["Greek or Turkish"], []]


def test_weights_stand_for_all_comments_of_a_label_and_part() -> None:
    generator = np.random.default_rng(0)
    groups = generator.random((5000, 3)) < 0.05
    cell = generator.integers(6, size=5000)
    drawn = generator.random(5000) < 0.4
    rows = np.flatnonzero(drawn | groups.any(1))
    weight = comments.shares(groups, cell, rows)
    assert (weight[groups[rows].any(1)] == 1).all()
    kept = np.bincount(cell[rows], weight)
    np.testing.assert_allclose(kept, np.bincount(cell))


def part(size: int, seed: int, toxic: float = 0.3) -> comments.Part:
    """Comments with two features: of toxicity, and of naming the first identity.

    Args:
        size: their number.
        seed: of the draws.
        toxic: share among those that name the first identity; 0.3 of the others are.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = torch.rand(size, len(GROUPS), generator=generator) < 0.1
    groups[:, 0] = torch.rand(size, generator=generator) < 0.4
    share = torch.where(groups[:, 0], toxic, 0.3)
    y = (torch.rand(size, generator=generator) < share).float()
    x = torch.randn(size, 2, generator=generator)
    x += torch.stack([2 * y, 3 * groups[:, 0]], 1)
    return comments.Part(x, y, groups, torch.where(groups.any(1), 1.0, 2.5))


def test_figures_by_counting() -> None:
    parts = {"val": part(400, 0), "test": part(300, 1)}
    scores = {name: own.x.sum(1) for name, own in parts.items()}
    figures = training.judge(scores, parts)
    val = parts["val"]
    cut = training.threshold(scores["val"], val)
    quiet = val.y == 0

    def rate(cut: float) -> float:
        return float((val.weight * (scores["val"] > cut))[quiet].sum() / val.weight[quiet].sum())

    lower = scores["val"][quiet & (scores["val"] < cut)].max().item()
    assert rate(cut) <= training.FPR < rate(lower)
    own, found = parts["test"], scores["test"]
    # A comment of weight 2.5 is as good as five of weight 0.5: count copies.
    copies = (2 * own.weight).int()
    y, repeated = own.y.repeat_interleave(copies), found.repeat_interleave(copies)
    assert figures["auc"]["test"] == pytest.approx(roc_auc_score(y, repeated), abs=1e-6)
    for name, label in (("fpr", 0), ("tpr", 1)):
        called = (repeated[y == label] > cut).float().mean().item()
        assert figures[name]["test"] == pytest.approx(called, abs=1e-6)
    for k, (wrong, number) in enumerate(figures["groups"]["test"]):
        members = [i for i in range(300) if own.groups[i, k] and own.y[i] == 0]
        assert number == len(members)
        assert wrong == sum(found[i].item() > cut for i in members)
    rate, (wrong, number) = figures["fpr"]["test"], figures["groups"]["test"][0]
    assert command.excess(figures, "test")[0] == pytest.approx(wrong / number - rate)


def test_proved_and_above_by_exact_bounds() -> None:
    """By Clopper and Pearson's bounds, which SciPy's test does not use."""
    counts = [[k, 100] for k in range(22)]
    own: dict[str, Any] = {"auc": {"test": 0.9}, "fpr": {"test": 0.051}, "tpr": {"test": 0.7}}
    own["groups"] = {"test": counts}
    lower = [beta.ppf(0.05, k, 101 - k) if k else 0.0 for k, _ in counts]
    upper = [beta.ppf(0.95, k + 1, 100 - k) for k, _ in counts]
    told = command.figures(own, own)
    assert told["groups above"] == sum(bound > 0.071 for bound in lower) > 0
    assert told["groups proved"] == sum(bound < 0.071 for bound in upper) > 0
    assert told["groups within"] == 8 and told["largest excess"] == pytest.approx(0.159)


def test_choice() -> None:
    """The least of the larger of excess / 0.02 and loss / 0.005; for `erm` the AUC."""

    def runs(auc: float, excess: float) -> list[training.Figures]:
        count = [round((0.05 + excess) * 10**12), 10**12]  # so many that nothing is in doubt
        return [{"auc": {"val": auc}, "fpr": {"val": 0.05}, "groups": {"val": [count]}}]

    erm = [runs(0.950, 0.20), runs(0.951, 0.30)]
    other = [runs(0.950, 0.05), runs(0.949, 0.02), runs(0.9475, 0.0), runs(0.940, -0.02)]
    assert command.choose({"erm": erm, "other": other}) == {"erm": 1, "other": 2}


def test_every_method_has_as_many_settings() -> None:
    counts = [len(training.grid(method, (1e-3, 1e-2))) for method in training.METHODS]
    assert all(one == other for one, other in pairwise(counts))


def test_threshold_is_that_of_the_last_scores() -> None:
    last = training.Threshold(size=1000)
    last(torch.full((5000,), 100.0))
    assert last(torch.arange(1000.0)) == pytest.approx(0.95 * 999)


def test_limits_by_hand() -> None:
    counts = torch.full((22,), 475)  # 0.05 * 0.95 / 475 = 0.0001
    assert set(training.limits(counts, 3.0)) == set(GROUPS)
    assert list(training.limits(counts, 3.0).values()) == pytest.approx([-0.01] * 22)


def small() -> dict[str, Any]:
    """Small parts as `read` gives them: comments of the first identity are often toxic."""
    parts = [part(size, seed, toxic=0.7) for seed, size in enumerate((3000, 1500, 1500))]
    found: dict[str, Any] = {
        name: np.concatenate([getattr(own, name) for own in parts])
        for name in ("x", "y", "groups", "weight")
    }
    return found | {"part": np.repeat(np.arange(3), [len(own.y) for own in parts])}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kinds of input that were read."""
    kinds: list[str] = []
    monkeypatch.setattr(comments, "read", lambda kind: kinds.append(kind) or small())
    monkeypatch.setattr(command, "QUICK_STEPS", 3)
    threads = torch.get_num_threads()
    comments.load.cache_clear()
    yield kinds
    comments.load.cache_clear()
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_constraints_lower_the_rate_of_a_group(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first identity, which plain training calls toxic too often."""
    monkeypatch.setitem(training.PLANS, "features", training.Plan((), 250, 256))
    first = {}
    for method, own in (("erm", {}), ("ours", {"margin": 4.0})):
        job = Job("features", method, {"lr": 0.01, **own}, 0)
        figures = training.run(job, "features")
        first[method] = sum(command.excess(figures, name)[0] for name in ("val", "test"))
    assert first["erm"] > 0.15 and first["ours"] < 0.1


def test_command(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The shape of the JSON; the file of finished runs is continued."""
    out = tmp_path / "runs.jsonl"
    words = ["--quick", "--json", "--workers", "1", "--out", str(out)]
    command.main(words)
    head, *rows = json.loads(capsys.readouterr().out.splitlines()[-1])["features"]
    figures = {name: dict(zip(head[1:], cells, strict=True)) for name, *cells in rows}
    assert list(figures) == list(training.METHODS) and asked == ["counts"]
    assert figures["erm"]["less than ERM"] == "0.0000 ± 0.0000"
    assert out.read_text().count("\n") == 2 * len(figures)
    command.main([*words, "--seeds", "1"])
    assert out.read_text().count("\n") == 2 * len(figures)
    command.main([*words, "--seeds", "1", "--words"])
    assert out.read_text().count("\n") == 3 * len(figures)

    def missing(kind: str) -> None:
        raise FileNotFoundError("`toxicity` is not here.\nmore")

    monkeypatch.setattr(comments, "read", missing)
    comments.load.cache_clear()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        command.main(["--quick"])
    told = capsys.readouterr().err
    assert "is not here." in told and "FCCO_DATA" in told and "more" not in told


def test_end_to_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All methods on a tiny network in place of MiniLM, and random tokens."""

    class Tiny(torch.nn.Module):
        width = 8

        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(40, self.width)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.words(ids).mean(1)

    generator = np.random.default_rng(0)
    found = {
        "x": generator.integers(1, 40, (1500, 6)),
        "y": np.arange(1500) % 2,
        "groups": generator.random((1500, 22)) < 0.2,
        "weight": np.ones(1500),
        "part": np.arange(1500) % 3,
    }
    monkeypatch.setattr(comments, "read", lambda kind: found if kind == "tokens" else None)
    monkeypatch.setattr(small_batches.backbones, "build", lambda name: Tiny())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "QUICK_STEPS", 3)
    comments.load.cache_clear()
    command.main(["--train", "all", "--json", "--quick", "--seeds", "1", "--workers", "1"])
    comments.load.cache_clear()
    _, *rows = json.loads(capsys.readouterr().out.splitlines()[-1])["end to end"]
    assert len(rows) == len(training.METHODS)
    assert all(0 < float(auc.split()[0]) < 1 for _, auc, *_ in rows)


@pytest.mark.parametrize("problem", training.PLANS)
def test_published_runs_are_all_there(problem: str) -> None:
    found = command.published(problem)
    tuning, seeds = command.BUDGET.get(problem, command.USUAL)
    assert {len(runs) for _, runs in found.values()} == {seeds}
    with gzip.open(publish.runs("identities"), "rt") as lines:
        own = [json.loads(json.loads(line)["job"]) for line in lines]
    own = [job for job in own if job["problem"] == problem]
    grid = training.grid("erm", training.PLANS[problem].rates)
    assert len(own) == len(found) * (seeds + tuning * len(grid))
