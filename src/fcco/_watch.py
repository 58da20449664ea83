"""Notice a training loop that runs but does not do what its author meant, and say so once.

Nothing here looks at the value of a tensor that may be on a GPU: versions, flags, ages of graph
nodes and ids that are Python numbers already are free. All but two counters of `Compositional` end
with its first calls.
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
from .tracker import Blocks

__all__ = [
    "MOVES",
    "NO_GRADIENT",
    "WAITS",
    "WINDOW",
    "FirstCalls",
    "Losses",
    "UsageWarning",
    "foreign_optimizers",
    "moved_by_hand",
    "never_stepped",
    "only_made_before",
    "sequence_number",
    "stepped_in_eval",
    "warn",
]

MOVES = 20
"""So many changes of the parameters without a step of the optimizer are no accident. Fewer may be
the ascent steps of SAM, or weights that were swapped for an evaluation."""

WAITS = (20, 1000)
"""After so many calls without a step it is asked why: at the first, whether gradients are
accumulated (over hundreds of calls, perhaps) or thrown away (a few times by a `GradScaler`); the
second is too long for anything."""

WINDOW = 10
"""Calls between two looks at what was noted of them."""

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


# The optimizer.


def foreign_optimizers(
    call: str, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], swaps: bool
) -> None:
    """Refuse optimizers that hold no parameter of the model.

    Args:
        call: the name of the objective's class.
        model: the model.
        optimizers: the optimizers.
        swaps: whether the model is evaluated at w_{t-1}, which needs its own parameters.
    """
    own = set(model.parameters())
    held = {p for each in optimizers for p in parameters_of(each)}
    if not own or own & held:
        return
    message = (
        f"`{call}(model, optimizer)`: {_names(optimizers)} holds no parameter of this "
        f"{type(model).__name__}: it was made for another model, or for a copy of this one. Make "
        "it from `model.parameters()` of the model that you train."
    )
    if swaps:
        raise ValueError(message)
    warn(f"{message} (Master copies of its parameters are fine.)")


def moved_by_hand(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Say that the parameters change without a step of the objective's optimizer."""
    warn(
        f"The parameters have changed {MOVES} times between calls of this objective, but its "
        f"optimizer, {_names(optimizers)}, made no step: the objective does not know where a step "
        "ends nor what w_{t-1} is. Step `objective.optimizer`, or build the objective with the "
        "optimizer that is stepped (a Hugging Face trainer makes its own: use "
        "`fcco.integrations.transformers.RobustTrainer`), or call `objective.close()` after each "
        "update by hand."
    )


@dataclass(slots=True)
class Losses:
    """What became of the losses of the calls since the last step.

    A hook costs as much as ten operations: where steps have one call, there is none. The first
    time that a step has a second, it looks whether there are gradients since (`trained`). Of the
    losses watched, some are used (differentiated) and some dropped without. `cleared`: when loss
    number WAITS[0] was differentiated, the gradients of those before were gone.
    """

    made: int = 0
    watched: int = 0
    used: int = 0
    dropped: int = 0
    trained: bool = False
    cleared: bool = False

    def watch(self, loss: Tensor, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Put a hook on the graph of a loss."""
        if self.made == 2 and not self.watched:
            self.trained = not _without_gradient(optimizers)
        self.watched += 1
        hook = _LossHook(self, optimizers if self.made == WAITS[0] else ())
        loss.grad_fn.register_prehook(hook)  # type: ignore[union-attr]


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


def never_stepped(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], calls: int, cleared: bool
) -> None:
    """Say that no step was made in many calls; `cleared`: gradients do not accumulate either."""
    held = [p for each in optimizers for p in parameters_of(each)]
    message = f"In {calls} calls of this objective its optimizer, {_names(optimizers)}, made no "
    if set(held).isdisjoint(model.parameters()):
        message += (
            "step, and it holds no parameter of the model any more. Build the objective after the "
            "model has its final parameters."
        )
    elif cleared:
        message += (
            "step, and its parameters have no gradient from the calls before. Is `optimizer.step()`"
            " missing before `zero_grad()`? If your function runs a copy of the model, or another "
            "optimizer is stepped, build the objective with those."
        )
    else:
        message += "step. Step `objective.optimizer` after `loss.backward()`."
    warn(message)


def stepped_in_eval() -> None:
    """Say that a step followed the gradient of a loss in `eval()` mode."""
    warn(
        "The optimizer stepped on a loss that this objective gave in `eval()` mode: that is the "
        "loss of the batch alone, and nothing was tracked. Call `objective.train()` before "
        "training (`.train()` of a module that holds it does that too)."
    )


def _names(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    return " and ".join(type(each).__name__ for each in optimizers)


# The function.


def sequence_number() -> int:
    """A number above that of all graph nodes which this thread has made so far."""
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).clone().grad_fn
    return node._sequence_nr()  # type: ignore[union-attr]


def only_made_before(number: int, results: Iterable[Tensor], parameters: Iterable[Tensor]) -> bool:
    """Whether results depend on parameters only through graph nodes older than a number.

    Then they were computed before, and the function that returned them will return the same at
    other parameters. A node that was made in another thread has a number of its own count; one
    parameter that is used directly by a new node is enough for False.
    """
    uses, held = _uses(results), {id(p) for p in parameters}
    numbers = [node._sequence_nr() for node, leaf in uses or () if id(leaf) in held]
    return bool(numbers) and max(numbers) <= number


def _uses(results: Iterable[Tensor]) -> list[tuple[Any, Tensor]] | None:
    """The leaves that results depend on, with the node that uses each; None if there are many."""
    nodes: set[Any] = {result.grad_fn for result in results if result.grad_fn is not None}
    stack, found = list(nodes), []
    while stack:
        if len(nodes) > _NODES:
            return None
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


NO_GRADIENT = (
    "What your function returned has no gradient, in training mode: was it computed by `.detach()`, "
    "`.item()`, NumPy or under `torch.no_grad()`, or is the model frozen? For an evaluation call "
    "`objective.eval()` first."
)


class FirstCalls:
    """What is noted of the first calls of an objective, and looked at now and then.

    Args:
        terms: the terms by name.
        copied: whether the objective is a copy, with copies of its model and optimizer.

    Attributes:
        noted: per call, for each term of it: its name, the blocks of its values, and whether the
            values that carry the gradient have one (or the loss beside them has none either).
        evaluations: evaluations at w_{t-1} after which the function is still to be checked.
    """

    def __init__(self, terms: Mapping[str, AbstractTerm], copied: bool = False) -> None:
        self.copied = copied
        self.noted: list[list[tuple[str, Blocks, bool]]] = []
        self.evaluations = 3
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
        self,
        number: int | None,
        results: Sequence[Tensor],
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> None:
        """Say that the function returns what was computed before `number` was drawn.

        Of a copy of an objective, also that it runs another model.
        """
        parameters = [p for each in optimizers for p in parameters_of(each)]
        if self.copied:
            self.copied = False
            leaves = {id(leaf) for _, leaf in _uses(results) or ()}
            if leaves and leaves.isdisjoint(map(id, parameters)):
                warn(
                    "This objective is a copy, with copies of its model and optimizer, but your "
                    "function runs another model. Copy them together, `copy.deepcopy((model, "
                    "optimizer, objective))`, or use `objective.model` and `objective.optimizer`."
                )
        if number is None:
            return
        self.evaluations -= 1
        if only_made_before(number, results, parameters):
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
        for name, blocks, has_gradient in (each for call in calls for each in call):
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
        present = {name for call in calls for name, _, _ in call}
        if self._looks == 0:
            self._say_constant(sorted(self._constant & present))
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
