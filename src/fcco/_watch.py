"""The user's training loop, as an objective sees it.

Where a step ends, what became of each loss; and a loop that runs but does not do what its author
meant is noticed, and told so once. Nothing here looks at the value of a tensor that may be on a
GPU: versions, flags, ages of graph nodes and ids that are Python numbers already are free.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .previous import parameters_of
from .terms import AbstractTerm, CVaRTerm, GroupWeights
from .tracker import Blocks, Entries

__all__ = [
    "MIN_WAIT", "NO_GRADIENT", "WINDOW", "FirstCalls", "Loop", "Losses", "UsageWarning",
    "sequence_number", "warn",
]  # fmt: skip

MOVES = 20
"""So many changes of the parameters without a step of the optimizer are no accident. Fewer may be
the ascent steps of SAM, or weights that were swapped for an evaluation."""

MIN_WAIT, MAX_WAIT = 20, 1000
"""After so many calls without a step it is asked why: at the first, whether gradients are
accumulated (over hundreds of calls, perhaps) or thrown away (a few times by a `GradScaler`); the
second is too long for anything."""

WINDOW = 10
"""Calls between two looks at what was noted of them."""

NO_GRADIENT = (
    "What your function returned has no gradient, in training mode: was it computed by "
    "`.detach()`, `.item()`, NumPy or under `torch.no_grad()`, or is the model frozen? For an "
    "evaluation call `objective.eval()` first."
)

_LOOKS = 100

_NODES = 20_000
"""Nodes of a graph that are looked at, at most."""


class UsageWarning(UserWarning):
    """Something in the training loop makes a method do less than it seems to; said once."""


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

    A hook costs as much as ten operations: where steps have one call, there is none. The first
    time that a step has a second, it looks whether there are gradients since (`trained`). Of the
    losses watched, some are used (differentiated) and some dropped without. `cleared`: when loss
    number `MIN_WAIT` was differentiated, the gradients of those before were gone.
    """

    made: int = 0
    watched: int = 0
    used: int = 0
    dropped: int = 0
    trained: bool = False
    cleared: bool = False


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


def _without_gradient(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    grads = (p.grad for each in optimizers for p in parameters_of(each))
    return all(g is None or (g.device.type == "cpu" and not g.any()) for g in grads)


class Loop:
    """The user's training loop, as an objective sees it; what looks wrong is said once.

    Args:
        model: the model.
        optimizers: the optimizers.
        terms: the terms by name.
        copied: whether the objective is a copy, with copies of its model and optimizer.

    Attributes:
        calls: calls since the last step of an optimizer.
        moves: how often the parameters have changed in that time.
        losses: those of the open step.
        several: a step had several calls; from then on the losses of all are watched.
        from_eval: the loss of a call in `eval()` mode was differentiated.
        listening: the objective is told of steps.
        first: what is noted of the first calls, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        terms: Mapping[str, AbstractTerm],
        copied: bool = False,
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self.calls = self.moves = self._unused = 0
        self.several = self.from_eval = self.listening = False
        self.losses, self._said = Losses(), set[str]()
        self.first: FirstCalls | None = FirstCalls(terms, optimizers, copied)

    def check_optimizers(self, call: str, swaps: bool) -> None:
        """Refuse optimizers that hold no parameter of the model.

        Args:
            call: the name of the objective's class.
            swaps: whether the model is evaluated at w_{t-1}, which needs its own parameters.
        """
        own = set(self._model.parameters())
        if not own or not own.isdisjoint(self._held()):
            return
        message = (
            f"`{call}(model, optimizer)`: {self._names} holds no parameter of this "
            f"{type(self._model).__name__}: it was made for another model, or for a copy of this "
            "one. Make it from `model.parameters()` of the model that you train."
        )
        if swaps:
            raise ValueError(message)
        warn(f"{message} (Master copies of its parameters are fine.)")

    def _held(self) -> set[Tensor]:
        return {p for each in self._optimizers for p in parameters_of(each)}

    @property
    def _names(self) -> str:
        return " and ".join(type(each).__name__ for each in self._optimizers)

    def returns(self, loss: Tensor, updating: bool) -> None:
        """Watch what becomes of a loss of the training, or of an evaluation."""
        losses = self.losses
        if not updating:
            if loss.requires_grad:
                loss.register_hook(self._differentiated_in_eval)
        elif loss.grad_fn is not None:
            self.several = True
            if losses.made == 2 and not losses.watched:
                losses.trained = not _without_gradient(self._optimizers)
            losses.watched += 1
            hook = _LossHook(losses, self._optimizers if losses.made == MIN_WAIT else ())
            loss.grad_fn.register_prehook(hook)

    def _differentiated_in_eval(self, _: Tensor) -> None:
        self.from_eval = True

    def none_was_used(self, one_rank: bool) -> bool:
        """Note losses that were dropped; whether the open step is one of such alone."""
        losses = self.losses
        self._note_unused(losses.dropped)
        losses.watched, losses.dropped = losses.watched - losses.dropped, 0
        # One rank must not undo what others keep.
        return one_rank and not (losses.used or losses.trained)

    def stepped(self) -> None:
        """A step of an optimizer was made."""
        from_eval, self.from_eval = self.from_eval, False
        if from_eval and self.calls == 0:
            self._say(
                "eval",
                "The optimizer stepped on a loss that this objective gave in `eval()` mode: that "
                "is the loss of the batch alone, and nothing was tracked. Call `objective.train()` "
                "before training (`.train()` of a module that holds it does that too).",
            )
        if self.losses.watched > self.losses.used:
            self._note_unused(self.losses.watched - self.losses.used)

    def moved(self, by_optimizer: bool) -> None:
        """The parameters have changed between two calls; `by_optimizer`: inside its step."""
        if by_optimizer:
            self.calls = self.moves = 0
            return
        self.moves += 1
        if self.moves == MOVES and self.listening:
            self._say(
                "moves",
                f"The parameters have changed {MOVES} times between calls of this objective, but "
                f"its optimizer, {self._names}, made no step: the objective does not "
                "know where a step ends nor what w_{t-1} is. Step `objective.optimizer`, or build "
                "the objective with the optimizer that is stepped (a Hugging Face trainer makes "
                "its own: use `fcco.integrations.transformers.RobustTrainer`), or call "
                "`objective.close()` after each update by hand.",
            )

    def waited(self) -> None:
        """There were many calls without a step."""
        why = self.losses.cleared or self.calls == MAX_WAIT
        if not (why and self.listening) or self._said & {"moves", "no step"}:
            return
        text = f"In {self.calls} calls of this objective its optimizer, {self._names}, made no step"
        if self._held().isdisjoint(self._model.parameters()):
            text += (
                ", and it holds no parameter of the model any more. Build the objective after the "
                "model has its final parameters."
            )
        elif self.losses.cleared:
            text += (
                ", and its parameters have no gradient from the calls before. Is "
                "`optimizer.step()` missing before `zero_grad()`? If your function runs a copy of "
                "the model, or another optimizer is stepped, build the objective with those."
            )
        else:
            text += ". Step `objective.optimizer` after `loss.backward()`."
        self._say("no step", text)

    def _note_unused(self, number: int) -> None:
        """Count losses of training that were not differentiated; warn from the second on."""
        self._unused += number
        if self._unused > 1:
            self._say(
                "unused",
                "Losses of this objective in training mode were never differentiated. If these are "
                "evaluations, use `objective.eval()` or `torch.no_grad()`: otherwise their values "
                "are tracked as those of training.",
            )

    def _say(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warn(message)


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


class FirstCalls:
    """What is noted of the first calls of an objective, and looked at now and then.

    Attributes:
        noted: per call, by term: the blocks of its values, and whether those that carry the
            gradient have one (or the loss beside them has none either).
        evaluations: evaluations at w_{t-1} after which the function is still to be checked.
        copied: the first function of a copy is still to be checked.
    """

    def __init__(
        self,
        terms: Mapping[str, AbstractTerm],
        optimizers: Sequence[torch.optim.Optimizer],
        copied: bool,
    ) -> None:
        self.copied, self.evaluations, self._optimizers = copied, 3, optimizers
        self.noted: list[dict[str, tuple[Blocks, bool]]] = []
        self._groups: dict[str, Sequence[Any]] = {
            name: term.names or range(term.tracker.num_inner)
            for name, term in terms.items()
            # With "batch" a group counts as often as it is there, by intention.
            if isinstance(term, CVaRTerm)
            or (isinstance(term, GroupWeights) and term.scaling == "unbiased")
        }
        self._visits = {name: Counter[int]() for name in self._groups}
        self._constant = set(terms)  # terms whose values never had a gradient
        self._overlapping = False  # samples came with several groups
        self._looks = 0

    def check_function(
        self, number: int | None, entries: Mapping[str, Entries], loss: Tensor | None
    ) -> None:
        """Say that the function returned what was computed before `number` was drawn.

        Of a copy of an objective, also that it runs another model.
        """
        held = {id(p) for each in self._optimizers for p in parameters_of(each)}
        results = [each.carrier for each in entries.values()]
        uses = _uses(results if loss is None else [*results, loss])
        if self.copied:
            self.copied = False
            if uses and held.isdisjoint(id(leaf) for _, leaf in uses):
                warn(
                    "This objective is a copy, with copies of its model and optimizer, but your "
                    "function runs another model. Copy them together, `copy.deepcopy((model, "
                    "optimizer, objective))`, or use `objective.model` and `objective.optimizer`."
                )
        if number is None:
            return
        self.evaluations -= 1
        # A node that was made in another thread has a number of its own count; one parameter that
        # a new node uses is enough.
        numbers = [node._sequence_nr() for node, leaf in uses if id(leaf) in held]
        if numbers and max(numbers) <= number:
            self.evaluations = 0
            warn(
                "The function that you gave returns values that were computed before it was "
                "called. It is also called at the previous parameters, where it must give other "
                "values: run the model inside it, `objective(lambda: losses_of(model(x), y), "
                "index)`."
            )

    def look(self, one_rank: bool) -> bool:
        """Judge what was noted so far; return whether to go on.

        Args:
            one_rank: whether the batches are those of all ranks.
        """
        calls, self.noted = self.noted, []
        for name, (blocks, has_gradient) in (each for call in calls for each in call.items()):
            if has_gradient:
                self._constant.discard(name)
            self._overlapping = self._overlapping or blocks.rows is not None
            if name not in self._visits:
                continue
            ids = blocks.index.tolist()
            if len(ids) > 1000 or not one_rank:  # many blocks, or others are on other ranks
                del self._visits[name]
            else:
                self._visits[name].update(ids)
        if self._looks == 0:
            self._say_constant(sorted(self._constant & set[str]().union(*calls)))
        self._looks += 1
        for name, visits in list(self._visits.items()):
            if visits and self._say_unequal(visits, self._groups[name]):
                del self._visits[name]
        return bool(self._visits) and self._looks < _LOOKS

    def _say_constant(self, names: list[str]) -> None:
        if not names:
            return
        of = "" if names == ["inner"] else f" of {', '.join(f'`{name}`' for name in names)}"
        warn(
            f"The inner values{of} had no gradient in {WINDOW} calls: nothing moves the parameters "
            "towards them. A rate or an accuracy needs a differentiable stand-in, "
            "`fcco.Measured(value, surrogate)`."
        )

    def _say_unequal(self, visits: Counter[int], names: Sequence[Any]) -> bool:
        """Say that groups are visited unequally, or not at all; return whether it was said."""
        number = len(names)
        most, least = max(visits.values()), min(visits.values())
        often, seldom = visits.most_common(1)[0][0], min(visits, key=visits.__getitem__)
        # Far apart in size, and by six standard deviations: chance among a thousand groups is not.
        if most >= 3 * least and most - least > 6 * (most + least) ** 0.5:
            data, groups, first = "data", "groups", ""
            if self._overlapping:
                data, groups = "members", "members.group"
                first = "`members = fcco.groups.GroupMemberships(data, groups)` and "
            warn(
                f"The batches hold group {names[often]} {most / least:.1f} times as often as group "
                f"{names[seldom]}: groups count by how often they come. Draw groups equally, "
                f"{first}`DataLoader({data}, batch_sampler=fcco.GroupBatchSampler({groups}, "
                "batch_size=...))`, with one sampler for all epochs: a new one with the same seed "
                "repeats its batches."
            )
            return True
        absent = [group for group in range(number) if group not in visits]
        # By chance so many visits leave out one of n groups in one of e^6 = 400 runs.
        if not absent or visits.total() < (math.log(number) + 6) * len(visits):
            return False
        first = f"Group {names[0]} of {number} has"
        if absent != [0]:
            few = ", ".join(str(names[k]) for k in absent[:5]) + ", ..." * (len(absent) > 5)
            first = f"{len(absent)} of {number} groups ({few}) have"
        one = " Ids start at 0: do yours start at 1?" if absent == [0] else ""
        warn(
            f"{first} not come once, while the others came {visits.total() / len(visits):.0f} "
            f"times on average: `num_groups` counts {number}, and so does the ratio.{one}"
        )
        return True
