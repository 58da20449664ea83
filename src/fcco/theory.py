"""Laws in closed form (docs/concepts/laws.md): where tracked values and constraints settle."""

from __future__ import annotations

from . import _checks
from .tracker import theory_correction

__all__ = ["expected_tracking_error", "smoothed_bias"]


def expected_tracking_error(
    gamma: float,
    num_inner: int,
    blocks: int,
    *,
    correction: float | None = None,
    drift: float = 0.0,
    systematic: bool = True,
    value_noise: float = 0.0,
    samples: int = 1,
) -> float:
    r"""Steady E(u_i - g_i)^2 after an update, exactly, for scalar g_i moving at constant speed.

    With p = B1/n, a = gamma' - (1 - gamma) and g_i moving by delta per step,

    .. math::
        E(u - g)^2 = \frac{\gamma}{2 - \gamma} \frac{\sigma_0^2}{B_2}
        + \frac{\delta^2 (p a^2 + 1 - p) + 2 \delta m (p (1 - \gamma) a - (1 - p))}
        {p \gamma (2 - \gamma)}, \qquad m = \delta \frac{p a - (1 - p)}{p \gamma},

    where m = E(u - g) is 0 for steps of random sign. The theory's gamma' makes the second
    bracket 0. The error of a run is measured by `fcco.diagnostics.tracking_error`.

    Args:
        num_inner: n, and `blocks` B1 of them in a step, each with B2 `samples`.
        correction: gamma'; `theory_correction(gamma, n, B1)` unless given.
        drift: delta, the size of each g_i's motion per step.
        systematic: the motion keeps its sign; otherwise each step has an independent random one.
        value_noise: sigma_0, the same at both points of the correction.

    Example:
        >>> from fcco.theory import expected_tracking_error
        >>> round(expected_tracking_error(0.5, 10, 10, value_noise=3.0, samples=4), 6)
        0.75
    """
    call = "expected_tracking_error"
    _checks.in_interval(call, "gamma", gamma, 0, 1, open_low=True)
    _checks.in_interval(call, "blocks", blocks, 1, num_inner)
    if correction is None:
        if blocks < num_inner:
            reason = "the correction of the theory is infinite there unless all blocks are sampled"
            _checks.below(call, "gamma", gamma, 1, "its limit", reason)
        correction = float(theory_correction(gamma, num_inner, blocks))
    excess = correction - (1 - gamma)  # a of the law
    share = blocks / num_inner
    lag = drift * (share * excess - (1 - share)) / (share * gamma) if systematic else 0.0
    motion = drift**2 * (share * excess**2 + 1 - share)
    motion += 2 * drift * lag * (share * (1 - gamma) * excess - (1 - share))
    noise = gamma / (2 - gamma) * value_noise**2 / samples
    return noise + motion / (share * gamma * (2 - gamma))


def smoothed_bias(smoothing: float, num_constraints: int, multiplier: float) -> float:
    r"""The violation lambda m nu_i of a constraint at the solution of the smoothed problem.

    It is exact for the multiplier 0 < nu_i < rho/m of the smoothed problem itself, and holds to
    first order in lambda for that of the constrained problem. It is how to choose lambda.

    Args:
        smoothing: lambda, of f = rho [.]_+ with its scale.
        multiplier: nu_i, of the constraint g_i <= 0 with the objective's weight 1.

    Example:
        >>> from fcco.theory import smoothed_bias
        >>> round(smoothed_bias(0.01, num_constraints=8, multiplier=0.6), 6)
        0.048
    """
    return smoothing * num_constraints * multiplier
