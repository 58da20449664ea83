"""Risks over pairs of scores, against transcriptions, brute force and the faults of others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import reference_xrisk as reference
import torch
from torch import Tensor, nn
from torch.nn.functional import relu, softplus

from fcco import xrisk

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
        gamma = {"g": GAMMA, "v": MIDDLE, "q": MIDDLE}
        kind = type("Settings", (self.transcription,), self.settings)
        return kind(X, w, lr, *data.get(self.data, (BAG_LABEL, BAG)), **gamma)


def partial(pair: str = "squared_hinge", two: bool = False, **options: Any) -> Case:
    own = options.get("threshold") == "own"
    settings: dict[str, Any] = {"share": SHARE, "own": own}
    if two:
        settings |= {"ratio": 0.5, "smoothing": options["smoothing"]}
    make = xrisk.TwoWayPartialAUC if two else xrisk.PartialAUC
    rates = RATES if two else {"max_fpr": SHARE}
    options |= {"surrogate": pair, **rates}
    return Case(make, options, reference.PartialAUC, pair, settings=settings)


CASES: dict[str, Case] = {
    "auc-margin": Case(xrisk.AUC, {}, reference.AUC),
    "auc-squared": Case(
        xrisk.AUC, {"loss": "squared"}, reference.AUC, settings={"form": "squared"}
    ),
    "auc-pairwise": Case(
        xrisk.AUC,
        {"loss": "pairwise", "surrogate": "squared"},
        reference.AUC,
        "squared",
        settings={"form": "pairwise"},
    ),
    "ap": Case(xrisk.AveragePrecision, {}, reference.AveragePrecision),
    "ap-sigmoid": Case(
        xrisk.AveragePrecision, {"surrogate": "sigmoid"}, reference.AveragePrecision, "sigmoid"
    ),
    "partial-shared": partial(threshold="shared"),
    "partial-own": partial("logistic", threshold="own"),
    "partial-kl": Case(
        xrisk.PartialAUC,
        {"max_fpr": SHARE, "form": "kl", "surrogate": "hinge", "temperature": 0.7},
        reference.SoftPartialAUC,
        "hinge",
        settings={"tau": 0.7},
    ),
    "two-way-shared": partial(two=True, smoothing=0.4, threshold="shared"),
    "two-way-own": partial("hinge", two=True, smoothing=0.0, threshold="own"),
    "two-way-kl": Case(
        xrisk.TwoWayPartialAUC,
        {**RATES, "form": "kl", "surrogate": "logistic", "temperature": 0.8}
        | {"positive_temperature": 1.7},
        reference.SoftPartialAUC,
        "logistic",
        settings={"tau": 0.8, "outer_tau": 1.7},
    ),
    "ndcg": Case(xrisk.NDCG, {}, reference.Ranking, data="lists"),
    "ndcg-top": Case(
        xrisk.NDCG,
        {"k": 3, "surrogate": "sigmoid"},
        reference.Ranking,
        "sigmoid",
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
UNTRACKED = ("auc-pairwise", "partial-shared", "partial-own")
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
    run = Run(name, **gamma, **more)
    if name.endswith("shared"):
        run.risk.term.tables[-1].gamma = MIDDLE  # the cut-off
    elif name == "two-way-kl":
        run.risk.term.mean.gamma = MIDDLE
    return run


def batches_of(name: str, number: int) -> list[np.ndarray]:
    """Batches with both classes, one of them with a sample twice."""
    draw, result = np.random.default_rng(11), []
    while len(result) < number:
        ids = draw.choice(SIZE, 13, replace=False)
        ids[-1] = ids[0] if len(result) == 3 else ids[-1]
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
    if "q" in expected.averages and expected.averages["q"].u:
        tables["q"] = term.tables[-1]
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
        values = term.tables[-1].value
        np.testing.assert_allclose(values[rows], list(found.values()), rtol=1e-10, atol=1e-10)
        assert values.isnan().sum() == len(values) - len(rows)


@ALL
@pytest.mark.parametrize("micro", [1, 2])
def test_steps_equal_the_transcription(name, micro):
    """Also with two micro-batches per step: pairs are formed within each, values are pooled."""
    run = fixed(name)
    expected = run.case.transcribe(run.model.weight.detach().numpy()[0], 0.1)
    batches = batches_of(name, 7 * micro)
    start = expected.w.copy()
    for k in range(7):
        part = batches[k * micro : (k + 1) * micro]
        np.testing.assert_allclose(run.step(*part), expected.step(*part), rtol=1e-10)
        weights = run.model.weight.detach().numpy()[0]
        np.testing.assert_allclose(weights, expected.w, rtol=1e-10, atol=1e-12)
        compare_tables(run, expected)
    assert np.abs(expected.w - start).max() > 0.005


PAIR: dict[str, Callable[[Tensor], Tensor]] = {
    "squared_hinge": lambda d: relu(1 + d) ** 2,
    "hinge": lambda d: relu(1 + d),
    "squared": lambda d: (1 + d) ** 2,
    "logistic": lambda d: softplus(d) / math.log(2),
    "sigmoid": lambda d: 2 * torch.sigmoid(d),
}


def worst(values: Tensor, share: float) -> Tensor:
    """The mean of the largest `share` of each row, by sorting; the last counts in part."""
    ordered, number = values.sort(-1, descending=True).values, share * values.shape[-1]
    weight = (number - torch.arange(values.shape[-1]).to(values)).clamp(0, 1)
    return (ordered * weight).sum(-1) / number


def brute(name: str, h: Tensor, share: float) -> Tensor:
    """The objective itself on all data."""
    case, pair = CASES[name], PAIR[CASES[name].pair]
    if case.data == "labels":
        p, n = h[torch.tensor(Y == 1)], h[torch.tensor(Y == 0)]
        losses = pair(n[None] - p[:, None])
        if name == "auc-margin":
            both = p.var(correction=0) + n.var(correction=0)
            return both + relu(1 + n.mean() - p.mean()) ** 2
        if name == "auc-squared":
            return ((1 + n[None] - p[:, None]) ** 2).mean()
        if name == "auc-pairwise":
            return losses.mean()
        if name.startswith("ap"):
            above = pair(p[None] - p[:, None])
            rank = 1 + above.sum(1) - above.diagonal()
            return -(rank / (rank + losses.sum(1))).mean()
        if name == "partial-kl":
            return 0.7 * (losses / 0.7).exp().mean(1).log().mean()
        if name == "two-way-kl":
            inner = (losses / 0.8).exp().mean(1)
            return 1.7 * (inner ** (0.8 / 1.7)).mean().log()
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
    run = Run(name, **options, **more)
    if name == "two-way-kl":
        run.risk.term.mean.gamma = 1.0
    return run


@ALL
def test_full_batch_is_the_objective_itself(name):
    """With gamma = 1 value and gradient are those of the objective, by brute force."""
    cvar = name.startswith(("partial", "two-way")) and not name.endswith("kl")
    more = {"max_fpr": 0.4} if cvar else {}  # 6 of the 15 negatives
    run = whole(name, **more, **({"smoothing": 0.0} if name == "two-way-shared" else {}))
    loss = run.call(np.arange(SIZE))
    expected = brute(name, run.scores(torch.tensor(X)), 0.4)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(run.risk.value(), expected.detach(), rtol=1e-10, atol=0)
    gradient, exact = run.gradient(loss), run.gradient(expected)
    assert exact.norm() > 1e-3
    torch.testing.assert_close(gradient, exact, rtol=1e-9, atol=1e-12)
    run.risk.eval()
    with torch.no_grad():
        torch.testing.assert_close(run.call(np.arange(SIZE)), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["partial-shared", "partial-own", "two-way-own"])
def test_a_share_that_is_no_whole_number_of_negatives(name):
    """A bound from above for the quantile of the batch, exact for the best threshold."""
    run = whole(name, max_fpr=0.31)  # 4.65 negatives
    h = run.scores(torch.tensor(X)).detach()
    exact = brute(name, h, 0.31)
    loss = run.call(np.arange(SIZE)).item()
    assert exact < loss < 1.05 * exact
    if name.endswith("own"):
        run = whole(name, max_fpr=0.31)
        fifth = h[torch.tensor(Y == 0)].sort(descending=True).values[4]
        best = PAIR[CASES[name].pair](fifth - h[torch.tensor(Y == 1)])
        run.risk.term.tables[-1].set(None, best)
        assert run.call(np.arange(SIZE)).item() == pytest.approx(exact.item(), rel=1e-12)


def test_thresholds_of_positives_find_the_quantile():
    run = whole("partial-own", lr=0.0, max_fpr=0.31, threshold_lr=0.02)
    for _ in range(400):
        run.step(np.arange(SIZE))
    loss = run.call(np.arange(SIZE)).item()
    exact = brute("partial-own", run.scores(torch.tensor(X)), 0.31).item()
    assert loss == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("shape", [(2, 1), (3, 2), (9, 1)])
def test_ranks_are_estimated_without_bias(shape):
    """The mean over all batches with fixed numbers of positives and negatives is the rank."""
    run, h = Run("ap"), torch.tensor(X[:, 0])
    term = run.risk.term
    p, n = torch.tensor(np.flatnonzero(Y == 1)), torch.tensor(np.flatnonzero(Y == 0))
    total, count = torch.zeros(9, 2, dtype=torch.float64), torch.zeros(9, 1)
    for block in itertools.combinations(range(9), shape[0]):
        for some in itertools.combinations(range(15), shape[1]):
            at = torch.tensor(block)
            total[at] += run.risk.values(term, h[p[at]], h[n[list(some)]], at, [])
            count[at] += 1
    above = PAIR["squared_hinge"](h[p][None] - h[p][:, None])
    rank = 1 + above.sum(1) - above.diagonal()
    below = PAIR["squared_hinge"](h[n][None] - h[p][:, None]).sum(1)
    torch.testing.assert_close(total / count, torch.stack([rank, rank + below], 1))


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
