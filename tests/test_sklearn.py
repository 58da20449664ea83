"""The classifiers for scikit-learn: rates by counting, fits by a plain loop."""

from __future__ import annotations

import io
import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

sklearn = pytest.importorskip("sklearn")
sparse = pytest.importorskip("scipy.sparse")

from sklearn.base import clone as sklearn_clone  # noqa: E402
from sklearn.exceptions import ConvergenceWarning  # noqa: E402
from sklearn.linear_model import LogisticRegression  # noqa: E402
from sklearn.metrics import average_precision_score, make_scorer  # noqa: E402
from sklearn.model_selection import GridSearchCV, cross_val_score  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

import fcco  # noqa: E402
from fcco.groups.holdout import split_rows  # noqa: E402
from fcco.integrations.sklearn import (  # noqa: E402
    AveragePrecisionClassifier,
    ConstrainedClassifier,
    WorstGroupClassifier,
)
from fcco.integrations.sklearn.goals import AveragePrecision  # noqa: E402
from fcco.integrations.sklearn.table import (  # noqa: E402
    Encoding,
    Part,
    read_groups,
)
from fcco.integrations.sklearn.training import WideAndDeep  # noqa: E402

Array = NDArray[Any]
clone: Any = sklearn_clone  # its type is that of any container too
pytestmark = pytest.mark.filterwarnings("ignore:.*Raise `max_epochs`")  # most fits are short
ALONE = pytest.mark.filterwarnings("ignore:.*there is nothing to compare")


def table(seed: int, number: int = 3000) -> tuple[Array, Array, Array]:
    """Two groups whose features and labels differ: plain training is far from parity."""
    random = np.random.default_rng(seed)
    group = random.choice(["a", "b"], number)
    X = random.normal(size=(number, 3)) + 0.7 * (group == "a")[:, None]
    y = X[:, 0] + 0.5 * X[:, 1] + random.normal(size=number) > 0.5 + 0.4 * (group == "b")
    return X, np.where(y, "yes", "no"), group


def rates(chosen: Array, y: Array, members: Array) -> dict[str, Array]:
    """Rates of groups by counting; groups are columns of `members`."""
    columns = list(members.T)
    return {
        "demographic_parity": np.array([chosen[m].mean() for m in columns]),
        "tpr": np.array([chosen[m & y].mean() for m in columns]),
        "fpr": np.array([chosen[m & ~y].mean() for m in columns]),
    }


def gap(constraint: str, chosen: Array, y: Array, members: Array) -> float:
    found = rates(chosen, y, members)
    names = ("tpr", "fpr") if constraint == "equalized_odds" else (constraint,)
    return max(float(found[name].max() - found[name].min()) for name in names)


def membership(group: Array) -> Array:
    return group[:, None] == np.unique(group)


# --- reading the data --------------------------------------------------------------------------


def test_groups_of_a_column_of_columns_and_of_lists():
    column = ["x", None, "y", "x"]
    assert read_groups(column).members.sum(0).tolist() in ([1, 1, 2], [2, 1, 1], [1, 2, 1])
    two = np.array([["f", 1], ["m", 1], ["f", 2], ["f", 1]], dtype=object)
    groups = read_groups(two)
    for k, name in enumerate(groups.names):
        rows = [", ".join(map(str, row)) == name for row in two]
        assert groups.members[:, k].tolist() == rows
    assert len(groups.names) == 3 and (groups.members.sum(1) == 1).all()
    lists = [["old", "poor"], [], ["poor"], ("old",)]
    groups = read_groups(lists)
    assert groups.names == ("old", "poor")
    assert groups.members.tolist() == [[True, True], [False, False], [False, True], [True, False]]
    assert (read_groups(groups.members).members == groups.members).all()
    assert len(read_groups(np.array([True, False, True])).names) == 2  # one column has values
    rows = np.empty(4, dtype=object)  # a column of lists, as of a pandas Series
    rows[:] = lists
    assert (read_groups(rows).members == groups.members).all()
    with pytest.raises(ValueError, match="booleans"):
        read_groups([[True, False], [False, True]])


def test_missing_values_are_a_group_and_names_are_distinct():
    nans = [float("nan") for _ in range(3)]  # each another object
    assert read_groups(np.array([1.0, *nans, "x"], dtype=object)).members.sum(0).max() == 3
    mixed = np.array([["f", nan] for nan in nans] + [["f", 1.0], ["m", None]], dtype=object)
    assert sorted(read_groups(mixed).members.sum(0)) == [1, 1, 3]
    X, y, _ = table(13, 200)
    four = np.array(["a", "b - c", "a - b", "c"])[np.arange(200) % 4]
    two = np.array([["a", "b, c"], ["a, b", "c"]])[np.arange(200) % 2]
    for group, number in ((four, 4), (two, 2)):  # names of pairs, of combinations
        model = ConstrainedClassifier("demographic_parity", max_epochs=1)
        model.fit(X, y, sensitive_features=group)
        assert len(model.objective_.multipliers()) == number * (number - 1)


def test_rows_are_set_aside_from_every_cell():
    cells = np.repeat([[0, 0], [0, 1], [1, 0], [1, 1]], [400, 20, 10, 1000], axis=0)
    cells = np.random.default_rng(0).permutation(cells)
    rows, held = split_rows(cells, 0.1, np.random.RandomState(0))
    assert sorted([*rows, *held]) == list(range(1430))
    for cell, number in (((0, 0), 40), ((0, 1), 2), ((1, 0), 1), ((1, 1), 100)):
        assert abs((cells[held] == cell).all(1).sum() - number) <= 1
    other = split_rows(cells, 0.1, np.random.RandomState(1))[1]
    assert set(held) != set(other) and len(split_rows(cells, 0.0, np.random.RandomState(0))[1]) == 0


def test_encoding_is_linear_between_knots():
    random = np.random.default_rng(0)
    X = np.column_stack([random.exponential(size=500), random.random(500) < 0.1, np.ones(500)])
    encoding = Encoding.of(X, 4)
    new = np.column_stack([np.linspace(-1, 9, 50), np.zeros(50), np.ones(50)])
    knots = np.quantile(np.unique(X[:, 0]), [0, 0.25, 0.5, 0.75, 1])
    pieces = [np.interp(new[:, 0], [low, high], [0, 1]) for low, high in itertools.pairwise(knots)]
    seen = [np.interp(X[:, 0], [low, high], [0, 1]) for low, high in itertools.pairwise(knots)]
    scaled = [(p - s.mean()) / s.std() for p, s in zip(pieces, seen, strict=True)]
    expected = [(new[:, 0] - X[:, 0].mean()) / X[:, 0].std(), -X[:, 1].mean() / X[:, 1].std()]
    np.testing.assert_allclose(encoding(new)[:, 0], expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(encoding(new)[:, 1], expected[1], rtol=1e-5)
    np.testing.assert_allclose(encoding(new)[:, 3:], np.column_stack(scaled), rtol=1e-5, atol=1e-5)
    assert encoding(new).shape == (50, 7) and Encoding.of(X, 1)(new).shape == (50, 3)
    np.testing.assert_allclose(encoding(X).std(0, correction=0)[[0, 1, 3]], 1, rtol=1e-5)
    constant = Encoding.of(np.full((600, 1), 0.1), 4)  # whose deviation is 1e-15 by rounding
    assert abs(constant(np.array([[0.1], [1.1]])).view(-1) - torch.tensor([0.0, 1.0])).max() < 1e-6


# --- what the fit promises ---------------------------------------------------------------------

QUICK = ["demographic_parity", "equalized_odds"]


@pytest.mark.parametrize(
    "constraint", [*QUICK, *(pytest.param(c, marks=pytest.mark.slow) for c in ("tpr", "fpr"))]
)
def test_the_gap_is_small_on_new_data(constraint):
    """Plain training has a gap of 0.15 and more; chance alone is at most 3 standard errors."""
    X, y, group = table(0)
    new, truth, of = table(1, 30000)
    model = ConstrainedClassifier(constraint, 0.03, random_state=0)
    model.fit(X, y, sensitive_features=group)
    chosen, members = model.predict(new) == "yes", membership(of)
    error = 0.5 * math.sqrt(2 / min((group == g).sum() * 0.3 for g in ("a", "b")))
    assert gap(constraint, chosen, truth == "yes", members) < 0.03 + 3 * error
    free = clone(model).set_params(tolerance=1.0).fit(X, y, sensitive_features=group)
    assert gap(constraint, free.predict(new) == "yes", truth == "yes", members) > 0.15
    assert gap(constraint, chosen, truth == "yes", members) < 0.1
    assert model.score(new, truth) > 0.65 > max((truth == "yes").mean(), (truth == "no").mean())


def test_group_loss_keeps_every_group_near_the_mean():
    random = np.random.default_rng(0)
    X, rare = random.normal(size=(2000, 2)), random.random(2000) < 0.2
    rule = X[:, 0] + np.where(rare, -1, 1) * X[:, 1]  # the network cannot see who is rare
    y = np.digitize(rule, [-1, 1])
    model, worst = ConstrainedClassifier("group_loss", random_state=0, validation_fraction=0.0), {}
    for tolerance in (10.0, 0.1):
        model.set_params(tolerance=tolerance).fit(X, y, sensitive_features=rare)
        losses = -np.log(model.predict_proba(X)[np.arange(2000), y])
        worst[tolerance] = max(losses[rare].mean(), losses[~rare].mean()) - losses.mean()
        assert model.report_.training.value == pytest.approx(worst[tolerance], abs=1e-4)
    assert worst[10.0] > 0.4 and worst[0.1] < 0.15


def test_overlapping_groups_as_a_matrix_and_as_lists():
    random = np.random.default_rng(0)

    def draw(number: int) -> tuple[Array, Array, Array]:
        members = random.random((number, 3)) < [0.5, 0.3, 0.2]
        X = random.normal(size=(number, 2)) + members @ [[0.8, 0.0], [0.0, 0.5], [-0.8, 0.0]]
        return X, X.sum(1) + random.normal(size=number) > 0, members

    X, y, members = draw(4000)
    names = [[f"group {k}" for k in np.flatnonzero(row)] for row in members]
    short = ConstrainedClassifier("fpr", 0.03, random_state=0, max_epochs=1)
    scores = [
        short.fit(X, y, sensitive_features=given).decision_function(X) for given in (members, names)
    ]
    assert (scores[0] == scores[1]).all()
    new, truth, of = draw(30000)
    model = ConstrainedClassifier("fpr", 0.03, random_state=0)
    chosen = model.fit(X, y, sensitive_features=members).predict(new)
    free = ConstrainedClassifier("fpr", 1.0, random_state=0).fit(X, y, sensitive_features=members)
    assert gap("fpr", chosen, truth, of) < 0.08 < gap("fpr", free.predict(new), truth, of) - 0.05
    assert not members.any(1).all() and (members.sum(1) > 1).any()


@ALONE
def test_the_worst_group_is_better_than_with_plain_training():
    random = np.random.default_rng(0)

    def draw(number: int) -> tuple[Array, Array, Array]:
        X, rare = random.normal(size=(number, 2)), random.random(number) < 0.1
        return X, np.digitize(X[:, 0] + np.where(rare, -1, 1) * X[:, 1], [-1, 1]) * 10, rare

    X, y, rare = draw(1500)
    new, truth, of = draw(5000)
    loss = {}
    for worst in (0.5, 0.15):
        model = WorstGroupClassifier(worst, random_state=0, max_epochs=10)
        model.fit(X, y, sensitive_features=rare if worst == 0.5 else None)
        losses = -np.log(model.predict_proba(new)[np.arange(5000), truth // 10])
        loss[worst] = [losses[of].mean(), losses[~of].mean()]
    assert max(loss[0.5]) < 1.2 < 1.5 < loss[0.15][0]
    assert set(model.predict(new)) == {0, 10, 20}


def test_most_samples_may_be_in_no_group():
    X, y, _ = table(13, 200)
    lists = [["a"], ["b"], ["a", "b"]] + [[]] * 197
    model = WorstGroupClassifier(0.5, max_epochs=2, random_state=0)
    report = model.fit(X, y, sensitive_features=lists).report_
    assert math.isnan(report.validation.value) and math.isfinite(report.training.value)


def test_average_precision_of_rare_positives():
    random = np.random.default_rng(0)
    X = random.normal(size=(3000, 4))
    y = X[:, 0] * X[:, 1] + 0.3 * random.normal(size=3000) > 2
    model = AveragePrecisionClassifier(random_state=0, max_epochs=16).fit(X[:1500], y[:1500])
    assert isinstance(model.objective_, fcco.xrisk.AveragePrecision)
    found = average_precision_score(y[1500:], model.decision_function(X[1500:]))
    assert y.mean() < 0.05 and found > 0.6
    # At the threshold it is better than no positive at all, which the scores alone do not give.
    assert model.score(X[1500:], y[1500:]) > 1 - y[1500:].mean()


@pytest.mark.parametrize("number", [1, 6, 40])
def test_the_threshold_by_trying_all(number):
    random = np.random.default_rng(number)
    scores = random.integers(0, 20, number) / 4  # with ties
    y = random.random(number) < 0.1 + 0.7 * (scores > 3)
    tensors = torch.as_tensor(scores), torch.as_tensor(y * 1)
    found = AveragePrecision().threshold(tensors[0], Part(tensors[0], tensors[1], tensors[1]))
    tried = [scores.min() - 1, *(scores + 0.01)]
    assert ((scores > found) == y).mean() == max(((scores > t) == y).mean() for t in tried)
    assert abs(scores - found).min() >= 0.125, "half-way"


def test_the_wide_part_starts_as_a_logistic_regression():
    X, y, _ = table(12, 1000)
    encoding = Encoding.of(X, 4)
    x, label = encoding(X), torch.as_tensor(y == "yes").float()
    network = WideAndDeep(encoding, 1)
    network.start(x, label)
    expected = LogisticRegression(tol=1e-8).fit(x, y).decision_function(x)
    for module in (network.train(), network.eval()):
        scores = module(x).detach().numpy()[:, 0]
        assert np.abs(scores - expected).mean() < 0.05 < 0.2 * np.abs(expected).mean()


@pytest.mark.parametrize("worst", [False, True])
def test_values_of_rows_set_apart_and_gradients_of_the_rest(worst):
    """A network that overfits its rows: what is tracked is what holds on new rows."""
    random = np.random.default_rng(0)
    X, group = random.normal(size=(1200, 60)), np.arange(1200) % 3
    y = random.random(1200) < 0.5
    settings: dict[str, Any] = {
        "estimator": lambda d, k: nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, k)),
        "max_epochs": 15, "random_state": 0, "validation_fraction": 0.0,
    }  # fmt: skip
    made = WorstGroupClassifier(1.0, **settings) if worst else ConstrainedClassifier(
        "group_loss", 10.0, **settings)  # fmt: skip
    plain = clone(made).fit(X, y, sensitive_features=group)
    model = made.set_params(holdout=0.3).fit(X, y, sensitive_features=group)
    report = model.report_
    assert (report.training.samples, report.holdout.samples, report.validation) == (840, 360, None)
    assert [each.samples for each in report.holdout.groups] == [120] * 3
    assert plain.report_.holdout is None and "holdout (360 samples)" in str(report)
    assert report.holdout.loss > 1.5 * report.training.loss
    values = model.objective_.term.tracker.value.flatten().detach()
    if worst:  # the losses of groups on rows that are not fitted
        assert values.min() > 1.3 * report.training.loss


def test_rows_cannot_be_set_apart_of_a_group_of_one():
    X, y, group = table(3, 100)
    group = np.where(np.arange(100) == 7, "z", group)
    with pytest.raises(ValueError, match=r"WorstGroupClassifier\(holdout=0.2\)` needs two rows.*z"):
        WorstGroupClassifier(holdout=0.2, validation_fraction=0.0).fit(
            X, y, sensitive_features=group
        )
    for share in (-0.1, 1.0):
        with pytest.raises(ValueError, match="holdout"):
            ConstrainedClassifier(holdout=share).fit(X, y, sensitive_features=group)


# --- equal to a plain loop ---------------------------------------------------------------------


def network(features: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 4), nn.Tanh(), nn.Linear(4, outputs))


def plain_loop(X: Array, module: nn.Module, steps: Any, build: Any, total: int) -> Array:
    """The training written out: schedule, AdamW, the average with weights t^3."""
    x = torch.as_tensor((X - X.mean(0)) / X.std(0), dtype=torch.float32)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.1, fused=True)
    objective = build(module, optimizer)
    weights, average = 0, [torch.zeros_like(p) for p in module.parameters()]
    for t, batch in enumerate(steps, start=1):
        done = t / total
        warm, late = 0.3 + 7 * done, 0.65 + 0.35 * math.cos(math.pi * (done - 0.1) / 0.9)
        optimizer.param_groups[0]["lr"] = 0.05 * (warm if done < 0.1 else late)
        weights += t**3
        for mean, p in zip(average, module.parameters(), strict=True):
            mean.lerp_(p.detach(), t**3 / weights)
        objective(module, x, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for mean, p in zip(average, module.parameters(), strict=True):
            p.copy_(mean)
        return module(x).view(-1).numpy()


SAME: dict[str, Any] = {
    "max_epochs": 5, "batch_size": 50, "learning_rate": 0.05, "weight_decay": 0.1,
    "validation_fraction": 0.0, "random_state": 5,
}  # fmt: skip


def seed_after_split(number: int) -> int:
    """What a fit draws as its seed after its split, which draws one number for each row."""
    random = np.random.RandomState(SAME["random_state"])
    random.random_sample(number + 1)
    return int(random.randint(2**31 - 1))


def test_a_constrained_fit_is_a_plain_loop():
    X, y, group = table(2, 400)
    model = ConstrainedClassifier("tpr", 0.1, estimator=network, **SAME)
    scores = model.fit(X, y, sensitive_features=group).decision_function(X)
    positive, first = torch.as_tensor(y == "yes"), torch.as_tensor(group == "a")
    counts = [(positive & side).sum().item() for side in (first, ~first)]
    share = positive.double().mean().item()
    limit = max(0.1 - math.sqrt(share * (1 - share) * sum(1 / n for n in counts)), 0.025)

    def build(module: nn.Module, optimizer: Any) -> Any:
        objective = fcco.constrained(module, optimizer, 2, tolerance=limit)

        def loss(module: nn.Module, x: Any, batch: Any) -> Any:
            def function() -> Any:
                logits = module(x[batch]).view(-1)
                one, two = (positive[batch] & side[batch] for side in (first, ~first))
                chosen, p = 1.0 * (logits > 0), 4 * logits.sigmoid()
                cells = torch.stack([1.0 * one, 1.0 * two], dim=1)
                hard, soft = (torch.sub(*(v @ cells / cells.sum(0))) for v in (chosen, p))
                values = fcco.Measured(torch.stack([hard, -hard]), torch.stack([soft, -soft]))
                bce = nn.functional.binary_cross_entropy_with_logits
                return bce(logits, positive[batch].float(), reduction="none"), values

            return objective(function)

        return loss

    torch.manual_seed(seed_after_split(400))
    module = network(3, 1)
    steps = [rows for _ in range(5) for rows in torch.randperm(400).tensor_split(8)]
    expected = plain_loop(X, module, steps, build, 40)
    assert abs(scores - expected).max() == 0.0
    assert max(model.objective_.multipliers().values()) > 0.01, "the constraint has to act"


def test_a_worst_group_fit_is_a_plain_loop():
    X, y, group = table(2, 400)
    model = WorstGroupClassifier(0.5, estimator=network, **SAME)
    scores = model.fit(X, y, sensitive_features=group).decision_function(X)
    positive, ids = torch.as_tensor(y == "yes").float(), torch.as_tensor((group == "b") * 1)
    seed = seed_after_split(400)

    def build(module: nn.Module, optimizer: Any) -> Any:
        objective = fcco.CVaRGroupDRO(module, optimizer, 2, 0.5)
        bce = nn.functional.binary_cross_entropy_with_logits

        def loss(module: nn.Module, x: Any, batch: Any) -> Any:
            return objective(
                lambda: bce(module(x[batch]).view(-1), positive[batch], reduction="none"),
                ids[batch],
            )

        return loss

    torch.manual_seed(seed)
    module = network(3, 1)
    sampler = fcco.GroupBatchSampler(ids, batch_size=50, seed=seed)
    expected = plain_loop(X, module, (b for _ in range(5) for b in sampler), build, 40)
    assert abs(scores - expected).max() == 0.0


# --- choice of the epoch, randomness, the network ----------------------------------------------


def test_the_best_epoch_is_returned():
    X, y, group = table(3, 600)
    model = WorstGroupClassifier(1.0, random_state=0, max_epochs=12, learning_rate=0.1)
    model.fit(X, y, sensitive_features=group)
    found = [row["validation worst-group loss"] for row in model.history_]
    assert model.report_.validation is not None
    assert model.report_.validation.value == pytest.approx(min(found)) and len(found) == 12
    assert int(np.argmin(found)) < 8, "the test needs an epoch that is overtaken"


def test_random_state_decides_and_the_global_streams_are_left_alone():
    X, y, group = table(4, 300)
    make = ConstrainedClassifier("fpr", random_state=1, max_epochs=2)
    torch.manual_seed(0), np.random.seed(0)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    first = make.fit(X, y, sensitive_features=group).decision_function(X)
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all()  # type: ignore[index]
    torch.manual_seed(7)
    again = clone(make).fit(X, y, sensitive_features=group).decision_function(X)
    assert (first == again).all()
    other = make.set_params(random_state=2).fit(X, y, sensitive_features=group)
    assert (first != other.decision_function(X)).any()


def test_a_network_of_the_user_is_copied_and_its_statistics_are_those_of_the_average():
    X, y, group = table(5, 400)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
    before = [p.clone() for p in module.state_dict().values()]
    model = ConstrainedClassifier("tpr", estimator=module, max_epochs=3, random_state=0)
    model.fit(X, y, sensitive_features=group)
    assert all(torch.equal(a, b) for a, b in zip(before, module.state_dict().values(), strict=True))
    inner: Any = model.module_
    with torch.no_grad():
        hidden = inner[0](model.encoding_(X))
    np.testing.assert_allclose(inner[1].running_mean, hidden.mean(0), atol=0.1)
    assert abs(inner[1].running_mean - before[2]).max() > 0.1
    X, y, group = table(5, 1025)  # a multiple of the rows that go through it at once, and one
    model.set_params(validation_fraction=0.0, max_epochs=1).fit(X, y, sensitive_features=group)
    wrong = ConstrainedClassifier("tpr", estimator=lambda d, k: nn.Linear(d, 2))
    with pytest.raises(ValueError, match=r"one logit.*\(2, 2\)"):
        wrong.fit(X, y, sensitive_features=group)
    wrong.set_params(estimator=nn.Sequential(nn.Linear(3, 1), nn.Sigmoid()), max_epochs=1)
    with pytest.warns(fcco.UsageWarning, match="logits.*Sigmoid"):
        wrong.fit(X, y, sensitive_features=group)
    wrong.set_params(estimator=nn.Linear(3, 1).double())
    assert wrong.fit(X, y, sensitive_features=group).predict_proba(X).dtype == np.float32


# --- the report --------------------------------------------------------------------------------


def test_the_report_counts_right():
    X, y, group = table(6, 500)
    model = ConstrainedClassifier(validation_fraction=0.0, max_epochs=2, random_state=0)
    model.fit(X, y, sensitive_features=group)
    chosen, truth, members = model.predict(X) == "yes", y == "yes", membership(group)
    found, report = rates(chosen, truth, members), model.report_
    assert report.validation is None
    assert report.training.accuracy == pytest.approx((chosen == truth).mean())
    assert report.training.value == pytest.approx(gap("equalized_odds", chosen, truth, members))
    for k, each in enumerate(report.training.groups):
        assert each.samples == members[:, k].sum() and each.name == "ab"[k]
        assert each.selection_rate == pytest.approx(found["demographic_parity"][k])
        assert (each.tpr, each.fpr) == pytest.approx((found["tpr"][k], found["fpr"][k]))
    text = str(report)
    assert f"{report.training.value:.4f}" in text and f"{report.training.groups[1].tpr:.3f}" in text


def test_a_rate_without_samples_is_named():
    X, y, group = table(6, 200)
    group = np.where((y == "no") & (np.arange(200) < 50), "c", group)  # c has no positives
    with pytest.warns(fcco.UsageWarning, match="not constrained.*: tpr c"):
        model = ConstrainedClassifier("equalized_odds", max_epochs=1, random_state=0)
        model.fit(X, y, sensitive_features=group)
    names = model.objective_.multipliers()
    assert len(names) == 2 + 6 and not any("c" in name for name in names if "tpr" in name)


@pytest.mark.filterwarnings("error")
def test_a_fit_that_ends_far_above_the_tolerance_says_so():
    X, y, group = table(6, 500)
    model = ConstrainedClassifier("demographic_parity", random_state=0, max_epochs=2)
    with pytest.warns(ConvergenceWarning, match="2 epochs with a gap of 0"):
        model.fit(X, y, sensitive_features=group)
    assert (
        gap("demographic_parity", model.predict(X) == "yes", y == "yes", membership(group)) > 0.04
    )
    model.set_params(tolerance=0.3).fit(X, y, sensitive_features=group)


# --- scikit-learn ------------------------------------------------------------------------------

FAST: dict[str, Any] = {"max_epochs": 1}
ESTIMATORS = [ConstrainedClassifier(**FAST), AveragePrecisionClassifier(**FAST)]
OTHERS = [ConstrainedClassifier("group_loss", **FAST), WorstGroupClassifier(**FAST)]
ESTIMATORS += [pytest.param(each, marks=pytest.mark.slow) for each in OTHERS]


@ALONE
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda each: type(each).__name__)
def test_scikit_learn_checks(estimator):
    found = check_estimator(estimator, on_skip=None)
    skipped = {each["check_name"] for each in found if each["status"] != "passed"}
    assert skipped <= {"check_array_api_input"} and len(found) > 50


def test_pipeline_grid_search_and_cross_validation_with_routing():
    X, y, group = table(9, 400)

    def parity(y: Array, chosen: Array, sensitive_features: Array) -> float:
        return -abs(np.subtract(*[(chosen[sensitive_features == g] == "yes").mean() for g in "ab"]))

    with sklearn.config_context(enable_metadata_routing=True):
        model = ConstrainedClassifier("demographic_parity", random_state=0, max_epochs=3)
        model.set_fit_request(sensitive_features=True)
        scorer = make_scorer(parity).set_score_request(sensitive_features=True)
        pipeline = make_pipeline(StandardScaler(), model)
        grid = {"constrainedclassifier__tolerance": [0.02, 1.0]}
        search = GridSearchCV(pipeline, grid, scoring=scorer, cv=2)
        search.fit(X, y, sensitive_features=group)
        scores = cross_val_score(
            pipeline, X, y, cv=2, scoring=scorer, params={"sensitive_features": group}
        )
    inner = search.best_estimator_[-1]
    assert inner.report_.training.groups[0].name == "a" and inner.objective_ is not None
    assert len(scores) == 2 and (scores <= 0).all()


def test_columns_of_the_table_as_groups_and_a_pickle():
    pandas = pytest.importorskip("pandas")
    X, y, group = table(10, 300)
    frame = pandas.DataFrame(X, columns=["one", "two", "three"])
    frame.insert(1, "group", group)
    settings: dict[str, Any] = {"random_state": 0, "max_epochs": 2}
    named = ConstrainedClassifier("tpr", sensitive_features="group", **settings).fit(frame, y)
    given = ConstrainedClassifier("tpr", **settings).fit(X, y, sensitive_features=group)
    scores = given.decision_function(X)
    assert named.n_features_in_ == 4 and (named.decision_function(frame) == scores).all()
    numbered = np.column_stack([X, group == "b"])
    placed = ConstrainedClassifier("tpr", sensitive_features=[3], **settings).fit(numbered, y)
    assert (placed.decision_function(numbered) == scores).all()
    placed.set_params(sensitive_features=np.int64(3)).fit(numbered, y)
    assert (placed.decision_function(numbered) == scores).all()
    with pytest.raises(TypeError, match=r"[Ss]parse"):
        placed.fit(sparse.csr_matrix(numbered), y)
    both = pandas.DataFrame({"b": group == "b", "high": X[:, 2] > 1})  # groups that overlap
    named_both = ConstrainedClassifier("tpr", sensitive_features=["b", "high"], **settings)
    named_both.fit(frame[["one", "two", "three"]].join(both), y)
    given.fit(X, y, sensitive_features=both)
    assert str(named_both.report_) == str(given.report_) and "high" in str(given.report_)
    again = pickle.loads(pickle.dumps(named))
    assert (again.decision_function(frame) == scores).all()
    assert str(again.report_) == str(named.report_)

    class Tensors(pickle.Pickler):  # all that is on a GPU after training there
        def persistent_id(self, obj: Any) -> Any:
            assert not isinstance(obj, torch.Tensor)

    named.module_, named.objective_ = None, None
    Tensors(io.BytesIO()).dump(named)
    with pytest.raises(ValueError, match="already"):
        named.fit(frame, y, sensitive_features=group)
    with pytest.raises(ValueError, match="'sex'"):
        clone(named).set_params(sensitive_features=["sex"]).fit(frame, y)


@pytest.mark.parametrize("far", [3.3e38, -1e39, 1e200])
def test_features_beyond_float32_have_the_probabilities_of_far_ones(far):
    X, y, _ = table(11, 100)
    model = AveragePrecisionClassifier(max_epochs=1).fit(X, y)
    rows = np.repeat(X[:1], 2, axis=0)
    rows[:, 0] = far, math.copysign(1e12, far)
    found = model.predict_proba(rows)
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow")
def test_what_cannot_be_meant_is_refused():
    X, y, group = table(11, 100)
    cases: list[tuple[Any, str, dict[str, Any]]] = [
        (ConstrainedClassifier("parity"), "demographic_parity", {"sensitive_features": group}),
        (ConstrainedClassifier(tolerance=-0.1), r"\[0.0, inf\)", {"sensitive_features": group}),
        (ConstrainedClassifier(tolerance=math.inf), "inf", {"sensitive_features": group}),
        (ConstrainedClassifier(max_epochs=0), "at least 1", {"sensitive_features": group}),
        (ConstrainedClassifier(), r"samples: \[100, 50\]", {"sensitive_features": group[:50]}),
        (ConstrainedClassifier(), r"samples: \[100, 50\]", {"sensitive_features": [["a"]] * 50}),
        (WorstGroupClassifier(0.0), r"\(0.0, 1.0\]", {"sensitive_features": group}),
    ]
    for model, message, given in cases:
        with pytest.raises(ValueError, match=message):
            model.fit(X, y, **given)
    with pytest.raises(ValueError, match="binary"):
        ConstrainedClassifier().fit(X, np.arange(100) % 3, sensitive_features=group)
    many = np.random.default_rng(0).random(400)
    with pytest.raises(ValueError, match="400 groups, more than 300"):
        ConstrainedClassifier().fit(np.ones((400, 1)), many > 0.5, sensitive_features=many)
    position: Any = ConstrainedClassifier().fit
    with pytest.raises(TypeError, match="positional"):  # where others have sample_weight
        position(X, y, np.ones(100))
    with pytest.raises(ValueError, match="must name groups"):
        WorstGroupClassifier().fit(X, y, sensitive_features=[[]] * 100)
    for model in (AveragePrecisionClassifier(), ConstrainedClassifier(sensitive_features=[0])):
        model.set_params(learning_rate=1e30, max_epochs=6, estimator=network)
        with pytest.raises(ValueError, match="diverged"):
            model.fit(np.column_stack([group == "b", X]), y)
    for missing in (None, ["all"] * 100):
        with pytest.warns(fcco.UsageWarning, match="nothing to compare"):
            ConstrainedClassifier(max_epochs=1).fit(X, y, sensitive_features=missing)
