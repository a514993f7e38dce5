"""Rényi divergences in closed form at an integer order: what the filter charges, one evaluation per round.

The Poisson-subsampled Gaussian (rate q, noise multiplier z, add/remove) at integer order a >= 2 has
(Mironov, Talwar, Zhang 2019, arXiv 1908.10530, section 3.3)

    rho(a) = log A / (a - 1),   A = sum_{i=0}^{a} C(a,i) q^i (1-q)^(a-i) exp((i^2-i) / (2 z^2)).

The binomial weights add up to 1 and the exponent vanishes for i = 0, 1, so A - 1 is the same sum over i >= 2 with
``expm1`` in place of ``exp``: all terms positive, nothing cancels however small q is. At q = 1 only i = a remains and
rho = a / (2 z^2), the plain Gaussian.

Conversion to (epsilon, delta), the one of dp_accounting (Canonne, Kamath, Steinke 2020, arXiv 2004.00010, Prop. 12):

    epsilon = rho(a) + log(1 - 1/a) - (log delta + log a) / (a - 1).

Guarantee: both are upper bounds; rho is increased by a relative 1e-12 to cover rounding.
"""

import math

import numpy as np
from scipy.special import logsumexp

from privacy import checks

_ROUNDING = 1e-12


def subsampled_gaussian_rdp(rate: float, noise_multiplier: float, order: int) -> float:
    """Rényi divergence of one Poisson-subsampled Gaussian, add/remove; upper bound. Infinite for zero noise.

    Args:
        rate: Poisson sampling probability, in (0, 1].
        noise_multiplier: standard deviation of the noise over the L2 sensitivity, >= 0.
        order: Rényi order, an integer >= 2.
    """
    checks.probability(rate=rate)
    checks.non_negative(noise_multiplier=noise_multiplier)
    checks.integer_at_least(2, order=order)
    if noise_multiplier == 0.0:
        return math.inf
    if rate == 1.0:
        return order / (2.0 * noise_multiplier**2) * (1.0 + _ROUNDING)
    i = np.arange(2, order + 1, dtype=np.float64)
    exponent = i * (i - 1.0) / (2.0 * noise_multiplier**2)
    log_binomial = np.array([math.log(math.comb(order, int(k))) for k in i])
    log_weight = log_binomial + i * math.log(rate) + (order - i) * math.log1p(-rate)
    # log(expm1(x)) = x + log(1 - exp(-x)), which neither overflows for large x nor cancels for small x.
    log_excess = float(logsumexp(log_weight + exponent + np.log(-np.expm1(-exponent))))
    return float(np.logaddexp(0.0, log_excess)) / (order - 1) * (1.0 + _ROUNDING)


def conversion_cost(order: int, delta: float) -> float:
    """What the conversion adds to rho to give epsilon; negative for small orders at large delta."""
    checks.integer_at_least(2, order=order)
    checks.probability(delta=delta)
    return math.log1p(-1.0 / order) - (math.log(delta) + math.log(order)) / (order - 1)


def epsilon_of(rho: float, order: int, delta: float) -> float:
    """Epsilon of a mechanism whose Rényi divergence at ``order`` is at most ``rho``; 0 for a mechanism never run."""
    checks.non_negative(rho=rho)
    return 0.0 if rho == 0.0 else max(0.0, rho + conversion_cost(order, delta))


def rho_budget(epsilon: float, order: int, delta: float) -> float:
    """The Rényi budget at ``order`` that converts to exactly ``epsilon``; <= 0 if this order cannot reach it."""
    checks.positive(epsilon=epsilon)
    return epsilon - conversion_cost(order, delta)
