"""The objective: coupled terms, one closure, one forward pass, an ordinary scalar loss."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import _watch
from ._distributed import DISTRIBUTED, Group, RanksOutOfStep, find_group, sum_over_ranks
from ._state import CheckedState, pack, unpack
from .certificate import Certificate, certify
from .inputs import ONLY, CallReader, Index, mean_loss, rows_by_block, split
from .optim import MethodOptimizer
from .previous import PreviousParameters, unwrap
from .terms import AbstractTerm
from .tracker import Batch, Blocks, Entries, NonFiniteValue, OpenStep, Tracked
from .tracker.blocks import over_ranks

__all__ = ["Compositional"]

Function = Callable[[], Any]
"""The user's function: runs the model and returns inner values, or (loss, values)."""


@dataclasses.dataclass
class _CallState:
    """What changes with each call: a plain object, since nn.Module is slow to set attributes of.

    Attributes:
        calls: number of calls so far, to notice ranks out of step.
        open_at: version of the parameters and number of snapshots when the open step was
            evaluated.
        waiting: calls since the last step of an optimizer.
        moves: how often the parameters have changed in that time.
        stepping: an optimizer is inside its step (it runs a closure).
        stepped: it has made one.
        from_eval: the loss of a call in `eval()` mode was differentiated.
        open: what the next step of an optimizer makes final.
        closing: it is being written.
        losses: of the calls since the last step.
        several: a step had several calls; from then on the losses of all are watched.
        unused: how many losses were never differentiated.
        said_moves, said_steps, said_eval, said_unused: what was warned of.
    """

    calls: int = 0
    open_at: tuple[int, int] | None = None
    waiting: int = 0
    moves: int = 0
    stepping: bool = False
    stepped: bool = False
    from_eval: bool = False
    open: OpenStep | None = None
    closing: bool = False
    losses: _watch.Losses = dataclasses.field(default_factory=_watch.Losses)
    several: bool = False
    unused: int = 0
    said_moves: bool = False
    said_steps: bool = False
    said_eval: bool = False
    said_unused: bool = False

    def differentiated(self, _: Tensor) -> None:
        """To be called when a loss of `eval()` mode is differentiated."""
        self.from_eval = True

    def note_unused(self, number: int) -> None:
        """Count losses of training that were not differentiated; warn from the second on."""
        self.unused += number
        if self.unused > 1 and not self.said_unused:
            self.said_unused = True
            _watch.warn(
                "Losses of this objective in training mode were never differentiated. If these are "
                "evaluations, use `objective.eval()` or `torch.no_grad()`: otherwise their values "
                "are tracked as those of training."
            )


class _Terms(nn.ModuleDict):
    """The terms of an objective, which reads their settings once."""

    def __init__(self, terms: Mapping[str, AbstractTerm]) -> None:
        super().__init__()
        self._modules.update(terms)

    def _refuse(self, *_: Any) -> Any:
        raise AttributeError(_FIXED)

    __setitem__ = __delitem__ = clear = _refuse  # type: ignore[assignment]

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse() if isinstance(value, nn.Module) else super().__setattr__(name, value)


_FIXED = "The terms of an objective cannot be replaced: it would go on with those it has."


class _Children(dict[str, Any]):
    """The modules of an objective: its terms stay, and nn.Module would take any as `term`."""

    def __setitem__(self, name: str, module: Any) -> None:
        if name == "term" or (name == "terms" and name in self):
            raise AttributeError(_FIXED)
        super().__setitem__(name, module)


class Compositional(CheckedState):
    r"""g0(w) plus a sum of coupled terms, as a loss for your own training loop.

    .. math::
        \min_w\; g_0(w) + \sum_{\text{terms}} \frac{\text{weight}}{n}\sum_{i=1}^n f(g_i(w))

    Call it with a function that runs your model; the returned scalar has an estimate of the
    objective as its value and the paper's estimator G_t as its gradient (Alg. 1, line 9). The
    function is called once with gradient and, when a tracker corrects, once more without, at the
    previous parameters. In `eval()` mode the loss of the batch is returned and nothing changes.

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
        offload: keep the copy of w_{t-1} that a correction needs in the host's memory instead of
            on the GPU: the same values, one copy of the parameters less at the peak, two transfers
            a step (see `PreviousParameters`).
        shared_index: whether an index that is no dict means the blocks of every term.

    The function returns one of

    * `values`: the inner values, shape (E,) or (E, d1), or a `Measured` pair;
    * `{term: values}` with several terms (a term that is missing is left alone);
    * `(loss, values)`, with an ordinary loss g0: a scalar, or a vector of per-sample losses, which
      is averaged over the global batch. Under DDP a scalar is averaged over ranks with equal
      weight, so give the vector when ranks hold batches of different size.

    Example:
        >>> import torch, fcco
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> tracker = fcco.tracker.msvr_tracker(3, gamma=0.5)
        >>> term = fcco.terms.CoupledTerm(fcco.outer.Hinge(), tracker, smoothing=0.1)
        >>> objective = fcco.Compositional(model, optimizer, term)
        >>> x, block = torch.ones(4, 2), torch.tensor([0, 0, 1, 2])
        >>> loss = objective(lambda: model(x).squeeze(1), block)
        >>> loss.backward(); optimizer.step(); optimizer.zero_grad()
    """

    method: str = ""
    """The name of the method, where a recipe made the objective."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        terms: AbstractTerm | Mapping[str, AbstractTerm],
        *,
        process_group: Any = "auto",
        offload: bool = False,
        shared_index: bool = True,
    ) -> None:
        super().__init__()
        self.__dict__["_modules"] = _Children()
        named = {ONLY: terms} if isinstance(terms, AbstractTerm) else dict(terms)
        if not named:
            raise ValueError("`Compositional(terms=...)` must hold at least one term.")
        several = optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
        self._optimizers = tuple(unwrap(each) for each in several)
        self.terms: Any = _Terms(named)
        self._terms = named  # the same, without the registry's slow look-up
        self._reader = CallReader(named, shared_index)
        # The only term and its tracker, in a tuple: nn.Module would register them once more.
        self._only = (named[ONLY], named[ONLY].tracker) if set(named) == {ONLY} else None
        self._model = (model,)  # a tuple hides it: it has its own state_dict
        self.optimizer = optimizer
        self._process_group = process_group
        # Terms that never look at w_{t-1} cost no copy of the parameters.
        self.previous: PreviousParameters | None = None
        if any(term.tracker.needs_previous or term.looks_back for term in named.values()):
            self.previous = PreviousParameters(model, self._optimizers, offload=offload)
        _watch.foreign_optimizers(
            type(self).__name__, model, self._optimizers, self.previous is not None
        )
        self._watch: _watch.FirstCalls | None = _watch.FirstCalls(named)
        for name, term in named.items():
            term.tracker.names = term.names
            term.tracker.of = "" if name == ONLY else f" of `{name}`"
        self._watchers = [name for name, term in named.items() if term.watches_objective]
        self._needs_objective = len(self._watchers) == len(named) or any(
            term.needs_objective for term in named.values()
        )
        self._forgetful = [t for t in named.values() if type(t).forget is not AbstractTerm.forget]
        self._look_backs = {name: term for name, term in named.items() if term.looks_back}
        self._state = _CallState()
        self._busy = threading.Lock()
        self._handles: list[Any] = []
        self._after_close: list[Callable[[], None]] = []
        self._attach()

    def _attach(self) -> None:
        """Listen to the steps of the optimizers."""
        hook = self._after_step
        self._handles = [each.register_step_post_hook(hook) for each in self._optimizers]
        if self.previous is None:  # its snapshots tell of steps that run closures
            before = self._before_step
            self._handles += [each.register_step_pre_hook(before) for each in self._optimizers]
        for each in self._optimizers:
            if isinstance(each, MethodOptimizer):
                each.join(*self._model)

    @property
    def model(self) -> nn.Module:
        """Your model."""
        return self._model[0]

    @property
    def term(self) -> Any:
        """The only term."""
        if set(self.terms) != {ONLY}:
            raise ValueError(f"This objective has the terms {', '.join(self.terms)}; use `terms`.")
        return self.terms[ONLY]

    @property
    def open_step(self) -> OpenStep | None:
        """What the next step of an optimizer makes final, if there was a call."""
        return self._state.open

    @property
    def group(self) -> Group | None:
        """The ranks to pool over."""
        return find_group(self._process_group)

    def forward(
        self,
        function: Function,
        index: Index = None,
        *,
        gradient: Function | None = None,
        gradient_index: Index = None,
    ) -> Tensor:
        """The loss of one batch.

        Args:
            function: runs the model; see the class for what it returns.
            index: block of each entry; repeated ids are samples of one block. Where samples are in
                several blocks or in none: a boolean matrix with a row per sample and a column per
                block, or a list of lists of ids; a value then counts in each block of its sample.
                None means that the entries are all n blocks in order. A dict by term with several
                terms.
            gradient: a second function for an independent batch of the same blocks: it carries
                the gradient (and g0) while `function` gives the values (Alg. 2, line 5).
            gradient_index: its index, when that differs.
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
            return self._loss(function, index, gradient, gradient_index)
        except RanksOutOfStep as error:
            self._state.calls = error.latest  # the next call is the same on all ranks again
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
    ) -> Tensor:
        updating = self.training and torch.is_grad_enabled()
        if self._state.closing:
            self.close()
        # The test of `find_group`, without a call in the usual case of one process.
        distributed = DISTRIBUTED and torch.distributed.is_initialized()
        group = find_group(self._process_group) if distributed else None
        self._state.calls += 1
        if not callable(function) or not (gradient is None or callable(gradient)):
            raise TypeError(self._needs_function(function, gradient))
        reader, previous = self._reader, self.previous
        watch = self._watch if updating else None
        only: Any = self._only
        blocks: dict[str, Any]
        if only is None or index is None or isinstance(index, Mapping):
            blocks = reader.blocks(index)
        else:
            blocks = {ONLY: only[1].blocks(index)}
            if blocks[ONLY].rows is not None and not only[0].overlapping:
                blocks = reader.blocks(index)  # which says what is wrong
        gradient_blocks = None if gradient_index is None else reader.blocks(gradient_index)
        if updating:
            self._end_step_if_parameters_moved()
        if self._look_backs and updating:
            self._look_back(function, blocks, gradient is not None)
            if gradient is not None:
                # The first batch has moved the multipliers and is not needed any more.
                blocks, gradient_blocks = gradient_blocks or blocks, None
                function, gradient = gradient, None
        # Before the first step w_{-1} = w_0, and there is nothing to correct.
        ready = previous is not None and updating and previous.ready
        past = number = None
        if ready and any(t.tracker.corrects for t in self._terms.values()):
            assert previous is not None
            past = previous.evaluate(function)
            if watch is not None and watch.evaluations and gradient is None:
                number = _watch.sequence_number()
        carriers = None
        if gradient is None:
            values, loss = function(), None
            if isinstance(values, tuple):
                loss, values = split(values)
        else:
            with torch.no_grad():
                values = split(function())[1]
            loss, carriers = split(gradient())
        if loss is None and self._needs_objective:
            raise ValueError("This method needs the objective too: return the pair (loss, values).")
        past = None if past is None else split(past)[1]
        plain = carriers is None and only is not None and isinstance(values, Tensor)
        own = blocks[ONLY] if plain else None
        if only and own is not None and past is None and values.shape[:1] == (own.size,):
            entries = {ONLY: only[1].entries(own, values)}
        else:
            entries = reader.entries(blocks, values, past, carriers, gradient_blocks)
        if loss is not None:
            loss = mean_loss(loss, group, check=updating)
        elif not entries:
            raise ValueError("Your function returned neither a loss nor any inner value.")
        if watch is not None:
            alone = loss is None or not loss.requires_grad
            if (
                alone
                and group is None
                and not any(e.carrier.requires_grad for e in entries.values())
            ):
                raise ValueError(_watch.NO_GRADIENT)
            if number is not None or watch.copied:
                results = [each.carrier for each in entries.values()]
                results += [] if loss is None else [loss]
                watch.check_function(number, results, self._optimizers)
            watch.noted.append(
                [(n, e.blocks, alone or e.carrier.requires_grad) for n, e in entries.items()]
            )
            if len(watch.noted) == _watch.WINDOW and not watch.look(group is None):
                self._watch = None
        if group is not None:
            entries = self._on_all_ranks(entries, group)
        step = OpenStep(self._state.open) if updating else None
        tracked, call = {}, self._state.calls
        for name, each in entries.items():
            tracked[name] = self._terms[name].tracker.track(each, step, group, call)
        if step is not None and group is None and (loss is not None or not plain):
            self._refuse_nonfinite(entries, loss)
        combined = self._combined(loss, tracked, group, step)
        if step is not None:
            self._state.open = step
        if updating and combined.grad_fn is not None:
            state = self._state
            state.losses.made += 1
            state.several = state.several or state.losses.made > 1
            if state.several:
                state.losses.watch(combined, self._optimizers)
        elif not self.training and combined.requires_grad:
            combined.register_hook(self._state.differentiated)
        return combined

    def _refuse_nonfinite(self, entries: dict[str, Entries], loss: Tensor | None) -> None:
        """Raise if the loss, or values that carry the gradient alone, are NaN or infinite.

        What is tracked was checked before; on several ranks all of this was, for all together. A
        GPU is not asked: the host would wait.
        """
        parts = {} if loss is None else {"ordinary loss g0": loss}
        for name, each in entries.items():
            strict = self._terms[name].tracker.on_nonfinite == "raise"
            if each.stand_in and strict:
                parts[f"values that carry the gradient of `{name}`"] = each.carrier
        for what, part in parts.items():
            # One number to look at; a sum of finite values may overflow.
            if part.device.type != "cpu" or math.isfinite(part.detach().sum().item()):
                continue
            if not bool(torch.isfinite(part).all()):
                raise NonFiniteValue(
                    f"The {what} that your function returned: NaN or infinite; nothing was updated."
                )

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
            f"`{type(self).__name__}` needs a function that runs the model, because it may be "
            f"called at the previous parameters too, but `{name}` is: {type(given).__name__}. "
            "Write `objective(lambda: losses_of(model(x), y), index)` or, with an ordinary loss, "
            "`objective(lambda: (loss_of(model), values_of(model)))`."
        )

    def _end_step_if_parameters_moved(self) -> None:
        """End or undo the open step if the parameters have changed since it was evaluated.

        Values of different w must not be pooled. In-place changes raise the version of a tensor,
        which costs nothing to read; the sum of all versions changes if any parameter does.
        """
        state, count = self._state, 0 if self.previous is None else self.previous.snapshots
        if state.losses.dropped:  # before anything is pooled with them
            self._forget_unused()
        groups = [group["params"] for each in self._optimizers for group in each.param_groups]
        here = (sum(p._version for group in groups for p in group), count)
        there, state.open_at = state.open_at, here
        state.waiting += 1
        cleared = state.losses.cleared
        if (cleared or state.waiting == _watch.WAITS[-1]) and self._handles:
            if not (state.said_moves or state.said_steps):
                _watch.never_stepped(self.model, self._optimizers, state.waiting, cleared)
            state.said_steps = True
        if there is None or there[0] == here[0]:
            return
        waiting, moves = state.waiting, state.moves + 1
        if there[1] != count or state.stepping:
            waiting = moves = 0  # one of our optimizers moves them, inside its step
        if moves == _watch.MOVES and self._handles and not state.said_moves:
            state.said_moves = True
            _watch.moved_by_hand(self._optimizers)
        if there[1] != count or (self.previous is None and (state.stepping or not state.stepped)):
            # w_{t-1} is where the open step was evaluated (L-BFGS, or parameters that are changed
            # by hand): it counts as a step.
            self.close()
            state.open_at = here
        else:
            self._give_up()  # the step is still to come (SAM): this evaluation is the one
        state.waiting, state.moves = waiting, moves

    def _forget_unused(self) -> None:
        """Note losses that went without being differentiated, and undo a step of such alone."""
        state, losses = self._state, self._state.losses
        state.note_unused(losses.dropped)
        losses.watched, losses.dropped = losses.watched - losses.dropped, 0
        # One rank must not undo what others keep.
        if not (losses.used or losses.trained) and self.group is None:
            self._give_up()
            state.open_at = None

    def _give_up(self) -> None:
        """Forget the calls since the last step."""
        self._state.open, self._state.losses = None, _watch.Losses()
        for term in self._forgetful:
            term.forget()

    def _look_back(
        self, function: Function, blocks: dict[str, Blocks | None], independent: bool
    ) -> None:
        """Let terms use this batch at w_{t-1}."""
        assert self.previous is not None
        for name, term in self._look_backs.items():
            pooled = functools.partial(self._pooled_values, name, function, blocks)
            term.look_back(pooled, self.previous, independent)

    def _pooled_values(
        self, name: str, function: Function, blocks: dict[str, Blocks | None]
    ) -> Tracked:
        group = self.group
        entries = self._reader.entries(blocks, split(function())[1])
        if group is not None:
            entries = self._on_all_ranks(entries, group)
        return self._terms[name].tracker.track(entries[name], None, group)

    def _on_all_ranks(self, entries: dict[str, Entries], group: Group) -> dict[str, Entries]:
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
            [n in entries and entries[n].previous is not None for n in names],
            [n in entries and entries[n].independent for n in names],
        ]
        device = self._terms[names[0]].tracker.value.device
        flags = sum_over_ranks(torch.tensor(kinds, dtype=torch.int64, device=device), group)
        result = {}
        for name, (held, bad, previous, independent) in zip(
            names, zip(*flags, strict=True), strict=True
        ):
            if bad and self._terms[name].tracker.on_nonfinite == "raise":
                raise NonFiniteValue(
                    f"The values that carry the gradient of `{name}` are NaN or infinite on at "
                    "least one rank; nothing was updated."
                )
            if held:
                result[name] = entries.get(name) or self._reader.no_entries(
                    name, previous > 0, independent > 0
                )
        return result

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._state.stepping = True

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        state = self._state
        if state.from_eval:
            state.from_eval = False
            if state.waiting == 0 and not state.said_eval:
                state.said_eval = True
                _watch.stepped_in_eval()
        state.stepping, state.stepped = False, True
        if state.losses.watched > state.losses.used:
            state.note_unused(state.losses.watched - state.losses.used)
        self.close()
        # A proximal-point optimizer that begins a round has z_{-1} = z_0 (Alg. 2, line 3).
        begins = isinstance(optimizer, MethodOptimizer) and optimizer.round_begins
        if begins and self.previous is not None:
            self.previous.forget(optimizer)

    def close(self) -> None:
        """End the tracking step; a hook calls it after each optimizer step."""
        state, step = self._state, self._state.open
        state.open_at, state.waiting, state.moves = None, 0, 0
        if state.losses.made:
            state.losses = _watch.Losses()
        if step is not None:
            state.closing = True  # until all is written: an interrupt before the end is made good
            for tracker, update in step.updates.items():
                tracker.close(update)
            for function, arguments in step.writes.values():
                function(*arguments)
        for term in self._forgetful:
            term.forget()
        state.open, state.closing = None, False
        for action in self._after_close:
            action()

    def detach_hooks(self) -> None:
        """Stop listening to the optimizer, so that another objective can take over."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.previous is not None:
            self.previous.detach_hooks()
        for optimizer in self._optimizers:
            if isinstance(optimizer, MethodOptimizer):
                optimizer.leave()

    def value(self) -> Tensor:
        """The coupled part of the objective itself, at the tracked u: no smoothing, no g0."""
        return torch.stack([term.value() for term in self.terms.values()]).sum()

    def warm_up(self, batches: Iterable[tuple[Function, Index]]) -> None:
        """Start every tracker from a pass over the data (Alg. 1, lines 2-3).

        Args:
            batches: pairs of a function and an index, as for a call. The values of each block are
                averaged over all of them. Without a warm-up, a block starts at its first visit.
        """
        pooled = self.pool(batches)
        for name, batch in pooled.items():  # all are checked before one is written
            self._terms[name].tracker.check_batch(batch)
        for name, batch in pooled.items():
            self._terms[name].tracker.set_batch(batch)
        self._give_up()

    def pool(self, batches: Iterable[tuple[Function, Index]]) -> dict[str, Batch]:
        """The values of each term over many batches, and over ranks; no gradient, no update."""
        pooled: dict[str, Batch] = {}
        for function, index in batches:
            blocks = self._reader.blocks(index)
            with torch.no_grad():
                entries = self._reader.entries(blocks, split(function())[1])
            for name, each in entries.items():
                batch = self._terms[name].tracker.pool(each._replace(previous=None))
                pooled[name] = pooled[name].merge(batch) if name in pooled else batch
        group = self.group
        if group is None:
            return pooled
        for name, term in self._terms.items():
            batch = pooled.get(name)  # once, at the end: ranks may have unequal numbers of batches
            if batch is None:
                batch = term.tracker.pool(self._reader.no_entries(name, False, False))
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
                block.
            limit: one for all blocks, or a dict by their names or numbers; see `certify`. Those of
                the objective unless given.
            reference: the values of another model for the same rows, in the same form. The limit
                is then that of the differences, 0 unless given.
            options: `level`, `tolerance`, `min_rows`, `joint` and `seed` of `certify`.
        """
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
            limit = 0.0 if limit is None else limit
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
        if self._state.closing:
            self.close()
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
        self._state.open_at, self._state.waiting, self._state.moves = None, 0, 0
        self._give_up()

    def __getstate__(self) -> dict[str, Any]:
        # Hooks and the lock belong to this object; a copy made by pickle or deepcopy has a model
        # and optimizers of its own and listens to those.
        if self._process_group is not None and self._process_group != "auto":
            raise TypeError(
                f"`{type(self).__name__}` cannot be copied or pickled with a process group of its "
                "own; use `state_dict()`."
            )
        state = {k: v for k, v in self.__dict__.items() if k not in ("_busy", "_handles")}
        state["_state"] = dataclasses.replace(
            self._state, losses=_watch.Losses(), open=None, closing=False
        )
        return state | {"_listens": bool(self._handles)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        listens = state.pop("_listens")
        super().__setstate__(state)
        self._busy, self._handles = threading.Lock(), []
        self._watch = _watch.FirstCalls(self._terms, copied=True)
        if listens:
            self._attach()
