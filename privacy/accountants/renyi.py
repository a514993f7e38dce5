"""Rényi divergences: in closed form at an integer order for the filter, through dp_accounting at all orders else.

The Poisson-subsampled Gaussian (rate q, noise multiplier z, add/remove) at integer order a >= 2 has
(Mironov, Talwar, Zhang 2019, arXiv 1908.10530, section 3.3)

    rho(a) = log A / (a - 1),   A = sum_{i=0}^{a} C(a,i) q^i (1-q)^(a-i) exp((i^2-i) / (2 z^2)).

The binomial weights add up to 1 and the exponent vanishes for i = 0, 1, so A - 1 is the same sum over i >= 2 with
``expm1`` in place of ``exp``: all terms positive, nothing cancels however small q is. At q = 1 only i = a remains and
rho = a / (2 z^2), the plain Gaussian.

Conversion to (epsilon, delta), the one of dp_accounting (Canonne, Kamath, Steinke 2020, arXiv 2004.00010, Prop. 12):

    epsilon = rho(a) + log(1 - 1/a) - (log delta + log a) / (a - 1).

Guarantee: all are upper bounds; the closed form is increased by a relative 1e-12 to cover rounding.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import dp_accounting
import numpy as np
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS, RdpAccountant, compute_epsilon
from jaxtyping import Float64
from scipy.special import logsumexp

from privacy import checks
from privacy.commitment import ADJACENCIES, ROUNDING
from privacy.errors import UnsupportedEvent
from privacy.events import ExampleLevelPoisson, Poisson, Step

_CLOSED_FORM = 1e-12  # relative rounding of the closed form
_SUM_ROUNDING = 1e-10  # relative rounding of dp_accounting's divergences (sums of up to a thousand terms)
_LOG_ROUNDING = 1e-12  # absolute rounding of its log A (differences of log-gamma values)


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
        return order / (2.0 * noise_multiplier**2) * (1.0 + _CLOSED_FORM)
    i = np.arange(2, order + 1, dtype=np.float64)
    exponent = i * (i - 1.0) / (2.0 * noise_multiplier**2)
    log_binomial = np.array([math.log(math.comb(order, int(k))) for k in i])
    log_weight = log_binomial + i * math.log(rate) + (order - i) * math.log1p(-rate)
    # log(expm1(x)) = x + log(1 - exp(-x)), which neither overflows for large x nor cancels for small x.
    log_excess = float(logsumexp(log_weight + exponent + np.log(-np.expm1(-exponent))))
    return float(np.logaddexp(0.0, log_excess)) / (order - 1) * (1.0 + _CLOSED_FORM)


def conversion_cost(order: int, delta: float) -> float:
    """The amount that conversion adds to rho to give epsilon; negative for small orders at large delta."""
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


def rho_of(sampling: Poisson, noise_multiplier: float, order: int, adjacency: str = "add_remove") -> float:
    """Rényi divergence of one release at one integer order: what the filter charges. Upper bound.

    Raises:
        UnsupportedEvent: no bound is known for this sampling under this adjacency.
    """
    checks.one_of(ADJACENCIES, adjacency=adjacency)
    _refuse_records(sampling)
    if noise_multiplier == 0.0:
        return math.inf
    multiplier = noise_multiplier * (1.0 - ROUNDING)
    if adjacency == "zero_out" and sampling.rate < 1.0:
        raise UnsupportedEvent(f"zero_out is accounted for cohorts of everyone only, got {sampling}; use rate 1")
    if adjacency in ("add_remove", "zero_out"):
        return subsampled_gaussian_rdp(sampling.rate, multiplier, order)
    return float(_divergences(sampling, multiplier, adjacency, (order,))[0])


def epsilon(steps: Sequence[Step], delta: float, adjacency: str) -> float:
    """Epsilon at ``delta`` of the composition of ``steps``, minimised over dp_accounting's default orders.

    Raises:
        UnsupportedEvent: no bound is known for a step under this adjacency.
    """
    return float(compute_epsilon(DEFAULT_RDP_ORDERS, divergences(steps, adjacency), delta)[0])


def divergences(steps: Sequence[Step], adjacency: str) -> Float64[np.ndarray, " orders"]:
    """Rényi divergences of the composition of ``steps`` at dp_accounting's default orders; upper bounds.

    Raises:
        UnsupportedEvent: no bound is known for a step under this adjacency.
    """
    checks.one_of(ADJACENCIES, adjacency=adjacency)
    total = np.zeros(len(DEFAULT_RDP_ORDERS))
    for sampling, multiplier, count in steps:
        total += count * _divergences(sampling, multiplier, adjacency, tuple(DEFAULT_RDP_ORDERS))
    return total


@lru_cache(maxsize=1024)
def _divergences(
    sampling: Poisson, multiplier: float, adjacency: str, orders: tuple[float, ...]
) -> Float64[np.ndarray, " orders"]:
    """Rényi divergences of one release at all orders; infinite where dp_accounting's series does not converge."""
    _refuse_records(sampling)
    replace = adjacency == "replace_one"
    relation = dp_accounting.NeighboringRelation
    accountant = RdpAccountant(orders, relation.REPLACE_ONE if replace else relation.ADD_OR_REMOVE_ONE)
    with _without_excluded_orders():
        accountant.compose(_rdp_event(sampling, multiplier, replace))
    # Where log A nearly cancels, dp_accounting may come out low, even negative, and its conversion then says epsilon 0.
    slack = _LOG_ROUNDING / (np.asarray(orders) - 1.0)
    divergences: Float64[np.ndarray, " orders"] = np.maximum(accountant.rdp, 0.0) * (1.0 + _SUM_ROUNDING) + slack
    divergences.flags.writeable = False
    return divergences


def _refuse_records(sampling: Poisson) -> None:
    """A unit that may bring several rows is a mixture, of which no Rényi bound is computed here."""
    if isinstance(sampling, ExampleLevelPoisson):
        raise UnsupportedEvent(
            "sampling of records where units are protected is accounted by privacy loss distributions alone: take "
            "accountant 'pld', a floor instead of a filter, no tuning by repeat-and-select, and a delta of at least "
            f"1e-12; or sample units. Got {sampling}"
        )


def _rdp_event(sampling: Poisson, multiplier: float, replace: bool) -> dp_accounting.DpEvent:
    if sampling.rate == 1.0:
        return dp_accounting.GaussianDpEvent(multiplier / 2.0 if replace else multiplier)
    if not replace:
        return dp_accounting.PoissonSampledDpEvent(sampling.rate, dp_accounting.GaussianDpEvent(multiplier))
    raise UnsupportedEvent(
        f"the rdp accountant has no bound for {sampling} under replace_one; use accountant 'pld', or sample everyone"
    )


@contextmanager
def _without_excluded_orders() -> Iterator[None]:
    """Silence dp_accounting's notes that a fractional order did not converge.

    Such an order gets divergence infinity and falls out of the minimum over orders, so the bound stays a bound.
    """

    def keep(record: logging.LogRecord) -> bool:
        return "failed to converge" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
