"""Reviews by user and opinions by source."""

from __future__ import annotations

import csv
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fcco_experiments import data
from fcco_experiments.data.grouped import ByUser
from grouped_fixtures import Reviews, opinions, opinions_content, put, stand_in


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    monkeypatch.delenv("FCCO_DATA", raising=False)
    monkeypatch.setenv("FCCO_CACHE", str(tmp_path / "cache"))


def texts(loaded: data.GroupedData) -> list[str]:
    return [str(loaded.samples[row]) for row in range(len(loaded.samples))]


# Sentiment


def test_sentiment(monkeypatch, tmp_path):
    rows = opinions()
    content = opinions_content(rows)
    name = stand_in(monkeypatch, "sentiment", content)
    folder = put(tmp_path, name, content, compress=True)
    loaded = data.load("sentiment", folder)
    assert (loaded.kind, loaded.class_names) == ("text", ("negative", "positive"))
    expected = [f"{row[4]}. {row[5]}" if row[4] else row[5] for row in rows]
    assert texts(loaded) == expected and any(row[4] for row in rows)
    parts = loaded.cut(3)
    assert sum(len(part) for part in parts.values()) == 36
    for part in parts.values():
        assert sorted(part.group_names) == sorted(
            f"{domain}, {word}"
            for domain in ("books", "imdb", "blog")
            for word in ("negative", "positive")
        )
        for place, row in enumerate(part.rows.tolist()):
            word = ("negative", "positive")[int(rows[row][1])]
            assert part.label[place] == int(rows[row][1])
            assert part.group_names[part.group[place]] == f"{rows[row][0]}, {word}"
        assert torch.equal(part.reported, part.group) and part.reported_names == part.group_names
    assert torch.equal(pickle.loads(pickle.dumps(loaded)).cut(3)["test"].rows, parts["test"].rows)
    few = data.load("sentiment", folder, limit=4)
    assert Counter(few.cut(0)["train"].group.tolist()) == dict.fromkeys(range(6), 2)
    assert set(texts(few)) < set(expected) and few.fingerprint != loaded.fingerprint


def test_repeated_opinions_are_left_out_on_demand(monkeypatch, tmp_path):
    rows = opinions()
    rows += [rows[3], rows[3], [rows[5][0], str(1 - int(rows[5][1])), *rows[5][2:]]]
    content = opinions_content(rows)
    folder = put(tmp_path, stand_in(monkeypatch, "sentiment", content), content)
    everything, once = (data.load("sentiment", folder, distinct=own) for own in (False, True))
    assert len(everything.samples) == 39
    assert texts(once) == texts(everything)[:36] + texts(everything)[38:], "the first one stays"
    assert once.fingerprint != everything.fingerprint


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda text: text.replace("domain", "source", 1), "lacks the columns domain"),
        (lambda text: text.replace(",1,,,", ",2,,,", 1), "row 1 of .* label of 0 or 1 but has"),
        (lambda text: text.split("\n")[0], "has no rows"),
        (lambda text: text + "books,1\n", "must have 6 cells"),
    ],
)
def test_broken_sentiment(monkeypatch, tmp_path, spoil, reason):
    rows = sorted(opinions(), key=lambda row: (row[1] == "0", row[0] == "books"))
    content = spoil(opinions_content(rows).decode()).encode()
    folder = put(tmp_path, stand_in(monkeypatch, "sentiment", content), content)
    with pytest.raises(data.WrongData, match=reason):
        data.load("sentiment", folder)


def test_sentiment_without_the_file(tmp_path):
    with pytest.raises(data.MissingData) as caught:
        data.load("sentiment", tmp_path)
    text = str(caught.value)
    assert f"{tmp_path} has none of sentiment_7domains.csv, sentiment_7domains.csv.gz" in text
    assert "https://github.com/bzantium/bert-AAD" in text and "wilds" not in text
    assert "fcco data fetch" not in text, "it cannot be fetched"
    own = put(tmp_path, "sentiment_7domains.csv", opinions_content(opinions()))
    with pytest.raises(data.MissingData, match="checksum mismatch"):
        data.load("sentiment", own)
    assert len(data.load("sentiment", own, verify=False).samples) == 36


# Amazon, one file

COUNTS = {f"U{number:02d}": 1 + number % 9 for number in range(60)} | {"BIG1": 25, "BIG2": 31}


@pytest.fixture
def reviews(monkeypatch, tmp_path) -> tuple[Reviews, Path]:
    made = Reviews(COUNTS)
    content = made.content()
    return made, put(tmp_path / "mine", stand_in(monkeypatch, "amazon", content), content, True)


def users_of(made: Reviews, loaded: data.GroupedData, part: data.GroupedPart) -> list[str]:
    by_text = {row[5]: row[0] for row in made.rows}
    return [by_text[str(loaded.samples[row])] for row in part.rows.tolist()]


def test_users_are_cut_by_the_seed(reviews):
    made, folder = reviews
    loaded = data.load("amazon", folder, download=False)
    assert (loaded.kind, loaded.summary) == ("text", "tenth")
    assert loaded.class_names == ("1 star", "2 stars", "3 stars", "4 stars", "5 stars")
    assert texts(loaded) == [row[5] for row in made.rows]
    many = {user for user, count in COUNTS.items() if count >= 5}
    seen = []
    for seed in (0, 1, 2):
        parts = loaded.cut(seed)
        rows = [row for part in parts.values() for row in part.rows.tolist()]
        assert sorted(rows) == list(range(len(made.rows)))
        users = {name: {*users_of(made, loaded, part)} for name, part in parts.items()}
        assert users["train"] <= many and len(users["train"]) == round(0.6 * len(many))
        assert len(users["validation"] & many) == round(0.2 * len(many))
        few = [len(users[name] - many) for name in ("validation", "test")]
        assert sum(few) == len(COUNTS) - len(many) and abs(few[0] - few[1]) <= 1
        assert not users["train"] & users["validation"] and not users["test"] & users["validation"]
        assert not users["train"] & users["test"]
        seen.append(frozenset(users["train"]))
        for part in parts.values():
            for place, row in enumerate(part.rows.tolist()):
                assert part.label[place] == int(made.rows[row][2]) - 1
            assert torch.equal(part.reported, part.group)
        groups: dict[int, set[str]] = {}
        for user, group in zip(
            users_of(made, loaded, parts["train"]), parts["train"].group.tolist(), strict=True
        ):
            groups.setdefault(group, set()).add(user)
        assert sorted(len(own) for own in groups.values()) == [1] * len(users["train"])
        assert all(name.startswith("user ") for name in parts["train"].group_names)
    assert len({*seen}) == 3, "seeds differ"
    assert [p.rows.tolist() for p in loaded.cut(1).values()] == [
        p.rows.tolist() for p in pickle.loads(pickle.dumps(loaded)).cut(1).values()
    ]


def test_users_with_few_reviews_are_pooled(reviews):
    made, folder = reviews
    loaded = data.load("amazon", folder, download=False)
    for seed in range(6):
        for name in ("validation", "test"):
            part = loaded.cut(seed)[name]
            groups: dict[str, set[str]] = {}
            owners = users_of(made, loaded, part)
            for user, group in zip(owners, part.group.tolist(), strict=True):
                groups.setdefault(part.group_names[group], set()).add(user)
            assert len(groups) == len(part.group_names)
            assert sum(len(own) for own in groups.values()) == len({*owners}), "none is torn apart"
            sizes = {key: sum(COUNTS[user] for user in own) for key, own in groups.items()}
            assert min(sizes.values()) >= 20
            for key, own in groups.items():
                if key.startswith("user "):
                    assert len(own) == 1 and next(iter(own)).startswith("BIG")
                else:
                    assert not any(user.startswith("BIG") for user in own)
                    last = key == part.group_names[-1]
                    # without its last user a pool was too small, but for what joined at the end
                    assert sizes[key] < 20 + 9 + (19 if last else 0)


def test_pools_by_hand():
    counts = torch.tensor([3, 4, 2, 9, 1, 2])
    cut = ByUser(torch.zeros(1), torch.zeros(1), counts, 1, 5)
    order = torch.tensor([0, 1, 2, 4, 3, 5])  # 3 + 4 | 2 + 1 + 9 | 2 left over
    assert cut._pooled(order).tolist() == [0, 0, 1, 1, 1, 1]
    assert cut._pooled(torch.tensor([4, 5])).tolist() == [0, 0], "too few for one"
    assert cut._pooled(order[:0]).tolist() == []


def test_the_seed_shuffles_the_pools(reviews):
    """Also where the parts are official."""
    _, folder = reviews
    drawn = data.load("amazon", folder, download=False).cut
    assert isinstance(drawn, ByUser)
    fixed = replace(drawn, part_of=torch.arange(len(drawn.counts)) % 3)
    one, same, other = (fixed(seed)["validation"] for seed in (0, 0, 1))
    assert torch.equal(one.rows, other.rows) and torch.equal(one.group, same.group)
    together = [each.group[:, None] == each.group for each in (one, other)]
    assert not torch.equal(*together)


def test_no_report_can_name_a_user(reviews):
    _, folder = reviews
    loaded = data.load("amazon", folder, download=False)
    names = {name for part in loaded.cut(0).values() for name in part.group_names}
    assert all(name.split()[0] in ("user", "pool") and name.split()[1].isdigit() for name in names)
    stored = pickle.dumps(loaded)
    assert b"BIG1" not in stored and b"U07" not in stored


def test_limit_and_options_of_amazon(reviews):
    _, folder = reviews
    whole, few = (data.load("amazon", folder, download=False, limit=own) for own in (0, 3))
    assert len(few.samples) == sum(min(3, count) for count in COUNTS.values())
    for seed in (0, 4):
        for name, part in few.cut(seed).items():
            assert part.group_names == whole.cut(seed)[name].group_names, "as many groups"
    prints = {whole.fingerprint, few.fingerprint}
    options: dict[str, Any]
    for options in ({"min_reviews": 7}, {"pool": 10}, {"distinct": True}):
        loaded = data.load("amazon", folder, download=False, **options)
        prints.add(loaded.fingerprint)
        assert loaded.fingerprint == data.load("amazon", folder, **options).fingerprint
    assert len(prints) == 4, "all texts differ, so distinct changes nothing"
    train = data.load("amazon", folder, download=False, min_reviews=7).cut(0)["train"]
    assert torch.bincount(train.group).min() >= 7
    for options in ({"min_reviews": 0}, {"pool": 0}, {"limit": 1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            data.load("amazon", folder, **options)


def test_repeated_reviews_of_a_user(monkeypatch, tmp_path):
    made = Reviews(COUNTS)
    first = next(row for row in made.rows if row[0] == "BIG1")
    other = next(row for row in made.rows if row[0] == "BIG2")
    made.rows += [list(first), ["BIG2", *first[1:]], [*other[:2], 6.0 - other[2], *other[3:]]]
    content = made.content()
    folder = put(tmp_path, stand_in(monkeypatch, "amazon", content), content)
    once = data.load("amazon", folder, download=False, distinct=True)
    assert texts(once) == [row[5] for row in made.rows[:-3]] + [first[5]], "users may agree"
    assert len(data.load("amazon", folder, download=False).samples) == len(made.rows)


def test_long_reviews(monkeypatch, tmp_path):
    made = Reviews({"A": 20, "B": 20, "C": 20, "D": 20, "E": 20})
    made.rows[3][5] = "long " * 40_000
    content = made.content()
    folder = put(tmp_path, stand_in(monkeypatch, "amazon", content), content)
    before = csv.field_size_limit()
    assert before < 200_000
    assert data.load("amazon", folder, download=False).samples[3] == "long " * 40_000
    assert csv.field_size_limit() == before
    folder = put(tmp_path / "b", stand_in(monkeypatch, "amazon", content[:-40]), content[:-40])
    with pytest.raises(data.WrongData):
        data.load("amazon", folder, download=False)
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("reviewText", "text", "lacks the columns reviewText"),
        (",5.0,", ",6.0,", r"must have 1.0 to 5.0 stars but has '6.0'"),
        (",5.0,", ",4.5,", r"stars but has '4.5'"),
        (",5.0,", ",5.0,1,", "must have 10 cells, as its header, but has 11"),
    ],
)
def test_broken_reviews(monkeypatch, tmp_path, old, new, reason):
    content = Reviews(COUNTS).content().decode().replace(old, new, 1).encode()
    folder = put(tmp_path, stand_in(monkeypatch, "amazon", content), content)
    with pytest.raises(data.WrongData, match=reason):
        data.load("amazon", folder, download=False)


# Amazon-WILDS

PARTS = {"A": 0, "B": 0, "C": 0, "D": 1, "E": 1, "F": 3, "G": 3, "X": -1}
SIZES = {"A": 16, "B": 15, "C": 5, "D": 22, "E": 25, "F": 21, "G": 30, "X": 9}


@pytest.fixture
def wilds(tmp_path) -> tuple[Reviews, Path, dict[str, int]]:
    made = Reviews(SIZES)
    folder = made.wilds(tmp_path / "mine", PARTS)
    numbers = {"train": 0, "validation": 1, "test": 3}
    counts = {name: made.splits.count(own) for name, own in numbers.items()}
    return made, folder, counts


def test_official_users(wilds):
    made, folder, counts = wilds
    assert made.splits.count(2) and made.splits.count(4)
    loaded = data.load("amazon", folder.parent, expected=counts, min_reviews=5)
    used = [row for row, split in zip(made.rows, made.splits, strict=True) if split in (0, 1, 3)]
    assert texts(loaded) == [row[5] for row in used]
    own = Counter(row[0] for row in used)
    assert own["C"] < 5 <= own["B"], "the fixture must have a user who is not trained on"
    parts = loaded.cut(0)
    assert {name: {*users_of(made, loaded, part)} for name, part in parts.items()} == {
        "train": {"A", "B"},
        "validation": {"D", "E"},
        "test": {"F", "G"},
    }
    assert len(parts["train"]) == own["A"] + own["B"]
    assert all(len(part.group_names) == 2 for part in parts.values())
    for part in parts.values():
        for place, row in enumerate(part.rows.tolist()):
            assert part.label[place] == int(used[row][2]) - 1
    everyone = data.load("amazon", folder, expected=counts, min_reviews=1).cut(0)["train"]
    assert len(everyone.group_names) == 3
    assert loaded.facts["copy"] == "Amazon-WILDS"
    once = data.load("amazon", folder, expected=counts, distinct=True)
    assert texts(once) == texts(loaded)


def test_counts_of_wilds(wilds):
    _, folder, counts = wilds
    reason = (
        r"must have 245,502 \(train\), 100,050 \(validation\), 100,050 \(test\) reviews but has"
    )
    with pytest.raises(data.WrongData, match=reason):
        data.load("amazon", folder)
    assert data.load("amazon", folder, verify=False).name == "amazon"
    with pytest.raises(data.WrongData, match="must have"):
        data.load("amazon", folder, expected={**counts, "test": counts["test"] + 1})


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda lines: lines[:-1], "as many as splits/user.csv, but has more"),
        (lambda lines: [*lines, "0"], "must have 144 rows, .* but has 143"),
        (lambda lines: ["part", *lines[1:]], "splits/user.csv lacks the columns split"),
        (lambda lines: [*lines[:-1], "7"], "must hold -1 to 4 but has 7"),
    ],
)
def test_broken_splits(wilds, spoil, reason):
    _, folder, counts = wilds
    path = folder / "splits" / "user.csv"
    path.write_text("\n".join(spoil(path.read_text().split())) + "\n")
    with pytest.raises(data.WrongData, match=reason):
        data.load("amazon", folder, expected=counts)


def test_a_user_in_two_parts(wilds):
    made, folder, _ = wilds
    path = folder / "splits" / "user.csv"
    lines = path.read_text().split()
    lines[1 + next(n for n, row in enumerate(made.rows) if row[0] == "D")] = "0"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(data.WrongData, match="users must belong to one part"):
        data.load("amazon", folder, verify=False)


@pytest.mark.parametrize("gap", ["reviews.csv", "RELEASE_v2.1.txt", "splits/user.csv"])
def test_amazon_folder_without_a_part(wilds, gap):
    _, folder, counts = wilds
    (folder / gap).unlink()
    with pytest.raises(data.WrongData, match=f"amazon_v2.1 lacks {gap}"):
        data.load("amazon", folder, expected=counts)


# Generated


def test_generated_groups():
    loaded = data.load("grouped-synthetic")
    assert loaded.kind == "vector" and isinstance(loaded.samples, data.Vectors)
    assert loaded.samples.values.shape == (3000, 8)
    assert loaded.samples.values.dtype == torch.float32
    parts = loaded.cut(0)
    sizes = sum(torch.bincount(part.group, minlength=12) for part in parts.values())
    assert isinstance(sizes, torch.Tensor)
    assert sizes.tolist() == sorted(sizes.tolist(), reverse=True) and sizes[0] > 15 * sizes[-1]
    assert int(sizes.sum()) == 3000 and sizes.min() >= 10
    same, other = data.load("grouped-synthetic"), data.load("grouped-synthetic", seed=1)
    assert same.fingerprint == loaded.fingerprint != other.fingerprint
    assert not torch.equal(parts["train"].rows, loaded.cut(1)["train"].rows)
    train = loaded.cut(0)["train"]
    rule = {
        tuple(loaded.samples[row].tolist()): int(own)
        for row, own in zip(train.rows.tolist(), train.label, strict=True)
    }
    short = data.load("grouped-synthetic", limit=10)
    part = short.cut(0)["train"]
    pairs = [
        (rule.get(tuple(torch.as_tensor(short.samples[row]).tolist())), int(own))
        for row, own in zip(part.rows.tolist(), part.label, strict=True)
    ]
    known = [pair for pair in pairs if pair[0] is not None]
    assert len(known) > 60 and all(first == second for first, second in known)
    few = data.load("grouped-synthetic", limit=10, groups=5, rows=400, features=3, classes=4)
    assert len(few.samples) == 50 and len(few.cut(0)["test"].group_names) == 5
    assert len(few.class_names) == 4
    options: dict[str, Any]
    for options in ({"groups": 1}, {"rows": 100}, {"features": 0}, {"classes": 1}, {"limit": 2}):
        with pytest.raises(ValueError, match=next(iter(options))):
            data.load("grouped-synthetic", **options)


def test_the_worst_groups_gain_from_cvar():
    """A linear model of the average fails the smallest groups, one of the worst groups does not."""
    loaded = data.load_grouped("grouped-synthetic")
    part = loaded.cut(0)["train"]
    assert isinstance(loaded.samples, data.Vectors)
    inputs, group = loaded.samples.values[part.rows], part.group
    counts = torch.bincount(group)

    def trained(worst: int) -> np.ndarray:
        weight = torch.zeros(9, 2, requires_grad=True)
        step = torch.optim.Adam([weight], lr=0.1)
        for _ in range(150):
            scores = inputs @ weight[:8] + weight[8]
            losses = torch.nn.functional.cross_entropy(scores, part.label, reduction="none")
            means = torch.zeros(12).index_add(0, group, losses) / counts
            loss = means.topk(worst).values.mean() if worst else losses.mean()
            step.zero_grad()
            loss.backward()
            step.step()
        return means.detach().numpy()

    average, worst = trained(0), trained(3)
    assert np.sort(average)[-3:].mean() > 1.3 * np.sort(worst)[-3:].mean()
    assert average[-1] > 2 * average[0], "the smallest group follows another rule"
    assert (average @ counts.numpy()) < (worst @ counts.numpy())


def test_names_of_grouped_data():
    with pytest.raises(
        ValueError, match="one of celeba, camelyon17, amazon, sentiment, grouped-sy"
    ):
        data.load_grouped("adult")
    with pytest.raises(ValueError, match="one of adult, "):
        data.load_grouped("mnist")
