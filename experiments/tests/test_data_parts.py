"""What the loaders make of the files: encoding, splits, groups; compared with plain loops."""

from __future__ import annotations

import csv
import io
import math
import time
from datetime import datetime

import numpy as np
import pytest
import torch
from data_fixtures import RARE, Generated, generated
from fcco_experiments import data
from fcco_experiments.data import tabular
from fcco_experiments.data.sources import checksum


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    """No data of this machine, no network."""
    monkeypatch.delenv("FCCO_DATA", raising=False)
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def loaded(made: Generated, name: str, folder, **options) -> data.FairnessData:
    made.write(folder)
    loader = {"adult": data.adult, "compas": data.compas}[name]
    return loader(folder, download=False, files=made.files(name), **options)


# A second way to read and encode, with loops.


def adult_rows(content: bytes) -> list[list[str]]:
    lines = content.decode().split("\n")
    return [line.rstrip(".").split(", ") for line in lines if line and not line.startswith("|")]


def adult_encoding(train: list[list[str]], rows: list[list[str]]) -> list[list[float]]:
    result = []
    for row in rows:
        cells = [float(row[place]) for place in (0, 4, 10, 11, 12)]
        for place in (1, 3, 5, 6, 7, 8, 9, 13):
            values = sorted({other[place] for other in train})
            cells += [1.0 if row[place] == value else 0.0 for value in values]
        result.append(cells)
    return result


def standardised(fitted: list[list[float]], rows: list[list[float]]) -> np.ndarray:
    result = np.zeros((len(rows), len(fitted[0])))
    for j in range(len(fitted[0])):
        column = [row[j] for row in fitted]
        mean = math.fsum(column) / len(column)
        variance = math.fsum((x - mean) ** 2 for x in column) / len(column)
        deviation = 1.0 if len(set(column)) == 1 else math.sqrt(variance)
        for i, row in enumerate(rows):
            result[i, j] = (row[j] - mean) / deviation
    return result


def set_aside(group: list[int], label: list[int], share: float, seed: int) -> set[int]:
    random, chosen = np.random.RandomState(seed), set()
    for a in (0, 1):
        for y in (0, 1):
            rows = [i for i in range(len(group)) if (group[i], label[i]) == (a, y)]
            chosen |= set(random.permutation(rows)[: round(share * len(rows))].tolist())
    return chosen


@pytest.mark.parametrize("validation", [0.0, 0.2, 0.35])
def test_adult_equals_loops(tmp_path, validation):
    made = generated(1)
    found = loaded(made, "adult", tmp_path, validation=validation, seed=7)
    train = adult_rows(made.contents["adult.data"])
    test = adult_rows(made.contents["adult.test"])
    group = [int(row[9] == "Male") for row in train]
    label = [int(row[14] == ">50K") for row in train]
    aside = set_aside(group, label, validation, 7)
    stay = [i for i in range(len(train)) if i not in aside]
    everything = adult_encoding(train, train)
    fitted = [everything[i] for i in stay]
    for part, rows, encoded in (
        (found.train, [train[i] for i in stay], fitted),
        (
            found.validation,
            [train[i] for i in sorted(aside)],
            [everything[i] for i in sorted(aside)],
        ),
        (found.test, test, adult_encoding(train, test)),
    ):
        if part is None:
            assert validation == 0 and not aside
            continue
        assert len(part) == len(rows)
        np.testing.assert_allclose(part.features, standardised(fitted, encoded), atol=2e-6)
        assert part.group.tolist() == [int(row[9] == "Male") for row in rows]
        assert part.label.tolist() == [int(row[14] == ">50K") for row in rows]
        assert part.features.dtype == np.float32
        assert part.label.dtype == part.group.dtype == np.int64
    assert found.feature_names[:6] == (*tabular.ADULT_NUMERIC, "workclass=?")
    assert len(found.feature_names) == found.train.features.shape[1]
    assert "sex=Male" in found.feature_names
    assert not any("fnlwgt" in name or RARE in name for name in found.feature_names)
    assert found.group_names == ("Female", "Male")


def test_a_value_that_only_the_test_file_has_gives_zeros(tmp_path):
    made = generated(1)
    found = loaded(made, "adult", tmp_path)
    rows = [row[13] == RARE for row in adult_rows(made.contents["adult.test"])]
    assert sum(rows) == 12
    places = [k for k, name in enumerate(found.feature_names) if name.startswith("native-country")]
    assert len(places) == 4
    before = found.test.features * found.standardisation.deviation + found.standardisation.mean
    np.testing.assert_allclose(before[:, places].sum(1), 1.0 - np.array(rows), atol=1e-6)


def compas_rows(content: bytes) -> list[dict[str, float | str]]:
    """ProPublica's filter and the numbers, from the file without names."""
    result = []
    for row in csv.DictReader(io.StringIO(content.decode())):
        if row["days_b_screening_arrest"] == "":
            continue
        if not -30 <= float(row["days_b_screening_arrest"]) <= 30:
            continue
        if row["is_recid"] == "-1" or row["c_charge_degree"] == "O" or row["score_text"] == "N/A":
            continue
        kept: dict[str, float | str] = {
            name: float(row[name]) for name in tabular.COMPAS_NUMERIC[:-1]
        }
        days = 0.0
        if row["c_jail_in"]:
            form = "%Y-%m-%d %H:%M:%S"
            spent = datetime.strptime(row["c_jail_out"], form) - datetime.strptime(
                row["c_jail_in"], form
            )
            days = math.floor(spent.total_seconds() / 86400)
        kept |= {"days_in_jail": days, "race": row["race"], "degree": row["c_charge_degree"]}
        result.append({**kept, "label": row["two_year_recid"]})
    return result


def compas_encoding(train, rows) -> list[list[float]]:
    result = []
    for row in rows:
        cells = [row[name] for name in tabular.COMPAS_NUMERIC]
        for name in ("race", "degree"):
            cells += [float(row[name] == value) for value in sorted({r[name] for r in train})]
        result.append(cells)
    return result


@pytest.mark.parametrize(
    "name", ["compas-scores-two-years.csv", "compas_two_years_deidentified.csv"]
)
def test_compas_equals_loops_from_either_file(tmp_path, name):
    made = generated(2)
    made.write(tmp_path, name)
    found = data.compas(tmp_path, download=False, files=made.files("compas"), seed=3)
    rows = compas_rows(made.contents["compas_two_years_deidentified.csv"])
    assert 100 < len(rows) < 400
    order = np.random.RandomState(42).permutation(len(rows)).tolist()
    size = round(0.8 * len(rows))
    train, test = [rows[k] for k in order[:size]], [rows[k] for k in order[size:]]
    group = [int(row["race"] == "Caucasian") for row in train]
    label = [int(row["label"]) for row in train]
    aside = set_aside(group, label, 0.2, 3)
    stay = [row for k, row in enumerate(train) if k not in aside]
    held = [row for k, row in enumerate(train) if k in aside]
    fitted = compas_encoding(train, stay)
    assert found.validation is not None
    for part, wanted in ((found.train, stay), (found.validation, held), (found.test, test)):
        encoded = standardised(fitted, compas_encoding(train, wanted))
        np.testing.assert_allclose(part.features, encoded, atol=2e-6)
        assert part.group.tolist() == [int(row["race"] == "Caucasian") for row in wanted]
        assert part.label.tolist() == [int(row["label"]) for row in wanted]
    assert found.group_names == ("non-Caucasian", "Caucasian")
    assert found.feature_names[:8] == tabular.COMPAS_NUMERIC


def test_both_compas_files_reduce_to_the_same_bytes():
    made = generated(2).contents
    raw = tabular.reduce(made["compas-scores-two-years.csv"])
    assert raw == tabular.reduce(made["compas_two_years_deidentified.csv"])
    assert raw.splitlines()[0].decode().split(",") == list(tabular.COMPAS_COLUMNS)
    assert len(raw.splitlines()) == 401


def test_compas_splits_are_choices(tmp_path):
    made = generated(2)
    first = loaded(made, "compas", tmp_path)
    again = loaded(made, "compas", tmp_path)
    other = loaded(made, "compas", tmp_path, split_seed=43)
    half = loaded(made, "compas", tmp_path, train_share=0.5)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert abs(len(half.test) - 2.5 * len(first.test)) <= 2
    with pytest.raises(ValueError, match=r"compas\(train_share=...\)` must lie in \(0, 1\)"):
        data.compas(train_share=1.0)
    with pytest.raises(ValueError, match="split_seed"):
        data.compas(split_seed=-1)


# Leakage


def test_test_rows_do_not_change_the_training_features(tmp_path):
    made, other = generated(1), generated(5)
    before = loaded(made, "adult", tmp_path / "before")
    mixed = Generated({**made.contents, "adult.test": other.contents["adult.test"]}, {})
    files = (made.files("adult")[0], other.files("adult")[1])
    after = data.adult(mixed.write(tmp_path / "after"), download=False, files=files)
    assert not np.array_equal(before.test.features, after.test.features)
    np.testing.assert_array_equal(before.train.features, after.train.features)
    assert before.validation is not None and after.validation is not None
    np.testing.assert_array_equal(before.validation.features, after.validation.features)


def test_validation_rows_do_not_change_the_training_features(tmp_path):
    made = generated(1)
    before = loaded(made, "adult", tmp_path / "before")
    lines = made.contents["adult.data"].decode().split("\n")
    rows = adult_rows(made.contents["adult.data"])
    group = [int(row[9] == "Male") for row in rows]
    for i in set_aside(group, [int(row[14] == ">50K") for row in rows], 0.2, 0):
        lines[i] = ", ".join(["99", "Private", *rows[i][2:10], "77777", *rows[i][11:]])
    content = "\n".join(lines).encode()
    first, second = made.files("adult")
    changed = data.DataFile(data.Form("adult.data", checksum(content), len(content)))
    other = Generated({**made.contents, "adult.data": content}, {}).write(tmp_path / "after")
    after = data.adult(other, download=False, files=(changed, second))
    assert first.form != changed.form
    np.testing.assert_array_equal(before.train.features, after.train.features)
    np.testing.assert_array_equal(before.test.features, after.test.features)
    assert before.validation is not None and after.validation is not None
    assert not np.array_equal(before.validation.features, after.validation.features)
    assert before.fingerprint != after.fingerprint


# Parts


def part(cells: list[int]) -> data.Part:
    """Rows of the four cells, shuffled."""
    cell = np.random.RandomState(0).permutation(np.repeat(np.arange(4), cells))
    return data.Part(np.arange(len(cell), dtype=np.float64)[:, None], cell % 2, cell // 2)


@pytest.mark.parametrize("seed", [0, 4])
def test_the_split_is_stratified_and_whole(seed):
    rows = part([40, 10, 25, 125])
    stay, aside = data.stratified(rows, 0.2, seed)
    assert rows.rows(aside).cells().tolist() == [[8, 2], [5, 25]]
    assert sorted([*stay, *aside]) == list(range(200))
    assert (np.diff(stay) > 0).all() and (np.diff(aside) > 0).all()
    assert set(aside) == set_aside(rows.group.tolist(), rows.label.tolist(), 0.2, seed)
    assert set(aside) != set(data.stratified(rows, 0.2, seed + 1)[1])


def test_wrong_shares_are_refused():
    with pytest.raises(ValueError, match=r"share=0.2\)` leaves no row of group 1, label 0 .* 2\."):
        data.stratified(part([40, 10, 2, 10]), 0.2, 0)
    with pytest.raises(ValueError, match=r"group 0, label 1 .* there are 0"):
        data.stratified(part([40, 0, 20, 10]), 0.2, 0)
    with pytest.raises(ValueError, match="group 0, label 1"):
        data.stratified(part([40, 2, 20, 10]), 0.9, 0)
    for share in (-0.1, 1.0):
        with pytest.raises(ValueError, match=r"must lie in \[0, 1\)"):
            data.stratified(part([5, 5, 5, 5]), share, 0)
    with pytest.raises(ValueError, match="seed"):
        data.stratified(part([5, 5, 5, 5]), 0.2, -1)


def test_a_constant_column_stays_small():
    """Its deviation is rounding, 1e-17 or so, and must not be divided by."""
    table = np.c_[np.full(10, 0.1), np.arange(10.0)]
    assert table.std(axis=0)[0] > 0, "the trap is there"
    scale = data.Standardisation.fit(table)
    assert scale.deviation[0] == 1.0
    assert abs(scale(table + 1)[:, 0] - 1).max() < 1e-6
    np.testing.assert_allclose(scale(table)[:, 1].std(), 1.0, rtol=1e-6)


def test_cells_and_parts_and_fingerprint(tmp_path):
    made = generated(1)
    found = loaded(made, "adult", tmp_path)
    none = loaded(made, "adult", tmp_path, validation=0.0)
    rows = adult_rows(made.contents["adult.data"])
    counted = [
        [sum(r[9] == sex and r[14] == income for r in rows) for income in ("<=50K", ">50K")]
        for sex in ("Female", "Male")
    ]
    assert none.train.cells().tolist() == counted
    assert list(found.parts()) == ["train", "validation", "test"]
    assert list(none.parts()) == ["train", "test"] and none.validation is None
    seeds = {loaded(made, "adult", tmp_path, seed=seed).fingerprint for seed in (0, 0, 1)}
    assert len(seeds | {none.fingerprint}) == 3
    assert len(found.fingerprint) == 64
    torch.from_numpy(found.train.features)  # would warn about an array that is read-only


def test_reading_is_fast():
    """48,842 rows of generated Adult: far below the 1.5 seconds that are allowed."""
    made = generated(0).contents
    lines = adult_rows(made["adult.data"])
    content = "\n".join(", ".join(lines[k % len(lines)]) for k in range(48_842)).encode()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        columns = tabular._adult_columns(content)
        tabular._adult_part(
            data.Encoder.fit(columns, tabular.ADULT_NUMERIC, tabular.ADULT_CATEGORICAL), columns
        )
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1.5


# Generated data


def roc_gap(score: np.ndarray, rows: data.Part) -> float:
    """The largest distance between the groups' rates, over all thresholds and both labels."""
    largest = 0.0
    for label in (0, 1):
        for threshold in np.unique(score)[::20]:
            rates = [
                (score[(rows.group == a) & (rows.label == label)] > threshold).mean()
                for a in (0, 1)
            ]
            largest = max(largest, abs(rates[0] - rates[1]))
    return largest


def auc(score: np.ndarray, label: np.ndarray) -> float:
    return float((score[label == 1][:, None] > score[label == 0]).mean())


def logistic(rows: data.Part) -> np.ndarray:
    """Newton's method."""
    table = np.c_[rows.features.astype(np.float64), np.ones(len(rows))]
    weight = np.zeros(table.shape[1])
    for _ in range(15):
        chance = 1 / (1 + np.exp(-table @ weight))
        hessian = table.T @ (table * (chance * (1 - chance))[:, None])
        weight += np.linalg.solve(hessian, table.T @ (rows.label - chance))
    return weight[:-1]


def test_synthetic_needs_constraints_and_can_meet_them():
    made = data.synthetic(rows=5000, test_rows=5000)
    greedy = made.test.features @ logistic(made.train)
    fair = made.test.features[:, :4].sum(1)
    assert roc_gap(greedy, made.test) > 0.3
    assert roc_gap(fair, made.test) < 0.08  # sampling: none in expectation
    assert 0.88 < auc(greedy, made.test.label) < 0.92
    wanted = 0.5 * (1 + math.erf(1.6 / 2))  # Phi(1.6 / sqrt 2)
    assert auc(fair, made.test.label) == pytest.approx(wanted, abs=0.02)


def test_synthetic_shapes_and_seeds():
    made = data.synthetic(rows=600, test_rows=50, features=3, validation=0.25, seed=1)
    assert made.train.features.shape[1] == 3 and len(made.test) == 50
    assert made.validation is not None and len(made.train) + len(made.validation) == 600
    assert made.feature_names == ("label-0", "label-1", "group-0")
    more = data.synthetic(rows=600, test_rows=90, features=3, validation=0.25, seed=1)
    np.testing.assert_array_equal(made.train.features, more.train.features)
    other = data.synthetic(rows=600, test_rows=50, features=3, validation=0.25, seed=2)
    assert made.fingerprint != other.fingerprint
    np.testing.assert_allclose(made.train.features.mean(0), 0, atol=1e-6)
    even = data.synthetic(rows=300, test_rows=300, validation=0.0)
    assert even.train.label.tolist() != even.test.label.tolist(), "the test rows are others"
    share = data.synthetic(rows=20_000, validation=0.0).train.cells()
    np.testing.assert_allclose(share / 20_000, [[0.32, 0.08], [0.18, 0.42]], atol=0.015)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 0},
        {"test_rows": 1.5},
        {"features": 1},
        {"seed": -1},
        {"signal": -1.0},
        {"proxy": -1.0},
        {"base_rates": (0.0, 0.5)},
        {"base_rates": (0.5, 1.0)},
        {"group_share": 1.0},
    ],
    ids=str,
)
def test_synthetic_refuses(wrong):
    with pytest.raises(ValueError, match=rf"synthetic\({next(iter(wrong))}"):
        data.synthetic(**wrong)
