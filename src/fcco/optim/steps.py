"""The paper's updates, and which iterate to return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _checks
from .._state import pack, unpack
from ..previous import after_closure, parameters_at, parameters_of, unwrap


def momentum_type(
    params: Iterable[Tensor], lr: float, beta: float = 0.1, **options: Any
) -> torch.optim.SGD:
    r"""The paper's momentum update as a torch optimizer (Alg. 1, lines 10-11).

    .. math:: v_{t+1} = (1-\beta) v_t + \beta G_t, \qquad w_{t+1} = w_t - \eta v_{t+1}

    This is SGD with `momentum = dampening = 1 - beta`, of which `options` are further options.
    """
    _checks.in_interval("momentum_type", "beta", beta, 0.0, 1.0, open_low=True)
    # The first buffer of torch's SGD is v = G_0, without dampening, which the paper leaves open.
    return torch.optim.SGD(params, lr=lr, momentum=1 - beta, dampening=1 - beta, **options)


def adam_type(
    params: Iterable[Tensor], lr: float, beta: float = 0.1, beta2: float = 0.001, **options: Any
) -> torch.optim.AdamW:
    r"""The paper's Adam-type update as a torch optimizer.

    .. math::
        s_{t+1} = (1-\beta')s_t + \beta' G_t\circ G_t, \qquad
        w_{t+1} = w_t - \eta\,\hat v_{t+1}/(\sqrt{\hat s_{t+1}} + \epsilon)

    with bias corrections: AdamW with `betas = (1-beta, 1-beta2)`, and no weight decay unless given.
    """
    _checks.in_interval("adam_type", "beta", beta, 0.0, 1.0, open_low=True)
    _checks.in_interval("adam_type", "beta2", beta2, 0.0, 1.0, open_low=True)
    options.setdefault("weight_decay", 0.0)
    return torch.optim.AdamW(params, lr=lr, betas=(1 - beta, 1 - beta2), **options)


class OutputIterate(nn.Module):
    r"""Keep the output of a method while it runs, without knowing its length.

    `"random"` holds w_tau with tau uniform on {0, ..., T-1} after any number T of steps, the
    output rule of the paper's theorems (reservoir sampling: iterate t replaces the kept one with
    the probability of its weight among those so far). `"average"` holds the mean of w_0, ...,
    w_{T-1}, in float32 at least. `with output.applied():` puts it into the model for a while.

    Args:
        optimizer: the optimizer whose iterates are meant; for ALEXR2 the outer one.
        seed: of its own random stream; the global one is not touched.
        weight: the weight of the current parameters, asked just before each step; 0 leaves them
            out.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: Literal["random", "average"] = "random",
        seed: int = 0,
        weight: Callable[[], float] | None = None,
    ) -> None:
        super().__init__()
        _checks.one_of("OutputIterate", "rule", rule, ("random", "average"))
        self.rule, self.count = rule, 0
        self.weight, self._total = weight, 0.0
        self._optimizer = unwrap(optimizer)
        self._generator = torch.Generator().manual_seed(seed)
        self._kept: list[Tensor] = []
        self._attach()

    def _attach(self) -> None:
        # Before the step the parameters are w_t, and t counts from 0.
        self._handle = self._optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return after_closure(args, kwargs, self.update)  # which may decide the weight

    @torch.no_grad()
    def update(self) -> None:
        """Take note of the current parameters; a hook calls it before each step."""
        weight = 1.0 if self.weight is None else float(self.weight())
        _checks.finite("OutputIterate", "weight", weight, 0.0)
        self.count += 1
        if weight == 0:
            return
        first = self._total == 0
        self._total += weight
        parameters = parameters_of(self._optimizer)
        for parameter in parameters[len(self._kept) :]:  # all at first, later a new group
            # Steps of 1/t would vanish in an average kept in bfloat16.
            average = torch.promote_types(parameter.dtype, torch.float32)
            dtype = parameter.dtype if self.rule == "random" else average
            self._kept.append(parameter.detach().to(dtype, copy=True))
        if first:
            return
        if self.rule == "average":
            for kept, parameter in zip(self._kept, parameters, strict=True):
                kept.lerp_(parameter.detach().to(kept.dtype), weight / self._total)
        elif torch.rand((), generator=self._generator).item() * self._total < weight:
            for kept, parameter in zip(self._kept, parameters, strict=True):
                kept.copy_(parameter)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the kept iterate into the model for a while (evaluation, saving)."""
        if not self._kept:
            raise RuntimeError("`OutputIterate.applied` needs a step of a weight above 0.")
        with parameters_at(dict(zip(parameters_of(self._optimizer), self._kept, strict=False))):
            yield

    def get_extra_state(self) -> Tensor:
        state = {"count": self.count, "total": self._total, "kept": self._kept}
        return pack({**state, "generator": self._generator.get_state()})

    def set_extra_state(self, state: Any) -> None:
        state = unpack(state)
        like, kept = parameters_of(self._optimizer), state["kept"]
        shapes = [tuple(k.shape) for k in kept]
        if shapes and shapes != [tuple(p.shape) for p in like[: len(shapes)]]:
            raise ValueError("`OutputIterate.load_state_dict`: it belongs to another model.")
        self.count, self._total = state["count"], state["total"]
        self._kept = [k.to(p.device).clone() for k, p in zip(kept, like, strict=False)]
        self._generator.set_state(state["generator"].cpu())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._attach()  # a copy made by pickle or deepcopy, to the copy of the optimizer
