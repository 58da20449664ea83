"""Reports: each finding in a situation made to have it, and in one without."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from problems import Point, take_step
from torch import Tensor

import fcco
from fcco.outer import Absolute, SquaredHinge
from fcco.report import ConstraintReport, GroupReport


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def groups(losses: Tensor, ratio: float, **options: Any) -> fcco.CVaRGroupDRO:
    """An objective that has tracked these losses, in one step with all groups."""
    model = Point([0.0])
    optimizer = sgd(model)
    settings = {"gamma": 1.0, "correction": 0.0, **options}
    dro = fcco.CVaRGroupDRO(model, optimizer, len(losses), ratio, **settings)
    take_step(dro, lambda: losses + 0 * model.w)
    return dro


def constraints(values: Tensor, number: Any = None, index: Any = None, **options: Any) -> Any:
    """A constrained objective that has tracked these values in one step."""
    model = Point([0.0])
    optimizer = sgd(model)
    number = len(values) if number is None else number
    method = options.pop("method", "sonex")
    settings = {"gamma": 1.0, **({} if method == "multipliers" else {"correction": 0.0}), **options}
    objective = fcco.constrained(model, optimizer, number, method, **settings)
    take_step(objective, lambda: (0 * model.w.sum(), values + 0 * model.w), index)
    return objective


def kinds(report: Any) -> list[str]:
    return [finding.kind for finding in report.findings]


def finding(report: Any, kind: str) -> str:
    (found,) = [each for each in report.findings if each.kind == kind]
    return str(found)


@pytest.fixture
def known_error(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the error of every estimate."""

    def set_error(error: float) -> None:
        monkeypatch.setattr(
            fcco.tracker.InnerTracker, "error", lambda self: torch.full_like(self.rows, error)
        )

    return set_error


# The table.


def test_the_rows_of_groups(known_error: Any) -> None:
    known_error(0.02)
    losses = torch.tensor([0.1, 0.9, 0.2, 0.4])
    dro = groups(losses, 0.5, smoothing=0.0)
    report = dro.report()
    assert isinstance(report, GroupReport)
    assert [row.value for row in report.rows] == pytest.approx(losses.tolist())
    assert [row.weight for row in report.rows] == pytest.approx(dro.group_weights().tolist())
    assert [row.capped for row in report.rows] == [False, True, False, True]
    assert (report.worst, report.seen, report.at_cap) == (1, 4, 2)
    assert report.cvar == pytest.approx(0.65) and report.mean == pytest.approx(0.4)
    assert report.rows[0].met is None
    lines = str(report).splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["group", "1", "3", "2", "0"]
    assert "0.9 ± 0.02" in lines[1]


def test_the_rows_of_constraints(known_error: Any) -> None:
    known_error(0.04)
    values = torch.tensor([0.5, 0.05, 0.3])
    objective = constraints(
        values, ["a", "b", "c"], penalty=6.0, smoothing=0.05, tolerance=[0.1, 0.2, 0.29]
    )
    report = objective.report()
    assert isinstance(report, ConstraintReport)
    assert [row.name for row in report.rows] == ["a", "b", "c"]
    assert [row.limit for row in report.rows] == pytest.approx([0.1, 0.2, 0.29])
    assert [row.excess for row in report.rows] == pytest.approx([0.4, -0.15, 0.01], abs=1e-6)
    assert [row.met for row in report.rows] == [False, True, False]
    assert [row.capped for row in report.rows] == [True, False, False]
    assert [row.weight for row in report.rows] == pytest.approx([2.0, 0.0, 0.2 / 3], abs=1e-6)
    lines = str(report).splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["constraint", "a", "c", "b"]
    assert lines[2].endswith("no?") and lines[3].endswith("yes")  # 0.01 is within the error
    assert str(objective.report(values)).splitlines()[2].endswith("no")  # known exactly


LIMITS: dict[str, Any] = {  # a limit, as it is shown, and the excess of the value 0.3
    "at most": (0.25, "0.25", 0.05),
    "at least": (fcco.AtLeast(0.4), "at least 0.4", 0.1),
    "at least, met": (fcco.AtLeast(0.1), "at least 0.1", -0.2),
    "above": ((0.1, 0.25), "0.1 to 0.25", 0.05),
    "below": ((0.4, 0.5), "0.4 to 0.5", 0.1),
    "between": ((0.2, 0.6), "0.2 to 0.6", -0.1),
    "equal": (fcco.Equal(0.0), "= 0", 0.3),
    "open below": ((None, 0.25), "0.25", 0.05),
    "open above": ((0.1, None), "at least 0.1", -0.2),
}


@pytest.mark.parametrize(
    "settings", [{"method": "multipliers"}, {"penalty": 6.0, "smoothing": 0.05}]
)
def test_limits_are_shown_as_they_are_written(settings: Any) -> None:
    limits = {name: limit for name, (limit, _, _) in LIMITS.items()}
    objective = constraints(torch.full((len(limits),), 0.3), limits, **settings)
    report = objective.report()
    lines = {row.name: line for row in report.rows for line in str(report).splitlines()
             if line.startswith(f"{row.name}  ")}  # fmt: skip
    for row, (_, shown, excess) in zip(report.rows, LIMITS.values(), strict=True):
        assert row.excess == pytest.approx(excess, abs=1e-6) and row.met is (excess < 0)
        assert f"  {shown}  " in lines[str(row.name)]
    assert report.violated == 6 and report.violation == pytest.approx(0.3)
    assert objective.violation() == pytest.approx({k: v[2] for k, v in LIMITS.items()}, abs=1e-6)


# The findings.


def test_never_seen() -> None:
    some = constraints(torch.zeros(2), 3, [0, 2], penalty=1.0, smoothing=0.1, tolerance=1.0)
    report = some.report()
    assert "of 1." in finding(report, "never-seen")
    assert report.seen == 2 and math.isnan(report.rows[1].value) and report.rows[1].met is None
    everything = constraints(torch.zeros(3), penalty=1.0, smoothing=0.1, tolerance=1.0)
    assert kinds(everything.report()) == []
    model = Point([0.0])
    with pytest.raises(ValueError, match="needs values"):
        fcco.CVaRGroupDRO(model, sgd(model), 3, 0.5).report()


def test_multiplier_at_its_cap() -> None:
    settings = {"penalty": 2.0, "smoothing": fcco.Width(0.1), "tolerance": 0.5}
    beyond = constraints(torch.tensor([0.7, 0.4]), ["a", "b"], **settings).report()
    text = finding(beyond, "multiplier-at-cap")
    assert "'a'" in text and "'b'" not in text and "penalty" in text
    inside = constraints(torch.tensor([0.55, 0.4]), ["a", "b"], **settings).report()
    assert inside.violated == 1 and kinds(inside) == []
    # At the cap but met: the margin asks for more than the limit.
    strict = constraints(torch.tensor([0.45, 0.1]), **settings, margin=0.2).report()
    assert strict.rows[0].capped and kinds(strict) == []


def test_multiplier_at_its_cap_without_smoothing(known_error: Any) -> None:
    """Each multiplier of the hard hinge is 0 or the cap: it takes an error."""
    objective = constraints(torch.tensor([0.7, 0.4]), method="hinge", penalty=2.0, tolerance=0.5)
    assert kinds(objective.report()) == []
    assert kinds(objective.report(torch.tensor([0.50001, 0.4]))) == []
    known_error(0.05)
    assert "multiplier-at-cap" in kinds(objective.report())
    known_error(0.2)
    assert "multiplier-at-cap" not in kinds(objective.report())


@pytest.mark.parametrize("ratio", [0.3, 0.05])
def test_no_group_at_the_cap(ratio: float) -> None:
    losses = torch.rand(40, generator=torch.Generator().manual_seed(0))
    wide = groups(losses, ratio, smoothing=fcco.Width(2.0))
    text = finding(wide.report(), "no-group-at-cap")
    assert f"ratio={ratio}" in text
    # The width it proposes is narrow enough, and close to the widest that is.
    proposed = float(text.split("fcco.Width(")[1].split(")")[0])
    narrow = groups(losses, ratio, smoothing=fcco.Width(proposed))
    assert kinds(narrow.report()) == [] and narrow.report().at_cap > 0
    for options in ({"smoothing": 0.0}, {"smoothing": fcco.Width(0.01)}):
        assert kinds(groups(losses, ratio, **options).report()) == []
    assert kinds(groups(losses, 1.0, smoothing=5.0).report()) == []


def test_zone_below_the_noise(known_error: Any) -> None:
    losses = torch.tensor([0.0, 1.0, 2.0, 3.0])
    dro = groups(losses, 0.5, smoothing=fcco.Width(0.1))
    objective = constraints(losses, penalty=3.0, smoothing=fcco.Width(0.1), tolerance=4.0)
    hard = groups(losses, 0.5, smoothing=0.0)
    for each in (dro, objective, hard):
        assert kinds(each.report()) == []  # the error is not known
    known_error(0.2)
    for each in (dro, objective, hard):
        assert "fcco.Width(0.4)" in finding(each.report(), "zone-below-noise")
    known_error(0.05)
    assert kinds(dro.report()) == kinds(objective.report()) == []
    smooth = constraints(losses, outer=SquaredHinge(3.0), smoothing=0.0, tolerance=4.0)
    known_error(0.2)
    assert kinds(smooth.report()) == []


@pytest.mark.parametrize("settings, moves, found", [
    ({"gamma": 0.1}, 1.0, True),
    ({"gamma": 0.1}, 0.0, False),  # old values of a model that stands still are as good as new
    ({"gamma": 1.0}, 1.0, False),
    ({"gamma": 0.1, "correction": 3.0}, 1.0, False),  # it makes up for gamma'/gamma of the steps
])  # fmt: skip
def test_estimates_behind(settings: Any, moves: float, found: bool) -> None:
    """A fourth of the groups in each batch, losses that rise by `moves` in each step."""
    model = Point([0.0])
    options: Any = {"smoothing": fcco.Width(10.0), "correction": 0.0, **settings}
    dro = fcco.CVaRGroupDRO(model, sgd(model), 8, 0.5, **options)
    draw = torch.Generator().manual_seed(0)

    def train(start: int, steps: int) -> None:
        for k in range(start, start + steps):
            noise = 0.1 * torch.randn(2, generator=draw)
            part = torch.tensor([k % 4, 4 + k % 4])
            take_step(dro, lambda noise=noise, k=k: moves * k + noise + 0 * model.w, part)

    train(0, 40)
    assert ("estimates-lag" in kinds(dro.report())) == found
    if found:  # behind by n / (gamma B1)
        assert "about 40 steps behind" in finding(dro.report(), "estimates-lag")
        train(40, 140)  # less than a quarter of the steps
        assert "estimates-lag" not in kinds(dro.report())


@pytest.mark.parametrize("levels, noise, fall, found", [
    ([0.693], 0.001, 0.0, True),
    ([0.65, 0.74], 0.001, 0.0, True),  # a constant output, and groups of one label each
    ([0.693], 0.1, 0.0, False),  # all groups are equally good
    ([0.693], 0.001, 0.02, False),  # the same, and learning
    ([0.5, 0.6, 0.7], 0.001, 0.0, False),
])  # fmt: skip
def test_collapse_to_a_constant(levels: Any, noise: float, fall: float, found: bool) -> None:
    model, draw = Point([0.0]), torch.Generator().manual_seed(0)
    dro = fcco.CVaRGroupDRO(model, sgd(model), 6, 0.5)
    places = torch.tensor(levels).repeat(6 // len(levels))
    for step in range(60):
        losses = places * (1 - fall) ** step + noise * torch.randn(6, generator=draw)
        take_step(dro, lambda losses=losses: losses + 0 * model.w)
        assert step > 10 or kinds(dro.report()) == []
    report = dro.report()
    assert kinds(report) == ["collapse"] * found
    if found:
        text = finding(report, "collapse")
        said = [float(each) for each in re.findall(r"0\.\d+", text.partition(",")[0])]
        assert {*said} and all(min(abs(x - y) for y in levels) < 0.005 for x in said)
        assert len(levels) == 1 or len(said) == 2
        assert "warms up" in text


def test_collapse_within_groups() -> None:
    """A constant output: within each group of one label all samples have the same loss."""
    torch.manual_seed(0)
    group = torch.arange(4).repeat_interleave(20)
    label = (group % 2).float()
    x = torch.randn(80, 3) + label.unsqueeze(1)
    model = torch.nn.Linear(3, 1)
    optimizer = sgd(model)
    dro = fcco.CVaRGroupDRO(
        model, optimizer, 4, 0.5, smoothing=fcco.Width(0.01), gamma=1.0, correction=0.0
    )

    def losses() -> Tensor:
        output = model(x).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(output, label, reduction="none")

    take_step(dro, losses, group)
    assert "collapse" not in kinds(dro.report(function=losses, index=group))
    with torch.no_grad():
        model.weight.zero_()
        model.bias.fill_(0.3)
    take_step(dro, losses, group)
    assert "collapse" in kinds(dro.report(function=losses, index=group))
    assert "collapse" not in kinds(dro.report())


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([[1.0, 0.0], [-1.0, 0.1]], "'a', 'b'"),  # almost opposite
        ([[1.0, 0.0], [-0.7, 0.7]], "none"),  # opposed in part: (0.4, 1) is against neither
        ([[1.0, 0.0], [0.0, 1.0]], None),
        ([[1.0, 0.0], [-0.5, 0.87], [-0.5, -0.87]], "'a', 'b', 'c'"),  # no two of them are
        ([[1.0, 0.0], [1.0, 0.2], [-1.0, 0.1]], None),  # the third is met, see below
    ],
)
def test_constraints_that_cannot_all_hold(rows: list[list[float]], found: str | None) -> None:
    """g_i = 1 + <a_i, w>, all of them violated at w = 0 (but for a limit of 2)."""
    directions, model = torch.tensor(rows).double(), Point([0.0, 0.0])
    unused = torch.nn.Parameter(torch.zeros(3))
    model.register_parameter("unused", unused)
    optimizer = sgd(model)
    limits = [0.5, 0.5, 2.0 if found is None else 0.5][: len(rows)]
    found = None if found == "none" else found
    objective = fcco.constrained(
        model, optimizer, ["a", "b", "c"][: len(rows)], "sonex", penalty=9.0, smoothing=1.0,
        tolerance=limits, gamma=1.0, correction=0.0,
    )  # fmt: skip

    def inner() -> Any:
        return model.w.square().sum(), 1 + directions @ model.w

    take_step(objective, inner, torch.arange(len(rows)))
    assert "constraints-oppose" not in kinds(objective.report())
    report = objective.report(function=inner, index=torch.arange(len(rows)))
    if found is None:
        assert "constraints-oppose" not in kinds(report)
    else:
        assert found in finding(report, "constraints-oppose")
    assert model.w.grad is None


def test_limits_that_are_met_need_not_be_loosened(known_error: Any) -> None:
    """Opposite gradients; violated by less than two errors, or by the tracked values alone."""
    model = Point([0.0])
    optimizer = sgd(model)
    objective = fcco.constrained(
        model, optimizer, ["a", "b"], "sonex", penalty=9.0, smoothing=1.0, gamma=1.0,
        correction=0.0, tolerance=0.5,
    )  # fmt: skip

    def inner(value: float) -> Any:
        return lambda: (model.w.sum(), value + torch.stack([model.w[0], -model.w[0]]))

    take_step(objective, inner(0.6))
    assert "constraints-oppose" in kinds(objective.report(function=inner(0.6)))
    assert "constraints-oppose" not in kinds(objective.report(function=inner(0.4)))
    known_error(0.1)
    assert "constraints-oppose" not in kinds(objective.report(function=inner(0.6)))


def test_the_terms_of_a_coupled_objective_are_not_mixed_up() -> None:
    model = Point([0.5, 0.5])
    optimizer = sgd(model)
    objective = fcco.constrained(
        model, optimizer, ["low", "high"], "sonex", penalty=4.0, smoothing=1.0, gamma=1.0,
        objective=fcco.terms.CoupledTerm(Absolute(), fcco.tracker.ema_tracker(3, gamma=0.5)),
    )  # fmt: skip

    def inner() -> Any:
        opposed = model.w[0]
        named = {"low": 1 + opposed, "high": 1 - opposed}
        return {"objective": model.w.sum().expand(3), "constraints": named}

    take_step(objective, inner, {"objective": torch.arange(3)})
    report = objective.report(function=inner, index={"objective": torch.arange(3)})
    assert "'low', 'high'" in finding(report, "constraints-oppose")
    with pytest.raises(ValueError, match="must return values of 'constraints'"):
        objective.report(
            function=lambda: {"objective": model.w.sum().expand(3)},
            index={"objective": torch.arange(3)},
        )


def trained(losses: Tensor, names: Any = None, steps: int = 40) -> fcco.CVaRGroupDRO:
    """An objective that has seen these losses, with noise in proportion, several times."""
    model, draw = Point([0.0]), torch.Generator().manual_seed(0)
    dro = fcco.CVaRGroupDRO(model, sgd(model), len(losses), 0.5, names=names)
    for _ in range(steps):
        seen = losses * (1 + 0.3 * torch.randn(len(losses), generator=draw))
        take_step(dro, lambda seen=seen: seen + 0 * model.w)
    return dro


def test_groups_that_are_learnt_by_heart() -> None:
    dro = trained(torch.tensor([0.02, 1.0, 0.5, 0.02]), ["a", "b", "c", "d"])
    assert kinds(dro.report()) == kinds(dro.report(held_out=dro.group_losses())) == []
    apart = torch.tensor([0.9, 1.2, 0.6, 0.025])
    text = finding(dro.report(held_out=apart), "overfitted")
    assert "'a'" in text and "0.9" in text and not any(f"'{k}'" in text for k in "bcd")
    # By name, and what `group_mean` returns: some groups, and from how many samples each.
    assert finding(dro.report(held_out={"a": 0.9, "d": torch.tensor(0.025)}), "overfitted") == text
    means = fcco.group_mean(apart[[0, 0, 3]], torch.tensor([0, 0, 3]))
    assert finding(dro.report(held_out=means), "overfitted") == text
    # Twice as large: by chance of few samples, not of many.
    for samples, found in ((5, False), (1000, True)):
        means = fcco.group_mean(torch.full((samples,), 2.0), torch.full((samples,), 1))
        assert ("overfitted" in kinds(dro.report(held_out=means))) == found
    # A group that came three times is not overfitted yet.
    early = trained(torch.tensor([0.02, 1.0, 0.5, 0.02]), steps=3)
    assert kinds(early.report(held_out=apart)) == []


@pytest.mark.parametrize("wrong", [torch.ones(3), {"e": 1.0}, {4: 1.0}, torch.ones(4, 1)])
def test_held_out_losses_of_other_groups_are_refused(wrong: Any) -> None:
    dro = groups(torch.ones(4), 0.5)
    with pytest.raises(ValueError, match=r"report\(held_out=...\)` needs one loss.* 4 groups"):
        dro.report(held_out=wrong)


@pytest.mark.parametrize("smoothing", [0.0, fcco.Width(0.5), fcco.Width(100.0)])
def test_the_share_of_a_batch_that_carries_weight(smoothing: Any) -> None:
    """The variance of a gradient from one sample of every group, against that of their mean."""
    dro = groups(torch.linspace(0, 1, 40), 0.1, smoothing=smoothing)
    report, weights = dro.report(), dro.group_weights().double()
    noise = torch.randn(20000, 40, generator=torch.Generator().manual_seed(0)).double()
    measured = noise.mean(1).var() / (noise @ weights).var()
    assert report.share == pytest.approx(measured.item(), rel=0.05)
    if smoothing == 0.0:
        assert report.share == pytest.approx(0.1) and "10.0 times as large" in str(report)


def test_limits_that_are_off_by_chance(known_error: Any) -> None:
    """Three errors are much for one of two limits, and usual among a thousand."""
    known_error(0.1)
    for number, found in ((2, True), (1000, False)):
        objective = fcco.constrained(model := Point([0.0]), sgd(model), number)
        values = torch.full((number,), -0.1)
        values[0] = 0.3
        noise = torch.randn(150, number + 1, generator=torch.Generator().manual_seed(0)) / 100
        for e in noise:

            def function(e: Tensor = e, model: Point = model, values: Tensor = values) -> Any:
                return e[0] + 0 * model.w.sum(), values + e[1:] + 0 * model.w

            take_step(objective, function)
        assert kinds(objective.report()) == ["multiplier-rising"] * found


def test_limits_that_cannot_all_hold_are_named_without_a_function() -> None:
    """w <= -0.3 and -w <= -0.3, and another limit that is met."""
    draw, model = torch.Generator().manual_seed(0), Point([0.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    objective = fcco.constrained(model, optimizer, {"low": -0.3, "high": -0.3, "met": 1.0})
    for _ in range(300):
        noise = 0.1 * torch.randn(4, generator=draw).double()

        def function(noise: Tensor = noise) -> Any:
            values = torch.cat([model.w, -model.w, model.w]) + noise[1:]
            named = dict(zip(("low", "high", "met"), values, strict=True))
            return (model.w + noise[0]).square().sum() / 2, named

        take_step(objective, function)
    text = finding(objective.report(), "multiplier-rising")
    assert "'low', 'high'" in text or "'high', 'low'" in text
    assert "'met'" not in text and "they cannot all hold" in text
