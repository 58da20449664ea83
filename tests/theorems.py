"""The proofs behind `fcco.theory`: their conditions as inequalities, and the law's own process."""

from __future__ import annotations

import math
from typing import Any

from fcco.theory import Constants


def sonex_bound(c: Constants, eps: float, gap: float, s: Any, low: float, high: float) -> float:
    """The right-hand side of the proof's final bound on the mean of |grad F_lambda|^2.

    Written from the lemmas: |u_{t+2} - u_{t+1}|^2 (a sum over n blocks) has the term
    4 B1 gamma^2 U with U a mean over blocks.
    """
    n, B1, B2 = c.num_inner, c.blocks, c.samples
    C_f, C_g, s0, s1 = c.outer_lipschitz, c.inner_lipschitz, c.value_noise, c.jacobian_noise
    L_f = max(1 / s.smoothing, c.outer_weak_convexity / (1 - s.smoothing * c.outer_weak_convexity))
    L_F = C_g**2 * L_f + C_f * c.inner_smoothness
    C_1 = math.sqrt(C_g**2 + s1**2 / B2)
    eta, beta, gamma = s.lr, s.beta, s.gamma
    # Weights of the four inequalities: 1/(eta c_u), 1/beta, P and 3 L_f^2 C_1^2 / (n beta).
    last = 3 * L_f**2 * C_1**2 / (n * beta)
    P = n / (gamma * B1) * (5 * L_f**2 * C_1**2 + last * 4 * B1 * gamma**2)
    descent = low / (4 * high)
    descent -= 2 * L_F**2 * (eta * high) ** 2 / beta**2
    descent -= P * 8 * n * C_g**2 * (eta * high) ** 2 / B1
    descent -= last * 9 * n**2 * C_g**2 * (eta * high) ** 2 / B1
    assert descent >= -1e-12, "the step is too long for the proof"
    assert eta * L_F <= low / (2 * high**2) * (1 + 1e-12)
    assert beta <= 2 / 7 and gamma <= 1 / 2
    noise = 2 * beta * C_f**2 * (C_g**2 + s1**2) / min(B1, B2)
    noise += P * 2 * B1 * gamma**2 * s0**2 / (n * B2) + last * 2 * B1 * gamma**2 * s0**2 / B2
    V_1 = 4 * C_f**2 * C_1**2
    U_1 = s0**2 * (1 / s.initial_samples + B1 / n * gamma**2 / B2)
    start = gap / (eta * high) + V_1 / beta + (P - 5 * L_f**2 * C_1**2) * U_1
    return 2 * high / low * (start / s.iterations + noise)


def check_inner_loop(c: Constants, lam: float, theta: float, rest: float, eps_: float) -> None:
    """The conditions of the inner theorem's proof, with rest = 1 - theta."""
    rho = math.sqrt(c.dim) * c.outer_lipschitz * (c.inner_weak_convexity or c.inner_smoothness)
    n, B1, B2, C_f, C_g = c.num_inner, c.blocks, c.samples, c.outer_lipschitz, c.inner_lipschitz
    nu = 1 / (4 * rho)
    eta = rest / (theta / nu - rho)
    gamma = 1 / (B1 / (n * rest) - 1)
    assert theta >= 0.5 and gamma > 0
    free = C_g * math.sqrt(B1 * lam / (n * rho))  # lambda_2 = lambda_3
    tolerance = 1 + 1e-9
    assert 2 * free / lam <= tolerance / gamma
    assert free * B1 / (lam * n) <= 1 / gamma + 1
    assert 1 / nu / 4 + C_g**2 / free <= tolerance / (4 * eta)
    noise = 2 * (1 + 2 * theta) * c.value_noise**2 / (lam * B2 * (1 + 1 / gamma))
    jacobian = C_f**2 * c.jacobian_noise**2 / B2 + C_f**2 * C_g**2 / B1 + 4 * C_f**2 * C_g**2
    noise += jacobian / (1 / eta + 1 / nu)
    assert 2 * noise <= eps_ / 2 * tolerance
