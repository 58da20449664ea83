"""From the objects of a run to what a fleet needs of them: the rules, the numbers, the state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..constraints.lagrangian import LagrangianTerm
from ..constraints.rounds import ProximalRound
from ..constraints.steps import PolyakStep
from ..constraints.switching import SwitchingOptimizer, SwitchingTerm
from ..methods.penalties import RampedTerm
from ..objective import Compositional
from ..per_parameter import unwrap
from ..proximal_point import ProximalPoint
from ..reading import ONLY
from ..terms import CoupledTerm
from ..weights import GroupWeights
from .groups import Adversary
from .lagrangian import Dual, Lagrangian, RoundUpdate
from .member import Member, State, Unsupported
from .penalty import Penalty
from .plain import Plain
from .run import Outcome, Run
from .shapes import Shape
from .switching import CONSTRAINT, PolyakUpdate, Switch, SwitchingUpdate
from .updates import SGD, Adam, ProximalUpdate, Update

__all__ = ["Estimator", "Kind", "Plan", "groups", "read", "read_all"]

Number = Any
"""A float, a tensor, or a function of the step."""
Length = int | Callable[[int], int]


class Estimator(Protocol):
    """What finds the gradient of one run."""

    @property
    def remembers(self) -> bool:
        """Whether it needs w_{t-1}."""
        ...

    def gradient(self, run: Run) -> Outcome:
        """G_t of one run."""
        ...


@dataclass(frozen=True)
class Kind:
    """What all runs of a fleet must share: the rules, not their numbers.

    Args:
        estimator: finds the gradient.
        update: steps the weights.
        rounds: whether steps come in rounds.
        names: of the blocks, in order.
    """

    estimator: Estimator
    update: Update
    rounds: bool = False
    names: tuple[str, ...] | None = None

    @property
    def switches(self) -> bool:
        """Whether a step is for the loss or for the values, never for both."""
        return isinstance(self.estimator, Switch)


@dataclass(frozen=True)
class Plan:
    """One run, read.

    Args:
        kind: its rules.
        numbers: its settings by name.
        state: of the estimator.
        length: steps of a round.
    """

    kind: Kind
    numbers: dict[str, Number]
    state: State
    length: Length = 1


def read(member: Member) -> Plan:
    """Read a run.

    Raises:
        Unsupported: with the reason, when no fleet can hold it.
    """
    objective, optimizer = member.objective, unwrap(member.optimizer)
    if objective is None:
        estimator, numbers, state, names = Plain(), {}, {}, None
    else:
        estimator, numbers, state, names = _estimator(objective)
    update, own, length = _update(optimizer)
    for rule, step, word in _PAIRS:
        if isinstance(estimator, rule) != isinstance(update, step):
            raise Unsupported(
                f"`Member(optimizer=...)` is a {type(optimizer).__name__}, but a {word} and its "
                "objective make one method: give `objective.optimizer`, and the objective."
            )
    kind = Kind(estimator, update, length is not None, names)
    return Plan(kind, {**numbers, **own}, state, 1 if length is None else length)


def groups(members: Sequence[Member]) -> dict[Kind, list[int]]:
    """Which runs fit together: positions by kind, in order."""
    found: dict[Kind, list[int]] = {}
    for place, plan in enumerate(_each(members)):
        found.setdefault(plan.kind, []).append(place)
    return found


def read_all(members: Sequence[Member]) -> list[Plan]:
    """Read runs of one kind.

    Raises:
        Unsupported: when they are of several.
    """
    plans = _each(members)
    for place, plan in enumerate(plans):
        if plan.kind != plans[0].kind:
            raise Unsupported(
                f"A fleet holds runs of one kind, but run {place} and run 0 differ in: "
                f"{', '.join(_differences(plan.kind, plans[0].kind))}; `fcco.fleet.groups` sorts "
                "them."
            )
    return plans


def _differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two kinds differ, as dotted names."""
    if type(one) is not type(other):
        return [f"{path or 'kind'} ({type(one).__name__}, {type(other).__name__})"]
    if not dataclasses.is_dataclass(one):
        return [] if one == other else [f"{path} ({one!r}, {other!r})"]
    names = [field.name for field in dataclasses.fields(one) if field.compare]
    pairs = ((n, getattr(one, n), getattr(other, n)) for n in names)
    return [e for n, a, b in pairs for e in _differences(a, b, f"{path}.{n}".lstrip("."))]


def _each(members: Sequence[Member]) -> list[Plan]:
    """Members that share an objective and an optimizer are read once."""
    known: dict[tuple[int, int], Plan] = {}
    for member in members:
        key = (id(member.objective), id(member.optimizer))
        if key not in known:
            known[key] = read(member)
    return [known[id(member.objective), id(member.optimizer)] for member in members]


def _estimator(objective: Any) -> tuple[Estimator, dict[str, Number], State, Any]:
    if not isinstance(objective, Compositional):
        raise Unsupported(f"A fleet cannot read a {type(objective).__name__}.")
    terms = dict(objective.terms.items())
    if set(terms) != {ONLY}:
        raise Unsupported("A fleet holds objectives with one coupled term.")
    term = terms[ONLY]
    if term.step:
        raise Unsupported(f"A fleet starts from the first step; this term has made {term.step}.")
    for kind, reader in _TERMS.items():
        if type(term) is kind:
            estimator, numbers, state = reader(term)
            return estimator, numbers, state, term.names
    raise Unsupported(f"A fleet has no rule for the term {type(term).__name__}.")


def _update(optimizer: torch.optim.Optimizer) -> tuple[Update, dict[str, Number], Length | None]:
    _followed(optimizer)
    for kind, reader in _LOOPS.items():
        if type(optimizer) is kind:
            return reader(optimizer)
    return *_simple(optimizer), None


def _simple(optimizer: torch.optim.Optimizer) -> tuple[Update, dict[str, Number]]:
    """An optimizer that steps by itself, alone or inside another."""
    _followed(optimizer)
    for kind, reader in _OPTIMIZERS.items():
        if type(optimizer) is kind:
            return reader(optimizer)
    raise Unsupported(f"A fleet has no rule for the optimizer {type(optimizer).__name__} here.")


def _followed(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what acts at each step without being seen here: schedulers, projections."""
    if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        raise Unsupported(
            "A fleet does not see a learning rate scheduler; use `Fleet.set_numbers(lr=...)`."
        )
    hooks = [*optimizer._optimizer_step_pre_hooks.values()]
    hooks += optimizer._optimizer_step_post_hooks.values()
    for hook in hooks:
        if ".".join(str(hook.__module__).split(".")[:2]) not in _OWN_HOOKS:
            raise Unsupported(
                f"A fleet cannot follow what {hook.__module__} does at each step of "
                f"{type(optimizer).__name__}."
            )


def _group(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The only group of an optimizer that has not stepped yet."""
    name = type(optimizer).__name__
    if len(optimizer.param_groups) != 1:
        raise Unsupported(f"A fleet needs one group of parameters, but {name} has several.")
    if optimizer.state:
        raise Unsupported(f"A fleet starts from the first step, but {name} has made some.")
    group = optimizer.param_groups[0]
    if unknown := [key for key in ("nesterov", "maximize", "amsgrad") if group.get(key)]:
        raise Unsupported(f"A fleet has no rule for {name}({unknown[0]}=True).")
    return group


def _numbers(group: dict[str, Any], *names: str) -> dict[str, Number]:
    return {name: float(group[name]) for name in names}


def _sgd(optimizer: Any) -> tuple[Update, dict[str, Number]]:
    group = _group(optimizer)
    numbers = _numbers(group, "lr", "momentum", "dampening", "weight_decay")
    return SGD(numbers["momentum"] != 0), numbers


def _adam(optimizer: Any) -> tuple[Update, dict[str, Number]]:
    group = _group(optimizer)
    first, second = (float(beta) for beta in group["betas"])
    numbers = _numbers(group, "lr", "eps", "weight_decay") | {"beta1": first, "beta2": second}
    decoupled = isinstance(optimizer, torch.optim.AdamW)
    return Adam(decoupled or bool(group.get("decoupled_weight_decay"))), numbers


def _proximal(optimizer: ProximalPoint) -> tuple[Update, dict[str, Number], Length]:
    group = _group(optimizer)
    if optimizer._polish_steps is not None:
        raise Unsupported("A fleet has no last round that ends at z: `ProximalPoint.polish`.")
    outer, numbers = _simple(optimizer.outer)
    own = {"eta": float(group["lr"]), "nu": float(group["nu"])}
    return ProximalUpdate(outer), {**numbers, **own}, optimizer.inner_steps


def _rounds(optimizer: ProximalRound) -> tuple[Update, dict[str, Number], Length]:
    if optimizer.inner_step:
        raise Unsupported("A fleet starts between rounds, but ProximalRound is within one.")
    primal, numbers = _simple(optimizer.inner[0])
    rule, more = Shape.of(optimizer.rule, "rule")
    own = {"coefficient": optimizer.coefficient, "inner_steps": optimizer.inner_steps}
    return RoundUpdate(primal, Dual(rule)), {**numbers, **more, **own}, optimizer.inner_steps


def _switching(optimizer: SwitchingOptimizer) -> tuple[Update, dict[str, Number], None]:
    first, numbers = _simple(optimizer.objective_optimizer)
    second, other = None, optimizer.constraint_optimizer
    if isinstance(other, PolyakStep):
        _followed(other)
        second = PolyakUpdate()
        numbers |= {CONSTRAINT + "lr": float(_group(other)["lr"])}
    elif len(optimizer.inner) > 1:
        second, more = _simple(other)
        numbers |= {CONSTRAINT + name: value for name, value in more.items()}
    factor = 1.0 if optimizer.schedule is None else optimizer.schedule
    return SwitchingUpdate(first, second), {**numbers, "factor": factor}, None


_PAIRS = (
    (Lagrangian, RoundUpdate, "ProximalRound"),
    (Switch, SwitchingUpdate, "SwitchingOptimizer"),
)
"""Estimators and updates that make one method together."""
_OWN_HOOKS = ["fcco.objective", "fcco.previous", "fcco.iterates", "fcco.constraints"]
_TERMS: dict[type, Callable[[Any], tuple[Estimator, dict[str, Number], State]]] = {
    CoupledTerm: Penalty.read_from,
    RampedTerm: Penalty.read_from,
    LagrangianTerm: Lagrangian.read_from,
    SwitchingTerm: Switch.read_from,
    GroupWeights: Adversary.read_from,
}
_OPTIMIZERS: dict[type, Callable[[Any], tuple[Update, dict[str, Number]]]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
}
_LOOPS: dict[type, Callable[[Any], tuple[Update, dict[str, Number], Any]]] = {
    ProximalPoint: _proximal,
    ProximalRound: _rounds,
    SwitchingOptimizer: _switching,
}
