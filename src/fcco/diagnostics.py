"""Diagnostics: what a point has reached, measured on the full data.

| question | function |
|---|---|
| KKT residuals, with given or the best multipliers | `kkt` |
| the eigenvalues of the stacked Jacobian's Gram matrix | `eigenvalues` |
| the singular value of violated constraints | `constraint_condition` |

They measure the model at its current parameters. Common arguments:

* `inner` maps a LongTensor of blocks to g_i(w), shape (B,) or, of `eigenvalues` alone, (B, d1), on
  the full data and with an autograd graph to `parameters`; deterministic, so set the model to
  evaluation mode first. It is asked for at most 64 blocks at a time.
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


class _FullData:
    """A problem at the current parameters; `call` is the public function, which errors name."""

    def __init__(
        self,
        call: str,
        inner: Inner,
        num_inner: int,
        parameters: Iterable[Tensor],
        loss: Loss | None = None,
    ) -> None:
        _checks.integer(call, "num_inner", num_inner, 1)
        self.call, self.inner, self.loss = call, inner, loss
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self.parameters:
            raise ValueError(
                f"`{call}(parameters=...)` has no tensor that requires a gradient "
                "(an iterator such as `model.parameters()` can be used only once)."
            )
        self.index = torch.arange(num_inner, device=self.parameters[0].device)

    def constraint_values(self) -> Tensor:
        """g_i(w) of scalar constraints, shape (m,), detached, in float64."""
        values = torch.cat([self._of(p).detach().double() for p in self.index.split(_CHUNK)])
        if values.dim() == 2 and values.shape[1] != 1:
            raise ValueError(
                f"`{self.call}(inner=...)` gives d1 = {values.shape[1]} values per constraint."
            )
        return values.reshape(-1)

    def jacobian(self, index: Tensor) -> Tensor:
        """The gradients of the g_i in `index`, a row each, that of g_0 last; in float64."""
        parts: list[Tensor | None] = list(index.split(_CHUNK)) if len(index) else []
        rows = []
        for part in parts if self.loss is None else [*parts, None]:
            for value in self._of(part).reshape(-1):
                gradients = torch.autograd.grad(
                    value, self.parameters, retain_graph=True, materialize_grads=True
                )
                rows.append(torch.cat([each.reshape(-1).double() for each in gradients]))
        jacobian = torch.stack(rows)
        if not bool(torch.isfinite(jacobian).all()):
            raise NonFiniteValue(
                f"`{self.call}`: a gradient of inner or loss is not finite although the values are."
            )
        return jacobian

    def _of(self, index: Tensor | None) -> Tensor:
        """g_i(w) for the blocks in `index`, or g_0(w) for None, with its graph."""
        with torch.enable_grad():
            values = self.inner(index) if index is not None else self.loss()  # type: ignore[misc]
        if index is None:
            argument, wanted, fits = f"`{self.call}(loss=...)`", "a scalar", values.numel() == 1
        else:
            argument = f"`{self.call}(inner=...)`"
            wanted = f"the shape ({len(index)},) or ({len(index)}, d1)"
            fits = values.dim() in (1, 2) and len(values) == len(index)
        if not fits:
            raise ValueError(f"{argument} must return {wanted}, not: {tuple(values.shape)}.")
        if not values.requires_grad:
            raise ValueError(
                f"{argument} returned values without an autograd graph to the parameters."
            )
        wrong = (~torch.isfinite(values.detach())).nonzero()
        if len(wrong):
            place = "" if index is None else f" for block {int(index[wrong[0, 0]])}"
            raise NonFiniteValue(f"{argument} must be finite but is not{place}.")
        return values


def eigenvalues(inner: Inner, num_inner: int, parameters: Iterable[Tensor]) -> Tensor:
    r"""The eigenvalues of J J^T in ascending order; LBSV bounds the smallest, delta, from below.

    .. math::
        J = [J_1; \dots; J_n] \in \mathbb{R}^{n d_1 \times d}, \qquad J J^\top \in
        \mathbb{R}^{n d_1 \times n d_1}

    (The transposed product of the paper would be d x d and singular; see
    docs/research/details/mathematics.md.) If n d1 > d, the smallest is 0 whatever the model does.
    For CVaR, whose inner functions are L_i - s, s is one of the parameters.
    """
    data = _FullData("eigenvalues", inner, num_inner, parameters)
    jacobian = data.jacobian(data.index)
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
    data = _FullData("constraint_condition", inner, num_constraints, parameters)
    violated = data.constraint_values() > 0
    if not bool(violated.any()):
        return None
    jacobian = data.jacobian(data.index)
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
    data = _FullData("kkt", inner, num_constraints, parameters, loss)
    values = data.constraint_values()
    if multipliers is None:
        active = data.index[values >= -_ACTIVE]
        jacobian = data.jacobian(active)
        nu = torch.zeros_like(values)
        nu[active] = _best_multipliers(jacobian)
    else:
        if multipliers.shape != values.shape or bool((multipliers < 0).any()):
            raise ValueError(
                f"`kkt(multipliers=...)` must be non-negative (constraints are g_i <= 0), of shape "
                f"({len(values)},), but is: {multipliers}."
            )
        nu = multipliers.detach().to(values)
        active = data.index[nu > 0]
        jacobian = data.jacobian(active)
    return KKT(
        stationarity=float((nu[active] @ jacobian[:-1] + jacobian[-1]).norm()),
        feasibility=max(float(values.max()), 0.0),
        complementarity=float((nu * values).abs().max()),
        multipliers=nu,
    )


def _best_multipliers(jacobian: Tensor) -> Tensor:
    """The nu >= 0 with the least norm of grad g_0, the last row, plus nu times the others."""
    try:
        import scipy.optimize
    except ImportError as error:
        raise ImportError("`kkt` needs scipy: pip install scipy.") from error
    # Non-negative least squares with m + 1 equations instead of d: a square matrix R with
    # R^T R = gram has columns of the lengths and angles of the gradients, grad g_0 last.
    eigenvalues, vectors = torch.linalg.eigh((jacobian @ jacobian.T).cpu())
    copy: Any = (eigenvalues.clamp(min=0).sqrt().unsqueeze(1) * vectors.T).numpy()
    if copy.shape[1] == 1:
        return jacobian.new_zeros(0)
    solution, _ = scipy.optimize.nnls(copy[:, :-1], -copy[:, -1], maxiter=100 * len(copy))
    return torch.from_numpy(solution).to(jacobian)
