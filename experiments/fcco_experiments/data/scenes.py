"""Scenes that are generated: vectors of classes, of which the last one overlaps others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fcco._checks import integer

from .cuts import WithinGroups, check_classes, check_limit, kept
from .folders import digest
from .grouped import GroupedData, Vectors

__all__ = ["scenes_synthetic"]

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
    names = check_classes("scenes_synthetic", classes)
    count = len(names)
    for name, value, low in (
        ("samples", samples, SMALLEST * count),
        ("dim", dim, count),
        ("seed", seed, 0),
    ):
        integer("scenes_synthetic", name, value, low)
    check_limit("scenes_synthetic", limit)
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
        facts={"vectors": f"{len(own):,}"},
    )
