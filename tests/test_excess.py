"""`reference=`: values are differences from the losses of another model on the same rows."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fcco
from fcco import ReferenceLosses
from fcco.rules import arrays

ROWS, GROUPS = 40, 4
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(ROWS, 3, generator=GENERATOR, dtype=torch.float64)
Y = torch.randn(ROWS, generator=GENERATOR, dtype=torch.float64)
GROUP = torch.arange(ROWS) % GROUPS
OLD = torch.rand(ROWS, generator=GENERATOR, dtype=torch.float64)
TOKENS = torch.randint(1, 30, (ROWS,), generator=GENERATOR)
NAMES = ("de", "en", "fr", "ja")


def make() -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(3, 1).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.02)


def losses(model: nn.Module, rows: Tensor) -> Tensor:
    return (model(X[rows])[:, 0] - Y[rows]) ** 2


def weights_of(model: nn.Linear) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def gradient_of(model: nn.Linear) -> np.ndarray:
    return torch.cat(
        [torch.zeros(0) if p.grad is None else p.grad.flatten() for p in model.parameters()]
    ).numpy()


def batches(number: int = 25) -> list[Tensor]:
    rng = np.random.default_rng(3)
    return [torch.from_numpy(rng.permutation(ROWS)[:12]) for _ in range(number)]


BUILDERS: dict[str, Any] = {
    "cvar": lambda m, o, **more: fcco.CVaRGroupDRO(m, o, GROUPS, 0.5, **more),
    "sonex": lambda m, o, **more: fcco.CVaRGroupDRO(
        m, o, GROUPS, 0.5, smoothing=0.1, gamma=0.1, correction="auto", read="old", **more
    ),
    "limits": lambda m, o, **more: fcco.constrained(m, o, dict.fromkeys(NAMES, 0.02), **more),
    "queues": lambda m, o, **more: fcco.constrained(
        m, o, GROUPS, "oss", proximal=0.1, inner_steps=5, **more
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BUILDERS)
def test_equals_differences_formed_by_hand(kind):
    """With a second pass at w_{t-1}, sampled blocks, a loss beside the limits."""
    paths = []
    for compared in (True, False):
        model, optimizer = make()
        more = {"reference": ReferenceLosses(OLD)} if compared else {}
        objective = BUILDERS[kind](model, optimizer, **more)
        path = []
        for rows in batches():
            rows = torch.cat([torch.arange(GROUPS), rows]) if kind == "queues" else rows

            def function(rows=rows, model=model, compared=compared):
                values = losses(model, rows) - (0 if compared else OLD[rows])
                return values if "limits" not in kind and kind != "queues" else (
                    losses(model, rows).mean(), values)  # fmt: skip

            given = {"rows": rows.tolist()} if compared else {}
            optimizer = objective.optimizer
            optimizer.zero_grad()
            objective(function, GROUP[rows], **given).backward()
            optimizer.step()
            path.append(weights_of(model))
        paths.append(np.array(path))
    np.testing.assert_allclose(paths[0], paths[1], rtol=0, atol=1e-14)


# Means over tokens.


ONE_EACH = torch.nn.functional.one_hot(GROUP, GROUPS).bool()


def by_tokens(values: Tensor, rows: Tensor, member: Tensor = ONE_EACH) -> Tensor:
    """Of each group, the mean over tokens; (samples, groups) says who belongs where."""
    weight = TOKENS[rows][:, None] * member[rows]
    return (weight * values[:, None]).sum(0) / weight.sum(0)


def check_losses(objective: Any, rows: Tensor, member: Tensor = ONE_EACH) -> None:
    """The tracked values at the first weights are differences from `OLD`, by tokens."""
    expected = by_tokens(losses(make()[0], rows).detach() - OLD[rows], rows, member)
    np.testing.assert_allclose(objective.group_losses(), expected, atol=1e-13)


def check_gradient(model: nn.Linear, rows: Tensor, member: Tensor = ONE_EACH) -> None:
    """That of the mean over all groups, at the first weights."""
    found, (model, _) = gradient_of(model), make()
    by_tokens(losses(model, rows), rows, member).mean().backward()
    np.testing.assert_allclose(found, gradient_of(model), atol=1e-13)


@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("calls", [1, 3])
def test_tokens_weigh_the_rows_also_over_several_calls(calls, overlapping, numpy, monkeypatch):
    monkeypatch.setattr(arrays, "USE_NUMPY", numpy)
    model, optimizer = make()
    member = ONE_EACH | (overlapping & (torch.arange(ROWS)[:, None] % 5 == 0))
    given = member if overlapping else GROUP
    settings: Any = {"smoothing": 1e6, "gamma": 1.0}  # all groups alike
    reference = ReferenceLosses(OLD, TOKENS)
    objective = fcco.CVaRGroupDRO(model, optimizer, GROUPS, 1.0, reference=reference, **settings)
    rows = batches(1)[0].repeat(2)  # a row may come twice
    for part in rows.chunk(calls):
        loss = objective(lambda p=part: losses(model, p), given[part], rows=part)
    if calls == 1:
        loss.backward()
        check_gradient(model, rows, member)
    objective.close()
    check_losses(objective, rows, member)


def test_a_warm_up_weighs_by_tokens_too():
    model, optimizer = make()
    reference = ReferenceLosses(OLD, TOKENS)
    objective = fcco.CVaRGroupDRO(model, optimizer, GROUPS, 0.5, reference=reference)
    parts = torch.arange(ROWS).split(9)
    objective.warm_up((lambda p=p: losses(model, p), GROUP[p], p) for p in parts)
    check_losses(objective, torch.arange(ROWS))


def test_an_independent_batch_has_rows_of_its_own():
    model, optimizer = make()
    reference = ReferenceLosses(OLD, TOKENS)
    alike: Any = {"smoothing": 1e6, "gamma": 1.0}  # all groups have the same weight
    objective = fcco.CVaRGroupDRO(model, optimizer, GROUPS, 1.0, reference=reference, **alike)
    rows, other = torch.arange(12), torch.arange(20, 37)
    objective(
        lambda: losses(model, rows), GROUP[rows], rows=rows,
        gradient=lambda: losses(model, other), gradient_index=GROUP[other], gradient_rows=other,
    ).backward()  # fmt: skip
    check_gradient(model, other)
    optimizer.step()
    check_losses(objective, rows)


# State, reports, certificates.


def test_the_state_holds_the_reference_which_a_resumed_run_takes():
    model, optimizer = make()
    objective = BUILDERS["limits"](model, optimizer, reference=ReferenceLosses(OLD, TOKENS))
    resumed = BUILDERS["limits"](*make(), reference=ReferenceLosses(OLD + 5, TOKENS))
    resumed.load_state_dict(objective.state_dict())
    assert torch.equal(resumed.reference.value, OLD)
    plain = BUILDERS["limits"](*make())
    with pytest.raises(RuntimeError, match="reference"):
        plain.load_state_dict(objective.state_dict())


def test_reports_and_certificates_are_of_differences():
    model, optimizer = make()
    rows = torch.arange(ROWS)
    reference = ReferenceLosses(losses(model, rows).detach() - 0.01, TOKENS)
    objective = BUILDERS["limits"](model, optimizer, reference=reference)

    def function() -> Any:
        values = losses(model, rows)
        return values.mean(), values

    objective(function, GROUP, rows=rows).backward()
    optimizer.step()
    report = objective.report(function=function, index=GROUP, rows=rows)
    np.testing.assert_allclose([row.value for row in report.rows], 0.01, atol=1e-12)
    before = losses(make()[0], rows).detach()
    limits = dict.fromkeys(NAMES, 0.02)
    found = objective.certificate(
        lambda: losses(model, rows), GROUP, reference=before, min_rows=5, level=0.9
    )
    by_hand = fcco.certificate.certify(
        {n: losses(model, rows).detach()[k == GROUP] for k, n in enumerate(NAMES)}, limits,
        reference={n: before[k == GROUP] for k, n in enumerate(NAMES)}, min_rows=5, level=0.9,
    )  # fmt: skip
    assert str(found) == str(by_hand)
    with pytest.raises(ValueError, match="on differences"):
        objective.certificate(function, GROUP)


# Errors, before anything changes.


@pytest.mark.parametrize("wrong", ["no rows", "no reference", "mean", "by name", "count", "row"])
def test_wrong_calls_are_refused(wrong):
    model, optimizer = make()
    reference = None if wrong == "no reference" else ReferenceLosses(OLD)
    objective = BUILDERS["limits"](model, optimizer, reference=reference)
    rows = torch.arange(8)
    values = {
        "mean": lambda: losses(model, rows).mean(),
        "by name": lambda: dict.fromkeys(NAMES, losses(model, rows)),
    }.get(wrong, lambda: losses(model, rows))
    given: Any = {"no rows": None, "count": rows[:-1], "row": rows + ROWS}.get(wrong, rows)
    state = {k: v.clone() for k, v in objective.state_dict().items()}
    with pytest.raises((ValueError, IndexError)):
        objective(lambda: (losses(model, rows).mean(), values()), GROUP[rows], rows=given)
    assert all(torch.equal(v, state[k]) for k, v in objective.state_dict().items())


def test_wrong_references_are_refused():
    with pytest.raises(ValueError, match="tokens"):
        ReferenceLosses(OLD, TOKENS * 0)
    model, optimizer = make()
    with pytest.raises(TypeError, match="ReferenceLosses"):
        BUILDERS["cvar"](model, optimizer, reference=OLD)
    member = fcco.fleet.Member(
        model, optimizer, BUILDERS["cvar"](model, optimizer, reference=ReferenceLosses(OLD))
    )
    with pytest.raises(fcco.fleet.Unsupported, match="reference"):
        fcco.fleet.signature_of(member)


# Mixtures.


def train(objective: Any, model: nn.Module, steps: list[Tensor], mixture: Any) -> list[np.ndarray]:
    """The gradient weights of each step, by hand from what the objective reports."""
    shares, optimizer = [], objective.optimizer
    for rows in steps:

        def function(rows=rows):
            values = losses(model, rows)
            if isinstance(objective, fcco.constraints.ConstrainedObjective):
                return values.mean(), values
            return values

        optimizer.zero_grad()
        objective(function, GROUP[rows], rows=rows).backward()
        optimizer.step()
        mixture.update()
        found = objective.term.group_weights().numpy()
        shares.append(found)
    return shares


def test_a_mixture_is_the_average_of_the_group_weights(tmp_path):
    model, optimizer = make()
    reference = ReferenceLosses(OLD, TOKENS)
    objective = fcco.CVaRGroupDRO(
        model, optimizer, ratio=0.5, names=NAMES, reference=reference, smoothing=0.1, gamma=0.3
    )
    mixture = fcco.groups.Mixture(objective)
    with pytest.raises(ValueError, match="no `update"):
        mixture.shares()
    steps = [torch.arange(8)[GROUP[:8] < 2], *batches()]  # two groups are not there at first
    shares = [each / each.sum() for each in train(objective, model, steps, mixture)]
    assert np.isnan(shares[0]).any()
    shares = [each for each in shares if not np.isnan(each).any()]
    mixture.save(tmp_path / "mixture.json")
    saved = json.loads((tmp_path / "mixture.json").read_text())
    assert tuple(saved) == NAMES
    np.testing.assert_allclose([*saved.values()], np.mean(shares, 0), atol=1e-12)
    assert np.ptp(np.mean(shares, 0)) > 0.1


def test_a_mixture_of_limits_adds_the_multipliers_to_the_loss():
    model, optimizer = make()
    reference = ReferenceLosses(losses(model, torch.arange(ROWS)).detach() - 0.5)
    objective = BUILDERS["limits"](model, optimizer, reference=reference)
    base = {"target": 3.0, "fr": 1.0}
    mixture = fcco.groups.Mixture(objective, base)
    by_hand = []
    for weights in train(objective, model, batches(60), mixture):
        total = np.append(np.maximum(weights, 0), 0) + np.array([0, 0, 0.25, 0, 0.75])
        by_hand.append(total / total.sum())
    known = [each for each in by_hand if not np.isnan(each).any()]
    assert max(each[0] for each in known) > 0.01, "limits that are violated have multipliers"
    shares = mixture.shares()
    assert tuple(shares) == (*NAMES, "target")
    np.testing.assert_allclose([*shares.values()], np.mean(known, 0), atol=1e-12)
    with pytest.raises(ValueError, match="whose loss"):
        fcco.groups.Mixture(objective)


def test_a_mixture_resumes():
    model, optimizer = make()
    objective = BUILDERS["cvar"](model, optimizer, reference=ReferenceLosses(OLD))
    whole, first = fcco.groups.Mixture(objective), fcco.groups.Mixture(objective)
    train(objective, model, batches(9), first)
    second = fcco.groups.Mixture(objective)
    second.load_state_dict(first.state_dict())
    whole.load_state_dict(first.state_dict())
    rest = batches(15)
    both = torch.nn.ModuleList([second, whole])
    assert not any("term" in key for key in both.state_dict())
    for rows in rest:
        train(objective, model, [rows], second)
        whole.update()
    assert whole.shares() == second.shares() != first.shares()
