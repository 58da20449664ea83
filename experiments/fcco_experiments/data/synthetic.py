"""Generated data sets: no file, no network, a known answer.

In all, `seed` draws the values (the parts have a seed of their own), `limit` is how many vectors of
each group are kept, and `keep` about how many of all, of each class its share; 0 keeps all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .grouped import (
    TEST,
    TRAIN,
    GroupedData,
    WithinCells,
    WithinGroups,
    kept,
    sampled,
)
from .samples import Vectors
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
        >>> data = two_groups_synthetic(rows=500, test_rows=100)
        >>> [len(part) for part in data.cut(0).values()]
        [400, 100, 100]
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


SMALLEST = 10  # rows of a group


def _in_groups(groups: int, rows: int) -> np.ndarray:
    """The group of each row: each has three quarters of the rows that the one before it has."""
    if groups < 2 or rows < SMALLEST * groups:
        raise ValueError(
            f"There must be 2 groups with {SMALLEST} rows each but are: {groups}, {rows}."
        )
    share = 0.75 ** np.arange(groups)
    sizes = SMALLEST + np.floor((rows - SMALLEST * groups) * share / share.sum()).astype(int)
    sizes[0] += rows - sizes.sum()
    return np.repeat(np.arange(groups), sizes)


def _vectors(
    name: str,
    table: np.ndarray,
    rows: Tensor,
    classes: tuple[tuple[str, ...], np.ndarray],
    groups: tuple[tuple[str, ...], np.ndarray],
    *facts: object,
) -> GroupedData:
    """Some rows of a table; classes and groups come with their names, facts tell it from others."""
    label, group = (torch.from_numpy(own)[rows] for _, own in (classes, groups))
    table = table.astype(np.float32)
    return GroupedData(
        name, "vector", Vectors(torch.from_numpy(table)[rows]), classes[0],
        WithinGroups(label, group, groups[0]), digest(name, *facts, table.tobytes()),
    )  # fmt: skip


def grouped_synthetic(
    groups: int = 12, *, rows: int = 3000, seed: int = 0, limit: int = 0
) -> GroupedData:
    r"""Vectors whose labels follow one rule in the large groups and another in the small ones.

    .. math::
        n_i \propto 0.75^{\,i}, \qquad x \sim \mathcal N(\mu_i, I_8), \qquad
        y = \arg\max_{k \le 2}\, \langle (1 - t_i) a_k + t_i b_k,\, x - \mu_i\rangle
        + \varepsilon_k, \qquad t_i = \tfrac{i}{n - 1},\ i = 0, \dots, n - 1

    So a model that fits the average fits the first groups and fails the last ones, and the worst
    groups can only become better at the cost of the others. Noise :math:`\varepsilon` makes every
    group hard to some degree.

    Args:
        groups: :math:`n`.
        rows: of all groups, at least 10 for each.

    Example:
        >>> data = grouped_synthetic(groups=3, rows=300)
        >>> data.kind, len(data.samples), data.cut(0)["train"].group_names
        ('vector', 300, ('group 1', 'group 2', 'group 3'))
    """
    features, classes, random = 8, ("class 0", "class 1"), np.random.default_rng(seed)
    group = _in_groups(groups, rows)
    means = random.standard_normal((groups, features))
    rules = random.standard_normal((2, len(classes), features)) * 3 / features**0.5
    noise = random.standard_normal((rows, len(classes))) * 0.5
    inner = random.standard_normal((rows, features))
    other = (group / (groups - 1))[:, None]
    scores = (1 - other) * (inner @ rules[0].T) + other * (inner @ rules[1].T) + noise
    names = tuple(f"group {number}" for number in range(1, groups + 1))
    return _vectors(
        "grouped-synthetic", inner + means[group], kept(torch.from_numpy(group), limit),
        (classes, scores.argmax(1)), (names, group), len(classes), limit,
    )  # fmt: skip


def scenes_synthetic(
    samples: int = 2000,
    *,
    classes: Sequence[str] = ("clear", "cloudy", "rainy", "snowy", "foggy"),
    seed: int = 0,
    limit: int = 0,
) -> GroupedData:
    r"""Vectors in classes of unequal size; the last class lies among those before it.

    .. math::
        n_k \propto 0.75^{\,k}, \qquad x \sim \mathcal N(\mu_k, I_{32}), \qquad
        \mu_k = 3 e_k \ (k < K), \qquad
        \mu_K = 1.5\, (e_{K-1} + e_{K-2}) + 1.5\, e_K

    with :math:`e_1, \dots, e_K` orthonormal and random. So a model that learns the last class alone
    takes samples of the two classes before it for it, more often than of the others: forgetting
    shows, and differs between the classes.

    Args:
        samples: of all classes, at least 10 for each.
        classes: names of the :math:`K \le 32` classes, which are the groups too; the last is new.

    Example:
        >>> data = scenes_synthetic(300)
        >>> data.kind, len(data.samples), data.cut(0)["train"].group_names[-1]
        ('vector', 300, 'foggy')
    """
    dim, random = 32, np.random.default_rng(seed)
    names, count, group = tuple(classes), len(classes), _in_groups(len(classes), samples)
    basis = np.linalg.qr(random.standard_normal((dim, dim)))[0].T[:count]
    means = 3.0 * basis
    means[-1] = 1.5 * basis[-1] + 1.5 * basis[max(0, count - 3) : count - 1].sum(0)
    return _vectors(
        "scenes-synthetic", means[group] + random.standard_normal((samples, dim)),
        kept(torch.from_numpy(group), limit), (names, group), (names, group), *names, seed, limit,
    )  # fmt: skip


def rare_synthetic(rows: int = 4000, *, seed: int = 0, keep: int = 0) -> GroupedData:
    r"""Vectors of which few are positives, of two kinds: most are easy to tell, some are not.

    .. math::
        x \mid y = 0 \sim \mathcal N(0, I_{16}), \qquad
        x \mid y = 1 \sim \tfrac34 \mathcal N(3 e_1, I) + \tfrac14 \mathcal N(1.5\, e_2, I)

    with :math:`e_1, e_2` orthonormal and random; one row in twenty is positive.

    Example:
        >>> data = rare_synthetic(rows=1000)
        >>> data.class_names, int(data.cut(0)["train"].label.sum())
        (('negative', 'positive'), 40)
    """
    features, share, random = 16, 0.05, np.random.default_rng(seed)
    positives = round(share * rows)
    label = (np.arange(rows) < positives).astype(np.int64)
    hard = np.arange(rows) < positives // 4
    basis = np.linalg.qr(random.standard_normal((features, 2)))[0].T
    shift = np.where(hard[:, None], 1.5 * basis[1], 3.0 * basis[0]) * label[:, None]
    classes = ("negative", "positive"), label
    return _vectors(
        "rare-synthetic", shift + random.standard_normal((rows, features)),
        sampled(torch.from_numpy(label), keep), classes, classes, share, keep,
    )  # fmt: skip
