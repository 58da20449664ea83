"""Diagnostics: what a point has reached, measured on the full data.

| question | function |
|---|---|
| KKT residuals, with given or the best multipliers | `kkt` |
| the eigenvalues of the stacked Jacobian's Gram matrix | `eigenvalues` |
| the singular value of violated constraints | `constraint_condition` |

They measure the model at its current parameters. Common arguments:

* `inner` maps a LongTensor of blocks to g_i(w), shape (B,) or, of `eigenvalues` alone, (B, d1), on
  the full data and with an autograd graph to `parameters`; deterministic, so set the model to
  evaluation mode first. It is asked for at most 64 blocks at a time. All gradients are held.
* `num_inner` is n, `num_constraints` m, `parameters` w.
* `loss` returns g_0(w), if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _checks
from .tracker import NonFiniteValue

__all__ = ["KKT", "constraint_condition", "eigenvalues", "kkt"]

Inner = Callable[[Tensor], Tensor]
Loss = Callable[[], Tensor]

_CHUNK = 64  # blocks per autograd graph


def _measure(
    call: str,
    inner: Inner,
    number: int,
    parameters: Iterable[Tensor],
    loss: Loss | None = None,
    scalar: bool = True,
) -> tuple[Tensor, Tensor]:
    """The g_i(w), and the gradient of each as a row, that of g_0 last; in float64.

    Args:
        call: the public function, which errors name.
        inner: see the module, also for `parameters` and `loss`.
        number: n.
        scalar: each g_i is one number.
    """
    _checks.integer(call, "num_inner", number, 1)
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if not parameters:
        raise ValueError(
            f"`{call}(parameters=...)` has no tensor that requires a gradient "
            "(an iterator such as `model.parameters()` can be used only once)."
        )
    chunks = torch.arange(number, device=parameters[0].device).split(_CHUNK)
    values, rows = [], []
    for blocks in chunks if loss is None else (*chunks, None):
        with torch.enable_grad():
            found = inner(blocks) if blocks is not None else loss()  # type: ignore[misc]
        if blocks is None:
            argument, wanted, fits = f"`{call}(loss=...)`", "a scalar", found.numel() == 1
        else:
            width = "" if scalar else f" or ({len(blocks)}, d1)"
            argument, wanted = f"`{call}(inner=...)`", f"the shape ({len(blocks)},){width}"
            fits = found.shape[:1] == blocks.shape and found.dim() <= (1 if scalar else 2)
        if not fits:
            raise ValueError(f"{argument} must return {wanted}, not: {tuple(found.shape)}.")
        if not found.requires_grad:
            raise ValueError(
                f"{argument} returned values without an autograd graph to the parameters."
            )
        wrong = (~torch.isfinite(found.detach())).nonzero()
        if len(wrong):
            place = "" if blocks is None else f" for block {int(blocks[wrong[0, 0]])}"
            raise NonFiniteValue(f"{argument} must be finite but is not{place}.")
        if blocks is not None:
            values.append(found.detach().double())
        for value in found.reshape(-1):
            gradients = torch.autograd.grad(
                value, parameters, retain_graph=True, materialize_grads=True
            )
            rows.append(torch.cat([gradient.reshape(-1).double() for gradient in gradients]))
    jacobian = torch.stack(rows)
    if not bool(torch.isfinite(jacobian).all()):
        raise NonFiniteValue(
            f"`{call}`: a gradient of inner or loss is not finite although the values are."
        )
    return torch.cat(values), jacobian


def eigenvalues(inner: Inner, num_inner: int, parameters: Iterable[Tensor]) -> Tensor:
    r"""The eigenvalues of J J^T in ascending order; LBSV bounds the smallest, delta, from below.

    .. math::
        J = [J_1; \dots; J_n] \in \mathbb{R}^{n d_1 \times d}, \qquad J J^\top \in
        \mathbb{R}^{n d_1 \times n d_1}

    (The transposed product of the paper would be d x d and singular; see
    docs/concepts/mathematics.md.) If n d1 > d, the smallest is 0 whatever the model does. For
    CVaR, whose inner functions are L_i - s, s is one of the parameters.
    """
    _, jacobian = _measure("eigenvalues", inner, num_inner, parameters, scalar=False)
    # Rounding can make the smallest of a singular matrix slightly negative.
    return torch.linalg.eigvalsh(jacobian @ jacobian.T).clamp(min=0)


def constraint_condition(
    inner: Inner, num_constraints: int, parameters: Iterable[Tensor]
) -> tuple[float, float] | None:
    r"""The smallest singular values of the constraints' Jacobian (the paper's section 5).

    .. math::
        \sigma_{\min}(J(w)) \ge \delta \quad \text{at every } w \text{ with } \max_i g_i(w) > 0

    Returns:
        That of all m constraints, as the assumption is written; and that of the violated ones,
        {i: g_i > 0}, alone. It is never smaller, and enough for the proof, whose multipliers vanish
        where g_i <= 0. None where all constraints hold: the assumption then asks nothing.
    """
    values, jacobian = _measure("constraint_condition", inner, num_constraints, parameters)
    violated = values > 0
    if not bool(violated.any()):
        return None
    parts = jacobian, jacobian[violated]
    least = [float(torch.linalg.eigvalsh(j @ j.T)[0].clamp(min=0).sqrt()) for j in parts]
    return least[0], least[1]


_ACTIVE = 1e-3
"""Constraints with g_i at least minus this may have a multiplier."""


@dataclass(frozen=True, eq=False)
class KKT:
    """Residuals of the KKT conditions; zero at a KKT point."""

    stationarity: float  # |grad g_0 + sum_i nu_i grad g_i|
    feasibility: float  # max_i [g_i]_+
    complementarity: float  # max_i |nu_i g_i|
    multipliers: Tensor  # nu, (m,)

    def __str__(self) -> str:
        return (
            f"stationarity {self.stationarity:.3g}, feasibility {self.feasibility:.3g}, "
            f"complementarity {self.complementarity:.3g}, multipliers <= "
            f"{float(self.multipliers.max()):.3g}"
        )


def kkt(
    loss: Loss,
    inner: Inner,
    num_constraints: int,
    parameters: Iterable[Tensor],
    *,
    multipliers: Tensor | None = None,
) -> KKT:
    """The KKT residuals at a point, with given multipliers or the best ones.

    Without `multipliers`, nu = argmin |grad g_0 + J^T nu| over nu >= 0 with nu_i = 0 where
    g_i < -0.001, which depends on the point alone and not on the method that found it. Much larger
    residuals with those of a method say that these have not converged.

    Args:
        multipliers: nu, shape (m,).
    """
    values, jacobian = _measure("kkt", inner, num_constraints, parameters, loss)
    if multipliers is None:
        nu = _best_multipliers(values, jacobian)
    else:
        if multipliers.shape != values.shape or bool((multipliers < 0).any()):
            raise ValueError(
                f"`kkt(multipliers=...)` must be non-negative (constraints are g_i <= 0), of shape "
                f"({len(values)},), but is: {multipliers}."
            )
        nu = multipliers.detach().to(values)
    return KKT(
        stationarity=float((nu @ jacobian[:-1] + jacobian[-1]).norm()),
        feasibility=max(float(values.max()), 0.0),
        complementarity=float((nu * values).abs().max()),
        multipliers=nu,
    )


def _best_multipliers(values: Tensor, jacobian: Tensor) -> Tensor:
    try:
        import scipy.optimize
    except ImportError as error:
        raise ImportError("`kkt` needs scipy: pip install scipy.") from error
    nu = torch.zeros_like(values)
    near = (values >= -_ACTIVE).nonzero().squeeze(1)
    if len(near) > 0:
        rows = torch.cat([jacobian[near], jacobian[-1:]])
        # Non-negative least squares with m + 1 equations instead of d: a square matrix R with
        # R^T R = gram has columns of the lengths and angles of the gradients, grad g_0 last.
        eigenvalues, vectors = torch.linalg.eigh((rows @ rows.T).cpu())
        copy: Any = (eigenvalues.clamp(min=0).sqrt().unsqueeze(1) * vectors.T).numpy()
        solution, _ = scipy.optimize.nnls(copy[:, :-1], -copy[:, -1], maxiter=100 * len(copy))
        nu[near] = torch.from_numpy(solution).to(nu)
    return nu
