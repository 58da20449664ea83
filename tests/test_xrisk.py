"""Risks over pairs of scores, against transcriptions, brute force and the faults of others."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import reference_xrisk as reference
import torch
from torch import Tensor, nn
from torch.nn.functional import relu, softplus
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fcco
from fcco import xrisk
from fcco.groups import PositiveBatchSampler
from fcco.tracker import NonFiniteValue
from fcco.xrisk import pairs
from fcco.xrisk.pairs import SURROGATES, Members, PairLoss, pair_means

SIZE, SHARE, GAMMA, MIDDLE = 24, 0.37, 0.3, 0.6
_draw = np.random.default_rng(3)
X = _draw.normal(size=(SIZE, 3))
Y = np.array([1] * 9 + [0] * 15)[_draw.permutation(SIZE)]
GRADE = np.array([2, 0, 1, 0, 3, 0, 1, 1, 0, 2, 0, 0, 1, 0, 0, 0, 2, 0, 1, 0, 0, 0, 0, 3], float)
# Lists of different lengths: the last item is alone in its own, and one list has nothing relevant.
QUERY = np.array([7] * 8 + [2] * 6 + [5] * 2 + [4] * 3 + [1] * 4 + [9])
BAG = np.array([0, 1, 2, 3, 4, 5, 6, 7] * 3)
BAG_LABEL = np.array([1, 0, 0, 1, 0, 1, 0, 0])
RATES = {"min_tpr": 0.5, "max_fpr": SHARE}

Objective = Any


@dataclass(frozen=True)
class Case:
    """An objective, its transcription, and how a batch of it is called."""

    make: Callable[..., Objective]
    options: dict[str, Any]
    transcription: type[reference.Reference]
    pair: str = "squared_hinge"
    data: str = "labels"
    settings: dict[str, Any] = field(default_factory=dict)

    def build(self, model: nn.Module, optimizer: Any, **more: Any) -> Objective:
        options = {**self.options, **more}
        if self.data == "labels":
            return self.make(model, optimizer, Y, **options)
        if self.data == "lists":
            return self.make(model, optimizer, GRADE, QUERY, **options)
        return self.make(model, optimizer, BAG_LABEL, **options)

    def call(self, risk: Objective, function: Callable[[Tensor], Any], ids: Any) -> Tensor:
        """The loss of the samples `ids`, whose scores are function(x)."""
        ids = torch.as_tensor(ids)
        inputs = lambda: function(torch.tensor(X)[ids])  # noqa: E731
        if self.data == "labels":
            return risk(inputs, torch.tensor(Y)[ids], ids)
        return risk(inputs, ids if self.data == "lists" else torch.tensor(BAG)[ids])

    def transcribe(self, w: np.ndarray, lr: float) -> reference.Reference:
        data = {"labels": (Y, self.pair), "lists": (GRADE, QUERY, self.pair)}
        gamma = {"g": GAMMA, "v": MIDDLE}
        kind = type("Settings", (self.transcription,), self.settings)
        return kind(X, w, lr, *data.get(self.data, (BAG_LABEL, BAG)), **gamma)


def partial(
    pair: str = "squared_hinge", two: bool = False, margin: float | None = None, **options: Any
) -> Case:
    settings: dict[str, Any] = {"share": SHARE, "margin": margin or 5.0}
    if two:
        settings |= {"ratio": 0.5, "smoothing": options["smoothing"]}
    make = xrisk.TwoWayPartialAUC if two else xrisk.PartialAUC
    rates = RATES if two else {"max_fpr": SHARE}
    options |= {"surrogate": pair, "margin": margin, **rates}
    return Case(make, options, reference.PartialAUC, pair, settings=settings)


CASES: dict[str, Case] = {
    "auc-margin": Case(xrisk.AUC, {}, reference.AUC),
    "auc-pairwise": Case(
        xrisk.PartialAUC,
        {"max_fpr": 1.0, "margin": 1.0},
        reference.AUC,
        settings={"form": "pairwise"},
    ),
    "ap": Case(
        xrisk.AveragePrecision, {}, reference.AveragePrecision, settings={"activated": True}
    ),
    "ap-logits": Case(
        xrisk.AveragePrecision,
        {"surrogate": "logistic", "activation": None},
        reference.AveragePrecision,
        "logistic",
        settings={"margin": 5.0},
    ),
    "partial": partial(),
    "partial-logistic": partial("logistic", margin=1.0),
    "two-way": partial(two=True, margin=1.0, smoothing=0.4),
    "two-way-hard": partial("logistic", two=True, smoothing=0.0),
    "ndcg": Case(xrisk.NDCG, {}, reference.Ranking, data="lists"),
    "ndcg-top": Case(
        xrisk.NDCG,
        {"k": 3, "surrogate": "logistic"},
        reference.Ranking,
        "logistic",
        "lists",
        {"k": 3},
    ),
    "listwise": Case(
        xrisk.ListwiseCrossEntropy, {}, reference.Ranking, data="lists", settings={"entropy": True}
    ),
    "bags": Case(
        xrisk.MultiInstanceAUC,
        {"temperature": 0.6, "gamma_classes": MIDDLE},
        reference.Bags,
        data="bags",
        settings={"tau": 0.6},
    ),
}
UNTRACKED = ("auc-pairwise", "partial", "partial-logistic")
ALL = pytest.mark.parametrize("name", CASES)
BINARY = pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.data == "labels"])


class Run:
    """A linear model without bias under an objective, in float64."""

    def __init__(self, name: str, lr: float = 0.1, momentum: float = 0.0, **more: Any) -> None:
        self.case = CASES[name]
        self.model = nn.Linear(3, 1, bias=False).double()
        with torch.no_grad():
            self.model.weight.copy_(torch.tensor([[0.4, -0.3, 0.2]]))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum)
        self.risk = self.case.build(self.model, self.optimizer, **more)

    def scores(self, x: Tensor) -> Tensor:
        return self.model(x).squeeze(1)

    def call(self, ids: Any, function: Callable[[Tensor], Any] | None = None) -> Tensor:
        return self.case.call(self.risk, function or self.scores, ids)

    def step(self, *batches: Any) -> list[float]:
        losses = [self.call(ids) / len(batches) for ids in batches]
        for loss in losses:
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.item() * len(batches) for loss in losses]

    def gradient(self, loss: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, list(self.model.parameters()))
        return gradient[0]

    def state(self) -> dict[str, Tensor]:
        state = {f"risk.{n}": b.clone() for n, b in self.risk.named_buffers()}
        return state | {n: p.detach().clone() for n, p in self.model.named_parameters()}


def fixed(name: str, **more: Any) -> Run:
    """A run with the weights of the transcription."""
    gamma = {} if name in UNTRACKED else {"gamma": GAMMA}
    return Run(name, **gamma, **more)


def batches_of(name: str, number: int) -> list[np.ndarray]:
    """Batches with both classes, some of them with samples twice."""
    draw, result = np.random.default_rng(11), []
    while len(result) < number:
        ids = draw.choice(SIZE, 13, replace=False)
        ids[-1] = ids[0] if len(result) == 3 else ids[-1]
        ids[-4:] = [16, 17, 18, 16] if len(result) == 4 else ids[-4:]  # more than a whole list
        present = BAG_LABEL[BAG[ids]] if CASES[name].data == "bags" else Y[ids]
        if 1 < present.sum() < 12:
            result.append(ids)
    return result


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    both = [(value, two[name]) for name, value in one.items()]
    return all(torch.equal(a.isnan(), b.isnan()) for a, b in both) and all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in both
    )


# --- against the transcription, and by brute force --------------------------------------------


def compare_tables(run: Run, expected: reference.Reference) -> None:
    """The tracked values and thresholds of both."""
    term, lists = run.risk.term, run.case.data == "lists"
    tables = {"g": term.tracker}
    if "v" in expected.averages and expected.averages["v"].u:
        tables["v"] = term.mean
    number = {int(i): n for n, i in enumerate(np.flatnonzero((GRADE > 0) & (QUERY != 9)))}
    for key, tracker in tables.items():
        found = expected.averages[key].u
        if key == "g" and not found:
            continue  # nothing to track
        rows = tracker.value.exp() if tracker.log_space else tracker.value
        blocks = [number[b] if lists else b for b in found]
        assert sorted(blocks) == tracker.seen.nonzero().squeeze(1).tolist()
        wanted = np.stack([np.atleast_1d(u) for u in found.values()])
        np.testing.assert_allclose(rows[blocks].numpy(), wanted, rtol=1e-10, atol=1e-10)
    found = expected.table.value
    if found:
        names = np.unique(QUERY[(GRADE > 0) & (QUERY != 9)]).tolist()
        rows = [names.index(b) if lists else b for b in found]
        values = (term.cutoffs if lists else term.cutoff).value
        np.testing.assert_allclose(values[rows], list(found.values()), rtol=1e-10, atol=1e-10)
        assert values.isnan().sum() == len(values) - len(rows)


@ALL
@pytest.mark.parametrize("micro", [1, 2])
def test_steps_equal_the_transcription(name, micro):
    """Also with two micro-batches per step: pairs are formed within each, values are pooled."""
    lr = 1.0 if name.startswith("ap") else 0.1
    run = fixed(name, lr=lr)
    expected = run.case.transcribe(run.model.weight.detach().numpy()[0], lr)
    batches = batches_of(name, 7 * micro)
    start = expected.w.copy()
    for k in range(7):
        part = batches[k * micro : (k + 1) * micro]
        found, losses = run.step(*part), expected.step(*part)
        if not name.startswith("two-way"):  # there the value is CVaR of all tracked positives
            np.testing.assert_allclose(found, losses, rtol=1e-10)
        weights = run.model.weight.detach().numpy()[0]
        np.testing.assert_allclose(weights, expected.w, rtol=1e-10, atol=1e-12)
        compare_tables(run, expected)
    assert np.abs(expected.w - start).max() > 0.005


PAIR: dict[str, Callable[[Tensor], Tensor]] = {
    "squared_hinge": lambda d: relu(1 + d) ** 2,
    "hinge": lambda d: relu(1 + d),
    "logistic": lambda d: softplus(d) / math.log(2),
}


def pair_of(name: str) -> Callable[[Tensor], Tensor]:
    case = CASES[name]
    return lambda d: PAIR[case.pair](d / case.settings.get("margin", 1.0))


def worst(values: Tensor, share: float) -> Tensor:
    """The mean of the largest `share` of each row, by sorting; the last counts in part."""
    ordered, number = values.sort(-1, descending=True).values, share * values.shape[-1]
    weight = (number - torch.arange(values.shape[-1]).to(values)).clamp(0, 1)
    return (ordered * weight).sum(-1) / number


def brute(name: str, h: Tensor, share: float) -> Tensor:
    """The objective itself on all data."""
    case, pair = CASES[name], pair_of(name)
    h = h.sigmoid() if case.settings.get("activated") else h
    if case.data == "labels":
        p, n = h[torch.tensor(Y == 1)], h[torch.tensor(Y == 0)]
        losses = pair(n[None] - p[:, None])
        if name == "auc-margin":
            both = p.var(correction=0) + n.var(correction=0)
            return both + relu(1 + n.mean() - p.mean()) ** 2
        if name == "auc-pairwise":
            return losses.mean()
        if name.startswith("ap"):
            above = pair(p[None] - p[:, None])
            rank = 1 + above.sum(1) - above.diagonal()
            return -(rank / (rank + losses.sum(1))).mean()
        inner = worst(losses, share)
        return inner.mean() if name.startswith("partial") else worst(inner, 0.5)
    if case.data == "bags":
        scores = [0.6 * (h[torch.tensor(b == BAG)] / 0.6).exp().mean().log() for b in range(8)]
        score, positive = torch.stack(scores), torch.tensor(BAG_LABEL == 1)
        p, n = score[positive], score[~positive]
        both = p.var(correction=0) + n.var(correction=0)
        return both + relu(1 + n.mean() - p.mean()) ** 2
    total = []
    for q in np.unique(QUERY):
        at = torch.tensor(q == QUERY)
        s, grade = h[at], torch.tensor(GRADE)[at]
        if len(s) < 2 or not grade.any():
            continue
        if name == "listwise":
            total.append(-(grade / grade.sum() * s.log_softmax(0)).sum())
            continue
        gain, k = 2**grade - 1, 3 if name == "ndcg-top" else len(s)
        discount = torch.log2(torch.arange(2, len(s) + 2).double())
        best = (gain.sort(descending=True).values / discount)[:k].sum()
        others = pair(s[None] - s[:, None])
        rank = 1 + others.sum(1) - others.diagonal()
        degree = torch.ones_like(s)
        if name == "ndcg-top" and len(s) > 3:
            third, fourth = s.detach().sort(descending=True).values[2:4]
            degree = ((s - (third + fourth) / 2) / (s.detach().std(correction=0) + 1e-6)).sigmoid()
        total.append(-(gain * degree / torch.log2(1 + rank)).sum() / best)
    return torch.stack(total).mean()


def whole(name: str, **more: Any) -> Run:
    """A run that keeps no memory and rounds no kink."""
    options: dict[str, Any] = {} if name in UNTRACKED else {"gamma": 1.0}
    if name == "bags":
        options["gamma_classes"] = 1.0
    return Run(name, **options, **more)


def whole_number(name: str) -> dict[str, float]:
    """A share that is 6 of the 15 negatives."""
    return {"max_fpr": 0.4} if name.startswith(("partial", "two-way")) else {}


@ALL
def test_full_batch_is_the_objective_itself(name):
    """With gamma = 1 value and gradient are those of the objective, by brute force."""
    more = {"smoothing": 0.0} if name == "two-way" else {}
    run = whole(name, **whole_number(name), **more)
    loss = run.call(np.arange(SIZE))
    expected = brute(name, run.scores(torch.tensor(X)), 0.4)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    run.risk.close()
    torch.testing.assert_close(run.risk.value(), expected.detach(), rtol=1e-10, atol=0)
    gradient, exact = run.gradient(loss), run.gradient(expected)
    assert exact.norm() > 1e-3
    torch.testing.assert_close(gradient, exact, rtol=1e-9, atol=1e-12)
    run.risk.eval()
    with torch.no_grad():
        torch.testing.assert_close(run.call(np.arange(SIZE)), expected, rtol=1e-10, atol=0)


RATES_ONE_BY_ONE = [0.01, 0.05, 0.31, 0.4, 0.5, 0.77, 0.99, 1.0]


@pytest.mark.parametrize("name", ["partial", "two-way"])
@pytest.mark.parametrize("share", RATES_ONE_BY_ONE)
def test_every_rate_is_exact_on_all_data(name, share):
    """The last of the hardest negatives counts in part, in value and gradient and after steps."""
    more = {"smoothing": 0.0} if name == "two-way" else {}
    run = whole(name, max_fpr=share, lr=0.3, **more)
    for _ in range(3):
        loss = run.call(np.arange(SIZE))
        exact = brute(name, run.scores(torch.tensor(X)), share)
        torch.testing.assert_close(loss, exact, rtol=1e-10, atol=0)
        torch.testing.assert_close(run.gradient(loss), run.gradient(exact), rtol=1e-9, atol=1e-12)
        run.step(np.arange(SIZE))
    run.risk.eval()
    exact = brute(name, run.scores(torch.tensor(X)), share)
    if name == "partial":
        torch.testing.assert_close(run.call(np.arange(SIZE)), exact, rtol=1e-10, atol=0)


@pytest.mark.parametrize("share", RATES_ONE_BY_ONE)
def test_equal_scores_share_the_rate(share):
    """The gradient is the mean of those of all orders of equal negatives."""
    y = np.array([1, 1, 0, 0, 0, 0, 0, 0, 0])
    h = torch.tensor([0.2, 1.0, 0.9, 0.5, 0.5, 0.5, -0.3, -0.3, -1.0], dtype=torch.float64)
    h.requires_grad_()
    risk = xrisk.PartialAUC(
        model := nn.Linear(1, 1).double(), torch.optim.SGD(model.parameters()), y, max_fpr=share
    )
    loss = risk(lambda: h, y, np.arange(9))
    losses = relu(1 + (h[2:][None] - h[:2][:, None]) / 5) ** 2
    torch.testing.assert_close(loss, worst(losses, share).mean())
    weights = []
    for first, second in itertools.product(itertools.permutations(range(3)), ((0, 1), (1, 0))):
        order = [0, *(1 + i for i in first), *(4 + i for i in second), 6]  # by falling score
        weight = (share * 7 - torch.arange(7).double()).clamp(0, 1) / (share * 7)
        weights.append(torch.zeros(7).double().index_copy(0, torch.tensor(order), weight))
    expected = (losses * torch.stack(weights).mean(0)).sum(1).mean()
    gradients = [torch.autograd.grad(each, h, retain_graph=True)[0] for each in (loss, expected)]
    torch.testing.assert_close(*gradients)


def rate_of_cutoffs(
    share: float, number: int, of_normal: Callable[[Tensor], Tensor], steps: int
) -> float:
    """The share of all negatives above the cut-off, on average over batches of some."""
    draw, rates = torch.Generator().manual_seed(0), []
    model = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    y = torch.cat([torch.ones(2), torch.zeros(10_000)])
    risk = xrisk.PartialAUC(model, optimizer, y, max_fpr=share)
    ids = torch.arange(2 + number)
    every = of_normal(torch.special.ndtri(torch.arange(0.5, 20_000).double() / 20_000))  # rising
    for step in range(steps):
        scores = of_normal(torch.randn(2 + number, generator=draw, dtype=torch.float64))
        scores.requires_grad_()
        risk(lambda scores=scores: scores, y[ids], ids)
        optimizer.step()
        if step >= 30:
            below = torch.searchsorted(every, risk.term.cutoff.value).item()
            rates.append(1 - below / len(every))
    return float(np.mean(rates))


@pytest.mark.parametrize(
    ("share", "number"), [(0.05, 16), (0.05, 32), (0.1, 8), (0.3, 8), (0.3, 32), (0.95, 32)]
)
def test_the_shared_cut_off_of_small_batches_has_the_rate_that_was_asked_for(share, number):
    """Of normal scores, for which the quantile of a batch is unbiased."""
    rate = rate_of_cutoffs(share, number, lambda h: h, steps=1000)
    assert rate == pytest.approx(share, rel=0.07)


RARE = torch.tensor([[1, 0], [1, 0], [1, 0], [0, 0], [0, 0], [0, 1.0]])
"""Two labels with three positives and one, of six samples."""


def label_risk() -> tuple[nn.Linear, Any]:
    model = nn.Linear(3, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.4, -0.3, 0.2], [0.1, 0.5, -0.2]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, xrisk.PartialAUC(model, optimizer, RARE, max_fpr=1.0, margin=1.0)


def label_gradient(model: nn.Linear, risk: Any, ids: Any) -> Tensor:
    x = torch.tensor(X)[list(ids)]
    loss = risk(lambda: model(x), RARE[list(ids)], torch.tensor(ids))
    return torch.autograd.grad(loss, model.weight)[0]


def test_labels_weigh_equally_however_seldom_they_come():
    """Over all sequences of batches the mean gradient is that of the mean over labels.

    A label that comes with probability p in a batch has come by call k with probability
    1 - (1-p)^k, and in expectation it has this weight there: no bias but for labels never seen.
    """
    batches = list(itertools.combinations(range(6), 3))
    here = [[0 < RARE[list(ids), t].sum() < 3 for t in (0, 1)] for ids in batches]
    batches = [ids for ids, labels in zip(batches, here, strict=True) if any(labels)]
    chance = torch.tensor([labels for labels in here if any(labels)]).double().mean(0)
    assert 0.4 < chance[1] < 0.6 and chance[0] > 0.9
    means = torch.zeros(2, 2, 3, dtype=torch.float64)
    for one in batches:
        for two in batches:
            model, risk = label_risk()
            for k, ids in enumerate((one, two)):
                means[k] += label_gradient(model, risk, ids) / len(batches) ** 2
            risk.detach_hooks()
    model, _ = label_risk()
    h = model(torch.tensor(X)[:6])
    positive, parts = RARE == 1, []
    for t in (0, 1):
        p, n = h[positive[:, t], t], h[~positive[:, t], t]
        parts.append(PAIR["squared_hinge"](n[None] - p[:, None]).mean())
    exact = torch.autograd.grad(torch.stack(parts).mean(), model.weight)[0]
    for k in (0, 1):
        come = 1 - (1 - chance) ** (k + 1)
        torch.testing.assert_close(means[k], exact * come.unsqueeze(1))


def test_labels_in_every_batch_and_in_evaluations_are_their_mean():
    """Whatever the sampler does: one that draws every label each time needs no weights."""
    model, risk = label_risk()
    ids = torch.tensor([0, 4, 5])  # both labels
    expected = [label_gradient(*label_risk(), ids.tolist())] * 5
    for one in expected:
        torch.testing.assert_close(label_gradient(model, risk, ids.tolist()), one)
    only, x = [0, 3, 4], torch.tensor(X)  # the first label alone
    h = model(x[only])[:, 0]
    alone = PAIR["squared_hinge"](h[1:] - h[0]).mean()
    risk.eval()
    for index in (None, torch.tensor(only)):
        torch.testing.assert_close(risk(lambda: model(x[only]), RARE[only], index), alone)


def test_the_weights_of_labels_are_saved():
    run, batches = label_risk(), [(0, 3, 4), (0, 4, 5), (1, 2, 3)]
    for ids in batches:
        label_gradient(*run, ids)
    other = label_risk()
    other[1].load_state_dict(run[1].state_dict())
    assert torch.equal(label_gradient(*run, (1, 3, 5)), label_gradient(*other, (1, 3, 5)))
    fresh = label_gradient(*label_risk(), (1, 3, 5))
    torch.testing.assert_close(label_gradient(*run, (1, 3, 5))[1], fresh[1] * 5 / 3)


@pytest.mark.parametrize("make", [xrisk.NDCG, xrisk.ListwiseCrossEntropy])
@pytest.mark.parametrize("shape", [(3, 2), (2, 2), (2, 3), (1, 2)])
def test_sampled_lists_weigh_equally(make, shape):
    """Over all batches of some items of some lists the mean gradient is that of whole lists.

    All scores are equal: the ranks that a sample estimates are then exact, and their gradient is
    unbiased, so that only the weights of the lists are left.
    """
    lists, items = shape
    grade = torch.tensor([2, 0, 0, 0, 0, 1, 2, 1, 0, 3, 1, 1, 0])
    query = torch.tensor([0] * 5 + [1] * 5 + [2] * 3)  # one relevant of 5; 4 of 5; 2 of 3
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def gradient(ids: Any) -> Tensor:
        risk, ids = make(model, optimizer, grade, query, gamma=1.0), torch.tensor(ids)
        loss = risk(lambda: model(torch.tensor(X)[ids]).squeeze(1), ids)
        risk.detach_hooks()
        return torch.autograd.grad(loss, model.weight)[0]

    members = [np.flatnonzero(query == q).tolist() for q in range(3)]
    total, count = torch.zeros(1, 3, dtype=torch.float64), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fcco.UsageWarning)  # batches without a relevant item
        for chosen in itertools.combinations(members, lists):
            parts = [list(itertools.combinations(each, items)) for each in chosen]
            # Each choice of lists is equally likely, and so are the samples of these lists.
            batches = list(itertools.product(*parts))
            for batch in batches:
                total += gradient(sum(batch, ())) / len(batches)
            count += 1
        exact = gradient(range(13))
    assert exact.norm() > 0.01
    torch.testing.assert_close(total / count, exact)


def test_several_labels_are_their_mean():
    """Unknown labels are left out, and a batch without a class of one label teaches the others."""
    labels = torch.tensor(np.stack([Y, 1 - Y, np.roll(Y, 5)], 1)).double()
    labels[3, 0] = labels[7, 2] = math.nan
    torch.manual_seed(0)
    model = nn.Linear(3, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    several = xrisk.AveragePrecision(model, optimizer, labels, gamma=GAMMA, names=["a", "b", "c"])
    assert list(several.terms) == ["a", "b", "c"]
    single, known = [], [~labels[:, t].isnan() for t in range(3)]
    for t in range(3):
        y = labels[:, t][known[t]]
        single.append(xrisk.AveragePrecision(model, optimizer, y, gamma=GAMMA))
    for ids in (torch.arange(12), torch.arange(8, 24), torch.arange(24)):
        x, parts = torch.tensor(X)[ids], []
        loss = several(lambda x=x: model(x), labels[ids], ids)
        for t, risk in enumerate(single):
            kept = ids[known[t][ids]]
            place = known[t].cumsum(0)[kept] - 1
            xs = torch.tensor(X)[kept]
            parts.append(risk(lambda x=xs, t=t: model(x)[:, t], labels[kept, t], place))
        mean = torch.stack(parts).mean()
        torch.testing.assert_close(loss, mean)
        gradients = [torch.autograd.grad(each, model.weight)[0] for each in (loss, mean)]
        torch.testing.assert_close(*gradients)
        several.close(), [risk.close() for risk in single]
    torch.testing.assert_close(several.value(), torch.stack([r.value() for r in single]).mean())
    before = {n: b.clone() for n, b in several.named_buffers()}
    with pytest.warns(UserWarning, match="PositiveBatchSampler"):
        only = torch.tensor([3])  # unknown, 1 or 0, 1 or 0: no pair of any label
        assert several(lambda: model(torch.tensor(X)[only]), labels[only], only) == 0
    assert same(before, dict(several.named_buffers()))


# --- state ------------------------------------------------------------------------------------


def trained(name: str, **more: Any) -> tuple[Run, PositiveBatchSampler]:
    """A run with automatic settings and its sampler after three steps."""
    run, sampler = Run(name, momentum=0.5, **more), PositiveBatchSampler(Y, 14, 6, seed=2)
    for _ in range(3):
        run.step(sampler.draw())
    return run, sampler


@ALL
def test_resume_is_exact(name):
    run, sampler = trained(name)
    parts = {"model": run.model, "optimizer": run.optimizer, "risk": run.risk, "sampler": sampler}
    file = io.BytesIO()
    torch.save({key: part.state_dict() for key, part in parts.items()}, file)
    file.seek(0)
    other, again = Run(name, momentum=0.5), PositiveBatchSampler(Y, 14, 6, seed=7)
    state = torch.load(file)
    for key, part in zip(parts, (other.model, other.optimizer, other.risk, again), strict=True):
        part.load_state_dict(state[key])
    for _ in range(3):
        assert run.step(sampler.draw()) == other.step(again.draw())
    assert same(run.state(), other.state())


@ALL
def test_copies_go_their_own_way(name):
    run, sampler = trained(name)
    parts, other = (run.model, run.optimizer, run.risk), Run(name)
    other.model, other.optimizer, other.risk = pickle.loads(pickle.dumps(parts))
    before, batches = run.state(), [sampler.draw() for _ in range(3)]
    said = [other.step(ids) for ids in batches]
    assert same(before, run.state()) and not same(before, other.state())
    assert said == [run.step(ids) for ids in batches]
    assert same(run.state(), other.state())


@ALL
def test_evaluation_changes_nothing(name):
    """It is that of the batch alone: on all data, the objective itself."""
    run, sampler = trained(name, **whole_number(name))
    other = copy.deepcopy(run)
    with torch.no_grad():
        run.call(sampler.draw())
    run.risk.eval()
    loss, exact = run.call(np.arange(SIZE)), brute(name, run.scores(torch.tensor(X)), 0.4)
    if name.startswith("two-way"):  # with the s of the training, which is no minimum
        assert loss > exact - 0.4 / 0.5
    else:
        torch.testing.assert_close(loss, exact, rtol=1e-10, atol=0)
    assert run.gradient(loss).norm() > 0, "it can be differentiated all the same"
    assert same(other.state(), run.state())
    run.risk.train()
    ids = sampler.draw()
    assert run.step(ids) == other.step(ids)
    assert same(other.state(), run.state())


# --- what went wrong elsewhere ----------------------------------------------------------------


@ALL
@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e200])
def test_a_bad_batch_is_refused_as_a_whole(name, factor):
    """Training goes on as if it had not been: no entry is dead, NaN or infinite."""
    run, sampler = trained(name)
    other = copy.deepcopy(run)
    before, ids = run.state(), sampler.draw()
    spoiled = torch.ones(len(ids), dtype=torch.float64)
    spoiled[[0, -1]] = factor  # a negative and a positive
    for factors in (spoiled, factor):
        try:
            run.call(ids, lambda x, run=run, by=factors: run.scores(x) * by)
        except NonFiniteValue:
            assert same(before, run.state())
        else:  # a score that is only large, or on the right side, has a value
            assert not math.isnan(factor)
            assert all(b.isfinite().all() for b in run.risk.term.tracker.buffers())
            run = copy.deepcopy(other)
    for _ in range(3):
        ids = sampler.draw()
        assert run.step(ids) == other.step(ids)
    assert same(run.state(), other.state())


def test_a_refused_second_batch_of_a_step_leaves_the_cut_off():
    run, sampler = trained("partial")
    first = run.call(sampler.draw())
    before = run.state()
    with pytest.raises(NonFiniteValue):
        run.call(sampler.draw(), lambda x: run.scores(x) * 1e200)
    lowest = torch.tensor(np.where((Y == 0) & (np.cumsum(1 - Y) <= 10), -math.inf, 0.0))
    with pytest.raises(NonFiniteValue):  # of infinite scores only the cut-off is infinite
        run.call(np.arange(SIZE), lambda x: run.scores(x) + lowest)
    assert same(before, run.state())
    first.backward()


@BINARY
def test_batches_without_a_pair(name):
    """Of one sample, of one class: no gradient, no change, one warning."""
    run, _ = trained(name)
    before, positive = run.state(), np.flatnonzero(Y == 1)
    with pytest.warns(UserWarning, match="no pair to learn from") as said:
        for ids in (positive[:1], positive, np.flatnonzero(Y == 0)):
            loss = run.call(ids)
            assert loss.item() == 0 and run.gradient(loss).norm() == 0
    assert len(said) == 1 and same(before, run.state())
    loss = run.call(positive[:3], lambda x: (run.scores(x).square(), run.scores(x)))
    torch.testing.assert_close(loss, run.scores(torch.tensor(X)[positive[:3]]).square().mean())


@pytest.mark.filterwarnings("ignore:.*no pair to learn from")
@pytest.mark.parametrize("name", ["auc-margin", "ap", "partial", "ndcg", "listwise"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_scores_without_a_pair_are_refused(name, bad):
    run, _ = trained(name)
    before = run.state()
    ids = [0] if run.case.data == "lists" else np.flatnonzero(Y == 1)
    for beside in (lambda h: h, lambda h: (run.model.weight.sum(), h)):
        with pytest.raises(NonFiniteValue, match=type(run.risk).__name__):
            run.call(ids, lambda x, beside=beside: beside(run.scores(x) * bad))
    with pytest.raises(NonFiniteValue, match="loss"):
        run.call(ids, lambda x: (run.model.weight.sum() * bad, run.scores(x)))
    assert same(before, run.state())
    run.risk.eval()
    assert run.call(ids, lambda x: run.scores(x) * bad).isnan()


@pytest.mark.parametrize("make", [xrisk.AUC, xrisk.AveragePrecision])
@pytest.mark.parametrize("rows", [[0, 3, 4], [1, 2, 3, 4, 5]])
def test_bad_scores_of_labels_without_a_pair_are_refused(make, rows):
    """Of a label with negatives alone, and of a sample whose label is unknown."""
    labels, rows = RARE.clone(), torch.tensor(rows)
    labels[4, 1] = math.nan
    model = nn.Linear(3, 2).double()
    risk = make(model, torch.optim.SGD(model.parameters()), labels)
    before = copy.deepcopy(dict(risk.named_buffers()))
    bad = torch.where(rows == 4, math.nan, 1.0)

    def scores() -> Tensor:
        first, second = model(torch.tensor(X)[rows]).unbind(1)
        return torch.stack([first, second * bad], 1)

    with pytest.raises(NonFiniteValue, match=f"`{make.__name__}`"):
        risk(scores, labels[rows], rows)
    assert same(before, dict(risk.named_buffers()))
    assert risk.eval()(scores, labels[rows], rows).isfinite()


@pytest.mark.parametrize("name", ["ndcg-top", "listwise"])
def test_items_without_others_of_their_list(name):
    run, _ = trained(name)
    before = run.state()
    with pytest.warns(UserWarning, match="no pair to learn from"):
        for ids in ([0], [23], [0, 8, 14], [1, 3, 5]):  # alone; nothing relevant
            assert run.call(ids).item() == 0
    assert same(before, run.state())


@ALL
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_scores_in_half_precision(name, kind):
    """Only the rounding of the scores is felt: differences are taken in single precision."""
    run, ids = Run(name, lr=0.0), batches_of(name, 1)[0]
    half = run.call(ids, lambda x: run.scores(x).to(kind))
    run.step(ids)
    other = Run(name, lr=0.0)
    full = other.call(ids, lambda x: other.scores(x).to(kind).float())
    assert half.item() == full.item() and run.gradient(half).isfinite().all()


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("margin", [0.5, 1.0, 3.0])
def test_surrogates(name, margin):
    d = torch.linspace(-4, 4, 31, dtype=torch.float64).requires_grad_()
    value, slope = PairLoss(name, margin)(d)
    torch.testing.assert_close(value, PAIR[name](d / margin))
    torch.testing.assert_close(slope, torch.autograd.grad(PAIR[name](d / margin).sum(), d)[0])
    assert PairLoss(name, margin)(torch.zeros(1))[0] == 1
    assert (value.diff() >= 0).all(), "the hardest negatives are those with the largest scores"
    far = torch.tensor([-1e4, 1e4])
    value, slope = PairLoss(name)(far)
    assert value.isfinite().all() and slope.isfinite().all()
    if name == "logistic":
        torch.testing.assert_close(value, torch.tensor([0.0, 1e4 / math.log(2)]))
        torch.testing.assert_close(slope, torch.tensor([0.0, 1 / math.log(2)]))


# --- parts ------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation gives."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.size = max([self.size, *sizes])
        return result


# The weights of the pairs, and whether the mean is that of exponentials.
PAIRS = pytest.mark.parametrize(("kind", "log_exp"), [
    ("all", False), ("split", False), ("others", False), ("lists", False), ("lists", True),
])  # fmt: skip


def weights_of(kind: str, row: Tensor, column: Tensor, like: Tensor) -> dict[str, Any]:
    """Arguments of `pair_means` for anchors that are the first of the others."""
    if kind == "split":
        return {"split": len(row) // 2}
    if kind == "lists":
        return {"weight": Members(torch.arange(len(row)), row, column)}
    if kind == "others":
        return {"weight": like[: len(column)].abs(), "level": like[: len(row)]}
    return {}


@PAIRS
def test_many_pairs_are_never_in_memory_at_once(kind, log_exp):
    number = 4096
    h = torch.randn(number, generator=torch.Generator().manual_seed(0)).requires_grad_()
    of = torch.arange(number) % 7
    with Largest() as largest:
        how = weights_of(kind, of, of, h.detach())
        pair_means(PairLoss(), h, h, log_exp=log_exp, **how).sum().backward()
    assert number <= largest.size <= 1 << 20


@PAIRS
def test_pairs_in_parts_are_those_at_once(monkeypatch, kind, log_exp):
    draw = torch.Generator().manual_seed(1)
    a, b, like, up = (torch.randn(n, generator=draw, dtype=torch.float64) for n in (9, 11, 11, 9))
    row, column = torch.arange(9) % 3, torch.arange(11) % 3
    how, results = weights_of(kind, row, column, like), []
    for kept, chunk in ((1000, 1000), (0, 25)):
        monkeypatch.setattr(pairs, "_KEPT", kept)
        monkeypatch.setattr(pairs, "_CHUNK", chunk)
        x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
        value = pair_means(PairLoss("logistic"), x, y, log_exp=log_exp, **how)
        value = value @ torch.tensor([1.0, 2.0]).double() if kind == "split" else value
        results.append([value, *torch.autograd.grad((value * up).sum(), (x, y))])
    x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
    losses = PAIR["logistic"](y[None] - x[:, None])
    weight = torch.full_like(losses, 1 / 11)
    if kind == "lists":
        counted = (row[:, None] == column[None]).double()
        counted[range(9), range(9)] = 0
        weight = counted / counted.sum(1, keepdim=True)
    by_hand = (weight * losses.exp()).sum(1).log() if log_exp else (weight * losses).sum(1)
    if kind == "split":
        by_hand = losses[:, :4].mean(1) + 2 * losses[:, 4:].mean(1)
    if kind == "others":
        by_hand = like[:9] + ((losses - like[:9, None]) * like.abs()).sum(1)
    exact = [by_hand, *torch.autograd.grad((by_hand * up).sum(), (x, y))]
    for result in results:
        torch.testing.assert_close(result, exact)


def test_positive_batch_sampler():
    """Counts, passes, ranks and resuming."""
    draw = np.random.default_rng(0)
    labels = (draw.random(97) < 0.2).astype(int)
    number = int(labels.sum())
    sampler = PositiveBatchSampler(labels, 12, 4, seed=3)
    batches = list(sampler)
    assert len(batches) == len(sampler) == -(-(97 - number) // 8)
    assert {(len(b), int(labels[b].sum())) for b in batches} == {(12, 4)}
    for kind, size in ((0, 97 - number), (1, number)):
        read = [i for batch in batches for i in batch if labels[i] == kind]
        for start in range(0, len(read), size):  # each once before any again
            part = read[start : start + size]
            assert len(set(part)) == len(part)
    assert sampler.epoch == 1 and next(iter(sampler)) != batches[0]
    ranks = [
        list(PositiveBatchSampler(labels, 12, 4, seed=3, rank=r, world_size=3)) for r in range(3)
    ]
    for whole_batch, *parts in zip(batches, *ranks, strict=True):
        assert sorted(itertools.chain(*parts)) == sorted(whole_batch)
        assert all(0 < labels[part].sum() < len(part) for part in parts)
    half = PositiveBatchSampler(labels, 12, 4, seed=3)
    for _ in range(5):
        half.draw()
    other = PositiveBatchSampler(labels, 12, 4, seed=9)
    other.load_state_dict(half.state_dict())
    assert list(other) == batches[5:]
    several = np.stack([labels, np.zeros(97), np.full(97, np.nan)], 1)
    assert list(PositiveBatchSampler(several, 12, 4, seed=3)) == batches
    few = PositiveBatchSampler([1, 1] + [0] * 20, 12)
    assert few.positives == 2 and {len(set(batch)) for batch in few} == {12}


def test_warm_start():
    """The losses of an epoch fall; unknown labels are left out, and the mode is restored."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.0)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.tensor(X).float()
    y = torch.tensor(Y).float()
    y[5] = math.nan
    known = ~y.isnan()
    (loss,) = xrisk.warm_start(model, optimizer, [(x, y, "more")])
    expected = nn.functional.binary_cross_entropy_with_logits(model(x[known]).squeeze(1), y[known])
    assert loss == pytest.approx(expected.item(), rel=1e-6) and not model.training
    optimizer.param_groups[0]["lr"] = 0.5
    losses = xrisk.warm_start(model, optimizer, [(x, y)] * 3, epochs=4)
    assert losses == sorted(losses, reverse=True) and len(losses) == 4
    with pytest.raises(ValueError, match="no batch in epoch 2"):
        xrisk.warm_start(model, optimizer, iter([(x, y)]), epochs=2)


# --- errors -----------------------------------------------------------------------------------

DEFAULTS: dict[str, dict[str, Any]] = {
    "AUC": {"labels": Y},
    "AveragePrecision": {"labels": Y},
    "PartialAUC": {"labels": Y, "max_fpr": 0.5},
    "TwoWayPartialAUC": {"labels": Y, **RATES},
    "NDCG": {"relevance": GRADE, "query": QUERY},
    "MultiInstanceAUC": {"labels": BAG_LABEL},
    "PositiveBatchSampler": {"labels": Y, "batch_size": 8},
    "warm_start": {"loader": []},
}


@pytest.mark.parametrize(
    ("call", "options", "words"),
    [
        ("AUC", {"labels": 2 * Y - 1}, "labels.*-1"),
        ("AUC", {"labels": np.ones(4)}, "4 and 0"),
        ("AUC", {"labels": np.array([1, 0, np.nan])}, "nan"),
        ("AUC", {"labels": np.zeros((2, 2, 2))}, "shape"),
        ("AveragePrecision", {"surrogate": "cubic"}, "surrogate"),
        ("AveragePrecision", {"margin": -1.0}, "margin"),
        ("AveragePrecision", {"gamma": 1.5}, "gamma"),
        ("AveragePrecision", {"activation": "tanh"}, "activation"),
        ("AveragePrecision", {"labels": np.stack([Y, 1 - Y], 1), "names": ["a", "a"]}, "differ"),
        ("AveragePrecision", {"labels": np.stack([Y, 0 * Y], 1)}, "label 1"),
        ("PartialAUC", {"max_fpr": 0.0}, "max_fpr"),
        ("TwoWayPartialAUC", {"min_tpr": 1.0}, "min_tpr"),
        ("TwoWayPartialAUC", {"smoothing": -1.0}, "smoothing"),
        ("NDCG", {"query": QUERY[:5]}, "equal length"),
        ("NDCG", {"relevance": -GRADE}, "at least 0"),
        ("NDCG", {"query": np.arange(SIZE)}, "nothing to rank"),
        ("NDCG", {"k": 0}, "k="),
        ("MultiInstanceAUC", {"labels": [1, 1]}, "both"),
        ("MultiInstanceAUC", {"temperature": 0.0}, "temperature"),
        ("PositiveBatchSampler", {"labels": [1, 1]}, "negatives"),
        ("PositiveBatchSampler", {"positives": 8}, "positives"),
        ("PositiveBatchSampler", {"rank": 0, "world_size": 9, "seed": 0}, "world_size"),
        ("warm_start", {"epochs": 0}, "epochs"),
        ("warm_start", {}, "loader"),
    ],
)
def test_settings_are_refused_in_the_words_of_the_call(call, options, words):
    model: Any = nn.Linear(3, 1)
    first: Any = model, torch.optim.SGD(model.parameters())
    make: Any = getattr(xrisk, call, PositiveBatchSampler)
    with pytest.raises((ValueError, TypeError), match=words) as said:
        make(*(first if make is not PositiveBatchSampler else ()), **DEFAULTS[call] | options)
    assert f"`{call}(" in str(said.value) or "gamma" in options or call == "MultiInstanceAUC"


@pytest.mark.parametrize("name", ["ap", "partial", "two-way"])
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((2 * Y - 1, None), ValueError, "-1"),
        ((Y[:5], np.arange(-1, 4)), IndexError, r"\[0, 23\]"),
        ((Y[:5], np.arange(20, 25)), IndexError, "reaches from 20 to 24"),
        ((Y[:5], np.arange(5.0)), ValueError, "integers"),
        ((Y[:5], np.arange(4)), ValueError, "`index`"),
        ((Y[:5], None), ValueError, "numbers of these rows"),
        ((1 - Y, None), ValueError, "differ from those of the training set"),
        ((np.stack([Y, Y], 1), None), ValueError, "shape"),
    ],
)
def test_calls_are_refused_before_anything_changes(name, arguments, error, words):
    run, _ = trained(name)
    before, x = run.state(), torch.tensor(X)[: len(arguments[0])]
    with pytest.raises(error, match=words):
        run.risk(lambda: run.scores(x), *arguments)
    for wrong in (
        lambda: [1.0],
        lambda: run.scores(x)[1:],
        lambda: torch.stack([run.scores(x)] * 2, 1),
    ):
        with pytest.raises((ValueError, TypeError), match=type(run.risk).__name__):
            run.risk(wrong, Y[: len(x)], np.arange(len(x)))
    assert same(before, run.state())


@pytest.mark.parametrize("name", ["ndcg-top", "listwise"])
def test_calls_of_ranking_risks_are_refused(name):
    run, _ = trained(name)
    before, x = run.state(), torch.tensor(X)
    for index, words in ((range(-1, 23), "reaches from -1"), (np.arange(24.0), "integers")):
        with pytest.raises((IndexError, ValueError), match=words):
            run.risk(lambda: run.scores(x), list(index))
    with pytest.raises(ValueError, match=r"a score for each entry.*`index`"):
        run.risk(lambda: run.scores(x)[1:], None)
    assert same(before, run.state())


@ALL
def test_scores_in_place_of_a_function_are_refused(name):
    run, _ = trained(name)
    before, ids = run.state(), torch.arange(SIZE)
    given = {"labels": (Y, ids), "lists": (ids,), "bags": (BAG,)}[run.case.data]
    with pytest.raises(TypeError, match=f"`{type(run.risk).__name__}`.*function.*Tensor.*lambda"):
        run.risk(run.scores(torch.tensor(X)), *given)
    assert same(before, run.state())


def test_bags_of_one_class_are_refused():
    run, _ = trained("bags")
    before, only = run.state(), np.flatnonzero(np.isin(BAG, [1, 2]))
    with pytest.raises(ValueError, match="both classes"):
        run.call(only)
    assert same(before, run.state())


@pytest.mark.parametrize("name", ["ap", "auc-margin", "partial", "two-way"])
def test_other_samples_are_evaluated_without_an_index(name):
    """In `eval()` there may be more positives than in the training set."""
    run = fixed(name)
    run.risk.eval()
    x, y = torch.tensor(np.concatenate([X, X + 0.1])), np.concatenate([Y, Y])
    before = run.state()
    found = run.risk(lambda: run.scores(x), y)
    assert torch.equal(run.risk(lambda: run.scores(torch.tensor(X)), Y), run.risk(
        lambda: run.scores(torch.tensor(X)), Y, np.arange(len(Y))))  # fmt: skip
    assert found.requires_grad and torch.isfinite(found) and same(before, run.state())
