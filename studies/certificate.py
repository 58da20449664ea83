"""Do the bounds of a certificate hold together?

    python -m studies.certificate --json            # 500 releases of each kind, 20 minutes
    python -m studies.certificate --quick --json    # 20

A release has m segments of 20 to 100 rows, or of 50 to 2,000, drawn from laws whose expectations
are known. Coverage is the share of releases in which all m bounds are above the expectations: it
should be 0.95. Beside it stand bounds by normal quantiles and Student's with Bonferroni's
correction, and Student's at 95 % each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from scipy import stats

from fcco.certificate import certify
from studies import publish
from studies.runner import command, parse

LEVEL = 0.95
Random = np.random.Generator
Law = tuple[Callable[[Random, int], np.ndarray], float]  # draw n rows; their expectation


def exponential(random: Random) -> Law:
    """Losses; each segment has a scale of its own."""
    scale = math.exp(0.5 * random.normal())
    return lambda r, n: r.exponential(scale, n), scale


def log_loss(random: Random) -> Law:
    """A good classifier: a tenth of the rows has most of the loss."""

    def draw(r: Random, n: int) -> np.ndarray:
        return r.exponential(np.where(r.random(n) < 0.1, 2.0, 0.15))

    return draw, 0.1 * 2 + 0.9 * 0.15


def lognormal(random: Random) -> Law:
    """A heavy tail, skewness 6.2."""
    return lambda r, n: r.lognormal(0, 1, n), math.exp(0.5)


def mixed(random: Random) -> Law:
    """Segments that differ in shape: a normal, a skewed and a heavy one."""
    normal = (lambda r, n: r.normal(0, 1, n)), 0.0
    return [normal, exponential(random), lognormal(random)][random.integers(3)]


def difference(random: Random) -> Law:
    """Of the losses of two models."""
    return lambda r, n: r.standard_t(5, n), 0.0


def rate(random: Random) -> Law:
    p = random.uniform(0.02, 0.4)
    return lambda r, n: (r.random(n) < p).astype(float), p


def errors(random: Random) -> Law:
    """Of the errors of two models, which differ in 5 to 20 % of the rows."""
    up, down = random.uniform(0.02, 0.1), random.uniform(0.03, 0.1)
    chances = (down, 1 - up - down, up)
    return lambda r, n: r.choice((-1.0, 0.0, 1.0), n, p=chances), up - down


def rare(random: Random) -> Law:
    """Of the losses of two models that are alike in all rows but a few."""
    p = math.exp(random.uniform(math.log(0.002), math.log(0.1)))
    return lambda r, n: np.where(r.random(n) < p, r.exponential(5, n), 0.0), 5 * p


LAWS = (exponential, log_loss, lognormal, mixed, difference, rate, errors, rare)
SHAPES = ((5, 20, 100), (100, 20, 100), (30, 50, 2000))


def release(
    law: Callable[[Random], Law], shape: tuple[int, int, int], seed: int
) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Rows and expectations of the segments."""
    random = np.random.default_rng(seed)
    segments, low, high = shape
    sizes = np.exp(random.uniform(math.log(low), math.log(high + 1), segments)).astype(int)
    laws = [law(random) for _ in sizes]
    rows = {k: laws[k][0](random, int(n)) for k, n in enumerate(sizes)}
    return rows, np.array([mean for _, mean in laws])


def crossed(shape: tuple[int, int, int], seed: int) -> Any:
    """Rows in several segments: the values of columns, 5 of each; all rows have one law."""
    random = np.random.default_rng(seed)
    segments, low, high = shape
    losses = random.exponential(1, 5 * round(math.sqrt(low * high)))
    columns = random.integers(5, size=(segments // 5, len(losses)))
    rows = {5 * c + v: losses[own == v] for c, own in enumerate(columns) for v in range(5)}
    return rows, np.ones(segments)


Release = Callable[[tuple[int, int, int], int], Any]
RELEASES: dict[str, Release] = {
    **{law.__name__: functools.partial(release, law) for law in LAWS},
    "crossed": crossed,
}


def study(name: str, shape: tuple[int, int, int], releases: int) -> dict[str, Any]:
    """Coverage of all kinds of bounds."""
    draw = RELEASES[name]
    segments = shape[0]
    chance = (1 - LEVEL) / segments
    held: dict[str, int] = {}
    few = 0.0
    for seed in range(releases):
        rows, truth = draw(shape, seed)
        size = np.array([len(own) for own in rows.values()])
        mean, s = (np.array([f(own) for own in rows.values()]) for f in (np.mean, np.std))
        error = s / np.sqrt(size - 1)
        certificate = certify(rows, 1e9, level=LEVEL, seed=seed)
        ours = np.array([math.inf if row.bound is None else row.bound for row in certificate.rows])
        few += float(np.isinf(ours).mean()) / releases
        bounds = {
            "certificate": ours,
            "normal": mean + NormalDist().inv_cdf(1 - chance) * error,
            "student": mean + stats.t.isf(chance, size - 1) * error,
            "each": mean + stats.t.isf(1 - LEVEL, size - 1) * error,
        }
        for kind, bound in bounds.items():
            held[kind] = held.get(kind, 0) + bool((bound >= truth).all())
    return {
        "law": name, "segments": segments, "rows": shape[1:], "unbounded": round(few, 3),
        "coverage": {kind: count / releases for kind, count in held.items()},
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(command("certificate", __doc__), arguments, (20, 500))
    kinds = ("certificate", "normal", "student", "each")
    found = [study(name, shape, options.seeds) for name in RELEASES for shape in SHAPES]
    rows = [["coverage", *kinds, "without a bound"]]
    for each in found:
        coverage = (f"{each['coverage'][k]:.3f}" for k in kinds)
        low, high = each["rows"]
        where = f"{each['law']}, {each['segments']} x {low}-{high}"
        rows.append([where, *coverage, str(each["unbounded"])])
    print(publish.plain(rows))
    result = {"releases": options.seeds, "level": LEVEL, "rows": found}
    publish.conclude(options, "certificate", result)


if __name__ == "__main__":
    main()
