"""The methods of the paper and its rivals, entered into the registry."""

from __future__ import annotations

from .double_loop import alexr2
from .group_weights import ooa
from .penalties import li2024, liu2025, yang2025
from .primal_dual import alexr
from .proximal_lagrangian import icppac, oss
from .registry import Method, register
from .single_loop import sonex, sonx, sox
from .switching import ssg
from .variance_reduced import msvr

__all__: list[str] = []

_ADAPTIVE = "momentum or Adam"
_SAMPLED = "blocks sampled"
_ALL = "all constraints"
_PAST = "forward at w_{t-1}"
_MSVR = "Jiang et al. 2022"

for method in (
    Method(
        "sonex", sonex,
        problem="f weakly convex with a prox, g_i smooth",
        outer=(), constraints="sampled", loop="single", update=_ADAPTIVE,
        sampling=_SAMPLED, batches=1, extra=_PAST,
        complexity="n eps^-5 / (B1 sqrt(B2))", measure="approximate stationarity",
        reference="the paper, Algorithm 1",
        problems=("S1", "S2", "S3", "S3b", "smooth"),
    ),
    Method(
        "alexr2", alexr2,
        problem="f convex with a prox, g_i smooth; or f also non-decreasing, g_i weakly convex",
        outer=("convex",), constraints="sampled", loop="double", update=_ADAPTIVE,
        sampling=_SAMPLED, batches=2, extra="forward at z_{k-1}",
        complexity="n eps^-5 / (B1 B2)", measure="near stationarity of F_lambda",
        reference="the paper, Algorithm 2",
        problems=("S1", "S2", "S3", "S3b", "S4", "smooth"),
    ),
    Method(
        "sonx", sonx,
        problem="f weakly convex, g_i smooth; or f also non-decreasing, g_i weakly convex",
        outer=(), constraints="", loop="single", update="SGD",
        sampling=_SAMPLED, batches=1, extra=_PAST,
        complexity="n eps^-6 / (B1 sqrt(B2))", measure="near stationarity",
        reference="Hu, Zhu and Yang 2023",
        problems=("S1", "S2", "S4"),
    ),
    Method(
        "sox", sox,
        problem="f smooth, g_i smooth",
        outer=("smooth",), constraints="", loop="single", update=_ADAPTIVE,
        sampling=_SAMPLED, batches=1, extra="none",
        complexity="n eps^-4 / (B1 B2)", measure="stationarity",
        reference="Wang and Yang 2022",
        problems=("smooth",),
    ),
    Method(
        "msvr-v1", msvr,
        problem="f smooth, g_i smooth",
        outer=("smooth",), constraints="", loop="single", update=_ADAPTIVE,
        sampling=_SAMPLED, batches=1, extra=_PAST,
        complexity="n eps^-3 + eps^-4", measure="stationarity",
        reference=_MSVR, problems=("smooth",),
    ),
    Method(
        "msvr-v2", msvr,
        problem="f smooth, g_i smooth with mean-Lipschitz gradients",
        outer=("smooth",), constraints="", loop="single", update="SGD on a STORM recursion",
        sampling=_SAMPLED, batches=1, extra="forward and backward at w_{t-1}",
        complexity="n eps^-3", measure="stationarity",
        reference=_MSVR, problems=("smooth",),
    ),
    Method(
        "msvr-v3", msvr,
        problem="f smooth, g_i finite sums of n_in smooth functions",
        outer=("smooth",), constraints="", loop="single", update="SGD on a STORM recursion",
        sampling=_SAMPLED, batches=1,
        extra="forward and backward at w_{t-1} and at a snapshot; full passes",
        complexity="n sqrt(n_in) eps^-2", measure="stationarity",
        reference=_MSVR, problems=("smooth",),
    ),
    Method(
        "msvr-sp", msvr,
        problem="f smooth, g_i smooth",
        outer=("smooth",), constraints="", loop="single", update=_ADAPTIVE,
        sampling=_SAMPLED, batches=1, extra="derivative along w_t - w_{t-1}, no second forward",
        complexity="n eps^-3 + eps^-4", measure="stationarity",
        reference=_MSVR, problems=("smooth",),
    ),
    Method(
        "alexr", alexr,
        problem="f convex and non-decreasing, g_i convex; or g_i affine",
        outer=("convex",), constraints="sampled", loop="single", update="SGD",
        sampling=_SAMPLED, batches=2, extra=_PAST,
        complexity="n eps^-2 / B1; n eps^-1 / B1 if strongly convex", measure="objective gap",
        reference="Wang and Yang 2023",
        problems=("S1", "S2", "S3", "smooth"),
    ),
    Method(
        "ooa", ooa,
        problem="worst groups or CVaR over groups",
        outer=(), constraints="", loop="single", update=_ADAPTIVE,
        sampling=f"{_SAMPLED}, scaled by n/B1", batches=1, extra="none",
        complexity="n log(n) eps^-2 / B1", measure="objective gap (convex)",
        reference="Sagawa et al. 2020",
        problems=("S2",),
    ),
    Method(
        "oss", oss,
        problem="g_0 and g_i weakly convex, Slater",
        outer=(), constraints="all", loop="double", update="SGD",
        sampling=_ALL, batches=1, extra="derivative along the step",
        complexity="eps^-6", measure="near KKT",
        reference="Ma, Lin and Yang 2020",
        problems=("S3", "S3b"),
    ),
    Method(
        "icppac", icppac,
        problem="g_0 and g_i weakly convex, Slater",
        outer=(), constraints="all", loop="double", update="SGD",
        sampling=_ALL, batches=2, extra="forward and derivative at x_{t-1}",
        complexity="eps^-6", measure="near KKT",
        reference="Boob, Deng and Lan 2023",
        problems=("S3", "S3b"),
    ),
    Method(
        "ssg", ssg,
        problem="g_0 weakly convex, g_i convex (or weakly convex with regularity)",
        outer=(), constraints="all", loop="single", update="SGD, or two optimizers",
        sampling=_ALL, batches=2, extra="forward for the switch",
        complexity="eps^-8", measure="near KKT",
        reference="Huang and Lin 2023",
        problems=("S3", "S3b"),
    ),
    Method(
        "li2024", li2024,
        problem="g_0 and g_i smooth; squared hinge",
        outer=(), constraints="sampled", loop="single", update=_ADAPTIVE,
        sampling=_SAMPLED, batches=1, extra="none",
        complexity="eps^-7", measure="KKT",
        reference="Li et al. 2024",
        problems=("S3", "S3b"),
    ),
    Method(
        "yang2025", yang2025,
        problem="g_0 and g_i weakly convex; hinge",
        outer=(), constraints="sampled", loop="single", update="SGD",
        sampling=_SAMPLED, batches=1, extra=_PAST,
        complexity="eps^-6", measure="near KKT",
        reference="Yang et al. 2025",
        problems=("S3", "S3b", "S4"),
    ),
    Method(
        "liu2025", liu2025,
        problem="g_0 and g_i weakly convex; smoothed hinge",
        outer=(), constraints="all", loop="single", update="SGD",
        sampling=_ALL, batches=2, extra=f"{_PAST}; a large batch every q steps",
        complexity="eps^-6 values, eps^-4 subgradients", measure="near KKT",
        reference="Liu and Xu 2025",
        problems=("S3", "S3b"),
    ),
):  # fmt: skip
    register(method)
