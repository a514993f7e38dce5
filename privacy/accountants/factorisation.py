r"""Banded Toeplitz strategies for correlated noise: how good they are, the best for a run, how many bands to take.

A server that adds up releases (FedAvg) sees sums of their noise; with A the matrix of what it adds up, the noise in its
parameters after each of T rounds is A C^{-1} z. The figure of merit is the mean over rounds of its variance per
coordinate, for normals z of variance 1,

    error(C) = ||A C^{-1}||_F^2 / T,        A_{ts} = sum_{k <= t-s} beta^k,

beta being the server's momentum (0: prefix sums). For lower-triangular Toeplitz C all products are of power series, so
the error takes O(T b). Independent noise (b = 1) has error (T + 1) / 2. :func:`optimise` minimises it over the b
coefficients at column norm 1.

More bands give a smaller error but need more groups: with b groups a unit is sampled at rate b q (q N the expected
cohort), T / b times, which costs more noise the more amplification by sampling was worth. :func:`choose` weighs both.

References: Choquette-Choo et al., "(Amplified) Banded Matrix Factorization" (arXiv 2306.08153); McKenna, "Scaling up
the Banded Matrix Factorization Mechanism" (arXiv 2405.15913), for Toeplitz strategies by gradients; Fichtenberger,
Henzinger and Upadhyay (arXiv 2202.11205), from whose coefficients the search starts. What comes out decides no
guarantee: that leans on the coefficients as the ledger holds them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from jaxtyping import Float64
from scipy.optimize import minimize
from scipy.signal import lfilter

from privacy import checks
from privacy.accountants.calibration import calibrate
from privacy.events import Banded, BufferedToeplitz, CyclicPoisson

MOST_BANDS = 64
"""As many noise vectors are kept in memory; beyond this little is won."""


_C = TypeVar("_C", Banded, BufferedToeplitz)


@dataclass(frozen=True)
class Strategy(Generic[_C]):
    """Correlated noise for a run, priced.

    Attributes:
        correlation: C; of one band it is independent noise.
        sampling: its cyclic sampling.
        noise_multiplier: calibrated.
        error: root of the mean over rounds of the variance of the noise in one server parameter, in clip bounds:
            sqrt(error(C)) z / (q N).
    """

    correlation: _C
    sampling: CyclicPoisson
    noise_multiplier: float
    error: float


def mean_error(coefficients: Sequence[float], rounds: int, momentum: float = 0.0) -> float:
    """The mean squared error ||A C^{-1}||_F^2 / T for these coefficients of C, whatever their norm."""
    checks.integer_at_least(1, rounds=rounds)
    return _error(np.asarray(coefficients, dtype=np.float64), workload(rounds, momentum))[0]


def optimise(bands: int, rounds: int, momentum: float = 0.0) -> tuple[float, ...]:
    """The coefficients, of L2 norm 1, with the least mean error over so many rounds.

    ``momentum`` is in [0, 1). A band beyond the last round does nothing, so ``bands`` is at most ``rounds``.
    """
    checks.integer_at_least(1, bands=bands, rounds=rounds)
    if bands > rounds:
        raise ValueError(f"bands must be at most the number of rounds ({rounds}), got {bands}")
    if bands == 1:
        return (1.0,)
    sums = workload(rounds, momentum)
    root = np.cumprod([1.0, *(1.0 - 0.5 / k for k in range(1, bands))])  # of (1 - x)^(-1/2): A = C C without momentum

    def loss(free: Float64[np.ndarray, " k"]) -> tuple[float, Float64[np.ndarray, " k"]]:
        coefficients = np.concatenate([[1.0], free])
        error, gradient = _error(coefficients, sums)
        squares = float(coefficients @ coefficients)
        return math.log(error * squares), (gradient / error + 2.0 * coefficients / squares)[1:]

    found = minimize(
        loss,
        root[1:],
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, 1.0)] * (bands - 1),
        options={"maxiter": 2000, "ftol": 1e-14},
    ).x
    best = np.concatenate([[1.0], found])
    best /= np.linalg.norm(best)
    return tuple(float(c) for c in best / max(1.0, math.hypot(*best)))


def price_strategy(
    bands: int, epsilon: float, delta: float, clients: int, rate: float, rounds: int, momentum: float = 0.0
) -> Strategy[Banded]:
    """The best strategy of so many bands, with as many groups, at the noise that keeps the target.

    Raises:
        ValueError: groups of ``clients / bands`` are smaller than the expected cohort, or no noise keeps the target.
    """
    sampling = cyclic(bands, clients, rate)
    coefficients = optimise(bands, rounds, momentum)
    z = calibrate(epsilon, delta, sampling, rounds)
    error = math.sqrt(mean_error(coefficients, rounds, momentum)) * z / sampling.expected_units
    return Strategy(Banded(coefficients), sampling, z, error)


def choose(
    epsilon: float, delta: float, clients: int, rate: float, rounds: int, momentum: float = 0.0
) -> tuple[Strategy[Banded], ...]:
    """One strategy for each number of bands worth trying (1, 2, 4, ... and the largest), the best first.

    Each takes a calibration, about a second.
    """
    largest = min(MOST_BANDS, rounds, math.floor(1.0 / rate * (1.0 + 1e-12)))
    tried = sorted({largest, *(2**k for k in range(largest.bit_length()))})
    found = [price_strategy(bands, epsilon, delta, clients, rate, rounds, momentum) for bands in tried]
    return tuple(sorted(found, key=lambda strategy: strategy.error))


def cyclic(bands: int, clients: int, rate: float) -> CyclicPoisson:
    """Sampling with an expected cohort of ``rate * clients`` from one of ``bands`` groups in turn.

    Raises:
        ValueError: a group has fewer members than that.
    """
    checks.integer_at_least(1, bands=bands)
    if bands * rate > 1.0 + 1e-12:
        raise ValueError(
            f"bands x sampling-rate must be at most 1, got {bands} x {rate:g}: a cohort comes from one of {bands} "
            f"groups of clients; take at most {math.floor(1.0 / rate * (1.0 + 1e-12))} bands"
        )
    return CyclicPoisson(min(1.0, bands * rate), clients, groups=bands)


def workload(rounds: int, momentum: float) -> Float64[np.ndarray, " rounds"]:
    """The first column of A."""
    checks.within(0.0, 1.0 - 1e-9, momentum=momentum)
    return np.cumsum(momentum ** np.arange(rounds)) if momentum else np.ones(rounds)


def _error(
    coefficients: Float64[np.ndarray, " b"], sums: Float64[np.ndarray, " rounds"]
) -> tuple[float, Float64[np.ndarray, " b"]]:
    """Mean error and its gradient: with d = a / c as series, sum_k (T - k) d_k^2 / T, and dd/dc_i = -x^i d / c."""
    rounds = len(sums)
    series = lfilter([1.0], coefficients, sums)
    weighted = (1.0 - np.arange(rounds) / rounds) * series
    slope = lfilter([1.0], coefficients, series)
    gradient = [-2.0 * float(weighted[i:] @ slope[: rounds - i]) for i in range(len(coefficients))]
    return float(weighted @ series), np.array(gradient)
