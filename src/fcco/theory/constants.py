"""The constants of a problem, and those that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .. import _checks

__all__ = ["Constants"]


@dataclass(frozen=True)
class Constants:
    r"""The constants of a problem (1/n) sum_i f_i(g_i(w)) and of its sampling.

    Args:
        num_inner: n, the number of inner functions.
        blocks: B1, blocks per step.
        samples: B2, samples per block.
        outer_lipschitz: C_f.
        inner_lipschitz: C_g, of g_i and, in mean square, of g_i(.; xi).
        inner_smoothness: L_g; `inf` where g_i is not smooth (ALEXR2 only).
        value_noise: sigma_0, standard deviation of g_i(w; xi).
        jacobian_noise: sigma_1, that of its Jacobian.
        outer_weak_convexity: rho_f, 0 for convex f_i.
        dim: d1, the dimension of g_i.
        inner_weak_convexity: rho_g; L_g unless given.

    Example:
        >>> from fcco.theory import Constants
        >>> constants = Constants(30, 8, 32, 2.0, 1.0, 0.5, 1.0, 1.0)
        >>> constants.outer_smoothness(0.1), constants.smoothness(0.1), constants.weak_convexity
        (10.0, 11.0, 1.0)
    """

    num_inner: int
    blocks: int
    samples: int
    outer_lipschitz: float
    inner_lipschitz: float
    inner_smoothness: float
    value_noise: float
    jacobian_noise: float
    outer_weak_convexity: float = 0.0
    dim: int = 1
    inner_weak_convexity: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_inner", "blocks", "samples", "dim"):
            _checks.at_least("Constants", name, getattr(self, name), 1)
        for name in ("outer_lipschitz", "inner_lipschitz"):
            _checks.positive("Constants", name, getattr(self, name))
        for name in ("inner_smoothness", "value_noise", "jacobian_noise", "outer_weak_convexity"):
            _checks.at_least("Constants", name, getattr(self, name), 0)
        if self.inner_weak_convexity is not None:
            _checks.at_least("Constants", "inner_weak_convexity", self.inner_weak_convexity, 0)
        _checks.in_interval("Constants", "blocks", self.blocks, 1, self.num_inner)

    @property
    def weak_convexity(self) -> float:
        """rho_F = sqrt(d1) C_f rho_g + rho_f C_g^2, for f_i convex also that of F_lambda."""
        rho = self.inner_weak_convexity
        rho = self.inner_smoothness if rho is None else rho
        convex_part = math.sqrt(self.dim) * self.outer_lipschitz * rho
        return convex_part + self.outer_weak_convexity * self.inner_lipschitz**2

    @property
    def jacobian_moment(self) -> float:
        """C_1^2 = C_g^2 + sigma_1^2 / B2, a bound on the squared size of a batch Jacobian."""
        return self.inner_lipschitz**2 + self.jacobian_noise**2 / self.samples

    def outer_smoothness(self, smoothing: float) -> float:
        """L_f = max(1/lambda, rho_f / (1 - lambda rho_f)), that of the envelope f_lambda."""
        rho = self.outer_weak_convexity
        limit = 1 / rho if rho else math.inf
        reason = "the envelope is not smooth otherwise"
        _checks.positive("Constants.outer_smoothness", "smoothing", smoothing)
        _checks.below("Constants", "smoothing", smoothing, limit, "1/outer_weak_convexity", reason)
        return max(1 / smoothing, rho / (1 - smoothing * rho))

    def smoothness(self, smoothing: float) -> float:
        """L_F = C_g^2 L_f + C_f L_g, that of F_lambda."""
        curved = self.outer_lipschitz * self.inner_smoothness
        return self.inner_lipschitz**2 * self.outer_smoothness(smoothing) + curved
