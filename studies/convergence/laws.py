"""The law of the tracking error, derived in docs/concepts/laws.md."""

from __future__ import annotations

from fcco.tracker import theory_correction

__all__ = ["expected_tracking_error"]


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
    """Steady E(u_i - g_i)^2 after an update, exactly, for scalar g_i moving at constant speed.

    Args:
        gamma: weight of the new values.
        num_inner: n.
        blocks: B1, how many of them come in a step.
        correction: gamma'; `theory_correction(gamma, n, B1)` unless given.
        drift: delta, the size of each g_i's motion per step.
        systematic: the motion keeps its sign; otherwise each step has an independent random one.
        value_noise: sigma_0, the same at both points of the correction.
        samples: B2, of each block in a step.
    """
    if correction is None:
        correction = float(theory_correction(gamma, num_inner, blocks))
    excess = correction - (1 - gamma)  # a of the law
    share = blocks / num_inner
    lag = drift * (share * excess - (1 - share)) / (share * gamma) if systematic else 0.0
    motion = drift**2 * (share * excess**2 + 1 - share)
    motion += 2 * drift * lag * (share * (1 - gamma) * excess - (1 - share))
    noise = gamma / (2 - gamma) * value_noise**2 / samples
    return noise + motion / (share * gamma * (2 - gamma))
