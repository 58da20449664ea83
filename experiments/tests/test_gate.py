"""`fcco gate`: verdicts and figures by hand, kinds of losses, wrong use."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from fcco_experiments.cli import app
from scipy import stats


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def gate(*arguments: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["gate", *arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def found(*arguments: str, code: int = 0) -> dict[str, Any]:
    return json.loads(gate(*arguments, "--json", code=code).stdout.splitlines()[-1])


def verdicts(result: dict[str, Any]) -> dict[str, str]:
    return {row["segment"]: row["verdict"] for row in result["segments"]}


@pytest.fixture
def losses() -> pd.DataFrame:
    """A new model that is better but for 400 rows of islands; 10 rows are abroad."""
    random = np.random.default_rng(0)
    region = np.repeat(["north", "island", "abroad"], [2000, 400, 10])
    old = random.gamma(4, 0.1, len(region))
    worse = np.where(region == "island", 0.2, -0.05)
    table = pd.DataFrame({
        "old": old, "new": old + worse + 0.05 * random.normal(size=len(region)), "region": region,
        "half": np.arange(len(region)) % 2,
    })  # fmt: skip
    table.to_csv("losses.csv", index=False)
    return table


def test_verdict_of_every_segment_exit_code_and_json(losses):
    result = found("old", "new", "--data", "losses.csv", "--segments", "region,half",
                   "--tolerance", "0.01", code=1)  # fmt: skip
    assert verdicts(result) == {
        "all rows": "pass", "region = abroad": "too few rows", "region = island": "fail",
        "region = north": "pass", "half = 0": "pass", "half = 1": "pass",
    }  # fmt: skip
    assert not result["passed"]
    island = next(row for row in result["segments"] if row["segment"] == "region = island")
    own = losses[losses.region == "island"]
    assert island["rows"] == 400 and island["old"] == pytest.approx(own.old.mean())
    difference = own.new - own.old
    assert island["difference"] == pytest.approx(difference.mean())
    # Five segments have rows enough; three tenths of the probability are kept back.
    student = stats.t.isf(0.7 * 0.05 / 5, 399) * difference.std() / 20
    assert island["bound"] - island["difference"] == pytest.approx(student, rel=0.1)
    abroad = next(row for row in result["segments"] if row["segment"] == "region = abroad")
    assert abroad["bound"] is None
    several = ["--segments", "region", "--segments", "half"]
    again = found("old", "new", "--data", "losses.csv", *several, "--tolerance", "0.01", code=1)
    assert again == result
    gate("old", "new", "--data", "losses.csv", "--segments", "half", "--tolerance", "0.01")
    lax = gate("old", "new", "--data", "losses.csv", "--segments", "region", "--tolerance", "0.5",
               "--min-rows", "5")  # fmt: skip
    assert "Passed: 4 of 4 pass" in lax.stdout


def test_scores_have_log_loss_and_predictions_the_error():
    random = np.random.default_rng(1)
    label = random.random(500) < 0.4
    old = np.clip(0.5 * label + 0.5 * random.random(500), 0.001, 0.999)
    table = pd.DataFrame({
        "income": np.where(label, ">50K", "<=50K"), "old": old, "new": 1 - old,
        "a": np.where(old > 0.5, ">50K", "<=50K"), "b": ["<=50K"] * 500,
    })  # fmt: skip
    table.to_csv("t.csv", index=False, sep=";")
    result = found("old", "new", "--data", "t.csv", "--label", "income", code=1)
    assert result["loss"] == "log" and result["tolerance"] == 0.01
    row = result["segments"][0]
    assert row["old"] == pytest.approx(-np.log(np.where(label, old, 1 - old)).mean())
    assert row["new"] == pytest.approx(-np.log(np.where(label, 1 - old, old)).mean())
    other = found("old", "new", "--data", "t.csv", "--label", "income=<=50K")
    assert other["segments"][0]["old"] == pytest.approx(row["new"])
    result = found("a", "b", "--data", "t.csv", "--label", "income", code=1)
    assert result["loss"] == "error"
    assert result["segments"][0]["old"] == pytest.approx(((old > 0.5) != label).mean())
    assert result["segments"][0]["new"] == pytest.approx(label.mean())


def test_squared_errors_of_a_number_and_lists_of_segments_in_a_packed_table():
    random = np.random.default_rng(2)
    truth, old = random.normal(size=(2, 300))
    lines = ['"the truth";old;new;"my tags"']
    lines += [f"{t};{o};{0.9 * o};{'a|b' if k % 3 else 'b'}" for k, (t, o) in
              enumerate(zip(truth, old, strict=True))]  # fmt: skip
    Path("t.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    result = found("old", "new", "--data", "t.csv.gz", "--label", "the truth", "--loss", "squared",
                   "--segments", "my tags", "--tolerance", "9")  # fmt: skip
    rows = {row["segment"]: row for row in result["segments"]}
    assert {name: row["rows"] for name, row in rows.items()} == {
        "all rows": 300, "my tags = a": 200, "my tags = b": 300,
    }  # fmt: skip
    own = np.arange(300) % 3 > 0
    assert rows["my tags = a"]["old"] == pytest.approx(((truth - old)[own] ** 2).mean())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("old nwe --tolerance 1", "no column `nwe`"),
        ("old old --tolerance 1", "the same column"),
        ("old new", "Say --tolerance"),
        ("old new --tolerance 1 --loss log", "--loss needs --label"),
        ("old new --tolerance 1 --segments regoin", "no column `regoin`"),
        ("old new --tolerance 1 --segments old", "different values"),
        ("old holes --tolerance 1", "is empty in 1 rows"),
        (
            "old text --tolerance 1",
            "finite number. (Columns of predictions need --label.)",
        ),
        ("old new --label region", "has 3 values"),
        ("old big --label half", "probabilities from 0 to 1"),
        ("old new --label half --loss hinge", "is not one of 'log', 'error'"),
        ("old region --label half --loss error", "no row of `old` has a value of the label"),
        ("old new --tolerance 1 --level 2", "'--level': 2.0 is not in the range"),
    ],
)
def test_wrong_use_is_told_in_words_of_the_command(losses, arguments, message):
    big = losses.old * 5
    holes = losses.old.where(losses.index != 7)
    losses.assign(big=big, holes=holes, text="x").to_csv("t.csv", index=False)
    done = gate(*arguments.split(), "--data", "t.csv", code=2)
    said = " ".join(done.stderr.split())
    assert message in said and "Traceback" not in said


def test_a_model_may_say_the_same_everywhere(losses):
    losses.assign(flat=0.0, half=0.5, y=np.arange(len(losses)) % 2).to_csv("t.csv", index=False)
    assert found("old", "flat", "--data", "t.csv", "--tolerance", "0.01")["passed"]
    result = found("half", "flat", "--data", "t.csv", "--label", "y", code=1)
    assert result["segments"][0]["old"] == pytest.approx(np.log(2))


def test_a_table_that_is_not_there():
    Path("empty.csv").write_text("a,b\n")
    done = gate("a", "b", "--data", "empty.csv", "--tolerance", "1", code=2)
    assert "has no rows" in done.stderr
    done = gate("a", "b", "--data", "none.csv", "--tolerance", "1", code=2)
    assert "There is no file none.csv" in done.stderr
