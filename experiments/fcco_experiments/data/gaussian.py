"""A data set that is generated: no file, no network, a known answer."""

from __future__ import annotations

import numpy as np

from fcco._checks import at_least, in_interval, integer

from .parts import FairnessData, Part, assemble

__all__ = ["synthetic"]


def synthetic(
    rows: int = 4000,
    test_rows: int = 2000,
    *,
    features: int = 8,
    signal: float = 1.6,
    proxy: float = 3.0,
    base_rates: tuple[float, float] = (0.2, 0.7),
    group_share: float = 0.6,
    validation: float = 0.2,
    seed: int = 0,
) -> FairnessData:
    r"""Gaussian features: one half tells the label, the other half tells the group.

    .. math::
        a \sim \mathrm{Bernoulli}(\pi), \quad y \mid a \sim \mathrm{Bernoulli}(p_a), \quad
        x = \Bigl(\tfrac{\delta}{\sqrt{k}}\,(y - \tfrac12)\mathbf 1_k,\;
                  \tfrac{\rho}{\sqrt{l}}\,(a - \tfrac12)\mathbf 1_l\Bigr) + \mathcal N(0, I),
        \qquad k = \lceil d/2\rceil,\ l = \lfloor d/2\rfloor

    The second half says nothing about the label within a group; but the groups' base rates differ,
    so a classifier that only wants a high AUC uses it, and its ROC curves differ between the
    groups. One that looks at the first half alone is exactly fair and has the AUC
    :math:`\Phi(\delta/\sqrt2)`. With the default values: a logistic regression has AUC 0.90 and
    a largest gap of 0.36, the fair one AUC 0.87 and none.

    Args:
        rows: to train and validate on.
        test_rows: for tests.
        features: :math:`d`, at least 2.
        signal: :math:`\delta`, how far the labels' means are apart.
        proxy: :math:`\rho`, how far the groups' means are apart.
        base_rates: :math:`p_0, p_1`, the share of label 1 in each group.
        group_share: :math:`\pi`, the share of group 1.
        validation: share of `rows` to set aside, see `stratified`; 0 for none.
        seed: of the features and of the validation split.

    Example:
        >>> data = synthetic(rows=500, test_rows=100)
        >>> len(data.train), len(data.test), data.train.features.shape[1]
        (400, 100, 8)
    """
    integer("synthetic", "rows", rows, 1)
    integer("synthetic", "test_rows", test_rows, 1)
    integer("synthetic", "features", features, 2)
    integer("synthetic", "seed", seed, 0)
    at_least("synthetic", "signal", signal, 0)
    at_least("synthetic", "proxy", proxy, 0)
    for name, value in zip(
        ("base_rates[0]", "base_rates[1]", "group_share"), (*base_rates, group_share), strict=True
    ):
        in_interval("synthetic", name, value, 0, 1, open_low=True, open_high=True)
    tells_label = (features + 1) // 2
    tells_group = features - tells_label
    # Two streams: more test rows must not change the training rows.
    first, second = np.random.SeedSequence(seed).spawn(2)

    def draw(sequence: np.random.SeedSequence, size: int) -> Part:
        random = np.random.default_rng(sequence)
        group = (random.random(size) < group_share).astype(np.int64)
        label = (random.random(size) < np.array(base_rates)[group]).astype(np.int64)
        table = random.standard_normal((size, features))
        table[:, :tells_label] += signal / tells_label**0.5 * (label[:, None] - 0.5)
        table[:, tells_label:] += proxy / tells_group**0.5 * (group[:, None] - 0.5)
        return Part(table, label, group)

    names = [f"label-{k}" for k in range(tells_label)] + [f"group-{k}" for k in range(tells_group)]
    return assemble(
        "synthetic",
        draw(first, rows),
        draw(second, test_rows),
        names,
        ("group 0", "group 1"),
        validation=validation,
        seed=seed,
    )
