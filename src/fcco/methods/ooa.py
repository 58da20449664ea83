"""OOA: group DRO with an adversary that weighs the groups."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from .. import _checks
from ..group_dro import OnlineGroupDRO
from ..inputs import known_settings
from ..terms import GroupWeights
from ..tracker import for_model

__all__ = ["ooa"]


@known_settings("gamma", "correction", "read")
def ooa(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    num_groups: int,
    *,
    ratio: float | None = None,
    step: float = 0.01,
    geometry: Literal["kl", "euclidean"] = "kl",
    scaling: Literal["unbiased", "batch"] = "unbiased",
    process_group: Any = "auto",
    **options: Any,
) -> OnlineGroupDRO:
    r"""OOA: online group DRO, plain or with CVaR; weights by mirror ascent, then descent on w.

    .. math::
        \min_w \max_{p\in\Omega} \sum_{i=1}^n p_i L_i(w), \qquad
        \Omega = \Bigl\{p : \textstyle\sum_i p_i = 1,\ 0 \le p_i \le \tfrac{1}{rn}\Bigr\}

    .. math::
        \hat\ell_i &= \tfrac{n}{B_1} L_i(w_t;\mathcal B)\,1[i\in\mathcal B_1], \qquad
        p \leftarrow \Pi^{KL}_\Omega\bigl(p\circ e^{\eta_p\hat\ell}\bigr)
        \ \text{ or }\ \Pi_\Omega(p + \eta_p\hat\ell) \\
        G_t &= \tfrac{n}{B_1}\sum_{i\in\mathcal B_1} p_i\,\nabla L_i(w_t;\mathcal B)
        \quad\text{with the new } p

    The step on G_t is your optimizer. Give the objective per-sample losses and the group of each
    sample. One batch serves both moves; there is no memory of losses but p.

    Args:
        num_groups: n.
        ratio: r, the share of groups that count; None (or 1/n) is plain group DRO, 1 the mean over
            groups.
        step: eta_p (eta_q in the paper of group DRO).
        geometry: `"kl"` (exponentiated weights) or `"euclidean"`.
        scaling: `"unbiased"` uses the factors n/B1; `"batch"` leaves them out of both lines, as
            the released code of group DRO does: absent groups count as loss 0.
        options: `on_nonfinite`, `dtype` and `device` of `InnerTracker`.

    The others as in `sonex`.

    Example:
        The point whose largest squared distance to 0, 1 and 4 is least is their midrange, 2.

        >>> import torch, fcco
        >>> from fcco.methods import ooa
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        >>> objective, centre = ooa(model, optimizer, 3, step=0.05), torch.tensor([0.0, 1.0, 4.0])
        >>> output = fcco.OutputIterate(optimizer, "average")
        >>> for _ in range(1000):
        ...     loss = objective(lambda: (model.weight.view(1) - centre).square())
        ...     loss.backward(); optimizer.step(); optimizer.zero_grad()
        >>> with output.applied():
        ...     round(model.weight.item(), 1)
        2.0
        >>> objective.group_weights().sum().round(decimals=4)
        tensor(1.)

    References:
        S. Sagawa, P. W. Koh, T. Hashimoto and P. Liang, Distributionally robust neural networks
        for group shifts, 2020 (plain, KL). The cap 1/(r n) is its extension to CVaR. For convex
        losses the average iterate is O(sqrt(log(n) / T)) from the optimum after T steps; nothing
        is known for other losses. Groups may be sampled, uniformly without replacement.
    """
    _checks.integer("ooa", "num_groups", num_groups, 1)
    tracker = for_model(model, num_groups, gamma=1.0, correction=0.0, read="new", **options)
    # ratio 1/n leaves the weights uncapped: the adversary may put all of p on one group.
    term = GroupWeights(
        tracker, step, 1 / num_groups if ratio is None else ratio, geometry=geometry,
        scaling=scaling,
    )  # fmt: skip
    return OnlineGroupDRO(model, optimizer, term, process_group=process_group)
