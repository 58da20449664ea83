r"""Recursive gradients (STORM) for any objective whose estimator reads tracked values.

z_t follows the gradient along the path: what G was at the last point, on the same samples, is taken
off, and what it is now is added, so that the noise of z does not grow with the path.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import _checks
from ..objective import Compositional, Inner
from ..previous import PreviousParameters, after_closure
from ..reading import Index
from ..tracker import Tracked
from ..tracker.blocks import per_row
from .elsewhere import (
    Where,
    loss_reading,
    overlaid,
    require_plain,
    shifted,
    smoothings,
    standing,
)
from .estimate import GradientEstimate, carrying, require_steppable
from .snapshot import Snapshot

__all__ = ["RecursiveGradient"]


class _Written(NamedTuple):
    """The blocks that the last step wrote, and the u that it read there."""

    index: Tensor  # type: ignore[assignment]
    value: Tensor


class RecursiveGradient(nn.Module):
    r"""STORM around an objective: call it instead, step your optimizer as before.

    .. math::
        z_t = (1-\beta)\,z_{t-1} + G(w_t, u_{t-1}) - (1-\beta)\,G(w_{t-1}, u_{t-2}), \qquad z_0=G_0

    where both G are of the same blocks and samples, with the same dropout masks, and g0 is part of
    both. A hook puts z_t into `.grad` before each step of the optimizer, so w_{t+1} = w_t - eta z_t
    is plain SGD; its own momentum, or Adam, would come on top. With a tracker that reads the new u,
    the indices of u are t and t-1.

    With `snapshot_every`, inner functions are finite sums, a full pass is made now and then at
    w_tau (`snapshot`, `snapshot_due`), and (MSVR v3)

    .. math::
        \hat g_i &= g_i(w_t;\mathcal B) - g_i(w_\tau;\mathcal B) + g_i(w_\tau)
            \quad\text{is tracked in place of } g_i(w_t;\mathcal B) \\
        z_t &= (1-\beta)\,z_{t-1} + \beta\,h_t
            + (1-\beta)\bigl(G(w_t, u_{t-1}) - G(w_{t-1}, u_{t-2})\bigr), \qquad z_0 = h_0 \\
        h_t &= \bar h + G(w_t, u_{t-1}) - G(w_\tau, u_{\tau-1}), \qquad
            \bar h = \nabla g_0(w_\tau)
            + \frac1n\sum_i\nabla g_i(w_\tau)\,\nabla f_i(u_{i,\tau-1}).

    Each call evaluates the function at w_{t-1} with gradient, and the tracker's correction uses the
    same values: one forward and one backward pass more than the objective without correction (two
    with a snapshot). z, w_{t-1} and G(w_{t-1}) take the memory of the parameters three times. A
    block that is visited for the first time at step t uses g_i(w_{t-1}; B) in place of u_{i,t-2}.
    A parameter starts at z = G when it gets its first gradient.

    Everything else (`term`, `optimizer`, `value()`, `warm_up()`, ...) is the objective's.

    * The difference of the two G is what `backward()` leaves in `.grad`, so gradient accumulation,
      a GradScaler (also when it skips a step) and DDP see one gradient as usual. To limit the norm
      of z use `normalized`, not `clip_grad_norm_`, which would see the difference.
    * With float16 the gradient at w_{t-1} is not scaled by a GradScaler; prefer bfloat16.
    * Every step of the optimizer must follow a call; put a second loss into g0.

    Args:
        objective: a `Compositional` of `CoupledTerm`s, such as `fcco.sonex` returns.
        beta: weight of the new gradient; 1 keeps no memory, 0 never forgets (SPIDER, with
            `restart()` now and then). May be changed between steps.
        snapshot_every: number of steps after which a new snapshot is due.
        normalized: give the optimizer z / |z|, so that lr is the length of the step.

    Example:
        >>> import torch, fcco
        >>> from fcco.recursive import RecursiveGradient
        >>> _ = torch.manual_seed(0)
        >>> c, model = torch.tensor([1.0, -2.0]), torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        >>> objective = fcco.sonex(model, optimizer, fcco.Absolute(), 2, smoothing=0.1)
        >>> storm = RecursiveGradient(objective, beta=0.1)
        >>> for _ in range(500):
        ...     noise = 0.1 * torch.randn(2)
        ...     loss = storm(lambda: model.weight.view(2) - c + noise)
        ...     loss.backward(); optimizer.step(); optimizer.zero_grad()
        >>> bool((model.weight.view(2) - c).abs().max() < 0.1)
        True

    References:
        A. Cutkosky and F. Orabona, Momentum-based variance reduction in non-convex SGD, 2019
        (STORM). W. Jiang, G. Li, Y. Wang, L. Zhang and T. Yang, Multi-block-single-probe variance
        reduced estimator for coupled compositional optimization, 2022 (MSVR v2 and v3).
    """

    def __init__(
        self,
        objective: Compositional,
        beta: float,
        *,
        snapshot_every: int | None = None,
        normalized: bool = False,
    ) -> None:
        super().__init__()
        _checks.in_interval("RecursiveGradient", "beta", beta, 0.0, 1.0)
        require_plain(objective)
        self.objective, self.beta, self.normalized = objective, beta, normalized
        self.estimate = GradientEstimate(objective.optimizer)
        optimizers = self.estimate._optimizers
        require_steppable(optimizers, normalized)
        self.anchor: Snapshot | None = None
        if snapshot_every is not None:
            _checks.integer("RecursiveGradient", "snapshot_every", snapshot_every, 1)
            self.anchor = Snapshot(objective, optimizers, snapshot_every)
        past = objective.previous
        if past is None:
            self.own_previous = past = PreviousParameters(*objective._model, optimizers)
        self._past = (past,)
        self._written: dict[str, _Written] = {}
        self._smoothing: dict[str, float] = {}
        self._waiting: set[int] = set()  # optimizers whose step is to come
        # Before the copy of w_t is taken, so that a step which is refused changes nothing.
        past.detach_hooks()
        self._handles = [each.register_step_pre_hook(self._before_step) for each in optimizers]
        past.attach_hooks()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "objective":
                raise
            return getattr(self.objective, name)

    def forward(self, inner: Inner, index: Index = None, *, counts: Index = None) -> Tensor:
        """The loss of one batch, as the objective gives it; see `Compositional`.

        Args:
            inner: runs the model.
            index: block of each entry.
            counts: samples behind each entry.
        """
        objective = self.objective
        if not (objective.training and torch.is_grad_enabled()):
            return objective(inner, index, counts=counts)
        self._check_call()
        where = objective._reader.layouts(index, counts)
        parameters, estimate = self.estimate.trainable(), self.estimate
        carried: dict[Tensor, Tensor] = {}
        function, shifts = inner, None
        if self.anchor is not None:
            missing, shifts = self.anchor.visit(inner, where, parameters)
            for parameter, part in missing.items():
                carried[parameter] = part * (self.beta if parameter in estimate else 1)
            function = lambda: shifted(objective, inner(), shifts)  # noqa: E731
        past, known = None, [p for p in parameters if p in estimate]
        if known and self.beta < 1:
            there, past = self._past[0].gradient(lambda: self._at_previous(inner, where), known)
            past = past if shifts is None else shifted(objective, past, shifts)
            for parameter, part in zip(known, there, strict=True):
                if part is not None:
                    part = part * (self.beta - 1)
                    carried[parameter] = carried[parameter] + part if parameter in carried else part
        loss = objective(function, index, counts=counts, past=past)
        self._waiting = {id(each) for each in estimate._optimizers}
        return carrying(loss, carried)

    def snapshot(self, batches: Iterable[tuple[Inner, Index]]) -> None:
        """Make a full pass and let the current parameters be w_tau.

        The pass is exact only if the function is not random: no dropout. Random streams and
        buffers are left as they were. A block that has no value yet starts from the exact one.

        Args:
            batches: pairs of a function and an index, as for a call, which hold all samples of all
                blocks; over ranks together, with an equal number of batches on each. It is read
                twice; an iterator is kept as a list. g0 is averaged over its samples, or over the
                batches when it is a scalar.
        """
        if self.anchor is None:
            raise ValueError("`snapshot` needs `RecursiveGradient(snapshot_every=...)`.")
        self.anchor.take(batches, self.estimate.trainable())

    @property
    def snapshot_due(self) -> bool:
        """Whether the next step needs a new snapshot."""
        return self.anchor is not None and self.anchor.due

    def restart(self) -> None:
        """Forget z: the next one is the next gradient."""
        self.estimate.clear()

    def detach_hooks(self) -> None:
        """Stop listening to the optimizer."""
        for handle in self._handles:
            handle.remove()
        self._past[0].detach_hooks()
        self.objective.detach_hooks()

    def _check_call(self) -> None:
        """Refuse a call before it changes anything."""
        if 0 < len(self._waiting) < len(self.estimate._optimizers):
            raise RuntimeError(
                "`RecursiveGradient` needs every optimizer to step after each gradient: one did "
                "and another did not, so that z would no longer follow the path."
            )
        if self.snapshot_due:
            raise RuntimeError(
                "`RecursiveGradient(snapshot_every=...)`: a snapshot is due; call "
                "`snapshot(batches)` whenever `snapshot_due` is true."
            )

    def _at_previous(self, inner: Inner, where: Where) -> tuple[Tensor, Any]:
        """To be called at w_{t-1}: the loss of G(w_{t-1}, u_{t-2}), and the function's result."""
        result = inner()
        return loss_reading(self.objective, result, where, self._read, self._smoothing), result

    def _read(self, name: str, tracked: Tracked) -> Tensor:
        """The u that G(w_{t-1}) reads."""
        tracker = self.objective._terms[name].tracker
        value, seen = standing(tracker, tracked.index)
        if tracker.read == "old" and name in self._written:
            index, before = (part.to(value.device) for part in self._written[name])
            value = overlaid(value, tracked.index, index, before)
        return torch.where(per_row(seen, value), value, tracked.value)

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        gradients = itertools.count()

        def act() -> None:
            if next(gradients):
                raise RuntimeError(
                    "`RecursiveGradient` needs one gradient per step, but "
                    f"{type(optimizer).__name__} calls its closure more than once."
                )
            if self._steps(optimizer):
                if len(self._waiting) == len(self.estimate._optimizers):
                    self._remember()
                self._waiting.discard(id(optimizer))
                self.estimate.advance(optimizer, self.beta, self.normalized)

        return after_closure(args, kwargs, act)

    def _steps(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step is ours; one that must not be made is refused."""
        if id(optimizer) not in self._waiting:
            if len(self.estimate):
                raise RuntimeError(
                    "`RecursiveGradient`: the optimizer steps without a gradient from it, so that "
                    "z would no longer belong to w_{t-1}. Put a second loss into g0."
                )
            return False
        if getattr(optimizer, "found_inf", None) is not None:
            raise RuntimeError(
                "`RecursiveGradient` cannot see the gradients that a GradScaler leaves to a fused "
                "optimizer to unscale; use `fused=False`."
            )
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        if any(grad is not None and grad.is_sparse for grad in grads):
            raise TypeError("`RecursiveGradient` needs dense gradients; use `sparse=False`.")
        return True

    def _remember(self) -> None:
        """Keep what the closing step read, and will have overwritten: u_{t-2} of the next."""
        self._written, self._smoothing = {}, smoothings(self.objective)
        for name, term in self.objective._terms.items():
            batch = term.tracker._progress.batch
            if batch is not None:
                value, seen = standing(term.tracker, batch.index)
                first = term.tracker._table()[batch.index]
                before = torch.where(per_row(seen, value), value, first)
                self._written[name] = _Written(batch.index, before)
        if self.anchor is not None and self.anchor.age is not None:
            self.anchor.age += 1

    def get_extra_state(self) -> dict[str, Any]:
        """What the last step read, for `state_dict()`; z has its own entry."""
        written = {name: [part.clone() for part in each] for name, each in self._written.items()}
        return {"written": written, "smoothing": dict(self._smoothing)}

    def set_extra_state(self, state: Any) -> None:
        """Restore it; an open step is forgotten."""
        self._written = {name: _Written(*parts) for name, parts in state["written"].items()}
        self._smoothing, self._waiting = dict(state["smoothing"]), set()
