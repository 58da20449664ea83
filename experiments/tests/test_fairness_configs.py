"""The files that ship with the fairness task, and the task through the command line."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from fcco_experiments import config, data, sweep
from fcco_experiments.cli.app import app
from fcco_experiments.store import load_comparison
from fcco_experiments.tasks.fairness import TASK
from typer.testing import CliRunner

RESULTS = Path(__file__).parents[2] / "docs" / "results"
CONFIGS = [name for name in config.names(TASK) if name not in ("base", "unbounded")]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_loads_and_fits_its_methods(name):
    for quick in (False, True):
        loaded = config.load(TASK, name, quick=quick)
        assert loaded.methods and loaded.data in data.DATA_SETS
        assert TASK.check(loaded) == []
        assert config.load(TASK, name, quick=quick, overrides=["epochs=3"]).epochs == 3


def test_the_paper_s_setting_is_as_printed_and_the_other_is_not():
    for name in ("adult", "compas"):
        printed, ours = config.load(TASK, f"{name}-paper"), config.load(TASK, name)
        assert (printed.score, printed.temperature) == ("unbounded", 1.0)
        assert ours.score == "normalised" and 0.1 <= ours.temperature <= 0.2
        for each in (printed, ours):
            assert each.thresholds == (-3, -2, -1, 0, 1, 2, 3) and each.tolerance == 0.005
            assert (each.batch, each.epochs, len(each.seeds)) == (128, 60, 5)
            assert (each.decay_at, each.decay) == ((0.5, 0.75), 0.1) and len(each.hidden) == 2
            assert each.methods["alexr2"].independent
            assert {"alexr2", "sonex", "sox", "sonx", "icppac"} <= set(each.methods)


GRIDS = [("appendix", 18), ("wide", 24), ("frontier", 6), ("full", 384)]


@pytest.mark.parametrize("name, number", GRIDS)
def test_every_method_has_the_same_number_of_settings(name, number):
    loaded = sweep.read_grid(TASK, name)
    chosen = sweep.settings_of(loaded, config.load(TASK, "adult"))
    assert set(Counter(setting.family for setting in chosen).values()) == {number}


def test_the_whole_grids_of_the_appendix():
    counts = Counter(
        setting.family
        for setting in sweep.settings_of(
            sweep.read_grid(TASK, "paper"), config.load(TASK, "adult-paper")
        )
    )
    assert counts["alexr2"] == 2 * 4 * 4 * 3 * 2 * 6 == 1152
    assert (counts["sonex"], counts["sonx"], counts["sox"], counts["icppac"]) == (72, 24, 32, 18)


SWEEPS = [
    (f"{data}{name}", f"fairness-{data}-{kind}-sweep", grid_name)
    for data in ("adult", "compas")
    for name, kind, grid_name in (
        ("", "full", "full"),
        ("-paper", "paper", "paper"),
        ("-appendix", "appendix", "paper"),
    )
]


@pytest.mark.parametrize("name, folder, grid_name", SWEEPS)
def test_settings_are_the_winners_of_the_committed_sweeps(name, folder, grid_name):
    loaded = config.load(TASK, name)
    told = json.loads((RESULTS / folder / "sweep.json").read_text())
    tried = {
        each.name: each for each in sweep.settings_of(sweep.read_grid(TASK, grid_name), loaded)
    }
    assert set(tried) == {entry["name"] for entry in told["settings"]}
    for entry in told["settings"]:
        assert entry["setting"] == tried[entry["name"]].values
        assert entry["finished"] == len(told["seeds"]) == 5
    assert {n: each for n, each in loaded.methods.items() if n != "erm"} == {
        family: tried[winner].method for family, winner in told["winners"].items()
    }
    swept = config.load(TASK, str(RESULTS / folder / "winners.yaml"))
    assert swept.methods == {n: each for n, each in loaded.methods.items() if n != "erm"}
    assert not set(told["seeds"]) & set(loaded.seeds), "fresh seeds"
    # The rule, asked again, with the figures that are committed.
    scores: dict[str, dict[str, tuple[float, ...]]] = {}
    for entry in told["settings"]:
        if entry["diverged"] == 0:
            figures = entry["figures"]
            if "val_gap" in figures:  # what is left of the gap without what chance makes of it
                left = figures["val_gap"] ** 2 - figures["val_gap_floor"] ** 2
                figures = figures | {"val_excess_gap": math.sqrt(max(0.0, left))}
            score = TASK.rule(loaded).score(figures)
            assert score == pytest.approx(entry["score"], abs=1e-5)
            scores.setdefault(entry["method"], {})[entry["name"]] = score
    for family, winner in told["winners"].items():
        assert scores[family][winner] == pytest.approx(min(scores[family].values()), abs=1e-5)


def test_the_appendix_grid_is_a_part_of_the_paper_s():
    whole, part = sweep.read_grid(TASK, "paper").methods, sweep.read_grid(TASK, "appendix").methods
    for name, each in part.items():
        assert each.base == whole[name].base
        for key, values in each.grid.items():
            assert set(values) <= set(whole[name].grid[key]), (name, key)


def test_compare_on_generated_data(tmp_path):
    out = tmp_path / "here"
    call = ["compare", "fairness", "--data", "synthetic", "--epochs", "1", "--seeds", "0,1"]
    call += ["--methods", "sonex,alexr2,erm", "--workers", "1", "--out", str(out), "--json"]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, result.output
    table = json.loads(result.stdout.splitlines()[-1])["methods"]
    assert set(table) == {"sonex", "alexr2", "erm"}
    for figures in table.values():
        for key in ("train_auc", "test_auc", "train_violation", "test_violation", "train_inside"):
            assert math.isfinite(figures[key]["mean"]) and figures[key]["std"] >= 0
        for key in ("train_gap", "test_gap", "test_gap_floor", "seconds", "kkt_stationarity"):
            assert math.isfinite(figures[key]["mean"])
    runs = load_comparison(out).of("sonex")
    mean = sum(run.rows[-1]["test_auc"] for run in runs) / 2
    assert table["sonex"]["test_auc"]["mean"] == pytest.approx(mean, abs=1e-12)
    page = (out / "report.html").read_text()
    assert "Two groups, one ROC curve" in page and "TPR gap at -3" in page
    assert "erm is there for reference" in page


def test_a_wrong_setting_is_told_before_any_training(tmp_path):
    call = ["run", "fairness", "--data", "synthetic", "--method", "sonex", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*call, "--settings.eta", "1"])
    assert result.exit_code == 2
    assert "no such setting: `eta`" in result.output and "Settings: smoothing" in result.output
    assert not list(tmp_path.iterdir())
