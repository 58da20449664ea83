"""Groups of a table that overlap: reading, splits, training, figures and the command."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from fcco_experiments import data
from fcco_experiments.cli import app
from fcco_experiments.data import Columns
from fcco_experiments.data.grouped import Vectors
from fcco_experiments.tasks.group_dro.training import GroupDROTraining
from fcco_experiments.tasks.network import Classifier
from group_dro_cases import CONFIG, METHODS
from task_cases import one_thread, steps  # noqa: F401 (one_thread is used by being here)

ROWS = 200
NAMES = ("is_old", "is_rural", "is_new")
OVERLAPPING = Columns(label="bought", overlapping=NAMES, features=("age", "income"))


@pytest.fixture
def frame() -> pd.DataFrame:
    """Customers in three groups that overlap; some are in none."""
    random = np.random.RandomState(0)
    member = random.rand(ROWS, 3) < [0.6, 0.3, 0.12]
    age, income = random.normal(size=(2, ROWS)).round(3)
    score = np.where(member[:, 2], age - income, age + income)
    return pd.DataFrame({
        "age": age,
        "income": income,
        "sex": random.choice(["f", "m"], ROWS),
        "is_old": np.where(member[:, 0], "1", "0"),
        "is_rural": np.where(member[:, 1], "True", "False"),
        "is_new": np.where(member[:, 2], "yes", "no"),
        "groups": [
            "|".join(name for name, own in zip(NAMES, row, strict=True) if own) for row in member
        ],
        "bought": np.where(score > 0, "yes", "no"),
    })  # fmt: skip


@pytest.fixture
def path(frame, tmp_path):
    frame.to_csv(tmp_path / "t.csv", index=False)
    return tmp_path / "t.csv"


def of_rows(loaded: data.GroupedData) -> list[set[str]]:
    """Names of the groups of each row, put together from the parts."""
    found: dict[int, set[str]] = {}
    for part in loaded.cut(0).values():
        found |= {int(row): set() for row in part.rows}
        assert part.member is not None
        for place, group in zip(part.member, part.group, strict=True):
            found[int(part.rows[place])].add(part.group_names[group])
    return [found[row] for row in range(len(loaded.samples))]


@pytest.mark.parametrize("columns", [NAMES, ("is_*",), ("groups",), ("is_old", "sex=f")])
def test_rows_have_all_of_their_groups(frame, path, columns):
    loaded = data.load_grouped(path, columns=Columns(label="bought", overlapping=columns))
    wanted = [set(filter(None, cell.split("|"))) for cell in frame["groups"]]
    if "sex=f" in columns:
        both = zip(wanted, frame["sex"], strict=True)
        wanted = [(own & {"is_old"}) | ({"sex=f"} if sex == "f" else set()) for own, sex in both]
    assert of_rows(loaded) == wanted
    assert any(len(own) > 1 for own in wanted) and set() in wanted


def test_columns_of_groups_are_no_features(frame, tmp_path):
    frame.drop(columns="groups").to_csv(tmp_path / "t.csv", index=False)
    columns = Columns(label="bought", overlapping=("is_*", "sex=f"))
    loaded = data.load_grouped(tmp_path / "t.csv", columns=columns)
    assert np.allclose(loaded.samples.values, frame[["age", "income"]])  # type: ignore[attr-defined]


def test_parts_hold_each_group_by_its_share(frame, path):
    loaded = data.load_grouped(path, columns=OVERLAPPING)
    parts = loaded.cut(3)
    rows = torch.cat([part.rows for part in parts.values()])
    assert sorted(rows.tolist()) == list(range(ROWS))
    for part in parts.values():
        assert part.group_names == NAMES == part.reported_names
    rarest = (frame["is_new"] == "yes").sum()  # cut exactly, others nearly
    for seed in range(10):
        assert (loaded.cut(seed)["test"].group == 2).sum() == round(0.1 * rarest)
    shares = torch.bincount(parts["train"].group) / torch.tensor(
        [(frame[name].isin(["1", "True", "yes"])).sum() for name in NAMES]
    )
    torch.testing.assert_close(shares, torch.full((3,), 0.8), atol=0.08, rtol=0)
    assert loaded.fingerprint != data.load_grouped(
        path, columns=Columns(**{**vars(OVERLAPPING), "overlapping": NAMES[:2]})
    ).fingerprint  # fmt: skip


def test_parts_of_a_split_column(frame, tmp_path):
    place = np.resize(["train", "train", "test", "train"], ROWS)
    frame.assign(part=place).to_csv(tmp_path / "t.csv", index=False)
    columns = Columns(**{**vars(OVERLAPPING), "split": "part"})
    parts = data.load_grouped(tmp_path / "t.csv", columns=columns).cut(0)
    assert parts["test"].rows.tolist() == np.flatnonzero(place == "test").tolist()
    assert 0 < len(parts["validation"]) < 0.2 * len(parts["train"])


@pytest.mark.parametrize(
    ("change", "columns", "reason"),
    [
        ({}, {"overlapping": ("is_old", "sex")}, "data row 1 of .* has sex = f; it must be"),
        ({}, {"overlapping": ("is_old", "is_young")}, "no column `is_young`"),
        ({"is_new": ["no"]}, {}, "no row of .* is in is_new"),
        ({"is_new": ["yes", None]}, {}, "`is_new` .* is empty in 100 rows"),
        ({}, {"overlapping": ("sex=f",)}, "train data .* too few groups: 1 of 2"),
        ({}, {"overlapping": ("is_old",)}, "no cell of the column `is_old` .* has two groups"),
        ({}, {"group": ("sex",)}, "without `group` and `sample_limit`"),
        ({"bought": ["yes"]}, {}, "one class alone in .*, yes"),
        ({"part": ["train", "test"], "is_new": ["yes", "no"], "is_old": ["1", "0"],
          "is_rural": ["1", "0"]}, {"split": "part"}, "test data .* too few groups: 0 of 1"),
    ],
)  # fmt: skip
def test_wrong_columns(frame, tmp_path, change, columns, reason):
    for name, values in change.items():
        frame[name] = np.resize(np.array(values, dtype=object), ROWS)
    frame.to_csv(tmp_path / "t.csv", index=False)
    chosen = Columns(**{**vars(OVERLAPPING), **columns})
    with pytest.raises(data.WrongData, match=reason):
        data.load_grouped(tmp_path / "t.csv", columns=chosen)


def test_where_groups_cannot_overlap(path):
    refused: Any = ({"limit": 5}, {"whole_groups": True}, {"by_user": True}, {"classes": ("no",)})
    for options in refused:
        with pytest.raises(data.WrongData, match="`overlapping` is for group-dro"):
            data.load_grouped(path, columns=OVERLAPPING, **options)
    with pytest.raises(data.WrongData, match="takes features and --group"):
        data.load(path, columns=Columns(label="bought", overlapping=NAMES))


# Training.


def training(path: Any, method: str, **changes: Any) -> GroupDROTraining:
    loaded = data.load_grouped(path, columns=OVERLAPPING)
    changes = {"groups_per_batch": 3, **changes}
    config, device = dataclasses.replace(CONFIG, **changes), torch.device("cpu")
    torch.manual_seed(0)
    model, parts = Classifier(None, 2, (7,), 2), dict(loaded.cut(0))
    samples = Vectors(loaded.samples.values.double())  # type: ignore[attr-defined]
    return GroupDROTraining(
        config, METHODS[method], 0, model.double(), samples, parts, "worst", device
    )


@pytest.mark.parametrize("method", ["sonex", "alexr2", "erm"])
def test_batches_draw_memberships_and_erm_draws_samples(path, frame, method):
    run = training(path, method)
    rows = {(x, y): k for k, (x, y) in enumerate(zip(frame["age"], frame["income"], strict=True))}
    counts = np.zeros((ROWS, 3))
    drawn = run.train if method == "erm" else run.train.memberships()
    for _ in range(100):
        inputs, (places,) = run.batches.draw()
        numbers = [rows[tuple(np.round(x, 3))] for x in inputs.numpy()]
        assert drawn.label[places].tolist() == [int(frame["bought"][k] == "yes") for k in numbers]
        groups = [0] * len(numbers)
        if method != "erm":
            groups = drawn.group[places].tolist()
            assert np.bincount(groups).tolist() == [8, 8, 8]
        for place in zip(numbers, groups, strict=True):
            counts[place] += 1
    train = run.train
    member = np.zeros((ROWS, 3), dtype=bool)
    member[train.rows[train.member], train.group] = True
    if method == "erm":  # every sample equally often, also those without a group
        member = np.zeros((ROWS, 3), dtype=bool)
        member[train.rows, 0] = True
    assert (counts[~member] == 0).all() and (counts[member] > 0).all()
    shared = member.sum(1) > 1
    for group in range(0 if method == "erm" else 3):  # samples of other groups come as often
        one, two = (counts[member[:, group] & own, group].mean() for own in (shared, ~shared))
        assert one == pytest.approx(two, rel=0.1)


def test_figures_over_memberships_against_loops(path, frame):
    run = steps(training(path, "sonex", spectrum=True), 5)
    row = run.evaluate()
    inputs = torch.tensor(frame[["age", "income"]].to_numpy()).float().double()
    label = torch.tensor((frame["bought"] == "yes").to_numpy()).long()
    member = frame[list(NAMES)].isin(["1", "True", "yes"]).to_numpy()
    scores = run.model(inputs).detach()
    loss = torch.nn.functional.cross_entropy(scores, label, reduction="none").numpy()
    right = (scores.argmax(1) == label).double().numpy()
    for name, short in (("train", "train"), ("validation", "val"), ("test", "test")):
        own = run.parts[name].rows.numpy()
        losses = [loss[own][member[own, i]].mean() for i in range(3)]
        accuracies = [right[own][member[own, i]].mean() for i in range(3)]
        wanted = {
            "cvar": max(losses), "loss": loss[own].mean(), "group_loss": np.mean(losses),
            "accuracy": right[own].mean(), "worst_accuracy": min(accuracies),
        }  # fmt: skip
        for key, value in wanted.items():
            assert row[f"{short}_{key}"] == pytest.approx(value, abs=1e-9), (name, key)
        if name == "train":
            assert row["losses"] == pytest.approx(losses, abs=1e-9)
    assert row["test_reported"] == pytest.approx(accuracies)
    assert row["test_smallest"] == member[own].sum(0).min()
    # The gradient of each group's loss, over its own samples.
    parameters = list(run.model.parameters())
    train = run.parts["train"].rows.numpy()
    gradients = []
    for i in range(3):
        rows = train[member[train, i]]
        mean = torch.nn.functional.cross_entropy(run.model(inputs[rows]), label[rows])
        gradients.append(torch.cat([g.ravel() for g in torch.autograd.grad(mean, parameters)]))
    gram = torch.stack(gradients) @ torch.stack(gradients).T
    assert run.finish()["gram_largest"] == pytest.approx(
        torch.linalg.eigvalsh(gram)[-1].item(), rel=1e-9
    )


def test_the_command_from_a_table_to_a_report(path, tmp_path):
    words = [
        "compare", "group-dro", "--data", str(path), "--label", "bought", "--overlapping", "is_*",
        "--features", "age,income", "--methods", "sonex,erm", "--ratio", "0.34", "--quick",
        "--epochs", "8", "--workers", "1", "--out", str(tmp_path / "out"), "--json",
    ]  # fmt: skip
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output + done.stderr
    table = json.loads(done.stdout.splitlines()[-1])["methods"]
    assert table["sonex"]["train_cvar"]["mean"] < table["erm"]["train_cvar"]["mean"]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "overlap" in page
    other = [*words[:1], "fairness", *words[2:8], "--out", str(tmp_path / "other")]
    refused = CliRunner().invoke(app, other)
    assert refused.exit_code == 2 and "features and --group" in refused.stderr
