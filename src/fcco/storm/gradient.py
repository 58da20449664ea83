r"""Recursive gradients (STORM) for any objective whose estimator reads tracked values.

z_t adds the change of G between w_{t-1} and w_t on the same samples, so that the noise of z does
not grow with the number of steps.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import _checks
from ..inputs import Index
from ..objective import Compositional, Function
from ..optim import ProximalPoint
from ..previous import ParameterTensors, PreviousParameters, after_closure, parameters_of
from ..previous.swap import any_sharded
from ..terms import TermNumbers
from ..tracker import Blocks, Tracked, log_track, track
from ..tracker.blocks import per_row
from ..tracker.update import overlay
from .snapshot import Snapshot, shifted

__all__ = ["GradientEstimate", "RecursiveGradient", "carrying"]

_TAKEN: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers whose gradient is replaced by that of a `RecursiveGradient`; two would mix."""


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
        >>> from fcco.storm import RecursiveGradient
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
        optimizers = self.estimate.optimizers
        require_steppable(optimizers, normalized)
        self.anchor: Snapshot | None = None
        if snapshot_every is not None:
            _checks.integer("RecursiveGradient", "snapshot_every", snapshot_every, 1)
            self.anchor = Snapshot(objective, optimizers, snapshot_every)
        past = objective.previous
        if past is None:
            self.own_previous = past = PreviousParameters(objective.model, optimizers)
        self._past = (past,)
        self._written: dict[str, _Written] = {}
        self._numbers: dict[str, TermNumbers] = {}  # smoothing and weight of the last step
        self._waiting: set[int] = set()  # optimizers whose step is to come
        # Before the copy of w_t is taken, so that a step which is refused changes nothing.
        past.detach_hooks()
        self._handles = [each.register_step_pre_hook(self._before_step) for each in optimizers]
        past.attach_hooks()
        _TAKEN.update(optimizers)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "objective":
                raise
            return getattr(self.objective, name)

    def forward(self, function: Function, index: Index = None, *, counts: Index = None) -> Tensor:
        """The loss of one batch, as the objective gives it; see `Compositional`.

        Args:
            function: runs the model.
            index: block of each entry.
            counts: samples behind each entry.
        """
        objective = self.objective
        if not (objective.training and torch.is_grad_enabled()):
            return objective(function, index, counts=counts)
        self._check_call()
        blocks = objective.blocks(index, counts)
        if self.anchor is not None:
            self.anchor.check_blocks(blocks)
        parameters, estimate = self.estimate.trainable(), self.estimate
        carried: dict[Tensor, Tensor] = {}
        call, shifts = function, None
        if self.anchor is not None:
            missing, shifts = self.anchor.evaluate(function, blocks, parameters)
            for parameter, part in missing.items():
                carried[parameter] = part * (self.beta if parameter in estimate else 1)
            call = lambda: shifted(function(), shifts)  # noqa: E731
        past, known = None, [p for p in parameters if p in estimate]
        if known and self.beta < 1:
            there, past = self._past[0].gradient(lambda: self._at_previous(function, blocks), known)
            past = past if shifts is None else shifted(past, shifts)
            for parameter, part in zip(known, there, strict=True):
                if part is not None:
                    part = part * (self.beta - 1)
                    carried[parameter] = carried[parameter] + part if parameter in carried else part
        loss = objective(call, index, counts=counts, past=past)
        self._waiting = {id(each) for each in estimate.optimizers}
        return carrying(loss, carried)

    def snapshot(self, batches: Iterable[tuple[Function, Index]]) -> None:
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
        for optimizer in self.estimate.optimizers:
            _TAKEN.discard(optimizer)
        self._past[0].detach_hooks()
        self.objective.detach_hooks()

    def _check_call(self) -> None:
        """Refuse a call before it changes anything."""
        if 0 < len(self._waiting) < len(self.estimate.optimizers):
            raise RuntimeError(
                "`RecursiveGradient` needs every optimizer to step after each gradient: one did "
                "and another did not, so that z would no longer follow the path."
            )
        if self.snapshot_due:
            raise RuntimeError(
                "`RecursiveGradient(snapshot_every=...)`: a snapshot is due; call "
                "`snapshot(batches)` whenever `snapshot_due` is true."
            )

    def _at_previous(
        self, function: Function, blocks: dict[str, Blocks | None]
    ) -> tuple[Tensor, Any]:
        """To be called at w_{t-1}: the loss of G(w_{t-1}, u_{t-2}), and the function's result."""
        result = function()
        return self.objective.replay(result, blocks, self._read, self._numbers), result

    def _read(self, name: str, tracked: Tracked) -> Tensor:
        """The u that G(w_{t-1}) reads."""
        tracker = self.objective.terms[name].tracker
        value, seen = tracker.values_before_step(tracked.index)
        if tracker.read == "old" and name in self._written:
            index, before = (part.to(value.device) for part in self._written[name])
            value = overlay(value, tracked.index, index, before)
        if seen is None:
            return value
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
                if len(self._waiting) == len(self.estimate.optimizers):
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
        self._written, self._numbers = {}, {}
        for name, term in self.objective.terms.items():
            self._numbers[name] = term.numbers()
            step = term.tracker.open_step
            if step is not None:
                self._written[name] = _Written(step.batch.index, step.before)
        if self.anchor is not None and self.anchor.age is not None:
            self.anchor.age += 1

    def get_extra_state(self) -> dict[str, Any]:
        """What the last step read, for `state_dict()`; z has its own entry."""
        written = {name: [part.clone() for part in each] for name, each in self._written.items()}
        return {"written": written, "numbers": {k: tuple(v) for k, v in self._numbers.items()}}

    def set_extra_state(self, state: Any) -> None:
        """Restore it; an open step is forgotten."""
        self._written = {name: _Written(*parts) for name, parts in state["written"].items()}
        self._numbers = {name: TermNumbers(*parts) for name, parts in state["numbers"].items()}
        self._waiting = set()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "`RecursiveGradient` cannot be copied or pickled: the order of its hooks on the "
            "optimizer belongs to this object. Use `state_dict()`."
        )


class GradientEstimate(ParameterTensors):
    """The z of a recursion z <- (1 - beta) z + d, whose increment d comes as `.grad`.

    A parameter starts at z = d when it gets its first gradient; one that is frozen starts anew.
    z is as wide as the gradient but not below float32.
    """

    def trainable(self) -> list[Tensor]:
        """The parameters that may get a gradient."""
        return [p for p in self.parameters_in_order if p.requires_grad]

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self.tensors

    def __len__(self) -> int:
        return len(self._saved if self._loaded is None else self._loaded)

    def clear(self) -> None:
        """Forget z: the next one is the next gradient."""
        self.replace({})

    @torch.no_grad()
    def advance(self, optimizer: torch.optim.Optimizer, beta: float, normalized: bool) -> None:
        """Take d from `.grad` and put z, or z / |z|, there, for the parameters of an optimizer."""
        estimates, old, grads = self.tensors, [], []
        for parameter in parameters_of(optimizer):
            if not parameter.requires_grad:
                estimates.pop(parameter, None)
                continue
            z = estimates.get(parameter)
            if parameter.grad is None:
                if z is None:
                    continue
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            grad = parameter.grad
            if z is None:
                kind = torch.promote_types(grad.dtype, torch.float32)
                z = torch.zeros_like(grad, dtype=kind)
            estimates[parameter] = z = z.to(grad.device)
            old.append(z)
            grads.append(grad)
        if not old:
            return
        torch._foreach_mul_(old, 1 - beta)
        torch._foreach_add_(old, grads)
        new = old
        if normalized:
            norms = [norm.to(old[0].device) for norm in torch._foreach_norm(old)]
            length = torch.linalg.vector_norm(torch.stack(norms))
            length = length.clamp(min=torch.finfo(length.dtype).tiny)
            new = [z / length.to(z.device) for z in old]
        torch._foreach_copy_(grads, new)


def carrying(loss: Tensor, gradients: dict[Tensor, Tensor]) -> Tensor:
    """A scalar that gives parameters a constant gradient besides its own, scaled alike.

    Example:
        >>> import torch
        >>> w = torch.tensor([3.0], requires_grad=True)
        >>> (2 * carrying(w.square().sum(), {w: torch.tensor([-1.0])})).backward()
        >>> w.grad
        tensor([10.])
    """
    if not gradients:
        return loss
    return _Carrying.apply(loss, list(gradients.values()), *gradients)  # type: ignore[return-value]


class _Carrying(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = [g.to(p.dtype) for g, p in zip(gradients, parameters, strict=True)]
        return loss.view_as(loss)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        (slope,) = slopes
        return slope, None, *(gradient * slope.to(gradient) for gradient in ctx.gradients)


def require_steppable(optimizers: tuple[torch.optim.Optimizer, ...], normalized: bool) -> None:
    """Refuse optimizers to which a running estimate means nothing."""
    if any(isinstance(each, ProximalPoint) for each in optimizers):
        raise ValueError(
            "`RecursiveGradient` cannot step a ProximalPoint: its problem changes from round to "
            "round, and the recursion would mix their gradients."
        )
    if any_sharded(p for each in optimizers for p in parameters_of(each)):
        raise TypeError(
            "`RecursiveGradient` cannot take gradients at w_{t-1} of a sharded model (FSDP2), "
            "whose backward pass reduces them into `.grad`; use DDP."
        )
    if normalized and len(optimizers) > 1:
        raise ValueError("`RecursiveGradient(normalized=True)` needs a single optimizer.")
    if any(each in _TAKEN for each in optimizers):
        raise ValueError(
            "`RecursiveGradient`: the optimizer belongs to another one, and z would enter z. "
            "Put all terms into one objective, or call `detach_hooks()` of the other."
        )


def require_plain(objective: Compositional) -> None:
    """Refuse an objective whose gradient is more than G(w, u)."""
    for name, term in objective.terms.items():
        if not term.replayable or term.tracker.rule not in (track, log_track):
            raise TypeError(
                "`RecursiveGradient` needs terms that depend on w and the tracked values alone "
                f"(CoupledTerm), but `{name}` is a {type(term).__name__} with state or an update "
                "of its own. For CVaR make the threshold s a parameter of your model: return "
                "`(s, losses - s)` and take the outer function CVaRHinge."
            )
        if term.tracker.on_nonfinite == "skip":
            raise ValueError(
                "`RecursiveGradient` needs on_nonfinite='raise' or 'deferred': an entry skipped at "
                "one of two points would leave gradients of different samples."
            )
