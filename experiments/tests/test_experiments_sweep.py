"""Sweeps: which settings are tried, how the best is chosen, and what is left for `compare`."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fcco_experiments import compare, config, store, sweep
from fcco_experiments.config import ConfigError
from fcco_experiments.task import Method
from hypothesis import given
from hypothesis import strategies as st
from toy_task import TASK, ToyTask

BASE = config.load(TASK, "quadratic")


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 40))
def test_a_spread_is_part_of_the_grid_and_shows_each_value_equally_often(sizes, limit):
    values = {f"key{i}": list(range(size)) for i, size in enumerate(sizes)}
    whole = [dict(zip(values, p, strict=True)) for p in itertools.product(*values.values())]
    chosen = sweep.spread(values, limit)
    assert len(chosen) == min(limit, len(whole))
    assert all(point in whole for point in chosen)
    assert len({tuple(point.values()) for point in chosen}) == len(chosen)
    assert chosen == sweep.spread(values, limit), "the same every time"
    assert sweep.spread(values, None) == whole


def test_a_spread_of_a_large_grid_is_balanced():
    """The paper's grid of ALEXR2 has 1,152 settings; 24 of them show each value."""
    sizes = {"a": 3, "b": 4, "c": 8, "d": 12}
    values = {key: list(range(size)) for key, size in sizes.items()}
    for key, each in values.items():
        counts = Counter(point[key] for point in sweep.spread(values, 24))
        assert set(counts) == set(each)
        assert max(counts.values()) - min(counts.values()) <= 1


def test_grids_are_read_and_expanded():
    read = sweep.read_grid(TASK, "quadratic")
    found = sweep.settings_of(read, BASE)
    assert [each.name for each in found] == [
        "sonex@0", "sonex@1", "sonex@2", "plain-sox@0", "plain-sox@1",
    ]  # fmt: skip
    assert {each.method.settings["smoothing"] for each in found[:3]} == {0.01}  # of the config
    for each in found[:3]:
        assert each.values == {
            "lr": each.method.lr, "settings.penalty": each.method.settings["penalty"],
        }  # fmt: skip
    assert found[4].method == Method("li2024", 0.02, "sgd", settings={"penalty": 30})
    assert len(sweep.settings_of(read, BASE, limit=6)) == 8
    base = {"method": "sonex", "lr": 1.0, "settings": {"penalty": 1}}
    own = sweep.Grid({"a": sweep.MethodGrid({"settings.penalty": [2, 3]}, base)})
    assert [each.method.settings["penalty"] for each in sweep.settings_of(own, BASE)] == [2, 3]
    assert base["settings"] == {"penalty": 1}, "the base is not changed"


def test_a_grid_on_the_command_line():
    found = settings_of(("sox.lr", "[1e-1, 1e-2]"), ("sox.beta", "[1.0]"))
    assert [each.method.lr for each in found] == [0.1, 0.01]
    assert all(each.method.method == "li2024" and each.method.beta == 1.0 for each in found)
    for key, text in (("sox", "[1]"), ("sox.lr", "0.1"), ("sox.lr", "[]")):
        with pytest.raises(ConfigError, match=r"write --grid\.METHOD\.KEY"):
            settings_of((key, text))


def test_wrong_grids(tmp_path):
    path = tmp_path / "g.yaml"
    path.write_text("methods:\n  sonex: {grid: {lr: 3}}\nlimits: 3\n")
    with pytest.raises(ConfigError) as caught:
        sweep.read_grid(TASK, str(path))
    assert [each.partition("g.yaml")[2] for each in caught.value.args] == [
        ", line 2: `methods.sonex.grid.lr` must be a valid array but is: 3",
        ", line 3: unknown key `limits`; did you mean `limit`? Allowed: methods, limit, seeds.",
    ]
    path.write_text("methods: {sonnex: {grid: {lr: [1]}}, sox: {grid: {updat: [adam]}}}")
    with pytest.raises(ConfigError) as caught:
        sweep.settings_of(sweep.read_grid(TASK, str(path)), BASE, source="g.yaml")
    assert caught.value.args[0].startswith("grid: `methods.sonnex` needs a `base`")
    assert caught.value.args[1].startswith("g.yaml: methods.sox: unknown key `updat`")
    with pytest.raises(ConfigError, match=r"no grid `nothing`.*There are: quadratic"):
        sweep.read_grid(TASK, "nothing")


def settings_of(*inline: tuple[str, str]) -> list[sweep.Setting]:
    """Of a grid on the command line."""
    return sweep.settings_of(sweep.with_inline(sweep.Grid(), inline), BASE)


def make(
    folder: Path, chosen: list[sweep.Setting], seeds: tuple[int, ...] = (7,),
    base: Any = BASE, resume: bool = False,
) -> dict[str, Any]:  # fmt: skip
    plan = sweep.plan_sweep("toy_task:TASK", "quadratic", base, chosen, seeds)
    compare.execute(plan, folder, resume=resume, workers=1)
    return sweep.choose(folder, chosen, BASE.seeds)


def test_the_winner_is_the_first_by_the_rule_of_the_task(tmp_path):
    """Recomputed from the files: violation above 0.05, then loss, means over both seeds."""
    chosen = sweep.settings_of(sweep.read_grid(TASK, "quadratic"), BASE, limit=6)
    longer = replace(BASE, epochs=30, checkpoint_every=30, evaluate_every=30)
    told = make(tmp_path, chosen, (7, 8), longer)
    assert told["rule"].startswith("violation above 0.05 first") and told["seeds"] == [7, 8]

    def score(name: str) -> tuple[float, float]:
        ends = [json.loads((tmp_path / name / f"seed-{k}/result.json").read_text()) for k in (7, 8)]
        excess = sum(end["final"]["val_excess"] for end in ends) / 2
        return max(0, excess - 0.05), sum(end["final"]["val_loss"] for end in ends) / 2

    for family in ("sonex", "plain-sox"):
        expected = sorted((s.name for s in chosen if s.family == family), key=score)
        assert told["ranking"][family] == expected
        assert told["winners"][family] == expected[0]
    losses = {name: score(name)[1] for name in told["ranking"]["sonex"]}
    assert min(losses, key=losses.__getitem__) != told["winners"]["sonex"], "feasibility decides"
    assert store.clean(told) == sweep.read(tmp_path)
    assert not any(key.startswith("test") for entry in told["settings"] for key in entry["figures"])

    won = config.load(TASK, tmp_path / "winners.yaml")
    assert won.seeds == BASE.seeds and won.epochs == 30
    best = {s.name: s.method for s in chosen}
    assert won.methods == {name: best[winner] for name, winner in told["winners"].items()}
    assert (tmp_path / "winners.yaml").read_text().startswith("# Winners of a sweep. Rule: viol")


def test_settings_that_diverge_come_last_and_never_win(tmp_path):
    told = make(tmp_path, settings_of(("sox.lr", "[1e80, 1e-3]"), ("sonex.lr", "[1e80]")))
    assert told["ranking"] == {"sox": ["sox@1", "sox@0"], "sonex": ["sonex@0"]}
    assert told["winners"] == {"sox": "sox@1"}
    assert [entry["diverged"] for entry in told["settings"]] == [1, 0, 1]
    assert list(config.load(TASK, tmp_path / "winners.yaml").methods) == ["sox"]


def test_a_sweep_that_goes_on_with_more_ranks_all(tmp_path):
    make(tmp_path, settings_of(("sox.lr", "[1e-3, 1e-2]")))
    told = make(tmp_path, settings_of(("sonex.lr", "[1e-2]")), resume=True)
    assert [(e["name"], e["setting"]) for e in told["settings"]] == [
        ("sox@0", {"lr": 1e-3}), ("sox@1", {"lr": 1e-2}), ("sonex@0", {"lr": 1e-2}),
    ]  # fmt: skip
    assert list(config.load(TASK, tmp_path / "winners.yaml").methods) == list(told["winners"])
    assert set(told["winners"]) == {"sox", "sonex"}


def test_a_task_without_a_rule_is_refused_before_training(monkeypatch):
    monkeypatch.setattr(ToyTask, "rule", lambda self, config: None)
    chosen = sweep.settings_of(sweep.read_grid(TASK, "quadratic"), BASE)
    with pytest.raises(ConfigError, match="toy has no rule to choose by"):
        sweep.plan_sweep("toy_task:TASK", "quadratic", BASE, chosen, (7,))
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="no settings"):
        sweep.plan_sweep("toy_task:TASK", "quadratic", BASE, [], (7,))
