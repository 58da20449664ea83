"""A run of group DRO in the study."""

from __future__ import annotations

from studies.group_dro.training import run as train
from studies.runner import Job


def test_a_run_of_group_dro_is_one_of_the_task():
    setting = {"method": "sonex", "lr": 0.01}
    job = Job("grouped-synthetic", "automatic", setting, 2000)
    one, two = (train(job, (f"epochs={k}", "device=cpu")) for k in (1, 2))
    assert two["epochs"] == 2 and two["train_cvar"] < one["train_cvar"]
