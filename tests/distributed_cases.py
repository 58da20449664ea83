"""Cases of test_distributed.py, and the worker process that runs them on one rank.

A case describes training steps on a list of batches, one per rank. Each rank takes its own; the
reference is one process that takes all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import io
import math
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

import fcco
from fcco import xrisk
from fcco.contrastive import log_means
from fcco.methods import alexr, ooa
from fcco.previous import reshard

WORLD, STEPS, GROUPS, SAMPLES, PAIRS = 2, 12, 6, 240, 20
STRATEGIES = ("ddp", "fsdp-layers", "fsdp-unsharded")
# On the CPU torch 2.6 has no FSDP2, and that of 2.7 and 2.8 other gradients in float32.
RUNNABLE = STRATEGIES if torch.__version__ >= "2.10" else STRATEGIES[:1]
FEW = {
    "fsdp-layers": (
        "sonex accumulation penalized-named automatic-accumulation alexr2-independent empty-rank "
        "several-terms float32 contrast-learned contrast-individual risk-two-way risk-ndcg"
    ),
    "fsdp-unsharded": "sonex alexr2 several-terms",
}
"""Cases that run on sharded models; DDP runs all of them."""

_draw = torch.Generator().manual_seed(5)
X = torch.randn(SAMPLES, 4, generator=_draw, dtype=torch.float64)
GROUP = torch.randint(GROUPS, (SAMPLES,), generator=_draw)
Y = torch.sign(X[:, 0] + 0.3 * X[:, 1] * GROUP + 0.2 * torch.randn(SAMPLES, generator=_draw))
T = torch.randn(PAIRS, 4, generator=_draw, dtype=torch.float64)

BY_TOKENS = fcco.ReferenceLosses(
    torch.rand(SAMPLES, generator=_draw, dtype=torch.float64),
    torch.randint(1, 9, (SAMPLES,), generator=_draw),
)

Batches = list[Tensor]  # sample numbers, one tensor per rank
Wrap = Callable[[nn.Module], nn.Module]


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Odd sizes: the shards of two ranks differ, and the last layer leaves one rank without any."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)
    return nn.Sequential(*layers).to(dtype)


def margins(model: nn.Module, ids: Tensor) -> Tensor:
    kind = next(model.parameters()).dtype
    return Y[ids].to(kind) * model(X[ids].to(kind)).squeeze(1)


def losses(model: nn.Module, ids: Tensor) -> Tensor:
    return softplus(-margins(model, ids))


def some_margins(model: nn.Module) -> Tensor:
    return margins(model, torch.arange(6))


def draw(step: int, micro: int, sizes: Iterable[int]) -> Batches:
    """Distinct samples for each rank; a group lands on both ranks almost always."""
    generator = torch.Generator().manual_seed(1000 * micro + step)
    order = torch.randperm(SAMPLES, generator=generator)
    return list(order[: sum(sizes)].split(list(sizes)))


def uneven(step: int) -> tuple[int, int]:
    return ((7, 5), (3, 8), (6, 6))[step % 3]


def sometimes_empty(step: int) -> tuple[int, int]:
    return ((7, 5), (9, 0), (0, 8))[step % 3]


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        build: (model, corrected) -> objective; uncorrected for the test of sensitivity.
        arguments: (model, step, batches) -> arguments of the objective.
        sizes: step -> batch size of each rank.
        micro: batches per optimizer step.
        sensitive: whether the case has a correction that can be left out.
        before: (objective, model, ranks) runs before the first step.
        dtype: precision of the model.
        model: (dtype) -> model.
        probe: (model) -> values that are compared at w_{t-1}.
    """

    build: Callable[[nn.Module, bool], fcco.Compositional]
    arguments: Callable[[nn.Module, int, Batches], tuple[tuple[Any, ...], dict[str, Any]]]
    sizes: Callable[[int], tuple[int, int]] = uneven
    micro: int = 1
    sensitive: bool = True
    before: Callable[[fcco.Compositional, nn.Module, list[int]], None] | None = None
    dtype: torch.dtype = torch.float64
    model: Callable[[torch.dtype], nn.Module] = make_model
    probe: Callable[[nn.Module], Tensor] = some_margins


# --- arguments --------------------------------------------------------------------------------


def entries(function: Callable[[nn.Module, Tensor], Any]) -> Any:
    """One entry per sample, in the block of its group."""

    def arguments(model: nn.Module, step: int, batches: Batches) -> Any:
        ids = torch.cat(batches)
        return (lambda: function(model, ids), GROUP[ids]), {}

    return arguments


def and_g0(value: Tensor) -> tuple[Tensor, Tensor]:
    """g0 as a vector: averaged over the samples of all ranks."""
    return 0.1 * value.square(), value


def errors(model: nn.Module, ids: Tensor) -> fcco.Measured:
    margin = margins(model, ids)
    return fcco.Measured((margin < 0).double() - 0.1 * margin.detach(), (-margin).sigmoid())


per_sample = entries(losses)
with_g0 = entries(lambda model, ids: and_g0(losses(model, ids)))
measured = entries(errors)


def with_rows(model: nn.Module, step: int, batches: Batches) -> Any:
    """Differences from a reference, averaged over tokens."""
    ids = torch.cat(batches)
    return (lambda: losses(model, ids), GROUP[ids]), {"rows": ids}


def with_scalar_g0(model: nn.Module, step: int, batches: Batches) -> Any:
    """g0 as a scalar: DDP and FSDP2 average it over ranks with equal weight."""
    ids = torch.cat(batches)

    def inner() -> Any:
        value = losses(model, ids)
        parts = value.split([len(part) for part in batches])
        return 0.1 * torch.stack([part.square().mean() for part in parts]).mean(), value

    return (inner, GROUP[ids]), {}


def independent(model: nn.Module, step: int, batches: Batches) -> Any:
    """A second batch of the same blocks; its entries lie on the ranks in another way."""
    ids = torch.cat(batches)
    position = torch.arange(SAMPLES)
    present = torch.unique(GROUP[torch.cat(draw(step, 0, uneven(step)))])
    rank = None if len(batches) == WORLD else dist.get_rank()
    parts = []
    for k, block in enumerate(present.tolist()):
        members = position[block == GROUP]
        holders = [r for r in range(WORLD) if (k + r) % 3 < 2]  # one rank, or both
        parts += [members[(2 * step + r) % len(members)] for r in holders if rank in (None, r)]
    other = torch.tensor(parts, dtype=torch.int64)
    extra = {"gradient": lambda: losses(model, other), "gradient_index": GROUP[other]}
    return (lambda: losses(model, ids), GROUP[ids]), extra


def independent_with_g0(model: nn.Module, step: int, batches: Batches) -> Any:
    args, options = independent(model, step, batches)
    carrier = options.pop("gradient")
    return args, {"gradient": lambda: and_g0(carrier()), **options}


NAMES = ("zero", "one", "two", "three", "four", "five")


def named(model: nn.Module, step: int, batches: Batches) -> Any:
    """Constraints by name, those that the rank's batch happens to hold; perhaps none."""
    ids = torch.cat(batches)
    keep = NAMES[step % 6 : step % 6 + 4]  # the others are not sampled in this step

    def inner() -> Any:
        value = losses(model, ids)  # one forward pass on every rank, also for an empty batch
        given: dict[str, list[Tensor]] = {}
        for part, own in zip(batches, value.split([len(part) for part in batches]), strict=True):
            for k in GROUP[part].unique().tolist():
                if NAMES[k] in keep:
                    given.setdefault(NAMES[k], []).append(own[GROUP[part] == k].mean())
        values = {name: torch.stack(parts).mean() for name, parts in given.items()}
        return 0.2 * value.square(), values

    return (inner,), {}


def several(model: nn.Module, step: int, batches: Batches) -> Any:
    """Three terms: in another order on rank 1, one there or not, one absent now and then."""
    ids = torch.cat(batches)
    whole = len(batches) == WORLD
    rank = 0 if whole else dist.get_rank()

    def inner() -> dict[str, Tensor]:
        value = losses(model, ids)
        terms = {"worst": value, "mean": 0.5 * value}
        if rank == 1:
            terms = {"mean": 0.5 * value, "worst": value}
        if step % 4 != 3 and (whole or rank == step % 2):
            terms["rare"] = value[rare].square()
        return terms

    first = len(batches[0])
    halves = slice(0, first), slice(first, None)
    rare = halves[step % 2] if whole else slice(None)
    return (inner, {"worst": GROUP[ids], "mean": GROUP[ids], "rare": GROUP[ids][rare]}), {}


def with_coupled_objective(model: nn.Module, step: int, batches: Batches) -> Any:
    """Every sample has a part in the objective, some in a constraint; a rank may hold none."""
    ids = torch.cat(batches)
    some = (ids + step) % 3 == 0

    def inner() -> Any:
        value = losses(model, ids)
        return 0.2 * value.square(), {"objective": 0.5 * value, "constraints": value[some]}

    return (inner, {"objective": GROUP[ids], "constraints": GROUP[ids][some]}), {}


def with_nonfinite(model: nn.Module, step: int, batches: Batches) -> Any:
    """Every third step the last entry of rank 1 is infinite: it is dropped."""
    arrays = [torch.zeros(len(part), dtype=torch.float64) for part in batches]
    here = len(batches) == WORLD or dist.get_rank() == 1
    if here and step % 3 == 1:
        arrays[-1][-1] = torch.inf
    ids, spoiled = torch.cat(batches), torch.cat(arrays)
    return (lambda: losses(model, ids) + spoiled, GROUP[ids]), {}


def overlapping(model: nn.Module, step: int, batches: Batches) -> Any:
    """Samples in several groups or in none; every third step those of rank 1 are in none."""
    matrix = torch.randn(SAMPLES, GROUPS, generator=torch.Generator().manual_seed(0)) > 0.5
    parts = [matrix[part] for part in batches]
    if step % 3 == 1 and (len(batches) == WORLD or dist.get_rank() == 1):
        parts[-1] = torch.zeros_like(parts[-1])
    ids, index = torch.cat(batches), torch.cat(parts)
    return (lambda: and_g0(losses(model, ids)), index), {}


def two_constraints(model: nn.Module, step: int, batches: Batches) -> Any:
    """Every sample has an entry in both constraints: for methods that look at all of them."""
    ids = torch.cat(batches)

    def inner() -> Any:
        margin = margins(model, ids)
        return softplus(-margin), torch.cat([0.3 - margin.square(), margin - 0.2])

    return (inner, torch.arange(2).repeat_interleave(len(ids))), {}


# --- objectives -------------------------------------------------------------------------------


def momentum(model: nn.Module, lr: float = 0.3) -> torch.optim.Optimizer:
    return fcco.optim.momentum_type(model.parameters(), lr=lr, beta=0.3)


def sonex(**options: Any) -> Callable[[nn.Module, bool], fcco.Compositional]:
    """The smoothing is wide: every slope depends on u, so a wrong u cannot hide."""
    settings: dict[str, Any] = {"smoothing": 2.0, "gamma": 0.3, "correction": 0.6, **options}
    outer = settings.pop("outer", fcco.outer.Hinge(1.5))

    def build(model: nn.Module, corrected: bool) -> fcco.Compositional:
        chosen: dict[str, Any] = settings if corrected else {**settings, "correction": 0.0}
        return fcco.methods.sonex(model, momentum(model), outer, GROUPS, **chosen)

    return build


def build_several(model: nn.Module, corrected: bool) -> fcco.Compositional:
    def tracker(read: Any, correction: Any) -> fcco.tracker.InnerTracker:
        correction = correction if corrected else 0.0
        return fcco.tracker.InnerTracker(
            GROUPS, gamma=0.4, correction=correction, read=read, dtype=torch.float64
        )

    annealed = fcco.Annealed(3.0, 1.0, steps=STEPS)
    terms = {
        "worst": fcco.terms.CVaRTerm(tracker("old", 0.5), ratio=0.5, smoothing=1.0),
        "mean": fcco.terms.CoupledTerm(fcco.outer.SquaredHinge(), tracker("new", "auto")),
        "rare": fcco.terms.CoupledTerm(
            fcco.outer.Hinge(), tracker("old", "theory"), smoothing=annealed
        ),
    }
    return fcco.Compositional(model, momentum(model, lr=0.1), terms)


def cvar(read: Any, **more: Any) -> Callable[[nn.Module, bool], fcco.Compositional]:
    return lambda model, corrected: fcco.CVaRGroupDRO(
        model, momentum(model, lr=0.2), GROUPS, ratio=0.5, smoothing=1.0, gamma=0.4,
        correction=0.5 if corrected else 0.0, read=read, **more,
    )  # fmt: skip


def automatic_cvar(model: nn.Module, corrected: bool) -> fcco.Compositional:
    """Gamma and smoothing from the error of the estimates; there is no correction to leave out."""
    return fcco.CVaRGroupDRO(model, momentum(model, lr=0.2), GROUPS, ratio=0.5)


def penalized(model: nn.Module, corrected: bool) -> fcco.Compositional:
    return fcco.constrained(
        model, momentum(model, 0.2), NAMES, "sonex", tolerance=0.2, penalty=2.0, smoothing=1.0,
        gamma=0.4, correction="auto" if corrected else 0.0,
    )  # fmt: skip


def automatic(constraints: Any, coupled: bool = False, **settings: Any) -> Any:
    """Without settings; it acts in the last steps. Limits are tight, so that all constraints do."""

    def build(model: nn.Module, corrected: bool) -> fcco.Compositional:
        own = fcco.tracker.ema_tracker(GROUPS, gamma=0.7, dtype=torch.float64)
        objective = fcco.terms.CoupledTerm(fcco.outer.SquaredHinge(), own) if coupled else None
        gamma: Any = "auto" if corrected else 0.7
        more: dict[str, Any] = {"tolerance": 0.2} | settings
        return fcco.constrained(
            model, momentum(model, lr=0.2), constraints, gamma=gamma, objective=objective, **more
        )

    return build


def alexr2(model: nn.Module, corrected: bool) -> fcco.Compositional:
    return fcco.methods.alexr2(
        model, momentum(model, lr=1.0), fcco.outer.Hinge(1.5), GROUPS,
        smoothing=0.6, nu=1.0, eta=0.5,
        inner_steps=4, gamma=0.5, theta=0.6 if corrected else 0.0,
    )  # fmt: skip


def lagrangian(method: str, **options: Any) -> Any:
    return lambda model, _: fcco.constrained(
        model, torch.optim.SGD(model.parameters(), lr=0.3), 2, method, tolerance=0.02, **options
    )


def weighted(**options: Any) -> Any:
    return lambda model, _: ooa(model, momentum(model), GROUPS, step=0.3, **options)


def primal_dual(**options: Any) -> Any:
    return lambda model, _: alexr(
        model, torch.optim.SGD(model.parameters(), lr=0.2), fcco.outer.Hinge(1.5), GROUPS, **options
    )


def warm_up(objective: fcco.Compositional, model: nn.Module, ranks: list[int]) -> None:
    """Ranks hold batches of unequal number."""
    batches = draw(99, 0, (5, 30))
    cut = [part for r in ranks for part in batches[r].split(8)]
    objective.warm_up((lambda i=ids: losses(model, i), GROUP[ids]) for ids in cut)


# --- the contrastive loss: pairs of all ranks are negatives of each other ---------------------


class Backbones(nn.Module):
    """Two linear encoders and a temperature."""

    def __init__(self, dtype: torch.dtype, learned: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(4, 4), nn.Linear(4, 4)
        self.log_tau = nn.Parameter(torch.tensor([math.log(0.4)]), requires_grad=learned)
        self.tau = torch.zeros(1)
        self.to(dtype)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        self.tau = self.log_tau.exp()
        return self.image(X[ids]).tanh(), self.text(T[ids]).tanh()


def pairs(step: int, batches: Batches) -> Tensor:
    """Numbers of distinct pairs, of this rank or of all; a rank may have none."""
    order = torch.randperm(PAIRS, generator=torch.Generator().manual_seed(step))
    parts = order[:8].split(((3, 5), (7, 1), (4, 4), (8, 0))[step % 4])
    return torch.cat(parts) if len(batches) == WORLD else parts[dist.get_rank()]


def contrast(
    learned: str = "", labels: int = 0, anchors: bool = False, loss: bool = False, **options: Any
) -> Case:
    """`learned`: the temperature comes from the "forward" pass or from the "parameter" after it."""

    def build(model: nn.Module, corrected: bool) -> fcco.Compositional:
        own: Any = getattr(model, "module", model)

        temperature: Any = {
            "": 0.4, "forward": lambda: own.tau, "parameter": lambda: own.log_tau.exp()
        }[learned]  # fmt: skip
        settings: Any = {"gamma": 0.5, "correction": 0.2} | options
        settings |= {} if corrected else {"correction": 0.0}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        settings = {"temperature": temperature} | settings
        return fcco.GlobalContrastive(model, optimizer, PAIRS, **settings)

    def arguments(model: nn.Module, step: int, batches: Batches) -> Any:
        ids = pairs(step, batches)

        def inner() -> Any:
            images, texts = model(ids)
            size = 0.1 * (images.square().sum(1) + texts.square().sum(1))
            return (size, (images, texts)) if loss else (images, texts)

        more = {"label": ids % labels} if labels else {}
        return (inner, ids), more | ({"anchor": ids % 5 != 1} if anchors else {})

    return Case(
        build, arguments, model=lambda dtype: Backbones(dtype, bool(learned)),
        sensitive=options.get("correction") != 0.0, probe=lambda m: m(torch.arange(6))[0],
    )  # fmt: skip


def contrastive_values() -> dict[str, Any]:
    """Errors that every rank must raise together; without a group nothing is gathered."""
    rank, ids = dist.get_rank(), pairs(0, [])
    same = torch.zeros(len(ids), dtype=torch.int64)
    first, single = torch.full((len(ids),), rank == 0), torch.arange(1 - rank)
    return {
        "one label": raised(lambda: log_means(X[ids], T[ids], 0.8, label=same, anchor=first)),
        "one pair": raised(lambda: log_means(X[single], T[single], 0.8)),
        "local": log_means(X[:5], T[:5], 0.8, process_group=None),
    }


def scored(model: nn.Module, ids: Tensor) -> Tensor:
    return model(X[ids]).squeeze(1)


def labelled(model: nn.Module, step: int, batches: Batches) -> Any:
    ids = torch.cat(batches)
    return (lambda: scored(model, ids), POSITIVE[ids], ids), {}


def twice_labelled(model: nn.Module, step: int, batches: Batches) -> Any:
    """A second label that is unknown for some, and an ordinary loss."""
    ids = torch.cat(batches)

    def inner() -> Any:
        score = scored(model, ids)
        return 0.1 * score.square(), torch.stack([score, -score], 1)

    return (inner, BOTH[ids], ids), {}


def numbered(model: nn.Module, step: int, batches: Batches) -> Any:
    ids = torch.cat(batches)
    return (lambda: scored(model, ids), ids), {}


def risk(make: Any, *data: Any, **options: Any) -> Callable[[nn.Module, bool], fcco.Compositional]:
    return lambda model, corrected: make(model, momentum(model), *data, **options)


POSITIVE = (Y > 0).long()
for _rank, _step in ((1, 1), (0, 2), (1, 4)):  # a rank without positives
    POSITIVE[draw(_step, 0, uneven(_step))[_rank]] = 0
BOTH = torch.stack([POSITIVE, GROUP % 2], 1).double()
BOTH[::7, 1] = torch.nan
GRADE = torch.randint(4, (SAMPLES,), generator=_draw)
RATES: dict[str, Any] = {"min_tpr": 0.4, "max_fpr": 0.6}
ROUND: dict[str, Any] = {"proximal": 0.5, "inner_steps": 5}
INDIVIDUAL: dict[str, Any] = {
    "temperature": "individual", "first_temperature": 0.4, "radius": 1.0, "temperature_lr": 0.05
}  # fmt: skip
KINDS = [fcco.Equal(0.0), fcco.AtLeast(1.2), (0.1, 0.2), 0.2]
MIXED = [KINDS[k % 4] for k in range(GROUPS)]
SWITCH: dict[str, Any] = {"threshold": 0.15, "constraint_optimizer": "polyak"}
CASES: dict[str, Case] = {
    "sonex": Case(sonex(), per_sample),
    "measured": Case(sonex(smoothing=1.0), measured),
    "skip-nonfinite": Case(sonex(on_nonfinite="skip"), with_nonfinite),
    "cvar": Case(cvar("new"), per_sample),
    "accumulation": Case(cvar("new"), per_sample, micro=2),
    "by-tokens": Case(cvar("new", reference=BY_TOKENS), with_rows, micro=2),
    "cvar-automatic": Case(automatic_cvar, per_sample, micro=2, sensitive=False),
    "g0-vector": Case(sonex(), with_g0),
    "penalized-named": Case(penalized, named, sizes=sometimes_empty),
    "automatic-scalar": Case(automatic(GROUPS), with_scalar_g0),
    "automatic-named": Case(automatic(NAMES, tolerance=MIXED), named, sizes=sometimes_empty),
    "automatic-coupled": Case(automatic(GROUPS, coupled=True), with_coupled_objective),
    "automatic-accumulation": Case(automatic(GROUPS), with_g0, micro=2),
    "alexr2": Case(alexr2, per_sample),
    "alexr2-independent": Case(alexr2, independent),
    "empty-rank": Case(sonex(), with_g0, sizes=sometimes_empty),
    "overlapping": Case(sonex(), overlapping),
    "several-terms": Case(build_several, several),
    "warm-up": Case(sonex(), per_sample, before=warm_up),
    "float32": Case(sonex(), independent_with_g0, dtype=torch.float32),
    "oss": Case(lagrangian("oss", **ROUND), two_constraints, sensitive=False),
    "icppac": Case(lagrangian("icppac", **ROUND), two_constraints, sensitive=False),
    "ssg": Case(lagrangian("ssg", **SWITCH), two_constraints, sensitive=False),
    "ooa": Case(weighted(ratio=0.5), per_sample, micro=2, sensitive=False),
    "ooa-euclidean": Case(
        weighted(geometry="euclidean"), with_g0, sizes=sometimes_empty, sensitive=False
    ),
    "alexr": Case(primal_dual(theta=0.6, dual_step=0.4), independent, sensitive=False),
    "contrast-learned": contrast("forward", radius=0.5, chunk=2),
    "contrast-individual": contrast(
        labels=4, anchors=True, loss=True, chunk=3, **INDIVIDUAL
    ),
    "contrast-everything": contrast(
        "parameter", labels=4, anchors=True, loss=True, chunk=3, radius=0.2, offset=0.1
    ),
    "risk-auc": Case(risk(xrisk.AUC, POSITIVE), labelled, sensitive=False),
    "risk-labels": Case(
        risk(xrisk.AveragePrecision, BOTH), twice_labelled, sizes=sometimes_empty, sensitive=False
    ),
    "risk-partial": Case(
        risk(xrisk.PartialAUC, POSITIVE, max_fpr=0.6), labelled, micro=2, sensitive=False
    ),
    "risk-two-way": Case(
        risk(xrisk.TwoWayPartialAUC, POSITIVE, **RATES), labelled, sizes=sometimes_empty,
        sensitive=False,
    ),
    "risk-ndcg": Case(
        risk(xrisk.NDCG, GRADE, GROUP, k=9), numbered, sizes=sometimes_empty, sensitive=False
    ),
    "risk-bags": Case(
        risk(xrisk.MultiInstanceAUC, [1, 0, 1, 0, 0, 1]), entries(scored), sensitive=False
    ),
}  # fmt: skip


def names_of(strategy: str) -> list[str]:
    return FEW[strategy].split() if strategy in FEW else list(CASES)


# --- training ---------------------------------------------------------------------------------


def full(tensor: Tensor) -> Tensor:
    """A parameter as a plain tensor."""
    whole = getattr(tensor, "full_tensor", None)
    return (tensor if whole is None else whole()).detach().clone()


def tensors_of(objective: fcco.Compositional) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in objective.named_buffers()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def is_fsdp(model: nn.Module) -> bool:
    return hasattr(model, "set_requires_gradient_sync")


@dataclass
class Record:
    """What a run leaves behind."""

    loss: list[float] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    previous: list[Tensor] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    moved: float = 0.0


@contextlib.contextmanager
def without_sync(model: nn.Module):
    """Gradient accumulation: no reduction of gradients yet."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
        return
    if is_fsdp(model):
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
    yield
    if is_fsdp(model):
        model.set_requires_gradient_sync(True)  # type: ignore[operator]


def step(
    case: Case, objective: fcco.Compositional, model: nn.Module, number: int, ranks: list[int]
) -> float:
    total = 0.0
    for micro in range(case.micro):
        batches = draw(number, micro, case.sizes(number))
        args, options = case.arguments(model, number, [batches[r] for r in ranks])
        last = micro == case.micro - 1
        with contextlib.nullcontext() if last else without_sync(model):
            loss = objective(*args, **options) / case.micro
            loss.backward()
        total += loss.item()
    optimizer: Any = objective.optimizer
    optimizer.step()
    optimizer.zero_grad()
    return total


def train(
    case: Case, wrap: Wrap, ranks: list[int], *, corrected: bool = True, steps: int = STEPS
) -> Record:
    model = wrap(case.model(case.dtype))
    start = [full(p) for p in model.parameters()]
    objective = case.build(model, corrected)
    record = Record()
    if case.before is not None:
        case.before(objective, model, ranks)
    for number in range(steps):
        record.loss.append(step(case, objective, model, number, ranks))
        if objective.previous is not None and number % 5 == 3:
            # A forward pass of FSDP2 is collective: every rank makes it, on the same samples.
            record.previous.append(objective.previous.evaluate(lambda: case.probe(model)))
    record.parameters = [full(p) for p in model.parameters()]
    both = zip(start, record.parameters, strict=True)
    record.moved = max(float((a - b).abs().max()) for a, b in both)
    record.state = tensors_of(objective)
    return record


# --- the worker -----------------------------------------------------------------------------


def wrap_of(strategy: str) -> Wrap:
    if strategy == "ddp":
        return DistributedDataParallel
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def wrap(model: nn.Module) -> nn.Module:
        if strategy == "fsdp-layers":
            for layer in model.children():
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
        # Unsharded: the gathered parameters stay in memory after a forward pass without gradient.
        fully_shard(model, mesh=mesh, reshard_after_forward=strategy != "fsdp-unsharded")
        return model

    return wrap


def raised(function: Callable[[], Any]) -> str:
    try:
        function()
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def started(case: Case, wrap: Wrap, steps: int) -> tuple[nn.Module, fcco.Compositional]:
    """A model and its objective after some steps on this rank."""
    model = wrap(make_model())
    objective = case.build(model, True)
    for number in range(steps):
        step(case, objective, model, number, [dist.get_rank()])
    return model, objective


def refused(
    case: Case, wrap: Wrap, call: Callable[[fcco.Compositional, nn.Module], Any]
) -> dict[str, Any]:
    """Five steps, a call that every rank must refuse, five more steps."""
    model, objective = started(case, wrap, 5)
    before = tensors_of(objective)
    text = raised(lambda: call(objective, model))
    unchanged = same(before, tensors_of(objective))
    for number in range(5, 10):
        step(case, objective, model, number, [dist.get_rank()])
    parameters, state = [full(p) for p in model.parameters()], tensors_of(objective)
    return {"text": text, "unchanged": unchanged, "parameters": parameters, "state": state}


NAN_IN = {
    "second term": "several-terms",
    "score": "risk-partial",
    "loss beside scores": "risk-partial",
}
"""The cases of `nan_on_one_rank`, `sonex` unless named."""


def nan_on_one_rank(wrap: Wrap, where: str) -> dict[str, Any]:
    """A NaN on rank 1 only: every rank refuses the batch, and training goes on."""
    ids = draw(50, 0, (6, 6))[dist.get_rank()]
    spoiled = torch.zeros(6, dtype=torch.float64)
    if dist.get_rank() == 1:
        spoiled[2] = torch.nan

    def call(objective: Any, model: nn.Module) -> Any:
        clean = lambda: losses(model, ids)  # noqa: E731
        bad = lambda: losses(model, ids) + spoiled  # noqa: E731
        if where == "gradient batch":
            return objective(clean, GROUP[ids], gradient=bad)
        if where == "score":
            return objective(bad, POSITIVE[ids], ids)
        if where == "loss beside scores":
            return objective(lambda: (spoiled, clean()), POSITIVE[ids], ids)
        values = {
            "value": bad,
            "surrogate": lambda: fcco.Measured(clean().detach(), bad()),
            "second term": lambda: {"worst": clean(), "mean": bad()},
        }
        several = dict.fromkeys(("worst", "mean"), GROUP[ids])
        return objective(values[where], several if where == "second term" else GROUP[ids])

    return refused(CASES[NAN_IN.get(where, "sonex")], wrap, call)


def out_of_step(wrap: Wrap) -> dict[str, Any]:
    """Rank 1 loses a batch to an error in its function and goes on with the next one."""
    ids = draw(50, 0, (6, 6))[dist.get_rank()]

    def broken() -> Tensor:
        raise KeyError("a sample that cannot be read")

    def call(objective: Any, model: nn.Module) -> Any:
        if dist.get_rank() == 1:
            with contextlib.suppress(KeyError):
                objective(broken, torch.arange(3))
        return objective(lambda: losses(model, ids), GROUP[ids])

    return refused(CASES["sonex"], wrap, call)


def local_parameters(model: nn.Module) -> list[Tensor]:
    return [getattr(p, "to_local", lambda p=p: p)().detach() for p in model.parameters()]


def resume(wrap: Wrap) -> dict[str, Any]:
    """Save on each rank its own state, in the middle; continue in new objects."""
    case, rank = CASES["cvar"], dist.get_rank()
    model, objective = started(case, wrap, 6)
    optimizer: Any = objective.optimizer
    file = io.BytesIO()
    torch.save({"objective": objective.state_dict()}, file)
    shards = [p.clone() for p in local_parameters(model)]
    momenta = copy.deepcopy(optimizer.state_dict())

    other, resumed = started(case, wrap, 0)
    with torch.no_grad():
        for parameter, shard in zip(local_parameters(other), shards, strict=True):
            parameter.copy_(shard)
    file.seek(0)
    resumed.load_state_dict(torch.load(file)["objective"])
    again: Any = resumed.optimizer
    again.load_state_dict(momenta)
    assert objective.previous is not None and resumed.previous is not None
    there = objective.previous.evaluate(lambda: model(X[:6]))
    here = resumed.previous.evaluate(lambda: other(X[:6]))
    for number in range(6, STEPS):
        step(case, objective, model, number, [rank])
        step(case, resumed, other, number, [rank])
    return {
        "parameters": all(map(torch.equal, local_parameters(model), local_parameters(other))),
        "previous": torch.equal(there, here) and not torch.equal(there, other(X[:6])),
        "state": same(tensors_of(objective), tensors_of(resumed)),
    }


def process_groups() -> dict[str, Any]:
    """None never communicates; a group of one rank neither; a group of all ranks pools."""
    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(WORLD)]
    everyone = dist.new_group(list(range(WORLD)))

    def run(process_group: Any) -> dict[str, Tensor]:
        case = Case(sonex(process_group=process_group), per_sample)
        return tensors_of(started(case, lambda model: model, 3)[1])

    result: dict[str, Any] = {}
    if rank == 0:  # rank 1 does not take part: any communication would hang
        groups = {"none": None, "alone": alone[0], "not a member": alone[1]}
        result |= {name: run(group) for name, group in groups.items()}
    dist.barrier()
    result["everyone"] = run(everyone)
    return result


class Drifting(nn.Module):
    """Its output depends on a buffer that each rank changes in its own way in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1).double()
        self.register_buffer("shift", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        output = self.linear(x) + self.shift
        self.shift = self.shift + 1 + dist.get_rank()  # type: ignore[operator]
        return output


def buffers() -> dict[str, Any]:
    """DDP sends rank 0's buffers out before a pass: the one at w_{t-1} must see them too."""
    model = DistributedDataParallel(Drifting())
    previous = fcco.previous.PreviousParameters(model, momentum(model))
    model(X[:6]).sum().backward()
    before = [b.clone() for b in model.buffers()]
    previous.snapshot()
    there = previous.evaluate(lambda: model(X[:6]))
    unchanged = all(map(torch.equal, before, model.buffers()))
    return {"same": torch.equal(there, model(X[:6])), "unchanged": unchanged}


def batch_norm() -> dict[str, Any]:
    """Dropout and BatchNorm under DDP: each forward counts once in the statistics."""
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 1)
    )
    model = DistributedDataParallel(net.double())
    objective = sonex()(model, True)
    case = Case(sonex(), per_sample, sizes=lambda step: (6, 6))
    torch.manual_seed(10 + rank)
    seen = [step(case, objective, model, number, [rank]) for number in range(6)]
    assert objective.previous is not None
    before = [b.clone() for b in model.buffers()]
    random = torch.get_rng_state()
    objective.previous.evaluate(lambda: model(X[:6]))
    return {
        "finite": bool(torch.isfinite(torch.tensor(seen)).all()),
        "buffers": all(map(torch.equal, before, model.buffers())),
        "random": torch.equal(random, torch.get_rng_state()),
        "counted": int(net[1].num_batches_tracked),  # type: ignore[arg-type]
        "parameters": [full(p) for p in model.parameters()],
        "state": tensors_of(objective),
    }


def ddp_options() -> dict[str, Any]:
    """Options of DDP that change how it prepares a backward pass."""
    result = {}
    for name in ("static_graph", "find_unused_parameters", "gradient_as_bucket_view"):
        option: dict[str, Any] = {name: True}
        wrap = lambda model, o=option: DistributedDataParallel(model, **o)  # noqa: E731
        for case in ("cvar", "icppac"):
            result[f"{case}, {name}"] = vars(train(CASES[case], wrap, [dist.get_rank()]))
    return result


def mixed_precision() -> dict[str, Any]:
    """FSDP2 gathers bfloat16 copies: these must be of w_{t-1} too, and then of w_t again."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rank, model = dist.get_rank(), make_model(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.children(), model):
        if part is model or isinstance(part, nn.Linear):
            fully_shard(part, mp_policy=policy)
    objective = sonex()(model, True)
    case, right = Case(sonex(), per_sample, dtype=torch.float32), []
    assert objective.previous is not None
    for number in range(5):
        before = now(model)
        step(case, objective, model, number, [rank])
        after = now(model)
        there = objective.previous.evaluate(lambda: some_margins(model))
        kinds = {there.dtype, before.dtype} == {torch.float32}
        right.append(kinds and torch.equal(there, before) and torch.equal(now(model), after))
        right.append(not torch.equal(before, after))
    return {"same": all(right), "dtype": str(objective.term.tracker.value.dtype)}


def now(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return some_margins(model).clone()


def anchored(wrap: Wrap) -> dict[str, Any]:
    """In the middle of a round: a pass at its start, which no other pass may take for its own."""
    case, rank = CASES["alexr2"], dist.get_rank()
    model: Any = wrap(make_model())
    objective = case.build(model, True)
    optimizer: Any = objective.optimizer
    start, right, apart = now(model), [], []
    for number in range(STEPS):
        if optimizer.round_begins:
            start = now(model)
        step(case, objective, model, number, [rank])
        here = now(model)
        with optimizer.anchored():
            there = now(model)
        right.append(torch.equal(there, here if optimizer.round_begins else start))
        right.append(torch.equal(now(model), here))
        if not optimizer.round_begins:
            apart.append(not torch.equal(there, here))
    model.reshard()  # a pass may have left the parameters gathered
    parameters = [full(p) for p in model.parameters()]
    return {"same": all(right), "apart": all(apart), "parameters": parameters}


def loading(wrap: Wrap) -> dict[str, Any]:
    """Weights are put back right after a pass, which may have left them gathered."""
    case = CASES["sonex"]
    model = wrap(make_model())
    objective = case.build(model, True)
    kept, before = copy.deepcopy(model.state_dict()), now(model)
    step(case, objective, model, 0, [dist.get_rank()])
    after = now(model)
    reshard(model)
    model.load_state_dict(kept)
    return {"moved": not torch.equal(after, before), "back": torch.equal(now(model), before)}


def fsdp_one() -> dict[str, Any]:
    """The older FSDP would silently stay at w_t: refused. Without a correction it may be used."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    texts = []
    for original in (False, True):
        model = FullyShardedDataParallel(
            make_model(), use_orig_params=original, device_id=torch.device("cpu")
        )
        texts.append(raised(lambda model=model: sonex()(model, True)))
        objective = sonex()(model, False)
        for number in range(3):
            step(CASES["sonex"], objective, model, number, [dist.get_rank()])
    return {"texts": texts, "state": tensors_of(objective)}


def reference_losses(folder: str) -> dict[str, Any]:
    from test_reference_losses import measured

    return measured(dist.get_rank(), Path(folder))


def jobs(strategy: str, folder: str) -> Iterable[tuple[str, Callable[[], Any]]]:
    wrap, ddp = wrap_of(strategy), strategy == "ddp"
    for name in names_of(strategy):
        yield name, lambda c=CASES[name]: vars(train(c, wrap, [dist.get_rank()]))
    for where in ("value", "gradient batch", "surrogate", *NAN_IN) if ddp else ("value",):
        yield f"nan in {where}", lambda w=where: nan_on_one_rank(wrap, w)
    yield "resume", lambda: resume(wrap)
    if ddp:
        yield "out of step", lambda: out_of_step(wrap)
        yield "process groups", process_groups
        yield "batch norm", batch_norm
        yield "buffers", buffers
        yield "options", ddp_options
        yield "contrastive values", contrastive_values
        yield "reference losses", lambda: reference_losses(folder)
    else:
        yield "anchored", lambda: anchored(wrap)
        yield "loading", lambda: loading(wrap)
    if strategy == "fsdp-layers":
        yield "mixed precision", mixed_precision
        yield "fsdp 1", fsdp_one


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    rank, folder = arguments.rank, arguments.folder
    torch.set_num_threads(1)
    store = f"file://{folder}/store"  # a file: somebody else could take a port
    limit = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=limit)
    results: dict[str, Any] = {}
    for strategy in RUNNABLE:
        for name, job in jobs(strategy, folder):
            print(f"{strategy}/{name}", file=sys.stderr, flush=True)
            try:
                results[f"{strategy}/{name}"] = job()
            except Exception:
                # The ranks are out of step now: later cases would only wait for each other.
                results[f"{strategy}/{name}"] = {"failed": traceback.format_exc()}
                torch.save(results, f"{folder}/{rank}.pt")
                sys.exit(1)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
