"""The objective: coupled terms, one closure, one forward pass, an ordinary scalar loss."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ._distributed import DISTRIBUTED, Group, RanksOutOfStep, find_group, sum_over_ranks
from ._replay import Replay
from ._state import CheckedState, pack, unpack
from ._watch import FAULTS, MIN_WAIT, WINDOW, FirstCalls, Loop, Losses, sequence_number
from .certificate import Certificate, certify
from .continual import ReferenceLosses
from .inputs import ONLY, Index, mean_loss, parse, rows_by_block, split, term_name
from .optim import MethodOptimizer
from .previous import Optimizers, PreviousParameters, unwrap
from .rules.arrays import view
from .terms import AbstractTerm
from .tracker import Batch, Blocks, Entries, NonFiniteValue, OpenStep, Tracked
from .tracker.blocks import over_ranks

Function = Callable[[], Any]
"""The user's function: runs the model and returns inner values, or (loss, values)."""


@dataclasses.dataclass(slots=True)
class _Step:
    """What changes with each call: a plain object, since nn.Module is slow to set attributes of."""

    number: int = 0  # of calls so far, to notice ranks out of step
    open: OpenStep | None = None  # what the next step of an optimizer makes final
    closing: bool = False  # it is being written
    # Of the parameters, and the number of snapshots, at the last call since a step.
    version: tuple[int, int] | None = None
    running: bool = False  # an optimizer is inside its step (it runs a closure)
    made: bool = False  # it has made one


class _Fixed(dict[str, Any]):
    """A read-only dict of modules.

    Without it, `objective.term = ...` would register a module that is never used.
    """

    def _refuse(self, *_: Any) -> Any:
        raise AttributeError(
            "The terms of an objective cannot be replaced: it would go on with those it has."
        )

    __setitem__ = __delitem__ = clear = _refuse

    def __reduce__(self) -> Any:
        return _Fixed, (dict(self),)


def _refuse_nonfinite(loss: Tensor) -> None:
    """Raise if g0 is NaN or infinite; a GPU is not asked, since the host would wait for it."""
    if loss.is_cpu and not math.isfinite(loss.item()):
        raise NonFiniteValue("The ordinary loss g0 is NaN or infinite; nothing was updated.")


class Compositional(CheckedState):
    r"""An objective of any terms: the mean loss g0 plus functions of tracked values.

    .. math::
        \min_w\; g_0(w) + \sum_{\text{terms}} \frac1n\sum_{i=1}^n f(g_i(w))

    Call it with a function that runs your model. It returns a scalar: its value is an estimate of
    the objective, its gradient the estimator of the method. The function is called once with
    gradient and, when a tracker corrects, once more without, at the previous parameters. In
    `eval()` mode the loss of the batch is returned and nothing changes.

    Calls between two optimizer steps belong to one step (gradient accumulation). If the parameters
    have changed between them (closures of L-BFGS, the second evaluation of SAM), the later call
    starts a step of its own.

    Args:
        model: your model.
        optimizer: the optimizer(s) you step; a step ends the tracking step.
        terms: one term, or several by name.
        process_group: ranks to pool over: `"auto"` (the default group when `torch.distributed` is
            initialised), None, or a group. The result then equals one process on the global batch
            under DDP and FSDP2, which average gradients over ranks.
        offload: of the copy of w_{t-1} that a correction needs, see `PreviousParameters`.
        reference: losses of another model: the values are then differences from it, and a call
            names the `rows` of the table. They are part of the state.

    The function returns one of

    * `values`: the inner values, shape (E,) or (E, d1), or a `Measured` pair;
    * `{term: values}` with several terms (a term that is missing is left alone);
    * `(loss, values)`, with an ordinary loss g0: a scalar, or per-sample losses, which are averaged
      over the global batch. Under DDP scalars count equally: where ranks hold batches of different
      size, give the vector.
    """

    method: str = ""
    """The name of the method, where a recipe made the objective."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        terms: AbstractTerm | Mapping[str, AbstractTerm],
        *,
        process_group: Any = "auto",
        offload: bool = False,
        reference: ReferenceLosses | None = None,
    ) -> None:
        super().__init__()
        if not (reference is None or isinstance(reference, ReferenceLosses)):
            raise TypeError(
                "`reference=` must be `fcco.ReferenceLosses`, of one loss per row, but is: "
                f"{type(reference).__name__}."
            )
        named = {ONLY: terms} if isinstance(terms, AbstractTerm) else dict(terms)
        if not named:
            raise ValueError("`Compositional(terms=...)` must hold at least one term.")
        several = optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
        self._optimizers = tuple(unwrap(each) for each in several)
        self.terms: Any = nn.ModuleDict()
        self.terms._modules = _Fixed(named)  # by any name: `update` refuses those of its methods
        self._terms, self._single = named, set(named) == {ONLY}
        if reference is not None and not self._single:
            raise ValueError(
                "An objective with several terms takes no `reference`: subtract its losses in your "
                "function, `losses - reference(rows)`."
            )
        self.reference, self._has_reference = reference, reference is not None
        self._model = (model,)  # a tuple hides it: it has its own state_dict
        self.optimizer = optimizer
        self._process_group = process_group
        # Terms that never look at w_{t-1} cost no copy of the parameters.
        self.previous: PreviousParameters | None = None
        if any(term.tracker.needs_previous or term.looks_back for term in named.values()):
            self.previous = PreviousParameters(model, self._optimizers, offload=offload)
        for name, term in named.items():
            term.tracker.names = term.names
            term.tracker.of = term_name(name)
        self._watchers = [name for name, term in named.items() if term.watches_objective]
        self._needs_objective = len(self._watchers) == len(named) or any(
            term.needs_objective for term in named.values()
        )
        # On a GPU; None before it is known whether it can be, False where it cannot.
        self._replay: Any = None
        self._forgetful = [t for t in named.values() if type(t).forget is not AbstractTerm.forget]
        self._look_backs = {name: term for name, term in named.items() if term.looks_back}
        self._step, self._busy, self._handles = _Step(), threading.Lock(), list[Any]()
        self._loop = Loop(model, self._optimizers, FirstCalls(named, self._optimizers))
        self._loop.check_optimizers(type(self).__name__, swaps=self.previous is not None)
        self._listen()
        self._modules = _Fixed(self._modules)

    def _listen(self) -> None:
        """Listen to the steps of the optimizers."""
        self._loop.listening = True
        for each in self._optimizers:
            self._handles.append(each.register_step_post_hook(self._after_step))
            if self.previous is None:  # its snapshots tell of steps that run closures
                self._handles.append(each.register_step_pre_hook(self._before_step))
            if isinstance(each, MethodOptimizer):
                each.join(self.model)

    @property
    def model(self) -> nn.Module:
        """Your model."""
        return self._model[0]

    @property
    def term(self) -> Any:
        """The only term."""
        if set(self._terms) != {ONLY}:
            raise ValueError(f"This objective has the terms {', '.join(self._terms)}; use `terms`.")
        return self._terms[ONLY]

    @property
    def open_step(self) -> OpenStep | None:
        """What the next step of an optimizer makes final, if there was a call."""
        return self._step.open

    @property
    def group(self) -> Group | None:
        """The ranks to pool over."""
        return find_group(self._process_group)

    def forward(
        self,
        function: Function,
        index: Index = None,
        *,
        rows: Any = None,
        gradient: Function | None = None,
        gradient_index: Index = None,
        gradient_rows: Any = None,
    ) -> Tensor:
        """The loss of one batch.

        Args:
            function: runs the model; see the class for what it returns.
            index: the group (or other block) of each value, see `Index`; repeated ids are samples
                of one group, and a value counts in each group of its sample. None: the values are
                those of all n groups in order.
            rows: with a `reference`, the row of each value in its table.
            gradient: a second function for an independent batch of the same blocks: it carries
                the gradient (and g0) while `function` gives the values (Alg. 2, line 5).
            gradient_index: its index, when that differs.
            gradient_rows: its rows.
        """
        differentiating = torch.is_grad_enabled()
        # An interrupt right after `acquire` would leave the lock behind: only a call that is really
        # running counts.
        if not self._busy.acquire(blocking=False) and self._is_running():
            raise RuntimeError(
                "This objective is in a call already, from another thread or from inside the "
                "function that it was given. It swaps parameters and pools batches, so calls "
                "must follow each other."
            )
        try:
            if not self._has_reference and rows is None:
                return self._loss(function, index, gradient, gradient_index)
            function, weights = self._compared(function, index, rows)
            gradient_weights = weights
            if gradient is not None:
                other = index if gradient_index is None else gradient_index
                gradient, gradient_weights = self._compared(gradient, other, gradient_rows)
                gradient_index = other
            both = weights, gradient_weights
            return self._loss(function, index, gradient, gradient_index, both)
        except RanksOutOfStep as error:
            self._step.number = error.latest  # the next call is the same on all ranks again
            raise
        finally:
            if torch.is_grad_enabled() != differentiating:  # an interrupt at the entry of `no_grad`
                torch.set_grad_enabled(differentiating)
            if self._busy.locked():
                self._busy.release()

    def _is_running(self) -> bool:
        """Whether another call than the present one is under way, in any thread."""
        code, calls = Compositional.forward.__code__, 0
        for frame in sys._current_frames().values():
            below: Any = frame
            while below is not None:
                calls += below.f_code is code and below.f_locals["self"] is self
                below = below.f_back
        return calls > 1

    # Trackers and w_{t-1} change between calls in ways that Dynamo's guards do not see. What the
    # function itself has compiled (the model) stays so. `torch.compiler.disable` is the same, but
    # takes a second when this module is imported.
    @torch._disable_dynamo
    def _loss(
        self,
        function: Function,
        index: Index,
        gradient: Function | None,
        gradient_index: Index,
        weights: tuple[Any, Any] = (None, None),
    ) -> Tensor:
        """Read the index; end the last step; evaluate at w_{t-1} and at w_t; track; combine.

        Nothing of the objective changes before the last lines: the updates lie in an `OpenStep`.
        """
        state, loop, previous = self._step, self._loop, self.previous
        updating = self.training and torch.is_grad_enabled()
        if state.closing:
            self._finish()
        # The test of `find_group`, without a call in the usual case of one process.
        distributed = DISTRIBUTED and torch.distributed.is_initialized()
        group = find_group(self._process_group) if distributed else None
        state.number += 1
        if not callable(function) or not (gradient is None or callable(gradient)):
            raise TypeError(self._needs_function(function, gradient))
        replay: Any = None
        if self._replay is not False and updating and group is None and gradient is None:
            replay = self._replay = self._find_replay()
        blocks = self._find_blocks(index, bool(replay), weights[0])  # before the model runs
        gradient_blocks = None
        if gradient_index is not None:
            gradient_blocks = self._find_blocks(gradient_index, weights=weights[1])
        if updating:
            self._end_step_if_parameters_moved(group is None)
        if self._look_backs and updating:
            assert previous is not None
            for name, term in self._look_backs.items():
                pooled = functools.partial(self._pooled_values, name, function, blocks)
                term.look_back(pooled, previous, gradient is not None)
            if gradient is not None:
                # The first batch has moved the multipliers and is not needed any more.
                blocks, gradient_blocks = gradient_blocks or blocks, None
                function, gradient = gradient, None
        first, past, number = loop.first if updating else None, None, None
        # Before the first step w_{-1} = w_0, and there is nothing to correct.
        before = previous if updating and previous is not None and previous.ready else None
        if before is not None and any(term.tracker.corrects for term in self._terms.values()):
            past = before.evaluate(function)
        if past is not None and first is not None and first.evaluations and gradient is None:
            number = sequence_number()
        loss, entries = self._evaluate(function, blocks, past, gradient, gradient_blocks, replay)
        if loss is not None:
            loss = mean_loss(loss, group, check=updating)
            if updating and group is None:
                _refuse_nonfinite(loss)  # on several ranks it was checked for all together
        elif self._needs_objective:
            raise ValueError("This method needs the objective too: return the pair (loss, values).")
        elif not entries:
            raise ValueError("Your function returned neither a loss nor any inner value.")
        if first is not None:
            if number is not None or first.copied:
                first.check_function(number, entries, loss)
            alone = loss is None or not loss.requires_grad
            first.noted.append(
                {name: (e.blocks, alone or e.carrier.requires_grad) for name, e in entries.items()}
            )
            if len(first.noted) == WINDOW and not first.look(group is None):
                loop.first = None
        if group is not None:
            entries = self._on_all_ranks(entries, group, gradient is not None)
        step = None
        if updating:
            step = OpenStep() if state.open is None else state.open.copy()
        if replay and past is None and step is not None and replay.can_replay(entries, step):
            combined = replay.loss(loss, entries, step)
        else:
            if step is not None and step.packed is not None:
                self._replay.unpack(step)  # type: ignore[union-attr]
            tracked = {}
            for name, each in entries.items():
                tracked[name] = self._terms[name].tracker.track(each, step, group, state.number)
            combined = self._combined(loss, tracked, group, step)
        if updating:
            if group is None and not combined.requires_grad:
                raise ValueError(FAULTS["detached"])
            state.open = step
            loop.losses.made += 1
        if loop.losses.made > 1 or loop.several or not updating:
            loop.watch_loss(combined, updating)
        return combined

    def _find_replay(self) -> Any:
        """The CUDA graphs of this objective; False where a part of it cannot be recorded."""
        if not (self._replay and self._replay.valid):
            if self._step.open is not None and self._step.open.packed is not None:
                self._replay.unpack(self._step.open)
            able = (
                term.branch_free
                and term.tracker.branch_free
                and isinstance(term.tracker.views["u"], Tensor)
                for term in self._terms.values()
            )
            return all(able) and Replay(self._terms, self._combined)
        return self._replay

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        self._replay = None  # it may be on another device now
        return super()._apply(*arguments, **options)

    def _compared(self, function: Function, index: Index, rows: Any) -> tuple[Function, Any]:
        """A function of differences from the reference, and how many samples each counts for."""
        if self.reference is None:
            raise ValueError("`rows` are those of a `reference`, which this objective has not.")
        if rows is None:
            raise ValueError(
                "This objective has a `reference`: say which row of it each value belongs to, "
                "`objective(function, index, rows=rows)` (`gradient_rows` with `gradient`)."
            )
        if index is None:
            raise ValueError("`objective(function, index, rows=rows)`: rows need an `index`.")
        return self.reference.paired(function, rows), self.reference.weights(rows)

    def _find_blocks(
        self, index: Index, later: bool = False, weights: Tensor | None = None
    ) -> dict[str, Blocks | None]:
        """The blocks of each term, checked; those of values by name are known only afterwards.

        With `later`, the distinct ones are found when they are tracked. `weights` are the samples
        that each value counts for, with one term.
        """
        given = index if isinstance(index, Mapping) else dict.fromkeys(self._terms, index)
        without_terms = index is not None and index is not given and not self._single
        if without_terms or not given.keys() <= self._terms.keys():
            found = "is none" if without_terms else f"its keys are: {', '.join(map(str, given))}"
            raise ValueError(
                f"`index` must be a dict by term, of {', '.join(self._terms)}, but {found}."
            )
        result: dict[str, Blocks | None] = {}
        for name, term in self._terms.items():
            ids = given.get(name)
            if ids is None and (not self._single or term.names is not None):
                result[name] = None
                continue
            found = term.tracker.blocks(ids, later and weights is None)
            if weights is not None:
                samples = found.sample_of_entry
                weights = weights.to(term.tracker.value)
                found = found.weighted(view(weights if samples is None else weights[samples]))
            result[name] = found
            if found.sample_of_entry is not None and not term.overlapping:
                raise ValueError(
                    f"`{type(term).__name__}` needs the one block of each entry as `index`, "
                    "integers of shape (E,), not a matrix or lists of the blocks of each sample."
                )
        return result

    def _evaluate(
        self,
        function: Function,
        blocks: Mapping[str, Blocks | None],
        past: Any = None,
        gradient: Function | None = None,
        gradient_blocks: Mapping[str, Blocks | None] | None = None,
        later: Any = False,
    ) -> tuple[Any, dict[str, Entries]]:
        """Call the user's function: the loss g0 or None, and the values by term.

        `blocks` are those of each term, as far as they are known; `past` is what the function
        returned at w_{t-1}.
        """
        if gradient is None:
            loss, values, others = None, function(), None
            if isinstance(values, tuple):
                loss, values = split(values)
        else:
            with torch.no_grad():
                values = split(function())[1]
            loss, apart = split(gradient())
            others = self._by_term(apart)
        fresh = {ONLY: values} if self._single else self._by_term(values)
        before = {} if past is None else self._by_term(split(past)[1])
        if others is not None and set(others) != set(fresh):
            raise ValueError(
                "`gradient=` must return the same terms as the first function, "
                f"{', '.join(fresh)}, but returned: {', '.join(others)}."
            )
        entries = {}
        for name, value in fresh.items():
            own, carrier, carrier_blocks, previous = blocks[name], None, None, before.get(name)
            if own is None or not isinstance(value, Tensor):
                value, carrier, own = self._parse(name, value, own, bool(later))
            if previous is not None and not isinstance(previous, Tensor):
                previous = self._parse(name, previous)[0]
            if others is not None:
                known = None if gradient_blocks is None else gradient_blocks[name]
                if gradient_blocks is None and not isinstance(others[name], Mapping):
                    known = own
                measured, surrogate, carrier_blocks = self._parse(name, others[name], known)
                carrier = measured if surrogate is None else surrogate
            tracker = self._terms[name].tracker
            entries[name] = tracker.entries(own, value, previous, carrier, carrier_blocks)
        return loss, entries

    def _by_term(self, values: Any) -> Mapping[str, Any]:
        if self._single:
            return {ONLY: values}
        if not isinstance(values, Mapping) or not values.keys() <= self._terms.keys():
            given = list(values) if isinstance(values, Mapping) else type(values).__name__
            raise ValueError(
                f"An objective with the terms {', '.join(self._terms)} needs inner values by term "
                f"but was given: {given}."
            )
        return values

    def _parse(
        self, name: str, values: Any, blocks: Blocks | None = None, later: bool = False
    ) -> tuple[Tensor, Tensor | None, Blocks]:
        """The values to track, those that carry the gradient if they are others, and the blocks."""
        term = self._terms[name]
        if term.names is not None and isinstance(values, Mapping) and not values:
            # Every named block is absent from this batch.
            nothing = self._no_entries(name)
            return nothing.carrier, None, nothing.blocks
        value, carrier, ids = parse(name, term.names, values, term.tracker.dim)
        if ids is not None and blocks is not None:
            raise ValueError(
                f"The values{term_name(name)} are given by name, which says their blocks: leave "
                "`index` out."
            )
        return value, carrier, term.tracker.blocks(ids, later) if blocks is None else blocks

    def _no_entries(self, name: str, independent: bool = False) -> Entries:
        """The entries of a term that this rank has none of."""
        tracker = self._terms[name].tracker
        blocks = tracker.blocks(torch.empty(0, dtype=torch.int64))
        nothing = tracker.rows[:0]
        return tracker.entries(blocks, nothing, None, nothing, blocks if independent else None)

    def entries(
        self, function: Function, index: Index = None, rows: Any = None
    ) -> dict[str, Entries]:
        """The values of a batch by term, with their gradient; nothing is tracked."""
        weights = None
        if self._has_reference or rows is not None:
            function, weights = self._compared(function, index, rows)
        return self._evaluate(function, self._find_blocks(index, weights=weights))[1]

    def _combined(
        self,
        loss: Tensor | None,
        tracked: dict[str, Tracked],
        group: Group | None,
        step: OpenStep | None,
    ) -> Tensor:
        """The loss to differentiate: g0 and the terms, or a term that takes the place of g0."""
        losses = {name: self._terms[name].loss(each) for name, each in tracked.items()}
        replaced = any(self._terms[name].replaces_objective for name in tracked)
        parts = list(losses.values())
        if loss is not None and not replaced:
            parts.insert(0, loss)
        if step is not None:
            for name in self._watchers:
                rest = [part.detach() for part in parts if part is not losses.get(name)]
                if name in losses and rest:
                    value = functools.reduce(torch.add, rest)
                    if group is not None:  # terms have the same value on all ranks, g0 has not
                        total = sum_over_ranks(value.double(), group)
                        value = torch.tensor(total / group.size, dtype=torch.float64)
                    self._terms[name].observe(step, value)
        return parts[0] if len(parts) == 1 else functools.reduce(torch.add, parts)

    def _needs_function(self, function: Any, gradient: Any) -> str:
        name, given = ("gradient=", gradient) if callable(function) else ("function", function)
        return (
            f"`{type(self).__name__}` needs a function that runs the model, here or at the "
            f"previous parameters, but `{name}` is: {type(given).__name__}. Write "
            "`objective(lambda: losses_of(model(x), y), index)`, with `lambda:` before it."
        )

    def _pooled_values(
        self, name: str, function: Function, blocks: dict[str, Blocks | None]
    ) -> Tracked:
        """The values of a term where the parameters are, for `AbstractTerm.look_back`."""
        group = self.group
        entries = self._evaluate(function, blocks)[1]
        if group is not None:
            entries = self._on_all_ranks(entries, group)
        return self._terms[name].tracker.track(entries[name], None, group)

    def _on_all_ranks(
        self, entries: dict[str, Entries], group: Group, independent: bool = False
    ) -> dict[str, Entries]:
        """The entries of every term that any rank holds, in an order that all ranks share.

        Each term is a message to all ranks, so that a term which only others hold gets entries of
        length 0; and bad values that only this rank sees are refused by all. A single term
        without names needs none of this: it is on every rank, and its pooled values are the same.
        """
        names = list(self._terms)
        apart = {n: e.carrier for n, e in entries.items() if e.stand_in}
        if names == [ONLY] and self._terms[ONLY].names is None and not apart:
            return entries
        kinds = [
            [name in entries for name in names],
            [n in apart and not bool(torch.isfinite(apart[n]).all()) for n in names],
        ]
        device = self._terms[names[0]].tracker.value.device
        flags = sum_over_ranks(torch.tensor(kinds, dtype=torch.int64, device=device), group)
        result = {}
        for name, held, bad in zip(names, *flags, strict=True):
            if bad and self._terms[name].tracker.on_nonfinite == "raise":
                raise NonFiniteValue(
                    f"The values that carry the gradient of `{name}` are NaN or infinite on at "
                    "least one rank; nothing was updated."
                )
            if held:
                result[name] = entries.get(name) or self._no_entries(name, independent)
        return result

    def _end_step_if_parameters_moved(self, one_rank: bool) -> None:
        """End or drop the open step if the parameters have changed since it was evaluated.

        Values of different w must not be pooled. In-place changes raise the version of a tensor,
        which costs nothing to read; the sum of all versions changes if any parameter does.

        | since the last call | the open step |
        |---|---|
        | no change: accumulation, or a step that a GradScaler skipped | goes on |
        | a step with hooks | was ended by `_after_step` |
        | a change inside the step of an optimizer that runs a closure: L-BFGS | ends |
        | a change by hand, no step was ever made | ends |
        | another change: the first step of SAM, to be undone before the real one | is dropped |
        """
        state, loop, previous = self._step, self._loop, self.previous
        if loop.losses.dropped and loop.all_losses_dropped(one_rank):  # before anything is pooled
            self._give_up()
            state.version = None
        groups = [group["params"] for each in self._optimizers for group in each.param_groups]
        snapshots = 0 if previous is None else previous.snapshots
        here = (sum(p._version for group in groups for p in group), snapshots)
        there, state.version = state.version, here
        loop.calls += 1
        if loop.calls >= MIN_WAIT:
            loop.on_many_calls_without_step()
        if there is None or there[0] == here[0]:
            return
        closure = there[1] != snapshots
        loop.on_parameters_changed(by_optimizer=closure or state.running)
        if closure or (previous is None and (state.running or not state.made)):
            # w_{t-1} is where the open step was evaluated (L-BFGS, or parameters that are changed
            # by hand): it counts as a step.
            self._finish()
            state.version = here
        else:
            self._give_up()  # the step is still to come (SAM): this evaluation is the one

    def _give_up(self) -> None:
        """Forget the calls since the last step."""
        self._step.open, self._loop.losses = None, Losses()
        for term in self._forgetful:
            term.forget()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._step.running = True

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        state, loop = self._step, self._loop
        if loop.several or loop.from_eval:
            loop.on_step()
        state.running, state.made = False, True
        self._finish()
        loop.calls = loop.moves = 0
        # A proximal-point optimizer that begins a round has z_{-1} = z_0 (Alg. 2, line 3).
        begins = isinstance(optimizer, MethodOptimizer) and optimizer.round_begins
        if begins and self.previous is not None:
            self.previous.forget(optimizer)

    def _finish(self) -> None:
        """Write what the open step changes."""
        state, step = self._step, self._step.open
        state.version, self._loop.losses = None, Losses()
        if step is not None:
            state.closing = True  # until all is written: an interrupt before the end is made good
            if step.packed is not None:
                self._replay.finish(step)
            for tracker, update in step.updates.items():
                tracker.close(update)
            for function, arguments in step.writes.values():
                function(*arguments)
        for term in self._forgetful:
            term.forget()
        state.open, state.closing = None, False

    def close(self) -> None:
        """End the tracking step; a hook does so after each optimizer step."""
        self._finish()
        self._loop.calls = self._loop.moves = 0

    def detach_hooks(self) -> None:
        """Stop listening to the optimizer, so that another objective can take over."""
        self._loop.listening = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.previous is not None:
            self.previous.detach_hooks()
        for optimizer in self._optimizers:
            if isinstance(optimizer, MethodOptimizer):
                optimizer.leave()

    def value(self) -> Tensor:
        """The objective at the running estimates, without smoothing and without g0."""
        return torch.stack([term.value() for term in self._terms.values()]).sum()

    def warm_up(self, batches: Iterable[tuple[Any, ...]]) -> None:
        """Start every tracker from a pass over the data (Alg. 1, lines 2-3).

        `batches` are pairs of a function and an index, with rows where there is a reference; the
        values of each group are averaged over all of them. Without a warm-up, a group starts at the
        value of its first batch.
        """
        pooled = self.pool(batches)
        for name, batch in pooled.items():  # all are checked before one is written
            self._terms[name].tracker.check_batch(batch)
        for name, batch in pooled.items():
            self._terms[name].tracker.set_batch(batch)
        self._give_up()

    def pool(self, batches: Iterable[tuple[Any, ...]]) -> dict[str, Batch]:
        """The values of each term, pooled over many batches and ranks; nothing is updated."""
        pooled: dict[str, Batch] = {}
        for function, index, *rows in batches:
            with torch.no_grad():
                entries = self.entries(function, index, *rows)
            for name, each in entries.items():
                batch = self._terms[name].tracker.pool(each._replace(previous=None))
                pooled[name] = pooled[name].merge(batch) if name in pooled else batch
        group = self.group
        if group is None:
            return pooled
        for name, term in self._terms.items():
            batch = pooled.get(name)  # once, at the end: ranks may have unequal numbers of batches
            if batch is None:
                batch = term.tracker.pool(self._no_entries(name)._replace(previous=None))
            pooled[name] = over_ranks(batch, group)
        return pooled

    def certificate(
        self,
        function: Function,
        index: Index = None,
        *,
        limit: Any = None,
        reference: Any = None,
        **options: Any,
    ) -> Certificate:
        """Test limits on new rows, which were used for nothing else; see `fcco.certificate`.

        Nothing is updated: the function runs once, without gradient, the model in `eval()`.

        Args:
            function: as in a call of the objective; where that takes means, a value for each row.
            index: as in a call. Without it the values are given by name, or as a column for each
                group.
            limit: one for all groups, or a dict by their names or numbers; see `certify`. The
                limits of the objective unless given.
            reference: the values of another model for the same rows, in the same form. The limit
                is then that of the differences: 0 unless given, or where the objective has a
                `reference` too, its own.
            options: `level`, `tolerance`, `min_rows`, `joint` and `seed` of `certify`.
        """
        if self._has_reference and reference is None and limit is None:
            raise ValueError(
                "The limits of this objective are on differences: give the values of the reference "
                "model on these rows, `certificate(..., reference=values)`."
            )
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                values = split(function())[1]
        finally:
            for module, mode in modes:
                module.training = mode
        rows = rows_by_block(self.term, values, index)
        if reference is not None:
            options["reference"] = rows_by_block(self.term, reference, index)
            limit = 0.0 if limit is None and not self._has_reference else limit
        return certify(rows, self._own_limits() if limit is None else limit, **options)

    def _own_limits(self) -> Any:
        raise ValueError(
            f"`{type(self).__name__}` has no limits of its own: give `certificate(limit=...)`, a "
            "number for all or a dict; or the values of a model to compare with as `reference`."
        )

    def _identity(self) -> dict[str, Any]:
        """What a state must have in common with the objective that loads it."""
        terms = {name: type(term).__name__ for name, term in self._terms.items()}
        blocks = {name: term.tracker.value.shape for name, term in self._terms.items()}
        names = {name: list(term.names or ()) for name, term in self._terms.items()}
        kind = {"objective": type(self).__name__, "method": self.method, "terms": terms}
        return {**kind, "blocks": {k: tuple(v) for k, v in blocks.items()}, "names": names}

    def _save_to_state_dict(self, *arguments: Any) -> None:
        if self._step.closing:
            self._finish()
        super()._save_to_state_dict(*arguments)

    def get_extra_state(self) -> Tensor:
        """What the state belongs to: method, blocks and their names."""
        return pack(self._identity())

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the state belongs to another method or to other blocks."""
        super().check_state(state)
        found = unpack(state["_extra_state"]) if "_extra_state" in state else {}
        for key, own in self._identity().items():
            if found.get(key, own) != own:
                raise ValueError(f"the {key} of the state: {found[key]}; of this objective: {own}.")

    def set_extra_state(self, state: Any) -> None:
        """Forget the open step, which belongs to the run that is given up."""
        self._give_up()
        self._step.version, self._loop.calls, self._loop.moves = None, 0, 0

    def __getstate__(self) -> dict[str, Any]:
        # Hooks and the lock belong to this object; a copy made by pickle or deepcopy has a model
        # and optimizers of its own and listens to those.
        own = ("_busy", "_handles", "_loop")
        state = {k: v for k, v in self.__dict__.items() if k not in own} | {"_replay": None}
        state["_step"] = dataclasses.replace(self._step, open=None, closing=False, version=None)
        return state | {"_listens": bool(self._handles)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        listens = state.pop("_listens")
        super().__setstate__(state)
        self._busy, self._handles = threading.Lock(), []
        first = FirstCalls(self._terms, self._optimizers, copied=True)
        self._loop = Loop(self.model, self._optimizers, first)
        if listens:
            self._listen()
