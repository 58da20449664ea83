"""Detects common mistakes in a training loop and warns once for each.

Nothing here reads the value of a tensor that may be on a GPU: versions, flags, ages of graph nodes
and ids on the host are free.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .previous import parameters_of
from .terms import AbstractTerm, CVaRTerm, GroupWeights
from .tracker import Blocks, Entries

# Changes of the parameters without a step of the optimizer, after which a warning is due. Fewer may
# be the ascent steps of SAM, or weights that were swapped for an evaluation.
MOVES = 20
# Calls without a step after which a warning is due: at the first if gradients are thrown away (more
# often than by a `GradScaler`), not if they are accumulated; at the second in any case.
MIN_WAIT, MAX_WAIT = 20, 1000
WINDOW, _LOOKS = 10, 100  # calls between two looks at what was noted of them, and looks
_NODES = 20_000  # of a graph that are looked at, at most

# What may go wrong, and the remedy.
FAULTS = {
    "foreign": "`{call}(model, optimizer)`: {optimizers} holds no parameter of this {model}. Make "
    "it from `model.parameters()` of the model that you train.",
    "eval": "The optimizer stepped on a loss of `eval()` mode, that of the batch alone: nothing "
    "was tracked. Call `objective.train()` before training.",
    "unused": "Losses of this objective in training mode were tracked and never differentiated. If "
    "these are evaluations, use `objective.eval()` or `torch.no_grad()`.",
    "moves": "The parameters have changed {moves} times between calls of this objective, but its "
    "optimizer, {optimizers}, made no step. Step `objective.optimizer`, build the objective with "
    "the optimizer that is stepped (a Hugging Face trainer makes its own: use `RobustTrainer`), or "
    "call `objective.close()` after each update by hand.",
    "waited": "In {calls} calls of this objective its optimizer, {optimizers}, made no step. Step "
    "`objective.optimizer` between `loss.backward()` and `zero_grad()`. Does your function run a "
    "copy of the model, is another optimizer stepped, or has the model got other parameters? Then "
    "build the objective with those.",
    "copy": "This objective is a copy, but your function runs another model than its own. Copy "
    "them together, `copy.deepcopy((model, optimizer, objective))`, or use `objective.model`.",
    "outside": "The function that you gave returns values that were computed before it was called, "
    "but must give others at the previous parameters: run the model inside it, "
    "`objective(lambda: losses_of(model(x), y), index)`.",
    "detached": "What your function returned has no gradient, in training mode: is it from "
    "`.detach()`, `.item()` or `torch.no_grad()`, or is the model frozen? For an evaluation call "
    "`objective.eval()` first.",
    "constant": "The values{of} had no gradient in {calls} calls, and nothing moves them. A "
    "rate or an accuracy needs a stand-in that has one, `fcco.Measured(value, surrogate)`.",
    "unequal": "The batches hold group {often} {times:.1f} times as often as group {seldom}, and "
    "so they count. Draw all equally, {first}`DataLoader({data}, batch_sampler="
    "fcco.GroupBatchSampler({groups}, batch_size=...))`, one sampler for all epochs.",
    "absent": "{groups} not come once, while the others came {times:.0f} times on average: "
    "`num_groups` counts {number}, and so does the ratio.{hint}",
}


class UsageWarning(UserWarning):
    """A mistake in the training loop that raises no error; each is reported once."""


def warn(message: str) -> None:
    """Warn at the line of the caller's own program."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and (
        frame.f_globals.get("__name__", "").partition(".")[0] in ("fcco", "torch")
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UsageWarning, stacklevel=level + 1)


@dataclass(slots=True)
class Losses:
    """What became of the losses of the calls since the last step.

    A hook costs as much as ten operations: where steps have one call, there is none.
    """

    made: int = 0
    watched: int = 0
    used: int = 0  # of those watched: differentiated
    dropped: int = 0  # freed without
    trained: bool = False  # there were gradients at the first second call of a step
    cleared: bool = False  # at loss `MIN_WAIT` the gradients of those before were gone


@dataclass(slots=True, eq=False)
class _LossHook:
    """Lives as long as the graph of a loss, and is called when that is differentiated."""

    losses: Losses
    optimizers: Sequence[torch.optim.Optimizer]
    used: bool = False

    def __call__(self, _: Any) -> None:
        if not self.used:
            self.used = True
            self.losses.used += 1
            self.losses.cleared = bool(self.optimizers) and _without_gradient(self.optimizers)

    def __del__(self) -> None:
        if not self.used:
            self.losses.dropped += 1


def _held(optimizers: Sequence[torch.optim.Optimizer]) -> set[Tensor]:
    return {p for each in optimizers for p in parameters_of(each)}


def _without_gradient(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    grads = (p.grad for each in optimizers for p in parameters_of(each))
    return all(g is None or (g.device.type == "cpu" and not g.any()) for g in grads)


@dataclass(slots=True, eq=False)
class Loop:
    """What an objective notes of the user's training loop; warns once for each fault."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    first: FirstCalls | None  # None once all was seen
    calls: int = 0  # since the last step of an optimizer
    moves: int = 0  # how often the parameters have changed in that time
    unused: int = 0  # losses that were never differentiated
    several: bool = False  # a step had several calls: from then on the losses of all are watched
    from_eval: bool = False  # the loss of a call in `eval()` mode was differentiated
    listening: bool = False  # the objective is told of steps
    losses: Losses = field(default_factory=Losses)  # of the open step
    said: set[str] = field(default_factory=set)

    def check_optimizers(self, call: str, swaps: bool) -> None:
        """Refuse optimizers that hold no parameter of the model, if it is evaluated at w_{t-1}."""
        own = list(self.model.parameters())
        if not own or not _held(self.optimizers).isdisjoint(own):
            return
        facts = {"optimizers": self._names, "model": type(self.model).__name__}
        message = FAULTS["foreign"].format(call=call, **facts)
        if swaps:
            raise ValueError(message)
        warn(f"{message} (Master copies of its parameters are fine.)")

    @property
    def _names(self) -> str:
        return " and ".join(type(each).__name__ for each in self.optimizers)

    def watch_loss(self, loss: Tensor, updating: bool) -> None:
        """Watch whether a loss of the training, or of an evaluation, is differentiated."""
        losses = self.losses
        if not updating:
            if loss.requires_grad:
                loss.register_hook(self._differentiated_in_eval)
        elif loss.grad_fn is not None:
            self.several = True
            if losses.made == 2 and not losses.watched:
                losses.trained = not _without_gradient(self.optimizers)
            losses.watched += 1
            hook = _LossHook(losses, self.optimizers if losses.made == MIN_WAIT else ())
            loss.grad_fn.register_prehook(hook)

    def _differentiated_in_eval(self, _: Tensor) -> None:
        self.from_eval = True

    def all_losses_dropped(self, one_rank: bool) -> bool:
        """Count dropped losses; return whether the open step has no others."""
        losses = self.losses
        self._note_unused(losses.dropped)
        losses.watched, losses.dropped = losses.watched - losses.dropped, 0
        # One rank must not undo what others keep.
        return one_rank and not (losses.used or losses.trained)

    def on_step(self) -> None:
        """A step of an optimizer was made."""
        from_eval, self.from_eval = self.from_eval, False
        if from_eval and self.calls == 0:
            self._say("eval")
        if self.losses.watched > self.losses.used:
            self._note_unused(self.losses.watched - self.losses.used)

    def on_parameters_changed(self, by_optimizer: bool) -> None:
        """The parameters have changed between two calls; `by_optimizer`: inside its step."""
        if by_optimizer:
            self.calls = self.moves = 0
            return
        self.moves += 1
        if self.moves == MOVES and self.listening:
            self._say("moves")

    def on_many_calls_without_step(self) -> None:
        """Warn if calls without a step mean that gradients are thrown away."""
        why = self.losses.cleared or self.calls == MAX_WAIT
        if why and self.listening and "moves" not in self.said:
            self._say("waited")

    def _note_unused(self, number: int) -> None:
        """Count losses of training that were not differentiated; warn from the second on."""
        self.unused += number
        if self.unused > 1:
            self._say("unused")

    def _say(self, fault: str) -> None:
        if fault not in self.said:
            self.said.add(fault)
            counts = {"calls": self.calls, "moves": self.moves}
            warn(FAULTS[fault].format(optimizers=self._names, **counts))


def sequence_number() -> int:
    """A number above that of all graph nodes which this thread has made so far."""
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).clone().grad_fn
    return node._sequence_nr()  # type: ignore[union-attr]


def _uses(results: Iterable[Tensor]) -> list[tuple[Any, Tensor]]:
    """The leaves that results depend on, with the node that uses each; none if there are many."""
    nodes: set[Any] = {result.grad_fn for result in results if result.grad_fn is not None}
    stack, found = list(nodes), []
    while stack:
        if len(nodes) > _NODES:
            return []
        node = stack.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            if below.name() == "torch::autograd::AccumulateGrad":
                found.append((node, below.variable))
            elif below not in nodes:
                nodes.add(below)
                stack.append(below)
    return found


@dataclass(slots=True, eq=False)
class FirstCalls:
    """What is noted of the first calls of an objective, and looked at now and then."""

    terms: Mapping[str, AbstractTerm]
    optimizers: Sequence[torch.optim.Optimizer]
    copied: bool = False  # the first function of a copy is still to be checked
    evaluations: int = 3  # at w_{t-1}, after which the function is still to be checked
    # Per call, by term: the blocks of its values, and whether those that carry the gradient have
    # one (or the loss beside them has none either).
    noted: list[dict[str, tuple[Blocks, bool]]] = field(default_factory=list)
    visits: dict[str, Counter[int]] = field(default_factory=dict)  # by term, where they are counted
    moving: set[str] = field(default_factory=set)  # terms whose values had a gradient
    overlapping: bool = False  # samples came with several groups
    looks: int = 0

    def check_function(
        self, number: int | None, entries: Mapping[str, Entries], loss: Tensor | None
    ) -> None:
        """Say that the function returned what was computed before `number` was drawn."""
        held = {id(p) for p in _held(self.optimizers)}
        results = [each.carrier for each in entries.values()]
        uses = _uses(results if loss is None else [*results, loss])
        if self.copied:
            self.copied = False
            if uses and held.isdisjoint(id(leaf) for _, leaf in uses):
                warn(FAULTS["copy"])
        if number is None:
            return
        self.evaluations -= 1
        # A node that was made in another thread has a number of its own count; one parameter that
        # a new node uses is enough.
        numbers = [node._sequence_nr() for node, leaf in uses if id(leaf) in held]
        if numbers and max(numbers) <= number:
            self.evaluations = 0
            warn(FAULTS["outside"])

    def look(self, one_rank: bool) -> bool:
        """Judge what was noted so far; return whether to go on."""
        calls, self.noted = self.noted, []
        if self.looks == 0:
            self.visits = {n: Counter() for n, term in self.terms.items() if _is_of_groups(term)}
        for name, (blocks, has_gradient) in (each for call in calls for each in call.items()):
            if has_gradient:
                self.moving.add(name)
            self.overlapping = self.overlapping or blocks.sample_of_entry is not None
            if name not in self.visits:
                continue
            ids: Any = blocks.index
            ids = blocks.inverse.unique().tolist() if ids is None else ids.tolist()  # type: ignore[union-attr]
            if len(ids) > 1000 or not one_rank:  # many blocks, or others are on other ranks
                del self.visits[name]
            else:
                self.visits[name].update(ids)
        constant = sorted(set[str]().union(*calls) - self.moving)
        if self.looks == 0 and constant:
            of = "" if constant == ["inner"] else f" of {', '.join(f'`{n}`' for n in constant)}"
            warn(FAULTS["constant"].format(of=of, calls=WINDOW))
        self.looks += 1
        for name, visits in list(self.visits.items()):
            term = self.terms[name]
            names = term.names or range(term.tracker.num_inner)
            if visits and (fault := self._unequal(visits, names) or _absent(visits, names)):
                warn(fault)
                del self.visits[name]
        return bool(self.visits) and self.looks < _LOOKS

    def _unequal(self, visits: Counter[int], names: Sequence[Any]) -> str:
        """The warning that some groups come more often than others, if they do."""
        (often, most), (seldom, least) = visits.most_common()[0], visits.most_common()[-1]
        # Far apart in size, and by six standard deviations: chance among a thousand groups is not.
        if most < 3 * least or most - least <= 6 * (most + least) ** 0.5:
            return ""
        data, groups, first = "data", "groups", ""
        if self.overlapping:
            data, groups = "members", "members.group"
            first = "`members = fcco.groups.GroupMemberships(data, groups)` and "
        facts = {"often": names[often], "seldom": names[seldom], "times": most / least}
        return FAULTS["unequal"].format(data=data, groups=groups, first=first, **facts)


def _is_of_groups(term: AbstractTerm) -> bool:
    """Whether groups should be sampled equally often; not with "batch" weights."""
    weights = isinstance(term, GroupWeights) and term.scaling == "unbiased"
    return weights or isinstance(term, CVaRTerm)


def _absent(visits: Counter[int], names: Sequence[Any]) -> str:
    """The warning that some groups never come, if they do not."""
    number, total = len(names), visits.total()
    absent = [group for group in range(number) if group not in visits]
    # By chance so many visits leave out one of n groups in one of e^6 = 400 runs.
    if not absent or total < (math.log(number) + 6) * len(visits):
        return ""
    groups, hint = f"Group {names[0]} of {number} has", " Ids start at 0: do yours start at 1?"
    if absent != [0]:
        few = ", ".join(str(names[k]) for k in absent[:5]) + ", ..." * (len(absent) > 5)
        groups, hint = f"{len(absent)} of {number} groups ({few}) have", ""
    facts = {"times": total / len(visits), "number": number}
    return FAULTS["absent"].format(groups=groups, hint=hint, **facts)
