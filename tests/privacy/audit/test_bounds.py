"""Lower bounds from two worlds: against closed forms, against an independent library, and their coverage."""

import math

import numpy as np
import pytest
from dp_accounting.dp_event import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from scipy import stats

from privacy.audit import bounds


def scores(mu: float, runs: int, *stream: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([17, *stream])
    return rng.normal(mu, 1, runs), rng.normal(0, 1, runs)


# The inputs of the oracle test: quantiles of two normals, so that no random stream enters.
GRID_IN = 1.3 * stats.norm.ppf((np.arange(400) + 0.5) / 400) + 1.2
GRID_OUT = stats.norm.ppf((np.arange(500) + 0.5) / 500)


class TestBinomialLimits:
    @pytest.mark.parametrize(("successes", "trials"), [(0, 10), (3, 10), (10, 10), (500, 1000)])
    def test_agrees_with_scipy_exact_interval(self, successes: int, trials: int) -> None:
        interval = stats.binomtest(successes, trials).proportion_ci(confidence_level=0.9, method="exact")
        assert bounds.binomial_lower(successes, trials, 0.05) == pytest.approx(interval.low, abs=1e-12)
        assert bounds.binomial_upper(successes, trials, 0.05) == pytest.approx(interval.high, abs=1e-12)

    def test_no_success_has_the_closed_form_upper_limit(self) -> None:
        assert bounds.binomial_upper(0, 20, 0.01) == pytest.approx(1 - 0.01 ** (1 / 20))

    @pytest.mark.parametrize("successes", [-1, 11, 2.5])
    def test_refuses_impossible_counts(self, successes: float) -> None:
        with pytest.raises(ValueError, match="successes must be integers"):
            bounds.binomial_lower(successes, 10, 0.05)


class TestGaussianConversion:
    def test_known_values(self) -> None:
        assert bounds.gdp_epsilon(1.0, 1e-5) == pytest.approx(4.3772, abs=1e-4)  # the analytic value for z = 1
        assert bounds.gdp_epsilon(0.25, 1e-5) == pytest.approx(0.92634, abs=1e-5)  # z = 4

    @pytest.mark.parametrize("mu", [0.3, 1.0])
    def test_agrees_with_privacy_loss_distributions(self, mu: float) -> None:
        accountant = PLDAccountant(value_discretization_interval=1e-4)
        accountant.compose(GaussianDpEvent(1 / mu))
        assert bounds.gdp_epsilon(mu, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), abs=2e-4)

    @pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 10.0, 300.0])
    @pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.3])
    def test_epsilon_and_mu_are_inverse(self, mu: float, delta: float) -> None:
        epsilon = bounds.gdp_epsilon(mu, delta)
        if epsilon > 0:
            assert bounds.gdp_delta(epsilon, mu) == pytest.approx(delta, rel=1e-6)
            assert bounds.gdp_mu(epsilon, delta) == pytest.approx(mu, rel=1e-6)
        else:
            assert bounds.gdp_delta(0.0, mu) <= delta

    def test_edges(self) -> None:
        assert bounds.gdp_epsilon(0.0, 1e-5) == 0
        assert bounds.gdp_epsilon(1.0, 0.0) == math.inf
        assert bounds.gdp_delta(0.0, 0.0) == 0
        with pytest.raises(ValueError, match="mu must be"):
            bounds.gdp_epsilon(-1.0, 1e-5)
        with pytest.raises(ValueError, match="delta must be"):
            bounds.gdp_mu(1.0, 0.0)


class TestOracle:
    """Constants computed once with jax-privacy 2.0.0 (jax_privacy.auditing.CanaryScoreAuditor on GRID_IN, GRID_OUT).

    epsilon_clopper_pearson(0.05, 1e-5, threshold_strategy=Explicit(t)) with t just above the out score that leaves
    r = 5, 50, 155 of them above it. jax-privacy is no dependency of this project.
    """

    @pytest.mark.parametrize(
        ("above", "oracle"), [(5, 1.9435377264983), (50, 1.1929287584222825), (155, 0.627334304794689)]
    )
    def test_clopper_pearson_at_one_threshold(self, above: int, oracle: float) -> None:
        ours = bounds.epsilon_lower_clopper_pearson(
            GRID_IN, GRID_OUT, delta=1e-5, alpha=0.05, levels=[(above + 0.5) / 500]
        )
        assert ours == pytest.approx(oracle, abs=1e-9)


@pytest.mark.run
class TestCoverage:
    """A lower bound at level 1 - alpha may exceed the truth in a share alpha of experiments. 400 experiments each."""

    experiments = 400
    alpha = 0.1

    def limit(self) -> float:
        """The share of failures that 400 experiments with failure probability alpha exceed once in a thousand."""
        return float(stats.binom.isf(1e-3, self.experiments, self.alpha)) / self.experiments

    @pytest.mark.parametrize("mu", [0.0, 0.5, 1.5])
    @pytest.mark.parametrize("runs", [30, 200])
    def test_mu_bound_on_gaussian_scores(self, mu: float, runs: int) -> None:
        wrong = [bounds.mu_lower(*scores(mu, runs, 1, run), alpha=self.alpha) > mu for run in range(self.experiments)]
        assert np.mean(wrong) <= self.limit()

    def test_one_threshold_uses_most_of_its_level(self) -> None:
        """The level is not wasted: with a single threshold the two limits fail together about as often as stated."""
        mu, wrong = 1.0, []
        for run in range(self.experiments):
            inside, outside = scores(mu, 200, 2, run)
            rates = bounds.rate_bounds(inside, outside, self.alpha, [0.3])
            truth_fpr, truth_fnr = stats.norm.sf(rates.thresholds[0]), stats.norm.cdf(rates.thresholds[0] - mu)
            wrong.append(truth_fpr > rates.false_positive[0] or truth_fnr > rates.false_negative[0])
        assert 0.03 <= np.mean(wrong) <= self.limit()

    @pytest.mark.parametrize("epsilon", [0.5, 2.0])
    def test_clopper_pearson_bound_on_randomised_response(self, epsilon: float) -> None:
        """Two-valued scores: nothing but ties, and a mechanism whose epsilon is exact at delta = 0."""
        keep, wrong = 1 / (1 + math.exp(-epsilon)), []
        for run in range(self.experiments):
            rng = np.random.default_rng([23, run])
            inside, outside = (rng.random(300) < keep).astype(float), (rng.random(300) < 1 - keep).astype(float)
            bound = bounds.epsilon_lower_clopper_pearson(inside, outside, delta=0.0, alpha=self.alpha)
            wrong.append(bound > epsilon)
        assert np.mean(wrong) <= self.limit()

    def test_clopper_pearson_bound_on_gaussian_scores(self) -> None:
        truth = bounds.gdp_epsilon(1.0, 1e-5)
        values = [
            bounds.epsilon_lower_clopper_pearson(*scores(1.0, 300, 3, run), delta=1e-5, alpha=self.alpha)
            for run in range(100)
        ]
        assert max(values) < truth  # blunt: it never comes near 4.38 with 300 runs
        assert np.median(values) > 0.5


class TestPower:
    """The medians of the project's table of lower bounds (95%, delta 1e-5), reproduced with few repetitions."""

    @pytest.mark.parametrize(
        ("epsilon", "runs", "gaussian", "clopper_pearson"),
        [
            (1, 1000, 0.35, 0.08),
            (2, 1000, 1.18, 0.47),
            (4, 300, 2.23, 0.83),
            (4, 1000, 3.08, 1.31),
            (8, 300, 5.87, 1.91),
        ],
    )
    def test_medians(self, epsilon: float, runs: int, gaussian: float, clopper_pearson: float) -> None:
        mu = bounds.gdp_mu(epsilon, 1e-5)
        pairs = [scores(mu, runs, 4, epsilon, run) for run in range(21)]
        by_gdp = np.median([bounds.epsilon_lower_gdp(*pair, delta=1e-5, alpha=0.05) for pair in pairs])
        by_cp = np.median([bounds.epsilon_lower_clopper_pearson(*pair, delta=1e-5, alpha=0.05) for pair in pairs])
        assert by_gdp == pytest.approx(gaussian, abs=0.4)
        assert by_cp == pytest.approx(clopper_pearson, abs=0.4)

    def test_separated_worlds_give_a_large_bound_and_equal_worlds_none(self) -> None:
        inside, outside = scores(40.0, 1000, 5)
        assert bounds.mu_lower(inside, outside, alpha=1e-3) == bounds.mu_ceiling(1000, 1000, alpha=1e-3) > 4.3
        assert bounds.mu_lower(outside, outside, alpha=1e-3) == 0
        assert bounds.epsilon_lower_clopper_pearson(outside, outside, delta=1e-5, alpha=1e-3) == 0

    def test_estimate(self) -> None:
        assert bounds.mu_estimate(*scores(1.0, 20_000, 6)) == pytest.approx(1.0, abs=0.04)
        assert bounds.mu_estimate([1.0, 1.0], [0.0, 0.0]) == math.inf
        assert bounds.mu_estimate([1.0, 1.0], [1.0, 1.0]) == 0


class TestBadInput:
    @pytest.mark.parametrize("bad", [[], [1.0, math.nan], [[1.0, 2.0]]])
    def test_scores(self, bad: list[float]) -> None:
        with pytest.raises(ValueError, match=r"scores_in .*1-D .*finite"):
            bounds.mu_lower(bad, [0.0, 1.0], alpha=0.05)

    @pytest.mark.parametrize("alpha", [0.0, 1.0, -1.0, math.nan])
    def test_level(self, alpha: float) -> None:
        with pytest.raises(ValueError, match=r"alpha .*between 0 and 1"):
            bounds.mu_lower([0.0, 1.0], [0.0, 1.0], alpha=alpha)

    def test_no_levels(self) -> None:
        with pytest.raises(ValueError, match="levels must not be empty"):
            bounds.mu_lower([0.0, 1.0], [0.0, 1.0], alpha=0.05, levels=[])
