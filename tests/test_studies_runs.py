"""Group DRO in the study: a run, and published ones."""

from __future__ import annotations

import gzip

from studies import publish
from studies.group_dro import report
from studies.group_dro.training import run as train
from studies.runner import Job


def test_a_run_of_group_dro_is_one_of_the_task():
    setting = {"method": "sonex", "lr": 0.01}
    job = Job("grouped-synthetic", "automatic", setting, 2000)
    one, two = (train(job, (f"epochs={k}", "device=cpu")) for k in (1, 2))
    assert two["epochs"] == 2 and two["train_cvar"] < one["train_cvar"]


def test_published_runs_take_the_place_of_those_of_their_data(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "RESULTS", tmp_path)
    publish.write(tmp_path / "group-dro", {"runs": {"networks.jsonl.gz": "1"}}, commit="abc1234")
    old = b'{"data": "amazon", "seed": 1}\n{"data": "celeba", "seed": 1}\n'
    (tmp_path / "group-dro/heads.jsonl.gz").write_bytes(gzip.compress(old))
    new = [{"data": "celeba", "seed": seed} for seed in (2, 3)]
    report.write("heads", new, "def5678")
    assert report.published("heads") == [{"data": "amazon", "seed": 1}, *new]
    made = {"networks.jsonl.gz": "1", "heads.jsonl.gz": "def5678"}
    assert publish.table("group-dro")["runs"] == made
