"""One run of a fleet, as the ordinary objects that would train it alone, and how it is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..inputs import ONLY
from ..methods.lagrangian import LagrangianTerm, ProximalRound
from ..methods.switching import SwitchingOptimizer, SwitchingTerm
from ..objective import Compositional
from ..optim import MethodOptimizer, ProximalPoint
from ..previous import parameters_of, unwrap
from ..terms import CoupledTerm, CVaRTerm, GroupWeights, MultiplierTerm
from .estimators import Coupled, CVaR, Multiplied, Parts, PlainLoss, Switch, Weighted
from .lagrangian import Lagrangian, RoundUpdate
from .numbers import Numbers
from .run import State, Unsupported
from .updates import ProximalPointUpdate, RoundLength, SwitchingUpdate, read_torch_optimizer

__all__ = ["Member", "Signature", "group_members", "read_members", "signature_of", "stack_weights"]


@dataclass(frozen=True)
class Member:
    """One run: a model, what steps it, and what makes its loss.

    The objects are read once and never changed. Runs that differ in their first weights alone may
    share an optimizer and an objective; the weights are those of `model`.

    Args:
        model: with the first weights and buffers.
        optimizer: what you would step: your own optimizer or `objective.optimizer`.
        objective: what makes the loss; None where it is a plain average.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    objective: Any = None


@dataclass(frozen=True)
class Signature:
    """What all runs of a fleet share: the method, without its numbers."""

    estimator: Any  # finds the gradient: `gradient(run)`
    update: Any  # steps the weights: `start(weights)`, `step(run, gradient, state)`
    rounds: bool  # steps come in rounds
    names: tuple[str, ...] | None  # of the blocks, in order
    needs_loss: bool  # the function must return g_0
    numbers: tuple[str, ...]  # names of what may differ


class MemberParts(NamedTuple):
    """What a fleet takes from a member."""

    signature: Signature
    numbers: Numbers
    state: State  # of the estimator
    round_length: RoundLength | None


_TERMS: dict[type, Callable[[Any], Parts]] = {
    CoupledTerm: Coupled.of,
    CVaRTerm: CVaR.of,
    GroupWeights: Weighted.of,
    MultiplierTerm: Multiplied.of,
    LagrangianTerm: Lagrangian.of,
    SwitchingTerm: Switch.of,
}
_METHOD_OPTIMIZERS: dict[type, Callable[[Any], tuple[Any, Numbers, Any]]] = {
    ProximalPoint: ProximalPointUpdate.of,
    ProximalRound: RoundUpdate.of,
    SwitchingOptimizer: SwitchingUpdate.of,
}


def signature_of(member: Member) -> Signature:
    """The method of a member; members with the same one can be in one fleet.

    Raises:
        Unsupported: with the reason, when no fleet can hold it.
    """
    return _read(member).signature


def group_members(members: Sequence[Member]) -> dict[Signature, list[int]]:
    """Which members can be in one fleet: their positions by signature, in order."""
    groups: dict[Signature, list[int]] = {}
    for position, parts in enumerate(_read_each(members)):
        groups.setdefault(parts.signature, []).append(position)
    return groups


def read_members(members: Sequence[Member]) -> list[MemberParts]:
    """Read the members of one fleet; raise `Unsupported` when two cannot be in the same."""
    parts = _read_each(members)
    for run, (signature, *_) in enumerate(parts):
        if signature != parts[0].signature:
            differences = _differences(signature, parts[0].signature, "")
            raise Unsupported(
                f"A fleet holds runs of one method, but run {run} and run 0 differ in: "
                f"{', '.join(differences)}; `fcco.fleet.group_members` sorts them."
            )
    return parts


def _differences(one: Any, other: Any, path: str) -> list[str]:
    if type(one) is not type(other):
        return [f"{path} ({type(one).__name__}, {type(other).__name__})"]
    if not dataclasses.is_dataclass(one):
        return [] if one == other else [f"{path} ({one!r}, {other!r})"]
    names = [field.name for field in dataclasses.fields(one) if field.compare]
    parts = ((name, getattr(one, name), getattr(other, name)) for name in names)
    return [d for n, a, b in parts for d in _differences(a, b, f"{path}.{n}".lstrip("."))]


def _read_each(members: Sequence[Member]) -> list[MemberParts]:
    """Members that share an objective and an optimizer are read once."""
    keys = [(id(member.objective), id(member.optimizer)) for member in members]
    first = dict(reversed([*zip(keys, members, strict=True)]))
    known = {key: _read(member) for key, member in first.items()}
    return [known[key] for key in keys]


def _read(member: Member) -> MemberParts:
    optimizer, objective = unwrap(member.optimizer), member.objective
    (estimator, numbers, state), names, needs_loss = (PlainLoss(), {}, {}), None, True
    if objective is not None:
        term = _only_term(objective)
        estimator, numbers, state = _TERMS[type(term)](term)
        names, needs_loss = term.names, term.needs_objective or term.watches_objective
    stepped = optimizer if objective is None else objective.optimizer
    alone = objective is None and isinstance(optimizer, (ProximalRound, SwitchingOptimizer))
    if alone or isinstance(stepped, (list, tuple)) or unwrap(stepped) is not optimizer:
        raise Unsupported(
            f"`Member(optimizer=...)` is a {type(optimizer).__name__} without its objective, or "
            "not the one that the objective follows: give `objective.optimizer` and the objective."
        )
    if type(optimizer) in _METHOD_OPTIMIZERS:
        update, of_update, length = _METHOD_OPTIMIZERS[type(optimizer)](optimizer)
    else:
        (update, of_update), length = read_torch_optimizer(optimizer), None
    _check_hooks(optimizer, member)
    numbers = {**numbers, **of_update}
    known = tuple(sorted(numbers))
    signature = Signature(estimator, update, length is not None, names, needs_loss, known)
    return MemberParts(signature, numbers, state, length)


def _only_term(objective: Any) -> Any:
    if not isinstance(objective, Compositional):
        raise Unsupported(f"A fleet cannot read a {type(objective).__name__}.")
    if set(objective.terms) != {ONLY}:
        raise Unsupported("A fleet holds objectives with one coupled term.")
    term = objective.terms[ONLY]
    if type(term) not in _TERMS:
        raise Unsupported(f"A fleet has no rule for the term {type(term).__name__}.")
    if term.step:
        raise Unsupported(f"A fleet starts from the first step; this term has made {term.step}.")
    return term


def _check_hooks(optimizer: torch.optim.Optimizer, member: Member) -> None:
    """Refuse what acts at each step and would be left out: schedulers, projections, averages.

    The hooks of the member's own objective and optimizer are part of the method: they end a
    tracking step, copy w_{t-1} and guard wrapped optimizers.
    """
    if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        raise Unsupported(
            "A fleet does not see a learning rate scheduler; use "
            "`Fleet.set_hyperparameters(lr=...)`."
        )
    own, objective = [unwrap(member.optimizer)], member.objective
    if objective is not None:
        own += [objective, objective.previous]
    hooks = [*optimizer._optimizer_step_pre_hooks.values()]
    for hook in (*hooks, *optimizer._optimizer_step_post_hooks.values()):
        owner = getattr(hook, "__self__", None)  # of a bound method
        if owner is None or all(owner is not allowed for allowed in own):
            what = hook.__qualname__ if owner is None else type(owner).__name__
            raise Unsupported(
                f"A fleet would leave out what {what} does at each step of "
                f"{type(optimizer).__name__}: only the hooks of the member's own objective are "
                "part of the method."
            )
    if isinstance(optimizer, MethodOptimizer):
        for wrapped in optimizer.wrapped:
            _check_hooks(wrapped, member)


def stack_weights(members: Sequence[Member], device: Any = None) -> tuple[State, State, State]:
    """The trained weights, the buffers and other parameters of all runs by name, (R, ...).

    Raises:
        Unsupported: when models differ in more than their weights.
    """
    names = _trained_by_all(members)
    models = {id(member.model): member.model for member in members}
    facts = {key: _facts(model) for key, model in models.items()}
    first = facts[id(members[0].model)]
    for run, member in enumerate(members):
        for fact, value in facts[id(member.model)].items():
            if value != first[fact]:
                raise Unsupported(f"The model of run {run} has another {fact} than that of run 0.")
    tensors = {key: _tensors(model) for key, model in models.items()}
    rows = [tensors[id(member.model)] for member in members]
    dtypes = {rows[0][name].dtype for name in names}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        raise Unsupported(
            "A fleet trains weights that are all of single or all of double precision, not of "
            f"{', '.join(sorted(map(str, dtypes)))}."
        )
    table = {name: torch.stack([row[name] for row in rows]).to(device) for name in rows[0]}
    buffers = {name: table.pop(name) for name, _ in members[0].model.named_buffers()}
    return {name: table.pop(name) for name in names}, buffers, table


def _trained_by_all(members: Sequence[Member]) -> tuple[str, ...]:
    """Names of the parameters that every run trains; runs that share an optimizer agree."""
    known: dict[int, tuple[str, ...]] = {}
    for run, member in enumerate(members):
        key = id(member.optimizer)
        if key not in known:
            known[key] = _trained(member)
        first = known[id(members[0].optimizer)]
        if other := sorted(set(known[key]) ^ set(first)):
            raise Unsupported(
                f"All runs of a fleet train the same parameters, but run {run} and run 0 differ "
                f"in: {', '.join(other)}."
            )
    if not first:
        raise Unsupported("`Member(optimizer=...)` moves no parameter of `model`.")
    return first


def _trained(member: Member) -> tuple[str, ...]:
    """Names of the parameters that the optimizer moves, in the order of the model."""
    stepped, model = parameters_of(unwrap(member.optimizer)), dict(member.model.named_parameters())
    ids, moving = {id(p) for p in stepped}, {n: p for n, p in model.items() if p.requires_grad}
    if {id(p) for p in model.values()} & ids:  # an optimizer of this very model
        return tuple(name for name, p in moving.items() if id(p) in ids)
    shapes = [tuple(p.shape) for p in stepped if p.requires_grad]
    if shapes != [tuple(p.shape) for p in moving.values()]:
        raise Unsupported(
            "`Member(optimizer=...)` holds parameters of another model than `model`, and of other "
            f"shapes: {shapes}."
        )
    return tuple(moving)


def _facts(model: nn.Module) -> dict[str, object]:
    """What models of one fleet must share, by a word for it; hooks of parameters are refused."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise Unsupported(f"A fleet cannot follow the hooks of the parameter {name}.")
    tensors, modules = _tensors(model), list(model.named_modules())
    return {
        "shape": {name: tuple(value.shape) for name, value in tensors.items()},
        "precision": {name: value.dtype for name, value in tensors.items()},
        "set of frozen parameters": {n: p.requires_grad for n, p in model.named_parameters()},
        "mode (`train` or `eval`)": [module.training for _, module in modules],
        "structure": [(name, type(m), m.extra_repr()) for name, m in modules],
    }


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    both = [*model.named_parameters(), *model.named_buffers()]
    return {name: value.detach() for name, value in both}
