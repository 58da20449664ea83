r"""The tracking update as pure functions: no state, no branches on data.

Every tracker of the library is one formula,

.. math::
    u_i^+ = (1-\gamma)\,u_i + \gamma\, g_i(w_t) + \gamma'\,\bigl(g_i(w_t) - g_i(w_{t-1})\bigr),

with :math:`\gamma' = 0` (moving average, SOX), MSVR's :math:`\gamma'` (SONX, SONEX) or
:math:`\theta\gamma` (ALEXR). They run under `torch.func.vmap` and `fullgraph=True`; the checks of
their input live in `fcco.tracker.tracker`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "Rule",
    "correction_weight",
    "forgetting_log_track",
    "log_track",
    "overlay",
    "theory_correction",
    "track",
    "value_of",
]

Number = float | Tensor
Rule = Callable[
    [Tensor, Tensor | None, Tensor, Tensor | None, Number, Number], tuple[Tensor, Tensor]
]


def track(
    old: Tensor,
    seen: Tensor | None,
    fresh: Tensor,
    previous: Tensor | None,
    gamma: Number,
    correction: Number,
) -> tuple[Tensor, Tensor]:
    r"""One tracking update of the sampled blocks (Alg. 1, line 7).

    A block visited for the first time starts at its fresh value, without correction.

    Args:
        old: u_i, shape (B, d1).
        seen: whether block i has a value yet, boolean, shape (B, 1); None when all have.
        fresh: g_i(w_t; B_i).
        previous: g_i(w_{t-1}; B_i), the same samples; None leaves the correction out.
        gamma: weight of the fresh value.
        correction: gamma', weight of the difference.

    Returns:
        The value before the update (`fresh` on a first visit) and the value after it.

    Example:
        >>> import torch
        >>> u, g = torch.tensor([[1.0], [0.0]]), torch.tensor([[2.0], [5.0]])
        >>> track(u, torch.tensor([[True], [False]]), g, g - 1.0, gamma=0.5, correction=0.1)
        (tensor([[1.],
                [5.]]), tensor([[1.6000],
                [5.0000]]))
    """
    before = old if seen is None else torch.where(seen, old, fresh)
    # lerp is exact at both ends: gamma = 1, also when |before| >> |fresh|, and a first visit.
    after = torch.lerp(before, fresh, gamma.to(fresh) if isinstance(gamma, Tensor) else gamma)
    if previous is not None:
        moved = fresh - previous if seen is None else (fresh - previous) * seen
        if isinstance(correction, Tensor):
            after = after + correction * moved
        else:
            after = torch.add(after, moved, alpha=correction)
    return before, after


def log_track(
    old: Tensor,
    seen: Tensor | None,
    fresh: Tensor,
    previous: Tensor | None,
    gamma: Number,
    correction: Number,
) -> tuple[Tensor, Tensor]:
    r"""The same update for u = exp(nu), on nu = log u, without overflow.

    .. math::
        \nu^+ = \log\bigl((1-\gamma)e^{\nu} + \gamma e^{\ell} + \gamma'(e^{\ell} - e^{\ell'})\bigr)

    where ell and ell' are the logarithms of the fresh and previous value. A correction can make
    the sum negative; it is floored at one thousandth of the uncorrected average.
    """
    before = old if seen is None else torch.where(seen, old, fresh)
    average = torch.logaddexp(before + _log(1 - gamma), fresh + _log(gamma))
    after = average
    if previous is not None:
        largest = torch.maximum(average, fresh)
        # Where the previous value is larger by e^50, the sum is negative in any case.
        gone = torch.exp((previous - largest).clamp(max=50))
        difference = torch.exp(fresh - largest) - gone
        total = torch.exp(average - largest) + correction * difference
        after = torch.maximum(largest + total.clamp(min=0).log(), average + math.log(1e-3))
    return before, after if seen is None else torch.where(seen, after, fresh)


def forgetting_log_track(
    old: Tensor,
    seen: Tensor | None,
    fresh: Tensor,
    previous: Tensor | None,
    gamma: Number,
    correction: Number,
) -> tuple[Tensor, Tensor]:
    """`log_track` that recovers from outliers: u is at most e^20 times the fresh value.

    A u above that comes from a batch of outliers. Its slope is 0 to the last digit, and would be
    for many visits, since its logarithm falls by no more than -log(1 - gamma) at each.
    """
    return log_track(torch.minimum(old, fresh + 20), seen, fresh, previous, gamma, correction)


def _log(weight: Number) -> Number:
    if isinstance(weight, Tensor):
        return weight.log()
    return math.log(weight) if weight > 0 else -math.inf


def value_of(value: Tensor, gradient_of: Tensor) -> Tensor:
    """A tensor with the value of one and the gradient of the other.

    `outer(value_of(u, gradient_of=g))` then differentiates to grad f(u) * grad g, the paper's
    estimator. The difference below is exactly zero, so the value is u to the last bit (adding
    `(u - g).detach()` to g instead would lose u when |g| is much larger than |u|).

    Example:
        >>> import torch
        >>> g = torch.tensor(1e8, requires_grad=True)
        >>> u = value_of(torch.tensor(0.001), gradient_of=g)
        >>> u.square().backward()
        >>> u.item() == torch.tensor(0.001).item(), g.grad
        (True, tensor(0.0020))
    """
    return value + (gradient_of - gradient_of.detach())


def theory_correction(gamma: Number, num_inner: int, blocks: int | Tensor) -> Number:
    r"""MSVR's correction weight, gamma' = (n - B1) / (B1 (1 - gamma)) + (1 - gamma).

    Above 1 as soon as fewer than half of the blocks are sampled; see docs/recipes/how-to-choose.md
    before using it on a deep network.

    Example:
        >>> round(theory_correction(0.1, num_inner=30, blocks=8), 2)
        3.96
    """
    if not isinstance(blocks, Tensor) and blocks in (0, num_inner):
        # Nothing to correct; or every block is seen, and gamma = 1 is allowed.
        return 1 - gamma if blocks else 0.0
    return (num_inner - blocks) / (blocks * (1 - gamma)) + (1 - gamma)


def correction_weight(
    correction: Number | str, gamma: Number, num_inner: int, blocks: int | Tensor
) -> Number:
    """The number gamma' of a step that samples `blocks` blocks.

    Args:
        correction: gamma' itself, `"theory"` (MSVR) or `"auto"`: (1 - gamma) B1 / n.
        gamma: weight of the fresh value.
        num_inner: n.
        blocks: B1.

    Example:
        >>> correction_weight("auto", 0.1, num_inner=30, blocks=10)
        0.3
    """
    if not isinstance(correction, str):
        return correction
    if correction == "theory":
        return theory_correction(gamma, num_inner, blocks)
    return (1 - gamma) * blocks / num_inner


def overlay(rows: Tensor, index: Tensor, others: Tensor, values: Tensor) -> Tensor:
    """The rows of `index`, replaced by those of `values` for blocks that `others` holds too.

    Both lists of blocks are increasing.

    Example:
        >>> import torch
        >>> rows, index = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 4, 7])
        >>> overlay(rows, index, torch.tensor([4, 5]), torch.tensor([9.0, 8.0]))
        tensor([1., 9., 3.])
    """
    if len(others) == 0:
        return rows
    position = torch.searchsorted(others, index).clamp(max=len(others) - 1)
    found = others[position] == index
    found = found if rows.dim() == 1 else found.unsqueeze(1)
    return torch.where(found, values[position], rows)
