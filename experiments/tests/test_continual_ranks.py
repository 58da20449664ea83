"""Continual learning on two processes equals one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from continual_cases import CONFIG, RANKS, everything, one_thread  # noqa: F401 (a fixture)
from test_experiments_ranks import TESTS, torchrun

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folder, and what each rank found."""
    at = tmp_path_factory.mktemp("ranks")
    done = torchrun(str(TESTS / "continual_cases.py"), ".", at=at)
    assert done.returncode == 0, done.stderr[-3000:]
    return at, [json.loads((at / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_equal_one_process(inside, tmp_path, monkeypatch, name):
    """In float32, so up to its rounding; the old model is trained by one rank alone."""
    monkeypatch.setenv("FCCO_CACHE", os.environ.get("FCCO_CACHE", ""))  # is put back afterwards
    one = everything(name, tmp_path)
    first, second = (found[name] for found in inside[1])
    assert first["old"] == second["old"] == one["old"]
    assert one["rows"][0]["objective"] - one["rows"][2]["objective"] > 0.01, "the case must move"
    for before, after in zip(one["rows"], first["rows"], strict=True):
        assert set(before) == set(after)
        for key, value in before.items():
            assert after[key] == pytest.approx(value, abs=3e-5), key
    assert first["rows"] == second["rows"], "the same figures on every rank"
    assert first["rows"][2] == first["rows"][3], "resumed"
    assert first["end"]["train_counts"] == one["end"]["train_counts"]


def test_one_rank_trains_the_old_model(inside):
    at, _ = inside
    assert len(list((at / "cache/data/old").glob("scenes-synthetic-0-*.pt"))) == 1
    seeds = len(CONFIG.seeds)
    assert len(list((at / "fetched/data/old").glob("scenes-synthetic-[0-9]-*.pt"))) == seeds
