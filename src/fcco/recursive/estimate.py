"""A running estimate z of the gradient, by parameter, that takes the place of `.grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..previous import PerParameter
from ..proximal_point import ProximalPoint
from ..visit import any_sharded

__all__ = ["GradientEstimate", "carrying", "require_steppable"]


class GradientEstimate(PerParameter):
    """The z of a recursion z <- (1 - beta) z + d, whose increment d comes as `.grad`.

    A parameter starts at z = d when it gets its first gradient; one that is frozen starts anew.
    z is as wide as the gradient but not below float32.
    """

    def trainable(self) -> list[Tensor]:
        """The parameters that may get a gradient."""
        return [p for p in self._parameters_in_order() if p.requires_grad]

    def __contains__(self, parameter: Tensor) -> bool:
        self._adopt_loaded()
        return parameter in self._saved

    def __len__(self) -> int:
        return len(self._saved if self._loaded is None else self._loaded)

    def clear(self) -> None:
        """Forget z: the next one is the next gradient."""
        self._saved.clear()
        self._loaded = None

    @torch.no_grad()
    def advance(self, optimizer: torch.optim.Optimizer, beta: float, normalized: bool) -> None:
        """Take d from `.grad` and put z, or z / |z|, there, for the parameters of an optimizer."""
        self._adopt_loaded()
        old, grads = [], []
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if not parameter.requires_grad:
                self._saved.pop(parameter, None)
                continue
            z = self._saved.get(parameter)
            if parameter.grad is None:
                if z is None:
                    continue
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            grad = parameter.grad
            if z is None:
                kind = torch.promote_types(grad.dtype, torch.float32)
                z = torch.zeros_like(grad, dtype=kind)
            self._saved[parameter] = z = z.to(grad.device)
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
    if any_sharded(
        p for each in optimizers for group in each.param_groups for p in group["params"]
    ):
        raise TypeError(
            "`RecursiveGradient` cannot take gradients at w_{t-1} of a sharded model (FSDP2), "
            "whose backward pass reduces them into `.grad`; use DDP."
        )
    if normalized and len(optimizers) > 1:
        raise ValueError("`RecursiveGradient(normalized=True)` needs a single optimizer.")
    for each in optimizers:
        owners = [getattr(h, "__self__", None) for h in each._optimizer_step_pre_hooks.values()]
        if any(isinstance(getattr(o, "estimate", None), GradientEstimate) for o in owners):
            raise ValueError(
                "`RecursiveGradient`: the optimizer belongs to another one, and z would enter z. "
                "Put all terms into one objective, or call `detach_hooks()` of the other."
            )
