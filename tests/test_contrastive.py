"""The global contrastive loss: its inner values, its gradient, its state."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from reference_contrastive import (
    IndividualTraining,
    Training,
    full_loss,
    loop_means,
    naive_means,
)
from torch import Tensor, nn

import fcco
from fcco.contrastive import ContrastiveTerm, log_means

LABEL = [0, 0, 1, 2, 3, 3, 3]
ANCHOR = [True, False, True, True, False, False, True]
INDIVIDUAL: dict[str, Any] = {
    "temperature": "individual", "first_temperature": 0.3, "radius": 1.5, "temperature_lr": 0.02
}  # fmt: skip
OPTIONS = [(None, None, None), (LABEL, None, 1), (None, ANCHOR, 3), (LABEL, ANCHOR, 20)]


def features(number: int, width: int = 5, seed: int = 0, scale: float = 1.0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [
        scale * torch.randn(number, width, generator=draw, dtype=torch.float64) for _ in range(2)
    ]


def tensors(label: Any, anchor: Any) -> dict[str, Tensor | None]:
    return {
        "label": None if label is None else torch.tensor(label),
        "anchor": None if anchor is None else torch.tensor(anchor),
    }


class Backbones(nn.Module):
    """Two linear encoders and a learnable temperature, on fixed data."""

    def __init__(self, number: int, tau: float = 0.3, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.x, self.t = features(number, 6, seed)
        self.image, self.text = nn.Linear(6, 4), nn.Linear(6, 4)
        self.log_tau = nn.Parameter(torch.tensor(math.log(tau), dtype=torch.float64))
        self.double()

    def tau(self) -> Tensor:
        return self.log_tau.exp()

    def forward(self, ids: Any) -> tuple[Tensor, Tensor]:
        return self.image(self.x[ids]), self.text(self.t[ids])

    def means(self, ids: Any) -> np.ndarray:
        """The inner values of a batch, by loops."""
        with torch.no_grad():
            x, t = self.units(ids)
            return loop_means(x, t, float(self.tau()))

    def units(self, ids: Any) -> tuple[Tensor, Tensor]:
        x, t = self(ids)
        return x / x.norm(dim=1, keepdim=True), t / t.norm(dim=1, keepdim=True)


def build(model: Backbones, lr: float = 0.1, **options: Any) -> tuple[Any, Any]:
    """An objective on all pairs of the model's data, and its optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    options = {"temperature": model.tau, **options}
    return fcco.GlobalContrastive(model, optimizer, len(model.x), **options), optimizer


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    slopes = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [
        torch.zeros_like(p) if g is None else g
        for p, g in zip(model.parameters(), slopes, strict=True)
    ]


# --- the inner values -----------------------------------------------------------------------------


@pytest.mark.parametrize("individual", [False, True])
@pytest.mark.parametrize(("label", "anchor", "chunk"), OPTIONS)
def test_inner_values_and_their_gradient(label, anchor, chunk, individual):
    """With one temperature, and with one for each value."""
    x, t = (each.requires_grad_() for each in features(7))
    rows = list(range(7)) if anchor is None else [i for i in range(7) if anchor[i]]
    draw = torch.Generator().manual_seed(1)
    taus = 0.3 + torch.rand(7, 2, generator=draw, dtype=torch.float64)
    tau = (taus if individual else taus[0, 0]).clone().requires_grad_()
    own = tau[rows] if individual else tau
    entries = log_means(x, t, own, chunk=chunk, **tensors(label, anchor))
    for k, side in itertools.product(range(len(rows)), (0, 1)):
        one = float(taus[rows[k], side] if individual else taus[0, 0])
        expected = loop_means(x.detach(), t.detach(), one, label)[rows[k], side]
        assert entries[k, side].item() == pytest.approx(expected, abs=1e-13)
    weights = torch.randn(entries.shape, dtype=torch.float64)
    naive = naive_means(x, t, tau, label, anchor).log()
    ours, theirs = (
        torch.autograd.grad((weights * each).sum(), (x, t, tau)) for each in (entries, naive)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_frozen_backbone(frozen):
    x, t = features(5)
    trained = (x, t)[1 - frozen].requires_grad_()
    (ours,) = torch.autograd.grad(log_means(x, t, 0.5).sum(), trained)
    (theirs,) = torch.autograd.grad(naive_means(x, t, 0.5).log().sum(), trained)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_second_derivative_is_refused():
    x, t = (each.requires_grad_() for each in features(4))
    (slope,) = torch.autograd.grad(log_means(x, t, 0.5).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


@pytest.mark.parametrize(
    ("kind", "chunk"), [(torch.float32, None), (torch.bfloat16, 3), (torch.float16, None)]
)
def test_exponentials_that_overflow(kind, chunk):
    """Margins of thousands over tau: finite and right, in value and in gradient."""
    x, t = (each.to(kind).requires_grad_() for each in features(7, scale=8.0))
    tau = torch.tensor(0.02, requires_grad=True)
    entries = log_means(x, t, tau, chunk=chunk, **tensors(LABEL, None))
    expected = loop_means(x.detach().double(), t.detach().double(), tau.item(), LABEL)
    assert expected.max() > 3000 and entries.dtype == torch.float32
    np.testing.assert_allclose(entries.detach().double(), expected, rtol=1e-5, atol=0.01)
    slopes = torch.autograd.grad(entries.sum(), (x, t, tau))
    wide = [each.detach().double().requires_grad_() for each in (x, t, tau)]
    right = torch.autograd.grad(log_means(*wide, **tensors(LABEL, None)).sum(), wide)  # type: ignore[arg-type]
    for one, two in zip(slopes, right, strict=True):
        rough = 2e-3 if one.dtype == torch.float32 else 2e-2
        assert one.isfinite().all()
        torch.testing.assert_close(
            one.double(), two, rtol=rough, atol=rough * float(two.abs().max())
        )


def test_autocast_does_not_reach_the_products():
    x, t = (each.float() for each in features(32, width=64))
    model = nn.Linear(64, 64)
    for normalised in (False, True):
        term = ContrastiveTerm(40, temperature=1.0, normalize=normalised)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            narrow = model(x)
            assert narrow.dtype == torch.bfloat16
            entries = term.inner(narrow, t)
            entries.sum().backward()  # inside, too
        inside, model.weight.grad = model.weight.grad, None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            narrow = model(x)
        outside = term.inner(narrow.float(), t)
        assert entries.dtype == torch.float32 and torch.equal(entries, outside)
        outside.sum().backward()
        assert inside is not None and model.weight.grad is not None
        torch.testing.assert_close(inside, model.weight.grad, rtol=0.02, atol=0.02)
        model.zero_grad()


@pytest.mark.parametrize(("chunk", "matrices"), [(None, 1), (5, 0)])
def test_at_most_one_square_matrix_is_kept(chunk, matrices):
    number, large = 40, []
    x, t = (each.requires_grad_() for each in features(number))
    tau = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() >= number * number // 2:
            large.append(tensor.shape)
        return tensor

    term = ContrastiveTerm(number, temperature=lambda: tau, chunk=chunk, dtype=torch.float64)
    model = nn.ParameterList([nn.Parameter(x), nn.Parameter(t), nn.Parameter(tau)])
    objective = fcco.Compositional(model, torch.optim.SGD(model.parameters()), term)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = objective(lambda: term.inner(x, t), torch.arange(number))
    assert len(large) == matrices
    loss.backward()
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        term.inner(x, t)
    assert len(large) == matrices


# --- the loss and its gradient --------------------------------------------------------------------


@pytest.mark.parametrize(("scaled", "chunk"), [(True, None), (False, 4)])
def test_the_whole_data_set_at_gamma_one_is_the_full_loss(scaled, chunk):
    """At every step, value and gradient, also in tau; up to the constant of the docstring."""
    number, radius = 9, 0.4 if scaled else 0.0
    model = Backbones(number)
    objective, optimizer = build(
        model, gamma=1.0, correction=0.0, scaled=scaled, radius=radius, chunk=chunk
    )
    for _ in range(3):
        loss = objective(lambda: model(slice(None)))
        x, t = model.units(slice(None))
        whole = full_loss(x, t, model.tau(), radius, scaled)
        front = model.tau() if scaled else 1.0
        constant = 2 * front * math.log(number / (number - 1))
        torch.testing.assert_close(loss, whole + constant, rtol=0, atol=1e-12)
        for one, two in zip(
            gradients(model, loss), gradients(model, whole + constant), strict=True
        ):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
        evaluated = objective.term.evaluate(objective.term.inner(*model(slice(None))))
        torch.testing.assert_close(evaluated, loss, rtol=0, atol=1e-12)
        objective.close()
        torch.testing.assert_close(objective.value(), loss.detach(), rtol=0, atol=1e-12)
        optimizer.zero_grad()
        loss = objective(lambda: model(slice(None)))
        loss.backward()
        optimizer.step()


PATHS = pytest.mark.parametrize(
    ("read", "correction", "case"),
    [("old", 0.15, "plain"), ("new", 0.0, "plain"), ("new", 0.15, "labels and anchors")],
)


def follow(ours: Backbones, theirs: Training, case: str, **options: Any) -> Any:
    """Train beside a transcription; the objective after sixty steps."""
    settings = {"gamma": theirs.gamma, "correction": theirs.correction, "read": theirs.read}
    objective, optimizer = build(ours, theirs.lr, **settings, **options)
    draw = torch.Generator().manual_seed(3)
    for step in range(60):
        ids = torch.randperm(len(ours.x), generator=draw)[:5]
        extra: dict[str, Any] = {}
        if case != "plain":
            extra = {"label": (ids % 4).tolist(), "anchor": [True, True, False, True, step % 2 > 0]}
            if len(set(extra["label"])) == 1:
                continue
        loss = objective(
            lambda ids=ids: ours(ids), ids, **{k: torch.tensor(v) for k, v in extra.items()}
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(theirs.step(ids.tolist(), **extra), abs=1e-10)
    for one, two in zip(ours.parameters(), theirs.parameters, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-10)
    return objective


@PATHS
def test_steps_equal_a_transcription(read, correction, case):
    model, twin = Backbones(24, tau=0.5), Backbones(24, tau=0.5)
    reference = Training(
        twin.units, list(twin.parameters()), twin.tau, 24, 0.6, correction, read, 0.05, radius=0.8
    )
    tracker = follow(model, reference, case, radius=0.8).term.tracker
    moved = float((model.log_tau - Backbones(24, tau=0.5).log_tau).detach().abs())
    assert moved > 0.02, "the temperature must move"
    assert sorted(reference.u) == tracker.seen.nonzero().squeeze(1).tolist()
    for i, u in reference.u.items():
        np.testing.assert_allclose(tracker.value[i].exp().numpy(), u, rtol=1e-10)


# --- individual temperatures ----------------------------------------------------------------------


@PATHS
def test_individual_temperatures_equal_a_transcription(read, correction, case):
    model, twin = Backbones(24), Backbones(24)
    reference = IndividualTraining(
        twin.units, list(twin.parameters()), twin.tau, 24, 0.6, correction, read, 0.05,
        radius=1.5, first=0.3, tau_lr=0.02,
    )  # fmt: skip
    objective = follow(model, reference, case, **INDIVIDUAL)
    taus = objective.term.temperature()
    expected = np.array([reference.taus.get(i, np.full(2, 0.3)) for i in range(24)])
    np.testing.assert_allclose(taus.numpy(), expected, rtol=0, atol=1e-10)
    assert taus.std() > 0.01 and (taus - 0.3).abs().max() > 0.1, "the temperatures must move"
    seen = sorted(reference.u)
    u, tau = np.array([reference.u[i] for i in seen]), expected[seen]
    value = (tau * (np.log(u + 1 / 23) + 1.5)).sum(1).mean()
    assert objective.value().item() == pytest.approx(value, abs=1e-10)


def test_micro_batches_average_the_steps_of_a_temperature():
    def trained(*batches: list[int]) -> Tensor:
        model = Backbones(10)
        objective, optimizer = build(model, gamma=1.0, correction=0.0, read="old", **INDIVIDUAL)
        objective.warm_up([(lambda: model(torch.arange(10)), torch.arange(10))])
        for ids in batches:
            objective(lambda ids=ids: model(ids), ids).backward()
        assert torch.equal(
            objective.term.temperature(), torch.full((10, 2), 0.3, dtype=torch.float64)
        )
        optimizer.step()
        return objective.term.temperature()

    one, two = [0, 1, 2], [2, 3, 4]
    both, first, second = trained(one, two), trained(one), trained(two)
    torch.testing.assert_close(both[:2], first[:2], rtol=0, atol=1e-12)
    torch.testing.assert_close(both[3:], second[3:], rtol=0, atol=1e-12)
    torch.testing.assert_close(both[2], (first[2] + second[2]) / 2, rtol=0, atol=1e-12)
    assert not torch.allclose(first[2], second[2], atol=1e-4)


def test_pairs_with_values_that_are_not_finite_keep_their_temperature():
    model, ids = Backbones(6), torch.arange(6)
    label = torch.tensor([0, 0, 1, 1, 1, 1])
    objective, optimizer = build(model, correction=0.0, on_nonfinite="skip", **INDIVIDUAL)
    for bad in (False, True):
        before = objective.term.temperature().clone()
        # Pair 1 is a negative of 2 to 5, but not of 0, which has the same label.
        spoiled = torch.zeros(6, 1, dtype=torch.float64)
        spoiled[1] = torch.nan if bad else 0.0
        objective(lambda s=spoiled: (model(ids)[0] + s, model(ids)[1]), ids, label=label).backward()
        optimizer.step()
        moved = (objective.term.temperature() != before).any(1)
        assert moved.tolist() == [True, *[not bad] * 5]


# --- state, of which test_state.py has more -------------------------------------------------------


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_no_copy_with_a_learned_temperature(copied):
    model = Backbones(8)
    objective, _ = build(model, temperature=lambda: model.log_tau.exp())
    term = ContrastiveTerm(8, temperature=model.tau)
    for each in (objective, term):
        with pytest.raises(TypeError, match=r"function as `temperature`.*parameters of this model"):
            copied(each)


@pytest.mark.parametrize("options", [{}, INDIVIDUAL])
def test_eval_mode_gives_the_loss_of_the_batch_and_changes_nothing(options):
    model = Backbones(10)
    objective, optimizer = build(model, gamma=0.5, correction=0.1, **options)
    objective(lambda: model([0, 1, 2]), torch.tensor([0, 1, 2])).backward()
    optimizer.step()
    before = copy.deepcopy(objective.state_dict())
    objective.eval()
    loss = objective(lambda: model([1, 2, 3, 4]), torch.tensor([1, 2, 3, 4]))
    with torch.no_grad():
        without_grad = objective.train()(lambda: model([1, 2, 3, 4]), torch.tensor([1, 2, 3, 4]))
    taus, radius = model.tau() * torch.ones(4, 2).double(), objective.term.radius
    if options:
        taus = objective.term.temperature(torch.tensor([1, 2, 3, 4]))
        assert len(taus.unique()) > 2, "some temperatures must have moved"
    with torch.no_grad():
        inner = naive_means(*model.units([1, 2, 3, 4]), taus)
        expected = float((taus * ((inner + 1 / 9).log() + radius)).sum(1).mean())
    assert loss.item() == without_grad.item() == pytest.approx(expected, abs=1e-12)
    after = objective.state_dict()
    optimizer.step()  # nothing was proposed either
    for key, value in before.items():
        if isinstance(value, Tensor):
            assert torch.equal(after[key].nan_to_num(), value.nan_to_num())


# --- objectives -----------------------------------------------------------------------------------


def test_features_in_place_of_a_function_are_refused():
    model, ids = Backbones(10), torch.arange(4)
    objective, _ = build(model)
    with pytest.raises(TypeError, match=r"`GlobalContrastive`.*function.*tuple"):
        objective(model(ids), ids)


def test_micro_batches_are_one_step_of_separate_batches():
    model = Backbones(10)
    objective, optimizer = build(model, lr=0.1, gamma=0.5)
    assert objective.previous is None, "by default, there is one forward pass"
    batches = [[0, 1, 2], [2, 3, 4]]
    for ids in batches:
        (objective(lambda ids=ids: model(ids), torch.tensor(ids)) / 2).backward()
    first, second = (np.exp(model.means(ids)) for ids in batches)
    optimizer.step()
    u = objective.term.tracker.value.exp().detach().numpy()
    assert objective.term.step == 1
    np.testing.assert_allclose(u[[0, 1]], first[:2], rtol=1e-12)
    np.testing.assert_allclose(u[[3, 4]], second[1:], rtol=1e-12)
    np.testing.assert_allclose(u[2], (first[2] + second[0]) / 2, rtol=1e-12)


def test_features_are_pooled_as_inner_values():
    """Also those of width 2, the number of inner values."""
    torch.manual_seed(0)
    model, ids = Backbones(6), torch.arange(6)
    model.image, model.text = nn.Linear(6, 2).double(), nn.Linear(6, 2).double()
    objective, _ = build(model)
    batch = objective.pool([(lambda: model(ids), ids)])["inner"]
    np.testing.assert_allclose(batch.fresh, model.means(ids), rtol=1e-12)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_learned_temperature_below_zero_is_refused(chunk):
    """The loss would change its sign, without a message."""
    model = Backbones(6)
    for tau in (-0.3, 0.0, float("nan")):
        objective, _ = build(model, temperature=lambda tau=tau: torch.tensor(tau), chunk=chunk)
        with pytest.raises(fcco.NonFiniteValue, match=r"NaN or infinite.*nothing was updated"):
            objective(lambda: model(torch.arange(6)), torch.arange(6))
        assert not objective.term.tracker.seen.any()


X, T = features(4)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: log_means(X[:1], T[:1], 0.1), r"`log_means\(images.*at least two pairs.*has: 1"),
        (lambda: log_means(X, T[:3], 0.1), r"same shape.*\(4, 5\).*\(3, 5\)"),
        (lambda: log_means(X, T.long(), 0.1), r"must be features.*int64"),
        (lambda: log_means(X, T, torch.ones(2)), r"`log_means\(temperature=...\)` must be one num"),
        (lambda: log_means(X, T, 0.1, chunk=0), r"`log_means\(chunk=...\)` must be at least 1"),
        (lambda: log_means(X, T, 0.1, label=torch.zeros(4)), r"`log_means\(label=...\)`.*integers"),
        (lambda: log_means(X, T, 0.1, label=torch.arange(3)), r"`log_means\(label=...\)` must be"),
        (lambda: log_means(X, T, 0.1, anchor=torch.arange(4)), r"`log_means\(anchor=...\)`.*bool"),
        (lambda: log_means(X, T, 0.1, label=torch.ones(4).long()), "without a neg.*all 4.*label 1"),
        (lambda: ContrastiveTerm(1), r"`ContrastiveTerm\(num_pairs=...\)` must be at least 2"),
        (lambda: ContrastiveTerm(5, temperature=-1.0), r"temperature=...\)` must be positive"),
        (lambda: ContrastiveTerm(5, radius=1.0, scaled=False), "is only a constant"),
        (lambda: ContrastiveTerm(5, temperature="individual"), r"needs a `radius` above 0.*falls"),
        (
            lambda: ContrastiveTerm(9, temperature="individual", radius=1.0).inner(X, T),
            r"`log_means\(temperature=...\)` must be.*\(4, 2\).*has shape \(9, 2\).*`index`",
        ),
        (lambda: build(Backbones(6))[0](lambda: X, torch.tensor([0])), "must return .image feat"),
    ],
)
def test_errors_name_the_call(call, error):
    with pytest.raises(ValueError, match=error):
        call()


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_batch_without_anchors_needs_no_negatives(chunk):
    """No rows, and the gradient is zero: e.g. a step of the other terms only."""
    label, anchor = torch.tensor([1, 1, 1, 1]), torch.zeros(4, dtype=torch.bool)
    x, t = (each.clone().requires_grad_() for each in (X, T))
    tau = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    rows = log_means(x, t, tau, label=label, anchor=anchor, chunk=chunk)
    assert rows.shape == (0, 2)
    for slope in torch.autograd.grad(rows.sum(), (x, t, tau)):
        assert torch.equal(slope, torch.zeros_like(slope))
