"""Samples that belong to several groups, or to none: objectives, samplers and group means."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from problems import take_step
from torch import Tensor, nn
from torch.utils.data import Dataset

import fcco
from fcco import xrisk
from fcco.groups import GroupBatchSampler, GroupMemberships
from fcco.index import read_names

DOUBLE = torch.float64
N, GROUPS, DIM = 40, 5, 3
_draw = np.random.default_rng(0)
X, Y = _draw.normal(size=(N, DIM)), _draw.normal(size=N)
MEMBER = _draw.random((N, GROUPS)) < np.array([0.7, 0.5, 0.4, 0.3, 0.2])
MEMBER[:6] = False  # some samples are in no group


def make_model() -> nn.Linear:
    model = nn.Linear(DIM, 1, bias=False, dtype=DOUBLE)
    model.weight.data.fill_(0.3)
    return model


def losses(model: nn.Module, ids: np.ndarray) -> Tensor:
    return 0.5 * (model(torch.from_numpy(X[ids])).squeeze(1) - torch.from_numpy(Y[ids])) ** 2


def batches(number: int, size: int = 8) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.choice(N, size, replace=False) for _ in range(number)]


def by_hand(ids: np.ndarray) -> tuple[Tensor, Tensor]:
    """The sample and the group of each membership."""
    pairs = [(k, i) for k, row in enumerate(MEMBER[ids]) for i in range(GROUPS) if row[i]]
    sample, group = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return torch.from_numpy(sample.copy()), torch.from_numpy(group.copy())


FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "tensor": torch.from_numpy,
    "array": lambda rows: rows,
    "booleans": lambda rows: rows.tolist(),
    "lists": lambda rows: [np.flatnonzero(row).tolist() for row in rows],
    "arrays": lambda rows: [np.flatnonzero(row) for row in rows],
    "sparse": lambda rows: torch.from_numpy(rows).to_sparse(),
}


def as_index(form: str, rows: np.ndarray) -> Any:
    if form == "first group alone":
        return rows & (rows.cumsum(1) == 1)
    return FORMS[form](rows)


# Objectives.


def test_tracked_values_and_steps_are_those_of_the_algorithm():
    """NumPy: a sample counts in each of its groups, and in the ordinary loss once."""
    gamma, correction, lam, limit, lr = 0.4, 0.2, 0.3, 0.2, 0.05
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    objective = fcco.constrained(
        model, optimizer, GROUPS, "sonex", tolerance=limit, penalty=2.0, smoothing=lam,
        gamma=gamma, correction=correction, read="new",
    )  # fmt: skip
    w = np.full(DIM, 0.3)
    before, u, seen = w.copy(), np.zeros(GROUPS), np.zeros(GROUPS, dtype=bool)
    for ids in batches(60):
        x, y, member = X[ids], Y[ids], MEMBER[ids]
        residual, residual_before = x @ w - y, x @ before - y
        step, present = np.zeros(DIM), np.flatnonzero(member.any(0))
        for i in present:
            own = member[:, i]
            g, g_before = (0.5 * (r[own] ** 2).mean() for r in (residual, residual_before))
            u[i] = (1 - gamma) * u[i] + gamma * g + correction * (g - g_before) if seen[i] else g
            seen[i] = True
            slope = np.clip((u[i] - limit) / lam, 0, 2.0)
            step += slope * (residual[own, None] * x[own]).mean(0) / len(present)
        step += (residual[:, None] * x).mean(0)
        before, w = w, w - lr * step

        def function(ids: np.ndarray = ids) -> tuple[Tensor, Tensor]:
            value = losses(model, ids)
            return value, value

        take_step(objective, function, MEMBER[ids])
    assert seen.all()
    np.testing.assert_allclose(objective.term.tracker.rows.numpy(), u, rtol=1e-12)
    np.testing.assert_allclose(model.weight.detach().numpy()[0], w, rtol=1e-12)


def cvar(model: nn.Module, optimizer: Any) -> Any:
    return fcco.CVaRGroupDRO(model, optimizer, GROUPS, ratio=0.4)


def corrected(model: nn.Module, optimizer: Any) -> Any:
    return fcco.methods.sonex(
        model, optimizer, fcco.outer.Hinge(), GROUPS, smoothing=0.1, gamma=0.3, correction=0.5
    )


def two_rates(model: nn.Module, optimizer: Any) -> Any:
    outer = fcco.outer.TwoSidedHinge(0.05, 1.5)
    return fcco.methods.sonex(model, optimizer, outer, GROUPS, smoothing=0.5, gamma=0.3)


def multipliers(model: nn.Module, optimizer: Any) -> Any:
    return fcco.constrained(model, optimizer, GROUPS, tolerance=0.3)


def weights(model: nn.Module, optimizer: Any) -> Any:
    return fcco.methods.ooa(model, optimizer, GROUPS)


def two_terms(model: nn.Module, optimizer: Any) -> Any:
    terms = {
        name: fcco.terms.CoupledTerm(
            fcco.outer.Hinge(), fcco.tracker.InnerTracker(GROUPS, gamma=0.5, dtype=DOUBLE)
        )
        for name in ("first", "second")
    }
    return fcco.Compositional(model, optimizer, terms)


def two_values(model: nn.Module, ids: np.ndarray) -> Tensor:
    value = losses(model, ids)
    return torch.stack([value, value.sqrt()], 1)


def measured(model: nn.Module, ids: np.ndarray) -> fcco.Measured:
    value = losses(model, ids)
    return fcco.Measured((value.detach() > 0.3).double(), value)


def expanded(value: Any, sample: Tensor) -> Any:
    """One value for each membership, of anything that a function may return."""
    if isinstance(value, fcco.Measured):
        return fcco.Measured(*(part[sample] for part in value))
    if isinstance(value, dict):
        return {name: part[sample] for name, part in value.items()}
    return value[sample]


CASES: dict[str, tuple[Any, Any, bool]] = {  # objective, values, whether there is a g0
    "cvar": (cvar, losses, False),
    "corrected": (corrected, losses, False),
    "two-rates": (two_rates, two_values, False),
    "multipliers": (multipliers, losses, True),
    "measured": (corrected, measured, True),
    "ooa": (weights, losses, False),
    "two-terms": (two_terms, lambda m, i: {n: losses(m, i) for n in ("first", "second")}, True),
}


def trained(case: str, steps: list[np.ndarray], form: str | None) -> Any:
    """The loss of each step and the state after all; `form` None expands by hand."""
    build, values, with_loss = CASES[case]
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    objective = build(model, optimizer)
    found = []
    for ids in steps:
        sample, index = by_hand(ids)

        def function(own: Any = model, ids: np.ndarray = ids, sample: Tensor = sample) -> Any:
            value = values(own, ids)
            value = expanded(value, sample) if form is None else value
            return (losses(own, ids), value) if with_loss else value

        given = index if form is None else as_index(form, MEMBER[ids])
        if case == "two-terms":
            given = dict.fromkeys(("first", "second"), given)
        found.append(take_step(objective, function, given))
    return {"loss": torch.tensor(found), **model.state_dict(), **dict(objective.named_buffers())}


@pytest.mark.parametrize("case", CASES)
def test_a_matrix_equals_one_value_per_membership(case):
    steps = [*batches(9), np.arange(4)]  # the last batch has no member of any group
    expected = trained(case, steps, None)
    result = trained(case, steps, "tensor")
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    others = trained(case, steps, "first group alone")
    # All groups of a sample count.
    assert any(not torch.equal(result[name], others[name]) for name in result)


@pytest.mark.parametrize("form", FORMS)
def test_lists_and_arrays_mean_the_same(form):
    expected = trained("multipliers", batches(4), None)
    result = trained("multipliers", batches(4), form)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_an_independent_batch():
    """`gradient_index` may be another matrix."""
    first, second, start = batches(3, size=30)
    found = []
    for hand in (True, False):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        objective = corrected(model, optimizer)
        take_step(objective, lambda m=model: losses(m, start), MEMBER[start])

        def batch(ids: np.ndarray, model: Any = model, hand: bool = hand) -> Any:
            sample, index = by_hand(ids)
            return lambda: losses(model, ids)[sample if hand else ...], index if hand else MEMBER[
                ids
            ]

        (values, index), (gradient, other) = batch(first), batch(second)
        loss = objective(values, index, gradient=gradient, gradient_index=other)
        loss.backward()
        found.append((loss.detach(), model.weight.grad, objective.term.tracker.rows))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_warm_up_pool_and_report_take_the_matrix():
    model = make_model()
    objective = cvar(model, torch.optim.SGD(model.parameters(), lr=0.05))
    parts = np.array_split(np.arange(N), 3)
    pairs = [(lambda ids=ids: losses(model, ids), MEMBER[ids]) for ids in parts]
    all_losses = losses(model, np.arange(N)).detach().numpy()
    exact = [all_losses[MEMBER[:, i]].mean() for i in range(GROUPS)]
    pooled = objective.pool(pairs)["inner"]
    np.testing.assert_array_equal(pooled.counts, MEMBER.sum(0))
    objective.warm_up(pairs)
    np.testing.assert_allclose(objective.group_losses(), exact, rtol=1e-12)
    everything = {"function": lambda: losses(model, np.arange(N)), "index": MEMBER}
    assert not objective.report(**everything).findings
    everything["function"] = lambda: 0 * losses(model, np.arange(N)) + 1  # all of one loss
    assert [f.kind for f in objective.report(**everything).findings] == ["collapse"]


BAD: dict[str, tuple[Any, str]] = {
    "columns": (MEMBER[:8, :4], "a column for each of the 5 blocks"),
    "rows": (MEMBER[:7], r"shape \(7,\)"),
    "float": (MEMBER[:8].astype(float), "must be boolean"),
    "numbers": (MEMBER[:8].astype(int), "must be boolean"),
    "0 and 1 as lists": (MEMBER[:8].astype(int).tolist(), "of sample 0 twice"),
    "an id too large": ([[0, 5]] + [[]] * 7, r"\[0, 4\]"),
    "a negative id": ([[0, -1]] + [[]] * 7, "ids from 0"),
    "a fraction": ([[0.5]] + [[]] * 7, "integer ids"),
    "ids and lists": ([[0], 1, [2], [], [], [], [], []], "one list of ids"),
    "booleans of unequal length": ([[True], [True, False]] * 4, "must hold integer ids"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_index_changes_nothing(name):
    index, words = BAD[name]
    model = make_model()
    objective = corrected(model, torch.optim.SGD(model.parameters(), lr=0.05))
    objective(lambda: losses(model, np.arange(8, 16)), MEMBER[8:16])
    objective.close()
    before = copy.deepcopy(objective.state_dict())
    with pytest.raises((ValueError, IndexError, TypeError), match=words):
        objective(lambda: losses(model, np.arange(8)), index)
    torch.testing.assert_close(objective.state_dict(), before, rtol=0, atol=0, equal_nan=True)


def test_two_columns_of_0_and_1_are_not_taken_for_lists_of_ids():
    """Read as ids, `[[1, 0], [0, 1]]` puts every sample into both groups."""
    values = torch.arange(3.0)
    for groups in ([[1, 0], [0, 1], [0, 1]], [[1, 0]] * 3):
        for number in (None, 2):
            with pytest.raises(ValueError, match="matrix of 0 and 1"):
                fcco.group_mean(values, groups, number)
    assert fcco.group_mean(values, [[0, 1]] * 3).counts.tolist() == [3, 3]
    assert fcco.group_mean(values, [[1, 0], [0], [1, 0]]).counts.tolist() == [3, 2]
    assert fcco.group_mean(values, [[1, 0]] * 3, 5).counts.tolist() == [3, 3]


def test_objectives_whose_blocks_are_samples_refuse_a_matrix():
    model, matrix = make_model(), torch.ones(4, 4, dtype=torch.bool)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    contrastive = fcco.GlobalContrastive(model, optimizer, num_pairs=4, temperature=0.1)
    features = torch.eye(4, dtype=DOUBLE)
    with pytest.raises(ValueError, match="one block of each entry"):
        contrastive(lambda: (features, features), matrix)
    assert not contrastive.term.tracker.seen.any()
    labels = torch.tensor([0, 1, 0, 1])
    risk = xrisk.AveragePrecision(model, optimizer, labels=labels)
    with pytest.raises(ValueError, match="number of each sample in the training set"):
        risk(lambda: model(torch.zeros(4, DIM, dtype=DOUBLE)), labels, matrix)


def test_a_fleet_refuses_a_matrix():
    def build(lr: float) -> Any:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        return fcco.fleet.Member(model, optimizer, corrected(model, optimizer))

    fleet = fcco.fleet.Fleet([build(0.1), build(0.2)], lambda model, x: model(x).squeeze(1))
    x = torch.zeros(2, 8, DIM, dtype=DOUBLE)
    with pytest.raises(ValueError, match="block of each entry"):
        fleet.step(x, index=torch.ones(2, 8, GROUPS, dtype=torch.bool))


# Samplers: 7 samples, groups of 4, 3 and 2 of them that overlap, one sample in no group.

SMALL = np.zeros((7, 3), dtype=bool)
for _group, _samples in enumerate([(0, 1, 2, 3), (2, 3, 4), (3, 5)]):
    SMALL[list(_samples), _group] = True


def small_losses(model: nn.Module, ids: Any) -> Tensor:
    """Sample 3, which is in all groups, has the largest loss."""
    ids = np.asarray(ids)
    return losses(model, ids) * torch.from_numpy(np.where(ids == 3, 20.0, 1.0))


def exact(model: nn.Module) -> tuple[np.ndarray, Tensor]:
    """The loss of each group over all of its samples, and the gradient of their mean."""
    every = small_losses(model, np.arange(7))
    means = torch.stack([every[torch.from_numpy(SMALL[:, i])].mean() for i in range(3)])
    (gradient,) = torch.autograd.grad(means.mean(), [*model.parameters()])
    return means.detach().numpy(), gradient


def estimates(model: nn.Module, calls: list[tuple[Any, Any]]) -> tuple[np.ndarray, Tensor]:
    """Means over batches (samples, index): of the values of each group, and of the gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objective = fcco.CVaRGroupDRO(model, optimizer, 3, ratio=1.0, gamma=1.0, smoothing=0.0)
    values, total = [], torch.zeros(1, DIM, dtype=DOUBLE)
    for ids, index in calls:
        loss = objective(lambda ids=ids: small_losses(model, ids), index)
        total += torch.autograd.grad(loss, [*model.parameters()])[0] / len(calls)
        objective.close()
        batch = objective.pool([(lambda ids=ids: small_losses(model, ids), index)])["inner"]
        row = np.full(3, np.nan)
        row[batch.index] = batch.mean(batch.fresh)
        values.append(row)
    return np.nanmean(values, 0), total


def test_batches_of_memberships_are_unbiased():
    """All batches of one sample per group, and those that the sampler draws."""
    model = make_model()
    means, gradient = exact(model)
    members = GroupMemberships(Numbers(7), SMALL)
    own = [np.flatnonzero(members.group == i).tolist() for i in range(3)]
    every = [[members[k] for k in batch] for batch in itertools.product(*own)]
    # 12 batches are 3, 4 and 6 passes over groups of 4, 3 and 2 samples.
    sampler = GroupBatchSampler(members.group, 3, 1, batches_per_epoch=12)
    for drawn in (every, [[members[k] for k in batch] for batch in sampler]):
        calls = [([s for s, _ in batch], [g for _, g in batch]) for batch in drawn]
        found, average = estimates(model, calls)
        np.testing.assert_allclose(found, means, rtol=1e-12)
        torch.testing.assert_close(average, gradient, rtol=1e-12, atol=0)
    # If a drawn sample counts in all of its groups, sample 3 comes too often in each of them.
    wrong = [[s for s, _ in batch] for batch in every]
    found, average = estimates(model, [(ids, SMALL[ids]) for ids in wrong])
    assert (found > 1.1 * means).all()
    assert (average - gradient).norm() > 0.1 * gradient.norm()


class Numbers(Dataset[Any]):
    """Items that are their own numbers, in several forms."""

    def __init__(self, number: int, form: Callable[[int], Any] = int) -> None:
        self.number, self.form = number, form

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, position: int) -> Any:
        return self.form(position)


@pytest.mark.parametrize("groups", [SMALL, torch.from_numpy(SMALL), FORMS["lists"](SMALL)])
def test_memberships_list_every_pair_once(groups):
    members = GroupMemberships(Numbers(7), groups)
    pairs = [(s, g) for s in range(7) for g in range(3) if SMALL[s, g]]
    assert [members[k] for k in range(len(members))] == pairs
    assert list(zip(members.sample.tolist(), members.group.tolist(), strict=True)) == pairs
    assert members.num_groups == 3


def test_items_carry_their_group():
    members = GroupMemberships(Numbers(7, lambda k: (k, -k)), SMALL)
    assert members[4] == (3, -3, 0)
    assert GroupMemberships(Numbers(7, lambda k: [k, -k]), SMALL)[4] == (3, -3, 0)
    assert GroupMemberships(Numbers(7, lambda k: {"x": k}), SMALL)[4] == {"x": 3, "group": 0}
    grouped = Numbers(7, lambda k: {"x": k, "group": "a"})
    with pytest.raises(ValueError, match="another `key`"):
        GroupMemberships(grouped, SMALL)[4]
    assert GroupMemberships(grouped, SMALL, key="id")[4] == {"x": 3, "group": "a", "id": 0}


WRONG: dict[str, tuple[Any, str]] = {
    "one group each": (np.zeros(7, dtype=int), "use `GroupBatchSampler"),
    "numbers": (SMALL.astype(int), "boolean matrix"),
    "rows": (SMALL[:6], "must have 7 rows"),
    "an empty column": (np.pad(SMALL, ((0, 0), (0, 1))), "group 3 has no samples"),
    "an unused id": ([[0], [2]] + [[]] * 5, "group 1 has no samples"),
    "no group at all": ([[]] * 7, "no samples"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_memberships_are_refused(name):
    groups, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        GroupMemberships(Numbers(7), groups)


@pytest.mark.parametrize("groups", [SMALL, torch.from_numpy(SMALL), FORMS["lists"](SMALL)])
def test_the_sampler_of_groups_names_the_memberships(groups):
    with pytest.raises(ValueError, match="GroupMemberships"):
        GroupBatchSampler(groups, batch_size=4)


def test_groups_that_come_unequally_are_noticed_with_the_right_remedy():
    """Rare groups in uniform batches: the warning names memberships."""
    model = make_model()
    objective = cvar(model, torch.optim.SGD(model.parameters(), lr=0.01))
    rare = np.zeros((4, GROUPS), dtype=bool)
    rare[:, :4] = True
    with pytest.warns(fcco.UsageWarning, match="GroupMemberships"):
        for step in range(60):
            rare[0, 4] = step % 20 == 0
            objective(lambda: losses(model, np.arange(4)), rare).backward()
            objective.optimizer.step()


NAMES: list[tuple[Any, list[tuple[int, str]]]] = [
    (["b", None, "a"], [(0, "b"), (2, "a")]),
    ([["b", "a"], [], ("c",)], [(0, "a"), (0, "b"), (2, "c")]),
    ([None, {"a", "d"}, np.array(["c", "b"])], [(1, "a"), (1, "d"), (2, "b"), (2, "c")]),
]


@pytest.mark.parametrize(("values", "pairs"), NAMES)
def test_names_are_numbered_in_order(values, pairs):
    members, names = read_names("`groups`", values)
    assert names == sorted({name for _, name in pairs})
    found = zip(members.sample.tolist(), [names[k] for k in members.group.tolist()], strict=True)
    assert list(found) == pairs and (members.samples, members.groups) == (3, len(names))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["a", 1], "of one kind"), ([[["a"]]], "of one kind"), ([None, []], "holds none"),
        ([float("nan")], "holds .nan"), (["a", ["b", "b"]], "once, but has: .'b', 'b'"),
    ],
)  # fmt: skip
def test_wrong_names_are_refused(values, words):
    with pytest.raises(ValueError, match=f"`groups` must .*{words}"):
        read_names("`groups`", values)


# Group means.


def test_group_mean_of_a_matrix():
    values = torch.randn(7, 2, dtype=DOUBLE, requires_grad=True)
    expected = torch.stack([values[torch.from_numpy(SMALL[:, i])].mean(0) for i in range(3)])
    for groups in (SMALL, torch.from_numpy(SMALL), FORMS["lists"](SMALL)):
        means = fcco.group_mean(values, groups, 3)
        torch.testing.assert_close(means.values, expected)
        assert means.counts.tolist() == [4, 3, 2] and means.index.tolist() == [0, 1, 2]
    sums = [torch.autograd.grad(v.square().sum(), values)[0] for v in (means.values, expected)]
    torch.testing.assert_close(sums[0], sums[1])
    with pytest.raises(ValueError, match="each of the 6 values"):
        fcco.group_mean(values[:6], SMALL)
    with pytest.raises(ValueError, match="each of the 4 blocks"):
        fcco.group_mean(values, SMALL, 4)
