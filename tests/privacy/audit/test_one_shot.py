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

    def test_directions_are_uniform_enough_to_have_the_null_they_are_compared_with(self) -> None:
        updates = one_shot.canary_updates(400, 500, 1.0, seed=6)
        cosines = one_shot.cosines(updates, np.random.default_rng(0).standard_normal(500))
        assert stats.kstest(cosines * math.sqrt(500), "norm").pvalue > 0.01

    def test_a_zero_release_points_nowhere(self) -> None:
        updates = one_shot.canary_updates(3, 10, 1.0, seed=1)
        assert one_shot.cosines(updates, np.zeros(10)).tolist() == [0, 0, 0]

    @pytest.mark.parametrize("release", [np.zeros(9), np.full(10, np.nan), np.zeros((1, 10))])
    def test_bad_releases_are_refused(self, release: np.ndarray) -> None:
        updates = one_shot.canary_updates(3, 10, 1.0, seed=1)
        with pytest.raises(ValueError, match=r"release .*length 10"):
            one_shot.cosines(updates, release)


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


class TestSphereTail:
    def test_three_dimensions_have_archimedes_answer(self) -> None:
        t = np.array([-0.5, 0.0, 0.5, 0.9])
        assert np.exp(one_shot.log_sphere_tail(t, 3)) == pytest.approx((1 - t) / 2)

    def test_nearly_normal_in_many_dimensions(self) -> None:
        t = np.array([0.001, 0.003, 0.01])
        assert one_shot.log_sphere_tail(t, 100_000) == pytest.approx(stats.norm.logsf(t * math.sqrt(1e5)), rel=1e-3)

    def test_far_tail_is_an_upper_bound_and_joins_the_exact_part(self) -> None:
        dim = 2000
        t = np.linspace(0.6, 0.85, 60)  # the incomplete beta function underflows in between
        values = one_shot.log_sphere_tail(t, dim)
        assert np.isfinite(values).all()
        assert (np.diff(values) < 0).all()
        exact = [math.log(stats.beta.sf((1 + c) / 2, (dim - 1) / 2, (dim - 1) / 2)) for c in (0.1, 0.3)]
        assert one_shot.log_sphere_tail([0.1, 0.3], dim) == pytest.approx(exact, rel=1e-9)
        assert one_shot.log_sphere_tail([1.0], dim)[0] == -math.inf


def federated_run(
    noise_scale: float = 1.0,
    *,
    canaries: int,
    dim: int,
    rate: float,
    rounds: int,
    z: float,
    seed: int,
    fresh: bool = True,
) -> tuple[np.ndarray, one_shot.CosineStatistics, np.ndarray]:
    """Poisson-sampled rounds of canaries and noise z only; the second half of the rows never takes part."""
    rng = np.random.default_rng([seed, 77])
    updates = one_shot.canary_updates(2 * canaries, dim, 1.0, seed)
    once = rng.standard_normal(dim)
    releases = []
    for _ in range(rounds):
        taken = rng.random(canaries) < rate
        noise = rng.standard_normal(dim) if fresh else once
        releases.append(taken.astype(np.float32) @ updates[:canaries] + noise_scale * z * noise)
    state = one_shot.statistics(updates, releases)
    return updates, state, state.final(updates)


class TestEstimate:
    @pytest.mark.run
    def test_one_gaussian_release_is_estimated_within_one(self) -> None:
        """z = 1, analytic epsilon 4.38. One estimate from 300 canaries lies in 3.9 .. 6.4 in 95% of runs."""
        estimates = []
        for seed in range(5):
            _, _, final = federated_run(canaries=300, dim=10_000, rate=1.0, rounds=1, z=1.0, seed=seed)
            estimates.append(one_shot.estimate_final(final[:300], 10_000, DELTA).epsilon)
            assert one_shot.epsilon_lower_final(final[:300], 10_000, delta=DELTA, alpha=0.05) < 4.377
            equal_spread = one_shot.estimate_final(final[:300], 10_000, DELTA).epsilon_equal_spread
            assert equal_spread == pytest.approx(4.377, abs=1.0)
        assert np.median(estimates) == pytest.approx(4.377, abs=1.0)
        assert all(3.5 < estimate < 7.0 for estimate in estimates)

    @pytest.mark.run
    def test_a_private_run_and_a_run_with_a_tenth_of_its_noise(self) -> None:
        """q = 0.1, T = 20, z = 1: the PLD accountant says 3.59; estimates of so few canaries scatter around it."""
        size = {"canaries": 150, "dim": 8000, "rate": 0.1, "rounds": 20, "z": 1.0, "seed": 3}
        _, right, right_final = federated_run(**size)
        _, wrong, wrong_final = federated_run(0.1, **size)
        assert one_shot.estimate_final(right_final[:150], 8000, DELTA).epsilon < 8
        assert one_shot.estimate_final(wrong_final[:150], 8000, DELTA).epsilon > 50
        assert one_shot.estimate_against(right.iterates[:150], right.iterates[150:], DELTA).epsilon < 16
        assert one_shot.estimate_against(wrong.iterates[:150], wrong.iterates[150:], DELTA).epsilon > 200
        assert one_shot.epsilon_lower_final(wrong_final[:150], 8000, delta=DELTA, alpha=0.05) > 20

    @pytest.mark.run
    def test_reused_noise_shows_in_differences_of_rounds_only(self) -> None:
        size = {"canaries": 150, "dim": 8000, "rate": 0.1, "rounds": 20, "z": 1.0, "seed": 5}
        _, fresh, _ = federated_run(**size)
        _, reused, reused_final = federated_run(fresh=False, **size)
        assert one_shot.estimate_final(reused_final[:150], 8000, DELTA).epsilon < 8
        assert one_shot.estimate_against(fresh.differences[:150], fresh.differences[150:], DELTA).epsilon < 8
        assert one_shot.estimate_against(reused.differences[:150], reused.differences[150:], DELTA).epsilon > 1000

    def test_unseen_canaries_are_estimated_at_nothing(self) -> None:
        _, _, final = federated_run(canaries=300, dim=8000, rate=0.5, rounds=3, z=1.0, seed=9)
        assert one_shot.estimate_final(final[300:], 8000, DELTA).epsilon < 1.2
        assert one_shot.epsilon_lower_final(final[300:], 8000, delta=DELTA, alpha=0.05) == pytest.approx(0, abs=0.3)

    def test_lower_bound_covers(self) -> None:
        """Independent statistics N(mu, 1/d): the bound exceeds the truth no more often than alpha."""
        dim, mu, alpha, wrong = 10_000, 1.5, 0.1, 0
        for run in range(300):
            seen = (np.random.default_rng([8, run]).standard_normal(80) + mu) / math.sqrt(dim)
            wrong += one_shot.epsilon_lower_final(seen, dim, delta=DELTA, alpha=alpha) > gdp_epsilon(mu, DELTA)
        assert wrong / 300 <= stats.binom.isf(1e-3, 300, alpha) / 300

    @pytest.mark.nightly
    def test_a_thousand_canaries_in_many_dimensions(self) -> None:
        _, _, final = federated_run(canaries=1000, dim=100_000, rate=1.0, rounds=1, z=1.0, seed=0)
        assert one_shot.estimate_final(final[:1000], 100_000, DELTA).epsilon == pytest.approx(4.377, abs=0.3)


def test_observing_one_by_one_equals_all_at_once() -> None:
    updates = one_shot.canary_updates(6, 50, 1.0, seed=2)
    releases = np.random.default_rng(3).standard_normal((4, 50))
    state = one_shot.statistics(updates, list(releases))
    assert state.final(updates) == pytest.approx(one_shot.cosines(updates, releases.sum(axis=0)))
    assert state.iterates == pytest.approx(np.max([one_shot.cosines(updates, r) for r in releases], axis=0))
    steps = np.diff(releases, axis=0)
    assert state.differences == pytest.approx(np.max([one_shot.cosines(updates, r) for r in steps], axis=0))


def test_one_canary_is_too_few() -> None:
    with pytest.raises(ValueError, match=r"seen .*at least 2"):
        one_shot.estimate_final([0.1], 100, DELTA)
