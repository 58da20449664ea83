"""Groups of vectors that are generated: no file, no network."""

from __future__ import annotations

import numpy as np
import torch

from fcco._checks import integer

from .cuts import WithinGroups, check_limit, kept
from .folders import digest
from .grouped import GroupedData, Vectors

__all__ = ["grouped_synthetic"]


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
        groups: :math:`n`, at least 2.
        rows: of all groups, at least 10 for each.
        features: length of the vectors.
        classes: of the labels, at least 2.
        seed: of all values; the cut has its own.
        limit: vectors of each group that are kept; 0 keeps all.

    Example:
        >>> data = grouped_synthetic(groups=3, rows=300)
        >>> data.kind, len(data.samples), data.cut(0)["train"].group_names
        ('vector', 300, ('group 1', 'group 2', 'group 3'))
    """
    for name, value, low in (
        ("groups", groups, 2),
        ("rows", rows, 10 * groups if isinstance(groups, int) else 0),
        ("features", features, 1),
        ("classes", classes, 2),
        ("seed", seed, 0),
    ):
        integer("grouped_synthetic", name, value, low)
    check_limit("grouped_synthetic", limit)
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
        fingerprint=digest(
            "grouped-synthetic",
            groups,
            rows,
            features,
            classes,
            seed,
            limit,
            table.numpy().tobytes(),
        ),
        facts={"vectors": f"{len(own):,}"},
    )
