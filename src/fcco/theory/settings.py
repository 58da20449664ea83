"""Settings and iteration counts of SONEX and ALEXR2 for a given accuracy, from the proofs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .. import _checks
from ..tracker import theory_correction

__all__ = ["Alexr2Settings", "Constants", "SonexSettings", "alexr2_settings", "sonex_settings"]


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
        for name in ("num_inner", "blocks", "samples", "dim"):
            _checks.at_least(call, name, getattr(self, name), 1)
        for name in ("outer_lipschitz", "inner_lipschitz"):
            _checks.positive(call, name, getattr(self, name))
        for name in ("inner_smoothness", "value_noise", "jacobian_noise", "outer_weak_convexity"):
            _checks.at_least(call, name, getattr(self, name), 0)
        _checks.at_least(call, "inner_weak_convexity", self.inner_weak_convexity, 0)
        _checks.in_interval(call, "blocks", self.blocks, 1, self.num_inner)

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
    gradient_error: float | None = None,
) -> SonexSettings:
    r"""SONEX settings for an approximate eps-stationary point, also with Adam-type steps.

    .. math::
        \lambda = \tfrac{\epsilon}{C_f}, \quad \beta = \Theta(\min\{B_1, B_2\} \epsilon^2), \quad
        \gamma = \Theta(B_2 \epsilon^4), \quad
        \eta = \Theta(\tfrac{B_1 \sqrt{B_2}}{n} \epsilon^3), \quad
        T = O(\tfrac{n}{B_1 \sqrt{B_2}} \epsilon^{-5}).

    The mean of |grad F_lambda(w_t)|^2 over the T iterations is then at most eps^2 in
    expectation. Two corrections to the proof: the noise of u is sigma_0, and U in the bound on
    |u_{t+2} - u_{t+1}|^2 is a mean over blocks, so its factor is 4 B1 gamma^2 without 1/n.

    With steps between eta c_l and eta c_u per coordinate,

    .. math::
        \beta, \gamma \propto \tfrac{c_l}{c_u}, \quad
        \eta \propto \sqrt{\tfrac{c_l}{c_u^3}} \min\{\beta, \sqrt{\gamma}, ...\}, \quad
        T = O(\tfrac{c_u^{2.5}}{c_l^{2.5}} \tfrac{n}{B_1 \sqrt{B_2}} \epsilon^{-5}):

    the noise of the proof's final bound is multiplied by c_u/c_l, so beta and gamma shrink by
    that ratio; steps of at most eta c_u must leave c_l/(4 c_u) of the descent, which gives the
    factor of eta. The proof also asks for eta L_F <= c_l / (2 c_u^2), in eta, not in the scaled
    step (the printed form depends on the unit of c). Only c_u/c_l matters for T.

    Args:
        constants: the problem.
        eps: the accuracy.
        initial_gap: F_lambda(w_0) minus its infimum, or a bound on it.
        smallest_scale: c_l; for Adam with |G_j| <= G and damping e, 1/(G + e). 1 for SGD.
        largest_scale: c_u; for Adam 1/e. 1 for SGD.
        initial_samples: batch that initialises u; ceil(eps^-3) unless given.
        gradient_error: E|v_1 - grad F_lambda(w_0)|^2; 4 C_f^2 C_1^2 unless given, which holds for
            v_0 = G_0.

    Example:
        >>> from fcco.theory import Constants, sonex_settings
        >>> constants = Constants(30, 8, 32, 1.0, 1.0, 1.0, 1.0, 1.0)
        >>> settings = sonex_settings(constants, 0.1, initial_gap=1.0)
        >>> f"{settings.smoothing:g} {settings.gamma:.1e} {settings.iterations:.1e}"
        '0.1 2.6e-05 9.7e+07'

    References:
        Section 4.1, and the appendix on adaptive learning rates.
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
        limit, reason = (
            c.outer_lipschitz / c.outer_weak_convexity,
            "f_lambda is not smooth otherwise",
        )
        _checks.below(call, "eps", eps, limit, "outer_lipschitz/outer_weak_convexity", reason)
    n, blocks, samples, noise = c.num_inner, c.blocks, c.samples, c.value_noise**2
    ratio = low / high
    smoothing = eps / c.outer_lipschitz
    outer = c.outer_smoothness(smoothing) ** 2 * c.jacobian_moment  # L_f^2 C_1^2
    smoothness = c.smoothness(smoothing)
    # Each of the three noise terms of the proof gets a sixth of eps^2, the initial ones the half.
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
    lr = min(math.sqrt(ratio) * step / high, low / (2 * high**2 * smoothness))
    if initial_samples is None:
        initial_samples = math.ceil(eps**-3)
    _checks.at_least(call, "initial_samples", initial_samples, 1)
    if gradient_error is None:
        gradient_error = 4 * c.outer_lipschitz**2 * c.jacobian_moment
    _checks.at_least(call, "gradient_error", gradient_error, 0)
    value_error = noise / initial_samples + blocks / n * gamma**2 * noise / samples  # U_1
    start = initial_gap / (lr * high) + gradient_error / beta + weight * value_error
    return SonexSettings(
        smoothing=smoothing,
        beta=beta,
        gamma=gamma,
        correction=float(theory_correction(gamma, n, blocks)),
        lr=lr,
        iterations=math.ceil(4 / (ratio * eps**2) * start),
        initial_samples=initial_samples,
    )


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
    constants: Constants,
    eps: float,
    initial_gap: float,
    *,
    beta: float = 0.5,
    dual_distance: float | None = None,
) -> Alexr2Settings:
    r"""ALEXR2 settings for a nearly eps-stationary point of F_lambda.

    .. math::
        \nu = \tfrac{1}{4 \rho}, \quad 1 - \theta = \Theta(\epsilon^3), \quad
        \hat\gamma = \tfrac{n (1 - \theta)}{B_1}, \quad
        \alpha = \tfrac{\beta \nu}{2 \sqrt 3}, \quad
        K = \tilde O(\tfrac{n}{B_1 B_2} \epsilon^{-3} + \epsilon^{-3}), \quad T = O(\epsilon^{-2}).

    Here rho = sqrt(d1) C_f rho_g. Each inner loop reaches (mu/2) E|z_K - prox|^2 <= eps' with
    mu = 1/nu - rho and eps' = mu nu^2 eps^2 / 36; half of eps' is for the noise, which bounds
    1 - theta, and half for the start, which gives K. The corrections: 1 - theta is of order
    lambda eps' = eps^3, not eps^2; eta is that of `inner_step`; alpha has the factor 1/sqrt(3).

    For smooth g_i, the polish runs the inner loop once more from the output, with (mu/2)
    E|z - prox|^2 <= mu eps^2 / (2 L_F^2), so that |grad F_lambda(z)| <= 2 eps in expectation:
    an approximate 2 eps-stationary point of F itself, with 1 - theta of order eps^5.

    Args:
        constants: the problem; f_i must be convex and rho_g positive (any bound will do).
        eps: the accuracy.
        initial_gap: F_{lambda,nu}(w_0) minus its infimum, or a bound on it.
        beta: weight of the new gradient in the outer momentum, at most 1/2.
        dual_distance: a bound on the Bregman divergence of f_lambda* between any two y_i;
            2 lambda C_f^2 unless given, which holds for the y-form where f* is linear on its
            domain (hinge, absolute value, maximum).

    Example:
        >>> from fcco.theory import Constants, alexr2_settings
        >>> constants = Constants(30, 8, 32, 1.0, 1.0, 1.0, 1.0, 1.0)
        >>> settings = alexr2_settings(constants, 0.1, initial_gap=1.0)
        >>> f"{settings.nu:g} {1 - settings.theta:.1e} {settings.inner_steps} {settings.rounds}"
        '0.25 1.2e-06 8463190 8764'

    References:
        Section 4.2.
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
    if dual_distance is None:
        dual_distance = 2 * smoothing * c.outer_lipschitz**2
    _checks.at_least(call, "dual_distance", dual_distance, 0)
    nu, mu = 1 / (4 * rho), 3 * rho
    rest, steps = _inner_loop(c, smoothing, mu * nu**2 * eps**2 / 36, dual_distance)
    theta = 1 - rest
    eta = rest / (theta / nu - rho)
    gamma_hat = c.num_inner * rest / c.blocks
    lr = beta * nu / (2 * math.sqrt(3))
    slope = (c.outer_lipschitz * c.inner_lipschitz) ** 2  # bounds |grad F_{lambda,nu}(w_0)|^2
    rounds = math.ceil(1.5 / eps**2 * (2 * initial_gap / lr + (2 / beta - 1) * slope))
    polish_theta = polish_steps = None
    if math.isfinite(c.inner_smoothness):
        accuracy = mu * eps**2 / (2 * c.smoothness(smoothing) ** 2)
        polish_rest, polish_steps = _inner_loop(c, smoothing, accuracy, dual_distance)
        polish_theta = 1 - polish_rest
    return Alexr2Settings(
        smoothing=smoothing,
        nu=nu,
        theta=theta,
        eta=eta,
        inner_lr=eta * nu / (eta + nu),
        dual_step=gamma_hat / (1 - gamma_hat),
        gamma_hat=gamma_hat,
        correction=theta * gamma_hat,
        beta=beta,
        lr=lr,
        inner_steps=steps,
        rounds=rounds,
        polish_theta=polish_theta,
        polish_steps=polish_steps,
    )


def _inner_loop(c: Constants, smoothing: float, accuracy: float, dual: float) -> tuple[float, int]:
    """1 - theta and K with which ALEXR reaches (mu/2) E|z_K - prox|^2 <= accuracy."""
    rho, outer, inner = c.weak_convexity, c.outer_lipschitz**2, c.inner_lipschitz**2
    per_block = c.num_inner / c.blocks
    # The proof's free weights lambda_2 = lambda_3 = C_g sqrt(lambda B1 / (n rho)) turn its
    # conditions on gamma and eta into the first two bounds on 1 - theta.
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
    start = mu * (1 + eta * rho) * nu**2 * outer * inner / 2 + 2 * dual
    return rest, max(1, math.ceil(math.log(2 * start / accuracy) / -math.log1p(-rest)))
