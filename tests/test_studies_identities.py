"""The benchmark of identities: groups and weights, rates against counting, choice, the command."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import beta
from sklearn.metrics import roc_auc_score

from studies import publish
from studies.identities import __main__ as command
from studies.identities import comments, methods, training
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
    figures = training.judge(scores, parts, 1.0)
    val = parts["val"]
    cut = training.threshold(scores["val"], val)
    quiet = val.y == 0

    def rate(cut: float) -> float:
        return float((val.weight * (scores["val"] > cut))[quiet].sum() / val.weight[quiet].sum())

    lower = scores["val"][quiet & (scores["val"] < cut)].max().item()
    assert rate(cut) <= methods.FPR < rate(lower)
    own, found = parts["test"], scores["test"]
    # A comment of weight 2.5 is as good as five of weight 0.5: count copies.
    copies = (2 * own.weight).int()
    y, repeated = own.y.repeat_interleave(copies), found.repeat_interleave(copies)
    assert figures.auc["test"] == pytest.approx(roc_auc_score(y, repeated))
    assert figures.fpr["test"] == pytest.approx((repeated[y == 0] > cut).float().mean())
    assert figures.tpr["test"] == pytest.approx((repeated[y == 1] > cut).float().mean())
    for k, (wrong, number) in enumerate(figures.groups["test"]):
        members = [i for i in range(300) if own.groups[i, k] and own.y[i] == 0]
        assert number == len(members)
        assert wrong == sum(found[i].item() > cut for i in members)
    again = training.Figures(**json.loads(json.dumps(figures.as_dict())))
    assert again.excess("test") == pytest.approx(figures.excess("test"), abs=1e-5)


def test_proved_and_above_by_exact_bounds() -> None:
    """By Clopper and Pearson's bounds, which SciPy's test does not use."""
    counts = [[k, 100] for k in range(22)]
    own = training.Figures(
        {"test": 0.9}, {"test": 0.051}, {"test": 0.7}, {"test": counts}, seconds=1.0
    )
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
        return [training.Figures({"val": auc}, {"val": 0.05}, {}, {"val": [count]}, 1.0)]

    erm = [runs(0.950, 0.20), runs(0.951, 0.30)]
    other = [runs(0.950, 0.05), runs(0.949, 0.02), runs(0.9475, 0.0), runs(0.940, -0.02)]
    assert command.choose({"erm": erm, "other": other}) == {"erm": 1, "other": 2}


def test_every_method_has_as_many_settings() -> None:
    counts = [len(method.grid((1e-3, 1e-2))) for method in methods.METHODS.values()]
    assert all(one == other for one, other in pairwise(counts))


def test_threshold_is_that_of_the_last_scores() -> None:
    last = methods.Threshold(size=1000)
    last(torch.full((5000,), 100.0))
    assert last(torch.arange(1000.0)) == pytest.approx(0.95 * 999)


def test_limits_by_hand() -> None:
    counts = torch.full((22,), 475)  # 0.05 * 0.95 / 475 = 0.0001
    assert set(methods.limits(counts, 3.0)) == set(GROUPS)
    assert list(methods.limits(counts, 3.0).values()) == pytest.approx([-0.01] * 22)


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """Small parts in the form of `--arrays`: those of the first identity are often toxic."""
    parts = [part(size, seed, toxic=0.7) for seed, size in enumerate((3000, 1500, 1500))]
    names = ("x", "y", "groups", "weight")
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(own, name) for own in parts]) for name in names
    }
    where = np.repeat(np.arange(3), [len(own.y) for own in parts])
    np.savez(tmp_path / "arrays.npz", **columns, part=where)
    return tmp_path / "arrays.npz"


@pytest.mark.slow
def test_constraints_lower_the_rate_of_a_group(
    arrays: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first identity, which plain training calls toxic too often."""
    monkeypatch.setitem(training.PLANS, "features", training.Plan((), 250, 256))
    first = {}
    for method, own in (("erm", {}), ("ours", {"margin": 4.0})):
        job = Job("features", method, {"lr": 0.01, **own}, 0)
        figures = training.run(job, training.Files(arrays))
        first[method] = figures.excess("val")[0] + figures.excess("test")[0]
    assert first["erm"] > 0.15 and first["ours"] < 0.1


def test_command(arrays: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The shape of the JSON; the file of finished runs is continued."""
    out = arrays.parent / "runs.jsonl"
    words = ["--quick", "--json", "--steps", "3", "--arrays", str(arrays), "--out", str(out)]
    threads = torch.get_num_threads()
    try:
        command.main(words)
        figures = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert list(figures) == list(methods.METHODS)
        assert set(figures["ours"]["largest excess"]) == {"mean", "std"}
        assert figures["erm"]["auc loss"] == {"mean": 0.0, "std": 0.0}
        assert out.read_text().count("\n") == 2 * len(figures)
        command.main([*words, "--seeds", "1"])
        assert out.read_text().count("\n") == 2 * len(figures)
        command.main([*words, "--seeds", "1", "--words"])
        assert out.read_text().count("\n") == 3 * len(figures)
    finally:
        torch.set_num_threads(threads)


def test_quick_counts_words_instead_of_running_a_backbone(
    arrays: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = comments.counts(["Ab b ab!", ""], width=1000)
    once, twice = (zlib.crc32(word) % 1000 for word in (b"b", b"ab"))
    assert found.count_nonzero() == 2 and found.shape == (2, 1000)
    assert found[0, [once, twice]].tolist() == pytest.approx([math.log(2), math.log(3)])
    asked = []

    def read(kind: str) -> dict[str, Any]:
        asked.append(kind)
        with np.load(arrays) as file:
            return dict(file)

    monkeypatch.setattr(comments, "read", read)
    threads = torch.get_num_threads()
    try:
        command.main(["--quick", "--json", "--steps", "3", "--seeds", "1"])
        assert asked == ["counts"] and "counts of words" in capsys.readouterr().err

        def missing(kind: str) -> None:
            raise FileNotFoundError("`toxicity` is not here.\nmore")

        monkeypatch.setattr(comments, "read", missing)
        with pytest.raises(SystemExit):
            command.main(["--quick"])
        told = capsys.readouterr().err
        assert "is not here." in told and "FCCO_DATA" in told and "more" not in told
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All methods on a tiny network and tokens from files."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=128,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path / "weights")
    generator = np.random.default_rng(0)
    np.savez(
        tmp_path / "tokens.npz",
        x=generator.integers(1, 40, (1500, 6)).astype(np.uint16),
        y=np.arange(1500) % 2,
        groups=generator.random((1500, 22)) < 0.2,
        weight=np.ones(1500),
        part=np.arange(1500) % 3,
    )
    threads = torch.get_num_threads()
    try:
        command.main(
            f"--train all --tokens {tmp_path}/tokens.npz --weights {tmp_path}/weights --json "
            "--quick --steps 2 --seeds 1 --device cpu".split()
        )
    finally:
        torch.set_num_threads(threads)
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(0 < own["auc"]["mean"] < 1 for own in figures.values())


@pytest.mark.parametrize("problem", training.PLANS)
def test_published_runs_are_all_there(problem: str) -> None:
    found = command.published(problem)
    tuning, seeds = command.BUDGET.get(problem, command.USUAL)
    assert {len(runs) for _, runs in found.values()} == {seeds}
    with gzip.open(publish.runs("identities"), "rt") as lines:
        own = [json.loads(json.loads(line)["job"]) for line in lines]
    own = [job for job in own if job["problem"] == problem]
    grid = methods.METHODS["erm"].grid(training.PLANS[problem].rates)
    assert len(own) == len(found) * (seeds + tuning * len(grid))
