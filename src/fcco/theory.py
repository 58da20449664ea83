r"""Formulas of the theorems, with explicit constants: hyperparameters, step sizes, error laws.

| question | name |
|---|---|
| which hyperparameters make the proofs go through | `sonex_settings`, `alexr2_settings` |
| the constants these need | `Constants` |
| primal and dual step of ALEXR for a contraction theta | `inner_step`, `dual_step` |
| steady error of a tracked value | `expected_tracking_error` |
| a penalty that is exact | `penalty_size` |
| violation that smoothing leaves | `smoothed_bias` |

The settings are far more cautious than tuned values; their use is in the orders and in tests. All
constants come from the proofs, corrected where those slip (docs/concepts/mathematics.md lists
the errata).

References:
    The SONEX and ALEXR2 paper, arXiv 2506.02504: sections 4.1 (SONEX), 4.2 (ALEXR2), 5
    (constraints) and the appendix on adaptive learning rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import _checks
from .tracker import theory_correction

__all__ = [
    "Alexr2Settings",
    "Constants",
    "SonexSettings",
    "alexr2_settings",
    "dual_step",
    "expected_tracking_error",
    "inner_step",
    "penalty_size",
    "smoothed_bias",
    "sonex_settings",
]


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
        call = "Constants"
        for name in ("num_inner", "samples", "dim"):
            _checks.at_least(call, name, getattr(self, name), 1)
        _checks.in_interval(call, "blocks", self.blocks, 1, self.num_inner)
        for name in ("outer_lipschitz", "inner_lipschitz"):
            _checks.positive(call, name, getattr(self, name))
        for name in ("inner_smoothness", "value_noise", "jacobian_noise", "outer_weak_convexity"):
            _checks.at_least(call, name, getattr(self, name), 0)
        if self.inner_weak_convexity is not None:
            _checks.at_least(call, "inner_weak_convexity", self.inner_weak_convexity, 0)

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
        call = "Constants.outer_smoothness"
        _checks.positive(call, "smoothing", smoothing)
        _checks.below(call, "smoothing", smoothing, limit, "1/outer_weak_convexity", reason)
        return max(1 / smoothing, rho / (1 - smoothing * rho))

    def smoothness(self, smoothing: float) -> float:
        """L_F = C_g^2 L_f + C_f L_g, that of F_lambda."""
        inner_part = self.outer_lipschitz * self.inner_smoothness
        return self.inner_lipschitz**2 * self.outer_smoothness(smoothing) + inner_part


@dataclass(frozen=True)
class SonexSettings:
    """Smoothing lambda, beta, gamma, correction gamma', lr eta and iterations T of SONEX.

    `initial_samples` is the batch with which every u_i is initialised.
    """

    smoothing: float
    beta: float
    gamma: float
    correction: float
    lr: float
    iterations: int
    initial_samples: int


def sonex_settings(
    constants: Constants,
    eps: float,
    initial_gap: float,
    *,
    smallest_scale: float = 1.0,
    largest_scale: float = 1.0,
    initial_samples: int | None = None,
) -> SonexSettings:
    r"""SONEX settings for an approximate eps-stationary point, also with Adam-type steps.

    .. math::
        \lambda = \tfrac{\epsilon}{C_f}, \quad \beta = \Theta(\min\{B_1, B_2\} \epsilon^2), \quad
        \gamma = \Theta(B_2 \epsilon^4), \quad
        \eta = \Theta(\tfrac{B_1 \sqrt{B_2}}{n} \epsilon^3), \quad
        T = O(\tfrac{n}{B_1 \sqrt{B_2}} \epsilon^{-5}).

    The mean of |grad F_lambda(w_t)|^2 over the T iterations is then at most eps^2 in expectation.
    With steps between eta c_l and eta c_u per coordinate, beta and gamma shrink by c_l/c_u, eta by
    sqrt(c_l/c_u^3) (and eta L_F <= c_l/(2 c_u^2)), and T grows by at most (c_u/c_l)^2.5.

    Args:
        constants: the problem.
        eps: the accuracy.
        initial_gap: F_lambda(w_0) minus its infimum, or a bound on it.
        smallest_scale: c_l; for Adam with |G_j| <= G and damping e, 1/(G + e). 1 for SGD.
        largest_scale: c_u; for Adam 1/e. 1 for SGD.
        initial_samples: batch that initialises u; ceil(eps^-3) unless given.

    Example:
        >>> from fcco.theory import Constants, sonex_settings
        >>> constants = Constants(30, 8, 32, 1.0, 1.0, 1.0, 1.0, 1.0)
        >>> settings = sonex_settings(constants, 0.1, initial_gap=1.0)
        >>> f"{settings.smoothing:g} {settings.gamma:.1e} {settings.iterations:.1e}"
        '0.1 2.6e-05 9.7e+07'

    References:
        Section 4.1 and the appendix on adaptive learning rates, with errata E4, E9 and E23.
    """
    call, c = "sonex_settings", constants
    low, high = smallest_scale, largest_scale
    _checks.positive(call, "eps", eps)
    _checks.at_least(call, "initial_gap", initial_gap, 0)
    _checks.positive(call, "largest_scale", high)
    _checks.in_interval(call, "smallest_scale", low, 0, high, open_low=True)
    if math.isinf(c.inner_smoothness):
        raise ValueError(
            f"`{call}(constants=...)` needs smooth inner functions but inner_smoothness (L_g) is "
            "inf (ALEXR2 does not need them)."
        )
    if c.outer_weak_convexity > 0:
        limit = c.outer_lipschitz / c.outer_weak_convexity
        reason = "f_lambda is not smooth otherwise"
        _checks.below(call, "eps", eps, limit, "outer_lipschitz/outer_weak_convexity", reason)
    n, blocks, samples, noise = c.num_inner, c.blocks, c.samples, c.value_noise**2
    ratio = low / high
    smoothing = eps / c.outer_lipschitz
    outer = c.outer_smoothness(smoothing) ** 2 * c.jacobian_moment  # L_f^2 C_1^2
    smoothness = c.smoothness(smoothing)
    # Each of the three noise terms of the proof gets a sixth of eps^2, the initial ones the half.
    # The proof's final bound multiplies the noise by c_u/c_l: beta and gamma shrink by that ratio.
    share = ratio * eps**2 / 6
    moment = c.outer_lipschitz**2 * (c.inner_lipschitz**2 + c.jacobian_noise**2)
    beta = min(2 / 7, share * min(blocks, samples) / (4 * moment))
    gamma = 0.5
    if noise > 0:
        by_noise = share * samples / (20 * noise * outer)
        by_change = math.sqrt(share * beta * n * samples / (36 * blocks * outer * noise))
        gamma = min(gamma, by_noise, by_change)
    weight = 5 * outer * n / (gamma * blocks) + 12 * outer * gamma / beta  # P of the proof
    lipschitz = c.inner_lipschitz**2
    step = min(
        beta / (math.sqrt(24) * smoothness),
        math.sqrt(blocks / (96 * n * lipschitz * weight)),
        math.sqrt(blocks * beta / (324 * n * outer * lipschitz)),
    )
    # Steps of at most eta c_u must leave c_l/(4 c_u) of the descent. The second bound is that of
    # the descent lemma; it is one on eta, not on the scaled step.
    lr = min(math.sqrt(ratio) * step / high, low / (2 * high**2 * smoothness))
    if initial_samples is None:
        initial_samples = math.ceil(eps**-3)
    _checks.at_least(call, "initial_samples", initial_samples, 1)
    gradient_error = 4 * c.outer_lipschitz**2 * c.jacobian_moment  # V_1, for v_0 = G_0
    value_error = noise / initial_samples + blocks / n * gamma**2 * noise / samples  # U_1
    start = initial_gap / (lr * high) + gradient_error / beta + weight * value_error
    return SonexSettings(
        smoothing=smoothing, beta=beta, gamma=gamma, lr=lr, initial_samples=initial_samples,
        correction=float(theory_correction(gamma, n, blocks)),
        iterations=math.ceil(4 / (ratio * eps**2) * start),
    )  # fmt: skip


@dataclass(frozen=True)
class Alexr2Settings:
    """Settings of ALEXR2.

    Smoothing lambda, nu, theta, eta, `inner_lr` = eta nu / (eta + nu), `dual_step` gamma,
    `gamma_hat` = gamma / (1 + gamma), `correction` = theta gamma_hat, beta, outer `lr` alpha,
    `inner_steps` K and `rounds` T. `polish_theta` and `polish_steps` are theta and K of the
    final run of the inner loop (the corollary), None where g_i is not smooth.
    """

    smoothing: float
    nu: float
    theta: float
    eta: float
    inner_lr: float
    dual_step: float
    gamma_hat: float
    correction: float
    beta: float
    lr: float
    inner_steps: int
    rounds: int
    polish_theta: float | None
    polish_steps: int | None


def alexr2_settings(
    constants: Constants, eps: float, initial_gap: float, *, beta: float = 0.5
) -> Alexr2Settings:
    r"""ALEXR2 settings for a nearly eps-stationary point of F_lambda.

    .. math::
        \nu = \tfrac{1}{4 \rho}, \quad 1 - \theta = \Theta(\epsilon^3), \quad
        \hat\gamma = \tfrac{n (1 - \theta)}{B_1}, \quad
        \alpha = \tfrac{\beta \nu}{2 \sqrt 3}, \quad
        K = \tilde O(\tfrac{n}{B_1 B_2} \epsilon^{-3} + \epsilon^{-3}), \quad T = O(\epsilon^{-2}).

    Here rho = sqrt(d1) C_f rho_g. For smooth g_i, the polish runs the inner loop once more from the
    output, with 1 - theta of order eps^5, which gives |grad F_lambda(z)| <= 2 eps in expectation:
    an approximate 2 eps-stationary point of F itself. K is for the y-form, or an f whose conjugate
    is linear on its domain (hinge, absolute value, maximum).

    Args:
        constants: the problem; f_i must be convex and rho_g positive (any bound will do).
        eps: the accuracy.
        initial_gap: F_{lambda,nu}(w_0) minus its infimum, or a bound on it.
        beta: weight of the new gradient in the outer momentum, at most 1/2.

    Example:
        >>> from fcco.theory import Constants, alexr2_settings
        >>> constants = Constants(30, 8, 32, 1.0, 1.0, 1.0, 1.0, 1.0)
        >>> settings = alexr2_settings(constants, 0.1, initial_gap=1.0)
        >>> f"{settings.nu:g} {1 - settings.theta:.1e} {settings.inner_steps} {settings.rounds}"
        '0.25 1.2e-06 8463190 8764'

    References:
        Section 4.2, with errata E10, E12, E13 and E14.
    """
    call, c = "alexr2_settings", constants
    _checks.positive(call, "eps", eps)
    _checks.at_least(call, "initial_gap", initial_gap, 0)
    _checks.in_interval(call, "beta", beta, 0, 0.5, open_low=True)
    if c.outer_weak_convexity > 0:
        raise ValueError(
            f"`{call}(constants=...)` needs convex outer functions but outer_weak_convexity is: "
            f"{c.outer_weak_convexity} (SONEX does not need them)."
        )
    rho = c.weak_convexity
    if not (rho > 0 and math.isfinite(rho)):
        raise ValueError(
            f"`{call}(constants=...)` needs a positive finite inner_weak_convexity (rho_g), as "
            f"nu = 1/(4 rho), but rho is: {rho} (any bound on rho_g will do, also for convex g_i)."
        )
    smoothing = eps / c.outer_lipschitz
    nu, mu = 1 / (4 * rho), 3 * rho
    # Each inner loop must reach (mu/2) E|z_K - prox|^2 <= eps' = mu nu^2 eps^2 / 36.
    rest, steps = _inner_loop(c, smoothing, mu * nu**2 * eps**2 / 36)
    theta = 1 - rest
    eta = rest / (theta / nu - rho)
    gamma_hat = c.num_inner * rest / c.blocks
    lr = beta * nu / (2 * math.sqrt(3))
    slope = (c.outer_lipschitz * c.inner_lipschitz) ** 2  # bounds |grad F_{lambda,nu}(w_0)|^2
    rounds = math.ceil(1.5 / eps**2 * (2 * initial_gap / lr + (2 / beta - 1) * slope))
    polish_theta = polish_steps = None
    if math.isfinite(c.inner_smoothness):
        accuracy = mu * eps**2 / (2 * c.smoothness(smoothing) ** 2)
        polish_rest, polish_steps = _inner_loop(c, smoothing, accuracy)
        polish_theta = 1 - polish_rest
    return Alexr2Settings(
        smoothing=smoothing, nu=nu, theta=theta, eta=eta, inner_lr=eta * nu / (eta + nu),
        dual_step=gamma_hat / (1 - gamma_hat), gamma_hat=gamma_hat, correction=theta * gamma_hat,
        beta=beta, lr=lr, inner_steps=steps, rounds=rounds, polish_theta=polish_theta,
        polish_steps=polish_steps,
    )  # fmt: skip


def _inner_loop(c: Constants, smoothing: float, accuracy: float) -> tuple[float, int]:
    """1 - theta and K with which ALEXR reaches (mu/2) E|z_K - prox|^2 <= accuracy."""
    rho, outer, inner = c.weak_convexity, c.outer_lipschitz**2, c.inner_lipschitz**2
    per_block = c.num_inner / c.blocks
    # The proof's free weights lambda_2 = lambda_3 = C_g sqrt(lambda B1 / (n rho)) turn its
    # conditions on gamma and eta into the first two bounds on 1 - theta. The third gives half of
    # the accuracy to the noise; the other half is for the start, and sets K.
    stiffness = math.sqrt(inner * per_block / (smoothing * rho))
    jacobian = c.jacobian_noise**2 / c.samples + inner / c.blocks + 4 * inner
    value = 6 * c.value_noise**2 * per_block / (smoothing * c.samples)
    rest = min(
        1 / (per_block + 2 * stiffness),
        3 / (8 + 4 * stiffness),
        accuracy / (4 * (value + outer * jacobian / rho)),
    )
    nu, mu = 1 / (4 * rho), 3 * rho
    eta = rest / ((1 - rest) / nu - rho)
    # The Bregman divergence of f_lambda* between two y_i is at most 2 lambda C_f^2.
    dual = 2 * smoothing * outer
    start = mu * (1 + eta * rho) * nu**2 * outer * inner / 2 + 2 * dual
    return rest, max(1, math.ceil(math.log(2 * start / accuracy) / -math.log1p(-rest)))


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
    r"""The primal step of ALEXR2's inner loop, eta = (1 - theta) / (theta / nu - rho).

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
        correction: gamma'; `theory_correction(gamma, n, B1)` unless given.
        drift: delta, the size of each g_i's motion per step.
        systematic: the motion keeps its sign; otherwise each step has an independent random one.
        value_noise: sigma_0; the same samples are used at both points of the correction, and the
            noise does not depend on the point.
        samples: B2.

    Example:
        >>> from fcco.theory import expected_tracking_error
        >>> round(expected_tracking_error(0.5, 10, 10, value_noise=3.0, samples=4), 6)
        0.75
    """
    call = "expected_tracking_error"
    _checks.in_interval(call, "gamma", gamma, 0, 1, open_low=True)
    _checks.in_interval(call, "blocks", blocks, 1, num_inner)
    _checks.at_least(call, "samples", samples, 1)
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


def penalty_size(
    num_constraints: int, inner_lipschitz: float, delta: float, *, margin: float = 0.01
) -> float:
    r"""A penalty rho = (1 + margin) m (C_g + 1) / delta, whose stationary points are KKT points.

    The theorem's bound is strict, hence the margin. It is sufficient, not necessary: what a
    problem needs is rho > m max_i nu_i for its multipliers nu.

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
    r"""The violation lambda m nu_i of a constraint at the solution of the smoothed problem.

    It is exact for the multiplier 0 < nu_i < rho/m of the smoothed problem itself, and holds to
    first order in lambda for that of the constrained problem. It is how to choose lambda.

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
