"""The algorithms of `fcco.xrisk`, transcribed in NumPy float64 for scores x.w.

Nothing here imports fcco or torch. Values are tracked as they are, never as logarithms, and every
derivative by the scores is written out as a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray
Pair = Callable[[Array], tuple[Array, Array]]


def sigmoid(t: Array) -> Array:
    return 1 / (1 + np.exp(-t))


def plus(t: Array) -> Array:
    return np.maximum(t, 0.0)


SURROGATES: dict[str, Pair] = {
    "squared_hinge": lambda d: (plus(1 + d) ** 2, 2 * plus(1 + d)),
    "hinge": lambda d: (plus(1 + d), (d > -1).astype(float)),
    "squared": lambda d: ((1 + d) ** 2, 2 * (1 + d)),
    "logistic": lambda d: (np.log2(1 + np.exp(d)), sigmoid(d) / np.log(2)),
    "sigmoid": lambda d: (2 * sigmoid(d), 2 * sigmoid(d) * sigmoid(-d)),
}
"""The surrogates l with margin 1, and their derivatives."""


class Average:
    """u <- (1 - gamma) u + gamma g from the first g on; the calls of one step are pooled."""

    def __init__(self, gamma: float) -> None:
        self.gamma, self.u, self.open = gamma, {}, {}

    def __call__(self, block: Array, rows: Array) -> tuple[Array, Array]:
        """The distinct blocks and their new u."""
        for b, row in zip(block.tolist(), rows, strict=True):
            total, count = self.open.get(b, (0.0, 0))
            self.open[b] = total + row, count + 1
        distinct = np.unique(block)
        return distinct, np.array([self.now(b) for b in distinct.tolist()])

    def now(self, b: int) -> Any:
        fresh = self.open[b][0] / self.open[b][1]
        return (1 - self.gamma) * self.u[b] + self.gamma * fresh if b in self.u else fresh

    def close(self) -> None:
        self.u |= {b: self.now(b) for b in self.open}
        self.open = {}


class Table:
    """Parameters of blocks: proposals of one step are averaged at its end."""

    def __init__(self) -> None:
        self.value: dict[int, float] = {}
        self.open: dict[int, list[float]] = {}

    def propose(self, block: Array, values: Array) -> None:
        for b, value in zip(block.tolist(), values.tolist(), strict=True):
            self.open.setdefault(b, []).append(value)

    def close(self) -> None:
        self.value |= {b: float(np.mean(values)) for b, values in self.open.items()}
        self.open = {}


def pairs(anchors: Any, others: Any, pair: Pair, skip: Array | None = None) -> Any:
    """Mean_j l(h_j - h_i) of each anchor i, and its derivatives by all scores of a batch.

    Args:
        anchors: (h, positions in the batch).
        others: likewise.
        pair: l.
        skip: (P, M), True for pairs that do not count.
    """
    (a, at_a), (b, at_b) = anchors, others
    value, slope = pair(b[None] - a[:, None])
    weight = np.ones_like(value) if skip is None else 1.0 - skip
    weight = weight / np.maximum(weight.sum(1, keepdims=True), 1)
    jacobian = np.zeros((len(a), 1 + max(at_a.max(), at_b.max())))
    np.add.at(jacobian, (np.arange(len(a))[:, None], at_b[None]), weight * slope)
    np.add.at(jacobian, (np.arange(len(a)), at_a), -(weight * slope).sum(1))
    return (weight * value).sum(1), jacobian


def per_block(block: Array, jacobian: Array, slope: Array) -> Array:
    """Sum over distinct blocks of slope times the mean of their rows of the Jacobian."""
    distinct, which, count = np.unique(block, return_inverse=True, return_counts=True)
    assert len(distinct) == len(slope)
    return (slope / count)[which] @ jacobian


class Reference:
    """An objective on data x with weights w, trained by plain gradient descent.

    `activated`: scores become probabilities before they are compared; `margin`: that of l.
    """

    activated, margin, surrogate = False, 1.0, "squared_hinge"

    def pair(self, d: Array) -> tuple[Array, Array]:
        value, slope = SURROGATES[self.surrogate](d / self.margin)
        return value, slope / self.margin

    def __init__(self, x: Array, w: Array, lr: float, **averages: float) -> None:
        self.x, self.w, self.lr = x, w.copy(), lr
        # Without tracking a step still has one value, the mean over its batches.
        self.averages = {name: Average(gamma) for name, gamma in (averages | {"1": 1.0}).items()}
        self.table = Table()

    def loss(self, ids: Array, h: Array) -> tuple[float, Array]:
        """The value and the derivatives by the scores of a batch."""
        raise NotImplementedError

    def pooled(self, value: float) -> float:
        return self.averages["1"](np.array([0]), np.array([value]))[1][0]

    def step(self, *batches: Array) -> list[float]:
        losses, gradient = [], np.zeros_like(self.w)
        for ids in batches:
            h = self.x[ids] @ self.w
            value, slope = self.loss(ids, sigmoid(h) if self.activated else h)
            losses.append(value)
            h = h[: len(slope)]
            slope = slope * sigmoid(h) * sigmoid(-h) if self.activated else slope
            gradient += slope @ self.x[ids][: len(slope)] / len(batches)
        self.w -= self.lr * gradient
        for each in (*self.averages.values(), self.table):
            each.close()
        return losses


class Binary(Reference):
    """Risks of labels; `block` is the number of each positive among the positives."""

    def __init__(self, x: Array, w: Array, lr: float, y: Array, pair: str, **averages: float):
        super().__init__(x, w, lr, **averages)
        self.y, self.surrogate, self.block = y, pair, np.cumsum(y) - 1
        self.positives, self.negatives = int(y.sum()), int((1 - y).sum())

    def split(self, ids: Array, h: Array) -> Any:
        positive, negative = np.flatnonzero(self.y[ids] == 1), np.flatnonzero(self.y[ids] == 0)
        return (h[positive], positive), (h[negative], negative), self.block[ids[positive]]


def separation(u: Array, hinge: bool, margin: float = 1.0) -> tuple[float, Array]:
    a, a2, b, b2 = u
    gap = margin + b - a
    gap = max(gap, 0.0) if hinge else gap
    value = (a2 - a * a) + (b2 - b * b) + gap * gap
    return value, np.array([-2 * a - 2 * gap, 1.0, -2 * b + 2 * gap, 1.0])


class AUC(Binary):
    form = "margin"

    def loss(self, ids: Array, h: Array) -> tuple[float, Array]:
        pos, neg, _ = self.split(ids, h)
        if self.form == "pairwise":
            value, jacobian = pairs(pos, neg, self.pair)
            return self.pooled(value.mean()), jacobian.mean(0)
        fresh = [part for s, _ in (pos, neg) for part in (s.mean(), (s**2).mean())]
        _, (u,) = self.averages["g"](np.array([0]), np.array([fresh]))
        value, slope = separation(u, self.form == "margin")
        gradient = np.zeros(len(h))
        for (s, at), (first, second) in ((pos, slope[:2]), (neg, slope[2:])):
            gradient[at] = (first + 2 * s * second) / len(s)
        return value, gradient


class AveragePrecision(Binary):
    def ranks(self, ids: Array, h: Array) -> tuple[Array, Array, Array]:
        """Blocks, both ranks (P, 2) and their Jacobian (P, 2, B)."""
        pos, neg, block = self.split(ids, h)
        number, size = len(block), len(h)
        above, j_above = pairs(pos, pos, self.pair, np.eye(number, dtype=bool))
        below, j_below = pairs(pos, neg, self.pair)
        jacobian = np.zeros((number, 2, size))
        jacobian[:, 0, : j_above.shape[1]] = (self.positives - 1) * j_above
        jacobian[:, 1] = jacobian[:, 0]
        jacobian[:, 1, : j_below.shape[1]] += self.negatives * j_below
        rank = 1 + (self.positives - 1) * above * (number > 1)
        return block, np.stack([rank, rank + self.negatives * below], 1), jacobian

    def loss(self, ids: Array, h: Array) -> tuple[float, Array]:
        block, ranks, jacobian = self.ranks(ids, h)
        _, u = self.averages["g"](block, ranks)
        slope = np.stack([-1 / u[:, 1], u[:, 0] / u[:, 1] ** 2], 1) / len(u)
        parts = [per_block(block, jacobian[:, k], slope[:, k]) for k in (0, 1)]
        return float((-u[:, 0] / u[:, 1]).mean()), parts[0] + parts[1]


class PartialAUC(Binary):
    """One-way with `ratio=None`, two-way with the share of positives."""

    share, own, rate = 0.4, False, 0.1
    ratio: float | None = None
    smoothing = 0.0

    def of_positives(self, pos: Any, neg: Any, block: Array) -> tuple[Array, Array]:
        """g_i = s_i + mean_j [l - s_i]_+ / share, s_i being a constant."""
        cutoff = np.quantile(neg[0], 1 - self.share, method="normal_unbiased")
        if self.own:
            first = self.pair(cutoff - pos[0])[0]
            s = np.array([self.table.value.get(b, f) for b, f in zip(block, first, strict=True)])
            losses = self.pair(neg[0][None] - pos[0][:, None])[0]
            spread = self.pair(neg[0] - pos[0].mean())[0].std()
            slope = 1 - (losses > s[:, None]).mean(1) / self.share
            self.table.propose(block, s - self.rate * spread * slope)
        else:
            old = self.table.value.get(0, cutoff)
            q = old + 0.2 * (cutoff - old)
            self.table.propose(np.array([0]), np.array([q]))
            s = self.pair(q - pos[0])[0]
        values, rows = [], []
        for i in range(len(s)):

            def excess(d: Array, s: float = s[i]) -> tuple[Array, Array]:
                value, slope = self.pair(d)
                return plus(value - s) / self.share, slope * (value > s) / self.share

            value, row = pairs((pos[0][i : i + 1], pos[1][i : i + 1]), neg, excess)
            values.append(s[i] + value[0])
            rows.append(np.pad(row[0], (0, 1 + max(pos[1].max(), neg[1].max()) - row.shape[1])))
        return np.array(values), np.array(rows)

    def loss(self, ids: Array, h: Array) -> tuple[float, Array]:
        pos, neg, block = self.split(ids, h)
        g, jacobian = self.of_positives(pos, neg, block)
        if self.ratio is None:
            return self.pooled(g.mean()), jacobian.mean(0)
        average, r, lam = self.averages["g"], self.ratio, self.smoothing
        _, u = average(block, g)
        table = np.array(list((average.u | {b: average.now(b) for b in average.open}).values()))
        if lam == 0:
            s = np.sort(table)[-int(np.ceil(r * len(table) - 1e-9))]
            kink = (len(table) - (table > s).sum() / r) / (table == s).sum()
            slope = np.where(u == s, kink, (u > s) / r)
            value = s + (plus(u - s) / r).mean()
        else:
            low, high = table.min() - 2 * lam / r, table.max()
            for _ in range(200):  # the largest s at which the weights sum to 1 or more
                s = (low + high) / 2
                full = np.clip((table - s) / lam, 0, 1 / r).mean() >= 1 - 1e-14
                low, high = (s, high) if full else (low, s)
            slope = np.clip((u - s) / lam, 0, 1 / r)
            value = s + (slope * (u - s) - lam / 2 * slope**2).mean()
        return value, per_block(block, jacobian, slope / len(u))


class Ranking(Reference):
    """NDCG, of the top k unless that is None, and with `entropy` listwise cross-entropy."""

    k: int | None = None
    entropy = False

    def __init__(self, x: Array, w: Array, lr: float, y: Array, query: Array, pair: str, **gamma):
        super().__init__(x, w, lr, **gamma)
        self.y, self.query, self.surrogate = y, query, pair
        self.weight = np.zeros(len(y))
        for q in np.unique(query):
            at = np.flatnonzero(query == q)
            gains = 2.0 ** y[at] - 1
            best = np.sort(gains)[::-1] / np.log2(2 + np.arange(len(at)))
            total = y[at].sum() if self.entropy else best[: self.k].sum()
            self.weight[at] = (y[at] if self.entropy else gains) / (total or 1)

    def cutoff(self, q: int, h: Array) -> tuple[float, float]:
        """Lambda_q, which moves towards that of the batch by the share of its list there."""
        assert self.k is not None
        size, ordered = (self.query == q).sum(), np.sort(h)[::-1]
        place = min(max(int(np.round(self.k * len(h) / size)), 1), len(h) - 1)
        best = (ordered[place - 1] + ordered[place]) / 2 if size > self.k else ordered[-1] - 1e6
        share = min(len(h) / size, 1.0)
        value = (1 - share) * self.table.value.get(q, best) + share * best
        self.table.propose(np.array([q]), np.array([value]))
        return value, h.std() + 1e-6

    def loss(self, ids: Array, h: Array) -> tuple[float, Array]:
        total, gradient, lists = 0.0, np.zeros(len(h)), 0
        for q in np.unique(self.query[ids]):
            at = np.flatnonzero(self.query[ids] == q)
            relevant, size = at[self.y[ids[at]] > 0], (self.query == q).sum()
            drawn = len(np.unique(ids[at]))
            if drawn < 2 or not self.y[self.query == q].any():
                continue
            lists += 1  # also if none of its relevant items are here
            if len(relevant) == 0:
                continue
            others = size - 1
            pair: Pair = (lambda d: (np.exp(d), np.exp(d))) if self.entropy else self.pair
            mean, jacobian = pairs(
                (h[relevant], relevant), (h[at], at), pair, relevant[:, None] == at[None]
            )
            rows, parts = [others * mean + (0 if self.entropy else 1)], [others * jacobian]
            if self.k is not None:
                cutoff, spread = self.cutoff(int(q), h[at])
                top = sigmoid((h[relevant] - cutoff) / spread)
                rows.append(top)
                part = np.zeros_like(jacobian)
                part[np.arange(len(top)), relevant] = top * (1 - top) / spread
                parts.append(part)
            block, u = self.averages["g"](ids[relevant], np.stack(rows, 1))
            rank, top = u[:, 0], (u[:, 1] if self.k is not None else 1.0)
            c = self.weight[block] * size / drawn
            if self.entropy:
                value, slopes = np.log(1 + rank), [1 / (1 + rank)]
            else:
                log = np.log2(1 + rank)
                slopes = [top / log**2 / (1 + rank) / np.log(2), -1 / log]
                value = -top / log
            total += (c * value).sum()
            for slope, part in zip(slopes, parts, strict=False):
                gradient[: part.shape[1]] += per_block(ids[relevant], part, c * slope)
        return total / lists, gradient / lists


class Bags(Reference):
    """AUC of bags: u_b tracks mean exp(h / tau), v the class means of H = tau log u and H^2."""

    tau = 1.0

    def __init__(self, x: Array, w: Array, lr: float, y: Array, bag: Array, **averages: float):
        super().__init__(x, w, lr, **averages)
        self.y, self.bag = y, bag

    def loss(self, ids: Array, h: Array) -> tuple[float, Array]:
        fresh = np.exp(h / self.tau)
        block, u = self.averages["g"](self.bag[ids], fresh)
        score, positive = self.tau * np.log(u), self.y[block] == 1
        means = [m for s in (score[positive], score[~positive]) for m in (s.mean(), (s**2).mean())]
        _, (v,) = self.averages["v"](np.array([0]), np.array([means]))
        value, slope = separation(v, hinge=True)
        first = np.where(positive, slope[0] / positive.sum(), slope[2] / (~positive).sum())
        second = np.where(positive, slope[1] / positive.sum(), slope[3] / (~positive).sum())
        by_u = (first + 2 * score * second) * self.tau / u
        return value, per_block(self.bag[ids], np.diag(fresh / self.tau), by_u)
