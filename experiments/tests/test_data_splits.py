"""How a seed splits rows, groups and users; generated data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fcco_experiments import data
from fcco_experiments.data import Part
from fcco_experiments.data.grouped import (
    ByUser,
    GroupedData,
    Vectors,
    WithinCells,
    cut_within_groups,
    kept,
    stratified,
)


def test_each_group_is_cut_by_shares():
    group = torch.tensor([0] * 47 + [1] * 3 + [2] * 2 + [4] * 12)[torch.randperm(64)]
    rows = cut_within_groups(group, 5)
    assert sorted(torch.cat(list(rows.values())).tolist()) == list(range(64))
    sizes = {name: torch.bincount(group[own], minlength=5).tolist() for name, own in rows.items()}
    # at least one of each part, but a group of two is for training alone
    assert sizes == {
        "train": [37, 1, 2, 0, 10],
        "validation": [5, 1, 0, 0, 1],
        "test": [5, 1, 0, 0, 1],
    }
    assert all((own.diff() > 0).all() for own in rows.values())
    assert torch.equal(rows["test"], cut_within_groups(group, 5)["test"])
    assert not torch.equal(rows["test"], cut_within_groups(group, 6)["test"])


def test_at_most_so_many_of_each_group_are_kept():
    group = torch.arange(200) % 7
    rows = kept(group, 5)
    assert torch.bincount(group[rows]).tolist() == [5] * 7 and (rows.diff() > 0).all()
    assert torch.equal(kept(group, 0), torch.arange(200))
    assert set(rows.tolist()) < set(kept(group, 9).tolist()), "a larger limit adds samples"


# Users


def by_user(counts: list[int], split: torch.Tensor | None = None) -> ByUser:
    user = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    user = user[torch.randperm(len(user), generator=torch.Generator().manual_seed(0))]
    return ByUser(user % 5, user, (), split, counts=torch.tensor(counts))


def test_users_are_in_one_part_alone_and_few_samples_are_pooled():
    counts = [1 + n % 9 for n in range(60)] + [25, 31, 28, 40, 22]
    cut = by_user(counts)
    many = {user for user, count in enumerate(counts) if count >= 5}
    trained = set()
    for seed in range(6):
        parts = cut(seed)
        assert sorted(torch.cat([p.rows for p in parts.values()]).tolist()) == [*range(sum(counts))]
        users = {name: set(cut.group[part.rows].tolist()) for name, part in parts.items()}
        assert sum(map(len, users.values())) == len(counts), "no user is in two parts"
        assert users["train"] <= many and len(users["train"]) == round(0.6 * len(many))
        assert len(users["validation"] & many) == round(0.2 * len(many))
        few = [len(users[name] - many) for name in ("validation", "test")]
        assert abs(few[0] - few[1]) <= 1
        trained.add(frozenset(users["train"]))
        assert len(parts["train"].group_names) == len(users["train"])
        for name in ("validation", "test"):
            part = parts[name]
            sizes = torch.bincount(part.group)
            assert sizes.min() >= 20
            for user in users[name]:
                groups = part.group[cut.group[part.rows] == user].unique()
                assert len(groups) == 1, "none is torn apart"
                own = part.group_names[groups[0]].startswith("user ")
                assert own == (counts[user] >= 20)
    assert len(trained) == 6, "seeds differ"


def test_official_parts_of_users_and_their_pools():
    cut = by_user([6] * 30, torch.arange(30) % 3)
    one, same, other = (cut(seed)["validation"] for seed in (0, 0, 1))
    assert torch.equal(one.rows, other.rows) and torch.equal(one.group, same.group)
    assert not torch.equal(one.group[:, None] == one.group, other.group[:, None] == other.group)
    # 10 users of 6: four in a pool are 24; the two left over join the second one
    assert sorted(torch.bincount(one.group).tolist()) == [24, 36]


# Rows of four cells


def cells(sizes: list[int]) -> np.ndarray:
    return np.random.RandomState(0).permutation(np.repeat(np.arange(4), sizes))


def test_cells_give_the_same_share():
    rows = cells([40, 10, 25, 125])
    aside = stratified(rows, 0.2, 3)
    assert np.bincount(rows[aside]).tolist() == [8, 2, 5, 25]
    assert sorted(set(aside)) == aside.tolist()
    assert set(aside) != set(stratified(rows, 0.2, 4))
    with pytest.raises(ValueError, match=r"no row of group 1, label 0 on one .* there are 2"):
        stratified(cells([40, 10, 2, 10]), 0.2, 0)
    with pytest.raises(ValueError, match=r"must be in \[0, 1\)"):
        stratified(rows, 1.0, 0)


def test_parts_of_cells_with_and_without_a_split():
    """A split is kept; of what it leaves to train on the seed takes the share of each cell."""
    cell = torch.from_numpy(cells([40, 20, 60, 80]))
    columns = cell % 2, cell // 2, ("a", "b")
    drawn = WithinCells(*columns, validation=0.25)
    sizes = {name: len(own) for name, own in drawn(0).items()}
    assert sizes == {"train": 120, "validation": 40, "test": 40}, "a fifth, a quarter of the rest"
    assert not torch.equal(drawn(0)["test"].rows, drawn(1)["test"].rows)
    split = torch.arange(200) % 2 * 2
    fixed = WithinCells(*columns, split, 0.0)(3)
    assert list(fixed) == ["train", "test"] and fixed["test"].rows.tolist() == [*range(1, 200, 2)]
    three = WithinCells(*columns, torch.arange(200) % 3)(5)
    assert [own.rows[0].item() for own in three.values()] == [0, 1, 2]


def own_data(table: np.ndarray, names: tuple[str, ...], split: list[int]) -> GroupedData:
    label, group = torch.arange(len(table)) % 2, torch.arange(len(table)) // 2 % 2
    cut = WithinCells(label, group, ("0", "1"), torch.tensor(split), 0.0)
    values = Vectors(torch.from_numpy(table))
    return GroupedData("a", "vector", values, ("0", "1"), cut, "", feature_names=names)


def test_a_constant_column_is_not_divided_by_rounding():
    table = np.c_[np.full(40, 0.1), np.arange(40.0)]
    assert table.std(axis=0)[0] > 0, "the trap is there"
    found = data.arrays(own_data(table, ("x", "y"), [0] * 36 + [2] * 4), 0)
    assert abs(found.train.features[:, 0]).max() < 1e-6
    np.testing.assert_allclose(found.train.features[:, 1].std(), 1.0, rtol=1e-6)


def test_a_category_of_test_rows_alone_is_no_feature():
    table = np.zeros((40, 3))
    table[:20, 0], table[38:, 1] = 1.0, 1.0
    found = data.arrays(own_data(table, ("c=a", "c=b", "n"), [0] * 36 + [2] * 4), 0)
    assert found.feature_names == ("c=a", "n") and found.test.features.shape == (4, 2)


# Generated data


def roc_gap(score: np.ndarray, rows: Part) -> float:
    """The largest distance between the groups' rates, over all thresholds and both labels."""
    return max(
        abs(
            np.subtract(
                *[(score[(rows.group == a) & (rows.label == y)] > t).mean() for a in (0, 1)]
            )
        )
        for y in (0, 1)
        for t in np.unique(score)[::20]
    )


def test_synthetic_needs_constraints_and_can_meet_them():
    made = data.load("synthetic", rows=5000, test_rows=5000)
    table, label = made.train.features.astype(np.float64), made.train.label
    weight = np.zeros(8)
    for _ in range(15):  # logistic regression by Newton's method; the features are centred
        chance = 1 / (1 + np.exp(-table @ weight))
        hessian = table.T @ (table * (chance * (1 - chance))[:, None])
        weight += np.linalg.solve(hessian, table.T @ (label - chance))
    greedy, fair = made.test.features @ weight, made.test.features[:, :4].sum(1)
    assert roc_gap(greedy, made.test) > 0.3
    assert roc_gap(fair, made.test) < 0.08  # sampling: none in expectation
    auc = (fair[made.test.label == 1][:, None] > fair[made.test.label == 0]).mean()
    assert auc == pytest.approx(0.5 * (1 + math.erf(1.6 / 2)), abs=0.02)  # Phi(1.6 / sqrt 2)
    more = data.load("synthetic", rows=5000, test_rows=50)
    np.testing.assert_array_equal(made.train.features, more.train.features)


def test_the_worst_generated_groups_gain_from_cvar():
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
    assert (average @ counts.numpy()) < (worst @ counts.numpy())


def test_the_last_generated_scene_lies_among_its_neighbours():
    loaded = data.load_grouped("scenes-synthetic", seed=1)
    assert isinstance(loaded.samples, data.Vectors)
    train = loaded.cut(0)["train"]
    table = loaded.samples.values[train.rows]
    means = torch.stack([table[train.label == k].mean(0) for k in range(5)])
    apart = torch.cdist(means, means)
    # expected: sqrt(18) = 4.2 between old classes; new: sqrt(6.75) = 2.6 to two, sqrt(15.75) = 4.0
    assert apart[-1, 2:4].max() < 3.0 < 3.6 < apart[-1, :2].min()
    assert (apart[:4, :4] + 9 * torch.eye(4)).min() > 3.8


@pytest.mark.parametrize(
    ("name", "options"),
    [("grouped-synthetic", {"groups": 1}), ("grouped-synthetic", {"rows": 100}),
     ("scenes-synthetic", {"classes": ("a",)}), ("scenes-synthetic", {"samples": 49})],
)  # fmt: skip
def test_generated_data_refuse(name, options):
    with pytest.raises(ValueError, match="There must be 2"):
        data.load_grouped(name, **options)
