"""A user's own table: columns, groups, splits, features, texts and images, and what is refused."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fcco_experiments import data
from fcco_experiments.data import Columns
from scenes_fixtures import picture, saved, tar, unpack

ROWS = 120


@pytest.fixture
def frame() -> pd.DataFrame:
    """Customers; regions and sexes are unequal."""
    random = np.random.RandomState(0)
    return pd.DataFrame({
        "age": random.randint(18, 80, ROWS),
        "income": random.normal(2000, 500, ROWS).round(2),
        "job": random.choice(["baker", "nurse", "NA"], ROWS),
        "region": random.choice(["10", "9", "007"], ROWS, p=[0.5, 0.3, 0.2]),
        "sex": random.choice(["f", "m"], ROWS),
        "note": [f"text {n}, with a comma" for n in range(ROWS)],
        "bought": random.choice(["no", "yes"], ROWS),
    })  # fmt: skip


def write(frame: pd.DataFrame, path: Path, **options) -> Path:
    frame.to_csv(path, index=False, **options)
    return path


FEATURES = Columns(label="bought", group=("region",), features=("age", "income", "job"))


def label_and_group(loaded: data.GroupedData) -> list[tuple[str, str]]:
    """Names of the class and the group of each row, put together from the parts."""
    found: dict[int, tuple[str, str]] = {}
    for part in loaded.cut(0).values():
        for row, label, group in zip(part.rows, part.label, part.group, strict=True):
            found[int(row)] = loaded.class_names[label], part.group_names[group]
    return [found[row] for row in range(len(loaded.samples))]


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.csv.gz", "semicolon.csv", "t.parquet"])
def test_every_kind_of_file_gives_the_same_rows(frame, tmp_path, name):
    path = tmp_path / name
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
        frame.to_parquet(path)
    else:
        write(frame, path, sep={"t.tsv": "\t", "semicolon.csv": ";"}.get(name, ","))
    loaded = data.load_grouped(path, columns=FEATURES)
    assert (loaded.kind, loaded.class_names) == ("vector", ("no", "yes"))
    assert label_and_group(loaded) == list(zip(frame["bought"], frame["region"], strict=True))
    values = torch.stack([torch.as_tensor(loaded.samples[row]) for row in range(ROWS)]).numpy()
    assert np.array_equal(values[:, 0], frame["age"])
    np.testing.assert_allclose(values[:, 1], frame["income"], rtol=1e-6)
    jobs = np.array(["NA", "baker", "nurse"])  # sorted; NA is a word here, not a gap
    assert np.array_equal(values[:, 2:], (frame["job"].to_numpy()[:, None] == jobs))


def as_r(frame: pd.DataFrame) -> str:
    """As R's write.csv: names quoted, and row names under an empty one."""
    rows = [["", *frame.columns], *([str(k), *row] for k, row in enumerate(frame.values, 1))]
    quoted = [
        ",".join(f'"{cell}"' if isinstance(cell, str) else str(cell) for cell in row)
        for row in rows
    ]
    return "\n".join(quoted) + "\n"


@pytest.mark.parametrize(
    ("columns", "written"),
    [
        ({}, as_r),
        ({}, lambda frame: frame.to_csv()),
        ({}, lambda frame: frame.to_csv(index=False, quoting=csv.QUOTE_ALL)),
        ({"note": "two\nlines"}, lambda frame: frame.to_csv(index=False)),
        ({"note": "n" * 140_000}, lambda frame: frame.to_csv(index=False)),
    ],
    ids=["R", "index", "all-quoted", "lines", "long"],
)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_headers_as_people_have_them(frame, tmp_path, columns, written, ending):
    path = tmp_path / f"t.csv{ending}"
    text = written(frame.rename(columns=columns)).encode("utf-8-sig")
    path.write_bytes(gzip.compress(text) if ending else text)
    table = data.read_table(path)
    assert list(table.frame.columns) == [columns.get(name, name) for name in frame.columns]
    assert table.frame["age"].astype(int).tolist() == frame["age"].tolist()
    assert table.frame["bought"].tolist() == frame["bought"].tolist()


def test_groups_are_crossed_and_sorted_as_numbers_and_split_within(frame, tmp_path):
    columns = Columns(label="bought", group=("region", "sex"), text="note")
    loaded = data.load_grouped(write(frame, tmp_path / "t.csv"), columns=columns)
    parts = loaded.cut(3)
    wanted = tuple(f"{region}, {sex}" for region in ("007", "9", "10") for sex in "fm")
    assert parts["train"].group_names == wanted
    assert [loaded.samples[row] for row in range(ROWS)] == list(frame["note"])
    rows = torch.cat([part.rows for part in parts.values()])
    assert sorted(rows.tolist()) == list(range(ROWS))
    sizes = frame.groupby(["region", "sex"]).size()
    for index, name in enumerate(parts["test"].group_names):
        number = sizes[tuple(name.split(", "))]
        assert (parts["test"].group == index).sum() == max(1, round(0.1 * number))
    assert not torch.equal(parts["test"].rows, loaded.cut(4)["test"].rows)


def test_the_split_column(frame, tmp_path):
    words = np.resize(["Train", "training", "dev", "test"], ROWS)
    columns = Columns(label="bought", group=("sex",), text="note", split="part")
    path = write(frame.assign(part=words), tmp_path / "t.csv")
    loaded = data.load_grouped(path, columns=columns)
    for seed in (0, 1):
        parts = loaded.cut(seed)
        assert parts["validation"].rows.tolist() == list(range(2, ROWS, 4))
        assert parts["test"].rows.tolist() == list(range(3, ROWS, 4))
    # Without validation rows a tenth of the training rows of each group, by the seed.
    numbers = np.resize([0, 0, 0, 2], ROWS)
    loaded = data.load_grouped(write(frame.assign(part=numbers), path), columns=columns)
    parts = loaded.cut(0)
    assert parts["test"].rows.tolist() == list(range(3, ROWS, 4))
    train = frame[numbers == 0]["sex"].value_counts()
    assert len(parts["validation"]) == sum(round(0.1 * number) for number in train)


def test_options_of_groups(frame, tmp_path):
    repeated = pd.concat([frame, frame.iloc[:10], frame.iloc[:5].assign(sex="x")])
    path = write(repeated, tmp_path / "t.csv")
    columns = Columns(label="bought", group=("sex",), text="note")
    every, once, few = (
        data.load_grouped(path, columns=columns, distinct=distinct, limit=limit)
        for distinct, limit in ((False, 0), (True, 0), (False, 5))
    )
    assert len(every.samples) == ROWS + 15
    assert len(once.samples) == ROWS + 5, "the same text in another group stays"
    assert len(few.samples) == 15
    assert len({loaded.fingerprint for loaded in (every, once, few)}) == 3
    again = data.load_grouped(path, columns=columns)
    assert again.fingerprint == every.fingerprint
    changed = write(repeated.assign(note=repeated["note"] + "!"), tmp_path / "t.csv")
    assert data.load_grouped(changed, columns=columns).fingerprint != every.fingerprint
    with pytest.raises(ValueError, match="at least 3"):
        data.load_grouped(path, columns=columns, limit=2)


def test_classes_in_the_callers_order(frame, tmp_path):
    """As continual learning takes them: the classes are the groups, the last is the target."""
    path = write(frame, tmp_path / "t.csv")
    columns = Columns(label="job", features=("age", "inc*"))
    loaded = data.load_grouped(path, columns=columns, classes=("nurse", "baker"))
    assert loaded.class_names == ("nurse", "baker") == loaded.cut(0)["test"].group_names
    assert len(loaded.samples) == frame["job"].isin(["nurse", "baker"]).sum()
    with pytest.raises(data.WrongData, match=r"no row of the class pilot, but: NA, baker, nurse"):
        data.load_grouped(path, columns=columns, classes=("nurse", "pilot"))


# Images


def pictures(number: int = 12) -> tuple[pd.DataFrame, dict[str, bytes]]:
    names = [f"shots/{n}.{'png' if n % 2 else 'jpg'}" for n in range(number)]
    files = {
        name: saved(picture(n, (40 + n, 60)), "PNG" if n % 2 else "JPEG")
        for n, name in enumerate(names)
    }
    kinds = [("cat", "dog")[n % 2] for n in range(number)]
    places = [("in", "out")[n // 6] for n in range(number)]
    return pd.DataFrame({"file": names, "kind": kinds, "place": places}), files


IMAGES = Columns(label="kind", group=("place",), image="file")


def test_images_in_a_folder_or_an_archive(tmp_path):
    frame, files = pictures()
    path = write(frame, tmp_path / "t.csv")
    unpack(files, tmp_path)
    (tmp_path / "own.tar").write_bytes(tar({f"top/{name}": own for name, own in files.items()}))
    (tmp_path / "own.tar.gz").write_bytes(gzip.compress((tmp_path / "own.tar").read_bytes()))
    beside = data.load_grouped(path, columns=IMAGES, size=(16, 24))
    assert beside.kind == "image" and isinstance(beside.samples, data.ImageFiles)
    for place in ("", "own.tar", "own.tar.gz"):
        columns = Columns(**{**vars(IMAGES), "files": str(tmp_path / place)})
        loaded = data.load_grouped(path, columns=columns, size=(16, 24))
        assert isinstance(loaded.samples, data.Vectors) == bool(place)
        for row in range(len(frame)):
            first, second = loaded.samples[row], beside.samples[row]
            assert isinstance(first, torch.Tensor) and first.shape == (3, 16, 24)
            assert isinstance(second, torch.Tensor) and torch.equal(first, second)


def test_images_that_are_missing_or_broken(tmp_path):
    frame, files = pictures()
    unpack(files, tmp_path)
    path = write(frame, tmp_path / "t.csv")
    (tmp_path / "shots/3.png").write_bytes(b"no image")
    loaded = data.load_grouped(path, columns=IMAGES)
    with pytest.raises(data.WrongData, match=r"image .*shots/3\.png cannot be decoded"):
        list(loaded.samples)  # type: ignore[call-overload]
    (tmp_path / "shots/3.png").unlink()
    reason = (
        r"first is shots/3\.png in data row 4, column `file`\. Name their folder or tar archive"
    )
    with pytest.raises(data.WrongData, match=r"1 of 12 images of .*t\.csv are not in .*" + reason):
        data.load_grouped(path, columns=IMAGES)


def test_the_ending_says_what_a_file_is(tmp_path):
    text = b"a\tb,c,d\n1\t2,3,4\n"
    for name, content in {"t.tsv": text, "T.TSV.GZ": gzip.compress(text)}.items():
        (tmp_path / name).write_bytes(content)
        table = data.read_table(tmp_path / name).frame
        assert list(table.columns) == ["a", "b,c,d"] and table["b,c,d"].tolist() == ["2,3,4"]


# Fairness


def by_hand(frame: pd.DataFrame, train: np.ndarray, validation: np.ndarray) -> np.ndarray:
    """Features of all rows: numbers, then the categories of the training file, standardised."""
    columns = [frame["age"], frame["income"]]
    columns += [frame["job"] == job for job in sorted(set(frame["job"][train | validation]))]
    table = np.stack([np.asarray(column, float) for column in columns], 1)
    return (table - table[train].mean(0)) / table[train].std(0)


def test_fairness_against_numpy(frame, tmp_path):
    frame = frame.assign(part=np.resize(["train", "train", "train", "val", "test"], ROWS))
    frame.loc[4::5, "job"] = frame["job"][4::5].where(frame.index[4::5] > 20, "pilot")
    columns = Columns(label="bought", group=("sex",), features=("job", "age", "inc*"), split="part")
    loaded = data.load(write(frame, tmp_path / "t.csv"), columns=columns)
    masks = {name: (frame["part"] == word).to_numpy() for name, word in
             {"train": "train", "validation": "val", "test": "test"}.items()}  # fmt: skip
    table = by_hand(frame, masks["train"], np.zeros(ROWS, bool))
    assert loaded.feature_names == ("age", "income", "job=NA", "job=baker", "job=nurse")
    assert loaded.group_names == ("f", "m")
    for name, part in loaded.parts().items():
        np.testing.assert_allclose(part.features, table[masks[name]], rtol=1e-4, atol=1e-5)
        assert np.array_equal(part.label, (frame["bought"] == "yes")[masks[name]])
        assert np.array_equal(part.group, (frame["sex"] == "m")[masks[name]])


def test_fairness_splits_cells_by_the_seed_and_takes_other_columns(frame, tmp_path):
    path = write(frame.drop(columns="note"), tmp_path / "t.csv")
    columns = Columns(label="bought", group=("region=9",))
    one, same, other = (data.load(path, columns=columns, seed=seed) for seed in (0, 0, 1))
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert one.group_names == ("not 9", "9")
    assert {name.partition("=")[0] for name in one.feature_names} == {"age", "income", "job", "sex"}
    cell = frame.groupby([frame["region"] == "9", "bought"]).size().to_numpy()
    tested = np.bincount(2 * one.test.group + one.test.label)
    assert tested.tolist() == [round(0.2 * number) for number in cell]
    assert sum(map(len, one.parts().values())) == ROWS


# What is refused


TEXT = Columns(label="bought", group=("sex",), text="note")


@pytest.mark.parametrize(
    ("change", "columns", "reason"),
    [
        ({}, Columns(), r"say which column is the label: --label COLUMN"),
        ({}, Columns(label="bougt"), r"no column `bougt`; did you mean `bought`\? Its columns are "
                                     r"age, income, job"),
        ({"bought": ["yes", None]}, TEXT, r"`label`: the column `bought` of .*t\.csv is empty in "
                                          r"60 rows, the first is data row 2"),
        ({"bought": ["yes"]}, TEXT, "`label`: there is one class alone in .*, yes"),
        ({"sex": ["f"]}, TEXT, "`group`: the train data of .* have too few groups: 1 of 2"),
        ({"sex": range(ROWS)}, TEXT, "the validation data of .* have too few groups: 0 of 1"),
        ({"note": ["a", None]}, TEXT, "`text`: the column `note` .* is empty in 60 rows"),
        ({"part": ["train", "later"]}, Columns(**{**vars(TEXT), "split": "part"}),
         r"data row 2 of .* has part = later; it must be one of train, training, 0, validation"),
        ({"part": ["train", "val"]}, Columns(**{**vars(TEXT), "split": "part"}),
         "no row of .* has part = test"),
        ({}, Columns(label="bought", text="note", image="job"), "one kind of input"),
        ({"age": [*["40"] * 59, "?"]}, FEATURES, r"row 60 of .* has age = \?; most are"),
        ({"age": [*["40"] * 59, None]}, FEATURES, "data row 60 of .* has age = an empty cell"),
        ({"age": [*["40"] * 59, "-4e38"]}, FEATURES, "row 60 of .* has age = -4e38.*3.4.*e.38"),
        ({"job": [f"j{n}" for n in range(ROWS)] }, None, "120 different texts; up to 100"),
        ({}, Columns(label="bought", features=("x*",)), r"`features`: .* has no column `x\*`"),
        ({}, Columns(label="bought", group=("region=4",)), "no row of .* has region = 4"),
        ({}, Columns(label="bought", files="nowhere"), "no folder or archive nowhere"),
    ],
)  # fmt: skip
def test_wrong_columns(frame, tmp_path, monkeypatch, change, columns, reason):
    monkeypatch.setattr("fcco_experiments.data.table.MOST_CATEGORIES", 100)
    for name, values in change.items():
        frame[name] = np.resize(np.array(list(values), dtype=object), ROWS)
    path = write(frame, tmp_path / "t.csv")
    with pytest.raises(data.WrongData, match=reason):
        data.load_grouped(path, columns=columns or FEATURES)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        (Columns(label="bought"), "say which column is the group: --group COLUMN"),
        (Columns(label="job", group=("sex",)), r"`label` must have two values but has 3 .*: NA, "
                                               r"baker, nurse\. .* --label COLUMN=VALUE"),
        (Columns(label="bought", group=("region",)), "`group` must have two values but has 3"),
        (Columns(label="bought", group=("sex",), text="note"), "`text`: this experiment takes"),
    ],
)  # fmt: skip
def test_wrong_columns_for_fairness(frame, tmp_path, columns, reason):
    with pytest.raises(data.WrongData, match=reason):
        data.load(write(frame, tmp_path / "t.csv"), columns=columns)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("t.csv", None, r"There is no file .*t\.csv"),
        ("t.csv", b"", r"t\.csv cannot be read as a table: No columns"),
        ("t.csv", b"bought,sex\n", "has no rows"),
        ("t.csv", b"bought,sex\nyes,f,1\nno,m,3\n", r"Expected 2 fields in line 2, saw 3"),
        ("t.csv", b"bought,sex\nyes,f\nno,m,3\n", r"Expected 2 fields in line 3, saw 3"),
        ("t.csv", b"bought,sex\n\xff\xfe,f\n", "'utf-8' codec can't decode"),
        ("t.csv", b"sex,bought,sex,a,a\nf,yes,m,1,2\n", "several columns .*: sex, a"),
        ("t.csv", b'"","sex","sex"\n1,f,m\n', "several columns .*: sex"),
        ("t.csv.gz", b"no gzip", "cannot be read as a table: Not a gzipped file"),
        ("t.parquet", b"no parquet", "Or write the table as csv"),
    ],
)
def test_files_that_are_no_tables(tmp_path, name, content, reason):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(data.WrongData, match=reason):
        data.load_grouped(tmp_path / name, columns=TEXT)
