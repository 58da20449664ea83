"""Molecules, comments and lists in the layout of their files; how they are split."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from data_fixtures import change_card
from fcco_experiments import backbones, data
from fcco_experiments.data.grouped import Vectors, WholeGroups, sampled
from fcco_experiments.data.layouts import libsvm
from fcco_experiments.data.samples import scaffold_split
from fcco_experiments.data.sources import WrongData
from fcco_experiments.tasks.x_risk.data import load
from grouped_fixtures import Faces, Reviews, put, stand_in
from scenes_fixtures import tar


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    monkeypatch.setenv("FCCO_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))


# Lists.

TRAIN = "2 1:0.5 7:-1\n0 2:3 # a comment\n1 1:4\n0 7:2\n3 1:1e-3\n1 2:7\n" * 5
TEST = "4 2:8\n0 1:1\n"


def lists(monkeypatch, tmp_path, train_sizes: str = "3\n" * 10):
    files = {
        "lambdarank/rank.train": TRAIN.encode(),
        "lambdarank/rank.train.query": train_sizes.encode(),
        "lambdarank/rank.test": TEST.encode(),
        "lambdarank/rank.test.query": b"2\n",
    }
    content = tar(files)
    put(tmp_path / "data", stand_in(monkeypatch, "ranking", content), content)


def test_lists(monkeypatch, tmp_path):
    lists(monkeypatch, tmp_path)
    parts = load("ranking")
    test, train, held = (parts[name] for name in ("test", "train", "validation"))
    assert test.features.tolist() == [[0, 8, 0], [1, 0, 0]] and test.label.tolist() == [4, 0]
    assert held.query is not None and train.query is not None and test.query is not None
    assert np.bincount(held.query).tolist() == [3, 3]  # a fifth of ten queries
    assert np.bincount(train.query).tolist() == [3] * 8 and test.query.tolist() == [0, 0]
    # Each list is one half of the six rows above.
    wanted = {((0.5, 0, -1), 2.0), ((0, 3, 0), 0.0), ((4, 0, 0), 1.0)}
    others = {((0, 0, 2), 0.0), ((0.001, 0, 0), 3.0), ((0, 7, 0), 1.0)}
    for query in range(8):
        rows = train.query == query
        pairs = zip(train.features[rows].tolist(), train.label[rows].tolist(), strict=True)
        found = {(tuple(round(x, 6) for x in row), label) for row, label in pairs}
        assert found in (wanted, others)


def test_lists_whose_sizes_do_not_fit_are_refused(monkeypatch, tmp_path):
    lists(monkeypatch, tmp_path, "3\n" * 9)
    with pytest.raises(WrongData, match=r"rank\.train\.query .* must count 30 rows but counts 27"):
        load("ranking")
    with pytest.raises(WrongData, match=r"f: line 2 is not `label number:value"):
        libsvm("1 1:2\n0 a:3\n", "f")


def test_groups_stay_whole():
    group = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9]).repeat(3)
    label = torch.arange(30) % 3
    names = tuple("abcdefghij")
    for part_of, wanted in (
        (None, [6, 2, 2]),
        (torch.tensor([0] * 5 + [1] * 3 + [2] * 2), [5, 3, 2]),
        (torch.tensor([0] * 5 + [2] * 5), [4, 1, 5]),
    ):
        cuts = [WholeGroups(label, group, names, part_of)(seed) for seed in (0, 0, 1)]
        for cut in cuts:
            parts = list(cut.values())
            assert [len(part.group_names) for part in parts] == wanted
            assert all(len(part) == 3 * len(part.group_names) for part in parts)
            rows = torch.cat([part.rows for part in parts])
            assert rows.sort().values.tolist() == list(range(30))
            for part in parts:
                assert [names[group[row]] for row in part.rows] == [
                    part.group_names[own] for own in part.group
                ]
        assert torch.equal(cuts[0]["validation"].rows, cuts[1]["validation"].rows)


def test_a_sample_keeps_the_shares_of_classes():
    group = torch.tensor([0] * 900 + [1] * 90 + [2] * 10)
    rows = sampled(group, 100)
    assert torch.bincount(group[rows]).tolist() == [90, 9, 3]
    assert torch.equal(rows, rows.unique()) and torch.equal(rows, sampled(group, 100))
    assert len(sampled(group, 0)) == len(sampled(group, 5000)) == 1000
    with pytest.raises(ValueError, match="`keep` must be 0"):
        sampled(group, -1)


# Comments.


def test_comments(monkeypatch, tmp_path):
    votes = {"1.0": "1110", "2.0": "1100", "3.0": "1000", "4.0": "1111", "5.0": "0000", "6.0": "0"}
    parts = dict(zip(votes, ("train", "train", "dev", "test", "test", "train"), strict=True))
    text = "rev_id\tcomment\tyear\tsplit\n"
    text += "".join(f"{i}\ta`NEWLINE_TOKENb{i}\t2010\t{part}\n" for i, part in parts.items())
    rates = "rev_id\tworker_id\ttoxicity\n"
    rates += "".join(
        f"{i}\t{n}\t{vote}\n" for i, own in votes.items() for n, vote in enumerate(own)
    )
    files = {
        "toxicity_annotated_comments.tsv": text.encode(),
        "toxicity_annotations.tsv": rates.encode(),
    }
    change_card(monkeypatch, "toxicity", **files)
    for name, content in files.items():
        put(tmp_path / "data", name, content)
    loaded = data.load_grouped("toxicity", download=False)
    assert loaded.samples[0] == "a` b1.0" and loaded.class_names == ("not toxic", "toxic")
    found = {name: part.label.tolist() for name, part in loaded.cut(0).items()}
    assert found == {"train": [1, 1, 0], "validation": [0], "test": [1, 0]}


# Another label of a card.


def test_another_label_of_the_same_images(monkeypatch, tmp_path):
    faces = Faces()
    content = faces.archive()
    put(tmp_path / "data", stand_in(monkeypatch, "celeba", content), content)
    bald, gray, own = (
        data.load_grouped("celeba", label=label) for label in ("Bald", "Gray_Hair", "")
    )
    assert bald.inputs == gray.inputs == own.inputs
    assert len({bald.fingerprint, gray.fingerprint, own.fingerprint}) == 3
    cut: Any = bald.cut
    assert cut.label.tolist() == (faces.table["Bald"] == 1).astype(int).tolist()
    assert cut(0)["test"].group_names == ("-1", "1"), "each class is cut by itself"


def test_users_are_no_groups_of_another_label(monkeypatch, tmp_path):
    content = Reviews({f"user {number}": 6 for number in range(12)}).content()
    put(tmp_path / "data", stand_in(monkeypatch, "amazon", content), content)
    five = data.load_grouped("amazon", label="overall=5")
    assert five.class_names == five.cut(0)["train"].group_names == ("not 5", "5")


# Molecules.


def test_scaffolds_are_cut_as_in_a_second_program():
    random = np.random.default_rng(0)
    for size in (10, 57, 400):
        names = [f"s{number}" for number in random.zipf(1.6, size).clip(max=40)]
        sets = defaultdict(list)
        for row, name in enumerate(names):
            sets[name].append(row)
        order = sorted(sets.values(), key=lambda rows: (-len(rows), -rows[0]))
        train: list[int] = []
        held: list[int] = []
        test: list[int] = []
        for rows in order:
            if len(train) + len(rows) > 0.8 * size:
                full = len(train) + len(held) + len(rows) > 0.9 * size
                (test if full else held).extend(rows)
            else:
                train.extend(rows)
        split = scaffold_split(names)
        for place, rows in enumerate((train, held, test)):
            assert np.flatnonzero(split == place).tolist() == sorted(rows)


RINGS = ["c1ccccc1", "C1CCCCC1", "c1ccncc1", "c1ccc2ccccc2c1"]
SMILES = [
    *(f"{'C' * n}{ring}" for ring in RINGS[:2] for n in range(1, 9)),
    "CCc1ccncc1", "Oc1ccc2ccccc2c1", "CCO", "CC(C)O",
    "CCC1=[O+][Cu-3]2([O+]=C(CC)C1)[O+]=C(CC)CC(CC)=[O+]2",
]  # fmt: skip


def test_molecules(monkeypatch, tmp_path):
    chem = pytest.importorskip("rdkit.Chem")
    from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles

    rows = "".join(f"{smiles},{number % 3 // 2}\n" for number, smiles in enumerate(SMILES))
    content = f"smiles,HIV_active\n{rows}".encode()
    put(tmp_path / "data", stand_in(monkeypatch, "hiv", content), content)
    loaded = data.load_grouped("hiv")
    parts: dict[str, Any] = dict(loaded.cut(0))
    scaffolds = {
        name: {MurckoScaffoldSmiles(SMILES[row]) for row in part.rows.tolist()}
        for name, part in parts.items()
    }
    assert not scaffolds["train"] & scaffolds["test"]
    assert not scaffolds["train"] & scaffolds["validation"]
    assert not scaffolds["test"] & scaffolds["validation"]
    assert "c1ccccc1" in scaffolds["train"] and len(parts["train"]) == 16
    (kept,) = (tmp_path / "cache").rglob("scaffolds-*.json")
    kept.write_text("[" + ",".join(["0"] * 20 + ["2"]) + "]")
    assert len(data.load_grouped("hiv").cut(0)["test"]) == 1, "read from the cache"
    assert chem.MolFromSmiles(SMILES[0]) is not None


def test_fingerprints_are_those_of_rdkit():
    pytest.importorskip("rdkit")
    from rdkit import Chem, DataStructs
    from rdkit.Chem import rdFingerprintGenerator

    generator = rdFingerprintGenerator.GetMorganGenerator(radius=2, fpSize=1024)
    made: Any = data.load_grouped("grouped-synthetic")
    texts = dataclasses.replace(made, kind="text", samples=tuple(SMILES[:-1]), inputs="m")
    found = backbones.features("morgan", texts, batch=5)
    for row, smiles in enumerate(SMILES[:-1]):
        wanted = np.zeros(1024)
        DataStructs.ConvertToNumpyArray(
            generator.GetFingerprint(Chem.MolFromSmiles(smiles)), wanted
        )
        assert found.values[row].tolist() == wanted.tolist()
    encoded = backbones.encode("morgan", ("C[Al-3](C)(C)(C)(C)C",), tokens=3)
    assert isinstance(encoded, Vectors) and encoded.values.count_nonzero() > 0
    with pytest.raises(WrongData, match="`C1CC` is not a molecule"):
        backbones.encode("morgan", ("C1CC",), tokens=3)
