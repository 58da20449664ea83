"""MSVR: the corrected tracker, with an averaged or a recursive gradient (v1, v2, v3)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from .. import _checks
from ..inputs import known_settings
from ..objective import Compositional
from ..outer import AbstractOuter
from ..storm import RecursiveGradient
from ._common import coupled

__all__ = ["msvr"]


@known_settings(also=("offload",))
def msvr(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outer: AbstractOuter,
    num_inner: int,
    *,
    version: Literal["v1", "v2", "v3"] = "v1",
    single_point: bool = False,
    gamma: float = 0.1,
    beta: float | None = None,
    correction: float | Literal["theory", "auto"] = "theory",
    period: int | None = None,
    normalized: bool = False,
    dim: int | None = None,
    process_group: Any = "auto",
    **options: Any,
) -> Compositional | RecursiveGradient:
    r"""MSVR: the corrected tracker, with an averaged or a recursive gradient (Jiang et al. 2022).

    .. math::
        u_{i,t} &= (1-\gamma)u_{i,t-1} + \gamma g_i(w_t;\mathcal B)
            + \gamma'\bigl(g_i(w_t;\mathcal B) - g_i(w_{t-1};\mathcal B)\bigr)
            && i\in\mathcal B_1^t \\
        G(w, u) &= \frac{1}{B_1}\sum_{i\in\mathcal B_1^t}
            \nabla g_i(w;\mathcal B)\,\nabla f_i(u_i) && (+\nabla g_0(w;\mathcal B_0)) \\
        \text{v1:}\quad z_t &= (1-\beta)z_{t-1} + \beta G(w_t, u_{t-1}) \\
        \text{v2:}\quad z_t &= (1-\beta)z_{t-1} + G(w_t, u_{t-1}) - (1-\beta) G(w_{t-1}, u_{t-2}) \\
        \text{v3:}\quad z_t &= (1-\beta)z_{t-1} + \beta h_t
            + (1-\beta)\bigl(G(w_t, u_{t-1}) - G(w_{t-1}, u_{t-2})\bigr) \\
        w_{t+1} &= w_t - \eta z_t

    The gradient uses u from before the batch, so that it does not depend on the batch's noise.

    * v1: z is your optimizer: `momentum_type(lr, beta)`, or Adam.
    * v2: z is kept by a `RecursiveGradient`; your optimizer is plain SGD.
    * v3, for inner functions that are means over n_in samples: call `snapshot(batches)` whenever
      `snapshot_due` is true; h_t and the value that is tracked are in `RecursiveGradient`.
    * `single_point` (v1): the difference in the first line becomes the derivative
      J_i(w_t; B) (w_t - w_{t-1}), without a second evaluation; see `Compositional`.

    Args:
        optimizer: your optimizer, with step eta.
        outer: f, smooth; for another f a `MoreauEnvelope` of it.
        num_inner: n, the number of blocks (MSVR: m).
        version: `"v1"`, `"v2"` or `"v3"`.
        single_point: use the derivative instead of a second evaluation.
        gamma: weight of the new value in u (MSVR: beta).
        beta: weight of the new gradient in z (MSVR: alpha); v2 and v3.
        correction: gamma' (MSVR: gamma); `"theory"` is (n - B1) / (B1 (1 - gamma)) + 1 - gamma.
        period: steps between snapshots (MSVR: I); v3.
        normalized: steps of length eta, w_{t+1} = w_t - eta z_t / |z_t|; v2 and v3.

    The others as in `sonex`.

    Example:
        >>> import torch, fcco
        >>> from fcco.methods import msvr
        >>> _ = torch.manual_seed(0)
        >>> c = torch.randn(3, 20) + torch.tensor([[1.0], [-2.0], [0.5]])  # 3 blocks of 20 samples
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> w, rows = model.weight.view(3), torch.arange(3)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        >>> objective = msvr(
        ...     model, optimizer, fcco.outer.Custom(lambda u: u**2 / 2, smooth=True), 3,
        ...     version="v3", gamma=0.1, beta=0.05, period=50)
        >>> for _ in range(600):
        ...     if objective.snapshot_due:
        ...         pairs = ((lambda k=k: model.weight.view(3) - c[:, k], rows) for k in range(20))
        ...         objective.snapshot(pairs)
        ...     k = torch.randint(20, ())
        ...     objective(lambda: model.weight.view(3) - c[:, k], rows).backward()
        ...     optimizer.step(); optimizer.zero_grad()
        >>> bool((model.weight.view(3) - c.mean(1)).abs().max() < 1e-4)
        True

    References:
        W. Jiang, G. Li, Y. Wang, L. Zhang and T. Yang, Multi-block-single-probe variance reduced
        estimator for coupled compositional optimization, NeurIPS 2022. An eps-stationary point
        after O(n eps^-3 + eps^-4) samples (v1), O(n eps^-3) (v2) and O(n sqrt(n_in) eps^-2) (v3),
        for smooth f and g_i; v2 and v3 need samples whose gradients are Lipschitz in mean square,
        too, and v2 a small gamma^2 / beta, because noise in u enters z undamped. The form of v2
        with independent blocks for the gradient (and u after the batch) is not offered.
    """
    _checks.one_of("msvr", "version", version, ("v1", "v2", "v3"))
    _checks.requires("msvr", outer, "smooth")
    if options.setdefault("read", "old") != "old":
        raise ValueError(
            f"`msvr(read=...)` must be 'old' but is: {options['read']!r}. MSVR takes the slope at "
            "u from before the batch, so that it is independent of the batch."
        )
    _belongs(version, "beta", beta, ("v2", "v3"), "v1 averages in the optimizer: momentum_type")
    _belongs(version, "period", period, ("v3",), "only v3 takes snapshots")
    if version == "v1" and normalized:
        raise ValueError("`msvr(normalized=True)` is a form of v2 and v3 but version is: 'v1'.")
    if version != "v1" and single_point:
        raise ValueError(
            f"`msvr(single_point=True)` is a form of v1: version={version!r} evaluates "
            "g_i(w_{t-1}) in any case, for its gradient there."
        )
    objective = coupled(
        "msvr", model, optimizer, outer, num_inner, gamma=gamma, correction=correction, dim=dim,
        process_group=process_group, single_point=single_point, **options,
    )  # fmt: skip
    if beta is None:  # v1: your optimizer makes z
        return objective
    return RecursiveGradient(objective, beta, snapshot_every=period, normalized=normalized)


def _belongs(version: str, name: str, value: Any, versions: tuple[str, ...], reason: str) -> None:
    """Refuse an option that a version has no use for, or lacks."""
    if version in versions and value is None:
        raise ValueError(f"`msvr({name}=...)` is needed for version={version!r}.")
    if version not in versions and value is not None:
        raise ValueError(
            f"`msvr({name}=...)` belongs to {' and '.join(versions)} but version is: {version!r} "
            f"({reason})."
        )
