"""Certificates: bounds beside scipy, joint coverage by simulation, verdicts, objectives."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import fcco
from fcco.certificate import certify
from studies import certificate as study

SPENT = 0.7  # of the probability, for values that are no rates


def rate(hits: int, size: int) -> np.ndarray:
    return np.repeat([1.0, 0.0], [hits, size - hits])


def row(certificate, name) -> Any:
    return next(each for each in certificate.rows if each.name == name)


# --- Bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [20, 137, 5000, 300_000])
@pytest.mark.parametrize("share", [0.0, 0.013, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("level", [0.8, 0.95, 0.9999])
def test_bounds_of_rates_are_those_of_clopper_and_pearson(size, share, level):
    hits = round(share * size)
    low, high = certify({"a": rate(hits, size)}, (-1, 2), level=level).rows[0].bound
    each = (1 - level) / 2  # both sides
    exact = stats.beta.ppf(1 - each, hits + 1, size - hits) if hits < size else 1.0
    assert high == pytest.approx(exact, abs=1e-9)
    exact = stats.beta.ppf(each, hits, size - hits + 1) if hits else 0.0
    assert low == pytest.approx(exact, abs=1e-9)


def test_the_level_is_shared_by_the_sides_of_the_limits_that_are_tested():
    values = {"a": rate(3, 100), "b": rate(50, 90), "c": rate(5, 60), "few": rate(1, 19)}
    limits = {"a": 0.2, "b": (0.1, 0.9), "c": fcco.AtLeast(0.01), "few": 0.5}
    found = certify(values, limits)
    for name, hits, size in (("a", 3, 100), ("b", 50, 90), ("c", 5, 60)):
        upper = stats.beta.ppf(1 - 0.05 / 4, hits + 1, size - hits)
        lower = stats.beta.ppf(0.05 / 4, hits, size - hits + 1)
        expected = {"a": upper, "b": (lower, upper), "c": lower}[name]
        assert row(found, name).bound == pytest.approx(expected, abs=1e-9)
    assert row(found, "few").bound is None and row(found, "few").verdict == "too few rows"
    alone = certify(values, limits, joint=False)
    assert row(alone, "a").bound == pytest.approx(stats.beta.ppf(0.95, 4, 97), abs=1e-9)
    assert not alone.joint and found.joint


def test_bounds_of_normal_values_are_nearly_those_of_student():
    random = np.random.default_rng(0)
    values = {k: random.normal(k, 1 + k, 400) for k in range(10)}
    for each in certify(values, 100.0).rows:
        own = values[each.name]
        factor = (each.bound - own.mean()) / own.std(ddof=1) * 20
        exact = stats.t.isf(SPENT * 0.05 / 10, 399)
        # Never below; above by the noise of 20,000 draws, of skewness and of the other deviations.
        assert exact * (1 - 1e-6) <= factor < 1.15 * exact


def test_the_factor_of_a_skewed_limit_is_the_quantile_of_its_own_bootstrap():
    random = np.random.default_rng(3)
    own = random.gamma(2, 1, 60)
    found = certify({"a": own}, 9.0, level=0.9).rows[0].bound
    draws = own[random.integers(60, size=(200_000, 60))]
    ratios = (own.mean() - draws.mean(1)) / draws.std(1, ddof=1)
    c = np.quantile(ratios, 1 - SPENT * 0.1)
    # The quantile of 10,000 draws varies by 1.3 %; samples of 60 rows are read at the length below.
    assert found - own.mean() == pytest.approx(c * own.std(ddof=1), rel=0.08)
    assert c * math.sqrt(60) > 1.1 * stats.t.isf(SPENT * 0.1, 59)  # Student would be too sure


def test_other_units_change_nothing_and_signs_turn_sides():
    random = np.random.default_rng(1)
    values = {k: random.exponential(size=40 + 30 * k) for k in range(6)}
    bound = {each.name: each.bound for each in certify(values, (-9, 9)).rows}
    moved = certify({k: 100 * own + 7 for k, own in values.items()}, (-999, 999))
    turned = certify({k: -own for k, own in values.items()}, (-9, 9))
    assert any(None not in pair for pair in bound.values())
    for name, pair in bound.items():
        for side in range(2):
            if pair[side] is None:
                continue
            assert row(moved, name).bound[side] == pytest.approx(100 * pair[side] + 7, rel=1e-6)
            assert row(turned, name).bound[1 - side] == pytest.approx(-pair[side], rel=1e-2)


def test_the_same_rows_give_the_same_bounds():
    values = {"a": np.random.default_rng(0).exponential(size=50)}
    first, again, other = (certify(values, 9.0, seed=seed).rows[0].bound for seed in (4, 4, 5))
    assert first == again != other


def missed(law, shape, releases):
    """Releases in which a bound of the certificate, or by normal quantiles, is exceeded."""
    held = study.study(law, shape, releases)["coverage"]
    return [round(releases * (1 - held[kind])) for kind in ("certificate", "normal")]


def test_bounds_hold_together_where_normal_ones_do_not():
    ours, naive = missed("exponential", (30, 20, 60), 40)
    # At 95 % more than this happens once in 10,000 times.
    most = stats.binom.ppf(1 - 1e-4, 40, 0.05)
    assert ours <= most < naive


@pytest.mark.slow
@pytest.mark.parametrize(
    "law", ["exponential", "mixed", "difference", "rate", "errors", "rare", "crossed"]
)
@pytest.mark.parametrize("shape", study.SHAPES)
def test_bounds_hold_together_in_500_releases(law, shape):
    assert missed(law, shape, 500)[0] <= stats.binom.ppf(1 - 1e-3, 500, 0.05)


# --- Verdicts -------------------------------------------------------------------------------------


def test_a_limit_passes_if_its_bound_keeps_it_and_fails_if_its_value_does_not():
    random = np.random.default_rng(0)
    values = {
        "good": random.normal(0.1, 1, 5000), "bad": random.normal(0.4, 1, 5000),
        "near": random.normal(0.27, 1, 900), "alike": np.full(500, 0.1), "none": [],
    }  # fmt: skip
    found = certify(values, 0.3)
    verdicts = {each.name: each.verdict for each in found.rows}
    few = "too few rows"
    assert verdicts == {"good": "pass", "bad": "fail", "near": few, "alike": few, "none": few}
    assert row(found, "near").value < 0.3 < row(found, "near").bound
    assert row(found, "alike").bound is None and row(found, "none").value is None
    assert not found.passed and certify({"good": values["good"]}, 0.3).passed
    text = str(found).splitlines()
    assert text[1].startswith("bad") and text[-1] == (
        "Not passed: 1 of 5 limits hold, together at 95 %"
    )
    parsed = json.loads(found.json())
    assert parsed["passed"] is False and parsed["rows"][3]["bound"] is None


def test_rare_large_losses_need_more_rows():
    """All 30 rows of a segment may lack them: a bound would be worth nothing."""
    random = np.random.default_rng(0)
    values = {
        k: np.where(random.random(30) < 0.05, 10.0, 0.1 * random.random(30)) for k in range(9)
    }
    assert {each.verdict for each in certify(values, 5.0).rows} == {"too few rows"}


def test_rows_without_a_difference_are_no_rates_where_others_are_large():
    """Most rows are alike; where none of 100 differs, one in 30 may, by as much as elsewhere."""
    other = np.where(np.arange(400) % 4 == 0, np.arange(400) / 50 - 4, 0.0)
    found = certify({"alike": np.zeros(100), "other": other}, 9.0)
    rate = stats.beta.ppf(1 - 0.05 / 2, 1, 100)
    assert row(found, "alike").bound == pytest.approx(np.abs(other).max() * rate, abs=1e-6)
    assert missed("rare", (30, 50, 400), 40)[0] <= stats.binom.ppf(1 - 1e-4, 40, 0.05)


def test_kinds_of_limits():
    values = {name: rate(500, 1000) for name in ("low", "high", "between", "equal")}
    limits = {
        "low": fcco.AtLeast(0.4),
        "high": 0.6,
        "between": (0.4, 0.6),
        "equal": fcco.Equal(0.5),
    }
    found = certify(values, limits, tolerance=0.05)
    assert found.passed and row(found, "equal").limit == pytest.approx((0.45, 0.55))
    assert row(found, "low").limit.limit == pytest.approx(0.35)
    worse = {"low": fcco.AtLeast(0.6), "high": 0.4, "between": (0.6, 0.7), "equal": fcco.Equal(0.4)}
    assert {each.verdict for each in certify(values, worse, tolerance=0.05).rows} == {"fail"}


def test_a_reference_makes_limits_of_differences():
    random = np.random.default_rng(0)
    before = random.exponential(size=300)
    after = before + 0.1 * random.normal(size=300)
    paired = certify({"a": after}, 0.05, reference={"a": before})
    assert paired.rows == certify({"a": after - before}, 0.05).rows and paired.passed
    apart = certify({"a": after}, 9.0).rows[0]
    assert paired.rows[0].bound - paired.rows[0].value < 0.2 * (apart.bound - apart.value)


def test_a_difference_may_be_negative_in_rows_to_come():
    """Those of 0/1 errors: 0 and 1 in the sample, and no -1."""
    before, after = rate(0, 100), rate(10, 100)
    low, high = certify({"a": after}, (-1, 1), reference={"a": before}).rows[0].bound
    exact = stats.beta.ppf([1 - 0.025] * 2, [1, 11], [100, 90])
    assert (-low, high) == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": {"a": torch.tensor(0.5)}}, "a finite value for each row, not a mean"),
        ({"values": {"a": [0.1, math.nan]}}, "NaN"),
        ({"values": {}}, "same names"),
        ({"limits": {"b": 0.5}}, "same names"),
        ({"limits": fcco.Equal(0.5)}, "needs a `tolerance`"),
        ({"reference": {"a": [0.1]}}, "has 1 rows of `a`"),
        ({"level": 1.0}, "level"),
        ({"min_rows": 1}, "min_rows"),
    ],
)
def test_wrong_use(change, message):
    given = {"values": {"a": np.ones(30)}, "limits": 0.5} | change
    with pytest.raises((ValueError, TypeError), match=message):
        certify(given.pop("values"), given.pop("limits"), **given)


# --- The objective's door -------------------------------------------------------------------------


def made(limits):
    torch.manual_seed(0)
    layers = (
        torch.nn.Linear(2, 4),
        torch.nn.BatchNorm1d(4),
        torch.nn.Dropout(),
        torch.nn.Linear(4, 1),
    )
    model = torch.nn.Sequential(*layers).double()
    return model, fcco.constrained(model, torch.optim.Adam(model.parameters()), limits)


def test_a_certificate_changes_nothing_and_runs_the_model_as_it_will_be_used():
    model, objective = made({"a": 0.5, "b": (0.2, 0.9)})
    model[2].eval()  # a mode of the user's own
    x = torch.randn(300, 2, dtype=torch.float64)
    objective(lambda: (model(x).mean(), model(x)[:2].squeeze(1)), [0, 1]).backward()
    before = copy.deepcopy([model.state_dict(), objective.state_dict()])
    seen = []

    def function():
        out = model(x).squeeze(1)
        seen.append((torch.is_grad_enabled(), out.requires_grad, model.training, model[1].training))
        return out.mean(), {"a": (out > 0).double(), "b": fcco.Measured(out.sigmoid(), out)}

    found = objective.certificate(function)
    assert seen == [(False, False, False, False)]
    assert [module.training for module in model.modules()] == [True, True, True, False, True]
    for old, new in zip(before, [model.state_dict(), objective.state_dict()], strict=True):
        assert all(torch.equal(new[name], value) for name, value in old.items())
    out = model.eval()(x).squeeze(1).detach()
    expected = certify({"a": (out > 0).double(), "b": out.sigmoid()}, {"a": 0.5, "b": (0.2, 0.9)})
    assert found == expected
    with pytest.raises(RuntimeError, match="broken"):
        model.train()
        objective.certificate(lambda: (_ for _ in ()).throw(RuntimeError("broken")))
    assert all(module.training for module in model.modules())


def test_rows_are_given_by_name_by_index_by_membership_or_as_columns():
    _, objective = made({"a": 0.5, "b": fcco.AtLeast(0.2), "c": 0.7})
    values = torch.rand(90, dtype=torch.float64)
    ids = torch.arange(90) % 3
    named = objective.certificate(lambda: {n: values[ids == k] for k, n in enumerate("abc")})
    matrix = torch.nn.functional.one_hot(ids).bool()
    for index in (ids, ids.tolist(), matrix, [[int(k)] for k in ids]):
        assert objective.certificate(lambda: values, index) == named
    columns = objective.certificate(lambda: values[:, None].expand(-1, 3))
    assert {each.rows for each in columns.rows} == {90}
    overlapping = objective.certificate(lambda: values, torch.ones(90, 3, dtype=torch.bool))
    assert overlapping == columns
    part = objective.certificate(lambda: {"b": values})
    assert [each.verdict for each in part.rows] == ["too few rows", "pass", "too few rows"]


def test_groups_have_the_limit_that_is_given_or_those_of_a_reference():
    model, _ = made({"a": 0.0})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dro = fcco.CVaRGroupDRO(model, optimizer, names=["old", "young"], ratio=0.5)
    losses, ids = torch.rand(400), torch.arange(400) % 2
    assert dro.certificate(lambda: losses, ids, limit=0.6).passed
    found = dro.certificate(lambda: losses, ids, limit={"old": 0.6, "young": 0.4})
    assert [each.verdict for each in found.rows] == ["pass", "fail"]
    better = dro.certificate(lambda: losses - 0.1, ids, reference=losses + 0.1 * torch.rand(400))
    assert better.passed and {each.limit for each in better.rows} == {0.0}
    with pytest.raises(ValueError, match=r"no limits of its own: give `certificate\(limit"):
        dro.certificate(lambda: losses, ids)
    with pytest.raises(ValueError, match="a row for each of the 400 values: 399"):
        dro.certificate(lambda: losses, ids[1:], limit=0.6)
    with pytest.raises(IndexError, match="Ids start at 0"):
        dro.certificate(lambda: losses, ids + 1, limit=0.6)
    with pytest.raises(ValueError, match="there is no `index`"):
        dro.certificate(lambda: losses, limit=0.6)
    with pytest.raises(ValueError, match=r"given for \['odd'\], but the names are"):
        dro.certificate(lambda: {"odd": losses}, limit=0.6)
