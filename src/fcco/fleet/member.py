"""One run of a fleet, as the ordinary objects that would train it alone, and how it is read."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..methods.lagrangian import ProximalRound
from ..methods.switching import SwitchingOptimizer
from ..objective import Compositional
from ..optim import MethodOptimizer
from ..previous import parameters_of, unwrap
from .estimators import Numbers, PlainLoss, read_term
from .run import State, Unsupported
from .updates import read_optimizer


@dataclass(frozen=True)
class Member:
    """One run of a fleet: a model, its optimizer and its objective.

    The objects are read once and never changed. Runs that differ in their first weights alone may
    share an optimizer and an objective; the weights are those of `model`.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer  # yours, or `objective.optimizer`
    objective: Any = None  # None where the loss is a plain average


@dataclass(frozen=True)
class Signature:
    """What all runs of a fleet share: the method, without its numbers."""

    estimator: Any  # finds the gradient: `gradient(run)`
    update: Any  # steps the weights: `start(weights)`, `step(run, gradient, state)`
    rounds: bool  # steps come in rounds
    names: tuple[str, ...] | None  # of the blocks, in order
    needs_loss: bool  # the function must return g_0
    held: tuple[str, ...]  # names of the numbers and of the state of the estimator


class MemberParts(NamedTuple):
    """What a fleet takes from a member."""

    signature: Signature
    numbers: Numbers
    state: State  # of the estimator
    round_length: int | None


def signature_of(member: Member) -> Signature:
    """The method of a member; members with the same one can be in one fleet."""
    return _read(member.optimizer, member.objective).signature


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
            raise Unsupported(
                f"A fleet holds runs of one method (`group_members` sorts them), but run {run} and "
                f"run 0 are:\n{signature}\n{parts[0].signature}"
            )
    return parts


def _read_each(members: Sequence[Member]) -> list[MemberParts]:
    read = functools.cache(_read)  # once where members share their objects
    return [read(member.optimizer, member.objective) for member in members]


def _read(given: Any, objective: Any) -> MemberParts:
    optimizer = unwrap(given)
    estimator, numbers, state = PlainLoss(), {}, {}
    names, needs_loss, whole = None, True, True
    if objective is None:
        whole = not isinstance(optimizer, (ProximalRound, SwitchingOptimizer))
    else:
        terms = list(objective.terms.values()) if isinstance(objective, Compositional) else []
        if len(terms) != 1:
            kind = type(objective).__name__
            raise Unsupported(f"A fleet holds objectives with one term, but {kind} is none.")
        if objective.reference is not None:
            raise Unsupported("A fleet has no `reference`: return the differences from it.")
        (term,) = terms
        estimator, numbers, state = read_term(term)
        names, needs_loss = term.names, term.needs_objective or term.watches_objective
        stepped = objective.optimizer
        whole = isinstance(stepped, torch.optim.Optimizer) and unwrap(stepped) is optimizer
    if not whole:
        raise Unsupported(
            f"`Member(optimizer=...)` is a {type(optimizer).__name__} without its objective, or "
            "not the one that the objective follows: give `objective.optimizer` and the objective."
        )
    update, of_update, length = read_optimizer(optimizer)
    own = [optimizer] if objective is None else [optimizer, objective, objective.previous]
    _check_hooks(optimizer, own)
    numbers = {**numbers, **of_update}
    held = (*sorted(numbers), *sorted(state))
    signature = Signature(estimator, update, length is not None, names, needs_loss, held)
    return MemberParts(signature, numbers, state, length)


def _check_hooks(optimizer: torch.optim.Optimizer, own: Sequence[Any]) -> None:
    """Refuse what acts at each step and would be left out: schedulers, projections, averages.

    The hooks of a member's `own` objective and optimizer are part of the method.
    """
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise Unsupported("Instead of a scheduler use `Fleet.set_hyperparameters(lr=...)`.")
    hooks: list[Any] = []
    wrapped = optimizer.wrapped if isinstance(optimizer, MethodOptimizer) else ()
    for each in (optimizer, *wrapped):  # torch has no public list of the hooks
        hooks += each._optimizer_step_pre_hooks.values()
        hooks += each._optimizer_step_post_hooks.values()
    for hook in hooks:
        owner = hook.__self__ if inspect.ismethod(hook) else hook
        if all(owner is not allowed for allowed in own):
            what = hook.__qualname__ if owner is hook else type(owner).__name__
            raise Unsupported(f"A fleet would leave out what {what} does at each step.")


def stack_weights(members: Sequence[Member], device: Any = None) -> tuple[State, State, State]:
    """The trained weights, the buffers and other parameters of all runs by name, (R, ...)."""
    built, tensors = functools.cache(_built), functools.cache(_tensors)
    # Of runs that share an optimizer, the first has the parameters that it moves.
    of_optimizer = {id(member.optimizer): member for member in reversed(members)}
    trained = {key: _trained(member) for key, member in of_optimizer.items()}
    plans = [(trained[id(member.optimizer)], *built(member.model)) for member in members]
    for run, plan in enumerate(plans):
        for own, first in zip(plan, plans[0], strict=True):
            if own != first:
                text = "The models of a fleet must differ in their weights alone, but run"
                raise Unsupported(f"{text} {run} and run 0 have:\n{own}\n{first}")
    names, rows = plans[0][0], [tensors(member.model) for member in members]
    dtypes = {rows[0][name].dtype for name in names}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        raise Unsupported(
            "A fleet trains weights that are all of single or all of double precision, not of "
            f"{', '.join(sorted(map(str, dtypes)))}."
        )
    table = {name: torch.stack([row[name].detach() for row in rows]).to(device) for name in rows[0]}
    buffers = {name: table.pop(name) for name, _ in members[0].model.named_buffers()}
    return {name: table.pop(name) for name in names}, buffers, table


def _trained(member: Member) -> tuple[str, ...]:
    """Names of the parameters that the optimizer moves, in the order of the model."""
    stepped, model = parameters_of(unwrap(member.optimizer)), dict(member.model.named_parameters())
    ids, moving = {id(p) for p in stepped}, {n: p for n, p in model.items() if p.requires_grad}
    if {id(p) for p in model.values()} & ids:  # an optimizer of this very model
        moving = {name: p for name, p in moving.items() if id(p) in ids}
    elif [p.shape for p in stepped if p.requires_grad] != [p.shape for p in moving.values()]:
        raise Unsupported("`Member(optimizer=...)` holds parameters of another model than `model`.")
    if not moving:
        raise Unsupported("`Member(optimizer=...)` moves no parameter of `model`.")
    return tuple(moving)


def _built(model: nn.Module) -> tuple[Any, Any]:
    """What models of one fleet share: tensors and modules; hooks of parameters are refused."""
    for name, parameter in model.named_parameters():
        # torch has no public list of them.
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise Unsupported(f"A fleet cannot follow the hooks of the parameter {name}.")
    tensors = {n: (tuple(x.shape), x.dtype, x.requires_grad) for n, x in _tensors(model).items()}
    return tensors, [(n, type(m), m.extra_repr(), m.training) for n, m in model.named_modules()]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
