"""OOA: group DRO with an adversary that weighs the groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..terms import GroupWeights
from ..tracker import InnerTracker
from .settings import Problem, Tracked

__all__ = ["Ooa"]


@dataclass(frozen=True, kw_only=True)
class Ooa(Tracked):
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
        ratio: r, the share of groups that count; None (or 1/n) is plain group DRO, 1 the mean over
            groups.
        step: eta_p (eta_q in the paper of group DRO).
        geometry: `"kl"` (exponentiated weights) or `"euclidean"`.
        scaling: `"unbiased"` uses the factors n/B1; `"batch"` leaves them out of both lines, as
            the released code of group DRO does: absent groups count as loss 0.

    References:
        S. Sagawa, P. W. Koh, T. Hashimoto and P. Liang, Distributionally robust neural networks
        for group shifts, 2020 (plain, KL). The cap 1/(r n) is its extension to CVaR. For convex
        losses the average iterate is O(sqrt(log(n) / T)) from the optimum after T steps.
    """

    ratio: float | None = None
    step: float = 0.01
    geometry: Literal["kl", "euclidean"] = "kl"
    scaling: Literal["unbiased", "batch"] = "unbiased"

    word = "ooa"

    def term(self, problem: Problem) -> GroupWeights:
        tracker = InnerTracker(
            problem.number, gamma=1.0, correction=0.0, read="new", **self.table(problem.model)
        )
        # ratio 1/n leaves the weights uncapped: the adversary may put all of p on one group.
        ratio = 1 / problem.number if self.ratio is None else self.ratio
        return GroupWeights(tracker, self.step, ratio, geometry=self.geometry, scaling=self.scaling)
