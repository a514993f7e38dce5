"""Bounds on attacks against closed forms: never below the best attack there is, and hardly above it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from privacy.accountants import renyi
from privacy.accountants.attack_rates import (
    AttackBound,
    attack_bound,
    bound_of_conversion,
    bound_of_events,
    bound_of_pairs,
)
from privacy.accountants.calibration import filter_commitment
from privacy.commitment import Commitment, FloorStep, Tries, Tuning
from privacy.events import Poisson, Step

N = 1000
RATES = (1e-3, 1e-2, 0.1, 0.5, 0.9)


def gaussian(mu: float, fpr: float) -> float:
    """The best test between N(0, 1) and N(mu, 1)."""
    return float(norm.cdf(norm.ppf(fpr) + mu))


def bounded(rate: float, z: float, rounds: int, adjacency: str = "add_remove") -> AttackBound:
    run: list[Step] = [(Poisson(rate, N), z, rounds)]
    return bound_of_events(run, suits=1e-5, adjacency=adjacency)


@pytest.mark.parametrize(("z", "rounds"), [(1.0, 1), (4.0, 9), (0.8, 1), (20.0, 1)])
def test_the_best_attack_on_a_gaussian_is_met_from_above(z: float, rounds: int) -> None:
    found, mu = bounded(1.0, z, rounds), math.sqrt(rounds) / z
    for fpr in RATES:
        assert gaussian(mu, fpr) <= found.true_positive_rate(fpr) <= gaussian(mu, fpr) + 2e-5
    assert 2 * norm.cdf(mu / 2) - 1 <= found.advantage <= 2 * norm.cdf(mu / 2) - 1 + 2e-5
    assert found.tight


def test_a_replaced_unit_moves_a_gaussian_twice_as_far() -> None:
    found = bounded(1.0, 2.0, 1, "replace_one").true_positive_rate(0.01)
    assert gaussian(1.0, 0.01) <= found <= gaussian(1.0, 0.01) + 2e-5


def sampled(q: float, z: float, fpr: float) -> float:
    """The better of the two likelihood-ratio tests between N(0, z) and (1 - q) N(0, z) + q N(1, z)."""

    def mixture(t: float) -> float:
        return float((1 - q) * norm.cdf(t / z) + q * norm.cdf((t - 1) / z))

    present = 1 - mixture(-z * norm.ppf(fpr))
    absent = norm.cdf(brentq(lambda t: mixture(t) - fpr, -50, 50) / z)
    return float(max(present, absent))


@pytest.mark.parametrize(("q", "z"), [(0.1, 1.0), (0.5, 0.6), (0.02, 0.8)])
def test_the_best_attack_on_one_sampled_release_is_met_from_above(q: float, z: float) -> None:
    found = bounded(q, z, 1)
    for fpr in RATES:
        exact = sampled(q, z, fpr)
        assert exact <= found.true_positive_rate(fpr) <= exact + 5e-5, fpr


def test_no_attacker_on_many_sampled_releases_does_better() -> None:
    """The likelihood-ratio test over all of them, which is the best, on simulated runs."""
    q, z, rounds, count = 0.2, 0.8, 12, 40_000
    random = np.random.default_rng(1)
    without = z * random.standard_normal((count, rounds))
    present = without[:, ::-1] + (random.random((count, rounds)) < q)

    def score(seen: np.ndarray) -> np.ndarray:
        return np.asarray(np.log1p(q * np.expm1((seen - 0.5) / z**2)).sum(axis=1))

    found = bounded(q, z, rounds)
    for fpr in (0.01, 0.1, 0.5):
        reached = float(np.mean(score(present) > np.quantile(score(without), 1 - fpr)))
        assert reached - 0.02 <= found.true_positive_rate(fpr) <= reached + 0.04


def test_more_rounds_help_every_attacker() -> None:
    runs = [bounded(0.1, 1.0, rounds) for rounds in (1, 5, 25, 125)]
    for fpr in RATES:
        rates = [run.true_positive_rate(fpr) for run in runs]
        assert fpr <= rates[0]
        assert rates == sorted(rates)
    assert [run.advantage for run in runs] == sorted(run.advantage for run in runs)


@settings(deadline=None)
@given(st.floats(0.01, 8.0), st.floats(1e-3, 0.999))
def test_randomised_response_is_met_exactly(epsilon: float, fpr: float) -> None:
    """It answers truly with probability e^eps / (1 + e^eps); its best attacks lie on two lines."""
    found = bound_of_pairs([(epsilon, 0.0)])
    exact = min(math.exp(epsilon) * fpr, 1 - math.exp(-epsilon) * (1 - fpr))
    assert found.true_positive_rate(fpr) == pytest.approx(exact)
    assert found.advantage == pytest.approx(math.tanh(epsilon / 2))
    assert not found.tight


def test_of_a_divergence_at_one_order_the_bound_is_valid_and_larger() -> None:
    rho, mu = 8 / (2 * 2.0**2), 0.5
    found = bound_of_conversion(lambda delta: renyi.epsilon_of(rho, 8, delta))
    for fpr in (1e-3, 1e-2, 0.1):
        assert gaussian(mu, fpr) < found.true_positive_rate(fpr) < 1.0


def test_what_bounds_nothing_says_one() -> None:
    for found in (bound_of_pairs(()), bound_of_pairs([(math.inf, 0.1), (900.0, 0.0)]), bounded(0.5, 0.0, 1)):
        assert found.true_positive_rate(0.001) == found.advantage == 1.0


def test_nothing_released_tells_nothing() -> None:
    found = bound_of_events([], suits=1e-5)
    assert found.true_positive_rate(0.01) == pytest.approx(0.01, abs=1e-8)
    assert found.posterior(0.5, 0.01) == pytest.approx(0.5, abs=1e-6)


def test_a_posterior_is_that_of_bayes() -> None:
    found = bound_of_pairs([(math.log(3.0), 0.0)])
    assert found.posterior(0.5, 0.01) == pytest.approx(0.75)
    assert found.posterior(0.1, 0.01) == pytest.approx(0.25)
    with pytest.raises(ValueError, match=r"prior must lie between 0 and 1, got 1\.0"):
        found.posterior(1.0, 0.01)


def test_commitments_of_every_mode_have_a_bound() -> None:
    floor = (FloorStep("round", Poisson(0.1, N), 1.5, 20),)
    one = Commitment("client", "add_remove", N, 4.0, 1e-5, floor=floor)
    alone = attack_bound(one)
    tuned = attack_bound(
        Commitment("client", "add_remove", N, 9.0, 1e-5, floor=floor, tuning=Tuning("a", Tries(5.0, 0.0), (floor,)))
    )
    filtered = attack_bound(filter_commitment(4.0, 1e-5, Poisson(0.1, N), 20)[0])
    assert (alone.tight, tuned.tight, filtered.tight) == (True, False, False)
    assert alone.true_positive_rate(0.01) < tuned.true_positive_rate(0.01) < 1.0
    assert 0.01 < filtered.true_positive_rate(0.01) < 1.0
    with pytest.raises(ValueError, match="bounds no attack: noise is off"):
        attack_bound(Commitment("client", "add_remove", N, math.inf, 1e-5, floor=floor, not_private="noise is off"))
