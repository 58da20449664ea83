"""The objective: coupled terms, one closure, one forward pass, an ordinary scalar loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._distributed import Group, find_group
from .inner import Parsed, global_mean, split
from .jobs import empty_job, is_bad, on_all_ranks, refuse
from .previous import PreviousParameters, unwrap
from .proximal_point import ProximalPoint
from .reading import ONLY, Index, Reader
from .terms import AbstractTerm
from .tracker.blocks import Batch, Layout, over_ranks

__all__ = ["Compositional"]

Inner = Callable[[], Any]


class Compositional(nn.Module):
    r"""g0(w) plus a sum of coupled terms, as a loss for your own training loop.

    .. math::
        \min_w\; g_0(w) + \sum_{\text{terms}} \frac{\text{weight}}{n}\sum_{i=1}^n f(g_i(w))

    Call it with a function that runs your model; the returned scalar has an estimate of the
    objective as its value and the paper's estimator G_t as its gradient (Alg. 1, line 9). The
    function is called once with gradient and, when a tracker corrects, once more without, at the
    previous parameters. In `eval()` mode the loss of the batch is returned and nothing changes.

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
        >>> term = fcco.CoupledTerm(fcco.Hinge(), fcco.msvr(3, gamma=0.5), smoothing=0.1)
        >>> objective = fcco.Compositional(model, optimizer, term)
        >>> x, block = torch.ones(4, 2), torch.tensor([0, 0, 1, 2])
        >>> loss = objective(lambda: model(x).squeeze(1), block)
        >>> loss.backward(); optimizer.step(); optimizer.zero_grad()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        terms: AbstractTerm | Mapping[str, AbstractTerm],
        *,
        process_group: Any = "auto",
        offload: bool = False,
    ) -> None:
        super().__init__()
        named = {ONLY: terms} if isinstance(terms, AbstractTerm) else dict(terms)
        if not named:
            raise ValueError("`Compositional(terms=...)` must hold at least one term.")
        self.terms: Any = nn.ModuleDict(named)
        self._terms = named  # the same, without the registry's slow look-up
        self._reader = Reader(named)
        self._model = (model,)  # a tuple hides it: it has its own state_dict
        self.optimizer = optimizer
        self.previous: PreviousParameters | None = None
        if any(term.tracker.needs_previous for term in named.values()):
            self.previous = PreviousParameters(model, optimizer, offload=offload)
        steppers = optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
        hook = lambda *_: self.close()  # noqa: E731
        self._handles = [unwrap(each).register_step_post_hook(hook) for each in steppers]
        for each in steppers:
            if isinstance(unwrap(each), ProximalPoint):
                unwrap(each).model = model  # type: ignore[attr-defined]
        self._process_group = process_group

    @property
    def term(self) -> Any:
        """The only term."""
        if set(self.terms) != {ONLY}:
            raise ValueError(f"This objective has the terms {', '.join(self.terms)}; use `terms`.")
        return self.terms[ONLY]

    def forward(
        self,
        inner: Inner,
        index: Index = None,
        *,
        counts: Index = None,
        gradient: Inner | None = None,
        gradient_index: Index = None,
        past: Any = None,
    ) -> Tensor:
        """The loss of one batch.

        Args:
            inner: runs the model; see the class for what it returns.
            index: block of each entry; repeated ids are samples of one block. None means that the
                entries are all n blocks in order. A dict by term with several terms.
            counts: samples behind each entry, when entries are means of unequal size.
            gradient: a second function for an independent batch of the same blocks: it carries
                the gradient (and g0) while `inner` gives the values (Alg. 2, line 5).
            gradient_index: its index, when that differs.
            past: what `inner` returns at w_{t-1}, when it was evaluated already; `inner` is then
                not called there.
        """
        where = self._reader.layouts(index, counts)
        before: dict[str, Parsed] = {}
        corrects = self._corrects
        if corrects:
            assert self.previous is not None
            past = self.previous.evaluate(inner) if past is None else past
            before = self._reader.values(split(past)[1])
        if gradient is None:
            loss, values = split(inner())
            fresh, carriers, carrier_where = self._reader.values(values), None, where
        else:
            with torch.no_grad():
                fresh = self._reader.values(split(inner())[1])
            loss, values = split(gradient())
            carriers = self._reader.values(values)
            if set(carriers) != set(fresh):
                raise ValueError(
                    "`Compositional(gradient=...)` must return the same terms as `inner`, "
                    f"{', '.join(fresh)}, but returned: {', '.join(carriers)}."
                )
            same = gradient_index is None
            carrier_where = where if same else self._reader.layouts(gradient_index, None)
        group = find_group(self._process_group)
        loss = None if loss is None else global_mean(loss, group)
        jobs = {
            name: self._job(
                name,
                entry,
                before.get(name),
                entry if carriers is None else carriers[name],
                where[name],
                carrier_where[name],
            )
            for name, entry in fresh.items()
        }
        if group is not None:
            jobs = self._with_other_ranks(jobs, group, corrects, carriers is not None)
        elif len(jobs) > 1:
            refuse([n for n, job in jobs.items() if is_bad(self._terms[n].tracker, job)])
        parts = {}
        for name, job in jobs.items():
            term = self._terms[name]
            parts[name] = term.loss(term.tracker.update(**job, group=group))
        if loss is None and not parts:
            raise ValueError("`Compositional(inner)` returned neither a loss nor any inner value.")
        return self._combined(loss, parts)

    def _combined(self, loss: Tensor | None, parts: dict[str, Tensor]) -> Tensor:
        """The loss to differentiate, from g0 and the terms; methods that switch override it."""
        return functools.reduce(torch.add, [*([] if loss is None else [loss]), *parts.values()])

    def close(self) -> None:
        """End the tracking step; a hook calls it after each optimizer step."""
        for term in self._terms.values():
            term.close()

    def detach_hooks(self) -> None:
        """Stop listening to the optimizer, so that another objective can take over."""
        for handle in self._handles:
            handle.remove()
        if self.previous is not None:
            self.previous.detach_hooks()

    def value(self) -> Tensor:
        """The coupled part of the objective itself, at the tracked u: no smoothing, no g0."""
        return torch.stack([term.value() for term in self.terms.values()]).sum()

    def warm_up(self, batches: Iterable[tuple[Inner, Index]]) -> None:
        """Start every tracker from a pass over the data (Alg. 1, lines 2-3).

        Args:
            batches: pairs of a function and an index, as for a call. The values of each block are
                averaged over all of them. Without a warm-up, a block starts at its first visit.
        """
        for name, batch in self._pooled(batches).items():
            self._terms[name].tracker.set_values(batch.index, batch.mean(batch.fresh))

    def _pooled(self, batches: Iterable[tuple[Inner, Index]]) -> dict[str, Batch]:
        """The values of each term over many batches, and over ranks; no gradient, no update."""
        pooled: dict[str, Batch] = {}
        for inner, index in batches:
            where = self._reader.layouts(index, None)
            with torch.no_grad():
                fresh = self._reader.values(split(inner())[1])
            for name, entry in fresh.items():
                tracker = self._terms[name].tracker
                batch = tracker.pool(entry.value, self._reader.layout(name, entry, where[name]))
                pooled[name] = pooled[name].merge(batch) if name in pooled else batch
        group = find_group(self._process_group)
        if group is None:
            return pooled
        for name, term in self._terms.items():
            batch = pooled.get(name)  # once, at the end: ranks may have batches of unequal number
            if batch is None:
                job = empty_job(term.tracker, False, False)
                batch = term.tracker.pool(job["fresh"], job["where"])
            pooled[name] = over_ranks(batch, group)
        return pooled

    @property
    def _corrects(self) -> bool:
        """Whether this call needs the values at w_{t-1}."""
        ready = self.previous is not None and self.previous.ready
        return ready and self.training and torch.is_grad_enabled()

    def _job(
        self,
        name: str,
        entry: Parsed,
        past: Parsed | None,
        carrier: Parsed,
        where: Layout | None,
        carrier_where: Layout | None,
    ) -> dict[str, Any]:
        """What one term's tracker is asked to do."""
        own_carrier = carrier is not entry or entry.surrogate is not None
        independent = carrier is not entry
        return {
            "fresh": entry.value,
            "where": self._reader.layout(name, entry, where),
            "previous": None if past is None else past.value,
            "carrier": carrier.carrier if own_carrier else None,
            "carrier_where": self._reader.layout(name, carrier, carrier_where)
            if independent
            else None,
        }

    def _with_other_ranks(
        self, jobs: dict[str, dict[str, Any]], group: Group, corrects: bool, independent: bool
    ) -> dict[str, dict[str, Any]]:
        """The jobs in an order that all ranks share, since each is a call to all of them.

        A term that only other ranks hold gets a job without entries, and a bad value on one rank
        is refused by all, before the first of several terms is written. A single term without
        names needs none of this: it is on every rank, and the tracker looks at the pooled values.
        """
        only = next(iter(self._terms.values())) if len(self._terms) == 1 else None
        if (
            only is not None
            and only.names is None
            and not any(j["carrier"] is not None for j in jobs.values())
        ):
            return jobs
        trackers = {name: term.tracker for name, term in self._terms.items()}
        return on_all_ranks(trackers, jobs, group, corrects, independent)
