"""Generated data sets: no file, no network, a known answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .arrays import FairnessData, arrays
from .grouped import (
    TEST,
    TRAIN,
    GroupedData,
    Vectors,
    WholeGroups,
    WithinCells,
    WithinGroups,
    kept,
    sampled,
)
from .sources import digest

SIGNAL, PROXY = 1.6, 3.0  # how far the means of the labels, and of the groups, are apart
BASE_RATES, GROUP_SHARE = (0.2, 0.7), 0.6


def two_groups_synthetic(
    rows: int = 4000,
    test_rows: int = 2000,
    *,
    features: int = 8,
    validation: float = 0.2,
    seed: int = 0,
) -> GroupedData:
    r"""Gaussian features: one half tells the label, the other half tells the group.

    .. math::
        a \sim \mathrm{Bernoulli}(0.6), \quad y \mid a \sim \mathrm{Bernoulli}(p_a), \quad
        x = \Bigl(\tfrac{1.6}{\sqrt{k}}\,(y - \tfrac12)\mathbf 1_k,\;
                  \tfrac{3}{\sqrt{l}}\,(a - \tfrac12)\mathbf 1_l\Bigr) + \mathcal N(0, I),
        \qquad k = \lceil d/2\rceil,\ l = \lfloor d/2\rfloor

    The second half says nothing about the label within a group; but the groups' base rates 0.2 and
    0.7 differ, so a classifier that only wants a high AUC uses it, and its ROC curves differ
    between the groups: a logistic regression has AUC 0.90 and a largest gap of 0.36. One that looks
    at the first half alone is exactly fair and has the AUC :math:`\Phi(1.6/\sqrt2) = 0.87`.

    Example:
        >>> data = synthetic(rows=500, test_rows=100)
        >>> len(data.train), len(data.test), data.train.features.shape[1]
        (400, 100, 8)
    """
    tells_label = (features + 1) // 2
    tells_group = features - tells_label
    # Two streams: more test rows must not change the training rows.
    first, second = np.random.SeedSequence(seed).spawn(2)

    def draw(sequence: np.random.SeedSequence, size: int) -> tuple[np.ndarray, ...]:
        random = np.random.default_rng(sequence)
        group = (random.random(size) < GROUP_SHARE).astype(np.int64)
        label = (random.random(size) < np.array(BASE_RATES)[group]).astype(np.int64)
        table = random.standard_normal((size, features))
        table[:, :tells_label] += SIGNAL / tells_label**0.5 * (label[:, None] - 0.5)
        table[:, tells_label:] += PROXY / tells_group**0.5 * (group[:, None] - 0.5)
        return table, label, group

    names = [f"label-{k}" for k in range(tells_label)] + [f"group-{k}" for k in range(tells_group)]
    both = zip(draw(first, rows), draw(second, test_rows), strict=True)
    table, label, group = (torch.from_numpy(np.concatenate(pair)) for pair in both)
    split = torch.tensor([TRAIN] * rows + [TEST] * test_rows)
    cut = WithinCells(label, group, ("group 0", "group 1"), split, validation)
    return GroupedData(
        "synthetic", "vector", Vectors(table), ("0", "1"), cut,
        digest("synthetic", table.numpy().tobytes()), feature_names=tuple(names),
    )  # fmt: skip


def synthetic(
    rows: int = 4000, test_rows: int = 2000, *, seed: int = 0, **options: Any
) -> FairnessData:
    """`two_groups_synthetic` as arrays; the seed draws and splits."""
    return arrays(two_groups_synthetic(rows, test_rows, seed=seed, **options), seed)


def grouped_synthetic(
    groups: int = 12,
    *,
    rows: int = 3000,
    features: int = 8,
    classes: int = 2,
    seed: int = 0,
    limit: int = 0,
) -> GroupedData:
    r"""Vectors whose labels follow one rule in the large groups and another in the small ones.

    .. math::
        n_i \propto 0.75^{\,i}, \qquad x \sim \mathcal N(\mu_i, I), \qquad
        y = \arg\max_k\, \langle (1 - t_i) a_k + t_i b_k,\, x - \mu_i\rangle + \varepsilon_k, \qquad
        t_i = \tfrac{i}{n - 1},\ i = 0, \dots, n - 1

    So a model that fits the average fits the first groups and fails the last ones, and the worst
    groups can only become better at the cost of the others. Noise :math:`\varepsilon` makes every
    group hard to some degree.

    Args:
        groups: :math:`n`.
        rows: of all groups, at least 10 for each.
        features: length of the vectors.
        classes: of the labels.
        seed: of all values; the cut has its own.
        limit: vectors of each group that are kept; 0 keeps all.

    Example:
        >>> data = grouped_synthetic(groups=3, rows=300)
        >>> data.kind, len(data.samples), data.cut(0)["train"].group_names
        ('vector', 300, ('group 1', 'group 2', 'group 3'))
    """
    if groups < 2 or rows < 10 * groups:
        raise ValueError(f"There must be 2 groups with 10 rows each but are: {groups}, {rows}.")
    random = np.random.default_rng(seed)
    share = 0.75 ** np.arange(groups)
    sizes = 10 + np.floor((rows - 10 * groups) * share / share.sum()).astype(int)
    sizes[0] += rows - sizes.sum()
    group = np.repeat(np.arange(groups), sizes)
    means = random.standard_normal((groups, features))
    rules = random.standard_normal((2, classes, features)) * 3 / features**0.5
    noise = random.standard_normal((rows, classes)) * 0.5
    inner = random.standard_normal((rows, features))
    other = (group / (groups - 1))[:, None]
    scores = (1 - other) * (inner @ rules[0].T) + other * (inner @ rules[1].T) + noise
    label = torch.from_numpy(scores.argmax(1))
    table = torch.from_numpy((inner + means[group]).astype(np.float32))
    own = kept(torch.from_numpy(group), limit)
    return GroupedData(
        name="grouped-synthetic",
        kind="vector",
        samples=Vectors(table[own]),
        class_names=tuple(f"class {number}" for number in range(classes)),
        cut=WithinGroups(
            label[own],
            torch.from_numpy(group)[own],
            tuple(f"group {number}" for number in range(1, groups + 1)),
        ),
        fingerprint=digest("grouped-synthetic", classes, limit, table.numpy().tobytes()),
    )


SMALLEST = 10


def scenes_synthetic(
    samples: int = 2000,
    *,
    classes: Sequence[str] = ("clear", "cloudy", "rainy", "snowy", "foggy"),
    dim: int = 32,
    seed: int = 0,
    limit: int = 0,
) -> GroupedData:
    r"""Vectors in classes of unequal size; the last class lies among those before it.

    .. math::
        n_k \propto 0.75^{\,k}, \qquad x \sim \mathcal N(\mu_k, I), \qquad
        \mu_k = 3 e_k \ (k < K), \qquad
        \mu_K = 1.5\, (e_{K-1} + e_{K-2}) + 1.5\, e_K

    with :math:`e_1, \dots, e_K` orthonormal and random. So a model that learns the last class alone
    takes samples of the two classes before it for it, more often than of the others: forgetting
    shows, and differs between the classes.

    Args:
        samples: of all classes, at least 10 for each.
        classes: names of the :math:`K` classes, which are the groups too; the last is the new one.
        dim: length of the vectors, at least :math:`K`.
        seed: of all values; the cut has its own.
        limit: vectors of each class that are kept; 0 keeps all.

    Example:
        >>> data = scenes_synthetic(300)
        >>> data.kind, len(data.samples), data.cut(0)["train"].group_names[-1]
        ('vector', 300, 'foggy')
    """
    names, count = tuple(classes), len(classes)
    if count < 2 or dim < count or samples < SMALLEST * count:
        raise ValueError(
            f"There must be 2 classes, {SMALLEST} samples of each and at least as many dimensions, "
            f"but there are {count} classes, {samples} samples and {dim} dimensions."
        )
    random = np.random.default_rng(seed)
    share = 0.75 ** np.arange(count)
    sizes = SMALLEST + np.floor((samples - SMALLEST * count) * share / share.sum()).astype(int)
    sizes[0] += samples - sizes.sum()
    group = np.repeat(np.arange(count), sizes)
    basis = np.linalg.qr(random.standard_normal((dim, dim)))[0].T[:count]
    means = 3.0 * basis
    means[-1] = 1.5 * basis[-1] + 1.5 * basis[max(0, count - 3) : count - 1].sum(0)
    table = (means[group] + random.standard_normal((samples, dim))).astype(np.float32)
    label = torch.from_numpy(group)
    own = kept(label, limit)
    return GroupedData(
        name="scenes-synthetic",
        kind="vector",
        samples=Vectors(torch.from_numpy(table)[own]),
        class_names=names,
        cut=WithinGroups(label[own], label[own], names),
        fingerprint=digest("scenes-synthetic", *names, seed, limit, table.tobytes()),
    )


def rare_synthetic(
    rows: int = 4000, *, features: int = 16, share: float = 0.05, seed: int = 0, keep: int = 0
) -> GroupedData:
    r"""Vectors of which few are positives, of two kinds: most are easy to tell, some are not.

    .. math::
        x \mid y = 0 \sim \mathcal N(0, I), \qquad
        x \mid y = 1 \sim \tfrac34 \mathcal N(3 e_1, I) + \tfrac14 \mathcal N(1.5\, e_2, I)

    with :math:`e_1, e_2` orthonormal and random.

    Args:
        rows: of all samples.
        features: length of the vectors.
        share: of positives.
        seed: of all values; the cut has its own.
        keep: about so many vectors, of each class its share; 0 keeps all.

    Example:
        >>> data = rare_synthetic(rows=1000)
        >>> data.class_names, int(data.cut(0)["train"].label.sum())
        (('negative', 'positive'), 40)
    """
    random = np.random.default_rng(seed)
    positives = round(share * rows)
    label = np.arange(rows) < positives
    hard = np.arange(rows) < positives // 4
    basis = np.linalg.qr(random.standard_normal((features, 2)))[0].T
    shift = np.where(hard[:, None], 1.5 * basis[1], 3.0 * basis[0]) * label[:, None]
    table = (shift + random.standard_normal((rows, features))).astype(np.float32)
    classes = torch.from_numpy(label.astype(np.int64))
    own = sampled(classes, keep)
    return GroupedData(
        name="rare-synthetic",
        kind="vector",
        samples=Vectors(torch.from_numpy(table)[own]),
        class_names=("negative", "positive"),
        cut=WithinGroups(classes[own], classes[own], ("negative", "positive")),
        fingerprint=digest("rare-synthetic", share, keep, table.tobytes()),
    )


def lists_synthetic(
    queries: int = 150, *, rows: int = 20, features: int = 16, seed: int = 0, keep: int = 0
) -> GroupedData:
    r"""Rows of queries with relevance 0 to 4, which depends on features and on the query.

    .. math::
        r = \text{place of } \langle a, x\rangle + b_q + \varepsilon \text{ among the limits } 0,
        1, 2, 3, \qquad x \sim \mathcal N(0, I),\ b_q \sim \mathcal N(0, 1),\
        \varepsilon \sim \mathcal N(0, \tfrac14)

    The shift :math:`b_q` of a query is one of its features plus noise: it says nothing about the
    order within a query, but fits of the relevance itself use it.

    Args:
        queries: number of lists.
        rows: of each list.
        features: length of the vectors.
        seed: of all values; the cut has its own.
        keep: about so many rows, of each query its share; 0 keeps all.

    Example:
        >>> data = lists_synthetic(queries=10)
        >>> data.class_names, len(data.cut(0)["train"].group_names)
        (('0', '1', '2', '3', '4'), 6)
    """
    random = np.random.default_rng(seed)
    query = np.repeat(np.arange(queries), rows)
    table = random.standard_normal((len(query), features))
    shift = random.standard_normal(queries)[query]
    rule = random.standard_normal(features) / features**0.5
    score = table @ rule + shift + 0.5 * random.standard_normal(len(query))
    table[:, 0] = shift + 0.3 * random.standard_normal(len(query))
    relevance = torch.from_numpy(np.searchsorted(np.arange(4.0), score))
    group = torch.from_numpy(query)
    own = sampled(group, keep)
    values = table.astype(np.float32)
    return GroupedData(
        name="lists-synthetic",
        kind="vector",
        samples=Vectors(torch.from_numpy(values)[own]),
        class_names=("0", "1", "2", "3", "4"),
        cut=WholeGroups(
            relevance[own], group[own], tuple(f"query {number + 1}" for number in range(queries))
        ),
        fingerprint=digest("lists-synthetic", keep, values.tobytes()),
    )
