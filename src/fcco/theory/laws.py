"""Single formulas: step sizes of ALEXR, and the laws of tracking, penalty and smoothing errors."""

from __future__ import annotations

from .. import _checks
from ..tracker import theory_correction

__all__ = [
    "dual_step",
    "expected_tracking_error",
    "inner_step",
    "penalty_size",
    "smoothed_bias",
]


def dual_step(theta: float, num_inner: int, blocks: int) -> float:
    r"""The mirror-ascent step gamma of ALEXR and ALEXR2.

    .. math::
        \gamma = \Big(\frac{B_1}{n (1 - \theta)} - 1\Big)^{-1}, \qquad
        \hat\gamma = \frac{\gamma}{1 + \gamma} = \frac{n (1 - \theta)}{B_1}.

    The second is the weight of the new value in u. The paper's main theorem prints it as gamma.

    Example:
        >>> from fcco.theory import dual_step
        >>> round(dual_step(0.9, num_inner=30, blocks=10), 6)
        0.428571
    """
    call = "dual_step"
    _checks.in_interval(call, "blocks", blocks, 1, num_inner)
    _checks.in_interval(call, "theta", theta, 0, 1, open_low=True, open_high=True)
    if not 1 - theta < blocks / num_inner:
        raise ValueError(
            f"`{call}(theta=...)` must be above 1 - blocks/num_inner = {1 - blocks / num_inner:g} "
            f"but is: {theta} (the weight n (1 - theta) / B1 of a new value must be below 1)."
        )
    return 1 / (blocks / (num_inner * (1 - theta)) - 1)


def inner_step(theta: float, nu: float, weak_convexity: float) -> float:
    r"""The primal step eta of ALEXR2's inner loop.

    .. math::
        \eta = \frac{1 - \theta}{\theta / \nu - \rho}, \qquad
        \text{for } \nu = \tfrac{1}{4 \rho}: \;
        \eta = \frac{1 - \theta}{(4 \theta - 1) \rho}.

    Args:
        theta: extrapolation weight.
        nu: parameter of the proximal term, below theta / rho.
        weak_convexity: rho = sqrt(d1) C_f rho_g.

    Example:
        >>> from fcco.theory import inner_step
        >>> round(inner_step(0.9, nu=0.25, weak_convexity=1.0), 6)
        0.038462
    """
    call = "inner_step"
    _checks.in_interval(call, "theta", theta, 0, 1, open_low=True, open_high=True)
    _checks.positive(call, "nu", nu)
    _checks.at_least(call, "weak_convexity", weak_convexity, 0)
    if not theta / nu > weak_convexity:
        raise ValueError(
            f"`{call}(nu=...)` must be below theta/weak_convexity = {theta / weak_convexity:g} "
            f"but is: {nu} (the inner problem does not contract by theta otherwise)."
        )
    return (1 - theta) / (theta / nu - weak_convexity)


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
    bracket 0: then the law is the same for any pattern of directions. The error of a run is
    measured by `fcco.diagnostics.tracking_error`.

    Args:
        gamma: weight of the new value.
        num_inner: n.
        blocks: B1.
        correction: gamma'; that of the theory, (n - B1) / (B1 (1 - gamma)) + 1 - gamma, unless
            given.
        drift: delta, the size of each g_i's motion per step.
        systematic: the motion keeps its sign; otherwise each step has an independent random one.
        value_noise: sigma_0; the same samples are used at both points of the correction, and the
            noise does not depend on the point.
        samples: B2.

    Example:
        >>> from fcco.theory import expected_tracking_error
        >>> round(expected_tracking_error(0.5, 10, 10, value_noise=3.0, samples=4), 6)
        0.75
        >>> theory = expected_tracking_error(0.1, 10, 2, drift=0.01)
        >>> plain = expected_tracking_error(0.1, 10, 2, drift=0.01, correction=0.0)
        >>> round(plain / theory)
        20
    """
    call = "expected_tracking_error"
    _checks.in_interval(call, "gamma", gamma, 0, 1, open_low=True)
    _checks.in_interval(call, "blocks", blocks, 1, num_inner)
    _checks.at_least(call, "samples", samples, 1)
    # a of the law, by which the correction exceeds 1 - gamma
    if correction is not None:
        excess = correction - (1 - gamma)
    elif blocks == num_inner:
        excess = 0.0
    else:
        reason = "the correction of the theory is infinite there unless all blocks are sampled"
        _checks.below(call, "gamma", gamma, 1, "its limit", reason)
        excess = float(theory_correction(gamma, num_inner, blocks)) - (1 - gamma)
    share = blocks / num_inner
    lag = drift * (share * excess - (1 - share)) / (share * gamma) if systematic else 0.0
    motion = drift**2 * (share * excess**2 + 1 - share)
    motion += 2 * drift * lag * (share * (1 - gamma) * excess - (1 - share))
    noise = gamma / (2 - gamma) * value_noise**2 / samples
    return noise + motion / (share * gamma * (2 - gamma))


def penalty_size(
    num_constraints: int, inner_lipschitz: float, delta: float, *, margin: float = 0.01
) -> float:
    r"""A penalty rho for which stationary points of the penalised problem are KKT points.

    .. math::
        \rho = (1 + \mathrm{margin}) \, \frac{m (C_g + 1)}{\delta} > \frac{m (C_g + 1)}{\delta}.

    The bound is strict, hence the margin. It is sufficient, not necessary: what a problem needs
    is rho > m max_i nu_i for its multipliers nu.

    Args:
        num_constraints: m; the penalty is (rho/m) sum_i [g_i]_+.
        inner_lipschitz: C_g, of the constraints and of the objective g_0.
        delta: lower bound on the smallest singular value of the constraints' Jacobian at
            infeasible points.
        margin: relative distance above the bound.

    Example:
        >>> from fcco.theory import penalty_size
        >>> penalty_size(14, inner_lipschitz=1.0, delta=0.5, margin=0.25)
        70.0
    """
    call = "penalty_size"
    _checks.at_least(call, "num_constraints", num_constraints, 1)
    _checks.positive(call, "inner_lipschitz", inner_lipschitz)
    _checks.positive(call, "delta", delta)
    _checks.positive(call, "margin", margin)
    return (1 + margin) * num_constraints * (inner_lipschitz + 1) / delta


def smoothed_bias(smoothing: float, num_constraints: int, multiplier: float) -> float:
    r"""Violation of a constraint at the solution of the smoothed penalty problem.

    .. math::
        g_i(w_\lambda) = \lambda \, m \, \nu_i, \qquad 0 < \nu_i < \rho / m,

    exactly for the multiplier nu_i of the smoothed problem itself, and to first order in lambda
    for that of the constrained problem. It is how to choose lambda.

    Args:
        smoothing: lambda, of f = rho [.]_+ with its scale.
        num_constraints: m.
        multiplier: nu_i, of the constraint g_i <= 0 with the objective's weight 1.

    Example:
        >>> from fcco.theory import smoothed_bias
        >>> round(smoothed_bias(0.01, num_constraints=8, multiplier=0.6), 6)
        0.048
    """
    _checks.positive("smoothed_bias", "smoothing", smoothing)
    _checks.at_least("smoothed_bias", "num_constraints", num_constraints, 1)
    _checks.at_least("smoothed_bias", "multiplier", multiplier, 0)
    return smoothing * num_constraints * multiplier
