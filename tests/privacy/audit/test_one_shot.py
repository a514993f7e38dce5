"""One-shot canaries: right for the Gaussian mechanism, loud for a broken one, and exact where a closed form exists."""

import math

import numpy as np
import pytest
from scipy import stats

from privacy.audit import one_shot
from privacy.audit.bounds import gdp_epsilon

DELTA = 1e-5


class TestCanaries:
    def test_rows_have_the_bound_and_can_be_made_one_by_one(self) -> None:
        updates = one_shot.canary_updates(5, 1000, 3.0, seed=4)
        assert updates.dtype == np.float32
        assert np.linalg.norm(updates.astype(np.float64), axis=1) == pytest.approx(np.full(5, 3.0), rel=1e-6)
        assert np.array_equal(one_shot.canary_updates(1, 1000, 3.0, seed=4, start=3)[0], updates[3])
        assert not np.array_equal(one_shot.canary_updates(1, 1000, 3.0, seed=5)[0], updates[0])

    def test_directions_are_uniform_enough_to_have_the_null_of_the_paper(self) -> None:
        updates = one_shot.canary_updates(400, 500, 1.0, seed=6)
        release = np.random.default_rng(0).standard_normal(500)
        cosines = updates @ release / np.linalg.norm(release)
        assert stats.kstest(cosines * math.sqrt(500), "norm").pvalue > 0.01


class TestNormals:
    @pytest.mark.parametrize("mu", [0.1, 1.0, 5.0, 20.0])
    def test_equal_spreads_are_gaussian_dp(self, mu: float) -> None:
        assert one_shot.normals_epsilon(mu, 1, 0, 1, DELTA) == pytest.approx(gdp_epsilon(mu, DELTA), abs=1e-6)
        assert one_shot.normals_epsilon(-2 * mu, 2, 0, 2, DELTA) == pytest.approx(gdp_epsilon(mu, DELTA), abs=1e-6)

    @pytest.mark.parametrize(("mean", "std"), [(1.0, 1.3), (1.0, 0.6), (0.0, 2.0), (0.0, 0.5), (-2.0, 0.9)])
    def test_unequal_spreads_against_numerical_integration(self, mean: float, std: float) -> None:
        delta = 1e-3
        epsilon = one_shot.normals_epsilon(mean, std, 0.0, 1.0, delta)
        x = np.linspace(-40, 40, 400_001)
        p, q = stats.norm.pdf(x, mean, std), stats.norm.pdf(x)
        reached = [np.trapezoid(np.maximum(one - math.exp(epsilon) * other, 0), x) for one, other in ((p, q), (q, p))]
        assert max(reached) == pytest.approx(delta, rel=1e-4)

    def test_identical_normals_cost_nothing(self) -> None:
        assert one_shot.normals_epsilon(0.3, 1.0, 0.3, 1.0, DELTA) == 0

    def test_a_spread_of_zero_is_refused(self) -> None:
        with pytest.raises(ValueError, match="std_p must be"):
            one_shot.normals_epsilon(0.0, 0.0, 0.0, 1.0, DELTA)


def shown(noise_scale: float = 1.0, *, canaries: int, dim: int, rate: float, rounds: int, seed: int) -> np.ndarray:
    """Inner products with the sum of the releases of Poisson-sampled canaries and noise z = 1; half never take part."""
    rng = np.random.default_rng([seed, 77])
    updates = one_shot.canary_updates(2 * canaries, dim, 1.0, seed)
    total = np.zeros(dim)
    for _ in range(rounds):
        taken = rng.random(canaries) < rate
        total += taken.astype(np.float32) @ updates[:canaries] + noise_scale * rng.standard_normal(dim)
    return np.asarray(updates @ total)


class TestEstimate:
    def test_one_gaussian_release_is_estimated_as_the_text_says(self) -> None:
        """Analytic epsilon 4.38."""
        final = shown(canaries=300, dim=10_000, rate=1.0, rounds=1, seed=1)
        found = one_shot.one_shot_estimate(final[:300], final[300:], DELTA)
        assert found.epsilon_equal_spread == pytest.approx(4.377, abs=1.2)
        assert 3.5 < found.epsilon < 8.5
        again = one_shot.one_shot_estimate(7 * final[:300], 7 * final[300:], DELTA)
        assert again.epsilon == pytest.approx(found.epsilon), "a factor changes nothing"

    def test_a_private_run_and_a_run_with_a_tenth_of_its_noise(self) -> None:
        """q = 0.1, T = 20, z = 1: the PLD accountant says 3.59; estimates of so few canaries scatter around it."""
        right, wrong = (shown(scale, canaries=150, dim=8000, rate=0.1, rounds=20, seed=3) for scale in (1.0, 0.1))
        found, loud = (one_shot.one_shot_estimate(one[:150], one[150:], DELTA) for one in (right, wrong))
        assert found.epsilon_equal_spread < 6 < 15 < loud.epsilon_equal_spread
        assert found.epsilon < 10 < 50 < loud.epsilon

    def test_canaries_that_never_take_part_are_estimated_at_little(self) -> None:
        final = shown(canaries=300, dim=8000, rate=0.5, rounds=3, seed=9)
        assert one_shot.one_shot_estimate(final[300:450], final[450:], DELTA).epsilon_equal_spread < 1.5

    @pytest.mark.nightly
    def test_a_thousand_canaries_in_many_dimensions(self) -> None:
        final = shown(canaries=1000, dim=100_000, rate=1.0, rounds=1, seed=0)
        found = one_shot.one_shot_estimate(final[:1000], final[1000:], DELTA)
        assert found.epsilon_equal_spread == pytest.approx(4.377, abs=0.6)


def test_one_canary_is_too_few() -> None:
    with pytest.raises(ValueError, match=r"inside .*at least 2"):
        one_shot.one_shot_estimate([0.1], [0.1, 0.2], DELTA)
