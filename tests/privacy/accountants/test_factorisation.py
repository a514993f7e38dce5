"""Banded Toeplitz strategies: errors against dense matrices, the optimum against numbers of another library."""

import math
from itertools import pairwise

import numpy as np
import pytest

from privacy.accountants.calibration import calibrate
from privacy.accountants.factorisation import choose, cyclic, mean_error, optimise, price_strategy
from privacy.events import Poisson

# first bands of C at column norm 1, mean squared error of prefix sums: optimize_banded_toeplitz of jax_privacy 2.0.0,
# in 64 bits, 1000 steps
GOLDEN = [
    (16, 4, 3.754023566361528, [0.79487528, 0.43843304, 0.32927408, 0.25986215]),
    (100, 8, 9.767662734999478, [0.64414165, 0.39714823, 0.33192623, 0.29569514]),
    (200, 8, 16.834935449327787, [0.59543505, 0.39515108, 0.3423724, 0.31247657]),
    (200, 16, 11.09988363822169, [0.59165141, 0.34363573, 0.28232416, 0.25113374]),
    (1000, 2, 253.45664449096236, [0.75015283, 0.6612645]),
    (1000, 16, 39.41531727284132, [0.4745836, 0.31633072, 0.2786148, 0.25959405]),
    (2000, 64, 26.267757606849344, [0.4607394, 0.25454846, 0.20494937, 0.18080973]),
]


def dense_error(coefficients: tuple[float, ...], rounds: int, momentum: float) -> float:
    lags = np.subtract.outer(np.arange(rounds), np.arange(rounds))
    strategy = sum(c * np.eye(rounds, k=-i) for i, c in enumerate(coefficients))
    workload = np.where(lags >= 0, np.cumsum(momentum ** np.arange(rounds, dtype=float))[np.maximum(lags, 0)], 0.0)
    return float(np.square(workload @ np.linalg.inv(strategy)).sum() / rounds)


@pytest.mark.parametrize(("rounds", "bands", "error", "first"), GOLDEN)
def test_the_optimum_is_that_of_another_library(rounds, bands, error, first):
    found = optimise(bands, rounds)
    assert mean_error(found, rounds) == pytest.approx(error, rel=1e-6)
    assert found[: len(first)] == pytest.approx(first, abs=2e-4)
    assert 1.0 - 1e-12 < math.hypot(*found) <= 1.0 + 1e-15


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("coefficients", [(1.0,), (0.8, 0.6), (0.7, -0.2, 0.1)])
def test_the_error_is_that_of_the_matrices(coefficients, momentum):
    assert mean_error(coefficients, 30, momentum) == pytest.approx(dense_error(coefficients, 30, momentum), rel=1e-10)
    assert mean_error((1.0,), 30) == pytest.approx(31 / 2)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_no_strategy_nearby_is_better_and_more_bands_are_never_worse(momentum):
    errors = []
    for bands in (1, 2, 4, 8, 16):
        best = np.array(optimise(bands, 100, momentum))
        errors.append(mean_error(best, 100, momentum))
        for i, step in ((i, s) for i in range(bands) for s in (-1e-3, 1e-3)):
            other = best + step * np.eye(bands)[i]
            squares = float(other @ other)
            assert mean_error(other, 100, momentum) * squares >= errors[-1] * (1.0 - 1e-7)
    assert all(more < 0.95 * fewer for fewer, more in pairwise(errors))


def test_the_price_is_that_of_the_windows_and_the_cohort_stays():
    found = price_strategy(4, 4.0, 1e-5, 1000, 0.1, 21)
    assert found.noise_multiplier == calibrate(4.0, 1e-5, Poisson(0.4, 1000), 6)
    assert found.sampling.expected_units == pytest.approx(100.0)
    expected = math.sqrt(mean_error(found.correlation.coefficients, 21)) * found.noise_multiplier / 100.0
    assert found.error == pytest.approx(expected, rel=1e-12)


def test_much_noise_is_better_independent_and_little_noise_correlated():
    """Much noise is what amplification by sampling is worth most with."""
    much, little = choose(1.0, 1e-5, 10_000, 0.25, 50), choose(8.0, 1e-5, 10_000, 0.05, 50)
    assert much[0].correlation.bands == 1
    assert little[0].correlation.bands == 20
    assert [one.error for one in little] == sorted(one.error for one in little)
    independent = next(one.error for one in little if one.correlation.bands == 1)
    assert little[0].error / independent == pytest.approx(0.7105, abs=2e-3)


def test_a_cohort_larger_than_a_group_is_refused():
    assert cyclic(3, 900, 1 / 3).rate == 1.0
    with pytest.raises(ValueError, match="take at most 3 bands"):
        cyclic(4, 900, 1 / 3)
    with pytest.raises(ValueError, match="at most the number of rounds"):
        optimise(5, 4)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, 1.5])
def test_a_momentum_that_does_not_forget_is_refused(momentum):
    with pytest.raises(ValueError, match="momentum must be"):
        mean_error((1.0, 0.5), 30, momentum)


def test_an_error_is_over_at_least_one_round():
    with pytest.raises(ValueError, match="rounds must be"):
        mean_error([1.0], 0)
