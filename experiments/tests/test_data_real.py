"""The real files: `FCCO_DATA=... pytest -m data`."""

from __future__ import annotations

import hashlib
import time

import numpy as np
import pytest
from fcco_experiments import data
from fcco_experiments.data import tabular

pytestmark = pytest.mark.data

# Group by label, counted by a second program.
ADULT_TRAIN = [[9592, 1179], [15_128, 6662]]  # women, men; at most and above 50K
ADULT_TEST = [[4831, 590], [7604, 3256]]
COMPAS = [[2082, 1987], [1281, 822]]  # others, Caucasians; not arrested again, arrested again


@pytest.fixture(autouse=True)
def only_the_named_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path))


def total(loaded: data.FairnessData) -> list[list[int]]:
    assert loaded.validation is not None
    return (loaded.train.cells() + loaded.validation.cells()).tolist()


@pytest.mark.parametrize("name", ["adult", "compas"])
def test_every_copy_has_its_checksum(name):
    sightings = data.look(name)
    assert {entry.state for entry in sightings} <= {"found", "missing"}
    for file in data.DATA_SETS[name].files:
        contents = [entry.content for entry in sightings if entry.file == file.name]
        good = [content for content in contents if content is not None]
        assert good
        for content in good:
            assert hashlib.sha256(content).hexdigest() == file.form.sha256
            assert len(content) == file.form.size


def test_adult():
    start = time.perf_counter()
    loaded = data.load("adult", download=False)
    assert time.perf_counter() - start < 3, "a second here; loaded machines are slower"
    assert loaded.validation is not None
    assert len(loaded.train) + len(loaded.validation) == 32_561
    assert loaded.train.features.shape == (26_049, 107) and loaded.test.features.shape == (
        16_281,
        107,
    )
    assert total(loaded) == ADULT_TRAIN
    assert loaded.test.cells().tolist() == ADULT_TEST
    assert loaded.validation.cells().tolist() == [
        [round(0.2 * count) for count in row] for row in ADULT_TRAIN
    ]
    assert len(loaded.feature_names) == 107
    for part in loaded.parts().values():
        assert np.isfinite(part.features).all()
    np.testing.assert_allclose(loaded.train.features.mean(0, dtype=np.float64), 0, atol=1e-6)
    # Holand-Netherlands has one row in the training file: a split may leave none
    deviation = loaded.train.features.std(0, dtype=np.float64)
    rare = loaded.feature_names.index("native-country=Holand-Netherlands")
    np.testing.assert_allclose(np.delete(deviation, rare), 1, rtol=1e-6)


def test_adult_without_validation_has_107_columns_too():
    loaded = data.load("adult", download=False, validation=0.0)
    assert loaded.validation is None and loaded.train.features.shape == (32_561, 107)
    assert loaded.train.cells().tolist() == ADULT_TRAIN


def test_compas():
    loaded = data.load("compas", download=False)
    assert loaded.validation is not None
    assert len(loaded.train) + len(loaded.validation) == 4938 and len(loaded.test) == 1234
    assert loaded.train.features.shape[1] == 16 == len(loaded.feature_names)
    cells = np.array(total(loaded)) + loaded.test.cells()
    assert cells.sum() == 6172
    assert cells.tolist() == COMPAS
    assert {name for name in loaded.feature_names if name.startswith("race=")} == {
        *("race=African-American", "race=Asian", "race=Caucasian", "race=Hispanic"),
        *("race=Native American", "race=Other"),
    }


def test_the_reduced_compas_file_has_no_person():
    (content,) = {entry.content for entry in data.look("compas") if entry.content is not None}
    lines = content.decode().splitlines()
    assert len(lines) == 7215
    assert lines[0].split(",") == list(tabular.COMPAS_COLUMNS)
    assert not {"name", "first", "last", "dob", "id", "c_case_number"} & set(lines[0].split(","))
